"""Copies of a model's buffers: when a block begins, and as rows of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from totalreduce.recovery.buffers import BufferRow, KeptBuffers, buffers_of
from totalreduce.recovery.sharing import seed_generators


class Model(nn.Module):
    """Buffers of several dtypes and shapes: one not contiguous, one shared, one that is missing, a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("turned", torch.arange(6, dtype=torch.float64).view(2, 3).t())
        self.register_buffer("narrow", torch.full((3,), 1.5, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("large", torch.zeros(70_000))
        self.same = nn.Module()
        self.same.register_buffer("mask", self.mask)


def values_of(model: nn.Module) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_a_row_has_every_buffer() -> None:
    model = Model()
    rows = BufferRow(buffers_of(model))
    row = rows.copy()
    assert len(row) == rows.layout.num_bytes >= 280_000
    assert {name: each.tolist() for name, each in rows.layout.read(row).items()} == values_of(model)
    model.scalar.fill_(8)
    model.turned.mul_(2)
    assert rows.copy(row) is row
    assert {name: each.tolist() for name, each in rows.layout.read(row).items()} == values_of(model)
    assert set(rows.layout.read(row)) == set(dict(model.named_buffers()))


@pytest.mark.parametrize("how", ["another tensor", "other memory"])
def test_a_row_follows_a_buffer_that_moves(how: str) -> None:
    model = Model()
    rows = BufferRow(buffers_of(model))
    row = rows.copy()
    if how == "another tensor":
        model.narrow = torch.tensor([2.5, 3.5, 4.5, 5.5], dtype=torch.bfloat16)
    else:
        model.narrow.data = torch.tensor([2.5, 3.5, 4.5, 5.5], dtype=torch.bfloat16)
    new = rows.copy(row)
    assert rows.layout.read(new)["narrow"].tolist() == [2.5, 3.5, 4.5, 5.5]
    assert {name: each.tolist() for name, each in rows.layout.read(new).items()} == values_of(model)


def test_buffers_are_undone_and_those_that_may_differ_between_ranks_are_known() -> None:
    model = Model()
    kept = KeptBuffers(model)
    small = set(dict(model.named_buffers())) - {"large"}
    assert set(kept.own()) == small | {"large"}  # there was no block yet
    before = values_of(model)
    kept.keep()
    assert set(kept.own()) == small
    model.norm(torch.randn(4, 5))
    model.scalar.add_(1)
    model.turned.zero_()
    model.large[3] = 5.0
    assert set(kept.own()) == small | {"large"}
    kept.restore()
    assert values_of(model) == before
    model.large[4] = 6.0
    kept.keep()
    assert set(kept.own()) == small | {"large"}  # some block has changed it
    model.large[4] = 7.0
    kept.restore()
    assert model.large[4] == 6.0


def test_a_buffer_of_another_shape_is_undone() -> None:
    model = Model()
    kept = KeptBuffers(model)
    kept.keep()
    before = values_of(model)
    model.norm.running_mean = torch.ones(7)
    model.large = torch.ones(80_000)
    model.narrow = model.narrow.double()
    kept.restore()
    assert values_of(model) == before
    assert model.narrow.dtype is torch.bfloat16
    model.norm.running_mean.add_(1)
    model.large.add_(1)
    kept.restore()  # the copies have memory of their own
    assert values_of(model) == before


def test_buffers_go_to_another_process() -> None:
    model, other = Model(), Model()
    kept, taken = KeptBuffers(model), KeptBuffers(other)
    kept.keep()
    model.norm(torch.randn(4, 5))
    taken.load(kept.own())
    assert values_of(other) == values_of(model)
    taken.keep()
    assert set(taken.own()) == set(kept.own())


def test_every_version_and_rank_draws_other_numbers() -> None:
    drawn = set()
    for seed in (0, 1, -1, 2**63):
        for version in range(20):
            for rank in range(8):
                seed_generators(seed, version, rank)
                drawn.add((float(torch.rand(1)), float(np.random.rand()), random.random()))
    assert len(drawn) == 4 * 20 * 8
    assert all(len({each[index] for each in drawn}) > 630 for index in range(3))
    seed_generators(3, 4, 5)
    first = (float(torch.rand(1)), float(np.random.rand()), random.random())
    seed_generators(3, 4, 5)
    assert first == (float(torch.rand(1)), float(np.random.rand()), random.random())
