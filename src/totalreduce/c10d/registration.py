"""Registers the back end for ``init_process_group("totalreduce")``, without importing torch.

``import totalreduce`` calls ``install``. If ``torch.distributed`` is imported already, the back end is registered at
once; otherwise a finder on ``sys.meta_path`` waits for its import, registers right after it, and is removed. An
installed totalreduce is also an entry point of ``torch.backends``: torch calls ``install``, and scripts need no import.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, final

from totalreduce.c10d.names import BACKEND_NAME

__all__ = ["install"]

#: The module that keeps torch's list of back ends.
_HOME = "torch.distributed.distributed_c10d"


def install() -> None:
    """Register the back end now, or as soon as torch.distributed is imported; harmless when called again."""
    module = sys.modules.get(_HOME)
    if module is not None and hasattr(module, "monitored_barrier"):
        _register(module)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


@final
class _Watch(MetaPathFinder):
    """Finds no module itself: it calls ``_register`` when the module for which it waits has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Afterwards(spec.loader)
                return spec
        return None


@final
class _Afterwards(Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later users of the module (inspect, linecache, TorchScript) must find its real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)


def _register(c10d: Any) -> None:
    if BACKEND_NAME in c10d.Backend.backend_list:
        return
    c10d.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _open_monitored_barrier(c10d)


def _create(options: Any, backend_options: Any) -> Any:
    """Create a process group for torch; imports the back end at the first call."""
    from totalreduce.c10d.backend import create

    # The caller is torch's ``_new_process_group_helper``; ``create`` explains what it looks for there.
    return create(options, backend_options, sys._getframe(1).f_locals)


def _open_monitored_barrier(c10d: Any) -> None:
    """Let ``torch.distributed.monitored_barrier`` through to our process groups.

    torch checks there that the back end is called gloo, and offers no other way in; for all other groups its function
    is called as before.
    """
    from totalreduce.tensors.compilation import never_compiled

    original = c10d.monitored_barrier

    @never_compiled
    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = c10d.GroupMember.WORLD if group is None else group
        if getattr(chosen, "backend_of_totalreduce", False):
            chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    package: Any = sys.modules.get("torch.distributed")
    if getattr(package, "monitored_barrier", None) is original:
        package.monitored_barrier = monitored_barrier
