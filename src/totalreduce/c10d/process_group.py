"""The process group that ``torch.distributed`` calls: c10d's methods in terms of ``Group``'s.

The base class comes from torch and is written in C++. Its Python methods are called by ``torch.distributed``; the C++
of DistributedDataParallel and of the functional collectives calls those that torch's trampoline knows, which is why
there are camel-cased ones (``getGroupName``) here.

Tensors of a device that another back end was asked for (``"cpu:totalreduce,cuda:nccl"``) are handed to that one. CUDA
tensors without one go through pinned memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from totalreduce.c10d import profiling
from totalreduce.c10d.callbacks import Callbacks
from totalreduce.c10d.errors import as_torch_error
from totalreduce.c10d.monitored import monitored_barrier
from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.pinned_memory import Stager
from totalreduce.c10d.reductions import arithmetic_view, reduction_of
from totalreduce.c10d.sparse import allreduce_sparse
from totalreduce.c10d.work import OperationWork, seconds_of
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["ProcessGroupTotalReduce"]

#: One tensor or, as c10d has it, a list of one.
Tensors = torch.Tensor | Sequence[torch.Tensor]
#: From a tensor to its counterpart in host memory.
Host = Callable[[torch.Tensor], torch.Tensor]

#: torch's stub knows neither the constructor for subclasses nor that one body may serve all overloads.
_ProcessGroup: Any = dist.ProcessGroup

#: So many monitored barriers may be under way at the same time; a tag is remembered for ever.
_MONITORED_TAGS = 64


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a collective.

    Attributes:
        title: Its name, as gloo has it, for the profiler and for messages.
        timeout_s: Its deadline, from now.
        submit: Submits it, given how to find a tensor's host memory.
        result: What its future holds.
        shown: Tensors that the profiler is told about.
        reads: Tensors that it reads here.
        writes: Tensors that it writes here.
    """

    title: str
    timeout_s: float
    submit: Callable[[Host], list[Work]]
    result: Any
    shown: Sequence[torch.Tensor]
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]


