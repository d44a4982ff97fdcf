"""A parameter server in virtual time: staleness, clocks, sums and bits for many seeds; planted defects."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from keyed import NUM_KEYS, World

from totalreduce.codecs.codec import Codec
from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.topk import Topk
from totalreduce.foundation.errors import RecoveryError, TotalReduceError
from totalreduce.server import handover
from totalreduce.server.client import Client
from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.handover import Holdings, Plan
from totalreduce.server.messages import list_bytes
from totalreduce.server.optimizers import Adagrad, Optimizer, Sum
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard

RULES: list[Consistency] = [Sequential(), Bounded(0), Bounded(2), Eventual()]


@pytest.mark.parametrize("lost", [pytest.param(0.0, marks=pytest.mark.slow), 0.15])
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


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("rule", [*RULES, Sequential(combine="mean")], ids=str)
def test_a_snapshot_has_all_pushes_of_earlier_steps_and_none_of_later_ones(rule: Consistency, seeds: range) -> None:
    for seed in seeds:
        lost = 0.15 if seed % 3 else 0.0
        num_workers = 2 + 2 * (seed % 2)  # so that means are exact
        world = World(rule, seed, num_workers=num_workers, servers=(0, num_workers), lost=lost, saves=(1, 3)).run()
        assert world.violations == [], seed
        assert not world.wrong_sums(), seed
        assert world.wrong_snapshots() == [], seed


def test_a_snapshot_that_waits_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defects: a shard is written when the first worker asks for it."""
    monkeypatch.setattr(Shard, "_waits_to_save", lambda *_: None)
    assert World(Eventual(), 3, saves=(1, 3)).run().wrong_snapshots()


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


@pytest.mark.parametrize(
    ("rule", "codec"),
    [
        pytest.param(rule, codec, marks=[] if codec in codecs else [pytest.mark.slow], id=f"{rule}-{codec}")
        for rule, codecs in ((Sequential(buffer_bytes=700), [None, Int8(block=8)]), (Bounded(1), [Topk(density=0.2)]))
        for codec in (None, Int8(block=8), Topk(density=0.2))
    ],
)
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

    def unordered(worker, message, now=0.0):
        stream = shard._streams[worker]
        if message.header.number > stream.last:
            stream.last = message.header.previous
        return take(worker, message, now)

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


# -------------------------------------------------------------------------------------------------- losses of processes


def run_with_losses(**course: object) -> World:
    world = World(**course).run()
    assert world.violations == [], course
    assert not world.wrong_sums(), course
    assert world.wrong_replicas() == [], course
    assert world.wrong_snapshots() == [], course
    return world


def lossy_course(seed: int) -> dict[str, object]:
    """Losses of one server, of workers, and of both at once; servers with and without a worker."""
    random = Random(seed)
    workers = 2 + seed % 3
    servers = random.choice(
        [(0, 1), (workers, workers + 1), (0, workers, workers + 1), (workers, workers + 1, workers + 2)]
    )
    only_workers = [seat for seat in range(workers) if seat not in servers]
    crashes, event = {}, random.randrange(1, 80)
    for _ in range(random.randint(1, 3)):
        lost = {random.choice([*servers, *only_workers])}
        if only_workers and random.random() < 0.3:
            lost.add(random.choice(only_workers))
        crashes[event] = tuple(sorted(lost))
        event += random.randrange(40, 150)
    return {
        "rule": RULES[seed % 4],
        "seed": seed,
        "num_workers": workers,
        "servers": servers,
        "steps": 4,
        "replicas": 2,
        "shards": random.choice([None, 3, 5]),
        "replaces": random.random() < 0.5,
        "crashes": crashes,
    }


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 1008), marks=pytest.mark.slow)], ids=len)
def test_losses_lose_no_push_and_apply_none_twice(seeds: range) -> None:
    losses = sum(run_with_losses(**lossy_course(seed)).losses for seed in seeds)
    assert losses > len(seeds)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 204), marks=pytest.mark.slow)], ids=len)
