"""The two ways in which a group carries its collectives out: by the engine, or by a native library."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, final

import torch

from totalreduce.engine.submission import Submission
from totalreduce.foundation import checks
from totalreduce.foundation.call_names import UNNAMED
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, OpKind, ReduceOp
from totalreduce.groups import checked
from totalreduce.groups.calling import call_here
from totalreduce.groups.checked import Blocks, CheckedOperation
from totalreduce.groups.operations import Operations, PreparedOperation
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.operation import flattened
from totalreduce.native.planned import PlannedReductions
from totalreduce.schedules import SCHEDULES
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import Operands, Place, is_plain
from totalreduce.tensors.work import Work

__all__ = ["Backend", "EngineBackend", "NativeBackend", "Options"]

#: How many names keep their last allreduce (``_Known``, some hundred bytes).
_KNOWN_MAX: Final = 1024


class Options(NamedTuple):
    """The arguments that all collectives have (see ``Group.allreduce``)."""

    name: str | None = None
    schedule: str = "auto"
    priority: int = 0
    timeout_s: float | None = None

    @property
    def shown(self) -> str:
        """The name in messages; checked."""
        return call_here.get()[0] or UNNAMED if self.name is None else checks.operation_name(self.name)

    @property
    def algorithm(self) -> str:
        """The name of the schedule as the engine knows it; checked."""
        if self.schedule == "auto":  # most operations
            return "auto"
        name = self.schedule.lower() if isinstance(self.schedule, str) else self.schedule
        if name != Algorithm.AUTO and name not in SCHEDULES:
            nearest = checks.did_you_mean(name, ("auto", *SCHEDULES))
            raise ConfigurationError(
                f"schedule {self.schedule!r} is not known{nearest}; there are auto, {', '.join(SCHEDULES)}"
            )
        return name


class Backend(Protocol):
    """Carries out the collectives of one group. Methods return at once; arguments are those of ``Group``."""

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator of the native library; ``None`` for the engine."""

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> Work:
        """Reduce over all ranks, in place."""

    def prepare_allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> PreparedOperation:
        """Return an allreduce that can be started again and again."""

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, options: Options) -> Work:
        """Reduce into the root's tensor."""

    def broadcast(self, tensor: torch.Tensor, root: int, options: Options) -> Work:
        """Copy the root's tensor to all ranks."""

    def allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> Work:
        """Collect every rank's tensor on every rank."""

    def prepare_allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> PreparedOperation:
        """Return an allgather that can be started again and again."""

    def reduce_scatter(self, tensor: torch.Tensor, inputs: Blocks, op: ReduceOp, options: Options) -> Work:
        """Reduce every rank's block into that rank's tensor."""

    def gather(self, outputs: Blocks | None, tensor: torch.Tensor, root: int, options: Options) -> Work:
        """Collect every rank's tensor on the root."""

    def scatter(self, tensor: torch.Tensor, inputs: Blocks | None, root: int, options: Options) -> Work:
        """Give every rank its block of the root's inputs."""

    def alltoall(self, outputs: Blocks, inputs: Blocks, options: Options) -> Work:
        """Give block r of the inputs to rank r."""

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        """Reductions that come again in every round. Collective where the library needs one order."""

    def close(self, timeout_s: float, reason: str) -> None:
        """End the back end; its operations in flight fail."""


