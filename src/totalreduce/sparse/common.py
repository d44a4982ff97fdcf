"""What the sessions of several methods have in common: the frame of a round, the bytes counted, regions and owners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from totalreduce.kernels import merging
from totalreduce.sparse import blocks
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Array, Broadcast, Messages
from totalreduce.sparse.greeting import Greetings, greet
from totalreduce.sparse.selector import Selection, Selector
from totalreduce.sparse.session import BucketShape, Report, Update
from totalreduce.sparse.settings import DensitySettings
from totalreduce.sparse.threshold import magnitude

__all__ = ["BaseSession", "TopkSession", "counted", "joined", "reduce_region", "to_owners"]

T = TypeVar("T")
S = TypeVar("S", bound=DensitySettings)


class BaseSession(ABC):
    """The frame of a round. ``_exchange`` is the method's own; what is local may be, see ``_count`` and ``_select``."""

    def __init__(self, name: str, shape: BucketShape, rank: int, world_size: int) -> None:
        """Nothing was exchanged yet."""
        self._name, self._rank, self._world_size = name, rank, world_size
        self._num_elements = shape.num_elements
        self._selector = Selector(world_size)
        self._steps = 0
        self.report = Report(name)

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """See ``Session``."""
        k = self._count()
        self._gradients = gradients
        self._selection = self._select(gradients, residuals, scale, k)
        self.report = Report(
            self._name,
            k=k,
            selected=self._selection.indices.size,
            local_threshold=magnitude(self._selection.bound),
            rescans=self._selector.rescans,
        )

    def exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        """See ``Session``."""
        update = yield from counted(self._exchange(present), self._rank, self._world_size, self.report)
        del self._selection, self._gradients  # a session outlives its round, and memory is scarce
        if update is None:
            self.report.skipped = True
            return None
        self._steps += 1
        self.report.applied = update.values.size
        if update.indices is not None and update.values.size:
            self.report.global_threshold = float(np.abs(update.values).min())
        return update

    def state(self) -> Mapping[str, Any]:
        """See ``Session``."""
        return {"steps": self._steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``Session``."""
        self._steps = state["steps"]

    def _count(self) -> int:
        """How many elements are to be chosen. None: then the pass does nothing but add and see what is not finite."""
        return 0

    def _select(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        return self._selector.accumulate(gradients, residuals, scale, k)

    def _greet(
        self, present: Array, numbers: Sequence[Sequence[int]] | None = None
    ) -> Generator[Action, Any, Greetings]:
        """Tell every rank its numbers, if there are any; see ``greet``."""
        numbers = [()] * self._world_size if numbers is None else numbers
        return (yield from greet(self._rank, finite=self._selection.finite, present=present, numbers=numbers))

    @abstractmethod
    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]: ...


class TopkSession(BaseSession, Generic[S]):
    """Of a method that sends a share of the elements."""

    def __init__(self, settings: S, shape: BucketShape, rank: int, world_size: int) -> None:
        """Nothing was exchanged yet."""
        super().__init__(settings.name, shape, rank, world_size)
        self._settings = settings

    def _count(self) -> int:
        return self._settings.count(self._num_elements, self._steps)

    def _keep(self, sent: Array, update: Update, reduced: Array, cut_off: Array) -> None:
        """Leave in the gradients all but what was applied.

        Args:
            sent: The selected values, as they were sent.
            update: What was applied: some of what the ranks have selected.
            reduced: Indices whose sums this rank has rounded.
            cut_off: What that has cut off.
        """
        chosen = self._selection
        assert update.indices is not None, "only some elements are applied"
        self._gradients.keep_rest(chosen.indices, chosen.values, sent, update.indices)
        self._gradients.add(reduced, cut_off)


def counted(
    exchange: Generator[Action, Any, T], rank: int, world_size: int, report: Report
) -> Generator[Action, Any, T]:
    """The same exchange; the report adds up its bytes."""
    reply = None
    while True:
        try:
            action = exchange.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        sent, received = _payload(action, rank, world_size)
        report.sent_bytes += sent
        report.received_bytes += received
        reply = yield action


def _payload(action: Action, rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that leave this rank, and that come."""
    others = world_size - 1
    match action:
        case Allgather():
            return action.block.size * others, sum(action.sizes) - action.block.size
        case Alltoall():
            sent = sum(block.size for block in action.blocks) - action.blocks[rank].size
            return sent, sum(action.sizes) - action.sizes[rank]
        case Allreduce():
            moved = 2 * action.values.nbytes * others // world_size
            return moved, moved
        case Broadcast():
            return (action.size * others, 0) if rank == action.root else (0, action.size)
        case Messages():
            return sum(block.size for block in action.sends.values()), sum(action.receives.values())


def to_owners(indices: Array, values: Array, cuts: Sequence[int], rank: int, kind: blocks.ValueKind) -> list[Array]:
    """Cut a list into one block for each region's owner; nothing for oneself.

    Args:
        indices: int32, ascending.
        values: Rounded to the kind.
        cuts: Where the regions begin, and where the last one ends.
        rank: This one's.
        kind: How values travel.
    """
    edges = np.searchsorted(indices, cuts).tolist()
    parts = []
    for owner in range(len(cuts) - 1):
        own = slice(edges[owner], edges[owner + 1])
        if owner == rank:  # it need not travel
            parts.append(np.empty(0, np.uint8))
        else:
            parts.append(blocks.pack(indices[own], values[own], cuts[owner], cuts[owner + 1], kind))
    return parts


def joined(lists: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Lists of indices and values, one after the other."""
    indices, values = (np.concatenate(column) for column in zip(*lists, strict=True))
    return indices, values


def reduce_region(
    received: Sequence[Array], indices: Array, values: Array, cuts: Sequence[int], rank: int
) -> tuple[Array, Array]:
    """Add up, in the order of ranks, what ``to_owners`` made everywhere; the own part is taken from the own list."""
    begin, end = cuts[rank], cuts[rank + 1]
    low, high = np.searchsorted(indices, (begin, end)).tolist()
    lists = [blocks.unpack(block, begin, end) for block in received]
    lists[rank] = indices[low:high], values[low:high]
    return merging.add_up(lists)
