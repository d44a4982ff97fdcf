"""The memory that one rank writes and the other ranks of its host read: layout, allocation, mapping, order of stores.

Every rank has one memory file, its *outbox*. Only its owner writes to it, so no lock is needed: every word has one
writer, and counters only grow. The parts of an outbox, in their order:

* words of the owner: whether it sleeps, its heartbeat, the processor on which it waits, a sample of its process's
  memory (``shm_reads.py``);
* one block of words per peer: the number of entries that the owner has published to this peer, the number of this
  peer's entries that it has consumed, whether it can read this peer's process, and the last use that it has given back
  of every piece of this peer's pool and of every loan;
* one ring of entries per peer: a message's header, the place of its body, and the body itself if it is small;
* the pool: pieces of two sizes for the other bodies;
* the board, which higher floors use (``base.Boards``);
* the arena: tensors whose bytes are lent and not staged (``shm_arena.py``).

A word has 64 bits and is read and written through ``memoryview.cast("Q")``, which is one machine instruction. x86 keeps
stores in order, and loads; other machines need fences (``Fences``). The writer has one between what a word tells of and
the word, and the reader one between the word and what it tells of.

===============  =======================================================================================================
word             tells the peers of
===============  =======================================================================================================
``published``    entries of the ring: header, words, body in the entry, piece or loan (``OutgoingRing._publish``)
``consumed``     entries that were read and may be written again (``IncomingRing._consume``)
``given_back``   a piece or a loan that was read and may be written again (``IncomingRing.give_back``)
``sleep``        nothing in memory; a full fence orders it with the words above on both sides (``shm_waiting.py``)
``sample``       the word after it; both are written before the socket of the meeting is used (``shm_reads.py``)
others           nothing: heartbeats, processors, and whether a process can be read
===============  =======================================================================================================

The entries of the board, which the fast lane uses, have an order of their own (``kernels.exchange``).
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
from typing import Final, final

import numpy as np

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES
from totalreduce.foundation.memory_room import memory_room
from totalreduce.foundation.os_errors import is_out_of_descriptors
from totalreduce.foundation.words import CACHE_LINE_WORDS, Structure
from totalreduce.transports.shm_arena import Arena

__all__ = ["CARD_BYTES", "OWNER", "PEER", "Fences", "Mapping", "Outbox", "OutboxLayout", "shm_available"]

_PAGE = 4096
_CARD = struct.Struct("<8s7IQ")
_MAGIC = b"TRshm\0\0\4"
CARD_BYTES = _CARD.size
#: ``F_SEAL_FUTURE_WRITE``, Linux 5.1: from then on no process can map the file for writing.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Where loads and stores are not reordered but for a load before an earlier store.
_STRONGLY_ORDERED = ("x86_64", "amd64", "i686", "i386")
_SEQ_CST = 5


class _Owner(Structure):
    """The words of the owner, each in a cache line of its own."""

    sleep: int = CACHE_LINE_WORDS  #: Whether it sleeps (``shm_waiting.py``).
    beat: int = CACHE_LINE_WORDS  #: Its heartbeat.
    processor: int = CACHE_LINE_WORDS  #: The processor on which it waits, plus 1.
    sample: int = CACHE_LINE_WORDS  #: Where the sample of its process's memory is, and, in the next word, its value.


class _Peer(Structure):
    """The words that the owner keeps about one peer."""

    published: int = 1  #: How many entries the owner has published to the peer.
    consumed: int = 1  #: How many of the peer's entries it has consumed.
    reads: int = CACHE_LINE_WORDS - 2  #: Whether it can read the peer's process. The rest of the cache line is unused.
    given_back: int = 0  #: For each of the peer's pieces and loans, a word: the last use that was given back.


OWNER: Final = _Owner()
PEER: Final = _Peer()
#: Of an entry: the header, then three words (see ``OutboxLayout.entry_word``), then the body.
_BODY_AT = HEADER_BYTES + 64

_RING_BYTES = 2 * 1024 * 1024
_INLINE_BYTES_MIN, _INLINE_BYTES_MAX = 1024, 8192
#: Bodies in the arena that one peer may have to read at the same time.
LOANS = 32


@dataclass(frozen=True, slots=True)
class OutboxLayout:
    """The offsets of all parts of an outbox; equal for all ranks of a host."""

    local_ranks: int  #: Number of ranks that share memory. The *index* of a rank is its position among them.
    slots: int  #: Number of entries of a ring.
    inline_bytes: int  #: Bodies up to this length lie in their entry.
    small_pieces: int  #: Number of pieces of ``small_bytes``; they come first in the pool.
    small_bytes: int  #: Length of a small piece.
    large_pieces: int  #: Number of pieces of ``large_bytes``.
    large_bytes: int  #: Length of a large piece; longer bodies are sent in parts.
    board_bytes: int = 0  #: Length of the board.

    @classmethod
    def choose(cls, local_ranks: int, max_body_bytes: int, pool_bytes: int, board_bytes: int = 0) -> OutboxLayout:
        """Return a layout for bodies of up to ``max_body_bytes`` (longer ones go in parts) in about ``pool_bytes``."""
        slots = 32
        inline = _RING_BYTES // (slots * max(1, local_ranks - 1))
        inline = max(_INLINE_BYTES_MIN, min(_INLINE_BYTES_MAX, inline & -1024))
        large = _round_up(max(_PAGE, min(max_body_bytes, pool_bytes // 4)), _PAGE)
        count = max(4, min(16, pool_bytes // large))
        board_bytes = _round_up(board_bytes, _PAGE)
        return cls(local_ranks, slots, inline, 32, min(64 * 1024, large), count, large, board_bytes)

    @property
    def pieces(self) -> int:
        """Number of pieces of a pool."""
        return self.small_pieces + self.large_pieces

    @property
    def block_words(self) -> int:
        """Number of words that a rank keeps about one peer."""
        return PEER.given_back + _round_up(self.pieces + LOANS, CACHE_LINE_WORDS)

    @property
    def entry_bytes(self) -> int:
        """Distance from one entry to the next."""
        return _BODY_AT + self.inline_bytes

    @property
    def _rings_at(self) -> int:
        return _round_up(8 * (OWNER.num_words + (self.local_ranks - 1) * self.block_words), _PAGE)

    @property
    def _pool_at(self) -> int:
        return _round_up(self._rings_at + (self.local_ranks - 1) * self.slots * self.entry_bytes, _PAGE)

    @property
    def board_at(self) -> int:
        """Offset of the board."""
        pool_bytes = self.small_pieces * self.small_bytes + self.large_pieces * self.large_bytes
        return self._pool_at + _round_up(pool_bytes, _PAGE)

    @property
    def prepared_bytes(self) -> int:
        """Length of the parts that are in use from the first message on: the words, the rings and the small pieces."""
        return self._pool_at + self.small_pieces * self.small_bytes

    @property
    def total_bytes(self) -> int:
        """Length of all parts but the arena, which is the rest of the file."""
        return self.board_at + self.board_bytes

    def block(self, owner: int, peer: int) -> int:
        """Return the first word of the block that index ``owner`` keeps about index ``peer``."""
        return OWNER.num_words + (peer - (peer > owner)) * self.block_words

    def entry(self, owner: int, peer: int, slot: int) -> int:
        """Return the offset of an entry that ``owner`` writes for ``peer``, in bytes."""
        return self._rings_at + ((peer - (peer > owner)) * self.slots + slot) * self.entry_bytes

    def entry_word(self, owner: int, peer: int, slot: int) -> int:
        """Return the first of an entry's three words: length and piece of the body, use of the piece, offset."""
        return (self.entry(owner, peer, slot) + HEADER_BYTES) // 8

    def entry_body(self, owner: int, peer: int, slot: int) -> int:
        """Return the offset of an entry's body, in bytes."""
        return self.entry(owner, peer, slot) + _BODY_AT

    def piece(self, number: int) -> tuple[int, int]:
        """Return the offset and the length of a piece."""
        if number < self.small_pieces:
            return self._pool_at + number * self.small_bytes, self.small_bytes
        number -= self.small_pieces
        return self._pool_at + self.small_pieces * self.small_bytes + number * self.large_bytes, self.large_bytes

    def card(self) -> bytes:
        """Return the layout in the form in which two ranks compare it when they meet."""
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
    """Memory fences: other processes see the loads and stores before a fence before those after it."""

    def __init__(self) -> None:
        """Find the fences of this machine. Raises ``ConfigurationError``: there is none."""
        #: Orders a store before a later load, for two ranks that each write a word and then read the other's word.
        self.full: Callable[[], object]
        #: Orders all other loads and stores; ``None`` where the machine keeps that order by itself.
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


