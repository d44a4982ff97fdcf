"""The options of ``totalreduce run`` by groups, and what each group means for the launcher."""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from totalreduce.foundation.environment import users_path
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import read_named
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.hosts import parse_hosts
from totalreduce.launch.live import LiveJob, open_live_job
from totalreduce.launch.local import EmulateOptions, HostOptions, RecoveryOptions
from totalreduce.launch.nodes import NodeOptions, node_options
from totalreduce.launch.placement import read_host_file, ssh_command
from totalreduce.launch.workers import describe_ranks
from totalreduce.observe.job import describe_event
from totalreduce.observe.reporting import ReportWriter, open_report

__all__ = ["Note", "RunOptions", "Size"]

Note = Callable[[str], None]
"""Tells the user a sentence."""

_TOKEN_BYTES_MAX = 64 * 1024


class OnLoss(enum.Enum):
    """What happens when a worker fails."""

    replace = "replace"
    shrink = "shrink"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOptions:
    """The machines of the job, on each of which a launcher is started. The options are torchrun's."""

    PANEL: ClassVar[str] = "From torchrun"

    nproc_per_node: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of workers of this machine.", show_default="1"),
    ] = None
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of machines, on each of which totalreduce run is started with --node-rank.",
            show_default="1",
        ),
    ] = None
    node_rank: Annotated[
        int | None,
        typer.Option(help="Number of this machine, from 0.", show_default="0"),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Machine 0, and a port that is free there."),
    ] = None
    rdzv_backend: Annotated[str | None, typer.Option(help="c10d or static; both mean the same here.")] = None
    rdzv_id: Annotated[str | None, typer.Option(help="Id of the job, if several use a port.")] = None
    master_addr: Annotated[str | None, typer.Option(help="Machine 0, as in --rdzv-endpoint.")] = None
    master_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port, as in --rdzv-endpoint."),
    ] = None

    def node(self) -> NodeOptions | None:
        """Return the part of this launcher in the job; ``None``: it is the only launcher."""
        return node_options(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            endpoint=self.rdzv_endpoint,
            backend=self.rdzv_backend,
            job=self.rdzv_id,
            master_addr=self.master_addr,
            master_port=self.master_port,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """How the script is started and ended, and where its output goes."""

    servers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start so many further processes, which only serve a parameter server (tr.ps).",
            show_default="none",
        ),
    ] = None
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is an executable.")] = False
    output: Annotated[
        str, typer.Option(help="all: every line, marked with its rank. rank0: only rank 0. Else a folder.")
    ] = "all"
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds from SIGTERM to SIGKILL.")] = 5.0
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Stop everything after so many seconds.")] = None
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write how every worker ended.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralHostsOptions:
    """The hosts on which workers run, and how they are reached."""

    PANEL: ClassVar[str] = "Several hosts"

    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", metavar="node0:4,node1:4", help="Hosts and their slots."),
    ] = None
    hosts_file: Annotated[
        Path | None,
        typer.Option(
            help="A host in each line: node0:4 or node0 slots=4. With --on-loss, changes of the file are followed.",
        ),
    ] = None
    ssh_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of ssh.")] = None
    ssh_identity: Annotated[Path | None, typer.Option(help="Private key for ssh.")] = None
    remote_shell: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Instead of ssh: COMMAND HOST 'command line' must run the command line on the host.",
        ),
    ] = None
    remote_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python of the other hosts.",
            show_default="as here",
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(help="Address of this host for the others.", show_default="route to them"),
    ] = None

    def options(self) -> HostOptions | None:
        """Return the hosts; ``None``: all workers run on this one."""
        ssh = {"--ssh-port": self.ssh_port, "--ssh-identity": self.ssh_identity}
        if self.hosts is not None and self.hosts_file is not None:
            raise ConfigurationError("--hosts and --hosts-file exclude each other")
        if self.hosts is not None:
            listed = parse_hosts(self.hosts)
        elif self.hosts_file is not None:
            listed = read_host_file(self.hosts_file)
        else:
            remote = {"--remote-shell": self.remote_shell, "--remote-python": self.remote_python}
            given = [name for name, value in {**ssh, **remote, "--address": self.address}.items() if value is not None]
            if given:
                raise ConfigurationError(f"{given[0]} goes with --hosts or --hosts-file")
            return None
        if self.remote_shell is None:
            shell = ssh_command(port=self.ssh_port, identity=self.ssh_identity)
        elif any(value is not None for value in ssh.values()):
            raise ConfigurationError("--ssh-port and --ssh-identity are options of ssh: put them into --remote-shell")
        else:
            shell = tuple(shlex.split(self.remote_shell))
        python = self.remote_python or users_path(sys.executable)
        return HostOptions(hosts=listed, file=self.hosts_file, shell=shell, python=python, address=self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationOptions:
    """Emulated hosts on this machine, in which the workers run."""

    PANEL: ClassVar[str] = "Emulation"

    emulate_hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Emulate so many hosts (root, Linux)."),
    ] = None
    emulate_rate: Annotated[str, typer.Option(help="Rate of every link, each direction.")] = "1gbit"
    emulate_delay_ms: Annotated[
        float,
        typer.Option(min=0, help="How long a packet travels between two hosts, up to about 100mbit."),
    ] = 0.0
    ranks_per_host: Annotated[
        int | None,
        typer.Option(min=1, help="Workers in each host.", show_default="1"),
    ] = None

    def options(self, num_workers: int | None, num_servers: int) -> EmulateOptions | None:
        """Return the emulated hosts for so many workers, if their number is known; ``None``: no host is emulated."""
        if self.emulate_hosts is None:
            if self.ranks_per_host is not None:
                raise ConfigurationError("--ranks-per-host goes with --emulate-hosts")
            return None
        return EmulateOptions(
            num_hosts=self.emulate_hosts,
            rate=self.emulate_rate,
            ranks_per_host=self.ranks_per_host or _ranks_per_host(num_workers, num_servers, self.emulate_hosts),
            delay_ms=self.emulate_delay_ms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """What happens when a worker fails."""

    PANEL: ClassVar[str] = "Recovery"

    on_loss: Annotated[
        OnLoss | None,
        typer.Option(
            help="If a worker fails, start it again while the others wait (replace), or go on without it (shrink). "
            "For scripts with tr.recoverable, tr.attempts, tr.replayed, a parameter server or hvd.elastic.",
            show_default="end the run",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Start so many workers again at most.", show_default="10"),
    ] = None
    min_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Go on with so many workers at least.", show_default="1"),
    ] = None
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With shrink: take in further workers while hosts have slots, up to so many.",
            show_default="-n",
        ),
    ] = None
    max_servers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With shrink: take in further servers while hosts have slots, up to so many.",
            show_default="--servers",
        ),
    ] = None
    spares: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Keep so many further processes in tr.init() on each host, to replace lost workers without starting "
            "Python; with --servers, as many again for lost servers.",
            show_default="0",
        ),
    ] = None
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write losses and restarts as JSON lines."),
    ] = None

    def options(self, note: Note) -> tuple[RecoveryOptions | None, ReportWriter | None]:
        """Return what the launcher does about failures, and the file of events; ``None``: a failure ends the run."""
        if self.on_loss is None:
            limits = (self.restarts, self.min_ranks, self.max_ranks, self.max_servers, self.spares, self.events)
            if any(value is not None for value in limits):
                raise ConfigurationError(
                    "--restarts, --min-ranks, --max-ranks, --max-servers, --spares and --events go with --on-loss"
                )
            return None, None
        file = None if self.events is None else open_report(self.events, "--events", note)
        recovery = RecoveryOptions(
            on_loss=self.on_loss.value,
            restarts=10 if self.restarts is None else self.restarts,
            min_ranks=self.min_ranks or 1,
            max_ranks=self.max_ranks,
            max_servers=self.max_servers,
            spares=self.spares or 0,
            on_event=functools.partial(_show_event, file=file, note=note),
        )
        return recovery, file


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOptions:
    """The page about the running job."""

    PANEL: ClassVar[str] = "View"

    dashboard: Annotated[
        bool,
        typer.Option("--dashboard", help="Serve a page about the job on 127.0.0.1; its address is shown."),
    ] = False
    dashboard_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the page, and of /metrics.", show_default="any"),
    ] = None
    dashboard_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token of the page, for Prometheus and bookmarks.",
            show_default="a new one",
        ),
    ] = None

    def open(self, stack: contextlib.ExitStack, note: Note) -> LiveJob | None:
        """Return the live view of the job, if it has one. A page that is wanted is served until the job has ended."""
        live, missing = open_live_job(stack, note)
        if self.dashboard or self.dashboard_port is not None or self.dashboard_token is not None:
            if live is None:
                raise ConfigurationError(f"--dashboard shows the figures that the ranks write, and {missing}")
            self._serve(stack, live, note)
        return live

    def _serve(self, stack: contextlib.ExitStack, live: LiveJob, note: Note) -> None:
        from totalreduce.observe.dashboard import Dashboard

        token = None
        if self.dashboard_token is not None:
            try:
                token = (
                    read_named(self.dashboard_token, _TOKEN_BYTES_MAX, is_trusted=True)
                    .decode("utf-8", "replace")
                    .strip()
                )
            except OSError as error:
                raise ConfigurationError(
                    f"the token {self.dashboard_token} cannot be read: {describe_error(error)}"
                ) from error
        page = stack.enter_context(Dashboard(live.board, port=self.dashboard_port or 0, token=token))
        note(f"the dashboard of this job: {page.url if token is None else page.url.partition('?')[0]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """All options of the command, in the order of its help."""

    num_workers: Annotated[
        int | None, typer.Option("-n", "--num-workers", min=1, help="Number of workers.", show_default="1")
    ] = None
    machines: MachineOptions
    job: JobOptions
    several: SeveralHostsOptions
    emulation: EmulationOptions
    losses: LossOptions
    view: ViewOptions

    def check_machines(self) -> None:
        """Refuse options that need one launcher for the whole job, if several machines have a launcher each."""
        given = {
            "--servers": self.job.servers,
            "--hosts": self.several.hosts,
            "--hosts-file": self.several.hosts_file,
            "--on-loss": self.losses.on_loss,
            "--emulate-hosts": self.emulation.emulate_hosts,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(
                    f"{name} does not go with --nnodes, --rdzv-endpoint and --master-addr: it needs one launcher for "
                    "the whole job. Leave these options out, and list several machines with --hosts"
                )


@dataclass(frozen=True, slots=True)
class Size:
    """How many ranks the job has, and where they run."""

    num_workers: int
    num_servers: int  #: The number of ranks that only serve a parameter server.
    is_default: bool  #: Whether no option says how many workers there are.
    node: NodeOptions | None  #: The part of this launcher in a job of several launchers.
    hosts: HostOptions | None  #: The hosts on which workers run.
    emulate: EmulateOptions | None  #: The emulated hosts.

    @classmethod
    def of(cls, options: RunOptions) -> Size:
        """Return the size that the options say. Raises ``ConfigurationError`` if they contradict each other."""
        num_servers, node = options.job.servers or 0, options.machines.node()
        num_workers = _per_node(options.num_workers, options.machines.nproc_per_node, node)
        if node is not None:
            options.check_machines()
        hosts = options.several.options()
        if hosts is not None and num_workers is None:
            num_workers = _without_servers(sum(host.slots for host in hosts.hosts), num_servers, "slots")
        emulate = options.emulation.options(num_workers, num_servers)
        if hosts is not None and emulate is not None:
            raise ConfigurationError("a run has emulated hosts (--emulate-hosts) or a list of hosts, and not both")
        if emulate is not None and num_workers is None:
            num_ranks = emulate.num_hosts * emulate.ranks_per_host
            num_workers = _without_servers(num_ranks, num_servers, "ranks in emulated hosts")
        return cls(num_workers or 1, num_servers, num_workers is None, node, hosts, emulate)


def _per_node(num_workers: int | None, per_node: str | None, node: NodeOptions | None) -> int | None:
    """Return the number of workers of all machines; ``None`` if no option says it."""
    if per_node is None:
        if node is None or node.count == 1:
            return num_workers
        if num_workers is not None:
            raise ConfigurationError(
                f"-n {num_workers} counts the workers of all machines: with --nnodes, write --nproc-per-node instead"
            )
        return node.count
    if num_workers is not None:
        raise ConfigurationError("-n and --nproc-per-node exclude each other")
    if not per_node.isdecimal() or not int(per_node):
        raise ConfigurationError(f"--nproc-per-node is a number of workers, at least 1, not {per_node!r}")
    return int(per_node) * (1 if node is None else node.count)


def _show_event(event: dict[str, Any], *, file: ReportWriter | None, note: Note) -> None:
    """Write an event of recovery to the file, and what a user should know of it to the terminal."""
    if file is not None:
        file.write(json.dumps(event).encode() + b"\n")
    for sentence in describe_event(event):
        note(sentence)


def _without_servers(num_ranks: int, num_servers: int, what: str) -> int:
    """Return how many of the ranks are workers."""
    if num_ranks <= num_servers:
        raise ConfigurationError(f"{num_servers} servers take all of {num_ranks} {what}, and a job needs a worker")
    return num_ranks - num_servers


def _ranks_per_host(num_workers: int | None, num_servers: int, num_hosts: int) -> int:
    if num_workers is None:
        return 1
    if (num_workers + num_servers) % num_hosts:
        raise ConfigurationError(
            f"{describe_ranks(num_workers, num_servers)} cannot be spread evenly over {num_hosts} emulated hosts"
        )
    return (num_workers + num_servers) // num_hosts
