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

The function (``exchange_code``) works on a *block* of 64-bit integers, whose words the constants name. Addresses are
those of this process. No call waits longer than ``SPINS`` and ``YIELD_NS`` say.

**The order of accesses.** x86-64 keeps stores in order, and loads; aarch64 does not. So a word that tells another
thread or another process something is written after what it tells of (release), and read before that (acquire). Words
of entries, and sleep words, are accessed by ``atomics.load`` and ``atomics.store``; those of the block that are
``SHARED`` by ``load_shared``, ``store_shared`` and ``raise_shared``. The other words of the block that change are used
by the thread that moves messages alone. What is constant was written before the engine's lock was released. Python
reads shared words only to decide whether to call the function, or to tell users of progress.

=================  ===============================  ==================================================================
word               written by                       who has read it may read then
=================  ===============================  ==================================================================
``E_OPERATION``    the entry's rank (``_announce``)  ``E_SIGNATURE``, ``E_SOURCE``, ``E_STAGE``, counters that begin at
                                                    0, and what the rank staged when it announced the operation
``E_STAGED``       the entry's rank                 the pieces of so many rounds in its stage
``E_REDUCED``      the entry's rank                 the results of so many rounds; it reads no pieces of these any more
``E_COPIED``       the entry's rank                 nothing: it reads no results of so many rounds any more
``E_FAILED``       the entry's rank, any thread     nothing: a fence orders it with the tensor on both sides
``E_SIGNATURE``,   the entry's rank                 nothing: they are ordered like the others, before ``E_OPERATION``
``E_SOURCE``,
``E_STAGE``
sleep word         the sleeping rank                nothing: a fence on both sides orders it with what would wake the
                                                    rank (``transports.shm_waiting``)
``ANNOUNCED``      the thread that moves messages   ``ITERATION``, ``ENTRY`` and the beginnings of all words of progress
``PEER_SOURCE``,   ``LOOK``, any thread             nothing: ``PEER_ENTRY`` tells of them
``PEER_STAGE``
``PEER_ENTRY``     ``LOOK``, any thread             ``PEER_SOURCE`` and ``PEER_STAGE`` of the peer
``FOUND``          ``LOOK``, any thread             the words of as many peers; two threads that look at the same time
                                                    leave the greater number
``COPIED``         the thread that moves messages   nothing: this rank reads the peers' memory no more
``SEEN``           the thread that moves messages   nothing: it is compared with the counters of the peers
``CULPRIT``        ``LOOK``, any thread             nothing: the result ``VIOLATION`` tells of it
=================  ===============================  ==================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from totalreduce.kernels import machine_code

__all__ = [
    "ADVANCE",
    "CONFLICT",
    "COUNTED",
    "DONE",
    "ENTRY_BYTES",
    "FUNCTION",
    "HAS_CHANGED",
    "HAS_ENDED",
    "IS_READ",
    "IS_WHOLE",
    "LOOK",
    "MARK_FAILED",
    "PEER_WORDS",
    "PENDING",
    "RESTART",
    "SHARED",
    "VIOLATION",
    "WITHDRAW",
    "Exchange",
    "block_words",
    "load",
]

# ------------------------------------------------------------------------------------------------- words of a block

