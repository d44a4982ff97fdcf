"""Selection kernels against plain NumPy, and the selector against a sort."""

from itertools import pairwise

import numpy as np
import plain_kernels as plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from totalreduce.kernels import selection
from totalreduce.kernels.selection import INFINITY, LANES
from totalreduce.sparse.accumulator import HostAccumulator
from totalreduce.sparse.candidates import Candidates, Workspace
from totalreduce.sparse.selector import Selector, sample_bound

BLOCK = 4096
SIZES = (0, 1, LANES - 1, LANES, LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
#: Room that the kernels need beyond what they list.
SLACK = BLOCK
DENORMAL, INF, NAN = np.float32(1e-45), np.float32(np.inf), np.float32(np.nan)
SPECIAL = np.array([0.0, -0.0, DENORMAL, -DENORMAL, 1e-38, 1.0, -1.0, 3.4e38, INF, -INF, NAN, -NAN], np.float32)
floats = arrays.arrays(np.float32, st.integers(0, 100), elements=st.floats(width=32, allow_nan=True))


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32)) & 0x7FFFFFFF


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, size]).standard_normal(size, np.float32)


def special(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, size]).choice(SPECIAL, size)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def lists(room: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a certain content, so that what is written beyond the end shows."""
    return np.full(room, -7, np.int32), np.full(room, -7.0, np.float32)


def run_both(name: str, source: np.ndarray, bound: int, *, first: int = 3, already: int = 2, room: int | None = None):
    """``accumulate`` or ``select`` of both kinds: what they return, the lists, and the memory they worked on."""
    results = []
    for module in (selection, plain):
        memory = source.copy()
        index, value = lists(already + source.size + SLACK if room is None else room)
        if name == "select":
            count = module.select(memory, bound, first, index, value, already)
        else:
            residual = np.ascontiguousarray(source[::-1])
            count = module.accumulate(memory, residual, np.float32(0.75), bound, first, index, value, already)
        results.append((count, index, value, memory))
    return results


@pytest.mark.parametrize("name", ["accumulate", "select"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [normal, special])
def test_lists_are_those_of_the_plain_kernel(name: str, size: int, make) -> None:
    for bound in (0, 1, bits(DENORMAL), bits(0.5), bits(2.5), bits(1e30), INFINITY, 0x7FC00000):
        (count, index, value, memory), (expected, plain_index, plain_value, plain_memory) = run_both(
            name, make(size), bound
        )
        assert count == expected
        assert np.array_equal(memory, plain_memory, equal_nan=True)
        assert same(index[:count], plain_index[:count])
        assert np.array_equal(value[:count], plain_value[:count], equal_nan=True)


@pytest.mark.parametrize("name", ["accumulate", "select"])
def test_lists_that_are_too_short_hold_what_comes_first(name: str) -> None:
    source = normal(3 * BLOCK + 7)
    for room in (LANES, BLOCK, BLOCK + 1, 2 * BLOCK, source.size, source.size + 1):
        short, whole = run_both(name, source, 0, room=room)[0], run_both(name, source, 0)[1]
        assert short[0] < 0
        count = -1 - short[0]
        assert 2 <= count <= room
        assert same(short[1][2:count], whole[1][2:count])
        assert same(short[2][2:count], whole[2][2:count])
        assert same(short[3], whole[3]), "everything is accumulated all the same"


def test_lists_that_are_too_short_for_their_slack_are_complete_or_say_so() -> None:
    source = normal(BLOCK + 100)
    for bound in (bits(1.0), bits(2.0), bits(3.0)):
        for room in range(LANES, SLACK + 600, 97):
            index, value = lists(room)
            count = selection.select(source, bound, 0, index, value, 0)
            expected = np.flatnonzero(np.abs(source) >= np.array(bound, np.int32).view(np.float32))
            listed = index[: count if count >= 0 else -1 - count]
            assert same(listed, expected[: listed.size].astype(np.int32))
            assert count < 0 or listed.size == expected.size


def test_nothing_is_written_beyond_the_lists() -> None:
    source = np.ones(BLOCK, np.float32)
    index, value = lists(2 * SLACK)
    assert selection.select(source, 1, 0, index[:SLACK], value[:SLACK], 0) == BLOCK
    assert (index[SLACK:] == -7).all()
    assert (value[SLACK:] == -7.0).all()


@settings(max_examples=200, deadline=None)
@given(floats, st.integers(0, 0x7FFFFFFF), st.sampled_from(["accumulate", "select"]))
def test_any_values_and_any_bound(source: np.ndarray, bound: int, name: str) -> None:
    (count, index, value, _), (expected, plain_index, plain_value, _) = run_both(name, source, bound)
    assert count == expected
    assert same(index[:count], plain_index[:count])
    assert np.array_equal(value[:count], plain_value[:count], equal_nan=True)


@pytest.mark.parametrize("size", [size for size in SIZES if size])
@pytest.mark.parametrize("make", [normal, special, lambda size: np.full(size, -0.5, np.float32)])
def test_the_kth_magnitude(size: int, make) -> None:
    values = make(size)
    parts = [values[: size // 3], values[size // 3 : size // 3], values[size // 3 :]]
    for k in {1, 2, size // 2, size - 1, size} - {0, size + 1}:
        if k <= size:
            assert selection.kth_magnitude(parts, k) == plain.kth_magnitude(parts, k)


@settings(max_examples=200, deadline=None)
@given(floats.filter(len), st.data())
def test_any_kth_magnitude_and_what_is_kept(values: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, values.size))
    kth = selection.kth_magnitude([values], k)
    assert kth == plain.kth_magnitude([values], k)
    for low in (kth.bits, max(0, kth.bits - data.draw(st.integers(0, 1 << 23)))):
        assert selection.kth_magnitude([values], k, low) == kth
    index = np.arange(values.size, dtype=np.int32)
    results = []
    for module in (selection, plain):
        own_index, own_value = index.copy(), values.copy()
        kept = module.keep_largest(own_index, own_value, kth.bits, k - kth.above)
        results.append((kept, own_index[:kept].tobytes(), own_value[:kept].tobytes()))
    assert results[0] == results[1]
    assert results[0][0] == k


@settings(max_examples=200, deadline=None)
@given(floats, st.integers(0, 2**31 - 1), st.integers(0, 24), st.integers(1, 200))
def test_magnitudes_are_counted_in_bins(values: np.ndarray, low: int, shift: int, num_bins: int) -> None:
    counts = []
    for module in (selection, plain):
        counts.append(np.ones(num_bins, np.int64))
        module.count_bins(values, low, shift, counts[-1])
    assert counts[0].tolist() == counts[1].tolist()
    reached = (np.abs(values).view(np.int32) >= low).sum()
    assert counts[0].sum() == num_bins + reached


def selected(values: np.ndarray, k: int, *, steps: int = 1) -> list:
    """What a selector chooses in so many steps without any residual, from two segments."""
    selector, zero = Selector(), np.zeros(values.size, np.float32)
    edges = (0, values.size // 3, values.size)

    def cut(flat: np.ndarray) -> HostAccumulator:
        return HostAccumulator([flat[low:high] for low, high in pairwise(edges)])

    return [selector.accumulate(cut(values.copy()), cut(zero), 1.0, k) for _ in range(steps)]


def reference(values: np.ndarray, k: int) -> np.ndarray:
    """The k largest that are not zero, the first of equal ones first."""
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return np.sort(order[values[order] != 0]).astype(np.int32)


@pytest.mark.parametrize("size", [1, 2, 17, 1000, 3 * BLOCK + 7, 60_000])
@pytest.mark.parametrize(
    "make",
    [
        normal,
        lambda size: np.full(size, 0.25, np.float32),
        lambda size: np.zeros(size, np.float32),
        lambda size: np.where(np.arange(size) % 7, np.float32(0), normal(size)),
        lambda size: normal(size) ** 9,
        lambda size: normal(size) * np.float32(1e-42),
        lambda size: np.sort(normal(size)),
    ],
    ids=["normal", "equal", "zero", "holes", "heavy tails", "denormal", "sorted"],
)
def test_exactly_the_k_largest_are_selected(size: int, make) -> None:
    values = make(size)
    for k in {0, 1, size // 100, size // 3, size - 1, size}:
        for choice in selected(values, k, steps=2):
            expected = reference(values, k)
            assert choice.finite
            assert same(choice.indices, expected)
            assert same(choice.values, values[expected])
            assert choice.bound == (min(map(bits, values[expected])) if expected.size else 0)


def test_a_bound_that_no_longer_fits_costs_a_second_reading_and_no_error() -> None:
    selector, n = Selector(), 50_000
    zero = HostAccumulator([np.zeros(n, np.float32)])
    for step, factor in enumerate((1.0, 1.0, 1e-6, 1e6, 1e6)):
        values = normal(n, step) * np.float32(factor)
        choice = selector.accumulate(HostAccumulator([values.copy()]), zero, 1.0, 500)
        assert same(choice.indices, reference(values, 500))
    assert 2 <= selector.rescans <= 3  # the drift after a jump may cost another one


@pytest.mark.parametrize("bad", [INF, -INF, NAN, np.float32(3e38)])
@pytest.mark.parametrize("k", [0, 1, 50, 1000])
def test_what_is_not_finite_is_found_wherever_it_is(bad: float, k: int) -> None:
    for place in (0, 400, 999):
        values = normal(1000)
        values[place] = bad
        assert [choice.finite for choice in selected(values, k, steps=2)] == [False, False]
        assert [choice.indices.size for choice in selected(values, k)] == [0]
    values = np.full(1000, bad, np.float32)
    assert not selected(values, k)[0].finite


def test_sums_that_could_overflow_are_not_finite() -> None:
    for world_size in (1, 2, 7):
        largest = np.finfo(np.float32).max / np.float32(2 * world_size)
        for factor, finite in ((0.999, True), (1.001, False)):
            values = np.array([1.0, largest * factor, 2.0], np.float32)
            selector = Selector(world_size)
            nothing = HostAccumulator([np.zeros(3, np.float32)])
            for k in (0, 1, 3):
                assert selector.accumulate(HostAccumulator([values.copy()]), nothing, 1.0, k).finite is finite


def test_an_accumulated_overflow_is_found() -> None:
    gradient, residual = np.full(100, 3e38, np.float32), np.full(100, 1.5e38, np.float32)
    selector = Selector()
    assert not selector.accumulate(HostAccumulator([gradient]), HostAccumulator([residual]), 1.0, 10).finite


def test_a_sampled_bound_is_near() -> None:
    values = HostAccumulator([normal(300_000), normal(100_000, 1)])
    flat = np.abs(values.flat())
    for k in (400, 4000, 40_000):
        bound = np.array(sample_bound([values], 1.0, k), np.int32).view(np.float32)
        assert 1.05 * k < (flat >= bound).sum() < 1.5 * k


def test_a_workspace_hands_out_the_same_memory_again() -> None:
    workspace = Workspace()
    large = workspace.candidates(1000)
    large.append(np.arange(700, dtype=np.int32), np.ones(700, np.float32), complete=False)
    for room in (1000, 10, 0):
        lists = workspace.candidates(room)
        assert (lists.count, lists.complete, lists.room) == (0, True, room)
        assert np.shares_memory(lists.index, large.index)
        assert np.shares_memory(lists.value, large.value)
    larger = workspace.candidates(1001)
    assert larger.room == 1001
    assert not np.shares_memory(larger.index, large.index)


def test_selectors_that_share_a_workspace_choose_what_they_would_alone() -> None:
    workspace = Workspace()
    for size in (50_000, 1000, 200_000):
        chosen = []
        for shared in (True, False):
            selector = Selector()
            if shared:
                selector.workspace = workspace
            memory = HostAccumulator([normal(size)])
            chosen.append(selector.accumulate(memory, HostAccumulator([normal(size, 1)]), 1.0, size // 100))
        kept = chosen[0].indices.copy()
        workspace.candidates(3 * (size // 100)).index[...] = -1  # the next bucket's
        assert same(chosen[0].indices, chosen[1].indices)
        assert same(chosen[0].values, chosen[1].values)
        assert same(chosen[0].indices, kept)


def test_candidates_have_room_or_are_not_complete() -> None:
    found, source = Candidates(10), HostAccumulator([normal(BLOCK), normal(3 * BLOCK, 1)])
    source.find(1, found)
    assert not found.complete
    assert found.count >= 10
    found = Candidates(source.num_elements)
    source.find(1, found)
    assert found.complete
    assert found.count == source.num_elements
    assert same(found.value[: found.count], source.flat())
