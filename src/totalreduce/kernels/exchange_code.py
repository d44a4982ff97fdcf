"""The code of the fast lane's exchange, which Numba compiles. See ``exchange`` for what it does, and for the words.

Only the process that compiles the code imports this module, because it imports Numba (``machine_code``). The functions
raise no exception: nothing could catch one. Addresses and counts are integers of 64 bits.
"""

from __future__ import annotations

from time import CLOCK_MONOTONIC
from typing import Any

from numba import cfunc, int64

from totalreduce.kernels.atomics import (
    BLOCK_BYTES,
    LINE_BYTES,
    copy_bytes,
    float32_at,
    int64_at,
    load,
    load_shared,
    pause,
    raise_shared,
    read_clock,
    read_process,
    store,
    store_shared,
    stream_block,
    uint16_at,
    yield_core,
)
from totalreduce.kernels.element_types import BFLOAT16
from totalreduce.kernels.elements import average, combine, compiled, round_off, widen
from totalreduce.kernels.exchange import (
    ADDS,
    ADVANCE,
    ANNOUNCED,
    ASLEEP,
    BOARD_AT,
    CONFLICT,
    COPIED,
    COUNT,
    COUNTED,
    CULPRIT,
    DIVISOR,
    DONE,
    E_COPIED,
    E_FAILED,
    E_OPERATION,
    E_REDUCED,
    E_SIGNATURE,
    E_SOURCE,
    E_STAGE,
    E_STAGED,
    ENTRIES,
    ENTRY,
    ENTRY_BYTES,
    FETCHED,
    FOUND,
    GATHERS,
    HAS_CHANGED,
    HAS_ENDED,
    HEAD_WORDS,
    HERE,
    HERE_BYTES,
    HOME,
    IS_CUT,
    IS_READ,
    IS_WHOLE,
    ITEMSIZE,
    ITERATION,
    ITERATION_FACTOR,
    KEY,
    KIND,
    LANE_ROUNDS,
    LANES,
    LENGTH,
    LOOK,
    MARK_FAILED,
    ME,
    MEMORY,
    NANOSECONDS,
    NUM_ARGUMENTS,
    ORDER,
    PART_AT,
    PART_COUNT,
    PART_OFFSET,
    PEER_ENTRY,
    PEER_SOURCE,
    PEER_STAGE,
    PEER_WORDS,
    PENDING,
    PIECE,
    PIECE_BYTES,
    PROBES,
    PROCESS,
    RANKS,
    REDUCED,
    REDUCTION,
    RESTART,
    RESULT,
    RESULTS_AT,
    ROUNDS,
    SECONDS,
    SEEN,
    SELF,
    SIGNATURE,
    SLEEP,
    SOURCE,
    SPINS,
    STAGE,
    STAGE_BYTES,
    STAGED,
    STAGES_AT,
    STAGES_END,
    SUMS,
    TENSOR,
    THERE,
    THERE_BYTES,
    TURNS,
    VIOLATION,
    WAKE,
    WITHDRAW,
    YIELD_NS,
)
from totalreduce.kernels.float_mode import restore_mode, use_default_mode
from totalreduce.kernels.vectors import fence

__all__ = ["assembly"]

#: A pointer to the words of a block.
Words = Any


@compiled
def _stream(target: Any, source: Any, num_bytes: Any) -> None:
    """Copy bytes past the caches: the target's lines are not read before they are written, and displace nothing.

    Measured with two ranks and tensors in shared memory: 4 MiB 0.55 instead of 0.65 ms, 64 MiB 7 instead of 10-20 ms.
    """
    copied = min(num_bytes, -target % LINE_BYTES)
    copy_bytes(target, source, copied)
    while copied + BLOCK_BYTES <= num_bytes:
        stream_block(target + copied, source + copied)
        copied += BLOCK_BYTES
    copy_bytes(target + copied, source + copied, num_bytes - copied)
    fence()


@compiled
def _peer(block: Words, peer: Any) -> Any:
    return int64(HEAD_WORDS + block[RANKS] * block[RANKS] + peer * PEER_WORDS)


@compiled
def _range(total: Any, parts: Any, index: Any) -> Any:
    """As ``foundation.partition.balanced_range``."""
    size = total // parts
    larger = total - size * parts
    start = index * size + min(index, larger)
    return start, start + size + (1 if index < larger else 0)


