"""The cases of the conformance suite, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product

import torch

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp
from totalreduce.groups.group import Group
from totalreduce.kernels import supports
from totalreduce.schedules import algorithms_of
from totalreduce.testing.conformance import Case, ConformanceError, check_case, simulated, threaded
from totalreduce.testing.conformance_oracle import Collective
from totalreduce.testing.ranks import RankTransport, TransportFactory, run_ranks

__all__ = ["WORLD_SIZES", "cases_for", "check_objects", "check_simulated", "check_transport", "large_cases_for"]

#: Odd and prime sizes reveal errors of index arithmetic; 1 must work everywhere.
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)

_REDUCTIONS = tuple(op for op in ReduceOp if op is not ReduceOp.NONE)
_LARGE_ELEMENTS = 4 * 1024 * 1024

#: Segments of 64 bytes: a few hundred bytes are many messages.
_TINY = EngineConfig(
    segment_bytes=64, segment_bytes_min=16, lanes_min=2, eager_bytes=1024, bulk_bytes=32, scratch_segments=4
)

_BLOCK_KINDS = (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALLTOALL)
_ROOTED = (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER)


def check_transport(
    transport: RankTransport | TransportFactory,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    thorough: bool = False,
    timeout_s: float = 30.0,
    shared_memory: bool = False,
) -> int:
    """Run the suite over a transport, with ranks as threads; returns how many results were compared.

    Args:
        transport: ``"inproc"``, ``"shm"``, ``"tcp"``, or a function from the world size to the transports of all ranks.
        world_sizes: Numbers of ranks.
        thorough: All reductions with all element types, sizes and schedules instead of a subset that covers each, and
            tensors of 16 MiB.
        timeout_s: A longer wait counts as a hang.
        shared_memory: Whether all tensors are made by ``Group.empty``.

    Raises:
        ConformanceError: The first wrong result or circumstance.
    """
    backend = threaded(transport, timeout_s=timeout_s, shared_memory=shared_memory)
    compared = 0
    for world_size in world_sizes:
        compared += sum(check_case(case, backend) for case in _cases(world_size, thorough=thorough))
        compared += check_objects(transport, world_size, timeout_s=timeout_s)
    return compared


def check_simulated(*, world_sizes: Sequence[int] = WORLD_SIZES, thorough: bool = False, seed: int = 0) -> int:
    """Run the suite in virtual time, where urgency can be checked exactly; otherwise like ``check_transport``.

    Object collectives are left out: they block, and are made of other collectives.
    """
    backend = simulated(seed=seed)
    return sum(check_case(case, backend) for size in world_sizes for case in _cases(size, thorough=thorough))


def _cases(world_size: int, *, thorough: bool) -> list[Case]:
    return [*cases_for(world_size, thorough=thorough), *(large_cases_for(world_size) if thorough else ())]


def cases_for(world_size: int, *, thorough: bool = False) -> list[Case]:
    """Return all cases for one world size."""
    return [
        *_matrix(world_size, thorough=thorough),
        *_rooted(world_size, thorough=thorough),
        *_blocks(world_size, thorough=thorough),
        _messages(world_size),
        _barrier(world_size),
        _subgroups(world_size),
        *_between_hosts(world_size),
        _orders(world_size),
        _everything(world_size),
        _small(world_size),
        _urgent(world_size),
        _floating(world_size),
        _rendezvous(world_size),
        _repeatable(world_size),
    ]


def large_cases_for(world_size: int) -> list[Case]:
    """Return cases with tensors (or all blocks together) of 16 MiB by every schedule, with the default segments."""
    cases = []
    for kind in OpKind:
        if kind in (OpKind.BARRIER, OpKind.SEND_RECV):
            continue
        blocks = world_size if kind in _BLOCK_KINDS else 1
        collectives = tuple(
            Collective(
                name=f"{algorithm} {kind.name.lower()} of 16 MiB",
                kind=kind,
                dtype=DType.FLOAT32,
                num_elements=_LARGE_ELEMENTS // blocks + 1,
                root=world_size // 2 if kind in _ROOTED else 0,
                schedule=_explicit(kind, algorithm),
            )
            for algorithm in algorithms_of(kind)
        )
        cases.append(Case(name=f"large {kind.name.lower()}", world_size=world_size, collectives=collectives))
    return cases


def check_objects(transport: RankTransport | TransportFactory, world_size: int, *, timeout_s: float = 30.0) -> int:
    """Run object collectives over a transport; returns how many values were compared. Raises ``ConformanceError``."""
    where = f"object collectives on {world_size} rank(s)"

    def body(group: Group) -> int:
        mine, compared = [_value(rank) for rank in range(world_size)], 0
        for root in range(world_size):
            is_root = group.rank == root
            received = [group.broadcast_object(mine[root] if is_root else None, root=root)]
            received.append(group.scatter_object(mine if is_root else None, root=root))
            gathered = group.gather_object(mine[group.rank], root=root)
            if (gathered is not None) != is_root:
                raise ConformanceError(f"{where}: rank {group.rank} got {gathered!r} of a gather to rank {root}")
            compared += _compare_values(where, [*received, *(gathered or [])], [mine[root], mine[group.rank], *mine])
        return compared + _compare_values(where, group.allgather_object(mine[group.rank]), mine)

    try:
        return sum(run_ranks(world_size, body, transport=transport, timeout_s=2 * timeout_s))
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{where}: {type(error).__name__}: {error}") from error


def _value(rank: int) -> dict[object, object]:
    """Return a value whose parts and sizes differ on every rank."""
    return {
        "rank": rank,
        rank: [None, True, -(2**70), 0.1 * rank, "ß" * rank],
        "nested": ({"bytes": bytes(range(rank))}, ()),
        "tensor": torch.arange(3 * rank, dtype=torch.bfloat16, device="cpu").reshape(3, rank),
        "scalar": torch.tensor(rank == 0, dtype=torch.bool, device="cpu"),
    }


def _compare_values(where: str, got: Sequence[object], wanted: Sequence[object]) -> int:
    compared = 0
    for result, reference in zip(got, wanted, strict=False):  # only the root of a gather has the last ones
        if not _alike(result, reference):
            raise ConformanceError(f"{where}: {result!r} instead of {reference!r}")
        compared += 1
    return compared


def _alike(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a == b


# --------------------------------------------------------------------------------------------------------- every kind


def _explicit(kind: OpKind, algorithm: str) -> str:
    """Return a schedule as a caller can choose it: not at all where there is only one."""
    return algorithm if len(algorithms_of(kind)) > 1 else Algorithm.AUTO


def _schedules(kind: OpKind) -> tuple[str, ...]:
    """Return the schedules that a caller can choose."""
    algorithms = algorithms_of(kind)
    return (Algorithm.AUTO, *algorithms) if len(algorithms) > 1 else (Algorithm.AUTO,)


def _sizes(world_size: int, dtype: DType) -> tuple[int, ...]:
    several = 3 * _TINY.segment_bytes * world_size // dtype.itemsize + 5
    return tuple(dict.fromkeys((0, 1, world_size - 1, world_size, world_size + 1, 101, several)))


def _matrix(world_size: int, *, thorough: bool) -> list[Case]:
    cases = []
    schedules = cycle(_schedules(OpKind.ALLREDUCE))
    for dtype in DType:
        sizes = _sizes(world_size, dtype)
        reductions = [op for op in _REDUCTIONS if supports(dtype, op)]
        chosen: Iterator[tuple[ReduceOp, int, str]]
        if thorough:
            chosen = product(reductions, sizes, _schedules(OpKind.ALLREDUCE))
        else:  # every reduction, every size and every schedule of this type, not all of them with each other
            count = max(len(reductions), len(sizes))
            shifted = islice(cycle(sizes), dtype, dtype + count)
            chosen = zip(islice(cycle(reductions), count), shifted, schedules, strict=False)
        collectives = tuple(
            Collective(
                name=f"{schedule} {op.name.lower()} of {size} {dtype.name.lower()}",
                dtype=dtype,
                reduction=op,
                num_elements=size,
                schedule=schedule,
            )
            for op, size, schedule in chosen
        )
        name = f"allreduce {dtype.name.lower()}"
        cases.append(Case(name=name, world_size=world_size, collectives=collectives, engine=_TINY))
    if thorough:
        return cases
    # One group for all types: what differs between the cases is the collectives only.
    together = tuple(collective for case in cases for collective in case.collectives)
    return [Case(name="allreduce", world_size=world_size, collectives=together, engine=_TINY)]


def _rooted(world_size: int, *, thorough: bool) -> list[Case]:
    """Return cases of broadcast and reduce, with every root."""
    shapes = ((DType.FLOAT32, 0), (DType.INT64, 1), (DType.BFLOAT16, 101), (DType.BOOL, 1000), (DType.FLOAT16, 67))
    reductions = cycle((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG))
    cases = []
    for kind in (OpKind.BROADCAST, OpKind.REDUCE):
        combinations = [
            (root, dtype, size, schedule)
            for root, (dtype, size), schedule in product(range(world_size), shapes, _schedules(kind))
        ]
        if not thorough:
            combinations = combinations[::2]  # there is an odd number of schedules: all of them, for every root
        collectives = tuple(
            Collective(
                name=f"{schedule} {size} {dtype.name.lower()} of {root}",
                kind=kind,
                dtype=dtype,
                reduction=next(reductions) if dtype is not DType.BOOL else ReduceOp.MIN,
                num_elements=size,
                root=root,
                schedule=schedule,
            )
            for root, dtype, size, schedule in combinations
        )
        name = f"{kind.name.lower()} with every root"
        cases.append(Case(name=name, world_size=world_size, collectives=collectives, engine=_TINY))
    return cases


def _blocks(world_size: int, *, thorough: bool) -> list[Case]:
    """Return cases of collectives with one block per rank: equal blocks, and blocks of which some are empty."""
    cases = []
    for kind in _BLOCK_KINDS:
        dtypes = list(DType) if thorough else [DType.INT32, DType.BFLOAT16, DType.BOOL]
        roots = range(world_size) if kind in _ROOTED else range(1)
        combinations = list(product(dtypes, roots, (False, True), (0, 1, world_size + 1, 101), _schedules(kind)))
        if not thorough:  # every root, every schedule and every size, but not all of them with each other
            combinations = combinations[:: 5 if kind in _ROOTED else 2]
        collectives = []
        for number, (dtype, root, uneven, size, schedule) in enumerate(combinations):
            reductions = [op for op in _REDUCTIONS if supports(dtype, op)]
            reduction = reductions[number % len(reductions)]
            called = f"{reduction.name.lower()} " if kind is OpKind.REDUCE_SCATTER else ""
            collectives.append(
                Collective(
                    name=f"{schedule} {called}{'uneven ' if uneven else ''}{size} {dtype.name} of {root}",
                    kind=kind,
                    dtype=dtype,
                    reduction=reduction,
                    num_elements=size,
                    uneven=uneven,
                    root=root,
                    schedule=schedule,
                )
            )
        name = kind.name.lower().replace("_", "-")
        cases.append(Case(name=name, world_size=world_size, collectives=tuple(collectives), engine=_TINY))
    return cases


def _messages(world_size: int) -> Case:
    """Return messages from every rank to every other; every second receiver does not name the sender."""
    sizes, dtypes = cycle((1, 0, 101, 16, 500, 7, 33)), cycle((DType.FLOAT32, DType.INT8, DType.BOOL, DType.FLOAT64))
    pairs = [(source, target) for source in range(world_size) for target in range(world_size) if source != target]
    return Case(
        name="messages",
        world_size=world_size,
        collectives=tuple(
            Collective(
                name=f"{source} to {target}{', from anybody' if number % 2 else ''}",
                kind=OpKind.SEND_RECV,
                dtype=next(dtypes),
                num_elements=next(sizes),
                members=(source, target),
                any_source=bool(number % 2),
                priority=number % 3,
            )
            for number, (source, target) in enumerate(pairs)
        ),
        # Some messages wait for their receiver; a receive from any rank finds them by their request.
        engine=EngineConfig(
            segment_bytes=64, segment_bytes_min=16, lanes_min=2, eager_bytes=256, bulk_bytes=16, scratch_segments=2
        ),
        shuffled=True,
        late_s=((world_size // 2, 0.02),),
    )


def _barrier(world_size: int) -> Case:
    barriers = tuple(Collective(name=f"barrier {index}", kind=OpKind.BARRIER) for index in range(3))
    return Case(
        name="barrier",
        world_size=world_size,
        collectives=barriers,
        # One scratch segment: early messages of a later round must not take the place of the earlier round's.
        engine=EngineConfig(scratch_segments=1),
        late_s=((world_size - 1, 0.05),),
    )


def _subgroups(world_size: int) -> Case:
    """Return collectives of overlapping subgroups at the same time, with ranks in orders of their own."""
    everybody = tuple(range(world_size))
    groups = dict.fromkeys(
        (everybody[::2], everybody[1::2], everybody[::-1], everybody[1:], everybody[:2], everybody[-1:])
    )
    collectives = []
    for members in groups:
        if not members:
            continue
        shown = ",".join(map(str, members))
        for index, kind in enumerate(OpKind):
            if kind in (OpKind.BARRIER, OpKind.SEND_RECV):
                continue
            collectives.append(
                Collective(
                    name=f"{kind.name.lower()} among {shown}",
                    kind=kind,
                    dtype=DType.FLOAT32,
                    reduction=ReduceOp.AVG if kind is OpKind.ALLREDUCE else ReduceOp.SUM,
                    num_elements=13 * index,
                    uneven=index % 2 == 0,
                    root=len(members) - 1 if kind in _ROOTED else 0,
                    members=members,
                )
            )
    return Case(name="subgroups", world_size=world_size, collectives=tuple(collectives), engine=_TINY, shuffled=True)


def _between_hosts(world_size: int) -> list[Case]:
    """Return cases with several hosts: two halves, unequal hosts, ranks in turn, and one host."""
    everybody = range(world_size)
    layouts = dict.fromkeys(
        (
            tuple(2 * rank // world_size for rank in everybody),
            tuple(int(rank == world_size - 1) for rank in everybody),
            tuple(rank % 3 for rank in everybody),
            (0,) * world_size,
        )
    )
    dtypes = (DType.FLOAT32, DType.BFLOAT16, DType.INT16)
    cases = []
    for hosts in layouts:
        collectives = tuple(
            Collective(
                name=f"{schedule} {reduction.name.lower()} of {size} {dtype.name.lower()}",
                dtype=dtype,
                reduction=reduction,
                num_elements=size,
                schedule=schedule,
            )
            for (dtype, reduction), size, schedule in product(
                zip(dtypes, (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX), strict=True),
                (0, 1, world_size + 1, 1009),
                (Algorithm.HIERARCHICAL, Algorithm.AUTO),
            )
        )
        name = f"on hosts {','.join(map(str, hosts))}"
        cases.append(Case(name=name, world_size=world_size, collectives=collectives, engine=_TINY, hosts=hosts))
    return cases


# ------------------------------------------------------------------------------------------------------- circumstances


def _one_of_each(world_size: int, num_elements: int, *, rough: bool = False) -> Iterator[Collective]:
    """Yield a collective of every kind by every schedule, with blocks of different sizes."""
    for kind in OpKind:
        if kind is OpKind.BARRIER or (kind is OpKind.SEND_RECV and world_size == 1):
            continue
        for schedule in _schedules(kind):
            yield Collective(
                name=f"{schedule} {kind.name.lower()} of {num_elements}",
                kind=kind,
                dtype=DType.FLOAT32,
                num_elements=num_elements,
                uneven=True,
                root=world_size - 1 if kind in _ROOTED else 0,
                rough=rough,
                schedule=schedule,
                members=(world_size - 1, 0) if kind is OpKind.SEND_RECV else (),
                any_source=kind is OpKind.SEND_RECV,
            )


def _orders(world_size: int) -> Case:
    collectives = tuple(
        Collective(name=f"tensor {index}", num_elements=7 * index + 1, priority=index % 3) for index in range(24)
    )
    return Case(
        name="every rank in its own order", world_size=world_size, collectives=collectives, engine=_TINY, shuffled=True
    )


def _everything(world_size: int) -> Case:
    """Return a case, run twice, with all kinds in flight, every rank in its own order, and a late rank."""
    return Case(
        name="everything at once",
        world_size=world_size,
        collectives=tuple(_one_of_each(world_size, 53)),
        engine=_TINY,
        shuffled=True,
        late_s=((world_size // 2, 0.02),),
        runs=2,
    )


def _small(world_size: int) -> Case:
    """Return a case with default segments, so that the tensors count as small; little scratch; one rank late."""
    collectives = tuple(
        Collective(name=f"tensor {index}", dtype=dtype, reduction=op, num_elements=5 * index + 1)
        for index, (dtype, op) in enumerate(product((DType.FLOAT32, DType.BFLOAT16, DType.INT64), _REDUCTIONS[:5]))
    )
    return Case(
        name="small tensors",
        world_size=world_size,
        collectives=(*collectives, *_one_of_each(world_size, 11)),
        engine=EngineConfig(scratch_segments=1),
        shuffled=True,
        late_s=((world_size // 2, 0.03),),
        runs=2,
    )


def _urgent(world_size: int) -> Case:
    bulk = tuple(Collective(name=f"bulk {index}", num_elements=1000, priority=10) for index in range(2))
    urgent = Collective(name="urgent", num_elements=4, priority=0)
    return Case(name="urgency", world_size=world_size, collectives=(*bulk, urgent), engine=_TINY, urgent="urgent")


def _floating(world_size: int) -> Case:
    """Return a case with two late ranks: messages of the others float, within a bound of four segments per peer."""
    bound = 4 * (64 + 256) * max(1, world_size - 1)
    return Case(
        name="floating within its bound",
        world_size=world_size,
        collectives=(
            *(Collective(name=f"tensor {index}", num_elements=100) for index in range(12)),
            *_one_of_each(world_size, 100),
        ),
        engine=EngineConfig(segment_bytes=64, segment_bytes_min=16, eager_bytes=4096, floating_bytes_max=bound),
        late_s=((0, 0.03), (world_size // 2, 0.06)),
    )


def _rendezvous(world_size: int) -> Case:
    """Return a case in which no segment fits into the bound: every message waits until its receiver has submitted."""
    return Case(
        name="rendezvous",
        world_size=world_size,
        collectives=(
            *(Collective(name=f"tensor {index}", num_elements=300) for index in range(8)),
            *_one_of_each(world_size, 90),
        ),
        engine=EngineConfig(segment_bytes=64, segment_bytes_min=16, eager_bytes=32, floating_bytes_max=200),
        shuffled=True,
        late_s=((world_size - 1, 0.03),),
    )


def _repeatable(world_size: int) -> Case:
    """Return sums whose bits depend on the order of the addends: they must not depend on arrival."""
    dtypes = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
    allreduces = tuple(
        Collective(name=f"{dtype.name.lower()} {size}", dtype=dtype, num_elements=size, rough=True)
        for dtype in dtypes
        for size in (17, 301)
    )
    return Case(
        name="same bits",
        world_size=world_size,
        collectives=(*allreduces, *_one_of_each(world_size, 71, rough=True)),
        engine=_TINY,
        shuffled=True,
        late_s=((0, 0.01),),
        runs=2,
    )
