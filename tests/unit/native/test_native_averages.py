"""Averages over a library that has sums only, on more ranks than a small integer type can count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from totalreduce.coordination.requests import Request
from totalreduce.foundation.types import OpKind, ReduceOp
from totalreduce.native.packing import Packer
from totalreduce.native.reductions import reduction_for

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int64, torch.float32, torch.bfloat16]


def planned(tensor: torch.Tensor, world_size: int) -> None:
    """What ends an average in a plan."""
    reduction_for(tensor, ReduceOp.AVG, world_size, wider={}).finish()


def negotiated(tensor: torch.Tensor, world_size: int) -> None:
    """What ends an average that the ranks agree on first."""
    request = Request("n", OpKind.ALLREDUCE, str(tensor.dtype).removeprefix("torch."), reduction="avg")
    packer = SimpleNamespace(_natives=SimpleNamespace(world_size=world_size), _divide_by_active=False)
    _, after = Packer._scales(packer, request, ())  # type: ignore[arg-type]
    after(tensor)


@pytest.mark.parametrize("end", [planned, negotiated])
@pytest.mark.parametrize("world_size", [2, 127, 128, 200, 256, 40_000, 65_536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_ranks_need_not_fit_into_the_element_type(dtype, world_size, end):
    sums = torch.tensor([0, 1, 7, 100, 100 if dtype is torch.uint8 else -100], dtype=dtype)
    exact = sums.double() / world_size
    wanted = (exact if dtype.is_floating_point else exact.trunc()).to(dtype)
    end(sums, world_size)
    assert torch.equal(sums, wanted)
