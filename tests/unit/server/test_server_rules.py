"""Means of a step, rules of torch on parts of a table, learning rates of pushes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.server.combining import means_of
from totalreduce.server.layout import Layout
from totalreduce.server.optimizers import FTRL, SGD, Adam, Replace, Sum
from totalreduce.server.table import Rows, Table
from totalreduce.server.torch_rule import Torch

RULES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9)}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5, "centered": True}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("Rprop", {}),
]


def rows_of(begin: int, end: int) -> Rows:
    return Rows(end - begin, begin, None)


def listed(*rows: int) -> Rows:
    return Rows(len(rows), 0, np.array(rows))


def ones(rows: Rows, factor: float) -> np.ndarray:
    return np.full(2 * rows.count, factor)


def total(means: list[tuple[Rows, np.ndarray, float]]) -> np.ndarray:
    found = np.full((12, 2), np.nan)
    for rows, mean, _ in means:
        part = slice(rows.begin, rows.begin + rows.count) if rows.listed is None else rows.listed
        assert np.isnan(found[part]).all()  # no row comes twice
        found[part] = mean.reshape(-1, 2)
    return found[:, 0]


def test_means_of_equal_overlapping_and_listed_rows() -> None:
    everything = rows_of(0, 12)
    [(rows, mean, lr)] = means_of([(everything, ones(everything, each), 0.5) for each in (1.0, 2.0, 4.0)], 2, 4)
    assert (rows.begin, rows.count, set(mean), lr) == (0, 12, {1.75}, 0.5)
    overlapping = [
        (rows, ones(rows, 2.0**n), 0.5) for n, rows in enumerate([rows_of(0, 6), rows_of(4, 8), rows_of(10, 12)])
    ]
    expected = [0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 1, 1, np.nan, np.nan, 2, 2]
    np.testing.assert_array_equal(total(means_of(overlapping, 2, 2)), expected)
    mixed = [*overlapping, (listed(4, 9), ones(listed(4, 9), 8.0), 0.5)]
    expected = [0.5, 0.5, 0.5, 0.5, 5.5, 1.5, 1, 1, np.nan, 4, 2, 2]
    np.testing.assert_array_equal(total(means_of(mixed, 2, 2)), expected)
    assert means_of([], 2, 2) == []


def test_the_mean_of_a_row_has_the_learning_rate_of_its_first_push() -> None:
    ranges = [(rows_of(0, 6), 0.1), (rows_of(6, 8), 0.01), (rows_of(4, 8), 0.5), (rows_of(9, 10), 0.1)]
    expected = [*[0.1] * 6, 0.01, 0.01, np.nan, 0.1, np.nan, np.nan]
    for more in ([], [(listed(0, 7), 0.7)]):  # ranges alone, and with a list
        pushed = [(rows, ones(rows, 1.0), lr) for rows, lr in [*ranges, *more]]
        rates = [(rows, np.full_like(mean, lr), lr) for rows, mean, lr in means_of(pushed, 2, 2)]
        np.testing.assert_array_equal(total(rates), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "settings"), RULES, ids=str)
def test_a_rule_on_parts_has_the_bits_of_torch_on_the_whole(kind: str, settings: dict[str, object], dtype: str) -> None:
    """Ranges that cut the values anywhere, and lists; some rows are updated more often than others."""
    random = np.random.default_rng(5)
    table = Table(
        Layout(40, [0]),
        0,
        width=3,
        dtype=np.dtype(dtype),
        optimizer=Torch(kind, settings),
        initial=lambda keys: np.sin(np.arange(3 * len(keys))),
    )
    # One torch optimizer for each row, because torch counts the updates of a tensor.
    rows = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in table.values.reshape(40, 3)]
    optimizers = [getattr(torch.optim, kind)([row], foreach=False, **settings) for row in rows]
    for pushed in [rows_of(0, 40), rows_of(3, 17), listed(0, 3, 16, 17, 39), rows_of(0, 40), listed(5)]:
        gradients = random.standard_normal((pushed.count, 3)).astype(dtype)
        table.push(pushed, gradients.reshape(-1).copy())
        chosen = range(pushed.begin, pushed.begin + pushed.count) if pushed.listed is None else pushed.listed.tolist()
        for row, gradient in zip(chosen, gradients, strict=True):
            rows[row].grad = torch.from_numpy(gradient)
            optimizers[row].step()
    np.testing.assert_array_equal(table.values.reshape(40, 3), np.stack([row.detach().numpy() for row in rows]))


def test_a_push_may_have_a_learning_rate_of_its_own() -> None:
    for optimizer, expected in [(SGD(1.0), [-0.5, -1.5, -1.75]), (Torch("SGD", {"lr": 1.0}), [-0.5, -1.5, -1.75])]:
        table = Table(Layout(1, [0]), 0, width=1, dtype=np.dtype("float32"), optimizer=optimizer)
        found = []
        for rate in ((0.5,), (), (0.25,)):
            table.push(rows_of(0, 1), np.ones(1, np.float32), *rate)
            found.append(table.values[0])
        assert found == expected
    Adam().check_rate(0.5)
    Torch("SGD", {"lr": 1.0}).check_rate(0.0)
    for optimizer in (Sum(), FTRL(), Replace()):
        with pytest.raises(ConfigurationError, match="no learning rate"):
            optimizer.check_rate(0.5)
    for optimizer in (SGD(1.0), Torch("SGD", {"lr": 1.0})):
        with pytest.raises(ConfigurationError, match="lr"):
            optimizer.check_rate(-0.5)


@pytest.mark.parametrize(("kind", "settings"), RULES, ids=str)
def test_keys_that_have_seen_different_learning_rates_keep_their_own_state(
    kind: str, settings: dict[str, object]
) -> None:
    optimizer = Torch(kind, settings)
    table = Table(Layout(2, [0]), 0, width=1, dtype=np.dtype("float32"), optimizer=optimizer)
    rows = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [getattr(torch.optim, kind)([row], foreach=False, **settings) for row in rows]
    for lr, pushed in [(0.1, rows_of(0, 1)), (0.01, rows_of(1, 2)), (0.01, rows_of(0, 2)), (0.01, listed(0, 1))]:
        gradients = np.arange(1.0, 1 + pushed.count, dtype=np.float32)
        table.push(pushed, gradients.copy(), lr)
        chosen = range(pushed.begin, pushed.begin + pushed.count) if pushed.listed is None else pushed.listed.tolist()
        for row, gradient in zip(chosen, gradients, strict=True):
            optimizers[row].param_groups[0]["lr"] = lr
            rows[row].grad = torch.full((1,), float(gradient))
            optimizers[row].step()
    assert table.values.tolist() == [row.item() for row in rows]


@pytest.mark.parametrize(("kind", "settings"), RULES, ids=str)
def test_torch_makes_its_state_on_the_cpu_whatever_the_default_device_is(
    kind: str, settings: dict[str, object]
) -> None:
    def values() -> list[float]:
        optimizer = Torch(kind, settings)
        table = Table(Layout(2, [0]), 0, width=1, dtype=np.dtype("float32"), optimizer=optimizer)
        for _ in range(2):
            table.push(rows_of(0, 2), np.arange(1.0, 3.0, dtype=np.float32), 0.1)
        return table.values.tolist()

    expected = values()
    with torch.device("meta"):
        assert values() == expected


def test_values_can_be_assigned_and_replaced() -> None:
    table = Table(Layout(6, [0]), 0, width=2, dtype=np.dtype("float64"), optimizer=Replace())
    table.assign(rows_of(0, 6), np.arange(12.0))
    table.push(rows_of(1, 2), np.array([-1.0, -2.0]))
    table.push(listed(3, 5), np.array([-3.0, -4.0, -5.0, -6.0]))
    table.assign(listed(0), np.array([7.0, 8.0]))
    assert table.values.tolist() == [7, 8, -1, -2, 4, 5, -3, -4, 8, 9, -5, -6]


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("LBFGS", {}, "no torch optimizer 'LBFGS'"),
        ("SGD", {"rate": 1.0}, "does not take"),
        ("SGD", {"lr": -1.0}, "does not take"),
        ("SGD", {"lr": object()}, "does not take"),
    ],
)
def test_rules_that_there_are_not(kind: str, settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Torch(kind, settings)
