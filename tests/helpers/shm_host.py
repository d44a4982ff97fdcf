"""Ranks of one host in one thread, moved by hand: what the tests of the shared-memory transport share."""

from __future__ import annotations

import contextlib
import select
from collections import deque
from types import SimpleNamespace

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.header import Frame, Header
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.shm import ShmTransport, listen
from totalreduce.transports.shm_memory import OWNER
from totalreduce.transports.shm_waiting import ASLEEP, WANTS_ROOM

IDENTITY = JobIdentity(bytes(range(32)), "job/default", 0)
PIECE = 128 * 1024


def message(body: bytes | bytearray = b"", *, frame: Frame = Frame.DATA, step: int = 0, key: object = None):
    header = Header(frame, 0, 7, step=step, body_bytes=len(body)).pack()
    return SimpleNamespace(header=header, body=memoryview(body) if body else None, share_key=key)


class RecordingEndpoint:
    """An endpoint that remembers everything. ``keeps``: it takes every lease and releases none by itself."""

    def __init__(self) -> None:
        self.outbox: dict[int, deque] = {}
        self.sent: list = []
        self.received: list[tuple[int, int, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.leases: list = []
        self.open, self.keeps = True, False

    def put(self, peer: int, *messages) -> None:
        self.outbox.setdefault(peer, deque()).extend(messages)

    def ready_peers(self, *, bulk: bool = False):
        if bulk:
            return []
        return [peer for peer, waiting in self.outbox.items() if waiting]

    def next_message(self, peer: int, *, bulk: bool = False):
        waiting = self.outbox.get(peer)
        return waiting.popleft() if waiting else None

    def message_sent(self, sent) -> None:
        self.sent.append(sent)

    def may_receive(self) -> bool:
        return self.open

    def accept(self, peer: int, header: Header, lease=None):
        taken = lease if self.keeps else None
        view = lease.body if taken is not None else memoryview(bytearray(header.body_bytes))
        return SimpleNamespace(peer=peer, header=header, view=view, lease=taken)

    def delivered(self, delivery) -> None:
        self.received.append((delivery.peer, delivery.header.step, bytes(delivery.view)))
        if delivery.lease is not None:
            self.leases.append(delivery.lease)

    def peer_lost(self, peer: int, reason: str) -> None:
        self.lost.append((peer, reason))


class Host(contextlib.AbstractContextManager["Host"]):
    """``count`` ranks that have met, unless ``meet`` is false."""

    def __init__(self, count: int, *, meet: bool = True, identities=None, config: TcpConfig | None = None, **sizes):
        doors = [listen() for _ in range(count)]
        self.names = [name for _, name in doors]
        sizes = {"max_body_bytes": PIECE, "pool_bytes": 4 * PIECE} | sizes
        identities = identities or [IDENTITY] * count
        self.ranks = [
            ShmTransport(rank, self.names, door, identities[rank], config or TcpConfig(), **sizes)
            for rank, (door, _) in enumerate(doors)
        ]
        self.endpoints = [RecordingEndpoint() for _ in range(count)]
        self.closed: set[int] = set()
        for rank, endpoint in zip(self.ranks, self.endpoints, strict=True):
            rank.attach(endpoint)
        if meet:
            self.move(until=lambda: all(len(rank.connected_peers()) == count - 1 for rank in self.ranks))

    def move(self, rounds: int = 12, *, only=None, until=None) -> None:
        """Let every rank that is not closed (or only some) make progress."""
        for _ in range(1000 if until is not None else rounds):
            for number, rank in enumerate(self.ranks):
                if number not in self.closed and (only is None or number in only):
                    rank._next_look = 0.0  # sockets every time: nothing here waits for a clock
                    rank.progress()
            if until is not None and until():
                return
        assert until is None, "it never came about"

    def close(self, rank: int) -> None:
        self.closed.add(rank)
        self.ranks[rank].close(1.0)

    def __exit__(self, *_: object) -> None:
        for rank in set(range(len(self.ranks))) - self.closed:
            self.close(rank)


def asleep(host: Host, rank: int) -> int:
    return host.ranks[rank]._outbox.words[OWNER.sleep] & (ASLEEP | WANTS_ROOM)


def readable(host: Host, rank: int) -> bool:
    return bool(select.select([host.ranks[rank].fileno()], [], [], 0)[0])


def assert_woken_when_given_back(host: Host, rank: int, lease) -> None:
    """``rank`` has nothing to do until ``lease`` is released, sleeps, and is woken by that; then all go on."""
    assert host.ranks[rank].fall_asleep(eager=False)
    assert asleep(host, rank) == ASLEEP | WANTS_ROOM
    lease.release()
    assert readable(host, rank)
    host.ranks[rank].wake_up(eager=False)
    assert not host.ranks[rank].fall_asleep(eager=False)
    host.move()