@final
@never_compiled
class ProcessGroupTotalReduce(_ProcessGroup):  # type: ignore[misc]
    """A c10d process group over a ``Group``.

    Methods take what c10d's take: lists and an options object; or single tensors, and the options' most important
    value in their place. All but ``monitored_barrier`` return a work handle at once.

    Attributes:
        group: What it is made of; the library's own methods may be used beside torch's.
    """

    #: How ``torch.distributed.monitored_barrier`` knows our process groups.
    backend_of_totalreduce = True

    # What torch asks a ``Backend`` for; this object plays that part too (see ``_get_backend``).
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        group: Group,
        store: c10d.Store,
        timeout: timedelta,
        *,
        devices: Sequence[str],
        others: Mapping[str, dist.ProcessGroup],
        close_others: Callable[[], None],
    ) -> None:
        """Wrap a group.

        Args:
            group: Its ranks are those of the process group.
            store: What ``get_group_store`` returns.
            timeout: Deadline of operations that name none.
            devices: Types of devices that the process group is responsible for, the others' included.
            others: Process groups for some of them, which have other back ends.
            close_others: Called at the end.
        """
        super().__init__(group.rank, group.world_size)
        self.group = group
        group.keep_order()  # torch's operations on one tensor follow one another
        self._store = store
        self._timeout = timeout
        self._devices = [torch.device(device) for device in devices]
        self._others = dict(others)
        self._close_others = close_others
        self._group_name = self._group_description = ""
        self._sequence = 0
        self._callbacks = Callbacks(f"totalreduce-{group.rank}")
        self._stager = Stager()
        self._monitor = group.subgroup(range(group.world_size), name="monitored barriers")
        self._monitored = itertools.count()

    # -------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """In place; sparse tensors only with SUM."""
        tensor = _single(tensors, "allreduce")
        if other := self._other(tensor):
            return other.allreduce([tensor], _options(opts, c10d.AllreduceOptions))
        op = reduction_of(_reduce_op(opts))
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, op, self._seconds(opts, timeout))

        def submit(host: Host) -> list[Work]:
            return [self.group.allreduce(arithmetic_view(host(tensor), op), op=op)]

        shown = [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
        return self._start(
            _Call("all_reduce", self._seconds(opts, timeout), submit, [tensor], shown, [tensor], [tensor])
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Each tensor in place."""
        listed = list(tensors)
        if other := self._other(listed[0]):
            return other.allreduce_coalesced(listed, _options(opts, c10d.AllreduceCoalescedOptions))
        op = reduction_of(_reduce_op(opts))

        def submit(host: Host) -> list[Work]:
            return [self.group.allreduce(arithmetic_view(host(tensor), op), op=op) for tensor in listed]

        return self._start(_Call("all_reduce", self._seconds(opts), submit, listed, listed, listed, listed))

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: timedelta | None = None, **root: int
    ) -> Any:
        """In place on the root; the others' tensors stay as they are."""
        tensor, place = _single(tensors, "reduce"), _root(opts, root)
        if other := self._other(tensor):
            return other.reduce([tensor], opts)
        kind = reduction_of(_reduce_op(opts) if op is None else op)

        def submit(host: Host) -> list[Work]:
            return [self.group.reduce(arithmetic_view(host(tensor), kind), root=place, op=kind)]

        writes = [tensor] if self.group.rank == place else []
        return self._start(_Call("reduce", self._seconds(opts, timeout), submit, [tensor], [tensor], [tensor], writes))

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Any:
        """Each rank gets its block of the sum; blocks may differ in size."""
        tensor, blocks = _single(outputs, "reduce_scatter"), _one_list(inputs)
        if other := self._other(tensor):
            return other.reduce_scatter([tensor], [blocks], _options(opts, c10d.ReduceScatterOptions))
        op = reduction_of(_reduce_op(opts))

        def submit(host: Host) -> list[Work]:
            numbers = [arithmetic_view(host(block), op) for block in blocks]
            return [self.group.reduce_scatter(arithmetic_view(host(tensor), op), numbers, op=op)]

        return self._start(_Call("reduce_scatter", self._seconds(opts), submit, [tensor], blocks, blocks, [tensor]))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Each rank gets its share of the sum of one tensor."""
        if other := self._other(input):
            return other.reduce_scatter_single(output, input, _options(opts, c10d.ReduceScatterOptions))
        return self._reduce_scatter_singles([output], [input], opts, output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """``reduce_scatter_single`` of several tensors."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.reduce_scatter_single_coalesced(received, sent, _options(opts, c10d.ReduceScatterOptions))
        return self._reduce_scatter_singles(received, sent, opts, received)

    def _reduce_scatter_singles(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, result: Any
    ) -> Any:
        op = reduction_of(_reduce_op(opts))
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != self.group.world_size * output.numel():
                raise ValueError("input tensor must be the same size as output size times world size")

        def submit(host: Host) -> list[Work]:
            return [
                self.group.reduce_scatter(
                    arithmetic_view(host(output), op), arithmetic_view(host(tensor).contiguous(), op), op=op
                )
                for output, tensor in zip(outputs, inputs, strict=True)
            ]

        return self._start(_Call("reduce_scatter", self._seconds(opts), submit, result, inputs, inputs, outputs))

    # ----------------------------------------------------------------------------------------------------- movement

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, **root: int) -> Any:
        """In place."""
        tensor, place = _single(tensors, "broadcast"), _root(opts, root)
        if other := self._other(tensor):
            return other.broadcast([tensor], opts)
        gives = self.group.rank == place
        return self._start(
            _Call(
                "broadcast",
                self._seconds(opts, timeout),
                lambda host: [self.group.broadcast(host(tensor), root=place, async_op=True)],
                [tensor],
                [tensor],
                [tensor] if gives else [],
                [] if gives else [tensor],
            )
        )

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        """Every rank's tensor on every rank, as a list; sizes may differ."""
        tensor, listed = _single(inputs, "allgather"), _one_list(outputs)
        if other := self._other(tensor):
            return other.allgather([listed], [tensor], _options(opts, c10d.AllgatherOptions))

        def submit(host: Host) -> list[Work]:
            return [self.group.allgather([host(output) for output in listed], host(tensor))]

        return self._start(_Call("all_gather", self._seconds(opts), submit, [listed], [tensor], [tensor], listed))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """``allgather`` of several tensors; ``outputs[rank][index]``."""
        if other := self._other(inputs[0]):
            return other.allgather_coalesced(outputs, inputs, _options(opts, c10d.AllgatherOptions))

        def submit(host: Host) -> list[Work]:
            return [
                self.group.allgather([host(part[index]) for part in outputs], host(tensor))
                for index, tensor in enumerate(inputs)
            ]

        writes = [tensor for part in outputs for tensor in part]
        return self._start(_Call("all_gather", self._seconds(opts), submit, outputs, inputs, inputs, writes))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Every rank's tensor on every rank, one after the other in one tensor."""
        if other := self._other(input):
            return other.all_gather_single(output, input, _options(opts, c10d.AllgatherOptions))
        return self._all_gather_singles([output], [input], opts, output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """``all_gather_single`` of several tensors."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.all_gather_single_coalesced(received, sent, _options(opts, c10d.AllgatherOptions))
        return self._all_gather_singles(received, sent, opts, received)

    def _all_gather_singles(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, result: Any
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.dtype != tensor.dtype:
                raise TypeError("output tensor must have the same type as input tensor")
            if output.numel() != self.group.world_size * tensor.numel():
                raise ValueError("output tensor size must be equal to world_size times input tensor size")

        def submit(host: Host) -> list[Work]:
            return [
                self.group.allgather(host(output), host(tensor)) for output, tensor in zip(outputs, inputs, strict=True)
            ]

        return self._start(_Call("all_gather", self._seconds(opts), submit, result, inputs, inputs, outputs))

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None, **root: int) -> Any:
        """Every rank's tensor on the root."""
        tensor, place = _single(inputs, "gather"), _root(opts, root)
        if other := self._other(tensor):
            return other.gather(outputs, [tensor], opts)
        listed = _one_list(outputs) if self.group.rank == place else []

        def submit(host: Host) -> list[Work]:
            blocks = [host(output) for output in listed] if listed else None
            return [self.group.gather(blocks, host(tensor), root=place)]

        return self._start(_Call("gather", self._seconds(opts), submit, [listed], [tensor], [tensor], listed))

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None, **root: int) -> Any:
        """Each rank gets its one of the root's tensors."""
        tensor, place = _single(outputs, "scatter"), _root(opts, root)
        if other := self._other(tensor):
            return other.scatter([tensor], inputs, opts)
        listed = _one_list(inputs) if self.group.rank == place else []

        def submit(host: Host) -> list[Work]:
            blocks = [host(block) for block in listed] if listed else None
            return [self.group.scatter(host(tensor), blocks, root=place)]

        return self._start(
            _Call("scatter", self._seconds(opts), submit, [tensor], listed or [tensor], listed, [tensor])
        )

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Tensor r of each rank goes to rank r."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.alltoall(received, sent, _options(opts, c10d.AllToAllOptions))

        def submit(host: Host) -> list[Work]:
            return [self.group.alltoall([host(block) for block in received], [host(block) for block in sent])]

        return self._start(_Call("all_to_all", self._seconds(opts), submit, received, sent, sent, received))

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
            options = _options(opts, c10d.AllToAllOptions)
            return other.all_to_all_single(output, input, output_split_sizes, input_split_sizes, options)
        received = _split_sizes(output, output_split_sizes, self.group.world_size, "output")
        sent = _split_sizes(input, input_split_sizes, self.group.world_size, "input")

        def submit(host: Host) -> list[Work]:
            outputs, inputs = torch.split(host(output), received), torch.split(host(input), sent)
            return [self.group.alltoall(outputs, inputs)]

        return self._start(_Call("all_to_all", self._seconds(opts), submit, output, [input], [input], [output]))

    # Former names, by which some callers, torch's own among them, still go.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -------------------------------------------------------------------------------------- barriers and messages

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Done when everybody is here."""
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._others:
            return self._others[device.type].barrier(opts)
        word = torch.zeros(1, dtype=torch.uint8)

        def submit(_: Host) -> list[Work]:
            return [self.group.allreduce(word, op=ReduceOp.MAX)]

        return self._start(_Call("barrier", self._seconds(opts, timeout), submit, [], [], [], []))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for everybody; says who does not come (see ``monitored``).

        Args:
            timeout: ``timedelta`` or seconds; ``None``: the process group's.
            wait_all_ranks: Name all of them, not just the first.
        """
        span = self._timeout if timeout is None else timeout
        seconds = seconds_of(span) if isinstance(span, timedelta) else checks.seconds("timeout", span)
        tag = next(self._monitored) % _MONITORED_TAGS
        monitored_barrier(self._monitor, tag, seconds, wait_all_ranks=wait_all_ranks)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        """The n-th with a tag meets the n-th ``recv`` with it."""
        tensor = _single(tensors, "send")
        if other := self._other(tensor):
            return other.send([tensor], dst, tag)

        def submit(host: Host) -> list[Work]:
            return [self.group.send(host(tensor), dst=dst, tag=tag)]

        return self._start(_Call("send", self._seconds(None), submit, [tensor], [tensor], [tensor], []))

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Any:
        """From one rank; from anybody if ``src`` is ``None``."""
        tensor = _single(tensors, "recv")
        if other := self._other(tensor):
            return other.recv_anysource([tensor], tag) if src is None else other.recv([tensor], src, tag)

        def submit(host: Host) -> list[Work]:
            return [self.group.recv(host(tensor), src=src, tag=tag)]

        title = "recv" if src is not None else "recvAnySource"
        return self._start(_Call(title, self._seconds(None), submit, [tensor], [tensor], [], [tensor]))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """From whoever sends first; the handle's ``source_rank`` says who that was."""
        return self.recv(tensors, None, tag)

    # -------------------------------------------------------------------------------------------------- what it is

    def getBackendName(self) -> str:  # noqa: N802
        """For torch's C++, as the other camel-cased ones."""
        return BACKEND_NAME

    def getGroupName(self) -> str:  # noqa: N802
        """See ``group_name``."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called when torch has registered the process group."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """See ``group_desc``."""
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called when torch has registered the process group."""
        self._group_description = description

    def get_group_store(self) -> c10d.Store:
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

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether ``allocate_tensor`` has memory for a device; FSDP asks if told to allocate from the process group."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of shape ``(size,)`` that the ranks of this host read where it lies; see ``Group.empty``."""
        if not self.supports_tensor_alloc(device):
            raise RuntimeError(f"{BACKEND_NAME} allocates no tensors on {device}, only on the CPU")
        return self.group.empty(size, dtype=dtype)

    @property
    def options(self) -> c10d.Backend.Options:
        """What torch reads the time-out from."""
        return c10d.Backend.Options(BACKEND_NAME, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of operations that name none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def get_error(self) -> c10d.ErrorType:
        """For torch's watchdogs; errors are raised where they are met."""
        return c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing to do: connections stand since the group was made."""

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # ------------------------------------------------------------------------------------------------------- ending

    def shutdown(self) -> None:
        """End; what is pending fails. A subgroup leaves the connections to the default process group."""
        self._monitor.close()
        self.group.close()
        self._callbacks.close()
        self._close_others()

    abort = shutdown

    # ------------------------------------------------------------------------------------------------------ the rest

    def _start(self, call: _Call) -> OperationWork:
        self._sequence += 1
        title = f"{BACKEND_NAME}:{call.title}"
        record = profiling.begin(title, call.shown)
        staged = self._stager.stage(call.reads, call.writes)
        try:
            works = call.submit(_as_is if staged is None else staged.host)
        except TotalReduceError as error:
            if record is not None:
                record.end()
            if isinstance(error, ConfigurationError):
                raise
            raise as_torch_error(error, title) from error
        return OperationWork(
            works,
            call.result,
            title=title,
            timeout_s=call.timeout_s,
            callbacks=self._callbacks,
            record=record,
            staged=staged,
        )

    def _allreduce_sparse(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> OperationWork:
        if op is not ReduceOp.SUM:
            raise ValueError("allreduce of sparse tensors is a sum; other reductions are not defined")
        begin = time.monotonic()
        title = f"{BACKEND_NAME}:sparse_all_reduce"
        try:
            works, finish = allreduce_sparse(self.group, tensor, timeout_s)
        except TotalReduceError as error:
            raise as_torch_error(error, title) from error
        left_s = timeout_s - (time.monotonic() - begin)
        return OperationWork(works, [tensor], title=title, timeout_s=left_s, callbacks=self._callbacks, staged=finish)

    def _other(self, tensor: torch.Tensor) -> Any:
        """The process group of another back end, if the tensor's device has one."""
        return self._others.get(tensor.device.type) if self._others else None

    def _seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Deadline: the call's, else the options', else the process group's."""
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        # Options that name none say minus one millisecond.
        return seconds_of(self._timeout if given is None or given < timedelta(0) else given)


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
    return dist.ReduceOp.SUM if opts is None or isinstance(opts, int) else getattr(opts, "reduceOp", opts)


def _root(opts: Any, named: Mapping[str, int]) -> int:
    """The root's rank in the group: ``root=``, or of the options, or given in their place; 0 by default."""
    if "root" in named:
        return named["root"]
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def _single(tensors: Tensors, what: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"totalreduce: {what} takes one tensor per rank, not {len(tensors)}")
    return tensors[0]


def _one_list(tensors: Any) -> list[torch.Tensor]:
    """The list in ``[[...]]``, or the one given without the outer list."""
    listed: Iterable[torch.Tensor] = tensors
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        listed = tensors[0]
    return list(listed)


def _split_sizes(tensor: torch.Tensor, sizes: Sequence[int] | None, world_size: int, what: str) -> list[int]:
    """Lengths of the slices along the first dimension, one per rank."""
    if not tensor.is_contiguous():
        raise ValueError(f"the {what} of all_to_all_single must be contiguous")
    rows = tensor.size(0) if tensor.dim() else 0
    if not sizes:
        if rows % world_size:
            raise ValueError(f"the {what}'s dim 0 ({rows}) does not divide equally across group size {world_size}")
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise ValueError(f"{what} splits {list(sizes)} must be {world_size} numbers whose sum is dim 0, {rows}")
    return list(sizes)
