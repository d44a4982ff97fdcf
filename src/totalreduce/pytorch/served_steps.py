"""The steps of a strategy with servers: each rank is a worker, and the server of a share of the parameters.

The parameters are dealt out. If the torch optimizer treats each element by itself, large ones are cut. A server has its
own copy of its parts, and a torch optimizer of the program's kind, for which each part is a parameter. A thread
receives what workers push and answers; what this rank pushes to its own server needs no message. The messages between
a worker and a server have one length each, which both know:

* from the worker: a header (its clock, and the version of the parameters that it has used), the learning rates of the
  optimizer's groups, and the gradient; behind the gradient a one for each part that has one, and a zero for the
  others, so that the sum of gradients tells which parts the optimizer must leave alone;
* from the server: a header (the version, and the staleness of the gradient), and the values of its parts.
"""

from __future__ import annotations

import inspect
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, GroupClosed
from totalreduce.foundation.forking import HomeProcess
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.elementwise import is_elementwise
from totalreduce.pytorch.intervals import Interval
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.pytorch.served_state import check_state, cut, joined, load_entries, numbers_of, saved, state_of
from totalreduce.pytorch.stepping import GradientSteps, StrategySteps
from totalreduce.strategies.served import Answer, Push, ServedStrategy
from totalreduce.strategies.strategy import Strategy, TrainingOfRank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Sent", "ServedSteps", "SynchronousSteps", "observations", "shares_of"]

#: Of a message to a server: clock and version.
_PUSH = struct.Struct("<qq")
#: In place of a clock: the worker has finished.
_FINISHED: Final = -1
#: Of an answer: version and staleness.
_ANSWER = struct.Struct("<qq")
#: In place of a staleness: the gradient counts later.
_COUNTS_LATER: Final = -1
_PUSHES, _ANSWERS = 0, 1
#: How long the server's thread waits for a message, at most, before it looks at the time.
_LOOK_S = 0.05
#: How long the end of the thread is waited for.
_END_S = 5.0
#: A tensor of fewer elements is not cut: a message costs more than its bytes.
_CUT_ELEMENTS_MIN: Final = 16 * 1024
#: A larger tensor is cut into parts of about a fair share, divided by this number.
_PARTS: Final = 4


