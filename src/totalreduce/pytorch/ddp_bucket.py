"""One bucket of DistributedDataParallel on its way: out of DDP's buffer, through the exchange, back into the buffer.

What is kept between backward passes is kept by parameter: DDP packs its buckets anew after the first pass. A residual
is float32 and lies where the parameter does. The session adds it to the gradient in DDP's own buffer, and only when the
whole pass is known to be good is what remains there copied to the residual: until then nothing has happened that would
have to be undone. Of a buffer with narrower numbers the gradient is copied into a spare float32 tensor first, which
changes places with the residual in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.correction import MomentumCorrection
from totalreduce.pytorch.error_feedback import ErrorFeedback, Residuals
from totalreduce.sparse.actions import Action, Allreduce, Array
from totalreduce.sparse.common import counted
from totalreduce.sparse.device import Lane, accumulator_of
from totalreduce.sparse.session import BucketShape, Report, Session, Update

__all__ = ["HookBucket", "Layout", "Memory", "Stretch"]

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
    """Residuals, and as much again to work in where DDP's buffers are not of float32."""

    def __init__(self) -> None:
        """Nothing was kept back."""
        self.residuals = Residuals()
        self._spares: dict[torch.nn.Parameter, torch.Tensor] = {}

    def spare(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """As large as its residual, with anything in it."""
        if parameter not in self._spares:
            self._spares[parameter] = torch.empty_like(self.residuals.of(parameter))
        return self._spares[parameter]

    def swap(self, parameter: torch.nn.Parameter) -> None:
        """The spare one is the residual now."""
        kept = self.residuals.kept
        kept[parameter], self._spares[parameter] = self._spares[parameter], kept[parameter]


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
        feedback: The settings.
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
        feedback: ErrorFeedback,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """See the class; to be made in DDP's thread, on the stream that computes the gradients."""
        self._buffer, self._layout, self._session = buffer.detach(), layout, session
        self._memory, self._lane = memory, lane
        self._rank, self._world_size = rank, world_size
        self._ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self._scale = 1.0
        self._feedback = feedback
        self._correction = MomentumCorrection(memory.residuals, feedback.momentum)
        self._present: list[bool] = []
        self._whole = np.empty(0, np.float32)
        #: Where means belong, and they.
        self._means: list[tuple[slice, torch.Tensor]] = []
        self._sparse_means: tuple[Array, torch.Tensor] | None = None
        self.report = Report("dense", k=sum(stretch.end - stretch.begin for stretch in layout.whole))
        self._in_place = buffer.dtype is torch.float32
        self._flats = [
            self._buffer[stretch.begin : stretch.end] if self._in_place else memory.spare(stretch.parameter)
            for stretch in layout.compressed
        ]
        self._accumulated = accumulator_of(self._flats, lane)

    # ------------------------------------------------------------------------------------------------------ leaving

    def take(self, loss_scale: Callable[[], float]) -> None:
        """Take the gradients out of the buffer. ``loss_scale`` returns the factor of the loss."""
        buffer = self._buffer
        with self._lane.beside(buffer.device, self._ready):
            self._scale = loss_scale()
            if not self._in_place:
                for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                    flat.copy_(buffer[stretch.begin : stretch.end])
            if self._layout.whole:
                dtype = torch.float64 if buffer.dtype is torch.float64 else torch.float32
                parts = [buffer[stretch.begin : stretch.end] for stretch in self._layout.whole]
                self._whole = torch.cat(parts).to("cpu", dtype).numpy()
        # A parameter that the pass did not use has only zeros in the buffer.
        self._present = self._accumulated.present()
        if self._feedback.momentum:
            with self._lane.beside(buffer.device, self._ready):
                for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                    self._correction.correct(stretch.parameter, flat, self._scale)

    def norm(self) -> float:
        """Return the norm of the compressed gradients, unscaled. Velocities are unscaled already."""
        norm = self._accumulated.norm()
        return norm if self._feedback.momentum else norm / self._scale

    def accumulate(self, clip: float) -> None:
        """Add the residuals, and choose. ``clip``: factor of the gradients."""
        if self._session is None:
            return
        kept = [self._memory.residuals.of(stretch.parameter) for stretch in self._layout.compressed]
        residuals = accumulator_of(kept, self._lane)
        scale = clip if self._feedback.momentum else clip / self._scale
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
        buffer, kept = self._buffer, self._memory.residuals
        with self._lane.beside(buffer.device):
            for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                if self._in_place:
                    kept.of(stretch.parameter).copy_(flat)
                else:
                    self._memory.swap(stretch.parameter)
                    buffer[stretch.begin : stretch.end] = 0
        if self._in_place:
            self._accumulated.clear()
        if self._sparse_means is not None:
            self._spread(*self._sparse_means)
        with self._lane.beside(buffer.device):
            for place, values in self._means:
                buffer[place] = values.to(buffer.device)
        self._correction.commit()
        self._forget()

    def _spread(self, indices: Array, means: torch.Tensor) -> None:
        if self._in_place:
            self._accumulated.put(indices, means.numpy())
            return
        begins = [stretch.begin for stretch in self._layout.compressed]
        shifts = np.array(begins, np.int64) - self._accumulated.starts()
        places = torch.from_numpy(indices + np.repeat(shifts, self._accumulated.spread(indices)))
        with self._lane.beside(self._buffer.device):
            self._buffer[places.to(self._buffer.device)] = means.to(self._buffer.device)

    def spoil(self) -> None:
        """Some rank's gradients are not finite, here or in another bucket: say so, and keep everything as it was."""
        with self._lane.beside(self._buffer.device):
            self._buffer.fill_(math.nan)
        self.report.skipped = True
        self._correction.discard()
        self._forget()

    def _forget(self) -> None:
        self._means, self._sparse_means = [], None

    def _settle_whole(self) -> bool:
        means = (torch.from_numpy(self._whole) / self._world_size).to(self._buffer.dtype)
        begin = 0
        for stretch in self._layout.whole:
            end = begin + stretch.end - stretch.begin
            self._means.append((slice(stretch.begin, stretch.end), means[begin:end]))
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
        if self._correction.pending:  # factor masking: what was applied loses its velocity
            accumulator_of(list(self._correction.pending.values()), self._lane).erase(indices)
        means, cut_off = self._rounded(values)
        if cut_off is not None:
            accumulated.add(indices, cut_off)
        self._sparse_means = indices, means
        return bool(means.isfinite().all())

    def _settle_dense(self, update: Update) -> bool:
        finite = True
        for number, (stretch, used) in enumerate(zip(self._layout.compressed, update.present, strict=True)):
            start = self._accumulated.starts()[number]
            values = update.values[start : start + stretch.end - stretch.begin]
            part = accumulator_of(self._flats[number : number + 1], self._lane)
            if not used:
                part.add_all(values, 1.0 / self._world_size)
                continue
            means, cut_off = self._rounded(values)
            if cut_off is not None:
                part.add_all(cut_off, 1.0)
            self._means.append((slice(stretch.begin, stretch.end), means))
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
