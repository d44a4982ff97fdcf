"""The reducer of dense gradients: buckets leave during backward, and those that change afterwards are sent again.

Rule 1: a round reduces the gradients as they are when it is *closed* (at ``step()`` or ``synchronize()``). A bucket
that leaves earlier, from a gradient hook, is speculation that nearly always holds.

Rule 2: every rank sends every bucket exactly once per round, with zeros for the gradients that it does not have, and
whatever branches its model took. So the ranks need not agree on what is ready, and no rank waits for a gradient that
another rank's model did not use.

Rule 3: the last bucket of the plan is sent only when the round is closed. Its tail says which other buckets changed on
this rank after they had left (by a second backward pass, ``zero_grad()``, clipping by hand). Once it is reduced, it
tells every rank the same set of buckets to send again. The last bucket holds the first registered parameters, whose
gradients backward makes last. So holding it back usually costs no time, and the agreement costs no message of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch

from totalreduce.foundation.errors import ConfigurationError, MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.buckets import Bucket, BucketSpec, ParameterSpec, WireFormat
from totalreduce.pytorch.deferred import Update
from totalreduce.pytorch.round import BucketReadiness, GradientReducer
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.freed import give_back_freed_memory
from totalreduce.tensors.work import Work

__all__ = ["Arithmetic", "ChangeWatch", "Reducer"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The factors and the operation by which the gradients of all ranks become one."""

    op: ReduceOp  #: The operation of the library that reduces, ``AVG`` or ``SUM``.
    world_size: int
    prescale: float  #: Factor before the reduction.
    wire_dtype: torch.dtype | None  #: The dtype to which gradients are cast while they travel; ``None``: they are not.
    #: Whether averages are divided by the number of ranks that have data, not by the world size.
    divide_by_active: bool
    rest: float  #: Factor after the reduction that completes an average of all ranks; 1.0 if nothing is left to do.
    averages: bool  #: Whether the result is an average.

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
        """Split a sum or an average into a factor before, the library's operation, and a factor after it.

        Args:
            op: ``AVG`` or ``SUM``: the result.
            world_size: Number of ranks.
            predivide: Averages are divided by this before the sum, and by the rest of the world size after it.
            wire_dtype: As in the class.
            divide_by_active: As in the class.
            native: Whether a native library reduces. It has sums only, and dividing while the gradients are copied into
                the bucket saves it a pass.
        """
        averages = op is ReduceOp.AVG
        if averages and native and predivide == 1.0:
            predivide = float(world_size)
        if averages and predivide != 1.0:
            scale, rest = 1.0 / predivide, predivide / world_size
            return cls(ReduceOp.SUM, world_size, scale, wire_dtype, divide_by_active, rest, averages)
        return cls(op, world_size, 1.0, wire_dtype, divide_by_active, 1.0, averages)

    def postscale(self, active: int) -> float:
        """Return the factor after the reduction, of the number of ranks with data."""
        if self.averages and self.divide_by_active and 0 < active < self.world_size:
            return self.rest * self.world_size / active
        return self.rest


