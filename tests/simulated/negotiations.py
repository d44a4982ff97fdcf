"""Negotiators in virtual time: a heap of events, random delays out of a seed, the order kept between each two ranks."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import Kind, split
from totalreduce.coordination.negotiator import Negotiator
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.types import OpKind

__all__ = ["Arrangement", "Training", "Workload", "make_workload"]

#: What a rank has at the end of a cycle: its cache, who has joined, what was decided.
_Ending = tuple[list[tuple[str, int]], tuple[int, ...], list[Response]]


class Arrangement:
    """``world_size`` negotiators and the wires between them.

    Attributes:
        now: Virtual time, in seconds.
        counts: By rank and kind: messages sent.
        decided: Told of every rank's responses.
        acted: Told of every rank that something has happened to.
    """

    def __init__(self, world_size: int, config: CoordinationConfig, delay: Callable[[], float]) -> None:
        self.world_size, self.now, self._delay = world_size, 0.0, delay
        self.ranks = [Negotiator(rank, world_size, config) for rank in range(world_size)]
        self.counts: list[dict[Kind, int]] = [dict.fromkeys(Kind, 0) for _ in self.ranks]
        self.decided: Callable[[int, list[Response]], None] = lambda rank, responses: None
        self.acted: Callable[[int], None] = lambda rank: None
        self.num_cycles = 0  #: That all ranks have ended, and ended alike.
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._wakes: list[float | None] = [None] * world_size
        #: By number of the cycle: how the first rank ended it, and how many ranks have ended it so.
        self._endings: dict[int, list[tuple[int, _Ending]]] = {}
        self._concluded: list[list[int]] = [[] for _ in self.ranks]
        for negotiator in self.ranks:
            self._watch(negotiator)

    def _watch(self, negotiator: Negotiator) -> None:
        conclude = negotiator.cycles._conclude

        def concluding(cycle: object, new: object) -> None:
            before = len(negotiator.cycles._responses)
            conclude(cycle, new)
            responses = negotiator.cycles._responses[before:]
            self._ended(negotiator, (negotiator.cache.snapshot(), negotiator.membership.joined, responses))

        negotiator.cycles._conclude = concluding

    def _ended(self, negotiator: Negotiator, ending: _Ending) -> None:
        number = negotiator.cycles.inbox.number
        endings = self._endings.setdefault(number, [])
        assert negotiator.rank not in [rank for rank, _ in endings], f"cycle {number} ended twice"
        if endings:
            assert ending == endings[0][1], f"cycle {number}: rank {negotiator.rank} differs from {endings[0][0]}"
        endings.append((negotiator.rank, ending))
        assert set(self._endings) <= {number - 1, number, number + 1}, "a rank is more than one cycle ahead"
        if len(endings) == self.world_size:
            del self._endings[number]
            self.num_cycles += 1

    # -------------------------------------------------------------------------------------------------------- time

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have something done later."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, action))

    def step(self) -> bool:
        """The next event; returns whether there was one."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True

    def run(self) -> None:
        """Until nothing happens any more."""
        while self.step():
            pass

    # --------------------------------------------------------------------------------------------------- the ranks

    def act(self, rank: int, action: Callable[[Negotiator, float], None]) -> None:
        """Have a rank do something, and let what it says and decides take its course."""
        negotiator = self.ranks[rank]
        action(negotiator, self.now)
        for target, message in negotiator.outbox:
            self._send(rank, target, message)
        negotiator.outbox.clear()
        due = negotiator.next_due()
        if due is not None:
            wake = self._wakes[rank]
            if wake is None or due < wake:
                self._wakes[rank] = max(due, self.now)
                self.at(max(due, self.now), lambda: self._wake(rank))
        responses = negotiator.cycles.pop_responses()
        if responses:
            self.decided(rank, responses)
        self.acted(rank)

    def _wake(self, rank: int) -> None:
        self._wakes[rank] = None
        self.act(rank, lambda negotiator, now: negotiator.tick(now))

    def _send(self, source: int, target: int, message: bytes) -> None:
        self.counts[source][split(message)[0]] += 1
        arrival = max(self.now + self._delay(), self._last_arrival.get((source, target), 0.0))
        self._last_arrival[source, target] = arrival
        self.at(arrival, lambda: self.act(target, lambda negotiator, now: negotiator.receive(source, message, now)))


# -------------------------------------------------------------------------------------------------------- a workload


@dataclass(frozen=True)
class Workload:
    """A training with ragged epochs, out of a seed."""

    seed: int
    world_size: int
    num_names: int
    capacity: int
    cycle_s: float
    jitter_s: float

    def units(self, epoch: int, step: int, rank: int) -> list[list[Request]]:
        """What a rank submits in a step: single operations and groups, in this rank's order. Sometimes one is odd."""
        common = random.Random(f"{self.seed} {epoch} {step}")
        chosen = common.sample(range(self.num_names), common.randint(1, min(8, self.num_names)))
        odd_rank = common.randrange(self.world_size) if common.random() < 0.1 else -1
        units = []
        for name in chosen:
            # The shape of a name changes now and then; that of the odd rank is another one.
            extent = 1 + name + 100 * ((epoch + name) % 3 == 0)
            odd = rank == odd_rank and common.random() < 0.5
            if name % 7 == 6:
                units.append(
                    [_request(f"w{name}.{index}of2", extent + index + odd, (f"w{name}", 2)) for index in range(2)]
                )
            else:
                units.append([_request(f"w{name}", extent + 50 * odd)])
        random.Random(f"{self.seed} {epoch} {step} {rank}").shuffle(units)
        return units

    def num_steps(self, epoch: int, rank: int) -> int:
        """How many steps a rank has data for."""
        return random.Random(f"{self.seed} {epoch} of {rank}").randint(0, 12)


