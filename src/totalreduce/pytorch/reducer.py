"""One round of gradient reduction: buckets leave while backward runs, and are made good at the end.

Rule 1: a round reduces the gradients as they are when it is *closed* (at ``step()`` or ``synchronize()``).
Sending a bucket earlier, from a gradient hook, is speculation that nearly always holds.

Rule 2: every rank sends every bucket exactly once per round, with zeros for what it does not have, whatever
branches its model took. So ranks never have to agree on what is ready, and no set of used parameters can hang
the job.

Rule 3: the last bucket of the plan is sent only when the round is closed, and says which other buckets
changed on this rank after they had left (a second backward pass, ``zero_grad()``, clipping by hand). Once
reduced, it tells every rank the same set of buckets to send again. The last bucket holds the first registered
parameters, whose gradients backward makes last, so holding it back costs nothing in the usual case, and the
agreement costs no message of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from totalreduce.foundation.errors import ConfigurationError, MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch.buckets import Bucket, BucketSpec, ParameterSpec, WireFormat
from totalreduce.pytorch.readiness import Readiness
from totalreduce.pytorch.round import GradientReducer
from totalreduce.tensors.compilation import never_compiled

if TYPE_CHECKING:
    from totalreduce.groups.group import Group
    from totalreduce.native.planned import PlannedReductions
    from totalreduce.tensors.work import Work

__all__ = ["Arithmetic", "Reducer", "operation_names"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How gradients of different ranks become one.

    Attributes:
        op: ``AVG`` or ``SUM``: what the ranks do with what they send.
        world_size: Of the group.
        prescale: Factor before.
        wire_dtype: What gradients are cast to while they travel; ``None``: nothing.
        divide_by_active: Averages are divided by the ranks that have data, not by all.
        rest: Factor afterwards that makes it an average, or 1.
        averages: Whether an average is wanted, in whatever steps.
    """

    op: ReduceOp
    world_size: int
    prescale: float
    wire_dtype: torch.dtype | None
    divide_by_active: bool
    rest: float
    averages: bool

    @classmethod
    def of(
        cls,
        op: ReduceOp,
        world_size: int,
        *,
        predivide: float,
        wire_dtype: torch.dtype | None,
        divide_by_active: bool,
        native: bool,
    ) -> Arithmetic:
        """Work out the steps.

        Args:
            op: What is wanted.
            world_size: Of the group.
            predivide: Averages are divided by this before the sum, and by the rest of the world size after it.
            wire_dtype: What gradients are cast to.
            divide_by_active: See the class.
            native: A native library has sums only; dividing while the gradients are copied saves it a pass.
        """
        averages = op is ReduceOp.AVG
        if averages and native and predivide == 1.0:
            predivide = float(world_size)
        if averages and predivide != 1.0:
            scale, rest = 1.0 / predivide, predivide / world_size
            return cls(ReduceOp.SUM, world_size, scale, wire_dtype, divide_by_active, rest, averages)
        return cls(op, world_size, 1.0, wire_dtype, divide_by_active, 1.0, averages)

    def postscale(self, active: int) -> float:
        """Factor after the reduction, where so many ranks had data."""
        if self.averages and self.divide_by_active and 0 < active < self.world_size:
            return self.rest * self.world_size / active
        return self.rest


