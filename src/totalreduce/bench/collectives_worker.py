"""One rank of ``bench collectives``: every collective by every contestant, in turns, every timed result checked.

Inputs are such that a block of the wrong rank, in the wrong place or added twice shows: every block is the pattern of
``values`` times a factor of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from totalreduce.bench import values
from totalreduce.bench.arithmetic import repetitions
from totalreduce.bench.context import Context
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.types import OpKind
from totalreduce.groups.group import Group
from totalreduce.groups.probe import selector_of

__all__ = ["measure"]

_WARMUP_ROUNDS = 1
_ROOT = 0

# torch 2.13 gave them new names.
_gloo_allgather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_gloo_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(context: Context, parameters: dict[str, Any]) -> dict[str, Any]:
    """Time each collective and size with each contestant.

    Args:
        context: This rank.
        parameters: ``kinds`` by name, ``sizes`` in bytes, and ``contestants`` by kind: pairs of a peer and a schedule
            (``auto`` unless the peer is Total Reduce).

    Returns:
        ``goodput_bits_per_s`` samples, and per kind and size the contestants' ``seconds``, what the selector would
        choose and what it expects of every schedule.

    Raises:
        WrongResultError: A timed operation left a wrong result.
    """
    goodput = [context.goodput()]
    rows = [
        _measure(context, OpKind[kind.upper()], size, parameters["contestants"][kind])
        for kind in parameters["kinds"]
        for size in parameters["sizes"]
    ]
    goodput.append(context.goodput())
    return {"goodput_bits_per_s": goodput, "rows": rows}


def _measure(context: Context, kind: OpKind, size: int, contestants: list[list[str]]) -> dict[str, Any]:
    block = max(1, size // 4 // context.world_size)
    count = block * context.world_size
    case = _Case(context, kind, count, repetitions(4 * count))
    seconds: list[list[float]] = [[] for _ in contestants]
    for index in range(-_WARMUP_ROUNDS, context.rounds):
        for (peer, schedule), samples in zip(contestants, seconds, strict=True):
            elapsed = case.sample(peer, schedule)
            if index >= 0:
                samples.append(elapsed)
    shown = kind.name.lower()
    context.report(f"{shown} {format_bytes(4 * count)}: {context.rounds} rounds of {len(contestants)} checked")
    selector = selector_of(context.group)
    return {
        "kind": shown,
        "size": 4 * count,
        "seconds": seconds,
        "expected_s": {
            str(algorithm): estimate
            for algorithm, estimate in selector.estimates(kind, 4 * count, context.group.ranks).items()
        },
    }


class _Case:
    """One collective of one size: buffers for several operations in a row, and everybody who can carry it out.

    ``count`` elements are the tensor, or all blocks of one rank together.
    """

    def __init__(self, context: Context, kind: OpKind, count: int, times: int) -> None:
        self._context, self._kind, self._count, self._times = context, kind, count, times
        self._rank, self._size = context.rank, context.world_size
        num_in, num_out = self._lengths()
        self._inputs = list(torch.empty(times, num_in))
        self._outputs = list(torch.empty(times, num_out))

    @property
    def _is_root(self) -> bool:
        return self._rank == _ROOT

    @property
    def _last(self) -> int:
        return self._size - 1

    def _lengths(self) -> tuple[int, int]:
        """Elements of this rank's input and output; what works in place has an output only."""
        whole, block = self._count, self._count // self._size
        match self._kind:
            case OpKind.ALLREDUCE | OpKind.REDUCE | OpKind.BROADCAST:
                return 0, whole
            case OpKind.ALLGATHER:
                return block, whole
            case OpKind.GATHER:
                return block, whole if self._is_root else 0
            case OpKind.SCATTER:
                return whole if self._is_root else 0, block
            case OpKind.REDUCE_SCATTER:
                return whole, block
            case OpKind.ALLTOALL:
                return whole, whole
            case OpKind.SEND_RECV:
                return whole if self._is_root else 0, whole if self._rank == self._last != _ROOT else 0
            case OpKind.BARRIER:
                return 0, 0

    def sample(self, peer: str, schedule: str) -> float:
        """Seconds of one operation on this rank.

        Raises:
            WrongResultError: A result was wrong.
        """
        context, kind = self._context, self._kind
        if peer in context.mpi:
            name = "send" if kind is OpKind.SEND_RECV else kind.name.lower()
            return context.mpi[peer].sample(name, self._count, self._times, "float32")
        self._fill()
        context.barrier()
        begin = time.monotonic()
        for tensor, output in zip(self._inputs, self._outputs, strict=True):
            if peer == "gloo":
                self._by_gloo(tensor, output)
            else:
                self._by_engine(context.group_of(peer), tensor, output, schedule)
        elapsed = time.monotonic() - begin
        if peer != "gloo" or kind is not OpKind.REDUCE or self._is_root:  # gloo leaves anything in the others' tensors
            self._check(f"{kind.name.lower()} of {self._count} elements by {peer}, schedule {schedule}")
        return elapsed / self._times

    def _by_engine(self, group: Group, tensor: torch.Tensor, output: torch.Tensor, schedule: str) -> None:
        name = "bench.collective"
        match self._kind:
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
                elif self._rank == self._last:
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
                elif self._rank == self._last:
                    dist.recv(output, _ROOT)
            case _:
                dist.barrier()

    def _blocks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.view(self._size, -1))

    def _fill(self) -> None:
        for tensor, output in zip(self._inputs, self._outputs, strict=True):
            match self._kind:
                case OpKind.ALLREDUCE | OpKind.REDUCE | OpKind.BROADCAST:
                    values.fill(output, rank=self._rank)
                    continue
                case OpKind.ALLGATHER | OpKind.GATHER:
                    values.fill(tensor, rank=self._rank)
                case OpKind.SEND_RECV:
                    values.fill_multiple(tensor, 1)
                case OpKind.SCATTER | OpKind.REDUCE_SCATTER | OpKind.ALLTOALL:
                    for index, block in enumerate(self._blocks(tensor)):
                        values.fill_multiple(block, self._factor(self._rank, index))
            output.fill_(0)

    def _factor(self, source: int, index: int) -> int:
        """Of block ``index`` of a rank's input."""
        match self._kind:
            case OpKind.REDUCE_SCATTER:
                return (source + 1) * (index + 1)
            case OpKind.ALLTOALL:
                return source * self._size + index + 1
            case _:
                return index + 1

    def _check(self, what: str) -> None:
        size, rank = self._size, self._rank
        total = size * (size + 1) // 2
        for output in self._outputs:
            match self._kind:
                case OpKind.ALLREDUCE:
                    values.check_multiple(output, total, additions=size, what=what)
                case OpKind.REDUCE:
                    # The others' tensors stay as they were.
                    expected = total if self._is_root else rank + 1
                    values.check_multiple(output, expected, additions=size, what=what)
                case OpKind.BROADCAST:
                    values.check_multiple(output, _ROOT + 1, what=what)
                case OpKind.REDUCE_SCATTER:
                    values.check_multiple(output, total * (rank + 1), additions=size, what=what)
                case OpKind.SCATTER:
                    values.check_multiple(output, rank + 1, what=what)
                case OpKind.ALLGATHER | OpKind.GATHER | OpKind.ALLTOALL if len(output):
                    for source, block in enumerate(self._blocks(output)):
                        factor = self._factor(source, rank) if self._kind is OpKind.ALLTOALL else source + 1
                        values.check_multiple(block, factor, what=what)
                case OpKind.SEND_RECV if len(output):
                    values.check_multiple(output, 1, what=what)
