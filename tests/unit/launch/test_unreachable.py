"""Rank 0's address cannot be reached: each cause is a sentence of its own, with what to check."""

import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from totalreduce.foundation.errors import RendezvousError
from totalreduce.foundation.world import World
from totalreduce.launch import unreachable
from totalreduce.launch.rendezvous import open_store
from totalreduce.launch.unreachable import await_listener, why_unreachable


def failing(error):
    def connect(*_, **__):
        raise error

    return connect


def of_system(number):
    return OSError(number, os.strerror(number))


@pytest.fixture
def node9(monkeypatch):
    """A name that the name service knows."""
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.9", 29500))]
    )


@pytest.fixture
def full_listener():
    """The port of a listener that accepts nobody: requests to connect are dropped, as a firewall does."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def world_at(host, port):
    return World(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        master_address=host,
        master_port=port,
        launcher="torchrun",
        job_id="",
    )


@pytest.mark.usefixtures("node9")
@pytest.mark.parametrize(
    ("error", "sentence", "advice"),
    [
        (of_system(errno.ECONNREFUSED), "nobody listens at port 29500 of node9", "Was rank 0 started"),
        (of_system(errno.EHOSTUNREACH), "there is no route from this host to node9", "interface"),
        (of_system(errno.ENETUNREACH), "there is no route from this host to node9", "interface"),
        (TimeoutError("timed out"), "node9 does not answer at port 29500", "firewall"),
        (of_system(errno.EACCES), "a connection to node9, port 29500, failed: Permission denied (EACCES)", ""),
    ],
)
def test_each_cause_has_its_own_sentence(monkeypatch, error, sentence, advice):
    monkeypatch.setattr(socket, "create_connection", failing(error))
    text = why_unreachable("node9", 29500, 1.0)
    assert sentence in text
    assert advice in text


def test_a_listener_is_no_cause():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert why_unreachable("127.0.0.1", server.getsockname()[1], 5.0) is None


def test_that_nobody_listens_does_not_explain_why_rank_0_could_not():
    assert why_unreachable("127.0.0.1", refused_port(), 5.0, serves=True) is None


def test_the_address_beyond_one_that_refuses_is_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert why_unreachable("node9", port, 5.0) is None


def refused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_rank_that_finds_nobody_says_so():
    port = refused_port()
    cause = f"^rank 1 cannot reach the store at 127.0.0.1:{port}: nobody listens at port {port}"
    with pytest.raises(RendezvousError, match=cause):
        open_store(world_at("127.0.0.1", port), 0.3)


def test_a_rank_whose_host_does_not_know_the_name_says_so(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.gaierror(socket.EAI_NONAME, "Name or service not known")))
    cause = "^rank 1 cannot reach the store at node9:29500: this host does not know the name 'node9'.*spelling"
    with pytest.raises(RendezvousError, match=cause):
        open_store(world_at("node9", 29500), 0.3)


def test_the_deadline_holds_if_the_name_service_does_not_answer(monkeypatch):
    """The system's look-up takes ten seconds and more then, which came on top of the deadline."""
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30))
    begun = time.monotonic()
    try:
        with pytest.raises(RendezvousError, match="the name service of this host does not answer for the name 'node9'"):
            open_store(world_at("node9", 29500), 0.3)
    finally:
        answered.set()
    assert time.monotonic() - begun < 5.0


def test_the_deadline_holds_if_the_host_does_not_answer(full_listener):
    """There was a second attempt after the deadline, in order to find out the cause."""
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match=f"127.0.0.1 does not answer at port {full_listener}. A firewall"):
        open_store(world_at("127.0.0.1", full_listener), 0.3)
    assert time.monotonic() - begun < 1.2


def test_a_short_attempt_at_the_deadline_does_not_hide_the_cause(monkeypatch):
    """The name service answers no more, a moment before the deadline: what was known before is the cause."""
    moments = iter(["there is no route"])
    monkeypatch.setattr(unreachable, "why_unreachable", lambda *_: next(moments, "does not answer"))
    assert await_listener("node9", 29500, 0.2) == "there is no route"


def test_a_listener_that_comes_later_is_found(monkeypatch):
    causes = iter(["nobody listens", "nobody listens", None])
    monkeypatch.setattr(unreachable, "why_unreachable", lambda *_: next(causes))
    assert await_listener("node9", 29500, 30.0) is None
