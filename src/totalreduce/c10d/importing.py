"""Calls a function when a module of another package has been imported, without importing it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, final

__all__ = ["after_import"]


def after_import(name: str, attribute: str, function: Callable[[Any], None]) -> None:
    """Call ``function`` with a module, now if it is imported already, else right after its import.

    A finder on ``sys.meta_path`` waits for the import and is removed then. When called again before that, this does
    nothing.

    Args:
        name: The full name of the module.
        attribute: A name that the module has when its import is complete.
        function: Takes the module. It may be called several times, when ``after_import`` is.
    """
    module = sys.modules.get(name)
    if module is not None and hasattr(module, attribute):
        function(module)
    elif not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, function))


@final
class _Watch(MetaPathFinder):
    """Finds no module itself: it lets ``function`` be called when the module for which it waits has been executed."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name = name  #: The module's name.
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Afterwards(spec.loader, self._function)
                return spec
        return None


@final
class _Afterwards(Loader):
    """The module's own loader, followed by a function."""

    def __init__(self, loader: Loader, function: Callable[[Any], None]) -> None:
        self._loader, self._function = loader, function

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later users of the module (inspect, linecache, TorchScript) must find its real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function(module)
