"""The fast lane's exchange: an allreduce between ranks of one host, in one compiled function that needs no interpreter.

Every rank has a *board* in memory that all ranks of the host can read and only this rank can write. There it announces
an operation in an *entry*: the operation's key and signature, where its tensor is, and three counters. The others look
for the key, so the order in which operations are announced does not matter. Two ways follow:

* Small tensors lie in the entry. Every rank adds all contributions by itself, and needs nothing else of the others.
* Larger tensors are exchanged in *pieces*, in rounds. In a round every rank makes one piece of every part of a lane
  readable (it *stages* it, unless the tensor lies in shared memory), *reduces* its own part's piece of all ranks, and
  *copies* the results of the other ranks. A counter in the entry tells how many rounds have passed each of these steps.
  Of staged pieces there are two sets, so that a rank may be one round ahead of the ranks that read.

A *part* is what one rank reduces: of every lane of the operation (``engine.layout``) one n-th. Contributions to a part
are added one after the other in the order that ``ORDER`` gives, which is that of the operation's schedule: the bits of
the result are those of the schedule.

The functions work on a *block* of 64-bit integers, whose words the constants name. Addresses are those of this process.
No function waits longer than ``SPINS`` and ``YIELDS`` say.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int64, njit

from totalreduce.kernels.atomics import load, pause, pointer_to, store, yield_core
from totalreduce.kernels.vectors import Array, fence

__all__ = [
    "CONFLICT",
    "COUNTED",
    "DONE",
    "ENTRY_BYTES",
    "PEER_WORDS",
    "PENDING",
    "PRODUCT",
    "SUM",
    "VIOLATION",
    "advance",
    "block_words",
    "has_changed",
    "has_ended",
    "is_read",
    "look",
    "prepare",
    "restart",
    "withdraw",
]

# ------------------------------------------------------------------------------------------------- words of a block

#: The number of ranks, and this rank's index among them.
RANKS, ME = 0, 1
#: ``SUM`` or ``PRODUCT``, and the divisor of an average (1: none).
REDUCTION, DIVISOR = 2, 3
#: Elements of the tensor, and lanes.
COUNT, LANES = 4, 5
#: Whether the tensor lies in the entry.
INLINE = 6
#: Elements of a piece, rounds of one lane, rounds of all lanes.
PIECE, LANE_ROUNDS, ROUNDS = 7, 8, 9
#: The address of the tensor, and of memory for one block of sums.
TENSOR, SUMS = 10, 11
#: The key of the operation, and a number that is equal where the signatures are.
KEY, ITERATION, SIGNATURE = 12, 13, 14
#: Where the operation may be announced: the number of the first of ``PROBES`` entries, and the number of all entries.
HOME, ENTRIES = 15, 16
#: This rank's entry; where its tensor is in its memory file (0: not there); where its stage is in its file.
ENTRY, SOURCE, STAGE = 17, 18, 19
#: The offset in every memory file: of the board, of the tensors in the entries, of the stages, and of their end.
BOARD_AT, INLINE_AT, STAGES_AT, STAGES_END = 20, 21, 22, 23
#: The longest tensor in an entry, the length of a stage, the offset of the results in a stage, the length of a piece.
INLINE_BYTES, STAGE_BYTES, RESULTS_AT, PIECE_BYTES = 24, 25, 26, 27
#: How often to look again before returning without progress: with a pause, or letting others have the core.
SPINS, YIELDS = 28, 29
#: Progress of this rank: announced; peers found; rounds staged, reduced and copied.
ANNOUNCED, FOUND, STAGED, REDUCED, COPIED = 30, 31, 32, 33, 34
#: What ``advance`` returns besides its status: a bit for every peer that is to be woken; the peer of a violation.
WAKE, CULPRIT = 35, 36
#: What ``advance`` has seen of the peers' boards when it found nothing to do.
SEEN = 37
#: The number of times that ``advance`` moves pieces before it returns, so that more urgent operations get their turn.
TURNS = 38
_HEAD_WORDS = 40
#: Per peer, after the order: the address and the length of its memory, the address of its sleep word, its entry's
#: address (0: not found yet), where its tensor is (0: staged) and its stage.
MEMORY, LENGTH, SLEEP, PEER_ENTRY, PEER_SOURCE, PEER_STAGE = 0, 1, 2, 3, 4, 5
PEER_WORDS = 8
#: The order of the contributions to each part: ranks**2 words, followed by the peers.
ORDER = _HEAD_WORDS

# ------------------------------------------------------------------------------------------------- words of an entry

_E_SIGNATURE, _E_SOURCE, _E_STAGE, _E_KEY, _E_ITERATION = 0, 8, 16, 24, 32
#: Each counter has a cache line of its own.
_E_STAGED, _E_REDUCED, _E_COPIED = 64, 128, 192
ENTRY_BYTES = 256
#: An operation is announced in one of so many entries that follow each other.
PROBES = 8
#: The bit of a sleep word that says that the rank sleeps.
_ASLEEP = 1
#: Elements that are added up before they are stored, so that they stay in the first-level cache.
COUNTED = 1024

#: Results of ``advance``. ``CONFLICT``: a rank has announced another signature. ``VIOLATION``: a rank has announced
#: what no correct rank does.
PENDING, DONE, CONFLICT, VIOLATION = 0, 1, 2, 3
SUM, PRODUCT = 1, 5


def block_words(ranks: int) -> int:
    """Return the number of words of a block."""
    return _HEAD_WORDS + ranks * ranks + ranks * PEER_WORDS


@njit(inline="always")  # type: ignore[untyped-decorator]
def _peer(block: Array, peer: Any) -> Any:
    return int64(_HEAD_WORDS + block[RANKS] * block[RANKS] + peer * PEER_WORDS)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _range(total: Any, parts: Any, index: Any) -> Any:
    """As ``foundation.partition.balanced_range``."""
    size = total // parts
    larger = total - size * parts
    start = index * size + min(index, larger)
    return start, start + size + (1 if index < larger else 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _is_there(block: Array, entry: Any) -> Any:
    """Return whether an entry still announces the operation. If not, its rank, and all others, have ended it."""
    return load(entry + _E_ITERATION) == block[ITERATION] and load(entry + _E_KEY) == block[KEY]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def look(block: Array, itemsize: Any) -> Any:
    """Look for the operation on the boards of the peers on which it was not found yet.

    Returns ``PENDING``, ``CONFLICT`` or ``VIOLATION``.
    """
    for peer in range(block[RANKS]):
        at = _peer(block, peer)
        if peer == block[ME] or block[at + PEER_ENTRY] != 0:
            continue
        memory = block[at + MEMORY]
        for probe in range(PROBES):
            entry = memory + block[BOARD_AT] + (block[HOME] + probe) % block[ENTRIES] * ENTRY_BYTES
            if not _is_there(block, entry):
                continue
            if load(entry + _E_SIGNATURE) != block[SIGNATURE]:
                return CONFLICT
            source, stage = load(entry + _E_SOURCE), load(entry + _E_STAGE)
            if source != 0:
                # Divided and not multiplied: no number of a peer may overflow.
                valid = source % itemsize == 0 and block[STAGES_END] <= source <= block[at + LENGTH]
                valid = valid and block[COUNT] <= (block[at + LENGTH] - source) // itemsize
            elif block[INLINE] != 0:
                valid = True
            else:
                valid = block[STAGES_AT] <= stage <= block[STAGES_END] - block[STAGE_BYTES] and stage % 64 == 0
            if not valid:
                block[CULPRIT] = peer
                return VIOLATION
            block[at + PEER_SOURCE] = source
            block[at + PEER_STAGE] = stage
            block[at + PEER_ENTRY] = entry
            block[FOUND] += 1
            break
    return PENDING


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _least(block: Array, counter: Any) -> Any:
    """Return the smallest value of a counter of the peers' entries."""
    least = block[ROUNDS]
    for peer in range(block[RANKS]):
        if peer != block[ME]:
            entry = block[_peer(block, peer) + PEER_ENTRY]
            rounds = load(entry + counter)
            if rounds < least and _is_there(block, entry):  # looked at afterwards: the counter is the operation's
                least = rounds
    return least


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _least_staged(block: Array) -> Any:
    """Return the number of rounds for which all peers' pieces can be read."""
    least = block[ROUNDS]
    for peer in range(block[RANKS]):
        at = _peer(block, peer)
        if peer != block[ME] and block[at + PEER_SOURCE] == 0:
            least = min(least, load(block[at + PEER_ENTRY] + _E_STAGED))
    return least


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _wake(block: Array) -> None:
    """Note which peers sleep, after something was written that they may wait for."""
    fence()
    for peer in range(block[RANKS]):
        if peer != block[ME] and load(block[_peer(block, peer) + SLEEP]) & _ASLEEP:
            block[WAKE] |= int64(1) << peer


