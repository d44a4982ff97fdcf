"""The conformance suite: the behaviour that the engine must have over any transport. Public.

A ``Case`` lists the collectives that all ranks submit. A ``Backend`` carries it out and returns one ``Record`` per
rank, and ``check_case`` compares. A transport is checked like this:

    >>> from totalreduce.testing import check_transport
    >>> check_transport("inproc", world_sizes=(1, 2)) > 0
    True

The reference (see ``conformance_oracle``) is plain torch. Elements differ on every rank and in every block, so that a
lost, doubled or misplaced segment shows, and they are small integers, so that sums are exact in every order and the
test is equality. Outputs begin with garbage; tensors that a collective only reads are compared too.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.types import OpKind
from totalreduce.groups import checked
from totalreduce.groups.checked import CheckedOperation, Member
from totalreduce.groups.group import Group
from totalreduce.tensors.work import Work
from totalreduce.testing.conformance_oracle import Collective, Tensors, expected, make_tensors
from totalreduce.testing.ranks import RankTransport, TransportFactory, run_ranks
from totalreduce.testing.simulation import SimulatedCluster, TimedSubmission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork

__all__ = [
    "Backend",
    "Case",
    "ConformanceError",
    "Record",
    "check_case",
    "check_record",
    "make_submission",
    "run_on",
    "simulated",
    "threaded",
]


class ConformanceError(AssertionError):
    """A result or a circumstance is wrong; the message names the case, the collective and the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The collectives of a test, and the circumstances in which they are submitted.

    Attributes:
        name: Name for messages.
        world_size: Number of ranks.
        collectives: In the order of submission.
        engine: Settings; with small sizes small tensors travel in many segments.
        hosts: Number of the host of every rank; by default each has its own.
        shuffled: Whether every rank submits in an order of its own.
        late_s: (rank, seconds): the delay before a rank begins.
        runs: How often the case is run, with other orders and delays; the bits must be the same.
        urgent: Name of a collective that must end before the earlier ones, if time is virtual.
    """

    name: str
    world_size: int
    collectives: tuple[Collective, ...]
    engine: EngineConfig = field(default_factory=EngineConfig)
    hosts: tuple[int, ...] | None = None
    shuffled: bool = False
    late_s: tuple[tuple[int, float], ...] = ()
    runs: int = 1
    urgent: str | None = None

    def order(self, rank: int, run: int) -> list[Collective]:
        """Return the collectives that ``rank`` submits, in its order."""
        order = [collective for collective in self.collectives if rank in self.members(collective)]
        if self.shuffled:
            random.Random(f"{self.name}/{rank}/{run}").shuffle(order)
        return order

    def delay_s(self, rank: int, run: int) -> float:
        """Return the delay before ``rank`` begins."""
        return dict(self.late_s).get(rank, 0.0) * (1 + run)

    def members(self, collective: Collective) -> tuple[int, ...]:
        """Return the ranks that take part in a collective."""
        return collective.members or tuple(range(self.world_size))


@dataclass(slots=True)
class Record:
    """The results of one rank by the names of collectives; times in seconds of one clock for all ranks."""

    #: Contents of the tensors that the collective writes.
    results: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    #: Contents of the tensors that it only reads, afterwards.
    read: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)  #: The sender of a message whose receiver did not name it.
    submitted_s: dict[str, float] = field(default_factory=dict)  #: When it was submitted.
    done_s: dict[str, float] = field(default_factory=dict)  #: When its end was noticed.
    floating_bytes_peak: int = 0  #: The largest size of all floating messages together.


@dataclass(frozen=True, slots=True)
class Backend:
    """Carries out a case: ``run(case, number of the run)``. With ``virtual_time`` its times are exact."""

    name: str
    run: Callable[[Case, int], list[Record]]
    virtual_time: bool = False


# ------------------------------------------------------------------------------------------------------------ verdict


def check_case(case: Case, backend: Backend) -> int:
    """Run a case and compare; returns how many results were compared.

    Raises:
        ConformanceError: A wrong value, different bits, a barrier that ends too early, too much memory, a hang.
    """
    where = f"{backend.name}: {case.name} on {case.world_size} rank(s)"
    first: list[Record] | None = None
    compared = 0
    for run in range(case.runs):
        try:
            records = backend.run(case, run)
        except ConformanceError as error:
            raise ConformanceError(f"{where}: {error}") from error
        except Exception as error:
            raise ConformanceError(f"{where}: {type(error).__name__}: {error}") from error
        by_rank = dict(enumerate(records))
        for collective in case.collectives:
            compared += _check_collective(case, collective, by_rank, where)
        for collective in case.collectives:
            _check_times(where, case, collective, records)
            if collective.kind in _EQUAL_EVERYWHERE:
                _check_equal_bits(where, case, collective, records)
        _check_circumstances(where, case, records, virtual_time=backend.virtual_time)
        first = first or records
        for rank, (before, now) in enumerate(zip(first, records, strict=True)):
            for name, results in now.results.items():
                if not _same_bits(before.results[name], results):
                    raise ConformanceError(f"{where}: {name}: run {run} has other bits than run 0 on rank {rank}")
    return compared


def check_record(case: Case, rank: int, record: Record, *, where: str = "") -> int:
    """Compare the record of one rank; returns how many collectives were compared. Raises ``ConformanceError``."""
    return sum(_check_collective(case, collective, {rank: record}, where) for collective in case.collectives)


def _check_collective(case: Case, collective: Collective, records: Mapping[int, Record], where: str) -> int:
    """Compare the records of some ranks (by rank) with the reference of a collective, which is computed once."""
    members = case.members(collective)
    ranks = [rank for rank in members if rank in records]
    if not ranks:
        return 0
    brought = [make_tensors(collective, position, len(members)) for position in range(len(members))]
    wanted = expected(collective, brought)
    exact = replace(collective, rough=False)
    for rank in ranks:
        here, record, position = f"{where}: {collective.name}: rank {rank}", records[rank], members.index(rank)
        _compare(collective, record.results[collective.name], wanted[position], here, "has")
        _compare(exact, record.read[collective.name], brought[position].inputs, here, "changed its inputs and has")
        source = record.sources.get(collective.name)
        if source is not None and source != members[0]:
            raise ConformanceError(f"{here} got rank {source} as the sender; it was rank {members[0]}")
    return len(ranks)


def _compare(
    collective: Collective, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], here: str, has: str
) -> None:
    if len(got) != len(wanted):
        raise ConformanceError(f"{here} {has} {len(got)} tensors instead of {len(wanted)}")
    for index, (result, reference) in enumerate(zip(got, wanted, strict=True)):
        right = (
            torch.allclose(result.double(), reference.double(), rtol=1e-2, atol=1e-2)
            if collective.rough
            else torch.equal(result, reference)
        )
        if not right:
            block = f" in block {index}" if len(wanted) > 1 else ""
            wrong = (result != reference).nonzero().flatten().tolist()
            raise ConformanceError(
                f"{here} {has} {len(wrong)} wrong elements of {len(reference)}{block}, first at {wrong[:1]}: "
                f"{result[wrong[:3]].tolist()} instead of {reference[wrong[:3]].tolist()}"
            )


_EQUAL_EVERYWHERE = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER})


def _check_equal_bits(where: str, case: Case, collective: Collective, records: Sequence[Record]) -> None:
    first, *others = case.members(collective)
    for rank in others:
        if not _same_bits(records[rank].results[collective.name], records[first].results[collective.name]):
            raise ConformanceError(f"{where}: {collective.name}: rank {rank} has other bits than rank {first}")


def _check_times(where: str, case: Case, collective: Collective, records: Sequence[Record]) -> None:
    """Check that no rank is done before all ranks have submitted from which it gets data."""
    name, members = collective.name, case.members(collective)
    for position, rank in enumerate(members):
        last = max(records[members[source]].submitted_s[name] for source in collective.sources(position, len(members)))
        if records[rank].done_s[name] < last:
            raise ConformanceError(f"{where}: {name} was done on rank {rank} before every rank had submitted it")


def _check_circumstances(where: str, case: Case, records: list[Record], *, virtual_time: bool) -> None:
    for rank, record in enumerate(records):
        if record.floating_bytes_peak > case.engine.floating_bytes_max:
            raise ConformanceError(
                f"{where}: {record.floating_bytes_peak} floating bytes on rank {rank}; the bound is "
                f"{case.engine.floating_bytes_max}"
            )
        if case.urgent is not None and virtual_time and case.world_size > 1:
            before = [c.name for c in case.collectives[: [c.name for c in case.collectives].index(case.urgent)]]
            if any(record.done_s[name] <= record.done_s[case.urgent] for name in before):
                raise ConformanceError(f"{where}: {case.urgent} did not overtake on rank {rank}")


def _same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# ----------------------------------------------------------------------------------------------------------- backends


def threaded(
    transport: RankTransport | TransportFactory, *, timeout_s: float = 30.0, shared_memory: bool = False
) -> Backend:
    """Ranks as threads of this process over a real transport.

    Args:
        transport: Name of the transport, or a function that makes the transports of all ranks.
        timeout_s: Deadline of every wait; a longer wait counts as a hang.
        shared_memory: Whether all tensors are made by ``Group.empty``.
    """

    def run(case: Case, number: int) -> list[Record]:
        engine = replace(case.engine, timeout_s=timeout_s)
        return run_ranks(
            case.world_size,
            lambda group: run_on(group, case, number, shared_memory=shared_memory),
            transport=transport,
            engine=engine,
            # The ranks share one interpreter: with 24 threads on two cores one of them may be silent for two seconds.
            tcp=TcpConfig(silence_s=timeout_s),
            hosts=case.hosts,
            timeout_s=2 * timeout_s,
        )

    return Backend(transport if isinstance(transport, str) else "given transport", run)


def run_on(group: Group, case: Case, run: int = 0, *, shared_memory: bool = False) -> Record:
    """Carry out one rank's part of a case; all ranks call it, each with its own group."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return group.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor) if shared_memory else tensor

    # The delay is a circumstance of the case; no condition is waited for.
    threading.Event().wait(case.delay_s(group.rank, run))
    record = Record()
    subgroups: dict[tuple[int, ...], Group] = {}
    works: list[tuple[Collective, Work, Tensors]] = []
    for collective in case.order(group.rank, run):
        members = case.members(collective)
        tensors = make_tensors(collective, members.index(group.rank), len(members), move)
        here = group
        if collective.members and collective.kind is not OpKind.SEND_RECV:
            if members not in subgroups:
                subgroups[members] = group.subgroup(members, name=f"of {case.name}")
            here = subgroups[members]
        record.submitted_s[collective.name] = time.monotonic()
        work = _start(here, collective, tensors)
        if collective.kind is OpKind.BARRIER:
            _note(record, collective, tensors, time.monotonic())
        else:
            works.append((collective, work, tensors))
    for collective, work, tensors in works:
        work.wait()
        _note(record, collective, tensors, time.monotonic())
        if collective.any_source and work.source is not None and tensors.outputs:
            record.sources[collective.name] = work.source
    record.floating_bytes_peak = group.statistics().floating_bytes_peak
    return record


