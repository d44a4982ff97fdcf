"""Holds the memory of a tensor where it is for as long as an operation uses it.

An operation in flight reads and writes the memory that its tensors had when it was submitted. A program may take that
memory away meanwhile: by ``tensor.data = …`` and ``tensor.set_``, by letting go of the tensor, by ``tensor.resize_``,
or by resizing the storage. A reference to the storage is enough against the first three. Against resizing, the storage
is marked as not resizable while it is held, so that torch raises its ``RuntimeError`` ("Trying to resize storage that
is not resizable") where the program resizes it.

torch has a way to read that mark, and none to set it for a while: the bridge to NumPy sets it for ever. So the place
of the mark within torch's object is looked up once, by watching that bridge set it, and checked through torch's own
``resizable``. Where that fails, with another build of torch, storages are held without the mark. One thing is not
seen: if the program calls ``tensor.numpy()`` while an operation is in flight, the storage is resizable again
afterwards, although torch would have had it stay as it is for the sake of the array.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Final, final

import torch

__all__ = ["StorageHold"]

#: How much of torch's object is looked at: less than it has.
_OBJECT_BYTES: Final = 72
_ATTRIBUTE: Final = "_totalreduce_holds"


@functools.cache
def _mark_offset() -> int | None:
    """Offset in bytes of the mark within torch's ``StorageImpl``, or ``None`` if it cannot be told."""
    probe = torch.zeros(16)
    storage = probe.untyped_storage()
    before = ctypes.string_at(storage._cdata, _OBJECT_BYTES)
    probe.numpy()
    after = ctypes.string_at(storage._cdata, _OBJECT_BYTES)
    changed = [offset for offset in range(_OBJECT_BYTES) if before[offset] != after[offset]]
    if len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (1, 0) or storage.resizable():
        return None
    ctypes.c_bool.from_address(storage._cdata + changed[0]).value = True
    return changed[0] if storage.resizable() else None


@final
class _Holds:
    """How many operations hold one storage. An attribute of the storage, so that all groups of a process share it."""

    __slots__ = ("count", "lock", "pid", "was_resizable")

    def __init__(self) -> None:
        self.count, self.was_resizable, self.pid = 0, False, os.getpid()
        self.lock = threading.RLock()  # a hold may be let go of by the garbage collector, in the midst of anything


@final
class StorageHold:
    """Keeps a storage alive as long as the hold is referred to, and from being resized until ``release``."""

    __slots__ = ("_marked", "_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage, self._marked = storage, False
        offset = _mark_offset()
        if offset is None:
            return
        holds: _Holds = storage.__dict__.setdefault(_ATTRIBUTE, _Holds())
        with holds.lock:
            self._marked = True
            holds.count += 1
            if holds.count == 1:
                holds.was_resizable = storage.resizable()
                ctypes.c_bool.from_address(storage._cdata + offset).value = False

    def release(self) -> None:
        """Let the storage be resized, if there is no other hold. Harmless when called twice."""
        offset = _mark_offset()
        if not self._marked or offset is None:
            return
        holds: _Holds = self._storage.__dict__[_ATTRIBUTE]
        if holds.pid != os.getpid():  # a forked child: the lock may be held by a thread that is not here
            return
        with holds.lock:
            self._marked = False
            holds.count -= 1
            if holds.count == 0:
                ctypes.c_bool.from_address(self._storage._cdata + offset).value = holds.was_resizable

    __del__ = release
