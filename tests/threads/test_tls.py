"""Ranks over TLS: everything that works without it, and nobody gets in who should not."""

import contextlib
import secrets
import socket
import ssl
import threading
import time

import pytest
import torch

import totalreduce as tr
from totalreduce.testing import check_case, check_transport, run_ranks
from totalreduce.testing.conformance import threaded
from totalreduce.testing.conformance_cases import cases_for
from totalreduce.testing.ranks import make_groups
from totalreduce.transports.handshake import Connector, JobIdentity
from totalreduce.transports.tcp import TcpTransport, listen
from totalreduce.transports.tls import TlsCredentials

CONFIG = tr.TcpConfig()


def over_tls(files, config=CONFIG, *, addresses=None, identity=None):
    """Transports of all ranks; ``files`` may be ``None`` for a rank without TLS, ``addresses`` may lead elsewhere."""
    identity = identity or JobIdentity(secrets.token_bytes(32), "test", 0)

    def make(world_size):
        doors = [listen("127.0.0.1") for _ in range(world_size)]
        known = [door.getsockname()[:2] for door in doors]
        return [
            TcpTransport(rank, (addresses or list)(known), doors[rank], identity, config, files[rank])
            for rank in range(world_size)
        ]

    return make


@contextlib.contextmanager
def groups_of(world_size, transports, timeout_s=20.0):
    groups = make_groups(world_size, transport=transports, engine=tr.EngineConfig(timeout_s=timeout_s))
    try:
        yield groups
    finally:
        closers = [threading.Thread(target=group.close, args=(1.0,)) for group in groups]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


