"""Which workers of a run are started again after a failure, and with how few the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.workers import RECOVERY_VARIABLES

__all__ = ["PAUSE_MAX_S", "SOON_S", "RecoveryOptions", "Restarts", "Seats", "event", "worker_variables"]

#: A process that exits with an error so soon after its start is started again only after a pause, which doubles.
SOON_S = 20.0
_PAUSE_S = 1.0
PAUSE_MAX_S = 30.0
#: The number of epochs, the last ones, of which the accusations are known.
_ACCUSED_EPOCHS = 64


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats of a job: those of the workers, and then those of the ranks that only serve."""

    workers: int  #: The number of seats of workers.
    servers: int  #: The number of seats of ranks that only serve.
    first_workers: int  #: The number of workers with which the job begins. They have the first seats.
    #: The number of ranks that only serve with which it begins. They have the first seats of theirs.
    first_servers: int

    @property
    def count(self) -> int:
        """The number of all seats."""
        return self.workers + self.servers

    @property
    def serving(self) -> range:
        """The seats of ranks that only serve."""
        return range(self.workers, self.count)

    @property
    def first_ranges(self) -> list[range]:
        """The seats with which the job begins: those of workers, and then those of ranks that only serve."""
        ranges = range(self.first_workers), range(self.workers, self.workers + self.first_servers)
        return [each for each in ranges if each]

    @property
    def first(self) -> list[int]:
        """The seats with which the job begins."""
        return [seat for each in self.first_ranges for seat in each]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryOptions:
    """What ``totalreduce run`` does when a worker fails."""

    #: ``"replace"``: the others wait until it was started again. ``"shrink"``: they go on without it, and it may join
    #: again.
    on_loss: Literal["replace", "shrink"]
    restarts: int = 10  #: How many workers are started again in the whole run.
    min_ranks: int = 1  #: With ``"shrink"``: the smallest number of ranks that go on.
    #: With ``"shrink"``: the number of seats of workers. While hosts have free slots, processes are started for seats
    #: beyond the number of workers, and join. By default no more than the job begins with.
    max_ranks: int | None = None
    max_servers: int | None = None  #: With ``"shrink"``: the same of ranks that only serve.
    #: How many processes wait on each host to replace a worker, and as many again to replace a rank that only serves,
    #: if there are some (``spares``).
    spares: int = 0
    #: Is called with each event: a dictionary with ``event`` (``ended``, ``started``, ``suspected``, ``epoch``,
    #: ``program failed``, ``start failed``, ``spare ended``, ``keeper``, ``values refused``, ``host added``, ``host
    #: removed``, ``host blacklisted``, ``host back`` or ``hosts refused``) and its details, JSON values.
    on_event: Callable[[dict[str, Any]], None] = lambda _: None

    def check(self, num_workers: int, num_servers: int) -> None:
        """Raise ``ConfigurationError`` if the limits do not fit the numbers of workers and servers."""
        seats = self.seats(num_workers, num_servers)
        most_workers, most_servers = seats.workers, seats.servers
        checks.rank_limits(self.min_ranks, num_workers, most_workers)
        if most_servers and not num_servers:
            raise ConfigurationError(
                f"--max-servers {most_servers} goes with --servers: a job begins with a server, or has none"
            )
        if most_servers < num_servers:
            raise ConfigurationError(f"--max-servers {most_servers} is less than the number of servers, {num_servers}")
        for option, limit, number, what in (
            ("--max-ranks", most_workers, num_workers, "workers"),
            ("--max-servers", most_servers, num_servers, "servers"),
        ):
            if self.on_loss == "replace" and limit > number:
                raise ConfigurationError(
                    f"{option} {limit} is more than the number of {what}, {number}, which never changes with --on-loss "
                    "replace: use --on-loss shrink"
                )
        if self.restarts < 0:
            raise ConfigurationError(f"--restarts must be at least 0, not {self.restarts}")
        if self.spares < 0:
            raise ConfigurationError(f"--spares must be at least 0, not {self.spares}")

    def seats(self, num_workers: int, num_servers: int) -> Seats:
        """Return the seats of a job that begins with so many workers and servers."""
        return Seats(
            num_workers if self.max_ranks is None else self.max_ranks,
            num_servers if self.max_servers is None else self.max_servers,
            num_workers,
            num_servers,
        )


