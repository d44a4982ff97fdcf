"""What programs pass to ``totalreduce.horovod``: values of a wrong type are refused with what was expected."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.horovod.arguments import (
    checked_compression,
    checked_factor,
    checked_splits,
    checked_tensor,
    checked_tensors,
)
from totalreduce.horovod.collectives import Reduction, checked_op
from totalreduce.horovod.compression import Compression
from totalreduce.horovod.process_sets import ProcessSet


def test_a_tensor_is_returned_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert checked_tensor(parameter, "allreduce") is parameter
    first, second = torch.ones(1), torch.ones(2)
    assert all(a is b for a, b in zip(checked_tensors(iter([first, second]), "x"), [first, second], strict=True))
    assert checked_tensors([], "x") == []


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, ConfigurationError, "needs a tensor, not None. The gradient of a parameter is None until"),
        (1.5, ConfigurationError, "needs a torch.Tensor, not a float: broadcast_object and allgather_object send"),
        (np.ones(2), ConfigurationError, "needs a torch.Tensor, not a ndarray"),
        (torch.eye(2).to_sparse(), UnsupportedError, "needs a dense tensor, not one of layout torch.sparse_coo"),
    ],
)
def test_what_is_no_dense_tensor_is_refused(value: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^broadcast 'w' {words}"):
        checked_tensor(value, "broadcast 'w'")
    with pytest.raises(kind, match=f"^tensor 1 of broadcast 'w' {words}"):
        checked_tensors([torch.ones(1), value], "broadcast 'w'")


@pytest.mark.parametrize("value", [torch.ones(2), None, 5])
def test_a_list_of_tensors_is_no_single_value(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="needs a list of tensors, not a"):
        checked_tensors(value, "allreduce")


def test_factors() -> None:
    good: list[Any] = [2, 0.5, True, np.float32(0.25), torch.tensor(3.0)]
    assert [checked_factor("prescale_factor", value) for value in good] == [2.0, 0.5, 1.0, 0.25, 3.0]
    bad: list[Any] = [None, "2", b"2", torch.ones(2), [1], 10**400, 1j]
    for value in bad:
        with pytest.raises(ConfigurationError, match="prescale_factor must be a number, not "):
            checked_factor("prescale_factor", value)


def test_splits() -> None:
    assert checked_splits(None) is None
    good: list[Any] = [[1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2])]
    assert [checked_splits(value) for value in good] == [[1, 2]] * 4
    square = torch.ones(2, 2, dtype=torch.int64)
    bad: list[Any] = [[0.5, 1.5], torch.tensor([1.0, 2.0]), torch.tensor(3), square, 3, "ab"]
    for value in bad:
        with pytest.raises(ConfigurationError, match="splits must be whole numbers, one for each rank"):
            checked_splits(value)


def test_compressors() -> None:
    assert checked_compression(Compression.fp16) is Compression.fp16
    for value in (None, "fp16", argparse.Namespace()):
        with pytest.raises(ConfigurationError, match=r"compression must be Compression\.none, Compression\.fp16"):
            checked_compression(value)


def test_reductions() -> None:
    assert checked_op(None) is Reduction.AVERAGE
    assert checked_op(5) is checked_op(Reduction.PRODUCT) is Reduction.PRODUCT
    for value in ("sum", 6, -1, torch.sum):
        with pytest.raises(ConfigurationError, match="op is one of Average, Sum, Adasum, Min, Max, Product, not "):
            checked_op(value)


def test_process_sets() -> None:
    assert ProcessSet(np.array([3, 1])).ranks == [1, 3]
    assert ProcessSet(range(2)).ranks == [0, 1]
    bad: list[Any] = [5, None, [0.5], ["0"], [-1], [1, 1], "01"]
    for value in bad:
        with pytest.raises(ConfigurationError, match="different ranks of the job, not of "):
            ProcessSet(value)
