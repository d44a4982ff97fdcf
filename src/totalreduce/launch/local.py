"""Start the workers of a run, watch them, and clean up after them.

One thread waits for output, ends of workers and signals at once:

- A worker that fails ends the run: the others may print their own error, then get SIGTERM, then SIGKILL. With
  ``RecoveryOptions`` it is started again, or the others go on without it (``recovery``).
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
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any, NamedTuple

from totalreduce.foundation import checks
from totalreduce.foundation.environment import LIVE, current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulatedHost, EmulatedNetwork, EmulateOptions
from totalreduce.launch.ending import Escalation, failure_of, find_first_failure
from totalreduce.launch.guard import Guard
from totalreduce.launch.hosts import Host, HostPool
from totalreduce.launch.live import LiveJob
from totalreduce.launch.nodes import NodeOptions
from totalreduce.launch.output import Output, Relay, Streams, open_relay
from totalreduce.launch.placement import HostOptions, HostsFile, Placement, is_this_host, launcher_address
from totalreduce.launch.program_errors import ProgramErrors
from totalreduce.launch.recovery import Keeper, RecoveryOptions, Restarts, Seats, event, worker_variables
from totalreduce.launch.spares import Spare, Spares
from totalreduce.launch.workers import (
    OUT_OF_MEMORY,
    RunResult,
    Worker,
    WorkerResult,
    common_environment,
    describe_ranks,
    free_port,
)

__all__ = ["EmulateOptions", "HostOptions", "RecoveryOptions", "RunResult", "WorkerResult", "run_workers"]

#: Longer than it takes a survivor to notice a frozen peer (2 s) and to print its error.
LINGER_S = 3.0
#: How long output is awaited after the last worker's end, if a process that it started holds the pipe open.
_DRAIN_S = 1.0
#: How long after the workers' end those that only serve may end by themselves, before the others' time begins.
_SERVERS_S = 7.0
#: How long a killed worker may take to end. After that it is stuck in the kernel, and left there.
_KILL_S = 10.0
_TICK_S = 0.05
_READ_BYTES = 64 * 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Batch systems send these to say that a job must end soon. The workers get them, and the run goes on.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def run_workers(
    argv: Sequence[str],
    *,
    num_workers: int,
    num_servers: int = 0,
    emulate: EmulateOptions | None = None,
    hosts: HostOptions | None = None,
    node: NodeOptions | None = None,
    environment: Mapping[str, str] | None = None,
    output: Output = "all",
    grace_s: float = 5.0,
    linger_s: float = LINGER_S,
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
        emulate: Put the ranks into emulated hosts; their number must then be hosts times ranks per host.
        hosts: Other hosts on which workers run; by default all run on this one. The first hosts of the list are filled
            first.
        node: This launcher starts the ranks of one machine, and the launchers of other machines start the others;
            ``num_workers`` counts all of them, equally many on each machine. The result has the ranks of this one.
        environment: The environment that the workers' environments extend; by default this process's.
        output: Where the workers' output goes; see :data:`totalreduce.launch.output.Output`.
        grace_s: Time from SIGTERM to SIGKILL.
        linger_s: Time from the first failure to SIGTERM for the other workers.
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
    pool = _pool(seats, emulate, hosts, node)
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
        kept: _Recovery | None = None
        if recovery is not None:
            port = free_port()
            keeper = Keeper(prefix, address, port, seats.count, common)
            stack.callback(keeper.close)
            # Torch logs a trace whenever the store is lost, which this library reports by itself.
            common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            common |= worker_variables(recovery, seats, address, port)
            file = None if hosts is None or hosts.file is None else HostsFile(hosts.file, hosts.hosts)
            kept = _Recovery(recovery, keeper, Restarts(recovery, seats), Spares(), file, ProgramErrors())
        placement = Placement(
            pool, argv, common, num_local=num_local, serving=seats.serving, options=hosts, emulated=emulated
        )
        relay = open_relay(output, seats.count, streams or stack.enter_context(Streams()))
        supervisor = _Supervisor(relay, Escalation(linger_s, grace_s), placement, kept, live)
        with _signals_to(supervisor):
            try:
                supervisor.start(own_seats)
                supervisor.watch(timeout_s)
            finally:
                supervisor.finish()
        guard.forget_job(job_id)
        return supervisor.result()


def _to_all(*callbacks: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return a function that calls all callbacks with an event."""

    def call(event: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(event)

    return call


def _pool(
    seats: Seats, emulate: EmulateOptions | None, hosts: HostOptions | None, node: NodeOptions | None
) -> HostPool:
    """Return the hosts of a run, which have a slot for every worker and every server with which it begins."""
    num_workers, num_servers = seats.first_workers, seats.first_servers
    if num_workers < 1:
        raise ConfigurationError(f"the number of workers must be at least 1, not {num_workers}")
    num_ranks = num_workers + num_servers
    ranks = describe_ranks(num_workers, num_servers)
    if node is not None:
        pool = HostPool([Host(name, num_workers // node.count) for name in node.names])
        for seat in range(num_workers):  # those of the other machines, too
            pool.place(seat)
        return pool
    if hosts is not None:
        if emulate is not None:
            raise ConfigurationError("a run has emulated hosts or a list of hosts, and not both")
        pool = HostPool(hosts.hosts)
        if pool.num_slots < num_ranks:
            raise ConfigurationError(
                f"{ranks} need as many slots, and the hosts have {pool.num_slots}: list more hosts, or start fewer (-n)"
            )
        return pool
    if emulate is None:
        return HostPool([Host("localhost", seats.count)])
    if emulate.num_hosts * emulate.ranks_per_host != num_ranks:
        raise ConfigurationError(
            f"{emulate.num_hosts} emulated hosts with {emulate.ranks_per_host} ranks each make "
            f"{emulate.num_hosts * emulate.ranks_per_host} workers, not {ranks}"
        )
    return HostPool([Host(f"host{index}", emulate.ranks_per_host) for index in range(emulate.num_hosts)])


class _Recovery(NamedTuple):
    options: RecoveryOptions
    keeper: Keeper
    restarts: Restarts
    spares: Spares
    file: HostsFile | None
    errors: ProgramErrors


class _Supervisor:
    """Watches the workers of one run."""

    def __init__(
        self,
        relay: Relay,
        escalation: Escalation,
        placement: Placement,
        recovery: _Recovery | None,
        live: LiveJob | None,
    ) -> None:
        self._relay, self._escalation = relay, escalation
        self._placement, self._recovery, self._live = placement, recovery, live
        self._selector = selectors.DefaultSelector()
        if recovery is not None:
            self._follow_new(recovery, recovery.keeper)
        self._workers: dict[int, Worker] = {}
        self._pipes: dict[IO[bytes], tuple[IO[bytes], Worker, bool]] = {}
        self._first_to_end: Worker | None = None
        self._signals: list[signal.Signals] = []
        self._is_to_stop = False
        self._interrupted_by: signal.Signals | None = None
        self._timed_out = False
        self._started_at = self._last_end = time.monotonic()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal; a second one kills at once, even if the terminal blocks the output."""
        if number in _PASSED_ON:
            self._send_all(signal.Signals(number))
            return
        if number == signal.SIGTSTP:
            self._is_to_stop = True
            return
        self._signals.append(signal.Signals(number))
        if self._interrupted_by or len(self._signals) > 1:
            self._send_all(signal.SIGKILL)

    def _stop_if_asked(self) -> None:
        """Stop the workers and this process, as Ctrl-Z asks for, until this process is continued.

        The workers get SIGSTOP: their process groups are orphaned, so that SIGTSTP would not stop them.
        """
        if self._is_to_stop:
            self._is_to_stop = False
            self._send_all(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send_all(signal.SIGCONT)

    def start(self, seats: Sequence[int]) -> None:
        """Start the workers of some seats. Raises ``ConfigurationError`` if one cannot be started."""
        for rank in seats:
            self._placement.queue(rank)
        self._start_waiting(time.monotonic())

    def _start_waiting(self, now: float) -> None:
        """Start the workers that have a place, as many as can be started at the same time."""
        if self._escalation.stopping:
            self._placement.waiting.clear()
        failed: list[tuple[int, ConfigurationError]] = []
        for rank in self._placement.take_startable():
            if rank in self._workers:
                self._workers[rank].finish(now)
            try:
                self._workers[rank] = self._start_worker(rank, now)
            except ConfigurationError as error:
                failed.append((rank, error))
        for rank, reason in failed:
            self._start_failed(rank, reason, now)

    def _start_failed(self, rank: int, error: ConfigurationError, now: float) -> None:
        """Count a replacement that cannot be started as one that has failed. Raises ``error`` if the job begins."""
        recovery, known = self._recovery, self._workers.get(rank)
        if recovery is None or not (known or recovery.restarts.has_begun):
            raise error
        place = self._placement.pool.place_of(rank)
        details = {"rank": rank, "host": None if place is None else place.host, "error": str(error)}
        recovery.options.on_event(event("start failed", **details))
        # The pause before the next attempt begins now, and not when the attempt has begun.
        if recovery.restarts.failed(rank, self._num_running, time.monotonic(), by_signal=False):
            return
        if known is None:
            raise error
        self._first_to_end = known
        self._escalation.failed(now)

    def _start_worker(self, rank: int, now: float) -> Worker:
        """Start the worker of a rank, or give the seat to a spare of its host."""
        placement, recovery = self._placement, self._recovery
        if recovery is None:
            worker = self._watched(placement.start(rank, None, self._relay.targets[rank]))
            if self._live is not None:
                self._live.note(event("started", rank=rank, incarnation=0, pid=worker.process.pid, host=worker.host))
            return worker
        recovery.restarts.started(rank, now)
        recovery.errors.started(rank)
        self._relay.forget_errors(rank)
        incarnation, place = recovery.restarts.incarnations[rank], placement.pool.place_of(rank)
        spare = None if place is None else recovery.spares.take(place.host, serves=rank in placement.serving)
        if spare is not None:
            spare.seat(rank, placement.environment(rank, incarnation))
            worker = spare.worker
            for is_error, data in enumerate(spare.held):
                self._relay.feed(rank, bytes(data), is_error=bool(is_error))
        else:
            worker = self._watched(placement.start(rank, incarnation, self._relay.targets[rank]))
        details = {"rank": rank, "incarnation": incarnation, "pid": worker.process.pid, "host": worker.host}
        details |= {"was_spare": spare is not None, "restarts_left": recovery.restarts.left}
        recovery.options.on_event(event("started", **details))
        return worker

    def _start_spares(self, recovery: _Recovery) -> None:
        """Start the spares that are missing. They cost time of the workers' cores until they wait."""
        wanted = recovery.options.spares if recovery.restarts.is_possible and not recovery.spares.fail else 0
        for serves in (False, True) if self._placement.serving else (False,):
            counts = recovery.spares.count(serves=serves)
            for host in self._placement.pool.usable:
                for _ in range(wanted - counts.get(host, 0)):
                    try:
                        spare = self._placement.start_spare(host, serves=serves)
                    except ConfigurationError as error:
                        recovery.spares.fail = True
                        recovery.options.on_event(event("start failed", rank=None, host=host, error=str(error)))
                        return
                    recovery.spares.waiting.append(spare)
                    self._watched(spare.worker)

    def _watched(self, worker: Worker) -> Worker:
        """Return a worker whose output and end are noticed from now on."""
        for is_error, pipe in enumerate((worker.process.stdout, worker.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                source = (pipe, worker, bool(is_error))
                self._pipes[pipe] = source
                self._selector.register(pipe, selectors.EVENT_READ, source)
        if worker.exit_descriptor is not None:
            self._selector.register(worker.exit_descriptor, selectors.EVENT_READ)
        return worker

    def watch(self, timeout_s: float | None) -> None:
        """Return when all workers have ended and their output is read, or when killed workers do not end."""
        give_up_at = float("inf")
        while not self._all_done() and time.monotonic() < give_up_at:
            self._read(_TICK_S)
            self._stop_if_asked()
            now = time.monotonic()
            self._look_for_ends(now)
            if self._recovery is not None:
                self._look_for_spares_ends(self._recovery, now)
                self._follow_keeper(self._recovery, now)
                self._follow_hosts(self._recovery, now)
                self._restart(self._recovery, now)
            self._start_waiting(now)
            if self._live is not None:
                self._live.write()
            numbers, self._signals = self._signals, []
            for number in numbers:
                self._interrupted_by = self._interrupted_by or number
                self._escalation.interrupted(number, now)
            if timeout_s is not None and not self._timed_out and now - self._started_at >= timeout_s:
                self._timed_out = True
                self._escalation.interrupted(signal.SIGTERM, now)
            due = self._escalation.due(now)
            if due is not None:
                self._send_all(due)
                give_up_at = now + _KILL_S if due is signal.SIGKILL else give_up_at

    def finish(self) -> None:
        """Kill the workers that still run, reap all, read and close the pipes."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.exit_descriptor is not None and not worker.ended:
                self._selector.unregister(worker.exit_descriptor)
            worker.finish(now)
        for spare in self._recovery.spares.waiting if self._recovery is not None else ():
            self._end_spare(spare, now)
        for source in list(self._pipes.values()):
            self._read_pipe(*source)
            self._close_pipe(source[0])
        self._selector.close()
        self._relay.close()

    def result(self) -> RunResult:
        """Return the result of the run, after :meth:`finish`."""
        results = {rank: self._end_of(each) for rank, each in sorted(self._workers.items())}
        ended = self._first_to_end
        first = find_first_failure(results[ended.rank], tuple(results.values())) if ended is not None else None
        if self._interrupted_by:
            code = 128 + self._interrupted_by
        elif self._timed_out:
            code = 124
        else:
            code = first.exit_code if first else 0
        output, errors = self._relay.captured()
        return RunResult(
            exit_code=code,
            workers=tuple(results.values()),
            first_failure=first,
            interrupted_by=self._interrupted_by.name if self._interrupted_by else None,
            timed_out=self._timed_out,
            seconds=round(self._last_end - self._started_at, 3),
            lost=tuple(self._relay.losses()),
            output=output,
            errors=errors,
        )

    def _end_of(self, worker: Worker) -> WorkerResult:
        """Return the result of a worker that has ended, with what its standard error says."""
        failure = failure_of(self._relay.last_errors(worker.rank))
        return worker.result(failure.lines, failure.error, failure.traceback)

    def _all_done(self) -> bool:
        if self._placement.waiting or not all(worker.ended for worker in self._workers.values()):
            return False
        if self._recovery is not None and self._recovery.restarts.is_pending and not self._escalation.stopping:
            return False
        return not self._pipes or time.monotonic() - self._last_end > _DRAIN_S

    def _end_spare(self, spare: Spare, now: float) -> None:
        """End a spare, and do without its output."""
        if spare.worker.exit_descriptor is not None:
            self._selector.unregister(spare.worker.exit_descriptor)
        for pipe in (spare.worker.process.stdout, spare.worker.process.stderr):
            if pipe in self._pipes:
                self._close_pipe(pipe)
        spare.worker.finish(now)

    def _look_for_spares_ends(self, recovery: _Recovery, now: float) -> None:
        """Without spares the job goes on: lost workers are then started from the beginning."""
        for spare in recovery.spares.take_ended(now):
            self._read_rest(spare.worker)
            self._end_spare(spare, now)
            if spare.worker.has_lost_host:  # this says nothing about the program
                self._host_failed(recovery, spare.worker, 0.0, now)
                continue
            recovery.spares.fail = True
            end = spare.worker.result(())
            lines = spare.held[1].decode("utf-8", "replace").splitlines()
            last_errors = list(failure_of(lines).lines)
            recovery.options.on_event(event("spare ended", exit_code=end.exit_code, last_errors=last_errors))

    def _look_for_ends(self, now: float) -> None:
        ended = [worker for worker in self._workers.values() if worker.poll(now)]
        if not ended:
            return
        self._last_end = now
        for worker in ended:
            self._read_rest(worker)
            if worker.exit_descriptor is not None:
                self._selector.unregister(worker.exit_descriptor)
        if self._live is not None and self._recovery is None:
            for end in map(self._end_of, ended):
                error = OUT_OF_MEMORY if end.is_out_of_memory else end.error
                details = {"exit_code": end.exit_code, "signal": end.signal, "error": error}
                self._live.note(event("ended", rank=end.rank, **details, host=end.host))
        failed = [worker for worker in ended if worker.failed]
        if self._recovery is not None and not self._escalation.stopping:
            failed = [worker for worker in ended if self._ends_run(self._recovery, worker, now)]
        if failed and not self._escalation.stopping:
            # Of workers that ended at the same time the killed one is the cause: the others noticed its death.
            self._first_to_end = min(failed, key=lambda worker: (not worker.ended_by_signal, worker.rank))
            self._escalation.failed(now)
        pending = self._recovery is not None and self._recovery.restarts.is_pending
        if self._placement.serving and not self._num_running and not pending:
            # Servers end by themselves when the workers have closed their group, if these have ever formed it.
            self._escalation.failed(now + _SERVERS_S)

    def _ends_run(self, recovery: _Recovery, worker: Worker, now: float) -> bool:
        """Report the end of a worker to the others and the user; return whether the run fails by it."""
        rank, restarts = worker.rank, recovery.restarts
        incarnation = restarts.incarnations[rank]
        is_leaving = rank in self._placement.leaving
        self._placement.leaving.discard(rank)
        recovery.keeper.has_ended(rank, incarnation, finished=not (worker.failed or is_leaving))
        end = self._end_of(worker)
        details = {"rank": rank, "incarnation": incarnation, "exit_code": end.exit_code, "signal": end.signal}
        details["error"] = OUT_OF_MEMORY if end.is_out_of_memory else end.error
        recovery.options.on_event(event("ended", **details, host=worker.host))
        if not worker.failed and not is_leaving:
            restarts.finished()
            return False
        if not is_leaving:
            self._host_failed(recovery, worker, restarts.seconds_since_start(rank, now), now)
        if is_leaving or worker.has_lost_host:
            return not restarts.displaced(rank, self._num_running)
        error = "" if end.trace.is_of_host and self._placement.blacklists else end.trace.of_program
        is_repeated = recovery.errors.is_repeated(rank, error, now)
        workers = self._workers.keys() - set(self._placement.serving)
        is_everywhere = recovery.errors.are_equal(workers)
        if is_repeated or is_everywhere:
            recovery.options.on_event(event("program failed", rank=rank, at=error, everywhere=is_everywhere))
            return is_everywhere or not restarts.is_enough(self._num_running)
        return not restarts.failed(rank, self._num_running, now, by_signal=worker.ended_by_signal)

    @property
    def _num_running(self) -> int:
        """The number of workers that run or are just being started; without those that only serve."""
        running = {rank for rank, each in self._workers.items() if not each.ended} | set(self._placement.waiting)
        return len(running - set(self._placement.serving))

    def _host_failed(self, recovery: _Recovery, worker: Worker, after_s: float, now: float) -> None:
        """Count the failure of a worker against its host."""
        if not self._placement.blacklists:
            return
        lost = worker.has_lost_host
        cool_down_s = self._placement.pool.failed(worker.host, now, after_s=after_s, is_reached=not lost)
        if cool_down_s is not None:
            for rank in self._placement.withdraw(worker.host):
                recovery.restarts.displaced(rank, 1)
            details = {"host": worker.host, "seconds": cool_down_s, "is_reached": not lost}
            last_errors = list(self._end_of(worker).last_errors) if lost and worker.rank >= 0 else []
            recovery.options.on_event(event("host blacklisted", **details, last_errors=last_errors))

    def _restart(self, recovery: _Recovery, now: float) -> None:
        """Have workers started whose seats wait for it, if there are slots."""
        if self._escalation.stopping:
            return
        counts = {serves: recovery.spares.count(serves=serves) for serves in (False, True)}
        for rank in recovery.restarts.due(now):
            spares = counts[rank in self._placement.serving]
            host = self._placement.queue(rank, spares)
            if host is not None:
                recovery.restarts.placed(rank)
                spares[host] = max(0, spares.get(host, 0) - 1)

    def _follow_hosts(self, recovery: _Recovery, now: float) -> None:
        """Use the hosts of the file if it has changed, and blacklisted ones again."""
        if self._escalation.stopping:
            return
        on_event, placement = recovery.options.on_event, self._placement
        hosts = None
        try:
            hosts = None if recovery.file is None else recovery.file.changed(now)
        except ConfigurationError as error:
            on_event(event("hosts refused", error=str(error)))
        back = placement.pool.returned(now)
        for name in back:
            on_event(event("host back", host=name))
        if hosts is not None:
            self._use_hosts(recovery, hosts, now)
        if recovery.restarts.has_begun and (back or hosts is not None):
            self._start_spares(recovery)

    def _use_hosts(self, recovery: _Recovery, hosts: Sequence[Host], now: float) -> None:
        """Take another list of hosts: kill the workers that have lost their slots; free slots are used afterwards.

        They get no SIGTERM, which a program may take for the end of the whole job (``tr.Snapshots(on_signal=...)``).
        """
        on_event, placement = recovery.options.on_event, self._placement
        update = placement.pool.update(hosts)
        for host in update.added:
            on_event(event("host added", host=host.name, slots=host.slots))
        for name in update.removed:
            on_event(event("host removed", host=name, slots=placement.pool.slots_of(name)))
        for rank in update.displaced:
            if rank in placement.waiting:
                placement.waiting.remove(rank)
                recovery.restarts.displaced(rank, 1)
            elif rank in self._workers and not self._workers[rank].ended:
                placement.leaving.add(rank)
                self._workers[rank].send(signal.SIGKILL)
        for spare in list(recovery.spares.waiting):
            if not placement.pool.slots_of(spare.worker.host):
                recovery.spares.waiting.remove(spare)
                self._end_spare(spare, now)

    def _follow_new(self, recovery: _Recovery, keeper: Keeper) -> None:
        """Notice from now on what a keeper says that was just started."""
        self._selector.register(keeper.output, selectors.EVENT_READ)
        recovery.options.on_event(event("keeper", pid=keeper.pid, starts=keeper.starts))

    def _follow_keeper(self, recovery: _Recovery, now: float) -> None:
        """Do what the ranks ask for: end silent workers, and show the user each membership."""
        keeper = recovery.keeper
        if keeper.is_lost:
            if not self._escalation.stopping and keeper.start_again(now):
                self._follow_new(recovery, keeper)
            return
        keeper.end_if_stopped(now)
        try:
            words = keeper.read()
        except EOFError:
            self._selector.unregister(keeper.output)
            keeper.lost(now)
            return
        for word in words:
            if "suspected" in word:
                rank, incarnation = word["suspected"], word["incarnation"]
                if recovery.restarts.is_to_end(rank, incarnation, word["by"], word["epoch"]):
                    accused = self._workers.get(rank)
                    if accused is not None and not accused.ended:
                        recovery.options.on_event(event("suspected", rank=rank, incarnation=incarnation, by=word["by"]))
                        accused.send(signal.SIGKILL)
            elif "waiting" in word:
                for worker in self._workers.values():
                    if worker.end_if_stopped():
                        recovery.options.on_event(event("suspected", rank=worker.rank, by=None))
            elif "refused" in word:
                recovery.options.on_event(event("values refused", count=word["refused"]))
            elif "finished" in word:
                recovery.restarts.finished()
            elif "members" in word:
                recovery.options.on_event(event("epoch", **word))
                recovery.restarts.begun()
                recovery.errors.joined([member["seat"] for member in word["members"]], now)
                self._start_spares(recovery)  # not before, because the ranks need the cores to recover

    def _send_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            if not worker.ended:
                worker.send(number)

    def _read(self, timeout_s: float) -> None:
        begin = time.monotonic()
        if self._relay.is_pending:
            self._relay.wait(timeout_s, self._selector.fileno())
            timeout_s = 0.0
        is_held = self._relay.is_full
        # A worker's end ends this wait through its pidfd, so the ends of workers are noticed in their order.
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None and not is_held and not self._read_pipe(*key.data):
                self._close_pipe(key.data[0])
        if not is_held:
            # What came since the begin may go on in the pipe, where this turn has not read everything.
            self._relay.overdue(begin)

    def _read_pipe(self, pipe: IO[bytes], worker: Worker, is_error: bool) -> bool:
        """Pass on the bytes in a pipe; returns false at the end of the stream."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        shown = worker.shown(data, is_error=is_error)
        spare = None if self._recovery is None else self._recovery.spares.of(worker)
        if spare is not None:
            spare.hold(shown, is_error=is_error)
            return bool(data)
        self._relay.feed(worker.rank, shown, is_error=is_error)
        return bool(data)

    def _read_rest(self, worker: Worker) -> None:
        """Read what a worker that has ended has written, which says whether it was started, or why not."""
        for source in [each for each in self._pipes.values() if each[1] is worker]:
            self._read_pipe(*source)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        del self._pipes[pipe]
        pipe.close()


@contextlib.contextmanager
def _signals_to(supervisor: _Supervisor) -> Iterator[None]:
    """Let the supervisor handle the signals that end a process; ignored signals stay ignored (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_FORWARDED, *_PASSED_ON, signal.SIGTSTP)}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, supervisor.on_signal)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
