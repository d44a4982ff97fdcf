"""Strategies in which servers have the parameters: asynchronous steps, bounded staleness, partial groups of ranks.

Every rank is a worker, and the server of a share of the parameters. A worker computes a gradient with the parameters
that it has got last, *pushes* it to the servers, and goes on when all of them have *answered* with new parameters. The
strategies differ in when a server applies what was pushed, and when it answers:

* ``Async``: it applies every gradient at once, scaled by its staleness; a bound on the staleness holds gradients back.
  Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD", IJCAI 2016.
* ``StaleSynchronous``: the same, but a worker that is more than some steps ahead of the slowest one waits. Ho et al.,
  "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
* ``SoftSync``: it applies the mean of the next n gradients, of whichever workers (the same IJCAI paper). No worker
  waits: servers get gradients in different orders, and workers that wait at one server for those that wait at another
  would wait for ever.
* ``Quorum``: it ends a step when n workers have come and some time has passed, or all have come; a gradient that comes
  late counts in the next step. ``Eager`` is that with one worker or the majority: Li et al., "Taming Unbalanced
  Training Workloads in Deep Learning with Partial Collective Operations", PPoPP 2020.

``sessions`` has the rules as plain objects, ``served_steps`` what a worker does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.server.served_steps import ServedStrategy
from totalreduce.server.sessions import Apply, ImmediateSession, QuorumSession, ServerSession, SoftSession

__all__ = ["Async", "Eager", "Quorum", "SoftSync", "StaleSynchronous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Async(ServedStrategy):
    """Settings of asynchronous steps.

    Attributes:
        max_staleness: The largest staleness: a gradient waits for the others that it would make staler than that.
            ``None``: there is no bound. With 0 every step is synchronous.
        scale: ``"inverse"``: a gradient of staleness s counts 1 / max(1, s). ``"none"``: all count alike.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "async"

    max_staleness: int | None = None
    scale: Literal["inverse", "none"] = "inverse"

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            checks.integer_fields(self, "max_staleness", minimum=0)
        checks.one_of("scale", self.scale, ("inverse", "none"))

    def is_synchronous(self, world_size: int) -> bool:
        """Whether no gradient may be stale."""
        return world_size == 1 or self.max_staleness == 0

    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""
        if self.max_staleness is not None and self.max_staleness < world_size - 1:
            raise ConfigurationError(
                f"max_staleness={self.max_staleness} is impossible with {world_size} ranks: while one computes a "
                f"gradient, each of the others has sent one. Use at least {world_size - 1}, or 0 for synchronous steps"
            )
        return ImmediateSession(world_size, apply, self.max_staleness, None, inverse=self.scale == "inverse")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleSynchronous(ServedStrategy):
    """Settings of stale synchronous parallel steps.

    Attributes:
        slack: The number of steps by which a worker may be ahead of the slowest one. With 0 every step is synchronous.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "stale_synchronous"

    slack: int = 3

    def __post_init__(self) -> None:
        checks.integer_fields(self, "slack", minimum=0)

    def is_synchronous(self, world_size: int) -> bool:
        """Whether no worker may be ahead."""
        return world_size == 1 or self.slack == 0

    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""
        return ImmediateSession(world_size, apply, None, self.slack, inverse=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftSync(ServedStrategy):
    """Settings of soft synchronisation.

    Attributes:
        n: The number of gradients whose mean is an update, at most the number of ranks; with all of them every step is
            synchronous. A fast worker may have several of them.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "soft_sync"

    n: int

    def __post_init__(self) -> None:
        checks.integer_fields(self, "n", minimum=1)

    def is_synchronous(self, world_size: int) -> bool:
        """Whether an update needs all ranks."""
        return _fits(self.name, self.n, world_size) == world_size

    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""
        return SoftSession(world_size, apply, _fits(self.name, self.n, world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum(ServedStrategy):
    """Settings of steps that do not wait for all ranks.

    Attributes:
        n: The number of workers without which no step ends, at most the number of ranks; with all of them every step
            is synchronous.
        grace_s: How long a step waits for the others after the n-th worker has come, in seconds.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "quorum"

    n: int
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        checks.integer_fields(self, "n", minimum=1)
        checks.real_field(self, "grace_s", minimum=0, maximum=3600)

    def is_synchronous(self, world_size: int) -> bool:
        """Whether a step needs all ranks."""
        return _fits(self.name, self.n, world_size) == world_size

    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""
        return QuorumSession(world_size, apply, _fits(self.name, self.n, world_size), self.grace_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eager(ServedStrategy):
    """Settings of eager steps: ``Quorum`` without grace.

    Attributes:
        mode: ``"majority"``: a step ends when more than half of the ranks have come. ``"solo"``: when one has.

    Raises:
        ConfigurationError: The mode is another one.
    """

    name: ClassVar[str] = "eager"

    mode: Literal["majority", "solo"] = "majority"

    def __post_init__(self) -> None:
        checks.one_of("mode", self.mode, ("majority", "solo"))

    def is_synchronous(self, world_size: int) -> bool:
        """Whether a step needs all ranks."""
        return self._enough(world_size) == world_size

    def serve(self, world_size: int, apply: Apply) -> ServerSession:
        """Return the session of one server."""
        return QuorumSession(world_size, apply, self._enough(world_size), 0.0)

    def _enough(self, world_size: int) -> int:
        return 1 if self.mode == "solo" else world_size // 2 + 1


def _fits(name: str, n: int, world_size: int) -> int:
    if n > world_size:
        raise ConfigurationError(f"{name} waits for {n} ranks, and there are {world_size}")
    return n
