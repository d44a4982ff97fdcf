"""A hostile accelerator: two devices of torch, ``fake:0`` and ``fake:1``, on which a missing wait is a wrong value.

Call ``load()`` once in a process, before anything else uses autograd or ``torch.accelerator`` there, and never in the
process of pytest: the device stays, and ``torch.accelerator`` is the fake from then on. ``tests/processes`` has
processes in plenty (``fleet``). Without a C++ compiler ``load`` raises ``NoCompiler``, whose text says why
the test is skipped. The first call on a machine compiles ``device.cpp``, which takes 8 s of processor time.

    import fake_accelerator

    fake = fake_accelerator.load(copy_delay_s=0.005)
    tensor = torch.ones(4, device="fake:1")
    side = torch.Stream(device="fake:1")
    ...
    assert fake.take_waits() == []

It is a real device for torch: autograd, hooks, optimizers, ``pin_memory``, ``torch.accelerator``, ``torch.fake`` (which
has what ``torch.cuda`` has under the same names, as far as tests need it). Its memory is the host's, and the CPU's
kernels compute, so that results have the bits of the CPU's. What makes it hostile:

* *Streams.* Each has a thread that does its jobs in their order. A copy between the host and a device, or between
  devices, is a job. It poisons its destination when it begins (at the call if the stream is idle), waits for a random
  time, and only then reads its source. So a source that is changed or freed too early gives wrong values. Poison is
  NaN in floating types and -1 in integers.
* *Kernels* are asynchronous for everyone but their own stream. A kernel waits for the jobs of its stream, computes,
  and poisons what it writes. A job of its stream writes the result after a random time. A kernel or copy of another
  stream that waits for no event, or a host that reads memory by its pointer, sees poison.
* *Memory* is poisoned when it is taken and when it is freed, and never goes back to the system. Freed memory of a
  device waits for the stream on which it was taken and for those named by ``record_stream``. Freed pinned memory waits
  for the streams that have copied from or to its tensors; arrays that were made from such a tensor are not known,
  as with CUDA. Memory of ``register`` (and of ``torch.fake.cudart().cudaHostRegister``) is its owner's. A copy from
  or to pinned memory that is not pinned any more when the copy comes leaves poison.
* *Synchronous as with CUDA*: copies with ``non_blocking=False``, and copies from a device to unpinned memory. A copy
  from unpinned memory with ``non_blocking=True`` takes its source at the call. ``count("unpinned")`` has the bytes of
  copies that asked for ``non_blocking`` and had unpinned memory.
* *Contexts* are made by memory, streams and jobs of a device, and by setting it as the current one. To leave
  ``with stream:`` for a device that was never used makes one there. ``torch.fake.device`` and
  ``torch.accelerator.device_index`` make none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

__all__ = ["FakeAccelerator", "NoCompiler", "load"]

SOURCE = Path(__file__).with_name("device.cpp")
KINDS = ("to_device", "to_host", "between", "kernels")
COUNTS = (*KINDS[:3], "unpinned", "device_memory", "pinned_memory")
NO_LIMIT = 2**62


class NoCompiler(Exception):
    """No compiler is here for the device."""


class FakeAccelerator:
    """What tests ask of the device and set. ``load`` returns the one of the process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_count.restype = ctypes.c_int64

    def delays(self, copy_delay_s: float, kernel_delay_s: float, seed: int = 0) -> None:
        """Let each copy, and each result of a kernel, take a random time of at most so many seconds; half take none."""
        self._set(copy_delay_s, kernel_delay_s, seed, lazy=())

    def lazy(self, *kinds: str) -> None:
        """Let jobs of these kinds begin when somebody waits for them, and do those of other kinds in the call.

        So a race has one outcome, whatever the load of the machine: whoever waits too little for a job of these kinds
        comes before it. With each kind alone in turn, both orders of each pair are tried. A wait is one of the host
        (or 20 calls of ``query`` one after the other), of a job that begins, or of a later kernel of the same stream.
        ``delays`` ends this.

        Args:
            kinds: ``"kernels"``, ``"to_device"``, ``"to_host"``, ``"between"``.
        """
        self._set(0.0, 0.0, 0, kinds)

    def _set(self, copy_delay_s: float, kernel_delay_s: float, seed: int, lazy: tuple[str, ...]) -> None:
        bits = sum(1 << KINDS.index(kind) for kind in lazy)
        self._library.fake_delays(
            ctypes.c_double(copy_delay_s), ctypes.c_double(kernel_delay_s), ctypes.c_uint64(seed), ctypes.c_uint(bits)
        )

    def count(self, what: str) -> int:
        """Return a number of bytes.

        Args:
            what: ``"to_device"``, ``"to_host"``, ``"between"`` (devices): copied since the beginning. ``"unpinned"``:
                copied with ``non_blocking=True`` from or to unpinned memory. ``"device_memory"``, ``"pinned_memory"``:
                taken at present.
        """
        return int(self._library.fake_count(COUNTS.index(what)))

    def contexts(self) -> set[int]:
        """Return the indices of the devices that have a context."""
        return {device for device in range(torch.fake.device_count()) if self._library.fake_context(device)}

    def take_waits(self) -> list[tuple[str, str]]:
        """Return the host's waits since the last call: what it waited for, and the name of the thread.

        The kinds are ``"event"``, ``"stream"``, ``"device"``, ``"copy"``, and the name of an operator whose result the
        host needs, such as ``"aten::_local_scalar_dense"`` of ``item()``. The name of a thread that has ended is a
        number.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        kind, thread = ctypes.create_string_buffer(100), ctypes.c_int64()
        waits = []
        while self._library.fake_take_wait(kind, len(kind), ctypes.byref(thread)):
            waits.append((kind.value.decode(), names.get(thread.value, str(thread.value))))
        return waits

    @contextlib.contextmanager
    def limited(self, *, device_bytes: int = NO_LIMIT, pinned_bytes: int = NO_LIMIT) -> Iterator[None]:
        """Refuse more memory of a device, or more pinned memory, with ``torch.OutOfMemoryError`` in the block."""
        self._library.fake_limits(ctypes.c_int64(device_bytes), ctypes.c_int64(pinned_bytes))
        try:
            yield
        finally:
            self._library.fake_limits(ctypes.c_int64(NO_LIMIT), ctypes.c_int64(NO_LIMIT))

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory that exists; returns what ``cudaHostRegister`` would: 0, 2 (limit reached) or 712 (is pinned)."""
        return int(self._library.fake_register(ctypes.c_size_t(address), ctypes.c_size_t(num_bytes)))

    def unregister(self, address: int) -> int:
        """End ``register``; returns 0, or 713 if nothing is registered there."""
        return int(self._library.fake_unregister(ctypes.c_size_t(address)))


