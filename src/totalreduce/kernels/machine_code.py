"""Machine code of functions that Numba has compiled, kept in files, so that a process needs no Numba to call them.

To import Numba and to prepare it for its first function takes half a second of processor time; to read machine code
takes some milliseconds. A wheel carries code for the usual processors (``foundation.shipped_code``), which is loaded if
it fits. Otherwise LLVM's library (``llvmlite``) emits the code of a function as an object file, and loads it.
The file's name contains a digest of everything that the code depends on: the sources, the versions and the processor.
The first process on a machine compiles (seconds); processes that start at the same time wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from totalreduce.foundation.environment import cache_folder, settings_of_numba
from totalreduce.foundation.errors import UnsupportedError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.foundation.private_files import PrivateFolder
from totalreduce.foundation.shipped_code import NoShippedCodeError, find_library

__all__ = [
    "SHIPPED",
    "SYMBOL",
    "SYMBOLS",
    "CompiledFunction",
    "Loaded",
    "NoCodeError",
    "NotKeptError",
    "check_room",
    "code_folder",
    "code_in_files",
    "digest_of_machine",
    "emit",
    "files",
    "keep_newest",
    "kernels_folder",
    "load",
    "load_shipped",
    "only_one",
    "open_kernels_folder",
    "remove_code",
    "warn",
    "warn_not_kept",
]

_log = logging.getLogger(__name__)

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
#: Object files that are kept: those of a few versions, and processors that share a home.
_FILES_MAX: Final = 16
#: Folders of kernels that are kept, and how their names end.
_FOLDERS_MAX: Final = 8
_SUFFIX: Final = ".kernels"
#: A function takes less on the disk.
_ROOM_BYTES: Final = 1 << 20
#: No function is so long.
_CODE_BYTES_MAX: Final = 16 << 20
#: How long a process waits for another one that compiles, in seconds: for one that is stopped, and in all; how often it
#: says so, and how often it looks.
_STOPPED_S, _WAIT_S, _SAY_S, _LOOK_S = 1.0, 60.0, 3.0, 0.05

#: What this process, or another rank for it, has said of compiled code that is missing.
_said: set[str] = set()
#: The symbol of the function in its object file, or in its library.
SYMBOL: Final = "totalreduce_function"
#: The folder of the code that the package carries.
SHIPPED: Final = Path(__file__).with_name("shipped")


class NoCodeError(UnsupportedError):
    """A function has no machine code in this process, for a reason that the text says. Others do without it."""


class NotKeptError(NoCodeError):
    """Code could not be kept in files, so that each process of each job would compile it: it is not compiled."""

    def __init__(self, error: OSError) -> None:
        """``error``: why no file can be used."""
        super().__init__(
            f"it cannot be kept in files ({describe_error(error)}); XDG_CACHE_HOME can name another folder"
        )


def _binding() -> Any:
    """Return LLVM's library. Raises ``NoCodeError``: it is not installed, or cannot be loaded."""
    try:
        return importlib.import_module("llvmlite.binding")
    except Exception as error:  # OSError of a library that does not fit
        raise NoCodeError(f"llvmlite, which loads compiled code, is missing: {describe_error(error)}") from error


class CompiledFunction(NamedTuple):
    """A function that is compiled, and kept in a file. It takes and returns integers of 64 bits."""

    #: The name of the module that compiles it. It is imported for that only. Its ``assembly()`` returns LLVM's assembly
    #: and the name of the function therein.
    module: str
    num_arguments: int
    sources: tuple[Path, ...]  #: The files whose text determines the code.
    title: str  #: What it is to a user: it is written into the log when it is compiled.

    @property
    def name(self) -> str:
        """The name of the module, without those of its packages."""
        return self.module.rpartition(".")[2]

    def at(self, address: int) -> Callable[..., int]:
        """Return the function whose code is at an address. A call does not hold the interpreter's lock."""
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self.num_arguments)(address)


class Loaded(NamedTuple):
    """A function that is loaded."""

    function: Callable[..., int]  #: The function, for integers of 64 bits.
    level: str  #: The level of x86-64 for which the package carries it; "" if it was compiled on this machine.
    memory: object  #: The object in whose memory the code is: the code lives as long as it does.


def files(*names: str) -> tuple[Path, ...]:
    """Return the paths of files of this package, and of those that all compiled functions share."""
    folder = Path(__file__).parent
    shared = ("atomics.py", "element_types.py", "elements.py", "halves.py", "machine_code.py", "../foundation/words.py")
    return tuple(folder / name for name in (*shared, "../foundation/types.py", *names))


