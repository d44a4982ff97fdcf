"""``Group.plan``: a list of tensors, agreed on by all ranks, that a program reduces in every step, in any order.

It is for programs that reduce tensors of their own and may leave some out on some ranks. A tensor that a rank has not
submitted when it leaves the step counts as zero there, or is an error on all ranks, by policy: leaving a step submits
zeros for it, so no rank waits for a tensor that never comes. Under the policy ``"error"``, another small operation
tells all ranks which rank submitted which tensor.

``DistributedOptimizer`` does not use it. It needs rounds of buckets: a bucket is sent again where gradients changed
after it had left, its tail has the flags for which a plan needs an operation, and a rank may join without data. Both
reduce by ``Backend.planned``, which gives a native library its order without an agreement in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from totalreduce.foundation.errors import ConfigurationError, MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.agreement import agree
from totalreduce.groups.backends import Backend
from totalreduce.groups.collectives import Collectives
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Plan", "Step", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a plan. Name, shape and dtype are equal on all ranks; ``priority`` may differ."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    priority: int = 0


@final
@never_compiled
class Plan:
    """A plan, made by ``Group.plan``, which documents the arguments.

    Attributes:
        control: The group by which the ranks agree.
        name: The name of the plan.
        op: The reduction: a sum or an average.
        on_missing: The policy for tensors that a rank leaves out.
        device: The device of the zeros for these tensors, in a step in which the rank submits none.
        specs: The tensors, by name.
        num_steps: The number of steps that were begun.
        stream: Carries the reductions out.
        indices: The index of each tensor in the plan.
    """

    def __init__(
        self,
        control: Collectives,
        backend: Backend,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        op: ReduceOp,
        on_missing: Literal["zero", "error"],
        settings: Mapping[str, Any] | None,
    ) -> None:
        if on_missing not in ("zero", "error"):
            raise ConfigurationError(f"on_missing is 'zero' or 'error', not {on_missing!r}")
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigurationError(f"a plan sums or averages (zero is neutral then); {op.name} cannot be planned")
        self.control, self.name, self.op, self.on_missing = control, name, op, on_missing
        coordinator = backend.coordinator
        self.device = torch.device("cpu") if coordinator is None else coordinator.natives.device
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            raise ConfigurationError(f"plan {name!r} names a tensor twice")
        self.num_steps = 0
        document = {
            "tensors": {s.name: f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}" for s in specs},
            "op": op.name,
            "on_missing": on_missing,
            "settings": dict(settings or {}),
        }
        agree(control, f"plan {name}", document)
        self.stream = backend.planned([f"{name}/{spec.name}" for spec in specs])
        self.indices = {spec.name: index for index, spec in enumerate(specs)}

    def step(self) -> Step:
        """Begin the next step, and return it for use as a context manager. The last step has ended."""
        self.num_steps += 1
        self.stream.begin()
        return Step(self, self.num_steps - 1)


@final
@never_compiled
class Step:
    """One step of a plan, made by ``Plan.step``. The end of the ``with`` statement waits for the results."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan, self.number = plan, number
        self._works: dict[str, Work] = {}
        self._results: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def submit(self, name: str, tensor: torch.Tensor) -> Work:
        """Reduce a tensor of the plan, in place; return at once.

        Raises:
            ConfigurationError: The plan has no such tensor or plans another shape or type; or this step has it already.
        """
        spec = self._plan.specs.get(name)
        if spec is None:
            raise ConfigurationError(f"{name!r} is not in plan {self._plan.name!r}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ConfigurationError(
                f"{name!r} is planned as {spec.dtype}{list(spec.shape)}, not {tensor.dtype}{list(tensor.shape)}"
            )
        if name in self._works:
            raise ConfigurationError(f"{name!r} was already submitted in step {self.number}")
        return self._start(spec, tensor)

    def finish(self, timeout_s: float | None = None) -> dict[str, torch.Tensor]:
        """Submit zeros for the tensors that this rank leaves out, wait for all results, and return them by name.

        Raises:
            MissingTensorError: A rank left a tensor out and the policy is ``"error"``. All ranks raise this error.
        """
        plan = self._plan
        present = torch.zeros(plan.control.world_size, len(plan.specs), dtype=torch.uint8, device="cpu")
        for index, (name, spec) in enumerate(plan.specs.items()):
            if name in self._works:
                present[plan.control.rank, index] = 1
            else:
                self._start(spec, torch.zeros(spec.shape, dtype=spec.dtype, device=self._device()))
        presence = None
        if plan.on_missing == "error":
            presence = plan.control.allreduce(present, name=f"{plan.name}/presence", op=ReduceOp.MAX, priority=-1)
        for work in self._works.values():
            work.wait(timeout_s)
        if presence is not None:
            presence.wait(timeout_s)
            self._check(present)
        return self._results

    def _device(self) -> torch.device:
        """Return the device of the zeros: that of the other tensors of this step."""
        return next((tensor.device for tensor in self._results.values()), self._plan.device)

    def _start(self, spec: TensorSpec, tensor: torch.Tensor) -> Work:
        plan = self._plan
        work = plan.stream.submit(plan.indices[spec.name], tensor, op=plan.op, priority=spec.priority)
        self._works[spec.name], self._results[spec.name] = work, tensor
        return work

    def _check(self, present: torch.Tensor) -> None:
        for index, name in enumerate(self._plan.specs):
            absent = (present[:, index] == 0).nonzero().flatten().tolist()
            if absent:
                raise MissingTensorError(name, tuple(absent), self.number)
