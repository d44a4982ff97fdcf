"""Base classes of sessions, which have the frame of a round and count its bytes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.kernels import merging
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Broadcast, Messages
from totalreduce.sparse.candidates import Workspace
from totalreduce.sparse.greeting import Greetings, greet
from totalreduce.sparse.selector import Selection, Selector
from totalreduce.sparse.session import BucketShape, Report, Update
from totalreduce.sparse.settings import DensitySettings, TopkSettings
from totalreduce.sparse.threshold import magnitude

__all__ = ["BaseSession", "GatheringSession", "TopkSession", "counted", "watched"]

T = TypeVar("T")
S = TypeVar("S", bound=DensitySettings)
_Topk = TypeVar("_Topk", bound=TopkSettings)


class BaseSession(ABC):
    """The frame of a round. A method overrides ``_exchange``, and may override ``_count`` and ``_select``."""

    def __init__(self, name: str, shape: BucketShape, rank: int, world_size: int) -> None:
        self._name, self._rank, self._world_size = name, rank, world_size
        self._num_elements = shape.num_elements
        self._selector = Selector(world_size)
        self._steps = 0
        self.report = Report(name)

    def share(self, workspace: Workspace) -> None:
        """Use the workspace for candidates."""
        self._selector.workspace = workspace

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """Add the residuals to the gradients, and select elements."""
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
        """Exchange the selection, count the bytes, and complete the report."""
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
        """Return the number of steps."""
        return {"steps": self._steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the number of steps."""
        self._steps = state["steps"]

    def _count(self) -> int:
        """Return the number of elements to select; with 0 the pass only adds, and looks for elements not finite."""
        return 0

    def _select(self, gradients: Accumulator, residuals: Accumulator, scale: float, k: int) -> Selection:
        return self._selector.accumulate(gradients, residuals, scale, k)

    def _greet(
        self, present: Array, numbers: Sequence[Sequence[int]] | None = None
    ) -> Generator[Action, Any, Greetings]:
        """Exchange flags and, if there are any, one row of numbers for each rank; see ``greet``."""
        numbers = [()] * self._world_size if numbers is None else numbers
        return (yield from greet(self._rank, finite=self._selection.finite, present=present, numbers=numbers))

    @abstractmethod
    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]: ...


class TopkSession(BaseSession, Generic[S]):
    """The session of a method that sends a share of the elements."""

    def __init__(self, settings: S, shape: BucketShape, rank: int, world_size: int) -> None:
        super().__init__(settings.name, shape, rank, world_size)
        self._settings = settings

    def _count(self) -> int:
        return self._settings.count(self._num_elements, self._steps)


class GatheringSession(TopkSession[_Topk]):
    """All ranks apply the sum of all selections; a rank keeps its unselected elements and its rounding errors."""

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        selection, kind, n = self._selection, self._settings.values, self._num_elements
        sent = blocks.rounded(selection.values, kind)
        block = blocks.pack(selection.indices, sent, 0, n, kind)
        keep_rest = functools.partial(self._gradients.put, selection.indices, selection.values - sent)
        greetings, gathered = yield from self._gather(present, block, keep_rest)
        if not greetings.finite:
            return None
        own = selection.indices, sent
        lists = [own if rank == self._rank else other for rank, other in enumerate(gathered)]
        indices, values = merging.add_up(*blocks.unpack_all(lists, [(0, n)] * self._world_size))
        return Update(greetings.present, indices, values)

    def _gather(
        self, present: Array, block: Array, meanwhile: Callable[[], None]
    ) -> Generator[Action, Any, tuple[Greetings, list[Array]]]:
        """Return the greetings and the blocks of all ranks."""
        greetings = yield from self._greet(present, [[block.size]] * self._world_size)
        gathered = (yield Allgather(block, greetings.numbers[:, 0].tolist(), meanwhile)) if greetings.finite else []
        return greetings, gathered


def watched(exchange: Generator[Action, Any, T], note: Callable[[Action], None]) -> Generator[Action, Any, T]:
    """Run an exchange; ``note`` is called with each of its actions."""
    reply = None
    while True:
        try:
            action = exchange.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        note(action)
        reply = yield action


def counted(
    exchange: Generator[Action, Any, T], rank: int, world_size: int, report: Report
) -> Generator[Action, Any, T]:
    """Run an exchange, and add its bytes to the report."""

    def note(action: Action) -> None:
        sent, received = _payload(action, rank, world_size)
        report.sent_bytes += sent
        report.received_bytes += received

    return watched(exchange, note)


def _payload(action: Action, rank: int, world_size: int) -> tuple[int, int]:
    """Return the bytes of an action that this rank sends and receives."""
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
