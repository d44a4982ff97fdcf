"""The application of ``totalreduce top``, with Textual: the view of a job, which keys scroll."""

from __future__ import annotations

import time
from typing import ClassVar, final

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from totalreduce.observe.board import Board, find_boards
from totalreduce.observe.table import job_tables
from totalreduce.observe.view import JobView

__all__ = ["TopApp"]


@final
class TopApp(App[None]):
    """Shows a job and reads its folder again from time to time."""

    CSS = "#job { padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "end"),
        Binding("n", "next_job", "next job"),
        Binding("p", "pause", "pause"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, board: Board, interval_s: float) -> None:
        """``interval_s``: the time between two readings of the folder."""
        super().__init__()
        self.board = board  #: The folder of the job that is shown.
        self._interval_s, self._is_paused = interval_s, False

    def compose(self) -> ComposeResult:
        """Yield the parts of the screen."""
        yield VerticalScroll(Static(id="job"))
        yield Footer()

    def on_mount(self) -> None:
        """Begin to show the job."""
        self._show()
        self.set_interval(self._interval_s, self._show)

    def action_next_job(self) -> None:
        """Show the next one of the running jobs."""
        paths = [board.path for board in find_boards()]
        if paths:
            at = paths.index(self.board.path) if self.board.path in paths else -1
            self.board, self._is_paused = Board(paths[(at + 1) % len(paths)]), False
            self._show()

    def action_pause(self) -> None:
        """Leave the present state on the screen, or go on."""
        self._is_paused = not self._is_paused

    def _show(self) -> None:
        if self._is_paused:
            return
        if not self.board.path.exists():
            self.exit(message="The job is over.")
            return
        self.query_one("#job", Static).update(job_tables(JobView.read(self.board, time.time())))
