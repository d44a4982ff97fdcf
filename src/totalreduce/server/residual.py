"""Error feedback of a worker: what codes have not expressed of its pushes, and what its filter has withheld."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from totalreduce.codecs.codec import TOO_LARGE, Codec
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.kernels.arrays import Array
from totalreduce.server.pieces import Places

__all__ = ["Residual"]


@final
class Residual:
    """What earlier pushes of a worker have not brought to servers. It is added to the next push of the same keys.

    All ``places`` are rows of the table (``Places.in_table``).

    Attributes:
        codec: The codec, if there is one.
        values: Of shape (num_keys, width). Memory of zeros is not taken before it is used.
    """

    def __init__(self, num_keys: int, width: int, dtype: np.dtype[Any], codec: Codec | None) -> None:
        self.codec = codec
        self.values: Array = np.zeros((num_keys, width), dtype)

    def check(self, values: Array) -> None:
        """Raise ``ConfigurationError`` if some of these values cannot be encoded."""
        if self.codec is not None and not quantisation.within_limit(values.reshape(-1)):
            raise ConfigurationError("what is pushed has values that are not finite, or too large to encode")

    def encode(self, places: Places, values: Array, seed: int) -> Array:
        """Return the code of values, one-dimensional, which were checked, and of the residual of their keys."""
        assert self.codec is not None
        total = places.take(self.values).reshape(-1) + values
        np.clip(total, -quantisation.LIMIT, quantisation.LIMIT, out=total)  # the sum may be too large to encode
        code = np.zeros(self.codec.bytes_max(total.size), np.uint8)
        size = self.codec.encode(total, code, seed=seed, keeps=True)
        if size == TOO_LARGE:
            raise ConfigurationError("values of a push were changed to numbers that are not finite before it was done")
        places.put(self.values, total.reshape(-1, self.values.shape[1]))
        return code[:size]

    def take_back(self, places: Places, values: Array, code: Array) -> None:
        """Undo ``encode``: the server has not applied this code of these values."""
        assert self.codec is not None
        change = np.empty(values.size, np.float32)
        self.codec.decode(code, change)
        change -= values
        self.add(places, change.reshape(-1, self.values.shape[1]))

    def add(self, places: Places, values: Array) -> None:
        """Add values, of shape (count, width)."""
        places.put(self.values, places.take(self.values) + values)

    def withheld(self) -> tuple[Array, Array]:
        """Return the keys whose residual is not zero, int64, and a copy of their residuals, of shape (n, width)."""
        keys = np.flatnonzero(self.values.any(axis=1))
        return keys, self.values[keys]
