"""Which ranks of a host can read each other's process memory, by Linux's ``process_vm_readv``.

What a rank reads there need not be staged. The system may forbid it: the processes are in different containers,
``kernel.yama.ptrace_scope`` is set, or a filter of system calls refuses it. So a rank tries: every rank publishes the
address and the value of a random number in its process. A rank that meets it reads the number, and says in its own
memory whether it found that value. A number of 64 bits is not found in a wrong process.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Collection
from typing import final

from totalreduce.transports.shm_meeting import process_and_user
from totalreduce.transports.shm_memory import OWNER, PEER, Mapping, Outbox

__all__ = ["ProcessReads"]

#: ``prctl``'s number for the process whose descendants may read this process, where Yama restricts that.
_PR_SET_PTRACER = 0x59616D61


class _Vector(ctypes.Structure):
    """The system's ``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


@final
class ProcessReads:
    """The processes of a host's ranks, as far as this rank can read their memory."""

    def __init__(self, rank: int, index: int, outbox: Outbox, *, allowed: bool) -> None:
        """``index``: of this rank in the layout. ``allowed``: whether this rank reads and lets others read at all."""
        self.processes: dict[int, int] = {}  #: The numbers of the processes whose memory this rank can read, by rank.
        self._rank, self._index, self._outbox = rank, index, outbox
        self._mappings: dict[int, tuple[Mapping, int]] = {}
        self._read = _system_call() if allowed else None
        self._sample = ctypes.c_uint64(secrets.randbits(64))
        if self._read is not None:
            _admit_siblings()
            outbox.words[OWNER.sample + 1] = self._sample.value
            outbox.words[OWNER.sample] = ctypes.addressof(self._sample)

    def meet(self, peer: int, index: int, sock: socket.socket, mapping: Mapping) -> None:
        """Find out whether this rank can read the process of a peer, and tell the peer. ``index``: the peer's."""
        self._mappings[peer] = mapping, mapping.layout.block(index, self._index) + PEER.reads
        address, value = mapping.words[OWNER.sample], mapping.words[OWNER.sample + 1]
        if self._read is None or not address:
            return
        process, _ = process_and_user(sock)
        found = ctypes.c_uint64(~value & (1 << 64) - 1)
        if process > 0 and self._copy(process, ctypes.addressof(found), address, 8) and found.value == value:
            self.processes[peer] = process
            self._outbox.words[mapping.layout.block(self._index, index) + PEER.reads] = 1

    def admits(self, peers: Collection[int]) -> bool:
        """Return whether all these ranks, this one not considered, have said that they can read this process."""
        words = (self._mappings[peer] for peer in peers if peer != self._rank)
        return self._read is not None and all(mapping.words[at] == 1 for mapping, at in words)

    def can_be_read(self, address: int, num_bytes: int) -> bool:
        """Return whether the system reads this memory of this process: not that of some devices, for instance."""
        byte = ctypes.c_uint8()
        target = ctypes.addressof(byte)
        ends = (address, address + num_bytes - 1)
        return all(self._copy(os.getpid(), target, end, 1) for end in ends)

    def close(self) -> None:
        """Let go of the memories of the other ranks."""
        self._mappings.clear()
        self.processes.clear()

    def _copy(self, process: int, target: int, source: int, num_bytes: int) -> bool:
        assert self._read is not None
        here, there = _Vector(target, num_bytes), _Vector(source, num_bytes)
        return self._read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == num_bytes


def _system_call() -> Callable[..., int] | None:
    """Return the C library's ``process_vm_readv``; ``None`` where there is none."""
    try:
        function = ctypes.CDLL(None).process_vm_readv
    except AttributeError:
        return None
    vectors = ctypes.POINTER(_Vector)
    function.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function


def _admit_siblings() -> None:
    """Let the processes that have the same launcher read this one, where Yama would let its ancestors only.

    Without Yama the call fails, and nothing is needed. It replaces what the program set before. The first process of a
    container is no launcher: all its processes descend from it.
    """
    launcher, zero = os.getppid(), ctypes.c_ulong(0)
    if launcher > 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher), zero, zero, zero)
