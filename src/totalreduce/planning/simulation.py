"""Training steps in virtual time: the library's engines on simulated hosts, between the computations of a trace.

Each rank has a thread that trains, one that moves messages and adds, and one that selects. What they do is written as
generators, which yield what they wait for. Bodies are not carried, so that large models fit: the engines see their
lengths only.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.groups.probe import rounded
from totalreduce.planning.fusion import Message, optimizer_messages
from totalreduce.planning.machines import Calibration, Machines
from totalreduce.planning.traces import ELEMENT_BYTES, Trace
from totalreduce.planning.traffic import Begun, Round, Script
from totalreduce.sparse.actions import Allgather, Allreduce, Alltoall, Broadcast
from totalreduce.testing.simulation import SimulatedCluster, TimedSubmission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork
from totalreduce.transports.simulated_hosts import HostModel

__all__ = [
    "Bucket",
    "Dense",
    "Local",
    "Scaling",
    "SimulatedSteps",
    "Sparse",
    "StepParts",
    "no_garbage_collection",
    "simulate",
]

_Resume = Callable[[], None]
#: What a thread waits for: it is called with what is to be called when the waiting has ended.
_Waiting = Callable[[_Resume], None]
_Thread = Generator[_Waiting, None, None]
#: Steps, or periods of a strategy, of which the last one counts: then all names are known, as in most steps of a
#: training.
_TURNS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """How costs differ from those of the simulated number of ranks: 1 for what is simulated as it is."""

    latency: float = 1.0  #: Factor of latencies.
    messages: float = 1.0  #: Factor of the processor time of messages.
    num_bytes: float = 1.0  #: Factor of the time that bytes take on network cards and processors.


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are exchanged together."""

    ready_s: float  #: When the backward pass has the last of them.
    elements: int  #: Their number.
    priority: int  #: Smaller is more urgent.
    effort: float = 1.0  #: How long the method computes before it sends, in times of a selection of so many elements.


@dataclass(frozen=True, slots=True)
class Dense:
    """All gradients are added in every step, by ``DistributedOptimizer`` without ``sync``."""

    bucket_bytes: int  #: Up to how many bytes small layers are fused.
    schedule: str = Algorithm.AUTO  #: The schedule of all allreduces; ``auto``: the selector's choice.
    #: ``ALLREDUCE``, or ``GATHER``: all gradients go to rank 0, and nothing comes back.
    kind: OpKind = OpKind.ALLREDUCE


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse method exchanges selections in every step."""

    buckets: Sequence[Bucket]  #: The buckets, in the order in which they are ready.
    scripts: Sequence[Script]  #: What each of them sends.


@dataclass(frozen=True, slots=True)
class Local:
    """A strategy: ranks train by themselves between exchanges."""

    period: int  #: The number of steps after which the strategy does the same again.
    begun: Sequence[Begun]  #: The exchanges of two periods.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What an average step takes."""

    step_s: float  #: Seconds.
    #: Seconds in which the training thread does not wait for communication. With fewer cores than threads, they are
    #: longer than in the trace.
    compute_s: float
    exposed_s: float  #: Seconds in which it waits.
    #: Seconds from the first submission to the last end of an exchange, on the rank on which that takes longest.
    exchange_s: float
    #: The share of the exchanges' time that lies beside computation, from 0 to 1, on the average rank.
    hidden_share: float


@dataclass(frozen=True, slots=True)
class SimulatedSteps(StepParts):
    """What the steps of a simulation took."""

    ranks: int  #: The number of ranks that were simulated.
    sent_bytes: float  #: Sent by the average rank in an average step, headers included.
    card_bytes: float  #: Through the busiest host's network card, in its busier direction, in an average step.
    card_s: float  #: Seconds in which the busiest network card was busy, in its busier direction.
    moved_s: float  #: Processor seconds of the busiest thread that moves messages and adds.
    messages: float  #: Sent by the average rank in an average step.


@final
class _Gate:
    """Opens when it was counted down to zero."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: list[_Resume] = []

    def count_down(self) -> None:
        self._count -= 1
        if not self._count:
            for resume in self._waiting:
                resume()

    def opened(self, resume: _Resume) -> None:
        """Call ``resume`` when the gate is open. This is what a thread yields."""
        if self._count:
            self._waiting.append(resume)
        else:
            resume()


@dataclass(slots=True)
class _Watch:
    """The moments of one rank's steps, in seconds."""

    ended: list[float]  #: When each step ended.
    waited: list[float]  #: How long each step waited.
    exchanged: list[float]  #: How long each step's exchanges took, from the first submission to the last end.


