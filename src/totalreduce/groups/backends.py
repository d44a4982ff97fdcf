"""How a group carries its collectives out: by the engine, or by a native library; ``mesh`` has both in one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.groups import checked
from totalreduce.groups.checked import Blocks, CheckedOperation, Member
from totalreduce.groups.operations import Operations, PreparedOperation, check_not_in_callback
from totalreduce.groups.options import Options
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.operation import flattened
from totalreduce.native.planned import PlannedReductions
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import Operands
from totalreduce.tensors.work import Work

__all__ = ["Backend", "EngineBackend", "NativeBackend"]

#: How many names keep their last allreduce (some hundred bytes each).
_KNOWN_MAX: Final = 1024


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


@never_compiled
class EngineBackend:
    """``Backend`` by the engine, in any order and by the schedules of this package."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._rank, self._staging = operations.rank, operations.staging
        self._member = Member(operations.rank, operations.world_size, operations.staging)
        #: By name: the last allreduce, unless it has failed. An operation that has failed may still hold its memory.
        self._known: OrderedDict[str, PreparedOperation] = OrderedDict()

    @property
    def coordinator(self) -> Coordinator | None:
        return None

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> Work:
        name = options.name
        known = self._known.get(name) if isinstance(name, str) else None
        if known is not None and known.is_allreduce_of(tensor, op, options):
            return known.start_on(tensor, self._known)
        operation = checked.reduction(
            OpKind.ALLREDUCE,
            tensor,
            options.shown,
            op=op,
            root=0,
            algorithm=options.algorithm,
            writes=True,
            staging=self._staging,
        )
        place = None if name is None or operation.operands is None else operation.operands.place
        if name is None or place is None:
            return self._submit(operation, options)
        try:
            known = self._known[name] = PreparedOperation(self._operations, operation, options, place)
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
            return known.start_on(tensor, self._known, operation.operands)
        except BaseException:
            self._known.pop(name, None)
            raise

    def prepare_allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> PreparedOperation:
        name, algorithm = options.shown, options.algorithm
        signature = checked.reduction_signature(OpKind.ALLREDUCE, tensor, name, op=op, algorithm=algorithm)
        operands = Operands(name, repeats=True, staging=self._staging)
        return self._prepare(checked.in_place(signature, tensor, operands), options)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        writes = self._rank == root
        operation = checked.reduction(
            OpKind.REDUCE, tensor, name, op=op, root=root, algorithm=algorithm, writes=writes, staging=self._staging
        )
        return self._submit(operation, options)

    def broadcast(self, tensor: torch.Tensor, root: int, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        writes = self._rank != root
        return self._submit(
            checked.broadcast(tensor, name, root=root, algorithm=algorithm, writes=writes, staging=self._staging),
            options,
        )

    def allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        operation = checked.allgather(outputs, tensor, name, self._member, algorithm=algorithm)
        return self._submit(operation, options)

    def prepare_allgather(self, outputs: Blocks, tensor: torch.Tensor, options: Options) -> PreparedOperation:
        name, algorithm = options.shown, options.algorithm
        operation = checked.allgather(outputs, tensor, name, self._member, algorithm=algorithm, repeats=True)
        return self._prepare(operation, options)

    def reduce_scatter(self, tensor: torch.Tensor, inputs: Blocks, op: ReduceOp, options: Options) -> Work:
        name, algorithm = options.shown, options.algorithm
        operation = checked.reduce_scatter(tensor, inputs, name, self._member, op=op, algorithm=algorithm)
        return self._submit(operation, options)

    def gather(self, outputs: Blocks | None, tensor: torch.Tensor, root: int, options: Options) -> Work:
        operation = checked.gather(outputs, tensor, options.shown, self._member, root=root)
        return self._submit(operation, options)

    def scatter(self, tensor: torch.Tensor, inputs: Blocks | None, root: int, options: Options) -> Work:
        operation = checked.scatter(tensor, inputs, options.shown, self._member, root=root)
        return self._submit(operation, options)

    def alltoall(self, outputs: Blocks, inputs: Blocks, options: Options) -> Work:
        operation = checked.alltoall(outputs, inputs, options.shown, self._member)
        return self._submit(operation, options)

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        return _UnorderedReductions(EngineBackend(self._operations.within("planned")), names)

    def close(self, timeout_s: float, reason: str) -> None:
        """The group closes the engine itself."""

    def _submit(self, operation: CheckedOperation, options: Options) -> Work:
        return self._operations.submit(operation, options.name, options.priority, options.timeout_s)

    def _prepare(self, operation: CheckedOperation, options: Options) -> PreparedOperation:
        check_not_in_callback(options.name)
        return PreparedOperation(self._operations, operation, options)


@final
@never_compiled
class _UnorderedReductions:
    """``PlannedReductions`` by the engine, which needs no order and no rounds.

    A tensor is checked and prepared when it is submitted for the first time. In later rounds the operation is started
    again.
    """

    def __init__(self, backend: EngineBackend, names: Sequence[str]) -> None:
        self._backend, self._options = backend, [Options(checks.operation_name(name)) for name in names]
        self._prepared: list[PreparedOperation | None] = [None] * len(names)

    def begin(self) -> None:
        """Nothing to prepare."""

    def submit(self, index: int, tensor: torch.Tensor, *, op: ReduceOp, priority: int) -> Work:
        prepared, options = self._prepared[index], self._options[index]
        if options.priority != priority:
            options = self._options[index] = options._replace(priority=priority)
        if prepared is None or not prepared.is_allreduce_of(tensor, op, options):
            prepared = self._prepared[index] = self._backend.prepare_allreduce(tensor, op, options)
        return prepared.start_on(tensor)

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
