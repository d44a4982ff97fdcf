"""Servers in virtual time: workers with random delays, what they see and what is applied."""

import heapq
from random import Random

import numpy as np
import pytest

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.server.served import Async, Eager, Quorum, SoftSync, StaleSynchronous
from totalreduce.server.served_steps import ServedStrategy
from totalreduce.server.sessions import Push


class World:
    """Workers that push ``steps`` gradients each to one server, with random times of computation.

    A gradient has a one in the place (worker, clock), so that the sum of all updates shows what was applied.
    """

    def __init__(self, strategy: ServedStrategy, world_size: int, steps: int, seed: int, slow: float = 1.0) -> None:
        self.random, self.steps, self.world_size = Random(seed), steps, world_size
        self.applied = np.zeros((world_size, steps))
        self.factors: list[float] = []
        self.session = strategy.serve(world_size, self.apply)
        self.slow, self.now = slow, 0.0
        self.clock, self.version = [0] * world_size, [0] * world_size
        self.waiting: set[int] = set()
        self.leads: list[int] = []
        self.times: list[list[float]] = [[] for _ in range(world_size)]
        self.trace: list[tuple] = []

    def apply(self, gradient: np.ndarray, factor: float) -> None:
        self.applied += gradient.reshape(self.applied.shape) * factor
        self.factors.append(factor)

    def run(self) -> "World":
        events: list[tuple[float, int, int]] = []
        order = 0
        for worker in range(self.world_size):
            heapq.heappush(events, (self.duration(worker), order, worker))
            order += 1
        while events or self.session.due() is not None:
            due = self.session.due()
            if due is not None and (not events or due <= events[0][0]):
                self.now = due
                answers = self.session.tick(self.now)
            else:
                self.now, _, worker = heapq.heappop(events)
                if self.clock[worker] == self.steps:
                    answers = self.session.finished(worker, self.now)
                else:
                    gradient = np.zeros(self.applied.size)
                    gradient[worker * self.steps + self.clock[worker]] = 1.0
                    push = Push(worker, self.clock[worker], self.version[worker], gradient)
                    self.clock[worker] += 1
                    self.waiting.add(worker)
                    answers = self.session.push(push, self.now)
            for answer in answers:
                self.waiting.remove(answer.worker)
                self.version[answer.worker] = self.session.version
                unfinished = [clock for clock in self.clock if clock < self.steps]
                if self.clock[answer.worker] < self.steps:
                    self.leads.append(self.clock[answer.worker] - min(unfinished))
                self.times[answer.worker].append(self.now)
                self.trace.append((answer.worker, answer.staleness, self.session.version))
                order += 1
                heapq.heappush(events, (self.now + self.duration(answer.worker), order, answer.worker))
        assert not self.waiting, f"workers {self.waiting} wait for ever"
        assert self.clock == [self.steps] * self.world_size
        return self

    def duration(self, worker: int) -> float:
        return self.random.uniform(0.5, 1.5) * (self.slow if worker == 0 else 1.0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_no_gradient_is_staler_than_the_bound(world_size: int) -> None:
    for seed in range(100):
        bound = world_size - 1 + seed % 5
        world = World(Async(max_staleness=bound, scale="none"), world_size, 12, seed, slow=1 + seed % 4).run()
        assert max(world.session.staleness) <= bound
        np.testing.assert_array_equal(world.applied, 1.0)
        assert sum(world.session.staleness.values()) == 12 * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_no_worker_is_further_ahead_than_its_slack(world_size: int) -> None:
    for seed in range(100):
        slack = 1 + seed % 5
        world = World(StaleSynchronous(slack=slack), world_size, 12, seed, slow=1 + seed % 4).run()
        assert max(world.leads) <= slack
        assert world.session.lead <= slack + 1  # the slowest one has finished, or its gradient was the last
        np.testing.assert_array_equal(world.applied, 1.0)


def test_without_a_bound_nobody_waits() -> None:
    for seed in range(20):
        world = World(Async(), 4, 30, seed, slow=3.0).run()
        assert all(staleness is not None for _, staleness, _ in world.trace)
        slow, *others = (times[-1] for times in world.times)
        assert max(others) < 0.5 * slow
        expected = sorted(1 / max(1, staleness) for _, staleness, _ in world.trace)
        assert sorted(world.factors) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_update_is_the_mean_of_n_gradients(n: int) -> None:
    for seed in range(50):
        world = World(SoftSync(n=n), 4, 12, seed, slow=1 + seed % 3).run()
        assert world.factors[0] == pytest.approx(1 / n)
        assert (world.applied > 0).all()
        assert world.applied.sum() == pytest.approx(len(world.factors))  # each update is a mean
        assert sum(world.session.staleness.values()) == 12 * 4


@pytest.mark.parametrize("strategy", [Quorum(n=2), Quorum(n=3, grace_s=0.3), Eager(), Eager(mode="solo")], ids=str)
def test_late_gradients_count_in_the_next_update(strategy: ServedStrategy) -> None:
    for seed in range(50):
        world = World(strategy, 4, 12, seed, slow=1 + seed % 4).run()
        assert (world.applied > 0).all()  # also what came too late for the last worker's last step
        assert world.applied.sum() == pytest.approx(len(world.factors))
        assert sum(world.session.staleness.values()) == 12 * 4


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["async", "stale", "soft", "quorum", "grace", "eager", "solo"])
def test_workers_of_several_servers_come_to_an_end(kind: str, world_size: int) -> None:
    """A worker goes on when all servers have answered, and its messages reach them in different orders."""
    for seed in range(12):
        n = 1 + seed % world_size
        strategy: ServedStrategy = {
            "async": Async(max_staleness=world_size - 1 + seed % 2, scale="none"),
            "stale": StaleSynchronous(slack=1 + seed % 2),
            "soft": SoftSync(n=n),
            "quorum": Quorum(n=n),
            "grace": Quorum(n=n, grace_s=0.4),
            "eager": Eager(),
            "solo": Eager(mode="solo"),
        }[kind]
        for applied, session in several_servers(strategy, world_size, 5 + seed % 3, seed):
            assert (applied > 0).all()
            assert sum(session.staleness.values()) == applied.size


