"""Keeps ``torch.compile`` out of the library's own code.

While a compiled function runs, Dynamo looks at every Python frame that begins in its thread outside its graphs, also at
frames that C++ begins: DistributedDataParallel's reducer calls the process group, and the autograd engine calls hooks.
The library's code is not to be traced. A thread that waits for an operation moves the messages itself. Dynamo, which
turns NumPy's calls into torch's, would hand it tensors without memory: the communication fails, and with it the whole
group. A process group is opaque to Dynamo, which fails where it meets an attribute that torch has not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["never_compiled"]

T = TypeVar("T", bound=Callable[..., Any])


def never_compiled(target: T) -> T:
    """Have Dynamo run a function, or every method of a class, as it is, and whatever is called from there.

    A decorator that returns its argument. A graph ends before the call and a new one begins after it; with
    ``fullgraph=True`` the call is an error.

    The effect is that of ``torch.compiler.disable``. That function imports Dynamo at once, which takes a second that
    scripts without a compiler need not spend, and it adds a frame to every call; here the code itself carries the mark.

    Args:
        target: A function; or a class, whose own functions and properties are marked, and not those it inherits.
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
    # For frames that begin outside a graph, whoever begins them:
    _skip(function.__code__)
    # For calls in code that Dynamo is tracing, which it would inline:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "totalreduce moves messages there"  # type: ignore[attr-defined]


def _skip(code: CodeType) -> None:
    """Have the frames of some code, of functions defined in it, and of what these call, run as they are."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant)
