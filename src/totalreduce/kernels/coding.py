"""The encoding of indices and values: gaps between ascending indices, Rice-coded, and values of two or four bytes.

A gap g is encoded as g >> r in unary (that number of zeros and a one), followed by its r low bits. With r near
log2(0.69 times the mean gap) the code is within two per cent of the entropy of random supports (8.1 bits for each
element at a density of 1 %). Every 128 indices have an r of their own, in five bits: embeddings have rows in which
every element is selected and long stretches without any, and one r for both would make their code half as long again.

For any positions of the indices, a list takes at most 1 + r bits per element, one bit per 2^r indices of the span, and
those five bits. So the largest size of a message is a function of its count.

Values are float32, or bfloat16: the upper half of a float32, rounded to nearest even.
"""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.formats import PARAMETER_BITS, PARAMETER_MAX, PIECE
from totalreduce.kernels.numba_names import int64, uint8, uint32, uint64
from totalreduce.kernels.plain import coding as plain
from totalreduce.kernels.vectors import load_word, store_word, trailing_zeros

__all__ = [
    "PIECE",
    "Array",
    "coded_bytes_max",
    "decode_gaps",
    "encode_gaps",
    "narrow",
    "rice_parameter",
    "round_values",
    "widen",
]

#: A code of this length plus one fits into a word together with the pending bits, which are at most twelve.
_FAST_BITS = 50
#: The best number of low bits is the binary logarithm of this share of the mean gap.
_SHARE = 0.69


def rice_parameter(count: int, span: int) -> int:
    """Return the number of low bits for ``count`` indices at random positions in ``span``."""
    parameter = 0
    while parameter < PARAMETER_MAX and count << (parameter + 1) <= _SHARE * span:
        parameter += 1
    return parameter