def shm_available(num_bytes: int = 0, num_ranks: int = 1) -> str | None:
    """Return why ranks of this host cannot use shared memory, or ``None`` if they can.

    Args:
        num_bytes: How much each of them will need.
        num_ranks: How many of them reserve it at the same time.
    """
    if not sys.platform.startswith("linux"):
        return f"shared memory needs Linux, and this is {sys.platform}"
    try:
        _check_limits(num_bytes, num_ranks)
        Outbox(OutboxLayout.choose(1, _PAGE, _PAGE)).close()
    except ConfigurationError as error:
        return str(error)
    return None


def _check_limits(num_bytes: int, num_ranks: int = 1) -> None:
    """Check that this process may reserve so much shared memory, while so many ranks of its container do so.

    Raises:
        ConfigurationError: It may not.
    """
    longest, room = resource.getrlimit(resource.RLIMIT_FSIZE)[0], memory_room()
    if longest != resource.RLIM_INFINITY and longest < num_bytes:
        raise ConfigurationError(
            f"no shared memory of {num_bytes >> 20} MiB: this process may make files of at most {longest} bytes "
            '(`ulimit -f`), and shared memory is a file; raise that limit, or use transport="tcp"'
        )
    if room is not None and room < num_ranks * num_bytes:
        raise ConfigurationError(
            f"no shared memory of {num_ranks} x {num_bytes >> 20} MiB: the container of this process has "
            f'{room >> 20} MiB left; give it more memory, or use transport="tcp"'
        )


