"""A parameter server in virtual time: staleness, clocks, sums and bits for many seeds; planted defects."""

from __future__ import annotations

import numpy as np
import pytest
from keyed import NUM_KEYS, World

from totalreduce.codecs.codec import Codec
from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.topk import Topk
from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.messages import list_bytes
from totalreduce.server.optimizers import Adagrad, Optimizer, Sum
from totalreduce.server.shard import Shard

RULES: list[Consistency] = [Sequential(), Bounded(0), Bounded(2), Eventual()]


@pytest.mark.parametrize("lost", [0.0, 0.15])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_pull_is_too_stale_and_no_push_is_lost_or_applied_twice(rule: Consistency, lost: float) -> None:
    digests = staleness = 0
    for seed in range(100 if not lost else 30):
        world = World(rule, seed, num_workers=2 + seed % 3, lost=lost, servers=[(0,), (0, 1), (1,)][seed % 3]).run()
        assert world.violations == [], seed
        assert not world.wrong_sums(), seed
        digests += sum(client.lists["digest"] for client in world.clients)
        staleness = max(staleness, *(max(client.staleness) for client in world.clients))
    assert digests > 100
    assert staleness == rule.bound if rule.bound is not None else staleness > 2


@pytest.mark.parametrize("optimizer", [Sum(), Adagrad(0.1)], ids=str)
def test_sequential_has_the_bits_of_a_synchronous_reference(optimizer: Optimizer) -> None:
    """The order of ranks, whatever the delays: and a reference that applies pushes one after the other."""
    results = []
    for seed in range(0, 70, 7):  # the same lists of keys; programs differ by seed only in their delays
        world = World(Sequential(), seed, optimizer=optimizer, fractions=True, lost=0.1 if seed % 2 else 0.0)
        taken = [Recorded(world, worker) for worker in range(world.num_workers)]
        world.run()
        reference = {shard: world.table_of(shard, optimizer) for shard in world.shards}
        for step in range(world.steps):
            for each in taken:
                for keys, values in each.steps[step]:
                    for shard, positions in world.layout.split_keys(keys):
                        table = reference[shard]
                        table.push(table.find_keys(keys[positions]), values[positions].reshape(-1))
        for shard, table in reference.items():
            np.testing.assert_array_equal(table.values, world.shards[shard].table.values)
        results.append(world.values())
    assert any((result != results[0]).any() for result in results)  # the programs were different


class Recorded:
    """What a worker pushes, by step."""

    def __init__(self, world: World, worker: int) -> None:
        self.steps: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(world.steps + 1)]
        client = world.clients[worker]
        on_keys, on_range = client.on_keys, client.on_range

        def record(kind, keys, values, out):
            if values is not None:
                self.steps[client.clock].append((keys, values.copy()))
            return on_keys(kind, keys, values, out)

        def record_range(kind, begin, end, values, out):
            if values is not None:
                self.steps[client.clock].append((np.arange(begin, end), values.copy()))
            return on_range(kind, begin, end, values, out)

        client.on_keys, client.on_range = record, record_range


@pytest.mark.parametrize("codec", [None, Int8(block=8), Topk(density=0.2)], ids=str)
@pytest.mark.parametrize("rule", [Sequential(buffer_bytes=700), Bounded(1)], ids=str)
def test_codes_and_refusals_lose_nothing(rule: Consistency, codec: Codec | None) -> None:
    """What is in the table and in the residuals is what was pushed and not refused."""
    refused = 0
    for seed in range(30):
        world = World(rule, seed, servers=(0,), codec=codec, lost=0.1 if seed % 2 else 0.0).run()
        assert world.violations == [], seed
        assert not world.wrong_sums(), seed
        refused += world.refused
    assert (refused > 10) == rule.in_steps


def test_a_server_that_forgets_lists_of_keys_gets_them_again() -> None:
    unknown = 0
    for seed in range(20):
        world = World(Bounded(1), seed)
        for shard in world.shards.values():
            shard._lists._size_max = list_bytes(20)
        assert world.run().violations == []
        assert not world.wrong_sums()
        unknown += sum(client.lists["unknown"] for client in world.clients)
    assert unknown > 20


# ------------------------------------------------------------------------------------------------------------- defects


class NeverStores(list):
    def __setitem__(self, place, value):
        pass


def without_memory_of_pushes(shard: Shard) -> None:
    shard._applied = NeverStores(shard._applied)


def with_a_bound_too_large_by_one(shard: Shard) -> None:
    class Wrong:
        in_steps, bound = False, 2
        admits = staticmethod(lambda clock, slowest: clock - slowest <= 3)

    shard._rule = Wrong()


def with_a_list_of_another_digest(shard: Shard) -> None:
    shard._lists.get = lambda digest: next(
        (rows for rows, _ in shard._lists._entries.values() if rows.count == len_of(shard, digest)), None
    )


def len_of(shard: Shard, digest: bytes) -> int | None:
    found = shard._lists._entries.get(digest)
    return None if found is None else found[0].count


def without_order(shard: Shard) -> None:
    """Requests are taken in whether the previous one has come or not."""
    take = shard.take

    def unordered(worker, message):
        stream = shard._streams[worker]
        if message.header.number > stream.last:
            stream.last = message.header.previous
        return take(worker, message)

    shard.take = unordered


@pytest.mark.parametrize(
    "plant", [without_memory_of_pushes, with_a_bound_too_large_by_one, with_a_list_of_another_digest, without_order]
)
def test_planted_defects_are_found(plant: object) -> None:
    for seed in range(60):
        world = World(Bounded(2), seed, lost=0.15)
        if plant is with_a_list_of_another_digest:
            world.lists = [np.sort((np.arange(9) * 3 + 7 * shift) % NUM_KEYS) for shift in range(4)]
        for shard in world.shards.values():
            plant(shard)
        try:
            world.run()
        except (AssertionError, RuntimeError):
            return
        if world.violations or world.wrong_sums():
            return
    pytest.fail("nobody noticed")
