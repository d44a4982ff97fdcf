"""Options that all benchmarks share, and how they become a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from totalreduce.cli.bench.launching import Setting

__all__ = [
    "AgainstOption",
    "HostsOption",
    "JsonOption",
    "RanksOption",
    "RateOption",
    "RoundsOption",
    "make_setting",
]

RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", "-n", help="Worker processes. [dim]default: 4, or one per emulated host[/dim]"),
]
HostsOption = Annotated[
    int,
    typer.Option("--emulate-hosts", help="Put the workers into this many network namespaces (root, Linux). 0: none."),
]
RateOption = Annotated[str, typer.Option("--emulate-rate", help="Rate of each emulated host's link, as 1gbit.")]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        help="Measure this too, in turns in the same run: gloo, or fifo (this engine without priorities). Repeatable.",
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", help="How often each peer is measured.")]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write every figure, all samples, versions and machine to this file."),
]


def make_setting(
    ranks: int | None, hosts: int, rate: str, against: list[str] | tuple[str, ...] | None, rounds: int
) -> Setting:
    """Fill in what was not said.

    Raises:
        ConfigurationError: The values do not go together.
    """
    return Setting(ranks=ranks or hosts or 4, hosts=hosts, rate=rate, against=tuple(against or ()), rounds=rounds)
