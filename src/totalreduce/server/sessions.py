"""When servers apply the gradients of workers, and when they answer: the rules of the strategies in ``served``.

No gradient is lost: those that wait for others when the last worker has finished are one more update.

The *version* of a share is the number of updates that were applied to it. The *staleness* of a gradient is the number
of updates between the parameters from which it was computed, and its own.

All of this is plain objects: ``now`` is an argument. ``gathering`` is between them and the requests of a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels.arrays import Array

__all__ = ["Answer", "Apply", "ImmediateSession", "Push", "QuorumSession", "ServerSession", "SoftSession"]

#: Applies the mean of gradients: the sum, and the factor by which it is multiplied.
Apply = Callable[[Array, float], None]


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that a worker has sent."""

    worker: int  #: Its rank.
    clock: int  #: The number of gradients that it has sent before.
    version: int  #: The version of the parameters with which it was computed.
    gradient: Array  #: The gradient of the server's share.


@dataclass(frozen=True, slots=True)
class Answer:
    """Parameters are to be sent to a worker, as they are now."""

    worker: int  #: Its rank.
    staleness: int | None  #: That of the gradient for which this is the answer; ``None`` if it was not applied yet.


class ServerSession(ABC):
    """What all rules share: the clocks of the workers, the version, and what was observed.

    Attributes:
        version: The number of updates so far.
        staleness: How often each staleness was observed.
        lead: The largest number of steps that a worker was ahead of the slowest one when it was answered.
    """

    def __init__(self, world_size: int, apply: Apply) -> None:
        """``apply``: changes the parameters of the share."""
        self._apply = apply
        self.version, self.lead = 0, 0
        self.staleness: Counter[int] = Counter()
        #: By worker that has not finished: the number of gradients that have come.
        self._clocks = dict.fromkeys(range(world_size), 0)
        #: By worker that computes a gradient: the version that it was answered with.
        self._computing = dict.fromkeys(range(world_size), 0)
        #: The gradients whose mean is the next update, for rules that apply means.
        self._waiting: list[Push] = []

    def push(self, push: Push, now: float) -> list[Answer]:
        """Take a gradient in; return the workers that are answered now. Raises ``ProtocolError``."""
        if self._clocks.get(push.worker) != push.clock or not 0 <= push.version <= self.version:
            raise ProtocolError(
                f"worker {push.worker} sends gradient {push.clock}, of version {push.version}, where gradient "
                f"{self._clocks.get(push.worker)} of a version up to {self.version} is expected"
            )
        self._clocks[push.worker] += 1
        self._computing.pop(push.worker, None)
        return self._noted(self._push(push, now))

    def finished(self, worker: int, now: float) -> list[Answer]:
        """Note that a worker sends no more gradients; return the workers that are answered now."""
        self._clocks.pop(worker, None)
        self._computing.pop(worker, None)
        answers = self._noted(self._finished(now))
        if not self._clocks and self._waiting:
            self._apply_mean()
        return answers

    def due(self) -> float | None:
        """Return the time at which ``tick`` is to be called; ``None``: not before another method was called."""
        return None

    def tick(self, now: float) -> list[Answer]:
        """Return the workers that are answered because of the time."""
        del now
        return []

    @abstractmethod
    def _push(self, push: Push, now: float) -> list[Answer]: ...

    @abstractmethod
    def _finished(self, now: float) -> list[Answer]: ...

    def _noted(self, answers: list[Answer]) -> list[Answer]:
        slowest = min(self._clocks.values(), default=0)
        for answer in answers:
            if answer.worker in self._clocks:
                self._computing[answer.worker] = self.version
                self.lead = max(self.lead, self._clocks[answer.worker] - slowest)
        return answers

    def _apply_one(self, push: Push, factor: float) -> None:
        self.staleness[self.version - push.version] += 1
        self._apply(push.gradient, factor)
        self.version += 1

    def _apply_mean(self) -> None:
        """Apply the mean of the gradients that wait, added in the order of the workers, not in that of their coming."""
        pushes, self._waiting = sorted(self._waiting, key=lambda push: (push.worker, push.clock)), []
        total = pushes[0].gradient.copy()
        for push in pushes[1:]:
            total += push.gradient
        self.staleness.update(self.version - push.version for push in pushes)
        self._apply(total, 1.0 / len(pushes))
        self.version += 1


