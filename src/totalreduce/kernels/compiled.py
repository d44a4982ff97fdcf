"""The decorator of kernels that Numba compiles. Numba keeps the code in files, where it can; else that costs time.

Numba itself raises an error if no folder can be written, or if a file cannot be written because a disk is full.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, final

from numba import njit
from numba.core.caching import FunctionCache

from totalreduce.foundation.os_errors import describe_error

__all__ = ["compiled"]

_log = logging.getLogger(__name__)


@final
class _KeptCode(FunctionCache):  # type: ignore[misc]
    """The files of one function."""

    #: Whether this process has said that code cannot be kept.
    has_warned = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for the types of arguments; ``None`` if there is none, or if the file is damaged."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # of a file that was cut: whatever pickle raises
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for the types of arguments, if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self.warn(error)

    @classmethod
    def warn(cls, error: Exception) -> None:
        """Say once that code cannot be kept."""
        if not cls.has_warned:
            cls.has_warned = True
            reason = describe_error(error)
            _log.warning("compiled kernels cannot be kept in files: %s. This process compiles them anew", reason)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that has Numba compile a function, which then runs without the interpreter's lock.

    Kernels also take scalars of NumPy where their annotations say ``float`` or ``int``, so the result has no types.

    Args:
        options: Further options of ``numba.njit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(nogil=True, **options)(function)
        if hasattr(made, "enable_caching"):  # else Numba compiles nothing (NUMBA_DISABLE_JIT)
            try:
                made._cache = _KeptCode(function)  # as made.enable_caching() does
            except RuntimeError as error:  # there is no folder
                _KeptCode.warn(error)
        return made

    return decorate