def several_servers(strategy: ServedStrategy, world_size: int, steps: int, seed: int):
    """Run workers that are also servers; return what each server has applied, by worker and clock, and its session."""
    random, events, order = Random(seed), [], 0
    applied = [np.zeros((world_size, steps)) for _ in range(world_size)]
    sessions: list = []
    for server in range(world_size):

        def apply(gradient: np.ndarray, factor: float, server: int = server) -> None:
            applied[server] += gradient * factor

        sessions.append(strategy.serve(world_size, apply))
    clocks, awaited = [0] * world_size, [0] * world_size
    versions = np.zeros((world_size, world_size), int)

    def send(worker: int, now: float) -> None:
        nonlocal order
        for server in range(world_size):
            order += 1
            version = int(versions[worker, server])
            heapq.heappush(events, (now + random.uniform(0.1, 2.0), order, worker, server, clocks[worker], version))
        awaited[worker] = world_size
        clocks[worker] += 1

    for worker in range(world_size):
        send(worker, 0.0)
    while True:
        dues = [(session.due(), server) for server, session in enumerate(sessions) if session.due() is not None]
        if not events and not dues:
            break
        if dues and (not events or min(dues)[0] <= events[0][0]):
            now, server = min(dues)
            answers = sessions[server].tick(now)
        else:
            now, _, worker, server, clock, version = heapq.heappop(events)
            if clock == steps:
                answers = sessions[server].finished(worker, now)
            else:
                gradient = np.zeros((world_size, steps))
                gradient[worker, clock] = 1.0
                answers = sessions[server].push(Push(worker, clock, version, gradient), now)
        for answer in answers:
            versions[answer.worker, server] = sessions[server].version
            awaited[answer.worker] -= 1
            if not awaited[answer.worker]:
                send(answer.worker, now)
    assert clocks == [steps + 1] * world_size, f"workers wait for ever: {clocks}"
    return list(zip(applied, sessions, strict=True))


def test_a_quorum_does_not_wait_for_a_slow_rank() -> None:
    slow = World(Quorum(n=3), 4, 30, 1, slow=4.0).run()
    for times in slow.times[1:]:
        assert times[-1] < 1.6 * 30
    assert slow.times[0][-1] > 2.0 * 30


def test_grace_waits_for_those_who_are_a_little_late() -> None:
    hurried = World(Quorum(n=2), 4, 30, 1).run()
    patient = World(Quorum(n=2, grace_s=10.0), 4, 30, 1).run()
    assert len(patient.factors) < len(hurried.factors)
    assert set(np.round(patient.factors[:-1], 6)) == {0.25}  # all four, until the first one has finished


@pytest.mark.parametrize(
    "strategy",
    [Async(), Async(max_staleness=5), StaleSynchronous(slack=2), SoftSync(n=2), Quorum(n=3, grace_s=0.1)],
    ids=str,
)
def test_a_seed_has_one_course(strategy: ServedStrategy) -> None:
    first, second = (World(strategy, 4, 20, 9).run() for _ in range(2))
    assert first.trace == second.trace
    np.testing.assert_array_equal(first.applied, second.applied)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        (Async(max_staleness=0), 4),
        (StaleSynchronous(slack=0), 4),
        (SoftSync(n=4), 4),
        (Quorum(n=4), 4),
        (Async(), 1),
        (Eager(), 1),
        (Eager(), 2),
        (Eager(mode="solo"), 1),
    ],
    ids=str,
)
def test_what_is_synchronous(strategy: ServedStrategy, world_size: int) -> None:
    assert strategy.is_synchronous(world_size)
    assert not Async(max_staleness=3).is_synchronous(4)
    assert not SoftSync(n=3).is_synchronous(4)
    assert not Eager().is_synchronous(3)
    assert not Eager(mode="solo").is_synchronous(2)


def test_what_no_worker_sends_is_refused_and_nothing_is_applied() -> None:
    session = Async().serve(2, lambda *_: None)
    gradient = np.zeros(3)
    session.push(Push(0, 0, 0, gradient), 0.0)
    for push in (Push(0, 0, 0, gradient), Push(0, 2, 0, gradient), Push(1, 0, 5, gradient), Push(7, 0, 0, gradient)):
        with pytest.raises(ProtocolError, match="is expected"):
            session.push(push, 0.0)
    assert session.version == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Async(max_staleness=-1),
        lambda: Async(scale="square"),
        lambda: Async(max_staleness=2).serve(4, lambda *_: None),
        lambda: StaleSynchronous(slack=-1),
        lambda: SoftSync(n=0),
        lambda: SoftSync(n=5).serve(4, lambda *_: None),
        lambda: Quorum(n=5).is_synchronous(4),
        lambda: Quorum(n=1, grace_s=-1.0),
        lambda: Eager(mode="all"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()
