"""Start the workers of a run, watch them, and clean up after them.

One thread waits for output, ends of workers and signals at once:

- A worker that fails ends the run: the others may print their own error, then get SIGTERM, then SIGKILL. With
  ``RecoveryOptions`` it is started again, or the others go on without it (``losses``).
- SIGINT, SIGTERM and SIGHUP are passed on, and followed by harder signals. A second one kills at once.
- SIGUSR1 and SIGUSR2 are passed on, and the run goes on. SIGTSTP (Ctrl-Z) stops the workers, too, until SIGCONT.
- Signals go to the workers' programs alone, and not to the processes that these have started (``programs``).
- Processes that workers left running in their process groups are killed. A pipe that one holds open is left.
- If this process is killed itself, the guard kills the workers; those on other hosts end with their connection.
- With a file of hosts, workers end and begin as the file changes (``hosts``, ``placement``).
- Ranks that only serve a parameter server end by themselves after the workers, or are ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from totalreduce.foundation import checks
from totalreduce.foundation.environment import LIVE, current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulatedHost, EmulatedNetwork, EmulateOptions
from totalreduce.launch.ending import Escalation
from totalreduce.launch.guard import Guard
from totalreduce.launch.hosts import Host, HostPool
from totalreduce.launch.keeper_process import KeeperProcess
from totalreduce.launch.live import LiveJob
from totalreduce.launch.losses import EndOnLoss, RestartOnLoss
from totalreduce.launch.nodes import NodeOptions
from totalreduce.launch.output import Output, Streams, open_sink
from totalreduce.launch.placement import HostOptions, HostsFile, Placement, is_this_host, launcher_address
from totalreduce.launch.processes import Processes
from totalreduce.launch.restarts import RecoveryOptions, Restarts, Seats, worker_variables
from totalreduce.launch.supervisor import Supervisor, signals_to
from totalreduce.launch.workers import (
    RunResult,
    WorkerResult,
    common_environment,
    describe_ranks,
    free_port,
)

__all__ = ["EmulateOptions", "HostOptions", "RecoveryOptions", "RunResult", "Where", "WorkerResult", "run_workers"]

#: Longer than it takes a survivor to notice a frozen peer (2 s) and to print its error.
LINGER_S = 3.0
#: The time that a worker has after SIGTERM.
GRACE_S = 5.0
#: The hosts on which the ranks of a run are.
Where = HostOptions | EmulateOptions | NodeOptions


def run_workers(
    argv: Sequence[str],
    *,
    num_workers: int,
    num_servers: int = 0,
    where: Where | None = None,
    environment: Mapping[str, str] | None = None,
    output: Output = "all",
    escalation: Escalation | None = None,
    timeout_s: float | None = None,
    recovery: RecoveryOptions | None = None,
    live: LiveJob | None = None,
    streams: Streams | None = None,
) -> RunResult:
    """Run ``num_workers`` copies of a command as the ranks of one job, and return when all have ended.

    Each gets torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ...), the job's id and,
    unless the environment has one, a key made for this job. Signals are handled only if the main thread calls this.
    The failure of a worker is in the result and raises nothing.

    Args:
        argv: The command, equal for all ranks.
        num_workers: World size, at least 1. With ``recovery``: the number of ranks with which the job begins.
        num_servers: The number of further ranks, which run no command and serve a parameter server (``tr.ps``). They
            get slots of hosts after the workers, and are in the result as ranks from ``num_workers`` on.
        where: The hosts on which the ranks run; by default all run on this one. ``HostOptions``: a list, whose first
            hosts are filled first. ``EmulateOptions``: emulated hosts; there must be hosts times ranks per host ranks.
            ``NodeOptions``: this launcher starts the ranks of one machine, and the launchers of other machines start
            the others; ``num_workers`` counts all of them, equally many on each machine. The result has the ranks of
            this one.
        environment: The environment that the workers' environments extend; by default this process's.
        output: Where the workers' output goes; see :data:`totalreduce.launch.output.Output`.
        escalation: By which signals, and when, workers are ended; by default SIGTERM comes ``LINGER_S`` after the first
            failure, and SIGKILL ``GRACE_S`` after it.
        timeout_s: Time after which the run is stopped.
        recovery: What happens when a worker fails; by default the run ends.
        live: The folder for the live view; by default the ranks write no figures.
        streams: This process's standard output and standard error, if the caller writes to them meanwhile, too.

    Raises:
        ConfigurationError: The command cannot be started, the emulated network cannot be made, or the hosts have too
            few slots.
    """
    checks.integer("the number of servers", num_servers, minimum=0)
    num_ranks = num_workers + num_servers
    seats = Seats(num_workers, num_servers, num_workers, num_servers)
    if recovery is not None:
        recovery.check(num_workers, num_servers)
        if live is not None:
            recovery = dataclasses.replace(recovery, on_event=_to_all(recovery.on_event, live.note))
        seats = recovery.seats(num_workers, num_servers)
    hosts = where if isinstance(where, HostOptions) else None
    emulate = where if isinstance(where, EmulateOptions) else None
    node = where if isinstance(where, NodeOptions) else None
    pool = _pool(seats, where)
    job_id = f"run-{os.getpid()}-{secrets.token_hex(8)}" if node is None else node.job
    base = current() if environment is None else environment
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        address = master = "127.0.0.1"
        prefix: list[str] = []
        emulated: dict[str, EmulatedHost] = {}
        num_local, own_seats = num_ranks, seats.first
        if hosts is not None:
            address, _ = launcher_address(hosts)
            first = hosts.hosts[0]
            master = address if is_this_host(first.name) else first.address
            num_local = max([1, *(host.slots for host in hosts.hosts if is_this_host(host.name))])
        if emulate is not None:
            network = EmulatedNetwork(
                emulate.num_hosts, emulate.rate, queue_ms=emulate.queue_ms, delay_ms=emulate.delay_ms
            )
            emulated = dict(zip(pool.usable, stack.enter_context(network).hosts, strict=True))
            address, prefix = network.hosts[0].address, network.hosts[0].command([])
            master = address
            # gloo, NCCL and c10d look up the host's name, which has no address inside a namespace.
            interface = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
            # Every emulated host sees all the cores.
            compute = {} if len(os.sched_getaffinity(0)) >= 2 * num_ranks else {"TOTALREDUCE_COMPUTE": "inline"}
            base = {"TORCH_CPP_LOG_LEVEL": "ERROR", **interface, **compute, **base}
        common = common_environment(
            base, seats.workers, master_address=master, job_id=job_id, num_servers=seats.servers
        )
        if node is not None:
            num_local, own_seats = num_workers // node.count, list(node.seats(num_workers))
            common |= {"MASTER_ADDR": node.address, "MASTER_PORT": str(node.port)}
            if node.count > 1 and "TOTALREDUCE_JOB_KEY" not in base:
                # The launchers of the other machines do not know it. Rank 0 makes one for all.
                common.pop("TOTALREDUCE_JOB_KEY", None)
        if live is not None:
            common[LIVE] = str(live.board.path)
            live.begin(job_id, argv, num_ranks)
        guard.watch_job(job_id)
        keeper = None
        if recovery is not None:
            port = free_port()
            keeper = KeeperProcess(prefix, address, port, seats.count, common)
            stack.callback(keeper.close)
            # Torch logs a trace whenever the store is lost, which this library reports by itself.
            common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            common |= worker_variables(recovery, seats, address, port)
        placement = Placement(
            pool, argv, common, num_local=num_local, serving=seats.serving, options=hosts, emulated=emulated
        )
        sink = open_sink(output, seats.count, streams or stack.enter_context(Streams()))
        processes, escalation = Processes(placement, sink), escalation or Escalation(LINGER_S, GRACE_S)
        policy = EndOnLoss(processes, live)
        if recovery is not None and keeper is not None:
            file = None if hosts is None or hosts.file is None else HostsFile(hosts.file, hosts.hosts)
            policy = RestartOnLoss(processes, escalation, recovery, Restarts(recovery, seats), keeper, file)
        supervisor = Supervisor(processes, policy, escalation, live)
        with signals_to(supervisor):
            try:
                supervisor.start(own_seats)
                supervisor.watch(timeout_s)
            finally:
                processes.finish()
        guard.forget_job(job_id)
        return supervisor.result()


def _to_all(*callbacks: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return a function that calls all callbacks with an event."""

    def call(event: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(event)

    return call


def _pool(seats: Seats, where: Where | None) -> HostPool:
    """Return the hosts of a run, which have a slot for every worker and every server with which it begins."""
    num_workers, num_servers = seats.first_workers, seats.first_servers
    if num_workers < 1:
        raise ConfigurationError(f"the number of workers must be at least 1, not {num_workers}")
    num_ranks = num_workers + num_servers
    ranks = describe_ranks(num_workers, num_servers)
    if isinstance(where, NodeOptions):
        pool = HostPool([Host(name, num_workers // where.count) for name in where.names])
        for seat in range(num_workers):  # those of the other machines, too
            pool.place(seat)
        return pool
    if isinstance(where, HostOptions):
        pool = HostPool(where.hosts)
        if pool.num_slots < num_ranks:
            raise ConfigurationError(
                f"{ranks} need as many slots, and the hosts have {pool.num_slots}: list more hosts, or start fewer (-n)"
            )
        return pool
    if where is None:
        return HostPool([Host("localhost", seats.count)])
    if where.num_hosts * where.ranks_per_host != num_ranks:
        raise ConfigurationError(
            f"{where.num_hosts} emulated hosts with {where.ranks_per_host} ranks each make "
            f"{where.num_hosts * where.ranks_per_host} workers, not {ranks}"
        )
    return HostPool([Host(f"host{index}", where.ranks_per_host) for index in range(where.num_hosts)])