@final
class ImmediateSession(ServerSession):
    """Applies one gradient after the other, and holds gradients or answers back where a bound demands it."""

    def __init__(
        self, world_size: int, apply: Apply, max_staleness: int | None, slack: int | None, *, inverse: bool
    ) -> None:
        super().__init__(world_size, apply)
        self._max_staleness, self._slack, self._inverse = max_staleness, slack, inverse
        self._held: list[Push] = []  #: Gradients that are not applied yet, in the order in which they came.
        self._unanswered: dict[int, int] = {}  #: By worker that is too far ahead: the staleness of its last gradient.

    def _push(self, push: Push, now: float) -> list[Answer]:
        self._held.append(push)
        return self._finished(now)

    def _finished(self, now: float) -> list[Answer]:
        del now
        answers: list[Answer] = []
        while (push := self._next()) is not None:
            staleness = self.version - push.version
            self._apply_one(push, 1.0 / max(1, staleness) if self._inverse else 1.0)
            self._unanswered[push.worker] = staleness
            answers += self._noted_now()
        return answers + self._noted_now()

    def _next(self) -> Push | None:
        """Take out the gradient that is applied next: the stalest one, if that leaves a way for all others.

        The others are those held back and those being computed. They can still be applied within the bound, the
        stalest first, if the i-th of them is not too stale after i updates.
        """
        if not self._held:
            return None
        push = min(self._held, key=lambda each: each.version)
        bound = self._max_staleness
        if bound is not None:
            others = [each.version for each in self._held if each is not push] + list(self._computing.values())
            if any(self.version + place - version > bound for place, version in enumerate(sorted(others), start=1)):
                return None
        self._held.remove(push)
        return push

    def _noted_now(self) -> list[Answer]:
        """Return the answers to workers that are not too far ahead. They compute with the present version."""
        slowest = min(self._clocks.values(), default=0)
        ready = [
            worker
            for worker in self._unanswered
            if self._slack is None or self._clocks.get(worker, slowest) - slowest <= self._slack
        ]
        for worker in ready:
            if worker in self._clocks:
                self._computing[worker] = self.version
        return [Answer(worker, self._unanswered.pop(worker)) for worker in ready]


@final
class SoftSession(ServerSession):
    """Applies the mean of n gradients, and answers each worker at once."""

    def __init__(self, world_size: int, apply: Apply, n: int) -> None:
        super().__init__(world_size, apply)
        self._n = n

    def _push(self, push: Push, now: float) -> list[Answer]:
        del now
        self._waiting.append(push)
        if len(self._waiting) < self._n:
            return [Answer(push.worker, None)]
        staleness = self.version - push.version
        self._apply_mean()
        return [Answer(push.worker, staleness)]

    def _finished(self, now: float) -> list[Answer]:
        del now
        return []


@final
class QuorumSession(ServerSession):
    """Ends a step when enough workers have come."""

    def __init__(self, world_size: int, apply: Apply, n: int, grace_s: float) -> None:
        super().__init__(world_size, apply)
        self._n, self._grace_s = n, grace_s
        self._ends_at: float | None = None

    def due(self) -> float | None:
        """Return the time at which the grace of the step ends."""
        return self._ends_at

    def tick(self, now: float) -> list[Answer]:
        """End the step if its grace is over."""
        return self._noted(self._finished(now))

    def _push(self, push: Push, now: float) -> list[Answer]:
        self._waiting.append(push)
        if push.version < self.version:
            # The step that it belongs to is over. The worker goes on with the present parameters, and its gradient
            # counts in the next update.
            return [Answer(push.worker, None), *self._finished(now)]
        return self._finished(now)

    def _finished(self, now: float) -> list[Answer]:
        present = [push for push in self._waiting if push.version == self.version]
        enough = min(self._n, len(self._clocks))
        if not present or len(present) < enough:
            return []
        if self._ends_at is None:
            self._ends_at = now + self._grace_s
        if len(present) < len(self._clocks) and now < self._ends_at:
            return []
        self._ends_at = None
        self._apply_mean()
        return [Answer(push.worker, 0) for push in present]
