"""Memory by its address, and functions of the C library, for compiled functions (``exchange_code``, ``relay_code``).

An address is an integer, because the memory of another process
is no array of this one. ``load`` and ``store`` keep their order towards other memory accesses (acquire and release);
``vectors.fence`` also orders a store before a later load. ``load_shared``, ``store_shared`` and ``raise_shared`` do the
same for words of a block that several threads of this process use.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, typeof_impl

from totalreduce.foundation.words import Structure

__all__ = [
    "BLOCK_BYTES",
    "LINE_BYTES",
    "copy_bytes",
    "error_number_at",
    "float32_at",
    "float64_at",
    "int32_at",
    "int64_at",
    "load",
    "load_shared",
    "move_bytes",
    "pause",
    "poll",
    "raise_shared",
    "read_clock",
    "read_process",
    "receive",
    "send_message",
    "set_option",
    "store",
    "store_shared",
    "stream_block",
    "uint8_at",
    "uint16_at",
    "wait_for_events",
    "yield_core",
]

_WORD = ir.IntType(64)


@typeof_impl.register(Structure)  # type: ignore[untyped-decorator]
def _as_module(structure: Structure, _context: Any) -> Any:
    """Let Numba compile the attributes of a structure as it compiles those of a module: as constants."""
    return types.Module(structure)


#: The length of a cache line, and what ``stream_block`` copies.
LINE_BYTES, BLOCK_BYTES = 64, 256
_BLOCK = ir.VectorType(ir.IntType(64), BLOCK_BYTES // 8)
#: LLVM's name and argument of the instruction that tells a processor that a loop waits: without it such a loop takes
#: the core's resources from its other thread.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)])}

#: The C library's ``sched_yield``: lets another process have this core.
yield_core = types.ExternalFunction("sched_yield", types.int32())
#: The C library's ``clock_gettime``: the number of the clock, and the address of two words for seconds and nanoseconds.
read_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
#: The C library's ``memcpy``, for addresses: target, source, number of bytes.
copy_bytes = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
#: Linux's ``process_vm_readv``: the number of the process; the address of vectors of this process, and their number;
#: the same of the other process; 0. Returns the number of bytes that were copied.
read_process = types.ExternalFunction(
    "process_vm_readv",
    types.int64(types.int32, types.int64, types.int64, types.int64, types.int64, types.int64),
)
#: The C library's ``memmove``, for addresses: target, source, number of bytes.
move_bytes = types.ExternalFunction("memmove", types.int64(types.int64, types.int64, types.int64))
#: Linux's ``epoll_wait``: the epoll object, the address of room for events, for how many, and milliseconds.
wait_for_events = types.ExternalFunction("epoll_wait", types.int32(types.int32, types.int64, types.int32, types.int32))
#: The C library's ``poll``: the address of the descriptors, their number, milliseconds.
poll = types.ExternalFunction("poll", types.int32(types.int64, types.int64, types.int32))
#: The C library's ``recv``: the socket, the address, the number of bytes, flags.
receive = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.int64, types.int32))
#: The C library's ``sendmsg``: the socket, the address of a ``struct msghdr``, flags.
send_message = types.ExternalFunction("sendmsg", types.int64(types.int32, types.int64, types.int32))
#: The C library's ``setsockopt``: the socket, the level, the option, the address of its value, the value's length.
set_option = types.ExternalFunction(
    "setsockopt", types.int32(types.int32, types.int32, types.int32, types.int64, types.int32)
)
#: Returns the address of this thread's ``errno``.
error_number_at = types.ExternalFunction("__errno_location", types.int64())


def _acquire(builder: Any, pointer: Any) -> Any:
    return builder.load_atomic(pointer, "acquire", 8)


def _release(context: Any, builder: Any, word: Any, pointer: Any) -> Any:
    builder.store_atomic(word, pointer, "release", 8)
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def load(_typing: Any, address: Any) -> Any:
    """Return the 64-bit word at ``address``; later accesses happen after it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _acquire(builder, builder.inttoptr(arguments[0], _WORD.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(_typing: Any, address: Any, word: Any) -> Any:
    """Write the 64-bit word at ``address``; earlier accesses happen before it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _release(context, builder, arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()))

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_shared(_typing: Any, words: Any, index: Any) -> Any:
    """Return a word that another thread may write meanwhile; later accesses happen after it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _acquire(builder, builder.gep(arguments[0], [arguments[1]]))

    return types.int64(words, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_shared(_typing: Any, words: Any, index: Any, word: Any) -> Any:
    """Write a word that another thread may read meanwhile; earlier accesses happen before it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _release(context, builder, arguments[2], builder.gep(arguments[0], [arguments[1]]))

    return types.void(words, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def raise_shared(_typing: Any, words: Any, index: Any, word: Any) -> Any:
    """Write a word that another thread may write meanwhile, unless it is greater; ordered as ``store_shared``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("max", builder.gep(arguments[0], [arguments[1]]), arguments[2], "acq_rel")
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_block(_typing: Any, target: Any, source: Any) -> Any:
    """Copy ``BLOCK_BYTES`` to the address ``target``, a multiple of ``LINE_BYTES``, past the caches.

    It needs ``vectors.fence`` before another thread may read the block.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(address, _BLOCK.as_pointer()) for address in arguments)
        loaded = builder.load(source)
        loaded.align = 1
        stored = builder.store(loaded, target)
        stored.align = LINE_BYTES
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pause(_typing: Any) -> Any:
    """Wait for some tens of nanoseconds, where the processor has an instruction for that."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, values = _PAUSES[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(builder.module.declare_intrinsic(name, fnty=kind), values)
        return context.get_dummy_value()

    return types.void(), generate


def _pointer_to(element: types.Type) -> Any:
    """Return a function that converts an address into a pointer to elements of one type."""

    def convert(_typing: Any, address: Any) -> Any:
        """Return an address as a pointer to elements of one type."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(element).as_pointer())

        return types.CPointer(element)(types.int64), generate

    return intrinsic(convert)


float32_at, float64_at = _pointer_to(types.float32), _pointer_to(types.float64)
uint8_at, uint16_at = _pointer_to(types.uint8), _pointer_to(types.uint16)
int32_at, int64_at = _pointer_to(types.int32), _pointer_to(types.int64)
