"""The kernels of ``kernels.coding`` in NumPy."""

from __future__ import annotations

from typing import Final

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.formats import PARAMETER_BITS, PARAMETER_MAX, PIECE

__all__ = ["decode_gaps", "encode_gaps", "round_values", "widen"]

#: The number of bytes that are decoded at a time, unless a piece is longer.
_WINDOW: Final = 1 << 13
_EXPONENT: Final = np.uint32(0x7F800000)


def encode_gaps(index: Array, first: int, parameter: int, out: Array) -> int:
    """See ``coding.encode_gaps``. No byte behind the code is written."""
    if not index.size:
        return 0
    gaps: Array = np.diff(index.astype(np.int64), prepend=first - 1) - 1
    begins = np.arange(0, gaps.size, PIECE)
    of_pieces = _parameters(gaps, begins, parameter)
    low_bits = np.repeat(of_pieces, PIECE)[: gaps.size]
    zeros = gaps >> low_bits
    lengths = zeros + 1 + low_bits
    lengths[begins] += PARAMETER_BITS
    ends = np.cumsum(lengths)
    words = np.zeros((int(ends[-1]) >> 6) + 2, np.uint64)
    _put(words, ends[begins] - lengths[begins], of_pieces)
    _put(words, ends - 1 - low_bits, 1 | (gaps & ((1 << low_bits) - 1)) << 1)
    size = (int(ends[-1]) + 7) // 8
    out[:size] = words.view(np.uint8)[:size]
    return size


def _parameters(gaps: Array, begins: Array, parameter: int) -> Array:
    """Return the parameter with the shortest code of each piece; of several, the one that is nearest to the last."""
    counts = np.diff(begins, append=gaps.size)
    largest = min(PARAMETER_MAX, int(gaps.max()).bit_length())  # beyond it, all codes of all pieces grow
    lengths = np.array([np.add.reduceat(gaps >> low, begins) + counts * (low + 1) for low in range(largest + 1)])
    lowest = lengths.argmin(axis=0)
    highest = largest - lengths[::-1].argmin(axis=0)
    chosen = []
    for low, high in zip(lowest.tolist(), highest.tolist(), strict=True):
        parameter = min(max(parameter, low), high)
        chosen.append(parameter)
    return np.array(chosen, np.int64)


def _put(words: Array, places: Array, numbers: Array) -> None:
    """Set the bits of numbers below 2^32 from ascending places on. No bit is one of two numbers."""
    at, shifts, numbers = places >> 6, (places & 63).astype(np.uint64), numbers.astype(np.uint64)
    begins = np.flatnonzero(np.diff(at, prepend=-1))
    words[at[begins]] |= np.bitwise_or.reduceat(numbers << shifts, begins)
    rest = (numbers >> np.uint64(1)) >> (np.uint64(63) - shifts)
    over = np.flatnonzero(rest)  # only the last number of a word reaches the next one
    words[at[over] + 1] |= rest[over]


def _get(words: Array, places: Array, lengths: Array) -> Array:
    """Return the numbers, int64, of at most 32 bits that begin at these places."""
    at, shifts = places >> 6, (places & 63).astype(np.uint64)
    found: Array = words[at] >> shifts | (words[at + 1] << np.uint64(1)) << (np.uint64(63) - shifts)
    numbers: Array = found.view(np.int64) & ((1 << lengths) - 1)
    return numbers


