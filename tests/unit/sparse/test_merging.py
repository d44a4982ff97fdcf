"""Sums of sparse vectors, and dense memory that lists are written to, against plain NumPy."""

from itertools import pairwise

import numpy as np
import plain_kernels as plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from totalreduce.codecs import blocks
from totalreduce.kernels import merging, scattering
from totalreduce.sparse.accumulator import HostAccumulator

BLOCK = 1 << 15
EMPTY = np.empty(0, np.int32)


def vector(indices, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    index = np.array(sorted(indices), np.int32)
    return index, np.random.default_rng([seed, index.size]).standard_normal(index.size, np.float32)


def random_vector(count: int, span: int, seed: int, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([seed, count, span])
    return vector(generator.choice(span, count, replace=False) + begin, seed)


def added(lists) -> tuple[np.ndarray, np.ndarray]:
    return merging.add_up(*blocks.unpack_all(lists, [(0, 2**31 - 1)] * len(lists)))


def both(lists) -> list[tuple[bytes, bytes]]:
    results = []
    for module in (merging, plain):
        index, value, bounds = blocks.unpack_all(lists, [(0, 2**31 - 1)] * len(lists))
        out_index, out_value = np.full(index.size + 3, -7, np.int32), np.full(index.size + 3, -7.0, np.float32)
        count = module.sum_sparse(index, value, bounds, out_index, out_value)
        assert (out_index[count:] == -7).all(), "something was written beyond the sum"
        results.append((out_index[:count].tobytes(), out_value[:count].tobytes()))
    return results


CASES = {
    "one empty list": [(EMPTY, EMPTY.astype(np.float32))],
    "empty lists": [(EMPTY, EMPTY.astype(np.float32))] * 3,
    "one list": [random_vector(100, 1000, 1)],
    "the same indices": [vector(range(50), seed) for seed in range(5)],
    "no common index": [vector(range(start, 300, 3), start) for start in range(3)],
    "one element each": [vector([7], seed) for seed in range(8)],
    "an empty one among others": [vector([1, 2]), (EMPTY, EMPTY.astype(np.float32)), vector([2, 3], 1)],
    "edges of a block": [vector([0, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1], seed) for seed in range(2)],
    "edges of words": [vector([63, 64, 65, 127, 128, BLOCK + 63], seed) for seed in range(2)],
    "far apart": [vector([0, 2**31 - 2]), vector([2**30, 2**31 - 2], 1)],
    "an unaligned beginning": [vector([100, 100 + BLOCK - 1, 100 + BLOCK], 1), vector([101, 99 + BLOCK], 2)],
    "much": [random_vector(20_000, 200_000, seed) for seed in range(7)],
    "everything": [vector(range(2 * BLOCK + 5), seed) for seed in range(3)],
    "uneven": [random_vector(5000, 100_000, 1), random_vector(3, 100_000, 2), random_vector(50_000, 100_000, 3)],
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_plain_kernel(name: str) -> None:
    ours, plainly = both(CASES[name])
    assert ours == plainly


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.integers(0, 200)), min_size=1, max_size=6), st.integers(0, 2**31 - 300), st.integers(1, 900))
def test_sums_of_any_lists(lists: list[set[int]], begin: int, stride: int) -> None:
    stride = min(stride, (2**31 - 2 - begin) // 200)
    vectors = [vector([begin + stride * index for index in indices], seed) for seed, indices in enumerate(lists)]
    ours, plainly = both(vectors)
    assert ours == plainly


def test_the_order_of_the_lists_is_the_order_of_the_additions() -> None:
    one = np.array([5], np.int32)
    large, small = np.array([1e8], np.float32), np.array([3.0], np.float32)
    for values in ([large, small, -large], [large, -large, small], [small, large, -large]):
        expected = np.float32(0.0)
        for value in values:
            expected = expected + value[0]
        index, total = added([(one, value) for value in values])
        assert index.tolist() == [5]
        assert total[0] == expected


def test_where_sums_are_zero_there_are_elements_all_the_same() -> None:
    index = np.array([1, 2], np.int32)
    value = np.array([1.5, -2.0], np.float32)
    indices, values = added([(index, value), (index, -value)])
    assert indices.tolist() == [1, 2]
    assert values.tolist() == [0.0, 0.0]


def test_special_values_are_added_as_numpy_does() -> None:
    index = np.arange(6, dtype=np.int32)
    one = np.array([-0.0, 1e-45, np.inf, np.nan, 3e38, 1.0], np.float32)
    other = np.array([-0.0, 1e-45, 1.0, 1.0, -3e38, np.inf], np.float32)
    _, values = added([(index, one), (index, other)])
    assert np.array_equal(values, one + other, equal_nan=True)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1), (1000, 10), (10, 1000), (3000, 3000)])
