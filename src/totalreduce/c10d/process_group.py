"""The process group that ``torch.distributed`` calls: c10d's methods in terms of ``Group``'s.

The base class comes from torch and is written in C++. Its Python methods are called by ``torch.distributed``; the C++ of
DistributedDataParallel and of the functional collectives calls the ones that torch's trampoline knows, which is why
both ``all_gather_single_coalesced`` and its siblings and the camel-cased ``getGroupName`` and its siblings are here.

Tensors of a device that another back end was asked for (``"cpu:totalreduce,cuda:nccl"``) are handed to that one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType, Store

from totalreduce.c10d import profiling
from totalreduce.c10d.callbacks import Callbacks
from totalreduce.c10d.errors import as_torch_error
from totalreduce.c10d.monitored import monitored_barrier
from totalreduce.c10d.reductions import arithmetic_view, reduction_of
from totalreduce.c10d.registration import BACKEND_NAME
from totalreduce.c10d.sparse import allreduce_sparse
from totalreduce.c10d.work import OperationWork
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.groups.work import Work

__all__ = ["ProcessGroupTotalReduce"]

Tensors = torch.Tensor | Sequence[torch.Tensor]

#: So many barriers may be under way at the same time; a tag is remembered for ever.
_MONITORED_TAGS = 64


@final
class ProcessGroupTotalReduce(dist.ProcessGroup):
    """A c10d process group over a ``Group``.

    Attributes:
        group: What it is made of; the library's own methods may be used beside torch's.
    """

    #: How ``torch.distributed.monitored_barrier`` tells our process groups.
    backend_of_totalreduce = True

    # What torch asks a ``Backend`` for; this object plays that part too (see ``_get_backend``).
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        group: Group,
        store: Store,
        timeout: timedelta,
        *,
        owned: bool,
        devices: Sequence[str],
        others: Mapping[str, dist.ProcessGroup],
        close_others: Callable[[], None],
    ) -> None:
        """Wrap a group.

        Args:
            group: Its ranks are those of the process group.
            store: What ``get_group_store`` returns.
            timeout: Deadline of operations that name none.
            owned: Whether the group ends with the process group; a subgroup does not end its parent either way.
            devices: Types of devices that the process group is responsible for, the others' included.
            others: Process groups for some of them, which have other back ends.
            close_others: Called at the end.
        """
        super().__init__(group.rank, group.world_size)
        self.group = group
        self._store = store
        self._timeout = timeout
        self._owned = owned
        self._devices = [torch.device(device) for device in devices]
        self._others = dict(others)
        self._close_others = close_others
        self._names = {"group": "", "description": ""}
        self._sequence = 0
        self._callbacks = Callbacks(f"totalreduce-{group.rank}")
        self._monitor = group.subgroup(range(group.world_size), name="monitored barriers")
        self._monitored = itertools.count()

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """In place; sparse tensors only with SUM."""
        tensor = _single(tensors, "allreduce")
        if other := self._other(tensor):
            return other.allreduce([tensor], _options(opts, dist.AllreduceOptions))
        op = reduction_of(_reduce_op(opts))
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, op, self._seconds(opts, timeout))
        number = arithmetic_view(tensor, op)
        return self._start(
            "all_reduce", [number], self._seconds(opts, timeout), lambda: [self.group.allreduce(number, op=op)], [tensor]
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Each tensor in place."""
        tensors = list(tensors)
        if other := self._other(tensors[0]):
            return other.allreduce_coalesced(tensors, _options(opts, dist.AllreduceCoalescedOptions))
        op = reduction_of(_reduce_op(opts))
        numbers = [arithmetic_view(tensor, op) for tensor in tensors]
        return self._start(
            "all_reduce",
            numbers,
            self._seconds(opts),
            lambda: [self.group.allreduce(number, op=op) for number in numbers],
            tensors,
        )

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Any:  # type: ignore[override]
        """In place on the root; the others' tensors stay as they are."""
        tensor = _single(tensors, "reduce")
        if other := self._other(tensor):
            return other.reduce([tensor], opts)
        kind = reduction_of(_reduce_op(opts) if op is None else op)
        number = arithmetic_view(tensor, kind)
        place = _root(opts, root)
        return self._start(
            "reduce",
            [number],
            self._seconds(opts, timeout),
            lambda: [self.group.reduce(number, root=place, op=kind)],
            [tensor],
        )

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Any:  # type: ignore[override]
        """In place."""
        tensor = _single(tensors, "broadcast")
        if other := self._other(tensor):
            return other.broadcast([tensor], opts)
        place = _root(opts, root)
        return self._start(
            "broadcast",
            [tensor],
            self._seconds(opts, timeout),
            lambda: [self.group.broadcast(tensor, root=place, async_op=True)],
            [tensor],
        )

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:  # type: ignore[override]
        """Every rank's tensor on every rank, as a list; sizes may differ."""
        tensor, listed = _single(inputs, "allgather"), _one_list(outputs)
        if other := self._other(tensor):
            return other.allgather([listed], [tensor], _options(opts, dist.distributed_c10d.AllgatherOptions))
        return self._start(
            "all_gather", [tensor], self._seconds(opts), lambda: [self.group.allgather(listed, tensor)], [listed]
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Every rank's tensor on every rank, one after the other in one tensor."""
        if other := self._other(input):
            return other.all_gather_single(output, input, _options(opts, dist.distributed_c10d.AllgatherOptions))
        return self._start(
            "all_gather", [input], self._seconds(opts), lambda: [self._gather_into(output, input)], output
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """``all_gather_single`` of several tensors."""
        outputs, inputs = list(outputs), list(inputs)
        if other := self._other(inputs[0]):
            return other.all_gather_single_coalesced(
                outputs, inputs, _options(opts, dist.distributed_c10d.AllgatherOptions)
            )
        return self._start(
            "all_gather",
            inputs,
            self._seconds(opts),
            lambda: [self._gather_into(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)],
            outputs,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:  # type: ignore[override]
        """``allgather`` of several tensors; ``outputs[rank][index]``."""
        if other := self._other(inputs[0]):
            return other.allgather_coalesced(outputs, inputs, _options(opts, dist.distributed_c10d.AllgatherOptions))
        return self._start(
            "all_gather",
            inputs,
            self._seconds(opts),
            lambda: [
                self.group.allgather([part[index] for part in outputs], tensor) for index, tensor in enumerate(inputs)
            ],
            outputs,
        )

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None, *, root: int | None = None) -> Any:  # type: ignore[override]
        """Every rank's tensor on the root."""
        tensor, place = _single(inputs, "gather"), _root(opts, root)
        if other := self._other(tensor):
            return other.gather(outputs, [tensor], opts)
        listed = _one_list(outputs) if self.group.rank == place else None
        return self._start(
            "gather",
            [tensor],
            self._seconds(opts),
            lambda: [self.group.gather(listed, tensor, root=place)],
            [listed] if listed is not None else [],
        )

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None, *, root: int | None = None) -> Any:  # type: ignore[override]
        """Each rank gets its one of the root's tensors."""
        tensor, place = _single(outputs, "scatter"), _root(opts, root)
        if other := self._other(tensor):
            return other.scatter([tensor], inputs, opts)
        listed = _one_list(inputs) if self.group.rank == place else None
        return self._start(
            "scatter",
            listed or [tensor],
            self._seconds(opts),
            lambda: [self.group.scatter(tensor, listed, root=place)],
            [tensor],
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Each rank gets its block of the sum; blocks may differ in size."""
        tensor, listed = _single(outputs, "reduce_scatter"), _one_list(inputs)
        if other := self._other(tensor):
            return other.reduce_scatter([tensor], [listed], _options(opts, dist.ReduceScatterOptions))
        op = reduction_of(_reduce_op(opts))
        blocks = [arithmetic_view(block, op) for block in listed]
        number = arithmetic_view(tensor, op)
        return self._start(
            "reduce_scatter",
            blocks,
            self._seconds(opts),
            lambda: [self.group.reduce_scatter(number, blocks, op=op)],
            [tensor],
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Each rank gets its share of the sum of one tensor."""
        if other := self._other(input):
            return other.reduce_scatter_single(output, input, _options(opts, dist.ReduceScatterOptions))
        op = reduction_of(_reduce_op(opts))
        return self._start(
            "reduce_scatter", [input], self._seconds(opts), lambda: [self._scatter_from(output, input, op)], output
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """``reduce_scatter_single`` of several tensors."""
        outputs, inputs = list(outputs), list(inputs)
        if other := self._other(inputs[0]):
            return other.reduce_scatter_single_coalesced(outputs, inputs, _options(opts, dist.ReduceScatterOptions))
        op = reduction_of(_reduce_op(opts))
        return self._start(
            "reduce_scatter",
            inputs,
            self._seconds(opts),
            lambda: [self._scatter_from(output, tensor, op) for output, tensor in zip(outputs, inputs, strict=True)],
            outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:  # type: ignore[override]
        """Tensor r of each rank goes to rank r."""
        outputs, inputs = list(outputs), list(inputs)
        if other := self._other(inputs[0]):
            return other.alltoall(outputs, inputs, _options(opts, dist.AllToAllOptions))
        return self._start(
            "all_to_all", inputs, self._seconds(opts), lambda: [self.group.alltoall(outputs, inputs)], outputs
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Slices of one tensor along its first dimension, to all ranks, from all ranks."""
        if other := self._other(input):
            options = _options(opts, dist.AllToAllOptions)
            return other.all_to_all_single(output, input, output_split_sizes, input_split_sizes, options)
        outputs = _split(output, output_split_sizes, self.group.world_size, "output")
        inputs = _split(input, input_split_sizes, self.group.world_size, "input")
        return self._start(
            "all_to_all", [input], self._seconds(opts), lambda: [self.group.alltoall(outputs, inputs)], output
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Everybody is here."""
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._others:
            return self._others[device.type].barrier(opts)
        word = torch.zeros(1, dtype=torch.uint8)
        return self._start(
            "barrier", [], self._seconds(opts, timeout), lambda: [self.group.allreduce(word, op=ReduceOp.MAX)], []
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which do not come (see ``monitored``).

        Args:
            timeout: ``timedelta`` or seconds; ``None``: the process group's.
            wait_all_ranks: Name all of them, not just the first.
        """
        span = self._timeout if timeout is None else timeout
        seconds = span.total_seconds() if isinstance(span, timedelta) else float(span)
        tag = next(self._monitored) % _MONITORED_TAGS
        monitored_barrier(self._monitor, tag, seconds, wait_all_ranks=wait_all_ranks)

    # ------------------------------------------------------------------------------------------------------ messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:  # type: ignore[override]
        """The n-th with a tag meets the n-th ``recv`` with it."""
        tensor = _single(tensors, "send")
        if other := self._other(tensor):
            return other.send([tensor], dst, tag)
        return self._start(
            "send", [tensor], self._seconds(None), lambda: [self.group.send(tensor, dst=dst, tag=tag)], [tensor]
        )

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:  # type: ignore[override]
        """From one rank."""
        tensor = _single(tensors, "recv")
        if other := self._other(tensor):
            return other.recv([tensor], src, tag)
        return self._start(
            "recv", [tensor], self._seconds(None), lambda: [self.group.recv(tensor, src=src, tag=tag)], [tensor]
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:  # type: ignore[override]
        """From whoever sends first; the handle's ``source_rank`` says who that was."""
        tensor = _single(tensors, "recv")
        if other := self._other(tensor):
            return other.recv_anysource([tensor], tag)
        return self._start(
            "recvAnySource", [tensor], self._seconds(None), lambda: [self.group.recv(tensor, src=None, tag=tag)], [tensor]
        )

    # -------------------------------------------------------------------------------------------------- what it is

    def getBackendName(self) -> str:  # noqa: N802
        """For torch's C++."""
        return BACKEND_NAME

    def getGroupName(self) -> str:  # noqa: N802
        """For torch's C++."""
        return self._names["group"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """For torch's C++."""
        self._names["group"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """For torch's C++."""
        return self._names["description"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """For torch's C++."""
        self._names["description"] = description

    def get_group_store(self) -> Store:
        """The store that the ranks met in."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind in self._others:
            return self._others[kind]._get_backend(device)
        if torch.device(kind) not in self._devices:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self

    @property
    def options(self) -> Backend.Options:
        """What torch reads the time-out from."""
        return Backend.Options(BACKEND_NAME, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of operations that name none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def get_error(self) -> ErrorType:
        """For torch's watchdogs."""
        return ErrorType.SUCCESS

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Connections stand since the group was made."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """Whether torch should ask for memory here."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # ------------------------------------------------------------------------------------------------------- ending

    def shutdown(self) -> None:
        """End; what is pending fails."""
        self._monitor.close()
        if self._owned:
            self.group.close()
        self._callbacks.close()
        self._close_others()

    abort = shutdown

    # ------------------------------------------------------------------------------------------------------ the rest

    def _start(
        self,
        title: str,
        tensors: Sequence[torch.Tensor],
        timeout_s: float,
        submit: Callable[[], list[Work]],
        result: Any,
        finish: Callable[[], None] | None = None,
    ) -> OperationWork:
        self._sequence += 1
        title = f"{BACKEND_NAME}:{title}"
        record = profiling.begin(title, tensors)
        try:
            works = submit()
        except TotalReduceError as error:
            if record is not None:
                record.end()
            if isinstance(error, ConfigurationError):
                raise
            raise as_torch_error(error, title) from error
        return OperationWork(
            works,
            result,
            title=title,
            timeout_s=timeout_s,
            callbacks=self._callbacks,
            record=record,
            finish=finish,
        )

    def _allreduce_sparse(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> OperationWork:
        if op is not ReduceOp.SUM:
            raise ValueError("allreduce of sparse tensors is a sum; other reductions are not defined")
        begin = time.monotonic()
        try:
            works, finish = allreduce_sparse(self.group, tensor, timeout_s)
        except TotalReduceError as error:
            raise as_torch_error(error, f"{BACKEND_NAME}:sparse_all_reduce") from error
        left_s = timeout_s - (time.monotonic() - begin)
        return self._start("sparse_all_reduce", [tensor], left_s, lambda: works, [tensor], finish)

    def _gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        if output.dtype != tensor.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if output.numel() != self.group.world_size * tensor.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        return self.group.allgather(output, tensor)

    def _scatter_from(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> Work:
        if tensor.numel() != self.group.world_size * output.numel():
            raise ValueError("input tensor must be the same size as output size times world size")
        number = arithmetic_view(tensor.contiguous(), op)
        return self.group.reduce_scatter(arithmetic_view(output, op), number, op=op)

    def _other(self, tensor: torch.Tensor) -> Any:
        """The process group of another back end, if the tensor's device has one."""
        return self._others.get(tensor.device.type) if self._others else None

    def _seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Deadline: the call's, else the options', else the process group's."""
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        # Options that name none say minus one millisecond.
        return (self._timeout if given is None or given < timedelta(0) else given).total_seconds()


def _options(opts: Any, kind: Any) -> Any:
    """Options for another back end: made from a bare reduction, or the defaults, where the caller gave none."""
    if hasattr(opts, "timeout"):
        return opts
    made = kind()
    if opts is not None:
        made.reduceOp = opts
    return made


def _reduce_op(opts: Any) -> Any:
    """The reduction: of the options, or given in their place; SUM by default."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _root(opts: Any, root: int | None) -> int:
    """The root's rank in the group: of the options, or given in their place."""
    if root is not None:
        return root
    if opts is None:
        return 0
    return int(getattr(opts, "rootRank", opts))


def _single(tensors: Tensors, what: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"totalreduce: {what} takes one tensor per rank, not {len(tensors)}")
    return tensors[0]


def _one_list(tensors: Any) -> list[torch.Tensor]:
    """The list in ``[[...]]``, or the one given without the outer list."""
    listed: Iterable[Any] = tensors
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        listed = tensors[0]
    return list(listed)


def _split(tensor: torch.Tensor, sizes: Sequence[int] | None, world_size: int, what: str) -> list[torch.Tensor]:
    """Slices along the first dimension."""
    if not tensor.is_contiguous():
        raise ValueError(f"the {what} of all_to_all_single must be contiguous")
    rows = tensor.size(0) if tensor.dim() else 0
    if not sizes:
        if rows % world_size:
            raise ValueError(f"the {what}'s dim 0 ({rows}) does not divide equally across group size {world_size}")
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise ValueError(f"{what} splits {list(sizes)} must be {world_size} numbers whose sum is dim 0, {rows}")
    return list(tensor.split(list(sizes)))
