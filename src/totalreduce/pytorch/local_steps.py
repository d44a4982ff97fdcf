"""The steps of a strategy: the model as its replica, and its exchanges beside training.

``DistributedOptimizer`` asks before each step whether gradients are exchanged in it, and tells when a step has ended. A
thread (``sparse/worker.py``) carries the exchanges out. A result is applied in the thread that trains, after the step
that the strategy has named: the same one on all ranks, however fast each of them is.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.worker import ExchangeWorker, Job
from totalreduce.strategies.strategy import Pending, Strategy
from totalreduce.tensors.compilation import never_compiled

__all__ = ["LocalSteps", "ModelReplica"]

#: Exchanges are less urgent than gradients and than what somebody waits for.
_PRIORITY = 1 << 20


@final
class ModelReplica:
    """The trained parameters of a model as a ``Replica``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters.

        Raises:
            ConfigurationError: A parameter is not a floating-point tensor.
        """
        odd = [parameter.dtype for parameter in parameters if not parameter.dtype.is_floating_point]
        if odd:
            raise ConfigurationError(f"a strategy averages floating-point parameters, and one is of {odd[0]}")
        self._parameters, self._optimizer = list(parameters), optimizer
        self._sizes = [parameter.numel() for parameter in parameters]
        whole = all(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = np.dtype(np.float64 if whole else np.float32)

    @property
    def sizes(self) -> Sequence[int]:
        """The number of elements of each parameter."""
        return self._sizes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Float64 if all parameters have it, else float32."""
        return self._dtype

    def read(self, tensors: Sequence[int]) -> Array:
        """Return a copy of the elements of these parameters."""
        return self._flat([self._parameters[tensor] for tensor in tensors])

    def write(self, tensors: Sequence[int], values: Array) -> None:
        """Set the elements of these parameters."""
        self._set([self._parameters[tensor] for tensor in tensors], values)

    def read_state(self) -> Array:
        """Return a copy of the floating-point tensors in the optimizer's state."""
        return self._flat(self._state())

    def write_state(self, values: Array) -> None:
        """Set these tensors."""
        self._set(self._state(), values)

    def _state(self) -> list[torch.Tensor]:
        """Return the tensors, in the order of parameters and names: equal on ranks that have taken a step."""
        state = self._optimizer.state
        return [
            value
            for parameter in self._parameters
            for _, value in sorted(state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        ]

    @torch.no_grad()
    def _flat(self, tensors: Sequence[torch.Tensor]) -> Array:
        flat = np.empty(sum(tensor.numel() for tensor in tensors), self._dtype)
        begin = 0
        for tensor in tensors:
            part = torch.from_numpy(flat[begin : begin + tensor.numel()])
            part.copy_(tensor.detach().reshape(-1))
            begin += tensor.numel()
        return flat

    @torch.no_grad()
    def _set(self, tensors: Sequence[torch.Tensor], values: Array) -> None:
        begin = 0
        for tensor in tensors:
            part = torch.from_numpy(values[begin : begin + tensor.numel()])
            tensor.copy_(part.view(tensor.shape))
            begin += tensor.numel()


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
        self.strategy, self._group = strategy, group
        self._replica = ModelReplica(parameters, optimizer)
        self._check_equal(group, name)
        self._session = strategy.session(self._replica, group.rank, group.world_size)
        self._worker = ExchangeWorker(GroupDriver(group, f"{name}.strategy"))
        self._waiting: list[tuple[Pending, Job]] = []
        self._steps, self._samples = 0, 0.0
        self._end = weakref.finalize(self, self._worker.close)

    def _check_equal(self, group: Group, name: str) -> None:
        everything = self._replica.read(range(len(self._replica.sizes)))
        digest = hashlib.sha256(everything.data).hexdigest()
        try:
            group.agree(f"{name}/strategy", {"the parameters at the begin": digest})
        except PlanMismatchError as error:
            raise ConfigurationError(
                f"the ranks begin with different parameters, which {self.strategy.name} does not bring together: call "
                "tr.broadcast_parameters(model, group) before DistributedOptimizer on every rank"
            ) from error

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the next step uses the gradients of all ranks."""
        return self._session.exchanges_gradients()

    def count_samples(self, number: float) -> None:
        """Add to the number of samples that this rank has used in the present step."""
        self._samples += checks.real_number("the number of samples", number, minimum=0)

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
