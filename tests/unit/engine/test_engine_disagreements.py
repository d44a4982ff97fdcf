"""Random programs in which ranks mean different things, messages in random order: nobody waits for ever.

Whatever collectives they call, and however far some of them are ahead: every operation ends, one on which all agree
ends well, and one on which they do not is noticed by somebody.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from engines_by_hand import BARRIER, Cluster

from totalreduce.engine.operation import Operation
from totalreduce.foundation.errors import MismatchError
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature

WHOLE = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE)
ROOTED = (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER)
KINDS = (*WHOLE, OpKind.GATHER, OpKind.SCATTER, OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.BARRIER)


class Call(NamedTuple):
    """What one rank calls. A root counts, and so does an algorithm, where there is one."""

    kind: OpKind
    root: int
    count: int
    algorithm: Algorithm

    def meaning(self) -> tuple[object, ...]:
        """What all ranks must have in common."""
        if self.kind is OpKind.BARRIER:
            return (self.kind,)
        if self.kind in ROOTED or self.kind is OpKind.ALLGATHER:
            return self.kind, self.count, self.root
        return self.kind, self.count, self.algorithm if self.kind is OpKind.ALLREDUCE else None

    def submit(self, cluster: Cluster, rank: int, name: str | None) -> Operation:
        """Call it."""
        kind, root, count, size = self.kind, self.root, self.count, cluster.world_size
        if kind is OpKind.BARRIER:
            return cluster.submit(rank, name, [], BARRIER)
        reduction = ReduceOp.SUM if kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else ReduceOp.NONE
        told_root = root if kind in ROOTED else 0
        if kind in WHOLE:
            algorithm = self.algorithm if kind is OpKind.ALLREDUCE else Algorithm.AUTO
            signature = Signature(kind, DType.FLOAT64, reduction, told_root, (count,), algorithm=algorithm)
            return cluster.submit(rank, name, [1.0] * count, signature)
        if kind is OpKind.ALLGATHER:
            sizes = tuple(count + (peer == root) for peer in range(size))
            signature = Signature(kind, DType.FLOAT64, reduction, told_root, (), sizes, Algorithm.DIRECT)
            return cluster.blocks(rank, name, signature, sizes)
        signature = Signature(kind, DType.FLOAT64, reduction, told_root, ())
        if kind is OpKind.ALLTOALL:
            return cluster.blocks(rank, name, signature, [count] * (2 * size))
        return cluster.blocks(rank, name, signature, [count if rank in (root, peer) else None for peer in range(size)])


def random_call(rng: random.Random, world_size: int) -> Call:
    algorithms = (Algorithm.AUTO, Algorithm.RING, Algorithm.TREE, Algorithm.STAR)
    return Call(
        rng.choice(KINDS), rng.randrange(world_size), rng.choice([1, 2, 3, 17, 40, 200]), rng.choice(algorithms)
    )


def random_program(rng: random.Random, world_size: int) -> list[list[Call]]:
    """By operation and rank. Often the same call again and again, and some ranks with a root or a size of their own."""
    usual, changes = random_call(rng, world_size), rng.random() < 0.5
    roots = rng.random() < 0.5
    program = []
    for _ in range(rng.randint(1, 12)):
        if changes:
            usual = random_call(rng, world_size)
        elif roots:
            usual = usual._replace(root=rng.randrange(world_size))
        calls = [usual] * world_size
        for rank in range(world_size if rng.random() < 0.5 else 0):
            if rng.random() < 0.3:
                other = random_call(rng, world_size)
                which = rng.randrange(3)
                calls[rank] = [other, usual._replace(root=other.root), usual._replace(count=other.count)][which]
        program.append(calls)
    return program


def check(seed: int, *, named: bool) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4, 5, 7, 8])
    program = random_program(rng, size)
    cluster = Cluster(size, eager_bytes=rng.choice([64, 256, 1024, 1 << 20]))
    pairs = [(source, target) for source in range(size) for target in range(size) if source != target]
    slow_links = {pair for pair in pairs if rng.random() < 0.3}
    haste = [0.01 + rng.random() ** 4 for _ in range(size)]
    operations: list[list[Operation]] = [[] for _ in range(size)]

    def waits(rank: int) -> bool:
        return named and bool(operations[rank]) and not operations[rank][-1].finished

    events = 0
    while any(len(mine) < len(program) for mine in operations):
        events += 1
        rank = rng.choices(range(size), haste)[0]
        if rng.random() < 0.3:
            if len(operations[rank]) < len(program) and not waits(rank):
                call = program[len(operations[rank])][rank]
                operations[rank].append(call.submit(cluster, rank, "w" if named else None))
        elif rng.random() < 0.2:
            cluster.compute(rng.randrange(size))
        else:
            pair = rng.choice(pairs)
            if pair not in slow_links or rng.random() < 0.02:
                cluster.move(*pair)
        if events % 1000 == 0:
            cluster.run()
            going_on = [rank for rank in range(size) if len(operations[rank]) < len(program)]
            assert not going_on or not all(waits(rank) for rank in going_on)
    cluster.run()
    for calls, ended in zip(program, zip(*operations, strict=True), strict=True):
        assert all(operation.finished for operation in ended), calls
        errors = [operation.error for operation in ended if operation.error is not None]
        assert all(isinstance(error, MismatchError) for error in errors)
        assert bool(errors) == (len({call.meaning() for call in calls}) > 1), calls
    assert all(engine.reception.num_bodies == 0 for engine in cluster.engines)


@pytest.mark.parametrize("named", [False, True])
def test_nobody_waits_for_ever(named: bool) -> None:
    # The last ones found what was wrong once.
    for seed in (*range(20), 87, 88, 95, 158, 220):
        check(seed, named=named)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(30))
def test_nobody_waits_for_ever_at_length(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(seed, named=False)
        check(seed, named=True)
