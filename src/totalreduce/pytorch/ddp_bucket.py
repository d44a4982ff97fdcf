"""One bucket of DistributedDataParallel on its way: out of DDP's buffer, through the exchange, back into the buffer.

Residuals and velocities are kept by parameter, because DDP packs its buckets anew after the first backward pass. A
residual is float32 and on its parameter's device. The session adds it to the gradient in DDP's own buffer. Only when
the whole pass is known to have a result is the rest that remains there copied to a spare tensor, which becomes the
residual; the one before it can come back (``ddp_memory``). If the buffer has a narrower dtype, the gradient is first
copied to the spare tensor, and accumulated there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.error_feedback import ErrorFeedback, MomentumCorrection
from totalreduce.sparse.actions import Action, Allreduce
from totalreduce.sparse.common import counted
from totalreduce.sparse.device import accumulator_of
from totalreduce.sparse.session import BucketShape, Report, Session, Update
from totalreduce.tensors.streams import SideStreams, current_stream, is_on_accelerator, record

__all__ = ["BucketLayout", "HookBucket", "HookSettings", "Parameters", "Regrouped"]

Parameters = tuple[torch.nn.Parameter, ...]

#: Indices are int32.
_ELEMENTS_END = 1 << 31


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The place of a parameter's gradient in its bucket, and the matrix that it is there."""

    parameter: torch.nn.Parameter
    begin: int
    end: int
    matrix: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The places of all gradients in a bucket."""

    compressed: tuple[_Stretch, ...]  #: The gradients that the method compresses.
    dense: tuple[_Stretch, ...]  #: The small and one-dimensional ones, which are summed.

    @classmethod
    def of(cls, parameters: Sequence[torch.nn.Parameter], feedback: ErrorFeedback) -> BucketLayout:
        """Place the gradients as DDP does: one after the other. Raises ``UnsupportedError``."""
        compressed: list[_Stretch] = []
        dense: list[_Stretch] = []
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            spec = ParameterSpec.of("of a bucket", (), parameter)
            (compressed if feedback.compresses(spec.shape) else dense).append(
                _Stretch(parameter, begin, end, spec.matrix)
            )
        if end >= _ELEMENTS_END:
            raise UnsupportedError(f"ddp_hook: a bucket of {end} elements; there can be {_ELEMENTS_END - 1}")
        return cls(tuple(compressed), tuple(dense))

    @property
    def shape(self) -> BucketShape:
        """The shape of the compressed part."""
        return BucketShape(tuple(stretch.matrix for stretch in self.compressed))


@dataclass(frozen=True, slots=True)
class HookSettings:
    """The settings and memory that all buckets of one ``SparseHookState`` share."""

    feedback: ErrorFeedback
    rank: int
    world_size: int
    memory: Memory  #: The residuals.
    streams: SideStreams  #: The streams on which GPUs copy.


@final
class HookBucket:
    """One bucket in one backward pass. Its buffer has this rank's gradients, and in the end those that all ranks apply.

    Its methods are called one after the other, though in several threads: ``take``, ``accumulate``, ``exchange`` and,
    when the exchanges of all buckets have ended, ``commit`` or ``spoil``.
    """

    def __init__(
        self, buffer: torch.Tensor, layout: BucketLayout, session: Session | None, settings: HookSettings
    ) -> None:
        """Called in DDP's thread, on the stream that computes the gradients."""
        self._buffer, self._layout, self._session, self._settings = buffer.detach(), layout, session, settings
        self._ready = None
        if is_on_accelerator(buffer):
            self._ready = record(current_stream(buffer.device), buffer.device)
        self._scale = 1.0
        self._correction = MomentumCorrection(settings.memory.residuals, settings.feedback.momentum)
        self._present: list[bool] = []
        self._dense = np.empty(0, np.float32)
        #: Means and their places: whole stretches, and single elements.
        self._means: list[tuple[slice, torch.Tensor]] = []
        self._sparse_means: tuple[Array, torch.Tensor] | None = None
        #: The report on the exchange.
        self.report = Report("dense", k=sum(stretch.end - stretch.begin for stretch in layout.dense))
        self._flats = [
            self._buffer[stretch.begin : stretch.end] if self._in_place else settings.memory.spare(stretch.parameter)
            for stretch in layout.compressed
        ]
        kept = [settings.memory.residuals.of(stretch.parameter) for stretch in layout.compressed]
        self._accumulated = accumulator_of(self._flats, settings.streams)
        self._residuals = accumulator_of(kept, settings.streams)  # those that are new are set to zero on this stream

    @property
    def _in_place(self) -> bool:
        """Whether the gradients are accumulated in DDP's buffer."""
        return self._buffer.dtype is torch.float32

    def take(self, loss_scale: Callable[[], float]) -> None:
        """Take the gradients out of the buffer. ``loss_scale`` returns the factor of the loss."""
        buffer, streams = self._buffer, self._settings.streams
        with streams.beside(buffer.device, self._ready):
            self._scale = loss_scale()
            if not self._in_place:
                for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                    flat.copy_(buffer[stretch.begin : stretch.end])
            if self._layout.dense:
                dtype = torch.float64 if buffer.dtype is torch.float64 else torch.float32
                parts = [buffer[stretch.begin : stretch.end] for stretch in self._layout.dense]
                self._dense = torch.cat(parts).to("cpu", dtype).numpy()
        # A parameter that the pass did not use has only zeros in the buffer.
        self._present = self._accumulated.present()
        if self._settings.feedback.momentum:
            with streams.beside(buffer.device, self._ready):
                for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                    self._correction.correct(stretch.parameter, flat, self._scale)

    def norm(self) -> float:
        """Return the norm of the compressed gradients, unscaled."""
        return self._accumulated.norm() / self._correction.scale_after(self._scale)

    def accumulate(self, clip: float) -> None:
        """Multiply the gradients by ``clip``, add the residuals, and select the elements to send."""
        if self._session is None:
            return
        self._session.accumulate(self._accumulated, self._residuals, clip / self._correction.scale_after(self._scale))
        self.report = self._session.report

    def exchange(self) -> Generator[Action, Any, bool]:
        """Compute the sum over all ranks; return whether it is finite, which is equal on all ranks."""
        if self._dense.size:
            yield from counted(_sum(self._dense), self._settings.rank, self._settings.world_size, self.report)
            if not self._use_dense():
                return False
        if self._session is None:
            return True
        update = yield from self._session.exchange(np.array(self._present, np.bool_))
        return update is not None and self._use(update)

    def commit(self) -> None:
        """Put the means into the buffer, and keep the rest that was not applied: the pass has a result."""
        buffer, memory, streams = self._buffer, self._settings.memory, self._settings.streams
        with streams.beside(buffer.device):
            for stretch, flat in zip(self._layout.compressed, self._flats, strict=True):
                parameter = stretch.parameter
                if self._in_place:
                    memory.spare(parameter).copy_(flat)
                else:
                    buffer[stretch.begin : stretch.end] = 0
                memory.renew(parameter, self._correction.pending.pop(parameter, None))
        if self._in_place:
            self._accumulated.clear()
        if self._sparse_means is not None:
            self._put(*self._sparse_means)
        with streams.beside(buffer.device):
            for place, values in self._means:
                buffer[place] = values.to(buffer.device)
        self._means, self._sparse_means = [], None

    def spoil(self) -> None:
        """Fill the buffer with NaN, and keep residuals and velocities as they were: some gradients are not finite."""
        with self._settings.streams.beside(self._buffer.device):
            self._buffer.fill_(math.nan)
        self.report.skipped = True
        self._correction.discard()
        self._means, self._sparse_means = [], None

    def _put(self, indices: Array, means: torch.Tensor) -> None:
        """Write the means of single elements into the buffer."""
        if self._in_place:
            self._accumulated.put(indices, means.numpy())
            return
        begins = [stretch.begin for stretch in self._layout.compressed]
        shifts = np.array(begins, np.int64) - self._accumulated.starts()
        places = torch.from_numpy(indices + np.repeat(shifts, self._accumulated.spread(indices)))
        with self._settings.streams.beside(self._buffer.device):
            self._buffer[places.to(self._buffer.device)] = means.to(self._buffer.device)

    def _use_dense(self) -> bool:
        """Prepare the means of the summed gradients for ``commit``; return whether they are finite."""
        means = (torch.from_numpy(self._dense) / self._settings.world_size).to(self._buffer.dtype)
        begin = 0
        for stretch in self._layout.dense:
            end = begin + stretch.end - stretch.begin
            self._means.append((slice(stretch.begin, stretch.end), means[begin:end]))
            begin = end
        return bool(means.isfinite().all())

    def _use(self, update: Update) -> bool:
        """Prepare the means of an update for ``commit``; return whether they are finite in the buffer's dtype."""
        if update.indices is None:
            return self._use_all(update)
        accumulated, indices, values = self._accumulated, update.indices, update.values
        used = np.repeat(update.present, accumulated.spread(indices))
        if not used.all():
            accumulated.add(indices[~used], values[~used], 1.0 / self._settings.world_size)
            indices, values = indices[used], values[used]
        if self._correction.pending:  # factor masking
            pending = list(self._correction.pending.values())
            accumulator_of(pending, self._settings.streams, settled=True).erase(indices)
        means, cut_off = self._rounded(values)
        if cut_off is not None:
            accumulated.add(indices, cut_off)
        self._sparse_means = indices, means
        return bool(means.isfinite().all())

    def _use_all(self, update: Update) -> bool:
        """Do the same for an update of all elements."""
        finite = True
        for number, (stretch, used) in enumerate(zip(self._layout.compressed, update.present, strict=True)):
            start = self._accumulated.starts()[number]
            values = update.values[start : start + stretch.end - stretch.begin]
            part = accumulator_of(self._flats[number : number + 1], self._settings.streams, settled=True)
            if not used:
                part.add_all(values, 1.0 / self._settings.world_size)
                continue
            means, cut_off = self._rounded(values)
            if cut_off is not None:
                part.add_all(cut_off, 1.0)
            self._means.append((slice(stretch.begin, stretch.end), means))
            finite = finite and bool(means.isfinite().all())
        return finite

    def _rounded(self, sums: Array) -> tuple[torch.Tensor, Array | None]:
        """Return the means in the buffer's dtype, and the share of the rounding errors that each rank keeps."""
        exact = torch.from_numpy(sums) * (self._scale / self._settings.world_size)
        means = exact.to(self._buffer.dtype)
        narrow = means.element_size() < exact.element_size()
        return means, ((exact - means.float()) / self._scale).numpy() if narrow else None


@final
class Regrouped:
    """The gradients of DDP's buckets of one pass, copied into other buckets, and back."""

    @staticmethod
    def is_possible(arrived: Sequence[tuple[torch.Tensor, Parameters]], wanted: Sequence[Parameters]) -> bool:
        """Whether the wanted buckets are others than DDP's, and have the same parameters, each once and of one kind."""
        keys = [parameters for _, parameters in arrived]
        mine, theirs = ([each for key in listed for each in key] for listed in (wanted, keys))
        kinds = {parameter: (buffer.dtype, buffer.device) for buffer, key in arrived for parameter in key}
        return (
            set(keys) != set(wanted)
            and len(mine) == len(theirs)
            and set(mine) == set(theirs)
            and all(len({kinds[parameter] for parameter in key}) == 1 for key in wanted)
        )

    def __init__(self, arrived: Sequence[tuple[torch.Tensor, Parameters]], wanted: Sequence[Parameters]) -> None:
        """Copy the gradients. ``wanted``: the parameters of the other buckets."""
        places: dict[torch.nn.Parameter, torch.Tensor] = {}
        for buffer, parameters in arrived:
            begin = 0
            for parameter in parameters:
                places[parameter] = buffer.detach()[begin : begin + parameter.numel()]
                begin += parameter.numel()
        self._places = [[places[parameter] for parameter in key] for key in wanted]
        self.buffers = [torch.cat(parts) for parts in self._places]  #: The buffers of the other buckets.

    def write_back(self, streams: SideStreams) -> None:
        """Copy the buffers back into those of DDP."""
        for buffer, parts in zip(self.buffers, self._places, strict=True):
            with streams.beside(buffer.device):
                for part, values in zip(parts, torch.split(buffer, [part.numel() for part in parts]), strict=True):
                    part.copy_(values)


def _sum(values: Array) -> Generator[Action, Any, None]:
    yield Allreduce(values)
