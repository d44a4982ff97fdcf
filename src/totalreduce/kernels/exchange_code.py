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
    yield_core,
)
from totalreduce.kernels.elements import average, combine, compiled, is_half, round_off, widen
from totalreduce.kernels.exchange import (
    ADVANCE,
    ASLEEP,
    CONFLICT,
    COUNTED,
    DONE,
    ENTRY,
    ENTRY_BYTES,
    HAS_CHANGED,
    HAS_ENDED,
    HEAD,
    IS_READ,
    ITERATION_FACTOR,
    LOOK,
    MARK_FAILED,
    NUM_ARGUMENTS,
    ORDER,
    PEER,
    PENDING,
    PROBES,
    RESTART,
    VIOLATION,
    WITHDRAW,
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
    return int64(HEAD.num_words + block[HEAD.ranks] * block[HEAD.ranks] + peer * PEER.num_words)


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
    if block[HEAD.is_cut] == 0:
        return int64(0), int64(block[_peer(block, part) + PEER.part_count])
    first, last = _range(block[HEAD.count], block[HEAD.lanes], lane)
    start, stop = _range(last - first, block[HEAD.ranks], part)
    return first + start, first + stop


@compiled
def _own(block: Words, part: Any, start: Any) -> Any:
    """Return the address of the elements of a part from ``start`` on in this rank's tensor."""
    return int64(block[HEAD.tensor] + block[_peer(block, part) + PEER.part_at] + start * block[HEAD.itemsize])


@compiled
def _result(block: Words, part: Any, start: Any) -> Any:
    """Return the address at which this rank writes the results of a part from ``start`` on."""
    if block[HEAD.result] == 0:
        return _own(block, part, start)
    return int64(block[HEAD.result] + start * block[HEAD.itemsize])


@compiled
def _readable(block: Words, peer: Any) -> Any:
    """Return the number of elements that a peer makes readable."""
    return block[HEAD.count] if block[HEAD.adds] != 0 else int64(block[_peer(block, peer) + PEER.part_count])


@compiled
def _number(block: Words, iteration: Any) -> Any:
    """Return the number by which an operation of the key is announced: one for its key and its iteration, never 0.

    Operations of one key have different numbers, because the factor is odd. Keys are hashes of 64 bits.
    """
    number = block[HEAD.key] ^ (iteration * ITERATION_FACTOR)
    return number if number != 0 else int64(1)


@compiled
def _operation(block: Words) -> Any:
    """Return the number by which the operation is announced."""
    return _number(block, block[HEAD.iteration])


@compiled
def _is_there(block: Words, entry: Any) -> Any:
    """Return whether an entry announces the operation.

    If an entry that was found does so no more, its rank uses it for a later operation, so all ranks have ended this
    one. (A rank that takes an announcement back knows that one rank was missing, so no rank has begun.)
    """
    return load(entry + ENTRY.operation) == _operation(block)


@compiled
def _probed(block: Words, at: Any, probe: Any) -> Any:
    """Return the address of an entry in which the peer whose words begin ``at`` may have announced the operation."""
    number = (block[HEAD.home] + probe) % block[HEAD.entries]
    return int64(block[at + PEER.memory] + block[HEAD.board_at] + number * ENTRY_BYTES)


@compiled
def _look(block: Words) -> Any:
    """As ``exchange.LOOK`` says."""
    if load_shared(block, HEAD.announced) == 0:
        return PENDING
    for peer in range(block[HEAD.ranks]):
        at = _peer(block, peer)
        if peer == block[HEAD.me] or load_shared(block, at + PEER.entry) != 0:
            continue
        for probe in range(PROBES):
            entry = _probed(block, at, probe)
            if not _is_there(block, entry):
                continue
            if load(entry + ENTRY.signature) != block[HEAD.signature]:
                return CONFLICT
            source, stage = load(entry + ENTRY.source), load(entry + ENTRY.stage)
            is_in_pieces = block[HEAD.is_whole] == 0
            if _readable(block, peer) == 0:
                valid = True
            elif is_in_pieces and source < 0:  # of an address that it cannot read, the system tells this rank
                valid = block[at + PEER.process] != 0
            elif is_in_pieces and source != 0:
                # Divided and not multiplied: no number of a peer may overflow.
                itemsize, length = block[HEAD.itemsize], block[at + PEER.length]
                valid = source % itemsize == 0 and block[HEAD.stages_end] <= source <= length
                valid = valid and _readable(block, peer) <= (length - source) // itemsize
            else:
                length = block[HEAD.stage_bytes] if is_in_pieces else _readable(block, peer) * block[HEAD.itemsize]
                valid = block[HEAD.stages_at] <= stage <= block[HEAD.stages_end] - length and stage % 64 == 0
            if not valid:
                store_shared(block, HEAD.culprit, peer)
                return VIOLATION
            store_shared(block, at + PEER.source, source)
            store_shared(block, at + PEER.stage, stage)
            store_shared(block, at + PEER.entry, entry)
            break
    # Another thread, for which the engine asks, may look at the same time. So they are counted and not added up, and a
    # thread that has counted fewer leaves the greater number.
    found = int64(0)
    for peer in range(block[HEAD.ranks]):
        if load_shared(block, _peer(block, peer) + PEER.entry) != 0:
            found += 1
    if found > load_shared(block, HEAD.found):
        raise_shared(block, HEAD.found, found)
    return PENDING


@compiled
def _least(block: Words, counter: Any) -> Any:
    """Return the smallest value of a counter of the peers' entries."""
    least = block[HEAD.rounds]
    for peer in range(block[HEAD.ranks]):
        if peer != block[HEAD.me]:
            entry = load_shared(block, _peer(block, peer) + PEER.entry)
            rounds = load(entry + counter)
            if rounds < least and _is_there(block, entry):  # looked at afterwards: the counter is the operation's
                least = rounds
    return least


@compiled
def _least_staged(block: Words) -> Any:
    """Return the number of rounds for which all peers' pieces can be read."""
    least = block[HEAD.rounds]
    for peer in range(block[HEAD.ranks]):
        at = _peer(block, peer)
        if peer != block[HEAD.me] and load_shared(block, at + PEER.source) == 0:
            least = min(least, load(load_shared(block, at + PEER.entry) + ENTRY.staged))
    return least


@compiled
def _wake(block: Words) -> None:
    """Note which peers sleep, after something was written that they may wait for."""
    fence()
    for peer in range(block[HEAD.ranks]):
        if peer != block[HEAD.me] and load(block[_peer(block, peer) + PEER.sleep]) & ASLEEP:
            block[HEAD.wake] |= int64(1) << peer


@compiled
def _announce(block: Words) -> None:
    entry = block[HEAD.entry]
    store(entry + ENTRY.operation, 0)
    store(entry + ENTRY.staged, 0)
    store(entry + ENTRY.reduced, 0)
    store(entry + ENTRY.copied, 0)
    store(entry + ENTRY.signature, block[HEAD.signature])
    store(entry + ENTRY.source, block[HEAD.source])
    store(entry + ENTRY.stage, block[HEAD.stage])
    if block[HEAD.is_whole] != 0:
        _publish(block, block[_peer(block, block[HEAD.me]) + PEER.memory] + block[HEAD.stage])
    elif block[HEAD.rounds] == 1 and block[HEAD.adds] != 0 and block[HEAD.source] == 0:
        _stage(block, 0)  # so that the others need not wait for it
    store(entry + ENTRY.operation, _operation(block))
    store_shared(block, HEAD.announced, 1)
    _wake(block)


@compiled
def _publish(block: Words, target: Any) -> None:
    """Copy what the other ranks read of this rank's tensor."""
    me, itemsize = block[HEAD.me], block[HEAD.itemsize]
    if block[HEAD.adds] == 0:
        copy_bytes(target, _own(block, me, 0), block[_peer(block, me) + PEER.part_count] * itemsize)
    elif block[HEAD.is_cut] != 0:
        copy_bytes(target, block[HEAD.tensor], block[HEAD.count] * itemsize)
    else:
        for part in range(block[HEAD.ranks]):
            at = _peer(block, part)
            shift, count = block[at + PEER.part_offset] * itemsize, block[at + PEER.part_count]
            copy_bytes(target + shift, _own(block, part, 0), count * itemsize)


@compiled
def _contribution(block: Words, peer: Any, part: Any, start: Any, turn: Any) -> Any:
    """Return the address of a peer's elements from ``start`` on, which lie in a piece of ``part`` in round ``turn``."""
    at = _peer(block, peer)
    if peer == block[HEAD.me]:
        return _own(block, part, start)
    memory, offset = block[at + PEER.memory], block[_peer(block, part) + PEER.part_offset]
    shift = (offset + start) * block[HEAD.itemsize]
    source, stage = load_shared(block, at + PEER.source), load_shared(block, at + PEER.stage)
    if block[HEAD.is_whole] != 0:
        return int64(memory + stage + shift)
    if source < 0:
        return int64(block[HEAD.fetched] + peer * block[HEAD.piece_bytes])
    if source != 0:
        return int64(memory + source + shift)
    piece = turn % 2 * block[HEAD.ranks] + part
    return int64(memory + stage + piece * block[HEAD.piece_bytes])


@compiled
def _reduce(block: Words, part: Any, start: Any, stop: Any, turn: Any) -> None:
    """Reduce elements of one piece of a part into this rank's result, in the order of the part."""
    ranks, itemsize, kind = block[HEAD.ranks], block[HEAD.itemsize], block[HEAD.kind]
    result = _result(block, part, start)
    if ranks == 2 and block[HEAD.result] == 0 and not is_half(kind):  # two contributions have one sum in either order
        other = _contribution(block, 1 - block[HEAD.me], part, start, turn)
        combine(kind, block[HEAD.reduction], result, other, stop - start)
        average(kind, block[HEAD.divisor], result, stop - start)
        return
    order, done = ORDER + part * ranks, 0
    while start + done < stop:
        # Not in the tensor: this rank's contribution, which may come late in the order, lies there.
        count, shift = min(COUNTED, stop - start - done), done * itemsize
        first = _contribution(block, block[order], part, start, turn) + shift
        if is_half(kind):
            widen(kind, block[HEAD.sums], first, count)
        else:
            copy_bytes(block[HEAD.sums], first, count * itemsize)
        for position in range(1, ranks):
            other = _contribution(block, block[order + position], part, start, turn) + shift
            combine(kind, block[HEAD.reduction], block[HEAD.sums], other, count)
        average(kind, block[HEAD.divisor], block[HEAD.sums], count)
        if is_half(kind):
            round_off(kind, result + shift, block[HEAD.sums], count)
        else:
            copy_bytes(result + shift, block[HEAD.sums], count * itemsize)
        done += count


@compiled
def _compute_all(block: Words) -> None:
    """Compute all parts that this rank gets of a small tensor: it is readable on every peer as a whole."""
    for lane in range(block[HEAD.lanes]):
        for part in range(block[HEAD.ranks]):
            start, stop = _part(block, lane, part)
            if block[HEAD.adds] == 0:
                if part != block[HEAD.me]:
                    source = _contribution(block, part, part, start, 0)
                    copy_bytes(_own(block, part, start), source, (stop - start) * block[HEAD.itemsize])
            elif block[HEAD.gathers] != 0 or part == block[HEAD.me]:
                _reduce(block, part, start, stop, 0)


@compiled
def _piece(block: Words, part: Any, turn: Any) -> Any:
    """Return the elements of a part that are its piece in a round (see ``_part``)."""
    lane, number = turn // block[HEAD.lane_rounds], turn % block[HEAD.lane_rounds]
    start, stop = _part(block, lane, part)
    begin = min(stop, start + number * block[HEAD.piece])
    return begin, min(stop, begin + block[HEAD.piece])


@compiled
def _holds(block: Words) -> Any:
    """Return whether what was just read of the peers' tensors is what they announced, and not a later change of it.

    A rank whose operation fails marks that in its entry before its program goes on (``MARK_FAILED``). Its thread that
    moves messages may then still be staging the tensor, or adding it, which the program changes meanwhile.
    """
    fence()  # the marks are looked at after the tensors
    for peer in range(block[HEAD.ranks]):
        if peer != block[HEAD.me]:
            entry = load_shared(block, _peer(block, peer) + PEER.entry)
            if load(entry + ENTRY.failed) == _operation(block):
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
    block[HEAD.here], block[HEAD.here_bytes] = target, num_bytes
    block[HEAD.there], block[HEAD.there_bytes] = shift - load_shared(block, at + PEER.source), num_bytes
    here, there = block[HEAD.address] + 8 * HEAD.here, block[HEAD.address] + 8 * HEAD.there
    return read_process(block[at + PEER.process], here, 1, there, 1, 0) == num_bytes


@compiled
def _fetch(block: Words, start: Any, stop: Any) -> Any:
    """Read what this rank adds next from the peers' processes; return whether it has all of that now."""
    itemsize, offset = block[HEAD.itemsize], block[_peer(block, block[HEAD.me]) + PEER.part_offset]
    shift = (offset + start) * itemsize
    for peer in range(block[HEAD.ranks]):
        if peer != block[HEAD.me] and load_shared(block, _peer(block, peer) + PEER.source) < 0:
            target = block[HEAD.fetched] + peer * block[HEAD.piece_bytes]
            if not _read(block, peer, shift, target, (stop - start) * itemsize):
                return False
    return True


@compiled
def _copy_result(block: Words, part: Any, start: Any, stop: Any, turn: Any) -> Any:
    """Copy a piece of another rank's part into this rank's tensor; return whether that has succeeded."""
    at, itemsize = _peer(block, part), block[HEAD.itemsize]
    target, num_bytes = _own(block, part, start), (stop - start) * itemsize
    shift, source = (block[at + PEER.part_offset] + start) * itemsize, load_shared(block, at + PEER.source)
    if source < 0:
        return _read(block, part, shift, target, num_bytes)
    if source != 0:
        source += shift
    else:
        source = load_shared(block, at + PEER.stage) + block[HEAD.results_at] + turn % 2 * block[HEAD.piece_bytes]
    _stream(target, block[at + PEER.memory] + source, num_bytes)
    return True


@compiled
def _stage(block: Words, turn: Any) -> None:
    """Copy this rank's pieces of a round, which the other ranks reduce, to where they can read them."""
    ranks, me = block[HEAD.ranks], block[HEAD.me]
    stage = block[_peer(block, me) + PEER.memory] + block[HEAD.stage]
    for part in range(ranks):
        if part != me:
            start, stop = _piece(block, part, turn)
            target = stage + (turn % 2 * ranks + part) * block[HEAD.piece_bytes]
            copy_bytes(target, _own(block, part, start), (stop - start) * block[HEAD.itemsize])
    block[HEAD.staged] = turn + 1
    store(block[HEAD.entry] + ENTRY.staged, turn + 1)


@compiled
def _move_pieces(block: Words) -> Any:
    """Carry out the steps that are possible now, each at most once; return whether there were any."""
    ranks, me, entry, itemsize = block[HEAD.ranks], block[HEAD.me], block[HEAD.entry], block[HEAD.itemsize]
    memory = block[_peer(block, me) + PEER.memory]
    is_staged, adds, gathers = block[HEAD.source] == 0, block[HEAD.adds] != 0, block[HEAD.gathers] != 0
    moved = False
    turn = block[HEAD.staged]
    # A set of pieces serves every second round: all peers have read those of two rounds before.
    if adds and is_staged and turn < block[HEAD.rounds] and turn < _least(block, ENTRY.reduced) + 2:
        _stage(block, turn)
        moved = True
    turn = block[HEAD.reduced]
    has_room = not (is_staged and gathers) or turn < _least(block, ENTRY.copied) + 2
    if turn < block[HEAD.rounds] and has_room and (not adds or turn < _least_staged(block)):
        start, stop = _piece(block, me, turn)
        if adds:
            if not _fetch(block, start, stop):
                return moved
            _reduce(block, me, start, stop, turn)
            if not _holds(block):
                return moved
        if is_staged and gathers:
            target = memory + block[HEAD.stage] + block[HEAD.results_at] + turn % 2 * block[HEAD.piece_bytes]
            copy_bytes(target, _own(block, me, start), (stop - start) * itemsize)
        block[HEAD.reduced] = turn + 1
        store(entry + ENTRY.reduced, turn + 1)
        moved = True
    turn = load_shared(block, HEAD.copied)
    # Without gathering, this rank does not wait for the results of the others, which need the pieces that it stages: so
    # it must have staged them.
    may_copy = turn < _least(block, ENTRY.reduced) if gathers else not is_staged or turn < block[HEAD.staged]
    if turn < block[HEAD.reduced] and may_copy:
        for part in range(ranks):
            if gathers and part != me:
                start, stop = _piece(block, part, turn)
                if not _copy_result(block, part, start, stop, turn):
                    return moved
        if gathers and not _holds(block):
            return moved
        store_shared(block, HEAD.copied, turn + 1)
        store(entry + ENTRY.copied, turn + 1)
        moved = True
    return moved


@compiled
def _seen(block: Words) -> Any:
    """Return a number that changes when a peer announces the operation, or a counter of a peer's entry changes."""
    total = int64(0)
    for peer in range(block[HEAD.ranks]):
        if peer == block[HEAD.me]:
            continue
        at = _peer(block, peer)
        entry = load_shared(block, at + PEER.entry)
        if entry != 0:
            total += load(entry + ENTRY.staged) + load(entry + ENTRY.reduced) + load(entry + ENTRY.copied) + 1
            continue
        for probe in range(PROBES):
            entry = _probed(block, at, probe)
            if _is_there(block, entry):
                total += 1
    return total


@compiled
def _has_changed(block: Words) -> Any:
    """As ``exchange.HAS_CHANGED`` says."""
    return load_shared(block, HEAD.announced) == 0 or _seen(block) != load_shared(block, HEAD.seen)


@compiled
def _is_read(block: Words) -> Any:
    """As ``exchange.IS_READ`` says."""
    for peer in range(block[HEAD.ranks]):
        if peer != block[HEAD.me]:
            entry = load_shared(block, _peer(block, peer) + PEER.entry)
            if entry != 0 and load(entry + ENTRY.copied) != block[HEAD.rounds] and _is_there(block, entry):
                return False
    return True


@compiled
def _has_ended(block: Words, peer: Any) -> Any:
    """As ``exchange.HAS_ENDED`` says."""
    at = _peer(block, peer)
    if load_shared(block, HEAD.announced) == 0:
        return False  # the words of the peer may be those of the operation before
    entry = load_shared(block, at + PEER.entry)
    if entry == 0 or load(entry + ENTRY.failed) == _operation(block):
        return False
    if load_shared(block, at + PEER.source) < 0 and load_shared(block, HEAD.copied) != block[HEAD.rounds]:
        return False  # its memory ends with its process
    return load(entry + ENTRY.copied) == block[HEAD.rounds] or not _is_there(block, entry)


@compiled
def _withdraw(block: Words) -> None:
    """As ``exchange.WITHDRAW`` says."""
    if load_shared(block, HEAD.announced) != 0:
        store(block[HEAD.entry] + ENTRY.operation, 0)


@compiled
def _mark_failed(block: Words, iteration: Any, entry: Any) -> None:
    """As ``exchange.MARK_FAILED`` says."""
    store(entry + ENTRY.failed, _number(block, iteration))
    fence()


@compiled
def _now(block: Words) -> Any:
    """Return the time in nanoseconds."""
    read_clock(CLOCK_MONOTONIC, block[HEAD.address] + 8 * HEAD.seconds)
    return block[HEAD.seconds] * 1_000_000_000 + block[HEAD.nanoseconds]


@compiled
def _advance(block: Words) -> Any:
    """As ``exchange.ADVANCE`` says."""
    block[HEAD.wake] = 0
    if load_shared(block, HEAD.announced) == 0:
        _announce(block)
    ranks, looks, turns = block[HEAD.ranks], 0, block[HEAD.turns]
    waits_since = int64(0)
    store_shared(block, HEAD.seen, -1)
    while True:
        seen = _seen(block)
        moved = False
        found = load_shared(block, HEAD.found)
        if found < ranks - 1:
            status = _look(block)
            if status != PENDING:
                return status
            moved = load_shared(block, HEAD.found) > found
        if load_shared(block, HEAD.found) == ranks - 1:
            if block[HEAD.is_whole] != 0:
                # Otherwise it was done when this function was called last.
                if load_shared(block, HEAD.copied) != block[HEAD.rounds]:
                    _compute_all(block)
                    if not _holds(block):
                        store_shared(block, HEAD.seen, seen)
                        return PENDING
                    store_shared(block, HEAD.copied, block[HEAD.rounds])
                    store(block[HEAD.entry] + ENTRY.copied, block[HEAD.rounds])
                return DONE
            if turns <= 0:
                return PENDING
            if _move_pieces(block):
                moved = True
                turns -= 1
                _wake(block)
            copied, rounds = load_shared(block, HEAD.copied), block[HEAD.rounds]
            if copied == rounds and (block[HEAD.source] == 0 or _least(block, ENTRY.copied) == rounds):
                return DONE
        if moved:
            looks, waits_since = 0, int64(0)
            continue
        store_shared(block, HEAD.seen, seen)
        if block[HEAD.wake] != 0:
            return PENDING
        if looks < block[HEAD.spins]:
            looks += 1
            pause()
            continue
        if block[HEAD.spins] != 0 or block[HEAD.yield_ns] == 0:
            return PENDING
        now = _now(block)
        if waits_since == 0:
            waits_since = now
        elif now - waits_since > block[HEAD.yield_ns]:
            return PENDING
        yield_core()  # this may take as long as the other processes of the core want


@compiled
def _restart(block: Words, iteration: Any, entry: Any) -> Any:
    """As ``exchange.RESTART`` says."""
    # Where other threads can look, ``FastLane.repeat`` has done it under the lock.
    store_shared(block, HEAD.announced, 0)
    block[HEAD.iteration], block[HEAD.entry], block[HEAD.staged], block[HEAD.reduced] = iteration, entry, 0, 0
    store_shared(block, HEAD.found, 0)
    store_shared(block, HEAD.copied, 0)
    for peer in range(block[HEAD.ranks]):
        store_shared(block, _peer(block, peer) + PEER.entry, 0)
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
