"""Codes of listed keys, filters of a worker, and pushes that are held, as plain objects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from totalreduce.codecs.codec import Codec
from totalreduce.codecs.half import Half
from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.onebit import OneBit
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.server.client import Client
from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.early import EarlyBuckets
from totalreduce.server.filters import KKT, Filter, Significant
from totalreduce.server.layout import Layout
from totalreduce.server.messages import Form, Header, Kind, Spec
from totalreduce.server.optimizers import Sum
from totalreduce.server.requests import Call, PushOptions
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard, _Kept
from totalreduce.server.table import Table

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
HELD = PushOptions(is_held=True)


class Rig:
    """Two workers, and the servers of two shards, each in a chain of ``replicas``."""

    def __init__(
        self, spec: Spec, rule: Consistency | None = None, filter_: Filter | None = None, replicas: int = 1
    ) -> None:
        self.spec, self.layout = spec, Layout(spec.num_keys, [0, 1])
        chains = {0: [10, 11][:replicas], 1: [11, 10][:replicas]}
        self.servers = {seat: Server(seat) for seat in (10, 11)}
        for seat, server in self.servers.items():
            shards = {number: self.shard(seat, number, rule) for number, chain in chains.items() if seat in chain}
            server.begin_epoch(chains, shards)
        if filter_ is not None:
            filter_.begin(spec.num_keys, spec.width)
        heads = {number: chain[0] for number, chain in chains.items()}
        self.clients = [Client(worker, self.layout, spec, heads, filter_=filter_) for worker in (0, 1)]

    def shard(self, seat: int, number: int, rule: Consistency | None) -> Shard:
        table = Table(self.layout, number, width=self.spec.width, dtype=self.spec.dtype, optimizer=Sum())
        return Shard(seat, table, self.spec, rule or Eventual(), 2)

    def carry(self, call: Call) -> Call:
        """Bring all messages where they belong."""
        under_way = [(worker, *each) for worker, client in enumerate(self.clients) for each in client.outgoing()]
        while under_way:
            source, target, message = under_way.pop(0)
            spec_read = self.spec.decode(self.spec.encode(message.header))
            assert spec_read == message.header
            if target in self.servers:
                under_way += [(target, *each) for each in self.servers[target].take(source, message)]
            else:
                self.clients[target].answer(source, message)
                under_way += [(target, *each) for each in self.clients[target].outgoing()]
        assert call.is_done
        return call

    def values(self, place: int = 0) -> np.ndarray:
        """The values of all keys, as the heads (0) or the last servers of the chains (1) have them."""
        out = np.zeros((self.spec.num_keys, self.spec.width), self.spec.dtype)
        for seat, server in self.servers.items():
            for number, shard in server.shards.items():
                if (seat == 10 + number) == (place == 0):
                    rows = np.arange(len(shard.table.values) // self.spec.width)
                    out[shard.table.keys_at(rows)] = shard.table.values.reshape(-1, self.spec.width)
        return out


def random_keys(random: np.random.Generator, count: int = 300) -> np.ndarray:
    return np.unique(random.integers(0, 2000, count))


# ---------------------------------------------------------------------------------------------------- listed keys


@pytest.mark.parametrize("codec", [Int8(), OneBit(), Half()], ids=lambda each: each.name)
def test_codes_of_listed_keys_and_residuals_are_what_was_pushed(codec: Codec) -> None:
    """Lists overlap, and some travel as digests; each list has keys of both servers."""
    rig, random = Rig(Spec(2000, 3, F32, codec)), np.random.default_rng(1)
    lists, total, sent = [random_keys(random) for _ in range(3)], np.zeros((2000, 3)), 0
    for turn in range(12):
        keys = lists[turn % 3]
        values = random.standard_normal((len(keys), 3)).astype(np.float32)
        total[keys] += values
        client = rig.clients[turn % 2]
        call = client.on_keys(Kind.PUSH, keys, values, None)
        for server, message in client.outgoing():
            sent += message.values.nbytes
            client.answer(server, rig.servers[server].take(turn % 2, message)[0][1])
        assert call.is_done
        assert call.error is None
    rest = sum(client._residual.values.astype(np.float64) for client in rig.clients)
    assert np.abs(rest).max() > 1e-5
    assert np.abs(rig.values() + rest - total).max() <= 1e-6 * np.abs(total).max() * 4  # float32: four pushes of a key
    assert sent < 0.6 * 12 * 4 * 3 * len(lists[0])
    assert all(client.lists["digest"] > 0 for client in rig.clients)


def test_what_is_pushed_exactly_has_no_code() -> None:
    rig, keys = Rig(Spec(2000, 1, F32, OneBit())), np.arange(0, 2000, 3)
    values = np.linspace(-1, 1, len(keys), dtype=np.float32)
    rig.carry(rig.clients[0].on_keys(Kind.PUSH, keys, values, None, PushOptions(is_exact=True)))
    np.testing.assert_array_equal(rig.values()[keys, 0], values)
    assert not rig.clients[0]._residual.values.any()


def test_all_that_was_withheld_can_be_pushed() -> None:
    rig, random = Rig(Spec(2000, 1, F32, OneBit()), filter_=Significant(0.5)), np.random.default_rng(2)
    total = np.zeros(2000)
    for _ in range(5):
        keys = random_keys(random)
        values = random.standard_normal(len(keys)).astype(np.float32)
        total[keys] += values
        rig.carry(rig.clients[0].on_keys(Kind.PUSH, keys, values, None))
    assert np.abs(rig.values()[:, 0] - total).max() > 0.1
    rig.carry(rig.clients[0].push_withheld())
    np.testing.assert_allclose(rig.values()[:, 0], total, atol=2e-6)
    assert not rig.clients[0]._residual.values.any()


def test_what_codes_have_not_expressed_is_not_pushed_while_pushes_are_held() -> None:
    """A withdrawal restores the residual, so that the same values would be pushed twice."""
    rig, values = Rig(Spec(100, 1, F32, OneBit())), np.linspace(-1, 2, 100, dtype=np.float32)
    client = rig.clients[0]
    rig.carry(client.on_range(Kind.PUSH, 0, 100, values, None))
    rig.carry(client.on_range(Kind.PUSH, 0, 100, values, None, HELD))
    with pytest.raises(ConfigurationError, match=r"push_withheld\(\) belongs behind clock\(\) or withdraw\(\)"):
        client.push_withheld()
    rig.carry(client.withdraw())
    assert client._residual.values.any()
    rig.carry(client.push_withheld())
    np.testing.assert_allclose(rig.values()[:, 0] + client._residual.values[:, 0], values, atol=1e-6)
    assert not client._residual.values.any()


def test_codes_that_no_correct_worker_sends() -> None:
    spec = Spec(2000, 1, F32, Int8())
    for header, text in [
        (Header(Kind.PULL, Form.LIST, number=1, end=3, is_coded=True), "cannot have a code"),
        (Header(Kind.ASSIGN, Form.LIST, number=1, mark=1, end=3, value_bytes=12, is_held=True), "values that are held"),
        (Header(Kind.WITHDRAW, number=1), "WITHDRAW without a mark"),
    ]:
        with pytest.raises(ProtocolError, match=text):
            spec.decode(spec.encode(header))
    coded = Header(Kind.PUSH, Form.RANGE, number=1, mark=1, end=3, is_coded=True)
    with pytest.raises(ProtocolError, match="cannot have a code"):
        replace(spec, codec=None).decode(spec.encode(coded))
    rig, keys = Rig(spec), np.arange(3)
    rig.clients[0].on_keys(Kind.PUSH, keys, np.ones(3, np.float32), None)
    for server, message in rig.clients[0].outgoing():
        short = replace(message, values=message.values[:-1])
        [(_, answer)] = rig.servers[server].take(0, short)
        assert answer.header.kind is Kind.REFUSED
    assert not rig.values().any()


# -------------------------------------------------------------------------------------------------------- filters


class EveryThird(Filter):
    """Sends a third of the keys in each step."""

    def select(self, keys: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
        assert values.shape == (len(keys), 2)
        return (keys + step) % 3 == 0


@pytest.mark.parametrize(
    "make", [lambda: Significant(1.0), lambda: KKT(1.5, slack=0.5), EveryThird], ids=["significant", "kkt", "own"]
)
def test_what_a_filter_withholds_is_pushed_later(make: type[Filter]) -> None:
    rig, random = Rig(Spec(2000, 2, F64), filter_=make()), np.random.default_rng(3)
    client, total = rig.clients[0], np.zeros((2000, 2))
    out = np.empty((2000, 2))
    for turn in range(10):
        keys = random_keys(random)
        values = random.standard_normal((len(keys), 2))
        total[keys] += values
        pulled = np.full((len(keys), 2), np.nan)
        if turn % 2:
            rig.carry(client.on_keys(Kind.PUSH_PULL, keys, values, pulled))
            np.testing.assert_array_equal(pulled, rig.values()[keys])
        else:
            rig.carry(client.on_keys(Kind.PUSH, keys, values, None))
        dense = random.standard_normal((500, 2))
        total[700:1200] += dense
        rig.carry(client.on_range(Kind.PUSH, 700, 1200, dense, None))
        rig.carry(client.on_range(Kind.PULL, 0, 2000, None, out))
        np.testing.assert_allclose(out + client._residual.values, total, atol=1e-12)
        rig.carry(client.advance())
    assert client.withheld > 100
    assert client._residual.values.any()


def test_the_significance_filter_sends_what_has_become_large() -> None:
    rig = Rig(Spec(10, 2, F64), filter_=Significant(1.0))
    values = np.array([[0.6, 0.0], [0.0, -2.0], [0.2, 0.2]])
    for expected in ([[0, 0], [0, -2], [0, 0]], [[1.2, 0], [0, -4], [0, 0]]):
        rig.carry(rig.clients[0].on_keys(Kind.PUSH, np.array([1, 4, 8]), values, None))
        np.testing.assert_array_equal(rig.values()[[1, 4, 8]], expected)
    assert rig.clients[0].withheld == 3


def test_the_kkt_filter_withholds_small_gradients_of_weights_that_are_known_to_be_zero() -> None:
    rig, keys = Rig(Spec(4, 1, F64), filter_=KKT(1.0, slack=0.25)), np.arange(4)
    client = rig.clients[0]
    rig.carry(client.on_keys(Kind.ASSIGN, keys[:1], np.array([[5.0]]), None))
    rig.carry(client.on_keys(Kind.PULL, keys[:3], None, np.empty((3, 1))))
    # the weight is 5; it is zero and the gradient is small; it is zero and the gradient is large; it is not known
    rig.carry(client.on_keys(Kind.PUSH, keys, np.array([0.5, 0.75, 0.76, 0.5]), None))
    np.testing.assert_array_equal(rig.values()[:, 0], [5.5, 0, 0.76, 0.5])


def test_wrong_filters_are_refused_before_anything_changes() -> None:
    class Wrong(Filter):
        def select(self, keys: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
            del values, step
            return keys

    rig = Rig(Spec(10, 1, F64), filter_=Wrong())
    with pytest.raises(ConfigurationError, match=r"Wrong.select returns int32 of shape \(2,\) for 2 keys"):
        rig.clients[0].on_keys(Kind.PUSH, np.array([1, 2]), np.ones(2), None)
    with pytest.raises(ConfigurationError, match="held=True needs exact=True"):
        rig.clients[0].on_keys(Kind.PUSH, np.array([1, 2]), np.ones(2), None, HELD)
    assert not rig.clients[0].awaited_servers
    assert not rig.clients[0]._residual.values.any()
    for make, text in [
        (lambda: Significant(-1.0), "threshold is a number from 0"),
        (lambda: KKT(1.0, slack=2.0), "slack is 2.0, more than l1"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            make()


# ----------------------------------------------------------------------------------------------- held pushes


@pytest.mark.parametrize("rule", [Eventual(), Bounded(1), Sequential(), Sequential(combine="mean")], ids=str)
@pytest.mark.parametrize("codec", [None, Int8()], ids=["plain", "int8"])
def test_what_is_held_counts_when_the_step_ends_unless_it_is_withdrawn(rule: Consistency, codec: Codec | None) -> None:
    """On all servers of the chains; and a code that is withdrawn leaves the residual as it was, bit by bit."""
    rig, random = Rig(Spec(2000, 1, F32, codec), rule, replicas=2), np.random.default_rng(4)
    client, other = rig.clients
    first, second, third = (random.standard_normal(2000).astype(np.float32) for _ in range(3))
    rig.carry(client.on_range(Kind.PUSH, 0, 2000, first, None, HELD))
    assert not rig.values().any()
    rig.carry(client.advance())
    rig.carry(other.advance())
    begun = rig.values()
    np.testing.assert_allclose(begun[:, 0] * (2 if getattr(rule, "combine", "") == "mean" else 1), first, atol=0.02)
    before = None if codec is None else client._residual.values.copy()
    for values in (second, third):  # the second one is not sent yet when it is withdrawn, except its first requests
        rig.carry(client.on_range(Kind.PUSH, 0, 2000, values, None, HELD))
        rig.carry(client.withdraw())
    if before is not None:
        assert before.any()
        assert client._residual.values.tobytes() == before.tobytes()
    rig.carry(client.on_range(Kind.PUSH, 0, 2000, third, None, HELD))
    rig.carry(client.advance())
    rig.carry(other.advance())
    again = Rig(Spec(2000, 1, F32, codec), rule)
    for values in (first, third):
        again.carry(again.clients[0].on_range(Kind.PUSH, 0, 2000, values, None))
        for each in again.clients:
            again.carry(each.advance())
    if codec is None:  # seeds of codes depend on the number of the request; Int8 rounds to the nearest
        assert rig.values().tobytes() == again.values().tobytes()
    np.testing.assert_allclose(rig.values(), again.values(), atol=1e-6)
    assert rig.values(1).tobytes() == rig.values().tobytes()  # replicas


def test_what_a_worker_that_finishes_has_held_is_dropped() -> None:
    for rule in (Eventual(), Sequential()):
        rig = Rig(Spec(100, 1, F32), rule)
        rig.carry(rig.clients[0].on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None, HELD))
        rig.carry(rig.clients[0].finish())
        rig.carry(rig.clients[1].advance())
        assert not rig.values().any()


def test_the_end_of_a_step_of_others_leaves_what_is_held() -> None:
    """The slower worker ends its step while the faster one holds something in its next step."""
    rig = Rig(Spec(100, 1, F32), Bounded(3))
    fast, slow = rig.clients
    rig.carry(fast.advance())
    rig.carry(fast.on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None, HELD))
    rig.carry(slow.advance())
    assert not rig.values().any()
    rig.carry(fast.advance())
    assert (rig.values() == 1).all()


def test_servers_hold_each_key_once_and_forget_what_is_withdrawn() -> None:
    rig, ones = Rig(Spec(100, 1, F32), Eventual()), np.ones(100, np.float32)
    client = rig.clients[0]
    for _ in range(3):
        assert rig.carry(client.on_keys(Kind.PUSH, np.arange(100), ones, None, HELD)).error is None
        rig.carry(client.withdraw())
    rig.carry(client.on_range(Kind.PUSH, 0, 100, ones, None, HELD))
    refused = rig.carry(client.on_range(Kind.PUSH, 0, 100, ones, None, HELD))
    assert "push each key once" in str(refused.error)
    rig.carry(client.advance())
    assert (rig.values() == 1).all()
    state = next(iter(rig.servers[10].shards.values())).state()
    assert state["kept"] == []


def test_a_withdrawn_push_that_is_refused_later_leaves_the_residual_as_it_was() -> None:
    """The servers have no room for the second push; their answers come when the worker has sent its withdrawal."""
    rig, values = Rig(Spec(100, 1, F32, OneBit()), Eventual()), np.linspace(-1, 2, 100, dtype=np.float32)
    client = rig.clients[0]
    rig.carry(client.on_range(Kind.PUSH, 0, 100, values, None))
    before = client._residual.values.copy()
    rig.carry(client.on_range(Kind.PUSH, 0, 100, values, None, HELD))
    refused = client.on_range(Kind.PUSH, 0, 100, values, None, HELD)
    sent = client.outgoing()
    withdrawal = client.withdraw()
    sent += client.outgoing()
    for server, message in sent:
        for _, answer in rig.servers[server].take(0, message):
            client.answer(server, answer)
    assert "push each key once" in str(refused.error)
    assert withdrawal.is_done
    assert before.any()
    assert client._residual.values.tobytes() == before.tobytes()


def test_the_end_of_a_step_looks_at_kept_pushes_only_where_the_worker_holds_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker ends each step, so the cost would be the number of workers times that of all pushes."""
    looked, num_bytes = [], _Kept.num_bytes

    def counted(kept: _Kept, rule: Consistency) -> int:
        looked.append(kept)
        return num_bytes(kept, rule)

    rig, ones = Rig(Spec(100, 1, F32), Sequential()), np.ones(5, np.float32)
    first, second = rig.clients
    for begin in range(0, 100, 5):
        rig.carry(second.on_range(Kind.PUSH, begin, begin + 5, ones, None))
    monkeypatch.setattr(_Kept, "num_bytes", counted)
    rig.carry(first.advance())
    assert len(looked) == 0
    rig.carry(second.advance())
    assert len(looked) == 0
    assert (rig.values() == 1).all()
    for begin in range(0, 100, 5):
        rig.carry(second.on_range(Kind.PUSH, begin, begin + 5, ones, None, HELD))
    num_kept = len(looked)  # when they came
    rig.carry(second.advance())
    assert len(looked) == 2 * num_kept
    rig.carry(first.advance())
    assert (rig.values() == 2).all()


