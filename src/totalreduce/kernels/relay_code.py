"""The code of the relay, which Numba compiles. See ``relay`` for what it does, and for the words.

Only the process that compiles the code imports this module, because it imports Numba (``machine_code``). The functions
raise no exception: nothing could catch one. Addresses and counts are integers of 64 bits.
"""

from __future__ import annotations

import errno
import select
import socket
from time import CLOCK_MONOTONIC
from typing import Any, Final

from numba import cfunc, int64

from totalreduce.foundation.header import HEADER_BYTES, Flag
from totalreduce.kernels import relay as w
from totalreduce.kernels.atomics import (
    copy_bytes,
    error_number_at,
    int32_at,
    int64_at,
    load_shared,
    move_bytes,
    poll,
    read_clock,
    receive,
    send_message,
    set_option,
    store_shared,
    uint8_at,
    wait_for_events,
)
from totalreduce.kernels.element_types import FLOAT32
from totalreduce.kernels.elements import average, combine, compiled, is_half, round_off, widen
from totalreduce.kernels.relay import HEAD, LINE, OPERATION, PEER, ROW, TRACK

__all__ = ["assembly"]

#: A pointer to the words of a block.
Words = Any

_BEAT: Final = ord("+")
#: How much may be received from a connection, and moved by all, before others get their turn.
_QUANTUM_BYTES: Final = 256 << 10
#: For how long messages are moved without a pause although the time to wait is over.
_LONGEST_NS: Final = 20_000_000
#: ``SO_RCVLOWAT`` while a body arrives, as in ``transports.connection``.
_WAKE_BYTES: Final = 1 << 20
_WAKE_BYTES_MIN: Final = 32 << 10
_NO_LIMIT: Final = 1 << 30
_ENDS: Final = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_POLL_OUT: Final = select.POLLOUT
_SOCKET: Final = socket.SOL_SOCKET
_TCP: Final = socket.IPPROTO_TCP
_LOW_WATER_MARK: Final = socket.SO_RCVLOWAT
_UNSENT_LIMIT: Final = 25  # TCP_NOTSENT_LOWAT
_NOT_BLOCKING: Final = socket.MSG_DONTWAIT
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL
_AGAIN: Final = errno.EAGAIN
_INTERRUPTED: Final = errno.EINTR
_EAGER: Final = Flag.EAGER
_URGENT: Final = Flag.URGENT
#: Greater than every word of an order.
_LAST: Final = 1 << 62


_next_row = compiled(w.next_row)


@compiled
def _now(block: Words) -> Any:
    read_clock(CLOCK_MONOTONIC, block[HEAD.address] + 8 * HEAD.seconds)
    return block[HEAD.seconds] * 1_000_000_000 + block[HEAD.nanoseconds]


@compiled
def _track(number: Any) -> Any:
    return int64(w.TRACKS_AT + number * TRACK.num_words)


@compiled
def _operation(block: Words, track: Any) -> Any:
    return int64(w.OPERATIONS_AT + block[track + TRACK.operation] * OPERATION.num_words)


@compiled
def _row(block: Words, track: Any, index: Any) -> Any:
    """Return a pointer to the words of a row of a track."""
    return int64_at(block[track + TRACK.rows] + 8 * ROW.num_words * index)


@compiled
def _peer(row: Words) -> Any:
    """Return the number of the first word of the peer of a row."""
    return row[ROW.peer] * PEER.num_words


