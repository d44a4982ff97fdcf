"""One rank of ``bench allreduce`` and ``bench collectives``: every contestant in turns, every timed result checked.

Inputs are such that a block of the wrong rank, in the wrong place or added twice shows: every block is the pattern of
``values`` times a factor of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from totalreduce.bench import values
from totalreduce.bench.arithmetic import repetitions
from totalreduce.bench.collectives import CollectiveRow, CollectivesParameters, CollectivesSamples, Contestant
from totalreduce.bench.context import Context
from totalreduce.bench.launching import SHARED
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.types import OpKind
from totalreduce.groups.group import Group
from totalreduce.groups.operations import PreparedOperation
from totalreduce.groups.probe import selector_of

_WARMUP_ROUNDS = 2
_ROOT = 0
#: Every tensor has a name of its own, as every bucket of a model has.
_NAME = "bench.collective.{}"

# torch 2.13 gave them new names.
_gloo_allgather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_gloo_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(context: Context, parameters: CollectivesParameters) -> CollectivesSamples:
    """Time each collective and size with each contestant."""
    before = context.goodput()
    shares = all(shares for (shares,) in context.exchange([context.group.shares_memory]))
    rows = [
        _measure(context, OpKind[kind.upper()], size, parameters.dtype, _able(contestants, shares=shares))
        for kind, contestants in parameters.contestants.items()
        for size in parameters.sizes
    ]
    return CollectivesSamples([before, context.goodput()], rows)


def _able(contestants: list[Contestant], *, shares: bool) -> list[Contestant]:
    return [contestant for contestant in contestants if shares or contestant.peer != SHARED]


def _measure(context: Context, kind: OpKind, size: int, dtype: str, contestants: list[Contestant]) -> CollectiveRow:
    case = _Case(context, kind, size, values.dtype_by_name(dtype))
    seconds: list[list[float]] = [[] for _ in contestants]
    sent: list[list[float]] = [[] for _ in contestants]
    cpu_s: list[list[float]] = [[] for _ in contestants]
    for index in range(-_WARMUP_ROUNDS, context.rounds):
        for number, contestant in enumerate(contestants):
            sample = case.sample(contestant.peer, contestant.schedule)
            if index >= 0:
                seconds[number].append(sample.seconds)
                if sample.bytes_sent is not None:
                    sent[number].append(sample.bytes_sent)
                if sample.cpu_s is not None:
                    cpu_s[number].append(sample.cpu_s)
    name, num_bytes = kind.name.lower(), case.num_bytes
    context.report(f"{name} {format_bytes(num_bytes)}: {context.rounds} rounds of {len(contestants)} checked")
    expected = selector_of(context.group).estimates(kind, num_bytes, context.group.ranks)
    expected_s = {str(schedule): estimate for schedule, estimate in expected.items()}
    return CollectiveRow(name, num_bytes, case.count, contestants, seconds, sent, cpu_s, expected_s)


class _Sample(NamedTuple):
    """One operation on this rank."""

    seconds: float  #: Its duration.
    bytes_sent: float | None = None  #: The bytes that this rank sent; ``None`` where unknown.
    #: The processor time of this process, all threads; ``None`` where another process did the work.
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Factors:
    """The contents of this rank's tensors, one factor for each block; without a block the rank has no such tensor."""

    given: list[int]  #: Of the input, where the collective has one.
    before: list[int]  #: Of the output, before the operation.
    after: list[int]  #: Of the output, when it is done.
    whole: bool = False  #: Whether the only block is the whole tensor, not one of as many blocks as there are ranks.
    additions: int = 1  #: How many numbers are added for one element of the output.