def test_what_is_held_survives_losses_and_what_is_withdrawn_never_counts(seeds: range) -> None:
    for seed in seeds:
        course = lossy_course(seed)
        # There are more messages than in other courses, and a loss must have been noticed before the next one.
        crashes = {2 * event: lost for event, lost in course["crashes"].items()}
        run_with_losses(**{**course, "crashes": crashes, "holds": True})


def bits(world: World) -> dict[int, bytes]:
    return {number: shard.table.values.tobytes() for number, shard in world.shards.items()}


def test_sequential_steps_have_the_bits_of_a_run_without_losses() -> None:
    for seed in range(3):
        course = {**lossy_course(4 * seed), "optimizer": Adagrad(0.1), "fractions": True}
        disturbed = World(**course).run()
        assert disturbed.losses
        assert bits(disturbed) == bits(World(**{**course, "crashes": None}).run())


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 104), marks=pytest.mark.slow)], ids=len)
def test_snapshots_are_whole_although_processes_are_lost(seeds: range) -> None:
    for seed in seeds:
        run_with_losses(**lossy_course(seed), saves=(1, 2))


SMALL = {"num_workers": 2, "servers": (2, 3), "steps": 3, "replicas": 2}


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_at_every_event_of_a_course_with_a_snapshot_and_means(every: int) -> None:
    course = {"rule": Sequential(combine="mean"), "seed": 3, "saves": (1,), **SMALL}
    for event in range(1, World(**course).run().num_events + 1, every):
        for seat in range(4):
            run_with_losses(crashes={event: (seat,)}, **course)


def test_a_token_that_a_successor_does_not_compute_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: a process that takes the place of a lost worker gives the snapshot another token."""
    course = {"rule": Sequential(), "seed": 3, "saves": (1,), **SMALL}
    monkeypatch.setattr(World, "token_of", lambda world, worker, mark: f"{mark}, {world.incarnations[worker]}")
    events = range(1, World(**course).run().num_events + 1, 4)
    assert any(World(crashes={event: (0,)}, **course).run().wrong_snapshots() for event in events)


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("rule", [Sequential(), Bounded(1), Eventual()], ids=str)
@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_at_every_event(rule: Consistency, replaces: bool, every: int) -> None:
    course = {"rule": rule, "seed": 3, "replaces": replaces, **SMALL}
    for event in range(1, World(**course).run().num_events + 1, every):
        for seat in range(4):
            run_with_losses(crashes={event: (seat,)}, **course)


@pytest.mark.parametrize("replaces", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [Sequential(), pytest.param(Bounded(1), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("every", [101, pytest.param(1, marks=pytest.mark.slow)])
def test_a_second_loss_at_every_step_while_the_next_epoch_begins(rule: Consistency, replaces: bool, every: int) -> None:
    """Three copies of each shard, so that two losses at a time are survived."""
    course = {**SMALL, "rule": rule, "seed": 5, "servers": (1, 2, 3), "replicas": 3, "shards": 4, "replaces": replaces}
    begun = World(**course).stages
    for event in (25, 60):
        for first in (2, 3, 0):
            last = run_with_losses(crashes={event: (first,)}, **course).stages
            for stage in range(begun + 1, last + 1, every):
                for second in {0, 1, 2, 3} - {first}:
                    run_with_losses(crashes={event: (first,)}, begin_crashes={stage: second}, **course)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 206), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("rule", [Sequential(), Bounded(1), Eventual()], ids=str)
def test_workers_that_come_begin_where_the_slowest_one_is(rule: Consistency, seeds: range) -> None:
    """Nobody waits for them before; from then on they are workers, and servers, like the others. Some are lost, too."""
    begun = set()
    for seed in seeds:
        random = Random(seed)
        servers = random.choice([(0, 1), (0, 1, 2, 3), (4, 5)])
        course = {"rule": rule, "seed": seed, "num_workers": 4, "servers": servers, "replicas": 2, "steps": 4}
        arrivals = {random.randint(1, 300): 2, random.randint(301, 600): 3}
        crashes = {random.randint(601, 900): (random.choice([2, 3]),)} if seed % 2 else {}
        world = run_with_losses(crashes=crashes, arrivals=arrivals, replaces=bool(seed % 3), **course)
        begun |= {sum(not counts.any() for counts in world.pushed[worker]) for worker in (2, 3)}
    assert len(begun) > 2  # at the begin of the job, and later


@pytest.mark.parametrize("rule", [Sequential(combine="mean"), Bounded(0)], ids=str)
def test_workers_that_never_come_are_neither_waited_for_nor_counted(rule: Consistency) -> None:
    world = World(rule, 3, num_workers=3, servers=(0, 1, 2), replicas=2, arrivals={1 << 40: 2}, saves=(1, 3))
    world.factor = min(world.factor, 2)  # a mean is that of two
    world.pushed[2] *= world.steps + 1
    world.run()
    assert world.violations == []
    assert not world.wrong_sums()
    assert world.wrong_snapshots() == []


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_at_every_event_around_the_arrival_of_a_worker(every: int) -> None:
    course = {"rule": Bounded(1), "seed": 3, "num_workers": 3, "servers": (0, 1, 3), "steps": 3, "replicas": 2}
    for event in range(1, 200, every):
        for seat in (0, 2, 3):
            run_with_losses(crashes={event: (seat,)}, arrivals={100: 2}, **course)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_at_every_step_while_the_epoch_of_an_arrival_begins(every: int) -> None:
    course = {"rule": Sequential(), "seed": 3, "num_workers": 3, "servers": (0, 1, 3), "steps": 3, "replicas": 2}
    begun = World(**course).stages
    last = World(arrivals={100: 2}, **course).run().stages
    for stage in range(begun + 1, last + 1, every):
        for seat in (0, 2, 3):
            run_with_losses(begin_crashes={stage: seat}, arrivals={100: 2}, **course)


def test_two_losses_of_both_holders_are_an_error() -> None:
    with pytest.raises(RecoveryError, match="shards are lost"):
        World(Eventual(), 1, crashes={40: (2, 3)}, **SMALL).run()


def without_waiting_for_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head answers at once; what the others have not carried out is lost with it."""
    after = Server._after

    def at_once(self, copy, reply):
        out = after(self, copy, reply)
        copy.passed.clear()
        return out if (reply.worker, reply.message) in out else [*out, (reply.worker, reply.message)]

    monkeypatch.setattr(Server, "_after", at_once)
    monkeypatch.setattr(Server, "_confirmed", lambda *_: [])