def _request(name: str, extent: int, batch: tuple[str, int] | None = None) -> Request:
    return Request(name, OpKind.ALLREDUCE, "float32", 4, (extent,), reduction="sum", batch=batch)


def make_workload(seed: int) -> Workload:
    """Two to five ranks, a cache that is mostly too small."""
    generator = random.Random(seed)
    num_names = generator.randint(4, 30)
    return Workload(
        seed,
        world_size=generator.randint(2, 5),
        num_names=num_names,
        capacity=generator.choice([0, 1, num_names // 3, num_names // 2, num_names, 2 * num_names]),
        cycle_s=generator.choice([0.0, 0.005]),
        jitter_s=generator.choice([0.0, 1e-4, 5e-3]),
    )


@dataclass
class _Trainee:
    """One rank of a training."""

    rank: int
    random: random.Random
    epoch: int = 0
    step: int = 0
    awaited: set[str] = field(default_factory=set)
    unsent: list[list[Request]] = field(default_factory=list)
    last_joined: list[int] = field(default_factory=list)
    joins: bool = False
    done: bool = False


class Training:
    """Runs a workload: every rank submits its steps, joins, and begins the next epoch when all have joined.

    Attributes:
        errors: How many operations were refused: ranks disagreed.
        lent: How many were carried out with a rank that had joined.
    """

    def __init__(self, workload: Workload, num_cycles: int) -> None:
        config = CoordinationConfig(
            cache_capacity=workload.capacity, cycle_s=workload.cycle_s, stall_warning_s=0.0, stall_abort_s=0.0
        )
        generator = random.Random(workload.seed)
        uniform, jitter_s = generator.random, workload.jitter_s
        self.workload, self._num_cycles = workload, num_cycles
        self.arrangement = Arrangement(workload.world_size, config, lambda: 1e-4 + jitter_s * uniform() ** 3)
        self.arrangement.decided, self.arrangement.acted = self._decided, self._acted
        self._trainees = [_Trainee(rank, random.Random(generator.random())) for rank in range(workload.world_size)]
        self.errors = self.lent = 0

    def run(self) -> None:
        """Until every rank has seen enough cycles, at the end of the same epoch."""
        for trainee in self._trainees:
            self._later(trainee, self._begin_step)
        while self.arrangement.step():
            pass
        assert all(trainee.done for trainee in self._trainees), f"{self.workload} hangs at {self.arrangement.now}"
        first = self._trainees[0]
        assert all(trainee.last_joined == first.last_joined for trainee in self._trainees)
        assert len(first.last_joined) == first.epoch > 0
        assert self.arrangement.num_cycles == self.arrangement.ranks[0].cycles.inbox.number
        for negotiator in self.arrangement.ranks:
            assert not len(negotiator.submissions.waiting)
            assert not negotiator.cycles.inbox._messages
            assert len(negotiator.cache) <= self.workload.capacity

    def _later(self, trainee: _Trainee, action: Callable[[_Trainee], None]) -> None:
        arrangement = self.arrangement
        arrangement.at(arrangement.now + trainee.random.random() ** 4 * 0.01, lambda: action(trainee))

    def _begin_step(self, trainee: _Trainee) -> None:
        workload = self.workload
        if trainee.step == workload.num_steps(trainee.epoch, trainee.rank):
            trainee.joins = True
            self.arrangement.act(trainee.rank, lambda negotiator, now: negotiator.join(now))
            return
        trainee.unsent = workload.units(trainee.epoch, trainee.step, trainee.rank)
        trainee.awaited = {request.name for unit in trainee.unsent for request in unit}
        self._submit(trainee)

    def _submit(self, trainee: _Trainee) -> None:
        """Some of what is left of the step; then again later, or be blocked."""
        count = trainee.random.randint(1, len(trainee.unsent))
        units, trainee.unsent = trainee.unsent[:count], trainee.unsent[count:]

        def submit(negotiator: Negotiator, now: float) -> None:
            for unit in units:
                negotiator.submit(unit, now)
            if not trainee.unsent:
                negotiator.hurry(now)

        if trainee.unsent:
            self._later(trainee, self._submit)
        self.arrangement.act(trainee.rank, submit)

    def _decided(self, rank: int, responses: Sequence[Response]) -> None:
        trainee = self._trainees[rank]
        for response in responses:
            self.errors += response.error is not None
            self.lent += bool(response.joined)
            assert response.name in trainee.awaited or rank in response.joined or response.error is not None
        blocked = bool(trainee.awaited)
        trainee.awaited -= {response.name for response in responses}
        if blocked and not trainee.awaited and not trainee.unsent:
            trainee.step += 1
            self._later(trainee, self._begin_step)

    def _acted(self, rank: int) -> None:
        """Begin the next epoch when all have joined."""
        trainee, negotiator = self._trainees[rank], self.arrangement.ranks[rank]
        if not trainee.joins or negotiator.membership.last_joined is None:
            return
        trainee.joins = False
        trainee.last_joined.append(negotiator.membership.last_joined)
        trainee.epoch += 1
        trainee.step = 0
        # Every rank is here at the end of the same cycle.
        trainee.done = negotiator.cycles.inbox.number >= self._num_cycles
        if not trainee.done:
            self._later(trainee, self._begin_step)
