"""The steps of a strategy: the model as its replica, and its exchanges beside training.

``DistributedOptimizer`` asks before each step whether gradients are exchanged in it, and tells when a step has ended. A
thread (``sparse/worker.py``) carries the exchanges out. A result is applied in the thread that trains, after the step
that the strategy has named: the same one on all ranks, however fast each of them is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.worker import ExchangeWorker, Job
from totalreduce.strategies.strategy import Pending, Strategy
from totalreduce.tensors.compilation import never_compiled

__all__ = ["LocalSteps"]

#: Exchanges are less urgent than gradients and than what somebody waits for.
_PRIORITY = 1 << 20


@final
@never_compiled
class LocalSteps:
    """A strategy on this rank.

    Attributes:
        strategy: Its settings.
    """

    def __init__(
        self,
        strategy: Strategy,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group: Group,
        name: str,
    ) -> None:
        """Begin. Collective.

        Args:
            strategy: The settings.
            parameters: The parameters that are trained.
            optimizer: The torch optimizer.
            group: The ranks.
            name: Different from that of every other optimizer of the group.

        Raises:
            ConfigurationError: The ranks do not begin with the same parameters, or a parameter is not a floating-point
                tensor.
        """
        self.strategy, self._group, self._inner = strategy, group, optimizer
        self._replica = ModelReplica(parameters, optimizer)
        check_equal(self._replica, strategy.name, group, name)
        self._session = strategy.session(self._replica, group.rank, group.world_size)
        self._worker = ExchangeWorker(GroupDriver(group, f"{name}.strategy"))
        self._waiting: list[tuple[Pending, Job]] = []
        self._steps, self._samples = 0, 0.0
        self._end = weakref.finalize(self, self._worker.close)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks."""
        return self._session.exchanges_gradients()

    def count_samples(self, number: float) -> None:
        """Add to the number of samples that this rank has used in the present step."""
        self._samples += checks.real_number("the number of samples", number, minimum=0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with this rank's gradients, and do what ``stepped`` does; return the closure's loss."""
        result = self._inner.step() if closure is None else self._inner.step(closure)
        self.stepped()
        return result

    def stepped(self) -> None:
        """Note that a step has ended: apply results that are due, and begin the exchanges that follow it. Collective.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: An exchange takes longer than the group's ``timeout_s``.
        """
        self._steps += 1
        weight, self._samples = self._samples, 0.0
        for pending in self._session.stepped(weight):
            job = _job_of(pending)
            self._worker.start(job)
            self._waiting.append((pending, job))
        while any(pending.due <= self._steps for pending, _ in self._waiting):
            pending, job = self._waiting.pop(0)
            self._worker.hurry()
            pending.apply(self._result(job))

    def _result(self, job: Job) -> Any:
        try:
            return job.result.result(self._group.timeout_s)
        except FutureTimeoutError:
            raise DeadlineExceededError(
                f"an exchange of {self.strategy.name} has not ended within {self._group.timeout_s:g} s. Do all ranks "
                "take the same number of steps?"
            ) from None

    def state(self) -> dict[str, Any]:
        """Return the state of the strategy.

        Raises:
            ConfigurationError: An exchange is under way.
        """
        if self._waiting:
            raise ConfigurationError(
                f"an exchange of {self.strategy.name} is under way until step {self._waiting[-1][0].due}: save the "
                f"state after this step (now it is step {self._steps})"
            )
        return {"steps": self._steps, "samples": self._samples, "session": dict(self._session.state())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps, self._samples = state["steps"], state["samples"]
        self._session.load_state(state["session"])

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