def test_requests_that_were_not_sent_are_not_sent_after_they_were_withdrawn() -> None:
    spec = Spec(8_000_000, 1, F32)
    rig, values = Rig(spec), np.ones(8_000_000, np.float32)
    client = rig.clients[0]
    push = client.on_range(Kind.PUSH, 0, 8_000_000, values, None, HELD)
    sent = client.outgoing()
    assert len(sent) < push.pending
    client.withdraw()
    assert push.pending == len(sent)


def test_another_server_goes_on_with_what_is_held() -> None:
    rig = Rig(Spec(100, 1, F32), Bounded(1))
    rig.carry(rig.clients[0].on_range(Kind.PUSH, 0, 100, np.ones(100, np.float32), None, HELD))
    for server in rig.servers.values():
        for number, shard in list(server.shards.items()):
            twin = rig.shard(server.rank, number, Bounded(1))
            twin.load_state(shard.state())
            [each] = twin._kept
            assert (each.worker, each.is_held) == (0, True)
            assert (twin._streams[0].kept_bytes, twin._streams[0].num_held) == (twin.table.values.nbytes, 1)


def test_assigned_values_are_the_same_on_all_servers_of_a_chain() -> None:
    rig, ones = Rig(Spec(100, 1, F32), replicas=2), np.ones(100, np.float32)
    for _ in range(2):
        rig.carry(rig.clients[0].on_range(Kind.ASSIGN, 0, 100, ones, None))
    assert (rig.values(0) == 1).all()
    assert (rig.values(1) == 1).all()


