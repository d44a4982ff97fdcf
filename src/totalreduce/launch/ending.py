"""How a run ends: which worker failed first and by which error, and when which signals stop the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from totalreduce.foundation.checks import listed
from totalreduce.launch.tracebacks import usage_error, without_rank
from totalreduce.launch.workers import WorkerResult

__all__ = ["Escalation", "Failure", "describe_failures", "failure_of", "find_first_failure"]

#: The last line of a traceback that ends in ``PeerLost``, or in another library's error made of it.
_LOSS = re.compile(r"^[\w.]+: rank (\d+) is lost: ")
#: What a program makes of such an error that it catches, in its last line.
_LOSS_IN_TEXT = re.compile(r"\brank (\d+) is lost: ")
#: The first line about an error of the syntax, before which no such line is.
_OF_SYNTAX = re.compile(r'^  File ".+", line \d+$')
_TRACEBACK = "Traceback (most recent call last):"
#: What stands before the traceback of an error that does not end a process.
_HARMLESS = ("Exception ignored in", "Exception in thread", "--- Logging error ---")
#: The number of lines of a worker's standard error that are shown, and how many of them come after its error.
_LINES, _LINES_AFTER = 10, 2
#: How many lines of the first failure, of other failures, and other ranks are shown.
_OTHERS = 8


class Failure(NamedTuple):
    """What standard error says about the end of a process."""

    error: str  #: The line of the exception that has ended it; "" if there is none.
    lines: tuple[str, ...]  #: Lines around it; the last ones if there is none.
    #: The lines of its traceback, with the line of the exception; none if there is none.
    traceback: tuple[str, ...] = ()


def failure_of(lines: Sequence[str]) -> Failure:
    """Return what the last lines of standard error say: programs may write many lines after their exception."""
    plain = [without_rank(line) for line in lines]
    first, found = 0, None
    for begin, line in enumerate(plain):
        before = plain[begin - 1] if begin else ""
        is_begin = line == _TRACEBACK and not before.startswith(_HARMLESS)
        if is_begin or (_OF_SYNTAX.match(line) and before != _TRACEBACK and not before.startswith(" ")):
            end = next((index for index in range(begin + 1, len(plain)) if not plain[index].startswith(" ")), None)
            if end is not None:
                first, found = begin, end
    if found is None:
        return Failure(usage_error(plain), tuple(lines[-_LINES:]))
    end = len(lines) if found >= len(lines) - _LINES else found + 1 + _LINES_AFTER
    return Failure(plain[found], tuple(lines[max(0, end - _LINES) : end]), tuple(plain[first : found + 1]))


class Escalation:
    """Signals to send to every worker that still runs, in order of time."""

    def __init__(self, linger_s: float, grace_s: float) -> None:
        """Survivors of a failure may go on for ``linger_s``; after the first signal a worker may take ``grace_s``."""
        self._linger_s = linger_s
        self.grace_s = grace_s  #: The time from SIGTERM to SIGKILL.
        self._steps: list[tuple[float, signal.Signals]] = []
        self._interruptions = 0
        self.stopping = False  #: Whether signals are planned: the end of a worker is then no failure of its own.

    def failed(self, now: float) -> None:
        """Plan the end of the other workers after a worker has failed."""
        if not self.stopping:
            self.stopping = True
            begin = now + self._linger_s
            self._steps = [(begin, signal.SIGTERM), (begin + self.grace_s, signal.SIGKILL)]

    def interrupted(self, by: signal.Signals, now: float) -> None:
        """Plan to pass on a signal that the launcher got. After a second one all workers are killed at once."""
        self.stopping = True
        self._interruptions += 1
        if self._interruptions > 1:
            self._steps = [(now, signal.SIGKILL)]
            return
        self._steps = [(now, by), (now + self.grace_s, signal.SIGKILL)]
        if by is not signal.SIGTERM:
            self._steps.insert(1, (now + self.grace_s / 2, signal.SIGTERM))

    def due(self, now: float) -> signal.Signals | None:
        """Return the signal to send now, if any: each once, and of several that are due only the last."""
        chosen: signal.Signals | None = None
        while self._steps and self._steps[0][0] <= now:
            chosen = self._steps.pop(0)[1]
        return chosen


def find_first_failure(first_to_end: WorkerResult, results: Sequence[WorkerResult]) -> WorkerResult:
    """Return the worker whose failure made the others fail.

    The order in which processes end does not show it: a rank that ends because of another rank's exception may be gone
    sooner than that rank, which still has threads to join. But the last error of such a rank names the lost rank. So
    the search follows these names from the process that ended first. Only a worker that has failed by itself continues
    the chain, and not one that the launcher has stopped before it had an error.
    """
    by_rank = {result.rank: result for result in results}
    seen = {first_to_end.rank}
    found = first_to_end
    while True:
        lost = _lost_rank(found)
        if lost is None and found.trace.kind == "RecoveryError":  # it says that all have failed, and not why
            return next((each for each in results if each.trace.of_program), found)
        if lost in seen:  # ranks that lost each other, for instance by a cut cable: nothing says which failed first
            return first_to_end
        if lost is None or lost not in by_rank:
            return found
        named = by_rank[lost]
        if named.exit_code == 0 or (named.was_stopped and not named.error):
            return found
        found = named
        seen.add(lost)


def _lost_rank(result: WorkerResult) -> int | None:
    """Return the rank that a worker's last error calls lost."""
    plain = [without_rank(line).strip() for line in result.last_errors]
    found = [match for line in plain if (match := _LOSS.match(line))]
    if not found and plain and not result.error:
        found = [match for match in [_LOSS_IN_TEXT.search(plain[-1])] if match]
    return int(found[-1][1]) if found else None


def describe_failures(first: WorkerResult, results: Sequence[WorkerResult], folder: str) -> list[str]:
    """Return the lines that tell a user why a run has failed: the line of his file comes first.

    Ranks that have failed by one error at one place are shown once, each other error of the program by itself, and
    last those that have ended because others have.
    """
    groups: dict[str, list[WorkerResult]] = {}
    for each in (first, *results):
        error = each.trace.of_program
        if each.rank != first.rank and (not error or each.exit_code == 0):
            continue
        group = groups.setdefault(error if each.trace.frames else f"rank {each.rank}", [])
        if all(known.rank != each.rank for known in group):
            group.append(each)
    lines: list[str] = []
    for index, group in enumerate(list(groups.values())[:_OTHERS]):
        lines += _described(group, folder, is_first=index == 0)
    shown = {each.rank for group in groups.values() for each in group}
    others = [each for each in results if each.rank not in shown]
    if others:
        more = f"; {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
        lines.append("the others: " + "; ".join(f"rank {w.rank} {w.describe()}" for w in others[:_OTHERS]) + more)
    return lines


def _described(group: Sequence[WorkerResult], folder: str, *, is_first: bool) -> list[str]:
    """Return the lines about ranks that have failed in the same way."""
    one, ranks = group[0], sorted(each.rank for each in group)
    who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, 'and')}"
    where = "" if one.host == "localhost" or len(ranks) > 1 else f" on {one.host}"
    what = f"{who}{where} failed first" if is_first else f"{who}{where} failed, too"
    end = f"{one.describe()} after {one.seconds:.1f} s"
    if one.trace.own is None:
        error = f": {one.error}" if one.error else ""
        return [f"{what}: {end}{error}", *(f"  {line}" for line in one.last_errors)]
    return [f"{what} at {one.trace.own.describe(folder)}: {one.error}", *one.trace.folded(folder), f"  {end}"]
