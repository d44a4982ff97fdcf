"""The TCP transport alone, driven step by step by one thread: what leaves when, with and without TLS."""

import time
from collections import deque

import pytest

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.header import Frame, Header
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.tcp import TcpTransport, listen

CONFIG = TcpConfig(heartbeat_s=5.0, silence_s=60.0, notsent_lowat_bytes=64 * 1024)


class Message:
    share_key = None

    def __init__(self, number, body_bytes):
        self.number, self.body = number, memoryview(bytes([number % 251]) * body_bytes)
        self.header = Header(Frame.DATA, 0, operation=number, body_bytes=body_bytes).pack()


class Box:
    """Where a body goes."""

    lease = None

    def __init__(self, header):
        self.number, self.view = header.operation, memoryview(bytearray(header.body_bytes))


class Rank:
    """An endpoint that is a list of messages; a peer is ready until the transport was told that there is none."""

    def __init__(self, transport):
        self.transport, self.outbox, self.taken, self.inbox, self.lost = transport, deque(), [], [], []
        self.receives, self._ready = True, set()
        transport.attach(self)

    def post(self, *messages):
        self.outbox.extend(messages)
        self._ready.add(1 - self.transport.rank)

    def ready_peers(self):
        return self._ready

    def next_message(self, peer):
        if not self.outbox:
            self._ready.discard(peer)
            return None
        self.taken.append(self.outbox.popleft())
        return self.taken[-1]

    def message_sent(self, message):
        pass

    def may_receive(self):
        return self.receives

    def accept(self, peer, header, lease=None):
        return Box(header)

    def delivered(self, box):
        assert bytes(box.view) == bytes([box.number % 251]) * len(box.view)
        self.inbox.append(box.number)

    def peer_lost(self, peer, reason):
        self.lost.append(reason)


@pytest.fixture(params=["plain", "tls"])
def ranks(request):
    files = request.getfixturevalue("rank_tls")[:2] if request.param == "tls" else [None, None]
    doors = [listen("127.0.0.1") for _ in range(2)]
    addresses = [door.getsockname()[:2] for door in doors]
    identity = JobIdentity(bytes(16), "test", 0)
    made = [
        Rank(TcpTransport(rank, addresses, door, identity, CONFIG, tls))
        for rank, (door, tls) in enumerate(zip(doors, files, strict=True))
    ]
    yield made
    for rank in made:
        rank.transport.close(0.0)


def turn(ranks, until, *, timeout_s=20.0):
    """Let every rank make progress until something is so."""
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, [(rank.inbox[-3:], rank.lost) for rank in ranks]
        for rank in ranks:
            if not rank.transport.progress():
                rank.transport.wait(0.002)


def fill(sender, receiver, message):
    """Send, to somebody who does not read, until nothing more goes out."""
    receiver.receives = False
    quiet = 0
    while quiet < 20:
        count = len(sender.taken)
        message(sender)
        for rank in (sender, receiver):
            rank.transport.progress()
        quiet = quiet + 1 if len(sender.taken) == count else 0
        time.sleep(0.001)


def test_every_message_arrives_once_whole_and_in_order(ranks):
    first, second = ranks
    sizes = [0, 1, 63, 8191, 8192, 8193, 16383, 16384, 16385, 65535, 65536, 65537, 300_000, 5 << 20, 1, 0]
    first.post(*(Message(number, size) for number, size in enumerate(sizes)))
    second.post(*(Message(number, size) for number, size in enumerate(reversed(sizes))))
    turn(ranks, lambda: len(first.inbox) == len(second.inbox) == len(sizes))
    assert first.inbox == second.inbox == list(range(len(sizes)))
    assert first.transport.idle()
    assert second.transport.idle()
    assert not first.lost + second.lost


def test_the_last_messages_leave_although_their_peer_is_not_ready_any_more(ranks):
    """A full socket cuts the last messages in two; nothing but the socket itself will ask for the rest."""
    first, second = ranks

    def three(rank):
        if not rank.outbox and rank.transport.idle():
            rank.post(*(Message(len(rank.taken) + number, 1000) for number in range(3)))

    first.post(Message(0, 0))
    turn(ranks, lambda: second.inbox == [0])
    fill(first, second, three)
    assert not first.transport.idle()
    assert not first.ready_peers()
    second.receives = True
    turn(ranks, lambda: len(second.inbox) == len(first.taken))
    assert second.inbox == list(range(len(first.taken)))
    assert first.transport.idle()


def test_what_is_urgent_overtakes_everything_that_has_not_begun_to_leave(ranks):
    first, second = ranks

    def bulk(rank):
        while len(rank.outbox) < 3:
            rank.post(Message(len(rank.taken) + len(rank.outbox), 256 * 1024))

    fill(first, second, bulk)
    begun = len(first.taken)
    first.outbox.appendleft(Message(250, 10))
    second.receives = True
    turn(ranks, lambda: len(second.inbox) >= begun + 4)
    assert second.inbox[: begun + 2] == [*range(begun), 250, begun]
