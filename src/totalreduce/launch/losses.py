"""What a run does when a worker ends: the run ends with the first failure, or goes on (``RestartOnLoss``)."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.ending import Escalation, failure_of
from totalreduce.launch.hosts import Host
from totalreduce.launch.keeper_process import (
    JobFinished,
    KeeperEvent,
    KeeperProcess,
    MembershipDecided,
    RankSuspected,
    RankWaits,
    ValuesRefused,
)
from totalreduce.launch.live import LiveJob
from totalreduce.launch.placement import HostsFile
from totalreduce.launch.processes import Processes
from totalreduce.launch.program_errors import ProgramErrors
from totalreduce.launch.restarts import RecoveryOptions, Restarts, event
from totalreduce.launch.workers import OUT_OF_MEMORY, Worker, WorkerResult

__all__ = ["EndOnLoss", "RestartOnLoss"]


class EndOnLoss:
    """The run ends when a worker fails. ``RestartOnLoss`` overrides what is different if it goes on."""

    def __init__(self, processes: Processes, live: LiveJob | None) -> None:
        """Begin with the processes of the run, and with its live view, if it has one."""
        self._processes, self._live = processes, live

    @property
    def is_pending(self) -> bool:
        """Whether workers that have failed wait for their restart."""
        return False

    def start(self, rank: int, now: float) -> Worker:  # noqa: ARG002  (the time is for restarts)
        """Start the worker of a rank that has a place. Raises ``ConfigurationError`` if that is impossible."""
        worker = self._processes.start(rank, None)
        self._note("started", rank=rank, incarnation=0, pid=worker.process.pid, host=worker.host)
        return worker

    def start_failed(self, rank: int, error: ConfigurationError) -> bool:  # noqa: ARG002
        """Note that a worker cannot be started; return whether the run goes on. Raises ``error`` if the job begins."""
        raise error

    def ended(self, workers: Sequence[Worker], now: float) -> list[Worker]:  # noqa: ARG002
        """Note that workers have ended; return those because of which the run fails."""
        for end in map(self._processes.result_of, workers):
            self._note("ended", rank=end.rank, **_reason_of(end), host=end.host)
        return [worker for worker in workers if worker.failed]

    def take_turn(self, now: float) -> None:
        """Do what is due besides the ends of workers."""

    def _note(self, kind: str, **details: Any) -> None:
        if self._live is not None:
            self._live.note(event(kind, **details))


def _reason_of(end: WorkerResult) -> dict[str, Any]:
    error = OUT_OF_MEMORY if end.is_out_of_memory else end.error
    return {"exit_code": end.exit_code, "signal": end.signal, "error": error}


@final
class RestartOnLoss(EndOnLoss):
    """Workers that fail are started again, or the others go on without them, as long as the options allow it."""

    def __init__(
        self,
        processes: Processes,
        escalation: Escalation,
        options: RecoveryOptions,
        restarts: Restarts,
        keeper: KeeperProcess,
        file: HostsFile | None,
    ) -> None:
        """Begin."""
        super().__init__(processes, None)
        self._escalation, self._options, self._restarts = escalation, options, restarts
        self._keeper, self._file, self._errors = keeper, file, ProgramErrors()
        self._placement, self._spares = processes.placement, processes.spares
        self._follow_new_keeper()

    @property
    def is_pending(self) -> bool:
        """Whether workers that have failed wait for their restart."""
        return self._restarts.is_pending

    def _note(self, kind: str, **details: Any) -> None:
        self._options.on_event(event(kind, **details))

    def start(self, rank: int, now: float) -> Worker:
        """Start the worker of a rank, or give its seat to a spare of its host."""
        self._restarts.started(rank, now)
        self._errors.started(rank)
        self._processes.sink.forget_errors(rank)
        incarnation = self._restarts.incarnations[rank]
        spare = self._processes.seat_spare(rank, incarnation)
        worker = self._processes.start(rank, incarnation) if spare is None else spare
        details = {"rank": rank, "incarnation": incarnation, "pid": worker.process.pid, "host": worker.host}
        self._note("started", **details, was_spare=spare is not None, restarts_left=self._restarts.left)
        return worker

    def start_failed(self, rank: int, error: ConfigurationError) -> bool:
        """Count a replacement that cannot be started as one that has failed."""
        was_started = rank in self._processes.workers
        if not was_started and not self._restarts.has_begun:
            raise error
        place = self._placement.pool.place_of(rank)
        self._note("start failed", rank=rank, host=None if place is None else place.host, error=str(error))
        # The pause before the next attempt begins now, and not when the attempt has begun.
        self._restarts.failed(rank, time.monotonic(), by_signal=False)
        survives = self._restarts.survives(rank, self._processes.num_running)
        if not survives and not was_started:
            raise error
        return survives

    def ended(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        """Report the ends of workers to the ranks and to the user; return those because of which the run fails."""
        return [] if self._escalation.stopping else [worker for worker in workers if self._ends_run(worker, now)]

    def _ends_run(self, worker: Worker, now: float) -> bool:
        rank, restarts = worker.rank, self._restarts
        incarnation = restarts.incarnations[rank]
        is_leaving = rank in self._placement.leaving
        self._placement.leaving.discard(rank)
        self._keeper.has_ended(rank, incarnation, finished=not (worker.failed or is_leaving))
        end = self._processes.result_of(worker)
        self._note("ended", rank=rank, incarnation=incarnation, **_reason_of(end), host=worker.host)
        if not worker.failed and not is_leaving:
            restarts.finished()
            return False
        if not is_leaving:
            self._host_failed(worker, restarts.seconds_since_start(rank, now), now)
        num_running = self._processes.num_running
        if is_leaving or worker.has_lost_host:
            restarts.displaced(rank)
            return not restarts.has_state(num_running)
        error = "" if end.trace.is_of_host and self._placement.blacklists else end.trace.of_program
        is_repeated = self._errors.is_repeated(rank, error, now)
        is_everywhere = self._errors.are_equal(self._processes.workers.keys() - set(self._placement.serving))
        if is_repeated or is_everywhere:
            self._note("program failed", rank=rank, at=error, everywhere=is_everywhere)
            return is_everywhere or not restarts.is_enough(num_running)
        restarts.failed(rank, now, by_signal=worker.ended_by_signal)
        return not restarts.survives(rank, num_running)

    def _host_failed(self, worker: Worker, after_s: float, now: float) -> None:
        """Count the failure of a worker against its host."""
        if not self._placement.blacklists:
            return
        lost = worker.has_lost_host
        cool_down_s = self._placement.pool.failed(worker.host, now, after_s=after_s, is_reached=not lost)
        if cool_down_s is not None:
            for rank in self._placement.withdraw(worker.host):
                self._restarts.displaced(rank)
            last_errors = list(self._processes.result_of(worker).last_errors) if lost and worker.rank >= 0 else []
            details = {"host": worker.host, "seconds": cool_down_s, "is_reached": not lost}
            self._note("host blacklisted", **details, last_errors=last_errors)

    def take_turn(self, now: float) -> None:
        """Follow the keeper and the file of hosts, and have workers and spares started that are due."""
        self._look_for_ends_of_spares(now)
        self._follow_keeper(now)
        if not self._escalation.stopping:
            self._follow_hosts(now)
            self._restart(now)

    def _restart(self, now: float) -> None:
        """Have workers started whose seats wait for it, if there are slots."""
        counts = {serves: self._spares.count(serves=serves) for serves in (False, True)}
        for rank in self._restarts.due(now):
            spares = counts[rank in self._placement.serving]
            host = self._placement.queue(rank, spares)
            if host is not None:
                self._restarts.placed(rank)
                spares[host] = max(0, spares.get(host, 0) - 1)

    def _start_spares(self) -> None:
        """Start the spares that are missing. They cost time of the workers' cores until they wait."""
        wanted = self._options.spares if self._restarts.is_possible and not self._spares.fail else 0
        for serves in (False, True) if self._placement.serving else (False,):
            counts = self._spares.count(serves=serves)
            for host in self._placement.pool.usable:
                for _ in range(wanted - counts.get(host, 0)):
                    try:
                        self._processes.start_spare(host, serves=serves)
                    except ConfigurationError as error:
                        self._spares.fail = True
                        self._note("start failed", rank=None, host=host, error=str(error))
                        return

    def _look_for_ends_of_spares(self, now: float) -> None:
        """Without spares the job goes on: lost workers are then started from the beginning."""
        for spare in self._processes.take_ended_spares(now):
            if spare.worker.has_lost_host:  # this says nothing about the program
                self._host_failed(spare.worker, 0.0, now)
                continue
            self._spares.fail = True
            lines = spare.held[1].decode("utf-8", "replace").splitlines()
            exit_code = spare.worker.result(()).exit_code
            self._note("spare ended", exit_code=exit_code, last_errors=list(failure_of(lines).lines))

    def _follow_hosts(self, now: float) -> None:
        """Use the hosts of the file if it has changed, and blacklisted ones again."""
        hosts = None
        try:
            hosts = None if self._file is None else self._file.changed(now)
        except ConfigurationError as error:
            self._note("hosts refused", error=str(error))
        back = self._placement.pool.returned(now)
        for name in back:
            self._note("host back", host=name)
        if hosts is not None:
            self._use_hosts(hosts, now)
        if self._restarts.has_begun and (back or hosts is not None):
            self._start_spares()

    def _use_hosts(self, hosts: Sequence[Host], now: float) -> None:
        """Take another list of hosts: kill the workers that have lost their slots; free slots are used afterwards.

        They get no SIGTERM, which a program may take for the end of the whole job (``tr.Snapshots(on_signal=...)``).
        """
        placement, workers = self._placement, self._processes.workers
        update = placement.pool.update(hosts)
        for host in update.added:
            self._note("host added", host=host.name, slots=host.slots)
        for name in update.removed:
            self._note("host removed", host=name, slots=placement.pool.slots_of(name))
        for rank in update.displaced:
            if rank in placement.waiting:
                placement.waiting.remove(rank)
                self._restarts.displaced(rank)
            elif rank in workers and not workers[rank].ended:
                placement.leaving.add(rank)
                workers[rank].send(signal.SIGKILL)
        for spare in list(self._spares.waiting):
            if not placement.pool.slots_of(spare.worker.host):
                self._spares.waiting.remove(spare)
                self._processes.end_spare(spare, now)

    def _follow_new_keeper(self) -> None:
        """Notice from now on what a keeper reports that was just started."""
        self._processes.watch(self._keeper.output)
        self._note("keeper", pid=self._keeper.pid, starts=self._keeper.starts)

    def _follow_keeper(self, now: float) -> None:
        """Do what the ranks ask for, and start the keeper again if it is lost."""
        keeper = self._keeper
        if keeper.is_lost:
            if not self._escalation.stopping and keeper.start_again(now):
                self._follow_new_keeper()
            return
        keeper.end_if_stopped(now)
        try:
            events = keeper.read()
        except EOFError:
            self._processes.forget(keeper.output)
            keeper.lost(now)
            return
        for each in events:
            self._handle(each, now)

    def _handle(self, reported: KeeperEvent, now: float) -> None:
        """End silent workers, and show the user each membership."""
        match reported:
            case RankSuspected():
                self._end_suspected(reported)
            case RankWaits():
                for worker in self._processes.workers.values():
                    if worker.end_if_stopped():
                        self._note("suspected", rank=worker.rank, by=None)
            case ValuesRefused():
                self._note("values refused", count=reported.count)
            case JobFinished():
                self._restarts.finished()
            case MembershipDecided():
                self._note("epoch", **reported.details)
                self._restarts.begun()
                self._errors.joined(reported.seats, now)
                self._start_spares()  # not before, because the ranks need the cores to recover

    def _end_suspected(self, reported: RankSuspected) -> None:
        rank, incarnation, by = reported.seat, reported.incarnation, reported.by
        if self._restarts.is_to_end(rank, incarnation, by, reported.epoch):
            worker = self._processes.workers.get(rank)
            if worker is not None and not worker.ended:
                self._note("suspected", rank=rank, incarnation=incarnation, by=by)
                worker.send(signal.SIGKILL)
