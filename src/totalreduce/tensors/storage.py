"""Keeps the memory of a tensor in place as long as an operation uses it.

An operation in flight reads and writes the memory that its tensors had when it was submitted. A program may take that
memory away meanwhile: by ``tensor.data = …``, by ``tensor.set_``, by deleting the tensor, or by resizing the tensor or
its storage. A reference to the storage protects against the first three. Against resizing, the storage is marked as not
resizable while it is held. If the program resizes it, torch raises its ``RuntimeError`` ("Trying to resize storage that
is not resizable").

torch can read that mark, but not set it for a while; its bridge to NumPy sets it for ever. So the offset of the mark in
torch's object is found once by comparing the object before and after the bridge has set the mark, and is checked by
torch's own ``resizable``. If that fails with another build of torch, storages are held without the mark. If the program
calls ``tensor.numpy()`` while an operation is in flight, the storage is resizable after the operation, although torch
would keep it as it is for the array.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Final, final

import torch

__all__ = ["StorageHold"]

#: Bytes of torch's object that are compared; the object is larger.
_OBJECT_BYTES: Final = 72
_ATTRIBUTE: Final = "_totalreduce_holds"


@functools.cache
def _mark_offset() -> int | None:
    """Return the offset in bytes of the mark within torch's ``StorageImpl``; ``None`` if it is not found."""
    probe = torch.zeros(16, dtype=torch.uint8, device="cpu")
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
    """The number of holds of a storage, whose attribute it is, so that all groups of a process share it."""

    __slots__ = ("count", "lock", "mark", "pid", "was_resizable")

    def __init__(self, mark: ctypes.c_bool) -> None:
        """``mark``: the mark in torch's object, which says whether the storage is resizable."""
        self.mark, self.count, self.was_resizable, self.pid = mark, 0, False, os.getpid()
        self.lock = threading.RLock()  # the garbage collector may release a hold at any time


@final
class StorageHold:
    """Keeps a storage alive as long as the hold exists, and prevents resizing it until ``release``."""

    __slots__ = ("_holds", "_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._holds: _Holds | None = None
        holds: _Holds | None = storage.__dict__.get(_ATTRIBUTE)
        if holds is None:
            offset = _mark_offset()
            if offset is None:
                return
            mark = ctypes.c_bool.from_address(storage._cdata + offset)
            holds = storage.__dict__.setdefault(_ATTRIBUTE, _Holds(mark))  # another thread may add one at the same time
        with holds.lock:
            self._holds = holds
            holds.count += 1
            if holds.count == 1:
                holds.was_resizable = storage.resizable()
                holds.mark.value = False

    def release(self) -> None:
        """Allow resizing the storage, if there is no other hold. A second call does nothing."""
        holds = getattr(self, "_holds", None)  # an exception in a signal handler may have cut ``__init__`` short
        if holds is None or holds.pid != os.getpid():  # in a forked child a thread that is not there may hold the lock
            return
        with holds.lock:
            if self._holds is None:  # another thread was faster
                return
            self._holds = None
            holds.count -= 1
            if holds.count == 0:
                holds.mark.value = holds.was_resizable

    __del__ = release
