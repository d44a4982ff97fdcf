"""A live line for training: loss, tokens per second, bytes moved, share of communication hidden.

In a terminal it is a bar; elsewhere (a file, a pipe, CI) it is a plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from totalreduce.foundation.os_errors import describe_error

__all__ = ["TrainingProgress", "TrainingReport"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """The state of a training."""

    step: int  #: Finished steps
    loss: float  #: Loss of the latest step whose loss is known
    tokens_per_s: float  #: Of all ranks together
    sent_bytes: int | None = None  #: Bytes that one rank has sent so far; ``None`` if nothing is communicated
    #: Share of the communication during which no caller was blocked, 0 to 1; ``None`` if not known.
    hidden_share: float | None = None

    def describe(self) -> str:
        """Return all but the step, as one phrase."""
        parts = [f"loss {self.loss:.3f}", f"{self.tokens_per_s:,.0f} tokens/s"]
        if self.sent_bytes is not None:
            parts.append(f"{decimal(self.sent_bytes)} sent per rank")
        if self.hidden_share is not None:
            parts.append(f"{self.hidden_share:.0%} hidden")
        return " · ".join(parts)


class _BarWithState(Progress):
    """The bar, and below it the text that would not fit beside it on 80 columns."""

    state = "starting"

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text("  " + self.state, style="cyan")


class TrainingProgress:
    """Shows reports; a context manager. Calls may come from any one thread.

    If the console cannot be written, a warning says so, and nothing is shown any more; the training goes on.

    Args:
        label: Name of the training, a few words.
        num_steps: Number of all steps.
        console: The console to write to.
        interval_s: Time between two plain lines if the console is no terminal.
        clock: Returns seconds, for ``interval_s``.

    Example:
        >>> with TrainingProgress("demo", 2, Console(force_terminal=False)) as progress:
        ...     progress.update(TrainingReport(step=2, loss=1.5, tokens_per_s=1e4))
        demo: step 2/2 · loss 1.500 · 10,000 tokens/s
    """

    def __init__(
        self,
        label: str,
        num_steps: int,
        console: Console,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._num_steps, self._console = label, num_steps, console
        self._interval_s, self._clock = interval_s, clock
        self._next_line = clock()
        self._bar: _BarWithState | None = None
        self._task = TaskID(0)
        self._is_over = False  #: Whether the console has failed.

    def __enter__(self) -> Self:
        """Draw the empty bar."""
        self._show(self._begin)
        return self

    def _begin(self) -> None:
        if self._console.is_terminal:
            self._bar = _BarWithState(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=self._console,
                refresh_per_second=5,  # the processes that train need the cores
            )
            self._task = self._bar.add_task(self._label, total=self._num_steps)
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen and restore the cursor."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # if the console has failed before, that was said
                self._bar.stop()

    def update(self, report: TrainingReport) -> None:
        """Show a newer state."""
        self._show(lambda: self._update(report))

    def _show(self, show: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            show()
        except (OSError, ValueError) as error:  # the second one: the stream is closed
            self._is_over = True
            _log.warning("the progress of %s is not shown any more: %s", self._label, describe_error(error))

    def _update(self, report: TrainingReport) -> None:
        if self._bar is not None:
            self._bar.state = report.describe()
            self._bar.update(self._task, completed=report.step)
        elif report.step >= self._num_steps or self._clock() >= self._next_line:
            self._next_line = self._clock() + self._interval_s
            line = f"{self._label}: step {report.step}/{self._num_steps} · {report.describe()}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
