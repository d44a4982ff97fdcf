"""The fast lane's exchange: collectives between ranks of one host, in one compiled function that needs no interpreter.

Every rank has a *board* in memory that all ranks of the host can read and only this rank can write. There it announces
an operation in an *entry*: the operation's key and signature, where its tensor is, and three counters. The others look
for the key, so the order in which operations are announced does not matter.

Every rank *owns* a part of the result. In an operation that ``ADDS``, all ranks contribute to every part, and the owner
of a part computes it. In one that does not, the part is the owner's own block. In an operation that ``GATHERS``, every
rank gets all parts; otherwise it gets its own part only. So an allreduce adds and gathers, a reduce-scatter adds, an
allgather gathers, and a broadcast is an allgather in which only the root's part has elements. Two ways follow:

* Small tensors are copied into a stage as a whole. Every rank computes all parts that it gets by itself, and needs
  nothing else of the others.
* Larger tensors are exchanged in *pieces*, in rounds. In a round every rank makes one piece of every part of a lane
  readable (it *stages* it, unless the others can read the tensor where it is: in shared memory, or by the system's call
  that reads the memory of another process), *reduces* its own part's piece of all ranks, and
  *copies* the results of the other ranks. An operation that does not add stages nothing: in place of a sum, a rank
  makes a piece of its own block readable. An operation that does not gather copies no results. A counter in the entry
  tells how many rounds have passed each of these steps.
  Of staged pieces there are two sets, so that a rank may be one round ahead of the ranks that read. An operation of
  one round has one set, and stages it when it is announced, so that nobody waits for that.

Where parts are *cut* out of one tensor, each rank owns one n-th of every lane of the operation (``engine.layout``);
otherwise a part is a block with a length of its own. Contributions to a part are added one after the other in the order
that ``ORDER`` gives, which is that of the operation's schedule. So the result has the bits that the schedule gives, but
those of a NaN are not defined.

The function (``exchange_code``) works on a *block* of 64-bit integers. For its head, for a peer and for an entry there
is a structure that numbers the words. Addresses are those of this process. No call waits longer than ``HEAD.spins`` and
``HEAD.yield_ns`` say.

**The order of accesses.** x86-64 keeps stores in order, and loads; aarch64 does not. So a word that tells another
thread or another process something is written after what it tells of (release), and read before that (acquire). Words
of entries, and sleep words, are accessed by ``atomics.load`` and ``atomics.store``; those of the block that are
``SHARED`` by ``load_shared``, ``store_shared`` and ``raise_shared``. The other words of the block that change are used
by the thread that moves messages alone. What is constant was written before the engine's lock was released. Python
reads shared words only to decide whether to call the function, or to tell users of progress.

====================  ================================  ================================================================
word                  written by                        who has read it may read then
====================  ================================  ================================================================
``ENTRY.operation``   the entry's rank (``_announce``)  ``ENTRY.signature``, ``source``, ``stage``, counters that begin
                                                        at 0, and what the rank staged when it announced it
``ENTRY.staged``      the entry's rank                  the pieces of so many rounds in its stage
``ENTRY.reduced``     the entry's rank                  the results of so many rounds; it reads no pieces of these any
                                                        more
``ENTRY.copied``      the entry's rank                  nothing: it reads no results of so many rounds any more
``ENTRY.failed``      the entry's rank, any thread      nothing: a fence orders it with the tensor on both sides
``ENTRY.signature``,  the entry's rank                  nothing: they are ordered like the others, before
``ENTRY.source``,                                       ``ENTRY.operation``
``ENTRY.stage``
sleep word            the sleeping rank                 nothing: a fence on both sides orders it with what would wake
                                                        the rank (``transports.shm_waiting``)
``HEAD.announced``    the thread that moves messages    ``iteration``, ``entry`` and the beginnings of all words of
                                                        progress
``PEER.source``,      ``LOOK``, any thread              nothing: ``PEER.entry`` tells of them
``PEER.stage``
``PEER.entry``        ``LOOK``, any thread              ``PEER.source`` and ``PEER.stage`` of the peer
``HEAD.found``        ``LOOK``, any thread              the words of as many peers; two threads that look at the same
                                                        time leave the greater number
``HEAD.copied``       the thread that moves messages    nothing: this rank reads the peers' memory no more
``HEAD.seen``         the thread that moves messages    nothing: it is compared with the counters of the peers
``HEAD.culprit``      ``LOOK``, any thread              nothing: the result ``VIOLATION`` tells of it
====================  ================================  ================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from totalreduce.foundation.words import CACHE_LINE_WORDS, Structure
from totalreduce.kernels import machine_code

__all__ = [
    "ADVANCE",
    "CONFLICT",
    "COUNTED",
    "DONE",
    "ENTRY",
    "ENTRY_BYTES",
    "FUNCTION",
    "HAS_CHANGED",
    "HAS_ENDED",
    "HEAD",
    "IS_READ",
    "LOOK",
    "MARK_FAILED",
    "ORDER",
    "PEER",
    "PENDING",
    "RESTART",
    "SHARED",
    "VIOLATION",
    "WITHDRAW",
    "Exchange",
    "block_words",
    "load",
]


class _Head(Structure):
    #: The address of the block.
    address: int = 1
    #: The number of ranks, and this rank's index among them.
    ranks: int = 1
    me: int = 1
    #: The element type, and the length of an element; ``SUM``, ``PRODUCT``, ``MIN`` or ``MAX``, and the divisor of an
    #: average (1: none).
    kind: int = 1
    itemsize: int = 1
    reduction: int = 1
    divisor: int = 1
    #: Whether the operation adds contributions, whether every rank gets all parts, and whether parts are cut (0 or 1).
    adds: int = 1
    gathers: int = 1
    is_cut: int = 1
    #: Elements of all parts together, and lanes.
    count: int = 1
    lanes: int = 1
    #: Whether a rank copies its tensor into its stage as a whole when it announces it, or exchanges it in pieces (1 or
    #: 0).
    is_whole: int = 1
    #: Elements of a piece, rounds of one lane, rounds of all lanes.
    piece: int = 1
    lane_rounds: int = 1
    rounds: int = 1
    #: The address of the tensor (0: ``part_at`` are addresses); the address of this rank's part of the result, if that
    #: is not in the tensor, otherwise 0.
    tensor: int = 1
    result: int = 1
    #: The address of memory for ``COUNTED`` sums, and of memory for one piece of every rank, for pieces that are read
    #: from another process.
    sums: int = 1
    fetched: int = 1
    #: The key of the operation, and a number that is equal where the signatures are.
    key: int = 1
    iteration: int = 1
    signature: int = 1
    #: Where the operation may be announced: the number of the first of ``PROBES`` entries, and the number of all
    #: entries.
    home: int = 1
    entries: int = 1
    #: This rank's entry; what the others read of this rank: its offset in this rank's memory file, or minus its address
    #: in this process, or 0 if it must be staged; where its stage is in its file.
    entry: int = 1
    source: int = 1
    stage: int = 1
    #: The offset in every memory file: of the board, of the stages, and of their end.
    board_at: int = 1
    stages_at: int = 1
    stages_end: int = 1
    #: The length of what a stage holds of pieces, the offset of the results in it, the length of a piece.
    stage_bytes: int = 1
    results_at: int = 1
    piece_bytes: int = 1
    #: How often to look again, with a pause, before returning without progress; without ``spins``: for how many
    #: nanoseconds to look again and let other processes have the core.
    spins: int = 1
    yield_ns: int = 1
    #: The number of times that ``ADVANCE`` moves pieces before it returns, so that more urgent operations get their
    #: turn.
    turns: int = 1
    #: Progress of this rank: announced; peers found; rounds staged, reduced and copied.
    announced: int = 1
    found: int = 1
    staged: int = 1
    reduced: int = 1
    copied: int = 1
    #: What ``ADVANCE`` has seen of the peers' boards when it found nothing to do.
    seen: int = 1
    #: What ``ADVANCE`` returns besides its status: a bit for every peer that is to be woken; the peer of a violation.
    wake: int = 1
    culprit: int = 1
    #: For the C library: a ``struct timespec``, and two vectors for ``process_vm_readv``, each of which has an address
    #: and a length: in this process, in the other one.
    seconds: int = 1
    nanoseconds: int = 1
    here: int = 1
    here_bytes: int = 1
    there: int = 1
    there_bytes: int = 1


class _Peer(Structure):
    #: The address and the length of its memory, the address of its sleep word, its entry's address (0: not found yet),
    #: where its tensor is (as ``HEAD.source``) and its stage.
    memory: int = 1
    length: int = 1
    sleep: int = 1
    entry: int = 1
    source: int = 1
    stage: int = 1
    #: And of the part that the peer owns: where it lies in this rank's memory, in bytes from ``tensor``; if it is not
    #: cut, its elements; and where it lies in what another rank makes readable, in elements.
    part_at: int = 1
    part_count: int = 1
    part_offset: int = 1
    #: The number of the peer's process, if this rank can read its memory; otherwise 0.
    process: int = 1


class _Entry(Structure):
    signature: int = 1
    source: int = 1
    stage: int = 1
    #: The key and the iteration of the operation as one number; 0 if the entry announces none. With two words, a rank
    #: could read one of them before and the other one after the entry was given to another operation. Then it would
    #: find the key of the one with the iteration of the other, and read a stage that is being written.
    operation: int = 1
    #: The number of the operation that has failed on this rank, whose tensor the program may change from then on.
    #: Another rank that finds the mark after it has read a tensor, a stage or a result uses nothing of that. The rest
    #: of the cache line is free.
    failed: int = CACHE_LINE_WORDS - 4
    #: Each counter has a cache line of its own.
    staged: int = CACHE_LINE_WORDS
    reduced: int = CACHE_LINE_WORDS
    copied: int = CACHE_LINE_WORDS


#: The block: the head, the order of the contributions to each part (``ORDER``: ranks**2 words), and the peers.
HEAD: Final = _Head()
PEER: Final = _Peer()
ORDER: Final = HEAD.num_words
#: The names of the words of the block that one thread may read or write while another one writes them.
SHARED: Final = (
    *("HEAD.announced", "HEAD.found", "HEAD.copied", "HEAD.seen", "HEAD.culprit"),
    *("PEER.entry", "PEER.source", "PEER.stage"),
)
#: An entry of a board, in whose names bytes are counted.
ENTRY: Final = _Entry(unit=8)
ENTRY_BYTES: Final = 8 * ENTRY.num_words
#: The factor of the iteration in ``ENTRY.operation``. It is odd.
ITERATION_FACTOR = -0x61C8864680B583EB
#: An operation is announced in one of so many entries that follow each other.
PROBES = 8
#: The bit of a sleep word that says that the rank sleeps.
ASLEEP = 1
#: Elements that are added up before they are stored, so that they stay in the first-level cache.
COUNTED = 1024

#: Results of ``ADVANCE``. ``CONFLICT``: a rank has announced another signature. ``VIOLATION``: a rank has announced
#: what no correct rank does.
PENDING, DONE, CONFLICT, VIOLATION = 0, 1, 2, 3

# -------------------------------------------------------------------------------------------------------- the function

# What the function does is its first argument. The second one is the address of the block.

#: Do what can be done for an operation, and look again for a while if that is nothing. Returns ``DONE`` (this
#: rank has the result, and the peers need nothing of it any more), ``PENDING`` (the peers in ``WAKE`` are to be woken;
#: there may be more to do), ``CONFLICT`` or ``VIOLATION``.
ADVANCE = 0
#: Announce the next operation of a block that has ended, and ``ADVANCE`` it. The third argument is the new iteration,
#: the fourth one is the address of the new entry.
RESTART = 1
#: Look for the operation on the boards of the peers on which it was not found yet, if this rank has announced it: until
#: then no peer can have ended its part. Returns ``PENDING``, ``CONFLICT`` or ``VIOLATION``.
LOOK = 2
#: Return whether ``ADVANCE`` could find something to do that it has not found.
HAS_CHANGED = 3
#: Return whether a peer (third argument) has announced the operation and ended its part of it, and this rank needs
#: nothing of its memory any more that is not shared.
HAS_ENDED = 4
#: Return whether no peer reads this rank's entry or stage any more, after this rank's own part has ended.
IS_READ = 5
#: Take the announcement of an operation back.
WITHDRAW = 6
#: Mark an operation as failed on this rank, before the program can change its tensor. The third argument is the
#: operation's iteration, the fourth one is the address of its entry: another thread may be about to write both into the
#: block (``RESTART``).
MARK_FAILED = 7

#: The compiled function: what to do, the address of the block, and two arguments.
Exchange = Callable[[int, int, int, int], int]
#: Arguments of the compiled function.
NUM_ARGUMENTS: Final = 4
FUNCTION: Final = machine_code.CompiledFunction(
    "totalreduce.kernels.exchange_code",
    NUM_ARGUMENTS,
    machine_code.files("exchange.py", "exchange_code.py", "float_mode.py", "vectors.py"),
    "what exchanges tensors between ranks of one host",
)


def block_words(ranks: int) -> int:
    """Return the number of words of a block."""
    return ORDER + ranks * ranks + ranks * PEER.num_words


@functools.cache
def load() -> machine_code.Loaded:
    """Return the compiled function (see ``Exchange``). The first call on a machine compiles it, which takes seconds.

    Raises:
        NoCodeError: This process cannot have it.
    """
    return machine_code.load(FUNCTION)
