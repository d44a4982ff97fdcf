"""The memory that one rank writes and the other ranks of its host read: layout, making, mapping, order of stores.

Every rank has one memory file, its *outbox*. Nobody but its owner writes to it, so what is shared needs no lock: every
word has one writer, and counters only grow. From its begin:

* words of the owner: is it asleep, its heartbeat, on which processor it waits;
* one block of words per peer: how many entries the owner has published to this peer, how many of this peer's entries it
  has consumed, and by piece of this peer's pool, then by loan, the last use that it has given back;
* one ring of entries per peer: a message's header, where its body is, and the body itself if it is small;
* the pool: pieces of two sizes for the other bodies;
* the arena: tensors whose bytes are not staged but lent (``shm_arena.py``).

A word is 64 bits and is read and written through ``memoryview.cast("Q")``, which is one machine instruction. x86 keeps
stores in order, and loads; other machines need fences (``Fences``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES
from totalreduce.foundation.os_errors import is_out_of_descriptors
from totalreduce.transports.shm_arena import Arena

__all__ = ["CARD_BYTES", "Fences", "Layout", "Mapping", "Outbox", "shm_available"]

_PAGE = 4096
_LINE_WORDS = 8
_CARD = struct.Struct("<8s7IQ")
_MAGIC = b"TRshm\0\0\3"
CARD_BYTES = _CARD.size
#: ``F_SEAL_FUTURE_WRITE``, Linux 5.1: from now on nobody can map the file for writing.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Where loads and stores are not reordered but for a load before an earlier store.
_STRONGLY_ORDERED = ("x86_64", "amd64", "i686", "i386")
_SEQ_CST = 5

#: Words of the owner, each in a cache line of its own.
SLEEP_WORD, BEAT_WORD, CPU_WORD, _LINKS_WORD = 0, _LINE_WORDS, 2 * _LINE_WORDS, 3 * _LINE_WORDS
#: Within the block of a peer.
PUBLISHED, CONSUMED, GIVEN_BACK = 0, 1, _LINE_WORDS
#: Of an entry: the header, then three words (see ``Layout.entry_word``), then the body.
_BODY_AT = HEADER_BYTES + 64

_RING_BYTES = 2 * 1024 * 1024
_INLINE_BYTES_MIN, _INLINE_BYTES_MAX = 1024, 8192
#: Bodies in the arena that one peer may have to read at the same time.
LOANS = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in an outbox; equal for all ranks of a host.

    Attributes:
        local_ranks: How many ranks share memory. A rank's place among them is its *index* here.
        slots: Entries of a ring.
        inline_bytes: Bodies up to this lie in their entry.
        small_pieces: Number of pieces of ``small_bytes``; they come first in the pool.
        small_bytes: Their length.
        large_pieces: Number of pieces of ``large_bytes``.
        large_bytes: Their length; longer bodies are sent in parts.
    """

    local_ranks: int
    slots: int
    inline_bytes: int
    small_pieces: int
    small_bytes: int
    large_pieces: int
    large_bytes: int

    @classmethod
    def choose(cls, local_ranks: int, max_body_bytes: int, pool_bytes: int) -> Layout:
        """A layout for bodies of up to ``max_body_bytes`` (longer ones go in parts) in about ``pool_bytes``."""
        slots = 32
        inline = _RING_BYTES // (slots * max(1, local_ranks - 1))
        inline = max(_INLINE_BYTES_MIN, min(_INLINE_BYTES_MAX, inline & -1024))
        large = _round_up(max(_PAGE, min(max_body_bytes, pool_bytes // 4)), _PAGE)
        count = max(4, min(16, pool_bytes // large))
        return cls(local_ranks, slots, inline, 32, min(64 * 1024, large), count, large)

    @property
    def pieces(self) -> int:
        """Number of pieces of a pool."""
        return self.small_pieces + self.large_pieces

    @property
    def _block_words(self) -> int:
        return GIVEN_BACK + _round_up(self.pieces + LOANS, _LINE_WORDS)

    @property
    def entry_bytes(self) -> int:
        """From one entry to the next."""
        return _BODY_AT + self.inline_bytes

    @property
    def _rings_at(self) -> int:
        return _round_up(8 * (_LINKS_WORD + (self.local_ranks - 1) * self._block_words), _PAGE)

    @property
    def _pool_at(self) -> int:
        return _round_up(self._rings_at + (self.local_ranks - 1) * self.slots * self.entry_bytes, _PAGE)

    @property
    def total_bytes(self) -> int:
        """Length of all this; the rest of the file is the arena, as long as its owner could have it."""
        return self._pool_at + self.small_pieces * self.small_bytes + self.large_pieces * self.large_bytes

    def block(self, owner: int, peer: int) -> int:
        """First word of what index ``owner`` keeps about index ``peer``."""
        return _LINKS_WORD + (peer - (peer > owner)) * self._block_words

    def entry(self, owner: int, peer: int, slot: int) -> int:
        """Offset of an entry that ``owner`` writes for ``peer``, in bytes."""
        return self._rings_at + ((peer - (peer > owner)) * self.slots + slot) * self.entry_bytes

    def entry_word(self, owner: int, peer: int, slot: int) -> int:
        """The first of an entry's words: where the body is, the use of piece or loan, the place of what is lent."""
        return (self.entry(owner, peer, slot) + HEADER_BYTES) // 8

    def entry_body(self, owner: int, peer: int, slot: int) -> int:
        """Offset of the body within an entry."""
        return self.entry(owner, peer, slot) + _BODY_AT

    def piece(self, number: int) -> tuple[int, int]:
        """Offset and length of a piece."""
        if number < self.small_pieces:
            return self._pool_at + number * self.small_bytes, self.small_bytes
        number -= self.small_pieces
        return self._pool_at + self.small_pieces * self.small_bytes + number * self.large_bytes, self.large_bytes

    def card(self) -> bytes:
        """What two ranks compare when they meet."""
        return _CARD.pack(
            _MAGIC,
            self.local_ranks,
            self.slots,
            self.inline_bytes,
            self.small_pieces,
            self.small_bytes,
            self.large_pieces,
            self.large_bytes,
            self.total_bytes,
        )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@final
class Fences:
    """What keeps other processes from seeing loads and stores in another order.

    ``full`` orders a store before a later load (each side says something, then looks at what the other has said);
    ``order`` is for everything else, and ``None`` where the machine does that by itself.

    Raises:
        ConfigurationError: There is no fence on this machine.
    """

    def __init__(self) -> None:
        """Find them."""
        self.full: Callable[[], object]
        self.order: Callable[[], object] | None = None
        if platform.machine().lower() in _STRONGLY_ORDERED:
            self._lock = threading.Lock()
            self.full = self._locked
            return
        try:
            function = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
        except (OSError, AttributeError) as error:
            raise ConfigurationError(
                f"shared memory on {platform.machine()} needs libatomic.so.1 ({error}); install it (Debian: "
                'libatomic1) or use transport="tcp"'
            ) from error
        function.argtypes, function.restype = [ctypes.c_int], None
        self.full = self.order = lambda: function(_SEQ_CST)

    def _locked(self) -> None:
        with self._lock:  # taking a lock is a locked instruction, and that is a full fence on x86
            pass


def shm_available() -> str | None:
    """Why ranks of this host cannot use shared memory, or ``None`` if they can."""
    if not sys.platform.startswith("linux"):
        return f"shared memory needs Linux, and this is {sys.platform}"
    try:
        Fences()
        Outbox(Layout.choose(1, _PAGE, _PAGE)).close()
    except ConfigurationError as error:
        return str(error)
    return None


@final
class Outbox:
    """This rank's memory.

    Attributes:
        fd: To be given to the peers; sealed, so that nobody can shrink what they have mapped.
        view: All of it.
        words: All but the arena, as words.
        arena: Memory for tensors.
    """

    def __init__(self, layout: Layout) -> None:
        """Make it.

        Raises:
            ConfigurationError: There is not enough memory, or the system does not allow it.
            OSError: This process, or the machine, has too many open files.
        """
        size = layout.total_bytes
        try:
            self.fd = os.memfd_create("totalreduce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            raise ConfigurationError(
                f'no shared memory: memfd_create: {error.strerror}; use transport="tcp" if this system forbids it'
            ) from error
        try:
            memory = _grow(self.fd, size, layout.local_ranks)
            # Now and not at the first touch, where a lack of memory would be SIGBUS.
            os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(self.fd)
            if is_out_of_descriptors(error):
                raise
            raise ConfigurationError(
                f"no shared memory of {size >> 20} MiB: {error.strerror}; give the container or the job more memory, "
                'or use transport="tcp"'
            ) from error
        with contextlib.suppress(OSError):  # older kernels: the peers map it for reading anyway
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        self.view = memoryview(memory)
        np.frombuffer(self.view[:size], np.uint8)[::_PAGE] = 0  # map it now and not while messages wait
        self.words = self.view[:size].cast("Q")
        self.arena = Arena(self.fd, self.view, size)

    def close(self) -> None:
        """Close the file. The memory goes when the last view of it has gone."""
        self.arena.close()
        os.close(self.fd)


def _grow(fd: int, size: int, local_ranks: int) -> mmap.mmap:
    """Make the file ``size`` bytes long plus an arena, and map it; without an arena where address space is limited."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    # A fair share: all arenas together, as each rank maps them, are as large as the machine's memory.
    arena = 0 if limited else os.sysconf("SC_PHYS_PAGES") // local_ranks * os.sysconf("SC_PAGE_SIZE")
    try:
        os.ftruncate(fd, size + arena)
        return _map(fd, size + arena, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.ftruncate(fd, size)
        return _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)


def _map(fd: int, size: int, protection: int) -> mmap.mmap:
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    with contextlib.suppress(OSError):  # other kernels: a core file is larger then
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory


@final
class Mapping:
    """A peer's memory, for reading.

    Attributes:
        view: All of it, the arena included.
        words: All but the arena, as words.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        """Map it; ``fd`` may be closed afterwards.

        Raises:
            ProtocolError: It is not what a correct peer hands over.
            OSError: This process, or the machine, has too many open files.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if seals & _SEALS != _SEALS or size < layout.total_bytes:
                raise ProtocolError(
                    f"a memory file of {size} bytes with seals {seals:#x}; {layout.total_bytes} sealed ones are "
                    "expected"
                )
            memory = _map(fd, size, mmap.PROT_READ)
        except OSError as error:
            if is_out_of_descriptors(error):  # a mapping keeps a descriptor of its own
                raise
            raise ProtocolError(f"the memory file cannot be mapped: {error.strerror}") from error
        self.view = memoryview(memory)
        np.frombuffer(self.view[: layout.total_bytes], np.uint8)[::_PAGE].sum()  # as for ``Outbox``
        self.words = self.view[: layout.total_bytes].cast("Q")
