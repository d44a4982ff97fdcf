"""The name of NumPy's arrays in signatures, and where memory lies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = ["Array", "address_of", "copy_at"]

#: An array of any shape and element type.
Array = np.ndarray[Any, Any]


def address_of(view: memoryview) -> int:
    """Return the address of memory, which may be read-only and must not be empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def copy_at(address: int, num_bytes: int) -> memoryview:
    """Return a copy of memory of this process."""
    return memoryview(ctypes.string_at(address, num_bytes))
