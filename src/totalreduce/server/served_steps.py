"""The steps of a strategy with servers: each rank is a worker, and the server of a share of the parameters.

The parameters are dealt out. If the torch optimizer treats each element by itself, large ones are cut. A server has its
own copy of its parts, and a torch optimizer of the program's kind (``torch_table``). In a step a worker pushes its
gradient, ends the step, and pulls: the servers answer when the rule of the strategy says so (``gathering``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.foundation.forking import HomeProcess
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.elementwise import is_elementwise
from totalreduce.pytorch.intervals import Interval
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.pytorch.stepping import GradientSteps, StrategySteps
from totalreduce.server.client import Client
from totalreduce.server.clocks import Eventual
from totalreduce.server.connection import Connection, Ticket
from totalreduce.server.driver import Driver
from totalreduce.server.gathering import Gathering
from totalreduce.server.messages import WINDOW, Spec
from totalreduce.server.messenger import Messenger
from totalreduce.server.optimizers import Sum
from totalreduce.server.renewal import Epoch
from totalreduce.server.saving import Origin
from totalreduce.server.served_state import check_state, joined, load_entries, numbers_of, saved, state_of
from totalreduce.server.server import Server
from totalreduce.server.sessions import Apply, ServerSession
from totalreduce.server.shard import Shard
from totalreduce.server.shares import Shares
from totalreduce.server.torch_table import TorchTable
from totalreduce.strategies.strategy import ROUNDS, Strategy, TrainingOfRank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["ServedSteps", "ServedStrategy", "SynchronousSteps", "observations"]


class ServedStrategy(Strategy):
    """The settings of a strategy with servers."""

    __slots__ = ()

    def steps(self, training: TrainingOfRank) -> StrategySteps:
        """Return the steps of one rank. Collective."""
        sizes = (parameter.numel() for parameter in training.parameters)
        if self.is_synchronous(training.group.world_size) or not any(sizes):
            return SynchronousSteps(self, training.optimizer)
        return ServedSteps(self, training)

    def recovery_obstacle(self) -> str:
        """Return that servers have the state."""
        instead = "Use tr.ParameterServer(replicas=2) without tr.recoverable"
        return f"its servers have state that no other rank has. {instead}. {ROUNDS}"

    def is_synchronous(self, world_size: int) -> bool:
        """Whether it is the same as synchronous steps with so many ranks."""
        return world_size == 1

    @abstractmethod
    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""


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
        self.strategy, self._optimizer = strategy, optimizer
        self._home = HomeProcess("the server of a strategy")
        self._replica = ModelReplica(training.parameters, optimizer)
        check_equal(self._replica, strategy.name, group, training.name)
        self._group = group.control.subgroup(range(group.world_size), name=f"{training.name}.servers")
        num_rates = 8 * len(optimizer.param_groups) // self._replica.dtype.itemsize
        self._shares = Shares(
            self._replica.sizes, group.world_size, cuts=is_elementwise(optimizer), num_rates=num_rates
        )
        self._loss: Any = None  #: That of the closure of an interrupted step.
        self._begin()

    def _begin(self) -> None:
        """Begin with the present parameters and the present state of the program's torch optimizer."""
        num_keys, dtype = self._shares.layout.num_keys, self._replica.dtype
        self._pushed, self._pulled = np.zeros(num_keys, dtype), np.zeros(num_keys, dtype)
        self._awaited: Ticket | None = None  #: That of the last request.
        self.is_interrupted = False
        self._stage: Literal["begun", "training", "finishing", "finished"] = "begun"
        self._meeting: Work | None = None  #: That of ``finish``: all servers know that all ranks have finished.
        self._client = self._connect()

    def _connect(self) -> Connection:
        group, rank, dtype = self._group, self._group.rank, self._replica.dtype
        layout = self._shares.layout
        # A worker makes one request of each server, with its gradient, and gets one answer, with values.
        piece_bytes = 8 * max(keys.stop - keys.start for keys in self._shares.keys)
        spec = Spec(layout.num_keys, 1, dtype, piece_bytes=piece_bytes)
        table = TorchTable(self._shares, rank, self._replica.parameters, self._optimizer, dtype)
        self._gathering = Gathering(partial(self.strategy.serve, group.world_size), group.world_size, table)
        heads = {shard: shard for shard in layout.shards}
        shard = Shard(rank, table, spec, Eventual(), group.world_size, gathering=self._gathering)
        server = Server(rank)
        server.begin_epoch({head: [head] for head in heads}, {rank: shard} if rank in heads else {})
        name = group.operations.own_name("servers of a strategy")
        own = group.subgroup(range(group.world_size), name=name)
        place = Epoch(own, tuple(range(group.world_size)), heads, (0,) * group.world_size)
        open_messenger = partial(Messenger, name=name, spec=spec, incoming_max=4 * WINDOW * len(heads))
        driver = Driver(place, Client(rank, layout, spec, heads), server, open_messenger)
        origin = Origin("", None, 0)
        connection = Connection(driver, timeout_s=group.timeout_s, origin=origin, check_rate=Sum().check_rate)
        group.at_close(connection.end)
        return connection

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
        if self._stage in ("finishing", "finished"):
            raise ConfigurationError(
                "strategy_steps.finish() was called, so the servers take no more gradients: to train on, call "
                "strategy_steps.load_state(strategy_steps.state()) on all ranks"
            )
        if not self.is_interrupted:
            if closure is not None:
                with torch.enable_grad():
                    self._loss = closure()
            self.is_interrupted, self._stage = True, "training"
            self._push()
        self._await_answers()
        self._write_parameters()
        self._optimizer._opt_called = True  # or torch's schedulers warn: no step was taken
        self.is_interrupted = False
        loss, self._loss = self._loss, None
        return loss

    def _push(self) -> None:
        """Push a gradient, and ask for parameters."""
        gradients = [_dense(parameter.grad) for parameter in self._replica.parameters]
        rates = np.array([float(group["lr"]) for group in self._optimizer.param_groups], np.float64)
        for share, keys in zip(self._shares.parts, self._shares.keys, strict=True):
            if share:
                _write_pushed(share, gradients, rates, self._pushed[keys])
        self._awaited = self._client.push_pull(slice(0, len(self._pushed)), self._pushed, self._pulled)

    def _await_answers(self) -> None:
        """Wait for the answers to the last request, if it was not answered."""
        if self._awaited is None:
            return
        try:
            self._awaited.wait(self._group.timeout_s)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"{error}: {self.strategy.name} holds this rank back until other ranks go on. Do all ranks train, or "
                "call strategy_steps.finish()? A rank that waits in a collective between two steps does neither. "
                "Repeat the call to wait on"
            ) from error
        self._awaited = None

    def _write_parameters(self) -> None:
        """Take over what was pulled."""
        for share, keys in zip(self._shares.parts, self._shares.keys, strict=True):
            self._replica.write_parts(share, self._pulled[keys])

    @property
    def waited_s(self) -> float:
        """The seconds for which this rank has waited for servers."""
        return self._client.statistics().waiting_s

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and what this rank's server has observed. Any thread."""
        return {"strategy": self.strategy.name, **observations(self.staleness, self.lead)}

    def stepped(self) -> None:
        """Do nothing: ``step`` has done everything."""

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""
        return self._replica.holds(parameters)

    def finish(self) -> None:
        """Wait until all ranks have called this, and take over the final parameters. Collective.

        Ranks may have taken different numbers of steps. Afterwards all have the same parameters.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: Another rank has not called this within the group's ``timeout_s``. Repeat the call.
        """
        self._home.check()
        if self._stage == "finished":
            return
        group, client = self._group, self._client
        if self._stage in ("begun", "training"):
            self._stage = "finishing"
            self._awaited = client.retire()
        self._await_answers()
        if self._meeting is None:
            self._meeting = group.allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), name="finish")
        self._meeting.wait()
        client.pull(slice(0, len(self._pulled)), self._pulled).wait(group.timeout_s)
        self._write_parameters()
        self._stage = "finished"
        client.finish()  # so a program that ends without close() leaves when the others need nothing of it any more

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizers of all servers, after ``finish``. Collective; equal on all ranks.

        Save it with the model's parameters, which are equal, too. No gradient waits on a server, so this is all.

        Raises:
            ConfigurationError: ``finish`` has not returned: servers have gradients that wait, or will get more.
            PeerLost: A rank is lost.
            DeadlineExceededError: Another rank does not call this within the group's ``timeout_s``.
        """
        self._home.check()
        if self._stage != "finished":
            raise ConfigurationError(
                "a strategy with servers has a state after strategy_steps.finish(): call it on all ranks, then "
                "state(), and to train on load_state() with the result"
            )
        numbers = numbers_of(self._optimizer)
        own = [(numbers[parameter], begin, entry) for parameter, begin, entry in self._gathering.table.state()]
        parts: dict[int, dict[int, dict[str, Any]]] = {}  #: By parameter, and by the first element of the part.
        for server, share in enumerate(self._shares.parts):
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
        if self._stage in ("training", "finishing"):
            raise ConfigurationError("steps were taken: call strategy_steps.finish() on all ranks before load_state()")
        entries = check_state(state, self.strategy.name, self._optimizer)
        load_entries(self._optimizer, entries)
        if self._stage == "finished":
            self._client.close()
            self._begin()
        else:
            self._gathering.table.reload(self._optimizer)
            self._group.barrier()  # so that no gradient comes to a server that has not begun anew

    @property
    def staleness(self) -> Counter[int]:
        """How often each staleness was observed by this rank's server."""
        return Counter(self._gathering.session.staleness)

    @property
    def lead(self) -> int:
        """The largest number of steps by which this rank's server has seen a worker ahead of the slowest one."""
        return self._gathering.session.lead

    def close(self) -> None:
        """End the server, after which no worker is answered: call ``finish`` before. Harmless when called twice."""
        if self._stage == "finished":
            self._client.close()
        else:
            self._client.end()


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient, dense and one-dimensional."""
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)


def _write_pushed(
    share: Sequence[Interval], gradients: Sequence[torch.Tensor | None], rates: Array, pushed: Array
) -> None:
    """Write what is pushed to a share: gradients, zeros where a parameter has none, which there are, and rates."""
    begin, first = 0, sum(part.size for part in share)
    for place, part in enumerate(share, start=first):
        gradient, end = gradients[part.parameter], begin + part.size
        pushed[place] = gradient is not None
        if gradient is None:
            pushed[begin:end] = 0.0
        else:
            torch.from_numpy(pushed[begin:end]).copy_(gradient[part.begin : part.end])
        begin = end
    pushed[first + len(share) :].view(np.uint8)[:] = rates.view(np.uint8)
