"""Options that all benchmarks share, and how they become a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from totalreduce.bench.launching import Setting
from totalreduce.foundation.errors import ConfigurationError

__all__ = [
    "AgainstOption",
    "HostsOption",
    "JsonOption",
    "MpirunOption",
    "RanksOption",
    "RanksPerHostOption",
    "RateOption",
    "RoundsOption",
    "TransportOption",
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
        help="Measure this too, in turns in the same run: gloo, fifo (this engine without priorities), and where "
        "it says so openmpi and mpich. Repeatable, or separated by commas.",
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", help="How often each peer is measured.")]
RanksPerHostOption = Annotated[
    int | None, typer.Option("--ranks-per-host", min=1, help="Workers in each emulated host. [dim]default: 1[/dim]")
]
TransportOption = Annotated[
    str, typer.Option("--transport", help="What Total Reduce sends through: auto, shm, tcp, torch.")
]
MpirunOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mpirun",
        help="Where an MPI's mpirun is, as mpich=/opt/mpich/bin/mpirun; the python beside it, if there is one, must "
        "have mpi4py and NumPy. [dim]default: mpirun on PATH[/dim] Repeatable.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write every figure, all samples, versions and machine to this file."),
]


def make_setting(
    ranks: int | None,
    hosts: int,
    rate: str,
    against: list[str] | tuple[str, ...] | None,
    rounds: int,
    *,
    ranks_per_host: int | None = None,
    transport: str = "auto",
    mpirun: list[str] | None = None,
) -> Setting:
    """Fill in what was not said.

    Raises:
        ConfigurationError: The values do not go together.
    """
    if ranks_per_host is not None:
        if not hosts:
            raise ConfigurationError("--ranks-per-host goes with --emulate-hosts")
        if ranks not in (None, hosts * ranks_per_host):
            raise ConfigurationError(f"{hosts} hosts with {ranks_per_host} ranks each are not --ranks {ranks}")
        ranks = hosts * ranks_per_host
    places = dict(_named_path(text) for text in mpirun or ())
    return Setting(
        ranks=ranks or hosts or 4,
        hosts=hosts,
        rate=rate,
        against=tuple(name.strip() for text in against or () for name in text.split(",")),
        rounds=rounds,
        transport=transport,
        mpirun=places,
    )


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--mpirun takes openmpi=PATH or mpich=PATH, not {text!r}")
    return name, Path(path)
