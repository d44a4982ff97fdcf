"""Clocks of workers, and the rules by which requests wait for them.

A worker's clock is the number of steps that it has ended. Each shard has the clocks of all workers, and is handed on
with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal, final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError

__all__ = ["ABSENT", "FINISHED", "Bounded", "Consistency", "Eventual", "Sequential", "VectorClock"]

#: The clock of a worker that has finished: nobody waits for it.
FINISHED: Final = 1 << 62
#: The clock of a worker that has not come yet (``--max-ranks``): nobody waits for it.
ABSENT: Final = -1


@dataclass(frozen=True)
class Consistency(ABC):
    """A rule: which requests wait for other workers. Equal on all ranks.

    Attributes:
        in_steps: Whether pushes are kept until all workers have ended the step, and then applied in the order of ranks.
    """

    in_steps: ClassVar[bool] = False

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The largest number of steps by which a worker may be ahead of the slowest one when its request is served.

        ``None``: there is no limit.
        """

    def admits(self, clock: int, slowest: int) -> bool:
        """Return whether a request of a worker at ``clock`` is carried out while the slowest is at ``slowest``."""
        return self.bound is None or clock - slowest <= self.bound

    def describe(self) -> dict[str, Any]:
        """Return name and settings as JSON values."""
        return {"name": type(self).__name__, **asdict(self)}


@final
@dataclass(frozen=True)
class Sequential(Consistency):
    """Synchronous steps: a pull sees all pushes of earlier steps, and none of this step; the same bits in every run.

    Attributes:
        buffer_bytes: A server keeps at most so many bytes of what one worker pushes in a step: values, and 8 bytes for
            each listed key. More is refused. The bound is for each worker: a server may keep as much of every worker.
        combine: ``"each"``: each push is one update. ``"mean"``: what all workers push for a key in a step is added, in
            the order of ranks and of their calls, and divided by the number of workers; the result is one update.
            Workers that have not come yet are not counted.
    """

    in_steps: ClassVar[bool] = True

    buffer_bytes: int = 256 * 1024 * 1024
    combine: Literal["each", "mean"] = "each"

    def __post_init__(self) -> None:
        """Check the bound."""
        checks.integer_fields(self, "buffer_bytes", minimum=1)
        checks.one_of("combine", self.combine, ("each", "mean"))

    @property
    def bound(self) -> int:
        """No worker is ahead of another one."""
        return 0


@final
@dataclass(frozen=True)
class Bounded(Consistency):
    """Bounded delay, or stale synchronous: a worker is at most ``tau`` steps ahead of the slowest one.

    Pushes are applied when they come. Li et al., OSDI 2014; Ho et al., NIPS 2013.
    """

    tau: int

    def __post_init__(self) -> None:
        """Check the bound."""
        checks.integer_fields(self, "tau", minimum=0)

    @property
    def bound(self) -> int:
        """The bound."""
        return self.tau


@final
@dataclass(frozen=True)
class Eventual(Consistency):
    """Nobody waits. Pushes are applied when they come."""

    @property
    def bound(self) -> None:
        """There is no bound."""
        return


@final
class VectorClock:
    """The clocks of all workers, as one shard knows them.

    Li et al., OSDI 2014, have a vector of clocks for each range of keys, because one for each key would take more
    memory than the values. Here one for all ranges of a shard is enough: a worker ends a step in all of them at once.
    """

    def __init__(self, clocks: Sequence[int]) -> None:
        """Begin with the clocks of the workers."""
        self._clocks = list(clocks)
        self._slowest = self._find_slowest()

    def advance(self, worker: int, clock: int) -> None:
        """Set the clock of a worker. A clock that was set before is no change.

        Raises:
            ProtocolError: The clock is neither the next one nor ``FINISHED``.
        """
        own = self._clocks[worker]
        if clock - own > 1 and clock != FINISHED:
            raise ProtocolError(f"worker {worker} is at clock {own}, and cannot go on to {clock}")
        self._clocks[worker] = max(own, clock)
        self._slowest = self._find_slowest()

    def place(self, worker: int, clock: int) -> None:
        """Set the clock of a worker that comes or is absent."""
        self._clocks[worker] = clock
        self._slowest = self._find_slowest()

    def of(self, worker: int) -> int:
        """Return the clock of a worker."""
        return self._clocks[worker]

    def slowest(self) -> int:
        """Return the smallest clock of the workers that have come; ``ABSENT`` if none has."""
        return self._slowest

    @property
    def num_present(self) -> int:
        """The number of workers that have come; those that have finished are among them."""
        return len(self._clocks) - self._clocks.count(ABSENT)

    def below(self, clock: int) -> list[tuple[int, int]]:
        """Return workers that have come, and whose clocks are below ``clock``, and these clocks."""
        return [(worker, its) for worker, its in enumerate(self._clocks) if ABSENT < its < clock]

    def _find_slowest(self) -> int:
        return min((clock for clock in self._clocks if clock != ABSENT), default=ABSENT)