def _start(group: Group, collective: Collective, tensors: Tensors) -> Work:
    name, priority, root = collective.name, collective.priority, collective.root
    op, schedule = collective.reduction, collective.schedule
    inputs, outputs = tensors.inputs, tensors.outputs
    input_arg, output_arg = tensors.input_arg, tensors.output_arg
    match collective.kind:
        case OpKind.ALLREDUCE:
            return group.allreduce(outputs[0], name=name, op=op, schedule=schedule, priority=priority)
        case OpKind.REDUCE:
            return group.reduce(outputs[0], root=root, name=name, op=op, schedule=schedule, priority=priority)
        case OpKind.BROADCAST:
            return group.broadcast(
                outputs[0], root=root, name=name, schedule=schedule, priority=priority, async_op=True
            )
        case OpKind.ALLGATHER:
            return group.allgather(output_arg, inputs[0], name=name, schedule=schedule, priority=priority)
        case OpKind.REDUCE_SCATTER:
            return group.reduce_scatter(outputs[0], input_arg, name=name, op=op, schedule=schedule, priority=priority)
        case OpKind.GATHER:
            return group.gather(output_arg or None, inputs[0], root=root, name=name, priority=priority)
        case OpKind.SCATTER:
            return group.scatter(outputs[0], input_arg or None, root=root, name=name, priority=priority)
        case OpKind.ALLTOALL:
            return group.alltoall(output_arg, input_arg, name=name, priority=priority)
        case OpKind.SEND_RECV:
            sender, receiver = collective.members
            if inputs:
                return group.send(inputs[0], dst=receiver, tag=_tag(collective), priority=priority)
            source = None if collective.any_source else sender
            return group.recv(outputs[0], src=source, tag=_tag(collective), priority=priority)
        case OpKind.BARRIER:
            return group.barrier()


