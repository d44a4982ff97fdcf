"""One round of gradient synchronisation over a list of reducers. This is where a new kind of reducer is added.

A round begins with the first gradient of a step, or at ``step()``, and ends when every rank has the gradients of all.
A *reducer* takes care of some of the parameters: ``reducer`` sends dense gradients in buckets, ``compressed`` sends
what a sparse method selects, ``sparse_gradients`` gathers the rows of sparse gradients. To add another one (local
updates, an asynchronous exchange, a parameter server), derive a class from ``GradientReducer``, override the methods
that it needs, and add an object of it to the list that ``DistributedOptimizer._make_round`` makes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch

from totalreduce.foundation.errors import MissingTensorError

if TYPE_CHECKING:
    from totalreduce.pytorch.order import ForwardOrder

__all__ = ["GradientReducer", "Phase", "Round"]


class GradientReducer(ABC):
    """Synchronises the gradients of some parameters, one round after the other.

    In every round each rank calls ``begin``, ``ready`` for gradients in the order in which they come, ``close`` and
    ``finish``; or ``begin`` and ``abandon``. All but ``begin`` and ``ready`` are collective.

    Attributes:
        parameters: The parameters. The optimizer calls ``ready`` for those of a reducer with ``hooked``.
        hooked: Whether the reducer is told when a gradient is ready.
        skipped: Whether the last round ended without a result, so that the optimizer must not step.
    """

    parameters: Sequence[torch.nn.Parameter]
    hooked = True
    skipped = False

    @abstractmethod
    def begin(self, *, joined: bool = False) -> None:
        """Open a round. The previous one is over.

        ``joined``: this rank has no data any more, and takes part for the sake of the others.
        """

    def ready(self, member: int) -> None:  # noqa: B027  (most reducers have something to do here, but not all)
        """Note that the gradient of a parameter was accumulated; ``member`` is its place in ``parameters``."""

    def close(self) -> None:  # noqa: B027
        """Send what has not left yet. Does nothing if the round is closed."""

    @abstractmethod
    def finish(self, active: int) -> int:
        """Wait for a closed round, and install its gradients unless this rank has joined.

        May be called again after it raised.

        Args:
            active: The number of ranks with data in this round, as far as the reducers before this one know.

        Returns:
            The number of ranks with data in this round.

        Raises:
            MissingTensorError: Some ranks have a gradient and others have not, and the policy forbids that.
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``.
        """

    def abandon(self) -> None:  # noqa: B027
        """End an open round without a result. The gradients of this rank stay."""

    def end(self) -> None:  # noqa: B027
        """Give back threads and operations. No round is open."""

    @property
    def buckets_members(self) -> Sequence[Sequence[int]]:
        """The members of each bucket, for priorities; empty if the reducer has none."""
        return ()

    def set_priorities(self, priorities: Mapping[int, int]) -> None:  # noqa: B027
        """Set the urgency of buckets by index; a smaller number leaves first."""


class Phase(enum.Enum):
    """What may happen next to the gradients."""

    LOCAL = enum.auto()
    """No gradient of this round has left; ``step()`` opens and closes a round."""
    OPEN = enum.auto()
    """Gradients may be in flight, and more may come."""
    CLOSED = enum.auto()
    """All gradients are in flight, and were not waited for."""
    SYNCHRONISED = enum.auto()
    """Gradients are reduced and installed; ``step()`` does not communicate."""


@final
class Round:
    """The reducers of one plan, and the phase of their common round.

    Attributes:
        reducers: In the order in which they finish. The first one finds out how many ranks have data.
        phase: What may happen next.
        active: The number of ranks with data in the last round that was finished.
    """

    def __init__(self, reducers: Sequence[GradientReducer], world_size: int) -> None:
        """Begin without an open round."""
        self.reducers, self._world_size = list(reducers), world_size
        self.phase = Phase.LOCAL
        self.active = world_size
        self._joined = False
        self._targets = [
            (reducer, member)
            for reducer in self.reducers
            if reducer.hooked
            for member in range(len(reducer.parameters))
        ]

    @property
    def in_flight(self) -> bool:
        """Whether gradients may be in flight."""
        return self.phase is Phase.OPEN or self.phase is Phase.CLOSED

    @property
    def hooked(self) -> list[torch.nn.Parameter]:
        """The parameters for which ``ready`` is called, by index."""
        return [reducer.parameters[member] for reducer, member in self._targets]

    def use_order(self, order: ForwardOrder) -> None:
        """Let gradients leave in the order in which forward needs the parameters."""
        first = 0
        for reducer in self.reducers:
            members = [[first + member for member in bucket] for bucket in reducer.buckets_members]
            if members:
                reducer.set_priorities(order.bucket_priorities(members))
            first += len(reducer.parameters) if reducer.hooked else 0

    def open(self, *, joined: bool = False) -> None:
        """Open a round."""
        self._joined = joined
        for reducer in self.reducers:
            reducer.begin(joined=joined)
        self.phase = Phase.OPEN

    def ready(self, index: int) -> None:
        """Note that the gradient of a hooked parameter was accumulated."""
        reducer, member = self._targets[index]
        reducer.ready(member)

    def close(self) -> None:
        """Send what has not left yet."""
        for reducer in self.reducers:
            reducer.close()
        self.phase = Phase.CLOSED

    def finish(self) -> None:
        """Wait for a closed round, and install its gradients.

        Raises:
            MissingTensorError: On every rank that has not joined.
        """
        active = self._world_size
        for reducer in self.reducers:
            try:
                active = reducer.finish(active)
            except MissingTensorError:
                if not self._joined:
                    self.phase = Phase.LOCAL
                    raise
        self.active = active
        self.phase = Phase.SYNCHRONISED

    def abandon(self) -> None:
        """End the round without a result; open one for that purpose if none is open, as other ranks may have one."""
        if not self.in_flight:
            self.open()
        for reducer in self.reducers:
            reducer.abandon()
        self.phase = Phase.LOCAL

    def end(self) -> None:
        """Give back what the reducers hold."""
        for reducer in self.reducers:
            reducer.end()

    @property
    def skipped(self) -> bool:
        """Whether the last round ended without a result."""
        return any(reducer.skipped for reducer in self.reducers)
