"""Calls that go through torch's dispatcher, where its modes see them: CommDebugMode, DebugMode, fake tensors.

A method of a process group that is written in C++ calls an operator, ``c10d::allreduce_`` for instance, whose kernel
calls the back end. A method that is written in Python is called directly. So torch's modes would see no collective, and
tensors whose class carries operators out itself (fake tensors, ``AsyncCollectiveTensor``) would come as they are.

Such calls are made on a plain process group of C++, which calls the operator. Between the modes of the program stand
two of our own: the first one puts the process group of the program in the place of the plain one, and the last one
carries the operator out, so that it never comes to torch's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from totalreduce.foundation.errors import UnsupportedError

__all__ = ["PLAIN", "Dispatched", "carries_out", "num_modes"]

#: The number of modes of this thread. It takes 30 ns, and is asked before every collective.
num_modes = torch._C._len_torch_dispatch_stack
#: Classes of tensors that leave operators to torch.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
#: Operators with a tensor that only says where they run; the methods take none.
_WITHOUT_TENSORS = ("barrier", "monitored_barrier")


def carries_out(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor carries operators out itself."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


@final
class Dispatched:
    """A process group whose methods call the operator that belongs to them, which then calls a method of the group.

    The methods are those of ``torch.distributed.ProcessGroup``, with arguments as C++ takes them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group``: the process group that carries the calls out."""
        self._group = group
        self._plain = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        last = _CarryOut(getattr(self._group, name), name, arguments)
        with _beneath(last), _Present(self._group):
            returned = getattr(self._plain, name)(*arguments)
        return next((work for stand_in, work in last.works if stand_in is returned), returned)


class _Present(TorchDispatchMode):
    """The first mode: it shows the process group of the program to the modes that follow."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._boxed = group.boxed()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _place_of_group(func)
        if place is not None:
            args = (*args[:place], self._boxed, *args[place + 1 :])
        return func(*args, **(kwargs or {}))


class _CarryOut(TorchDispatchMode):
    """The last mode: it calls the method with the tensors that the other modes, and classes of tensors, have left.

    A handle of ours cannot be a result of an operator: C++ does not hold the Python object, and a mode may keep the
    result for long (selective checkpointing returns it in a second call). So a handle of C++ that calls ours is.
    """

    def __init__(self, method: Callable[..., Any], name: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._method, self._name, self._arguments = method, name, arguments
        #: The handles that are results of operators, and those of ours for which they stand.
        self.works: list[tuple[dist.Work, dist.Work]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _place_of_group(func)
        if place is None or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # torch has the mode of fake tensors behind all others
        if types:
            return NotImplemented  # the class of a tensor carries the operator out
        if num_modes():  # one that records a graph
            raise UnsupportedError(
                f"{func} cannot be recorded with real tensors: trace with fake ones (tracing_mode='fake'), or use "
                "torch.distributed._functional_collectives"
            )
        tensors = () if self._name in _WITHOUT_TENSORS else args[:place]
        work = self._method(*tensors, *self._arguments[len(tensors) :])
        if work is None:
            return None
        stand_in = PythonCallbackWork(work.wait)
        self.works.append((stand_in, work))
        return stand_in.boxed() if len(func._schema.returns) == 1 else (args[0], stand_in.boxed())


def _place_of_group(func: Any) -> int | None:
    """Return which argument of an operator of c10d is the process group; ``None`` for other operators."""
    if getattr(func, "namespace", None) != "c10d":
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index("process_group") if "process_group" in names else None


@contextmanager
def _beneath(mode: TorchDispatchMode) -> Iterator[None]:
    """Have a mode follow all modes of this thread."""
    modes = _taken()
    _put([mode, *modes])
    try:
        yield
    finally:
        _put([each for each in _taken() if each is not mode])


def _taken() -> list[TorchDispatchMode]:
    """Take all modes of this thread away, and return them, the last one first."""
    return [_pop_mode() for _ in range(num_modes())][::-1]


def _put(modes: list[TorchDispatchMode]) -> None:
    for mode in modes:
        _push_mode(mode)