def _factors(kind: OpKind, rank: int, size: int) -> _Factors:
    is_root, total, every = rank == _ROOT, size * (size + 1) // 2, range(1, size + 1)
    own, zeros = [rank + 1], [0] * size
    match kind:
        case OpKind.ALLREDUCE:
            return _Factors([], own, [total], whole=True, additions=size)
        case OpKind.REDUCE:  # the others' tensors stay as they were
            return _Factors([], own, [total] if is_root else own, whole=True, additions=size)
        case OpKind.BROADCAST:
            return _Factors([], own, [_ROOT + 1], whole=True)
        case OpKind.ALLGATHER:
            return _Factors(own, zeros, [*every])
        case OpKind.GATHER:
            return _Factors(own, zeros if is_root else [], [*every] if is_root else [])
        case OpKind.SCATTER:
            return _Factors([*every] if is_root else [], [0], own)
        case OpKind.REDUCE_SCATTER:
            return _Factors([(rank + 1) * block for block in every], [0], [total * (rank + 1)], additions=size)
        case OpKind.ALLTOALL:
            blocks = [source * size for source in range(size)]
            return _Factors([rank * size + block for block in every], zeros, [block + rank + 1 for block in blocks])
        case OpKind.SEND_RECV:
            receives = rank == size - 1 != _ROOT
            return _Factors([1] if is_root else [], [0] if receives else [], [1] if receives else [], whole=True)
        case OpKind.BARRIER:
            return _Factors([], [], [])


