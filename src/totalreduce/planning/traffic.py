"""What the exchanges of sparse methods and strategies send: recorded from the library's own sessions, in lockstep.

The sessions run on gradients of normally distributed elements. A gradient that is too large is taken smaller, and long
blocks are scaled up afterwards: a block is long if it grows with the gradient, which two recordings show.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Broadcast, Exchange, Messages
from totalreduce.sparse.common import watched
from totalreduce.testing.lockstep import run_exchanges

if TYPE_CHECKING:
    from totalreduce.sparse.session import BucketShape, Method
    from totalreduce.strategies.strategy import Strategy

__all__ = ["Begun", "Round", "Script", "record_method", "record_strategy", "script_of", "script_totals"]

_SEED = 13
#: A recording takes memory and time for so many elements of one rank, and of all ranks.
_ELEMENTS_MAX = 1 << 22
_ELEMENTS_OF_ALL_MAX = 1 << 24
#: Exchanges of strategies are dense, so that few elements show what all of them do.
_ELEMENTS_OF_A_STRATEGY = 1 << 14
#: With half the elements, blocks that grow with them are half as long.
_GROWS = 0.75


@dataclass(frozen=True, slots=True)
class Round:
    """One action of an exchange on all ranks, without its contents."""

    kind: type[Action]  #: The action's class.
    #: By rank: bytes for each rank (alltoall, messages); for itself and the others (allgather, broadcast, allreduce) a
    #: list with one number.
    sends: list[list[int]]
    root: int = 0  #: The root of a broadcast.

    def sent(self, rank: int) -> tuple[int, int]:
        """Return the messages and bytes that a rank sends, as if each block went straight to its receivers."""
        world_size, own = len(self.sends), self.sends[rank]
        if self.kind is Allreduce:
            return 2 * (world_size - 1), 2 * own[0] * (world_size - 1) // world_size
        if self.kind is Allgather:
            return world_size - 1, own[0] * (world_size - 1)
        if self.kind is Broadcast:
            return (world_size - 1, own[0] * (world_size - 1)) if rank == self.root else (0, 0)
        others = [size for peer, size in enumerate(own) if peer != rank and (size or self.kind is Alltoall)]
        return len(others), sum(others)

    def received(self, rank: int) -> int:
        """Return the bytes that a rank has of the other ranks afterwards, which it merges."""
        if self.kind is Allreduce or (self.kind is Broadcast and rank == self.root):
            return 0
        if self.kind in (Allgather, Broadcast):
            return sum(row[0] for peer, row in enumerate(self.sends) if peer != rank)
        return sum(row[rank] for peer, row in enumerate(self.sends) if peer != rank)


#: The rounds of one exchange.
Script = list[Round]


@dataclass(frozen=True, slots=True)
class Begun:
    """An exchange of a strategy."""

    step: int  #: The number of steps after which it begins.
    due: int  #: The number of steps after which its result is applied.
    elements: int  #: The number of elements that it exchanges.
    script: Script  #: What it sends.


def script_totals(script: Script) -> tuple[float, float]:
    """Return the messages and bytes that the busiest rank sends in an exchange."""
    world_size = len(script[0].sends) if script else 1
    sent = [[each.sent(rank) for each in script] for rank in range(world_size)]
    totals = [(sum(count for count, _ in row), sum(size for _, size in row)) for row in sent]
    return max(count for count, _ in totals), max(size for _, size in totals)


def record_method(method: Method, world_size: int, shape: BucketShape) -> Script:
    """Return what the exchange of a bucket sends in a usual step; not the first one, in which thresholds are found."""
    from totalreduce.sparse.session import BucketShape

    if method.whole:
        # The bytes follow from the shapes of matrices, which cannot be taken smaller. Two ranks show them, because all
        # ranks send sums and greetings of one size.
        script = _widened(_method_script(method, 2, shape), world_size)
        return _method_script(method, world_size, shape) if script is None else script
    num_elements = shape.num_elements
    taken = min(num_elements, _ELEMENTS_MAX, max(1 << 14, _ELEMENTS_OF_ALL_MAX // world_size))
    return _scaled(lambda count: _method_script(method, world_size, BucketShape(((count,),))), num_elements, taken)


def record_strategy(strategy: Strategy, world_size: int, sizes: Sequence[int], steps: int) -> list[Begun]:
    """Return the exchanges that a strategy begins in so many steps."""
    total, taken = sum(sizes), min(sum(sizes), _ELEMENTS_OF_A_STRATEGY)
    runs: dict[int, list[Begun]] = {}

    def run(count: int) -> list[Begun]:
        if count not in runs:
            small = [max(1, size * count // total) for size in sizes]
            runs[count] = _strategy_scripts(strategy, world_size, small, steps)
        return runs[count]

    return [
        Begun(
            each.step,
            each.due,
            round(each.elements * total / taken),
            _scaled(lambda count, index=index: run(count)[index].script, total, taken),  # type: ignore[misc]
        )
        for index, each in enumerate(run(taken))
    ]


def _scaled(record: Callable[[int], Script], num_elements: int, taken: int) -> Script:
    """Return what an exchange of so many elements sends, recorded with those that are taken of them."""
    script = record(taken)
    if taken == num_elements:
        return script
    factor = num_elements / taken
    shorter = record(taken // 2)
    # A session may need a round more or less with fewer elements. A round without a counterpart stays as it is.
    pairs = SequenceMatcher(None, [each.kind for each in script], [each.kind for each in shorter], autojunk=False)
    grows = {
        match.a + number
        for match in pairs.get_matching_blocks()
        for number in range(match.size)
        if _volume(shorter[match.b + number]) < _GROWS * _volume(script[match.a + number])
    }
    return [_longer(each, factor) if index in grows else each for index, each in enumerate(script)]


def _longer(one: Round, factor: float) -> Round:
    # Elements of eight bytes stay whole.
    return Round(one.kind, [[round(size * factor / 8) * 8 for size in row] for row in one.sends], one.root)


def _volume(one: Round) -> int:
    return sum(map(sum, one.sends))


def _widened(script: Script, world_size: int) -> Script | None:
    """Return what more ranks than two send; ``None`` if the blocks of a round differ: two ranks cannot show it."""
    wider: Script = []
    for each in script:
        sizes = {size for row in each.sends for size in row}
        if len(sizes) != 1 or each.kind is Messages:
            return None
        row = [*sizes] * (world_size if each.kind is Alltoall else 1)
        wider.append(Round(each.kind, [row] * world_size, each.root))
    return wider


def _method_script(method: Method, world_size: int, shape: BucketShape) -> Script:
    from totalreduce.sparse.accumulator import HostAccumulator
    from totalreduce.sparse.candidates import Workspace

    count, edges = shape.num_elements, np.cumsum([0, *shape.sizes]).tolist()

    def segments(values: Any) -> HostAccumulator:
        return HostAccumulator([values[begin:end] for begin, end in pairwise(edges)])

    sessions = [method.session(shape, rank, world_size) for rank in range(world_size)]
    workspace = Workspace()
    generator = np.random.default_rng(_SEED)
    noise = generator.standard_normal(2 * count, dtype=np.float32)
    residuals = [np.zeros(count, np.float32) for _ in sessions]
    script: Script = []
    for _ in range(2):
        for rank, session in enumerate(sessions):
            session.share(workspace)
            turn = int(generator.integers(count))
            gradient = noise[turn : turn + count].copy()
            session.accumulate(segments(gradient), segments(residuals[rank]), 1.0)
            residuals[rank] = gradient
        exchanges = [session.exchange(np.ones(len(shape.shapes), np.bool_)) for session in sessions]
        script = script_of(exchanges)
    return script


def _strategy_scripts(strategy: Strategy, world_size: int, sizes: Sequence[int], steps: int) -> list[Begun]:
    from totalreduce.testing.strategies import ArrayReplica

    generator = np.random.default_rng(_SEED)
    start = [generator.standard_normal(size, dtype=np.float32) for size in sizes]
    updates = np.float32(1e-3) * generator.standard_normal(sum(sizes), dtype=np.float32)
    replicas = [ArrayReplica([array.copy() for array in start]) for _ in range(world_size)]
    sessions = [strategy.session(replica, rank, world_size) for rank, replica in enumerate(replicas)]
    begun: list[Begun] = []
    waiting: list[tuple[int, int, list[Any]]] = []
    for step in range(1, steps + 1):
        for rank, replica in enumerate(replicas):
            everything = range(len(sizes))
            replica.write(everything, replica.read(everything) + np.float32(1 + rank) * updates)
        pending = [session.stepped(1.0) for session in sessions]
        for group in zip(*pending, strict=True):
            results: list[Any] = [None] * world_size
            script = script_of([_kept(each.exchange, results, rank) for rank, each in enumerate(group)])
            elements = max((result.size for result in results if isinstance(result, np.ndarray)), default=sum(sizes))
            begun.append(Begun(step, group[0].due, elements, script))
            waiting.append((group[0].due, group[0].channel, results))
        for due, channel, results in list(waiting):
            if due <= step:
                waiting.remove((due, channel, results))
                for session, result in zip(sessions, results, strict=True):
                    session.apply(channel, result)
    return begun


def _kept(exchange: Exchange, results: list[Any], rank: int) -> Generator[Action, Any, Any]:
    results[rank] = yield from exchange
    return results[rank]


def script_of(exchanges: Sequence[Exchange]) -> Script:
    """Run the exchanges of all ranks to their end; return what they sent."""
    rows: list[list[tuple[Action, list[int]]]] = [[] for _ in exchanges]

    def note(row: list[tuple[Action, list[int]]], action: Action) -> None:
        row.append((action, _sizes_of(action, len(exchanges))))

    run_exchanges([watched(exchange, partial(note, row)) for exchange, row in zip(exchanges, rows, strict=True)])
    return [_round_of(ranks[0][0], [sizes for _, sizes in ranks]) for ranks in zip(*rows, strict=True)]


def _round_of(action: Action, sends: list[list[int]]) -> Round:
    return Round(type(action), sends, action.root if isinstance(action, Broadcast) else 0)


def _sizes_of(action: Action, world_size: int) -> list[int]:
    match action:
        case Allgather():
            return [action.block.size]
        case Alltoall():
            return [block.size for block in action.blocks]
        case Allreduce():
            return [action.values.nbytes]
        case Broadcast():
            return [action.size]
        case Messages():
            return [action.sends[rank].size if rank in action.sends else 0 for rank in range(world_size)]
