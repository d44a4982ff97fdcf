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

__all__ = ["accumulate", "launch", "select"]

_BLOCK = 4096


# Each variant of a kernel is compiled when it is first used. Bounds change in every step; if Triton made variants for
# numbers that are divisible by 16, some later steps would wait for a compilation.
@triton.jit(do_not_specialize=["room", "bound"])  # type: ignore[untyped-decorator]
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
    room = min(room, source.numel())
    index, value, counter = launch(source, residual, scale, bound, room, adds=adds)
    count = int(counter.item())
    if count > room:  # the lists have any of them, not the first ones
        return device.select(source, bound, room)
    ascending, order = index[:count].sort()
    return Found(ascending.long(), value[order], complete=True)


def launch(
    source: Tensor, residual: Tensor, scale: float, bound: int, room: int, *, adds: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queue the pass over the memory on the current stream; do not wait for it.

    Args:
        source: float32, contiguous, one-dimensional; with ``adds`` it becomes ``source * scale + residual``.
        residual: Of the same size; read with ``adds``.
        scale: Factor of the source.
        bound: Bits of the smallest magnitude to list.
        room: The length of the lists, at most the number of elements.
        adds: Whether the residual is added.

    Returns:
        The lists of indices (int32) and values, in any order, and the number of elements that reach the bound (one
        int32). If that is larger than ``room``, the lists have some of these elements.
    """
    n = source.numel()
    index = torch.empty(room, dtype=torch.int32, device=source.device)
    value = torch.empty(room, dtype=torch.float32, device=source.device)
    counter = torch.zeros(1, dtype=torch.int32, device=source.device)
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        # Product and sum are rounded one after the other, as on the CPU, so that the bits are the same.
        options = {"ADDS": adds, "BLOCK": _BLOCK, "enable_fp_fusion": False}
        _pass[grid](source, residual, index, value, counter, n, room, scale, bound, **options)
    return index, value, counter
