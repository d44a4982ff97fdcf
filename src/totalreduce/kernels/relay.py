"""The relay: a compiled function that receives, adds and sends the messages of large operations over TCP.

An arriving message says by itself what comes next: its bytes are added or stored, and messages of the same lane leave.
So the function needs no interpreter between messages. It knows *operations*, each of which has *tracks*. A track is a
lane of the operation, or one of its blocks (``engine.relay_plan``). It has *rows*, which are the actions of its
schedule, and two positions: the next row that receives (``receives``), and the next row that sends (``sends``). All
rows before ``receives`` have been carried out, except the sends from ``sends`` on. These wait for their connection,
which sends the most urgent message first, as ``engine.outbox.SendQueue`` does.

In a ring or a chain, a track receives from one neighbour and sends to one, so its messages come and leave in the order
of the rows. Other tracks have several sources or targets. Each of their rows has a *state* (``TRACK.states``), because
a message may come before its turn, and messages of the engine may have left in another order. Bytes are added in the
order of the rows all the same: what comes too early waits in memory of its own.

The function reads a message only if its header is exactly what a track expects. Any other header stays in the words of
its connection, and the function returns, so that the engine looks at it. So the wire has the same bytes with the relay
and without it, and each rank may use it or not.

The function works on a *block* of 64-bit integers: a head, then *lines*, which are the connections that it may use,
tracks and operations. For each of these, and for a row, there is a structure that numbers its words. Addresses are
those of this process. The code is in ``relay_code``.

**The order of accesses.** The function runs without the interpreter's lock, and other threads may use an operation
meanwhile (``relay.RelayedOperation``). The function reads what they write (``READ_SHARED``) by ``load_shared``, and
writes what they read (``WRITE_SHARED``) by ``store_shared``. Only the thread that moves messages uses the other words,
in the function or in Python.

=========================  ========================  =============================================================
word                       written by                who has read it may rely on
=========================  ========================  =============================================================
``OPERATION.is_promoted``  any thread; the function  nothing else: it is a flag that is set once
``OPERATION.has_failed``   any thread                nothing else: no further message of the operation begins
``PEER.leaves_by``         any thread                nothing else: the peer has submitted the operation, so its
                                                     messages may leave
``TRACK.receives``         the function              the bytes of the messages before it have come
``TRACK.sends``            the function              the bytes of the messages before it have left
=========================  ========================  =============================================================
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from totalreduce.foundation.header import HEADER_BYTES
from totalreduce.foundation.words import Structure
from totalreduce.kernels import machine_code
from totalreduce.kernels.arrays import Array

__all__ = [
    "FUNCTION",
    "HEAD",
    "LINE",
    "NUM_ARGUMENTS",
    "OPERATION",
    "PEER",
    "READ_SHARED",
    "ROW",
    "TRACK",
    "WRITE_SHARED",
    "Pump",
    "load",
    "next_row",
    "tracks_of",
]

EVENTS_MAX: Final = 32
SIGNATURE_WORDS: Final = 3
#: How many sums of half types are computed at a time.
SUMS_MAX: Final = 4096
_HEADER_WORDS: Final = HEADER_BYTES // 8


class _Head(Structure):
    #: The address of the block, and the descriptor of the epoll object.
    address: int = 1
    epoll: int = 1
    #: The address of memory for ``EVENTS_MAX`` events as the kernel writes them; the length of one, and where its data
    #: is.
    events: int = 1
    event_bytes: int = 1
    event_data: int = 1
    #: How many lines and tracks there are. Some of them may be unused.
    num_lines: int = 1
    num_tracks: int = 1
    #: The first eight bytes of the headers of this group's data messages.
    prologue: int = 1
    #: Whether the order of messages is by age alone, and how many messages may overtake the oldest one.
    is_fifo: int = 1
    starvation_limit: int = 1
    #: Why the function returns: bits of ``FOR_INTERPRETER`` and the following ones.
    status: int = 1
    #: For the C library: a ``struct timespec``, the value of an option, a ``struct pollfd``, two vectors (address and
    #: length), and a ``struct msghdr``.
    seconds: int = 1
    nanoseconds: int = 1
    option: int = 1
    polled: int = 1
    vectors: int = 4
    message: int = 7
    #: Whether the interpreter has given bodies to tracks, which go on with them.
    given: int = 1
    #: The address of memory for ``SUMS_MAX`` float32: sums of half types that are rounded at once.
    wide_sums: int = 1
    #: How many events are for the interpreter, and these: each has two words, the descriptor and the events.
    num_events_left: int = 1
    events_left: int = 2 * EVENTS_MAX


#: Bits of ``status``. There are events for the interpreter; a header is none that a track expects (``in_refused``); an
#: operation has ended; a connection has ended (``failure``); it is the turn of a message that the interpreter has
#: (``rivals_turn_here``).
FOR_INTERPRETER, REFUSED, ENDED, FAILED, RIVALS_TURN = 1, 2, 4, 8, 16
#: The function has moved messages for so long without a pause that the interpreter must have its turn.
TIME_IS_UP = 32
#: A track has come to a message that the interpreter sends (``BY_ENGINE``).
REACHED = 64


class _Line(Structure):
    #: The descriptor (-1: unused).
    fd: int = 1
    #: Whether the socket may have bytes, and may take bytes. Whether the peer has ended the stream: then the socket may
    #: have more although a read returned fewer bytes than were asked for.
    readable: int = 1
    writable: int = 1
    is_ending: int = 1
    #: Whether this function may read, and write: not while the interpreter has a part of a message.
    may_read: int = 1
    may_write: int = 1
    #: Whether nothing can be sent any more. What the peer has sent before is read to the end.
    is_broken: int = 1
    #: The error that has ended the stream (``EOF``: it has ended).
    failure: int = 1
    #: The kernel's low-water mark, as it was set last.
    low_water: int = 1
    #: The limit for unsent bytes in the socket, and from which length a message goes into the socket as a whole.
    unsent_limit: int = 1
    long_bytes: int = 1
    #: Bytes of the header that have come, the header, and whether it is for the interpreter.
    in_got: int = 1
    in_header: int = _HEADER_WORDS
    in_refused: int = 1
    #: The track of the body that is arriving (``NO_TRACK``; ``DISCARDED``: of an operation that has failed), and its
    #: row; the address of the memory in which it comes before its turn (0: it does not); where its next byte goes, the
    #: bytes that are missing, and the bytes that wait in the window to be added.
    in_track: int = 1
    in_row: int = 1
    in_early: int = 1
    in_at: int = 1
    in_left: int = 1
    in_waiting: int = 1
    #: Of a body that is added: where its next byte's counterpart in this rank's tensor is.
    in_local: int = 1
    #: The address of memory for a part of a body that is to be added, and its length.
    window: int = 1
    window_bytes: int = 1
    #: The track of the message that is leaving (``NO_TRACK``; ``DETACHED``: of an operation that has failed), the bytes
    #: of its header that have not left, the header, the address of the rest of its body, and the length of that.
    out_track: int = 1
    out_header_left: int = 1
    out_header: int = _HEADER_WORDS
    out_at: int = 1
    out_left: int = 1
    #: The most urgent message that the interpreter has for this connection: whether there is one, its place in the
    #: order, and whether it is its turn.
    rival: int = 1
    rival_is_promoted: int = 1
    rival_priority: int = 1
    rival_sequence: int = 1
    rivals_turn_here: int = 1
    #: How many messages have overtaken the oldest one.
    overtakes: int = 1
    #: Since the interpreter has looked: bytes and messages that came and that left; messages that came with the flag
    #: EAGER, and their bytes.
    bytes_in: int = 1
    messages_in: int = 1
    bytes_out: int = 1
    messages_out: int = 1
    eager_in: int = 1
    eager_bytes_in: int = 1


NO_TRACK, DISCARDED, DETACHED = -1, -2, -3
EOF: Final = -1


class _Track(Structure):
    #: The number of the operation (-1: unused), and of the track in it.
    operation: int = 1
    index: int = 1
    #: Words of its headers: the id; iteration and lane; the signature; the priority.
    key: int = 1
    iteration: int = 1
    signature: int = SIGNATURE_WORDS
    sent_priority: int = 1
    #: The address of its rows, their number, and the two positions.
    rows: int = 1
    length: int = 1
    receives: int = 1
    sends: int = 1
    #: The address of the states of its rows (``OPEN`` and the following ones); 0: they are carried out in order.
    states: int = 1
    #: What is added to ``iteration`` for each row. The upper half of ``iteration`` is the lane of the operation. It
    #: grows by 1 for each row of a block (``ahead``), because row i is a message of lane i of the operation.
    per_row: int = 1


class _Operation(Structure):
    #: Whether it is promoted, whether it has failed, and how many of its tracks have not ended.
    is_promoted: int = 1
    has_failed: int = 1
    tracks_left: int = 1
    #: Its place in the order of messages.
    priority: int = 1
    sequence: int = 1
    #: The element type, the length of an element, the reduction, and the divisor of an average (``element_types``).
    kind: int = 1
    itemsize: int = 1
    reduction: int = 1
    divisor: int = 1
    #: The address of the addresses of its buffers, and that of the words of its peers (``PEER``).
    buffers: int = 1
    peers: int = 1
    #: The address of the slots, the length of all of them, and that of one. An unfinished sum that is not kept in the
    #: tensor has a slot from when its first message begins to arrive until the row that needs it last (``GIVES_BACK``).
    #: A body that comes before its turn has a slot until then.
    memory: int = 1
    memory_bytes: int = 1
    slot_bytes: int = 1
    #: The address of an array of the slot of each sum (-1: none), and of a stack of the free slots; how many of these
    #: there are, and how many there were at least.
    slots: int = 1
    free_slots: int = 1
    num_free: int = 1
    fewest_free: int = 1
    #: By how many rows a block that is sent may be ahead of each block that is being received; 0: the tracks of the
    #: operation are no blocks.
    ahead: int = 1


class _Peer(Structure):
    #: The connection that its messages come by, and the one for messages to it; -1: there is none, or nothing may leave
    #: to the peer yet; ``BY_ENGINE``: the interpreter exchanges the messages with it.
    comes_by: int = 1
    leaves_by: int = 1


class _Row(Structure):
    #: What it does (``SEND`` and the following ones) and how (bits of ``WIDE_BODY`` and the following ones), the step
    #: of the message, the number of the peer, and the length of the message.
    action: int = 1
    manner: int = 1
    step: int = 1
    peer: int = 1
    length_bytes: int = 1
    #: Where the bytes are with which those of a message are combined: the number of the buffer, and the first byte. The
    #: buffer ``OF_SUMS`` stands for the unfinished sums: sum i begins at byte i * ``slot_bytes``, whatever slot it has.
    buffer: int = 1
    start: int = 1
    #: Where the result is written, and where a message is sent from.
    into: int = 1
    into_start: int = 1


OF_SUMS: Final = -1
BY_ENGINE: Final = -2
#: What a row does. ``NOTHING``: the track has no part in this action.
SEND, REPLACE, COMBINE, COMBINE_LAST, NOTHING = 0, 1, 2, 3, 4
#: How it does that. Of a half type: the elements of the message, those with which they are combined, and the results
#: are float32. A message that replaces bytes may do so before its turn. The row is the last one that needs the sum that
#: it sends, or with which it combines the message.
WIDE_BODY, WIDE_LOCAL, WIDE_RESULT, ANYTIME, GIVES_BACK = 1, 2, 4, 8, 16
#: States of a row: nothing has happened; its message is arriving; it is carried out, up to the turn of later ones.
#: Every greater number is the address of a body that waits for its turn.
OPEN, ARRIVING, CARRIED_OUT = 0, 1, 2

HEAD: Final = _Head()
LINE: Final = _Line()
TRACK: Final = _Track()
OPERATION: Final = _Operation()
PEER: Final = _Peer()
ROW: Final = _Row()
#: The words that other threads may write while the function runs, and those that they may read.
READ_SHARED: Final = ("OPERATION.is_promoted", "OPERATION.has_failed", "PEER.leaves_by")
WRITE_SHARED: Final = ("OPERATION.is_promoted", "TRACK.receives", "TRACK.sends")

#: The block: the head, then lines, tracks and operations.
LINES_MAX: Final = 64
TRACKS_MAX: Final = 2048
OPERATIONS_MAX: Final = 256
LINES_AT: Final = HEAD.num_words
TRACKS_AT: Final = LINES_AT + LINES_MAX * LINE.num_words
OPERATIONS_AT: Final = TRACKS_AT + TRACKS_MAX * TRACK.num_words
BLOCK_WORDS: Final = OPERATIONS_AT + OPERATIONS_MAX * OPERATION.num_words

#: The compiled function: the address of the block, and for how many nanoseconds it may wait. Returns ``STATUS``.
Pump = Callable[[int, int], int]
NUM_ARGUMENTS: Final = 2
FUNCTION: Final = machine_code.CompiledFunction(
    "totalreduce.kernels.relay_code",
    NUM_ARGUMENTS,
    machine_code.files("relay.py", "relay_code.py", "arrays.py", "../foundation/header.py"),
    "what moves large tensors between hosts",
)


def next_row(rows: Sequence[int], length: int, index: int, sends: bool) -> int:
    """Return the first row from ``index`` on that sends, or else that receives; ``length`` if there is none.

    ``relay_code`` compiles this function, too. ``length``: the number of rows.
    """
    while index < length:
        action = rows[index * ROW.num_words + ROW.action]
        if action != NOTHING and (action == SEND) == sends:
            break
        index += 1
    return index


def tracks_of(rows: Sequence[array[int]], signatures: Sequence[bytes], *, of_blocks: bool) -> Array:
    """Return the words of the tracks of an operation, as far as they depend on its layout alone; the others are 0.

    Args:
        rows: By track: its rows. The words have their addresses, and do not keep them in memory.
        signatures: By track: the packed signature of its messages.
        of_blocks: Whether the tracks are blocks (``TRACK.per_row``).

    Returns:
        ``int64[tracks, TRACK.num_words]``.
    """
    tracks = np.zeros((len(rows), TRACK.num_words), np.int64)
    tracks[:, TRACK.index] = np.arange(len(rows))
    if of_blocks:
        tracks[:, TRACK.per_row] = 1 << 32
    else:
        tracks[:, TRACK.iteration] = tracks[:, TRACK.index] << 32
    packed = np.frombuffer(b"".join(signatures), np.int64)
    tracks[:, TRACK.signature : TRACK.signature + SIGNATURE_WORDS] = packed.reshape(len(rows), SIGNATURE_WORDS)
    tracks[:, TRACK.rows] = [row.buffer_info()[0] for row in rows]
    tracks[:, TRACK.length] = [len(row) // ROW.num_words for row in rows]
    return tracks


@functools.cache
def load() -> machine_code.Loaded:
    """Return the compiled function (see ``Pump``). The first call on a machine compiles it, which takes seconds.

    Raises:
        NoCodeError: This process cannot have it.
    """
    return machine_code.load(FUNCTION)
