"""A parameter server on real ranks: what is pushed comes to the servers, and back; how it waits, fails and ends."""

from __future__ import annotations

import gc
import struct
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GroupClosed,
    PeerLost,
    PlanMismatchError,
    ProtocolError,
    RefusedError,
    SlowWorkersError,
)
from totalreduce.groups.group import Group
from totalreduce.server import messenger
from totalreduce.server.messages import Header, Kind
from totalreduce.testing import run_ranks

ps = tr.ps
SIZES = [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 7, 8))]
NUM_KEYS = 3000


@pytest.mark.parametrize("world_size", SIZES)
def test_pushes_of_all_ranks_are_added_up(world_size: int) -> None:
    """Sparse keys and ranges, arrays and tensors; every element and every rank has another value."""

    def body(group: Group) -> tuple[np.ndarray, np.ndarray]:
        with ps.connect(group, num_keys=NUM_KEYS, width=2, dtype="float64", consistency=ps.Sequential()) as client:
            keys = torch.arange(group.rank, NUM_KEYS, 3 + group.rank)
            values = torch.stack([keys, 10.0**group.rank + keys], dim=1).double()
            client.push(keys, values)
            dense = np.arange(2000.0).reshape(1000, 2) * (group.rank + 1)
            client.push_range(500, 1500, dense)
            client.clock()
            sparse, out = np.zeros((len(keys), 2)), torch.full((NUM_KEYS, 2), torch.nan, dtype=torch.float64)
            tickets = [client.pull(keys, sparse), client.pull(slice(0, NUM_KEYS), out)]
            for ticket in tickets:
                ticket.wait()
                assert ticket.done()
                assert ticket.staleness == 0
            np.testing.assert_array_equal(sparse, out.numpy()[keys])
            return out.numpy(), client.statistics().updates

    expected = np.zeros((NUM_KEYS, 2))
    for rank in range(world_size):
        keys = np.arange(rank, NUM_KEYS, 3 + rank)
        expected[keys] += np.stack([keys, 10.0**rank + keys], axis=1)
        expected[500:1500] += np.arange(2000.0).reshape(1000, 2) * (rank + 1)
    results = run_ranks(world_size, body)
    for out, _ in results:
        np.testing.assert_array_equal(out, expected)
    assert sum(updates for _, updates in results) == 2 * world_size * world_size


@pytest.mark.parametrize("servers", [[0], [2, 1]])
def test_some_ranks_are_servers(servers: list[int]) -> None:
    def body(group: Group) -> tuple[float, int]:
        with ps.connect(group, num_keys=100, servers=servers, consistency=ps.Bounded(0), initial=2.0) as client:
            client.push(np.array([3, 50]), np.array([1, 2], np.float32))
            client.push_range(0, 100, np.full(100, 0.5, np.float32))
            client.clock()
            out = np.zeros(100, np.float32)
            client.pull_range(0, 100, out).wait()
            assert (out[3], out[50], out[4]) == (6.5, 9.5, 3.5)
            return float(out.sum()), client.statistics().updates

    for rank, (total, updates) in enumerate(run_ranks(3, body)):
        assert total == 359
        assert (updates > 0) == (rank in servers)


def test_steps_of_an_optimizer_have_the_bits_of_a_synchronous_run() -> None:
    def body(group: Group) -> bytes:
        random = np.random.default_rng(group.rank)
        adam, initial = ps.Adam(0.01), lambda keys: np.sin(keys)
        settings = {"num_keys": 500, "optimizer": adam, "initial": initial, "consistency": ps.Sequential()}
        with ps.connect(group, **settings) as client:
            out = np.zeros(500, np.float32)
            for step in range(6):
                client.pull_range(0, 500, out).wait()
                if (step + group.rank) % 3 == 0:
                    time.sleep(0.01)
                keys = np.flatnonzero(random.random(500) < 0.4)
                client.push(keys, (np.cos(out[keys]) * (group.rank + 1)).astype(np.float32))
                client.clock()
            client.pull_range(0, 500, out).wait()
            return out.tobytes()

    runs = [run_ranks(3, body) for _ in range(2)]
    assert len({bits for run in runs for bits in run}) == 1
    one = run_ranks(1, body)[0]
    assert one != runs[0][0]


