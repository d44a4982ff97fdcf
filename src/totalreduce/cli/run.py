"""``totalreduce run``: start a script as several workers on this host, on others, or in emulated hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.environment import current, users_path
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.ending import describe_failures
from totalreduce.launch.hosts import Host, parse_hosts
from totalreduce.launch.live import LiveJob, open_live_job
from totalreduce.launch.local import EmulateOptions, HostOptions, RecoveryOptions, RunResult, run_workers
from totalreduce.launch.nodes import NodeOptions, node_options
from totalreduce.launch.output import Streams
from totalreduce.launch.placement import launcher_address, read_host_file, ssh_command
from totalreduce.launch.workers import default_num_threads, describe_ranks
from totalreduce.observe.job import describe_event
from totalreduce.observe.reporting import ReportWriter, open_report

__all__ = ["run"]

#: Tells the user a sentence.
_Note = Callable[[str], None]
#: Scripts of shells, which Python would refuse with an error of the syntax.
_SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_TOKEN_BYTES_MAX = 64 * 1024
_NUMBER_OF_WORKERS = re.compile(r"-n\d*|--num-workers(=.*)?|--emulate-hosts(=.*)?")


class OnLoss(enum.Enum):
    """What happens when a worker fails."""

    replace = "replace"
    shrink = "shrink"


def run(
    script: Annotated[str, typer.Argument(help="Python script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments and options.", show_default=False)
    ] = None,
    *,
    num_workers: Annotated[
        int | None, typer.Option("-n", "--num-workers", min=1, help="Number of workers.", show_default="1")
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Number of workers of this machine.", show_default="1", rich_help_panel="From torchrun"
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of machines, on each of which totalreduce run is started with --node-rank.",
            show_default="1",
            rich_help_panel="From torchrun",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Number of this machine, from 0.", show_default="0", rich_help_panel="From torchrun"),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Machine 0, and a port that is free there.", rich_help_panel="From torchrun"
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None, typer.Option(help="c10d or static; both mean the same here.", rich_help_panel="From torchrun")
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option(help="Id of the job, if several use a port.", rich_help_panel="From torchrun")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="Machine 0, as in --rdzv-endpoint.", rich_help_panel="From torchrun")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port, as in --rdzv-endpoint.", rich_help_panel="From torchrun"),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start so many further processes, which only serve a parameter server (tr.ps).",
            show_default="none",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is an executable.")] = False,
    output: Annotated[
        str, typer.Option(help="all: every line, marked with its rank. rank0: only rank 0. Else a folder.")
    ] = "all",
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds from SIGTERM to SIGKILL.")] = 5.0,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Stop everything after so many seconds.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write how every worker ended.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H", "--hosts", metavar="node0:4,node1:4", help="Hosts and their slots.", rich_help_panel="Several hosts"
        ),
    ] = None,
    hosts_file: Annotated[
        Path | None,
        typer.Option(
            help="A host in each line: node0:4 or node0 slots=4. With --on-loss, changes of the file are followed.",
            rich_help_panel="Several hosts",
        ),
    ] = None,
    ssh_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of ssh.", rich_help_panel="Several hosts")
    ] = None,
    ssh_identity: Annotated[
        Path | None, typer.Option(help="Private key for ssh.", rich_help_panel="Several hosts")
    ] = None,
    remote_shell: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Instead of ssh: COMMAND HOST 'command line' must run the command line on the host.",
            rich_help_panel="Several hosts",
        ),
    ] = None,
    remote_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python of the other hosts.",
            show_default="as here",
            rich_help_panel="Several hosts",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of this host for the others.", show_default="route to them", rich_help_panel="Several hosts"
        ),
    ] = None,
    emulate_hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Emulate so many hosts (root, Linux).", rich_help_panel="Emulation"),
    ] = None,
    emulate_rate: Annotated[
        str, typer.Option(help="Rate of every link, each direction.", rich_help_panel="Emulation")
    ] = "1gbit",
    emulate_delay_ms: Annotated[
        float,
        typer.Option(
            min=0, help="How long a packet travels between two hosts, up to about 100mbit.", rich_help_panel="Emulation"
        ),
    ] = 0.0,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(min=1, help="Workers in each host.", show_default="1", rich_help_panel="Emulation"),
    ] = None,
    on_loss: Annotated[
        OnLoss | None,
        typer.Option(
            help="If a worker fails, start it again while the others wait (replace), or go on without it (shrink). "
            "For scripts with tr.recoverable, tr.attempts, tr.replayed, a parameter server or hvd.elastic.",
            show_default="end the run",
            rich_help_panel="Recovery",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Start so many workers again at most.", show_default="10", rich_help_panel="Recovery"),
    ] = None,
    min_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Go on with so many workers at least.", show_default="1", rich_help_panel="Recovery"),
    ] = None,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With shrink: take in further workers while hosts have slots, up to so many.",
            show_default="-n",
            rich_help_panel="Recovery",
        ),
    ] = None,
    max_servers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With shrink: take in further servers while hosts have slots, up to so many.",
            show_default="--servers",
            rich_help_panel="Recovery",
        ),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Keep so many further processes in tr.init() on each host, to replace lost workers without starting "
            "Python; with --servers, as many again for lost servers.",
            show_default="0",
            rich_help_panel="Recovery",
        ),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write losses and restarts as JSON lines.", rich_help_panel="Recovery"),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard", help="Serve a page about the job on 127.0.0.1; its address is shown.", rich_help_panel="View"
        ),
    ] = False,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the page, and of /metrics.", show_default="any", rich_help_panel="View"
        ),
    ] = None,
    dashboard_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token of the page, for Prometheus and bookmarks.",
            show_default="a new one",
            rich_help_panel="View",
        ),
    ] = None,
) -> None:
    """Start a script as several workers: on this host, on others over ssh, or in emulated hosts.

    Every worker gets the variables that torchrun sets: a script runs unchanged under either.
    If one fails, the others are stopped and its exit code is passed on.
    Ctrl-C stops all of them; a second Ctrl-C kills them at once.

    [bold]Examples[/bold]

    totalreduce run -n 4 train.py --lr 0.1
    totalreduce run -n 2 -m package.train
    totalreduce run -n 4 --servers 2 train.py
    totalreduce run -n 4 --output logs train.py
    totalreduce run -n 2 --no-python ./train.sh
    totalreduce run -H node0:4,node1:4 train.py
    totalreduce run --nproc-per-node 4 --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500 train.py
    totalreduce run -n 8 --hosts-file hosts --ssh-port 2222 train.py
    totalreduce run --emulate-hosts 8 --emulate-rate 1gbit train.py
    totalreduce run -n 8 --on-loss replace --restarts 20 train.py
    totalreduce run -n 8 --on-loss replace --spares 1 train.py
    totalreduce run -n 8 --on-loss shrink --min-ranks 4 --max-ranks 12 --hosts-file hosts train.py
    totalreduce run -n 4 --max-ranks 8 --servers 2 --max-servers 4 --on-loss shrink --hosts-file hosts train.py
    totalreduce run -n 4 --dashboard train.py
    """
    num_servers, late = servers or 0, None
    node = node_options(
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=rdzv_endpoint,
        backend=rdzv_backend,
        job=rdzv_id,
        master_addr=master_addr,
        master_port=master_port,
    )
    num_workers = _per_node(num_workers, nproc_per_node, node)
    if node is not None:
        others = {"--servers": servers, "--hosts": hosts, "--hosts-file": hosts_file, "--on-loss": on_loss}
        for name, value in {**others, "--emulate-hosts": emulate_hosts}.items():
            if value is not None:
                raise ConfigurationError(
                    f"{name} does not go with --nnodes, --rdzv-endpoint and --master-addr: it needs one launcher for "
                    "the whole job. Leave these options out, and list several machines with --hosts"
                )
    listed = _listed_hosts(hosts, hosts_file)
    ssh = {"--ssh-port": ssh_port, "--ssh-identity": ssh_identity}
    remote = {**ssh, "--remote-shell": remote_shell, "--remote-python": remote_python, "--address": address}
    several = None
    if listed is not None:
        if remote_shell is not None and any(value is not None for value in ssh.values()):
            raise ConfigurationError("--ssh-port and --ssh-identity are options of ssh: put them into --remote-shell")
        shell = ssh_command(port=ssh_port, identity=ssh_identity) if remote_shell is None else shlex.split(remote_shell)
        python = remote_python or users_path(sys.executable)
        several = HostOptions(hosts=listed, file=hosts_file, shell=tuple(shell), python=python, address=address)
        num_workers = num_workers or _without_servers(sum(host.slots for host in listed), num_servers, "slots")
    elif given := [name for name, value in remote.items() if value is not None]:
        raise ConfigurationError(f"{given[0]} goes with --hosts or --hosts-file")
    emulate = None
    if emulate_hosts is not None:
        per_host = ranks_per_host or _ranks_per_host(num_workers, num_servers, emulate_hosts)
        emulate = EmulateOptions(
            num_hosts=emulate_hosts, rate=emulate_rate, ranks_per_host=per_host, delay_ms=emulate_delay_ms
        )
        num_workers = num_workers or _without_servers(emulate_hosts * per_host, num_servers, "ranks in emulated hosts")
    elif ranks_per_host is not None:
        raise ConfigurationError("--ranks-per-host goes with --emulate-hosts")
    elif num_workers is None:
        late = _late_option(arguments or [])
    num_workers = num_workers or 1
    argv = _command(script, arguments or [], module=module, no_python=no_python)
    _open_closed_streams()
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(Streams())
        note, losses = streams.note, []
        if late is not None:
            note(
                f"started one worker: {late!r} comes after {script} and belongs to the script. For several workers put "
                f"the option before the script: totalreduce run -n 2 {script}"
            )
        several = _say_what_was_chosen(
            num_workers // (1 if node is None else node.count), num_servers, emulate, several, note
        )
        if json_file is not None:
            _check_summary(json_file)
        recovery = None
        if on_loss is not None:
            file = None if events is None else open_report(events, "--events", note)
            losses = [] if file is None else [file.describe_loss]
            recovery = RecoveryOptions(
                on_loss=on_loss.value,
                restarts=10 if restarts is None else restarts,
                min_ranks=min_ranks or 1,
                max_ranks=max_ranks,
                max_servers=max_servers,
                spares=spares or 0,
                on_event=functools.partial(_show_event, file=file, note=note),
            )
        elif any(value is not None for value in (restarts, min_ranks, max_ranks, max_servers, spares, events)):
            raise ConfigurationError(
                "--restarts, --min-ranks, --max-ranks, --max-servers, --spares and --events go with --on-loss"
            )
        live, missing = open_live_job(stack, note)
        if dashboard or dashboard_port is not None or dashboard_token is not None:
            if live is None:
                raise ConfigurationError(f"--dashboard shows the figures that the ranks write, and {missing}")
            _serve_dashboard(stack, live, dashboard_port or 0, dashboard_token, note)
        result = run_workers(
            argv,
            num_workers=num_workers,
            num_servers=num_servers,
            emulate=emulate,
            hosts=several,
            node=node,
            output="all" if output == "all" else "rank0" if output == "rank0" else Path(output),
            grace_s=grace,
            timeout_s=timeout,
            recovery=recovery,
            live=live,
            streams=streams,
        )
        result = dataclasses.replace(result, lost=(*result.lost, *filter(None, (loss() for loss in losses))))
        if json_file is not None:
            _write_summary(json_file, {"command": argv, **result.as_dict()}, note)
        _report(result, timeout, note)
    raise typer.Exit(result.exit_code)


def _per_node(num_workers: int | None, per_node: str | None, node: NodeOptions | None) -> int | None:
    """Return the number of workers of all machines; ``None`` if no option says it."""
    if per_node is None:
        if node is None or node.count == 1:
            return num_workers
        if num_workers is not None:
            raise ConfigurationError(
                f"-n {num_workers} is a number of workers of all machines: write --nproc-per-node with --nnodes"
            )
        return node.count
    if num_workers is not None:
        raise ConfigurationError("-n and --nproc-per-node exclude each other")
    if not per_node.isdecimal() or not int(per_node):
        raise ConfigurationError(f"--nproc-per-node is a number of workers, at least 1, not {per_node!r}")
    return int(per_node) * (1 if node is None else node.count)


def _open_closed_streams() -> None:
    """Have the standard streams that are closed be ``/dev/null``, so that no other file gets their descriptors."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _check_summary(path: Path) -> None:
    """Refuse a path of ``--json`` that cannot be written, before the job begins."""
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"cannot write --json {path}: name a file in a folder that exists and can be written")


