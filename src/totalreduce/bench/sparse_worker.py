"""One rank of ``bench sparse``: one flat gradient by every method and peer, in turns, every method's result checked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from totalreduce.bench.context import Context
from totalreduce.bench.methods import make_method
from totalreduce.bench.values import WrongResultError
from totalreduce.kernels.selection import kth_magnitude
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.actions import Action, Array
from totalreduce.sparse.candidates import Workspace
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import BucketShape, Report, Session, Update

__all__ = ["GradientSource", "bucket_edges", "matrix_sides", "measure"]

_SEED = 11
_TIMEOUT_S = 300.0
#: What all ranks have in common, beside noise of their own of size 1: the gradient that training is after.
_SIGNAL = 0.1
_ROW = 64
_POOL = 2
#: Allowed difference between what came out and what went in, relative to what went in.
_TOLERANCE = 1e-5


class Contestant(Protocol):
    """A way to reduce a gradient that lies in ``gradient``."""

    gradient: Array

    def reduce(self) -> None:
        """The timed part: until the result lies where a gradient would."""

    def pending(self) -> Array | None:
        """What is to be added to the gradient before it is reduced, if there is something."""

    def update(self) -> Array:
        """The mean that the last ``reduce`` has made."""


def measure(context: Context, parameters: dict[str, Any]) -> dict[str, Any]:
    """Time every method and peer.

    Args:
        context: This rank.
        parameters: See ``sparse.make_parameters``.

    Returns:
        ``contestants``, by name: ``seconds`` by round and step; ``error`` and ``xi`` of an untimed step. Methods have
        besides, by step: ``parts`` (seconds, see ``sparse.PARTS``), ``bytes`` (sent and received, with headers and
        without), and ``counts`` (k, selected and applied, by bucket; none where a method has no k); and ``rescans``,
        the mean of a step.

    Raises:
        WrongResultError: A method's result differs between ranks, or something was lost.
    """
    source = GradientSource(parameters["elements"], parameters["distribution"], context.rank)
    names = [*parameters["methods"], *parameters["against"]]
    contestants = {name: _contestant(context, name, parameters) for name in names}
    step = 0
    for name, contestant in contestants.items():
        for number in range(parameters["warm_up"]):
            source.write(contestant.gradient, step + number)
            contestant.reduce()
        context.report(f"sparse {name}: {parameters['warm_up']} untimed steps")
    step += parameters["warm_up"]
    rows: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    for index in range(context.rounds):
        for name, contestant in contestants.items():
            _block(context, contestant, source, step, parameters["steps"], rows[name])
        step += parameters["steps"] + 1
        context.report(f"sparse: round {index + 1} of {context.rounds}")
    for name, contestant in contestants.items():
        rows[name] |= _check(context, name, contestant, source, step, parameters)
        if isinstance(contestant, _Sparse):
            contestant.close()
    context.report("sparse: results checked")
    return {"contestants": rows}


@final
class GradientSource:
    """Gradients that differ in every element, step and rank, made of a few arrays of noise.

    Args:
        num_elements: Of each.
        distribution: See ``sparse.DistributionOption``.
        rank: Ranks have noise of their own, and a tenth as much in common.
    """

    def __init__(self, num_elements: int, distribution: str, rank: int) -> None:
        """Draws the noise."""
        self._rank, self._distribution = rank, distribution
        generators = [np.random.default_rng([_SEED, rank, number]) for number in range(_POOL)]
        self._pool = [_noise(generator, num_elements, distribution) for generator in generators]
        self._signal = _noise(np.random.default_rng([_SEED]), num_elements, distribution)
        self._signal *= np.float32(_SIGNAL)

    def write(self, out: Array, step: int) -> None:
        """The gradient of a step; equal for equal steps."""
        generator = np.random.default_rng([_SEED, self._rank, _POOL, step])
        noise = self._pool[int(generator.integers(_POOL))]
        sign = np.float32(generator.choice([-1.0, 1.0]))
        turn = int(generator.integers(noise.size))
        np.multiply(noise[turn:], sign, out=out[: noise.size - turn])
        np.multiply(noise[:turn], sign, out=out[noise.size - turn :])
        out += self._signal
        if self._distribution == "embedding":
            rows = np.arange(-(-out.size // _ROW))
            # As words of a text are: the first hundredth of the rows is always there, row r with a chance of 1 / r.
            absent = generator.random(rows.size) * (rows + 1) > max(1.0, rows.size / 100)
            whole = out.size // _ROW * _ROW
            out[:whole].reshape(-1, _ROW)[absent[: whole // _ROW]] = 0.0
            if whole < out.size and absent[-1]:
                out[whole:] = 0.0


def bucket_edges(num_elements: int, bucket_elements: int) -> list[int]:
    """Where buckets begin, and where the last one ends: equal ones, as large parameters are cut."""
    pieces = -(-num_elements // bucket_elements)
    return [num_elements * piece // pieces for piece in range(pieces + 1)]


def matrix_sides(num_elements: int) -> tuple[int, int]:
    """Rows and columns of the largest nearly square matrix that so many elements fill, but for a rest."""
    columns = max(1, int(np.sqrt(num_elements)))
    return num_elements // columns, columns


def _noise(generator: np.random.Generator, num_elements: int, distribution: str) -> Array:
    if distribution == "normal":
        return generator.standard_normal(num_elements, dtype=np.float32)
    return generator.standard_t(3, num_elements).astype(np.float32)


def _contestant(context: Context, name: str, parameters: dict[str, Any]) -> Contestant:
    num_elements = parameters["elements"]
    edges = bucket_edges(num_elements, parameters["bucket_elements"])
    if name == "gloo":
        return _Gloo(num_elements, context.world_size)
    if name in ("fp16", "powersgd-hook"):
        return _Hook(name, edges)
    return _Sparse(context, name, parameters["density"], edges)


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
        self._rounds.sessions[:] = self._watches
        self.gradient, self._residual = (np.zeros(edges[-1], np.float32) for _ in range(2))
        self._update = self._residual
        self._rescans = 0
        self.sample = _Sample([], [], [], 0)

    def reduce(self) -> None:
        """See ``Contestant``; how it went is in ``sample``."""
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
        """See ``Contestant``."""
        return self._residual

    def update(self) -> Array:
        """See ``Contestant``."""
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


@final
class _Watch:
    """A session that says how long it has computed: a ``Session``.

    Attributes:
        selection_s: In the last ``accumulate``.
        coding_s: In the last ``exchange``, waiting not included.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.selection_s, self.coding_s = 0.0, 0.0

    @property
    def report(self) -> Report:
        """The session's own."""
        return self._session.report

    @report.setter
    def report(self, report: Report) -> None:
        self._session.report = report

    def share(self, workspace: Workspace) -> None:
        """See ``Session``."""
        self._session.share(workspace)

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """See ``Session``."""
        begin = time.monotonic()
        self._session.accumulate(gradients, residuals, scale)
        self.selection_s, self.coding_s = time.monotonic() - begin, 0.0

    def exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        """See ``Session``."""
        inner = self._session.exchange(present)
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

    def state(self) -> Mapping[str, Any]:
        """See ``Session``."""
        return self._session.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``Session``."""
        self._session.load_state(state)


@final
class _Gloo:
    """The dense sum, in place, by torch.distributed."""

    def __init__(self, num_elements: int, world_size: int) -> None:
        self.gradient = np.zeros(num_elements, np.float32)
        self._tensor, self._world_size = torch.from_numpy(self.gradient), world_size

    def reduce(self) -> None:
        """See ``Contestant``."""
        dist.all_reduce(self._tensor)

    def pending(self) -> Array | None:
        """See ``Contestant``."""
        return None

    def update(self) -> Array:
        """See ``Contestant``."""
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
        """See ``Contestant``."""
        self._hook(self._state, self._bucket).wait()

    def pending(self) -> Array | None:
        """See ``Contestant``."""
        error = self._state.error_dict.get(0) if self._state is not None else None
        return None if error is None else error.numpy()

    def update(self) -> Array:
        """See ``Contestant``."""
        return self.gradient


@final
class _OneBucket:
    """What hooks ask of ``torch.distributed.GradBucket``, which only DDP can make."""

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
    context: Context, contestant: Contestant, source: GradientSource, first: int, steps: int, row: dict[str, Any]
) -> None:
    """Steps in a row; the first one, untimed, brings the contestant's memory back into the caches."""
    durations = []
    after = context.group.statistics()
    for number in range(steps + 1):
        source.write(contestant.gradient, first + number)
        context.barrier()
        begin = time.monotonic()
        contestant.reduce()
        elapsed = time.monotonic() - begin
        # From one step's end to the next one's: past the barrier, a faster rank's messages may be here already.
        before, after = after, context.group.statistics()
        if number == 0:
            continue
        durations.append(elapsed)
        if isinstance(contestant, _Sparse):
            sample = contestant.sample
            moved = [after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received]
            row.setdefault("parts", []).append(sample.parts)
            row.setdefault("bytes", []).append([*moved, *sample.payload])
            row.setdefault("counts", []).append(sample.counts)
            row["rescans"] = row.get("rescans", 0.0) + sample.rescans / (steps * context.rounds)
    row["seconds"].append(durations)


def _check(
    context: Context,
    name: str,
    contestant: Contestant,
    source: GradientSource,
    step: int,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """One more step, and what came of it.

    Raises:
        WrongResultError: The result differs between ranks, or what went in is neither in it nor in the residuals.
    """
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
        return {"error": error, "xi": None}
    wanted_k = [int(max(ranks)) for ranks in zip(*context.exchange([k for k, _, _ in counts]), strict=True)]
    edges = bucket_edges(parameters["elements"], parameters["bucket_elements"])
    difference = _largest(wanted, edges, wanted_k) - _largest(update, edges, wanted_k)
    return {"error": error, "xi": _norm(difference) / (_norm(_mean(context, gradient)) or 1.0)}


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