def _tag(collective: Collective) -> int:
    """Return a tag of the message's own, so that the order of submission does not matter."""
    return zlib.crc32(collective.name.encode())


def _note(record: Record, collective: Collective, tensors: Tensors, now: float) -> None:
    record.results[collective.name], record.read[collective.name] = tensors.outputs, tensors.inputs
    record.done_s[collective.name] = now


def simulated(
    *, seed: int = 0, link: LinkModel | None = None, prepare: Callable[[SimulatedNetwork], None] | None = None
) -> Backend:
    """Ranks in virtual time. In every second run of a case, bulk has links of its own.

    Args:
        seed: Seed of the delays.
        link: Model of every link.
        prepare: Called with the network before the run, to inject faults.
    """
    model = link or LinkModel(bytes_per_s=1e6, latency_s=1e-4, jitter_s=1e-3)

    def run(case: Case, number: int) -> list[Record]:
        network = SimulatedNetwork(case.world_size, seed=seed + number, default=model)
        if prepare is not None:
            prepare(network)
        apart = bool(number % 2)
        cluster = SimulatedCluster(network, case.engine, compute_jitter=1.0, hosts=case.hosts, bulk_apart=apart)
        submitted = [_submissions(cluster, case, rank, number) for rank in range(case.world_size)]
        cluster.run(until_s=600.0)
        _raise_first_failure(submitted)
        return [_record(cluster, rank, mine) for rank, mine in enumerate(submitted)]

    return Backend("simulated", run, virtual_time=True)