def _write_summary(path: Path, document: dict[str, Any], note: _Note) -> None:
    """Write the file of ``--json``. If that fails, the job has ended nevertheless, and its exit code counts."""
    try:
        writer = open_report(path, "--json", note)
    except ConfigurationError as error:
        note(str(error))
        return
    writer.write(json.dumps(document, indent=2).encode() + b"\n")
    writer.close()
    if writer.loss.num_bytes:
        with contextlib.suppress(OSError):  # a part of it would look like a document
            os.truncate(path, 0)


def _serve_dashboard(
    stack: contextlib.ExitStack, live: LiveJob, port: int, token_file: Path | None, note: _Note
) -> None:
    """Serve the page until the job has ended."""
    from totalreduce.observe.dashboard import Dashboard

    token = None
    if token_file is not None:
        try:
            token = read_named(token_file, _TOKEN_BYTES_MAX, is_trusted=True).decode("utf-8", "replace").strip()
        except OSError as error:
            raise ConfigurationError(f"the token {token_file} cannot be read: {describe_error(error)}") from error
    page = stack.enter_context(Dashboard(live.board, port=port, token=token))
    note(f"the dashboard of this job: {page.url if token is None else page.url.partition('?')[0]}")


def _show_event(event: dict[str, Any], *, file: ReportWriter | None, note: _Note) -> None:
    """Write an event of recovery to the file, and what a user should know of it to the terminal."""
    if file is not None:
        file.write(json.dumps(event).encode() + b"\n")
    for sentence in describe_event(event):
        note(sentence)


