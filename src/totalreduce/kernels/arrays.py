"""The name of NumPy's arrays in signatures, and where memory lies."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "address_of"]

#: An array of any shape and element type.
Array = np.ndarray[Any, Any]


def address_of(view: memoryview) -> int:
    """Return the address of memory, which may be read-only and must not be empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
