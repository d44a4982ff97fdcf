"""The steps of a strategy in which each rank trains its own replica of the model, and ranks exchange what they need.

``DistributedOptimizer`` asks before each step whether gradients are exchanged in it, and calls ``stepped`` after it. A
thread (``sparse/worker.py``) carries the exchanges out beside training. The strategy names the step after which the
thread that trains applies a result: the same step on all ranks, however fast each of them is.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.deferred import DeferredUpdates
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.pytorch.round import RoundGuard
from totalreduce.pytorch.stepping import StrategySteps
from totalreduce.sparse.actions import Exchange
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.rounds import with_arrays, with_tensors
from totalreduce.sparse.worker import ExchangeWorker, Job
from totalreduce.strategies.averaging import AveragingSession
from totalreduce.strategies.strategy import ElementsCopy, Pending, RestartableSession, Strategy, TrainingOfRank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["LocalSteps"]

#: The parts of a state, beside the strategy's name.
_KEYS = ("steps", "samples", "results", "under_way", "session")
#: Exchanges are less urgent than gradients and than what somebody waits for.
_PRIORITY = 1 << 20
_JOINING = "this rank has announced that it has no more data: repeat join() until it returns"


@dataclass(slots=True)
class _Kept:
    """What ``undo`` restores: the state before a guarded step that ends with an exchange."""

    parameters: ElementsCopy
    optimizer: dict[str, Any]  #: The state of the torch optimizer.
    steps: dict[str, Any]  #: The state of ``LocalSteps``.
    is_done: bool = False  #: Whether the step and the exchange have ended, and only the guard has not agreed yet.


@dataclass(slots=True)
class _Joining:
    """A call of ``join``."""

    most: torch.Tensor  #: One element: the steps of this rank times the number of ranks, plus the rank.
    last: Work | None = None  #: The allreduce that finds the largest of all ranks, when all have joined.


@final
@never_compiled
class LocalSteps(StrategySteps):
    """A strategy on this rank."""

    outlives_group = True
    strategy: Strategy  #: Its settings.
    waited_s = 0.0

    def __init__(self, strategy: Strategy, training: TrainingOfRank) -> None:
        """Begin. Collective. Raises ``ConfigurationError``."""
        group, name = training.group, training.name
        self.strategy, self._group, self._inner = strategy, group, training.optimizer
        self._replica = ModelReplica(training.parameters, training.optimizer)
        if training.compares:
            check_equal(self._replica, strategy.name, group, name)
        self._session = strategy.session(self._replica, group.rank, group.world_size)
        self._worker = ExchangeWorker(GroupDriver(group, f"{name}.strategy", beside=True))
        self._waiting: deque[tuple[Pending, Job]] = deque()
        self._unstarted: list[Job] = []  #: Exchanges to begin anew in the next call: the group is complete then.
        self._kept: _Kept | None = None  #: While a guarded step can be undone.
        self._steps, self._samples = 0, 0.0
        self.is_interrupted = False  #: Whether a call of ``step`` ran out of time, and must be repeated.
        self.waited_s = 0.0  #: The seconds for which the program was blocked because results of exchanges were due.
        #: Whether steps can be undone after a loss: from the first guarded step to the end of the job.
        self.is_guarded = not training.compares
        self._joining: _Joining | None = None  #: While ``join`` runs, or must be repeated.
        #: What ``finish`` waits for, while it runs or must be repeated: the exchanges before it, or the one it has
        #: begun.
        self._finishing: Literal["", "earlier exchanges", "last exchange"] = ""
        self._loss: Any = None  #: That of the closure of an interrupted step.
        self._end = weakref.finalize(self, self._worker.close)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks."""
        return self._session.exchanges_gradients()

    @property
    def ends_exchange(self) -> bool:
        """Whether the next step, or one that must be repeated, ends with an exchange. Equal on all ranks."""
        return self._kept is not None or self._session.ends_exchange()

    def count_samples(self, number: float) -> None:
        """Add to the number of samples that this rank has used in the present step."""
        self._samples += checks.real_number("the number of samples", number, minimum=0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with this rank's gradients, and do what ``stepped`` does; return the closure's loss.

        Raises:
            PeerLost, DeadlineExceededError: As ``stepped``.
        """
        if self._joining is not None:
            raise ConfigurationError(_JOINING)
        self._refuse_unfinished()
        if not self.is_interrupted:
            self._loss = self._inner.step() if closure is None else self._inner.step(closure)
        self.stepped()
        loss, self._loss = self._loss, None
        return loss

    def take(
        self,
        closure: Callable[[], Any] | None,
        guard: RoundGuard | None,
        deferred: DeferredUpdates,
        flush: Callable[[], None],
    ) -> Any:
        """Take a step; with a guard, have it agree. Until it has, ``undo`` makes the step undone.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: An exchange or the guard takes too long. The call may be repeated.
        """
        del deferred, flush
        if guard is None:
            return self.step(closure)
        self.is_guarded = True
        if not self.ends_exchange:
            guard.step_alone()
            return self.step()
        guard.before_wait()
        if self._kept is None:
            everything = self._replica.copy(0, sum(self._replica.sizes))
            self._kept = _Kept(everything, copy.deepcopy(self._inner.state_dict()), self.state_under_way())
        if not self._kept.is_done:
            self.step()
            self._kept.is_done = True
        guard.before_step()
        guard.before_commit()
        self._kept = None
        return None

    def refuse_frozen(self) -> None:
        """Raise ``ConfigurationError`` if parameters were frozen, which a process that joins could not train."""
        num_frozen = self._replica.num_frozen
        if num_frozen:
            raise ConfigurationError(
                f"sync={self.strategy.name!r} goes on with the trainable parameters that it has begun with, and "
                f"{num_frozen} of them were frozen since: a process that takes the place of a lost rank could not "
                "average them. Freeze parameters before the DistributedOptimizer is built, or set their learning rate "
                "to 0 instead (param_groups)"
            )

    def undo(self) -> None:
        """Set everything to what it was before a guarded step that has not ended, if there is one.

        The samples that were counted for the step are counted again when it is repeated.
        """
        kept, self._kept = self._kept, None
        self._samples = 0.0
        if kept is None:
            return
        self.is_interrupted, self._loss = False, None
        self._waiting.clear()
        self._replica.update(0, kept.parameters)
        self._inner.load_state_dict(kept.optimizer)
        self.load_state({**kept.steps, "samples": 0.0})

    def stepped(self) -> None:
        """Note that a step has ended: begin the exchanges that follow it, and apply results that are due. Collective.

        ``step`` calls this. A program calls it where a step was left out on this rank alone.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: An exchange takes longer than the group's ``timeout_s``. Repeat the call: it waits
                on, and counts no second step.
        """
        self._refuse_unfinished()
        if not self.is_interrupted:
            self._begin()
        self.is_interrupted = True
        self._apply_due(self._steps)
        self.is_interrupted = False

    def _apply_due(self, steps: float) -> None:
        """Wait for the results that are due after so many steps, and apply them."""
        self._start_restarted()
        while self._waiting and self._waiting[0][0].due <= steps:
            pending, job = self._waiting[0]
            self._worker.hurry()
            result = self._result(job)
            self._session.apply(pending.channel, result)
            self._waiting.popleft()

    def _begin(self) -> None:
        """Count a step, and begin the exchanges that follow it."""
        self._start_restarted()
        self._steps += 1
        weight, self._samples = self._samples, 0.0
        for pending in self._session.stepped(weight):
            self._start(pending)

    def _start(self, pending: Pending) -> None:
        job = _job_of(pending)
        self._worker.start(job)
        self._waiting.append((pending, job))

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, its steps and the exchanges under way. Any thread, at any time.

        ``staleness`` is the number of steps after which the result of the oldest exchange under way is applied.
        """
        under_way = tuple(self._waiting)
        staleness = max(0, under_way[0][0].due - self._steps) if under_way else 0
        return {
            "strategy": self.strategy.name,
            "local_steps": self._steps,
            "exchanges_under_way": len(under_way),
            "staleness": staleness,
        }

    def _result(self, job: Job) -> Any:
        begin = time.monotonic()
        try:
            return job.result.result(self._group.timeout_s)
        except FutureTimeoutError:
            raise DeadlineExceededError(
                f"an exchange of {self.strategy.name} has not ended within {self._group.timeout_s:g} s. Do all ranks "
                "take the same number of steps? Repeat the call to wait on"
            ) from None
        finally:
            self.waited_s += time.monotonic() - begin

    def join(self, *, is_guarded: bool = False) -> int:
        """Take part in averages until all ranks have called this; return the rank with the most steps. Collective.

        Raises:
            ConfigurationError: A call of ``step`` ran out of time and must be repeated; or the strategy has no averages
                in which a rank without data can take part; or ranks train in ``tr.recoverable``.
            PeerLost: A rank is lost.
            DeadlineExceededError: An average takes longer than the group's ``timeout_s``. The call may be repeated.
        """
        if is_guarded or not self.strategy.can_join():
            return super().join(is_guarded=is_guarded)
        self._refuse_interrupted()
        session, group = self._session, self._group
        assert isinstance(session, AveragingSession)
        if self._joining is None:
            most = torch.tensor([self._steps * group.world_size + group.rank], dtype=torch.int64, device="cpu")
            self._joining = _Joining(most)
        joining = self._joining
        while joining.last is None:
            if not self._waiting:
                for pending in session.join():
                    self._start(pending)
                    self._steps = pending.due  # as if this rank had taken the steps until then
            self._apply_due(self._steps)
            if session.num_active == 0:
                joining.last = group.control.allreduce(joining.most, name="strategy/joined", op=ReduceOp.MAX)
        last = int(joining.last.wait()) % group.world_size
        session.end_join()
        self._joining = None
        return last

    def finish(self) -> None:
        """Give all ranks the same parameters at the end of training. Collective, after the same step on all ranks.

        Results of exchanges under way are applied. Then, unless the last step has ended an exchange that makes them
        equal, the parameters become the average of all ranks, sent without a codec, or with EASGD the centre. The
        state of the torch optimizer is not averaged. Training may go on afterwards.

        Raises:
            ConfigurationError: A call of ``step`` or ``join`` ran out of time and must be repeated; or this is called
                within ``tr.recoverable``, where a loss could leave some ranks with the average and others without.
            PeerLost: A rank is lost.
            DeadlineExceededError: An exchange takes longer than the group's ``timeout_s``. Repeat the call; until it
                has returned, the strategy takes no step.
        """
        if self.is_guarded:
            raise ConfigurationError(
                "finish() cannot be undone where a rank is lost: call it behind the block of tr.recoverable"
            )
        if not self._finishing:
            self._refuse_interrupted()
            if self._joining is not None:
                raise ConfigurationError(_JOINING)
            self._finishing = "earlier exchanges"
        if self._finishing == "earlier exchanges":
            self._apply_due(math.inf)
            for pending in self._session.ending():
                self._start(pending)
            self._finishing = "last exchange"
        self._apply_due(self._steps)
        self._finishing = ""

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""
        return self._replica.holds(parameters)

    def state(self) -> dict[str, Any]:
        """Return the state of the strategy on this rank, copied: numbers, lists, dicts and tensors.

        Results of exchanges that are not due yet are in it: this waits for exchanges under way, and so for the other
        ranks to come as far as this one.

        Raises:
            ConfigurationError: A call of ``step`` ran out of time and must be repeated.
            PeerLost: A rank is lost.
            DeadlineExceededError: An exchange takes longer than the group's ``timeout_s``. The call may be repeated.
        """
        self._refuse_interrupted()
        self._start_restarted()
        results = []
        for pending, job in self._waiting:
            self._worker.hurry()
            results.append({"channel": pending.channel, "due": pending.due, "result": self._result(job)})
        return self._state(results, [])

    def state_under_way(self) -> dict[str, Any]:
        """Return the state without a wait: exchanges under way are restarted where the state is loaded."""
        self._refuse_interrupted()
        return self._state([], self._under_way())

    def _state(self, results: list[dict[str, Any]], under_way: list[dict[str, int]]) -> dict[str, Any]:
        state = {
            "steps": self._steps,
            "samples": self._samples,
            "results": results,
            "under_way": under_way,
            "session": self._session.state(),
        }
        return {"strategy": self.strategy.name, **with_tensors(state)}

    def _under_way(self) -> list[dict[str, int]]:
        """Describe the exchanges whose results are not applied."""
        return [{"channel": pending.channel, "due": pending.due} for pending, _ in self._waiting]

    def _restart(self, under_way: Sequence[Mapping[str, int]]) -> None:
        """Make exchanges again that were under way; the next call starts them (``_start_restarted``)."""
        for each in under_way:
            if not isinstance(self._session, RestartableSession):
                raise ConfigurationError(f"{self.strategy.name!r} cannot restart an exchange that was under way")
            pending = self._session.restart(each["channel"], each["due"])
            job = _job_of(pending)
            self._waiting.append((pending, job))
            self._unstarted.append(job)

    def _start_restarted(self) -> None:
        """Start the exchanges that ``_restart`` has made."""
        while self._unstarted:
            self._worker.start(self._unstarted[0])
            del self._unstarted[0]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state`` has returned on this rank, with the same settings and model.

        Results that this rank has not applied yet are dropped, so all ranks call this after the same step.

        Raises:
            ConfigurationError: The state is that of other settings or another model. Nothing has changed. Or a call of
                ``step`` ran out of time and must be repeated.
        """
        self._refuse_interrupted()
        name = state.get("strategy") if isinstance(state, Mapping) else None
        if name != self.strategy.name:
            raise ConfigurationError(
                f"the state is not that of {self.strategy.name!r} but of {name!r}: load what strategy_steps.state() "
                "has returned with the same sync="
            )
        steps, samples, results, under_way, session = (with_arrays(state.get(key)) for key in _KEYS)
        present = {"steps": 0, "samples": 0.0, "session": self._session.state()}
        _check_alike({"steps": steps, "samples": samples, "session": session}, present, "state")
        under_way = under_way or []
        for each in under_way:
            _check_alike(each, {"channel": 0, "due": 0}, "state.under_way")
        for result in results:
            _check_alike(result, {"channel": 0, "due": 0, "result": result["result"]}, "state.results")
        self._steps, self._samples = steps, samples
        self._session.load_state(session)
        self._waiting = deque(_arrived(result["channel"], result["due"], result["result"]) for result in results)
        self._unstarted.clear()
        self._restart(under_way)

    def shared(self) -> dict[str, Any]:
        """Return the part of ``state`` that all ranks have in common, for a rank that begins with the others."""
        session = with_tensors(self._session.state()["shared"])
        return {"steps": self._steps, "under_way": self._under_way(), "session": session}

    def load_shared(self, shared: Mapping[str, Any]) -> None:
        """Begin with the present parameters and what ``shared`` has returned on another rank.

        What a rank has for itself begins anew. In exchanges under way its updates are zeros.
        """
        steps, under_way, session = (with_arrays(shared.get(key)) for key in ("steps", "under_way", "session"))
        self._steps, self._samples = steps, 0.0
        self._renew(session, None, under_way or [])

    def enter(self, group: Group, name: str) -> None:
        """Go on after ``close``, in the group with its new members. Exchanges under way begin anew. Collective.

        Args:
            group: The ranks.
            name: Different from that of every other optimizer of the group.
        """
        self._group = group
        self._worker = ExchangeWorker(GroupDriver(group, f"{name}.strategy", beside=True))
        self._end = weakref.finalize(self, self._worker.close)
        state = self._session.state()
        self._renew(state["shared"], state["own"], self._under_way())

    def _renew(self, shared: Any, own: Any, under_way: Sequence[Mapping[str, int]]) -> None:
        """Make the session again for the present rank and number of ranks, and anew where ``own`` is ``None``."""
        self._waiting.clear()
        self._unstarted.clear()
        self._session = self.strategy.session(self._replica, self._group.rank, self._group.world_size)
        self._session.load_state({"shared": shared, "own": self._session.state()["own"] if own is None else own})
        self._restart(under_way)

    def _refuse_unfinished(self) -> None:
        if self._finishing:
            raise ConfigurationError("the last finish() was interrupted: repeat it until it returns")

    def _refuse_interrupted(self) -> None:
        self._refuse_unfinished()
        if self.is_interrupted:
            raise ConfigurationError("the last step() was interrupted: repeat it until it returns")

    def spread(self) -> float:
        """Return the largest distance between two ranks in an element of a parameter. Collective."""
        everything = self._replica.read(range(len(self._replica.sizes)))
        bounds = [torch.from_numpy(sign * everything) for sign in (1, -1)]
        for number, bound in enumerate(bounds):
            self._group.control.allreduce(bound, name=f"strategy/spread/{number}", op=ReduceOp.MAX).wait()
        return float((bounds[0] + bounds[1]).max()) if everything.size else 0.0

    def close(self) -> None:
        """End the thread. Exchanges under way are dropped."""
        self._end()


def _job_of(pending: Pending) -> Job:
    return Job(pending.channel, lambda: None, lambda: pending.exchange, _PRIORITY)


def _arrived(channel: int, due: int, result: Any) -> tuple[Pending, Job]:
    """Return an exchange that has ended with a result."""
    pending = Pending(channel, due, _nothing())
    job = _job_of(pending)
    job.result.set_result(result)
    return pending, job


def _nothing() -> Exchange:
    """Exchange nothing."""
    yield from ()


def _check_alike(state: Any, present: Any, where: str) -> None:
    """Raise ``ConfigurationError`` unless two states have the same keys, lengths, types and sizes."""
    if _described(state) != _described(present):
        raise ConfigurationError(
            f"the saved state has {_described(state)} at {where}, and this strategy {_described(present)}: load one "
            "of the same settings and the same model"
        )
    if isinstance(present, Mapping):
        for key, value in present.items():
            _check_alike(state[key], value, f"{where}.{key}")
    elif isinstance(present, list):
        for number, value in enumerate(present):
            _check_alike(state[number], value, f"{where}[{number}]")


def _described(state: Any) -> str:
    """Name what must be equal of two nodes of states."""
    if isinstance(state, Mapping):
        return f"the entries {sorted(map(str, state))}"
    if isinstance(state, list):
        return f"a list of {len(state)}"
    if isinstance(state, np.ndarray):  # a message of bytes may have any length
        return "bytes" if state.dtype == np.uint8 else f"{state.size} elements of {state.dtype}"
    return "a number" if isinstance(state, (int, float)) else type(state).__name__
