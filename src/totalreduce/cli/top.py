"""``totalreduce top``: a running job in the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe.board import Board, find_boards
from totalreduce.observe.table import job_tables
from totalreduce.observe.view import JobView

__all__ = ["top"]


def top(
    job: Annotated[
        str | None,
        typer.Argument(help="The id of a job or its begin, or the folder of a job.", show_default="the newest one"),
    ] = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the present state, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the present state as JSON, and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two states.")] = 1.0,
) -> None:
    """Show the ranks of a running job: where a step's time goes, who is late, what was lost.

    Finds the jobs that totalreduce run has started on this host as this user. Keys: q ends, n shows the next job, the
    arrow keys scroll.

    [bold]Examples[/bold]

    totalreduce top
    totalreduce top --once
    totalreduce top run-4711 --json
    """
    board = choose_board(job)
    if as_json:
        typer.echo(json.dumps(JobView.read(board, time.time()).as_dict(), indent=2))
    elif once:
        Console().print(job_tables(JobView.read(board, time.time())))
    else:
        _follow(board, interval)


def choose_board(job: str | None) -> Board:
    """Return the folder of a job; see the argument of ``top``. Raises ``ConfigurationError``."""
    if job is not None and Path(job).is_dir():
        return Board(Path(job))
    boards = find_boards()
    if job is None:
        if not boards:
            raise ConfigurationError(
                "no job that totalreduce run has started as this user runs on this host. Of a job of another launcher, "
                "name the folder that TOTALREDUCE_LIVE names"
            )
        return boards[0]
    found = {str(board.read_job().get("job")): board for board in reversed(boards)}
    fitting = [name for name in found if name.startswith(job)]
    if len(fitting) != 1:
        running = ", ".join(found) or "none"
        raise ConfigurationError(f"{len(fitting)} running jobs have an id that begins with {job!r}. Running: {running}")
    return found[fitting[0]]


def _follow(board: Board, interval_s: float) -> None:
    """Show a job until the user ends it, with Textual if it is installed; the job's end ends it, too."""
    try:
        from totalreduce.cli.top_app import TopApp
    except ImportError:
        _follow_plainly(board, interval_s)
        return
    TopApp(board, interval_s).run()


def _follow_plainly(board: Board, interval_s: float) -> None:
    with Live(auto_refresh=False, screen=True) as screen:
        while board.path.exists():
            screen.update(job_tables(JobView.read(board, time.time())), refresh=True)
            time.sleep(interval_s)