@compiled
def _part(block: Words, lane: Any, part: Any) -> Any:
    """Return the elements of a part of a lane: of the tensor if parts are cut, otherwise of the block."""
    if block[IS_CUT] == 0:
        return int64(0), int64(block[_peer(block, part) + PART_COUNT])
    first, last = _range(block[COUNT], block[LANES], lane)
    start, stop = _range(last - first, block[RANKS], part)
    return first + start, first + stop


@compiled
def _own(block: Words, part: Any, start: Any) -> Any:
    """Return the address of the elements of a part from ``start`` on in this rank's tensor."""
    return int64(block[TENSOR] + block[_peer(block, part) + PART_AT] + start * block[ITEMSIZE])


@compiled
def _result(block: Words, part: Any, start: Any) -> Any:
    """Return the address at which this rank writes the results of a part from ``start`` on."""
    return _own(block, part, start) if block[RESULT] == 0 else int64(block[RESULT] + start * block[ITEMSIZE])


@compiled
def _readable(block: Words, peer: Any) -> Any:
    """Return the number of elements that a peer makes readable."""
    return block[COUNT] if block[ADDS] != 0 else int64(block[_peer(block, peer) + PART_COUNT])


@compiled
def _number(block: Words, iteration: Any) -> Any:
    """Return the number by which an operation of the key is announced: one for its key and its iteration, never 0.

    Operations of one key have different numbers, because the factor is odd. Keys are hashes of 64 bits.
    """
    number = block[KEY] ^ (iteration * ITERATION_FACTOR)
    return number if number != 0 else int64(1)


@compiled
def _operation(block: Words) -> Any:
    """Return the number by which the operation is announced."""
    return _number(block, block[ITERATION])


@compiled
def _is_there(block: Words, entry: Any) -> Any:
    """Return whether an entry announces the operation.

    If an entry that was found does so no more, its rank uses it for a later operation, so all ranks have ended this
    one. (A rank that takes an announcement back knows that one rank was missing, so no rank has begun.)
    """
    return load(entry + E_OPERATION) == _operation(block)


@compiled
def _probed(block: Words, at: Any, probe: Any) -> Any:
    """Return the address of an entry in which the peer whose words begin ``at`` may have announced the operation."""
    return int64(block[at + MEMORY] + block[BOARD_AT] + (block[HOME] + probe) % block[ENTRIES] * ENTRY_BYTES)


@compiled
def _look(block: Words) -> Any:
    """As ``exchange.LOOK`` says."""
    if load_shared(block, ANNOUNCED) == 0:
        return PENDING
    for peer in range(block[RANKS]):
        at = _peer(block, peer)
        if peer == block[ME] or load_shared(block, at + PEER_ENTRY) != 0:
            continue
        for probe in range(PROBES):
            entry = _probed(block, at, probe)
            if not _is_there(block, entry):
                continue
            if load(entry + E_SIGNATURE) != block[SIGNATURE]:
                return CONFLICT
            source, stage = load(entry + E_SOURCE), load(entry + E_STAGE)
            is_in_pieces = block[IS_WHOLE] == 0
            if _readable(block, peer) == 0:
                valid = True
            elif is_in_pieces and source < 0:  # of an address that it cannot read, the system tells this rank
                valid = block[at + PROCESS] != 0
            elif is_in_pieces and source != 0:
                # Divided and not multiplied: no number of a peer may overflow.
                valid = source % block[ITEMSIZE] == 0 and block[STAGES_END] <= source <= block[at + LENGTH]
                valid = valid and _readable(block, peer) <= (block[at + LENGTH] - source) // block[ITEMSIZE]
            else:
                length = block[STAGE_BYTES] if is_in_pieces else _readable(block, peer) * block[ITEMSIZE]
                valid = block[STAGES_AT] <= stage <= block[STAGES_END] - length and stage % 64 == 0
            if not valid:
                store_shared(block, CULPRIT, peer)
                return VIOLATION
            store_shared(block, at + PEER_SOURCE, source)
            store_shared(block, at + PEER_STAGE, stage)
            store_shared(block, at + PEER_ENTRY, entry)
            break
    # Another thread, for which the engine asks, may look at the same time. So they are counted and not added up, and a
    # thread that has counted fewer leaves the greater number.
    found = int64(0)
    for peer in range(block[RANKS]):
        if load_shared(block, _peer(block, peer) + PEER_ENTRY) != 0:
            found += 1
    if found > load_shared(block, FOUND):
        raise_shared(block, FOUND, found)
    return PENDING