def test_staleness_is_bounded_and_counted() -> None:
    """Rank 1 is slow: at first by the whole bound, which is 2, and then a little in each step."""
    two_ahead = threading.Event()

    def body(group: Group) -> tuple[int, int, float]:
        with ps.connect(group, num_keys=10, consistency=ps.Bounded(2)) as client:
            seen, ones, out = 0, np.ones(1, np.float32), np.zeros(10, np.float32)
            begin = time.monotonic()
            for step in range(8):
                ticket = client.pull_range(0, 10, out)
                ticket.wait()
                seen = max(seen, ticket.staleness)
                for other in range(group.world_size):
                    assert out[other] >= step - 2
                if group.rank == 0 and step == 2:
                    two_ahead.set()
                elif group.rank == 1:
                    assert two_ahead.wait(20)
                    time.sleep(0.05)
                client.push([group.rank], ones)
                client.clock()
            seconds = time.monotonic() - begin
            statistics = client.statistics()
            assert max(statistics.staleness) == seen
            assert statistics.waiting_s < seconds
            return seen, statistics.lists + statistics.digests, statistics.waiting_s

    results = run_ranks(3, body)
    assert max(seen for seen, *_ in results) == 2
    assert results[0][2] > 0.0  # the fast ones have waited


def test_lists_of_keys_travel_once() -> None:
    def body(group: Group) -> tuple[int, int, int]:
        with ps.connect(group, num_keys=100_000, servers=[0]) as client:
            keys, values = np.arange(0, 100_000, 10), np.ones(10_000, np.float32)
            for _ in range(5):
                client.push(keys, values).wait()
            statistics = client.statistics()
            return statistics.lists, statistics.digests, statistics.bytes_sent

    _, (lists, digests, sent) = run_ranks(2, body)
    assert (lists, digests) == (1, 4)
    assert 5 * 40_000 + 40_000 <= sent <= 5 * 40_000 + 40_000 + 2000


def test_codes_are_pushed_with_error_feedback() -> None:
    def body(group: Group) -> tuple[np.ndarray, int]:
        with ps.connect(group, num_keys=4096, codec=tr.Int8(), consistency=ps.Sequential()) as client:
            values, out = np.linspace(0, 1, 4096, dtype=np.float32) ** 3, np.zeros(4096, np.float32)
            for _ in range(20):
                client.push_range(0, 4096, values)
            client.clock()
            client.pull_range(0, 4096, out).wait()
            return out, client.statistics().bytes_sent

    for out, sent in run_ranks(2, body):
        exact = 40 * np.linspace(0, 1, 4096, dtype=np.float32) ** 3
        assert 0 < np.abs(out - exact).max() < 0.03  # the error of two codes, and not of forty
        assert sent < 20 * 4096 * 4


def test_a_bound_holds_a_rank_back_and_the_error_names_the_slow_ones() -> None:
    def body(group: Group) -> str:
        with ps.connect(group, num_keys=10, consistency=ps.Bounded(1), timeout_s=10.0) as client:
            out = np.zeros(10, np.float32)
            if group.rank == 0:
                for _ in range(2):
                    client.clock().wait()
                ticket = client.pull_range(0, 10, out)
                with pytest.raises(SlowWorkersError, match=r"clock 2 has waited 0\.3 s for slower") as caught:
                    ticket.wait(0.3)
                assert (caught.value.clock, caught.value.clocks) == (2, {1: 0, 2: 0})
            group.barrier()
            client.clock().wait()
            if group.rank == 0:
                client.clock()
                client.pull_range(0, 10, out)
                ticket.wait()  # goes on
                assert ticket.staleness == 1
            return "done"

    assert run_ranks(3, body) == ["done"] * 3


def test_a_lost_rank_raises_in_all_waiting_calls() -> None:
    def body(group: Group) -> list[BaseException | str]:
        client = ps.connect(group, num_keys=10, consistency=ps.Sequential())
        if group.rank == 2:
            group.barrier()
            group.close()
            return ["left"]
        client.clock()
        out, found = np.zeros(10, np.float32), []
        ticket = client.pull_range(0, 10, out)
        group.barrier()
        for wait in (ticket.wait, lambda: client.push_range(0, 10, out).wait()):
            begin = time.monotonic()
            try:
                wait(20.0) if wait == ticket.wait else wait()
            except (PeerLost, GroupClosed) as error:
                found.append(error)
            assert time.monotonic() - begin < 10
        client.end()
        return found

    *survivors, _ = run_ranks(3, body)
    for found in survivors:
        assert [type(error) for error in found] == [PeerLost, PeerLost]
        assert found[0].rank == 2


