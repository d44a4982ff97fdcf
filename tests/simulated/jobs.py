"""A job out of a seed: how many ranks, what they submit, in which order, when, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import PeerLost
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.testing.simulation import SimulatedCluster, Submission
from totalreduce.transports.simulated import LinkModel, SimulatedNetwork

SILENCE_S = 2.0


@dataclass
class Job:
    """What happened. ``culprits``: who may be named as lost; empty where nothing went wrong."""

    seed: int
    cluster: SimulatedCluster
    submissions: dict[tuple[int, str], Submission] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)
    culprits: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    fault_at_s: float = 0.0

    @property
    def trace(self) -> list[tuple[float, str, int, int, int]]:
        return self.cluster.network.trace


def make_job(seed: int, *, fault: str | None = None, world_size: int | None = None, num_tensors: int = 6) -> Job:
    """Prepare a job. ``fault``: ``"crash"`` or ``"cut"``. Beside the tensors: one allreduce, broadcast, barrier."""
    generator = random.Random(seed)
    size = world_size or generator.choice([1, 2, 3, 4, 5, 7, 8])
    config = EngineConfig(
        segment_bytes=generator.choice([64, 4096]),  # the larger sends small tensors by way of a root
        segment_bytes_min=16,
        lanes_min=generator.choice([1, 2, 4]),
        eager_bytes=generator.choice([32, 128, 4096]),
        floating_bytes_max=generator.choice([300, 4096]) * max(1, size - 1),
        scratch_segments=generator.choice([1, 4, 16]),
        starvation_limit=generator.choice([1, 5, 64]),
    )
    link = LinkModel(jitter_s=generator.choice([0.0, 1e-3]), latency_s=1e-4, bytes_per_s=1e6)
    network = SimulatedNetwork(size, seed=seed, default=link, silence_s=SILENCE_S)
    cluster = SimulatedCluster(network, config, validates=size <= 8, compute_jitter=1.0)
    job = Job(seed, cluster)
    for rank, order in enumerate(_orders(generator, size, num_tensors)):
        for place, (name, kind, count) in enumerate(order):
            _submit(job, rank, name, kind, count, generator, place)
    if fault == "crash" and size > 1:
        _crash(job, generator)
    elif fault == "cut" and size > 1:
        _cut(job, generator)
    return job


def run_job(job: Job) -> Job:
    """Run it, and check everything that must hold whatever happened."""
    job.cluster.run(until_s=60.0, dead=job.dead)
    bound = job.cluster.config.floating_bytes_max
    assert all(rank.engine.floating.peak_bytes <= bound for rank in job.cluster.ranks)
    for (rank, name), submission in job.submissions.items():
        where = f"seed {job.seed}: {name} on rank {rank}"
        if rank in job.dead and submission.done_at_s is None:
            continue
        if submission.error is None:
            assert submission.data == job.expected[name], where
        else:
            assert isinstance(submission.error, PeerLost), f"{where}: {submission.error!r}"
            assert submission.error.rank in job.culprits, f"{where}: {submission.error}"
            limit_s = job.fault_at_s + SILENCE_S + 1.0
            assert submission.done_at_s is not None
            assert submission.done_at_s <= max(limit_s, submission.at_s), where
    if not job.culprits:
        for rank in job.cluster.ranks:
            assert rank.engine.num_active == rank.engine.scratch.in_use == rank.engine.floating.total_bytes == 0
    return job


def _orders(generator: random.Random, size: int, num_tensors: int) -> list[list[tuple[str, OpKind, int]]]:
    counts = [generator.choice([0, 1, size - 1, size, size + 1, 17, 101]) for _ in range(num_tensors)]
    counts.append(2 * size + 1)
    operations = [(f"tensor {index}", OpKind.ALLREDUCE, count) for index, count in enumerate(counts)]
    operations.append(("broadcast", OpKind.BROADCAST, generator.choice([0, 1, 40])))
    operations.append(("barrier", OpKind.BARRIER, 0))
    return [generator.sample(operations, len(operations)) for _ in range(size)]


def _submit(job: Job, rank: int, name: str, kind: OpKind, count: int, generator: random.Random, place: int) -> None:
    size = job.cluster.network.world_size
    values = np.arange(count) * size + rank
    root = job.seed % size if kind is OpKind.BROADCAST else 0
    if kind is OpKind.ALLREDUCE:
        total = np.arange(count) * size * size + size * (size - 1) / 2
        signature = Signature(kind, DType.FLOAT64, ReduceOp.SUM, 0, (count,))
    else:
        total = np.arange(count) * size + root
        signature = Signature(kind, DType.FLOAT64, ReduceOp.NONE, root, (count,))
    job.expected[name] = total.astype(np.float64).tobytes()
    submission = Submission(
        name,
        signature,
        bytearray(values.astype(np.float64).tobytes()),
        at_s=generator.random() * 0.01 + place * 1e-4,
        priority=generator.randrange(3),
    )
    job.submissions[rank, name] = submission
    job.cluster.submit(rank, submission)


def _crash(job: Job, generator: random.Random) -> None:
    network = job.cluster.network
    victim = generator.randrange(network.world_size)
    job.fault_at_s = generator.random() * 0.02
    job.dead = job.culprits = (victim,)
    network.at(job.fault_at_s, lambda: network.crash(victim))


def _cut(job: Job, generator: random.Random) -> None:
    """Either end of the link may take the other for dead, and says so."""
    network = job.cluster.network
    a, b = generator.sample(range(network.world_size), 2)
    job.fault_at_s = generator.random() * 0.02
    job.culprits = (a, b)
    network.at(job.fault_at_s, lambda: network.cut(a, b))