@njit(inline="always")  # type: ignore[untyped-decorator]
def _elements(address: Any, count: Any, like: Array) -> Any:
    return numba.carray(pointer_to(address, like), (count,))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy(target: Any, source: Any, count: Any, like: Array) -> None:
    to, read = _elements(target, count, like), _elements(source, count, like)
    for i in range(count):
        to[i] = read[i]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _announce(block: Array, like: Array) -> None:
    entry = block[ENTRY]
    store(entry + _E_ITERATION, 0)
    store(entry + _E_STAGED, 0)
    store(entry + _E_REDUCED, 0)
    store(entry + _E_COPIED, 0)
    store(entry + _E_SIGNATURE, block[SIGNATURE])
    store(entry + _E_SOURCE, block[SOURCE])
    store(entry + _E_STAGE, block[STAGE])
    store(entry + _E_KEY, block[KEY])
    if block[INLINE] != 0:
        memory = block[_peer(block, block[ME]) + MEMORY]
        _copy(_inline(block, memory, entry), block[TENSOR], block[COUNT], like)
    store(entry + _E_ITERATION, block[ITERATION])
    block[ANNOUNCED] = 1
    _wake(block)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _inline(block: Array, memory: Any, entry: Any) -> Any:
    """Return the address of the tensor in an entry."""
    number = (entry - memory - block[BOARD_AT]) // ENTRY_BYTES
    return int64(memory + block[INLINE_AT] + number * block[INLINE_BYTES])