def test_a_refused_request_raises_on_its_rank_only() -> None:
    def body(group: Group) -> float:
        rule = ps.Sequential(buffer_bytes=400)
        with ps.connect(group, num_keys=100, servers=[0], consistency=rule) as client:
            ones, out = np.ones(100, np.float32), np.zeros(100, np.float32)
            client.push_range(0, 100, ones).wait()
            if group.rank == 1:
                with pytest.raises(RefusedError, match="worker 1 pushes more in step 0"):
                    client.push_range(0, 1, ones[:1]).wait()
            client.clock()
            client.pull_range(0, 100, out).wait()
            return float(out.sum())

    assert run_ranks(2, body) == [200.0, 200.0]


@pytest.mark.parametrize(
    ("setting", "zero", "one"),
    [
        ("num_keys", 10, 11),
        ("optimizer", ps.SGD(0.1), ps.SGD(0.2)),
        ("consistency", ps.Bounded(1), ps.Eventual()),
        ("codec", tr.Int8(), None),
        ("dtype", "float32", "float64"),
    ],
)
def test_settings_must_agree(setting: str, zero: object, one: object) -> None:
    def body(group: Group) -> str:
        given = {"num_keys": 10, setting: one if group.rank else zero}
        with pytest.raises(PlanMismatchError) as caught:
            ps.connect(group, **given)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert f"{setting}" in text
        assert "rank 0 has" in text
        assert "rank 1 has" in text


def test_arguments_that_cannot_be() -> None:
    def body(group: Group) -> None:
        for given, text in [
            ({"num_keys": 0}, "num_keys must be at least 1"),
            ({"dtype": "float16"}, "dtype is 'float32' or 'float64'"),
            ({"dtype": torch.float64, "codec": tr.Int8()}, "codecs encode float32"),
            ({"optimizer": torch.optim.SGD}, "expected is a tr.ps.Optimizer"),
            ({"servers": []}, "servers must name a rank"),
        ]:
            with pytest.raises(ConfigurationError, match=text):
                ps.connect(group, **{"num_keys": 10, **given})
        client = ps.connect(group, num_keys=10)
        for keys, values, text in [
            ([3, 3], np.ones(2, np.float32), "ascending"),
            ([3, 10], np.ones(2, np.float32), "from 0 to 9"),
            ([3], np.ones(2, np.float32), "expected is"),
            ([3], torch.ones(1, dtype=torch.bfloat16), "dense tensor of a type that NumPy has, not torch.bfloat16"),
            ([3], [1.0], "not list"),
            (slice(0, 9, 2), np.ones(2, np.float32), "slice"),
            (slice(2, 12), np.ones(10, np.float32), "no range"),
        ]:
            with pytest.raises(ConfigurationError, match=text):
                client.push(keys, values)
        ones = np.ones(10, np.float32)
        with pytest.raises(ConfigurationError, match="share memory"):
            client.push_pull_range(0, 10, ones, ones)
        ones.flags.writeable = False
        client.push_range(0, 10, ones).wait()
        client.close()
        client.close()
        with pytest.raises(GroupClosed, match="has closed its connection"):
            client.clock()

    run_ranks(2, body)


def test_a_rank_that_does_not_close_is_named() -> None:
    def body(group: Group) -> None:
        client = ps.connect(group, num_keys=10)
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError, match=r"rank\(s\) \[1\] have not closed their connections"):
                client.close(0.3)
        group.barrier()
        client.end()

    run_ranks(2, body, engine=EngineConfig(timeout_s=20.0))


