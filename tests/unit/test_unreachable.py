"""Rank 0's address cannot be reached: each cause is a sentence of its own, with what to check."""

import errno
import os
import socket

import pytest

from totalreduce.foundation.errors import RendezvousError
from totalreduce.foundation.world import World
from totalreduce.launch.rendezvous import open_store
from totalreduce.launch.unreachable import why_unreachable


def failing(error):
    def connect(*_):
        raise error

    return connect


def of_system(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "sentence", "advice"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "does not know the name 'node9'", "spelling"),
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert why_unreachable("127.0.0.1", port, 5.0, serves=True) is None


@pytest.mark.parametrize(
    ("host", "cause"),
    [("no-such-host.invalid", "does not know the name"), ("127.0.0.1", "nobody listens at port")],
)
def test_a_rank_that_cannot_reach_the_store_says_why(host, cause):
    """With the store of torch, whose own error is a time-out in each case."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = World(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        master_address=host,
        master_port=port,
        launcher="torchrun",
        job_id="",
    )
    with pytest.raises(RendezvousError, match=f"^rank 1 cannot reach the store at {host}:{port}: .*{cause}"):
        open_store(world, 0.5)
