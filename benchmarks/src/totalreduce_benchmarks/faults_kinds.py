"""The kinds of faults of ``totalreduce bench faults``: which there are, how many of each, and what each does."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.foundation.errors import ConfigurationError
from totalreduce_benchmarks.faults_job import RunningJob
from totalreduce_benchmarks.network_faults import HostOfProcess, host_of

__all__ = ["KINDS", "Fault", "FaultKind", "FaultPlan"]

#: How long a partition lasts: longer than the silence after which a rank counts as lost.
_PARTITION_S = 4.0
#: The longest time from the first kill to the second one of ``again``: longer than most recoveries.
_AGAIN_S = 3.0
#: How long a second kill is tried.
_SECOND_S = 20.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was caused.

    Attributes:
        kind: Its kind.
        at: The time of day.
    """

    kind: str
    at: float


class FaultKind(ABC):
    """A kind of faults. A new one is a class here and an entry in ``KINDS``.

    Attributes:
        help: What it does, for ``--help``.
        needs_hosts: Whether it needs emulated hosts with one rank each.
        loses_ranks: Whether ranks are lost by it, so that a new group is formed.
    """

    help: str
    needs_hosts = False
    loses_ranks = True

    @abstractmethod
    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        """Cause the fault; return its time of day, or ``None`` if it was not possible now."""


class _Signal(FaultKind):
    """A signal to a random rank, or to a given one."""

    def __init__(self, number: signal.Signals, description: str, rank: int | None = None) -> None:
        self.help = description
        self._number, self._rank = number, rank

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        rank = chance.randrange(job.num_ranks)
        return job.send(rank if self._rank is None else self._rank, self._number)


class _Again(FaultKind):
    help = "two kills, the second one while the job recovers from the first"

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        at = job.send(chance.randrange(job.num_ranks), signal.SIGKILL)
        if at is None:
            return None
        time.sleep(chance.uniform(0.0, _AGAIN_S))  # before or after the survivors have formed their group
        ranks = list(range(job.num_ranks))
        chance.shuffle(ranks)
        # Often the only other process with the state must live until another one has it, too.
        give_up_at = time.monotonic() + _SECOND_S
        while all(job.send(rank, signal.SIGKILL) is None for rank in ranks) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_S)
        return at


class _Keeper(FaultKind):
    help = "SIGKILL of the launcher's process that serves the store of the ranks' decisions"
    loses_ranks = False

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:  # noqa: ARG002
        return job.kill_keeper()


class _Network(FaultKind):
    """A fault of the connections between the hosts of two random ranks."""

    needs_hosts = True

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        pids = job.pids()
        rank = chance.randrange(job.num_ranks)
        peers = [peer for peer in range(job.num_ranks) if peer != rank]
        chance.shuffle(peers)
        if len(pids) < job.num_ranks:
            return None
        members = job.forget_members()  # until the ranks have formed another group
        for peer in peers:
            try:
                at = self._disturb(host_of(pids[rank]), host_of(pids[peer]))
            except (subprocess.CalledProcessError, OSError):
                at = None  # one of the processes has ended since
            if at is not None:
                return at
        job.remember_members(members)
        return None

    @abstractmethod
    def _disturb(self, here: HostOfProcess, there: HostOfProcess) -> float | None:
        """Disturb the connections of two hosts; return the time of day, ``None``: there are none.

        Raises:
            subprocess.CalledProcessError: It was not possible, and nothing is disturbed.
            BenchmarkFailedError: What was disturbed could not be restored.
        """


class _Reset(_Network):
    help = "the connections of two hosts are reset"

    def _disturb(self, here: HostOfProcess, there: HostOfProcess) -> float | None:
        at = time.time()
        return at if here.reset(there) else None


class _Partition(_Network):
    help = f"for {_PARTITION_S:g} s nothing comes from one host to another one, but the other direction works"

    def _disturb(self, here: HostOfProcess, there: HostOfProcess) -> float | None:
        at = time.time()
        here.block(there)
        try:
            time.sleep(_PARTITION_S)
        finally:
            try:
                here.unblock(there)
            except subprocess.CalledProcessError as error:
                raise BenchmarkFailedError(
                    f"the route from {here.namespace} to {there.address} could not be restored: {error.stderr.strip()}"
                ) from error
        return at


#: By name. The order is that of ``--help``.
KINDS: dict[str, FaultKind] = {
    "kill": _Signal(signal.SIGKILL, "SIGKILL of a random rank at a random time"),
    "stop": _Signal(signal.SIGSTOP, "SIGSTOP"),
    "again": _Again(),
    "first": _Signal(signal.SIGKILL, "SIGKILL of rank 0", rank=0),
    "keeper": _Keeper(),
    "reset": _Reset(),
    "partition": _Partition(),
}


@final
class FaultPlan:
    """Which faults come, in which order: ``kill,stop`` by turns, or ``kill=500,stop=100`` in random order.

    Attributes:
        kinds: The names of the different kinds.
        counts: By kind the number of faults; ``None``: the kinds come by turns.
    """

    def __init__(self, text: str, known: Mapping[str, FaultKind] = KINDS, option: str = "--kinds") -> None:
        """Read the value of an option.

        Args:
            text: The value.
            known: The kinds that there are.
            option: The name of the option, for errors.

        Raises:
            ConfigurationError: A kind is not known, or some have counts and others have none.
        """
        counts: dict[str, int | None] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, equals, count = word.partition("=")
            if name not in known or (equals and not (count.isdecimal() and int(count) > 0)):
                raise ConfigurationError(
                    f"{option} takes {', '.join(known)}, or counts from 1 on as {_example_of(known)}, not {text!r}"
                )
            counts[name] = int(count) if equals else None
        given = [count for count in counts.values() if count is not None]
        if not counts or 0 < len(given) < len(counts):
            raise ConfigurationError(f"{option}: either each kind has a count, or none, not {text!r}")
        self.kinds, self._known = list(counts), known
        self.counts = {name: count for name, count in counts.items() if count is not None} or None

    def sequence(self, num_faults: int | None, chance: random.Random) -> Iterator[str]:
        """Yield the kinds of the faults.

        Args:
            num_faults: How many faults come if there are no counts; ``None``: without an end, with counts as shares.
            chance: Draws the order of kinds with counts.
        """
        if self.counts is None:
            yield from itertools.islice(itertools.cycle(self.kinds), num_faults)
            return
        for _ in itertools.count() if num_faults is None else range(1):
            row = list(Counter(self.counts).elements())
            chance.shuffle(row)
            yield from row

    def cause(self, kind: str, job: RunningJob, chance: random.Random) -> float | None:
        """Cause a fault of a kind; as ``FaultKind.cause``."""
        return self._known[kind].cause(job, chance)

    def total(self, num_faults: int) -> int:
        """Return the number of faults; ``num_faults`` if there are no counts."""
        return num_faults if self.counts is None else sum(self.counts.values())


def _example_of(known: Mapping[str, FaultKind]) -> str:
    first, second, *_ = known
    return f"{first}=500,{second}=100"
