"""Ranks that are TCP transports with lists of messages, driven step by step by one thread: what several tests share."""

import time
from collections import deque

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.header import Frame, Header

CONFIG = TcpConfig(heartbeat_s=20.0, silence_s=60.0, notsent_lowat_bytes=64 * 1024)


class Message:
    share_key = None

    def __init__(self, number, body_bytes, frame=Frame.DATA):
        self.number, self.body = number, memoryview(bytes([number % 251]) * body_bytes)
        self.header = Header(frame, 0, operation=number, body_bytes=body_bytes).pack()


class Box:
    """Where a body goes."""

    lease = None

    def __init__(self, header):
        self.number, self.view = header.operation, memoryview(bytearray(header.body_bytes))


class Rank:
    """An endpoint that is two lists of messages; a peer is ready until the transport was told that there is none."""

    def __init__(self, transport):
        self.transport, self.outbox, self.taken, self.inbox, self.lost = transport, deque(), [], [], []
        self.bulk, self.sent, self.left = deque(), [], False
        self.receives, self._ready = True, (set(), set())
        transport.attach(self)

    def post(self, *messages):
        self.outbox.extend(messages)
        self._ready[False].add(1 - self.transport.rank)

    def post_bulk(self, *messages):
        self.bulk.extend(messages)
        self._ready[True].add(1 - self.transport.rank)

    def ready_peers(self, *, bulk=False):
        return self._ready[bulk]

    def next_message(self, peer, *, bulk=False):
        queue = self.bulk if bulk else self.outbox
        if not queue:
            self._ready[bulk].discard(peer)
            return None
        self.taken.append(queue.popleft())
        return self.taken[-1]

    def message_sent(self, message):
        self.sent.append(message.number)

    def may_receive(self):
        return self.receives

    def accept(self, peer, header, lease=None):
        return Box(header)

    def delivered(self, box):
        assert bytes(box.view) == bytes([box.number % 251]) * len(box.view)
        self.inbox.append(box.number)

    def peer_lost(self, peer, reason):
        self.lost.append(reason)


def turn(ranks, until, *, timeout_s=20.0):
    """Let every rank make progress until something is so."""
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, [(rank.inbox[-3:], rank.lost) for rank in ranks]
        for rank in ranks:
            if not rank.transport.progress():
                rank.transport.wait(0.002)


def settle(ranks):
    """Let every rank make progress until no event comes any more, so that nothing is left of the handshakes.

    ``wait`` returns at an event that ``progress`` must handle, such as a connection that the other rank opens.
    """
    quiet = 0
    while quiet < 3:
        quiet += 1
        for rank in ranks:
            rank.transport._poller.poll(0.01)
            if rank.transport._poller.events:
                quiet = 0
            rank.transport.progress()
