"""``totalreduce run``: start a script as several workers on this host, on others, or in emulated hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from totalreduce.cli.option_groups import grouped
from totalreduce.cli.run_options import Note, RunOptions, Size
from totalreduce.foundation.checks import did_you_mean
from totalreduce.foundation.environment import current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.ending import Escalation, describe_failures
from totalreduce.launch.local import LINGER_S, HostOptions, RunResult, run_workers
from totalreduce.launch.output import Streams
from totalreduce.launch.placement import launcher_address
from totalreduce.launch.workers import default_num_threads, describe_ranks
from totalreduce.observe.reporting import open_report

__all__ = ["run"]

#: Scripts of shells, which Python would refuse with an error of the syntax.
_SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_NUMBER_OF_WORKERS = re.compile(r"-n\d*|--num-workers(=.*)?|--emulate-hosts(=.*)?")


@grouped
def run(
    script: Annotated[str, typer.Argument(help="Python script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments and options.", show_default=False)
    ] = None,
    *,
    options: RunOptions,
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
    size, job = Size.of(options), options.job
    late = _late_option(arguments or []) if size.is_default else None
    argv = _command(script, arguments or [], module=job.module, no_python=job.no_python)
    _open_closed_streams()
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(Streams())
        note = streams.note
        if late is not None:
            note(
                f"started one worker: {late!r} comes after {script} and belongs to the script. For several workers put "
                f"the option before the script: totalreduce run -n 2 {script}"
            )
        hosts = _say_what_was_chosen(size, note)
        if job.json_file is not None:
            _check_summary(job.json_file)
        recovery, events = options.losses.options(note)
        live = options.view.open(stack, note)
        result = run_workers(
            argv,
            num_workers=size.num_workers,
            num_servers=size.num_servers,
            where=hosts or size.emulate or size.node,
            output="all" if job.output == "all" else "rank0" if job.output == "rank0" else Path(job.output),
            escalation=Escalation(LINGER_S, job.grace),
            timeout_s=job.timeout,
            recovery=recovery,
            live=live,
            streams=streams,
        )
        loss = None if events is None else events.describe_loss()
        result = dataclasses.replace(result, lost=(*result.lost, *filter(None, [loss])))
        if job.json_file is not None:
            _write_summary(job.json_file, {"command": argv, **result.as_dict()}, note)
        _report(result, job.timeout, note)
    raise typer.Exit(result.exit_code)


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


def _write_summary(path: Path, document: dict[str, Any], note: Note) -> None:
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


def _late_option(arguments: list[str]) -> str | None:
    """Return an option after the script, and so the script's, that looks like the launcher's number of workers."""
    return next((word for word in arguments if _NUMBER_OF_WORKERS.fullmatch(word)), None)


def _command(script: str, arguments: list[str], *, module: bool, no_python: bool) -> list[str]:
    if module and no_python:
        raise ConfigurationError("--module and --no-python exclude each other")
    if no_python:
        if shutil.which(script) is None:
            raise ConfigurationError(f"{script!r} is no executable in the PATH: write its path, such as ./{script}")
        return [script, *arguments]
    path = Path(script)
    if module:
        if path.suffix == ".py":
            raise ConfigurationError(f"-m takes the name of a module, not of a file: totalreduce run {script}")
        return [sys.executable, "-m", script, *arguments]
    if re.fullmatch(r"python[\d.]*", path.name) and arguments:  # as one writes it for mpirun
        raise ConfigurationError(
            f"{script} is no Python script: leave it out, {arguments[0]} is started with the Python of totalreduce. To "
            f"start another one, write --no-python {script}"
        )
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


def _say_what_was_chosen(size: Size, note: Note) -> HostOptions | None:
    """Show what the user has not chosen; return the options of the hosts with the address that is shown."""
    num_here, emulate = size.num_workers // (1 if size.node is None else size.node.count), size.emulate
    ranks = describe_ranks(num_here, size.num_servers)
    if size.hosts is not None:
        address, how = launcher_address(size.hosts)
        names = ", ".join(f"{host.name}:{host.slots}" for host in size.hosts.hosts[:8])
        names += f" and {len(size.hosts.hosts) - 8} more" if len(size.hosts.hosts) > 8 else ""
        note(f"{ranks} on {names}; they reach this host at {address} ({how}; --address chooses it)")
        return dataclasses.replace(size.hosts, address=address)
    if emulate is not None:
        per_host = emulate.ranks_per_host
        each = f"{per_host} worker(s)" if not size.num_servers else f"{per_host} rank(s)"
        delay = f", {emulate.delay_ms:g} ms from host to host" if emulate.delay_ms else ""
        note(f"{emulate.num_hosts} emulated hosts, {emulate.rate} links{delay}, {each} each")
    num_ranks = num_here + size.num_servers
    if num_ranks > 1 and not current().get("OMP_NUM_THREADS"):
        threads = default_num_threads(num_ranks)
        note(f"OMP_NUM_THREADS={threads} for each of {ranks}; set it to choose otherwise")
    return None


def _report(result: RunResult, timeout_s: float | None, note: Note) -> None:
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
