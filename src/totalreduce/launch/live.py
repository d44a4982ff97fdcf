"""The launcher's part of the live view: the folder into which ranks write their figures, and the file about the job.

Ranks on this host and in emulated hosts write into the folder themselves. The figures of ranks on other hosts come with
their output (``remote``).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from totalreduce.foundation.environment import LIVE, current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.observe.board import Board, launcher_identity, make_board
from totalreduce.observe.job import JobRecord

__all__ = ["LiveJob", "open_live_job"]

#: The file about the job is written at most so often.
_WRITE_S = 0.25


@final
class LiveJob:
    """The folder of one run; a context manager that removes it."""

    def __init__(self, warn: Callable[[str], object] = lambda _: None) -> None:
        """Make the folder. Raises ``ConfigurationError`` if that is impossible.

        ``warn`` is called with a sentence if the file about the job cannot be written, once.
        """
        self._warn: Callable[[str], object] | None = warn
        self.board: Board = make_board(f"run-{os.getpid()}")  #: The folder.
        self._record: JobRecord | None = None
        self._is_written = True
        self._write_at = 0.0

    def __enter__(self) -> LiveJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.board.remove()

    def begin(self, job_id: str, command: Sequence[str], num_ranks: int, *, is_part: bool = False) -> None:
        """Write what the job is. ``is_part``: this is one rank of a job of a launcher on another host."""
        launcher = {**launcher_identity(), "began_at": round(time.time(), 3)}
        shown = ["python" if word == sys.executable else word for word in command]
        self._record = JobRecord(job_id, shown, num_ranks, {**launcher, "is_part": is_part})
        self._is_written = False
        self.write()

    def note(self, event: Mapping[str, Any]) -> None:
        """Note an event of the job, which ``write`` writes."""
        if self._record is not None:
            self._record.note(event)
            self._is_written = False

    def write(self) -> None:
        """Write what has changed, unless that was done a moment ago. A full disk ends the live view, not the job."""
        now = time.time()
        if self._record is not None and not self._is_written and not 0 <= now - self._write_at < _WRITE_S:
            self._is_written, self._write_at = True, now
            try:
                self.board.write_job(self._record.document(now))
            except OSError as error:
                self._is_written = False  # it is tried again
                if self._warn is not None:
                    self._warn(f"the live view of this job cannot be written: {describe_error(error)}. The job goes on")
                    self._warn = None


def open_live_job(stack: ExitStack, note: Callable[[str], object]) -> tuple[LiveJob | None, str]:
    """Return the folder for the live view; or ``None``, and why the job does without: unwanted, or impossible."""
    if current().get(LIVE) == "0":
        return None, f"{LIVE}=0 forbids that"
    try:
        return stack.enter_context(LiveJob(note)), ""
    except ConfigurationError as error:
        note(f"no live view of this job: {error}")
        return None, str(error)
