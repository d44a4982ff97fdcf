"""The decorator of kernels that Numba compiles. Numba keeps the code in files, where it can; else that costs time.

The files are in the user's folder of compiled code (``machine_code``), because Numba unpickles what it reads. They
have a folder there for each version of the sources, of Numba and of the processor, so that an old one goes as a whole.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from totalreduce.foundation.private_files import PrivateFolder
from totalreduce.kernels import machine_code
from totalreduce.kernels.numba_names import WHY_NOT, check_numba, njit

__all__ = ["compiled", "kernels_folder", "open_kernels_folder"]

#: Folders of kernels that are kept.
_FOLDERS_MAX: Final = 8
_SUFFIX: Final = ".kernels"


@functools.cache
def kernels_folder() -> Path | None:
    """Return the folder of the kernels of these sources on this machine, which nobody may have made yet.

    ``None``: there can be none, which is said.
    """
    digest = machine_code.digest_of_machine()
    # Of the sources this has what Numba looks at: time and length.
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp = source.stat()
        digest.update(f"{source} {stamp.st_mtime} {stamp.st_size} {sys.version_info[:2]}".encode())
    try:
        return machine_code.code_folder() / f"{digest.hexdigest()}{_SUFFIX}"
    except OSError as error:
        machine_code.warn_not_kept(error)
        return None


def open_kernels_folder(path: Path) -> PrivateFolder:
    """Return the folder of the kernels, which is made if there is none; then old ones of other versions go.

    Raises:
        OSError: It cannot be made, or somebody else may write to it.
    """
    if not path.exists():
        with PrivateFolder(path.parent, makes=True) as folder:
            machine_code.keep_newest(folder, _SUFFIX, _FOLDERS_MAX - 1)
    return PrivateFolder(path, makes=True)


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
