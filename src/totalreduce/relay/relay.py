"""The relay of one rank: the connections and operations that the compiled function has, and its results.

``kernels.relay`` says what the function does. This module reads and writes the *words* of the function's block: it
lends connections of the TCP transport to the function, takes operations of the engine, and reports the results to the
``RelayUser``. All methods are called by the thread that moves messages, while the function does not run;
``RelayedOperation`` may be used by any thread.

A connection has one reader and one writer at any time. The function reads a connection if an operation of the relay
receives by it and the transport's own reader (``Connection.incoming``) is between two messages; otherwise that reader
reads. For writing the same holds of ``Connection.outgoing``, the transport's own writer. Its most urgent message is the
*rival* of the messages of the relay: both are sent in the order of ``Order``.
"""

from __future__ import annotations

import heapq
import platform
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol, final

import numpy as np

from totalreduce.engine.operation import Carriage, progress_text
from totalreduce.engine.relay_plan import RelayPlan
from totalreduce.engine.relaying import Order, RelayedTraffic, RelayTask
from totalreduce.foundation.header import HEADER_BYTES
from totalreduce.kernels import relay as w
from totalreduce.kernels.arrays import Array, address_of, copy_at
from totalreduce.kernels.relay import HEAD, LINE, OPERATION, PEER, ROW, TRACK
from totalreduce.transports.connection import Connection, UnsentLimit
from totalreduce.transports.relay import RelayPort

__all__ = ["Relay", "RelaySettings", "RelayUser", "RelayedOperation"]

#: The length of the memory for a part of a body that is to be added: it stays in the second-level cache.
_WINDOW_BYTES: Final = 256 * 1024
#: How many memories of operations are kept, and how long the used part of each is at most.
_KEPT_MAX: Final = 4
_KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
#: The words that all tracks of an operation have alike, and that change from iteration to iteration.
_SAME: Final = [TRACK.operation, TRACK.key, TRACK.sent_priority]
#: The length of the kernel's ``struct epoll_event``, and where its data is. On x86-64 it is packed.
_EVENT_BYTES, _EVENT_DATA = (12, 4) if platform.machine() == "x86_64" else (16, 8)


class RelaySettings(NamedTuple):
    """What the relay must know of an engine."""

    prologue: bytes  #: The first eight bytes of the headers of its data messages.
    bulk_bytes: int  #: See ``EngineConfig``.
    is_fifo: bool  #: See ``EngineConfig.scheduling``.
    starvation_limit: int  #: See ``EngineConfig``.


class RelayUser(Protocol):
    """The user of a relay. All methods return quickly. ``Transport.wait`` calls only ``order_of_bulk``."""

    @property
    def has_candidates(self) -> bool:
        """Whether there are operations that ``hand_over`` may hand over now or later."""

    def hand_over(self) -> None:
        """Hand operations over to the relay (``Relay.take``)."""

    def order_of_bulk(self, peer: int) -> Order | None:
        """Return the place of the most urgent message of bulk that waits for a peer."""

    def relayed(self, peer: int, traffic: RelayedTraffic) -> None:
        """Count what the relay has exchanged with a peer."""

    def relay_moved(self, task: RelayTask, used: Sequence[tuple[int, int]], reached: Sequence[tuple[int, int]]) -> None:
        """Release bodies that were given to an operation, and send messages that are the engine's.

        Both are given by their lanes and rows, which are those of the operation.
        """

    def relay_ended(self, task: RelayTask) -> None:
        """Note that all messages of an operation have come and left."""


