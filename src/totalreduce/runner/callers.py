"""The threads of a program that submit operations without a name, for error messages.

Such operations are matched by their number. If several threads submit them, their order differs from rank to rank.
"""

from __future__ import annotations

import threading
from typing import final

__all__ = ["Callers"]

#: Threads that are remembered for a group.
_THREADS_MAX = 8


@final
class Callers:
    """The threads that have submitted operations without a name, by the id that all of these have in a group."""

    def __init__(self) -> None:
        #: The names of the threads, by thread. That of a thread that Python has not started, as the autograd engine's,
        #: is empty: another thread waits for it, so the order is certain.
        self._names: dict[int, dict[int, str]] = {}

    def note(self, op_id: int) -> None:
        """Note that this thread submits an operation without a name. Called under the lock of the engine."""
        known, thread = self._names.get(op_id), threading.get_ident()
        if known is None or thread not in known:
            known = self._names.setdefault(op_id, {})
            if len(known) < _THREADS_MAX:
                current = threading.current_thread()
                known[thread] = "" if isinstance(current, threading._DummyThread) else current.name

    def advice(self, op_id: int) -> str:
        """Return a sentence for an error of such an operation, if several threads have submitted them; else ""."""
        names = [name for name in self._names.get(op_id, {}).values() if name]
        if len(names) < 2:
            return ""
        return (
            f"The threads {', '.join(map(repr, names))} of this process have called collectives of this group, so "
            "their order differs from rank to rank: give each thread a group of its own (dist.new_group(), "
            "dcp.async_save(..., process_group=...); with tr.Group: group.subgroup(), or names)."
        )