def _late_option(arguments: list[str]) -> str | None:
    """Return an option after the script, and so the script's, that looks like the launcher's number of workers."""
    return next((word for word in arguments if _NUMBER_OF_WORKERS.fullmatch(word)), None)


def _without_servers(num_ranks: int, num_servers: int, what: str) -> int:
    """Return how many of the ranks are workers."""
    if num_ranks <= num_servers:
        raise ConfigurationError(f"{num_servers} servers leave none of {num_ranks} {what} for a worker")
    return num_ranks - num_servers


def _ranks_per_host(num_workers: int | None, num_servers: int, num_hosts: int) -> int:
    if num_workers is None:
        return 1
    if (num_workers + num_servers) % num_hosts:
        raise ConfigurationError(
            f"{describe_ranks(num_workers, num_servers)} cannot be spread evenly over {num_hosts} emulated hosts"
        )
    return (num_workers + num_servers) // num_hosts


def _command(script: str, arguments: list[str], *, module: bool, no_python: bool) -> list[str]:
    if module and no_python:
        raise ConfigurationError("--module and --no-python exclude each other")
    if no_python:
        if shutil.which(script) is None:
            raise ConfigurationError(f"no executable {script!r}")
        return [script, *arguments]
    path = Path(script)
    if module:
        if path.suffix == ".py":
            raise ConfigurationError(f"-m takes the name of a module, not of a file: totalreduce run {script}")
        return [sys.executable, "-m", script, *arguments]
    if not path.exists():
        nearest = ""
        with contextlib.suppress(OSError):
            nearest = did_you_mean(path.name, (each.name for each in path.parent.iterdir()))
        raise ConfigurationError(f"no such file: {script}{nearest}. A module needs -m, an executable --no-python.")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigurationError(f"{script} is a folder without a __main__.py: name the script in it")
    if path.suffix in _SHELL_SUFFIXES:
        raise ConfigurationError(f"{script} is no Python script: start it with --no-python, as ./{path.name}")
    return [sys.executable, script, *arguments]