class _Case:
    """One collective of one size: tensors for several operations in a row, and all that can carry it out."""

    def __init__(self, context: Context, kind: OpKind, size: int, dtype: torch.dtype) -> None:
        self._context, self._kind, self._dtype = context, kind, dtype
        self._is_root, self._last = context.rank == _ROOT, context.world_size - 1
        self._factors = _factors(kind, context.rank, context.world_size)
        elements = max(1, size // dtype.itemsize)
        #: Elements of the tensor, or of all blocks of one rank together.
        self.count = elements if self._factors.whole else max(1, elements // (self._last + 1)) * (self._last + 1)
        self.num_bytes = self.count * dtype.itemsize  #: Their size.
        self._times = repetitions(self.num_bytes)
        #: Several operations in a row are short. One before them is not timed, because the ranks leave a barrier at
        #: times that differ by more than one of them takes.
        self._untimed = int(self._times > 1)
        tensors = self._times + self._untimed
        block = self.count if self._factors.whole else self.count // (self._last + 1)
        self._inputs = list(torch.empty(tensors, block * len(self._factors.given), dtype=dtype))
        self._outputs = list(torch.empty(tensors, block * len(self._factors.before), dtype=dtype))
        self._shared: list[torch.Tensor] = []
        self._prepared: dict[int, PreparedOperation] = {}

    def sample(self, peer: str, schedule: str) -> _Sample:
        """Carry out a few operations, check their results, and return the average."""
        context, kind = self._context, self._kind
        if peer in context.mpi:
            name = "send" if kind is OpKind.SEND_RECV else kind.name.lower()
            dtype = str(self._dtype).removeprefix("torch.")
            return _Sample(context.mpi[peer].sample(name, self.count, self._times, dtype))
        if peer == SHARED and not self._shared:
            tensors = len(self._outputs)
            self._shared = list(context.group.empty(self.count * tensors, dtype=self._dtype).view(tensors, -1))
            self._prepared = {
                id(tensor): context.group.prepare_allreduce(tensor, name=_NAME.format(number), schedule=schedule)
                for number, tensor in enumerate(self._shared)
            }
        outputs = self._shared if peer == SHARED else self._outputs
        self._fill(outputs)
        group = None if peer == "gloo" else context.group_of(peer)
        names = [_NAME.format(number) for number in range(len(outputs))]
        calls = list(zip(names, self._inputs, outputs, strict=True))
        context.barrier()
        self._carry_out(group, calls[: self._untimed], schedule)
        sent = 0 if group is None else group.statistics().bytes_sent
        cpu_s = -time.process_time()
        begin = time.monotonic()
        self._carry_out(group, calls[self._untimed :], schedule)
        elapsed = time.monotonic() - begin
        cpu_s += time.process_time()
        if group is not None:
            sent = group.statistics().bytes_sent - sent
        context.barrier()  # nobody checks while another rank still works
        if (
            group is not None or kind is not OpKind.REDUCE or self._is_root
        ):  # gloo leaves anything in the others' tensors
            self._check(outputs, f"{kind.name.lower()} of {self.count} elements by {peer}, schedule {schedule}")
        bytes_sent = None if group is None else sent / self._times
        return _Sample(elapsed / self._times, bytes_sent, cpu_s / self._times)

    def _carry_out(
        self, group: Group | None, calls: list[tuple[str, torch.Tensor, torch.Tensor]], schedule: str
    ) -> None:
        """Carry out operations in order; each is a name, an input and an output. Without a group: by gloo."""
        for name, tensor, output in calls:
            if group is None:
                self._by_gloo(tensor, output)
            else:
                self._by_engine(group, name, tensor, output, schedule)

    def _by_engine(self, group: Group, name: str, tensor: torch.Tensor, output: torch.Tensor, schedule: str) -> None:
        match self._kind:
            case OpKind.ALLREDUCE if id(output) in self._prepared:
                self._prepared[id(output)].start().wait()
            case OpKind.ALLREDUCE:
                group.allreduce(output, name=name, schedule=schedule).wait()
            case OpKind.REDUCE:
                group.reduce(output, root=_ROOT, name=name, schedule=schedule).wait()
            case OpKind.BROADCAST:
                group.broadcast(output, root=_ROOT, name=name, schedule=schedule)
            case OpKind.ALLGATHER:
                group.allgather(output, tensor, name=name, schedule=schedule).wait()
            case OpKind.GATHER:
                group.gather(output if self._is_root else None, tensor, root=_ROOT, name=name).wait()
            case OpKind.SCATTER:
                group.scatter(output, tensor if self._is_root else None, root=_ROOT, name=name).wait()
            case OpKind.REDUCE_SCATTER:
                group.reduce_scatter(output, tensor, name=name, schedule=schedule).wait()
            case OpKind.ALLTOALL:
                group.alltoall(output, tensor, name=name).wait()
            case OpKind.SEND_RECV if self._last != _ROOT:
                if self._is_root:
                    group.send(tensor, dst=self._last).wait()
                elif len(output):
                    group.recv(output, src=_ROOT).wait()
            case _:
                group.barrier()

    def _by_gloo(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        match self._kind:
            case OpKind.ALLREDUCE:
                dist.all_reduce(output)
            case OpKind.REDUCE:
                dist.reduce(output, _ROOT)
            case OpKind.BROADCAST:
                dist.broadcast(output, _ROOT)
            case OpKind.ALLGATHER:
                _gloo_allgather(output, tensor)
            case OpKind.GATHER:
                dist.gather(tensor, self._blocks(output) if self._is_root else None, _ROOT)
            case OpKind.SCATTER:
                dist.scatter(output, self._blocks(tensor) if self._is_root else None, _ROOT)
            case OpKind.REDUCE_SCATTER:
                _gloo_reduce_scatter(output, tensor)
            case OpKind.ALLTOALL:
                dist.all_to_all_single(output, tensor)
            case OpKind.SEND_RECV if self._last != _ROOT:
                if self._is_root:
                    dist.send(tensor, self._last)
                elif len(output):
                    dist.recv(output, _ROOT)
            case _:
                dist.barrier()

    def _blocks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.view(self._last + 1, -1))

    def _fill(self, outputs: list[torch.Tensor]) -> None:
        for tensors, factors in ((self._inputs, self._factors.given), (outputs, self._factors.before)):
            for tensor in tensors if factors else ():
                for block, factor in zip(tensor.view(len(factors), -1), factors, strict=True):
                    values.fill_multiple(block, factor)

    def _check(self, outputs: list[torch.Tensor], what: str) -> None:
        factors = self._factors.after
        for output in outputs if factors else ():
            for block, factor in zip(output.view(len(factors), -1), factors, strict=True):
                values.check_multiple(block, factor, additions=self._factors.additions, what=what)
