"""Registers the back end for ``init_process_group("totalreduce")``, without importing torch.

``import totalreduce`` calls ``install``. If ``torch.distributed`` is imported already, the back end is registered at
once; otherwise when it is imported (``importing``). The same is true of the frameworks that know strategies and back
ends by name (``frameworks``). An installed totalreduce also has an entry point in ``torch.backends``: torch calls
``install``, and scripts need no import.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from totalreduce.c10d import frameworks
from totalreduce.c10d.importing import after_import
from totalreduce.c10d.names import BACKEND_NAME

__all__ = ["install"]


def install() -> None:
    """Register the back end now, or as soon as torch.distributed is imported; harmless when called again."""
    after_import("torch.distributed.distributed_c10d", "monitored_barrier", _register)
    frameworks.install()


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