# ---------------------------------------------------------------------------------------------- early gradients


def test_buckets_leave_in_one_order_and_not_behind_a_gradient_that_is_missing() -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(5)]
    early = EarlyBuckets([(4, 3), (2, 1), (0,)], parameters, is_fixed=False)

    def backward(*numbers: int) -> list[tuple[int, ...]]:
        left: list[tuple[int, ...]] = []
        for number in numbers:
            parameters[number].grad = torch.ones(2)
            left += early.ready(number)
        return left

    assert backward(1, 2, 4) == []
    assert backward(3) == [(4, 3), (2, 1)]
    assert (early.rest(), early.have_changed()) == ([0], False)
    early.end_step()
    assert backward(4, 3, 0) == [(4, 3)]  # nothing comes for parameter 1
    assert early.rest() == [0, 1, 2]
    parameters[3].grad.mul_(2)  # clipped
    assert early.have_changed()
    early.withdraw()
    assert early.rest() == [0, 1, 2, 3, 4]
    early.end_step()
    assert backward(4, 3, 2, 1, 0) == []  # gradients are watched, and do not leave
    assert not early.have_changed()
    early.end_step()
    assert backward(4, 3) == [(4, 3)]
    assert backward(4, 3, 2, 1) == []  # another backward pass
    assert early.have_changed()
    assert (early.num_early, early.num_withdrawn) == (4, 1)


