"""The cases of the conformance suite, as data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.types import DType, OpKind, ReduceOp
from totalreduce.kernels import supports
from totalreduce.testing.conformance import Case, Collective, check_case, simulated, threaded
from totalreduce.testing.ranks import RankTransport, TransportFactory

__all__ = ["WORLD_SIZES", "cases_for", "check_simulated", "check_transport"]

#: The odd and the prime ones catch errors of index arithmetic; 1 must work everywhere.
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)

_REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

#: Segments of 64 bytes: a few hundred bytes are many messages.
_TINY = EngineConfig(segment_bytes=64, segment_bytes_min=16, lanes_min=2, eager_bytes=1024, scratch_segments=4)


def check_transport(
    transport: RankTransport | TransportFactory,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    thorough: bool = False,
    timeout_s: float = 30.0,
) -> int:
    """Run the suite over a transport, ranks as threads; returns how many results were compared.

    Args:
        transport: ``"inproc"``, ``"tcp"``, or a function from the world size to the transports of all ranks.
        world_sizes: How many ranks.
        thorough: All reductions with all element types and all sizes, instead of a subset that covers each.
        timeout_s: What takes longer is a hang.

    Raises:
        ConformanceError: At the first thing that is wrong.
    """
    backend = threaded(transport, timeout_s=timeout_s)
    cases = [case for world_size in world_sizes for case in cases_for(world_size, thorough=thorough)]
    return sum(check_case(case, backend) for case in cases)


def check_simulated(*, world_sizes: Sequence[int] = WORLD_SIZES, thorough: bool = False, seed: int = 0) -> int:
    """Run the suite in virtual time, where urgency can be checked exactly; otherwise like ``check_transport``."""
    cases = [case for world_size in world_sizes for case in cases_for(world_size, thorough=thorough)]
    return sum(check_case(case, simulated(seed=seed)) for case in cases)


def cases_for(world_size: int, *, thorough: bool = False) -> list[Case]:
    """All cases for one world size."""
    return [
        *_matrix(world_size, thorough=thorough),
        _broadcasts(world_size),
        _barrier(world_size),
        _orders(world_size),
        _small(world_size),
        _urgent(world_size),
        _floating(world_size),
        _rendezvous(world_size),
        _repeatable(world_size),
    ]


def _sizes(world_size: int, dtype: DType) -> tuple[int, ...]:
    several = 3 * _TINY.segment_bytes * world_size // dtype.itemsize + 5
    return tuple(dict.fromkeys((0, 1, world_size - 1, world_size, world_size + 1, 101, several)))


def _matrix(world_size: int, *, thorough: bool) -> list[Case]:
    cases = []
    for dtype in DType:
        sizes = _sizes(world_size, dtype)
        pairs = [(op, size) for op, size in product(_REDUCTIONS, sizes) if supports(dtype, op)]
        if not thorough:  # every reduction and every size of this type, not every pair of them
            pairs = [(op, size) for op, size in pairs if (_REDUCTIONS.index(op) - sizes.index(size)) % 5 == dtype % 5]
        cases.append(
            Case(
                name=f"allreduce {dtype.name.lower()}",
                world_size=world_size,
                collectives=tuple(
                    Collective(
                        name=f"{op.name.lower()} of {size} {dtype.name.lower()}",
                        dtype=dtype,
                        reduction=op,
                        num_elements=size,
                    )
                    for op, size in pairs
                ),
                engine=_TINY,
            )
        )
    if thorough:
        return cases
    # One group for all types: what differs between the cases is the collectives only.
    together = tuple(collective for case in cases for collective in case.collectives)
    return [Case(name="allreduce", world_size=world_size, collectives=together, engine=_TINY)]


def _broadcasts(world_size: int) -> Case:
    kinds = ((DType.FLOAT32, 0), (DType.INT64, 1), (DType.BFLOAT16, 101), (DType.BOOL, 1000))
    return Case(
        name="broadcast from every root",
        world_size=world_size,
        collectives=tuple(
            Collective(
                name=f"{size} {dtype.name.lower()} from {root}",
                kind=OpKind.BROADCAST,
                dtype=dtype,
                num_elements=size,
                root=root,
            )
            for root in range(world_size)
            for dtype, size in kinds
        ),
        engine=_TINY,
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


def _orders(world_size: int) -> Case:
    collectives = tuple(
        Collective(name=f"tensor {index}", num_elements=7 * index + 1, priority=index % 3) for index in range(24)
    )
    return Case(
        name="every rank in its own order", world_size=world_size, collectives=collectives, engine=_TINY, shuffled=True
    )


def _small(world_size: int) -> Case:
    """Segments as large as usual, so that these tensors take the way of small ones; little scratch; one rank late."""
    collectives = tuple(
        Collective(name=f"tensor {index}", dtype=dtype, reduction=op, num_elements=5 * index + 1)
        for index, (dtype, op) in enumerate(product((DType.FLOAT32, DType.BFLOAT16, DType.INT64), _REDUCTIONS))
    )
    return Case(
        name="small tensors",
        world_size=world_size,
        collectives=collectives,
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
    """Two ranks are late; what the others send floats, within a bound of four segments per peer."""
    bound = 4 * (64 + 256) * max(1, world_size - 1)
    return Case(
        name="floating within its bound",
        world_size=world_size,
        collectives=tuple(Collective(name=f"tensor {index}", num_elements=100) for index in range(12)),
        engine=EngineConfig(segment_bytes=64, segment_bytes_min=16, eager_bytes=4096, floating_bytes_max=bound),
        late_s=((0, 0.03), (world_size // 2, 0.06)),
    )


def _rendezvous(world_size: int) -> Case:
    """Not even one segment fits into the bound: every message waits until its receiver has submitted."""
    return Case(
        name="rendezvous",
        world_size=world_size,
        collectives=tuple(Collective(name=f"tensor {index}", num_elements=300) for index in range(8)),
        engine=EngineConfig(segment_bytes=64, segment_bytes_min=16, eager_bytes=32, floating_bytes_max=200),
        shuffled=True,
        late_s=((world_size - 1, 0.03),),
    )


def _repeatable(world_size: int) -> Case:
    """Sums whose bits depend on the order of the addends: they must not depend on arrival."""
    dtypes = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
    return Case(
        name="same bits",
        world_size=world_size,
        collectives=tuple(
            Collective(name=f"{dtype.name.lower()} {size}", dtype=dtype, num_elements=size, rough=True)
            for dtype in dtypes
            for size in (17, 301)
        ),
        engine=_TINY,
        shuffled=True,
        late_s=((0, 0.01),),
        runs=2,
    )
