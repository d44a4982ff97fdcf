"""The decorator of kernels that Numba compiles. Numba keeps the code in files, where it can; else that costs time.

The files are in the user's folder of compiled code (``machine_code``), because Numba unpickles what it reads. They
have a folder there for each version of the sources, of Numba and of the processor, so that an old one goes as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from totalreduce.kernels.machine_code import kernels_folder
from totalreduce.kernels.numba_names import WHY_NOT, check_numba, njit

__all__ = ["compiled"]


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that has Numba compile a function, which then runs without the interpreter's lock.

    Kernels also take scalars of NumPy where their annotations say ``float`` or ``int``, so the result has no types.
    Where Numba cannot be used, a call of the function raises ``UnsupportedError``.

    Args:
        options: Further options of ``numba.njit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if WHY_NOT:
            return functools.wraps(function)(lambda *_, **__: check_numba())
        made = njit(nogil=True, **options)(function)
        if kernels_folder() is not None:
            from totalreduce.kernels.kept_code import KeptCode  # which imports Numba

            made._cache = KeptCode(function)  # as made.enable_caching() does
        return made

    return decorate
