"""One round of gradient synchronisation over a list of reducers. A new kind of reducer is added here.

A round begins with the first gradient of a step, or at ``step()``, and ends when every rank has the gradients of all.
A *reducer* synchronises some of the parameters: ``reducer`` sends dense gradients in buckets, ``compressed`` sends the
elements that a sparse method selects, ``sparse_gradients`` gathers the rows of sparse gradients. To add another one
(local updates, an asynchronous exchange, a parameter server), derive a class from ``GradientReducer``, override the
methods that it needs, and add an object of it to the list that ``DistributedOptimizer._make_reducers`` returns.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, final

import torch

from totalreduce.foundation.errors import MissingTensorError
from totalreduce.pytorch.order import ForwardOrder

__all__ = ["BucketReadiness", "GradientReducer", "Phase", "Round", "RoundGuard"]


class RoundGuard(Protocol):
    """Takes part in every step of an optimizer, and can end it before parameters and residuals change.

    In a step of a strategy that ends with an exchange, ``before_wait`` is called before the exchange, and
    ``before_step`` and ``before_commit`` after it: everything has changed then, and is undone if they raise an error.
    In a step of a strategy without an exchange only ``step_alone`` is called.

    Attributes:
        waits_in_backward: Whether a round may end with the backward pass that has opened it, and not only in ``step()``
            or ``synchronize()``.
    """

    @property
    def waits_in_backward(self) -> bool:
        """See the class."""

    def counts(self) -> bool:
        """Whether the gradients of this rank count in the present step."""

    def step_alone(self) -> None:
        """Do what must happen before this rank steps by itself, without any exchange."""

    def before_wait(self) -> None:
        """Do what may happen while the gradients are exchanged; all of this rank have left."""

    def before_step(self) -> None:
        """Begin to agree on the step: this rank has the gradients of all ranks, as the optimizer will use them."""

    def before_commit(self) -> None:
        """Return when all ranks have agreed, before parameters, residuals or the optimizer's state change."""


