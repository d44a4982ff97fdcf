"""A transport over a library's messages, with a library that is a few lists."""

from __future__ import annotations

from shm_host import RecordingEndpoint, message

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports.passing import PassingTransport, Wire, WireError


class ListWire(Wire):
    """Rank 0 of three. A test fills ``arrived`` and names the peers of which the library finds that they have ended."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 3
        self.arrived: dict[int, list[bytes]] = {1: [], 2: []}
        self.ended: set[int] = set()
        self.failed: list[tuple[int, str]] = []
        self.sent: list[tuple[int, bytes]] = []

    def poll(self) -> bool:
        return False

    def failures(self) -> list[tuple[int, str]]:
        failed, self.failed = self.failed, []
        return failed

    def may_send(self, peer: int) -> bool:
        return True

    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        if peer in self.ended:
            raise WireError("broken pipe")
        self.sent.append((peer, head))

    def bodies_left(self, peer: int) -> int:
        return 0

    def busy(self, peer: int) -> bool:
        return False

    def head(self, peer: int) -> memoryview | None:
        return memoryview(self.arrived[peer][0]) if self.arrived[peer] else None

    def receive(self, peer: int, view: memoryview) -> None:
        raise AssertionError("no message of these tests has a body")

    def received(self, peer: int) -> bool:
        return False

    def release(self, peer: int) -> None:
        self.arrived[peer].pop(0)

    def close(self, timeout_s: float) -> None:
        pass


def make() -> tuple[ListWire, RecordingEndpoint, PassingTransport]:
    wire, endpoint = ListWire(), RecordingEndpoint()
    transport = PassingTransport(wire, TcpConfig())
    transport.attach(endpoint)
    return wire, endpoint, transport


def last_words() -> bytes:
    return bytes(message(step=7).header)


def test_what_has_arrived_is_read_before_a_peer_that_the_library_reports_is_lost() -> None:
    wire, endpoint, transport = make()
    wire.failed.append((1, "connection closed by peer"))
    wire.arrived[1].append(last_words())
    endpoint.peer_lost = lambda peer, reason: endpoint.lost.append((peer, reason, len(endpoint.received)))  # type: ignore
    assert transport.progress()
    assert endpoint.received == [(1, 7, b"")]
    assert endpoint.lost == [(1, "connection closed by peer", 1)]


def test_what_arrives_is_read_before_a_peer_to_which_nothing_can_be_sent_is_lost() -> None:
    """The library finds the end when something is sent; the peer's last message may arrive at the same moment."""
    wire, endpoint, transport = make()
    wire.ended.add(1)
    endpoint.put(1, message())
    assert transport.progress()
    assert endpoint.lost == []
    wire.arrived[1].append(last_words())
    transport.progress()
    assert endpoint.received == [(1, 7, b"")]
    assert endpoint.lost == [(1, "broken pipe")]
    transport.progress()
    assert len(endpoint.lost) == 1


def test_a_body_that_the_library_reads_is_waited_for() -> None:
    """The library can be told of no other memory, so a failed operation keeps its tensor until the body has left."""
    wire, endpoint, transport = make()
    sent = message(bytes(20_000))
    endpoint.put(1, sent)
    transport.progress()
    assert not transport.keep_rests(lambda each: each is sent)
    assert transport.keep_rests(lambda each: each is not sent), "of no other message"
    wire.bodies_left = lambda peer: int(peer == 1 and not endpoint.sent)  # type: ignore
    transport.progress()
    assert endpoint.sent == [sent]
    assert transport.keep_rests(lambda each: each is sent)
