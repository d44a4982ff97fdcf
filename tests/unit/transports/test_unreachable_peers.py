"""A rank's address cannot be reached after the rendezvous: each cause is a sentence of its own, with what to check."""

import errno
import socket
import time

import pytest
from shm_host import IDENTITY, RecordingEndpoint, message

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports import tcp

QUICK = TcpConfig(heartbeat_s=0.05, silence_s=20.0, connect_timeout_s=0.15)


def reason_of_loss(address):
    """Return with which reason rank 0 loses rank 1 if it is said to listen at an address."""
    door, endpoint = tcp.listen("127.0.0.1"), RecordingEndpoint()
    transport = tcp.TcpTransport(0, [door.getsockname()[:2], address], door, IDENTITY, QUICK)
    transport.attach(endpoint)
    endpoint.put(1, message(b"never read"))
    deadline = time.monotonic() + 20.0
    try:
        while not endpoint.lost:
            assert time.monotonic() < deadline
            if not transport.progress():
                transport.wait(0.05)
    finally:
        transport.close(0.0)
    [(peer, reason)] = endpoint.lost
    assert peer == 1
    return reason


@pytest.mark.parametrize(
    ("number", "sentence", "advice"),
    [
        (errno.ECONNREFUSED, "nobody listens at port 4711 of 192.0.2.7", "look for its end in its output"),
        (errno.EHOSTUNREACH, "there is no route from this host to 192.0.2.7 (port 4711): No route", "`ip route get`"),
        (errno.ENETUNREACH, "there is no route from this host to 192.0.2.7 (port 4711): Network", "`ip route get`"),
        (errno.ETIMEDOUT, "192.0.2.7 does not answer at port 4711", "A firewall may drop"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "by the event"])
def test_each_cause_has_its_own_sentence(monkeypatch, number, sentence, advice, is_late):
    class Failing(socket.socket):
        def connect_ex(self, address):
            return errno.EINPROGRESS if is_late else number

        def getsockopt(self, level, name, *rest):
            return number if name == socket.SO_ERROR else super().getsockopt(level, name, *rest)

    monkeypatch.setattr(socket, "socket", Failing)
    reason = reason_of_loss(("192.0.2.7", 4711))
    assert reason.startswith(f"cannot connect to rank 1: {sentence}")
    for text in (advice, "TOTALREDUCE_INTERFACE", "irewall", "docs/where.md, 'Firewalls and ports'"):
        assert text in reason


def test_another_error_is_said_as_it_is(monkeypatch):
    class Failing(socket.socket):
        def connect_ex(self, address):
            return errno.EACCES

    monkeypatch.setattr(socket, "socket", Failing)
    said = reason_of_loss(("192.0.2.7", 4711))
    assert said == (
        "cannot connect to rank 1: a connection to 192.0.2.7, port 4711, failed: Permission denied (EACCES)"
    )


def test_a_connection_attempt_without_an_answer_ends_at_its_deadline():
    """The kernel drops what comes to a listener with a full queue, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as door, socket.create_connection(door.getsockname()):
        port = door.getsockname()[1]
        reason = reason_of_loss(("127.0.0.1", port))
    assert reason.startswith(f"cannot connect to rank 1: 127.0.0.1 does not answer at port {port}. A firewall may")


def test_a_process_that_does_not_answer_is_no_firewall():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        reason = reason_of_loss(("127.0.0.1", port))
    assert reason.startswith(f"cannot connect to rank 1: a process listens at port {port} of 127.0.0.1, but has not")
    assert "Rank 1 may be stopped" in reason
