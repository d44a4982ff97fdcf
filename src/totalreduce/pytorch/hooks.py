"""Hooks that hold their owner weakly and survive ``deepcopy`` and ``torch.save`` of the model they hang on.

A plain bound method as a hook keeps the optimizer alive as long as the model, and a deep copy of the model
(an EMA, a teacher) would carry a second set of hooks that drive the first model's optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from totalreduce.tensors.compilation import never_compiled

__all__ = ["WeakHook"]


@never_compiled
class WeakHook:
    """Calls ``method(key, *arguments)`` while the method's object lives; does nothing afterwards.

    Args:
        method: A bound method; its object is held weakly.
        key: Passed first, so that one method serves many modules or parameters.
    """

    __slots__ = ("_key", "_method")

    def __init__(self, method: Callable[..., None] | None = None, key: object = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._key = key

    @property
    def alive(self) -> bool:
        """Whether the hook still does something."""
        return self._method is not None and self._method() is not None

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Call the method, if its object still lives."""
        method = None if self._method is None else self._method()
        if method is not None:
            method(self._key, *arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakHook:
        return WeakHook()

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return (WeakHook, ())