def total(groups, value=1.0, size=1000):
    """An allreduce of all ranks; its first and last element."""
    tensors = [torch.full((size,), value * (group.rank + 1)) for group in groups]
    works = [group.allreduce(tensor, name="total") for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    return {tensor[index].item() for tensor in tensors for index in (0, -1)}


# --------------------------------------------------------------------------------------- what works without it, works


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
def test_conformance(rank_tls, world_size):
    assert check_transport(over_tls(rank_tls), world_sizes=(world_size,)) >= 100 * world_size


@pytest.mark.parametrize("world_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 8))])
def test_conformance_of_larger_worlds(rank_tls, world_size):
    names = {"barrier", "every rank in its own order", "small tensors", "floating within its bound", "rendezvous"}
    cases = [case for case in cases_for(world_size) if case.name in names]
    assert {case.name for case in cases} == names
    backend = threaded(over_tls(rank_tls), timeout_s=30.0)
    assert sum(check_case(case, backend) for case in cases) >= 40 * world_size


def test_large_bodies_in_both_directions(rank_tls):
    def body(group):
        tensor = torch.arange(6 << 20, dtype=torch.float32) % 1000 + group.rank
        group.allreduce(tensor, name="large").wait()
        wanted = (torch.arange(6 << 20, dtype=torch.float32) % 1000) * 2 + 1
        return torch.equal(tensor, wanted)

    assert run_ranks(2, body, transport=over_tls(rank_tls)) == [True, True]


def test_one_certificate_for_all_ranks_is_enough(rank_tls):
    with groups_of(3, over_tls(rank_tls[:1] * 3)) as groups:
        assert total(groups) == {6.0}


def test_heartbeats_keep_an_idle_connection(rank_tls):
    config = tr.TcpConfig(heartbeat_s=0.02, silence_s=1.0)
    with groups_of(2, over_tls(rank_tls, config)) as groups:
        assert total(groups) == {3.0}
        deadline = time.monotonic() + 10
        while min(group._runner.transport.counters.heartbeats_sent for group in groups) < 30:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(1.2)  # longer than a silent connection lives
        assert total(groups) == {3.0}
        assert [group.statistics().refused_connections for group in groups] == [0, 0]


def test_a_rank_that_leaves_says_so(rank_tls):
    with groups_of(2, over_tls(rank_tls)) as groups:
        assert total(groups) == {3.0}
        groups[1].close(1.0)
        with pytest.raises(tr.PeerLost, match="closed the group") as caught:
            groups[0].allreduce(torch.ones(10), name="next").wait()
        assert caught.value.rank == 1


def test_a_connection_that_is_cut_is_the_loss_of_the_peer(rank_tls):
    with groups_of(2, over_tls(rank_tls)) as groups:
        assert total(groups) == {3.0}
        for connection in list(groups[0]._runner.transport._connections.values()):
            connection.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(tr.PeerLost, match="its connection ended") as caught:
            groups[1].allreduce(torch.ones(10), name="next").wait()
        assert caught.value.rank == 0


class Tap:
    """Passes bytes on between a rank and the one that it takes the tap for, and remembers them."""

    def __init__(self):
        self.door = socket.create_server(("127.0.0.1", 0))
        self.target, self.seen, self._threads, self._socks = None, bytearray(), [], []
        self._start(self._accept)

    def _start(self, function, *arguments):
        thread = threading.Thread(target=function, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.door.accept()
                far = socket.create_connection(self.target)
                self._socks += [near, far]
                self._start(self._pass, near, far)
                self._start(self._pass, far, near)

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for sock in (self.door, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_an_eavesdropper_sees(rank_tls, encrypted):
    taps = [Tap(), Tap()]

    def through_the_taps(known):
        for tap, address in zip(taps, known, strict=True):
            tap.target = address
        return [tap.door.getsockname() for tap in taps]

    try:
        files = rank_tls if encrypted else [None, None]
        with groups_of(2, over_tls(files, addresses=through_the_taps)) as groups:
            assert total(groups, value=1234.5, size=20_000) == {3 * 1234.5}
    finally:
        for tap in taps:
            tap.close()
    seen = taps[0].seen + taps[1].seen
    mine = torch.full((16,), 1234.5).numpy().tobytes()
    assert len(seen) > 80_000
    assert (mine in seen) is not encrypted
    assert (b"total" in seen or b"TRh1" in seen) is not encrypted


# ----------------------------------------------------------------------------------------------- nobody else gets in


def check_that_rank_0_names_rank_1(groups, reason):
    """Both ranks try; whoever is right learns what is wrong with the other one."""
    for group in groups:
        with contextlib.suppress(tr.PeerLost):
            group.allreduce(torch.ones(10_000), name="x")
    with pytest.raises(tr.PeerLost, match=reason) as caught:
        groups[0].allreduce(torch.ones(10_000), name="y").wait(timeout_s=10)
    assert caught.value.rank == 1


def test_a_rank_with_a_foreign_certificate(authorities, rank_tls):
    foreign = authorities.issue("stranger", "foreign", trusts="foreign")
    with groups_of(2, over_tls([rank_tls[0], foreign])) as groups:
        reason = r"the certificate of rank 1 at 127\.0\.0\.1:\d+ was not signed by CA .*job-ca\.pem \("
        check_that_rank_0_names_rank_1(groups, reason)
        with pytest.raises(tr.PeerLost, match=r"certificate of rank 0 .*not signed by CA .*foreign-ca|does not accept"):
            groups[1].allreduce(torch.ones(10_000), name="y").wait(timeout_s=10)


def test_a_rank_whose_certificate_has_expired(authorities, rank_tls, monkeypatch):
    expired = authorities.issue("expired", days=-0.01)
    monkeypatch.setattr(TlsCredentials, "_shake_own_hand", lambda _: b"")  # it does not look at its own
    with groups_of(2, over_tls([rank_tls[0], expired])) as groups:
        check_that_rank_0_names_rank_1(groups, r"the certificate of rank 1 at 127\.0\.0\.1:\d+ has expired")


def test_a_rank_without_tls(rank_tls):
    with groups_of(2, over_tls([rank_tls[0], None])) as groups:
        check_that_rank_0_names_rank_1(groups, "rank 1 at .* hung up when TLS began; is TLS set on every rank")
        with pytest.raises(tr.PeerLost, match="rank 0 speaks TLS and this rank does not") as caught:
            groups[1].allreduce(torch.ones(10_000), name="y").wait(timeout_s=10)
        assert caught.value.rank == 0


def test_a_certificate_without_the_jobs_key_is_not_enough(rank_tls):
    def make(world_size):
        doors = [listen("127.0.0.1") for _ in range(world_size)]
        known = [door.getsockname()[:2] for door in doors]
        identities = [JobIdentity(bytes([rank]) * 16, "test", 0) for rank in range(world_size)]
        return [TcpTransport(r, known, doors[r], identities[r], CONFIG, rank_tls[r]) for r in range(world_size)]

    with groups_of(2, make) as groups:
        check_that_rank_0_names_rank_1(groups, "the process at rank 1's address does not know the job's key")


def stranger(tls=None, *, version=ssl.TLSVersion.TLSv1_3):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def knock(address, context, said):
    """Connect, speak, and return what is answered, or why not."""
    with socket.create_connection(address, timeout=10) as plain:
        try:
            with context.wrap_socket(plain) as sock:
                sock.sendall(said)
                return sock.recv(1000)
        except ssl.SSLError as error:
            return error.reason


STRANGERS = {
    "no certificate": (lambda _: stranger(), "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
    "foreign": (lambda a: stranger(a.issue("burglar", "foreign")), "TLSV1_ALERT_UNKNOWN_CA"),
    "expired": (lambda a: stranger(a.issue("late", days=-0.01)), "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
    "old TLS": (lambda a: stranger(a.issue("old"), version=ssl.TLSVersion.TLSv1_2), "TLSV1_ALERT_PROTOCOL_VERSION"),
    "another job": (lambda a: stranger(a.issue("other")), b""),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_told_why_counted_and_forgotten(authorities, rank_tls, kind):
    make, answer = STRANGERS[kind]
    said = Connector(JobIdentity(bytes(16), "another", 0), 1, 0).outgoing
    with groups_of(2, over_tls(rank_tls)) as groups:
        assert total(groups) == {3.0}
        transport = groups[0]._runner.transport
        context = make(authorities)
        assert [knock(transport._addresses[0], context, said) for _ in range(3)] == [answer] * 3
        assert total(groups) == {3.0}
        assert groups[0].statistics().refused_connections == 3
        deadline = time.monotonic() + 10
        while not all(connection.established for connection in list(transport._connections.values())):
            assert time.monotonic() < deadline
            time.sleep(0.01)


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\x16\x03\x01\x02\x00\x01" + bytes(600)]


@pytest.mark.parametrize("said", GARBAGE, ids=["http", "zeros", "no ClientHello"])
def test_garbage_is_refused_at_once_and_silence_at_the_deadline(rank_tls, said):
    with groups_of(2, over_tls(rank_tls, tr.TcpConfig(handshake_timeout_s=0.5))) as groups:
        address = groups[0]._runner.transport._addresses[0]
        for _ in range(3):
            with socket.create_connection(address, timeout=10) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(said)
                answer = sock.recv(100)
                assert answer[:2] == b"\x15\x03", "a TLS alert"
                assert sock.recv(100) == b""
        assert total(groups) == {3.0}
        assert groups[0].statistics().refused_connections == 3
        # The silent client comes afterwards: on a loaded machine its deadline can pass during the steps above.
        with socket.create_connection(address, timeout=10) as silent:
            assert silent.recv(100) == b""
        assert total(groups) == {3.0}
        assert groups[0].statistics().refused_connections == 4


def test_strangers_who_stay_are_bounded_and_keep_no_rank_out(authorities, rank_tls):
    config = tr.TcpConfig(handshake_timeout_s=30.0, pending_handshakes_max=8)
    context = stranger()
    with groups_of(2, over_tls(rank_tls, config)) as groups, contextlib.ExitStack() as stack:
        transport = groups[0]._runner.transport
        for number in range(30):
            sock = stack.enter_context(socket.create_connection(transport._addresses[0], timeout=10))
            if number % 2:  # refused, and does not go away
                tls = stack.enter_context(context.wrap_socket(sock, do_handshake_on_connect=False))
                with contextlib.suppress(OSError):
                    tls.do_handshake()
        assert total(groups) == {3.0}
        assert sum(not connection.established for connection in list(transport._connections.values())) <= 8


def relay(client_tls, server_tls, victim_door, target):
    """Somebody in the middle with both ranks' certificates and keys, who passes on what they say."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(server_tls.cert, server_tls.key)
    outside = stranger(client_tls)
    passed = []
    with contextlib.suppress(OSError):
        near, _ = victim_door.accept()
        far = socket.create_connection(target, timeout=10)
        with inside.wrap_socket(near, server_side=True) as to_victim, outside.wrap_socket(far) as to_target:
            for source, sink, num_bytes in (
                (to_victim, to_target, 48),
                (to_target, to_victim, 48),
                (to_victim, to_target, 32),
            ):
                data = source.recv(num_bytes)
                passed.append(len(data))
                sink.sendall(data)
    return passed


def test_words_passed_on_between_two_connections_are_worth_nothing(rank_tls):
    """The key is right, the certificates are right; what is wrong is the connection."""
    passed = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(10)

        def through_the_middle(known):
            targets.append(known[1])
            return [known[0], door.getsockname()]

        targets = []
        with groups_of(2, over_tls(rank_tls, addresses=through_the_middle)) as groups:
            middle = threading.Thread(
                target=lambda: passed.extend(relay(rank_tls[0], rank_tls[1], door, targets[0])), daemon=True
            )
            middle.start()
            with pytest.raises(tr.PeerLost, match="at rank 1's address does not know the job's key"):
                groups[0].allreduce(torch.ones(10_000), name="x").wait(timeout_s=10)
            middle.join(10)
    assert passed[:2] == [48, 48]
    assert passed[2:] in ([], [0])
