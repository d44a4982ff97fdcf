"""Engines over a ``SimulatedNetwork``: entire jobs in virtual time, a thousand seeds a minute.

The engines are the real ones; only time and the network are simulated. A job is data: the operations that each rank
submits, and when. ``Engine.validate`` follows every event if asked for, and the run ends with a result per operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.computations import Computation
from totalreduce.engine.engine import Engine
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import OutgoingMessage
from totalreduce.engine.reception import Delivery
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.header import Header
from totalreduce.foundation.types import OpKind, Signature
from totalreduce.runner.endpoint import carry_out
from totalreduce.transports.base import Lease, Outgoing
from totalreduce.transports.simulated import SimulatedNetwork

__all__ = ["SimulatedCluster", "TimedSubmission"]


@dataclass(slots=True)
class TimedSubmission:
    """One operation on one rank."""

    name: str  #: Equal on all ranks.
    signature: Signature  #: Signature of the operation.
    buffers: Sequence[memoryview | None]  #: Input and output bytes of the tensor, or of every block.
    at_s: float = 0.0  #: Virtual time of the submission.
    priority: int = 0  #: Smaller is more urgent.
    ranks: tuple[int, ...] | None = None  #: The ranks that take part; by default all.
    repeats: bool = False  #: Whether the name may be in flight several times.
    candidates: dict[int, str] | None = None  #: For a receive from any rank: the name of the message by its sender.
    done_at_s: float | None = None  #: Virtual time of the end, set by the run.
    error: BaseException | None = None  #: The error, set by the run.
    source: int | None = None  #: The sender of a message, set by the run.
    on_done: Callable[[], None] | None = None  #: Called when the operation has ended.


@final
class _Rank:
    """One engine as an endpoint of the simulated network, with a computation thread that takes virtual time."""

    def __init__(self, cluster: SimulatedCluster, rank: int, config: EngineConfig) -> None:
        self.engine = Engine(rank, cluster.network.world_size, config, observers=[], hosts=cluster.hosts)
        self._cluster, self._network, self._rank = cluster, cluster.network, rank
        self._computing = False

    def ready_peers(self, *, bulk: bool = False) -> Collection[int]:
        outbox = self.engine.outbox
        return tuple(outbox.bulk_ready if bulk else outbox.ready)

    def next_message(self, peer: int, *, bulk: bool = False) -> OutgoingMessage | None:
        return self.engine.next_message(peer, self._network.now, bulk=bulk)

    def message_sent(self, message: Outgoing) -> None:
        assert isinstance(message, OutgoingMessage)
        self.engine.message_sent(message, self._network.now)
        self.after_event()

    def may_receive(self) -> bool:
        return self.engine.reception.scratch.available

    def accept(self, peer: int, header: Header, lease: Lease | None = None) -> Delivery:
        return self.engine.accept(peer, header, self._network.now, lease)

    def delivered(self, delivery: Any) -> None:
        self.engine.delivered(delivery, self._network.now)
        self.after_event()

    def peer_lost(self, peer: int, reason: str) -> None:
        self.engine.peer_lost(peer, reason, self._network.now)
        self.after_event()

    def after_event(self) -> None:
        """Complete the operations that ended, start the next computation, check the invariants."""
        for operation in self.engine.table.pop_completed():
            self._cluster.completed(operation)
        if self._cluster.validates:
            self.engine.validate()
        if not self._computing:
            computation = self.engine.computations.take()
            if computation is not None:
                self._computing = True
                seconds = len(computation.destination) / self._cluster.reduce_bytes_per_s
                seconds *= self._network.random.uniform(1.0, 1.0 + self._cluster.compute_jitter)
                hosts = self._network.hosts
                if hosts is None:
                    self._network.after(seconds, lambda: self._computed(computation, seconds))
                else:  # the thread that moves messages adds
                    hosts.move(self._rank, seconds, lambda: self._computed(computation, seconds))

    def _computed(self, computation: Computation, seconds: float) -> None:
        self._computing = False
        if self._network.carries:
            carry_out(computation)
        self.engine.computed(computation, seconds, self._network.now)
        self.after_event()
        self._network.poke(self._rank)


@dataclass
class SimulatedCluster:
    """A job in virtual time."""

    network: SimulatedNetwork
    config: EngineConfig = field(default_factory=EngineConfig)
    validates: bool = True  #: Whether to check an engine's invariants after each of its events.
    reduce_bytes_per_s: float = 4e9  #: Speed of additions.
    compute_jitter: float = 0.0  #: Additions take up to this share longer, at random.
    #: Number of the host of every rank; by default each has its own. Unless the network has hosts, too, it is the same
    #: for all.
    hosts: Sequence[int] | None = None
    bulk_apart: bool = False  #: Whether bulk has links of its own, as over TCP, so that other messages overtake it.
    reports: list[tuple[int, str]] = field(default_factory=list)  #: Stall reports of all ranks.

    def __post_init__(self) -> None:
        """Make one engine per rank."""
        self.ranks = [_Rank(self, rank, self.config) for rank in range(self.network.world_size)]
        everybody = range(self.network.world_size)
        for rank, endpoint in enumerate(self.ranks):
            self.network.attach(rank, endpoint)
            if self.bulk_apart:
                endpoint.engine.outbox.bulk_peers = frozenset(range(len(self.ranks))) - {rank}
            endpoint.engine.telling.connected = lambda: everybody
        #: What every rank has submitted, or will submit.
        self.submissions: list[list[TimedSubmission]] = [[] for _ in self.ranks]

    def submit(self, rank: int, submission: TimedSubmission) -> None:
        """Have ``rank`` submit an operation at its time."""
        self.submissions[rank].append(submission)
        self.network.at(submission.at_s, lambda: self.submit_now(rank, submission))

    def submit_now(self, rank: int, submission: TimedSubmission) -> None:
        """Have ``rank`` submit an operation at once. The job does not keep it: its ``on_done`` is called."""
        endpoint = self.ranks[rank]
        try:
            self._hand_over(endpoint.engine, submission)
        except TotalReduceError as error:
            submission.done_at_s, submission.error = self.network.now, error
        endpoint.after_event()
        self.network.poke(rank)

    def completed(self, operation: Operation | AnyReceive) -> None:
        """Record the end of an operation."""
        submission: TimedSubmission = operation.owner
        submission.done_at_s, submission.error = self.network.now, operation.error
        if isinstance(operation, Operation) and operation.signature.kind is OpKind.SEND_RECV:
            submission.source = operation.ranks[0]
        if submission.on_done is not None:
            submission.on_done()

    def run(self, *, until_s: float = 1e6, tick_s: float = 0.5, dead: Collection[int] = ()) -> None:
        """Run until every operation of every rank that is not ``dead`` has finished. Raises ``TimeoutError``."""
        self.network.after(tick_s, lambda: self._tick(tick_s))
        while any(s.done_at_s is None for rank, mine in enumerate(self.submissions) if rank not in dead for s in mine):
            # The check above is linear, so many events are handled between two of them.
            for _ in range(64):
                if not self.network.step():
                    break
            if self.network.now > until_s:
                late = [
                    f"rank {rank}: {s.name}"
                    for rank, mine in enumerate(self.submissions)
                    for s in mine
                    if s.done_at_s is None and rank not in dead
                ]
                raise TimeoutError(f"hang: not finished after {until_s} virtual seconds: {late[:10]}")

    def _hand_over(self, engine: Engine, submission: TimedSubmission) -> None:
        s = submission
        if s.candidates is not None:
            [buffer] = s.buffers
            assert buffer is not None
            receive = AnyReceive(s.candidates, s.signature, buffer, "", s.priority, owner=s)
            engine.receive_any(receive, self.network.now)
            return
        operation = Submission(s.name, s.signature, s.buffers, ranks=s.ranks, repeats=s.repeats, priority=s.priority)
        engine.submit(operation, self.network.now, owner=s)

    def _tick(self, tick_s: float) -> None:
        for rank, endpoint in enumerate(self.ranks):
            endpoint.engine.tick(self.network.now)
            self.reports += [(rank, str(report)) for report in endpoint.engine.reports.pop()]
            self.network.poke(rank)
        self.network.after(tick_s, lambda: self._tick(tick_s))
