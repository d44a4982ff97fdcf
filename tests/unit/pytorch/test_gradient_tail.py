"""What ranks say of their gradients survives every arithmetic in which the gradients may be reduced.

The model of the arithmetic covers what libraries do with a sum or an average of half types: add in any order and round
after each addition, add in float32 and round once, divide after the sum or before it. Ones are worst: their rounded sum
stops growing at 2**8 in bfloat16 and 2**11 in float16.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from totalreduce.pytorch.tail import Tail, TailLayout

RANKS_MAX = 8192
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Around the powers of two, where roundings begin, and some others.
WORLD_SIZES = [
    1,
    2,
    3,
    5,
    8,
    100,
    *(2**power + near for power in (8, 9, 11, 12) for near in (-1, 0, 1)),
    5000,
    RANKS_MAX,
]


def folds(unit: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of 0, 1, ... ``count`` times the unit, one after the other, rounded after each: shape (count + 1, ...)."""
    sums = [torch.zeros_like(unit)]
    for _ in range(count):
        sums.append(sums[-1] + unit)
    return torch.stack(sums)


def halved(counts: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """The same sums along a binary tree, rounded at each level."""
    total, power = torch.zeros(counts.shape, dtype=unit.dtype), unit.expand(counts.shape)
    for level in range(RANKS_MAX.bit_length()):
        total = torch.where(counts >> level & 1 == 1, total + power, total)
        power = power + power
    return total


class Arithmetic:
    """How ones become a sum or an average in one dtype: numbers of ones to what a library makes of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        one = torch.ones((), dtype=dtype)
        folded = folds(one, RANKS_MAX)
        self.sums: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "one after the other": lambda counts: folded[counts],
            "along a tree": lambda counts: halved(counts, one),
            "in float32": lambda counts: counts.float().to(dtype),
        }

    def results(self, counts: torch.Tensor, world_size: int) -> dict[str, torch.Tensor]:
        """By every way to sum, and to average."""
        found = {}
        for name, add in self.sums.items():
            total = add(counts)
            found[f"sum {name}"] = total
            found[f"average {name}"] = total / world_size
            found[f"average {name}, divided in float32"] = (total.float() / world_size).to(total.dtype)
        found["average in float32 and rounded once"] = (counts.float() / world_size).to(total.dtype)
        unit = torch.full((), 1.0 / world_size, dtype=total.dtype)
        found["average divided first"] = halved(counts, unit)
        return found


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def arithmetic(request):
    return Arithmetic(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flag_is_zero_exactly_where_no_rank_has_set_it_in_every_world_up_to_8192_ranks(dtype):
    sizes = torch.arange(1, RANKS_MAX + 1)
    arithmetic = Arithmetic(dtype)
    for add in arithmetic.sums.values():
        for count in (0, 1, 2, 3, 255, 256, 257, 2047, 2048, 2049, RANKS_MAX - 1, RANKS_MAX):
            total = add(torch.tensor([count]))
            for average in (total, total / sizes, (total.float() / sizes).to(dtype)):
                assert (average != 0).all() if count else (average == 0).all()
    # Divided first: all worlds side by side, and every number of ranks that set the flag.
    total = torch.zeros(RANKS_MAX, dtype=dtype)
    unit = (1.0 / sizes).to(dtype)
    for _ in range(RANKS_MAX):
        total = total + unit
        assert (total > 0).all()


@pytest.mark.parametrize(
    ("dtype", "how", "world_size"),
    [
        (torch.bfloat16, "sum one after the other", 257),
        (torch.float16, "sum one after the other", 2049),
        (torch.bfloat16, "average in float32 and rounded once", 512),
        (torch.float16, "average in float32 and rounded once", 4096),
    ],
)
def test_the_model_loses_counts(dtype, how, world_size):
    """From so many ranks on, presence that is counted cannot tell that one rank has none."""
    arithmetic = Arithmetic(dtype)

    def counted(num_present: int, size: int) -> int:
        value = arithmetic.results(torch.tensor([num_present]), size)[how].item()
        return round(value * size if "average" in how else value)

    if "sum" in how:
        assert counted(world_size, world_size) == counted(world_size - 1, world_size) == world_size - 1
    else:
        assert counted(world_size - 1, world_size) == world_size
        assert counted(world_size - 2, world_size - 1) < world_size - 1


def contribution(layout: TailLayout, missing, changed=(), **options) -> torch.Tensor:
    """What one rank writes, in int64."""
    memory = torch.full((layout.num_elements,), 7.0)
    Tail(memory, layout).write(missing, changed, **options)
    return memory.long()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_ranks_read_what_some_rank_wrote(arithmetic, world_size):
    """Parameter 0 is missing on one rank, 1 on all but one, 2 nowhere, 3 everywhere; some ranks have joined."""
    layout = TailLayout(4, reports_absence=True, num_buckets=3, num_ranks=world_size)
    for num_joined in sorted({0, min(1, world_size - 1), world_size // 2, world_size - 1}):
        active = world_size - num_joined
        # Of the active ranks one lacks 0 and 3, the next ones 1 and 3, and the last one only 3.
        ranks = [[0, 1, 3] if active > 1 else [0, 3], *[[1, 3]] * (active - 2), *[[3]] * (active > 1)]
        assert len(ranks) == active
        kinds = {tuple(missing): ranks.count(missing) for missing in ranks}
        counts = sum(number * contribution(layout, missing) for missing, number in kinds.items())
        joined = random.Random(world_size).sample(range(world_size), num_joined)
        for rank in joined[:3]:
            counts += contribution(layout, [0, 1, 2, 3], [1], rank=rank, joined=True)
        for rank in joined[3:]:  # as the others, and faster
            counts[-world_size - 2 + rank] += 1
        for name, reduced in arithmetic.results(counts, world_size).items():
            tail = Tail(reduced, layout)
            where = f"{name} of {num_joined} joined"
            assert tail.joined() == sorted(joined), where
            assert tail.changed() == ([1] if num_joined else []), where
            assert tail.present() == [active > 1, True, True, False], where
            assert tail.missing() == [active > 1, active > 1, False, False], where
            assert not tail.are_in_different_rounds(), where
        again = counts + contribution(layout, [3], again=True) - contribution(layout, [3])
        for name, reduced in arithmetic.results(again, world_size).items():
            assert Tail(reduced, layout).are_in_different_rounds() == (active > 1), f"one of {active}, {name}"


def test_without_reports_of_absence_there_are_fewer_elements_and_nothing_is_missing():
    layout = TailLayout(5, reports_absence=False)
    assert layout.num_elements == 5
    tail = Tail(torch.empty(5, dtype=torch.bfloat16), layout)
    tail.write([1, 4])
    assert tail.present() == [True, False, True, True, False]
    assert tail.missing() == [False] * 5
    assert (tail.changed(), tail.joined()) == ([], [])