#: What one rank has submitted.
_Submitted = list[tuple[Collective, Tensors, TimedSubmission]]


def _submissions(cluster: SimulatedCluster, case: Case, rank: int, run: int) -> _Submitted:
    mine: _Submitted = []
    for order, collective in enumerate(case.order(rank, run)):
        at_s = case.delay_s(rank, run) + 1e-5 * order
        tensors, submission = make_submission(collective, rank, case.world_size, at_s=at_s)
        cluster.submit(rank, submission)
        mine.append((collective, tensors, submission))
    return mine


def make_submission(
    collective: Collective, rank: int, world_size: int, *, at_s: float = 0.0
) -> tuple[Tensors, TimedSubmission]:
    """Return the tensors of a rank that takes part, and its submission to a simulated cluster."""
    members = collective.members or tuple(range(world_size))
    position = members.index(rank)
    tensors = make_tensors(collective, position, len(members))
    operation = _checked(collective, tensors, Member(position, len(members)))
    if operation.operands is not None:  # a barrier has none
        assert not operation.operands.copies_back
        operation.operands.prepare()
    name, candidates = collective.name, None
    if collective.kind is OpKind.SEND_RECV:
        name = f"{collective.name} from {members[0]}"
        if collective.any_source and tensors.outputs:
            candidates = {other: f"{collective.name} from {other}" for other in range(world_size) if other != rank}
    submission = TimedSubmission(
        name,
        operation.signature,
        operation.buffers,
        at_s=at_s,
        priority=collective.priority,
        ranks=members,
        candidates=candidates,
    )
    return tensors, submission


def _checked(collective: Collective, tensors: Tensors, member: Member) -> CheckedOperation:
    """Return the operation that a group would submit to the engine."""
    kind, name, root = collective.kind, collective.name, collective.root
    op, algorithm = collective.reduction, collective.schedule
    inputs, outputs = tensors.inputs, tensors.outputs
    input_arg, output_arg = tensors.input_arg, tensors.output_arg
    match kind:
        case OpKind.ALLREDUCE | OpKind.REDUCE:
            root = root if kind is OpKind.REDUCE else 0
            return checked.reduction(kind, outputs[0], name, op=op, root=root, algorithm=algorithm, writes=True)
        case OpKind.BROADCAST:
            return checked.broadcast(outputs[0], name, root=root, algorithm=algorithm, writes=True)
        case OpKind.ALLGATHER:
            return checked.allgather(output_arg, inputs[0], name, member, algorithm=algorithm)
        case OpKind.REDUCE_SCATTER:
            return checked.reduce_scatter(outputs[0], input_arg, name, member, op=op, algorithm=algorithm)
        case OpKind.GATHER:
            return checked.gather(output_arg or None, inputs[0], name, member, root=root)
        case OpKind.SCATTER:
            return checked.scatter(outputs[0], input_arg or None, name, member, root=root)
        case OpKind.ALLTOALL:
            return checked.alltoall(output_arg, input_arg, name, member)
        case OpKind.SEND_RECV:
            return checked.message((inputs or outputs)[0], name, writes=not inputs)
        case OpKind.BARRIER:
            return checked.barrier()


def _raise_first_failure(submitted: Sequence[_Submitted]) -> None:
    failed = [(s.done_at_s or 0.0, rank, s) for rank, mine in enumerate(submitted) for *_, s in mine if s.error]
    if failed:
        at_s, rank, submission = min(failed, key=lambda failure: failure[:2])
        raise ConformanceError(f"{submission.name} failed on rank {rank} at {at_s:.6f} s: {submission.error}")


def _record(
    cluster: SimulatedCluster, rank: int, submitted: Iterable[tuple[Collective, Tensors, TimedSubmission]]
) -> Record:
    record = Record(floating_bytes_peak=cluster.ranks[rank].engine.reception.floating.peak_bytes)
    for collective, tensors, submission in submitted:
        assert submission.done_at_s is not None
        record.submitted_s[collective.name] = submission.at_s
        _note(record, collective, tensors, submission.done_at_s)
        if submission.candidates is not None and submission.source is not None:
            record.sources[collective.name] = submission.source
    return record