def test_two_tables_and_a_large_dense_one_over_tcp() -> None:
    def body(group: Group) -> None:
        one = ps.connect(group, num_keys=5_000_000)
        two = ps.connect(group, num_keys=5, optimizer=ps.SGD(1.0))
        values, out, small = np.arange(5e6, dtype=np.float32), np.zeros(5_000_000, np.float32), np.zeros(5, np.float32)
        ticket = one.push_pull_range(0, 5_000_000, values, out)
        two.push([1], np.ones(1, np.float32)).wait()
        ticket.wait()
        group.barrier()
        one.pull_range(0, 5_000_000, out).wait()
        two.pull([0, 1, 2, 3, 4], small).wait()
        np.testing.assert_array_equal(out, 2 * values)
        assert list(small) == [0, -2, 0, 0, 0]
        group.barrier()
        two.close()
        one.close()

    run_ranks(2, body, transport="tcp")


def test_a_rank_that_only_serves_closes_at_once() -> None:
    """Nobody waits for it, and it goes on serving until the others have closed."""

    def body(group: Group) -> float:
        client = ps.connect(group, num_keys=100, servers=[0], consistency=ps.Sequential())
        out = np.zeros(100, np.float32)
        if group.rank == 0:
            client.close(30.0)
            return client.statistics().updates
        for _ in range(3):
            client.pull_range(0, 100, out).wait()
            time.sleep(0.05)
            client.push_range(0, 100, np.ones(100, np.float32))
            client.clock()
        client.pull_range(0, 100, out).wait()
        client.close()
        return float(out.sum())

    assert run_ranks(3, body) == [6, 600, 600]


def test_the_end_of_a_with_block_raises_what_has_failed_meanwhile() -> None:
    def body(group: Group) -> type[BaseException]:
        if group.rank == 1:
            client = ps.connect(group, num_keys=10)
            client.end()
            client.close()  # says nothing: this rank has ended its connection itself
            return GroupClosed
        with pytest.raises(PeerLost, match="rank 1 is lost") as caught, ps.connect(group, num_keys=10) as client:  # noqa: PT012
            client.push_range(0, 10, np.ones(10, np.float32))
            until = time.monotonic() + 10
            while client._driver.state != "ended" and time.monotonic() < until:
                time.sleep(0.01)
        client.close()  # was told once
        return type(caught.value)

    assert run_ranks(2, body) == [PeerLost, GroupClosed]


def test_close_raises_the_error_of_a_push_that_nobody_has_waited_for() -> None:
    def body(group: Group) -> None:
        client = ps.connect(group, num_keys=100, servers=[0], consistency=ps.Sequential(buffer_bytes=40))
        ones = np.ones(100, np.float32)
        if group.rank == 1:
            with pytest.raises(RefusedError):
                client.push_range(0, 100, ones).wait()
            client.push_range(0, 50, ones[:50])
            with pytest.raises(RefusedError, match="worker 1 pushes more"):
                client.close()
        client.close()

    run_ranks(2, body)


def test_a_thread_that_waits_for_a_push_notices_that_it_was_withdrawn() -> None:
    """The push was not sent, because a pull that waits for the other worker takes all bytes under way."""

    def body(group: Group) -> float:
        count, waited_s = 5_000_000, 0.0
        with ps.connect(group, num_keys=count, servers=[0], consistency=ps.Bounded(0)) as client:
            if group.rank == 0:
                client.clock()
                pull = client.pull_range(0, count, np.empty(count, np.float32))
                push = client.push_range(0, count, np.ones(count, np.float32), held=True)
                waiting = threading.Thread(target=push.wait, args=(20.0,))
                waiting.start()
                time.sleep(0.2)
                begin = time.monotonic()
                client.withdraw()
                waiting.join()
                waited_s = time.monotonic() - begin
                group.barrier()
                pull.wait()
            else:
                group.barrier()
                client.clock()
        return waited_s

    assert max(run_ranks(2, body)) < 5.0


def test_several_pulls_into_the_same_memory() -> None:
    """Over tcp, large answers are received into the memory of the pull."""

    def body(group: Group) -> int:
        with ps.connect(group, num_keys=1_000_000, servers=[0], initial=lambda keys: keys) as client:
            out, lent = np.zeros(1_000_000, np.float32), 0
            answer = client._client.answer

            def count(source, message):
                nonlocal lent
                lent += message.values is not None and np.shares_memory(message.values, out)
                return answer(source, message)

            client._client.answer = count
            for _ in range(3):
                tickets = [client.pull_range(0, 1_000_000, out) for _ in range(4)]
                for ticket in tickets:
                    ticket.wait()
                np.testing.assert_array_equal(out, np.arange(1e6, dtype=np.float32))
                out[:] = 0
            return lent

    assert run_ranks(2, body, transport="tcp") == [0, 96]  # each in eight pieces