def without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is run again numbers its pushes anew."""
    monkeypatch.setattr(
        Client, "_next_mark", lambda self, _kind: self._next + self.clock * 1000 + id(self) % 1000 * 10**6
    )


def without_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holdings, "unconfirmed", lambda *_: [])


def without_void_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_base", lambda standings: max(each.epoch for each in standings))


def with_steps_that_end_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_awaits_before", lambda *_: False)


def with_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last server of the old chain gives its state to the others."""
    make = Plan.make.__func__

    def turned(cls, epoch, standings, chains):
        turned_round = [
            replace(each, places={s: {e: -p for e, p in where.items()} for s, where in each.places.items()})
            for each in standings
        ]
        return make(cls, epoch, turned_round, chains)

    monkeypatch.setattr(Plan, "make", classmethod(turned))


@pytest.mark.parametrize(
    "plant",
    [
        without_waiting_for_the_chain,
        without_marks,
        without_catching_up,
        without_void_epochs,
        with_steps_that_end_apart,
        with_another_source,
    ],
)
def test_planted_defects_of_the_chain_are_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    course = {**SMALL, "servers": (1, 2, 3), "replicas": 3, "shards": 4, "rule": Bounded(1)}
    for seed in range(40):
        random = Random(seed)
        losses = {random.randrange(10, 150): (random.choice([1, 2, 3]),)}
        begin = {random.randrange(20, 60): random.choice([1, 2, 3])} if seed % 2 else {}
        if plant is with_steps_that_end_apart:  # shows if a worker is lost between two messages
            losses, begin = {20 + 2 * seed: (0,)}, {}
        try:
            run_with_losses(**course, seed=seed, crashes=losses, begin_crashes=begin)
        except (AssertionError, TotalReduceError, KeyError, TypeError):
            return
    pytest.fail("nobody noticed")