@njit(inline="always")  # type: ignore[untyped-decorator]
def _contribution(block: Array, peer: Any, part: Any, start: Any, turn: Any, itemsize: Any) -> Any:
    """Return the address of a peer's elements from ``start`` on, which lie in a piece of ``part`` in round ``turn``."""
    at = _peer(block, peer)
    if peer == block[ME]:
        return int64(block[TENSOR] + start * itemsize)
    memory = block[at + MEMORY]
    if block[INLINE] != 0:
        return int64(_inline(block, memory, block[at + PEER_ENTRY]) + start * itemsize)
    if block[at + PEER_SOURCE] != 0:
        return int64(memory + block[at + PEER_SOURCE] + start * itemsize)
    piece = turn % 2 * block[RANKS] + part
    return int64(memory + block[at + PEER_STAGE] + piece * block[PIECE_BYTES])


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _combine(reduction: Any, into: Array, other: Array, count: Any) -> None:
    if reduction == SUM:
        for i in range(count):
            into[i] = into[i] + other[i]
    else:
        for i in range(count):
            into[i] = into[i] * other[i]


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _divide(values: Array, divisor: Any, count: Any) -> None:
    converted = np.empty(1, values.dtype)
    converted[0] = divisor
    by = converted[0]
    for i in range(count):
        values[i] = values[i] / by


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _reduce(block: Array, part: Any, start: Any, stop: Any, turn: Any, like: Array) -> None:
    """Reduce elements of one piece of a part into this rank's tensor, in the order of the part."""
    ranks, itemsize = block[RANKS], like.itemsize
    result = block[TENSOR] + start * itemsize
    if ranks == 2:  # two contributions have one sum in either order
        other = _contribution(block, 1 - block[ME], part, start, turn, itemsize)
        into = _elements(result, stop - start, like)
        _combine(block[REDUCTION], into, _elements(other, stop - start, like), stop - start)
        if block[DIVISOR] != 1:
            _divide(into, block[DIVISOR], stop - start)
        return
    order, done = ORDER + part * ranks, 0
    while start + done < stop:
        # Not in the tensor: this rank's contribution, which may come late in the order, lies there.
        count, shift = min(COUNTED, stop - start - done), done * itemsize
        sums = _elements(block[SUMS], count, like)
        _copy(block[SUMS], _contribution(block, block[order], part, start, turn, itemsize) + shift, count, like)
        for position in range(1, ranks):
            other = _contribution(block, block[order + position], part, start, turn, itemsize) + shift
            _combine(block[REDUCTION], sums, _elements(other, count, like), count)
        if block[DIVISOR] != 1:
            _divide(sums, block[DIVISOR], count)
        _copy(result + shift, block[SUMS], count, like)
        done += count


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _reduce_all(block: Array, like: Array) -> None:
    """Reduce a small tensor completely: every peer has it in its entry."""
    for lane in range(block[LANES]):
        first, last = _range(block[COUNT], block[LANES], lane)
        for part in range(block[RANKS]):
            start, stop = _range(last - first, block[RANKS], part)
            _reduce(block, part, first + start, first + stop, 0, like)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _piece(block: Array, part: Any, turn: Any) -> Any:
    """Return the elements of the tensor that are a part's piece in a round."""
    lane, number = turn // block[LANE_ROUNDS], turn % block[LANE_ROUNDS]
    first, last = _range(block[COUNT], block[LANES], lane)
    start, stop = _range(last - first, block[RANKS], part)
    begin = min(stop, start + number * block[PIECE])
    return first + begin, first + min(stop, begin + block[PIECE])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _move_pieces(block: Array, like: Array) -> Any:
    """Carry out the steps that are possible now, each at most once; return whether there were any."""
    ranks, me, entry, itemsize = block[RANKS], block[ME], block[ENTRY], like.itemsize
    memory = block[_peer(block, me) + MEMORY]
    is_staged = block[SOURCE] == 0
    moved = False
    turn = block[STAGED]
    # A set of pieces serves every second round: all peers have read those of two rounds before.
    if is_staged and turn < block[ROUNDS] and turn < _least(block, _E_REDUCED) + 2:
        for part in range(ranks):
            if part != me:
                start, stop = _piece(block, part, turn)
                target = memory + block[STAGE] + (turn % 2 * ranks + part) * block[PIECE_BYTES]
                _copy(target, block[TENSOR] + start * itemsize, stop - start, like)
        block[STAGED] = turn + 1
        store(entry + _E_STAGED, turn + 1)
        moved = True
    turn = block[REDUCED]
    has_room = not is_staged or turn < _least(block, _E_COPIED) + 2
    if turn < block[ROUNDS] and has_room and turn < _least_staged(block):
        start, stop = _piece(block, me, turn)
        _reduce(block, me, start, stop, turn, like)
        if is_staged:
            target = memory + block[STAGE] + block[RESULTS_AT] + turn % 2 * block[PIECE_BYTES]
            _copy(target, block[TENSOR] + start * itemsize, stop - start, like)
        block[REDUCED] = turn + 1
        store(entry + _E_REDUCED, turn + 1)
        moved = True
    turn = block[COPIED]
    if turn < block[REDUCED] and turn < _least(block, _E_REDUCED):
        for part in range(ranks):
            if part != me:
                start, stop = _piece(block, part, turn)
                at = _peer(block, part)
                source = block[at + MEMORY]
                if block[at + PEER_SOURCE] != 0:
                    source += block[at + PEER_SOURCE] + start * itemsize
                else:
                    source += block[at + PEER_STAGE] + block[RESULTS_AT] + turn % 2 * block[PIECE_BYTES]
                _copy(block[TENSOR] + start * itemsize, source, stop - start, like)
        block[COPIED] = turn + 1
        store(entry + _E_COPIED, turn + 1)
        moved = True
    return moved


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _seen(block: Array) -> Any:
    """Return a number that changes when a peer announces the operation, or a counter of a peer's entry changes."""
    total = int64(0)
    for peer in range(block[RANKS]):
        if peer == block[ME]:
            continue
        at = _peer(block, peer)
        entry = block[at + PEER_ENTRY]
        if entry != 0:
            total += load(entry + _E_STAGED) + load(entry + _E_REDUCED) + load(entry + _E_COPIED) + 1
            continue
        for probe in range(PROBES):
            entry = block[at + MEMORY] + block[BOARD_AT] + (block[HOME] + probe) % block[ENTRIES] * ENTRY_BYTES
            if _is_there(block, entry):
                total += 1
    return total


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def has_changed(block: Array) -> Any:
    """Return whether ``advance`` could find something to do that it has not found."""
    return block[ANNOUNCED] == 0 or _seen(block) != block[SEEN]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def is_read(block: Array) -> Any:
    """Return whether no peer reads this rank's entry or stage any more, after this rank's own part has ended."""
    for peer in range(block[RANKS]):
        if peer != block[ME]:
            entry = block[_peer(block, peer) + PEER_ENTRY]
            if entry != 0 and load(entry + _E_COPIED) != block[ROUNDS] and _is_there(block, entry):
                return False
    return True


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def has_ended(block: Array, peer: Any) -> Any:
    """Return whether a peer that has announced the operation has ended its part of it."""
    entry = block[_peer(block, peer) + PEER_ENTRY]
    return load(entry + _E_COPIED) == block[ROUNDS] or not _is_there(block, entry)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def withdraw(block: Array) -> None:
    """Take the announcement of an operation back."""
    if block[ANNOUNCED] != 0:
        store(block[ENTRY] + _E_ITERATION, 0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def advance(block: Array, like: Array) -> Any:
    """Do what can be done for an operation; look again for a while if that is nothing.

    Args:
        block: The operation's words, int64, ``block_words(ranks)`` long.
        like: An array of the tensor's element type; float32 or float64.

    Returns:
        ``DONE``: the tensor holds the result, and the peers need nothing of it any more. ``PENDING``: the peers in
        ``WAKE`` are to be woken; there may be more to do. ``CONFLICT``, ``VIOLATION``: see there.
    """
    block[WAKE] = 0
    if block[ANNOUNCED] == 0:
        _announce(block, like)
    ranks, looks, turns = block[RANKS], 0, block[TURNS]
    block[SEEN] = -1
    limit = block[SPINS] + block[YIELDS]
    while True:
        seen = _seen(block)
        moved = False
        if block[FOUND] < ranks - 1:
            found = block[FOUND]
            status = look(block, like.itemsize)
            if status != PENDING:
                return status
            moved = block[FOUND] > found
        if block[FOUND] == ranks - 1:
            if block[INLINE] != 0:
                if block[COPIED] != block[ROUNDS]:  # else it was done when this function was called last
                    _reduce_all(block, like)
                    block[COPIED] = block[ROUNDS]
                    store(block[ENTRY] + _E_COPIED, block[ROUNDS])
                return DONE
            if turns <= 0:
                return PENDING
            if _move_pieces(block, like):
                moved = True
                turns -= 1
                _wake(block)
            if block[COPIED] == block[ROUNDS] and (block[SOURCE] == 0 or _least(block, _E_COPIED) == block[ROUNDS]):
                return DONE
        if moved:
            looks = 0
            continue
        block[SEEN] = seen
        if block[WAKE] != 0 or looks >= limit:
            return PENDING
        looks += 1
        if block[SPINS] != 0:
            pause()
        else:
            yield_core()


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def restart(block: Array, like: Array, iteration: Any, entry: Any) -> Any:
    """Announce the next operation of a block that has ended, in another entry, and ``advance`` it."""
    block[ITERATION], block[ENTRY] = iteration, entry
    block[ANNOUNCED] = block[FOUND] = block[STAGED] = block[REDUCED] = block[COPIED] = 0
    for peer in range(block[RANKS]):
        block[_peer(block, peer) + PEER_ENTRY] = 0
    return advance(block, like)


def prepare() -> None:
    """Compile every function, or read it from its file, so that the first operation does not wait for that."""
    block, memory = np.zeros(block_words(1), np.int64), np.zeros(4 * ENTRY_BYTES, np.uint8)
    block[RANKS] = block[LANES] = block[LANE_ROUNDS] = block[ENTRIES] = block[DIVISOR] = 1
    entry = memory.ctypes.data // ENTRY_BYTES * ENTRY_BYTES + ENTRY_BYTES
    for like in (np.empty(0, np.float32), np.empty(0, np.float64)):
        restart(block, like, 1, entry)
        advance(block, like)
        look(block, like.itemsize)
    has_changed(block)
    block[ORDER + 1 + PEER_ENTRY] = entry
    has_ended(block, 0)
    is_read(block)
    withdraw(block)