@final
class Restarts:
    """Decides which workers are started again, and which must be ended because others have lost them."""

    def __init__(self, options: RecoveryOptions, seats: Seats) -> None:
        """Begin with a policy, and the seats of the job."""
        num_seats = seats.count
        self._options, self._later = options, set(range(num_seats)).difference(seats.first)
        #: By seat: how often the worker was started again; -1 if it was not started at all.
        self.incarnations = [-1] * num_seats
        self.left = options.restarts  #: The number of restarts that are left.
        self._started_at = [0.0] * num_seats
        self._pauses = [_PAUSE_S] * num_seats
        self._due: dict[int, float] = {}  #: By seat of a worker that has failed: when it is started again.
        self._vacant: set[int] = set()  #: Seats that wait for a slot: nothing has failed there.
        self.has_begun = False  #: Whether the ranks have decided on the first epoch.
        self._has_finished = False
        self._accused: dict[int, set[int]] = {}  #: By epoch: the ranks that were accused.

    @property
    def is_possible(self) -> bool:
        """Whether a worker that failed now would be started again."""
        return self.left > 0 and not self._has_finished

    @property
    def is_pending(self) -> bool:
        """Whether workers that have failed wait for their restart."""
        return bool(self._due)

    def started(self, rank: int, now: float) -> None:
        """Note that a worker was started, which counts its incarnation."""
        self._started_at[rank] = now
        self.incarnations[rank] += 1

    def seconds_since_start(self, rank: int, now: float) -> float:
        """Return the time from the last start of a worker until now."""
        return now - self._started_at[rank]

    def begun(self) -> None:
        """Note that the job has begun: processes of seats beyond the number of workers can join from now on."""
        if not self.has_begun and not self._has_finished:
            self._vacant.update(self._later)
        self.has_begun = True

    def displaced(self, rank: int) -> None:
        """Have the seat of a worker that has lost its host wait for a slot of another host. That costs no restart."""
        if not self._has_finished:
            self._vacant.add(rank)

    def has_state(self, num_running: int) -> bool:
        """Return whether a worker has the state of the job, or will have it, or none needs it any more.

        ``num_running`` is the number of workers that run or are just being started.
        """
        return self._has_finished or num_running + len(self._due) > 0

    def failed(self, rank: int, now: float, *, by_signal: bool) -> None:
        """Plan to start a worker that has failed again, if restarts are left."""
        if self.is_possible:
            self.left -= 1
            soon = not by_signal and now < self._started_at[rank] + SOON_S
            self._due[rank] = now + (self._pauses[rank] if soon else 0.0)
            self._pauses[rank] = min(2 * self._pauses[rank], PAUSE_MAX_S) if soon else _PAUSE_S

    def survives(self, rank: int, num_running: int) -> bool:
        """Return whether the run goes on after ``failed``: the worker starts again, or the others are enough."""
        return not self._has_finished and (rank in self._due or self.is_enough(num_running))

    def is_enough(self, num_running: int) -> bool:
        """Return whether the run goes on without a worker that has failed and is not started again."""
        return self._options.on_loss == "shrink" and num_running + len(self._due) >= self._options.min_ranks

    def finished(self) -> None:
        """Note that the job has come to its end: nothing is started again."""
        self._has_finished = True
        self._due.clear()
        self._vacant.clear()

    def due(self, now: float) -> list[int]:
        """Return the seats that are to be started as soon as there is a slot: those that have failed first."""
        return [*sorted(rank for rank, at in self._due.items() if at <= now), *sorted(self._vacant - set(self._due))]

    def placed(self, rank: int) -> None:
        """Note that a seat of ``due`` has a slot."""
        self._due.pop(rank, None)
        self._vacant.discard(rank)

    def is_to_end(self, accused: int, incarnation: int, by: int, epoch: int) -> bool:
        """Return whether a worker that another one calls silent is to be ended.

        Two ranks that cannot hear each other accuse each other: only the first accusation counts. One that has come
        too late, or names a seat or an incarnation that there is not, does not count either.
        """
        seats = range(len(self.incarnations))
        if accused not in seats or by not in seats or incarnation < 0 or incarnation != self.incarnations[accused]:
            return False
        known = self._accused.setdefault(epoch, set())
        if by in known:
            return False
        known.add(accused)
        if len(self._accused) > _ACCUSED_EPOCHS:
            del self._accused[min(self._accused)]
        return True


def worker_variables(options: RecoveryOptions, seats: Seats, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a worker knows the keeper and the policy."""
    begin = ",".join(f"{each[0]}-{each[-1]}" for each in seats.first_ranges)
    values = (options.on_loss, f"{address}:{port}", str(options.min_ranks), begin, "0")
    return dict(zip(RECOVERY_VARIABLES, values, strict=True))


def event(kind: str, **details: Any) -> dict[str, Any]:
    """Return an event with the time of the day."""
    return {"time": round(time.time(), 3), "event": kind, **details}