def load(function: CompiledFunction) -> Loaded:
    """Load a function that the package carries, or from its file; compile it first if there is none for this machine.

    Raises:
        NoCodeError: It cannot be compiled or kept here, or the process that compiles it does not come to an end.
    """
    try:
        return load_shipped(function)
    except NoShippedCodeError as error:
        _log.debug("%s is not loaded from the package: %s", function.name, error)
    try:
        digest = digest_of_machine()
        for source in function.sources:
            digest.update(source.read_bytes())
        name = f"{function.name}-{digest.hexdigest()}.o"
        return _load_object(_code_of(name, lambda: _compile(function)), function)
    except NoCodeError:
        raise
    except Exception as error:  # whatever another version of Numba or LLVM raises
        raise NoCodeError(f"{function.module} cannot be compiled: {describe_error(error).splitlines()[0]}") from error


def load_shipped(function: CompiledFunction) -> Loaded:
    """Load a function that the package carries. Raises ``NoShippedCodeError``."""
    found = find_library(SHIPPED, function.name, function.sources)
    try:
        library = ctypes.CDLL(str(found.path))
        address = ctypes.cast(library[SYMBOL], ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise NoShippedCodeError(f"it cannot be loaded: {describe_error(error)}") from error
    return Loaded(function.at(address or 0), found.level, library)


def _load_object(code: bytes, function: CompiledFunction) -> Loaded:
    """Load an object file with one function."""
    _initialize()
    binding = _binding()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Loaded(function.at(engine.get_function_address(SYMBOL)), "", engine)


def digest_of_machine() -> hashlib.blake2b:
    """Return a digest, to be continued, of all that compiled code depends on besides its sources."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    binding = _binding()
    machine = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())
    for part in (*machine, metadata.version("numba"), metadata.version("llvmlite"), *settings_of_numba()):
        digest.update(part.encode() + b"\0")
    return digest


def code_folder() -> Path:
    """Return the folder of compiled code, among the files of this user that can be made again. Raises ``OSError``."""
    folder = cache_folder()
    if folder is None:
        raise OSError(errno.ENOENT, "this user has no home, and XDG_CACHE_HOME is not set")
    return folder / "compiled"


def kernels_folder() -> Path:
    """Return the folder of the kernels of these sources on this machine, which nobody may have made yet.

    Raises:
        OSError: The user has no home.
    """
    return code_folder() / f"{_digest_of_kernels()}{_SUFFIX}"


@functools.cache
def _digest_of_kernels() -> str:
    digest = digest_of_machine()
    # Of the sources this has what Numba looks at: time and length.
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp = source.stat()
        digest.update(f"{source} {stamp.st_mtime} {stamp.st_size} {sys.version_info[:2]}".encode())
    return digest.hexdigest()


def open_kernels_folder(path: Path) -> PrivateFolder:
    """Return the folder of the kernels, which is made if there is none; then old ones of other versions go.

    Raises:
        OSError: It cannot be made, or somebody else may write to it.
    """
    if not path.exists():
        with PrivateFolder(path.parent, makes=True) as folder:
            keep_newest(folder, _SUFFIX, _FOLDERS_MAX - 1)
    return PrivateFolder(path, makes=True)


def check_room(folder: PrivateFolder, num_bytes: int) -> None:
    """Check that code can be kept before it is compiled, which takes seconds. Raises ``OSError``."""
    folder.write("room", bytes(num_bytes))
    folder.remove("room")


def code_in_files() -> dict[str, int]:
    """Return the bytes of each file and folder of compiled code. Raises ``OSError``."""
    with PrivateFolder(code_folder()) as folder:
        return {name: folder.size(name) for name in folder.names()}


def remove_code() -> None:
    """Remove all files of compiled code. Jobs that run go on; the next ones compile it again. Raises ``OSError``."""
    with PrivateFolder(code_folder()) as folder:
        for name in folder.names():
            folder.remove(name)


def keep_newest(folder: PrivateFolder, suffix: str, count: int) -> None:
    """Remove old files, or folders, whose names end with ``suffix``, if there are more than ``count``."""
    for name in [name for name in folder.names() if name.endswith(suffix)][count:]:
        with contextlib.suppress(OSError):  # of a folder into which another process writes
            folder.remove(name)


def warn(text: str, *arguments: object, elsewhere: bool = False) -> None:
    """Say once why compiled code is missing or takes time: a warning if it is the first in this process.

    What follows a warning, of another consequence, is information.

    Args:
        text: As for a logger.
        arguments: Likewise.
        elsewhere: Another rank warns.
    """
    if text not in _said:
        level = logging.INFO if _said or elsewhere else logging.WARNING
        _said.add(text)
        _log.log(level, text, *arguments)


def warn_not_kept(error: Exception) -> None:
    """Say that code cannot be kept in files."""
    warn(
        "compiled code cannot be kept in files: %s. Each process compiles it anew, which takes seconds",
        describe_error(error),
    )


def _code_of(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the code in a file, which is made first if there is none."""
    try:
        with PrivateFolder(code_folder(), makes=True) as folder:
            code = _read(folder, name)
            if code is None:
                check_room(folder, _ROOM_BYTES)
                with only_one(folder, f"{name}.lock"):
                    code = _read(folder, name)
                    if code is None:
                        code = make()
                        folder.write(name, _digest(code) + code)
                        keep_newest(folder, ".o", _FILES_MAX)
                        keep_newest(folder, ".lock", _FILES_MAX)
    except OSError as error:
        raise NotKeptError(error) from error
    return code


def _read(folder: PrivateFolder, name: str) -> bytes | None:
    """Return the code in a file, or ``None`` if there is no file or it is damaged."""
    try:
        content = folder.read(name, _CODE_BYTES_MAX)
    except FileNotFoundError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and digest == _digest(code) else None


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()


@contextlib.contextmanager
def only_one(folder: PrivateFolder, lock: str) -> Iterator[None]:
    """Wait until no other process compiles under this lock. On a file system without locks several do.

    Raises:
        NoCodeError: The other process is stopped, or takes too long.
        OSError: The file of the lock cannot be used.
    """
    begin = stopped_since = time.monotonic()
    say_at = begin + _SAY_S
    while True:
        with folder.locked(lock) as holder:
            if holder == 0:
                yield
                return
        now = time.monotonic()
        if holder is None or not _is_stopped(holder):
            stopped_since = now
        who = "another process" if holder is None else f"process {holder}"
        if now - stopped_since > _STOPPED_S:
            raise NoCodeError(f"{who}, which compiles it, is stopped (lock {folder.path / lock})")
        if now - begin > _WAIT_S:
            raise NoCodeError(f"{who} compiles it, and was not ready after {_WAIT_S:g} s (lock {folder.path / lock})")
        if now >= say_at:
            say_at = now + _SAY_S
            _log.info("%s compiles code, once on this machine: %.0f s so far", who, now - begin)
        time.sleep(_LOOK_S)


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped. Unknown ones are not: it may be one of another container."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b") ")[2][:1] in (b"T", b"t")