@final
class Outbox:
    """This rank's memory."""

    def __init__(self, layout: OutboxLayout) -> None:
        """Allocate and map the memory.

        Raises:
            ConfigurationError: There is not enough memory, or the system does not allow it.
            OSError: This process, or the machine, has too many open files.
        """
        self.layout, self.fences = layout, Fences()
        size = layout.total_bytes
        _check_limits(size)
        try:
            #: To be given to the peers; sealed, so that no process can shrink the file that the peers have mapped.
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
        self.view = memoryview(memory)  #: The entire memory.
        # Page faults of these parts happen now and not while messages wait. A large piece or a stage of the board has
        # them when it is first used: many jobs never use most of these, which are nine tenths of the memory.
        np.frombuffer(self.view[: layout.prepared_bytes], np.uint8)[::_PAGE] = 0
        self.words = self.view[:size].cast("Q")  #: The memory without the arena.
        self.arena = Arena(self.fd, self.view, size)  #: Memory for tensors.

    def close(self) -> None:
        """Close the file. The memory is freed with the last view of it."""
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
    """A peer's memory, for reading."""

    def __init__(self, fd: int, layout: OutboxLayout) -> None:
        """Map the memory file ``fd``, which may be closed afterwards.

        Raises:
            ProtocolError: No correct peer hands over such a file.
            OSError: This process, or the machine, has too many open files.
        """
        self.layout = layout  #: The offsets of its parts.
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
        self.view = memoryview(memory)  #: The entire memory, the arena included.
        np.frombuffer(self.view[: layout.prepared_bytes], np.uint8)[::_PAGE].sum()  # as in ``Outbox``
        self.words = self.view[: layout.total_bytes].cast("Q")  #: The memory without the arena, as words.
