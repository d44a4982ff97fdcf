"""Messages beside the engine: whole and in order; what a peer can make grow is bounded."""

import pytest

from totalreduce.engine.channels import Channels
from totalreduce.engine.members import Members
from totalreduce.engine.outbox import PIECE_BYTES, Outbox, pieces
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ProtocolError


def make_channels() -> Channels:
    outbox = Outbox(EngineConfig(), 0)
    return Channels(outbox, Members(0, 3, outbox))


class Recorder:
    """A channel that remembers."""

    def __init__(self) -> None:
        self.received: list[tuple[int, bytes]] = []

    def receive(self, peer, message, now):
        self.received.append((peer, message))


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