@functools.cache
def _loaded() -> FakeAccelerator:
    library = ctypes.CDLL(str(_compiled()))
    torch.utils.rename_privateuse1_backend("fake")
    library.fake_begin()
    fake = FakeAccelerator(library)
    torch._register_device_module("fake", _device_module(fake))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    fake.kernels = _python_kernels()
    return fake


def load(copy_delay_s: float = 0.002, kernel_delay_s: float = 0.0002, seed: int = 0) -> FakeAccelerator:
    """Give this process the devices ``fake:0`` and ``fake:1``, with these delays (see ``FakeAccelerator.delays``)."""
    fake = _loaded()
    fake.delays(copy_delay_s, kernel_delay_s, seed)
    return fake


def _compiled() -> Path:
    """Return the compiled device, which is kept in the user's folder of caches under the digest of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "totalreduce-tests"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"fake-accelerator-{digest}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            compiler = shutil.which(os.environ.get("CXX", "g++"))
            if compiler is None:
                raise NoCompiler("there is no g++ on the path, which compiles the fake accelerator")
            _compile(compiler, made)
    return made


def _compile(compiler: str, made: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    headers = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
    unfinished = made.with_suffix(".unfinished")
    # Without optimisation: the compiler takes as long for it as all tests that use the device.
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS", str(SOURCE), "-o"]
    command += [str(unfinished), *(f"-I{folder}" for folder in headers)]
    command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{compiler} cannot compile {SOURCE}: {done.stderr[:2000]}")
    unfinished.rename(made)


def _python_kernels() -> tuple[torch.library.Library, ...]:
    """Return what holds the kernels that are written in Python."""

    def sparse(operator: torch._ops.OpOverload, *arguments: object, **options: object) -> object:
        """Let the CPU compute with sparse tensors. That the host waits for it is no matter of the tests."""
        on_host = {}

        def host(value: object) -> object:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor) or value.device.type != "fake":
                return value
            devices.append(value.device)
            return on_host.setdefault(id(value), (value, value.cpu()))[1]

        def back(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            for ours, copied in on_host.values():
                if value is copied:
                    return ours.copy_(value)
            return value.to(devices[0])

        devices: list[torch.device] = []
        computed = operator(*tree_map(host, arguments), **tree_map(host, options))
        return tree_map(back, computed)

    def lower(operator: torch._ops.OpOverload, *arguments: object, **options: object) -> object:
        """Autocast: matrices are multiplied in its half type."""
        dtype = torch.get_autocast_dtype("fake")

        def cast(value: object) -> object:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operator(*tree_map(cast, arguments), **options)

    for_sparse = torch.library.Library("_", "IMPL")
    for_sparse.fallback(sparse, "SparsePrivateUse1")
    for_autocast = torch.library.Library("aten", "IMPL")
    for name in ("linear", "matmul"):
        operator = getattr(torch.ops.aten, name).default
        for_autocast.impl(name, functools.partial(lower, operator), "AutocastPrivateUse1")
    return for_sparse, for_autocast


def _device_module(fake: FakeAccelerator) -> types.ModuleType:
    """``torch.fake``: what ``torch.cuda`` has, under the same names."""
    module = types.ModuleType("torch.fake")
    accelerator = torch.accelerator

    class Device:
        """Makes a device the current one, and makes no context when it goes back to the old one, as with CUDA."""

        def __init__(self, device: torch.device | int | str) -> None:
            self._index = device if isinstance(device, int) else torch.device(device).index
            self._before = -1

        def __enter__(self) -> None:
            self._before = torch._C._accelerator_exchangeDevice(-1 if self._index is None else self._index)

        def __exit__(self, *error: object) -> None:
            torch._C._accelerator_maybeExchangeDevice(self._before)

    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: fake.register(address, num_bytes),
        cudaHostUnregister=fake.unregister,
    )
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": torch._C._accelerator_hooks_device_count,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "device": Device,
        "Stream": lambda device=None, **options: torch.Stream(device=_device_of(device), **options),
        "Event": lambda **options: torch.Event(device="fake", **options),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda device=None: accelerator.current_stream(_device_of(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_device_of(device).index, device_type=20
        ),
        "set_stream": accelerator.set_stream,
        "synchronize": lambda device=None: accelerator.synchronize(_device_of(device)),
        "cudart": lambda: runtime,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _default_stream(device: torch.device | int | str | None = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_device_of(device).index, device_type=20)


def _device_of(device: torch.device | int | str | None) -> torch.device:
    device = torch.device("fake", device) if isinstance(device, int) else torch.device(device or "fake")
    return device if device.index is not None else torch.device("fake", torch.accelerator.current_device_index())
