"""Keeps ``torch.compile`` out of the library's own code.

While a compiled function runs, Dynamo inspects every Python frame that begins in its thread outside its graphs. This
includes frames that C++ begins: DistributedDataParallel's reducer calls the process group, and the autograd engine
calls hooks. Dynamo must not trace the library's code. A thread that waits for an operation moves the messages itself.
Dynamo turns calls of NumPy into calls of torch, and would pass tensors without memory to it: the communication, and
with it the whole group, would fail. Dynamo also fails at attributes of a process group that torch has not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["never_compiled"]

T = TypeVar("T", bound=Callable[..., Any])


def never_compiled(target: T) -> T:
    """Have Dynamo run a function or all methods of a class without tracing, and all functions that they call.

    This decorator returns its argument. A graph ends before the call and a new one begins after it. With
    ``fullgraph=True`` the call is an error. The effect is that of ``torch.compiler.disable``, which would import Dynamo
    at once (a second in scripts without a compiler) and add a frame to every call. Here the code carries the mark.
    """
    if isinstance(target, FunctionType):
        _mark(target)
    else:
        for member in vars(target).values():
            accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for function in accessors:
                if isinstance(function, FunctionType):
                    _mark(function)
    return target


def _mark(function: FunctionType) -> None:
    # For frames that begin outside a graph:
    _skip(function.__code__)
    # For calls in code that Dynamo is tracing, which it would inline:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "totalreduce moves messages there"  # type: ignore[attr-defined]


def _skip(code: CodeType) -> None:
    """Have Dynamo skip the frames of some code, of functions defined in it, and of functions that these call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant)