class GradientReducer(ABC):
    """Synchronises the gradients of some parameters, one round after the other.

    In every round each rank calls ``begin``, ``ready`` for gradients in the order in which they come, ``close``,
    ``finish`` and ``install``, and then ``commit`` when the optimizer steps, or ``undo`` if the step is left out.
    Instead of ``install`` it may call ``abandon``, also before ``finish`` has returned or before ``close``. ``close``,
    ``finish`` and ``abandon`` are collective.
    """

    #: The parameters. The optimizer calls ``ready`` for those of a reducer with ``hooked``.
    parameters: Sequence[torch.nn.Parameter]
    #: Whether a gradient of these parameters opens a round, and the reducer is told when it is ready. Each parameter
    #: belongs to one such reducer.
    hooked = True
    skipped = False  #: Whether the last round ended without a result, so that the optimizer must not step.
    #: Tells which buckets wait for gradients; ``None``: the reducer has none that leave before ``close``.
    readiness: BucketReadiness | None = None

    @abstractmethod
    def begin(self, *, joined: bool = False, again: bool = False) -> None:
        """Open a round. The previous one is over.

        If neither ``commit`` nor ``undo`` was called for it, the installed gradients tell what the program did: if it
        has reset them, it has left the step out; otherwise the gradients of this round are added to them.

        Args:
            joined: This rank has no more data, and takes part in the rounds of the others without gradients.
            again: This rank has finished a round since its last step. Equal on all ranks that have data.
        """

    def ready(self, member: int) -> None:  # noqa: B027  (most reducers have something to do here, but not all)
        """Note that the gradient of a parameter may leave; ``member`` is its index in ``parameters``."""

    def close(self) -> None:  # noqa: B027
        """Send all gradients that have not left yet. Do nothing if the round is closed."""

    @abstractmethod
    def finish(self, active: int) -> int:
        """Wait for a closed round. The gradients of this rank stay until ``install``.

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

    def install(self) -> None:  # noqa: B027
        """Replace the gradients by the reduced ones, unless this rank has joined. Nothing else changes.

        Every reducer has finished.
        """

    def commit(self) -> None:  # noqa: B027
        """Keep what outlives the round (residuals, velocities): the optimizer steps with the installed gradients."""

    def undo(self) -> None:  # noqa: B027
        """Drop what ``commit`` would keep, as if the round had not been: its step is left out."""

    def abandon(self) -> None:  # noqa: B027
        """End an open or closed round without a result. The gradients of this rank stay.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``; may be called again.
        """

    def drop(self) -> None:
        """End an open round without a result, and without a trace in what outlives it (residuals, velocities).

        Other than with ``abandon``, the gradients of this rank may be lost. Collective.

        Raises:
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``.
        """
        self.abandon()

    def end(self) -> None:  # noqa: B027
        """Give back threads and operations. No round is open."""

    @property
    def buckets_members(self) -> Sequence[Sequence[int]]:
        """The members of each bucket, for priorities; empty if the reducer has no buckets."""
        return ()

    def set_priorities(self, priorities: Mapping[int, int]) -> None:  # noqa: B027
        """Set the priorities of buckets, by index; a bucket with a smaller number leaves first."""


@final
class BucketReadiness:
    """Tells which buckets may leave before the round is closed: those with every gradient that the last rounds had.

    A wrong guess costs time and no correctness: the other buckets leave when the round is closed.

    Args:
        members: The parameters of each bucket; a parameter may be in several buckets.
    """

    def __init__(self, members: Sequence[Collection[int]]) -> None:
        """Expect the gradients of all parameters in the first round."""
        self._members = [frozenset(bucket) for bucket in members]
        self._buckets_of: dict[int, list[int]] = {}
        for index, bucket in enumerate(members):
            for member in bucket:
                self._buckets_of.setdefault(member, []).append(index)
        self._fired: list[set[int]] = [set() for _ in members]
        self._fired_before = [set(bucket) for bucket in members]
        self._awaited = [set(bucket) for bucket in members]

    def begin(self) -> None:
        """Begin the next round."""
        for index, fired in enumerate(self._fired):
            if fired:
                self._fired_before[index] = fired
            self._fired[index] = set()

    def fired(self, member: int) -> list[int]:
        """Note that a parameter has its gradient; return its buckets that have all gradients they wait for."""
        complete = []
        for index in self._buckets_of[member]:
            self._fired[index].add(member)
            self._awaited[index].discard(member)
            if not self._awaited[index]:
                complete.append(index)
        return complete

    @property
    def is_complete(self) -> bool:
        """Whether no bucket waits for a gradient."""
        return not any(self._awaited)

    def close(self) -> None:
        """End the round: the next one waits for the gradients that this round and the one before it had."""
        for index, fired in enumerate(self._fired):
            self._awaited[index] = (fired | self._fired_before[index]) or set(self._members[index])


class Phase(enum.Enum):
    """The state of a round, which says what may happen next to the gradients."""

    LOCAL = enum.auto()  #: No gradient of this round has left; ``step()`` opens and closes a round
    OPEN = enum.auto()  #: Gradients may be in flight, and more may come
    CLOSED = enum.auto()  #: All gradients are in flight, and were not waited for
    SYNCHRONISED = enum.auto()  #: Gradients are reduced and installed; ``step()`` does not communicate any more


@final
class Round:
    """The reducers of one plan, and the phase of their common round.

    Args:
        reducers: In the order in which they finish. The first one finds out how many ranks have data.
        world_size: The number of ranks.
    """

    def __init__(self, reducers: Sequence[GradientReducer], world_size: int) -> None:
        self.reducers = list(reducers)
        self._world_size = world_size
        #: Gives buckets their priorities when it has seen a forward pass, and is then set to ``None``.
        self.order: ForwardOrder | None = None
        self.phase = Phase.LOCAL  #: The phase of the round.
        self.active = world_size  #: The number of ranks with data in the last round that was finished.
        #: Of the present round: how many reducers have finished, and the number of ranks with data that they found.
        self._num_finished, self._active_now = 0, world_size
        self._num_installed = 0  #: Likewise: how many reducers have installed their gradients.
        self._again = False  #: Whether a round has ended since the last step.
        self._targets = [
            (reducer, member)
            for reducer in self.reducers
            if reducer.hooked
            for member in range(len(reducer.parameters))
        ]
        #: The number of backward passes that each hooked parameter was in since the last round ended, or
        #: ``restart_passes`` was called.
        self.passes = [0] * len(self._targets)
        #: Held while a round is opened, and while a strategy takes a gradient: autograd may call hooks in threads.
        self.lock = threading.Lock()

    @property
    def in_flight(self) -> bool:
        """Whether gradients may be in flight."""
        return self.phase is Phase.OPEN or self.phase is Phase.CLOSED

    @property
    def hooked(self) -> list[torch.nn.Parameter]:
        """The parameters for which ``ready`` is called, by index."""
        return [reducer.parameters[member] for reducer, member in self._targets]

    @property
    def skipped(self) -> bool:
        """Whether the last round ended without a result."""
        return any(reducer.skipped for reducer in self.reducers)

    def open(self, *, joined: bool = False) -> None:
        """Open a round, unless one is open already.

        Autograd calls the hooks of parameters on the CPU and on a GPU in two threads, and both may call this.
        """
        with self.lock:
            if self.phase is Phase.OPEN:
                return
            if self.order is not None and self.order.seen:
                self.order.unwatch()
                self._use_order(self.order)
                self.order = None
            for reducer in self.reducers:
                reducer.begin(joined=joined, again=self._again)
            self._num_finished, self._active_now = 0, self._world_size
            self._num_installed = 0
            self.phase = Phase.OPEN

    def _use_order(self, order: ForwardOrder) -> None:
        """Have gradients leave in the order in which forward needs the parameters."""
        first = 0
        for reducer in self.reducers:
            members = [[first + member for member in bucket] for bucket in reducer.buckets_members]
            if members:
                reducer.set_priorities(order.bucket_priorities(members))
            first += len(reducer.parameters) if reducer.hooked else 0

    def ready(self, index: int) -> None:
        """Note that the gradient of a hooked parameter may leave."""
        reducer, member = self._targets[index]
        reducer.ready(member)

    def close(self) -> None:
        """Send all gradients that have not left yet."""
        for reducer in self.reducers:
            reducer.close()
        self.phase = Phase.CLOSED

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have come that the rounds before had."""
        return all(each.readiness is None or each.readiness.is_complete for each in self.reducers)

    def finish(self) -> None:
        """Wait for a closed round, and install its gradients.

        Raises:
            MissingTensorError: On every rank. The round has ended.
            ConfigurationError: Some ranks have called ``backward()`` more often than others since the last step.
            DeadlineExceededError: A wait exceeded the group's ``timeout_s``. The call may be repeated.
        """
        try:
            while self._num_finished < len(self.reducers):
                self._active_now = self.reducers[self._num_finished].finish(self._active_now)
                self._num_finished += 1
        except MissingTensorError:
            self.phase, self._again = Phase.LOCAL, True
            raise
        # Only now, so that a time-out never leaves some gradients installed and others not.
        while self._num_installed < len(self.reducers):
            self.reducers[self._num_installed].install()
            self._num_installed += 1
        self.active = self._active_now
        self.phase, self._again = Phase.SYNCHRONISED, True
        self.restart_passes()

    def commit(self) -> None:
        """Keep what outlives the round: the optimizer steps with its gradients. May be repeated."""
        for reducer in self.reducers:
            reducer.commit()

    def undo(self) -> None:
        """Drop what outlives the round, if its step has not been taken: the step is left out."""
        for reducer in self.reducers:
            reducer.undo()
        self.forget_result()

    def abandon(self) -> None:
        """End the round without a result. If none is open, open one first, because other ranks may have one."""
        if not self.in_flight:
            self.open()
        for reducer in self.reducers:
            reducer.abandon()
        self.phase = Phase.LOCAL

    def drop(self) -> None:
        """End the round without a result and without a trace. If none is open, open one first, as ``abandon`` does."""
        if not self.in_flight:
            self.open()
        for reducer in self.reducers:
            reducer.drop()
        self.end_step()

    def forget_result(self) -> None:
        """Have the next ``step()`` synchronise again: the installed gradients were changed or consumed."""
        if self.phase is Phase.SYNCHRONISED:
            self.phase = Phase.LOCAL

    def end_step(self) -> None:
        """Note that the optimizer has stepped: the next gradients are those of another round."""
        self.phase, self._again = Phase.LOCAL, False
        self.restart_passes()

    def restart_passes(self) -> None:
        """Count the backward passes from zero: the next one is the first of those that are accumulated."""
        self.passes = [0] * len(self.passes)

    def end(self) -> None:
        """Give back the threads and operations of the reducers, and the hooks that record the order."""
        if self.order is not None:
            self.order.unwatch()
        for reducer in self.reducers:
            reducer.end()
