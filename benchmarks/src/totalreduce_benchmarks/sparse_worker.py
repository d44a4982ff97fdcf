"""One rank of ``bench sparse``: one flat gradient by every method and peer, in turns, every method's result checked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from totalreduce.bench.context import Context
from totalreduce.bench.gradients import GradientSource
from totalreduce.bench.methods import make_method
from totalreduce.bench.values import WrongResultError
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.selection import kth_magnitude
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.actions import Action
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import BucketShape, Session, Update
from totalreduce_benchmarks.sparse import PEERS, ContestantSamples, SparseParameters, SparseSamples

_TIMEOUT_S = 300.0
#: Allowed difference between results with residuals and gradients, relative to the gradients.
_TOLERANCE = 1e-5


class Contestant(Protocol):
    """A way to reduce a gradient that lies in ``gradient``."""

    gradient: Array

    def reduce(self) -> None:
        """The timed part: until the result lies where a gradient would."""

    def pending(self) -> Array | None:
        """Return the residual that is added to the gradient before it is reduced, if there is one."""

    def update(self) -> Array:
        """Return the mean that the last ``reduce`` has made."""


def measure(context: Context, parameters: SparseParameters) -> SparseSamples:
    """Time every method and peer."""
    source = GradientSource(parameters.count, parameters.distribution, context.rank)
    names = [*parameters.method_names, *parameters.peers]
    contestants = {name: _contestant(context, name, parameters) for name in names}
    step = 0
    for name, contestant in contestants.items():
        for number in range(parameters.warm_up):
            source.write(contestant.gradient, step + number)
            contestant.reduce()
        context.report(f"sparse {name}: {parameters.warm_up} untimed steps")
    step += parameters.warm_up
    rows = {name: ContestantSamples([]) for name in names}
    rescans = dict.fromkeys(names, 0)
    for index in range(context.rounds):
        for name, contestant in contestants.items():
            rescans[name] += _block(context, contestant, source, range(step, step + parameters.steps + 1), rows[name])
        step += parameters.steps + 1
        context.report(f"sparse: round {index + 1} of {context.rounds}")
    for name, contestant in contestants.items():
        error, xi = _check(context, name, contestant, source, step, parameters)
        rescans_of_step = rescans[name] / (parameters.steps * context.rounds)
        rows[name] = replace(rows[name], error=error, xi=xi, rescans=rescans_of_step)
        if isinstance(contestant, _Sparse):
            contestant.close()
    context.report("sparse: results checked")
    return SparseSamples(rows)


def _contestant(context: Context, name: str, parameters: SparseParameters) -> Contestant:
    if name == "gloo":
        return _Gloo(parameters.count, context.world_size)
    if name in PEERS:
        return _Hook(name, parameters.edges)
    return _Sparse(context, name, parameters.density, parameters.edges)


@dataclass(slots=True)
class _Sample:
    """One step of a method: seconds by ``sparse.PARTS``, payload, and k, selected and applied by bucket."""

    parts: list[float]
    payload: list[int]
    counts: list[list[int]]
    rescans: int


@final
class _Sparse:
    """A method, with the two pieces of memory that ``CompressedReducer`` has for a parameter: they change places."""

    def __init__(self, context: Context, name: str, density: float, edges: list[int]) -> None:
        method = make_method(name, density)
        shapes = []
        for low, high in pairwise(edges):
            rows, columns = matrix_sides(high - low) if method.whole else (0, 0)
            rest = high - low - rows * columns
            shapes.append(BucketShape((*([(rows, columns)] if rows else []), *([(rest,)] if rest else []))))
        self._factor = 1 / context.world_size
        self._edges, self._shapes = edges, shapes
        self._rounds = SparseRounds([method] * len(shapes), shapes, GroupDriver(context.group, f"bench {name}"))
        self._watches = [_Watch(session) for session in self._rounds.sessions]
        self.gradient, self._residual = (np.zeros(edges[-1], np.float32) for _ in range(2))
        self._update = self._residual
        self._rescans = 0
        self.sample = _Sample([], [], [], 0)

    def reduce(self) -> None:
        begin = time.monotonic()
        gradients, residuals = self._segments(self.gradient), self._segments(self._residual)
        for number, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True)):
            present = [True] * len(self._shapes[number].shapes)
            self._rounds.start(number, gradient, residual, present=present, priority=number)
        updates = self._rounds.finish(_TIMEOUT_S)
        if updates is None:
            raise WrongResultError("a finite gradient was taken for one that is not")
        exchanged = time.monotonic()
        for residual, update in zip(residuals, updates, strict=True):
            update.write_to(residual, self._factor)
        end = time.monotonic()
        self.gradient, self._residual = self._residual, self.gradient
        self._update = self.gradient
        self._take_sample(exchanged - begin, end - exchanged, updates)

    def pending(self) -> Array | None:
        return self._residual

    def update(self) -> Array:
        return self._update

    def close(self) -> None:
        """End its thread."""
        self._rounds.close()

    def _segments(self, memory: Array) -> list[HostAccumulator]:
        found = []
        for low, shape in zip(self._edges[:-1], self._shapes, strict=True):
            inner = np.cumsum([low, *shape.sizes]).tolist()
            found.append(HostAccumulator([memory[start:stop] for start, stop in pairwise(inner)]))
        return found

    def _take_sample(self, exchange_s: float, writing_s: float, updates: Sequence[Update]) -> None:
        reports = self._rounds.reports()
        selection_s = sum(watch.selection_s for watch in self._watches)
        coding_s = sum(watch.coding_s for watch in self._watches)
        rescans = sum(report.rescans for report in reports)
        counted = all(update.indices is not None for update in updates)
        self.sample = _Sample(
            [selection_s, coding_s, exchange_s - selection_s - coding_s, writing_s],
            [sum(report.sent_bytes for report in reports), sum(report.received_bytes for report in reports)],
            [[report.k, report.selected, report.applied] for report in reports] if counted else [],
            rescans - self._rescans,
        )
        self._rescans = rescans


class _Watch:
    """Measures how long a session computes.

    Attributes:
        selection_s: In the last ``accumulate``.
        coding_s: In the last ``exchange``, waiting not included.
    """

    def __init__(self, session: Session) -> None:
        self._accumulate, self._exchange = session.accumulate, session.exchange
        self.selection_s, self.coding_s = 0.0, 0.0
        # The session keeps its place among the others; only these two methods of this one object are measured.
        vars(session).update(accumulate=self._timed_accumulate, exchange=self._timed_exchange)

    def _timed_accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        begin = time.monotonic()
        self._accumulate(gradients, residuals, scale)
        self.selection_s, self.coding_s = time.monotonic() - begin, 0.0

    def _timed_exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        inner = self._exchange(present)
        reply = None
        while True:
            begin = time.monotonic()
            try:
                action = inner.send(reply)
            except StopIteration as stop:
                result: Update | None = stop.value
                return result
            finally:
                self.coding_s += time.monotonic() - begin
            reply = yield action


@final
class _Gloo:
    """The dense sum, in place, by torch.distributed."""

    def __init__(self, num_elements: int, world_size: int) -> None:
        self.gradient = np.zeros(num_elements, np.float32)
        self._tensor, self._world_size = torch.from_numpy(self.gradient), world_size

    def reduce(self) -> None:
        dist.all_reduce(self._tensor)

    def pending(self) -> Array | None:
        return None

    def update(self) -> Array:
        return self.gradient / np.float32(self._world_size)


@final
class _Hook:
    """A communication hook of torch's DDP, given one bucket that holds the whole gradient.

    The PowerSGD hook sees the matrices that ``powersgd`` sees. One bucket, because over gloo its collectives would
    leave in different orders on the ranks with more.
    """

    def __init__(self, name: str, edges: list[int]) -> None:
        self.gradient = np.zeros(edges[-1], np.float32)
        tensor = torch.from_numpy(self.gradient)
        parts = []
        for low, high in pairwise(edges):
            rows, columns = matrix_sides(high - low)
            parts.append(tensor[low : low + rows * columns].view(rows, columns))
            if low + rows * columns < high:
                parts.append(tensor[low + rows * columns : high])
        self._bucket: Any = _OneBucket(tensor, parts)
        self._state: Any = None
        self._hook: Any = default_hooks.fp16_compress_hook
        if name == "powersgd-hook":
            self._hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=PowerSGD().rank, start_powerSGD_iter=2
            )

    def reduce(self) -> None:
        self._hook(self._state, self._bucket).wait()

    def pending(self) -> Array | None:
        error = self._state.error_dict.get(0) if self._state is not None else None
        return None if error is None else error.numpy()

    def update(self) -> Array:
        return self.gradient


@final
class _OneBucket:
    """The methods of ``torch.distributed.GradBucket`` that hooks call; only DDP can make a real one."""

    def __init__(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._tensor, self._parts = tensor, parts

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def gradients(self) -> list[torch.Tensor]:
        return self._parts

    @staticmethod
    def index() -> int:
        return 0

    @staticmethod
    def is_last() -> bool:
        return True


def _block(
    context: Context, contestant: Contestant, source: GradientSource, steps: range, row: ContestantSamples
) -> int:
    """Time steps in a row; the first one, untimed, brings the contestant's memory back into the caches.

    Returns:
        How often candidates were listed again in the timed steps.
    """
    durations = []
    rescans = 0
    after = context.group.statistics()
    for step in steps:
        source.write(contestant.gradient, step)
        context.barrier()
        begin = time.monotonic()
        contestant.reduce()
        elapsed = time.monotonic() - begin
        # From one step's end to the next one's: past the barrier, a faster rank's messages may be here already.
        before, after = after, context.group.statistics()
        if step == steps[0]:
            continue
        durations.append(elapsed)
        if isinstance(contestant, _Sparse):
            sample = contestant.sample
            moved = [after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received]
            row.parts.append(sample.parts)
            row.bytes.append([*moved, *sample.payload])
            row.counts.append(sample.counts)
            rescans += sample.rescans
    row.seconds.append(durations)
    return rescans


def _check(
    context: Context,
    name: str,
    contestant: Contestant,
    source: GradientSource,
    step: int,
    parameters: SparseParameters,
) -> tuple[float, float | None]:
    """Check one more step; returns the update's error and, where there is a k, xi."""
    source.write(contestant.gradient, step)
    gradient = contestant.gradient.copy()
    pending = contestant.pending()
    accumulated = gradient if pending is None else gradient + pending
    contestant.reduce()
    update = contestant.update()
    wanted = _mean(context, accumulated)
    counts: list[list[int]] = []
    if isinstance(contestant, _Sparse):
        counts = contestant.sample.counts
        digests = context.exchange([float(zlib.crc32(update.tobytes()))])
        if any(digest != digests[0] for digest in digests):
            raise WrongResultError(f"the results of {name} differ between ranks")
        kept = contestant.pending()
        assert kept is not None
        lost = _norm(_mean(context, accumulated - kept) - update) / (_norm(accumulated) or 1.0)
        if not lost <= _TOLERANCE:
            raise WrongResultError(f"{name} has lost {lost:.1e} of what went in (rounding explains {_TOLERANCE:.0e})")
    error = _norm(update - wanted) / (_norm(wanted) or 1.0)
    if not counts:
        return error, None
    wanted_k = [int(max(ranks)) for ranks in zip(*context.exchange([k for k, _, _ in counts]), strict=True)]
    edges = parameters.edges
    difference = _largest(wanted, edges, wanted_k) - _largest(update, edges, wanted_k)
    return error, _norm(difference) / (_norm(_mean(context, gradient)) or 1.0)


def _mean(context: Context, values: Array) -> Array:
    """Over all ranks, by gloo."""
    total = torch.from_numpy(values.copy())
    dist.all_reduce(total)
    mean: Array = total.div_(context.world_size).numpy()
    return mean


def _norm(values: Array) -> float:
    return float(torch.from_numpy(values).double().norm())


def _largest(values: Array, edges: list[int], counts: list[int]) -> Array:
    """The k largest elements of every bucket, at their places."""
    found = np.zeros_like(values)
    for low, high, k in zip(edges[:-1], edges[1:], counts, strict=True):
        if k:
            part = values[low:high]
            bound = np.array(max(1, kth_magnitude([part], k).bits), np.int32).view(np.float32)
            chosen = np.abs(part) >= bound
            found[low:high][chosen] = part[chosen]
    return found


def matrix_sides(num_elements: int) -> tuple[int, int]:
    """Rows and columns of the largest nearly square matrix that so many elements fill, but for a rest."""
    columns = max(1, int(np.sqrt(num_elements)))
    return num_elements // columns, columns
