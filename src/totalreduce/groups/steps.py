"""What the steps of a training cost on this rank: reports for a callback of the program, and for the live view."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from totalreduce.foundation import checks
from totalreduce.groups.statistics import Statistics, snapshot
from totalreduce.runner.meter import StepTotals
from totalreduce.runner.runner import Runner

__all__ = ["Reading", "StepReport", "report_every"]


@dataclass(frozen=True, slots=True)
class Reading:
    """The totals of a rank at one time.

    Attributes:
        at: The time, by ``time.monotonic``.
        totals: Of the steps.
        statistics: Of operations and messages.
        sent_to: The bytes of messages sent, by peer.
        received_from: The bytes of messages received, by peer.
    """

    at: float
    totals: StepTotals
    statistics: Statistics
    sent_to: dict[int, int]
    received_from: dict[int, int]

    @classmethod
    def of(cls, runner: Runner) -> Reading:
        """Read the totals of an engine. Any thread."""
        statistics = snapshot(runner)
        with runner.locked():
            counters = runner.engine.counters
            sent, received = dict(counters.sent_to), dict(counters.received_from)
        return cls(time.monotonic(), runner.meter.totals, statistics, sent, received)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The steps of a training on this rank since the report before.

    Times are means in seconds; they are 0 if no step was timed, because the first step has no known begin.

    Attributes:
        step: The number of steps that have ended since the training began.
        steps: The number of steps of this report.
        step_s: The time of a step, from the end of the one before.
        compute_s: The part of it in which the thread that trains was not blocked in waits for other ranks.
        exposed_s: The other part: communication that no computation hides, and waiting for ranks that are late.
        hidden_share: The share, 0 to 1, of the time with an operation in flight in which the thread that trains was not
            blocked; 1 if nothing was in flight.
        bytes_sent: The bytes that this rank has sent, headers included. In the fast lane, the bytes that other ranks
            have read of its memory.
        bytes_received: The bytes that this rank has received, or read.
        seconds: The time of the whole report.
    """

    step: int
    steps: int
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_share: float
    bytes_sent: int
    bytes_received: int
    seconds: float

    @classmethod
    def between(cls, before: Reading, after: Reading) -> StepReport:
        """Return the report on the time between two readings of one engine."""
        old, new = before.totals, after.totals
        timed = max(1, new.timed_steps - old.timed_steps)
        step_s, exposed_s = (new.step_s - old.step_s) / timed, (new.exposed_s - old.exposed_s) / timed
        active_s = after.statistics.active_s - before.statistics.active_s
        waited_s = after.statistics.waited_s - before.statistics.waited_s
        if new.timed_steps > old.timed_steps:  # other threads than the one that trains may be blocked, and cost nothing
            waited_s = new.exposed_s - old.exposed_s
        return cls(
            step=new.steps,
            steps=new.steps - old.steps,
            step_s=step_s,
            compute_s=step_s - exposed_s,
            exposed_s=exposed_s,
            hidden_share=min(1.0, max(0.0, 1.0 - waited_s / active_s)) if active_s > 0 else 1.0,
            bytes_sent=after.statistics.bytes_sent - before.statistics.bytes_sent,
            bytes_received=after.statistics.bytes_received - before.statistics.bytes_received,
            seconds=after.at - before.at,
        )

    def scalars(self, prefix: str = "totalreduce/") -> dict[str, float]:
        """Return the figures by name, for TensorBoard or Weights & Biases; without the number of the step."""
        return {prefix + name: float(value) for name, value in asdict(self).items() if name != "step"}


def report_every(
    runner: Callable[[], Runner], every: int, callback: Callable[[StepReport], None]
) -> Callable[[], None]:
    """Have ``callback`` called with a report after every so many steps; return a function that undoes this.

    Args:
        runner: Returns the present engine with its threads, which is another one after the members have changed. A
            report in which that happens is left out.
        every: The number of steps between two reports.
        callback: Is called in the thread that trains.

    Raises:
        ConfigurationError: ``every`` is not a positive integer.
    """
    checks.integer("every", every, minimum=1)
    read = runner()
    before = Reading.of(read)

    def watch(totals: StepTotals) -> None:
        nonlocal before, read
        if totals.steps % every:
            return
        old, is_same = before, read is runner()
        read = runner()
        before = Reading.of(read)
        if is_same:
            callback(StepReport.between(old, before))

    read.meter.watchers.append(watch)

    def remove() -> None:
        watchers = runner().meter.watchers
        if watch in watchers:
            watchers.remove(watch)

    return remove
