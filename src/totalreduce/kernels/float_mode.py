"""The processor's mode of floating-point arithmetic, for compiled functions that several ranks must compute alike.

The mode belongs to a thread: ``torch.set_flush_denormal`` changes it in the thread that calls it. Numba compiles these
functions into ``exchange_code``.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["restore_mode", "use_default_mode"]

_INT, _WORD = ir.IntType(32), ir.IntType(64)
#: All exceptions masked, rounding to the nearest, denormal numbers kept.
_X86_DEFAULT = 0x1F80
_ARM_DEFAULT = 0


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), arguments)


def _set(builder: Any, mode: Any) -> None:
    """Set the mode; nothing on processors whose mode is not known here."""
    if platform.machine() == "x86_64":
        place = cgutils.alloca_once_value(builder, builder.trunc(mode, _INT))
        _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [builder.bitcast(place, cgutils.voidptr_t)])
    elif platform.machine() == "aarch64":
        _call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [mode])


@intrinsic  # type: ignore[untyped-decorator]
def use_default_mode(_typing: Any) -> Any:
    """Set this thread's mode to the default; return the mode that it had."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        before: Any = _WORD(0)
        if platform.machine() == "x86_64":
            place = cgutils.alloca_once(builder, _INT)
            _call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [builder.bitcast(place, cgutils.voidptr_t)])
            before = builder.zext(builder.load(place), _WORD)
            _set(builder, _WORD(_X86_DEFAULT))
        elif platform.machine() == "aarch64":
            before = _call(builder, "llvm.aarch64.get.fpcr", _WORD, [])
            _set(builder, _WORD(_ARM_DEFAULT))
        return before

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def restore_mode(_typing: Any, _mode: Any) -> Any:
    """Set this thread's mode to what ``use_default_mode`` has returned."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _set(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate
