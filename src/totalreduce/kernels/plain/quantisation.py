"""The kernels of ``kernels.quantisation`` in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.kernels.formats import LIMIT_BITS, MAGNITUDE, ONE_24TH, ROUNDING, TINY, TRITS
from totalreduce.kernels.plain.coding import nearest_halves, widen
from totalreduce.kernels.plain.parts import PART, parts

__all__ = [
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

#: By byte below 243: its digits of base 3, the lowest one first, each less 1; of others, as much of them.
_DIGITS = np.stack([np.arange(256) // 3**digit % 3 - 1 for digit in range(TRITS)]).astype(np.float32)


class _Blocks(NamedTuple):
    """Some blocks of equal size."""

    numbers: slice  #: The numbers of the blocks.
    begin: int  #: The first element of the first one.
    shape: tuple[int, int]  #: The number of blocks, and that of the elements of each.

    def of(self, values: Array) -> Array:
        """Return the elements of these blocks, of the shape (blocks, elements): a view of contiguous memory."""
        count, size = self.shape
        return values[self.begin : self.begin + count * size].reshape(count, size)

    def codes(self, codes: Array, per_block: int, per_end: int) -> Array:
        """Return the bytes of these blocks; ``per_block``: of a whole block, ``per_end``: of each of these."""
        begin = self.numbers.start * per_block
        return codes[begin : begin + self.shape[0] * per_end].reshape(self.shape[0], per_end)


def _blocks(num_elements: int, block: int) -> Iterator[_Blocks]:
    """Return whole blocks, some at a time, and then the last one if it is shorter."""
    whole = num_elements // block
    for part in parts(whole, max(1, PART // block)):
        yield _Blocks(part, part.start * block, (part.stop - part.start, block))
    if whole * block < num_elements:
        yield _Blocks(slice(whole, whole + 1), whole * block, (1, num_elements - whole * block))


def _largest(values: Array) -> Array:
    """Return the bits of the largest magnitude along the last axis."""
    largest: Array = (values.view(np.int32) & np.int32(MAGNITUDE)).max(axis=-1, initial=0)
    return largest


def _random(seed: int, begin: int, shape: tuple[int, int]) -> Array:
    """Return numbers in [0, 1): hashes of the seed and of the indices of elements, from ``begin`` on."""
    x = np.arange(begin, begin + shape[0] * shape[1]).astype(np.uint32) * np.uint32(0x9E3779B9)
    x ^= np.uint32(seed & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    numbers: Array = (x >> np.uint32(8)).astype(np.float32) * ONE_24TH
    return numbers.reshape(shape)


def _integers(
    values: Array, most: np.float32, seed: int, begin: int, stochastic: bool, keeps: bool, scales: Array
) -> Array | None:
    """Write the scales of blocks, and return their integers, int8; ``None`` if a value cannot be encoded."""
    largest = _largest(values)
    if (largest > LIMIT_BITS).any():
        return None
    magnitudes = largest.view(np.float32)
    magnitudes[magnitudes < TINY] = 0.0
    scales[:] = magnitudes / most
    inverse = np.divide(most, magnitudes, out=np.zeros_like(magnitudes), where=magnitudes > 0)[:, None]
    if stochastic:
        scaled = np.floor(values * inverse + _random(seed, begin, values.shape))
        integers: Array = np.clip(scaled, -most, most).astype(np.int8)
    else:
        integers = ((values * inverse + ROUNDING) - ROUNDING).astype(np.int8)
    if keeps:
        values -= scales[:, None] * integers.astype(np.float32)
    return integers


def _write(source: Array, adds: bool, out: Array) -> None:
    if adds:
        out += source
    else:
        out[...] = source


def _padded(values: Array, size: int) -> Array:
    """Return rows with zeros at the end."""
    return np.pad(values, ((0, 0), (0, size - values.shape[1])))


def within_limit(values: Array) -> bool:
    """See ``quantisation.within_limit``."""
    return all(_largest(values[part]) <= LIMIT_BITS for part in parts(values.size))


def encode_bytes(
    values: Array, block: int, seed: int, stochastic: bool, keeps: bool, scales: Array, codes: Array
) -> bool:
    """See ``quantisation.encode_bytes``."""
    most = np.float32(127.0)
    for some in _blocks(values.size, block):
        integers = _integers(some.of(values), most, seed, some.begin, stochastic, keeps, scales[some.numbers])
        if integers is None:
            return False
        some.of(codes)[...] = integers
    return True


def decode_bytes(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """See ``quantisation.decode_bytes``."""
    for some in _blocks(out.size, block):
        _write(scales[some.numbers, None] * some.of(codes).astype(np.float32), adds, some.of(out))


def encode_nibbles(
    values: Array, block: int, seed: int, stochastic: bool, keeps: bool, scales: Array, codes: Array
) -> bool:
    """See ``quantisation.encode_nibbles``."""
    most = np.float32(7.0)
    for some in _blocks(values.size, block):
        integers = _integers(some.of(values), most, seed, some.begin, stochastic, keeps, scales[some.numbers])
        if integers is None:
            return False
        half = (some.shape[1] + 1) // 2
        nibbles = _padded(integers, 2 * half).view(np.uint8) + np.uint8(8)
        some.codes(codes, block // 2, half)[...] = nibbles[:, :half] | nibbles[:, half:] << np.uint8(4)
    return True


def decode_nibbles(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """See ``quantisation.decode_nibbles``."""
    for some in _blocks(out.size, block):
        packed = some.codes(codes, block // 2, (some.shape[1] + 1) // 2)
        nibbles = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)[:, : some.shape[1]]
        numbers = nibbles.astype(np.float32) - np.float32(8.0)
        _write(scales[some.numbers, None] * numbers, adds, some.of(out))


def encode_trits(values: Array, block: int, seed: int, keeps: bool, scales: Array, codes: Array) -> bool:
    """See ``quantisation.encode_trits``."""
    most, size = np.float32(1.0), block // TRITS
    for some in _blocks(values.size, block):
        integers = _integers(some.of(values), most, seed, some.begin, True, keeps, scales[some.numbers])
        if integers is None:
            return False
        digits = _padded(integers + np.int8(1), block).view(np.uint8)
        digits[:, some.shape[1] :] = 1
        packed = some.codes(codes, size, size)
        packed[...] = digits[:, 4 * size :]
        for digit in reversed(range(TRITS - 1)):
            packed *= np.uint8(3)
            packed += digits[:, digit * size : (digit + 1) * size]
    return True


def decode_trits(scales: Array, codes: Array, block: int, adds: bool, out: Array) -> bool:
    """See ``quantisation.decode_trits``."""
    size = block // TRITS
    for some in _blocks(out.size, block):
        digits = _DIGITS[:, some.codes(codes, size, size)]
        numbers = digits.transpose(1, 0, 2).reshape(some.shape[0], block)[:, : some.shape[1]]
        _write(scales[some.numbers, None] * numbers, adds, some.of(out))
    return bool(codes[: scales.size * size].max(initial=0) <= 242)


def encode_signs(values: Array, block: int, keeps: bool, means: Array, codes: Array) -> bool:
    """See ``quantisation.encode_signs``.

    The order in which a block is added up is another one than that of compiled code, where it depends on the processor.
    The means are in the code, so that all ranks decode the same.
    """
    for some in _blocks(values.size, block):
        part = some.of(values)
        if (_largest(part) > LIMIT_BITS).any():
            return False
        negative = np.signbit(part)
        words = (some.shape[1] + 63) // 64
        some.codes(codes, block // 8, 8 * words)[...] = np.packbits(_padded(negative, 64 * words), 1, "little")
        num_negative = np.count_nonzero(negative, axis=1)
        total, magnitudes = part.sum(axis=1), np.abs(part).sum(axis=1)
        for mean, doubled, count in (
            (0, magnitudes + total, some.shape[1] - num_negative),
            (1, total - magnitudes, num_negative),
        ):
            half, divisor = doubled * np.float32(0.5), count.astype(np.float32)
            means[2 * some.numbers.start + mean : 2 * some.numbers.stop : 2] = np.divide(
                half, divisor, out=np.zeros_like(half), where=count > 0
            )
        if keeps:
            above, below = _means(means, some)
            part -= np.where(negative, below, above)
    return True


def _means(means: Array, some: _Blocks) -> Array:
    """Return the means of blocks, of the shape (2, blocks, 1)."""
    return means.reshape(-1, 2)[some.numbers].T[:, :, None]


def decode_signs(means: Array, codes: Array, block: int, adds: bool, out: Array) -> None:
    """See ``quantisation.decode_signs``."""
    for some in _blocks(out.size, block):
        packed = some.codes(codes, block // 8, (some.shape[1] + 63) // 64 * 8)
        negative = np.unpackbits(packed, axis=1, count=some.shape[1], bitorder="little").view(np.bool_)
        above, below = _means(means, some)
        _write(np.where(negative, below, above), adds, some.of(out))


def round_halves(values: Array, keeps: bool, codes: Array) -> None:
    """See ``quantisation.round_halves``."""
    for part in parts(values.size):
        codes[part] = nearest_halves(values[part].view(np.uint32))
        if keeps:
            sent = np.empty_like(values[part])
            widen(codes[part], sent)
            values[part] -= sent


def take_quanta(values: Array, quantum: float, index: Array, keeps: bool, codes: Array) -> None:
    """See ``quantisation.take_quanta``."""
    negative = values[index] < 0
    signs = np.packbits(negative, bitorder="little")
    codes[: signs.size] |= signs
    if keeps:
        values[index] -= np.where(negative, -quantum, quantum)


def write_quanta(codes: Array, quantum: float, index: Array, out: Array) -> None:
    """See ``quantisation.write_quanta``."""
    negative = np.unpackbits(codes, count=index.size, bitorder="little").view(np.bool_)
    out[index] += np.where(negative, -quantum, quantum)
