"""Strangers at the door, wrong keys, recorded and garbled bytes: refused and counted, and the job goes on."""

import contextlib
import json
import os
import random
import select
import socket
import struct
import threading
import time

import pytest
import torch
from descriptors import open_files
from hypothesis import given, settings
from hypothesis import strategies as st

import totalreduce as tr
from totalreduce.engine.engine import Engine
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.errors import AuthenticationError, PeerLost, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Frame, Header, unpack_signature
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.testing.ranks import make_groups
from totalreduce.transports.handshake import Acceptor, Connector, JobIdentity

CONFIG = TcpConfig(handshake_timeout_s=0.5, pending_handshakes_max=64)


class Job:
    """Three ranks that reduce one tensor after the other and check each result, while strangers come."""

    def __init__(self):
        self.groups = make_groups(3, transport="tcp", tcp=CONFIG, engine=EngineConfig(timeout_s=20))
        self.steps, self.failures = [0, 0, 0], []
        self._stop = False
        self._threads = [threading.Thread(target=self._work, args=(group,)) for group in self.groups]
        for thread in self._threads:
            thread.start()
        self.wait_for_progress()

    def _work(self, group):
        try:
            # The ranks stop after the same step: the tensor itself says whether rank 0 wants to go on.
            step = 0
            while True:
                value = torch.arange(5000, dtype=torch.float64) * (group.rank + 1) + step
                value[0] = float(self._stop)
                group.allreduce(value, name="x", op=tr.ReduceOp.SUM).wait()
                wanted = torch.arange(5000, dtype=torch.float64) * 6 + 3 * step
                assert torch.equal(value[1:], wanted[1:]), f"wrong values in step {step}"
                step += 1
                self.steps[group.rank] = step
                if value[0]:
                    return
        except BaseException as error:
            self.failures.append((group.rank, error))

    def wait_for_progress(self, num_steps=5):
        """Return when every rank has done so many more steps."""
        goal = max(self.steps) + num_steps
        deadline = time.monotonic() + 20
        while min(self.steps) < goal and not self.failures:
            assert time.monotonic() < deadline, f"no progress: {self.steps}"
            time.sleep(0.005)
        assert not self.failures, self.failures

    def pause(self):
        """End the series of operations, so that only strangers can make the memory grow."""
        self._stop = True
        for thread in self._threads:
            thread.join(20)

    def address(self, rank):
        return self.groups[rank]._runner.transport._addresses[rank]

    def identity(self):
        return self.groups[0]._runner.transport._peers._identity

    def refused(self, rank=0):
        return self.groups[rank].statistics().refused_connections

    def close(self):
        self.pause()
        for group in self.groups:
            group.close(1.0)


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()
    assert not made.failures, made.failures


def connect(address):
    sock = socket.create_connection(address, timeout=5)
    sock.settimeout(5)
    return sock


