"""A job out of a seed: how many ranks, what they submit, in which order, when, and what goes wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import PeerLost
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules import algorithms_of
from totalreduce.testing.conformance import make_submission
from totalreduce.testing.conformance_oracle import Collective, Tensors, expected, make_tensors
from totalreduce.testing.simulation import SimulatedCluster, TimedSubmission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork

SILENCE_S = 2.0
#: How long after each other the ranks notice a fault: together, within a few messages, and later than they hear of it.
SPREADS_S = (0.0, 1e-3, 0.05)
ROOTED = (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER)


@dataclass
class Job:
    """What happened.

    Attributes:
        tensors: By rank and name: what was submitted.
        expected: By rank and name: what must be in the outputs in the end.
        culprits: Who may be named as lost; empty where nothing went wrong.
    """

    seed: int
    cluster: SimulatedCluster
    submissions: dict[tuple[int, str], TimedSubmission] = field(default_factory=dict)
    tensors: dict[tuple[int, str], Tensors] = field(default_factory=dict)
    expected: dict[tuple[int, str], list[torch.Tensor]] = field(default_factory=dict)
    culprits: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    fault_at_s: float = 0.0

    @property
    def trace(self) -> list[tuple[float, str, int, int, int]]:
        return self.cluster.network.trace


def make_job(
    seed: int,
    *,
    fault: str | None = None,
    world_size: int | None = None,
    collectives: list[Collective] | None = None,
    has_late_rank: bool = False,
) -> Job:
    """Prepare a job; by default several allreduces and one of everything else.

    ``fault``: ``"crash"``; ``"stop"``: a rank falls silent; or ``"cut"``: a link does.
    ``has_late_rank``: one rank submits when the others have submitted everything; and there is four times as much.
    """
    generator = random.Random(seed)
    size = world_size or generator.choice([1, 2, 3, 4, 5, 7, 8])
    config = EngineConfig(
        segment_bytes=generator.choice([64, 4096]),
        segment_bytes_min=16,
        lanes_min=generator.choice([1, 2, 4]),
        eager_bytes=generator.choice([32, 128, 4096]),
        floating_bytes_max=generator.choice([300, 4096]) * max(1, size - 1),
        scratch_segments=generator.choice([1, 4, 16]),
        starvation_limit=generator.choice([1, 5, 64]),
        bulk_bytes=32,
    )
    link = LinkModel(jitter_s=generator.choice([0.0, 1e-3]), latency_s=1e-4, bytes_per_s=1e6)
    network = SimulatedNetwork(size, seed=seed, default=link, silence_s=SILENCE_S)
    hosts = tuple(generator.randrange(2) for _ in range(size))
    cluster = SimulatedCluster(
        network, config, validates=size <= 8, compute_jitter=1.0, hosts=hosts, bulk_apart=bool(seed % 2)
    )
    job = Job(seed, cluster)
    chosen = collectives if collectives is not None else _collectives(generator, size)
    late = generator.randrange(size) if has_late_rank else None
    if has_late_rank:
        for turn in range(3):
            chosen += [replace(each, name=f"{each.name} {turn}") for each in _collectives(generator, size)]
    for collective in chosen:
        _expect(job, collective, size)
    for rank in range(size):
        mine = [collective for collective in chosen if rank in (collective.members or range(size))]
        for place, collective in enumerate(generator.sample(mine, len(mine))):
            at_s = generator.random() * 0.01 + place * 1e-4 + (1.0 if rank == late else 0.0)
            tensors, submission = make_submission(collective, rank, size, at_s=at_s)
            job.tensors[rank, collective.name], job.submissions[rank, collective.name] = tensors, submission
            cluster.submit(rank, submission)
    if fault == "crash" and size > 1:
        _end_a_rank(job, generator, job.cluster.network.crash)
    elif fault == "stop":
        _end_a_rank(job, generator, job.cluster.network.stop)
    elif fault == "cut" and size > 1:
        _cut(job, generator)
    return job


def run_job(job: Job) -> Job:
    """Run it, and check everything that must hold whatever happened."""
    job.cluster.run(until_s=60.0, dead=job.dead)
    bound = job.cluster.config.floating_bytes_max
    assert all(rank.engine.reception.floating.peak_bytes <= bound for rank in job.cluster.ranks)
    for (rank, name), submission in job.submissions.items():
        where = f"seed {job.seed}: {name} on rank {rank}"
        if rank in job.dead and submission.done_at_s is None:
            continue
        if submission.error is None:
            got, wanted = job.tensors[rank, name].outputs, job.expected[rank, name]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), where
        else:
            assert isinstance(submission.error, PeerLost), f"{where}: {submission.error!r}"
            assert submission.error.rank in job.culprits, f"{where}: {submission.error}"
            limit_s = job.fault_at_s + SILENCE_S + 1.0
            assert submission.done_at_s is not None
            assert submission.done_at_s <= max(limit_s, submission.at_s), where
    if not job.culprits:
        for rank in job.cluster.ranks:
            engine = rank.engine
            assert engine.table.num_active == engine.reception.num_bodies == len(engine.table.early.records) == 0
            assert not engine._entries.waiting
            assert not engine._rendezvous.asking
        _check_allowances(job.cluster)
    return job


def _check_allowances(cluster: SimulatedCluster) -> None:
    """What each rank has used of its allowances was returned to it, or is due, but for answers that have not left."""
    for source, target in itertools.permutations(cluster.ranks, 2):
        sender, receiver, peer = source.engine, target.engine, target.engine.rank
        for allowance, used in (
            (receiver.table.early.allowance, sender._entries._used),
            (receiver.reception.floating.allowance, sender._rendezvous._used),
        ):
            assert allowance.used(sender.rank) == 0
            assert allowance.take_credit(sender.rank) == used.get(peer, 0)


def _collectives(generator: random.Random, size: int) -> list[Collective]:
    """Some of everything; schedules, sizes, roots and members at random."""

    def schedule(kind: OpKind) -> Algorithm:
        return (
            generator.choice([Algorithm.AUTO, *algorithms_of(kind)]) if len(algorithms_of(kind)) > 1 else Algorithm.AUTO
        )

    def count() -> int:
        return generator.choice([0, 1, size - 1, size, size + 1, 17, 101])

    def subset() -> tuple[int, ...]:
        return tuple(generator.sample(range(size), generator.randint(1, size)))

    chosen = [
        Collective(
            name=f"tensor {index}",
            num_elements=count() if index else 2 * size + 1,
            schedule=schedule(OpKind.ALLREDUCE),
            priority=generator.randrange(3),
            members=subset() if index == 1 else (),
        )
        for index in range(5)
    ]
    for kind in OpKind:
        if kind is OpKind.ALLREDUCE or (kind is OpKind.SEND_RECV and size == 1):
            continue
        members = tuple(generator.sample(range(size), 2)) if kind is OpKind.SEND_RECV else ()
        if kind not in (OpKind.SEND_RECV, OpKind.BARRIER) and generator.random() < 0.3:
            members = subset()
        chosen.append(
            Collective(
                name=kind.name.lower(),
                kind=kind,
                num_elements=count(),
                uneven=generator.random() < 0.5,
                root=generator.randrange(len(members) or size) if kind in ROOTED else 0,
                schedule=schedule(kind),
                priority=generator.randrange(3),
                members=members,
                any_source=generator.random() < 0.5,
            )
        )
    return chosen


def _expect(job: Job, collective: Collective, size: int) -> None:
    members = collective.members or tuple(range(size))
    brought = [make_tensors(collective, place, len(members)) for place in range(len(members))]
    for rank, outputs in zip(members, expected(collective, brought), strict=True):
        job.expected[rank, collective.name] = outputs


def _end_a_rank(job: Job, generator: random.Random, end: Callable[..., None]) -> None:
    """``end``: ``crash`` or ``stop`` of the network."""
    victim = generator.randrange(job.cluster.network.world_size)
    job.fault_at_s = generator.random() * 0.02
    job.dead = job.culprits = (victim,)
    spread_s = generator.choice(SPREADS_S)
    job.cluster.network.at(job.fault_at_s, lambda: end(victim, spread_s=spread_s))


def _cut(job: Job, generator: random.Random) -> None:
    """Either end of the link may take the other for dead, and says so."""
    network = job.cluster.network
    a, b = generator.sample(range(network.world_size), 2)
    job.fault_at_s = generator.random() * 0.02
    job.culprits = (a, b)
    network.at(job.fault_at_s, lambda: network.cut(a, b))