@compiled
def _least(block: Words, counter: Any) -> Any:
    """Return the smallest value of a counter of the peers' entries."""
    least = block[ROUNDS]
    for peer in range(block[RANKS]):
        if peer != block[ME]:
            entry = load_shared(block, _peer(block, peer) + PEER_ENTRY)
            rounds = load(entry + counter)
            if rounds < least and _is_there(block, entry):  # looked at afterwards: the counter is the operation's
                least = rounds
    return least


@compiled
def _least_staged(block: Words) -> Any:
    """Return the number of rounds for which all peers' pieces can be read."""
    least = block[ROUNDS]
    for peer in range(block[RANKS]):
        at = _peer(block, peer)
        if peer != block[ME] and load_shared(block, at + PEER_SOURCE) == 0:
            least = min(least, load(load_shared(block, at + PEER_ENTRY) + E_STAGED))
    return least


@compiled
def _wake(block: Words) -> None:
    """Note which peers sleep, after something was written that they may wait for."""
    fence()
    for peer in range(block[RANKS]):
        if peer != block[ME] and load(block[_peer(block, peer) + SLEEP]) & ASLEEP:
            block[WAKE] |= int64(1) << peer


@compiled
def _announce(block: Words) -> None:
    entry = block[ENTRY]
    store(entry + E_OPERATION, 0)
    store(entry + E_STAGED, 0)
    store(entry + E_REDUCED, 0)
    store(entry + E_COPIED, 0)
    store(entry + E_SIGNATURE, block[SIGNATURE])
    store(entry + E_SOURCE, block[SOURCE])
    store(entry + E_STAGE, block[STAGE])
    if block[IS_WHOLE] != 0:
        _publish(block, block[_peer(block, block[ME]) + MEMORY] + block[STAGE])
    elif block[ROUNDS] == 1 and block[ADDS] != 0 and block[SOURCE] == 0:
        _stage(block, 0)  # so that the others need not wait for it
    store(entry + E_OPERATION, _operation(block))
    store_shared(block, ANNOUNCED, 1)
    _wake(block)


@compiled
def _publish(block: Words, target: Any) -> None:
    """Copy what the other ranks read of this rank's tensor."""
    me, itemsize = block[ME], block[ITEMSIZE]
    if block[ADDS] == 0:
        copy_bytes(target, _own(block, me, 0), block[_peer(block, me) + PART_COUNT] * itemsize)
    elif block[IS_CUT] != 0:
        copy_bytes(target, block[TENSOR], block[COUNT] * itemsize)
    else:
        for part in range(block[RANKS]):
            at = _peer(block, part)
            shift, count = block[at + PART_OFFSET] * itemsize, block[at + PART_COUNT]
            copy_bytes(target + shift, _own(block, part, 0), count * itemsize)


@compiled
def _contribution(block: Words, peer: Any, part: Any, start: Any, turn: Any) -> Any:
    """Return the address of a peer's elements from ``start`` on, which lie in a piece of ``part`` in round ``turn``."""
    at = _peer(block, peer)
    if peer == block[ME]:
        return _own(block, part, start)
    memory, shift = block[at + MEMORY], (block[_peer(block, part) + PART_OFFSET] + start) * block[ITEMSIZE]
    source, stage = load_shared(block, at + PEER_SOURCE), load_shared(block, at + PEER_STAGE)
    if block[IS_WHOLE] != 0:
        return int64(memory + stage + shift)
    if source < 0:
        return int64(block[FETCHED] + peer * block[PIECE_BYTES])
    if source != 0:
        return int64(memory + source + shift)
    piece = turn % 2 * block[RANKS] + part
    return int64(memory + stage + piece * block[PIECE_BYTES])


@compiled
def _reduce(block: Words, part: Any, start: Any, stop: Any, turn: Any) -> None:
    """Reduce elements of one piece of a part into this rank's result, in the order of the part."""
    ranks, itemsize, is_half = block[RANKS], block[ITEMSIZE], block[KIND] == BFLOAT16
    result = _result(block, part, start)
    if ranks == 2 and block[RESULT] == 0 and not is_half:  # two contributions have one sum in either order
        other = _contribution(block, 1 - block[ME], part, start, turn)
        combine(block[KIND], block[REDUCTION], result, other, stop - start)
        average(block[KIND], block[DIVISOR], result, stop - start)
        return
    order, done = ORDER + part * ranks, 0
    while start + done < stop:
        # Not in the tensor: this rank's contribution, which may come late in the order, lies there.
        count, shift = min(COUNTED, stop - start - done), done * itemsize
        first = _contribution(block, block[order], part, start, turn) + shift
        if is_half:
            widen(float32_at(block[SUMS]), uint16_at(first), count)
        else:
            copy_bytes(block[SUMS], first, count * itemsize)
        for position in range(1, ranks):
            other = _contribution(block, block[order + position], part, start, turn) + shift
            combine(block[KIND], block[REDUCTION], block[SUMS], other, count)
        average(block[KIND], block[DIVISOR], block[SUMS], count)
        if is_half:
            round_off(uint16_at(result + shift), float32_at(block[SUMS]), count)
        else:
            copy_bytes(result + shift, block[SUMS], count * itemsize)
        done += count


