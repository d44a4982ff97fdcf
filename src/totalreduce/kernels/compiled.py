"""The decorator of kernels that Numba compiles. Numba keeps the code in files, where it can; else that costs time.

The files are in the user's folder of compiled code (``machine_code``), because Numba unpickles what it reads. They
have a folder there for each version of the sources, of Numba and of the processor, so that an old one goes as a whole.

Where Numba cannot be used, a kernel is its twin in NumPy (``plain``): the choice is made here, for all kernels of a
process. A rank with compiled kernels and one with their twins write the same bits. What Numba fails to compile becomes
its twin later (``use_twins``); so modules call the kernels of another one by its name, as ``selection.select``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from totalreduce.kernels import COMPILED
from totalreduce.kernels.machine_code import kernels_folder
from totalreduce.kernels.numba_names import WHY_NOT, njit

__all__ = ["compiled", "quiet", "use_twins"]


def quiet(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that warns of no infinities and NaN, as compiled code does not either."""

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return plain(*args)

    return call


def compiled(plain: Callable[..., Any] | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that has Numba compile a function, which then runs without the interpreter's lock.

    Kernels also take scalars of NumPy where their annotations say ``float`` or ``int``, so the result has no types.

    Args:
        plain: The function in NumPy that takes its place where Numba cannot be used; ``None``: only compiled functions
            call it.
        options: Further options of ``numba.njit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if WHY_NOT:
            return function if plain is None else quiet(plain)
        made = njit(nogil=True, **options)(function)
        made.twin = None if plain is None else quiet(plain)
        with contextlib.suppress(OSError):
            kernels_folder()
            from totalreduce.kernels.kept_code import KeptCode  # which imports Numba

            made._cache = KeptCode(function)  # as made.enable_caching() does
        return made

    return decorate


def use_twins() -> None:
    """Have all kernels be their twins in NumPy from now on."""
    for module_name in COMPILED:
        module = importlib.import_module(f"totalreduce.kernels.{module_name}")
        for name, kernel in list(vars(module).items()):
            twin = getattr(kernel, "twin", None)
            if twin is not None:
                setattr(module, name, twin)
