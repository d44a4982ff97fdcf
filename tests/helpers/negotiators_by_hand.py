"""Several negotiators in one thread, messages carried by hand. What the negotiation's tests share."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import Kind, split
from totalreduce.coordination.negotiator import Negotiator
from totalreduce.coordination.requests import Request, Response
from totalreduce.foundation.errors import GroupClosed
from totalreduce.foundation.types import OpKind


def ask(name: str, *shape: int, kind: OpKind = OpKind.ALLREDUCE, **changes: object) -> Request:
    """A request for a float32 tensor; (4,) by default, and summed where that makes sense."""
    fields: dict[str, object] = {"dtype": "float32", "itemsize": 4, "shape": shape or (4,)}
    if kind is OpKind.ALLREDUCE:
        fields["reduction"] = "sum"
    return Request(name, kind, **(fields | changes))


def group(base: str, *shapes: tuple[int, ...], **changes: object) -> list[Request]:
    """A group of operations as the ``Coordinator`` names them."""
    size = len(shapes)
    return [ask(f"{base}.{index}of{size}", *shape, batch=(base, size), **changes) for index, shape in enumerate(shapes)]


@dataclass(frozen=True)
class Sent:
    """A message that a rank has sent."""

    source: int
    target: int
    kind: Kind
    cycle: int
    message: bytes


@dataclass
class Concluded:
    """What a rank had at the end of a cycle: all of it must be equal on all ranks."""

    snapshot: list[tuple[str, int]]
    joined: tuple[int, ...]
    responses: list[Response] = field(default_factory=list)


class Negotiation:
    """``world_size`` negotiators; nothing is delivered unless told to.

    Attributes:
        cycles: By rank and number of the cycle: how it ended.
        sent: Every message, in order.
        answers: By rank: every response, in order, with what the rank had asked for (``None``: it lends).
    """

    def __init__(self, world_size: int, **settings: object) -> None:
        config = CoordinationConfig(**({"cycle_s": 0.0, "stall_warning_s": 0.0, "stall_abort_s": 0.0} | settings))
        self.world_size, self.now = world_size, 0.0
        self.honest = True  #: Whether only what negotiators say is delivered.
        self.ranks = [Negotiator(rank, world_size, config) for rank in range(world_size)]
        pairs = itertools.permutations(range(world_size), 2)
        self.wires: dict[tuple[int, int], deque[bytes]] = {pair: deque() for pair in pairs}
        self.cycles: list[dict[int, Concluded]] = [{} for _ in range(world_size)]
        self.sent: list[Sent] = []
        self.answers: list[list[tuple[Response, Request | None]]] = [[] for _ in range(world_size)]
        self.asked: list[dict[str, Request]] = [{} for _ in range(world_size)]
        self._ended: list[list[int]] = [[] for _ in range(world_size)]
        for rank in self.ranks:
            self._watch(rank)

    def _watch(self, rank: Negotiator) -> None:
        """Have it written down how every cycle ends."""
        conclude = rank.cycles._conclude

        def concluding(cycle: object, new: object) -> None:
            conclude(cycle, new)
            number = rank.cycles.inbox.number
            assert number not in self.cycles[rank.rank]
            self.cycles[rank.rank][number] = Concluded(rank.cache.snapshot(), rank.membership.joined)
            self._ended[rank.rank].append(number)

        rank.cycles._conclude = concluding

    # ---------------------------------------------------------------------------------------------- what ranks do

    def submit(self, rank: int, *requests: Request, num_bytes: int = 0, where: str = "") -> None:
        self.asked[rank] |= {request.name: request for request in requests}
        self.ranks[rank].submit(requests, self.now, where=where, num_bytes=num_bytes)
        self.collect(rank)
        self._look(rank)

    def submit_all(self, *requests: Request) -> None:
        for rank in range(self.world_size):
            self.submit(rank, *requests)

    def join(self, rank: int) -> None:
        self.ranks[rank].join(self.now)
        self.collect(rank)

    def leave(self, rank: int, reason: str, *, undone: int = 0) -> None:
        """A rank leaves that has not carried out the last operations that it has agreed on."""
        negotiator = self.ranks[rank]
        negotiator.leave(GroupClosed("closed"), reason, negotiator.cycles.agreed - undone)
        self.collect(rank)

    def hurry(self, rank: int) -> None:
        self.ranks[rank].hurry(self.now)
        self.collect(rank)

    def depart(self, peer: int, reason: str = "gone") -> None:
        """A rank leaves in good order: what it has sent arrives first."""
        while any(self.move(peer, target) for target in range(self.world_size) if target != peer):
            pass
        for rank in self.ranks:
            if rank.rank != peer:
                rank.depart(peer, reason, self.now)
                self.collect(rank.rank)

    def tick(self, now: float) -> None:
        """Tick those whose time has come."""
        self.now = now
        for rank in range(self.world_size):
            self._look(rank)

    def _look(self, rank: int) -> None:
        """As the engine does it."""
        due = self.ranks[rank].next_due()
        if due is not None and self.now >= due:
            self.ranks[rank].tick(self.now)
            self.collect(rank)

    def collect(self, rank: int) -> None:
        """Put what a rank has to say on the wires; take what it has decided."""
        negotiator = self.ranks[rank]
        for target, message in negotiator.outbox:
            kind, cycle, _, _ = split(message)
            self.sent.append(Sent(rank, target, kind, cycle, message))
            self.wires[rank, target].append(message)
        negotiator.outbox.clear()
        responses = negotiator.cycles.pop_responses()
        ended, self._ended[rank] = self._ended[rank], []
        # What is decided in one cycle is fused on its own, so two of them must not come out as one.
        assert len(ended) <= 1 or self.world_size == 1 or not self.honest
        if responses:
            self.cycles[rank][ended[-1]].responses += responses
        for response in responses:
            self.answers[rank].append((response, self.asked[rank].pop(response.name, None)))

    # -------------------------------------------------------------------------------------------------- carrying

    def move(self, source: int, target: int) -> bool:
        """Carry one message, if there is one."""
        wire = self.wires[source, target]
        if not wire:
            return False
        self.ranks[target].receive(source, wire.popleft(), self.now)
        self.collect(target)
        return True

    def run(self) -> None:
        """Carry until nothing is left to carry."""
        moves = 0
        while [self.move(*pair) for pair in self.wires].count(True):
            moves += 1
            assert moves < 100_000, "this never ends"

    def settle(self) -> None:
        """Carry everything, and begin what was put off, until nothing happens any more."""
        self.run()
        for _ in range(1000):
            due = [rank.next_due() for rank in self.ranks if rank.ended is None]
            times = [time for time in due if time is not None]
            if not times or min(times) > self.now + 1.0:
                return
            self.tick(max(self.now, min(times)))
            self.run()
        raise AssertionError("something is due for ever")

    # -------------------------------------------------------------------------------------------------- comparing

    def check(self) -> None:
        """All ranks have concluded the same cycles in the same way, as far as they have come."""
        first = min(rank.cycles.inbox.number for rank in self.ranks)
        last = max(rank.cycles.inbox.number for rank in self.ranks)
        assert last - first <= 1
        for number in range(last):
            ends = [cycles[number] for cycles in self.cycles if number in cycles]
            assert all(end == ends[0] for end in ends), f"cycle {number}"
            assert number >= first or len(ends) == self.world_size

    def counts(self, *, cycle: int | None = None) -> list[Counter[Kind]]:
        """By rank: how many messages of each kind it has sent."""
        counts: list[Counter[Kind]] = [Counter() for _ in self.ranks]
        for sent in self.sent:
            if cycle is None or sent.cycle == cycle:
                counts[sent.source][sent.kind] += 1
        return counts

    def responses(self, rank: int = 0) -> list[Response]:
        return [response for response, _ in self.answers[rank]]

    def take(self) -> list[Response]:
        """The responses since the last call, which are equal on all ranks."""
        self.settle()
        self.check()
        taken = [self.responses(rank) for rank in range(self.world_size)]
        for answers in self.answers:
            answers.clear()
        assert all(responses == taken[0] for responses in taken)
        return taken[0]

    def snapshot(self) -> list[tuple[str, int]]:
        """The caches' content, which is equal on all ranks."""
        assert all(rank.cache.snapshot() == self.ranks[0].cache.snapshot() for rank in self.ranks)
        return self.ranks[0].cache.snapshot()


def phase_of(negotiator: Negotiator) -> str:
    """The name of the phase of a rank's cycle."""
    cycle = negotiator.cycles._cycle
    return "IDLE" if cycle is None else cycle.phase.name


def names(responses: Sequence[Response]) -> list[str]:
    return [response.name for response in responses]


#: What a request may differ in, and how.
CHANGES: dict[str, dict[str, object]] = {
    "shape": {"shape": (4, 4)},
    "shape of as many elements": {"shape": (4, 3)},
    "dtype": {"dtype": "int32"},
    "device": {"device": "cuda"},
    "reduction": {"reduction": "sum"},
    "prescale": {"prescale": 0.25},
    "postscale": {"postscale": 2.0},
    "kind": {"kind": OpKind.REDUCE_SCATTER},
    "group": {"batch": ("g", 2)},
    "not remembered": {"cached": False},
}


def changed(request: Request, **changes: object) -> Request:
    return Request(
        **{field: changes.get(field, getattr(request, field)) for field in Request.__dataclass_fields__}  # type: ignore[arg-type]
    )
