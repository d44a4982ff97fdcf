"""The relay: a compiled function that receives, adds and sends the messages of large operations over TCP.

In a schedule whose ranks have one neighbour on each side (the ring, the chain) an arriving message says by itself what
comes next: its bytes are added or stored, and a message of the same lane leaves. So the function needs no interpreter
between messages. It knows *operations*, each cut into *lanes*. A lane has *rows*, which are the actions of its
schedule, and two positions: the next row that receives, and the next row that sends. All rows before the first one
have been carried out except for the sends from the second one on. Those wait for their connection, which sends the most
urgent one first, as ``engine.outbox.SendQueue`` does.

The function reads a message only if its header is exactly what a lane expects next. Any other header stays in the words
of its connection, and the function returns, so that the engine looks at it. So the wire has the same bytes with the
relay and without it, and each rank may use it or not.

The function works on a *block* of 64-bit integers, whose words the constants name: the words of the head, then those
of the connections, of the lanes and of the operations. Addresses are those of this process. The code is in
``relay_code``.

**The order of accesses.** The function runs without the interpreter's lock, and other threads may use an operation
meanwhile (``relay.RelayedOperation``). The function reads what they write (``READ_SHARED``) by ``load_shared``, and
writes what they read (``WRITE_SHARED``) by ``store_shared``. All other words are used by the thread that moves messages
alone, by the function or by Python.

===============  ===========================  =========================================================================
word             written by                   who has read it may rely on
===============  ===========================  =========================================================================
``IS_PROMOTED``  any thread; the function     nothing else: it is a flag that is set once
``HAS_FAILED``   any thread                   nothing else: no further message of the operation begins
``LEAVES_BY``    any thread                   nothing else: the peer has submitted the operation, so its messages may
                                              leave
``RECEIVES``     the function                 the bytes of the messages before it have come
``SENDS``        the function                 the bytes of the messages before it have left
===============  ===========================  =========================================================================
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from totalreduce.kernels import machine_code
from totalreduce.kernels.arrays import Array

__all__ = ["FUNCTION", "NUM_ARGUMENTS", "READ_SHARED", "WRITE_SHARED", "Pump", "lanes_of", "load", "next_row"]

# ----------------------------------------------------------------------------------------------- words of the head

#: The address of the block, and the descriptor of the epoll object.
SELF, EPOLL = 0, 1
#: The address of memory for ``EVENTS_MAX`` events as the kernel writes them; the length of one, and where its data is.
EVENTS, EVENT_BYTES, EVENT_DATA = 2, 3, 4
#: How many connections and lanes there are. Some of them may be unused.
NUM_CONNECTIONS, NUM_LANES = 5, 6
#: The first eight bytes of the headers of this group's data messages.
PROLOGUE = 8
#: Whether the order of messages is by age alone, and after how many messages the oldest one leaves.
IS_FIFO, STARVATION_LIMIT = 9, 10
#: How many events in ``EVENTS_LEFT`` are for the interpreter; each has two words, the descriptor and the events.
NUM_EVENTS_LEFT = 11
#: Why the function returns: bits of the constants below.
STATUS = 12
#: Words for the C library: the time in seconds and nanoseconds, the value of an option, a ``struct pollfd``, two
#: vectors (address and length), and a ``struct msghdr`` of seven words.
SECONDS, NANOSECONDS, OPTION, POLLED, VECTORS, MESSAGE = 13, 14, 15, 16, 17, 21
EVENTS_LEFT = 28
EVENTS_MAX: Final = 32
HEAD_WORDS: Final = EVENTS_LEFT + 2 * EVENTS_MAX

#: Bits of ``STATUS``. There are events for the interpreter; a header is none that a lane expects (``IN_REFUSED``); an
#: operation has ended; a connection has ended (``FAILURE``); it is the turn of a message that the interpreter has
#: (``RIVALS_TURN_HERE``).
FOR_INTERPRETER, REFUSED, ENDED, FAILED, RIVALS_TURN = 1, 2, 4, 8, 16
#: It has moved messages for so long that others must have their turn.
TIME_IS_UP = 32

# ------------------------------------------------------------------------------------------ words of a connection

#: The descriptor (-1: unused).
FD = 0
#: Whether the socket may have bytes and may take bytes; whether the stream ends, so that a short read says nothing.
READABLE, WRITABLE, IS_ENDING = 2, 3, 4
#: Whether this function may read, and write: not while the interpreter has a part of a message.
MAY_READ, MAY_WRITE = 5, 6
#: Bytes of the header that have come, and the header.
IN_GOT, IN_HEADER = 7, 8
#: The lane of the body that is arriving (``NO_LANE``; ``DISCARDED``: of an operation that has failed), where its next
#: byte goes, the bytes that are missing, and the bytes that wait at ``WINDOW`` to be added.
IN_LANE, IN_AT, IN_LEFT, IN_WAITING = 16, 17, 18, 19
#: The address of memory for a part of a body that is to be added, and its length.
WINDOW, WINDOW_BYTES = 20, 21
#: The kernel's low-water mark, as it was set last.
LOW_WATER = 22
#: Whether the header is for the interpreter, and the error that has ended the stream (``EOF``: it has ended).
IN_REFUSED, FAILURE = 23, 24
#: The lane of the message that is leaving (``NO_LANE``; ``DETACHED``: of an operation that has failed), the bytes of
#: its header that have not left, the header, the address of the rest of its body, and the length of that.
OUT_LANE, OUT_HEADER_LEFT, OUT_HEADER, OUT_AT, OUT_LEFT = 25, 26, 27, 35, 36
#: The limit for unsent bytes in the socket, and from which length a message goes into the socket as a whole.
UNSENT_LIMIT, LONG_BYTES = 37, 38
#: The most urgent message that the interpreter has for this connection: whether there is one, its place in the order,
#: and whether it is its turn.
RIVAL, RIVAL_IS_PROMOTED, RIVAL_PRIORITY, RIVAL_SEQUENCE, RIVALS_TURN_HERE = 39, 40, 41, 42, 50
#: How many messages have overtaken the oldest one.
OVERTAKES = 43
#: Since the interpreter has looked: bytes and messages that came and that left; messages that came with the flag EAGER,
#: and their bytes.
BYTES_IN, MESSAGES_IN, BYTES_OUT, MESSAGES_OUT, EAGER_IN, EAGER_BYTES_IN = 44, 45, 46, 47, 48, 49
#: Of a body that is added: where its next byte's counterpart in this rank's tensor is.
IN_LOCAL = 52
#: Whether nothing can be sent any more. What the peer has sent before is read to the end.
IS_BROKEN = 51
CONNECTION_WORDS: Final = 53

NO_LANE, DISCARDED, DETACHED = -1, -2, -3
EOF: Final = -1

# ------------------------------------------------------------------------------------------------- words of a lane

#: The number of the operation (-1: unused), and of the lane in it.
OPERATION, LANE = 0, 1
#: Words of its headers: the id; iteration and lane; three words of signature; the priority.
KEY, ITERATION, SIGNATURE, SENT_PRIORITY = 2, 3, 4, 7
SIGNATURE_WORDS: Final = 3
#: The address of its rows, their number, and the two positions.
ROWS, LENGTH, RECEIVES, SENDS = 8, 9, 10, 11
#: By the number of a peer in the rows: the connection that its messages come by, and the one for messages to it; -1:
#: there is none, or nothing may leave to the peer yet.
COMES_BY, LEAVES_BY = 12, 16
PEERS_MAX: Final = 4
#: What is added to ``ITERATION`` for each row. In a lane of a block (``AHEAD``) row i is a message of lane i of the
#: operation; then the lane of the operation, which is in the upper half of ``ITERATION``, grows by 1.
PER_ROW = 20
LANE_WORDS: Final = 21

# -------------------------------------------------------------------------------------------- words of an operation

#: Whether it is promoted, whether it has failed, and how many of its lanes have not ended.
IS_PROMOTED, HAS_FAILED, LANES_LEFT = 0, 1, 2
#: Its place in the order of messages.
PRIORITY, SEQUENCE = 3, 4
#: The element type, the length of an element, the reduction, and the divisor of an average (``element_types``).
KIND, ITEMSIZE, REDUCTION, DIVISOR = 5, 6, 7, 8
#: The address of the addresses of its buffers.
BUFFERS = 9
#: The memory for unfinished sums that are not kept in the tensor: slots of ``SUM_BYTES`` each. A sum has a slot from
#: when its message begins to arrive until it has been sent. The address of the slots, the length of each, the address
#: of the number of the slot of each sum (-1: it has none), the address of a stack of the free slots, their number, and
#: the smallest number of free slots that there was.
SUMS, SUM_BYTES, SLOTS, FREE_SLOTS, NUM_FREE, FEWEST_FREE = 10, 11, 12, 13, 14, 15
#: Of an operation whose lanes are blocks, each of which is either sent or received: by how many rows one that is sent
#: may be ahead of every one that is being received. ``AHEAD`` of other operations is 0.
AHEAD = 16
OPERATION_WORDS: Final = 17

# ---------------------------------------------------------------------------------------------------- words of a row

#: What it does (below), the step of the message, the number of the peer, the buffer, the first byte, and the length.
ACTION, STEP, ROW_PEER, BUFFER, START, LENGTH_BYTES = 0, 1, 2, 3, 4, 5
#: Where a sum is written, and where a message is sent from: the number of the buffer, and the first byte. In the buffer
#: ``OF_SUMS``, which has the unfinished sums, each sum has ``SUM_BYTES`` bytes, whichever slot it is in.
INTO, INTO_START = 6, 7
OF_SUMS: Final = -1
ROW_WORDS: Final = 8
#: What a row does. ``NOTHING``: the lane has no part in this action.
SEND, REPLACE, COMBINE, COMBINE_LAST, NOTHING = 0, 1, 2, 3, 4

#: The names of the words that other threads may write while the function runs, and of those that they may read.
READ_SHARED: Final = ("IS_PROMOTED", "HAS_FAILED", "LEAVES_BY")
WRITE_SHARED: Final = ("IS_PROMOTED", "RECEIVES", "SENDS")

# ------------------------------------------------------------------------------------------------------------ sizes

CONNECTIONS_MAX: Final = 64
LANES_MAX: Final = 2048
OPERATIONS_MAX: Final = 256
CONNECTIONS_AT: Final = HEAD_WORDS
LANES_AT: Final = CONNECTIONS_AT + CONNECTIONS_MAX * CONNECTION_WORDS
OPERATIONS_AT: Final = LANES_AT + LANES_MAX * LANE_WORDS
BLOCK_WORDS: Final = OPERATIONS_AT + OPERATIONS_MAX * OPERATION_WORDS

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
        action = rows[index * ROW_WORDS + ACTION]
        if action != NOTHING and (action == SEND) == sends:
            break
        index += 1
    return index


def lanes_of(
    rows: Sequence[array[int]], signatures: Sequence[bytes], peers: Sequence[Sequence[int]], *, of_blocks: bool
) -> Array:
    """Return the words of the lanes of an operation, as far as they depend on its layout alone; the others are 0.

    Args:
        rows: By lane: its rows. The words have their addresses, and do not keep them in memory.
        signatures: By lane: the packed signature of its messages.
        peers: By lane and by the number of a peer in its rows: a number of the caller, which is in ``COMES_BY`` and in
            ``LEAVES_BY``; -1 where there is no such peer.
        of_blocks: Whether the lanes are blocks (``PER_ROW``).

    Returns:
        ``int64[lanes, LANE_WORDS]``.
    """
    lanes = np.zeros((len(rows), LANE_WORDS), np.int64)
    lanes[:, LANE] = np.arange(len(rows))
    if of_blocks:
        lanes[:, PER_ROW] = 1 << 32
    else:
        lanes[:, ITERATION] = lanes[:, LANE] << 32
    packed = np.frombuffer(b"".join(signatures), np.int64)
    lanes[:, SIGNATURE : SIGNATURE + SIGNATURE_WORDS] = packed.reshape(len(rows), SIGNATURE_WORDS)
    lanes[:, ROWS] = [row.buffer_info()[0] for row in rows]
    lanes[:, LENGTH] = [len(row) // ROW_WORDS for row in rows]
    lanes[:, COMES_BY : LEAVES_BY + PEERS_MAX] = -1
    for begin in (COMES_BY, LEAVES_BY):
        lanes[:, begin : begin + len(peers[0])] = peers
    return lanes


@functools.cache
def load() -> machine_code.Loaded:
    """Return the compiled function (see ``Pump``). The first call on a machine compiles it, which takes seconds.

    Raises:
        NoCodeError: This process cannot have it.
    """
    return machine_code.load(FUNCTION)
