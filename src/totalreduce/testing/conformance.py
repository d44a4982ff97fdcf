"""The conformance suite: what any transport must let the engine do. Data in, verdict out; public.

A ``Case`` says what all ranks submit; a ``Backend`` carries it out and returns one ``Record`` per rank; ``check_case``
compares. Add a transport and check it:

    >>> from totalreduce.testing import check_transport
    >>> check_transport("inproc", world_sizes=(1, 2)) > 0
    True

The oracle is a stacked torch reference. Inputs differ in every element on every rank, so that a segment that is lost,
doubled or misplaced shows, and they are small integers, so that sums are exact in every order and equality is the test.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.groups.group import Group
from totalreduce.groups.work import Work
from totalreduce.testing.ranks import RankTransport, TransportFactory, run_ranks
from totalreduce.testing.simulation import SimulatedCluster, Submission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork

__all__ = [
    "Backend",
    "Case",
    "Collective",
    "ConformanceError",
    "Record",
    "check_case",
    "expected",
    "make_input",
    "simulated",
    "threaded",
]


class ConformanceError(AssertionError):
    """Something does not do what it must; the message names the case, the collective and the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation, submitted by every rank. ``rough``: normal floats instead of integers (see ``Case.runs``)."""

    name: str
    kind: OpKind = OpKind.ALLREDUCE
    dtype: DType = DType.FLOAT64
    reduction: ReduceOp = ReduceOp.SUM
    num_elements: int = 1
    root: int = 0
    priority: int = 0
    rough: bool = False

    @property
    def signature(self) -> Signature:
        """As the engine wants it."""
        if self.kind is OpKind.BARRIER:
            return Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,))
        reduction = self.reduction if self.kind is OpKind.ALLREDUCE else ReduceOp.NONE
        return Signature(self.kind, self.dtype, reduction, self.root, (self.num_elements,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What happens, and under which circumstances.

    Attributes:
        name: For the verdict.
        world_size: Number of ranks.
        collectives: In the order of submission.
        engine: Sizes; small ones make small tensors travel in many segments.
        shuffled: Every rank submits in an order of its own.
        late_s: (rank, seconds): the rank begins so much later.
        runs: How often the case is run, with other orders and delays; the bits must be the same.
        urgent: Name of a collective that must be done before those submitted before it, where time is virtual.
    """

    name: str
    world_size: int
    collectives: tuple[Collective, ...]
    engine: EngineConfig = field(default_factory=EngineConfig)
    shuffled: bool = False
    late_s: tuple[tuple[int, float], ...] = ()
    runs: int = 1
    urgent: str | None = None

    def order(self, rank: int, run: int) -> list[Collective]:
        """What ``rank`` submits, in its order."""
        order = list(self.collectives)
        if self.shuffled:
            random.Random(f"{self.name}/{rank}/{run}").shuffle(order)
        return order

    def delay_s(self, rank: int, run: int) -> float:
        """When ``rank`` begins."""
        return dict(self.late_s).get(rank, 0.0) * (1 + run)


