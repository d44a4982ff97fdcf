"""``KeptCode``: the compiled code of a kernel, in files that this user alone can have written.

It is what Numba's own ``enable_caching`` makes, in another place, and with a look at each file before it is unpickled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

from totalreduce.foundation.private_files import PrivateFolder
from totalreduce.kernels import machine_code
from totalreduce.kernels.machine_code import kernels_folder, open_kernels_folder

__all__ = ["KeptCode"]


@final
class _Locator:
    """Where Numba finds the files of a function. Numba asks for these methods."""

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._source = folder, Path(source)

    @classmethod
    def from_function(cls, _function: Callable[..., Any], source: str) -> _Locator:
        """Return the place of a function."""
        return cls(kernels_folder(), source)

    def ensure_cache_path(self) -> None:
        """Make the folder, or check it."""
        open_kernels_folder(self._folder).close()

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> tuple[float, int]:
        """Return what changes with the source."""
        stamp = self._source.stat()
        return stamp.st_mtime, stamp.st_size

    def get_disambiguator(self) -> str:
        """Return nothing: the folder is of one source."""
        return ""


@final
class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


@final
class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function: those that this user alone can have written are read, and no others."""

    def _load_index(self) -> Any:
        self._check(self._index_path)
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        self._check(self._data_path(name))
        return super()._load_data(name)

    def _check(self, path: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError), PrivateFolder(Path(self._cache_path)) as folder:
                folder.check(os.path.basename(path))
        except OSError as error:  # Numba says nothing of it
            machine_code.warn_not_kept(error)
            raise

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        with PrivateFolder(Path(self._cache_path)) as folder, folder.writing(os.path.basename(filepath)) as file:
            yield file


@final
class KeptCode(FunctionCache):  # type: ignore[misc]
    """The code of one function, in files."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        impl = self._impl
        self._cache_file = _Files(self._cache_path, impl.filename_base, impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for the types of arguments; ``None`` if there is none, or if the file is damaged."""
        try:
            return super().load_overload(sig, target_context)
        except OSError:  # somebody else can have written it
            return None
        except Exception:  # of a file that was cut: whatever pickle raises
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for the types of arguments, if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            machine_code.warn_not_kept(error)