def _listed_hosts(hosts: str | None, hosts_file: Path | None) -> tuple[Host, ...] | None:
    if hosts is not None and hosts_file is not None:
        raise ConfigurationError("--hosts and --hosts-file exclude each other")
    if hosts is not None:
        return parse_hosts(hosts)
    return None if hosts_file is None else read_host_file(hosts_file)


def _say_what_was_chosen(
    num_workers: int,
    num_servers: int,
    emulate: EmulateOptions | None,
    several: HostOptions | None,
    note: _Note,
) -> HostOptions | None:
    """Show what the user has not chosen; return the options of the hosts with the address that is shown."""
    ranks = describe_ranks(num_workers, num_servers)
    if several is not None:
        address, how = launcher_address(several)
        names = ", ".join(f"{host.name}:{host.slots}" for host in several.hosts[:8])
        names += f" and {len(several.hosts) - 8} more" if len(several.hosts) > 8 else ""
        note(f"{ranks} on {names}; they reach this host at {address} ({how}; --address chooses it)")
        return dataclasses.replace(several, address=address)
    if emulate is not None:
        per_host = emulate.ranks_per_host
        each = f"{per_host} worker(s)" if not num_servers else f"{per_host} rank(s)"
        delay = f", {emulate.delay_ms:g} ms from host to host" if emulate.delay_ms else ""
        note(f"{emulate.num_hosts} emulated hosts, {emulate.rate} links{delay}, {each} each")
    num_ranks = num_workers + num_servers
    if num_ranks > 1 and not current().get("OMP_NUM_THREADS"):
        threads = default_num_threads(num_ranks)
        note(f"OMP_NUM_THREADS={threads} for each of {ranks}; set it to choose otherwise")
    return None


def _report(result: RunResult, timeout_s: float | None, note: _Note) -> None:
    failure = result.first_failure
    if failure is not None:
        for line in describe_failures(failure, result.workers, os.getcwd()):
            note(line)
    if result.timed_out:
        note(f"stopped after --timeout {timeout_s:g} s")
    if result.interrupted_by:
        note(f"stopped by {result.interrupted_by}")
    for sentence in result.lost:
        note(sentence)
