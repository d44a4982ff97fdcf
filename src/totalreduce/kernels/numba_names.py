"""What kernels import of Numba. Where Numba cannot be used, the names stand for nothing, and nothing needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

import numpy as np

from totalreduce.foundation.os_errors import describe_error

__all__ = [
    "WHY_NOT",
    "float32",
    "int8",
    "int32",
    "int64",
    "intrinsic",
    "ir",
    "njit",
    "types",
    "uint8",
    "uint32",
    "uint64",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Nothing:
    """Stands for whatever is asked of it."""

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __getattr__(self, _name: str) -> Self:
        return self


def _import() -> tuple[str, dict[str, Any]]:
    try:
        numba, extending = importlib.import_module("numba"), importlib.import_module("numba.extending")
        ir = importlib.import_module("llvmlite.ir")
    except Exception as error:  # another version may raise anything
        return describe_error(error).splitlines()[0], {}
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set", {}
    return "", {**vars(numba), "intrinsic": extending.intrinsic, "ir": ir}


def _same(function: _Function) -> _Function:
    return function


_why_not, _found = _import()
#: Why Numba cannot be used; "" if it can.
WHY_NOT: Final = _why_not
_nothing: Any = _Nothing()
types: Any = _found.get("types", _nothing)
ir: Any = _found.get("ir", _nothing)
njit: Any = _found.get("njit", _nothing)
intrinsic: Any = _found.get("intrinsic", _same)
float32: Any = _found.get("float32", np.float32)
int8: Any = _found.get("int8", np.int8)
int32: Any = _found.get("int32", np.int32)
int64: Any = _found.get("int64", np.int64)
uint8: Any = _found.get("uint8", np.uint8)
uint32: Any = _found.get("uint32", np.uint32)
uint64: Any = _found.get("uint64", np.uint64)
