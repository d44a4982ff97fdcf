"""Selection in the memory of any device, by torch's own operations: the reference of ``device_triton``.

It takes several passes over one stretch of the memory at a time, so that it needs little additional memory. Bounds are
bits of magnitudes, as in ``selection``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from totalreduce.kernels.arrays import Array

__all__ = ["DeviceKernels", "Found", "accumulate", "histogram", "select"]

_MAGNITUDE = 0x7FFFFFFF
#: The number of elements of a stretch.
_STRETCH = 1 << 22


class Found(NamedTuple):
    """Elements that reach a bound, on their device."""

    indices: Tensor  #: int64, ascending.
    values: Tensor  #: float32, as long.
    complete: bool  #: Whether these are all elements; otherwise they are the first ones.


class DeviceKernels(Protocol):
    """This module, or ``device_triton``."""

    def accumulate(self, gradient: Tensor, residual: Tensor, scale: float, bound: int, room: int) -> Found:
        """See ``accumulate`` below."""

    def select(self, source: Tensor, bound: int, room: int) -> Found:
        """See ``select`` below."""


def accumulate(gradient: Tensor, residual: Tensor, scale: float, bound: int, room: int) -> Found:
    """Compute ``gradient = gradient * scale + residual`` in place, and return the elements that reach the bound.

    Args:
        gradient: float32, contiguous, one-dimensional.
        residual: Of the same size; only read.
        scale: Factor of the gradient.
        bound: Bits of the smallest magnitude to list.
        room: The largest number of elements to list.
    """
    gradient.mul_(scale).add_(residual)
    return select(gradient, bound, room)


def select(source: Tensor, bound: int, room: int) -> Found:
    """Return the elements that reach the bound, like ``accumulate``; the memory is only read."""
    places, left, complete = [], room, True
    for begin, bits in _stretches(source):
        chosen = (bits >= bound).nonzero().squeeze(1) + begin
        complete = chosen.numel() <= left
        places.append(chosen[:left])
        left -= places[-1].numel()
        if not complete:
            break
    index = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device=source.device)
    return Found(index, source[index], complete)


def histogram(source: Tensor, prefix: int, prefix_shift: int, shift: int, mask: int) -> Array:
    """Return the counts of a digit of the magnitudes that have a prefix: ``int64[mask + 1]``."""
    counts = np.zeros(mask + 1, np.int64)
    for _, bits in _stretches(source):
        digits = (bits[bits >> prefix_shift == prefix] >> shift) & mask
        counts += torch.bincount(digits, minlength=mask + 1).cpu().numpy()
    return counts


def _stretches(source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the beginning of each stretch and the bits of its magnitudes."""
    for begin in range(0, source.numel(), _STRETCH):
        yield begin, source[begin : begin + _STRETCH].view(torch.int32) & _MAGNITUDE
