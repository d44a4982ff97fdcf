"""Three engines under arbitrary interleavings: right sums, invariants after every event, bounded memory, no
deadlock."""

from collections import deque

import numpy as np
from engines_by_hand import SMALL, Cluster, allreduce, values_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from totalreduce.engine.computations import Computation
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.foundation.types import Algorithm

RANKS = (0, 1, 2)
PAIRS = tuple((source, target) for source in RANKS for target in RANKS if source != target)
NAMES = ("a", "b", "c", "d")
SIZES = {"a": 1, "b": 13, "c": 40, "d": 9}
SCHEDULES = {"a": Algorithm.STAR, "b": Algorithm.HALVING_DOUBLING, "c": Algorithm.RING, "d": Algorithm.DIRECT}
ROUNDS = 3


class Interleavings(RuleBasedStateMachine):
    @initialize(eager=st.sampled_from([16, 100, 4096]), floating=st.sampled_from([200, 1500, 100_000]))
    def make(self, eager: int, floating: int) -> None:
        self.cluster = Cluster(3, SMALL, eager_bytes=eager, floating_bytes_max=floating, scratch_segments=2)
        self.submitted: dict[tuple[int, str], list[Operation]] = {(r, n): [] for r in RANKS for n in NAMES}
        self.leaving: dict[tuple[int, int], OutgoingMessage | None] = dict.fromkeys(PAIRS)
        self.wires: dict[tuple[int, int], deque] = {pair: deque() for pair in PAIRS}
        self.arriving: dict[tuple[int, int], tuple[Delivery, bytes] | None] = dict.fromkeys(PAIRS)
        self.computing: dict[int, Computation | None] = dict.fromkeys(RANKS)

    @rule(rank=st.sampled_from(RANKS), name=st.sampled_from(NAMES), priority=st.integers(-1, 1))
    def submit(self, rank: int, name: str, priority: int) -> None:
        mine = self.submitted[rank, name]
        if len(mine) < ROUNDS and not (mine and not mine[-1].finished):
            values = self.input(rank, name, len(mine))
            signature = allreduce(SIZES[name], algorithm=SCHEDULES[name])
            mine.append(self.cluster.submit(rank, name, values, signature, priority=priority))

    @rule(rank=st.sampled_from(RANKS), name=st.sampled_from(NAMES))
    def promote(self, rank: int, name: str) -> None:
        if self.submitted[rank, name]:
            self.cluster.engines[rank].promote(self.submitted[rank, name][-1], 0.0)

    @rule(pair=st.sampled_from(PAIRS))
    def begin_sending(self, pair: tuple[int, int]) -> None:
        if self.leaving[pair] is None:
            self.leaving[pair] = self.cluster.begin_sending(*pair)

    @rule(pair=st.sampled_from(PAIRS))
    def end_sending(self, pair: tuple[int, int]) -> None:
        outgoing = self.leaving[pair]
        if outgoing is not None:
            self.leaving[pair] = None
            self.wires[pair].append(self.cluster.end_sending(pair[0], outgoing))

    @rule(pair=st.sampled_from(PAIRS))
    def begin_receiving(self, pair: tuple[int, int]) -> None:
        source, target = pair
        wire = self.wires[pair]
        if wire and self.arriving[pair] is None and self.cluster.engines[target].reception.scratch.available:
            header, body = wire.popleft()
            self.arriving[pair] = (self.cluster.begin_receiving(source, target, header), body)

    @rule(pair=st.sampled_from(PAIRS))
    def end_receiving(self, pair: tuple[int, int]) -> None:
        arriving = self.arriving[pair]
        if arriving is not None:
            self.arriving[pair] = None
            self.cluster.end_receiving(pair[1], *arriving)

    @rule(rank=st.sampled_from(RANKS))
    def begin_computing(self, rank: int) -> None:
        if self.computing[rank] is None:
            self.computing[rank] = self.cluster.begin_computing(rank)

    @rule(rank=st.sampled_from(RANKS))
    def end_computing(self, rank: int) -> None:
        computation = self.computing[rank]
        if computation is not None:
            self.computing[rank] = None
            self.cluster.end_computing(rank, computation)

    @precondition(lambda self: hasattr(self, "cluster"))
    @rule(steps=st.integers(1, 40))
    def go_on(self, steps: int) -> None:
        """A stretch of ordinary progress, or the interesting states are hardly ever reached."""
        for _ in range(steps):
            for pair in PAIRS:
                self.begin_sending(pair)
                self.end_sending(pair)
                self.begin_receiving(pair)
                self.end_receiving(pair)
            for rank in RANKS:
                self.begin_computing(rank)
                self.end_computing(rank)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.cluster.validate()
        for engine in self.cluster.engines:
            assert engine.reception.floating.peak_bytes <= self.cluster.config.floating_bytes_max
            assert engine.reception.scratch.in_use <= self.cluster.config.scratch_segments + len(RANKS)

    def teardown(self) -> None:
        """Everybody submits what is missing, everything is carried, and then all must be done."""
        if not hasattr(self, "cluster"):
            return
        for _ in range(ROUNDS):
            for rank, name in self.submitted:
                self.submit(rank, name, 0)
            self.go_on(500)
        for (rank, name), mine in self.submitted.items():
            assert len(mine) == ROUNDS
            for number, operation in enumerate(mine):
                assert operation.finished, f"{name} #{number} hangs on rank {rank}"
                assert operation.error is None
                total = sum(self.input(other, name, number) for other in RANKS)
                assert values_of(operation) == total.tolist()
        assert all(engine.reception.num_bodies == 0 for engine in self.cluster.engines)

    @staticmethod
    def input(rank: int, name: str, number: int) -> np.ndarray:
        return np.arange(SIZES[name]) * 100.0 + 10.0 * number + rank


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