@never_compiled
class Reducer(GradientReducer):
    """The buckets of one plan and the round that is under way.

    Args:
        group: Where to reduce.
        stream: Reduces the buckets, by their index; see ``Group.planned``.
        names: Of the operations; see ``operation_names``.
        parameters: In registration order.
        specs: Their descriptions, in the same order.
        plan: From ``plan_buckets``.
        arithmetic: How gradients of different ranks become one.
        forbid_missing: Raise where some but not all ranks have a gradient.
    """

    def __init__(
        self,
        group: Group,
        stream: PlannedReductions,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        plan: Sequence[BucketSpec],
        *,
        arithmetic: Arithmetic,
        forbid_missing: bool,
    ) -> None:
        self._group, self._stream, self._arithmetic = group, stream, arithmetic
        self._forbid_missing = forbid_missing
        self.specs, self.names, self.parameters = specs, names, parameters
        wire = WireFormat(
            group.rank,
            group.world_size,
            dtype=arithmetic.wire_dtype,
            scale=arithmetic.prescale,
            reports_absence=forbid_missing,
        )
        self.buckets = [Bucket(spec, parameters, specs, self._empty, wire) for spec in plan]
        self.bucket_of = {member: spec.index for spec in plan for member in spec.members}
        self._works: list[Work | None] = [None] * len(plan)
        self._priorities = list(range(len(plan)))[::-1]
        self._readiness = Readiness([spec.members for spec in plan])
        self._agreed = False
        self._checked: set[int] = set()
        self._widened: set[int] = set()
        self.closed = False
        self.joined = False  #: This rank has no data in this round.
        self.active = group.world_size  #: Ranks with data in the last round that was agreed on.
        self.round = 0
        self.resubmissions = 0

    def set_priorities(self, priorities: Mapping[int, int]) -> None:
        """Set the urgency of buckets by index; a smaller number leaves first.

        The last bucket always is as urgent as the most urgent one, because every other one waits for its
        word.
        """
        for index, priority in priorities.items():
            self._priorities[index] = priority
        if self.buckets:
            self._priorities[-1] = min(self._priorities)

    @property
    def buckets_members(self) -> list[tuple[int, ...]]:
        """The parameters of each bucket."""
        return [bucket.spec.members for bucket in self.buckets]

    @property
    def by_urgency(self) -> list[int]:
        """Indices of the buckets, the most urgent first."""
        return sorted(range(len(self.buckets)), key=lambda index: (self._priorities[index], -index))

    def begin(self, *, joined: bool = False) -> None:
        """Open a round. The previous one must be over: every bucket was waited for.

        ``joined``: this rank has no data any more and takes part for the sake of the others.
        """
        self.round += 1
        self.joined = joined
        self._stream.begin()
        self.closed = self._agreed = False
        self._checked.clear()
        self._widened.clear()
        self._works = [None] * len(self.buckets)
        self._readiness.begin()

    def ready(self, member: int) -> None:
        """A parameter's gradient was accumulated; its bucket leaves if that was the last it waited for."""
        for index in self._readiness.fired(member):
            if self._works[index] is None and index != len(self.buckets) - 1:
                self.buckets[index].capture()
                self._submit(index)

    def close(self) -> None:
        """Send what has not left, then the last bucket with the word on what changed since it left."""
        if self.closed:
            return
        changed: list[int] = []
        for index in self.by_urgency:
            bucket = self.buckets[index]
            if index == len(self.buckets) - 1:
                continue
            if self._works[index] is None:
                self._capture(bucket)
                self._submit(index)
            elif bucket.replaced():
                bucket.capture()
                changed.append(index)
        if self.buckets:
            self._capture(self.buckets[-1])
            self._submit(len(self.buckets) - 1, changed)
        self.closed = True
        if not self.joined:
            self._readiness.close()

    def _capture(self, bucket: Bucket) -> None:
        if self.joined:
            bucket.local = [None] * len(bucket.parameters)
        else:
            bucket.capture()

    def abandon(self) -> None:
        """End an open round without a result: what has not left is sent as nothing. Collective.

        The parameters' gradients stay this rank's own.
        """
        if not self.closed:
            for index, bucket in enumerate(self.buckets):
                if self._works[index] is None:
                    bucket.local = [None] * len(bucket.parameters)
                    self._submit(index)
            self.closed = True
        for index, bucket in enumerate(self.buckets):
            self._wait_reduced(index)
            bucket.release()

    def finish(self, active: int) -> int:
        """Wait for every bucket of a closed round, and install the reduced gradients."""
        for index in self.by_urgency:
            self._wait_reduced(index)
        try:
            for index in range(len(self.buckets)):
                self.wait(index)
            if not self.joined:
                for bucket in self.buckets:
                    for parameter, gradient in zip(bucket.parameters, bucket.reduced(), strict=True):
                        parameter.grad = gradient
        except MissingTensorError:
            for bucket in self.buckets:
                bucket.release()
            raise
        for bucket in self.buckets:
            bucket.release()
        return self.active if self.buckets else active

    def end(self) -> None:
        """Give the stream of planned reductions back."""
        self._stream.close()

    def wait(self, index: int) -> None:
        """Wait until one bucket of a closed round is final.

        Raises:
            MissingTensorError: On every rank, if the policy forbids that some ranks have no gradient.
            PeerLost: A rank died.
            DeadlineExceededError: It takes too long; may be called again.
        """
        self._wait_reduced(index)
        if self._forbid_missing and index not in self._checked:
            self._check_missing(index)
        self._checked.add(index)

    def _wait_reduced(self, index: int) -> None:
        if not self._agreed:
            self._agree_on_changes()
        work = self._works[index]
        assert work is not None, "the round was closed, so every bucket was submitted"
        work.wait()
        if index not in self._widened:
            self._widened.add(index)
            self.buckets[index].widen()
            self.buckets[index].rescale(self._arithmetic.postscale(self.active))

    def _submit(self, index: int, changed: Collection[int] = ()) -> None:
        bucket = self.buckets[index]
        bucket.pack(changed, joined=self.joined)
        self._works[index] = self._stream.submit(
            index, bucket.flat, op=self._arithmetic.op, priority=self._priorities[index]
        )

    def _empty(self, num_elements: int, /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._group.coordinator is None:  # a native library has no use for shared memory
            return self._group.empty(num_elements, dtype=dtype)
        return torch.empty(num_elements, dtype=dtype, device=device)

    def _agree_on_changes(self) -> None:
        if not self.buckets:
            self._agreed = True
            return
        last = self._works[-1]
        assert last is not None, "the round was closed, so the last bucket was submitted"
        last.wait()
        tail = self.buckets[-1].tail
        self.active = self._group.world_size - tail.num_joined()
        # By index: the order of submission has to be the same on all ranks, where urgency need not be.
        again = tail.changed()
        for index in again:
            work = self._works[index]
            assert work is not None
            work.wait()
        for index in again:
            if self.buckets[index].overwritten():
                raise ConfigurationError(
                    f"the gradients of bucket {index} are needed again, because they changed after backward, "
                    "but were overwritten after step(). Use optimizer.zero_grad() instead of "
                    "model.zero_grad(), or wrap all but the last backward of a step in optimizer.no_sync()."
                )
            self._submit(index)
            self.resubmissions += 1
        self._agreed = True

    def _check_missing(self, index: int) -> None:
        # Decided by numbers that are equal on all ranks, so all ranks enter the second allreduce or none
        # does.
        members = self.buckets[index].spec.members
        for position, missing in enumerate(self.buckets[index].tail.missing()):
            if not missing:
                continue
            missing_here = torch.zeros(self._group.world_size, dtype=torch.uint8)
            missing_here[self._group.rank] = self.buckets[index].local[position] is None and not self.joined
            name = f"{self.names[index]}/missing"
            self._group.control.allreduce(missing_here, name=name, op=ReduceOp.SUM, priority=0).wait()
            ranks = tuple(missing_here.nonzero().flatten().tolist())
            raise MissingTensorError(self.specs[members[position]].name, ranks, self.round)


def operation_names(plan: Sequence[BucketSpec], specs: Sequence[ParameterSpec]) -> list[str]:
    """By bucket. Timelines and stall reports show them, so they say whose gradients."""
    return [f"bucket{spec.index}[{_ends(spec, specs)}]" for spec in plan]


def _ends(bucket: BucketSpec, specs: Sequence[ParameterSpec]) -> str:
    first, last = specs[bucket.members[0]].name, specs[bucket.members[-1]].name
    return first if first == last else f"{first} .. {last}"
