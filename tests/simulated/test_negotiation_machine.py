"""Negotiators under arbitrary interleavings: at the end of every cycle all ranks have the same cache and have decided
the same; what everybody asked for is decided, and rightly."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from negotiators_by_hand import Negotiation, ask, group

from totalreduce.coordination.negotiator import Negotiator
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.errors import UnsupportedError
from totalreduce.foundation.types import OpKind

#: What ranks submit at once: each in two variants, which do not fit each other (but the gathers do).
UNITS: dict[str, tuple[list[Request], list[Request]]] = {
    "a": ([ask("a")], [ask("a", 9)]),
    "b": ([ask("b")], [ask("b", dtype="int32")]),
    "c": ([ask("c", 2, 2, reduction="avg")], [ask("c", 4)]),
    "d": ([ask("d", prescale=0.5)], [ask("d")]),
    "unnamed": ([ask("allreduce#1", cached=False)], [ask("allreduce#1", 9, cached=False)]),
    "gather": ([ask("gather", 2, 3, kind=OpKind.ALLGATHER)], [ask("gather", 5, 3, kind=OpKind.ALLGATHER)]),
    "root": ([ask("root", kind=OpKind.BROADCAST)], [ask("root", kind=OpKind.BROADCAST, root=1)]),
    "g": (group("g", (1,), (2,)), group("g", (1,), (3,))),
    "h": (group("h", (4,), (5,), (6,)), [ask(f"h.{index}of3", 4 + index) for index in range(3)]),
}
JOINABLE = (OpKind.ALLREDUCE, OpKind.BARRIER)


class Negotiations(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([3, 2, 4, 5, 8, 1]),
        capacity=st.sampled_from([0, 2, 5, 100]),
        cycle_s=st.sampled_from([0.0, 0.01]),
        warning_s=st.sampled_from([0.0, 0.05]),
        warm=st.booleans(),
    )
    def make(self, size: int, capacity: int, cycle_s: float, warning_s: float, warm: bool) -> None:
        self.negotiation = Negotiation(size, cache_capacity=capacity, cycle_s=cycle_s, stall_warning_s=warning_s)
        self.size = size
        self.pairs = list(self.negotiation.wires)
        self.epochs = [0] * size  #: How often each rank has joined.
        if warm:
            self.negotiation.submit_all(*[request for unit in UNITS.values() for request in unit[0]])

    # ------------------------------------------------------------------------------------------------------- rules

    @rule(rank=st.integers(0, 7), unit=st.sampled_from(sorted(UNITS)), odd=st.integers(0, 5))
    def submit(self, rank: int, unit: str, odd: int) -> None:
        rank %= self.size
        requests = UNITS[unit][odd == 5]
        negotiator = self.negotiation.ranks[rank]
        if not self.joins(rank) and not any(request.name in negotiator.submissions.waiting for request in requests):
            self.negotiation.submit(rank, *requests)

    @rule(ranks=st.integers(0, 255), unit=st.sampled_from(sorted(UNITS)), odd=st.booleans())
    def submit_on_many(self, ranks: int, unit: str, odd: bool) -> None:
        for rank in range(self.size):
            if ranks >> rank & 1:
                self.submit(rank, unit, 5 if odd else 0)

    @rule(units=st.lists(st.sampled_from(sorted(UNITS)), min_size=1, max_size=4, unique=True), odd=st.integers(0, 60))
    def steps(self, units: list[str], odd: int) -> None:
        """What most programs do: the same on every rank, again and again; in the last step one may be odd."""
        for step in range(3):
            for rank in range(self.size):
                for unit in units:
                    self.submit(rank, unit, 5 if (step, rank) == (2, odd) else 0)
            self.settle()

    @rule(rank=st.integers(0, 7))
    def join(self, rank: int) -> None:
        rank %= self.size
        if not self.joins(rank) and not len(self.negotiation.ranks[rank].submissions.waiting):
            self.epochs[rank] += 1
            self.negotiation.join(rank)

    @precondition(lambda self: self.size > 1)
    @rule(index=st.integers(0, 55), most=st.integers(1, 4))
    def deliver(self, index: int, most: int) -> None:
        for _ in range(most):
            self.negotiation.move(*self.pairs[index % len(self.pairs)])

    @precondition(lambda self: self.size > 1)
    @rule(order=st.randoms(use_true_random=False), steps=st.integers(1, 60))
    def deliver_many(self, order: object, steps: int) -> None:
        """A stretch of progress, or the interesting states are hardly ever reached."""
        for _ in range(steps):
            full = [pair for pair in self.pairs if self.negotiation.wires[pair]]
            if not full:
                return
            self.negotiation.move(*order.choice(full))  # type: ignore[attr-defined]

    @rule(rank=st.integers(0, 7), later_s=st.sampled_from([0.0, 0.001, 0.02, 0.2]))
    def tick(self, rank: int, later_s: float) -> None:
        self.negotiation.now += later_s
        self.negotiation.ranks[rank % self.size].tick(self.negotiation.now)
        self.negotiation.collect(rank % self.size)

    @rule(rank=st.integers(0, 7))
    def hurry(self, rank: int) -> None:
        self.negotiation.hurry(rank % self.size)

    @rule()
    def settle(self) -> None:
        self.negotiation.settle()
        self.compare()
        assert all(
            negotiator.cycles.inbox.number == self.negotiation.ranks[0].cycles.inbox.number
            for negotiator in self.negotiation.ranks
        )
        for name in {name for negotiator in self.negotiation.ranks for name in negotiator.submissions.waiting}:
            active = [negotiator for negotiator in self.negotiation.ranks if not self.joins(negotiator.rank)]
            assert not all(self.whole(negotiator, name) for negotiator in active), f"all ranks wait for {name}"

    # -------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "negotiation"):
            self.negotiation.check()
            assert all(negotiator.ended is None for negotiator in self.negotiation.ranks)

    def teardown(self) -> None:
        """Everybody submits what is missing, and joins, twice; then nothing may be left."""
        if not hasattr(self, "negotiation"):
            return
        for _ in range(2):
            self.settle()
            for rank in range(self.size):
                for unit in UNITS:
                    self.submit(rank, unit, 0)
            self.settle()
            assert not any(len(negotiator.submissions.waiting) for negotiator in self.negotiation.ranks)
            for rank in range(self.size):
                self.join(rank)
            self.settle()
            assert len({negotiator.membership.last_joined for negotiator in self.negotiation.ranks}) == 1
            assert self.negotiation.ranks[0].membership.last_joined in range(self.size)
            assert not any(
                negotiator.membership.joined or negotiator.membership.is_joining
                for negotiator in self.negotiation.ranks
            )
            assert len(set(self.epochs)) == 1
        assert all(
            not negotiator.cycles.inbox._messages and not len(negotiator.cycles.table)
            for negotiator in self.negotiation.ranks
        )

    # ----------------------------------------------------------------------------------------------------- compared

    def joins(self, rank: int) -> bool:
        return self.negotiation.ranks[rank].membership.is_joining

    @staticmethod
    def whole(negotiator: Negotiator, name: str) -> bool:
        """Whether a rank waits for the name, and for the others of its group."""
        entry = negotiator.submissions.waiting.get(name)
        if entry is None:
            return False
        batch = entry.request.batch
        if batch is None:
            return True
        members = [other for other in negotiator.submissions.waiting.values() if other.request.batch == batch]
        return len(members) == batch[1]

    def compare(self) -> None:
        """Everything was delivered: all ranks have decided the same, in the same order, and rightly."""
        answers = self.negotiation.answers
        assert len({len(mine) for mine in answers}) == 1
        failed: dict[tuple[str, int], list[bool]] = {}
        for place, (response, _) in enumerate(answers[0]):
            assert all(mine[place][0] == response for mine in answers)
            asked = {rank: mine[place][1] for rank, mine in enumerate(answers) if mine[place][1] is not None}
            self.judge(response, asked)  # type: ignore[arg-type]
            if response.request.batch is not None and len({request.batch for request in asked.values()}) == 1:
                failed.setdefault(response.request.batch, []).append(response.error is not None)
        for (_, count), errors in failed.items():
            for begin in range(0, len(errors), count):
                assert len(set(errors[begin : begin + count])) == 1, "all or none of a group"
        for mine in answers:
            mine.clear()

    def judge(self, response: Response, asked: dict[int, Request]) -> None:
        missing = [rank for rank in range(self.size) if rank not in asked]
        assert asked
        commons = {request.common for request in asked.values()}
        if response.error is None:
            assert len(commons) == 1
            assert response.request.common in commons
            assert response.joined == tuple(missing)
            assert not missing or response.request.kind in JOINABLE
            if response.request.kind is OpKind.ALLGATHER:
                assert response.rows == tuple((asked[rank].shape[0],) for rank in range(self.size))
        elif response.error.tensor == response.name:
            if isinstance(response.error.error(), UnsupportedError):
                assert response.error.sets == (tuple(missing),)
                assert response.request.kind not in JOINABLE
            else:
                said: dict[Request, list[int]] = {}
                for rank in sorted(asked):
                    said.setdefault(asked[rank].common, []).append(rank)
                assert response.error.sets == tuple(map(tuple, said.values()))
                assert response.error.values == tuple(request.describe() for request in said)
                assert len(said) > 1
        else:
            assert response.request.batch is not None


TestNegotiations = Negotiations.TestCase
TestNegotiations.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
