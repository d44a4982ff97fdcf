"""Machine code of functions that Numba has compiled, kept in files, so that a process needs no Numba to call them.

To import Numba and to prepare it for its first function takes half a second of processor time; to read machine code
takes some milliseconds. LLVM's library (``llvmlite``) emits the code of a function as an object file, and loads it.
The file's name contains a digest of everything that the code depends on: the sources, the versions and the processor.
The first process on a machine compiles (seconds); processes that start at the same time wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from llvmlite import binding

from totalreduce.foundation.environment import cache_folder
from totalreduce.foundation.files import replacing

__all__ = ["SYMBOLS", "Loaded", "digest_of_machine", "files", "load", "only_one"]

#: Symbols of this process that the code may refer to: of the C library, and of Python's exceptions.
_OF_PROCESS: Final = (
    "PyBytes_FromStringAndSize",
    "PyErr_Clear",
    "PyErr_SetNone",
    "PyErr_SetString",
    "PyErr_WriteUnraisable",
    "PyExc_RuntimeError",
    "PyExc_StopIteration",
    "PyExc_SystemError",
    "PyUnicode_FromString",
    "Py_DecRef",
    "__errno_location",
    "clock_gettime",
    "epoll_wait",
    "memcpy",
    "memmove",
    "memset",
    "poll",
    "process_vm_readv",
    "recv",
    "sched_yield",
    "sendmsg",
    "setsockopt",
)
#: Symbols of Numba's own library. A function calls them after an exception only, and the functions here raise none:
#: where Numba is not imported, a call ends the process.
_OF_NUMBA: Final = (
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
#: All symbols that the code may refer to and does not define.
SYMBOLS: Final = (*_OF_PROCESS, *_OF_NUMBA)
_DIGEST_BYTES: Final = 16
#: The symbol of the function in its object file.
_SYMBOL: Final = "totalreduce_function"


class Loaded:
    """A function of a loaded object file.

    Attributes:
        function: The function, for integers of 64 bits. A call does not hold the interpreter's lock.
    """

    def __init__(self, code: bytes, num_arguments: int) -> None:
        """``code``: an object file with one function, which takes and returns integers of 64 bits."""
        _initialize()
        # The code is in this object's memory: it lives as long as the object.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        arguments = [ctypes.c_int64] * num_arguments
        self.function = ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(self._engine.get_function_address(_SYMBOL))


def files(*names: str) -> list[Path]:
    """Return the paths of files of this folder, and of those with the arithmetic that all compiled functions share."""
    folder = Path(__file__).parent
    return [folder / name for name in ("atomics.py", "element_types.py", "elements.py", "halves.py", *names)]


def load(module: str, num_arguments: int, sources: Sequence[Path]) -> Loaded:
    """Load a function from its file; compile it first if there is no file for these sources and this machine.

    Args:
        module: The name of the module that compiles the function. It is imported for that only. Its ``assembly()``
            returns LLVM's assembly and the name of the function therein.
        num_arguments: The number of the function's arguments.
        sources: The files whose text determines the code.
    """
    digest = digest_of_machine()
    for source in sources:
        digest.update(source.read_bytes())
    paths = [folder / f"{module}-{digest.hexdigest()}.o" for folder in _folders()]
    make = functools.cache(lambda: _compile(module))  # once, even if the file cannot be written in the first folder
    for path in paths:
        with contextlib.suppress(OSError):
            code = _read(path)
            if code is not None:
                return Loaded(code, num_arguments)
    for path in paths:
        with contextlib.suppress(OSError):
            return Loaded(_read_or_make(path, make), num_arguments)
    return Loaded(make(), num_arguments)


def digest_of_machine() -> hashlib.blake2b:
    """Return a digest, to be continued, of all that compiled code depends on besides its sources."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    machine = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())
    for part in (*machine, metadata.version("numba"), metadata.version("llvmlite")):
        digest.update(part.encode() + b"\0")
    return digest


def _folders() -> Iterator[Path]:
    """Return where files may be kept, as Numba does: beside the source, or in the user's folder of caches."""
    yield Path(__file__).parent / "__pycache__"
    folder = cache_folder()
    if folder is not None:
        yield folder


def _read_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with only_one(path):
        code = _read(path)
        if code is None:
            code = make()
            with replacing(path) as file:
                file.write(_digest(code) + code)
    return code


def _read(path: Path) -> bytes | None:
    """Return the code in a file, or ``None`` if there is no file or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and digest == _digest(code) else None


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Wait until no other process compiles for this file. On a file system without locks several do.

    Raises:
        OSError: The file of the lock, beside this one, cannot be written.
    """
    with path.with_suffix(".lock").open("wb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(module: str) -> bytes:
    """Return the object file of the function of a module.

    Raises:
        RuntimeError: The function refers to symbols that ``SYMBOLS`` does not have. A process that calls it could end.
    """
    assembly, name = importlib.import_module(module).assembly()
    _initialize()
    named = binding.parse_assembly(assembly.replace(f'@"{name}"', f"@{_SYMBOL}").replace(f"@{name}(", f"@{_SYMBOL}("))
    needed = {symbol.name for symbol in (*named.functions, *named.global_variables) if symbol.is_declaration}
    unknown = sorted(name for name in needed if not name.startswith("llvm.") and name not in SYMBOLS)
    if unknown:
        raise RuntimeError(f"{module} refers to symbols that are not in machine_code.SYMBOLS: {', '.join(unknown)}")
    code: bytes = _machine().emit_object(named)
    return code


def _machine() -> binding.TargetMachine:
    """Return LLVM's description of this machine, with the options that Numba uses."""
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic" if os.uname().machine.startswith("ppc64") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _initialize() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    process = ctypes.CDLL(None)
    for name in SYMBOLS:
        if not binding.address_of_symbol(name):
            # Only Linux has all of them. Elsewhere nothing calls the functions that need them.
            function = getattr(process, name if name in _OF_PROCESS else "abort", process.abort)
            binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