def shares_of(sizes: Sequence[int], count: int, *, cuts: bool) -> list[list[Interval]]:
    """Return the parts of each share: the largest part first, each to the share that is smallest so far.

    Args:
        sizes: The number of elements of each tensor.
        count: The number of shares.
        cuts: Cut tensors that are larger than a quarter of a fair share, so that shares have about the same size.
            Otherwise each tensor is one part.
    """
    longest = max(_CUT_ELEMENTS_MIN, -(-sum(sizes) // (_PARTS * count))) if cuts else max(1, *sizes)
    parts = [
        Interval(tensor, begin, min(begin + longest, size))
        for tensor, size in enumerate(sizes)
        for begin in range(0, max(1, size), longest)
    ]
    shares: list[list[Interval]] = [[] for _ in range(count)]
    totals = [0] * count
    for part in sorted(parts, key=lambda part: (-part.size, part)):
        smallest = totals.index(min(totals))
        shares[smallest].append(part)
        totals[smallest] += part.size
    return [_together(sorted(share)) for share in shares]


def _together(parts: Sequence[Interval]) -> list[Interval]:
    """Return parts in which those are one that follow each other."""
    found: list[Interval] = []
    for part in parts:
        if found and found[-1].parameter == part.parameter and found[-1].end == part.begin:
            found[-1] = Interval(part.parameter, found[-1].begin, part.end)
        else:
            found.append(part)
    return found


class _Twin(NamedTuple):
    """A copy of a part of one of the program's parameters, which is a parameter of the server's torch optimizer.

    A copy of a whole parameter has its shape, another one is one-dimensional. It is contiguous, as its gradient and its
    state are: fused optimizers of torch ignore the order of the elements in memory.

    Attributes:
        original: The program's parameter.
        part: The part of it.
        copy: The copy.
    """

    original: torch.nn.Parameter
    part: Interval
    copy: torch.nn.Parameter

    @classmethod
    def of(cls, original: torch.nn.Parameter, part: Interval) -> Self:
        """Copy a part of a parameter."""
        values = _values_of(original, part).clone(memory_format=torch.contiguous_format)
        return cls(original, part, torch.nn.Parameter(values))

    def reload(self) -> None:
        """Take over the present values of the program's parameter."""
        self.copy.data.copy_(_values_of(self.original, self.part))


def _values_of(parameter: torch.nn.Parameter, part: Interval) -> torch.Tensor:
    values = parameter.detach()
    return values if part.size == values.numel() else values.reshape(-1)[part.begin : part.end]


@final
class _Share:
    """The parts of parameters of which this rank is the server, and their optimizer.

    Attributes:
        dtype: The type of gradients and parameters in messages.
        gradient_bytes: The size of a gradient in a message.
        rates: The learning rates of the next update, by group.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        parts: Sequence[Interval],
        inner: torch.optim.Optimizer,
        dtype: np.dtype[Any],
    ) -> None:
        """Copy these parts of the parameters; ``inner``: the worker's optimizer."""
        self._twins = [_Twin.of(parameters[part.parameter], part) for part in parts]
        self._optimizer = _optimizer_like(inner, self._twins)
        self._replica = ModelReplica([twin.copy for twin in self._twins], inner, dtype)
        self.dtype = dtype
        self.gradient_bytes = (sum(self._replica.sizes) + len(parts)) * dtype.itemsize
        self.rates: Array = np.zeros(0)

    @property
    def is_empty(self) -> bool:
        """Whether there are no parameters."""
        return not self._twins

    def values(self) -> Array:
        """Return a copy of the values as they are now."""
        return self._replica.read(range(len(self._twins)))

    def state(self) -> list[tuple[torch.nn.Parameter, int, dict[str, Any]]]:
        """Return a copy of the optimizer's state: the program's parameter, the part's first element, and its state."""
        states = {} if self._optimizer is None else self._optimizer.state
        twins = [twin for twin in self._twins if twin.copy in states]
        return [(twin.original, twin.part.begin, saved(states[twin.copy])) for twin in twins]

    def reload(self, inner: torch.optim.Optimizer) -> None:
        """Take over the program's parameters and the state of its optimizer."""
        for twin in self._twins:
            twin.reload()
        self._optimizer = _optimizer_like(inner, self._twins)

    def apply(self, gradient: Array, factor: float) -> None:
        """Take a step with a gradient times a factor. Parts of which no rank had a gradient stay as they are."""
        begin, present = 0, gradient[gradient.size - len(self._twins) :]
        for number, twin in enumerate(self._twins):
            parameter = twin.copy
            part = torch.from_numpy(gradient[begin : begin + parameter.numel()]).view(parameter.shape)
            begin += parameter.numel()
            parameter.grad = (part * factor).to(parameter.device, parameter.dtype) if present[number] else None
        if self._optimizer is not None:
            for group, rate in zip(self._optimizer.param_groups, self.rates, strict=True):
                group["lr"] = float(rate)
            self._optimizer.step()


@final
class _Server:
    """The server of this rank: a thread that receives what other workers push, and answers. Any thread may call it."""

    def __init__(self, strategy: ServedStrategy, share: _Share, group: Group, num_rates: int) -> None:
        """``num_rates``: the number of learning rates in a message."""
        self._share, self._group, self._num_rates = share, group, num_rates
        self._session = strategy.serve(group.world_size, share.apply)
        self._lock = threading.Condition()
        self._own_answer: Array | None = None
        self._sent = Sent()
        self._error: BaseException | None = None
        self._unfinished = set(range(group.world_size))
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="totalreduce-server", daemon=True)
        if not share.is_empty:
            self._thread.start()

    def observed(self) -> tuple[Counter[int], int]:
        """Return how often each staleness was observed, and the largest lead of a worker."""
        with self._lock:
            return Counter(self._session.staleness), self._session.lead

    def values(self) -> Array:
        """Return a copy of the values as they are now."""
        with self._lock:
            return self._share.values()

    def state(self) -> list[tuple[torch.nn.Parameter, int, dict[str, Any]]]:
        """Return a copy of the state of the optimizer (see ``_Share``)."""
        with self._lock:
            return self._share.state()

    def reload(self, inner: torch.optim.Optimizer) -> None:
        """Take over the program's parameters and the state of its optimizer, before the first gradient."""
        with self._lock:
            self._share.reload(inner)

    def take(self, worker: int, message: Array) -> None:
        """Give a worker's message to the session, and answer whom it says.

        Args:
            worker: Its rank.
            message: uint8. Nobody else changes it: the session keeps the gradient in it.
        """
        clock, version = _PUSH.unpack_from(message.data)
        gradient = message[_PUSH.size + 8 * self._num_rates :].view(self._share.dtype)
        now = time.monotonic()
        with self._lock:
            if clock == _FINISHED:
                self._unfinished.discard(worker)
                self._answer(self._session.finished(worker, now))
                self._lock.notify_all()
                return
            self._share.rates = np.frombuffer(message, np.float64, self._num_rates, _PUSH.size).copy()
            self._answer(self._session.push(Push(worker, clock, version, gradient), now))

    def await_own_answer(self, timeout_s: float, check: Callable[[], None]) -> Array | None:
        """Return the answer to this rank's own worker, uint8; ``None`` if there is none in time.

        ``check`` is called now and then; it may raise an error.
        """
        ends_at = time.monotonic() + timeout_s
        with self._lock:
            while self._own_answer is None and self._error is None and (left := ends_at - time.monotonic()) > 0:
                self._lock.wait(min(left, self._until_due()))
                self._look_at_time()
                check()
            if self._error is not None:
                raise self._error
            answer, self._own_answer = self._own_answer, None
        return answer

    def await_others(self, timeout_s: float) -> list[int]:
        """Wait until all workers have finished; return those that have not in time."""
        with self._lock:
            self._lock.wait_for(lambda: not self._unfinished or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            return sorted(self._unfinished)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            while self._unfinished - {self._group.rank} and not self._is_closed:
                self._receive_one()
            while self._unfinished and not self._is_closed:  # this rank's own worker goes on
                with self._lock:
                    self._lock.wait(_LOOK_S)
                    self._look_at_time()
        except BaseException as error:
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _receive_one(self) -> None:
        """Receive a message of another worker, and look at the time meanwhile."""
        num_bytes = _PUSH.size + 8 * self._num_rates + self._share.gradient_bytes
        message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        work = self._group.recv(message, src=None, tag=_PUSHES)
        while not self._is_closed:
            try:
                work.wait(self._until_due())
            except DeadlineExceededError:
                with self._lock:
                    self._look_at_time()
            else:
                assert work.source is not None
                self.take(work.source, message.numpy())
                return

    def _until_due(self) -> float:
        """Return the seconds to wait before the time is looked at."""
        due = self._session.due()
        return _LOOK_S if due is None else min(_LOOK_S, max(0.0, due - time.monotonic()))

    def _look_at_time(self) -> None:
        """Do what is due. Under the lock."""
        due = self._session.due()
        if due is not None and time.monotonic() >= due:
            self._answer(self._session.tick(time.monotonic()))

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Send the parameters as they are now. Under the lock."""
        if not answers:
            return
        values = self._share.values().view(np.uint8)
        messages: dict[int, Array] = {}  #: By staleness: workers get the same memory, and nobody changes it.
        for answer in answers:
            staleness = _COUNTS_LATER if answer.staleness is None else answer.staleness
            if staleness not in messages:
                message = messages[staleness] = np.empty(_ANSWER.size + values.size, np.uint8)
                _ANSWER.pack_into(message.data, 0, self._session.version, staleness)
                message[_ANSWER.size :] = values
            if answer.worker == self._group.rank:
                self._own_answer = messages[staleness]
                self._lock.notify_all()
            elif answer.worker in self._unfinished:
                self._sent.send(self._group, messages[staleness], answer.worker, _ANSWERS)


@final
class Sent:
    """Messages that have not left yet, whose memory must stay."""

    def __init__(self) -> None:
        self._works: deque[tuple[Work, torch.Tensor]] = deque()

    def send(self, group: Group, message: Array, to: int, tag: int) -> None:
        """Send a message, uint8, which nobody changes from now on.

        Raises the error of an earlier message that could not be sent.
        """
        block = torch.from_numpy(message)
        self._works.append((group.send(block, dst=to, tag=tag), block))
        while self._works and self._works[0][0].done():
            ended, _ = self._works.popleft()
            error = ended.exception()
            if error is not None and not isinstance(error, GroupClosed):
                raise error


def _optimizer_like(inner: torch.optim.Optimizer, twins: Sequence[_Twin]) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same kind, settings and state for parts of its parameters; ``None`` without any.

    Raises:
        ConfigurationError: No such optimizer can be made, or it takes no steps with a given dense gradient.
    """
    kind = type(inner).__name__
    if isinstance(inner, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigurationError(
            f"a strategy with servers does not support {kind}: servers have dense gradients, and no closure. Use "
            "another torch optimizer, or a strategy without servers, as tr.LocalSGD()"
        )
    if not twins:
        return None
    groups = [
        {**group, "params": [twin.copy for each in group["params"] for twin in twins if twin.original is each]}
        for group in inner.param_groups
    ]
    accepted = inspect.signature(type(inner)).parameters
    try:
        made = type(inner)(groups, **{name: value for name, value in inner.defaults.items() if name in accepted})
    except Exception as error:
        raise ConfigurationError(
            f"a strategy with servers needs a second {kind} for the server, and it cannot be made of the settings of "
            f"the first one ({error}). Its constructor must take param_groups and its defaults"
        ) from error
    for parameter, part, twin in twins:
        if parameter in inner.state:
            made.state[twin] = cut(inner.state[parameter], parameter, part.begin, part.end)
    return made


@final
class _Worker:
    """What this rank sends to all servers, and their answers.

    Attributes:
        replica: The model.
        shares: By server: its parts of the parameters.
        waited_s: The seconds for which this rank waited for its own server so far.
    """

    def __init__(
        self,
        strategy: ServedStrategy,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group: Group,
    ) -> None:
        """``optimizer``: the program's."""
        self.replica = ModelReplica(parameters, optimizer)
        self.shares = shares_of(self.replica.sizes, group.world_size, cuts=is_elementwise(optimizer))
        self._strategy, self._parameters, self._inner, self._group = strategy, list(parameters), optimizer, group
        self._versions = [0] * group.world_size  #: By server: the version of the parameters that this rank has.
        self._sent = Sent()
        self.waited_s = 0.0
        #: By server that has not answered the last gradient: the message that is being received.
        self._awaited: dict[int, tuple[Work, torch.Tensor]] = {}
        self._answers: dict[int, Array] = {}  #: By server that has answered: its answer, uint8.

    def push(self, server_here: _Server, clock: int) -> None:
        """Send a gradient, or the end (``_FINISHED``), to all servers; begin to receive their answers."""
        group, is_last = self._group, clock == _FINISHED
        gradients = [None if is_last else _dense(parameter.grad) for parameter in self._parameters]
        rates = np.array([float(each["lr"]) for each in self._inner.param_groups], np.float64)
        for server, share in enumerate(self.shares):
            if not share:
                continue
            message = np.empty(_PUSH.size + rates.nbytes + self._gradient_bytes(share), np.uint8)
            _PUSH.pack_into(message.data, 0, clock, self._versions[server])
            message[_PUSH.size : _PUSH.size + rates.nbytes] = rates.view(np.uint8)
            gradient = message[_PUSH.size + rates.nbytes :].view(self.replica.dtype)
            _write_gradient(share, gradients, gradient)
            if server == group.rank:
                server_here.take(group.rank, message)
                continue
            if not is_last:
                num_bytes = _ANSWER.size + _num_elements(share) * self.replica.dtype.itemsize
                answer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                self._awaited[server] = group.recv(answer, src=server, tag=_ANSWERS), answer
            self._sent.send(group, message, server, _PUSHES)

    def await_answers(self, server_here: _Server) -> None:
        """Wait until all servers have answered the last gradient, and take the parameters over."""
        group = self._group
        if self.shares[group.rank] and group.rank not in self._answers:
            begin = time.monotonic()
            own = server_here.await_own_answer(group.timeout_s, self._check_servers)
            self.waited_s += time.monotonic() - begin
            if own is None:
                raise self._held_back(group.rank)
            self._answers[group.rank] = own
        for server, (work, answer) in list(self._awaited.items()):
            self._await_message(server, work)
            self._answers[server] = answer.numpy()
            del self._awaited[server]
        for server, values in self._answers.items():
            self._versions[server], _ = _ANSWER.unpack_from(values.data)
            self.replica.write_parts(self.shares[server], values[_ANSWER.size :].view(self.replica.dtype))
        self._answers.clear()

    def _await_message(self, server: int, work: Work) -> None:
        """Wait for a server's answer, and look now and then whether another server is lost: then this one may wait."""
        ends_at = time.monotonic() + self._group.timeout_s
        while True:
            try:
                work.wait(max(0.0, min(_LOOK_S, ends_at - time.monotonic())))
                return
            except DeadlineExceededError as error:
                self._check_servers()
                if time.monotonic() >= ends_at:
                    raise self._held_back(server) from error

    def _check_servers(self) -> None:
        """Raise the error of a server whose answer cannot come."""
        for work, _ in self._awaited.values():
            error = work.exception()
            if error is not None:
                raise error

    def _held_back(self, server: int) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"rank {server}, a server, did not answer within {self._group.timeout_s:g} s: {self._strategy.name} holds "
            "this rank back until other ranks go on. Do all ranks train, or call strategy_steps.finish()? A rank that "
            "waits in a collective between two steps does neither. Repeat the call to wait on"
        )

    def _gradient_bytes(self, share: Sequence[Interval]) -> int:
        return (_num_elements(share) + len(share)) * self.replica.dtype.itemsize


def _num_elements(share: Sequence[Interval]) -> int:
    """Return the number of elements of these parts."""
    return sum(part.size for part in share)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient, dense and one-dimensional."""
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)


def _write_gradient(share: Sequence[Interval], gradients: Sequence[torch.Tensor | None], flat: Array) -> None:
    """Write the gradients of a share, zeros where a parameter has none, and which of them there are."""
    begin = 0
    for place, part in enumerate(share, start=flat.size - len(share)):
        gradient, end = gradients[part.parameter], begin + part.size
        flat[place] = gradient is not None
        if gradient is None:
            flat[begin:end] = 0.0
        else:
            torch.from_numpy(flat[begin:end]).copy_(gradient[part.begin : part.end])
        begin = end


def observations(staleness: Counter[int], lead: int) -> dict[str, int | float]:
    """Return the mean and the largest staleness of the gradients that were applied, and the largest lead."""
    count = sum(staleness.values())
    mean = sum(value * times for value, times in staleness.items()) / count if count else 0.0
    return {"staleness": mean, "staleness_max": max(staleness, default=0), "lead": lead}


class SynchronousSteps(GradientSteps):
    """A strategy with servers whose settings leave no choice: all steps are those of the synchronous optimizer.

    Attributes:
        strategy: Its settings.
        staleness: How often each staleness was observed: always 0.
        lead: The largest number of steps by which a rank was ahead: 0.
    """

    strategy: Strategy

    def __init__(self, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
        """Begin. ``optimizer``: the program's torch optimizer."""
        self.strategy, self.lead, self._optimizer = strategy, 0, optimizer
        self.staleness: Counter[int] = Counter()

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and what was observed. Any thread."""
        return {"strategy": self.strategy.name, **observations(self.staleness, self.lead)}

    def stepped(self) -> None:
        """Count a step."""
        self.staleness[0] += 1

    def finish(self) -> None:
        """Do nothing: all ranks have the same parameters."""

    def state(self) -> dict[str, Any]:
        """Return the state of the torch optimizer, as ``ServedSteps.state`` does."""
        states = self._optimizer.state
        numbers = {each: number for each, number in numbers_of(self._optimizer).items() if each in states}
        return state_of(
            self.strategy.name, self._optimizer, {number: saved(states[each]) for each, number in numbers.items()}
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, as ``ServedSteps.load_state`` does."""
        load_entries(self._optimizer, check_state(state, self.strategy.name, self._optimizer))


@final
@never_compiled
class ServedSteps(StrategySteps):
    """A strategy with servers on this rank.

    Attributes:
        strategy: Its settings.
        is_interrupted: Whether a call of ``step`` ran out of time, and must be repeated.
    """

    strategy: ServedStrategy

    def __init__(self, strategy: ServedStrategy, training: TrainingOfRank) -> None:
        """Begin. Collective; errors as of ``LocalSteps``."""
        group, optimizer = training.group, training.optimizer
        self.strategy, self._optimizer, self._parameters = strategy, optimizer, list(training.parameters)
        self._home = HomeProcess("the server of a strategy")
        check_equal(ModelReplica(self._parameters, optimizer), strategy.name, group, training.name)
        self._group = group.control.subgroup(range(group.world_size), name=f"{training.name}.servers")
        self._loss: Any = None  #: That of the closure of an interrupted step.
        self._begin()

    def _begin(self) -> None:
        """Begin with the present parameters and the present state of the program's torch optimizer."""
        group, optimizer = self._group, self._optimizer
        self._worker = _Worker(self.strategy, self._parameters, optimizer, group)
        self._shares = self._worker.shares
        share = _Share(self._parameters, self._shares[group.rank], optimizer, self._worker.replica.dtype)
        self._server = _Server(self.strategy, share, group, len(optimizer.param_groups))
        self._clock = 0
        self.is_interrupted = False
        self._has_finished = False
        #: The final parameters that are being received, by share.
        self._final: list[tuple[Work, Sequence[Interval], Array]] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this rank's gradients to the servers, and take over the parameters that they answer with.

        Returns:
            The closure's loss, of this rank.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: A server does not answer within the group's ``timeout_s``: a bound holds this rank
                back, and the others do not go on. Repeat the call: it waits on, and pushes nothing a second time.
            ConfigurationError: ``finish`` was called.
        """
        self._home.check()
        if self._has_finished:
            raise ConfigurationError(
                "strategy_steps.finish() was called, so the servers take no more gradients: to train on, call "
                "strategy_steps.load_state(strategy_steps.state()) on all ranks"
            )
        if not self.is_interrupted:
            if closure is not None:
                with torch.enable_grad():
                    self._loss = closure()
            self.is_interrupted = True
            self._worker.push(self._server, self._clock)
            self._clock += 1
        self._worker.await_answers(self._server)
        self._optimizer._opt_called = True  # or torch's schedulers warn: no step was taken
        self.is_interrupted = False
        loss, self._loss = self._loss, None
        return loss

    @property
    def waited_s(self) -> float:
        """The seconds for which steps were blocked by the server of this rank itself."""
        return self._worker.waited_s

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and what this rank's server has observed. Any thread."""
        return {"strategy": self.strategy.name, **observations(*self._server.observed())}

    def stepped(self) -> None:
        """Do nothing: ``step`` has done everything."""

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""
        return self._worker.replica.holds(parameters)

    def finish(self) -> None:
        """Wait until all ranks have called this, and take over the final parameters. Collective.

        Ranks may have taken different numbers of steps. Afterwards all have the same parameters.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: Another rank has not called this within the group's ``timeout_s``. Repeat the call.
        """
        group = self._group
        self._home.check()
        if not self._has_finished:
            self._has_finished = True
            self._worker.push(self._server, _FINISHED)
        if self._final is None:
            if self._shares[group.rank]:
                late = self._server.await_others(group.timeout_s)
                if late:
                    raise DeadlineExceededError(
                        f"rank(s) {late} have not called strategy_steps.finish() within {group.timeout_s:g} s. Repeat "
                        "the call to wait on"
                    )
            self._final = [self._final_parameters(server, share) for server, share in enumerate(self._shares) if share]
        while self._final:
            work, share, values = self._final[0]
            work.wait()
            self._worker.replica.write_parts(share, values)
            del self._final[0]

    def _final_parameters(self, server: int, share: Sequence[Interval]) -> tuple[Work, Sequence[Interval], Array]:
        """Begin to send or receive the parameters of a share."""
        if server == self._group.rank:
            values = self._server.values()
        else:
            values = np.empty(_num_elements(share), self._worker.replica.dtype)
        final = torch.from_numpy(values)
        return self._group.broadcast(final, root=server, name=f"final/{server}", async_op=True), share, values

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizers of all servers, after ``finish``. Collective; equal on all ranks.

        Save it with the model's parameters, which are equal, too. No gradient waits on a server, so this is all.

        Raises:
            ConfigurationError: ``finish`` has not returned: servers have gradients that wait, or will get more.
            PeerLost: A rank is lost.
            DeadlineExceededError: Another rank does not call this within the group's ``timeout_s``.
        """
        self._home.check()
        if not self._has_finished or self._final is None or self._final:
            raise ConfigurationError(
                "a strategy with servers has a state after strategy_steps.finish(): call it on all ranks, then "
                "state(), and to train on load_state() with the result"
            )
        numbers = numbers_of(self._optimizer)
        own = [(numbers[parameter], begin, entry) for parameter, begin, entry in self._server.state()]
        parts: dict[int, dict[int, dict[str, Any]]] = {}  #: By parameter, and by the first element of the part.
        for server, share in enumerate(self._shares):
            if share:
                for number, begin, entry in self._group.broadcast_object(
                    own if server == self._group.rank else None, root=server
                ):
                    parts.setdefault(number, {})[begin] = entry
        entries = {number: joined(parts[number], each) for each, number in numbers.items() if number in parts}
        return state_of(self.strategy.name, self._optimizer, entries)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the present parameters and a state that ``state`` has returned. Collective.

        The number of ranks, and settings of the strategy, may be others. The servers begin anew: no gradient is stale,
        and observations are counted from zero. It may be called on a new optimizer, or after ``finish``.

        Raises:
            ConfigurationError: It is the state of another strategy, optimizer or model; nothing has changed. Or this
                rank has taken steps without ``finish``.
        """
        self._home.check()
        if self._clock and (self._final is None or self._final):
            raise ConfigurationError("steps were taken: call strategy_steps.finish() on all ranks before load_state()")
        entries = check_state(state, self.strategy.name, self._optimizer)
        load_entries(self._optimizer, entries)
        if self._has_finished:
            self._server.close()
            self._begin()
        else:
            self._server.reload(self._optimizer)
        self._group.barrier()  # so that no gradient comes to a server that has not begun anew

    @property
    def staleness(self) -> Counter[int]:
        """How often each staleness was observed by this rank's server."""
        return self._server.observed()[0]

    @property
    def lead(self) -> int:
        """The largest number of steps by which this rank's server has seen a worker ahead of the slowest one."""
        return self._server.observed()[1]

    def close(self) -> None:
        """End the server, after which no worker is answered: call ``finish`` before. Harmless when called twice."""
        if self._home.is_here:
            self._server.close()
