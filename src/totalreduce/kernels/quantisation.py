"""Numbers with few bits: float32 memory as small integers, with a scale for each block of elements, and back.

The kernels release the GIL and are compiled once per machine. A block stays in the first-level cache while it is
encoded, so the memory is read once. With ``keeps`` the values become what the code does not express, which is what
error feedback adds to the next values.

A number becomes the nearest one that the code has; or, *stochastic*, one of its two neighbours, with probabilities by
which the expected value is the number itself (QSGD: Alistarh et al., NeurIPS 2017). The pseudo-random numbers are
hashes of a seed and of the element's index, so that the code depends on nothing else.

Encoders return false if the magnitude of a value exceeds ``LIMIT``, or it is not a number; then code and values are
undefined.
"""

from __future__ import annotations

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.compiled import compiled
from totalreduce.kernels.formats import LIMIT, LIMIT_BITS, MAGNITUDE, ONE_24TH, ROUNDING, TINY, TRITS
from totalreduce.kernels.numba_names import float32, int8, int32, int64, uint8, uint32, uint64
from totalreduce.kernels.plain import quantisation as plain
from totalreduce.kernels.vectors import LANES, load_word, sign_lanes, store_word

__all__ = [
    "LIMIT",
    "TRITS",
    "decode_bytes",
    "decode_nibbles",
    "decode_signs",
    "decode_trits",
    "encode_bytes",
    "encode_nibbles",
    "encode_signs",
    "encode_trits",
    "round_halves",
    "take_quanta",
    "within_limit",
    "write_quanta",
]


