"""The interface of codecs, and the part that codecs with a scale for each block of elements share."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

import numpy as np

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.kernels import ahead, quantisation
from totalreduce.kernels.arrays import Array

__all__ = [
    "BLOCK_MAX",
    "TOO_LARGE",
    "BlockCodec",
    "Codec",
    "check_codec",
    "check_size",
    "load_kernels",
    "seed_of",
    "words",
]

#: What ``Codec.encode`` returns if a value is too large.
TOO_LARGE = -1
#: The largest number of elements that share a scale. Kernels have room for a block, and add its values in float32.
BLOCK_MAX = 1 << 20
_SEED_BITS = 0x7FFFFFFF


class Codec(Protocol):
    """The settings of a codec, as a frozen dataclass; equal on all ranks. All methods release the GIL."""

    name: ClassVar[str]  #: The codec's name.
    has_fixed_size: ClassVar[bool]  #: Whether a code always has ``bytes_max`` bytes.

    @property
    def is_unbiased(self) -> bool:
        """Whether the expected value of what is decoded is what was encoded.

        The error of other codecs must be added to the next values (``keeps``), or training does not converge.
        """

    def bytes_max(self, count: int) -> int:
        """Return the largest size in bytes of the code of so many values."""

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Encode values.

        Args:
            values: float32, contiguous, one-dimensional.
            out: uint8, contiguous, with room for ``bytes_max``; its memory begins at a multiple of eight.
            seed: Of the pseudo-random numbers, from 0. The code depends on values and seed alone.
            keeps: Subtract from the values what ``decode`` will return.

        Returns:
            The number of bytes written. ``TOO_LARGE`` if the magnitude of a value exceeds ``quantisation.LIMIT``, or
            it is not a number; then the contents of values and ``out`` are undefined.
        """

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Decode as many values as ``out`` has elements.

        Args:
            coded: uint8: the code, and nothing behind it.
            out: float32, contiguous, one-dimensional: is overwritten.
            adds: Add to ``out`` instead.

        Raises:
            ProtocolError: The bytes are no code of so many values.
        """


class BlockCodec:
    """The layout that codecs with ``block`` elements per scale share: all scales, and then all codes of elements.

    Attributes:
        block: The number of elements that share a scale.
    """

    has_fixed_size: ClassVar[bool] = True
    #: The number of float32 for each block.
    _scales_per_block: ClassVar[int] = 1

    block: int

    def bytes_max(self, count: int) -> int:
        """Return the size of a code of so many values."""
        return self._scale_bytes(count) + self._code_bytes(count)

    @abstractmethod
    def _code_bytes(self, count: int) -> int:
        """Return the number of bytes of the codes of elements."""

    def _scale_bytes(self, count: int) -> int:
        return 4 * self._scales_per_block * -(-count // self.block)

    def _split(self, coded: Array, count: int) -> tuple[Array, Array]:
        """Return the scales and the codes in a code of ``count`` values, which may be longer."""
        scale_bytes = self._scale_bytes(count)
        scales = coded[:scale_bytes].view(np.float32)
        return scales, coded[scale_bytes : scale_bytes + self._code_bytes(count)]

    def _parts(self, coded: Array, count: int) -> tuple[Array, Array]:
        """Return the scales and the codes of a code that came from another rank. Raises ``ProtocolError``."""
        check_size(coded, self.bytes_max(count))
        scales, codes = self._split(words(coded), count)
        if not (np.abs(scales) <= 2 * quantisation.LIMIT).all():  # means may be rounded up
            raise ProtocolError("a scale in the code is larger than any encoder writes")
        return scales, codes


def check_codec(codec: object) -> None:
    """Refuse what is neither ``None`` nor a codec. Raises ``ConfigurationError``."""
    if codec is not None and (isinstance(codec, type) or not callable(getattr(codec, "bytes_max", None))):
        raise ConfigurationError(f"codec is None or a codec, for instance tr.Int8(), not {codec!r}")


def load_kernels(codec: Codec | None) -> None:
    """Encode and decode one value, so that the compiled kernels of a codec are loaded.

    Numba loads a kernel when it is called for the first time: half a second of processor time, and some seconds where
    the kernel must be compiled. A session calls this when it is made, so that its first exchange does not take longer.
    A second call takes no time.
    """
    if codec is None:
        return
    ahead.load_codecs()  # compiled apart from this process; what a codec of another package needs is called below
    value = np.ones(1, np.float32)
    room = np.empty(codec.bytes_max(1), np.uint8)
    code = room[: codec.encode(value, room, keeps=True)]
    codec.decode(code, value)
    codec.decode(code, value, adds=True)


def seed_of(step: int, rank: int, region: int = 0) -> int:
    """Return a seed for ``Codec.encode``. Ranks and steps have different seeds, so that their errors do not add up."""
    return (step * 1_000_003 + rank * 8_191 + region * 131) & _SEED_BITS


def check_size(coded: Array, expected: int) -> None:
    """Raise ``ProtocolError`` unless a code has so many bytes."""
    if coded.size != expected:
        raise ProtocolError(f"a code has {coded.size} bytes where one of {expected} is expected")


def words(coded: Array) -> Array:
    """Return the code, copied unless its memory begins where words may lie."""
    return coded if coded.ctypes.data % 8 == 0 and coded.flags.c_contiguous else coded.copy()