@compiled
def _compute_all(block: Words) -> None:
    """Compute all parts that this rank gets of a small tensor: it is readable on every peer as a whole."""
    for lane in range(block[LANES]):
        for part in range(block[RANKS]):
            start, stop = _part(block, lane, part)
            if block[ADDS] == 0:
                if part != block[ME]:
                    source = _contribution(block, part, part, start, 0)
                    copy_bytes(_own(block, part, start), source, (stop - start) * block[ITEMSIZE])
            elif block[GATHERS] != 0 or part == block[ME]:
                _reduce(block, part, start, stop, 0)


@compiled
def _piece(block: Words, part: Any, turn: Any) -> Any:
    """Return the elements of a part that are its piece in a round (see ``_part``)."""
    lane, number = turn // block[LANE_ROUNDS], turn % block[LANE_ROUNDS]
    start, stop = _part(block, lane, part)
    begin = min(stop, start + number * block[PIECE])
    return begin, min(stop, begin + block[PIECE])


@compiled
def _holds(block: Words) -> Any:
    """Return whether what was just read of the peers' tensors is what they announced, and not a later change of it.

    A rank whose operation fails marks that in its entry before its program goes on (``MARK_FAILED``). Its thread that
    moves messages may then still be staging the tensor, or adding it, which the program changes meanwhile.
    """
    fence()  # the marks are looked at after the tensors
    for peer in range(block[RANKS]):
        if peer != block[ME]:
            entry = load_shared(block, _peer(block, peer) + PEER_ENTRY)
            if load(entry + E_FAILED) == _operation(block):
                return False
    return True


@compiled
def _read(block: Words, peer: Any, shift: Any, target: Any, num_bytes: Any) -> Any:
    """Copy bytes of a peer's process, which begin ``shift`` after its source; return whether that has succeeded.

    It fails when the process has ended, or its operation has failed and the memory is not there any more. The engine
    learns of either by itself, so it is no progress and nothing else.
    """
    if num_bytes == 0:
        return True
    at = _peer(block, peer)
    block[HERE], block[HERE_BYTES] = target, num_bytes
    block[THERE], block[THERE_BYTES] = shift - load_shared(block, at + PEER_SOURCE), num_bytes
    here, there = block[SELF] + 8 * HERE, block[SELF] + 8 * THERE
    return read_process(block[at + PROCESS], here, 1, there, 1, 0) == num_bytes


@compiled
def _fetch(block: Words, start: Any, stop: Any) -> Any:
    """Read what this rank adds next from the peers' processes; return whether it has all of that now."""
    itemsize, shift = block[ITEMSIZE], (block[_peer(block, block[ME]) + PART_OFFSET] + start) * block[ITEMSIZE]
    for peer in range(block[RANKS]):
        if peer != block[ME] and load_shared(block, _peer(block, peer) + PEER_SOURCE) < 0:
            target = block[FETCHED] + peer * block[PIECE_BYTES]
            if not _read(block, peer, shift, target, (stop - start) * itemsize):
                return False
    return True


@compiled
def _copy_result(block: Words, part: Any, start: Any, stop: Any, turn: Any) -> Any:
    """Copy a piece of another rank's part into this rank's tensor; return whether that has succeeded."""
    at, itemsize = _peer(block, part), block[ITEMSIZE]
    target, num_bytes = _own(block, part, start), (stop - start) * itemsize
    shift, source = (block[at + PART_OFFSET] + start) * itemsize, load_shared(block, at + PEER_SOURCE)
    if source < 0:
        return _read(block, part, shift, target, num_bytes)
    if source != 0:
        source += shift
    else:
        source = load_shared(block, at + PEER_STAGE) + block[RESULTS_AT] + turn % 2 * block[PIECE_BYTES]
    _stream(target, block[at + MEMORY] + source, num_bytes)
    return True


