"""Allreduces over hosts with several ranks each: a library inside a host, the engine between hosts.

With L ranks on each host, rank i of a host is responsible for the i-th of L equal parts of a tensor::

    inside a host    the library (NCCL, gloo) reduces and scatters: each rank gets the sum of its part over its host
    between hosts    the engine reduces this part over the ranks i of all hosts, one ring for each i
    inside a host    the library gathers the parts

So a rank exchanges S / L bytes with other hosts where a ring over all ranks exchanges S. The up to L - 1 elements that
are left over are reduced by the engine over all ranks. Each element is first added over the ranks of a host, in the
library's order, and then over the hosts, in the order of the engine's schedule. It is added up in one place and then
copied, so that all ranks have the same bits. They are not the bits of a ring over all ranks; values of half types are
rounded once more, after the sum of a host.

The library needs one order of its calls on the ranks of a host. There is no protocol for it here: ``MeshCollectives``
are a native library for the rest of this package, so that its callers keep one order on all ranks. Callers are the
coordinator (``native.coordinator``), whose agreement orders operations that come in any order, and planned reductions
(``native.planned``), which start in the order of the plan. To overlap the steps of several operations, the scattering
and the gathering have a communicator each, and both see the operations in that order.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, final

import torch

from totalreduce.foundation.errors import ConfigurationError, GroupClosed, TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.backends import EngineBackend
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.groups.operations import Operations
from totalreduce.groups.options import Options
from totalreduce.kernels import divide
from totalreduce.native.collectives import NativeCollectives, NativeWork
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.failures import LOOK_S
from totalreduce.native.planned import PlannedReductions
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.modes import writing
from totalreduce.tensors.streams import SideStreams, current_stream, is_on_accelerator, record
from totalreduce.tensors.work import Work

__all__ = ["MeshBackend", "MeshCollectives", "ranks_per_host"]

#: Smaller tensors go through the engine alone, over all ranks: one exchange instead of three.
SMALL_BYTES: Final = 256 * 1024
#: What both NCCL and gloo reduce. The engine reduces everything else, over all ranks.
_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int32, torch.int64, torch.int8, torch.uint8),
    )
)
_OPS = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT})
#: How long ``close`` waits for the threads. They look every ``LOOK_S`` whether they are to end.
_JOIN_S: Final = 5.0


def ranks_per_host(hosts: Sequence[int]) -> int:
    """Return how many ranks each host has. Raises ``ConfigurationError``: not all hosts have the same number.

    Args:
        hosts: By rank, the number of its host.
    """
    counts = Counter(hosts)
    if len(set(counts.values())) != 1:
        raise ConfigurationError(
            f"a mesh of ranks needs the same number of ranks on each host, and the hosts have {list(counts.values())}: "
            "start as many on each (totalreduce run --hosts a:2,b:2), or leave `inner` and TOTALREDUCE_INNER out"
        )
    return next(iter(counts.values()))


@final
class _Reduction:
    """One allreduce on its way through the mesh (see ``NativeWork``).

    Attributes:
        tensor: The elements that divide evenly, in one dimension.
        part: Those of them for which this rank is responsible.
        op: The reduction.
        ready: The event after which a tensor of an accelerator may be read.
        rest: The reduction of the elements that are left over; ``None`` if there are none.
        between: The reduction between hosts, once it was started.
    """

    def __init__(self, tensor: torch.Tensor, part: torch.Tensor, op: ReduceOp, rest: NativeWork | None) -> None:
        self.tensor, self.part, self.op, self.rest = tensor, part, op, rest
        self.ready: torch.Event | None = None
        if is_on_accelerator(tensor):
            self.ready = record(current_stream(tensor.device), tensor.device)
        self.between: NativeWork | None = None
        self._ended = threading.Event()
        self._arrived: torch.Event | None = None
        self._error: TotalReduceError | None = None

    def end(self, error: TotalReduceError | None, arrived: torch.Event | None) -> None:
        """Note the end. ``arrived``: the event after which a tensor of an accelerator has the result."""
        self._error, self._arrived = error, arrived
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set() and (self._arrived is None or self._arrived.query())

    def wait(self, timeout_s: float) -> bool:
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._arrived is not None:
            current_stream(self.tensor.device).wait_event(self._arrived)
        return True


@final
class MeshCollectives:
    """``NativeCollectives`` over all ranks of a mesh. Only allreduces use it; the engine does everything else.

    Two threads carry operations through: one scatters and starts the exchange between hosts, one awaits that and
    gathers. So up to three operations are on their way at the same time, one in each step.
    """

    def __init__(
        self, whole: EngineCollectives, inner: NativeCollectives, hosts: Sequence[int], timeout_s: float
    ) -> None:
        """Make the mesh. Collective.

        Args:
            whole: The engine's collectives over all ranks.
            inner: The library's collectives over the ranks of this host, in the order of their numbers in the job.
            hosts: By rank, the number of its host; ``ranks_per_host`` takes them.
            timeout_s: Seconds until all ranks of this host must have come.
        """
        self.world_size, self.device = whole.world_size, inner.device
        self._whole, self._inner, self._hosts = whole, inner, tuple(hosts)
        by_host: dict[int, list[int]] = {}
        # torch orders the ranks of a group by their numbers in the job, and not as a subgroup does.
        for rank in sorted(range(len(hosts)), key=whole.ranks.__getitem__):
            by_host.setdefault(hosts[rank], []).append(rank)
        self._here = by_host[hosts[whole.rank]]
        self._index = self._here.index(whole.rank)
        self._between = whole.split([ranks[self._index] for ranks in by_host.values()], timeout_s)
        self._gatherer = inner.split(range(len(self._here)), timeout_s)
        self._failure: TotalReduceError | None = None
        self._to_scatter: queue.SimpleQueue[_Reduction | None] = queue.SimpleQueue()
        self._to_gather: queue.SimpleQueue[_Reduction | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"totalreduce-{whole.rank}-mesh-{what}", daemon=True)
            for what, run in (("scatter", self._run_scatter), ("gather", self._run_gather))
        ]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        if (
            tensor.nbytes < SMALL_BYTES
            or tensor.dtype not in _DTYPES
            or op not in _OPS
            or tensor.device.type != self.device.type
        ):
            return self._whole.allreduce(tensor, op)
        flat = tensor.detach().view(-1)
        length = flat.numel() // len(self._here)
        even, left_over = flat[: length * len(self._here)], flat[length * len(self._here) :]
        rest = self._whole.allreduce(left_over, op) if left_over.numel() else None
        reduction = _Reduction(even, even[self._index * length : (self._index + 1) * length], op, rest)
        self._to_scatter.put(reduction)
        return reduction

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        return self._whole.reduce(tensor, root, op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        return self._whole.broadcast(tensor, root)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        return self._whole.allgather(output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        return self._whole.reduce_scatter(output, tensor, op)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        return self._whole.alltoall(output, tensor, received, sent)

    def split(self, ranks: Sequence[int], timeout_s: float) -> NativeCollectives:
        """Return a mesh of some ranks; the engine's collectives, if their hosts do not have several of them each."""
        hosts = [self._hosts[rank] for rank in ranks]
        whole, counts = self._whole.split(ranks, timeout_s), set(Counter(hosts).values())
        if len(counts) > 1 or counts == {1}:
            return whole
        inner = self._inner.split([self._here.index(rank) for rank in ranks if rank in self._here], timeout_s)
        return MeshCollectives(whole, inner, hosts, timeout_s)

    def close(self) -> None:
        self._is_closing.set()
        self._to_scatter.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        for natives in (self._gatherer, self._inner, self._between, self._whole):
            natives.close()

    # ------------------------------------------------------------------------------------------------------ threads

    @torch.no_grad()
    def _run_scatter(self) -> None:
        streams = SideStreams()
        while (reduction := self._to_scatter.get()) is not None:
            self._carry_on(reduction, streams, self._scatter)
            self._to_gather.put(reduction)
            del reduction  # it holds the tensor
        self._to_gather.put(None)

    @torch.no_grad()
    def _run_gather(self) -> None:
        streams = SideStreams()
        while (reduction := self._to_gather.get()) is not None:
            arrived = self._carry_on(reduction, streams, self._gather)
            reduction.end(self._failure, arrived)
            del reduction

    def _carry_on(
        self, reduction: _Reduction, streams: SideStreams, step: Callable[[_Reduction], None]
    ) -> torch.Event | None:
        """Take one step, unless a step has failed: the other ranks of this host take later steps in vain, too."""
        tensor = reduction.tensor
        try:
            if self._failure is None:
                with streams.on(tensor.device):
                    step(reduction)
                    if is_on_accelerator(tensor):
                        tensor.record_stream(streams.of(tensor.device))
                        return record(streams.of(tensor.device), tensor.device)
        except TotalReduceError as error:
            self._failure = error
        except Exception as error:
            self._failure = TotalReduceError(f"rank {self._whole.rank}: an allreduce over the mesh failed: {error!r}")
            self._failure.__cause__ = error
        return None

    def _scatter(self, reduction: _Reduction) -> None:
        if reduction.ready is not None:
            current_stream(reduction.tensor.device).wait_event(reduction.ready)
        op = ReduceOp.SUM if reduction.op is ReduceOp.AVG else reduction.op
        self._await(self._inner.reduce_scatter(reduction.part, reduction.tensor, op))
        reduction.between = self._between.allreduce(reduction.part, op)

    def _gather(self, reduction: _Reduction) -> None:
        assert reduction.between is not None, "it has failed otherwise"
        self._await(reduction.between)
        if reduction.op is ReduceOp.AVG:
            with writing(reduction.part):
                divide(reduction.part, self.world_size)
        self._await(self._gatherer.allgather(reduction.tensor, reduction.part))
        if reduction.rest is not None:
            self._await(reduction.rest)

    def _await(self, work: NativeWork) -> None:
        while not work.wait(LOOK_S):
            if self._is_closing.is_set():
                raise GroupClosed(f"rank {self._whole.rank} has closed the group")


@final
@never_compiled
class MeshBackend(EngineBackend):
    """``Backend`` by the engine, with allreduces of large tensors over a mesh.

    Smaller tensors, those for which a schedule is named, all other collectives and prepared operations go through the
    engine. So all ranks prepare an operation, or none does. If one rank passes a large tensor and another one a small
    tensor under one name, the two do not meet: both wait until their deadline, which names the operation.
    """

    def __init__(self, operations: Operations, coordinator: Coordinator) -> None:
        super().__init__(operations)
        self._coordinator = coordinator

    @property
    def coordinator(self) -> Coordinator:
        return self._coordinator

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> Work:
        if options.schedule != "auto" or tensor.numel() * tensor.element_size() < SMALL_BYTES:
            return super().allreduce(tensor, op, options)
        return self._coordinator.allreduce(
            tensor, name=options.name, op=op, priority=options.priority, timeout_s=options.timeout_s
        )

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        return self._coordinator.planned(names)

    def close(self, timeout_s: float, reason: str) -> None:
        self._coordinator.close(timeout_s, reason=reason)
