"""Futures of operations whose callbacks may start further operations, on all ranks the same ones.

A callback runs in a thread, or at once where the operation has ended already, so ranks run callbacks in different
orders. While one runs, ``groups.calling`` knows its origin: the operation, and the number of the callback among those
that were registered on its future. What the callback starts is named after that.

The futures are torch's own. Its C++ makes chained futures, and carries errors and CUDA streams over to them. A future
of a class of ours could hold an error as a value only: ``torch.futures.wait_all`` would return it, and
DistributedDataParallel take it for a tensor. So ``then`` and ``add_done_callback`` of torch's class, and
``torch.futures.collect_all``, are wrapped when the first future is followed. Futures of other back ends, and those that
a program makes, go through as before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch

from totalreduce.groups.calling import Origin, Unknown, surroundings
from totalreduce.tensors.compilation import never_compiled

__all__ = ["follow", "in_backward"]

_Result = TypeVar("_Result")
#: torch's class of all futures; its stub does not know everything.
_Future: Any = torch._C.Future
#: Torch's number of the backward pass outside a backward pass.
_NO_BACKWARD = -1


@final
class _Followed:
    """What is known of a future: its origin, from which those of its callbacks are made.

    It does not refer to the future, by which it is found. ``find`` returns the origin, and is called when the future is
    complete: the sender of a message from any rank is not known before. ``None`` stands for an origin that no other
    rank can know.
    """

    __slots__ = ("_find", "_numbers", "_origin", "error")

    def __init__(self, find: Callable[[], Origin | None]) -> None:
        self._find: Callable[[], Origin | None] | None = find
        self._origin: Origin | None = None
        #: By the callback that registers callbacks here (its digest; the program's is empty): how many it has.
        self._numbers: dict[bytes, int] = {}
        #: The exception of the callback that completes the future.
        self.error: BaseException | None = None

    @property
    def origin(self) -> Origin | None:
        """The origin; ``None`` if it is not known."""
        find = self._find
        if find is not None:
            self._origin = find()
            self._find = None  # it refers to the futures from which this one was chained
        return self._origin

    def next_callback(self) -> _Followed:
        """Return what is known of the future of a callback that is registered now."""
        there = surroundings.get()
        registered_in = there if isinstance(there, Origin) else None
        key = b"" if registered_in is None else registered_in.digest
        number = self._numbers[key] = self._numbers.get(key, -1) + 1

        def find() -> Origin | None:
            origin = self.origin
            return None if origin is None else origin.of_callback(registered_in, number)

        return _Followed(find)

    def run(self, callback: Callable[[Any], _Result], future: Any) -> _Result:
        """Call the callback whose future this is with the future on which it was registered."""
        token = surroundings.set(self.origin or Unknown())
        try:
            return callback(future)
        except BaseException as error:
            self.error = error
            raise
        finally:
            surroundings.reset(token)

    def raise_error(self, future: Any) -> None:
        """Wait for the future, and raise the exception itself of the callback that completes it."""
        try:
            future.wait()
        except RuntimeError:
            if self.error is not None:
                raise self.error from None
            raise


#: The futures that are followed. torch has one object of Python for each of them while the program refers to it.
_followed: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()


def follow(future: Any, find: Callable[[], Origin | None]) -> None:
    """Have the callbacks of a future know their origin, and those of futures that are chained to it.

    Args:
        future: A ``torch.futures.Future`` that completes outside of callbacks that are followed.
        find: Returns the origin, when the future is complete; ``None``: it is not known. It refers to no object that
            refers to the future.
    """
    _wrap_torch()
    _followed[future] = _Followed(find)


def in_backward() -> bool:
    """Return whether this thread carries a backward pass out."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


@functools.cache
def _wrap_torch() -> None:
    """Wrap the methods of torch's futures. Once for a process."""
    then, add_done_callback, collect_all = _Future.then, _Future.add_done_callback, torch._C._collect_all

    @never_compiled
    @functools.wraps(then)
    def then_followed(self: Any, callback: Callable[[Any], Any]) -> Any:
        known = _followed.get(self)
        if known is None:
            return then(self, callback)
        made = known.next_callback()
        # The closure keeps the object of Python for ``self``, by which the callback may register others.
        future = then(self, lambda _: made.run(callback, self))
        _followed[future] = made
        if in_backward():
            # DistributedDataParallel waits in C++ when the pass ends, and raises a bare RuntimeError. This comes first.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: made.raise_error(future))
        return future

    @never_compiled
    @functools.wraps(add_done_callback)
    def add_done_callback_followed(self: Any, callback: Callable[[Any], Any]) -> None:
        known = _followed.get(self)
        if known is None:
            add_done_callback(self, callback)
        else:
            made = known.next_callback()
            add_done_callback(self, lambda _: made.run(callback, self))

    @never_compiled
    @functools.wraps(collect_all)
    def collect_all_followed(futures: Sequence[Any]) -> Any:
        collected = collect_all(futures)  # type: ignore[arg-type]
        parts = [known for future in futures if (known := _followed.get(future)) is not None]
        if parts:

            def find() -> Origin | None:
                origins = [origin for part in parts if (origin := part.origin) is not None]
                return Origin.of_several(origins) if len(origins) == len(parts) else None

            _followed[collected] = _Followed(find)
        return collected

    _Future.then, _Future.add_done_callback = then_followed, add_done_callback_followed
    torch._C._collect_all = collect_all_followed