#: The number of ranks, and this rank's index among them.
RANKS, ME = 0, 1
#: ``SUM``, ``PRODUCT``, ``MIN`` or ``MAX``, and the divisor of an average (1: none).
REDUCTION, DIVISOR = 2, 3
#: Elements of all parts together, and lanes.
COUNT, LANES = 4, 5
#: Whether a rank copies its tensor into its stage as a whole when it announces it, or exchanges it in pieces (1 or 0).
IS_WHOLE = 6
#: Elements of a piece, rounds of one lane, rounds of all lanes.
PIECE, LANE_ROUNDS, ROUNDS = 7, 8, 9
#: The address of the tensor (0: ``PART_AT`` are addresses), and of memory for ``COUNTED`` sums.
TENSOR, SUMS = 10, 11
#: The key of the operation, and a number that is equal where the signatures are.
KEY, ITERATION, SIGNATURE = 12, 13, 14
#: Where the operation may be announced: the number of the first of ``PROBES`` entries, and the number of all entries.
HOME, ENTRIES = 15, 16
#: This rank's entry; what the others read of this rank: its offset in this rank's memory file, or minus its address in
#: this process, or 0 if it must be staged; where its stage is in its file.
ENTRY, SOURCE, STAGE = 17, 18, 19
#: The offset in every memory file: of the board, of the stages, and of their end.
BOARD_AT, STAGES_AT, STAGES_END = 20, 21, 22
#: The length of what a stage holds of pieces, the offset of the results in it, the length of a piece.
STAGE_BYTES, RESULTS_AT, PIECE_BYTES = 23, 24, 25
#: How often to look again, with a pause, before returning without progress; without ``SPINS``: for how many nanoseconds
#: to look again and let other processes have the core.
SPINS, YIELD_NS = 26, 27
#: Progress of this rank: announced; peers found; rounds staged, reduced and copied.
ANNOUNCED, FOUND, STAGED, REDUCED, COPIED = 28, 29, 30, 31, 32
#: What ``advance`` returns besides its status: a bit for every peer that is to be woken; the peer of a violation.
WAKE, CULPRIT = 33, 34
#: What ``advance`` has seen of the peers' boards when it found nothing to do.
SEEN = 35
#: The number of times that ``advance`` moves pieces before it returns, so that more urgent operations get their turn.
TURNS = 36
#: The element type, and the length of an element.
KIND, ITEMSIZE = 37, 38
#: The address of the block, and the words into which the C library writes the time, in seconds and nanoseconds.
SELF, SECONDS, NANOSECONDS = 39, 40, 41
#: Whether the operation adds contributions, whether every rank gets all parts, and whether parts are cut (0 or 1).
ADDS, GATHERS, IS_CUT = 42, 43, 44
#: The address of this rank's part of the result, if that is not in the tensor; otherwise 0.
RESULT = 45
#: The address of memory for one piece of every rank, for pieces that are read from another process.
FETCHED = 46
#: Two vectors for ``process_vm_readv``, each of which has an address and a length: in this process, in the other one.
HERE, HERE_BYTES, THERE, THERE_BYTES = 47, 48, 49, 50
HEAD_WORDS = 51
#: Per peer, after the order: the address and the length of its memory, the address of its sleep word, its entry's
#: address (0: not found yet), where its tensor is (as ``SOURCE``) and its stage.
MEMORY, LENGTH, SLEEP, PEER_ENTRY, PEER_SOURCE, PEER_STAGE = 0, 1, 2, 3, 4, 5
#: And of the part that the peer owns: where it lies in this rank's memory, in bytes from ``TENSOR``; if it is not cut,
#: its elements; and where it lies in what another rank makes readable, in elements.
PART_AT, PART_COUNT, PART_OFFSET = 6, 7, 8
#: The number of the peer's process, if this rank can read its memory; otherwise 0.
PROCESS = 9
PEER_WORDS = 10
#: The order of the contributions to each part: ranks**2 words, followed by the peers.
ORDER = HEAD_WORDS
#: The names of the words of the block that one thread may read or write while another one writes them.
SHARED: Final = ("ANNOUNCED", "FOUND", "COPIED", "SEEN", "CULPRIT", "PEER_ENTRY", "PEER_SOURCE", "PEER_STAGE")

# ------------------------------------------------------------------------------------------------- words of an entry

E_SIGNATURE, E_SOURCE, E_STAGE = 0, 8, 16
#: The key and the iteration of the operation as one number; 0 if the entry announces none. With two words, a rank could
#: read one of them before and the other one after the entry was given to another operation. Then it would find the key
#: of the one with the iteration of the other, and read a stage that is being written.
E_OPERATION = 24
#: The number of the operation that has failed on this rank, whose tensor the program may change from then on. Another
#: rank that finds the mark after it has read a tensor, a stage or a result uses nothing of that.
E_FAILED = 32
#: The factor of the iteration in that number. It is odd.
ITERATION_FACTOR = -0x61C8864680B583EB
#: Each counter has a cache line of its own.
E_STAGED, E_REDUCED, E_COPIED = 64, 128, 192
ENTRY_BYTES = 256
#: An operation is announced in one of so many entries that follow each other.
PROBES = 8
#: The bit of a sleep word that says that the rank sleeps.
ASLEEP = 1
#: Elements that are added up before they are stored, so that they stay in the first-level cache.
COUNTED = 1024

#: Results of ``advance``. ``CONFLICT``: a rank has announced another signature. ``VIOLATION``: a rank has announced
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
    return HEAD_WORDS + ranks * ranks + ranks * PEER_WORDS


@functools.cache
def load() -> machine_code.Loaded:
    """Return the compiled function (see ``Exchange``). The first call on a machine compiles it, which takes seconds.

    Raises:
        NoCodeError: This process cannot have it.
    """
    return machine_code.load(FUNCTION)
