"""Error feedback of a worker: codes of what it pushes to ranges, and what these codes have not expressed."""

from __future__ import annotations

from typing import final

import numpy as np

from totalreduce.codecs.codec import TOO_LARGE, Codec
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.server.pieces import Places

__all__ = ["Residual"]


@final
class Residual:
    """What codes of earlier pushes have not expressed. It is added to the next push of the same keys.

    Attributes:
        values: float32 of shape (num_keys, width). Memory of zeros is not taken before it is used.
    """

    def __init__(self, codec: Codec, num_keys: int, width: int) -> None:
        self._codec = codec
        self.values: Array = np.zeros((num_keys, width), np.float32)

    def check(self, values: Array) -> None:
        """Raise ``ConfigurationError`` if some of these values cannot be encoded."""
        if not quantisation.within_limit(values.reshape(-1)):
            raise ConfigurationError("what is pushed has values that are not finite, or too large to encode")

    def encode(self, places: Places, values: Array, seed: int) -> Array:
        """Return the code of values, one-dimensional, which were checked, and of the residual of their keys."""
        places = places.in_table()
        total = places.take(self.values).reshape(-1) + values
        np.clip(total, -quantisation.LIMIT, quantisation.LIMIT, out=total)  # the sum may be too large to encode
        code = np.zeros(self._codec.bytes_max(total.size), np.uint8)
        size = self._codec.encode(total, code, seed=seed, keeps=True)
        if size == TOO_LARGE:
            raise ConfigurationError("values of a push were changed to numbers that are not finite before it was done")
        places.put(self.values, total.reshape(-1, self.values.shape[1]))
        return code[:size]

    def take_back(self, places: Places, values: Array, code: Array) -> None:
        """Undo ``encode``: the server has not applied this code of these values."""
        places = places.in_table()
        change = np.empty(values.size, np.float32)
        self._codec.decode(code, change)
        change -= values
        places.put(self.values, places.take(self.values) + change.reshape(-1, self.values.shape[1]))