@compiled
def _stage(block: Words, turn: Any) -> None:
    """Copy this rank's pieces of a round, which the other ranks reduce, to where they can read them."""
    ranks, me, stage = block[RANKS], block[ME], block[_peer(block, block[ME]) + MEMORY] + block[STAGE]
    for part in range(ranks):
        if part != me:
            start, stop = _piece(block, part, turn)
            target = stage + (turn % 2 * ranks + part) * block[PIECE_BYTES]
            copy_bytes(target, _own(block, part, start), (stop - start) * block[ITEMSIZE])
    block[STAGED] = turn + 1
    store(block[ENTRY] + E_STAGED, turn + 1)


@compiled
def _move_pieces(block: Words) -> Any:
    """Carry out the steps that are possible now, each at most once; return whether there were any."""
    ranks, me, entry, itemsize = block[RANKS], block[ME], block[ENTRY], block[ITEMSIZE]
    memory = block[_peer(block, me) + MEMORY]
    is_staged, adds, gathers = block[SOURCE] == 0, block[ADDS] != 0, block[GATHERS] != 0
    moved = False
    turn = block[STAGED]
    # A set of pieces serves every second round: all peers have read those of two rounds before.
    if adds and is_staged and turn < block[ROUNDS] and turn < _least(block, E_REDUCED) + 2:
        _stage(block, turn)
        moved = True
    turn = block[REDUCED]
    has_room = not (is_staged and gathers) or turn < _least(block, E_COPIED) + 2
    if turn < block[ROUNDS] and has_room and (not adds or turn < _least_staged(block)):
        start, stop = _piece(block, me, turn)
        if adds:
            if not _fetch(block, start, stop):
                return moved
            _reduce(block, me, start, stop, turn)
            if not _holds(block):
                return moved
        if is_staged and gathers:
            target = memory + block[STAGE] + block[RESULTS_AT] + turn % 2 * block[PIECE_BYTES]
            copy_bytes(target, _own(block, me, start), (stop - start) * itemsize)
        block[REDUCED] = turn + 1
        store(entry + E_REDUCED, turn + 1)
        moved = True
    turn = load_shared(block, COPIED)
    # Without gathering, this rank does not wait for the results of the others, which need the pieces that it stages: so
    # it must have staged them.
    may_copy = turn < _least(block, E_REDUCED) if gathers else not is_staged or turn < block[STAGED]
    if turn < block[REDUCED] and may_copy:
        for part in range(ranks):
            if gathers and part != me:
                start, stop = _piece(block, part, turn)
                if not _copy_result(block, part, start, stop, turn):
                    return moved
        if gathers and not _holds(block):
            return moved
        store_shared(block, COPIED, turn + 1)
        store(entry + E_COPIED, turn + 1)
        moved = True
    return moved


@compiled
def _seen(block: Words) -> Any:
    """Return a number that changes when a peer announces the operation, or a counter of a peer's entry changes."""
    total = int64(0)
    for peer in range(block[RANKS]):
        if peer == block[ME]:
            continue
        at = _peer(block, peer)
        entry = load_shared(block, at + PEER_ENTRY)
        if entry != 0:
            total += load(entry + E_STAGED) + load(entry + E_REDUCED) + load(entry + E_COPIED) + 1
            continue
        for probe in range(PROBES):
            entry = _probed(block, at, probe)
            if _is_there(block, entry):
                total += 1
    return total


@compiled
def _has_changed(block: Words) -> Any:
    """As ``exchange.HAS_CHANGED`` says."""
    return load_shared(block, ANNOUNCED) == 0 or _seen(block) != load_shared(block, SEEN)


@compiled
def _is_read(block: Words) -> Any:
    """As ``exchange.IS_READ`` says."""
    for peer in range(block[RANKS]):
        if peer != block[ME]:
            entry = load_shared(block, _peer(block, peer) + PEER_ENTRY)
            if entry != 0 and load(entry + E_COPIED) != block[ROUNDS] and _is_there(block, entry):
                return False
    return True


@compiled
def _has_ended(block: Words, peer: Any) -> Any:
    """As ``exchange.HAS_ENDED`` says."""
    at = _peer(block, peer)
    if load_shared(block, ANNOUNCED) == 0:
        return False  # the words of the peer may be those of the operation before
    entry = load_shared(block, at + PEER_ENTRY)
    if entry == 0 or load(entry + E_FAILED) == _operation(block):
        return False
    if load_shared(block, at + PEER_SOURCE) < 0 and load_shared(block, COPIED) != block[ROUNDS]:
        return False  # its memory ends with its process
    return load(entry + E_COPIED) == block[ROUNDS] or not _is_there(block, entry)