@final
class ChangeWatch:
    """Notices that the program changes gradients while they are still this rank's own.

    Args:
        parameters: The parameters.
        names: Their names.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        #: By index: the gradient as the last backward pass has left it, by its identity and its count of changes.
        self._noted: dict[int, tuple[int, int]] = {}
        self._has_warned = False

    def note(self) -> None:
        """Note the gradients at the end of a backward pass."""
        grads = ((index, parameter.grad) for index, parameter in enumerate(self._parameters))
        self._noted = {index: (id(grad), grad._version) for index, grad in grads if grad is not None}

    def forget(self) -> None:
        """Forget the noted gradients: they leave as they are, or the program has reset them."""
        self._noted.clear()

    def warn(self) -> None:
        """Warn once if the program has changed one, unless to zeros: a program may leave its own gradients out."""
        for index, noted in self._noted.items():
            grad = self._parameters[index].grad
            if self._has_warned or grad is None or (id(grad), grad._version) == noted or not bool(grad.any()):
                continue
            self._has_warned = True
            warnings.warn(
                f"the gradient of {self._names[index]!r} was changed between backward() and step(), while it was still "
                "this rank's own, not the average of all ranks. To change (clip, unscale) the gradients of all ranks, "
                "as with DistributedDataParallel, call optimizer.synchronize() first",
                RuntimeWarning,
                stacklevel=5,
            )


@dataclass(slots=True)
class _RoundState:
    """How far a round of a reducer has come."""

    joined: bool = False  #: Whether this rank takes part without data.
    again: bool = False  #: Whether this rank has finished a round since its last step.
    closed: bool = False  #: Whether all buckets have left.
    agreed: bool = False  #: Whether the buckets that changed on any rank have left again.
    missing: Work | None = None  #: In a round with a missing gradient: the exchange of the ranks that miss it.


@never_compiled
class Reducer(GradientReducer):
    """The buckets of one plan."""

    readiness: BucketReadiness

    def __init__(
        self,
        group: Group,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        plan: Sequence[BucketSpec],
        *,
        arithmetic: Arithmetic,
        forbid_missing: bool,
    ) -> None:
        self._group, self._arithmetic = group, arithmetic
        self.parameters = parameters
        #: Notices that the program changes gradients which are still this rank's own.
        self.watch = ChangeWatch(parameters, [spec.name for spec in specs])
        wire = WireFormat(
            group.rank,
            group.world_size,
            dtype=arithmetic.wire_dtype,
            scale=arithmetic.prescale,
            reports_absence=forbid_missing,
        )
        self.buckets = [Bucket(spec, parameters, specs, self._empty, wire) for spec in plan]
        for index, bucket in enumerate(reversed(self.buckets)):
            bucket.priority = index
        #: Timelines and stall reports show the names of operations, so they have parameters' names.
        self.names = [f"{name}.bucket{bucket.spec.index}[{_ends(bucket)}]" for bucket in self.buckets]
        self._stream = group.planned(self.names)
        self.readiness = BucketReadiness([spec.members for spec in plan])
        self._state = _RoundState()
        #: The ranks with data in the last round, in ascending order.
        self.active_ranks = tuple(range(group.world_size))
        self._postscale = 1.0
        self.round = 0  #: The number of rounds that were opened.
        self.resubmissions = 0  #: The number of buckets that were sent twice.

    def set_priorities(self, priorities: Mapping[int, int]) -> None:
        """Set the priorities of buckets.

        The last bucket always has that of the most urgent one, because all others wait for its tail.
        """
        for index, priority in priorities.items():
            self.buckets[index].priority = priority
        if self.buckets:
            self.buckets[-1].priority = min(bucket.priority for bucket in self.buckets)

    @property
    def buckets_members(self) -> list[tuple[int, ...]]:
        """The members of each bucket."""
        return [bucket.spec.members for bucket in self.buckets]

    @property
    def by_urgency(self) -> list[int]:
        """Indices of the buckets, the most urgent first."""
        return sorted(range(len(self.buckets)), key=lambda index: (self.buckets[index].priority, -index))

    def begin(self, *, joined: bool = False, again: bool = False) -> None:
        """Open a round."""
        self.round += 1
        self._state = _RoundState(joined, again)
        self._stream.begin()
        for bucket in self.buckets:
            bucket.begin()
        self.readiness.begin()

    def ready(self, member: int) -> None:
        """Send the bucket of the parameter if it waited for no other gradient, and is not the last one."""
        for index in self.readiness.fired(member):
            bucket = self.buckets[index]
            if bucket.work is None and bucket is not self.buckets[-1]:
                bucket.capture()
                self._submit(index)

    def close(self) -> None:
        """Send the buckets that have not left, and then the last bucket, which lists those that changed since."""
        if self._state.closed:
            return
        changed: list[int] = []
        last = len(self.buckets) - 1
        for index in self.by_urgency:
            bucket = self.buckets[index]
            if index == last:
                continue
            if bucket.work is None:
                bucket.capture(empty=self._state.joined)
                self._submit(index)
            elif bucket.replaced():
                bucket.capture()
                changed.append(index)
        if self.buckets:
            self.buckets[last].capture(empty=self._state.joined)
            self._submit(last, changed)
        self._state.closed = True
        self.watch.forget()
        if not self._state.joined:
            self.readiness.close()

    def abandon(self) -> None:
        """End an open round without a result: buckets that have not left are sent without gradients."""
        if not self._state.closed:
            for index, bucket in enumerate(self.buckets):
                if bucket.work is None:
                    bucket.capture(empty=True)
                    self._submit(index)
            self._state.closed = True
            self.readiness.close()
        for index, bucket in enumerate(self.buckets):
            self.wait(index)
            bucket.release()

    def finish(self, active: int) -> int:
        """Wait for every bucket of a closed round."""
        for index in self.by_urgency:
            self.wait(index)
        try:
            for index in range(len(self.buckets)):
                self._check_missing(index)
        except MissingTensorError:
            for bucket in self.buckets:
                bucket.release()
            raise
        return len(self.active_ranks) if self.buckets else active

    def install(self) -> None:
        """Replace the gradients by the reduced ones, unless this rank has joined."""
        for bucket in self.buckets:
            if not self._state.joined:
                for parameter, gradient in zip(bucket.parameters, bucket.reduced(), strict=True):
                    parameter.grad = gradient
            bucket.release()
        if self.round == 1:
            # The gradients of the first backward pass are free now, and the construction of the model and the first
            # forward pass have freed memory between them, which later passes do not use.
            give_back_freed_memory()

    def take(self, index: int) -> list[Update]:
        """Wait for one bucket of a closed round; return the updates that its gradients make. Errors as of ``wait``."""
        self.wait(index)
        bucket = self.buckets[index]
        return [
            Update(parameter, gradient, gradient if bucket.same_local(position) else parameter.grad)
            for position, (parameter, gradient) in enumerate(zip(bucket.parameters, bucket.reduced(), strict=True))
        ]

    def once(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: nobody checks whether an update was interrupted."""
        return nullcontext()

    def release(self, index: int) -> None:
        """End the part that one bucket has in the round."""
        self.buckets[index].release()

    def gradients_needed(self, index: int) -> list[torch.Tensor]:
        """Return the gradients of this rank that are sent again if the bucket has changed on another rank."""
        return [gradient for gradient in self.buckets[index].local if gradient is not None]

    def end(self) -> None:
        """Give the stream of planned reductions back."""
        self._stream.close()

    def wait(self, index: int) -> None:
        """Wait until one bucket of a closed round is reduced.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``; may be called again.
        """
        if not self._state.agreed:
            self._resubmit_changed()
        self.buckets[index].complete(self._postscale)

    def _submit(self, index: int, changed: Collection[int] = ()) -> None:
        bucket = self.buckets[index]
        flat = bucket.pack(changed, joined=self._state.joined, again=self._state.again)
        bucket.work = self._stream.submit(index, flat, op=self._arithmetic.op, priority=bucket.priority)

    def _empty(self, num_elements: int, /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and self._group.coordinator is None:  # a native library has no use for shared memory
            return self._group.empty(num_elements, dtype=dtype)
        return torch.empty(num_elements, dtype=dtype, device=device)

    def _resubmit_changed(self) -> None:
        """Wait for the last bucket, and send the buckets again that changed on any rank after they had left."""
        last = self.buckets[-1]
        last.wait()
        if last.tail.are_in_different_rounds():
            raise ConfigurationError(
                "since the last step() some ranks have called backward() more often than others, and their gradients "
                "would be mixed. With overlap='backward' each backward pass synchronises, as with "
                "DistributedDataParallel: write `with optimizer.no_sync():` around all but the last backward pass of a "
                "step, or build the optimizer with overlap='step', with which each step() synchronises once. This "
                "optimizer cannot go on"
            )
        joined = last.tail.joined()
        self.active_ranks = tuple(rank for rank in range(self._group.world_size) if rank not in joined)
        self._postscale = self._arithmetic.postscale(len(self.active_ranks))
        # By index: the order of submission has to be the same on all ranks, and priorities need not be.
        again = last.tail.changed()
        for index in again:
            work = self.buckets[index].work
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
        self._state.agreed = True

    def _check_missing(self, index: int) -> None:
        # The flags are equal on all ranks, so all ranks enter the second allreduce, or none does.
        bucket = self.buckets[index]
        for position, missing in enumerate(bucket.tail.missing()):
            if not missing:
                continue
            if self._state.missing is None:  # otherwise an earlier call ran out of time here
                missing_here = torch.zeros(self._group.world_size, dtype=torch.uint8, device="cpu")
                missing_here[self._group.rank] = bucket.local[position] is None and not self._state.joined
                name = f"{self.names[index]}/missing"
                self._state.missing = self._group.control.allreduce(
                    missing_here, name=name, op=ReduceOp.SUM, priority=0
                )
            ranks = tuple(self._state.missing.wait().nonzero().flatten().tolist())
            raise MissingTensorError(bucket.specs[position].name, ranks, self.round)


def _ends(bucket: Bucket) -> str:
    first, last = bucket.specs[0].name, bucket.specs[-1].name
    return first if first == last else f"{first} .. {last}"
