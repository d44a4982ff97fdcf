"""Selection in the memory of a GPU, in one pass over it, by Triton.

Blocks of elements run in any order; each reserves a part of the lists for its elements by adding to one counter. So the
lists, which are a hundredth of the memory, are sorted afterwards. Names and results are those of ``device``. To import
this module needs the package ``triton``, a part of torch's builds for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from totalreduce.kernels import device
from totalreduce.kernels.device import Found

__all__ = ["accumulate", "select"]

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _pass(source, residual, index, value, counter, n, room, scale, bound, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(source + at, mask=inside, other=0.0)
    if ADDS:
        x = x * scale + tl.load(residual + at, mask=inside, other=0.0)
        tl.store(source + at, x, mask=inside)
    chosen = inside & ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= bound)
    ones = chosen.to(tl.int32)
    place = tl.atomic_add(counter, tl.sum(ones, 0)) + tl.cumsum(ones, 0) - 1
    fits = chosen & (place < room)
    tl.store(index + place, at.to(tl.int32), mask=fits)
    tl.store(value + place, x, mask=fits)


def accumulate(gradient: Tensor, residual: Tensor, scale: float, bound: int, room: int) -> Found:
    """See ``device.accumulate``. Traffic: 12 bytes per element, and the lists, which are the only temporary memory."""
    return _run(gradient, residual, scale, bound, room, adds=True)


def select(source: Tensor, bound: int, room: int) -> Found:
    """See ``device.select``."""
    return _run(source, source, 1.0, bound, room, adds=False)


def _run(source: Tensor, residual: Tensor, scale: float, bound: int, room: int, *, adds: bool) -> Found:
    n = source.numel()
    room = min(room, n)
    index = torch.empty(room, dtype=torch.int32, device=source.device)
    value = torch.empty(room, dtype=torch.float32, device=source.device)
    counter = torch.zeros(1, dtype=torch.int32, device=source.device)
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        _pass[grid](source, residual, index, value, counter, n, room, scale, bound, ADDS=adds, BLOCK=_BLOCK)
    count = int(counter.item())
    if count > room:  # the lists have any of them, not the first ones
        return device.select(source, bound, room)
    ascending, order = index[:count].sort()
    return Found(ascending.long(), value[order], complete=True)
