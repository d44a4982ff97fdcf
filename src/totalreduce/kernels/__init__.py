"""Arithmetic on memory, without ranks, messages or threads. Every kernel releases the GIL while it works.

The modules whose kernels Numba compiles are loaded when something of them is first used. Numba takes 15 MiB and 0.14 s
in each process, and a job that sends dense gradients needs none of it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final

from totalreduce.kernels.reduction import combine, divide, supports

__all__ = ["COMPILED", "combine", "divide", "supports"]

#: The modules whose kernels Numba compiles.
COMPILED: Final = ("coding", "merging", "quantisation", "scattering", "selection", "updates")


class _LoadedWhenUsed(ModuleType):
    """Stands for a module until that is loaded. ``importlib.util.LazyLoader`` may be used by one thread only (3.11)."""

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("module")
        if module is None:
            module = vars(self)["module"] = importlib.import_module(self.__name__)
        # Nothing else is kept here: a kernel becomes its twin in the module (``compiled.use_twins``).
        return getattr(module, name)


def __getattr__(name: str) -> ModuleType:
    """Return what stands for a module with compiled kernels; the import system asks if the module is not loaded."""
    if name in COMPILED:
        return _LoadedWhenUsed(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
