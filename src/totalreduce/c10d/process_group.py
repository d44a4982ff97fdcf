"""The process group that ``torch.distributed`` calls: c10d's methods in terms of ``Group``'s.

The base class comes from torch and is written in C++. Its Python methods are called by ``torch.distributed``; the C++
of DistributedDataParallel and of the functional collectives calls the methods that torch's trampoline knows, which is
why some names are camel-cased here (``getGroupName``).

Tensors of a device that another back end was asked for (``"cpu:totalreduce,cuda:nccl"``) are handed to that one. CUDA
tensors without one go through pinned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from totalreduce.c10d.calls import (
    Calls,
    Tensors,
    arithmetic_view,
    one_list,
    operator_event,
    options_for,
    place_of,
    reduce_op_of,
    reduction_of,
    root_of,
    rows_of,
    single_tensor,
    split_sizes,
)
from totalreduce.c10d.dispatched import PLAIN, Dispatched, carries_out, num_modes
from totalreduce.c10d.monitored import monitored_barrier
from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.work import seconds_of
from totalreduce.foundation import checks
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

if TYPE_CHECKING:
    from totalreduce.pytorch.ddp_hook import HookKeeper

__all__ = ["ProcessGroupTotalReduce"]

#: torch's stub knows neither the constructor for subclasses nor that one body may serve all overloads.
_ProcessGroup: Any = dist.ProcessGroup

#: The largest number of monitored barriers at the same time; the group keeps the state of a tag until it is closed.
_MONITORED_TAGS = 64


@final
@never_compiled
class ProcessGroupTotalReduce(_ProcessGroup):  # type: ignore[misc]
    """A c10d process group over a ``Group``.

    Methods take what c10d's take: lists and an options object; or single tensors, and the options' most important
    value in their place. All but ``monitored_barrier`` return a work handle at once.
    """

    #: ``torch.distributed.monitored_barrier`` recognises the library's process groups by this attribute.
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
            store: The store that ``get_group_store`` returns.
            timeout: Deadline of operations that name none.
            devices: Types of devices that the process group is responsible for, those of ``others`` included.
            others: Process groups of other back ends, by the type of device that each is for.
            close_others: Called at the end.
        """
        super().__init__(group.rank, group.world_size)
        self.group = group  #: The group that carries the operations out; its own methods may be used beside torch's.
        #: Keeps what the hooks of DDP keep back while process groups come and go (``tr.attempts``); or ``None``.
        self.keeper: HookKeeper | None = None
        group.keep_order()  # torch's operations on one tensor follow one another
        self._calls = Calls(group, timeout)
        self._start = self._calls.start
        self._store = store
        self._devices = [torch.device(device) for device in devices]
        self._others = dict(others)
        self._close_others = close_others
        self._group_name = self._group_description = ""
        self._monitor = group.subgroup(range(group.world_size), name="monitored barriers")
        self._monitored = itertools.count()

    # -------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduce in place; sparse tensors only with SUM."""
        tensor = single_tensor(tensors, "allreduce")
        if other := self._other(tensor):
            return other.allreduce([tensor], options_for(opts, c10d.AllreduceOptions))
        op, factor = reduction_of(reduce_op_of(opts))
        if tensor.layout is torch.sparse_coo:
            return self._calls.allreduce_sparse(tensor, op, factor, self._calls.seconds(opts, timeout))
        if factor is not None:
            self._calls.multiply([tensor], factor, self._calls.seconds(opts, timeout), in_place=True)

        def submit() -> list[Work]:
            return [self.group.allreduce(arithmetic_view(tensor, op), op=op)]

        shown = [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
        return self._start("all_reduce", opts, submit, [tensor], shown, [tensor], timeout=timeout)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each tensor in place."""
        listed = list(tensors)
        if other := self._other(listed[0]):
            return other.allreduce_coalesced(listed, options_for(opts, c10d.AllreduceCoalescedOptions))
        op, factor = reduction_of(reduce_op_of(opts))
        if factor is not None:
            self._calls.multiply(listed, factor, self._calls.seconds(opts), in_place=True)

        def submit() -> list[Work]:
            return [self.group.allreduce(arithmetic_view(tensor, op), op=op) for tensor in listed]

        return self._start("all_reduce", opts, submit, listed, listed, listed, operator="allreduce_coalesced_")

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: timedelta | None = None, **root: int
    ) -> Any:
        """Reduce in place on the root; the tensors of the other ranks do not change."""
        tensor, root_rank = single_tensor(tensors, "reduce"), root_of(opts, root)
        if other := self._other(tensor):
            return other.reduce([tensor], options_for(opts, c10d.ReduceOptions, op=op, root=root_rank))
        kind, factor = reduction_of(reduce_op_of(opts) if op is None else op)
        if factor is not None:
            takes_result, seconds = self.group.rank == root_rank, self._calls.seconds(opts, timeout)
            [tensor] = self._calls.multiply([tensor], factor, seconds, in_place=takes_result)

        def submit() -> list[Work]:
            return [self.group.reduce(arithmetic_view(tensor, kind), root=root_rank, op=kind)]

        writes = [tensor] if self.group.rank == root_rank else []
        return self._start("reduce", opts, submit, [tensor], [tensor], writes, timeout=timeout)

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Any:
        """Give each rank its block of the sum; blocks may differ in size."""
        tensor, blocks = single_tensor(outputs, "reduce_scatter"), one_list(inputs)
        if other := self._other(tensor):
            return other.reduce_scatter([tensor], [blocks], options_for(opts, c10d.ReduceScatterOptions))
        op, factor = reduction_of(reduce_op_of(opts))
        if factor is not None:
            blocks = self._calls.multiply(blocks, factor, self._calls.seconds(opts))

        def submit() -> list[Work]:
            numbers = [arithmetic_view(block, op) for block in blocks]
            return [self.group.reduce_scatter(arithmetic_view(tensor, op), numbers, op=op)]

        return self._start("reduce_scatter", opts, submit, [tensor], blocks, [tensor])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Give each rank its share of the sum of one tensor."""
        if other := self._other(input):
            return other.reduce_scatter_single(output, input, options_for(opts, c10d.ReduceScatterOptions))
        return self._calls.reduce_scatter_singles([output], [input], opts, output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Do ``reduce_scatter_single`` for several tensors."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.reduce_scatter_single_coalesced(received, sent, options_for(opts, c10d.ReduceScatterOptions))
        return self._calls.reduce_scatter_singles(received, sent, opts, received)

    # ----------------------------------------------------------------------------------------------------- movement

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, **root: int) -> Any:
        """Broadcast the root's tensor, in place."""
        tensor, root_rank = single_tensor(tensors, "broadcast"), root_of(opts, root)
        if other := self._other(tensor):
            return other.broadcast([tensor], options_for(opts, c10d.BroadcastOptions, root=root_rank))

        def submit() -> list[Work]:
            return [self.group.broadcast(tensor, root=root_rank, async_op=True)]

        writes = [] if self.group.rank == root_rank else [tensor]
        return self._start("broadcast", opts, submit, [tensor], [tensor], writes, timeout=timeout)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        """Gather every rank's tensor on every rank, as a list; sizes may differ."""
        tensor, listed = single_tensor(inputs, "allgather"), one_list(outputs)
        if other := self._other(tensor):
            return other.allgather([listed], [tensor], options_for(opts, c10d.AllgatherOptions))

        def submit() -> list[Work]:
            return [self.group.allgather(listed, tensor)]

        return self._start("all_gather", opts, submit, [listed], [tensor], listed, value=lambda: rows_of(listed))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Do ``allgather`` for several tensors, into ``outputs[rank][index]``."""
        if other := self._other(inputs[0]):
            return other.allgather_coalesced(outputs, inputs, options_for(opts, c10d.AllgatherOptions))

        def submit() -> list[Work]:
            return [
                self.group.allgather([part[index] for part in outputs], tensor) for index, tensor in enumerate(inputs)
            ]

        writes = [tensor for part in outputs for tensor in part]
        return self._start("all_gather", opts, submit, outputs, inputs, writes, operator="allgather_coalesced_")

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Gather every rank's tensor on every rank, one after the other in one tensor."""
        if other := self._other(input):
            return other.all_gather_single(output, input, options_for(opts, c10d.AllgatherOptions))
        return self._calls.all_gather_singles([output], [input], opts, output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Do ``all_gather_single`` for several tensors."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.all_gather_single_coalesced(received, sent, options_for(opts, c10d.AllgatherOptions))
        return self._calls.all_gather_singles(received, sent, opts, received)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None, **root: int) -> Any:
        """Gather every rank's tensor on the root."""
        tensor, root_rank = single_tensor(inputs, "gather"), root_of(opts, root)
        if other := self._other(tensor):
            return other.gather(outputs, [tensor], options_for(opts, c10d.GatherOptions, root=root_rank))
        listed = one_list(outputs) if self.group.rank == root_rank else []

        def submit() -> list[Work]:
            return [self.group.gather(listed or None, tensor, root=root_rank)]

        return self._start("gather", opts, submit, [listed], [tensor], listed)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None, **root: int) -> Any:
        """Give each rank one of the root's tensors."""
        tensor, root_rank = single_tensor(outputs, "scatter"), root_of(opts, root)
        if other := self._other(tensor):
            return other.scatter([tensor], inputs, options_for(opts, c10d.ScatterOptions, root=root_rank))
        listed = one_list(inputs) if self.group.rank == root_rank else []

        def submit() -> list[Work]:
            return [self.group.scatter(tensor, listed or None, root=root_rank)]

        return self._start("scatter", opts, submit, [tensor], listed or [tensor], [tensor])

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Send tensor r of each rank to rank r."""
        received, sent = list(outputs), list(inputs)
        if other := self._other(sent[0]):
            return other.alltoall(received, sent, options_for(opts, c10d.AllToAllOptions))

        def submit() -> list[Work]:
            return [self.group.alltoall(received, sent)]

        return self._start("all_to_all", opts, submit, received, sent, received)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Exchange slices of one tensor along its first dimension between all ranks."""
        if other := self._other(input):
            options = options_for(opts, c10d.AllToAllOptions)
            return other.all_to_all_single(output, input, output_split_sizes, input_split_sizes, options)
        received = split_sizes(output, output_split_sizes, self.group.world_size, "output")
        sent = split_sizes(input, input_split_sizes, self.group.world_size, "input")

        def submit() -> list[Work]:
            outputs, inputs = torch.split(output, received), torch.split(input, sent)
            return [self.group.alltoall(outputs, inputs)]

        return self._start("all_to_all", opts, submit, output, [input], [output], operator="alltoall_base_")

    # Former names, which some callers, torch's own among them, still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -------------------------------------------------------------------------------------- barriers and messages

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Submit a barrier; its handle is done when every rank has submitted it."""
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._others:
            return self._others[device.type].barrier(opts)
        if num_modes():
            return Dispatched(self).barrier(options_for(opts, c10d.BarrierOptions))
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")

        def submit() -> list[Work]:
            return [self.group.allreduce(word, op=ReduceOp.MAX)]

        return self._start("barrier", opts, submit, [], [], [], timeout=timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names the ranks that do not come (see ``monitored``).

        Args:
            timeout: ``timedelta`` or seconds; ``None``: that of the process group.
            wait_all_ranks: Name all of the missing ranks, not only the first.
        """
        span = self._calls.timeout if timeout is None else timeout
        seconds = seconds_of(span) if isinstance(span, timedelta) else checks.seconds("timeout", span)
        if num_modes():
            Dispatched(self).monitored_barrier(timedelta(seconds=seconds), wait_all_ranks)
            return
        tag = next(self._monitored) % _MONITORED_TAGS
        with operator_event("monitored_barrier_"):
            monitored_barrier(self._monitor, tag, seconds, wait_all_ranks=wait_all_ranks)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        """Send a tensor; the n-th ``send`` with a tag belongs to the n-th ``recv`` with it."""
        tensor = single_tensor(tensors, "send")
        if other := self._other(tensor):
            return other.send([tensor], dst, tag)

        def submit() -> list[Work]:
            return [self.group.send(tensor, dst=dst, tag=tag)]

        return self._start("send", None, submit, [tensor], [tensor], [])

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Any:
        """Receive a tensor from one rank, or from any rank if ``src`` is ``None``."""
        tensor = single_tensor(tensors, "recv")
        if other := self._other(tensor):
            return other.recv_anysource([tensor], tag) if src is None else other.recv([tensor], src, tag)

        def submit() -> list[Work]:
            return [self.group.recv(tensor, src=src, tag=tag)]

        title = "recv" if src is not None else "recvAnySource"
        return self._start(title, None, submit, [tensor], [tensor], [tensor])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receive from the rank that sends first; the handle's ``source_rank`` names it."""
        return self.recv(tensors, None, tag)

    # ------------------------------------------------------------------------------------------------- description

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND_NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_description = description
        self._calls.place = place_of(self._group_name, description, self.group.ranks)

    def get_group_store(self) -> c10d.Store:
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
        """Whether ``allocate_tensor`` has memory for a device. FSDP asks before it allocates from a process group."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of shape ``(size,)`` that the ranks of this host read in place; see ``Group.empty``."""
        if not self.supports_tensor_alloc(device):
            raise RuntimeError(f"{BACKEND_NAME} allocates no tensors on {device}, only on the CPU")
        return self.group.empty(size, dtype=dtype)

    @property
    def options(self) -> c10d.Backend.Options:
        """The options from which torch reads the time-out."""
        return c10d.Backend.Options(BACKEND_NAME, self._calls.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of operations that name none."""
        self._calls.timeout = timeout

    _set_default_timeout = set_timeout

    def get_error(self) -> c10d.ErrorType:
        """Report no error to torch's watchdogs: an error is raised by the operation that meets it."""
        return c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the group was connected when it was made."""

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._calls.count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.count

    def _other(self, tensor: torch.Tensor) -> Any:
        """Return the process group of another back end, if the tensor's device has one, or one for torch's modes."""
        if self._others and (other := self._others.get(tensor.device.type)):
            return other
        if num_modes() or (type(tensor) not in PLAIN and carries_out(tensor)):
            return Dispatched(self)
        return None

    # ------------------------------------------------------------------------------------------------------- ending

    def shutdown(self) -> None:
        """End the group; pending operations fail. A subgroup leaves the connections to the default process group."""
        self._monitor.close()
        self.group.close()
        self._calls.callbacks.close()
        self._close_others()

    abort = shutdown
