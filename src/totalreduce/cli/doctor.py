"""``totalreduce doctor``: who takes part, how messages travel, what they cost, and what follows from that.

Inside a job (torchrun, mpirun, srun) every rank runs it and rank 0 prints; otherwise it starts local workers itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from totalreduce.cli.report import format_bytes, write_document
from totalreduce.foundation import environment
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.foundation.types import OpKind
from totalreduce.launch.emulate import EmulateOptions
from totalreduce.launch.local import run_workers
from totalreduce.schedules.select import LinkModel, Selector

__all__ = ["choices_of", "doctor", "warnings_of", "way_between"]

_TIMEOUT_S = 120.0
_SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26))
#: The kinds among whose schedules there is something to choose.
_KINDS = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER)
#: A host whose link carries less than this share of the others' slows everybody down.
_SLOW_SHARE = 0.7
_PAIRS_SHOWN_MAX = 16


def doctor(
    *,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Local workers.", show_default="2, or one per host")
    ] = None,
    transport: Annotated[str, typer.Option(help="auto, shm, tcp, mpi or torch.")] = "auto",
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measured numbers for TOTALREDUCE_LINKS."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything.")] = None,
    clear_code: Annotated[
        bool, typer.Option("--clear-code", help="Remove the compiled code of this user, and do nothing else.")
    ] = False,
    emulate_hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Emulate so many hosts (root, Linux).", rich_help_panel="Emulation"),
    ] = None,
    emulate_rate: Annotated[
        str, typer.Option(help="Rate of every link, each direction.", rich_help_panel="Emulation")
    ] = "1gbit",
) -> None:
    """Measure the links of a job, and say how it stands with it.

    Started by torchrun, mpirun or srun it examines that job, otherwise local workers of its own.

    [bold]Examples[/bold]

    totalreduce doctor -n 4
    totalreduce doctor --emulate-hosts 8 --emulate-rate 1gbit
    srun --ntasks 8 totalreduce doctor --store links.json
    torchrun --nnodes 2 --nproc-per-node 4 ... --no-python totalreduce doctor
    """
    if clear_code:
        _clear_code()
        return
    if environment.read_world().world_size > 1:
        if ranks is not None or emulate_hosts is not None:
            raise ConfigurationError("this job has several ranks already: leave out -n and --emulate-hosts")
        from totalreduce.cli.doctor_worker import examine

        document = examine(transport)
    else:
        document = _launch(ranks, transport, emulate_hosts, emulate_rate)
    if document is None:
        return
    hosts, links = document["survey"]["hosts"], LinkModel(**document["links"])
    document["choices"] = choices_of(hosts, links, shared_memory=document["shared_memory"])
    document["warnings"] = warnings_of(document)
    document["compiled_code"], document["shipped_code"] = _compiled_code(), _shipped_code()
    _print(document)
    if store is not None:
        from totalreduce.groups.probe import write_links

        write_links(store, links)
        print(f"stored; use it with TOTALREDUCE_LINKS={store}, on every host")
    write_document(json_file, document)


def _compiled_code() -> str:
    """Return a sentence about the files of compiled code."""
    from totalreduce.kernels.machine_code import code_folder, code_in_files  # whose package imports torch

    try:
        found = code_in_files()
        return f"{len(found)} files, {sum(found.values()) / 1e6:.1f} MB in {code_folder()}"
    except FileNotFoundError:
        return "none yet; the first job compiles it"
    except OSError as error:
        return f"not kept in files: {describe_error(error)}"


def _shipped_code() -> str:
    """Return a sentence about the compiled functions that the package carries."""
    from totalreduce.foundation.shipped_code import NoShippedCodeError
    from totalreduce.kernels import exchange, relay
    from totalreduce.kernels.machine_code import load_shipped

    found: dict[str, list[str]] = {}
    for function in (exchange.FUNCTION, relay.FUNCTION):
        try:
            text = f"used, for {load_shipped(function).level}"
        except NoShippedCodeError as error:
            text = f"not used: {error}"
        found.setdefault(text, []).append(function.title)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} ({', '.join(titles)})" for text, titles in found.items())


def _clear_code() -> None:
    """Remove the files of compiled code, and say so. Raises ``ConfigurationError``: the folder cannot be used."""
    from totalreduce.kernels.machine_code import remove_code

    before = _compiled_code()
    try:
        remove_code()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigurationError(f"compiled code cannot be removed: {describe_error(error)}") from error
    print(f"removed: {before}")


def _launch(ranks: int | None, transport: str, hosts: int | None, rate: str) -> dict[str, Any]:
    """Examine local workers. Raises ``ConfigurationError``, ``Exit``."""
    ranks = ranks or hosts or 2
    emulate = None
    if hosts is not None:
        if ranks % hosts:
            raise ConfigurationError(f"{ranks} ranks cannot be spread evenly over {hosts} emulated hosts")
        emulate = EmulateOptions(num_hosts=hosts, rate=rate, ranks_per_host=ranks // hosts)
    with tempfile.TemporaryDirectory(prefix="totalreduce-doctor-") as folder:
        path = Path(folder) / "document.json"
        outcome = run_workers(
            [sys.executable, "-m", "totalreduce.cli.doctor_worker", str(path), transport],
            num_workers=ranks,
            where=emulate,
            environment={"TOTALREDUCE_LOG": "warning", **environment.current()},
            output="all",
            timeout_s=_TIMEOUT_S,
        )
        if outcome.exit_code != 0 or not path.exists():
            print("totalreduce doctor: the workers could not be examined; see above", file=sys.stderr)
            raise typer.Exit(outcome.exit_code or 1)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


# ------------------------------------------------------------------------------------------------------------- findings


def choices_of(
    hosts: Sequence[int], links: LinkModel, *, shared_memory: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """By collective and size: the schedule that the selector would choose, and the seconds it expects. Pure."""
    selector = Selector(links, tuple(hosts), shared_memory=shared_memory)
    ranks = tuple(range(len(hosts)))
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in _KINDS:
        rows = found[kind.name.lower()] = []
        for size in _SIZES:
            best = selector.choose(kind, size, ranks)
            seconds = selector.estimates(kind, size, ranks)[best]
            rows.append({"size": size, "schedule": str(best), "seconds": seconds})
    return found


def way_between(document: dict[str, Any], a: int, b: int) -> str:
    """How messages travel between two ranks: ``shm``, ``tcp``, ``mpi``, ``torch``."""
    way: str = document["ranks"][a]["way"]
    if way != "routed" and document["ranks"][b]["way"] != "routed":
        return way
    hosts = document["survey"]["hosts"]
    both_share = not any(document["ranks"][rank]["no_shared_memory"] for rank in (a, b))
    return "shm" if hosts[a] == hosts[b] and both_share else "tcp"


def warnings_of(document: dict[str, Any]) -> list[str]:
    """What makes the job slower or less safe than it could be. Pure."""
    facts, survey = document["ranks"], document["survey"]
    hosts: list[int] = survey["hosts"]
    first = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    counts = Counter(hosts)
    by_text: dict[str, list[int]] = {}
    for host, rank in first.items():
        for text in _host_warnings(facts[rank], counts[host], alone=len(first) == 1):
            by_text.setdefault(text, []).append(host)
    found = [f"{_hosts_named(named, len(first))}: {text}" for text, named in by_text.items()]
    found += _slow_hosts(survey["bytes_per_s"], hosts, first, facts)
    if len(first) > 1 and not any(mine["tls"] for mine in facts):
        if not all(mine["job_key"] for mine in facts):
            found.append(
                "no TOTALREDUCE_JOB_KEY: the ranks share a key through the store, so the job is as safe as the store"
            )
        found.append("no TLS: what travels between hosts can be read and changed on the way (see docs/security.md)")
    return found


def _host_warnings(mine: dict[str, Any], num_ranks: int, *, alone: bool) -> list[str]:
    found = []
    if num_ranks > mine["cores"]:
        found.append(f"{mine['cores']} cores for {num_ranks} ranks, which take turns")
    if num_ranks > 1 and mine["no_shared_memory"]:
        found.append(f"no shared memory ({mine['no_shared_memory']}), so its ranks talk over TCP")
    if alone:
        return found
    if 0 < mine["mtu"] <= 1500:
        found.append(
            f"{mine['interface']} sends packets of {mine['mtu']} bytes, of which headers take 5 %; jumbo frames (MTU "
            "9000 on hosts and switches) also save CPU time"
        )
    if mine["congestion"].startswith("bbr"):
        found.append(
            f"congestion control {mine['congestion']!r}, which is kept where a round trip takes 5 ms or more; else "
            "cubic is used (TcpConfig.congestion chooses)"
        )
    return found


def _hosts_named(hosts: Sequence[int], of: int) -> str:
    if len(hosts) == of > 1:
        return "every host"
    return f"host {', '.join(map(str, hosts[:8]))}{' ...' if len(hosts) > 8 else ''}"


def _slow_hosts(
    measured: Sequence[float], hosts: Sequence[int], first: dict[int, int], facts: Sequence[dict[str, Any]]
) -> list[str]:
    found = {host: measured[rank] for host, rank in first.items() if measured[rank]}
    if len(found) < 2:
        return []
    usual = median(found.values())
    return [
        f"host {host} ({facts[first[host]]['name']}) receives {_rate(speed)}, the others {_rate(usual)}: "
        f"its link, or that of host {hosts[first[host] - 1]}, which sends to it, slows everybody down"
        for host, speed in found.items()
        if speed < _SLOW_SHARE * usual
    ]


# ------------------------------------------------------------------------------------------------------------- printing


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _measured(latency_s: float, bytes_per_s: float) -> str:
    return ", ".join([_time(latency_s)] * bool(latency_s) + [_rate(bytes_per_s)] * bool(bytes_per_s))


def _print(document: dict[str, Any]) -> None:
    # In a pipe rich assumes 80 columns and would cut figures off.
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts, survey = document["ranks"], document["survey"]
    hosts: list[int] = survey["hosts"]
    console.print(
        f"totalreduce {document['version']}; ranks: {len(hosts)}, hosts: {len(set(hosts))}, started by "
        f"{document['launcher']}"
    )
    table = _table("rank", "host", "address", "MTU", "cores", "to next rank", "inside the host", "between hosts")
    for rank, mine in enumerate(facts[:_PAIRS_SHOWN_MAX]):
        other = (rank + 1) % len(hosts)
        table.add_row(
            str(rank),
            f"{hosts[rank]} {mine['name']}",
            mine["address"],
            f"{mine['mtu'] or ''} {mine['interface']}",
            str(mine["cores"]),
            way_between(document, rank, other) if other != rank else "",
            _measured(survey["local_latency_s"][rank], survey["local_bytes_per_s"][rank]),
            _measured(survey["latency_s"][rank], survey["bytes_per_s"][rank]),
        )
    table.caption = "Latency to the next rank (host), bandwidth from the previous one while all of them send."
    if len(facts) > _PAIRS_SHOWN_MAX:
        table.caption += f" {len(facts) - _PAIRS_SHOWN_MAX} more ranks: --json."
    console.print(table)
    links = LinkModel(**document["links"])
    if len(set(hosts)) > 1:
        console.print(f"between hosts: {_time(links.latency_s)}, {_rate(links.bytes_per_s)} (the slowest)")
    if len(set(hosts)) < len(hosts):
        console.print(f"inside a host: {_time(links.local_latency_s)}, {_rate(links.local_bytes_per_s)} (the slowest)")
    console.print(f"measured in {_time(survey['seconds'])}; the job itself goes by: {document['in_use']['source']}")
    tls = "mutual TLS" if all(mine["tls"] for mine in facts) else "no TLS"
    key = "given by the environment" if all(mine["job_key"] for mine in facts) else "made by rank 0, through the store"
    console.print(f"safety: {tls}; job key {key}")
    console.print(f"compiled code: {document['compiled_code']}", highlight=False)
    console.print(f"compiled code of the package: {document['shipped_code']}", highlight=False)
    table = _table("chosen by size", *(format_bytes(size) for size in _SIZES))
    for kind, rows in document["choices"].items():
        table.add_row(kind, *(f"{row['schedule']} {_time(row['seconds'])}" for row in rows))
    console.print(table)
    for warning in document["warnings"]:
        console.print(f"[yellow]note:[/yellow] {warning}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