@final
@never_compiled
class _Known:
    """The last allreduce of a name, which was checked and has ended well, for further ones with the same arguments.

    It keeps no tensor, and no memory of one: an operation that has failed may still hold its memory, so it is not kept.

    Attributes:
        name: The name of the operation.
        submission: What is submitted again.
        patience_s: The time-out of ``Work.wait``, in seconds.
    """

    __slots__ = ("_op", "_options", "_place", "_shape", "_tensor", "_type", "name", "patience_s", "submission")

    def __init__(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        options: Options,
        place: Place,
        submission: Submission,
        patience_s: float,
    ) -> None:
        self._tensor, self._op, self._options, self._place = weakref.ref(tensor), op, options, place
        self._shape, self._type, self.name = tensor.shape, tensor.dtype, place.name
        self.submission, self.patience_s = submission, patience_s

    def fits(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> bool:
        """Return whether the arguments are the same, and the tensor lies where it did."""
        return (
            self._tensor() is tensor
            and self._op is op
            and self._options == options
            and tensor.data_ptr() == self._place.span.start
            and tensor.dtype is self._type
            and tensor.shape == self._shape
            and is_plain(tensor)
        )

    def operation(self, tensor: torch.Tensor) -> CheckedOperation:
        """Return the next operation on the tensor, for which ``fits`` has returned true."""
        submission = self.submission
        return CheckedOperation(submission.signature, submission.buffers, Operands.again(self._place, tensor), tensor)


@final
@never_compiled
class EngineBackend:
    """``Backend`` by the engine, in any order and by the schedules of this package."""

    coordinator = None

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._rank, self._size = operations.rank, operations.world_size
        #: By name: the last allreduce. One that is in flight is not here; when it has ended well, it is the newest.
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> Work:
        name = options.name
        known = self._known.pop(name, None) if isinstance(name, str) else None
        if known is not None and known.fits(tensor, op, options):
            operation = known.operation(tensor)
        else:
            operation = checked.reduction(
                OpKind.ALLREDUCE, tensor, options.shown, op=op, root=0, algorithm=options.algorithm, writes=True
            )
            place = None if operation.operands is None else operation.operands.place
            if name is None or place is None:
                return self._submit(operation, options)
            submitted = self._operations.submission(operation, name, options.priority, options.timeout_s)
            known = _Known(tensor, op, options, place, *submitted)
        assert operation.operands is not None
        operation.operands.then = functools.partial(self._keep, known)
        return self._operations.start(operation, known.submission, known.patience_s)

    def _keep(self, known: _Known) -> None:
        """Keep an allreduce that has ended well, in place of the oldest one if there are too many."""
        if len(self._known) >= _KNOWN_MAX:
            self._known.popitem(last=False)
        self._known[known.name] = known

    def prepare_allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> PreparedOperation:
        name, algorithm = options.shown, options.algorithm
        signature = checked.reduction_signature(OpKind.ALLREDUCE, tensor, name, op=op, algorithm=algorithm)
        operation = checked.in_place(signature, tensor, name, repeats=True)
        return self._operations.prepare(operation, options.name, options.priority, options.timeout_s)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        writes = self._rank == root
        operation = checked.reduction(OpKind.REDUCE, tensor, name, op=op, root=root, algorithm=algorithm, writes=writes)
        return self._submit(operation, options)

    def broadcast(self, tensor: torch.Tensor, root: int, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        writes = self._rank != root
        return self._submit(checked.broadcast(tensor, name, root=root, algorithm=algorithm, writes=writes), options)

    def allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        operation = checked.allgather(outputs, tensor, name, rank=self._rank, size=self._size, algorithm=algorithm)
        return self._submit(operation, options)

    def prepare_allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> PreparedOperation:
        name, algorithm = options.shown, options.algorithm
        operation = checked.allgather(
            outputs, tensor, name, rank=self._rank, size=self._size, algorithm=algorithm, repeats=True
        )
        return self._operations.prepare(operation, options.name, options.priority, options.timeout_s)

    def reduce_scatter(self, tensor: torch.Tensor, inputs: Blocks, op: ReduceOp, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        operation = checked.reduce_scatter(
            tensor, inputs, name, op=op, rank=self._rank, size=self._size, algorithm=algorithm
        )
        return self._submit(operation, options)

    def gather(self, outputs: Blocks | None, tensor: torch.Tensor, root: int, options: Options) -> Work:
        operation = checked.gather(outputs, tensor, options.shown, rank=self._rank, size=self._size, root=root)
        return self._submit(operation, options)

    def scatter(self, tensor: torch.Tensor, inputs: Blocks | None, root: int, options: Options) -> Work:
        operation = checked.scatter(tensor, inputs, options.shown, rank=self._rank, size=self._size, root=root)
        return self._submit(operation, options)

    def alltoall(self, outputs: Blocks, inputs: Blocks, options: Options) -> Work:
        operation = checked.alltoall(outputs, inputs, options.shown, rank=self._rank, size=self._size)
        return self._submit(operation, options)

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        return _UnorderedReductions(self._operations.within("planned"), names)

    def close(self, timeout_s: float, reason: str) -> None:
        """The group closes the engine itself."""

    def _submit(self, operation: CheckedOperation, options: Options) -> Work:
        return self._operations.submit(operation, options.name, options.priority, options.timeout_s)


@final
@never_compiled
class _UnorderedReductions:
    """``PlannedReductions`` by the engine, which needs no order and no rounds.

    A tensor is checked and prepared when it is submitted for the first time. In later rounds the operation is started
    again.
    """

    def __init__(self, operations: Operations, names: Sequence[str]) -> None:
        self._operations, self._names = operations, [checks.operation_name(name) for name in names]
        self._prepared: list[PreparedOperation | None] = [None] * len(names)

    def begin(self) -> None:
        """Nothing to prepare."""

    def submit(self, index: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:
        prepared = self._prepared[index]
        if prepared is None or not prepared.is_allreduce_of(tensor, op, priority):
            name = self._names[index]
            signature = checked.reduction_signature(OpKind.ALLREDUCE, tensor, name, op=op)
            operation = checked.in_place(signature, tensor, name, repeats=True)
            prepared = self._prepared[index] = self._operations.prepare(operation, name, priority)
        return prepared.start()

    def close(self) -> None:
        """Nothing to release."""


@final
@never_compiled
class NativeBackend:
    """``Backend`` by a native library, whose calls a coordinator orders."""

    def __init__(self, coordinator: Coordinator, rank: int) -> None:
        self.coordinator = coordinator
        self._rank, self._size = rank, coordinator.natives.world_size

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> Work:
        return self.coordinator.allreduce(tensor, op=op, **_shared(options))

    def prepare_allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> PreparedOperation:
        raise _unprepared(options, "allreduce")

    def prepare_allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> PreparedOperation:
        raise _unprepared(options, "allgather")

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, options: Options) -> Work:
        return self.coordinator.reduce(tensor, root=root, op=op, **_shared(options))

    def broadcast(self, tensor: torch.Tensor, root: int, options: Options) -> Work:
        return self.coordinator.broadcast(tensor, root=root, **_shared(options))

    def allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> Work:
        listed = checked.list_blocks(outputs, self._size, options.shown, "outputs")
        flat, parts = flattened(tensor)
        return self.coordinator.allgather(flat, outputs=listed, parts=parts, **_shared(options))

    def reduce_scatter(self, tensor: torch.Tensor, inputs: Blocks, op: ReduceOp, options: Options) -> Work:
        parts = checked.list_blocks(inputs, self._size, options.shown, "inputs")
        if any(part.numel() != tensor.numel() for part in parts):
            raise ConfigurationError(f"{options.shown!r}: the native library takes equal blocks only")
        stacked = tensor.new_empty(self._size, tensor.numel())
        return self.coordinator.reduce_scatter(stacked, op=op, outputs=[tensor], parts=parts, **_shared(options))

    def alltoall(self, outputs: Blocks, inputs: Blocks, options: Options) -> Work:
        listed = checked.list_blocks(outputs, self._size, options.shown, "outputs")
        parts = checked.list_blocks(inputs, self._size, options.shown, "inputs")
        splits = [part.numel() for part in parts]
        row = parts[0].new_empty(sum(splits))
        return self.coordinator.alltoall(row, splits, outputs=listed, parts=parts, **_shared(options))

    def gather(self, outputs: Blocks | None, tensor: torch.Tensor, root: int, options: Options) -> Work:
        listed = self._root_blocks(outputs, tensor, root, options, "outputs")
        return self.coordinator.gather(tensor, outputs=listed, root=root, **_shared(options))

    def scatter(self, tensor: torch.Tensor, inputs: Blocks | None, root: int, options: Options) -> Work:
        parts = self._root_blocks(inputs, tensor, root, options, "inputs")
        return self.coordinator.scatter(tensor, inputs=parts, root=root, **_shared(options))

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        return self.coordinator.planned(names)

    def close(self, timeout_s: float, reason: str) -> None:
        self.coordinator.close(timeout_s, reason=reason)

    def _root_blocks(
        self, blocks: Blocks | None, tensor: torch.Tensor, root: int, options: Options, what: str
    ) -> list[torch.Tensor] | None:
        return checked.root_blocks(
            blocks, tensor, options.shown, what=what, rank=self._rank, size=self._size, root=root
        )


def _unprepared(options: Options, kind: str) -> ConfigurationError:
    return ConfigurationError(
        f"{options.shown!r}: a native library has no prepared operations; use {kind}, or collectives='engine'"
    )


def _shared(options: Options) -> dict[str, Any]:
    """Return the options that a coordinator takes."""
    if options.schedule != "auto":
        raise ConfigurationError(f"schedule {options.schedule!r}: a native library chooses its schedules by itself")
    return {"name": options.name, "priority": options.priority, "timeout_s": options.timeout_s}