@pytest.mark.parametrize("how", ["end", "failure"])
def test_a_rank_that_ends_its_connection_is_lost_to_the_others(how: str) -> None:
    def body(group: Group) -> float:
        client = ps.connect(group, num_keys=10, servers=[0], consistency=ps.Bounded(0), timeout_s=20.0)
        ticket = None
        if group.rank != 0:
            client.clock()
            ticket = client.pull_range(0, 10, np.zeros(10, np.float32))
        group.barrier()
        if group.rank == 0:
            if how == "end":
                client.end()
            else:
                client._driver._events.put(lambda: client._driver._fail(RefusedError("planted")))
            return 0.0
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="rank 0 is lost: it has ended its connection to the parameter server"):
            ticket.wait()
        client.end()
        return time.monotonic() - begin

    assert max(run_ranks(3, body)) < 10


def test_one_rank_that_cannot_connect_does_not_leave_the_others_waiting() -> None:
    def fails(_keys: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("of the program")

    def body(group: Group) -> list[str]:
        texts = []
        for setting, wrong in [("initial", fails), ("timeout_s", -1.0), ("codec", "int8")]:
            right = (lambda keys: keys) if setting == "initial" else None
            with pytest.raises((ConfigurationError, PlanMismatchError)) as caught:
                ps.connect(group, num_keys=10, **{setting: wrong if group.rank == 1 else right})
            texts.append(str(caught.value))
        with pytest.raises(ConfigurationError, match=r"tr\.Int8\(\), not 'int8'"):
            ps.connect(group, num_keys=10, codec="int8")
        return texts

    zero, one = run_ranks(2, body)
    for text, expected in zip(one, ["ZeroDivisionError('of the program')", "timeout_s", "codec"], strict=True):
        assert expected in text
    for text in zero:
        assert "refused" in text


@pytest.mark.parametrize("is_filter", [True, False])
def test_a_filter_that_cannot_begin_does_not_leave_the_others_waiting(is_filter: bool) -> None:
    class Broken(ps.Filter):
        """A filter of the program."""

        def select(self, keys: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
            raise AssertionError

        def begin(self, num_keys: int, width: int) -> None:
            raise ValueError(f"no room for {num_keys} keys")

    def body(group: Group) -> str:
        wrong = Broken() if is_filter else "significant"
        with pytest.raises((ConfigurationError, PlanMismatchError)) as caught:
            ps.connect(group, num_keys=10, filter=wrong if group.rank == 1 else None)
        with ps.connect(group, num_keys=10, workers=1, filter=wrong if group.rank == 1 else None):
            return f"{type(caught.value).__name__}: {caught.value}"  # rank 1 only serves here

    zero, one = run_ranks(2, body, engine=EngineConfig(timeout_s=20.0))
    text = "Broken.begin has failed: ValueError('no room for 10 keys')" if is_filter else "tr.ps.Filter, not 'signific"
    assert one.startswith("ConfigurationError")
    assert text in one
    assert zero.startswith("PlanMismatchError")
    assert text in zero


def test_a_filter_of_a_worker_begins_once_and_sends_what_has_become_large() -> None:
    class Watched(ps.Filter):
        """Notes its begin."""

        def select(self, keys: np.ndarray, values: np.ndarray, step: int) -> np.ndarray:
            return values[:, 0] > 1.5

        def begin(self, num_keys: int, width: int) -> None:
            begun.append((num_keys, width))

    begun: list[tuple[int, int]] = []

    def body(group: Group) -> list[float]:
        out = np.empty(10, np.float32)
        with ps.connect(group, num_keys=10, filter=Watched()) as client:
            for _ in range(3):
                client.push_range(0, 10, np.ones(10, np.float32)).wait()
            client.pull_range(0, 10, out).wait()
        return np.unique(out).tolist()

    assert run_ranks(1, body) == [[2.0]]
    assert begun == [(10, 1)]


def test_a_wrong_time_limit_of_close_changes_nothing_and_a_list_may_be_empty() -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10) as client:
            with pytest.raises(ConfigurationError):
                client.close(-1)
            client.push([], np.zeros(0, np.float32)).wait()
            client.push([3], np.ones(1, np.float32)).wait()

    run_ranks(2, body)


def test_a_closed_connection_keeps_no_table() -> None:
    def body(group: Group) -> int:
        client = ps.connect(group, num_keys=1000, codec=tr.Int8())
        table = weakref.ref(next(iter(client._driver.server.shards.values())).table)
        group.barrier()
        client.push_range(0, 1000, np.ones(1000, np.float32)).wait()
        client.close()
        gc.collect()
        assert table() is None
        assert client._client._residual is None
        assert client._client._queues == {}
        return client.statistics().updates

    assert run_ranks(2, body) == [2, 2]


def test_a_rank_that_asks_and_does_not_receive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers would fill the memory of the server."""
    monkeypatch.setattr(messenger, "_UNSENT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(messenger._Unsent, "end", lambda *_: None)  # as if nothing left

    def body(group: Group) -> str:
        client = ps.connect(group, num_keys=10_000, servers=[0])
        group.barrier()
        if group.rank == 1:
            client._client.on_range(Kind.PULL, 0, 10_000, None, np.zeros(10_000, np.float32))
            [(_, message)] = client._client.outgoing()
            client._driver.messenger.send([(0, message)] * 100)
        group.barrier()
        text = ""
        if group.rank == 0:
            with pytest.raises(ProtocolError) as caught:
                client.close(20.0)
            text = str(caught.value)
        group.barrier()
        client.end()
        return text

    text, _ = run_ranks(2, body)
    assert text == "rank 1 asks for values and does not receive them: more than 1048576 bytes of answers wait"


def test_answers_that_have_left_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messenger, "_UNSENT_BYTES_MAX", 1 << 20)

    def body(group: Group) -> int:
        out = np.zeros(100_000, np.float32)
        with ps.connect(group, num_keys=100_000, servers=[0], initial=2.0) as client:
            for _ in range(10 if group.rank else 0):
                client.pull_range(0, 100_000, out).wait()  # 400 kB each time
                np.testing.assert_array_equal(out, np.float32(2.0))
                out[:] = 0
            group.barrier()
            return sum(client._driver.messenger._unsent._num_bytes.values())

    assert run_ranks(2, body, transport="tcp") == [0, 0]


def test_many_words_about_what_a_request_waits_for() -> None:
    """A server says it again for each step of the slowest worker; a rank that is busy needs the last word alone."""

    def body(group: Group) -> dict[int, int]:
        found = {}
        with ps.connect(group, num_keys=10, servers=[0], consistency=ps.Bounded(0)) as client:
            if group.rank == 1:
                client.clock()
                pull = client.pull_range(0, 10, np.zeros(10, np.float32))
                while not client._client.slow_workers():
                    time.sleep(0.01)
                number = next(iter(client._client._queues[0].unanswered))
                goes_on = threading.Event()
                client._driver._events.put(goes_on.wait)
                for clock in range(10_000):
                    note = struct.pack("<qq", 7, clock)
                    header = Header(Kind.WAITING, shard=0, number=number, value_bytes=len(note))
                    client._driver.messenger.receive(0, client._driver.messenger._spec.encode(header) + note, 0.0)
                waits = client._driver._events.qsize()
                goes_on.set()
                while client._client.slow_workers() != {7: 9_999}:
                    time.sleep(0.01)
                found = {waits: len(client._driver.messenger._waiting[0])}
            group.barrier()
            client.clock()
            if group.rank == 1:
                pull.wait()
        return found

    assert run_ranks(2, body)[1] == {1: 0}


def test_a_request_that_could_not_be_sent_ends_the_connection() -> None:
    def body(group: Group) -> None:
        client = ps.connect(group, num_keys=10)

        def planted() -> list[object]:
            raise MemoryError

        client._client.outgoing = planted
        with pytest.raises(MemoryError):
            client.push([3], np.ones(1, np.float32))
        with pytest.raises(ProtocolError, match="a request could not be sent: MemoryError"):
            client.push([3], np.ones(1, np.float32))
        with pytest.raises(ProtocolError):
            client.close()

    run_ranks(1, body)