def test_what_is_found_in_another_list(sizes: tuple[int, int]) -> None:
    index, other = (random_vector(size, 5000, seed)[0] for seed, size in enumerate(sizes))
    for one, two in ((index, other), (index, index), (index, index[1:]), (index, index[:-1])):
        assert np.array_equal(merging.found_in(one, two), plain.found_in(one, two))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_what_is_found_in_any_other_list(one: set[int], other: set[int]) -> None:
    index, others = (np.array(sorted(indices), np.int32) for indices in (one, other))
    assert np.array_equal(merging.found_in(index, others), plain.found_in(index, others))


@pytest.mark.parametrize("count", [0, 1, 16, 500, 1000])
@pytest.mark.parametrize("first", [0, 77, 2**31 - 1001])
def test_lists_meet_dense_memory(count: int, first: int) -> None:
    index, value = random_vector(count, 1000, 1, begin=first)
    applied = random_vector(400, 1000, 2, begin=first)[0]
    memory = np.random.default_rng(3).standard_normal(1000, np.float32)
    results = []
    for module in (scattering, plain):
        set_to, added_to, kept, taken = memory.copy(), memory.copy(), memory.copy(), np.empty(count, np.float32)
        module.scatter(set_to, first, index, value, np.float32(0.3))
        module.scatter_add(added_to, first, index, value, np.float32(0.3))
        module.keep_rest(kept, first, index, value, value * np.float32(0.9), applied)
        module.gather(memory, first, index, taken)
        results.append([array.tobytes() for array in (set_to, added_to, kept, taken)])
    assert results[0] == results[1]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("offset", [0, 1, 15, 16])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_memory_is_overwritten_wherever_it_begins(size: int, offset: int, density: float) -> None:
    first = 2**31 - 5001
    index, value = random_vector(int(size * density), max(size, 1), 1, begin=first)
    results = []
    for module in (scattering, plain):
        memory = np.full(16 + size + 16, 7.0, np.float32)  # what lies around it is left alone
        module.overwrite(memory[offset : offset + size], first, index, value, np.float32(0.3))
        results.append(memory.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("sizes", [(300,), (100, 200), (0, 300), (300, 0), (1, 0, 0, 298, 1), (50, 50, 50, 150)])
def test_indices_count_through_all_segments(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    flat = np.arange(300, dtype=np.float32)
    edges = np.cumsum([0, *sizes])
    for count in (0, 1, 60, 300):
        index, value = random_vector(count, 300, count)
        memory = flat.copy()
        accumulator = HostAccumulator([memory[low:high] for low, high in pairwise(edges)])
        assert accumulator.take(index).tolist() == index.tolist()
        assert accumulator.spread(index) == [((index >= low) & (index < high)).sum() for low, high in pairwise(edges)]
        expected = flat.copy()
        expected[index] += value
        accumulator.add(index, value)
        assert accumulator.flat().tobytes() == expected.tobytes()
        expected[index] = value
        accumulator.put(index, value)
        assert memory.tobytes() == expected.tobytes()
        accumulator.erase(index)
        assert not memory[index].any()
        expected[...] = 0.0
        expected[index] = value * np.float32(0.3)
        for cached in (0, 1 << 20):  # by either way
            monkeypatch.setattr("totalreduce.sparse.accumulator._CACHED", cached)
            memory[...] = 7.0
            accumulator.assign_sparse(index, value, 0.3)
            assert memory.tobytes() == expected.tobytes()
        accumulator.clear()
        assert not memory.any()