@compiled()
def _random(seed: int, index: int) -> float:
    """Return a number in [0, 1): a hash of seed and index, with the multipliers of Weyl and of Wellons' lowbias32."""
    x = uint32(uint32(index) * uint32(0x9E3779B9)) ^ uint32(seed)
    x = uint32(x ^ uint32(x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ uint32(x >> uint32(15)))
    x = uint32(x * uint32(0x846CA68B))
    number: float = float32(int32(x >> uint32(8))) * ONE_24TH
    return number


@compiled()
def _largest(values: Array) -> int:
    """Return the bits of the largest magnitude; those of infinities and NaN are above all others."""
    bits = values.view(np.int32)
    largest: int = int32(0)
    for i in range(bits.size):
        magnitude = int32(bits[i] & int32(MAGNITUDE))
        largest = max(largest, magnitude)
    return largest


@compiled(plain.within_limit)
def within_limit(values: Array) -> bool:
    """Whether all values can be encoded."""
    return bool(_largest(values) <= LIMIT_BITS)


@compiled()
def _scale(values: Array, most: float, scale: Array) -> float:
    """Write the scale of a block; return its inverse, 0 for a block of zeros, and -1 if a value cannot be encoded."""
    largest, inverse = np.empty(1, np.int32), np.zeros(1, np.float32)
    largest[0] = _largest(values)
    magnitude = largest.view(np.float32)[0]
    scale[0] = float32(0.0)
    if largest[0] > LIMIT_BITS:
        inverse[0] = -1.0
    elif magnitude >= TINY:
        scale[0] = magnitude / most
        inverse[0] = most / magnitude
    return float(inverse[0])


@compiled()
def _round(values: Array, inverse: float, most: float, seed: int, first: int, stochastic: bool, out: Array) -> None:
    """Write the integers, int8, of a block that begins at the element ``first``."""
    if stochastic:
        for i in range(values.size):
            scaled = np.floor(values[i] * inverse + _random(seed, first + i))
            out[i] = int8(int32(max(min(scaled, most), -most)))
    else:
        for i in range(values.size):
            out[i] = int8(int32((values[i] * inverse + ROUNDING) - ROUNDING))


@compiled()
def _keep_rest(values: Array, scale: float, integers: Array) -> None:
    for i in range(values.size):
        values[i] -= scale * float32(integers[i])


@compiled()
def _write(source: Array, adds: bool, out: Array) -> None:
    if adds:
        for i in range(out.size):
            out[i] += source[i]
    else:
        for i in range(out.size):
            out[i] = source[i]


@compiled(plain.encode_bytes)
def encode_bytes(
    values: Array, block: int, seed: int, stochastic: bool, keeps: bool, scales: Array, codes: Array
) -> bool:
    """Encode each value as an integer from -127 to 127.

    Args:
        values: float32, contiguous.
        block: The number of elements that share a scale.
        seed: Of the pseudo-random numbers.
        stochastic: Round at random.
        keeps: Leave in the values what the code does not express.
        scales: float32, one for each block.
        codes: int8, one for each element.
    """
    most = float32(127.0)
    for number in range(scales.size):
        begin = number * block
        part, integers = values[begin : begin + block], codes[begin : begin + block]
        inverse = float32(_scale(part, most, scales[number : number + 1]))
        if inverse < 0:
            return False
        _round(part, inverse, most, seed, begin, stochastic, integers)
        if keeps:
            _keep_rest(part, scales[number], integers)
    return True


@compiled(plain.decode_bytes)
def decode_bytes(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """Undo ``encode_bytes``: overwrite ``out``, float32, or add to it."""
    for number in range(scales.size):
        begin = number * block
        part, integers, scale = out[begin : begin + block], codes[begin : begin + block], scales[number]
        if adds:
            for i in range(part.size):
                part[i] += scale * float32(integers[i])
        else:
            for i in range(part.size):
                part[i] = scale * float32(integers[i])


@compiled(plain.encode_nibbles)
def encode_nibbles(
    values: Array, block: int, seed: int, stochastic: bool, keeps: bool, scales: Array, codes: Array
) -> bool:
    """Encode each value as an integer from -7 to 7: four bits, plus 8.

    Arguments as for ``encode_bytes``, but ``block`` is even, and ``codes`` is uint8, half as long, rounded up. The
    codes of a block have its first half in their low bits, and its second half in their high ones.
    """
    most, room = float32(7.0), np.zeros(block, np.int8)
    for number in range(scales.size):
        begin = number * block
        part = values[begin : begin + block]
        half = (part.size + 1) // 2
        inverse = float32(_scale(part, most, scales[number : number + 1]))
        if inverse < 0:
            return False
        _round(part, inverse, most, seed, begin, stochastic, room)
        room[part.size :] = int8(0)
        low, high, packed = room[:half], room[half : 2 * half], codes[begin // 2 : begin // 2 + half]
        for i in range(half):
            packed[i] = uint8((low[i] + int8(8)) | ((high[i] + int8(8)) << int8(4)))
        if keeps:
            _keep_rest(part, scales[number], room)
    return True


@compiled(plain.decode_nibbles)
def decode_nibbles(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """Undo ``encode_nibbles``: overwrite ``out``, float32, or add to it."""
    room = np.zeros(block, np.float32)
    for number in range(scales.size):
        begin, scale = number * block, scales[number]
        part = out[begin : begin + block]
        half = (part.size + 1) // 2
        low, high, packed = room[:half], room[half : 2 * half], codes[begin // 2 : begin // 2 + half]
        for i in range(half):
            low[i] = scale * float32(int32(packed[i] & uint8(15)) - int32(8))
            high[i] = scale * float32(int32(packed[i] >> uint8(4)) - int32(8))
        _write(room, adds, part)


@compiled(plain.encode_trits)
def encode_trits(values: Array, block: int, seed: int, keeps: bool, scales: Array, codes: Array) -> bool:
    """Encode each value as -1, 0 or 1 times the largest magnitude of its block, at random.

    Wen et al., "TernGrad", NeurIPS 2017. Arguments as for ``encode_bytes``, but ``block`` is a multiple of ``TRITS``,
    and ``codes`` is uint8, ``block // TRITS`` for each block: a byte has ``TRITS`` digits of base 3, each plus 1. The
    lowest digits of a block's bytes are its first elements, the next digits those that follow, and so on.
    """
    most, room, size = float32(1.0), np.zeros(block, np.int8), block // TRITS
    for number in range(scales.size):
        begin = number * block
        part = values[begin : begin + block]
        inverse = float32(_scale(part, most, scales[number : number + 1]))
        if inverse < 0:
            return False
        _round(part, inverse, most, seed, begin, True, room)
        room[part.size :] = int8(0)
        if keeps:
            _keep_rest(part, scales[number], room)
        packed = codes[number * size : (number + 1) * size]
        first, second, third = room[:size], room[size : 2 * size], room[2 * size : 3 * size]
        fourth, fifth = room[3 * size : 4 * size], room[4 * size : 5 * size]
        for i in range(size):
            low = int32(first[i]) + int32(3) * int32(second[i]) + int32(9) * int32(third[i])
            packed[i] = uint8(low + int32(27) * int32(fourth[i]) + int32(81) * int32(fifth[i]) + int32(121))
    return True


@compiled(plain.decode_trits)
def decode_trits(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> bool:
    """Undo ``encode_trits``: overwrite ``out``, float32, or add to it. False: a byte of the code is above 242."""
    room, size, largest = np.zeros(block, np.float32), block // TRITS, uint8(0)
    rest = np.zeros(size, np.int32)
    for number in range(scales.size):
        begin, scale = number * block, scales[number]
        part, packed = out[begin : begin + block], codes[number * size : (number + 1) * size]
        for i in range(size):
            largest = max(largest, packed[i])
            rest[i] = int32(packed[i])
        for digit in range(TRITS):
            digits = room[digit * size : (digit + 1) * size]
            for i in range(size):
                third = int32((rest[i] * int32(171)) >> int32(9))  # a third, rounded down, of numbers up to 255
                digits[i] = scale * float32(rest[i] - int32(3) * third - int32(1))
                rest[i] = third
        _write(room, adds, part)
    is_code: bool = largest <= uint8(242)
    return is_code


@compiled(fastmath={"reassoc"})
def _sums(values: Array) -> tuple[float, float]:
    """Return the sum of a block's values and that of their magnitudes."""
    total, magnitudes = float32(0.0), float32(0.0)
    for i in range(values.size):
        total += values[i]
        magnitudes += abs(values[i])
    return total, magnitudes


@compiled()
def _num_negative(values: Array) -> int:
    bits = values.view(np.uint32)
    count = uint32(0)
    for i in range(bits.size):
        count += bits[i] >> uint32(31)
    return int(int64(count))


@compiled(plain.encode_signs)
def encode_signs(values: Array, block: int, keeps: bool, means: Array, codes: Array) -> bool:
    """Encode each value as its sign bit; it stands for the mean of the values with this sign in the block.

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, with blocks instead of the columns of matrices.

    Args:
        values: float32, contiguous.
        block: The number of elements that share means: a multiple of 64.
        keeps: Leave in the values what the code does not express.
        means: float32, two for each block: of the values without and with a sign.
        codes: uint8: a bit for each value, the first one lowest; eight bytes for each 64 values, rounded up.
    """
    ends = np.zeros(LANES, np.float32)
    for number in range(means.size // 2):
        begin = number * block
        part = values[begin : begin + block]
        if _largest(part) > LIMIT_BITS:
            return False
        whole = part.size // LANES * LANES
        for i in range(0, whole, LANES):
            store_word(codes, int64((begin + i) // 8), sign_lanes(part, int64(i)))
        if whole < part.size:
            ends[:] = float32(0.0)
            ends[: part.size - whole] = part[whole:]
            store_word(codes, int64((begin + whole) // 8), sign_lanes(ends, int64(0)))
        num_negative = _num_negative(part)
        num_others = part.size - num_negative
        total, magnitudes = _sums(part)
        above = (magnitudes + total) * float32(0.5) / float32(num_others) if num_others else float32(0.0)
        below = (total - magnitudes) * float32(0.5) / float32(num_negative) if num_negative else float32(0.0)
        means[2 * number], means[2 * number + 1] = above, below
        if keeps:
            bits = part.view(np.int32)
            for i in range(part.size):
                part[i] -= below if bits[i] < 0 else above
    return True


@compiled(plain.decode_signs)
def decode_signs(means: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """Undo ``encode_signs``: overwrite ``out``, float32, or add to it."""
    room = np.zeros(LANES, np.float32)
    for number in range(means.size // 2):
        begin = number * block
        part = out[begin : begin + block]
        above, below = means[2 * number], means[2 * number + 1]
        for first in range(0, part.size, LANES):
            word = load_word(codes, int64((begin + first) // 8))
            for i in range(LANES):
                room[i] = below if (word >> uint64(i)) & uint64(1) else above
            _write(room, adds, part[first : first + LANES])


@compiled(plain.round_halves)
def round_halves(values: Array, keeps: bool, codes: Array) -> None:
    """Encode each value, finite, as the nearest bfloat16: the upper half, uint16, of its bits. See ``coding.widen``."""
    bits = values.view(np.uint32)
    for i in range(bits.size):
        old = bits[i]
        new = uint32(old + uint32(0x7FFF) + uint32(uint32(old >> uint32(16)) & uint32(1)))
        # The largest magnitudes would become infinite.
        codes[i] = int32((new if new & uint32(0x7F800000) != uint32(0x7F800000) else old) >> uint32(16))
    if keeps:
        rest, room = values.view(np.float32), np.empty(1024, np.float32)
        for begin in range(0, values.size, room.size):
            part, halves = rest[begin : begin + room.size], codes[begin : begin + room.size]
            whole = room.view(np.uint32)
            for i in range(part.size):
                whole[i] = uint32(halves[i]) << uint32(16)
            for i in range(part.size):
                part[i] -= room[i]


@compiled(plain.take_quanta)
def take_quanta(values: Array, quantum: float, index: Array, keeps: bool, codes: Array) -> None:
    """Encode the signs of listed values, each of which stands for a quantum (Strom, Interspeech 2015).

    Args:
        values: float32.
        quantum: float32, positive.
        index: int32: the indices of the values.
        keeps: Take the quanta from the values.
        codes: uint8, zeros: gets a bit for each index, the first one lowest: whether the value is negative.
    """
    for i in range(index.size):
        negative = values[index[i]] < 0
        codes[i >> 3] |= uint8(uint8(negative) << uint8(i & 7))
        if keeps:
            values[index[i]] -= -quantum if negative else quantum


@compiled(plain.write_quanta)
def write_quanta(codes: Array, quantum: float, index: Array, out: Array) -> None:
    """Add the quanta of ``take_quanta`` to ``out``, float32."""
    for i in range(index.size):
        out[index[i]] += -quantum if (codes[i >> 3] >> (i & 7)) & 1 else quantum
