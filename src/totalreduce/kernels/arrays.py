"""The name of NumPy's arrays in signatures."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array"]

#: An array of any shape and element type.
Array = np.ndarray[Any, Any]
