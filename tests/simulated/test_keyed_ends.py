"""The ends of a parameter server in any order: the connections of all ranks without threads, one event after the other.

Each rank has its real connection, messenger, client and server. A seed decides what comes next: a call of a rank's
program, an event in a rank's thread, the arrival of a message, or of the word that a rank has closed its group.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.server import driver as driver_module
from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.connecting import _Parts
from totalreduce.server.connection import Connection
from totalreduce.server.messages import HEADER, Kind
from totalreduce.server.placement import chains_of
from totalreduce.server.renewal import Epoch
from totalreduce.server.saving import Origin
from totalreduce.server.setup import Setup

RULES: list[Consistency] = [Sequential(), Bounded(1), Eventual()]


class Thread:
    """Never runs; the test takes its turns."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.target = target

    def start(self) -> None:
        pass


class World:
    """Ranks with a shard each, or some of them, and the messages between them, which keep their order on each link."""

    def __init__(
        self,
        rule: Consistency,
        size: int,
        servers: Sequence[int] | None,
        random: Random,
        *,
        goodbyes_first: bool = False,
    ) -> None:
        self.random, self.links = random, defaultdict[tuple[int, int], deque[bytes | None]](deque)
        self.closed: set[int] = set()
        self.goodbyes_first = goodbyes_first
        setup = Setup.checked(
            *(size, size),
            num_keys=12,
            width=1,
            dtype="float32",
            optimizer=None,
            consistency=rule,
            servers=servers,
            workers=None,
            shards=None,
            replicas=1,
            codec=None,
            initial=0.0,
            restore=None,
        )
        self.ranks = [self._connect(rank, size, setup) for rank in range(size)]
        self.programs = {rank: self._program(rank) for rank in range(size)}

    def _connect(self, rank: int, size: int, setup: Setup) -> Connection:
        parts = _Parts(rank, setup, "table")
        chains = chains_of(parts.shards, setup.servers, setup.servers, 1)
        made = {shard: parts.make_shard(shard) for shard, chain in chains.items() if rank in chain}
        parts.server.begin_epoch(chains, made)

        def post(peer: int, number: int, data: bytes, bodies: Sequence[memoryview], on_sent: object) -> None:
            assert not bodies
            link, kind = self.links[rank, peer], parts.spec.decode(data[: HEADER.size]).kind
            overtakes = self.goodbyes_first and kind is Kind.GOODBYE and bool(link)
            link.insert(len(link) - overtakes, data)

        def act(action: Callable[[float], bool]) -> None:
            action(0.0)

        channels = SimpleNamespace(open=lambda *_: None, close=lambda _: None, post_with_bodies=post)
        runner: Any = SimpleNamespace(act=act, engine=SimpleNamespace(channels=channels))
        group: Any = SimpleNamespace(
            rank=rank,
            ranks=range(size),
            operations=SimpleNamespace(runner=runner, scope="test"),
            control=SimpleNamespace(barrier=lambda: None),
        )
        place = Epoch(group, tuple(range(size)), {shard: chain[0] for shard, chain in chains.items()}, (0,) * size)
        return parts.connect(place, 10.0, Origin("run"))

    def _program(self, rank: int) -> Iterator[None]:
        connection, keys = self.ranks[rank], np.arange(0, 12, 2)
        out = np.empty(6, np.float32)
        for _ in range(2):
            connection.push(keys, np.full(6, rank + 1, np.float32))
            yield
            connection.clock()
            yield
        connection.pull(keys, out)  # ``close`` waits for it
        yield
        connection.finish()

    def turns(self) -> list[Callable[[], object]]:
        """Return everything that may happen next."""
        turns: list[Callable[[], object]] = []
        for (source, target), link in self.links.items():
            if link:
                turns.append(lambda source=source, target=target: self._arrive(source, target))
        for rank, connection in enumerate(self.ranks):
            if connection._driver.state == "ended":
                if rank not in self.closed:
                    turns.append(lambda rank=rank: self._close(rank))
            elif not connection._driver._events.empty():
                turns.append(lambda connection=connection: self._step(connection))
            if rank in self.programs:
                turns.append(lambda rank=rank: self._call(rank))
        return turns

    def _call(self, rank: int) -> None:
        """Have a rank's program make its next call. After an error of its connection it makes none."""
        try:
            next(self.programs[rank])
        except (StopIteration, TotalReduceError):
            del self.programs[rank]

    def _arrive(self, source: int, target: int) -> None:
        message, messenger = self.links[source, target].popleft(), self.ranks[target]._driver.messenger
        if self.ranks[target]._driver.state == "ended":
            return  # its channel is closed
        if message is None:
            messenger.depart(source, "it was asked to", 0.0)
        else:
            messenger.receive(source, message, 0.0)

    @staticmethod
    def _step(connection: Connection) -> None:
        connection._driver._next_event(0.0)()
        connection._driver._end_if_all_is_done()

    def _close(self, rank: int) -> None:
        self.closed.add(rank)
        for peer in range(len(self.ranks)):
            if peer != rank:
                self.links[rank, peer].append(None)

    def run(self) -> list[str | None]:
        """Return the error of each rank; ``None`` if it has ended without one."""
        while turns := self.turns():
            self.random.choice(turns)()
        assert {each._driver.state for each in self.ranks} == {"ended"}
        for each in self.ranks:
            each._driver._leave()
        return [None if each._driver.error is None else str(each._driver.error) for each in self.ranks]


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(Thread=Thread, Condition=threading.Condition, current_thread=threading.current_thread)
    monkeypatch.setattr(driver_module, "threading", names)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("size", "servers"), [(2, None), (2, (0,)), (3, None), (3, (1, 2))])
def test_a_rank_that_has_ended_and_closed_its_group_is_lost_to_nobody(
    rule: Consistency, size: int, servers: Any, seeds: range
) -> None:
    for seed in seeds:
        assert World(rule, size, servers, Random(seed)).run() == [None] * size, seed


def test_a_goodbye_that_overtakes_the_last_answer_is_found() -> None:
    """Planted defect."""
    worlds = (World(Sequential(), 2, None, Random(seed), goodbyes_first=True) for seed in range(20))
    assert any("has ended its connection" in str(error) for world in worlds for error in world.run())