def coded_bytes_max(count: int, span: int) -> int:
    """Return the largest size of the code of ``count`` different indices below ``span``."""
    parameter = rice_parameter(count, span)
    bits = count * (parameter + 1) + (span >> parameter) + -(-count // PIECE) * PARAMETER_BITS
    return (bits + 7) // 8 if count else 0


@compiled()
def _num_bits(index: Array, begin: int, end: int, expected: int, parameter: int) -> int:
    """Return the length of a piece's code; ``expected`` is its smallest possible index."""
    bits: int = int64(end - begin) * (parameter + 1)
    for i in range(begin, end):
        bits += (index[i] - expected) >> parameter
        expected = int64(index[i]) + 1
    return bits


@compiled()
def _fitting(index: Array, begin: int, end: int, expected: int, parameter: int) -> int:
    """Return the parameter with the shortest code of a piece. Lengths fall up to it and rise beyond it."""
    gap = index[begin] - expected
    less, bits, more = (gap << 1) >> parameter, gap >> parameter, gap >> (parameter + 1)
    for i in range(begin + 1, end):  # three lengths in one pass: usually one of them is the shortest
        gap = int64(index[i]) - int64(index[i - 1]) - 1
        less += (gap << 1) >> parameter
        bits += gap >> parameter
        more += gap >> (parameter + 1)
    less, more = less - (end - begin), more + (end - begin)
    if bits <= less and bits <= more:
        return parameter
    bits += (end - begin) * (parameter + 1)
    for towards in (-1, 1):
        while 0 <= parameter + towards <= PARAMETER_MAX:
            other = _num_bits(index, begin, end, expected, parameter + towards)
            if other >= bits:
                break
            bits, parameter = other, parameter + towards
    return parameter


@compiled(plain.encode_gaps)
def encode_gaps(index: Array, first: int, parameter: int, out: Array) -> int:
    """Write the gaps between ascending indices; the first gap is counted from ``first``.

    Args:
        index: int32.
        first: The smallest possible index.
        parameter: ``rice_parameter``; no piece becomes longer than with this parameter.
        out: uint8, with room for ``coded_bytes_max``. Up to seven bytes behind the code may become zero.

    Returns:
        The number of bytes written.
    """
    pending, num_pending, at = uint64(0), 0, 0
    expected = int64(first)
    for begin in range(0, index.size, PIECE):
        end = min(begin + PIECE, index.size)
        parameter = _fitting(index, begin, end, expected, parameter)
        pending |= uint64(parameter) << uint64(num_pending)
        num_pending += PARAMETER_BITS
        for i in range(begin, end):
            gap = index[i] - expected
            expected = int64(index[i]) + 1
            zeros = gap >> parameter
            if zeros + parameter <= _FAST_BITS and at + 8 <= out.size:
                low = gap & ((1 << parameter) - 1)
                pending |= uint64(1 | (low << 1)) << uint64(num_pending + zeros)
                num_pending += zeros + 1 + parameter
                store_word(out, at, pending)
                at += num_pending >> 3
                pending >>= uint64(num_pending & ~7)
                num_pending &= 7
                continue
            while zeros + num_pending >= 32:  # whole words of zeros
                out[at], out[at + 1] = uint8(pending & 0xFF), uint8((pending >> 8) & 0xFF)
                out[at + 2], out[at + 3] = uint8((pending >> 16) & 0xFF), uint8((pending >> 24) & 0xFF)
                at += 4
                zeros -= 32 - num_pending
                pending, num_pending = uint64(0), 0
            low = gap & ((1 << parameter) - 1)
            pending |= uint64(1 | (low << 1)) << uint64(num_pending + zeros)
            num_pending += zeros + 1 + parameter
            while num_pending >= 8:
                out[at] = uint8(pending & 0xFF)
                at += 1
                pending >>= uint64(8)
                num_pending -= 8
    if num_pending:
        out[at] = uint8(pending & 0xFF)
        at += 1
    return at


@compiled()
def _fill(coded: Array, at: int, window: int, num_bits: int) -> tuple[int, int, int]:
    """Fill the window with more than 32 bits, or with all that are left."""
    if num_bits <= 32 and at + 4 <= coded.size:
        word = uint64(coded[at]) | uint64(coded[at + 1]) << uint64(8)
        word |= uint64(coded[at + 2]) << uint64(16) | uint64(coded[at + 3]) << uint64(24)
        window |= word << uint64(num_bits)
        num_bits += 32
        at += 4
    while num_bits <= 32 and at < coded.size:
        window |= uint64(coded[at]) << uint64(num_bits)
        num_bits += 8
        at += 1
    return at, window, num_bits


@compiled(plain.decode_gaps)
def decode_gaps(coded: Array, first: int, end: int, index: Array) -> int:
    """Undo ``encode_gaps``: fill ``index``.

    Returns:
        The number of bytes read; -1 if the code is damaged (too short, or an index outside [first, end)).
    """
    expected = int64(first)
    window, num_bits, at = uint64(0), 0, 0
    for begin in range(0, index.size, PIECE):
        at, window, num_bits = _fill(coded, at, window, num_bits)
        parameter = int64(window & uint64((1 << PARAMETER_BITS) - 1))
        if num_bits < PARAMETER_BITS or parameter > PARAMETER_MAX:
            return -1
        window >>= uint64(PARAMETER_BITS)
        num_bits -= PARAMETER_BITS
        for i in range(begin, min(begin + PIECE, index.size)):
            if at + 8 <= coded.size:
                # The window gets 56 bits or more; the bits above them are read again, with the same values.
                window |= load_word(coded, at) << uint64(num_bits)
                at += (63 - num_bits) >> 3
                num_bits |= 56
                zeros = trailing_zeros(window)
                taken = zeros + 1 + parameter
                if window != uint64(0) and taken <= 56:
                    low = int64((window >> uint64(zeros + 1)) & uint64((1 << parameter) - 1))
                    window >>= uint64(taken)
                    num_bits -= taken
                    place = expected + ((zeros << parameter) | low)
                    if place >= end:
                        return -1
                    index[i] = place
                    expected = place + 1
                    continue
            window &= (uint64(1) << uint64(num_bits)) - uint64(1)
            zeros = 0
            while window == uint64(0):
                zeros += num_bits
                if at >= coded.size or zeros > end:
                    return -1
                at, window, num_bits = _fill(coded, at, window, 0)
            low_zeros = trailing_zeros(window)
            zeros += low_zeros
            window = (window >> uint64(low_zeros)) >> uint64(1)
            num_bits -= low_zeros + 1
            if num_bits < parameter:
                at, window, num_bits = _fill(coded, at, window, num_bits)
                if num_bits < parameter:
                    return -1
            place = expected + ((zeros << parameter) | int64(window & uint64((1 << parameter) - 1)))
            window >>= uint64(parameter)
            num_bits -= parameter
            if place >= end:
                return -1
            index[i] = place
            expected = place + 1
    return at - num_bits // 8


@compiled(plain.round_values)
def round_values(values: Array) -> None:
    """Round float32 to bfloat16, in place, to nearest even; finite values stay finite."""
    bits = values.view(np.uint32)
    for i in range(bits.size):
        old = bits[i]
        new = (old + uint32(0x7FFF) + ((old >> uint32(16)) & uint32(1))) & uint32(0xFFFF0000)
        if new & uint32(0x7F800000) == uint32(0x7F800000):
            new = old & uint32(0xFFFF0000)
        bits[i] = new


def narrow(values: Array) -> Array:
    """Return the upper halves, uint16, of rounded float32."""
    halves: Array = values.view(np.uint16)[1::2]
    return halves


@compiled(plain.widen)
def widen(halves: Array, out: Array) -> None:
    """Write the float32 that have these upper halves."""
    bits = out.view(np.uint32)
    for i in range(halves.size):
        bits[i] = uint32(halves[i]) << uint32(16)