@dataclass(slots=True)
class Record:
    """What one rank saw; times in seconds of one clock for all ranks."""

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    submitted_s: dict[str, float] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)
    floating_bytes_peak: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Carries out a case: ``run(case, number of the run)``. ``virtual_time``: its times can be trusted exactly."""

    name: str
    run: Callable[[Case, int], list[Record]]
    virtual_time: bool = False


# ------------------------------------------------------------------------------------------------------------ oracle


def make_input(collective: Collective, rank: int, world_size: int) -> torch.Tensor:
    """The tensor that ``rank`` brings; exact under the reduction unless ``rough``."""
    dtype: torch.dtype = getattr(torch, collective.dtype.name.lower())
    place = np.arange(collective.num_elements, dtype=np.int64) * world_size + rank + 1
    mixed = (place * 2_654_435_761 % 2**32) >> 8
    if collective.rough:
        generator = np.random.default_rng([rank, collective.num_elements])
        return torch.from_numpy(generator.standard_normal(collective.num_elements)).to(dtype)
    if collective.dtype is DType.BOOL:
        values = mixed % 2
    elif collective.reduction is ReduceOp.PRODUCT:
        values = mixed % 3 + 1 if dtype in (torch.int64, torch.int32) else 2 ** (mixed % 2)
    elif collective.dtype.itemsize == 1:
        # An average must not overflow on the way; a sum may, and wraps like torch's.
        span = 248 // world_size if collective.reduction is ReduceOp.AVG else 256
        values = mixed % span - (0 if dtype is torch.uint8 else span // 2)
    else:
        span = 256 if dtype is torch.bfloat16 else 2048 if collective.dtype.itemsize == 2 else 2**20
        values = mixed % span - span // 2
    return torch.from_numpy(values).to(dtype)


def expected(collective: Collective, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result, from all ranks' inputs."""
    if collective.kind is not OpKind.ALLREDUCE:
        return inputs[collective.root]
    dtype, stacked = inputs[0].dtype, torch.stack(list(inputs))
    if dtype is torch.bool:
        is_or = collective.reduction in (ReduceOp.SUM, ReduceOp.MAX)
        return stacked.any(0) if is_or else stacked.all(0)
    wide = stacked.float() if collective.dtype.is_half else stacked if stacked.is_floating_point() else stacked.long()
    match collective.reduction:
        case ReduceOp.MIN:
            total = wide.amin(0)
        case ReduceOp.MAX:
            total = wide.amax(0)
        case ReduceOp.PRODUCT:
            total = wide.prod(0)
        case _:
            total = wide.sum(0)
    if collective.reduction is ReduceOp.AVG:
        rounding = None if wide.is_floating_point() else "trunc"
        total = torch.div(total, len(inputs), rounding_mode=rounding)
    return total.to(dtype)


# ------------------------------------------------------------------------------------------------------------ verdict


