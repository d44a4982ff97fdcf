"""Messages, clocks, one server and one client of a parameter server, as plain objects."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.ternary import Ternary
from totalreduce.codecs.topk import Topk
from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RefusedError
from totalreduce.server.client import Client
from totalreduce.server.clocks import FINISHED, Bounded, Eventual, Sequential, VectorClock
from totalreduce.server.layout import Layout
from totalreduce.server.messages import HEADER, WINDOW, Form, Header, Kind, Lru, Message, Spec, digest_of
from totalreduce.server.optimizers import Sum
from totalreduce.server.requests import Call
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard, read_waiting
from totalreduce.server.table import Table

F32 = np.dtype(np.float32)
SPEC = Spec(5000, 2, F32, table=77)


def pair(rule=None, *, spec=SPEC, num_workers=2, rank=0):
    """A server of all keys, and the clients of its workers."""
    layout = Layout(spec.num_keys, [rank])
    table = Table(layout, rank, width=spec.width, dtype=spec.dtype, optimizer=Sum())
    server = Shard(rank, table, spec, rule or Eventual(), num_workers)
    return server, [Client(worker, layout, spec, {rank: rank}) for worker in range(num_workers)]


def carry(server: Shard, clients: list[Client], worker: int, call: Call) -> Call:
    """Bring all messages where they belong."""
    while messages := clients[worker].outgoing():
        for _, message in messages:
            for reply in server.take(worker, message):
                clients[reply.worker].answer(0, reply.message)
    return call


def rows(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


# ------------------------------------------------------------------------------------------------------------ messages


def test_headers_come_back() -> None:
    keys = np.arange(3, dtype=np.int32)
    header = Header(Kind.PUSH_PULL, Form.LIST, 2, 1, 9, 4, 5, 3, 0, 3, 24, digest_of(keys))
    assert SPEC.decode(SPEC.encode(header)) == header
    assert (SPEC.key_bytes(header), SPEC.value_dtype(header)) == (12, F32)


VALID = SPEC.encode(Header(Kind.PUSH, Form.RANGE, number=5, mark=7, begin=10, end=20, value_bytes=80))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (VALID[:-1], "has 96 bytes where 97"),
        (b"\4" + VALID[1:], "a message of version 4 where version 5"),
        (
            replace(SPEC, table=3).encode(Header(Kind.CLOCK)),
            "about table 0x3, which has other settings than table 0x4d",
        ),
        (VALID[:2] + b"\x63" + VALID[3:], "an unknown kind"),
        (SPEC.encode(Header(Kind.PUSH, number=1)), "PUSH cannot have keys of form NOTHING"),
        (
            SPEC.encode(Header(Kind.PULL, Form.RANGE, number=1, begin=9, end=5001)),
            "a range from 9 to 5001 of 5000 keys",
        ),
        (SPEC.encode(Header(Kind.PULL, Form.LIST, number=1, end=1 << 40)), "a list of 1099511627776 keys"),
        (
            SPEC.encode(Header(Kind.PUSH, Form.LIST, number=1, end=2, value_bytes=12)),
            "12 bytes of values for 2 keys, where 16",
        ),
        (SPEC.encode(Header(Kind.CLOCK, number=3, clock=1)), "a request of kind CLOCK without a mark"),
        (SPEC.encode(Header(Kind.SAVE, number=3, clock=1)), "a request of kind SAVE without a mark"),
        (SPEC.encode(Header(Kind.CLOCK, number=3, clock=1, mark=1, lr=np.inf)), "a learning rate of inf"),
        (SPEC.encode(Header(Kind.DONE, value_bytes=1 << 30)), "1073741824 bytes of values in a message of kind DONE"),
        (SPEC.encode(Header(Kind.PULL, Form.RANGE, number=-3, begin=0, end=1)), "a request with number -3"),
    ],
    ids=lambda each: None if isinstance(each, str) else "header",
)
def test_headers_that_no_correct_rank_sends(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        SPEC.decode(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_garbage_is_refused_and_never_asks_for_memory(data: st.DataObject) -> None:
    """Random headers, half of them with some fields that are right: an error, or sizes within the bounds."""
    number = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 50)
    fields = [
        *(4, data.draw(st.integers(0, 255) | st.integers(1, 15)), data.draw(st.integers(0, 5))),
        *(data.draw(st.integers(0, 4)), 77),
        *(data.draw(st.integers(-2, 2)), data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2))),
        *(data.draw(number) for _ in range(6)),
        *(data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 400)), data.draw(st.binary(min_size=16, max_size=16))),
        data.draw(st.floats() | st.sampled_from([-1.0, 0.1])),
    ]
    try:
        header = SPEC.decode(HEADER.pack(*fields))
    except ProtocolError:
        return
    assert SPEC.key_bytes(header) <= 4 << 20
    assert header.value_bytes <= 4 << 20
    server, clients = pair()
    keys = None
    if header.form is Form.LIST:
        keys = data.draw(st.sampled_from([np.zeros(header.end, np.int32), np.arange(header.end, dtype=np.int32)]))
    dtype = SPEC.value_dtype(header)
    values = np.ones(header.value_bytes // dtype.itemsize, dtype) if header.value_bytes else None
    holder = Server(0)
    holder.begin_epoch({0: (0,)}, {0: server})
    for taker in (lambda: holder.take(1, Message(header, keys, values)), lambda: clients[0].answer(0, Message(header))):
        try:
            answers = taker()
        except ProtocolError:
            continue
        refused = not answers or answers[0][1].header.kind in (Kind.REFUSED, Kind.UNKNOWN_LIST)
        assert not refused or not server.table.values.any()


def test_least_recently_used_entries_are_dropped() -> None:
    lru: Lru[int] = Lru(10)
    for number in range(4):
        lru.put(bytes([number]), number, 3)
        lru.get(b"\1")
    assert [lru.get(bytes([number])) for number in range(4)] == [None, 1, 2, 3]
    lru.put(b"\1", 5, 11)
    assert [lru.get(bytes([number])) for number in range(4)] == [None, None, None, None]


# -------------------------------------------------------------------------------------------------------------- clocks


def test_clocks_go_on_one_by_one() -> None:
    clocks = VectorClock([0, 0])
    clocks.advance(0, 1)
    clocks.advance(0, 1)  # the same message again
    assert (clocks.of(0), clocks.of(1), clocks.slowest()) == (1, 0, 0)
    with pytest.raises(ProtocolError, match="worker 1 is at clock 0, and cannot go on to 2"):
        clocks.advance(1, 2)
    clocks.advance(1, FINISHED)
    assert clocks.slowest() == 1
    assert clocks.below(5) == [(0, 1)]
    assert clocks.below(1) == []


@pytest.mark.parametrize("make", [lambda: Bounded(-1), lambda: Bounded(1.5), lambda: Sequential(buffer_bytes=0)])
def test_rules_that_cannot_be(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()


# ------------------------------------------------------------------------------------------------- server and client


def test_a_request_that_comes_again_is_answered_and_not_applied_again() -> None:
    server, clients = pair()
    client = clients[0]
    call = client.on_keys(Kind.PUSH, np.array([3, 9]), rows(2, 2), None)
    [(_, first)] = client.outgoing()
    assert [reply.message.header.kind for reply in server.take(0, first)] == [Kind.DONE]
    assert [reply.message.header.kind for reply in server.take(0, first)] == [Kind.DONE]
    np.testing.assert_array_equal(server.table.values[6:8], [1, 2])
    client.resend(0)
    [(_, again)] = client.outgoing()
    assert again.header.form is Form.DIGEST  # the server knows the list
    carry(server, clients, 0, call)
    assert server.table.version == 1
    assert not call.is_done
    client.answer(0, server.take(0, again)[0].message)
    assert call.is_done
    client.answer(0, Message(Header(Kind.DONE, number=first.header.number)))  # a late answer changes nothing
    assert call.pending == 0


def test_a_request_whose_predecessor_is_missing_is_ignored() -> None:
    server, clients = pair()
    client = clients[0]
    calls = [client.on_keys(Kind.PUSH, np.array([3]), rows(1, 2), None) for _ in range(2)]
    [(_, first), (_, second)] = client.outgoing()
    assert server.take(0, second) == []
    assert server.table.version == 0
    client.resend(0)
    carry(server, clients, 0, calls[0])  # the second one has a digest only, so the list is asked for, too
    assert calls[1].is_done
    np.testing.assert_array_equal(server.table.values[6:8], [2, 4])
    assert (first.header.previous, second.header.previous) == (-1, first.header.number)


def test_lists_are_shared_between_workers_and_asked_for() -> None:
    server, clients = pair()
    keys, out = np.array([5, 7, 4999]), np.empty((3, 2), np.float32)
    carry(server, clients, 0, clients[0].on_keys(Kind.PUSH, keys, rows(3, 2), None))
    clients[1]._queues[0].lists.put(digest_of(keys.astype(np.int32)), True, 1)  # as if it had used it long ago
    assert carry(server, clients, 1, clients[1].on_keys(Kind.PULL, keys, None, out)).is_done
    np.testing.assert_array_equal(out, rows(3, 2))
    assert clients[1].lists == {"digest": 1}
    server._lists.drop(digest_of(keys.astype(np.int32)))
    out[:] = 0
    assert carry(server, clients, 1, clients[1].on_keys(Kind.PUSH_PULL, keys, rows(3, 2), out)).is_done
    np.testing.assert_array_equal(out, 2 * rows(3, 2))
    assert clients[1].lists == {"digest": 2, "unknown": 1, "list": 1}


def test_a_list_with_the_digest_of_another_one_is_refused() -> None:
    server, _ = pair()
    keys = np.array([1, 2], np.int32)
    header = Header(Kind.PUSH, Form.LIST, number=0, end=2, value_bytes=16, digest=digest_of(keys + 1))
    [reply] = server.take(0, Message(header, keys, rows(4)))
    answer = reply.message
    assert answer.header.kind is Kind.REFUSED
    assert b"is that of another list" in answer.values.tobytes()
    assert not server.table.values.any()


def test_a_worker_that_is_ahead_waits_and_is_told_for_whom() -> None:
    server, clients = pair(Bounded(1), num_workers=3)
    fast, out = clients[0], np.zeros((5000, 2), np.float32)
    for _ in range(2):
        assert carry(server, clients, 0, fast.advance()).is_done
    assert carry(server, clients, 2, clients[2].advance()).is_done
    push = carry(server, clients, 0, fast.on_range(Kind.PUSH, 0, 5000, rows(5000, 2), None))
    pull = carry(server, clients, 0, fast.on_range(Kind.PULL, 0, 5000, None, out))
    assert not push.is_done
    assert not pull.is_done
    assert fast.slow_workers() == {1: 0}
    assert not server.table.values.any()
    carry(server, clients, 1, clients[1].advance())
    assert push.is_done
    assert pull.is_done
    assert pull.staleness == 1
    assert fast.staleness == {1: 1}
    assert fast.slow_workers() == {}
    np.testing.assert_array_equal(out, rows(5000, 2))
    assert read_waiting(np.frombuffer(bytes(16), np.uint8)) == {0: 0}
    with pytest.raises(ProtocolError):
        read_waiting(np.zeros(9, np.uint8))


def test_steps_are_applied_when_all_have_ended_them() -> None:
    server, clients = pair(Sequential(buffer_bytes=40_000))
    out, mine = np.zeros((5000, 2), np.float32), rows(5000, 2)
    for worker in (1, 0):
        carry(server, clients, worker, clients[worker].on_range(Kind.PUSH, 0, 5000, mine, None))
    mine[:] = 99  # worker 0 is on the server's rank: its array was copied
    refused = carry(server, clients, 1, clients[1].on_keys(Kind.PUSH, np.array([1]), rows(1, 2), None))
    assert isinstance(refused.error, RefusedError)
    assert "worker 1 pushes more in step 0 than the rule's buffer_bytes" in str(refused.error)
    carry(server, clients, 1, clients[1].on_range(Kind.PULL, 0, 5000, None, out))
    assert not out.any()
    carry(server, clients, 1, clients[1].advance())
    late = carry(server, clients, 1, clients[1].on_range(Kind.PULL, 0, 5000, None, out))
    assert not late.is_done
    carry(server, clients, 0, clients[0].finish())
    assert late.is_done
    np.testing.assert_array_equal(out, rows(5000, 2) + 99)  # worker 1's memory came without a copy here
    assert server.table.version == 2


def test_large_calls_are_cut_and_few_requests_are_under_way() -> None:
    spec = Spec(9_000_000, 1, np.dtype(np.float64))
    server, clients = pair(spec=spec, num_workers=1)
    values, out = np.arange(9e6), np.zeros(9_000_000)
    push = clients[0].on_range(Kind.PUSH, 0, 9_000_000, values, None)
    sent = clients[0].outgoing()
    assert len(sent) == 16  # 8 MiB
    assert all(message.num_bytes <= (1 << 19) + HEADER.size for _, message in sent)
    assert np.shares_memory(sent[0][1].values, values)
    for _, message in sent:
        [reply] = server.take(0, message)
        clients[0].answer(0, reply.message)
    carry(server, clients, 0, push)
    assert push.is_done
    carry(server, clients, 0, clients[0].on_range(Kind.PULL, 0, 9_000_000, None, out))
    np.testing.assert_array_equal(out, values)
    small = [clients[0].on_keys(Kind.PULL, np.array([1]), None, np.zeros(1)) for _ in range(100)]
    assert len(clients[0].outgoing()) == WINDOW
    clients[0].fail(RefusedError("over"))
    assert all(isinstance(call.error, RefusedError) for call in small)


def test_an_answer_says_whether_a_call_is_done() -> None:
    """Only then the program is woken."""
    spec = Spec(2_000_000, 1, np.dtype(np.float64))
    server, [client, other] = pair(Bounded(0), spec=spec)
    push = client.on_range(Kind.PUSH, 0, 100_000, np.ones(100_000), None)  # two requests
    answers = [server.take(0, message)[0].message for _, message in client.outgoing()]
    assert [client.answer(0, answer) for answer in answers] == [False, True]
    assert push.is_done
    assert not client.answer(0, answers[0])  # it was answered before
    carry(server, [client, other], 0, client.advance())
    client.on_keys(Kind.PULL, np.array([5]), None, np.empty(1))
    [(_, message)] = client.outgoing()
    [waiting] = server.take(0, message)
    assert waiting.message.header.kind is Kind.WAITING
    assert not client.answer(0, waiting.message)
    refused = Message(Header(Kind.REFUSED, shard=0, number=message.header.number))
    assert client.answer(0, refused)


@pytest.mark.parametrize("codec", [Int8(), Topk(density=0.05)], ids=str)
def test_what_codes_do_not_express_is_pushed_later(codec: object) -> None:
    spec = Spec(5000, 2, F32, codec)
    server, clients = pair(spec=spec)
    random, total = np.random.default_rng(3), np.zeros((5000, 2))
    for begin, end in [(0, 5000), (100, 4000), (100, 4000), (7, 8)]:
        values = random.standard_normal((end - begin, 2)).astype(np.float32)
        total[begin:end] += values
        call = clients[0].on_range(Kind.PUSH, begin, end, values, None)
        [(_, message)] = clients[0].outgoing()
        assert message.values.nbytes < 0.3 * values.nbytes + 40
        clients[0].answer(0, server.take(0, message)[0].message)
        assert call.is_done
        assert call.error is None
    residual = clients[0]._residual.values
    np.testing.assert_allclose(residual + server.table.values.reshape(-1, 2), total, atol=1e-5)
    assert np.abs(residual).max() > 1e-3


def test_workers_begin_with_different_servers_and_send_little_at_a_time() -> None:
    """Otherwise all of them would fill the link of one server, and its queue would drop packets."""
    spec, layout = Spec(16_000_000, 1, F32), Layout(16_000_000, range(4))
    values, first = np.zeros(16_000_000, np.float32), []
    for rank in range(5):
        client = Client(rank, layout, spec, {shard: 4 + shard for shard in range(4)})
        client.on_range(Kind.PUSH, 0, 16_000_000, values, None)
        servers = [server for server, _ in client.outgoing()]
        first.append(servers[0])
        assert Counter(servers) == dict.fromkeys([4, 5, 6, 7], 4)  # a quarter of 8 MiB for each server
    assert first == [4, 5, 6, 7, 4]


@pytest.mark.parametrize("codec", [Int8(), Topk(density=0.05)], ids=str)
def test_values_that_no_code_expresses_are_refused_before_anything_is_sent(codec: object) -> None:
    """The last of three pieces has the wrong value."""
    spec = Spec(3_000_000, 1, F32, codec)
    _, [client, _] = pair(spec=spec)
    values = np.ones(3_000_000, np.float32)
    values[-1] = np.nan
    with pytest.raises(ConfigurationError, match="not finite, or too large to encode"):
        client.on_range(Kind.PUSH, 0, 3_000_000, values, None)
    assert client.outgoing() == []
    assert not client.awaited_servers


def test_a_refused_push_leaves_the_residual_as_it_was() -> None:
    spec = Spec(100, 1, F32, Topk(density=0.05))
    server, clients = pair(Sequential(buffer_bytes=400), spec=spec)
    first, second = np.arange(100, dtype=np.float32), np.arange(100, dtype=np.float32)[::-1].copy()
    carry(server, clients, 0, clients[0].on_range(Kind.PUSH, 0, 100, first, None))
    refused = carry(server, clients, 0, clients[0].on_range(Kind.PUSH, 0, 100, second, None))
    assert isinstance(refused.error, RefusedError)
    for worker in (0, 1):
        carry(server, clients, worker, clients[worker].advance())
    kept = clients[0]._residual.values.reshape(-1) + server.table.values
    np.testing.assert_allclose(kept, first, atol=1e-4)


def test_workers_use_different_random_numbers_for_the_same_values() -> None:
    spec = Spec(1000, 1, F32, Ternary())
    _, clients = pair(spec=spec)
    values, codes = np.linspace(-1, 1, 1000, dtype=np.float32), []
    for client in clients:
        client.on_range(Kind.PUSH, 0, 1000, values, None)
        [(_, message)] = client.outgoing()
        codes.append(message.values)
    assert (codes[0] != codes[1]).any()


def two_servers() -> tuple[Client, Layout]:
    layout = Layout(SPEC.num_keys, [0, 1])
    return Client(0, layout, SPEC, {0: 0, 1: 1}), layout


def test_a_call_is_done_when_all_its_requests_were_answered_also_after_an_error() -> None:
    client, _ = two_servers()
    call = client.on_range(Kind.PULL, 0, 5000, None, rows(5000, 2))
    [(zero, first), (one, second)] = client.outgoing()
    client.answer(zero, Message(Header(Kind.REFUSED, shard=0, number=first.header.number)))
    assert not call.is_done  # the other server's answer may still be received into the caller's memory
    client.answer(one, Message(Header(Kind.REFUSED, shard=1, number=second.header.number)))
    assert call.is_done
    assert isinstance(call.error, RefusedError)
    other = client.on_range(Kind.PULL, 0, 5000, None, rows(5000, 2))
    client.fail(ConfigurationError("over"))
    assert other.is_done
    assert isinstance(other.error, ConfigurationError)


def test_the_memory_of_a_pull_takes_one_answer_only() -> None:
    """The request may be sent again, and the program may use the memory when the first answer has come."""
    _, [client, _] = pair()
    out = np.zeros((5000, 2), np.float32)
    client.on_range(Kind.PULL, 0, 5000, None, out)
    [(_, message)] = client.outgoing()
    assert np.shares_memory(message.room, out)
    client.resend(0)
    [(_, message)] = client.outgoing()
    assert message.room is None


def test_the_error_of_a_call_that_nobody_waits_for_is_kept() -> None:
    server, clients = pair(Sequential(buffer_bytes=8))
    for _ in range(2):
        carry(server, clients, 0, clients[0].on_range(Kind.PUSH, 0, 2, rows(2, 2), None))
    first = clients[0].unreported()
    assert isinstance(first.error, RefusedError)
    first.is_reported = True
    second = clients[0].unreported()
    assert second is not None
    second.is_reported = True
    assert clients[0].unreported() is None


def test_keys_of_another_byte_order() -> None:
    server, clients = pair()
    carry(server, clients, 0, clients[0].on_keys(Kind.PUSH, np.array([3, 9], ">i8"), rows(2, 2), None))
    np.testing.assert_array_equal(server.table.values[[6, 7, 18, 19]], [1, 2, 3, 4])


def test_only_the_answer_to_the_waiting_request_ends_what_is_known_of_slow_workers() -> None:
    server, clients = pair(Bounded(0), num_workers=3)
    client, out = clients[0], np.zeros((1, 2), np.float32)
    carry(server, clients, 0, client.advance())
    client.on_keys(Kind.PULL, np.array([1]), None, out)
    [(_, waiting)] = client.outgoing()
    [note] = server.take(0, waiting)
    client.answer(0, note.message)
    late = client.on_range(Kind.PULL, 0, 1, None, out.copy())
    client.outgoing()
    client.answer(0, Message(Header(Kind.REFUSED, number=waiting.header.number + 1)))
    assert late.is_done
    assert client.slow_workers() == {1: 0, 2: 0}


def test_the_slowest_clock_of_all_servers_is_told() -> None:
    client, _ = two_servers()
    client.on_range(Kind.PULL, 0, 5000, None, rows(5000, 2))
    for (server, message), clock in zip(client.outgoing(), (3, 4), strict=True):
        note = np.frombuffer(bytearray(struct.pack("<qq", 1, clock)), np.uint8)
        header = Header(Kind.WAITING, shard=server, number=message.header.number)
        client.answer(server, Message(header, None, note))
    assert client.slow_workers() == {1: 3}


def test_many_forgotten_lists_are_sent_again_once() -> None:
    server, clients = pair()
    client, lists = clients[0], [np.array([first, first + 50]) for first in range(WINDOW)]
    for keys in lists:
        carry(server, clients, 0, client.on_keys(Kind.PUSH, keys, rows(2, 2), None))
    for keys in lists:
        server._lists.drop(digest_of(keys.astype(np.int32)))
    before = client.lists.total()
    calls = [client.on_keys(Kind.PUSH, keys, rows(2, 2), None) for keys in lists]
    carry(server, clients, 0, calls[0])
    assert all(call.is_done for call in calls)
    assert client.lists["unknown"] == 1
    assert client.lists.total() - before <= 2 * WINDOW + 1


def test_a_refused_push_that_comes_again_is_refused_again() -> None:
    server, clients = pair(Sequential(buffer_bytes=8))
    client = clients[0]
    client.on_keys(Kind.PUSH, np.array([1]), rows(1, 2), None)
    client.on_keys(Kind.PUSH, np.array([2]), rows(1, 2), None)
    for _, message in client.outgoing():
        answers = [server.take(0, message)[0].message.header.kind for _ in range(2)]
    assert answers == [Kind.REFUSED, Kind.REFUSED]
    for worker in (0, 1):
        clients[worker].advance()
        for _, each in clients[worker].outgoing():
            server.take(worker, each)
    assert server.take(0, message)[0].message.header.kind is Kind.REFUSED  # also when there would be room now


def test_kept_lists_of_keys_count_as_what_is_kept() -> None:
    server, clients = pair(Sequential(buffer_bytes=20))
    call = carry(server, clients, 0, clients[0].on_keys(Kind.PUSH, np.array([1, 2]), rows(2, 2), None))
    assert isinstance(call.error, RefusedError)  # 16 bytes of values, and 16 of rows


@pytest.mark.parametrize(
    ("keys", "values", "text"),
    [
        ([1, 1], rows(2, 2), r"keys\[1\] is 1: keys are ascending, each comes once, and they are from 0 to 4999"),
        ([2, 1], rows(2, 2), r"keys\[1\] is 1"),
        ([-1, 1], rows(2, 2), r"keys\[0\] is -1"),
        ([1, 5000], rows(2, 2), r"keys\[1\] is 5000"),
        ([1.0, 2.0], rows(2, 2), "array of integers, not float64"),
        ([[1, 2]], rows(2, 2), r"one-dimensional array of integers, not int64 of \(1, 2\)"),
        ([1, 2], rows(2, 3), r"values have shape \(2, 3\); expected is \(2, 2\)"),
        ([1, 2], np.ones((2, 2)), "values are float64; the table's values are float32"),
        ([1, 2], rows(4), r"values have shape \(4,\); expected is \(2, 2\)"),
        ([1, 2, 3], rows(2, 3), r"values have shape \(2, 3\); expected is \(3, 2\)"),
        ([1, 2], rows(2, 4)[:, ::2], "must be contiguous"),
    ],
)
def test_bad_arguments(keys: list, values: np.ndarray, text: str) -> None:
    _, [client, _] = pair()
    with pytest.raises(ConfigurationError, match=text):
        client.on_keys(Kind.PUSH, np.array(keys), values, None)
    assert client.outgoing() == []


def test_bad_ranges_and_outputs() -> None:
    _, [client, _] = pair()
    with pytest.raises(ConfigurationError, match="keys from 4 to 3 are no range of 5000 keys"):
        client.on_range(Kind.PULL, 4, 3, None, rows(1, 2))
    out = rows(2, 2)
    out.flags.writeable = False
    with pytest.raises(ConfigurationError, match="out must be writable"):
        client.on_range(Kind.PULL, 4, 6, None, out)
    assert client.on_range(Kind.PULL, 4, 4, None, rows(0, 2)).is_done
    with pytest.raises(ProtocolError, match="rank 5 sends a message of kind DONE about shard 0 to a worker"):
        client.answer(5, Message(Header(Kind.DONE, number=0)))
