"""Messages beside the engine: whole and in order; what a peer can make grow is bounded."""

import pytest

from totalreduce.engine.channels import Bodies, Channels
from totalreduce.engine.members import Members
from totalreduce.engine.outbox import PIECE_BYTES, Outbox, pieces
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ProtocolError


def make_channels() -> Channels:
    outbox = Outbox(EngineConfig(), 0)
    return Channels(outbox, Members(0, 3))


class Recorder:
    """A channel that remembers."""

    def __init__(self) -> None:
        self.received: list[tuple[int, bytes]] = []

    def receive(self, peer, message, now):
        self.received.append((peer, message))


class Reader(Recorder):
    """A channel whose messages are the lengths of the bodies that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[tuple[int, list[bytes]]] = []

    def receive(self, peer, message, now):
        super().receive(peer, message, now)
        views = [memoryview(bytearray(length)) for length in message]
        return Bodies(views, lambda: self.bodies.append((peer, list(map(bytes, views))))) if views else None


def send_body(channels: Channels, peer: int, number: int, body: bytes) -> None:
    room = channels.room(peer, number, len(body))
    if room is not None:
        room[:] = body
        channels.body_arrived(peer, number)


def send(channels: Channels, peer: int, number: int, message: bytes) -> None:
    for piece, last in pieces(message):
        channels.arrived(peer, number, piece, last=last, now=0.0)


def send_all(channels: Channels, peer: int, numbers, message: bytes) -> None:
    for number in numbers:
        send(channels, peer, number, message)


@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
@pytest.mark.parametrize("early", [False, True])
def test_messages_of_any_length(length: int, early: bool) -> None:
    channels, recorder = make_channels(), Recorder()
    if not early:
        channels.open(7, recorder, 0.0)
    messages = [bytes([peer]) * length for peer in range(3)]
    for peer, message in enumerate(messages):
        send(channels, peer, 7, message)
        send(channels, peer, 7, b"second")
    if early:
        assert recorder.received == []
        channels.open(7, recorder, 0.0)
    assert recorder.received == [(p, m) for p, message in enumerate(messages) for m in (message, b"second")]


def test_an_unfinished_message_of_a_channel_that_opens_meanwhile() -> None:
    channels, recorder = make_channels(), Recorder()
    channels.arrived(1, 7, b"first half, ", last=False, now=0.0)
    channels.open(7, recorder, 0.0)
    channels.arrived(1, 7, b"second half", last=True, now=0.0)
    assert recorder.received == [(1, b"first half, second half")]


def test_a_closed_channel_keeps_nothing() -> None:
    channels, recorder = make_channels(), Recorder()
    channels.open(7, recorder, 0.0)
    channels.arrived(1, 7, b"half", last=False, now=0.0)
    channels.close(7)
    for _ in range(10_000):
        channels.arrived(1, 7, bytes(PIECE_BYTES), last=False, now=0.0)
    channels.arrived(1, 7, b"", last=True, now=0.0)
    assert (channels._partial, channels._early, recorder.received) == ({}, {}, [])


def test_a_message_that_is_too_long() -> None:
    channels = make_channels()
    channels.open(7, Recorder(), 0.0)
    with pytest.raises(ProtocolError, match="rank 1 sends a message of more than 8388608 bytes"):
        send(channels, 1, 7, bytes(8 * 2**20 + 1))
    send(channels, 2, 7, bytes(8 * 2**20))


def test_unfinished_messages_in_many_channels() -> None:
    """One message of a peer is under way at a time, so nobody makes this rank keep many."""
    channels = make_channels()
    for number in range(40):
        channels.open(number, Recorder(), 0.0)
    channels.arrived(1, 0, b"half", last=False, now=0.0)
    channels.arrived(2, 1, b"another rank's", last=False, now=0.0)
    with pytest.raises(ProtocolError, match="rank 1 sends a message through one channel in the midst of another"):
        channels.arrived(1, 1, b"half", last=False, now=0.0)


@pytest.mark.parametrize("body", [b"", bytes(1000), bytes(PIECE_BYTES)])
@pytest.mark.parametrize("same_channel", [False, True])
def test_what_comes_for_channels_that_are_not_open(body: bytes, same_channel: bool) -> None:
    channels = make_channels()
    send(channels, 2, 7, b"of a rank that does not flood")
    numbers = [7] * 10_000 if same_channel else range(10_000)
    with pytest.raises(ProtocolError, match="rank 1 sends too much through channels that are not open here"):
        send_all(channels, 1, numbers, body)
    kept = sum(len(message) for waiting in channels._early.values() for _, message in waiting)
    assert kept <= 1024 * 1024
    assert sum(map(len, channels._early.values())) <= 2049


def test_an_unfinished_message_for_a_channel_that_is_not_open() -> None:
    channels = make_channels()
    with pytest.raises(ProtocolError, match="rank 1 sends too much through channels that are not open here"):
        send(channels, 1, 7, bytes(2 * 2**20))
    assert channels._partial == {}


def test_bodies_come_into_the_memory_that_the_channel_has_named() -> None:
    """Also in parts, from several peers at once, and with messages of other channels in between."""
    channels, reader, other = make_channels(), Reader(), Recorder()
    channels.open(7, reader, 0.0)
    channels.open(8, other, 0.0)
    for peer in (1, 2):
        send(channels, peer, 7, bytes([3, 5]))
        send_body(channels, peer, 7, b"abc")
        send(channels, peer, 8, b"between")
        send_body(channels, peer, 7, b"de")
    assert reader.bodies == []
    send_body(channels, 2, 7, b"fgh")
    send_body(channels, 1, 7, b"ijk")
    assert reader.bodies == [(2, [b"abc", b"defgh"]), (1, [b"abc", b"deijk"])]
    assert other.received == [(1, b"between"), (2, b"between")]
    send(channels, 1, 7, b"")  # a message without bodies
    assert len(reader.received) == 3
    assert channels._following == {}


@pytest.mark.parametrize(
    ("number", "length"),
    [(7, 4), (7, 0), (8, 3), (9, 3)],
    ids=["longer", "empty", "of another channel", "of no channel"],
)
def test_a_body_that_no_message_has_announced(number: int, length: int) -> None:
    channels = make_channels()
    for each in (7, 8):
        channels.open(each, Reader(), 0.0)
    with pytest.raises(ProtocolError, match="rank 1 sends 3 bytes of a body that no message has announced"):
        channels.room(1, 7, 3)
    send(channels, 1, 7, bytes([3]))
    with pytest.raises(ProtocolError, match=f"rank 1 sends {length} bytes of a body that no message has announced"):
        channels.room(1, number, length)


@pytest.mark.parametrize("number", [7, 8])
def test_a_message_before_the_bodies_of_the_one_before(number: int) -> None:
    channels = make_channels()
    for each in (7, 8):
        channels.open(each, Reader(), 0.0)
    send(channels, 1, 7, bytes([3]))
    with pytest.raises(ProtocolError, match="rank 1 sends a message before the bodies that follow an earlier one"):
        send(channels, 1, number, bytes([3]))


def test_the_bodies_of_a_closed_channel_are_forgotten() -> None:
    channels, reader = make_channels(), Reader()
    channels.open(7, reader, 0.0)
    send(channels, 1, 7, bytes([3, 4]))
    forgotten: list[int | None] = []
    channels.on_forgotten = forgotten.append
    assert channels.room(1, 7, 3) is not None
    channels.close(7)
    assert forgotten == [7]  # the body that is under way is not written to its memory any more
    channels.body_arrived(1, 7)
    assert channels.room(1, 7, 4) is None
    channels.body_arrived(1, 7)
    assert (channels._following, reader.bodies) == ({}, [])


def test_a_second_part_before_the_first_one_has_come() -> None:
    """By another connection, it could end the body before all of it has come."""
    channels, reader = make_channels(), Reader()
    channels.open(7, reader, 0.0)
    send(channels, 1, 7, bytes([5]))
    assert channels.room(1, 7, 3) is not None
    with pytest.raises(ProtocolError, match="rank 1 sends 2 bytes of a body that no message has announced"):
        channels.room(1, 7, 2)
    assert reader.bodies == []
