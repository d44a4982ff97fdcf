"""Which worker failed first.

The order in which processes end does not say it: a rank that ends because of another rank's exception may be gone
sooner than that rank, which still has threads to join. But the last error of such a rank names the lost rank. So the
report follows these names from the process that ended first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from totalreduce.launch.workers import WorkerResult

__all__ = ["find_first_failure"]

#: The last line of a traceback that ends in ``PeerLost``, or in what another library makes of it.
_LOSS = re.compile(r"^(?:\[rank\d+\]: *)?[\w.]+: rank (\d+) is lost: ")


def find_first_failure(first_to_end: WorkerResult, results: Sequence[WorkerResult]) -> WorkerResult:
    """The worker whose failure made the others fail.

    Args:
        first_to_end: The worker whose process ended first with a failure.
        results: All workers, by rank.

    Returns:
        The worker at the end of the chain of lost ranks. Only a worker that ended with an exit code of its own, other
        than 0, continues the chain: the launcher itself ends workers by signals.
    """
    seen = {first_to_end.rank}
    found = first_to_end
    while True:
        lost = _lost_rank(found.last_errors)
        if lost in seen:  # ranks that lost each other, for instance by a cut cable: nothing says which failed first
            return first_to_end
        if lost is None or lost >= len(results):
            return found
        if results[lost].signal is not None or results[lost].exit_code == 0:
            return found
        found = results[lost]
        seen.add(lost)


def _lost_rank(last_errors: Sequence[str]) -> int | None:
    for line in reversed(last_errors):
        match = _LOSS.match(line.strip())
        if match:
            return int(match[1])
    return None