@final
class RelayedOperation(Carriage):
    """An operation in the relay. Any thread may call all methods but ``accepts``, ``receive`` and ``posted``.

    Attributes:
        task: The operation, as the relay has taken it.
        number: Its number in the words.
        tracks: The numbers of its tracks in the words.
        comes_by: The connections by which its messages come.
        leaves_by: Those by which they leave.
        memory: The slots of the unfinished sums that are not kept in the tensor, and of bodies that come early.
        is_removed: Whether the relay has it no more, so that its number and its tracks may be those of another one.
    """

    exchanges_messages = True

    def __init__(
        self,
        words: memoryview,
        failed: deque[RelayedOperation],
        task: RelayTask,
        number: int,
        tracks: list[int],
        routes: tuple[set[_Line], set[_Line]],
    ) -> None:
        """``failed``: gets the operation when it fails."""
        self.task, self.number, self.tracks = task, number, tracks
        self.comes_by, self.leaves_by = routes
        self.is_removed = False
        #: By peer to which nothing leaves yet: the number of the connection.
        self._held_back = {
            line.connection.peer: line.number for line in self.leaves_by if line.connection.peer in task.held_back
        }
        self.memory: Array | None = None
        self._slots: Array | None = None
        self._words, self._failed = words, failed
        self._at = w.OPERATIONS_AT + number * OPERATION.num_words
        buffers = [0 if view is None or not len(view) else address_of(view) for view in task.buffers]
        #: The words of the peers, and behind them the addresses of the buffers.
        self._peers = array("q", [*[-1] * (len(task.plan.peers) * PEER.num_words), *buffers])
        words[self._at + OPERATION.memory_bytes] = 0
        #: By track and row: the bodies that the engine has received, until they were used.
        self._given: dict[tuple[int, int], memoryview] = {}
        words[self._at + OPERATION.peers] = address = self._peers.buffer_info()[0]
        words[self._at + OPERATION.buffers] = address + 8 * len(task.plan.peers) * PEER.num_words
        for lines, word in ((routes[0], PEER.comes_by), (routes[1], PEER.leaves_by)):
            for line in lines:
                peer = line.connection.peer
                if word == PEER.comes_by or peer not in self._held_back:
                    self._peers[task.plan.peers.index(peer) * PEER.num_words + word] = line.number
        for peer in task.plan.near:
            self._peers[task.plan.peers.index(peer) * PEER.num_words + PEER.leaves_by] = w.BY_ENGINE
        #: By track, if the rows have states: these.
        self._states: list[array[int]] = []
        if task.plan.has_states:
            self._states = [array("q", bytes(8 * len(rows) // ROW.num_words)) for rows in task.plan.rows]
            for track, index in task.standing.carried_out:
                self._states[track][index] = w.CARRIED_OUT

    @property
    def held_back(self) -> Sequence[int]:
        """The peers to which nothing leaves until they have submitted the operation."""
        return tuple(self._held_back)

    @property
    def has_ended(self) -> bool:
        """Whether all its messages have come and left."""
        return bool(self._words[self._at + OPERATION.tracks_left] == 0)

    @property
    def addresses_of_states(self) -> list[int]:
        """The address of the states of the rows of each track; none where the rows have no states."""
        return [states.buffer_info()[0] for states in self._states]

    def keep_in(self, memory: Array) -> None:
        """Use the slots of this memory; copy the sums and the bodies into it that the engine has handed over."""
        words, at, plan, task = self._words, self._at, self.task.plan, self.task
        count, length = plan.slots
        self.memory = memory
        self._slots = slots = np.full((2, count), -1)  # row 0: the slot of each sum; row 1: a stack of the free slots
        slots[1] = np.arange(count - 1, -1, -1)  # slot 0 lies on top
        words[at + OPERATION.memory], words[at + OPERATION.memory_bytes] = address_of(memory.data), len(memory)
        words[at + OPERATION.slot_bytes] = length
        words[at + OPERATION.slots], words[at + OPERATION.free_slots] = (address_of(row.data) for row in slots)
        for slot, (number, view) in enumerate(task.sums):
            slots[0, number] = slot
            memory[slot * length : slot * length + len(view)] = np.frombuffer(view, np.uint8)
        for slot, (track, index, view) in enumerate(task.standing.early, len(task.sums)):
            self._states[track][index] = words[at + OPERATION.memory] + slot * length
            memory[slot * length : slot * length + len(view)] = np.frombuffer(view, np.uint8)
        num_free = count - len(task.sums) - len(task.standing.early)
        words[at + OPERATION.num_free] = words[at + OPERATION.fewest_free] = num_free

    @property
    def touched_bytes(self) -> int:
        """How long the part of the slots is that has been used."""
        count, length = self.task.plan.slots
        return (count - int(self._words[self._at + OPERATION.fewest_free])) * length

    def promote(self) -> None:
        """Send its messages before those of operations that are not promoted."""
        if not self.is_removed:
            self._words[self._at + OPERATION.is_promoted] = 1

    def posted(self, peer: int) -> None:
        """Let messages leave to a peer that has submitted the operation."""
        number = self._held_back.pop(peer, None)
        if number is not None:
            self._peers[self.task.plan.peers.index(peer) * PEER.num_words + PEER.leaves_by] = number

    def fail(self) -> None:
        """Receive and send no further message of it. One that is half-way out is sent to its end."""
        if not self.is_removed:
            self._words[self._at + OPERATION.has_failed] = 1
            self._failed.append(self)

    def accepts(self, peer: int, lane: int, step: int) -> bool:
        """Return whether the engine may receive a message.

        It may receive any message of a peer that is near, and the next one of its lane, if it is empty or of a block.
        """
        return self._expecting(peer, lane, step) is not None

    def receive(self, peer: int, lane: int, step: int, body: memoryview | None) -> None:
        """Note that the engine has received a message that was expected."""
        words, expecting = self._words, self._expecting(peer, lane, step)
        assert expecting is not None
        number, index = expecting
        if self._states:
            self._states[number][index] = address_of(body) if body else w.CARRIED_OUT
            if body:
                self._given[expecting] = body
            words[HEAD.given] = 1
            return
        rows, at = self.task.plan.rows[number], w.TRACKS_AT + self.tracks[number] * TRACK.num_words
        words[at + TRACK.receives] = w.next_row(rows, words[at + TRACK.length], index + 1, False)
        self._note_end(at)

    def pop_moved(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the lanes and rows of given bodies that were used, and of messages that the engine sends now."""
        if not self.task.plan.near or self.is_removed:
            return [], []
        words, plan = self._words, self.task.plan
        used = [place for place in self._given if self._states[place[0]][place[1]] == w.CARRIED_OUT]
        for place in used:
            del self._given[place]
        reached = []
        for number, rows in enumerate(plan.rows):
            at = w.TRACKS_AT + self.tracks[number] * TRACK.num_words
            index, receives, length = words[at + TRACK.sends], words[at + TRACK.receives], words[at + TRACK.length]
            begin = index
            while index < receives and plan.peers[rows[index * ROW.num_words + ROW.peer]] in plan.near:
                reached.append((number, index))
                index = w.next_row(rows, length, index + 1, True)
                while index < length and self._states[number][index] == w.CARRIED_OUT:
                    index = w.next_row(rows, length, index + 1, True)
            if index != begin:
                words[at + TRACK.sends] = index
                self._note_end(at)
        return used, reached

    def _note_end(self, at: int) -> None:
        """Count a track whose rows have all been carried out as ended. ``at``: where its words begin."""
        words = self._words
        if words[at + TRACK.receives] == words[at + TRACK.sends] == words[at + TRACK.length]:
            words[self._at + OPERATION.tracks_left] -= 1

    def _expecting(self, peer: int, lane: int, step: int) -> tuple[int, int] | None:
        """Return the track and the row that expect a message that the engine may receive; ``None``: none.

        ``lane``: the lane of the operation. It is the number of the track; if the track is a block, that of the row.
        """
        plan = self.task.plan
        if peer in plan.near:
            rows = plan.rows[lane] if lane < len(plan.rows) else ()
            for index in range(len(rows) // ROW.num_words):
                action, _, its_step, number = rows[index * ROW.num_words : index * ROW.num_words + 4]
                if action not in (w.SEND, w.NOTHING) and (plan.peers[number], its_step) == (peer, step):
                    return (lane, index) if self._states[lane][index] == w.OPEN else None
            return None
        for number, rows in enumerate(plan.rows):
            at = w.TRACKS_AT + self.tracks[number] * TRACK.num_words
            index = self._words[at + TRACK.receives]
            its_lane = index if plan.is_of_blocks else number
            if its_lane != lane or index == self._words[at + TRACK.length]:
                continue
            row = rows[index * ROW.num_words : (index + 1) * ROW.num_words]
            source = plan.peers[row[ROW.peer]]
            if (source, row[ROW.step]) == (peer, step) and (plan.is_of_blocks or not row[ROW.length_bytes]):
                return number, index
        return None

    def positions(self) -> list[tuple[int, int]]:
        """Return for each track the index of the next row that receives, and of the next one that sends."""
        words = self._words
        if self.is_removed:
            return [(len(rows) // ROW.num_words,) * 2 for rows in self.task.plan.rows]
        ats = [w.TRACKS_AT + track * TRACK.num_words for track in self.tracks]
        return [(words[at + TRACK.receives], words[at + TRACK.sends]) for at in ats]

    def num_received(self) -> int:
        """Return how many messages have come, those before the hand-over included."""
        plan = self.task.plan
        return sum(map(_count_receives, plan.rows)) - sum(not sends for _, sends in self._missing())

    def progress(self) -> str:
        """Return the progress in words."""
        return progress_text(self.num_received(), sum(map(_count_receives, self.task.plan.rows)), self.held_back)

    def needs(self, peer: int) -> bool:
        """Return whether a message to or from a peer is missing."""
        plan = self.task.plan
        return any(plan.peers[number] == peer for number, _ in self._missing())

    def _missing(self) -> Iterator[tuple[int, bool]]:
        """Yield the number of the peer, and whether it leaves, of every message that has not come or left."""
        for track, (rows, (receives, sends)) in enumerate(zip(self.task.plan.rows, self.positions(), strict=True)):
            states = self._states[track] if self._states else None
            for index in range(min(receives, sends), len(rows) // ROW.num_words):
                action, peer = rows[index * ROW.num_words], rows[index * ROW.num_words + ROW.peer]
                is_missing = index >= (sends if action == w.SEND else receives)
                if states is not None and states[index] > w.ARRIVING:
                    is_missing = False
                if is_missing and action != w.NOTHING:
                    yield peer, action == w.SEND


@final
class _Line:
    """A connection that the relay uses."""

    def __init__(self, connection: Connection, limit: UnsentLimit, number: int, words: memoryview) -> None:
        self.connection, self.number = connection, number  #: Its number in the words.
        self.readers = self.writers = 0  #: How many operations receive by it, and send by it.
        #: A copy of what had not left of a message when its operation failed, until the message has left.
        self.leaving: memoryview | None = None
        self._window = np.empty(_WINDOW_BYTES, np.uint8)
        self._words = words
        self._at = at = w.LINES_AT + number * LINE.num_words
        for word in range(LINE.num_words):
            words[at + word] = 0
        words[at + LINE.fd] = connection.sock.fileno()
        words[at + LINE.in_track] = words[at + LINE.out_track] = w.NO_TRACK
        words[at + LINE.window] = address_of(self._window.data)
        words[at + LINE.window_bytes] = _WINDOW_BYTES
        words[at + LINE.unsent_limit], words[at + LINE.long_bytes] = limit.num_bytes, limit.long_bytes

    @property
    def is_half_way_in(self) -> bool:
        """Whether the function has read a part of a message."""
        words, at = self._words, self._at
        return bool(words[at + LINE.in_got]) or words[at + LINE.in_track] != w.NO_TRACK

    @property
    def is_half_way_out(self) -> bool:
        """Whether the function has sent a part of a message."""
        return bool(self._words[self._at + LINE.out_track] != w.NO_TRACK)

    @property
    def is_read(self) -> bool:
        """Whether the function reads from the connection, and not the transport's reader."""
        return self.is_half_way_in or (self.readers > 0 and self.connection.incoming.is_between_messages)

    @property
    def is_idle(self) -> bool:
        """Whether no operation uses the connection, and the function has no part of a message of it."""
        return not (self.readers or self.writers or self.is_half_way_in or self.is_half_way_out)

    @property
    def needs_attention(self) -> bool:
        """Whether a message of a failed operation is half-way, or the transport's reader must read a header."""
        words, at = self._words, self._at
        if self.leaving is not None or words[at + LINE.in_track] == w.DISCARDED:
            return True
        return bool(words[at + LINE.in_refused]) or self._has_stray_header

    @property
    def _has_stray_header(self) -> bool:
        """Whether the function has a part of a header, and no operation receives by the connection any more."""
        words, at = self._words, self._at
        return not self.readers and bool(words[at + LINE.in_got]) and words[at + LINE.in_track] == w.NO_TRACK

    @property
    def is_rivals_turn(self) -> bool:
        """Whether the transport's writer may send a message now."""
        return bool(self._words[self._at + LINE.rivals_turn_here])

    def end_rivals_turn(self) -> None:
        """Note that the transport's writer has used its turn."""
        self._words[self._at + LINE.rivals_turn_here] = 0

    def note_rival(self, order: Order | None) -> None:
        """Note the most urgent message that the transport's writer would send, or that there is none."""
        words, at = self._words, self._at
        words[at + LINE.rival] = order is not None
        if order is not None:
            words[at + LINE.rival_is_promoted] = order.is_promoted
            words[at + LINE.rival_priority] = order.priority
            words[at + LINE.rival_sequence] = order.sequence

    @property
    def has_rival(self) -> bool:
        """Whether the transport's writer had a message to send when ``note_rival`` was called last."""
        return bool(self._words[self._at + LINE.rival])

    def lend(self) -> None:
        """Let the function read and write where the transport's reader and writer are between two messages."""
        words, at = self._words, self._at
        incoming, outgoing = self.connection.incoming, self.connection.outgoing
        words[at + LINE.readable], words[at + LINE.writable] = incoming.readable, outgoing.writable
        words[at + LINE.is_ending], words[at + LINE.low_water] = incoming.is_ending, incoming.wake_bytes
        is_refused = words[at + LINE.in_refused]
        words[at + LINE.may_read] = incoming.is_between_messages and self.is_read and not is_refused
        is_used = self.writers > 0 or self.is_half_way_out  # if not, the transport gets the events of the socket
        words[at + LINE.may_write] = is_used and not outgoing.has_messages

    def take_back(self) -> None:
        """Tell the transport's reader and writer what the function knows of the socket."""
        words, at = self._words, self._at
        incoming, outgoing = self.connection.incoming, self.connection.outgoing
        incoming.readable, incoming.wake_bytes = bool(words[at + LINE.readable]), words[at + LINE.low_water]
        outgoing.writable = bool(words[at + LINE.writable])
        outgoing.is_lent = self.is_half_way_out
        if words[at + LINE.is_ending] and not incoming.is_ending:
            incoming.read_to_the_end()

    def pop_traffic(self) -> RelayedTraffic | None:
        """Return what was exchanged since the last call, and count from 0 again."""
        words, at = self._words, self._at
        if not any(words[at + LINE.bytes_in : at + LINE.eager_bytes_in + 1]):
            return None
        traffic = RelayedTraffic(*words[at + LINE.bytes_in : at + LINE.eager_bytes_in + 1])
        for word in range(LINE.bytes_in, LINE.eager_bytes_in + 1):
            words[at + word] = 0
        return traffic

    def pop_header(self) -> memoryview | None:
        """Return the bytes of a header that the transport's reader must read, if there are some."""
        words, at = self._words, self._at
        if not words[at + LINE.in_refused] and not self._has_stray_header:
            return None
        words[at + LINE.bytes_in] -= words[at + LINE.in_got]  # whoever reads the header counts it
        begin = at + LINE.in_header
        header = words[begin : begin + HEADER_BYTES // 8].cast("B")[: words[at + LINE.in_got]]
        words[at + LINE.in_refused] = words[at + LINE.in_got] = 0
        return header

    def abandon(self, operation: RelayedOperation) -> None:
        """Have the function discard what is arriving of a failed operation, and send what is leaving to its end."""
        words, at = self._words, self._at
        if words[at + LINE.in_track] in operation.tracks:
            words[at + LINE.in_track] = w.DISCARDED
        if words[at + LINE.out_track] in operation.tracks:
            words[at + LINE.out_track] = w.DETACHED
            # The program may change its tensor from now on, and the receiver must not get the changed bytes.
            self.leaving = copy_at(words[at + LINE.out_at], words[at + LINE.out_left])
            if self.leaving:
                words[at + LINE.out_at] = address_of(self.leaving)

    @property
    def has_ended(self) -> bool:
        """Whether the function has come to the end of the stream."""
        return bool(self._words[self._at + LINE.failure])

    def close(self) -> None:
        """Let the function use the connection no more."""
        self._words[self._at + LINE.fd] = -1


class _FreeNumbers:
    """The numbers of lines, operations and tracks of the block that are free: the smallest are used first.

    The compiled function looks at all numbers up to the largest one in use.
    """

    def __init__(self) -> None:
        self._lines, self._operations = list(range(w.LINES_MAX)), list(range(w.OPERATIONS_MAX))
        self._tracks = list(range(w.TRACKS_MAX))

    @property
    def num_lines(self) -> int:
        """The number of free lines."""
        return len(self._lines)

    def has_room_for(self, num_tracks: int) -> bool:
        """Return whether an operation with so many tracks can be taken."""
        return bool(self._operations) and num_tracks <= len(self._tracks)

    def take_line(self) -> int:
        """Return the number of a line that is used from now on."""
        return heapq.heappop(self._lines)

    def give_line_back(self, number: int) -> None:
        """Note that a line is free."""
        heapq.heappush(self._lines, number)

    def take_operation(self, num_tracks: int) -> tuple[int, list[int]]:
        """Return the numbers of an operation, and of its tracks in ascending order, that are used from now on."""
        tracks, self._tracks = self._tracks[:num_tracks], self._tracks[num_tracks:]
        return heapq.heappop(self._operations), tracks

    def give_operation_back(self, number: int, tracks: list[int]) -> None:
        """Note that an operation and its tracks are free."""
        heapq.heappush(self._operations, number)
        if self._tracks and tracks[-1] > self._tracks[0]:
            self._tracks = sorted(self._tracks + tracks)
        else:  # the usual case, which needs no sort
            self._tracks[:0] = tracks


@final
class Relay:
    """The words of the compiled function, and the connections and operations that it has."""

    def __init__(self, port: RelayPort, settings: RelaySettings, user: RelayUser) -> None:
        """Begin without operations; ``user`` is told of the results."""
        self._port, self._user, self._bulk_bytes = port, user, settings.bulk_bytes
        self._loaded = w.load()
        block = np.zeros(w.BLOCK_WORDS, np.int64)
        #: For the function: room for sums, and behind it for events.
        self._room = np.zeros(4 * w.SUMS_MAX + w.EVENTS_MAX * _EVENT_BYTES, np.uint8)
        #: A memoryview reads and writes a word in a third of the time that an array takes.
        self._words = words = block.data
        #: The words of all tracks, a row for each.
        self._tracks = block[w.TRACKS_AT : w.OPERATIONS_AT].reshape(w.TRACKS_MAX, TRACK.num_words)
        self._tracks[:, TRACK.operation] = -1
        words[HEAD.address], words[HEAD.epoll] = address_of(words), port.epoll_fd
        words[HEAD.wide_sums] = address_of(self._room.data)
        words[HEAD.events], words[HEAD.event_bytes] = words[HEAD.wide_sums] + 4 * w.SUMS_MAX, _EVENT_BYTES
        words[HEAD.event_data], words[HEAD.prologue] = _EVENT_DATA, int.from_bytes(settings.prologue, "little")
        words[HEAD.is_fifo], words[HEAD.starvation_limit] = settings.is_fifo, settings.starvation_limit
        self._lines: dict[Connection, _Line] = {}
        #: Connections that are read only to the end of the present message: then an operation may be taken.
        self._wanted: set[Connection] = set()
        self._operations: dict[int, RelayedOperation] = {}
        self._failed: deque[RelayedOperation] = deque()
        #: ``_Line.needs_attention`` of any connection, as ``pump`` or ``settle`` has left it.
        self._needs_attention = False
        #: Memory for slots of later operations, by its length: to touch fresh memory takes time.
        self._memories: dict[int, Array] = {}
        self._free = _FreeNumbers()

    # -------------------------------------------------------------------------------------------------- connections

    def reads(self, connection: Connection) -> bool:
        """Whether the function reads from a connection, and not the transport's reader."""
        line = self._lines.get(connection)
        return line is not None and line.is_read

    def is_read_exactly(self, connection: Connection) -> bool:
        """Whether the transport's reader may read one message and no byte after it."""
        line = self._lines.get(connection)
        return connection in self._wanted or (line is not None and line.readers > 0)

    def sends_by(self, connection: Connection) -> bool:
        """Whether operations of the relay send by a connection."""
        line = self._lines.get(connection)
        return line is not None and line.writers > 0

    def take_turn(self, connection: Connection) -> bool:
        """Use the turn of the transport's writer; return whether it may begin a message now.

        If the relay sends by the connection, too, the writer has a turn only where its message is the most urgent one,
        and the turn is one message.
        """
        line = self._lines.get(connection)
        if line is None or not line.writers:
            return True
        is_turn = line.is_rivals_turn and self._user.order_of_bulk(connection.peer) is not None
        line.end_rivals_turn()
        return is_turn

    def is_rivals_turn(self, connection: Connection) -> bool:
        """Whether ``take_turn`` returns true as soon as the transport's writer has a message."""
        line = self._lines.get(connection)
        return line is None or not line.writers or line.is_rivals_turn

    def _comes_by(self, peer: int) -> Connection | None:
        """Return the connection by which bulk has come from a peer, if there is one and it is not encrypted."""
        for connection in self._port.connections.values():
            is_encrypted = connection.unsent_limit is None
            is_of_peer = connection.peer == peer and connection.established and not is_encrypted
            if is_of_peer and connection.incoming.longest_bytes > self._bulk_bytes:
                return connection
        return None

    def _leaves_by(self, peer: int) -> Connection | None:
        """Return the connection by which bulk leaves to a peer, if it is for bulk alone and not encrypted."""
        connection = self._port.bulk_routes.get(peer)
        if connection is None or not connection.established or connection.unsent_limit is None:
            return None
        return None if self._port.routes.get(peer) is connection else connection

    def _line(self, connection: Connection) -> _Line:
        """Return what the relay knows of a connection. There is room for it (``prepare_to_take``)."""
        line, limit = self._lines.get(connection), connection.unsent_limit
        if line is None:
            assert limit is not None
            if not self._free.num_lines:
                self._forget(next(line for line in self._lines.values() if line.is_idle))
            number = self._free.take_line()
            line = self._lines[connection] = _Line(connection, limit, number, self._words)
            self._words[HEAD.num_lines] = max(self._words[HEAD.num_lines], number + 1)
        return line

    def _forget(self, line: _Line) -> None:
        """Let go of a connection that has ended, or that nothing uses."""
        line.close()
        del self._lines[line.connection]
        self._free_number(line)

    def _free_number(self, line: _Line) -> None:
        """Let another connection have the number of one that was closed, if no operation uses the connection.

        An operation fails some time after its connection has ended, and its words name the number until then.
        """
        if not line.readers and not line.writers:
            self._free.give_line_back(line.number)

    # --------------------------------------------------------------------------------------------------- operations

    def is_busy(self) -> bool:
        """Return whether the function has something to do, or to wait for."""
        return bool(self._operations) or self._needs_attention

    def prepare_to_take(self, plan: RelayPlan) -> bool:
        """Prepare to take an operation with this plan; return whether it can be taken now.

        If it cannot, because a message is arriving from a source, nothing is read after that message.
        """
        if not self._free.has_room_for(len(plan.rows)):
            return False
        sources, targets = map(self._comes_by, plan.sources), map(self._leaves_by, plan.targets)
        incoming = {connection for connection in sources if connection is not None}
        outgoing = {connection for connection in targets if connection is not None}
        if len(incoming) < len(plan.sources) or len(outgoing) < len(plan.targets):
            return False
        needed = incoming | outgoing
        num_idle = sum(line.is_idle and connection not in needed for connection, line in self._lines.items())
        if len(needed.difference(self._lines)) > self._free.num_lines + num_idle:
            return False
        if plan.is_of_blocks:  # the engine may receive the message that is arriving (``accepts``)
            return True
        self._wanted |= incoming
        return all(connection.incoming.is_between_messages for connection in incoming)

    def hand_over(self) -> None:
        """Take operations that can be taken now."""
        self._wanted.clear()
        if self._user.has_candidates:
            self._user.hand_over()

    def take(self, task: RelayTask) -> RelayedOperation:
        """Take an operation that can be taken now."""
        plan = task.plan
        comes_by, leaves_by = set(), set()
        for peer in plan.peers:  # each counts before the next one is made, in place of an idle one
            incoming, outgoing = self._comes_by(peer), self._leaves_by(peer)
            if peer in plan.sources and incoming is not None:
                line = self._line(incoming)
                line.readers += 1
                comes_by.add(line)
            if peer in plan.targets and outgoing is not None:
                line = self._line(outgoing)
                line.writers += 1
                leaves_by.add(line)
        return self._add(task, comes_by, leaves_by)

    def _add(self, task: RelayTask, comes_by: set[_Line], leaves_by: set[_Line]) -> RelayedOperation:
        """Write the words of an operation and of its tracks."""
        plan, words = task.plan, self._words
        number, tracks = self._free.take_operation(len(plan.rows))
        at = w.OPERATIONS_AT + number * OPERATION.num_words
        words[at + OPERATION.is_promoted], words[at + OPERATION.has_failed] = task.order.is_promoted, 0
        words[at + OPERATION.priority], words[at + OPERATION.sequence] = task.order.priority, task.order.sequence
        words[at + OPERATION.kind], words[at + OPERATION.itemsize] = plan.kind, plan.itemsize
        words[at + OPERATION.reduction], words[at + OPERATION.divisor] = plan.reduction, plan.divisor
        words[at + OPERATION.ahead] = plan.ahead
        routes = comes_by, leaves_by
        operation = self._operations[number] = RelayedOperation(words, self._failed, task, number, tracks, routes)
        num_bytes = plan.slots[0] * plan.slots[1]
        if num_bytes:
            memory = self._memories.pop(num_bytes, None)
            operation.keep_in(np.empty(num_bytes, np.uint8) if memory is None else memory)
        words[at + OPERATION.tracks_left] = self._write_tracks(operation)
        words[HEAD.num_tracks] = max(words[HEAD.num_tracks], tracks[-1] + 1)
        return operation

    def _write_tracks(self, operation: RelayedOperation) -> int:
        """Write the words of the tracks of an operation; return how many of them have not ended.

        All tracks at once: an operation has hundreds of them, and one by one they took 0.6 ms.
        """
        task = operation.task
        plan, (key, iteration) = task.plan, task.key
        tracks = plan.tracks.copy()
        tracks[:, _SAME] = operation.number, _word(key), task.order.priority & 0xFFFFFFFF
        tracks[:, TRACK.iteration] += iteration
        if plan.has_states:
            tracks[:, TRACK.states] = operation.addresses_of_states
        positions = tracks[:, TRACK.receives : TRACK.sends + 1]
        positions[:] = task.standing.positions
        self._tracks[operation.tracks] = tracks
        return int(np.count_nonzero(positions.min(axis=1) < tracks[:, TRACK.length]))

    def _remove(self, operation: RelayedOperation) -> None:
        """Take out an operation that has ended."""
        words = self._words
        operation.is_removed = True
        del self._operations[operation.number]
        for line in operation.comes_by:
            line.readers -= 1
        for line in operation.leaves_by:
            line.writers -= 1
        for line in operation.comes_by | operation.leaves_by:
            if self._lines.get(line.connection) is not line:
                self._free_number(line)
        if operation.memory is not None and operation.has_ended and operation.touched_bytes <= _KEPT_BYTES_MAX:
            self._memories[len(operation.memory)] = operation.memory
            if len(self._memories) > _KEPT_MAX:
                del self._memories[next(iter(self._memories))]
        self._free.give_operation_back(operation.number, operation.tracks)
        for track in operation.tracks:
            words[w.TRACKS_AT + track * TRACK.num_words + TRACK.operation] = -1
        words[HEAD.num_tracks] = 1 + max((other.tracks[-1] for other in self._operations.values()), default=-1)

    def _sweep(self) -> None:
        """Take out the operations that have failed, and the connections that were closed."""
        while self._failed:
            operation = self._failed.popleft()
            if self._operations.get(operation.number) is operation:
                for line in self._lines.values():
                    line.abandon(operation)
                self._remove(operation)
        for line in [line for line in self._lines.values() if line.connection.sock.fileno() < 0]:
            self._forget(line)

    # ------------------------------------------------------------------------------------------------- the function

    def keep_rests(self) -> None:
        """Copy what has not left of the messages of operations that have failed."""
        self._sweep()

    def pump(self, timeout_s: float) -> bool:
        """Have the function move messages, and wait for ``timeout_s`` at most if there are none.

        It returns as soon as there is something for the transport (``RelayPort.events``) or for ``settle``. Returns
        whether it could go on after that: a rival's turn alone is no reason to go on.
        """
        self._sweep()
        words, lines = self._words, self._lines.values()
        for line in lines:
            line.lend()
            if line.writers or line.has_rival:
                line.end_rivals_turn()  # if it was not used, the function decides it again
                line.note_rival(self._user.order_of_bulk(line.connection.peer))
        try:
            self._loaded.function(words[HEAD.address], int(timeout_s * 1e9))
        except BaseException:  # Ctrl-C: the group fails, and nothing may follow a message that is half-way out
            for line in lines:
                if line.is_half_way_out:
                    line.connection.shutdown()
            raise
        finally:
            for index in range(words[HEAD.num_events_left]):
                at = HEAD.events_left + 2 * index
                self._port.events.append((words[at], words[at + 1] & 0xFFFFFFFF))
            for line in lines:
                line.take_back()
            self._needs_attention = any(line.needs_attention for line in lines)
        return bool(words[HEAD.status] & ~w.RIVALS_TURN)

    def settle(self, now: float) -> list[Connection]:
        """Report what the function has done: bytes, the ends of operations and connections.

        Returns the connections of which a message that the function has refused is to be read.
        """
        refused = []
        self._sweep()
        for operation in tuple(self._operations.values()):
            used, reached = operation.pop_moved()
            if used or reached:
                self._user.relay_moved(operation.task, used, reached)
        ended = [operation for operation in self._operations.values() if operation.has_ended]
        for operation in ended:  # first, because it decides who reads what comes next
            self._remove(operation)
        for line in list(self._lines.values()):
            connection = line.connection
            header = line.pop_header()
            traffic = line.pop_traffic()
            if traffic is not None:
                if traffic.bytes_in:
                    connection.pulse.heard_at = connection.incoming.moved_at = now
                if traffic.bytes_out:
                    connection.pulse.spoke_at = now
                self._user.relayed(connection.peer, traffic)
            if not line.is_half_way_out:
                line.leaving = None
            if header is not None:
                connection.incoming.give(header)
                refused.append(connection)
            if line.has_ended:
                self._forget(line)
                connection.incoming.read_to_the_end()  # the transport's reader finds the same end, and reports it
        self._needs_attention = any(line.needs_attention for line in self._lines.values())
        for operation in ended:
            self._user.relay_ended(operation.task)
        return refused

    def arriving(self) -> set[int]:
        """Return the peers of which a message of an operation is arriving. Any thread."""
        return {line.connection.peer for line in tuple(self._lines.values()) if line.is_half_way_in}


def _word(number: int) -> int:
    """Return a number of 64 bits as a signed one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _count_receives(rows: array[int]) -> int:
    """Return the number of rows that receive."""
    return sum(action not in (w.SEND, w.NOTHING) for action in rows[:: ROW.num_words])
