"""How a run ends: which worker failed first, and when which signals stop the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from totalreduce.launch.workers import WorkerResult

__all__ = ["Escalation", "find_first_failure"]

#: The last line of a traceback that ends in ``PeerLost``, or in another library's error made of it.
_LOSS = re.compile(r"^(?:\[rank\d+\]: *)?[\w.]+: rank (\d+) is lost: ")


class Escalation:
    """Signals to send to every worker that still runs, in order of time.

    Attributes:
        grace_s: The time from SIGTERM to SIGKILL.
        stopping: Whether signals are planned: the end of a worker is then no failure of its own.
    """

    def __init__(self, linger_s: float, grace_s: float) -> None:
        """Survivors of a failure may go on for ``linger_s``; after the first signal a worker may take ``grace_s``."""
        self._linger_s, self.grace_s = linger_s, grace_s
        self._steps: list[tuple[float, signal.Signals]] = []
        self._interruptions = 0
        self.stopping = False

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
    the search follows these names from the process that ended first. Only a worker that ended with an exit code of its
    own, other than 0, continues the chain: the launcher itself ends workers by signals.
    """
    by_rank = {result.rank: result for result in results}
    seen = {first_to_end.rank}
    found = first_to_end
    while True:
        lost = _lost_rank(found.last_errors)
        if lost in seen:  # ranks that lost each other, for instance by a cut cable: nothing says which failed first
            return first_to_end
        if lost is None or lost not in by_rank:
            return found
        if by_rank[lost].signal is not None or by_rank[lost].exit_code == 0:
            return found
        found = by_rank[lost]
        seen.add(lost)


def _lost_rank(last_errors: Sequence[str]) -> int | None:
    for line in reversed(last_errors):
        match = _LOSS.match(line.strip())
        if match:
            return int(match[1])
    return None