def check_case(case: Case, backend: Backend) -> int:
    """Run a case and compare; returns how many results were compared.

    Raises:
        ConformanceError: A wrong value, different bits, a barrier that lets through, too much memory, a hang, an error.
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
        for collective in case.collectives:
            _check_values(where, case, collective, records)
            _check_times(where, collective, records)
            compared += len(records)
        _check_circumstances(where, case, records, virtual_time=backend.virtual_time)
        first = first or records
        for collective in case.collectives:
            if not _same_bits(first[0].results[collective.name], records[0].results[collective.name]):
                raise ConformanceError(f"{where}: {collective.name}: run {run} has other bits than run 0")
    return compared


def _check_values(where: str, case: Case, collective: Collective, records: list[Record]) -> None:
    inputs = [make_input(collective, rank, case.world_size) for rank in range(case.world_size)]
    if collective.kind is OpKind.BARRIER:
        inputs = [tensor[:0] for tensor in inputs]
    reference = expected(collective, inputs)
    for rank, record in enumerate(records):
        result = record.results[collective.name]
        right = (
            torch.allclose(result.double(), reference.double(), rtol=1e-2, atol=1e-2)
            if collective.rough
            else torch.equal(result, reference)
        )
        if not right:
            wrong = (result != reference).nonzero().flatten().tolist()
            raise ConformanceError(
                f"{where}: {collective.name}: rank {rank} has {len(wrong)} wrong elements of {len(reference)}, first "
                f"at {wrong[:1]}: {result[wrong[:3]].tolist()} instead of {reference[wrong[:3]].tolist()}"
            )
        if not _same_bits(result, records[0].results[collective.name]):
            raise ConformanceError(f"{where}: {collective.name}: rank {rank} has other bits than rank 0")


def _check_times(where: str, collective: Collective, records: list[Record]) -> None:
    last = max(record.submitted_s[collective.name] for record in records)
    for rank, record in enumerate(records):
        if record.done_s[collective.name] < last:
            raise ConformanceError(
                f"{where}: {collective.name} was done on rank {rank} before every rank had submitted it"
            )


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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
        if a.dtype is not torch.bfloat16
        else (torch.equal(a.view(torch.int16), b.view(torch.int16)))
    )


# ----------------------------------------------------------------------------------------------------------- backends


def threaded(transport: RankTransport | TransportFactory, *, timeout_s: float = 30.0) -> Backend:
    """Ranks as threads of this process over a real transport.

    Args:
        transport: Its name, or a function that makes the transports of all ranks.
        timeout_s: Deadline of every wait; what takes longer counts as a hang.
    """

    def run(case: Case, number: int) -> list[Record]:
        engine = replace(case.engine, timeout_s=timeout_s)

        def body(group: Group) -> Record:
            # Nobody signals a late rank: its being late is the circumstance, no condition is waited for.
            threading.Event().wait(case.delay_s(group.rank, number))
            return _on_group(group, case, number)

        return run_ranks(case.world_size, body, transport=transport, engine=engine, timeout_s=2 * timeout_s)

    return Backend(transport if isinstance(transport, str) else "given transport", run)


def _on_group(group: Group, case: Case, run: int) -> Record:
    record = Record()
    works: list[tuple[str, Work]] = []
    for collective in case.order(group.rank, run):
        name, tensor = collective.name, make_input(collective, group.rank, group.world_size)
        record.submitted_s[name] = time.monotonic()
        match collective.kind:
            case OpKind.ALLREDUCE:
                work = group.allreduce(tensor, name=name, op=collective.reduction, priority=collective.priority)
                works.append((name, work))
            case OpKind.BROADCAST:
                work = group.broadcast(
                    tensor, name=name, root=collective.root, priority=collective.priority, async_op=True
                )
                works.append((name, work))
            case OpKind.BARRIER:
                record.results[name] = group.barrier().wait()
                record.done_s[name] = time.monotonic()
    for name, work in works:
        record.results[name] = work.wait()
        record.done_s[name] = time.monotonic()
    record.floating_bytes_peak = group.statistics().floating_bytes_peak
    return record


def simulated(
    *, seed: int = 0, link: LinkModel | None = None, prepare: Callable[[SimulatedNetwork], None] | None = None
) -> Backend:
    """Ranks in virtual time.

    Args:
        seed: Of delays.
        link: Model of every link.
        prepare: Called with the network before anything happens; for faults.
    """
    model = link or LinkModel(bytes_per_s=1e6, latency_s=1e-4, jitter_s=1e-3)

    def run(case: Case, number: int) -> list[Record]:
        network = SimulatedNetwork(case.world_size, seed=seed + number, default=model)
        if prepare is not None:
            prepare(network)
        cluster = SimulatedCluster(network, case.engine, compute_jitter=1.0)
        submissions = [_submissions(cluster, case, rank, number) for rank in range(case.world_size)]
        cluster.run(until_s=600.0)
        _raise_first_failure(submissions)
        return [_record(cluster, rank, mine) for rank, mine in enumerate(submissions)]

    return Backend("simulated", run, virtual_time=True)


def _submissions(cluster: SimulatedCluster, case: Case, rank: int, run: int) -> list[Submission]:
    mine = []
    for place, collective in enumerate(case.order(rank, run)):
        tensor = make_input(collective, rank, case.world_size)
        if collective.kind is OpKind.BARRIER:
            tensor = tensor[:0]
        data = bytearray(tensor.view(torch.uint8).numpy().tobytes() if len(tensor) else b"")
        at_s = case.delay_s(rank, run) + 1e-5 * place
        submission = Submission(collective.name, collective.signature, data, at_s=at_s, priority=collective.priority)
        cluster.submit(rank, submission)
        mine.append(submission)
    return mine


def _raise_first_failure(submissions: Sequence[Sequence[Submission]]) -> None:
    failed = [(s.done_at_s or 0.0, rank, s) for rank, mine in enumerate(submissions) for s in mine if s.error]
    if failed:
        at_s, rank, submission = min(failed, key=lambda failure: failure[:2])
        raise ConformanceError(f"{submission.name} failed on rank {rank} at {at_s:.6f} s: {submission.error}")


def _record(cluster: SimulatedCluster, rank: int, submissions: Iterable[Submission]) -> Record:
    record = Record(floating_bytes_peak=cluster.ranks[rank].engine.floating.peak_bytes)
    for submission in submissions:
        assert submission.done_at_s is not None
        dtype: torch.dtype = getattr(torch, submission.signature.dtype.name.lower())
        data = submission.data
        record.results[submission.name] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        record.submitted_s[submission.name], record.done_s[submission.name] = submission.at_s, submission.done_at_s
    return record