# ------------------------------------------------------------------------------------- workers that are run again


class Coin(Filter):
    """Withholds every second push, and of the other ones each key with a probability of one half."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def select(self, keys: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
        share = 0.5 * self.random.integers(2)
        return self.random.random(len(keys)) < share


#: In each step: the first, last and distance of the keys of each push. Some pushes need two requests to each shard.
PUSHES = ((0, 14_000, 1), (100, 12_000, 3), None, (5_000, 14_000, 1))
STEPS = 4


def push_steps(client: Client, steps: range, ends: bool) -> list[Call]:
    """Make the pushes of some steps. Push n of the job adds 1 to value n of its keys; ``None`` is ``push_withheld``."""
    calls = []
    for step in steps:
        for index, part in enumerate(PUSHES):
            if part is None:
                calls.append(client.push_withheld())
                continue
            keys = np.arange(*part)
            values = np.zeros((len(keys), STEPS * len(PUSHES)))
            values[:, step * len(PUSHES) + index] = 1
            if part[2] == 1:
                calls.append(client.on_range(Kind.PUSH, part[0], part[1], values, None))
            else:
                calls.append(client.on_keys(Kind.PUSH, keys, values, None))
        if ends:
            calls.append(client.advance())
    return calls


@pytest.mark.parametrize(("lost_at", "num_delivered"), [(0, 6), (1, 1), (1, 6), (1, 99), (2, 0), (2, 3), (2, 6)])
def test_a_worker_with_a_filter_that_is_run_again_applies_nothing_twice(lost_at: int, num_delivered: int) -> None:
    spec = Spec(14_000, STEPS * len(PUSHES), F64)
    rig = Rig(spec)
    heads = {0: 10, 1: 11}

    def start(seed: int, clock: int) -> Client:
        client = Client(0, rig.layout, spec, heads, steps_are_atomic=True, filter_=Coin(seed))
        client.begin_epoch(heads, clock)
        client.begin_steps()
        rig.clients[0] = client
        return client

    lost = start(num_delivered, 0)
    for step in range(lost_at):
        for call in push_steps(lost, range(step, step + 1), ends=True):
            rig.carry(call)
    push_steps(lost, range(lost_at, lost_at + 1), ends=False)
    sent = lost.outgoing()
    for target, message in sent[:num_delivered]:
        rig.servers[target].take(0, message)
    applied = rig.values()  # the lost process has withheld the rest
    for number, (seat, server) in enumerate(rig.servers.items()):
        shard = Shard(seat, server.shards[number].table, spec, Eventual(), 2)
        shard.load_state(server.shards[number].state())
        server.begin_epoch({0: (10,), 1: (11,)}, {number: shard})
    calls = push_steps(again := start(77, lost_at), range(lost_at, STEPS), ends=True)
    for call in [*calls, again.push_withheld()]:
        rig.carry(call)
    counts = rig.values()
    for step in range(STEPS):
        for index, part in enumerate(PUSHES):
            column = step * len(PUSHES) + index
            expected = np.zeros(spec.num_keys)
            if part is not None:
                expected[slice(*part)] = 1
            missing = np.flatnonzero(counts[:, column] != expected)
            if step < lost_at:  # lost with the process that had withheld them
                assert not applied[missing, column].any()
                assert not counts[missing, column].any()
                continue
            # Of the step that is repeated, and of later ones, each push counts once.
            assert not counts[missing, column].any(), "applied twice"
            assert len(missing) == 0 or (step == lost_at > 0 and num_delivered)
