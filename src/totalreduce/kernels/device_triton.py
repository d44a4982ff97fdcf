"""Selection in the memory of a GPU, in little more than one pass over it, by Triton.

The first kernel adds the residual and marks the elements that reach the bound in a map of bits, an eighth of a byte per
element. The second kernel reads only the map, and lists the marked elements in their order. So the lists need no
sorting, and blocks of elements do not wait for one another. Names and results are those of ``device``. To import this
module needs the package ``triton``, a part of torch's builds for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from totalreduce.kernels.device import Found

__all__ = ["accumulate", "select"]

#: Words of the map that a block of either kernel works on. Each word has the bits of 32 elements.
_WORDS = 128


@triton.jit
def _popcount(words):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the number of ones in each word (uint32); the interpreter has no instruction for it."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return ((words + (words >> 16)) & 0x3F).to(tl.int32)


# Each variant of a kernel is compiled when it is first used. Bounds change in every step; if Triton made variants for
# numbers that are divisible by 16, some later steps would wait for a compilation.
@triton.jit(do_not_specialize=["bound"])  # type: ignore[untyped-decorator]
def _mark(source, residual, marks, counts, n, scale, bound, ADDS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Add the residual; write the map, and the number of marked elements of each block."""
    block = tl.program_id(0)
    begin = block.to(tl.int64) * (32 * WORDS)
    at = tl.arange(0, 32 * WORDS)
    inside = at < n - begin
    x = tl.load(source + begin + at, mask=inside, other=0.0)
    if ADDS:
        x = x * scale + tl.load(residual + begin + at, mask=inside, other=0.0)
        tl.store(source + begin + at, x, mask=inside)
    chosen = inside & ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= bound)
    bits = tl.reshape(chosen.to(tl.uint32), (WORDS, 32)) << tl.arange(0, 32).to(tl.uint32)[None, :]
    words = tl.sum(bits, 1)
    tl.store(marks + block * WORDS + tl.arange(0, WORDS), words.to(tl.int32, bitcast=True))
    tl.store(counts + block, tl.sum(_popcount(words), 0))


@triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator]
def _list(source, marks, ends, index, value, room, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """List the marked elements: in each round, the first remaining one of each word."""
    block = tl.program_id(0)
    words = tl.load(marks + block * WORDS + tl.arange(0, WORDS)).to(tl.uint32, bitcast=True)
    ones = _popcount(words)
    place = tl.load(ends + block) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - ones
    first = block.to(tl.int64) * (32 * WORDS) + tl.arange(0, WORDS) * 32
    for _ in range(tl.max(ones, 0)):
        lower = words & (~words + 1)  # the lowest one
        at = first + _popcount(lower - 1)
        listed = (words != 0) & (place < room)
        tl.store(index + place, at, mask=listed)
        tl.store(value + place, tl.load(source + at, mask=listed, other=0.0), mask=listed)
        words = words ^ lower
        place += 1


def accumulate(gradient: Tensor, residual: Tensor, scale: float, bound: int, room: int) -> Found:
    """See ``device.accumulate``. Traffic: 12.25 bytes per element, and the lists. The map is the temporary memory."""
    return _run(gradient, residual, scale, bound, room, adds=True)


def select(source: Tensor, bound: int, room: int) -> Found:
    """See ``device.select``."""
    return _run(source, source, 1.0, bound, room, adds=False)


def _run(source: Tensor, residual: Tensor, scale: float, bound: int, room: int, *, adds: bool) -> Found:
    n = source.numel()
    blocks = triton.cdiv(n, 32 * _WORDS)
    marks = torch.empty(blocks * _WORDS, dtype=torch.int32, device=source.device)
    counts = torch.empty(blocks, dtype=torch.int32, device=source.device)
    room = min(room, n)
    index = torch.empty(room, dtype=torch.int64, device=source.device)
    value = torch.empty(room, dtype=torch.float32, device=source.device)
    count = 0
    if n:
        # Product and sum are rounded one after the other, as on the CPU, so that the bits are the same.
        options = {"ADDS": adds, "WORDS": _WORDS, "enable_fp_fusion": False}
        _mark[(blocks,)](source, residual, marks, counts, n, scale, bound, **options)
        ends = counts.cumsum(0, dtype=torch.int32)
        if room:
            _list[(blocks,)](source, marks, ends, index, value, room, WORDS=_WORDS, num_warps=1)
        count = int(ends[-1].item())  # the only wait: the kernels were queued without one
    return Found(index[:count], value[:count], complete=count <= room)
