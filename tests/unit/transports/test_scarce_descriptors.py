"""A process that can open no more sockets: it waits without spinning, says so rarely, and goes on when it can."""

import select
import socket
import time

import pytest
import shm_host
from shm_host import RecordingEndpoint, message

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.transports import tcp
from totalreduce.transports.base import TransportCounters
from totalreduce.transports.listener import DescriptorShortage, Listener

NUMBERS = [1, 2, 4, 8, 16, 32, 64, 128]


def numbers_in(caplog):
    """Which failures were logged; every line names the limit and the remedy."""
    numbers = []
    for record in caplog.records:
        text = record.getMessage()
        assert "too many open files (EMFILE)" in text
        assert "`ulimit -n" in text
        numbers.append(int(text.split("(number ")[1].split(")")[0]))
    return numbers


def test_connections_that_cannot_be_accepted_wait_without_a_loop(descriptors, caplog):
    listener = tcp.listen("127.0.0.1")
    epoll = select.epoll()
    door = Listener(3, listener, epoll, TransportCounters())
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    accepted, rounds = [], 0

    def turn_until(moment, count):
        nonlocal rounds
        while time.monotonic() < moment and len(accepted) < count:
            rounds += 1
            door.resume(time.monotonic())
            if epoll.poll(max(0.0, min(moment, door.resume_at) - time.monotonic())):
                connection = door.accept(time.monotonic())
                accepted.extend([connection[0]] if connection else [])

    descriptors.exhaust(leave=1)
    turn_until(time.monotonic() + 0.55, 3)
    assert len(accepted) == 1
    assert 2 <= rounds <= 16
    failures = numbers_in(caplog)
    assert failures in (NUMBERS[:1], NUMBERS[:2], NUMBERS[:3])
    assert all(text.startswith("rank 3 cannot accept a connection") for text in caplog.messages)
    descriptors.free(4)
    turn_until(time.monotonic() + 10, 3)
    assert len(accepted) == 3
    assert numbers_in(caplog) == failures
    door.close()
    epoll.close()
    for sock in (*strangers, *accepted):
        sock.close()


def test_other_errors_of_accept_do_not_close_the_door(caplog):
    listener = socket.socket()  # does not listen: every ``accept`` fails
    listener.setblocking(False)
    epoll = select.epoll()
    door = Listener(0, listener, epoll, TransportCounters())
    assert [door.accept(0.0) for _ in range(100)] == [None] * 100
    assert door.resume_at == float("inf")
    assert [int(text.split("(number ")[1].split(")")[0]) for text in caplog.messages] == NUMBERS[:7]
    assert all("Invalid argument (EINVAL)" in text for text in caplog.messages)
    door.close()
    epoll.close()


def test_a_shortage_that_lasts_is_an_error_and_one_that_ended_is_forgotten(caplog):
    error = OSError(24, "Too many open files")
    shortage = DescriptorShortage(5, patience_s=20.0)
    for second in range(20):
        shortage.occurred(1, error, 100.0 + second)
    assert numbers_in(caplog) == NUMBERS[:5]
    shortage.ended()
    shortage.occurred(1, error, 200.0)
    shortage.occurred(2, error, 220.0)
    with pytest.raises(ConfigurationError, match=r"rank 5 cannot connect to rank 2: too many open files \(EMFILE\)"):
        shortage.occurred(2, error, 220.1)


class Pair:
    """Two ranks of one transport in this thread."""

    def __init__(self, kind, **settings):
        config = TcpConfig(heartbeat_s=0.1, silence_s=60.0, **settings)
        if kind == "tcp":
            doors = [tcp.listen("127.0.0.1") for _ in range(2)]
            addresses = [door.getsockname()[:2] for door in doors]
            self.links = [
                tcp.TcpTransport(rank, addresses, door, shm_host.IDENTITY, config) for rank, door in enumerate(doors)
            ]
        else:
            doors, addresses = zip(*(shm_host.listen() for _ in range(2)), strict=True)
            self.links = [
                shm_host.ShmTransport(rank, addresses, door, shm_host.IDENTITY, config)
                for rank, door in enumerate(doors)
            ]
        self.endpoints = [RecordingEndpoint(), RecordingEndpoint()]
        for link, endpoint in zip(self.links, self.endpoints, strict=True):
            link.attach(endpoint)

    def turn(self, seconds, *, until=lambda: False):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            for link in self.links:
                if not link.progress():
                    link.wait(0.005)

    def arrived(self):
        return [body for _, _, body in self.endpoints[1].received]

    def close(self):
        for link in self.links:
            link.close(0.0)


@pytest.fixture
def pair():
    made = []

    def make(kind, **settings):
        made.append(Pair(kind, **settings))
        return made[0]

    yield make
    for one in made:
        one.close()


# Of shared memory one side's sockets are all that is needed to begin; then descriptors change hands.
@pytest.mark.parametrize(("kind", "leave"), [("tcp", 0), ("tcp", 1), ("shm", 0), ("shm", 1)])
def test_a_peer_gets_in_when_descriptors_are_free_again(pair, descriptors, caplog, kind, leave):
    ranks = pair(kind)
    ranks.endpoints[0].put(1, message(b"late but whole"))
    descriptors.exhaust(leave=leave)
    ranks.turn(0.5)
    assert ranks.arrived() == []
    assert ranks.endpoints[0].lost == ranks.endpoints[1].lost == []
    logged = numbers_in(caplog)
    assert logged in (NUMBERS[:1], NUMBERS[:2], NUMBERS[:3], NUMBERS[:4])
    descriptors.free(8 - leave)
    ranks.turn(10, until=ranks.arrived)
    assert ranks.arrived() == [b"late but whole"]
    assert ranks.endpoints[0].lost == ranks.endpoints[1].lost == []
    assert numbers_in(caplog) == logged


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_rank_that_can_never_connect_fails_by_itself_and_names_the_limit(pair, descriptors, kind):
    ranks = pair(kind, connect_timeout_s=0.3)
    ranks.endpoints[0].put(1, message(b"never"))
    descriptors.exhaust()
    with pytest.raises(ConfigurationError, match=r"rank 0 cannot connect to rank 1: too many open files \(EMFILE\)"):
        ranks.turn(10)
    assert ranks.endpoints[0].lost == []  # rank 1 is not to blame


def test_a_rank_that_cannot_ask_for_a_late_one_does_not_call_it_lost(pair, descriptors):
    ranks = pair("shm", connect_timeout_s=0.5)
    ranks.endpoints[1].put(0, message(b"to the lower rank, which connects"))
    descriptors.exhaust()
    moved = ranks.links[1]
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        if not moved.progress():
            moved.wait(0.005)
    assert ranks.endpoints[1].lost == []
    descriptors.free(8)
    ranks.turn(10, until=lambda: ranks.endpoints[0].received)
    assert [body for _, _, body in ranks.endpoints[0].received] == [b"to the lower rank, which connects"]
    assert ranks.endpoints[1].lost == []


@pytest.mark.parametrize("left", [2, 3, 4])
def test_memory_that_cannot_be_taken_over_is_no_difference_of_layouts(pair, descriptors, left):
    """The kernel drops descriptors for which there is no room; a mapping needs one more."""
    ranks = pair("shm")
    ranks.endpoints[0].put(1, message(b"never"))
    descriptors.exhaust(leave=left)
    with pytest.raises(ConfigurationError, match=r"cannot share memory with rank \d: too many open files \(EMFILE\)"):
        ranks.turn(10)