def wait_until_closed(sock):
    """Return what the other end said before it closed; fail if it does not close."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(4096):
            said += data
    return said


def hello(job, source=1, target=0, *, identity=None):
    return Connector(identity or job.identity(), source, target)


OTHER_KEY = JobIdentity(b"k" * 32, "test", 0)
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(range(200)),
    "random": random.Random(3).randbytes(100_000),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_bytes_of_a_stranger_are_refused_and_counted(job, kind):
    before = job.refused()
    with connect(job.address(0)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(GARBAGE[kind])
        assert wait_until_closed(sock) == b""
    job.wait_for_progress()
    assert job.refused() == before + 1


def test_who_says_nothing_or_half_a_word_is_refused_at_the_deadline(job):
    before = job.refused()
    whole = hello(job).outgoing
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(job.address(0))) for _ in range(3)]
        socks[1].sendall(whole[:1])
        socks[2].sendall(whole[:-1])
        assert [wait_until_closed(sock) for sock in socks] == [b"", b"", b""]
        assert CONFIG.handshake_timeout_s - 0.1 < time.monotonic() - begin < 5.0
    job.wait_for_progress()
    assert job.refused() == before + 3


def test_who_sends_byte_by_byte_is_refused_at_the_same_deadline(job):
    begin = time.monotonic()
    with connect(job.address(0)) as sock:
        with contextlib.suppress(ConnectionError):
            for byte in hello(job).outgoing:
                sock.sendall(bytes([byte]))
                if select.select([sock], [], [], 0.05)[0]:
                    break
        wait_until_closed(sock)
    assert time.monotonic() - begin < 5.0
    job.wait_for_progress()


@pytest.mark.parametrize(
    ("wrong", "identity", "source", "target"),
    [
        ("job", lambda own: JobIdentity(own.key, "another", 0), 1, 0),
        ("epoch", lambda own: JobIdentity(own.key, own.job_id, 1), 1, 0),
        ("target", lambda own: own, 1, 2),
        ("itself", lambda own: own, 0, 0),
        ("rank", lambda own: own, 3, 0),
        ("huge rank", lambda own: own, 2**32 - 1, 0),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_without_an_answer(job, wrong, identity, source, target):
    before = job.refused()
    with connect(job.address(0)) as sock:
        sock.sendall(hello(job, source, target, identity=identity(job.identity())).outgoing)
        assert wait_until_closed(sock) == b"", wrong
    job.wait_for_progress()
    assert job.refused() == before + 1


def test_a_wrong_key_is_refused_on_both_sides(job):
    before = job.refused()
    client = hello(job, identity=OTHER_KEY)
    with connect(job.address(0)) as sock:
        sock.sendall(client.outgoing)
        challenge = sock.recv(48, socket.MSG_WAITALL)
        with pytest.raises(AuthenticationError, match="rank 0's address does not know the job's key"):
            client.feed(challenge)
        transcript = client.outgoing + challenge[:16]
        sock.sendall(OTHER_KEY.code(b"connector", transcript))
        assert wait_until_closed(sock) == b""
    job.wait_for_progress()
    assert job.refused() == before + 1


def test_a_recorded_or_reflected_proof_is_refused(job):
    before = job.refused()
    client = hello(job)
    with connect(job.address(0)) as sock:  # a true peer, recorded; nobody sees its messages
        sock.sendall(client.outgoing)
        challenge = sock.recv(48, socket.MSG_WAITALL)
        recorded = client.feed(challenge)
    for proof in (recorded, challenge[16:], bytes(32)):
        with connect(job.address(0)) as sock:
            sock.sendall(client.outgoing)
            again = sock.recv(48, socket.MSG_WAITALL)
            assert again[:16] != challenge[:16]
            sock.sendall(proof)
            assert wait_until_closed(sock) == b""
    job.wait_for_progress()
    assert job.refused() >= before + 3


def test_two_hundred_idle_connections_are_bounded_and_leave_no_trace(job):
    before, files = job.refused(), open_files()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(job.address(0))) for _ in range(200)]
        job.wait_for_progress()
        transport = job.groups[0]._runner.transport
        pending = sum(not connection.established for connection in list(transport._connections.values()))
        assert pending <= CONFIG.pending_handshakes_max
        for sock in socks:
            wait_until_closed(sock)
    job.wait_for_progress()
    assert job.refused() == before + 200
    assert open_files() <= files


def test_a_peer_gets_in_while_strangers_hold_every_place():
    tcp = TcpConfig(handshake_timeout_s=30.0, pending_handshakes_max=16)
    groups = make_groups(3, transport="tcp", tcp=tcp, engine=EngineConfig(timeout_s=10))
    try:
        with contextlib.ExitStack() as stack:
            for address in groups[0]._runner.transport._addresses:
                for _ in range(40):
                    stack.enter_context(connect(address))
            deadline = time.monotonic() + 5
            while any(group.statistics().refused_connections < 24 for group in groups):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            begin = time.monotonic()
            works = [group.allreduce(torch.ones(10), name="x") for group in groups]
            assert [work.wait(timeout_s=8)[0] for work in works] == [3.0, 3.0, 3.0]
            assert time.monotonic() - begin < 5.0
    finally:
        for group in groups:
            group.close(1.0)


def test_memory_does_not_grow_with_refused_strangers(job):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def storm(count):
        for _ in range(count):
            with connect(job.address(0)) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(GARBAGE["zeros"])
                wait_until_closed(sock)

    job.pause()
    storm(100)
    before = resident()
    storm(300)
    assert resident() - before < 2 << 20
    assert job.refused() >= 399  # the last one may be about to be counted


# --------------------------------------------------------------------------- somebody who knows the key, and misbehaves


def as_rank_1(groups):
    """A connection to rank 0 that has proved to be rank 1."""
    transport = groups[0]._runner.transport
    client = Connector(transport._peers._identity, 1, 0)
    sock = connect(transport._addresses[0])
    sock.sendall(client.outgoing)
    sock.sendall(client.feed(sock.recv(48, socket.MSG_WAITALL)))
    return sock


def frame(kind, body=b"", **fields):
    return Header(kind, 0, body_bytes=len(body), **fields).pack() + body


def nested(depth):
    return b'{"name": ' + b"[" * depth + b"]" * depth + b"}"


VIOLATIONS = {
    "no header": bytes(64),
    "wrong version": frame(Frame.HEARTBEAT)[:2] + b"\x09" + frame(Frame.HEARTBEAT)[3:],
    "unknown frame": frame(Frame.HEARTBEAT)[:3] + b"\xc8" + frame(Frame.HEARTBEAT)[4:],
    "heartbeat with a body": frame(Frame.HEARTBEAT, b"x"),
    "4 GiB of control": Header(Frame.DESCRIBE, 0, body_bytes=2**32 - 1).pack(),
    "4 GiB of data": Header(Frame.DATA, 0, operation=7, flags=1, body_bytes=2**32 - 1).pack(),
    "4 GiB of an old epoch": Header(Frame.DATA, 9, operation=7, flags=1, body_bytes=2**32 - 1).pack(),
    "data nobody asked for": Header(Frame.DATA, 0, operation=7, body_bytes=10).pack(),
    "credit never used": frame(Frame.CREDIT, operation=2**63),
    "no json": frame(Frame.DESCRIBE, b"\xff\xfe"),
    "json that is no object": frame(Frame.LOST, b"[1]"),
    "a rank that does not exist": frame(Frame.LOST, b'{"rank": 99}'),
    "a mismatch that is none": frame(Frame.MISMATCH, b'{"tensor": 1, "ranks": [1, 2, 3], "values": []}'),
    "infinite ranks": frame(Frame.MISMATCH, b'{"tensor": "t", "ranks": [Infinity], "values": ["v"]}'),
    "time as a text": frame(Frame.STATUS_REQUEST, b'{"name": "t", "waited_s": "x"}', operation=5),
    "deep json": frame(Frame.DESCRIBE, nested(7000)),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_peer_that_breaks_the_protocol_is_the_one_who_is_lost(violation):
    groups = make_groups(3, transport="tcp", engine=EngineConfig(timeout_s=20))
    try:
        pending = groups[0].allreduce(torch.ones(100), name="x")
        with as_rank_1(groups) as sock:
            sock.sendall(VIOLATIONS[violation])
            with pytest.raises(PeerLost, match="protocol violation") as caught:
                pending.wait(timeout_s=5)
        assert caught.value.rank == 1
        with pytest.raises(PeerLost) as caught:  # the others are told
            groups[2].allreduce(torch.ones(100), name="x").wait(timeout_s=5)
        assert caught.value.rank == 1
    finally:
        for group in groups:
            group.close(1.0)


def test_a_promised_body_takes_no_memory_before_it_is_allowed():
    groups = make_groups(2, transport="tcp", engine=EngineConfig(timeout_s=20, floating_bytes_max=1 << 20))
    try:
        with as_rank_1(groups) as sock:
            with contextlib.suppress(ConnectionError):
                for iteration in range(100):  # together 25 MiB; the share is one
                    header = Header(Frame.DATA, 0, operation=9, iteration=iteration, flags=1, body_bytes=1 << 18)
                    sock.sendall(header.pack() + bytes(1 << 18))
            with pytest.raises(PeerLost, match=r"protocol violation: rank 1 would have \d+ floating bytes"):
                groups[0].barrier(timeout_s=5)
        assert groups[0].statistics().floating_bytes_peak <= 1 << 20
    finally:
        for group in groups:
            group.close(1.0)


# ------------------------------------------------------------------------------------------------------------- fuzzing


IDENTITY = JobIdentity(b"0123456789abcdef", "fuzz", 0)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_64_bytes_are_a_header_or_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        header = Header.unpack(data)
        assert 0 <= header.body_bytes < 2**32
    assert unpack_signature(data[32:56])


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=48, max_size=48), st.binary(min_size=32, max_size=32), st.booleans(), st.data())
def test_any_handshake_is_refused(data, proof, keep_beginning, extra):
    acceptor = Acceptor(IDENTITY, 0, 4)
    if keep_beginning:
        good = Connector(IDENTITY, 1, 0).outgoing
        cut = extra.draw(st.integers(20, 48))
        data = good[:cut] + data[cut:]
    assert acceptor.needed == len(data)
    with pytest.raises(AuthenticationError):  # noqa: PT012  (either step may refuse)
        acceptor.feed(data)
        acceptor.feed(proof)
    with pytest.raises(AuthenticationError):
        Connector(IDENTITY, 1, 0).feed(data[:16] + proof)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("name", "is", "rank", "reason", "tensor", "submitted", "progress", "waited_s"), JSON),
        "ranks": st.lists(JSON, max_size=3) | JSON,
        "values": st.lists(JSON, max_size=3) | JSON,
    },
)
BODIES = DOCUMENTS.map(lambda value: json.dumps(value).encode()) | JSON.map(lambda v: json.dumps(v).encode())

#: Kind, schedule, root, and how many blocks its 36 bytes are in.
SUBMITTED = [
    (OpKind.ALLREDUCE, Algorithm.RING, 0, 1),
    (OpKind.ALLREDUCE, Algorithm.DIRECT, 0, 1),
    (OpKind.ALLREDUCE, Algorithm.TREE, 0, 1),
    (OpKind.ALLREDUCE, Algorithm.HALVING_DOUBLING, 0, 1),
    (OpKind.BROADCAST, Algorithm.CHAIN, 1, 1),
    (OpKind.REDUCE, Algorithm.TREE, 0, 1),
    (OpKind.ALLGATHER, Algorithm.RING, 0, 3),
    (OpKind.GATHER, Algorithm.DIRECT, 0, 3),
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SUBMITTED),
    st.lists(
        st.tuples(
            st.sampled_from([kind for kind in Frame if kind is not Frame.HEARTBEAT]),
            BODIES | st.binary(max_size=40),
            st.sampled_from(["known", "unknown"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(0, 255),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
)
def test_an_engine_answers_any_frame_or_calls_it_a_violation(submitted, frames):
    engine = Engine(0, 3, EngineConfig(floating_bytes_max=1 << 16), observers=[])
    kind, algorithm, root, blocks = submitted
    signature = Signature(kind, DType.FLOAT32, ReduceOp.SUM, root, (9,), algorithm=algorithm)
    buffers = [memoryview(bytearray(36 // blocks)) for _ in range(blocks)]
    operation = engine.submit(Submission("known", signature, buffers), 0.0)
    unknown = struct.unpack("<Q", b"unknown!")[0]
    for number, (kind, body, which, iteration, lane, flags, step) in enumerate(frames):
        key = operation.key[0] if which == "known" else unknown
        header = Header(kind, 0, key, iteration, lane, step, flags, len(body), operation.layout.expectation.packed)
        with contextlib.suppress(ProtocolError):
            delivery = engine.accept(1, Header.unpack(header.pack()), float(number))
            delivery.view[:] = body
            engine.delivered(delivery, float(number))
        engine.tick(float(number))
        engine.validate()
    for peer in (1, 2):
        while engine.next_message(peer, 9.0) is not None:
            pass
