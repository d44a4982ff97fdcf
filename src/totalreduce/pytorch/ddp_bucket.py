"""One bucket of DistributedDataParallel on its way: out of DDP's buffer, through the exchange, back into the buffer.

What is kept between backward passes is kept by parameter: DDP packs its buckets anew after the first pass. A parameter
that is compressed has two float32 tensors in host memory, a residual and a spare one. The gradient is copied into the
spare one, where the session adds the residual; when the whole pass is known to be good, the two change places. Until
then nothing has happened that would have to be undone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.error_feedback import ErrorFeedback, Residuals
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allreduce, Array
from totalreduce.sparse.common import counted
from totalreduce.sparse.session import BucketShape, Report, Session, Update

__all__ = ["HookBucket", "Lane", "Layout", "Memory", "Stretch"]

#: Indices are int32.
_ELEMENTS_END = 1 << 31


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a parameter's gradient lies in its bucket."""

    parameter: torch.nn.Parameter
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies where in a bucket.

    Attributes:
        compressed: What the method is given.
        whole: The small and one-dimensional rest.
    """

    compressed: tuple[Stretch, ...]
    whole: tuple[Stretch, ...]

    @classmethod
    def of(cls, parameters: Sequence[torch.nn.Parameter], feedback: ErrorFeedback) -> Layout:
        """Lay out parameters as DDP does: one after the other.

        Raises:
            UnsupportedError: One is not of a real floating type, or there are too many elements for one bucket.
        """
        sorts: tuple[list[Stretch], list[Stretch]] = ([], [])
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            spec = ParameterSpec.of("of a bucket", (), parameter, any_device=True)
            sorts[not feedback.compresses(spec.shape)].append(Stretch(parameter, begin, end))
        if end >= _ELEMENTS_END:
            raise UnsupportedError(f"ddp_hook: a bucket of {end} elements; there can be {_ELEMENTS_END - 1}")
        return cls(tuple(sorts[0]), tuple(sorts[1]))

    @property
    def shape(self) -> BucketShape:
        """Of what is compressed."""
        return BucketShape(tuple(tuple(stretch.parameter.shape) for stretch in self.compressed))


@final
class Memory:
    """Residuals, and as much again to work in."""

    def __init__(self) -> None:
        """Nothing was kept back."""
        self.residuals = Residuals()
        self._spares: dict[torch.nn.Parameter, torch.Tensor] = {}

    def residual(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What was not applied yet; zeros at first."""
        if parameter not in self.residuals.kept:
            self.residuals.kept[parameter] = _host_memory(parameter).zero_()
        return self.residuals.kept[parameter]

    def spare(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """As large, with anything in it."""
        if parameter not in self._spares:
            self._spares[parameter] = _host_memory(parameter)
        return self._spares[parameter]

    def swap(self, parameter: torch.nn.Parameter) -> None:
        """The spare one is the residual now."""
        kept = self.residuals.kept
        kept[parameter], self._spares[parameter] = self._spares[parameter], kept[parameter]


@final
class Lane:
    """Where copies between a GPU and the host go, beside the kernels of the model."""

    def __init__(self) -> None:
        """Touch no device yet."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def beside(self, device: torch.device, ready: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is done in here is done when it ends; on a GPU it begins when ``ready`` has come."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            yield
        stream.synchronize()


@final
class HookBucket:
    """One bucket in one backward pass.

    Its methods are called one after the other, though in several threads: ``take``, ``accumulate``, ``exchange`` and,
    when all buckets are through, ``commit`` or ``spoil``.

    Args:
        buffer: Its gradients, of this rank; at the end those that all ranks apply.
        layout: What lies where.
        session: Compresses what is to be compressed; ``None`` if that is nothing.
        memory: Residuals.
        lane: For copies.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        report: What happened.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        layout: Layout,
        session: Session | None,
        memory: Memory,
        lane: Lane,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """See the class; to be made in DDP's thread, on the stream that computes the gradients."""
        self._buffer, self._layout, self._session = buffer, layout, session
        self._memory, self._lane = memory, lane
        self._rank, self._world_size = rank, world_size
        self._ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self._scale = 1.0
        self._unscaled = False
        self._present: list[bool] = []
        self._velocities: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._whole = np.empty(0, np.float32)
        self._results: list[tuple[slice | torch.Tensor, torch.Tensor]] = []
        self.report = Report("dense", k=sum(stretch.end - stretch.begin for stretch in layout.whole))
        self._accumulated = Accumulator([memory.spare(stretch.parameter).numpy() for stretch in layout.compressed])

    # ------------------------------------------------------------------------------------------------------ leaving

    def take(self, loss_scale: Callable[[], float], momentum: float) -> None:
        """Take the gradients out of the buffer.

        Args:
            loss_scale: By what the loss is multiplied.
            momentum: Of ``ErrorFeedback``.
        """
        buffer = self._buffer
        with torch.no_grad(), self._lane.beside(buffer.device, self._ready):
            self._scale = loss_scale()
            for stretch in self._layout.compressed:
                self._memory.spare(stretch.parameter).copy_(buffer[stretch.begin : stretch.end])
            if self._layout.whole:
                dtype = torch.float64 if buffer.dtype is torch.float64 else torch.float32
                parts = [buffer[stretch.begin : stretch.end] for stretch in self._layout.whole]
                self._whole = torch.cat(parts).to("cpu", dtype).numpy()
            buffer.zero_()  # here, and not when all wait for the result
        self._present = [_any(segment) for segment in self._accumulated.segments]
        if momentum:
            for stretch in self._layout.compressed:
                self._correct(stretch.parameter, momentum)
            self._unscaled = True

    def _correct(self, parameter: torch.nn.Parameter, momentum: float) -> None:
        flat, velocity = self._memory.spare(parameter), self._memory.residuals.velocities.get(parameter)
        flat.div_(self._scale)
        if velocity is not None:
            flat.add_(velocity, alpha=momentum)
        self._velocities[parameter] = flat.clone()

    def squares(self) -> float:
        """The square of the norm of what is compressed."""
        scale = 1.0 if self._unscaled else self._scale
        flats = (torch.from_numpy(segment) for segment in self._accumulated.segments)
        return sum((float(torch.linalg.vector_norm(flat, dtype=torch.float64)) / scale) ** 2 for flat in flats)

    def accumulate(self, clip: float) -> None:
        """Add the residuals, and choose. ``clip``: factor of the gradients."""
        if self._session is None:
            return
        residuals = Accumulator(
            [self._memory.residual(stretch.parameter).numpy() for stretch in self._layout.compressed]
        )
        scale = clip if self._unscaled else clip / self._scale
        self._session.accumulate(self._accumulated, residuals, scale)
        self.report = self._session.report

    def exchange(self) -> Generator[Action, Any, bool]:
        """Agree with the other ranks on the sum. Whether it is finite: the same on all ranks."""
        if self._whole.size:
            yield from counted(_sum(self._whole), self._rank, self._world_size, self.report)
            if not self._settle_whole():
                return False
        if self._session is None:
            return True
        update = yield from self._session.exchange(np.array(self._present, np.bool_))
        return update is not None and self._settle(update)

    # ---------------------------------------------------------------------------------------------- and coming back

    def commit(self) -> None:
        """The pass is good: put the means into the buffer, and keep what was not applied."""
        buffer = self._buffer
        with torch.no_grad(), self._lane.beside(buffer.device):
            for place, values in self._results:
                buffer[place.to(buffer.device) if isinstance(place, torch.Tensor) else place] = values.to(buffer.device)
        for stretch in self._layout.compressed:
            self._memory.swap(stretch.parameter)
        self._memory.residuals.velocities.update(self._velocities)
        self._results.clear()

    def spoil(self) -> None:
        """Some rank's gradients are not finite, here or in another bucket: say so, and keep everything as it was."""
        with torch.no_grad(), self._lane.beside(self._buffer.device):
            self._buffer.fill_(math.nan)
        self.report.skipped = True
        self._results.clear()

    def _settle_whole(self) -> bool:
        means = (torch.from_numpy(self._whole) / self._world_size).to(self._buffer.dtype)
        begin = 0
        for stretch in self._layout.whole:
            end = begin + stretch.end - stretch.begin
            self._results.append((slice(stretch.begin, stretch.end), means[begin:end]))
            begin = end
        return bool(means.isfinite().all())

    def _settle(self, update: Update) -> bool:
        """Prepare what ``commit`` writes; whether it is finite, as numbers of the buffer's type."""
        if update.indices is None:
            return self._settle_dense(update)
        accumulated, indices, values = self._accumulated, update.indices, update.values
        used = np.repeat(update.present, accumulated.spread(indices))
        if not used.all():
            accumulated.add(indices[~used], values[~used], 1.0 / self._world_size)
            indices, values = indices[used], values[used]
        if self._velocities:  # factor masking: what was applied loses its velocity
            Accumulator([flat.numpy() for flat in self._velocities.values()]).erase(indices)
        means, cut_off = self._rounded(values)
        if cut_off is not None:
            accumulated.add(indices, cut_off)
        shifts = [
            stretch.begin - start
            for stretch, (start, _) in zip(self._layout.compressed, accumulated.pieces(), strict=True)
        ]
        places = indices + np.repeat(np.array(shifts, np.int64), accumulated.spread(indices))
        self._results.append((torch.from_numpy(places), means))
        return bool(means.isfinite().all())

    def _settle_dense(self, update: Update) -> bool:
        finite = True
        pieces = zip(self._layout.compressed, self._accumulated.pieces(), update.present, strict=True)
        for stretch, (start, segment), used in pieces:
            values = update.values[start : start + segment.size]
            if not used:
                segment[...] += values / np.float32(self._world_size)
                continue
            means, cut_off = self._rounded(values)
            if cut_off is not None:
                segment[...] += cut_off
            self._results.append((slice(stretch.begin, stretch.end), means))
            finite = finite and bool(means.isfinite().all())
        return finite

    def _rounded(self, sums: Array) -> tuple[torch.Tensor, Array | None]:
        """The means as gradients of the buffer's type, and what each rank keeps of what that cuts off."""
        exact = torch.from_numpy(sums) * (self._scale / self._world_size)
        means = exact.to(self._buffer.dtype)
        narrow = means.element_size() < exact.element_size()
        return means, ((exact - means.float()) / self._scale).numpy() if narrow else None


def _sum(values: Array) -> Generator[Action, Any, None]:
    yield Allreduce(values)


def _host_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.empty(parameter.numel(), dtype=torch.float32, device="cpu", pin_memory=parameter.is_cuda)


def _any(segment: Array) -> bool:
    """Whether an element is not zero. A parameter that the pass did not use has only zeros in the buffer."""
    begin, size = 0, 4096  # as a rule there is one among the first few
    while begin < segment.size:
        if segment[begin : begin + size].any():
            return True
        begin, size = begin + size, 4 * size
    return False
