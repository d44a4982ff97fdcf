"""Buckets in the memory of an accelerator: the same lists and the same bits as in the CPU's.

Where there is no GPU, torch's operations work on the CPU, and Triton's kernels are interpreted: `make test` runs this
file a second time, with Triton in the path and its interpreter switched on.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise

import numpy as np
import pytest
import torch

from totalreduce.kernels import device as plain
from totalreduce.kernels.selection import INFINITY
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.candidates import Candidates
from totalreduce.sparse.device import DeviceAccumulator, accumulator_of
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.selector import Selector
from totalreduce.tensors.streams import SideStreams
from totalreduce.testing.sparse_conformance import check_method

BLOCK = 4096
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)
EDGES = (0, 5000, 5000, 5003, 20_000)
WHERE = "cuda" if torch.cuda.is_available() else "cpu"


TRITON = importlib.util.find_spec("triton") is not None and (WHERE == "cuda" or "TRITON_INTERPRET" in os.environ)
KERNELS = ["torch", "triton"] if TRITON else ["torch"]


def cases(values, takes_long) -> list:
    """All pairs of kernels and values. Those that take long, interpreted, belong to `make soak`."""
    return [
        pytest.param(
            kernels,
            value,
            id=f"{kernels}-{value}",
            marks=[pytest.mark.slow] if WHERE == "cpu" and kernels == "triton" and value in takes_long else [],
        )
        for kernels in KERNELS
        for value in values
    ]


@pytest.fixture(params=KERNELS, scope="module")
def kernels(request: pytest.FixtureRequest):
    if request.param == "torch":
        return plain
    from totalreduce.kernels import device_triton

    return device_triton


def normal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def bits(value: float) -> int:
    return int(np.array(value, np.float32).view(np.int32))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def cut(flat: np.ndarray, edges: tuple[int, ...] = EDGES) -> list[np.ndarray]:
    return [flat[low:high].copy() for low, high in pairwise(edges)]


def both(flat: np.ndarray, kernels, edges: tuple[int, ...] = EDGES) -> tuple[HostAccumulator, DeviceAccumulator]:
    """The same elements here and there."""
    tensors = [torch.from_numpy(segment).to(WHERE) for segment in cut(flat, edges)]
    return HostAccumulator(cut(flat, edges)), DeviceAccumulator(tensors, SideStreams(), kernels)


@pytest.mark.parametrize("n", SIZES)
def test_one_pass_adds_and_lists(kernels, n: int) -> None:
    gradient, residual = normal(n), normal(n, 1)
    for scale, bound in ((1.0, bits(2.0)), (0.3, bits(0.5)), (1.0, 0), (1.0, INFINITY)):
        on_device = torch.from_numpy(gradient.copy()).to(WHERE)
        before = torch.from_numpy(residual.copy()).to(WHERE)
        found = kernels.accumulate(on_device, before, scale, bound, n)
        total = gradient * np.float32(scale) + residual
        places = np.flatnonzero((total.view(np.int32) & 0x7FFFFFFF) >= bound)
        assert found.complete
        assert same(on_device.cpu().numpy(), total)
        assert same(before.cpu().numpy(), residual)
        assert same(found.indices.cpu().numpy(), places)
        assert same(found.values.cpu().numpy(), total[places])
        again = kernels.select(on_device, bound, n)
        assert same(again.indices.cpu().numpy(), places)
        assert same(on_device.cpu().numpy(), total)


def test_without_room_the_first_ones_are_listed(kernels) -> None:
    n = 3 * BLOCK + 17
    source = torch.from_numpy(normal(n)).to(WHERE)
    places = np.flatnonzero(np.abs(normal(n)) >= 1.0)
    for room in (0, 1, 100, places.size - 1):
        found = kernels.select(source, bits(1.0), room)
        assert not found.complete
        assert same(found.indices.cpu().numpy(), places[:room])
    assert kernels.select(source, bits(1.0), places.size).complete


def test_stretches_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_STRETCH", 1000)
    source = torch.from_numpy(normal(2500)).to(WHERE)
    places = np.flatnonzero(np.abs(normal(2500)) >= 1.0)
    assert same(plain.select(source, bits(1.0), 2500).indices.cpu().numpy(), places)
    for room in (1, int((places < 1000).sum()), int((places < 1000).sum()) + 1, places.size - 1):
        found = plain.select(source, bits(1.0), room)
        assert not found.complete
        assert same(found.indices.cpu().numpy(), places[:room])


def test_what_is_not_finite_is_listed_above_everything(kernels) -> None:
    source = torch.tensor([1.0, -np.inf, np.nan, 3e38, np.inf], device=WHERE)
    assert kernels.select(source, INFINITY, 5).indices.tolist() == [1, 2, 4]


def test_the_list_of_a_bucket(kernels) -> None:
    flat, kept = normal(EDGES[-1]), normal(EDGES[-1], 1)
    for room in (EDGES[-1], 3000, 2000, 10):
        lists = []
        host, device = both(flat, kernels)
        for gradients, residuals in zip((host, device), both(kept, kernels), strict=True):
            found = Candidates(room)
            gradients.accumulate(residuals, 1.0, bits(1.5), found)
            assert same(gradients.flat(), flat + kept)
            lists.append(found)
        mine, theirs = lists
        assert theirs.complete >= mine.complete
        count = min(mine.count, theirs.count)
        assert count >= min(room, 5000)
        assert same(mine.index[:count], theirs.index[:count])
        assert same(mine.value[:count], theirs.value[:count])


def test_elements() -> None:
    """One after the other; each sees what those before have written."""
    host, device = both(normal(EDGES[-1]), plain)
    chosen = np.sort(np.random.default_rng(3).choice(EDGES[-1], 700, replace=False)).astype(np.int32)
    some = chosen[::3]
    values = normal(chosen.size, 4)
    for each in (host, device):
        each.put(chosen[100:], values[100:], 2.0)
        each.add(chosen, values, -0.5)
        each.erase(some)
        each.keep_rest(chosen, values, values / 2, np.union1d(some, np.arange(40, dtype=np.int32)).astype(np.int32))
        each.keep_rest(chosen, values, values / 2, np.empty(0, np.int32))
        each.put(np.empty(0, np.int32), np.empty(0, np.float32))
        with each.on_host() as segments:
            segments[3][7] = 5.5
    assert same(host.flat(), device.flat())
    assert same(host.take(chosen), device.take(chosen))
    assert same(host.take(chosen[:0]), device.take(chosen[:0]))
    assert device.take(np.array([5010], np.int32)) == 5.5


def test_everything() -> None:
    flat = normal(EDGES[-1], 5)
    flat[5000:5003] = 0
    host, device = both(flat, plain)
    assert host.present() == device.present() == [True, False, False, True]
    assert host.starts() == device.starts() == [0, 5000, 5000, 5003]
    assert same(host.sample(7), device.sample(7))
    for k in (1, 77, EDGES[-1] - 3, EDGES[-1]):
        assert host.kth_magnitude(k) == device.kth_magnitude(k)
    assert device.norm() == pytest.approx(host.norm(), rel=1e-12)
    assert device.moments() == pytest.approx(host.moments(), rel=1e-6)
    for each in (host, device):
        each.assign(flat, 0.25)
        each.add_all(flat[::-1].copy(), 0.5)
    assert same(host.flat(), device.flat())
    few = np.array([0, 4999, 5001, EDGES[-1] - 1], np.int32)
    for each in (host, device):
        each.assign_sparse(few, flat[few], 0.25)
    assert same(host.flat(), device.flat())
    assert set(np.flatnonzero(host.flat())) <= set(few.tolist())
    for each in (host, device):
        each.clear()
        assert not each.flat().any()


@pytest.mark.parametrize(("kernels", "k"), cases((0, 1, 200, 9000), takes_long=(1, 9000)), indirect=["kernels"])
def test_a_selector_chooses_the_same(kernels, k: int) -> None:
    """Through jumps that need a second reading, many equal magnitudes, zeros and what is not finite."""
    # Where all elements are listed there are fewer: Triton's interpreter takes a round for every 32nd of a block.
    edges = (0, 5000, 5000, 5003, 9000) if k == 9000 else EDGES
    n = edges[-1]
    ties = np.where(normal(n, 9) > 0, np.float32(1.0), np.float32(-1.0))
    nothing, broken = np.zeros(n, np.float32), normal(n, 7)
    broken[n // 2] = np.nan
    steps = [normal(n), normal(n, 1), normal(n, 2) * np.float32(1000), normal(n, 3), ties, broken, nothing, normal(n)]
    here, there = Selector(2), Selector(2)
    for gradient in steps:
        host, device = both(gradient, kernels, edges)
        zero = both(nothing, kernels, edges)
        expected = here.accumulate(host, zero[0], 1.0, k)
        chosen = there.accumulate(device, zero[1], 1.0, k)
        assert same(chosen.indices, expected.indices)
        assert same(chosen.values, expected.values)
        assert (chosen.bound, chosen.finite) == (expected.bound, expected.finite)


# Top-k A and Ok-Topk call the kernels in every way in which the four methods do that take long.
@pytest.mark.parametrize(
    ("kernels", "name"), cases(METHODS, takes_long=("gtopk", "topkdsa", "shared", "gaussiank")), indirect=["kernels"]
)
def test_methods_give_the_same_bits(kernels, name: str) -> None:
    settings = {} if name in ("dense", "powersgd", "coded") else {"density": 0.1}
    shapes, moves = ((40, 30), (0,), (500,)), name == "gtopk"
    # A step takes Triton's interpreter half a second. The third step of these methods calls no kernel in a new way.
    steps = 2 if kernels is not plain and name in ("topka", "gtopk", "topkdsa", "oktopk") else 4

    def memory(segments: list[np.ndarray]) -> Accumulator:
        return DeviceAccumulator([torch.from_numpy(segment) for segment in segments], SideStreams(), kernels)

    if WHERE == "cuda":
        pytest.skip("conformance looks at the CPU's memory")
    here = check_method(METHODS[name](**settings), 3, shapes, moves=moves, steps=steps)
    there = check_method(METHODS[name](**settings), 3, shapes, moves=moves, steps=steps, memory=memory)
    assert [done.bits for done in there] == [done.bits for done in here]


def test_memory_is_the_tensors_own() -> None:
    tensors = [torch.zeros(3), torch.zeros(2)]
    bucket = accumulator_of(tensors, SideStreams())
    assert isinstance(bucket, HostAccumulator)
    bucket.assign(np.arange(5, dtype=np.float32), 1.0)
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [3, 4]]
