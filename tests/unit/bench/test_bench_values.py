"""The check that stands before every figure: it must see every kind of wrong result."""

import pytest
import torch

from totalreduce.bench.values import WrongResultError, check, dtype_by_name, fill

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32"]


def reduced(world_size, count, dtype, times=1):
    """What a right allreduce leaves behind, summed in the type itself, rank by rank."""
    total = torch.zeros(count, dtype=dtype)
    for rank in range(world_size):
        mine = torch.empty(count, dtype=dtype)
        fill(mine, rank=rank)
        total += mine
    return total * world_size ** (times - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 30, 31, 8191, 8192, 100_003])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_the_right_sum_passes(dtype, count, world_size):
    check(reduced(world_size, count, dtype_by_name(dtype)), world_size=world_size, what="sum")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_sum_of_sums_passes(world_size):
    check(reduced(world_size, 20_000, torch.float32, times=9), world_size=world_size, times=9, what="sum")


def test_elements_and_ranks_differ():
    first, second = torch.empty(8191), torch.empty(8191)
    fill(first, rank=0)
    fill(second, rank=1)
    assert first.unique().numel() == 8191
    assert bool((first != second).all())
    assert first[:3].tolist() == [1.0, 2.0, 3.0]
    assert second[:3].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contribution_that_is_missing_is_seen(dtype):
    found = reduced(4, 10_000, dtype_by_name(dtype))
    last = torch.empty_like(found)
    fill(last, rank=3)
    with pytest.raises(WrongResultError, match="element 0 is"):
        check(found - last, world_size=4, what="sum")


def test_a_contribution_counted_twice_in_place_of_another_is_seen():
    found = reduced(4, 10_000, torch.float32)
    last, first = torch.empty_like(found), torch.empty_like(found)
    fill(last, rank=3)
    fill(first, rank=0)
    with pytest.raises(WrongResultError, match="element 0 is"):
        check(found - last + first, world_size=4, what="sum")


@pytest.mark.parametrize("index", [0, 5_000_000, 8191 * 512 + 17, 5_999_999])
def test_one_wrong_element_is_named(index):
    found = reduced(2, 6_000_000, torch.float32)
    found[index] += 1
    with pytest.raises(WrongResultError, match=rf"ring: element {index} is"):
        check(found, world_size=2, what="ring")


def test_chunks_that_changed_places_are_seen():
    found = reduced(2, 40_000, torch.float32)
    with pytest.raises(WrongResultError):
        check(found.roll(20_000), world_size=2, what="sum")


@pytest.mark.parametrize("times", [1, 9])
def test_nan_is_never_right(times):
    found = reduced(3, 10_000, torch.float32, times=times)
    found[9_999] = float("nan")
    with pytest.raises(WrongResultError, match="element 9999 is nan"):
        check(found, world_size=3, times=times, what="sum")


def test_an_unknown_dtype_lists_those_that_can_be_checked():
    with pytest.raises(WrongResultError, match="choose one of float64, float32"):
        dtype_by_name("complex64")
