"""Threshold: each value beyond a threshold as its sign, which stands for the threshold; the rest waits.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015. Values must be
accumulated with error feedback: what is below the threshold, or beyond it, is sent when it has added up.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np

from totalreduce.codecs.codec import TOO_LARGE
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import coding, quantisation, selection
from totalreduce.kernels.arrays import Array

__all__ = ["MAXIMUM", "MINIMUM", "Threshold"]

#: The bounds of thresholds.
MINIMUM: Final = 1e-30
MAXIMUM: Final = 1e30

_COUNT = struct.Struct("<I")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """The indices and signs of values of a threshold's magnitude or more. Only with error feedback.

    Attributes:
        threshold: The smallest magnitude that is sent, and the magnitude for which a sign stands.

    Raises:
        ConfigurationError: The threshold is not positive.
    """

    name: ClassVar[str] = "threshold"
    has_fixed_size: ClassVar[bool] = False

    threshold: float

    def __post_init__(self) -> None:
        checks.real_field(self, "threshold", minimum=MINIMUM, maximum=MAXIMUM)

    @property
    def is_unbiased(self) -> bool:
        """Most values are not sent."""
        return False

    def bytes_max(self, count: int) -> int:
        """Return the size of the code if all values are sent."""
        return _COUNT.size + coding.coded_bytes_max(count, count) + (count + 7) // 8 if count else 0

    def encode(self, values: Array, out: Array, *, seed: int = 0, keeps: bool = False) -> int:
        """Write the number of values beyond the threshold, their indices, and their signs."""
        del seed
        if not quantisation.within_limit(values):
            return TOO_LARGE
        quantum = np.float32(self.threshold)
        indices = self._indices(values, int(quantum.view(np.int32)))
        if not indices.size:
            return 0
        _COUNT.pack_into(out.data, 0, indices.size)
        code = out[_COUNT.size :]
        used = coding.encode_gaps(indices, 0, coding.rice_parameter(indices.size, values.size), code)
        signs = code[used : used + (indices.size + 7) // 8]
        signs[:] = 0
        quantisation.take_quanta(values, quantum, indices, keeps, signs)
        return _COUNT.size + int(used) + signs.size

    def decode(self, coded: Array, out: Array, *, adds: bool = False) -> None:
        """Write the threshold with the sign of each listed value, and zeros for the others."""
        if not adds:
            out[:] = 0.0
        if not coded.size:
            return
        indices, signs = self._read(coded, out.size)
        quantisation.write_quanta(signs, np.float32(self.threshold), indices, out)

    @staticmethod
    def _indices(values: Array, bound: int) -> Array:
        room = max(1024, values.size // 64)
        while True:
            indices, found = np.empty(room, np.int32), np.empty(room, np.float32)
            count = selection.select(values, bound, 0, indices, found, 0)
            if count >= 0:
                return indices[:count]
            room = min(4 * room, values.size + selection.BLOCK)

    @staticmethod
    def _read(coded: Array, count: int) -> tuple[Array, Array]:
        """Return the indices and the signs of a code that came from another rank."""
        if coded.size < _COUNT.size:
            raise ProtocolError(f"a code of {coded.size} bytes is too short for its header")
        (listed,) = _COUNT.unpack_from(coded.data)
        code = coded[_COUNT.size :]
        if not 0 < listed <= min(count, 8 * code.size):
            raise ProtocolError(f"a code of {coded.size} bytes claims {listed} of {count} values")
        indices = np.empty(listed, np.int32)
        used = coding.decode_gaps(code, 0, count, indices)
        signs = code[used : used + (listed + 7) // 8]
        if used < 0 or used + signs.size != code.size or signs.size != (listed + 7) // 8:
            raise ProtocolError(f"a code of {listed} values is damaged")
        return indices, signs
