"""A command: ``totalreduce schedules`` lists the schedules, with their estimated times."""

import typer

from totalreduce.foundation.types import OpKind
from totalreduce.schedules.select import LinkModel, candidates


def show(hosts: int = 4, size: int = 1 << 20) -> None:
    """Print the estimated milliseconds of an allreduce of SIZE bytes on HOSTS hosts, by schedule."""
    estimates = candidates(OpKind.ALLREDUCE, size, range(hosts), LinkModel())
    for name, seconds in sorted(estimates.items(), key=lambda item: item[1]):
        typer.echo(f"{name:20} {1000 * seconds:8.2f} ms")
