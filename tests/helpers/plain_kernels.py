"""The kernels in NumPy, as kernels call them, and the k-th magnitude by a sort: what compiled kernels must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from totalreduce.kernels.compiled import quiet
from totalreduce.kernels.plain import coding, merging, quantisation, scattering, selection, updates
from totalreduce.kernels.selection import Kth

Array = np.ndarray[Any, Any]

MODULES: tuple[ModuleType, ...] = (coding, merging, quantisation, scattering, selection, updates)


def __getattr__(name: str) -> Callable[..., Any]:
    for module in MODULES:
        if name in module.__all__:
            return quiet(getattr(module, name))
    raise AttributeError(name)


def kth_magnitude(parts: Sequence[Array], k: int) -> Kth:
    """See ``selection.kth_magnitude``."""
    magnitudes = np.concatenate([part.view(np.int32) & 0x7FFFFFFF for part in parts])
    kth = int(np.sort(magnitudes)[::-1][k - 1])
    return Kth(kth, int((magnitudes > kth).sum()), int((magnitudes == kth).sum()))