@compiled
def _withdraw(block: Words) -> None:
    """As ``exchange.WITHDRAW`` says."""
    if load_shared(block, ANNOUNCED) != 0:
        store(block[ENTRY] + E_OPERATION, 0)


@compiled
def _mark_failed(block: Words, iteration: Any, entry: Any) -> None:
    """As ``exchange.MARK_FAILED`` says."""
    store(entry + E_FAILED, _number(block, iteration))
    fence()


@compiled
def _now(block: Words) -> Any:
    """Return the time in nanoseconds."""
    read_clock(CLOCK_MONOTONIC, block[SELF] + 8 * SECONDS)
    return block[SECONDS] * 1_000_000_000 + block[NANOSECONDS]


@compiled
def _advance(block: Words) -> Any:
    """As ``exchange.ADVANCE`` says."""
    block[WAKE] = 0
    if load_shared(block, ANNOUNCED) == 0:
        _announce(block)
    ranks, looks, turns = block[RANKS], 0, block[TURNS]
    waits_since = int64(0)
    store_shared(block, SEEN, -1)
    while True:
        seen = _seen(block)
        moved = False
        found = load_shared(block, FOUND)
        if found < ranks - 1:
            status = _look(block)
            if status != PENDING:
                return status
            moved = load_shared(block, FOUND) > found
        if load_shared(block, FOUND) == ranks - 1:
            if block[IS_WHOLE] != 0:
                if load_shared(block, COPIED) != block[ROUNDS]:  # else it was done when this function was called last
                    _compute_all(block)
                    if not _holds(block):
                        store_shared(block, SEEN, seen)
                        return PENDING
                    store_shared(block, COPIED, block[ROUNDS])
                    store(block[ENTRY] + E_COPIED, block[ROUNDS])
                return DONE
            if turns <= 0:
                return PENDING
            if _move_pieces(block):
                moved = True
                turns -= 1
                _wake(block)
            copied = load_shared(block, COPIED)
            if copied == block[ROUNDS] and (block[SOURCE] == 0 or _least(block, E_COPIED) == block[ROUNDS]):
                return DONE
        if moved:
            looks, waits_since = 0, int64(0)
            continue
        store_shared(block, SEEN, seen)
        if block[WAKE] != 0:
            return PENDING
        if looks < block[SPINS]:
            looks += 1
            pause()
            continue
        if block[SPINS] != 0 or block[YIELD_NS] == 0:
            return PENDING
        now = _now(block)
        if waits_since == 0:
            waits_since = now
        elif now - waits_since > block[YIELD_NS]:
            return PENDING
        yield_core()  # this may take as long as the other processes of the core want


@compiled
def _restart(block: Words, iteration: Any, entry: Any) -> Any:
    """As ``exchange.RESTART`` says."""
    store_shared(block, ANNOUNCED, 0)  # where other threads can look, ``FastLane.repeat`` has done it under the lock
    block[ITERATION], block[ENTRY], block[STAGED], block[REDUCED] = iteration, entry, 0, 0
    store_shared(block, FOUND, 0)
    store_shared(block, COPIED, 0)
    for peer in range(block[RANKS]):
        store_shared(block, _peer(block, peer) + PEER_ENTRY, 0)
    return _advance(block)


def _exchange(what: Any, address: Any, first: Any, second: Any) -> Any:
    block = int64_at(address)
    if what in (ADVANCE, RESTART):
        # Several ranks compute the same sums, each in a thread whose mode may be another one.
        mode = use_default_mode()
        status = _advance(block) if what == ADVANCE else _restart(block, first, second)
        restore_mode(mode)
        return status
    if what == LOOK:
        return _look(block)
    if what == HAS_CHANGED:
        return int64(_has_changed(block))
    if what == HAS_ENDED:
        return int64(_has_ended(block, first))
    if what == IS_READ:
        return int64(_is_read(block))
    if what == WITHDRAW:
        _withdraw(block)
    elif what == MARK_FAILED:
        _mark_failed(block, first, second)
    return int64(0)


def assembly() -> tuple[str, str]:
    """Compile; return the assembly of LLVM and the name of the function ``exchange.Exchange`` therein."""
    compiled = cfunc(int64(*[int64] * NUM_ARGUMENTS), error_model="numpy", _nrt=False)(_exchange)
    return compiled.inspect_llvm(), compiled.native_name