@compiled
def _slot_of(block: Words, operation: Any, start: Any) -> Words:
    """Return a pointer to the number of the slot of the unfinished sum that has a byte of ``OF_SUMS``."""
    return int64_at(block[operation + OPERATION.slots] + 8 * (start // block[operation + OPERATION.slot_bytes]))


@compiled
def _address(block: Words, track: Any, buffer: Any, start: Any) -> Any:
    """Return the address of a byte of a buffer, or of an unfinished sum that has a slot."""
    operation = _operation(block, track)
    if buffer == w.OF_SUMS:
        length = block[operation + OPERATION.slot_bytes]
        slot = _slot_of(block, operation, start)[0]
        return int64(block[operation + OPERATION.memory] + slot * length + start % length)
    return int64(int64_at(block[operation + OPERATION.buffers])[buffer] + start)


@compiled
def _take_slot(block: Words, operation: Any) -> Any:
    """Return the number of the free slot that was used last, which is in the cache, and take it."""
    left = block[operation + OPERATION.num_free] - 1
    block[operation + OPERATION.num_free] = left
    block[operation + OPERATION.fewest_free] = min(left, block[operation + OPERATION.fewest_free])
    return int64_at(block[operation + OPERATION.free_slots])[left]


@compiled
def _free_slot(block: Words, operation: Any, number: Any) -> None:
    """Let another sum or body have a slot."""
    int64_at(block[operation + OPERATION.free_slots])[block[operation + OPERATION.num_free]] = number
    block[operation + OPERATION.num_free] += 1


@compiled
def _need_result(block: Words, operation: Any, row: Words) -> None:
    """Give the unfinished sum that a row writes a slot, if it has none."""
    if row[ROW.into] == w.OF_SUMS:
        slot = _slot_of(block, operation, row[ROW.into_start])
        if slot[0] < 0:
            slot[0] = _take_slot(block, operation)


@compiled
def _give_sum_back(block: Words, operation: Any, row: Words) -> None:
    """Give the slot back of the sum that nothing needs after a row."""
    if row[ROW.manner] & w.GIVES_BACK:
        slot = _slot_of(block, operation, row[ROW.into_start] if row[ROW.action] == w.SEND else row[ROW.start])
        _free_slot(block, operation, slot[0])
        slot[0] = -1


@compiled
def _next_of(block: Words, track: Any, index: Any, sends: Any) -> Any:
    """Return the first row of a track from ``index`` on that sends, or else that receives (``relay.next_row``)."""
    return _next_row(_row(block, track, 0), block[track + TRACK.length], index, sends)


@compiled
def _next_send(block: Words, track: Any, index: Any) -> Any:
    """Return the first row of a track from ``index`` on whose message has not left."""
    index = _next_of(block, track, index, True)
    if block[track + TRACK.states] != 0:
        states = int64_at(block[track + TRACK.states])
        while index < block[track + TRACK.length] and states[index] == w.CARRIED_OUT:
            index = _next_of(block, track, index + 1, True)
    return index


@compiled
def _note_end(block: Words, track: Any) -> None:
    """Count a track whose rows have all been carried out as ended."""
    length = block[track + TRACK.length]
    if block[track + TRACK.receives] == length and block[track + TRACK.sends] == length:
        operation = _operation(block, track)
        block[operation + OPERATION.tracks_left] -= 1
        if block[operation + OPERATION.tracks_left] == 0:
            block[HEAD.status] |= w.ENDED


# --------------------------------------------------------------------------------------------------------- receiving


@compiled
def _set_option(block: Words, descriptor: Any, level: Any, name: Any, number: Any) -> None:
    int32_at(block[HEAD.address] + 8 * HEAD.option)[0] = number
    set_option(descriptor, level, name, block[HEAD.address] + 8 * HEAD.option, 4)


@compiled
def _set_low_water_mark(block: Words, at: Any) -> None:
    """Tell the kernel how much must come before it reports the socket as readable."""
    if block[at + LINE.in_track] == w.NO_TRACK:
        wanted = HEADER_BYTES - block[at + LINE.in_got]
    else:
        left = block[at + LINE.in_left]
        wanted = min(left, _WAKE_BYTES) if left > _WAKE_BYTES_MIN else 1
    if block[at + LINE.low_water] != wanted:
        block[at + LINE.low_water] = wanted
        _set_option(block, block[at + LINE.fd], _SOCKET, _LOW_WATER_MARK, wanted)


@compiled
def _end(block: Words, at: Any, error: Any) -> None:
    """Note that a connection has ended."""
    block[at + LINE.failure] = error
    block[at + LINE.readable] = block[at + LINE.writable] = 0
    block[HEAD.status] |= w.FAILED


@compiled
def _receive(block: Words, at: Any, target: Any, num_bytes: Any) -> Any:
    """Receive at most so many bytes; return how many."""
    while True:
        count = receive(block[at + LINE.fd], target, num_bytes, _NOT_BLOCKING)
        if count > 0:
            block[at + LINE.bytes_in] += count
            if count < num_bytes and block[at + LINE.is_ending] == 0:
                block[at + LINE.readable] = 0  # the socket is empty
            return count
        if count == 0:
            _end(block, at, w.EOF)
            return int64(0)
        error = int32_at(error_number_at())[0]
        if error == _AGAIN:
            block[at + LINE.readable] = 0
            return int64(0)
        if error != _INTERRUPTED:
            _end(block, at, error)
            return int64(0)


@compiled
def _skip_beats(block: Words, at: Any) -> None:
    """Take heartbeats out of the beginning of a header."""
    header = block[HEAD.address] + 8 * (at + LINE.in_header)
    beats, got = int64(0), block[at + LINE.in_got]
    while beats < got and uint8_at(header)[beats] == _BEAT:
        beats += 1
    if beats:
        move_bytes(header, header + beats, got - beats)
        block[at + LINE.in_got] = got - beats


@compiled
def _iteration(block: Words, track: Any, index: Any) -> Any:
    """Return the third word of the header of the message of a row: the iteration, and the lane of the operation."""
    return int64(block[track + TRACK.iteration] + index * block[track + TRACK.per_row])


@compiled
def _is_signed(block: Words, track: Any, header: Any) -> Any:
    """Return whether a header has the signature of a track."""
    is_signed = True
    for word in range(w.SIGNATURE_WORDS):
        is_signed = is_signed and block[track + TRACK.signature + word] == block[header + 4 + word]
    return is_signed


@compiled
def _is_expected(block: Words, track: Any, index: Any, at: Any) -> Any:
    """Return whether the message of the header that has come by a connection is that of a row of a track."""
    header, row = at + LINE.in_header, _row(block, track, index)
    third = block[header + 3]
    if row[ROW.action] in (w.SEND, w.NOTHING) or row[ROW.step] != third & 0xFFFF:
        return False
    if row[ROW.length_bytes] != (third >> 32) & 0xFFFFFFFF or _iteration(block, track, index) != block[header + 2]:
        return False
    peers = int64_at(block[_operation(block, track) + OPERATION.peers])
    comes_by = peers[_peer(row) + PEER.comes_by]
    return at == w.LINES_AT + comes_by * LINE.num_words and _is_signed(block, track, header)


@compiled
def _expecting(block: Words, track: Any, at: Any) -> Any:
    """Return the row of a track that expects the message of a header; -1 if there is none."""
    index = block[track + TRACK.receives]
    if block[track + TRACK.states] == 0:
        return index if index < block[track + TRACK.length] and _is_expected(block, track, index, at) else int64(-1)
    while index < block[track + TRACK.length]:
        if int64_at(block[track + TRACK.states])[index] == w.OPEN and _is_expected(block, track, index, at):
            return index
        index += 1
    return int64(-1)


@compiled
def _find_track(block: Words, at: Any) -> Any:
    """Return the number of the track that expects the message of a header, and note the row; or ``NO_TRACK``."""
    header = at + LINE.in_header
    flags, num_bytes = (block[header + 3] >> 16) & 0xFF, (block[header + 3] >> 32) & 0xFFFFFFFF
    if block[header] != block[HEAD.prologue] or flags & ~(_EAGER | _URGENT) != 0:
        return int64(w.NO_TRACK)
    for number in range(block[HEAD.num_tracks]):
        track = _track(number)
        if block[track + TRACK.key] != block[header + 1] or block[track + TRACK.operation] < 0:
            continue
        if load_shared(block, _operation(block, track) + OPERATION.has_failed) != 0:
            continue
        index = _expecting(block, track, at)
        if index < 0:
            continue
        if flags & _URGENT:
            store_shared(block, _operation(block, track) + OPERATION.is_promoted, 1)
        if flags & _EAGER:
            block[at + LINE.eager_in] += 1
            block[at + LINE.eager_bytes_in] += num_bytes
        block[at + LINE.in_row] = index
        return int64(number)
    return int64(w.NO_TRACK)


@compiled
def _begin_body(block: Words, at: Any) -> None:
    """Find the place of the body of a header that has come, or leave the header to the interpreter."""
    number = _find_track(block, at)
    if number == w.NO_TRACK:
        block[at + LINE.in_refused] = 1
        block[at + LINE.may_read] = 0
        block[HEAD.status] |= w.REFUSED
        return
    track, index = _track(number), block[at + LINE.in_row]
    row, operation = _row(block, track, index), _operation(block, track)
    if block[track + TRACK.states] != 0:
        store_shared(int64_at(block[track + TRACK.states]), index, w.ARRIVING)
    block[at + LINE.in_track], block[at + LINE.in_early] = number, 0
    if index == block[track + TRACK.receives] or (row[ROW.action] == w.REPLACE and row[ROW.manner] & w.ANYTIME != 0):
        _need_result(block, operation, row)
        block[at + LINE.in_at] = _address(block, track, row[ROW.into], row[ROW.into_start])
        block[at + LINE.in_local] = _address(block, track, row[ROW.buffer], row[ROW.start])
    else:
        shift = _take_slot(block, operation) * block[operation + OPERATION.slot_bytes]
        block[at + LINE.in_at] = block[at + LINE.in_early] = block[operation + OPERATION.memory] + shift
    block[at + LINE.in_left], block[at + LINE.in_waiting] = row[ROW.length_bytes], 0
    if row[ROW.length_bytes] == 0:
        _end_body(block, at)


@compiled
def _end_row(block: Words, track: Any) -> None:
    """Go on behind the row that is the next one to receive, and whose message has been added or stored."""
    index = block[track + TRACK.receives]
    row = _row(block, track, index)
    if row[ROW.action] != w.REPLACE:
        _give_sum_back(block, _operation(block, track), row)
    store_shared(block, track + TRACK.receives, _next_of(block, track, index + 1, False))


@compiled
def _add_early(block: Words, track: Any, body: Any) -> None:
    """Add or store a body that has waited for its turn, and let another one have its memory."""
    row, operation = _row(block, track, block[track + TRACK.receives]), _operation(block, track)
    _need_result(block, operation, row)
    into = _address(block, track, row[ROW.into], row[ROW.into_start])
    if row[ROW.action] == w.REPLACE:
        copy_bytes(into, body, row[ROW.length_bytes])
    else:
        count = row[ROW.length_bytes] // _width(block, operation, row, w.WIDE_BODY)
        _combine(block, operation, row, into, _address(block, track, row[ROW.buffer], row[ROW.start]), body, count)
    place = body - block[operation + OPERATION.memory]
    if 0 <= place < block[operation + OPERATION.memory_bytes]:  # otherwise the interpreter has given it
        _free_slot(block, operation, place // block[operation + OPERATION.slot_bytes])


@compiled
def _go_on(block: Words, track: Any) -> None:
    """Carry out the next rows of a track with states, as far as their messages have come."""
    states, before = int64_at(block[track + TRACK.states]), block[track + TRACK.receives]
    while block[track + TRACK.receives] < block[track + TRACK.length]:
        index = block[track + TRACK.receives]
        if states[index] in (w.OPEN, w.ARRIVING):
            break
        if states[index] != w.CARRIED_OUT:
            _add_early(block, track, states[index])
            store_shared(states, index, w.CARRIED_OUT)
        _end_row(block, track)
    if block[track + TRACK.receives] != before:
        _note_reached(block, track)
        _note_end(block, track)


@compiled
def _note_reached(block: Words, track: Any) -> None:
    """Return to the interpreter if the next message that leaves is one of its own."""
    index = block[track + TRACK.sends]
    if block[track + TRACK.states] != 0 and index < block[track + TRACK.receives]:
        peers = int64_at(block[_operation(block, track) + OPERATION.peers])
        if load_shared(peers, _peer(_row(block, track, index)) + PEER.leaves_by) == w.BY_ENGINE:
            block[HEAD.status] |= w.REACHED


@compiled
def _use_given(block: Words) -> None:
    """Go on with the bodies that the interpreter has given to tracks."""
    block[HEAD.given] = 0
    for number in range(block[HEAD.num_tracks]):
        track = _track(number)
        if block[track + TRACK.operation] < 0 or block[track + TRACK.states] == 0:
            continue
        if load_shared(block, _operation(block, track) + OPERATION.has_failed) == 0:
            _go_on(block, track)


@compiled
def _end_body(block: Words, at: Any) -> None:
    """Go on with the track whose message has come."""
    number = block[at + LINE.in_track]
    block[at + LINE.in_track], block[at + LINE.in_got] = w.NO_TRACK, 0
    block[at + LINE.messages_in] += 1
    if number < 0:
        return
    track = _track(number)
    if block[track + TRACK.states] == 0:
        _end_row(block, track)
        _note_end(block, track)
    else:
        states, early = int64_at(block[track + TRACK.states]), block[at + LINE.in_early]
        store_shared(states, block[at + LINE.in_row], early if early != 0 else int64(w.CARRIED_OUT))
        _go_on(block, track)


@compiled
def _width(block: Words, operation: Any, row: Words, bit: Any) -> Any:
    """Return the length of the elements of which a bit of ``ROW.manner`` says whether they are float32."""
    return int64(4) if row[ROW.manner] & bit != 0 else block[operation + OPERATION.itemsize]


@compiled
def _combine(block: Words, operation: Any, row: Words, into: Any, local: Any, body: Any, elements: Any) -> None:
    """Combine elements of a message with those at ``local`` as a row says, and write the results to ``into``."""
    kind, reduction = block[operation + OPERATION.kind], block[operation + OPERATION.reduction]
    divisor = block[operation + OPERATION.divisor] if row[ROW.action] == w.COMBINE_LAST else int64(1)
    if not is_half(kind):
        if local != into:
            copy_bytes(into, local, elements * block[operation + OPERATION.itemsize])
        combine(kind, reduction, into, body, elements)
        average(kind, divisor, into, elements)
        return
    of_local, of_body = _width(block, operation, row, w.WIDE_LOCAL), _width(block, operation, row, w.WIDE_BODY)
    of_result, done = _width(block, operation, row, w.WIDE_RESULT), int64(0)
    while done < elements:
        count = min(w.SUMS_MAX, elements - done)
        own, other, result = local + done * of_local, body + done * of_body, into + done * of_result
        sums = result if of_result == 4 else block[HEAD.wide_sums]
        if of_local == 2:
            widen(kind, sums, own, count)
        elif own != sums:
            copy_bytes(sums, own, 4 * count)
        combine(FLOAT32 if of_body == 4 else kind, reduction, sums, other, count)
        average(FLOAT32, divisor, sums, count)
        if of_result == 2:
            round_off(kind, result, sums, count)
        done += count


@compiled
def _receive_body(block: Words, at: Any) -> Any:
    """Receive a part of a body, and add it to this rank's part where the row says so; return how many bytes came."""
    number, left, target = block[at + LINE.in_track], block[at + LINE.in_left], block[at + LINE.in_at]
    if number == w.DISCARDED:
        count = _receive(block, at, block[at + LINE.window], min(left, block[at + LINE.window_bytes]))
        block[at + LINE.in_left] = left - count
        return count
    track = _track(number)
    row = _row(block, track, block[at + LINE.in_row])
    if row[ROW.action] == w.REPLACE or block[at + LINE.in_early] != 0:
        count = _receive(block, at, target, left)
        block[at + LINE.in_at], block[at + LINE.in_left] = target + count, left - count
        return count
    # A part that stays in the cache until it is added.
    window, waiting = block[at + LINE.window], block[at + LINE.in_waiting]
    count = _receive(block, at, window + waiting, min(left, block[at + LINE.window_bytes] - waiting))
    operation, local, come = _operation(block, track), block[at + LINE.in_local], waiting + count
    itemsize = _width(block, operation, row, w.WIDE_BODY)
    elements = come // itemsize
    _combine(block, operation, row, target, local, window, elements)
    added = elements * itemsize
    copy_bytes(window, window + added, come - added)
    block[at + LINE.in_local] = local + elements * _width(block, operation, row, w.WIDE_LOCAL)
    block[at + LINE.in_at] = target + elements * _width(block, operation, row, w.WIDE_RESULT)
    block[at + LINE.in_waiting], block[at + LINE.in_left] = come - added, left - count
    return count


@compiled
def _read(block: Words, at: Any) -> Any:
    """Receive what has come by a connection; return how many bytes that were."""
    moved = int64(0)
    while block[at + LINE.readable] != 0 and block[at + LINE.may_read] != 0 and moved < _QUANTUM_BYTES:
        if block[at + LINE.in_track] != w.NO_TRACK:
            count = _receive_body(block, at)
            moved += count
            if block[at + LINE.in_left] == 0:
                _end_body(block, at)
            continue
        got = block[at + LINE.in_got]
        target = block[HEAD.address] + 8 * (at + LINE.in_header) + got
        count = _receive(block, at, target, HEADER_BYTES - got)
        moved += count
        block[at + LINE.in_got] = got + count
        _skip_beats(block, at)
        if block[at + LINE.in_got] == HEADER_BYTES:
            _begin_body(block, at)
    is_read = block[at + LINE.may_read] != 0 and block[at + LINE.failure] == 0
    if is_read and block[at + LINE.readable] == 0:
        _set_low_water_mark(block, at)
    return moved


# ----------------------------------------------------------------------------------------------------------- sending


@compiled
def _least_received(block: Words, operation: Any) -> Any:
    """Return the least position of the blocks of an operation that are being received; ``_LAST`` if there is none."""
    least = int64(_LAST)
    for number in range(block[HEAD.num_tracks]):
        track = _track(number)
        if block[track + TRACK.operation] == operation and block[track + TRACK.receives] < block[track + TRACK.length]:
            least = min(least, block[track + TRACK.receives])
    return least


@compiled
def _is_ready(block: Words, track: Any, connection: Any) -> Any:
    """Return whether the next message of a track can leave by a connection, whose number is given."""
    index, number = block[track + TRACK.sends], block[track + TRACK.operation]
    if number < 0 or index >= block[track + TRACK.receives]:
        return False  # after the last row that receives, ``RECEIVES`` is the number of rows
    operation = _operation(block, track)
    if load_shared(block, operation + OPERATION.has_failed) != 0:
        return False
    peers = int64_at(block[operation + OPERATION.peers])
    # Also where a message to another target could leave: so ranks send to one after the other, and not all to the same
    # one. Measured with bfloat16, 64 MiB, 8 hosts at 1 Gbit/s: 1,095 ms, and 1,220 to 1,330 in any order.
    if load_shared(peers, _peer(_row(block, track, index)) + PEER.leaves_by) != connection:
        return False
    ahead = block[operation + OPERATION.ahead]
    return ahead == 0 or index < _least_received(block, number) + ahead


@compiled
def _give_turn(block: Words, at: Any, old_sequence: Any) -> None:
    """Note that it is the rival's turn. ``old_sequence``: the age of the oldest message here that is ready."""
    block[at + LINE.rivals_turn_here] = 1
    is_oldest = block[at + LINE.rival_sequence] < old_sequence
    block[at + LINE.overtakes] = 0 if is_oldest else block[at + LINE.overtakes] + 1
    block[HEAD.status] |= w.RIVALS_TURN


@compiled
def _choose(block: Words, at: Any, connection: Any) -> Any:
    """Return the number of the track whose message leaves next; ``NO_TRACK``: none is ready, or it is the rival's turn.

    The most urgent message is the next one; after ``STARVATION_LIMIT`` messages the oldest one is. A message that the
    interpreter has (``LINE.rival``) takes part.
    """
    best, oldest = int64(w.NO_TRACK), int64(w.NO_TRACK)
    best_waits = best_priority = best_sequence = best_step = best_track = int64(_LAST)
    old_sequence = old_step = old_track = int64(_LAST)
    for number in range(block[HEAD.num_tracks]):
        track = _track(number)
        if not _is_ready(block, track, connection):
            continue
        operation = _operation(block, track)
        waits = 1 - load_shared(block, operation + OPERATION.is_promoted)
        priority, sequence = block[operation + OPERATION.priority], block[operation + OPERATION.sequence]
        step, index = _row(block, track, block[track + TRACK.sends])[ROW.step], block[track + TRACK.index]
        if (sequence, step, index) < (old_sequence, old_step, old_track):
            oldest, old_sequence, old_step, old_track = number, sequence, step, index
        order = (waits, priority, sequence, step, index)
        if order < (best_waits, best_priority, best_sequence, best_step, best_track):
            best, best_waits, best_priority, best_sequence, best_step, best_track = (number, *order)
    if best == w.NO_TRACK:
        if block[at + LINE.rival] != 0:
            _give_turn(block, at, old_sequence)
        return best
    if block[HEAD.is_fifo] != 0 or block[at + LINE.overtakes] >= block[HEAD.starvation_limit]:
        best, best_waits, best_priority, best_sequence = oldest, int64(-1), int64(0), old_sequence
    if block[at + LINE.rival] != 0:
        rival_waits = 1 - block[at + LINE.rival_is_promoted]
        rival_priority = block[at + LINE.rival_priority]
        if best_waits < 0:
            rival_waits, rival_priority = int64(-1), int64(0)
        rival = (rival_waits, rival_priority, block[at + LINE.rival_sequence])
        if rival < (best_waits, best_priority, best_sequence):
            _give_turn(block, at, old_sequence)
            return int64(w.NO_TRACK)
        if block[at + LINE.rival_sequence] < old_sequence:
            oldest = int64(w.NO_TRACK)
    block[at + LINE.overtakes] = 0 if best == oldest else block[at + LINE.overtakes] + 1
    return best


@compiled
def _load(block: Words, at: Any, number: Any) -> None:
    """Take the next message of a track as the one that is leaving."""
    track = _track(number)
    row, header = _row(block, track, block[track + TRACK.sends]), at + LINE.out_header
    is_promoted = load_shared(block, _operation(block, track) + OPERATION.is_promoted)
    flags = int64(_URGENT) if is_promoted != 0 else int64(0)
    block[header], block[header + 1] = block[HEAD.prologue], block[track + TRACK.key]
    block[header + 2] = _iteration(block, track, block[track + TRACK.sends])
    block[header + 3] = row[ROW.step] | (flags << 16) | (row[ROW.length_bytes] << 32)
    for word in range(w.SIGNATURE_WORDS):
        block[header + 4 + word] = block[track + TRACK.signature + word]
    block[header + 7] = block[track + TRACK.sent_priority]
    block[at + LINE.out_track], block[at + LINE.out_header_left] = number, HEADER_BYTES
    block[at + LINE.out_at] = _address(block, track, row[ROW.into], row[ROW.into_start])
    block[at + LINE.out_left] = row[ROW.length_bytes]


@compiled
def _send(block: Words, at: Any) -> Any:
    """Send bytes of the message that is leaving; return how many."""
    header_left, left = block[at + LINE.out_header_left], block[at + LINE.out_left]
    vectors, first = block[HEAD.address] + 8 * HEAD.vectors, int64(0)
    block[HEAD.vectors] = block[HEAD.address] + 8 * (at + LINE.out_header) + HEADER_BYTES - header_left
    block[HEAD.vectors + 1] = header_left
    block[HEAD.vectors + 2], block[HEAD.vectors + 3] = block[at + LINE.out_at], left
    if header_left == 0:
        first = int64(1)
    for word in range(7):
        block[HEAD.message + word] = 0
    block[HEAD.message + 2], block[HEAD.message + 3] = vectors + 16 * first, 2 - first
    is_long = header_left + left > block[at + LINE.long_bytes]
    if is_long:  # it goes into the socket as a whole (``transports.connection.UnsentLimit``)
        _set_option(block, block[at + LINE.fd], _TCP, _UNSENT_LIMIT, _NO_LIMIT)
    count = send_message(block[at + LINE.fd], block[HEAD.address] + 8 * HEAD.message, _NOT_BLOCKING | _NO_SIGNAL)
    error = int32_at(error_number_at())[0]
    if is_long:
        _set_option(block, block[at + LINE.fd], _TCP, _UNSENT_LIMIT, block[at + LINE.unsent_limit])
        # The kernel reports an end of waiting only to those that have asked.
        int32_at(block[HEAD.address] + 8 * HEAD.polled)[0] = block[at + LINE.fd]
        int32_at(block[HEAD.address] + 8 * HEAD.polled)[1] = _POLL_OUT
        block[at + LINE.writable] = 1 if poll(block[HEAD.address] + 8 * HEAD.polled, 1, 0) > 0 else 0
    if count < 0:
        if error == _AGAIN:
            block[at + LINE.writable] = 0
        elif error != _INTERRUPTED:
            # What the peer has sent before its end still counts.
            block[at + LINE.is_broken], block[at + LINE.writable] = 1, 0
            block[at + LINE.readable] = block[at + LINE.is_ending] = 1
            block[HEAD.status] |= w.FAILED
        return int64(0)
    if count < header_left + left:
        block[at + LINE.writable] = 0  # the socket is full
    of_header = min(count, header_left)
    block[at + LINE.out_header_left] = header_left - of_header
    block[at + LINE.out_at] += count - of_header
    block[at + LINE.out_left] = left - (count - of_header)
    block[at + LINE.bytes_out] += count
    return int64(count)


@compiled
def _end_send(block: Words, track: Any) -> None:
    """Go on with the track whose message has left."""
    index = block[track + TRACK.sends]
    _give_sum_back(block, _operation(block, track), _row(block, track, index))
    store_shared(block, track + TRACK.sends, _next_send(block, track, index + 1))
    _note_reached(block, track)
    _note_end(block, track)


@compiled
def _write(block: Words, at: Any, connection: Any) -> Any:
    """Send messages until the socket is full, none is ready, or enough have left; return how many bytes that were."""
    moved = int64(0)
    while block[at + LINE.writable] != 0 and block[at + LINE.may_write] != 0 and moved < _QUANTUM_BYTES:
        if block[at + LINE.out_track] == w.NO_TRACK:
            number = _choose(block, at, connection)
            if number == w.NO_TRACK:
                break
            _load(block, at, number)
        moved += _send(block, at)
        if block[at + LINE.out_header_left] == 0 and block[at + LINE.out_left] == 0:
            number = block[at + LINE.out_track]
            block[at + LINE.out_track] = w.NO_TRACK
            block[at + LINE.messages_out] += 1
            if number >= 0:
                _end_send(block, _track(number))
            else:
                block[HEAD.status] |= w.ENDED  # the interpreter waits for the end of this message
    return moved


# ------------------------------------------------------------------------------------------------------------ events


@compiled
def _sort_event(block: Words, descriptor: Any, events: Any) -> None:
    """Note an event in the words of its connection, or leave it to the interpreter."""
    for number in range(block[HEAD.num_lines]):
        at = w.LINES_AT + number * LINE.num_words
        if block[at + LINE.fd] != descriptor:
            continue
        if events & (_IN | _ENDS):
            block[at + LINE.readable] = 1
        if events & _ENDS:
            block[at + LINE.is_ending] = 1
        # The kernel adds to every other event that a socket takes bytes. That says something to the interpreter only if
        # the socket took none before.
        was_writable = block[at + LINE.writable] != 0
        if events & (_OUT | _ENDS):
            block[at + LINE.writable] = 1
        reads = block[at + LINE.may_read] != 0 or events & (_IN | _ENDS) == 0
        writes = block[at + LINE.may_write] != 0 or was_writable or events & (_OUT | _ENDS) == 0
        if reads and writes:
            return
        break
    left = HEAD.events_left + 2 * block[HEAD.num_events_left]
    block[left], block[left + 1] = descriptor, events
    block[HEAD.num_events_left] += 1
    block[HEAD.status] |= w.FOR_INTERPRETER


@compiled
def _wait(block: Words, timeout_ns: Any) -> Any:
    """Wait for events, and sort them; return their number, or -1 if a signal has come."""
    timeout_ms = (timeout_ns + 999_999) // 1_000_000
    room = w.EVENTS_MAX - block[HEAD.num_events_left]
    count = wait_for_events(block[HEAD.epoll], block[HEAD.events], room, timeout_ms)
    for number in range(count):
        event = block[HEAD.events] + number * block[HEAD.event_bytes]
        events, descriptor = int32_at(event)[0], int32_at(event + block[HEAD.event_data])[0]
        _sort_event(block, descriptor, events)
    return count


def _pump(address: Any, timeout_ns: Any) -> Any:
    block = int64_at(address)
    block[HEAD.status] = 0
    block[HEAD.num_events_left] = 0
    begin = _now(block)
    until, since_events = begin + timeout_ns, int64(0)
    if block[HEAD.given] != 0:
        _use_given(block)
    while True:
        moved = int64(0)
        for number in range(block[HEAD.num_lines]):
            at = w.LINES_AT + number * LINE.num_words
            if block[at + LINE.fd] >= 0:
                moved += _read(block, at)
        for number in range(block[HEAD.num_lines]):
            at = w.LINES_AT + number * LINE.num_words
            if block[at + LINE.fd] >= 0 and block[at + LINE.is_broken] == 0:
                moved += _write(block, at, number)
        if block[HEAD.status] != 0:
            return block[HEAD.status]
        since_events += moved
        if moved != 0 and since_events < _QUANTUM_BYTES:
            continue
        since_events = int64(0)
        now = _now(block)
        if moved != 0:
            if _wait(block, 0) < 0:
                return block[HEAD.status]
            if now - begin > _LONGEST_NS and now > until:
                block[HEAD.status] |= w.TIME_IS_UP
                return block[HEAD.status]
            continue
        count = _wait(block, max(until - now, 0))
        if count < 0 or (count == 0 and now >= until):
            return block[HEAD.status]


def assembly() -> tuple[str, str]:
    """Compile; return the assembly of LLVM and the name of the function ``relay.Pump`` therein."""
    made = cfunc(int64(*[int64] * w.NUM_ARGUMENTS), error_model="numpy", _nrt=False)(_pump)
    return made.inspect_llvm(), made.native_name