def decode_gaps(coded: Array, first: int, end: int, index: Array) -> int:
    """See ``coding.decode_gaps``."""
    done, at, expected, room = 0, 0, int(first), 0
    while done < index.size:  # ``at``: the bit at which the next piece begins
        room = room or min(_WINDOW, 2 * (index.size - done) + 16)
        window = coded[at >> 3 : (at >> 3) + room]
        ones, stops, low_bits, next_at = _follow(window, at & 7, index.size - done)
        if not ones.size:
            if (at >> 3) + room >= coded.size:
                return -1
            room *= 2
            continue
        words = np.zeros(window.size // 8 + 2, np.uint64)
        words.view(np.uint8)[: window.size] = window
        zeros = np.minimum(ones - stops, end)  # else a sum could be too large for an integer
        gaps = np.minimum(zeros << low_bits | _get(words, ones + 1, low_bits), end)
        places = np.cumsum(gaps + 1) + (expected - 1)
        if places[-1] >= end:
            return -1
        index[done : done + ones.size] = places
        done, expected, room = done + ones.size, int(places[-1]) + 1, 0
        at = (at & ~7) + next_at
    return (at + 7) // 8


def _follow(window: Array, at: int, count: int) -> tuple[Array, Array, Array, int]:
    """Find the codes of whole pieces.

    Args:
        window: uint8: the code, cut off somewhere.
        at: The bit at which a piece begins.
        count: The number of indices that are left.

    Returns:
        For each index: the place of the one behind the zeros, the place at which the code begins, and the number of low
        bits. And the place behind the last piece. Nothing, if no piece is whole, or the first one is damaged.
    """
    bits = np.unpackbits(window, bitorder="little")
    all_ones = np.flatnonzero(bits)
    #: By place: the number of ones before.
    before = np.zeros(bits.size + 1, np.int64)
    np.cumsum(bits, out=before[1:])
    by_parameter: dict[int, list[Array]] = {}
    pieces: list[tuple[int, int, int, int]] = []
    text = window.tobytes()
    while count:
        parameter = int.from_bytes(text[at >> 3 : (at >> 3) + 2], "little") >> (at & 7) & ((1 << PARAMETER_BITS) - 1)
        begin = at + PARAMETER_BITS
        if begin > bits.size or parameter > PARAMETER_MAX:
            break
        jumps = by_parameter.get(parameter)
        if jumps is None:
            behind = before[np.minimum(all_ones + (1 + parameter), bits.size)]
            jumps = by_parameter[parameter] = _jumps(np.append(behind, all_ones.size))
        size, first = min(count, PIECE), int(before[begin])
        last = first
        for power, jump in enumerate(jumps):
            last = int(jump[last]) if (size - 1) >> power & 1 else last
        if last == all_ones.size or all_ones[last] + 1 + parameter > bits.size:
            break
        pieces.append((size, begin, parameter, first))
        at, count = int(all_ones[last]) + 1 + parameter, count - size
    sizes, begins, parameters, firsts = np.array(pieces, np.int64).reshape(-1, 4).T
    numbers = np.empty((sizes.size, PIECE), np.int64)
    for parameter, jumps in by_parameter.items():
        rows = np.flatnonzero(parameters == parameter)
        found = firsts[rows, None]
        for jump in jumps:
            found = np.concatenate([found, jump[found]], axis=1)
        numbers[rows] = found
    # Only the last piece may be shorter.
    ones, low_bits = all_ones[numbers.reshape(-1)[: sizes.sum()]], np.repeat(parameters, sizes)
    codes = np.empty_like(ones)
    codes[1:] = ones[:-1] + 1 + low_bits[:-1]
    codes[np.cumsum(sizes) - sizes] = begins
    return ones, codes, low_bits, at


def _jumps(step: Array) -> list[Array]:
    """Return, from the number of the one to that of the next one that ends zeros, the same for 2, 4, … 64 of them."""
    jumps = [step]
    while 1 << len(jumps) < PIECE:
        jumps.append(jumps[-1][jumps[-1]])
    return jumps


def round_values(values: Array) -> None:
    """See ``coding.round_values``."""
    values.view(np.uint32)[...] = nearest_halves(values.view(np.uint32)) << np.uint32(16)


def nearest_halves(bits: Array) -> Array:
    """Return the upper halves, uint32, of float32 that were rounded to nearest even; finite ones stay finite."""
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(rounded & _EXPONENT == _EXPONENT, bits, rounded) >> np.uint32(16)


def widen(halves: Array, out: Array) -> None:
    """See ``coding.widen``."""
    np.left_shift(halves, np.uint32(16), out=out.view(np.uint32)[: halves.size], dtype=np.uint32)