def _compile(function: CompiledFunction) -> bytes:
    """Return the object file of a function for this machine, and log that it is compiled, and for how long."""
    if "NUMBA_DISABLE_JIT=1" in settings_of_numba():
        raise NoCodeError("NUMBA_DISABLE_JIT is set")
    _log.info("compiling %s, once on this machine: some ten seconds of one core", function.title)
    begin = time.monotonic()
    code = emit(function)
    _log.info("compiled in %.1f s", time.monotonic() - begin)
    return code


def emit(function: CompiledFunction, level: str | None = None) -> bytes:
    """Return the object file of a function.

    Args:
        function: The function.
        level: A level of x86-64, for which Numba must compile in this process; the code can then be linked into a
            library. ``None``: this machine, whose process loads it.

    Raises:
        RuntimeError: The function refers to symbols that ``SYMBOLS`` does not have. A process that calls it could end.
    """
    assembly, name = importlib.import_module(function.module).assembly()
    _initialize()
    binding = _binding()
    named = binding.parse_assembly(assembly.replace(f'@"{name}"', f"@{SYMBOL}").replace(f"@{name}(", f"@{SYMBOL}("))
    needed = {symbol.name for symbol in (*named.functions, *named.global_variables) if symbol.is_declaration}
    unknown = sorted(name for name in needed if not name.startswith("llvm.") and name not in SYMBOLS)
    if unknown:
        text = f"{function.module} refers to symbols that are not in machine_code.SYMBOLS: {', '.join(unknown)}"
        raise RuntimeError(text)
    code: bytes = _machine(level).emit_object(named)
    return code


def _machine(level: str | None = None) -> Any:
    """Return LLVM's description of this machine, with the options that Numba uses, or of those of a level."""
    binding = _binding()
    target = binding.Target.from_triple(binding.get_process_triple())
    if level is not None:
        return target.create_target_machine(cpu=level, features="", opt=3, reloc="pic", codemodel="small", jit=False)
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic" if os.uname().machine.startswith("ppc64") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _initialize() -> None:
    binding = _binding()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    process = ctypes.CDLL(None)
    for name in SYMBOLS:
        if not binding.address_of_symbol(name):
            # Only Linux has all of them. Elsewhere nothing calls the functions that need them.
            function = getattr(process, name if name in _OF_PROCESS else "abort", process.abort)
            binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
