"""Where keys are, and what the optimizers of a parameter server do with what is pushed."""

from __future__ import annotations

import math

import numpy as np
import plain_updates
import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.server.layout import Layout
from totalreduce.server.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, Optimizer, Sum
from totalreduce.server.table import Table

OPTIMIZERS = [
    Sum(),
    SGD(0.1),
    Momentum(0.1, 0.7),
    Adagrad(0.1, 0.3),
    Adam(0.01),
    Adam(0.01, beta1=0.0),
    FTRL(0.2, l1=0.3),
]

# ------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 5, 7, 8, 33, 300])
def test_no_shard_has_more_than_its_share(num_shards: int) -> None:
    layout = Layout(10**6, range(num_shards))
    shares = np.bincount(layout.owners, minlength=num_shards)
    assert shares.sum() == layout.num_ranges == 1024
    assert (shares.min(), shares.max()) == (1024 // num_shards, math.ceil(1024 / num_shards))


@pytest.mark.parametrize("num_shards", [1, 2, 4, 7, 8, 16])
def test_few_ranges_move_besides_those_of_the_changed_shard(num_shards: int) -> None:
    before, after = Layout(10**6, range(num_shards)), Layout(10**6, range(num_shards + 1))
    moved, gained = before.owners != after.owners, after.owners == num_shards
    assert moved.sum() - gained.sum() <= 0.04 * 1024


@pytest.mark.parametrize(("num_keys", "num_shards"), [(1, 1), (5, 3), (1024, 2), (99_991, 4)])
def test_every_key_has_one_shard(num_keys: int, num_shards: int) -> None:
    layout = Layout(num_keys, range(num_shards))
    keys = np.unique(np.random.default_rng(1).integers(0, num_keys, 300))
    found = np.concatenate([keys[positions] for _, positions in layout.split_keys(keys)])
    assert sorted(found) == list(keys)
    begin, end = num_keys // 3, num_keys - num_keys // 5
    by_range: dict[int, list[int]] = {}
    for shard, parts in layout.split_range(begin, end):
        by_range[shard] = [key for first, last in parts for key in range(first, last)]
        assert (parts[1:, 0] > parts[:-1, 1]).all()
    assert sorted(key for keys in by_range.values() for key in keys) == list(range(begin, end))
    for shard, positions in layout.split_keys(np.arange(begin, end)):
        assert by_range[shard] == list(np.arange(begin, end)[positions])


@pytest.mark.parametrize(("num_keys", "shards"), [(0, [0]), (2**50, [0]), (True, [0]), (5, []), (5, [1, 1])])
def test_layouts_that_cannot_be(num_keys: int, shards: list[int]) -> None:
    with pytest.raises(ConfigurationError):
        Layout(num_keys, shards)


# -------------------------------------------------------------------------------------------------------------- table


def make(optimizer: Optimizer, width: int, dtype: type, initial: object = 0.0, num_keys: int = 5000) -> Table:
    layout = Layout(num_keys, [0, 1])
    return Table(layout, 1, width=width, dtype=np.dtype(dtype), optimizer=optimizer, initial=initial)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_pushes_do_what_the_reference_does(optimizer: Optimizer, width: int, dtype: type) -> None:
    random, table = np.random.default_rng(5), make(optimizer, width, dtype, initial=0.25)
    begins = Layout(5000, [0, 1]).begins
    own = np.concatenate([np.arange(*begins[i : i + 2]) for i in table.ranges])
    place = {int(key): row for row, key in enumerate(own)}
    values = np.full((len(own), width), 0.25)
    states = [np.full((len(own), 1 if kind.is_per_key else width), kind.initial) for kind in optimizer.states]
    for step in range(12):
        if step % 3 == 2:
            begin, end = sorted(random.integers(0, 5001, 2))
            keys, rows = own[(own >= begin) & (own < end)], table.find_range(begin, end)
        else:
            keys = own[np.flatnonzero(random.random(len(own)) < 0.2)]
            rows = table.find_keys(keys.astype(np.int32 if step % 2 else np.int64))
        assert rows.count == len(keys)
        gradients = random.standard_normal((len(keys), width)).astype(dtype)
        plain_updates.update(optimizer, values, states, np.array([place[int(key)] for key in keys], int), gradients)
        table.push(rows, gradients.reshape(-1))
        pulled = table.pull(rows).reshape(-1, width)
        expected = values[[place[int(key)] for key in keys]]
        np.testing.assert_allclose(pulled, expected, rtol=2e-5 if dtype is np.float32 else 1e-12, atol=1e-6)
    np.testing.assert_allclose(table.values.reshape(-1, width), values, rtol=2e-5, atol=1e-6)
    assert table.version == 12


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Momentum(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Adagrad(0.1, 0.5), lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)),
        (Adam(0.01, 0.8, 0.99), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99))),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_dense_table_is_trained_as_by_torch(ours: Optimizer, theirs: object) -> None:
    layout = Layout(3000, [0])
    table = Table(layout, 0, width=2, dtype=np.dtype(np.float64), optimizer=ours)
    parameter = torch.nn.Parameter(torch.zeros(3000, 2, dtype=torch.float64))
    optimizer, generator = theirs([parameter]), torch.Generator().manual_seed(1)
    for _ in range(5):
        parameter.grad = torch.randn(3000, 2, dtype=torch.float64, generator=generator)
        optimizer.step()
        table.push(table.find_range(0, 3000), parameter.grad.numpy().reshape(-1))
    np.testing.assert_allclose(table.values.reshape(-1, 2), parameter.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_initial_values_are_those_of_the_key() -> None:
    table = make(Sum(), 2, np.float32, initial=lambda keys: np.stack([keys, -keys], axis=1))
    rows = table.find_range(1234, 2345)
    pulled = table.pull(rows).reshape(-1, 2)
    layout = Layout(5000, [0, 1])
    expected = [key for _, parts in [*layout.split_range(1234, 2345)][1:] for p in parts for key in range(*p)]
    np.testing.assert_array_equal(pulled, np.stack([expected, np.negative(expected)], axis=1))
    with pytest.raises(ConfigurationError, match=r"initial returns values of shape \(1,\) for \d+ keys; expected is"):
        make(Sum(), 2, np.float32, initial=lambda keys: np.zeros(1))


def test_an_empty_range_has_no_rows() -> None:
    assert make(Sum(), 1, np.float32).find_range(10, 10).count == 0


@pytest.mark.parametrize("keys", ["of the other shard", "twice", "descending", "negative", "too large"])
def test_wrong_keys(keys: str) -> None:
    table, layout = make(Sum(), 1, np.float32), Layout(5000, [0, 1])
    mine = [int(layout.begins[index]) for index in table.ranges]
    wrong = {
        "of the other shard": [mine[0], *[int(layout.begins[i]) for i in range(1024) if i not in table.ranges][-1:]],
        "twice": [mine[0], mine[0]],
        "descending": [mine[4], mine[2]],
        "negative": [-1, mine[1]],
        "too large": [mine[0], 5000],
    }
    with pytest.raises(ProtocolError, match="is not ascending, or of another shard"):
        table.find_keys(np.array(wrong[keys], np.int64))


@pytest.mark.parametrize(
    "make_wrong",
    [lambda: SGD(0), lambda: Momentum(1, 1), lambda: Adam(beta2=0), lambda: FTRL(l1=-1), lambda: FTRL(beta=0, l2=0)],
)
def test_settings_that_cannot_be(make_wrong: object) -> None:
    with pytest.raises(ConfigurationError):
        make_wrong()


@pytest.mark.parametrize("optimizer", [Adagrad(0.1, eps=1e-50), FTRL(beta=0, l1=0, l2=1e-3)], ids=str)
def test_tiny_gradients_and_settings_change_nothing_and_raise_nothing(optimizer: Optimizer) -> None:
    table = make(optimizer, 1, np.float32)
    for gradient in (0.0, 1e-30):
        table.push(table.find_range(0, 5000), np.full(len(table.values), gradient, np.float32))
    assert np.isfinite(table.values).all()