def simulate(
    trace: Trace,
    how: Dense | Sparse | Local,
    ranks: int,
    machines: Machines,
    calibration: Calibration,
    scaling: Scaling | None = None,
) -> SimulatedSteps:
    """Train in virtual time. Raises ``RuntimeError``."""
    return _Training(trace, how, ranks, machines, calibration, scaling or Scaling()).run()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection looks at the objects of a thousand ranks, for seconds, in the call of one of them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@final
class _Training:
    def __init__(
        self,
        trace: Trace,
        how: Dense | Sparse | Local,
        ranks: int,
        machines: Machines,
        calibration: Calibration,
        scaling: Scaling,
    ) -> None:
        self._trace, self._how, self._ranks, self._calibration = trace, how, ranks, calibration
        hosts = machines.hosts(ranks)
        links = machines.links
        # The latency of machines includes the processor's part, which the hosts add here.
        far_s = max(0.0, links.latency_s - 2 * calibration.message_s) * scaling.latency
        near_s = max(0.0, links.local_latency_s - 2 * calibration.message_s) * scaling.latency
        model = HostModel(
            host_of_rank=hosts,
            card_bytes_per_s=links.bytes_per_s / scaling.num_bytes,
            cores=machines.cores,
            shared_cores=machines.emulated,
            message_s=calibration.message_s * scaling.messages,
            byte_s=calibration.byte_s * scaling.num_bytes,
            beside_message_s=calibration.beside_message_s * scaling.messages,
            beside_byte_s=calibration.beside_byte_s * scaling.num_bytes,
            wake_s=calibration.wake_s,
            crowded_wake_s=calibration.crowded_wake_s,
            sharing_loss=calibration.sharing_loss,
        )
        local = {
            (source, target): LinkModel(latency_s=near_s)
            for source in range(ranks)
            for target in range(ranks)
            if hosts[source] == hosts[target]
        }
        self._network = SimulatedNetwork(
            ranks, default=LinkModel(latency_s=far_s), links=local, traced=False, hosts=model, carries=False
        )
        self._cluster = SimulatedCluster(
            self._network,
            EngineConfig(stall_warning_s=0),
            validates=False,
            reduce_bytes_per_s=calibration.reduce_bytes_per_s / scaling.num_bytes,
            hosts=hosts,
            bulk_apart=True,
        )
        for endpoint in self._cluster.ranks:
            endpoint.engine.planner.use_links(rounded(links))
        assert self._network.hosts is not None
        self._hosts = self._network.hosts
        self._selecting = [self._hosts.thread(rank) for rank in range(ranks)]
        self._watches = [_Watch([], [], []) for _ in range(ranks)]
        self._memory = memoryview(bytearray(0))
        self._running = 0
        #: The last steps, which count, and as many before them.
        self._counted = how.period if isinstance(how, Local) else 1
        self._before = self._counts()

    def run(self) -> SimulatedSteps:
        how = self._how
        if isinstance(how, Dense):
            messages = optimizer_messages([layer.elements for layer in self._trace.layers], how.bucket_bytes)
            threads = [self._train_dense(rank, how, messages) for rank in range(self._ranks)]
        elif isinstance(how, Sparse):
            threads = [self._train_sparse(rank, how) for rank in range(self._ranks)]
        else:
            threads = [self._train_locally(rank, how) for rank in range(self._ranks)]
        with no_garbage_collection():
            for thread in threads:
                self._spawn(thread)
            while self._running:
                if not self._network.step():
                    raise RuntimeError("the simulated job stands still")
        return self._measured()

    # ------------------------------------------------------------------------------------------------------- threads

    def _train_dense(self, rank: int, how: Dense, messages: Sequence[Message]) -> _Thread:
        layers = self._trace.layers
        ready = sorted(
            (max(layers[layer].ready_s for layer in message.layers), index) for index, message in enumerate(messages)
        )
        for _ in range(_TURNS):
            gate, now_s, first_s = _Gate(len(messages)), 0.0, None
            for ready_s, index in ready:
                message = messages[index]
                num_bytes = (message.end - message.begin) * ELEMENT_BYTES
                packing_s = num_bytes / self._calibration.copy_bytes_per_s
                yield self._compute(rank, ready_s - now_s + packing_s + self._calibration.operation_s)
                now_s = ready_s
                first_s = self._network.now if first_s is None else first_s
                sizes: list[int | None] = [num_bytes]
                if how.kind is OpKind.ALLREDUCE:
                    shape, op = (message.end - message.begin,), ReduceOp.SUM
                    signature = Signature(how.kind, DType.FLOAT32, op, 0, shape, algorithm=how.schedule)
                else:
                    signature = Signature(how.kind, DType.FLOAT32, ReduceOp.NONE, 0, ())
                    sizes = [num_bytes if rank in (0, peer) else None for peer in range(self._ranks)]
                self._submit(rank, f"{index}", signature, sizes, gate, message.priority)
            called_s = self._network.now
            yield gate.opened
            self._note_waiting(rank, called_s, called_s if first_s is None else first_s)
            yield self._compute(rank, self._trace.period_s - now_s)
            self._end_step(rank)

    def _train_sparse(self, rank: int, how: Sparse) -> _Thread:
        order = sorted(range(len(how.buckets)), key=lambda index: how.buckets[index].ready_s)
        elements = sum(bucket.elements for bucket in how.buckets)
        for _ in range(_TURNS):
            gate, now_s, first_s = _Gate(len(order)), 0.0, None
            for index in order:
                bucket = how.buckets[index]
                yield self._compute(rank, bucket.ready_s - now_s)
                now_s = bucket.ready_s
                first_s = self._network.now if first_s is None else first_s
                select_s = bucket.effort * bucket.elements / self._calibration.select_elements_per_s
                self._spawn(self._exchange(rank, f"{index}", how.scripts[index], gate, select_s, bucket.priority))
            called_s = self._network.now
            yield gate.opened
            self._note_waiting(rank, called_s, called_s if first_s is None else first_s)
            # The selected elements are written into a gradient of zeros.
            yield self._compute(rank, elements * ELEMENT_BYTES / self._calibration.copy_bytes_per_s)
            yield self._compute(rank, self._trace.period_s - now_s)
            self._end_step(rank)

    def _train_locally(self, rank: int, how: Local) -> _Thread:
        waiting: list[tuple[Begun, _Gate]] = []
        for step in range(1, _TURNS * how.period + 1):
            yield self._compute(rank, self._trace.period_s)
            began_s = self._network.now
            for index, begun in enumerate(each for each in how.begun if each.step == step):
                gate = _Gate(1)
                copied_s = begun.elements * ELEMENT_BYTES / self._calibration.copy_bytes_per_s
                self._spawn(self._exchange(rank, f"{step}.{index}", begun.script, gate, copied_s, 1 << 20))
                waiting.append((begun, gate))
                self._spawn(self._time_exchange(rank, gate, began_s))
            called_s = self._network.now
            applied = 0
            while waiting and waiting[0][0].due <= step:
                begun, gate = waiting.pop(0)
                yield gate.opened
                applied += begun.elements
            self._watches[rank].waited.append(self._network.now - called_s)
            yield self._compute(rank, applied * ELEMENT_BYTES / self._calibration.copy_bytes_per_s)
            self._end_step(rank)

    def _time_exchange(self, rank: int, gate: _Gate, began_s: float) -> _Thread:
        yield gate.opened
        self._watches[rank].exchanged.append(self._network.now - began_s)

    def _exchange(self, rank: int, name: str, script: Script, gate: _Gate, before_s: float, priority: int) -> _Thread:
        """Select, and carry out one action after the other."""
        yield self._select(rank, before_s)
        for number, each in enumerate(script):
            started = self._start(rank, f"{name}.{number}", each, priority)
            yield started.opened
            merging_s = each.received(rank) / self._calibration.merge_bytes_per_s
            yield self._select(rank, merging_s + self._calibration.operation_s)
        gate.count_down()

    # ------------------------------------------------------------------------------------------------------ operations

    def _start(self, rank: int, name: str, each: Round, priority: int) -> _Gate:
        if each.kind is Allreduce:
            gate, [num_bytes] = _Gate(1), each.sends[0]
            signature = Signature(OpKind.ALLREDUCE, DType.FLOAT32, ReduceOp.SUM, 0, (num_bytes // ELEMENT_BYTES,))
            self._submit(rank, name, signature, [num_bytes // ELEMENT_BYTES * ELEMENT_BYTES], gate, priority)
        elif each.kind is Allgather:
            gate, sizes = _Gate(1), [row[0] for row in each.sends]
            signature = Signature(OpKind.ALLGATHER, DType.UINT8, ReduceOp.NONE, 0, (), tuple(sizes))
            self._submit(rank, name, signature, sizes, gate, priority)
        elif each.kind is Alltoall:
            gate = _Gate(1)
            signature = Signature(OpKind.ALLTOALL, DType.UINT8, ReduceOp.NONE, 0, ())
            sent, came = list(each.sends[rank]), [row[rank] for row in each.sends]
            sent[rank] = came[rank] = 0
            self._submit(rank, name, signature, [*sent, *came], gate, priority)
        elif each.kind is Broadcast:
            gate, [num_bytes] = _Gate(1), each.sends[each.root]
            signature = Signature(OpKind.BROADCAST, DType.UINT8, ReduceOp.NONE, each.root, (num_bytes,))
            self._submit(rank, name, signature, [num_bytes], gate, priority)
        else:
            pairs = [(peer, rank, row[rank]) for peer, row in enumerate(each.sends) if peer != rank and row[rank]]
            pairs += [(rank, peer, size) for peer, size in enumerate(each.sends[rank]) if peer != rank and size]
            gate = _Gate(len(pairs))
            signature = Signature(OpKind.SEND_RECV, DType.UINT8, ReduceOp.NONE, 0, ())
            for source, target, size in pairs:
                text = f"{name} from {source} to {target}"
                self._submit(rank, text, signature, [size], gate, priority, pair=(source, target))
        return gate

    def _submit(
        self,
        rank: int,
        name: str,
        signature: Signature,
        sizes: Sequence[int | None],
        gate: _Gate,
        priority: int,
        pair: tuple[int, int] | None = None,
    ) -> None:
        most = max(filter(None, sizes), default=0)
        if most > len(self._memory):
            self._memory = memoryview(bytearray(most))  # nobody reads what is written there
        buffers = [None if size is None else self._memory[:size] for size in sizes]

        def done() -> None:
            if submission.error is not None:
                raise submission.error
            gate.count_down()

        submission = TimedSubmission(
            name, signature, buffers, priority=priority, ranks=pair, repeats=pair is not None, on_done=done
        )
        self._cluster.submit_now(rank, submission)
        if submission.error is not None:
            raise submission.error

    def _compute(self, rank: int, seconds: float) -> _Waiting:
        return lambda resume: self._hosts.compute(rank, max(0.0, seconds), resume)

    def _select(self, rank: int, seconds: float) -> _Waiting:
        return lambda resume: self._selecting[rank].run(seconds, resume)

    def _spawn(self, thread: _Thread) -> None:
        self._running += 1
        self._go_on(thread)

    def _go_on(self, thread: _Thread) -> None:
        try:
            waiting = next(thread)
        except StopIteration:
            self._running -= 1
            return
        waiting(lambda: self._go_on(thread))

    # -------------------------------------------------------------------------------------------------------- figures

    def _note_waiting(self, rank: int, called_s: float, first_s: float) -> None:
        now = self._network.now
        self._watches[rank].waited.append(now - called_s)
        self._watches[rank].exchanged.append(now - first_s)

    def _counts(self) -> list[list[float]]:
        counters = [endpoint.engine.counters for endpoint in self._cluster.ranks]
        return [
            [float(each.bytes_sent) for each in counters],
            [float(each.messages_sent) for each in counters],
            [float(each) for each in self._hosts.card_bytes()],
            self._hosts.card_s(),
            self._hosts.moved_s(),
        ]

    def _end_step(self, rank: int) -> None:
        ended = self._watches[rank].ended
        ended.append(self._network.now)
        if len(ended) == self._counted and all(len(watch.ended) <= self._counted for watch in self._watches):
            self._before = self._counts()  # again for each rank, up to the last one that goes on to what counts

    def _measured(self) -> SimulatedSteps:
        counted = self._counted
        sent, messages, card_bytes, card_s, moved_s = (
            [(new - old) / counted for new, old in zip(now, then, strict=True)]
            for now, then in zip(self._counts(), self._before, strict=True)
        )
        step_s = fmean(watch.ended[-1] - watch.ended[-1 - counted] for watch in self._watches) / counted
        exposed_s = fmean(sum(watch.waited[-counted:]) / counted for watch in self._watches)
        # The second one of two turns, which have equally many exchanges.
        exchanged = [sum(watch.exchanged[len(watch.exchanged) // 2 :]) / counted for watch in self._watches]
        mean_s = fmean(exchanged)
        return SimulatedSteps(
            ranks=self._ranks,
            step_s=step_s,
            compute_s=step_s - exposed_s,
            exposed_s=exposed_s,
            exchange_s=max(exchanged),
            hidden_share=max(0.0, 1.0 - exposed_s / mean_s) if mean_s else 1.0,
            sent_bytes=fmean(sent),
            card_bytes=max(card_bytes),
            card_s=max(card_s),
            moved_s=max(moved_s),
            messages=fmean(messages),
        )
