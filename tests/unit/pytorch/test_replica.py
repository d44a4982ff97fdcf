"""The model as strategies see it: ranges of elements that begin and end within parameters."""

import numpy as np
import pytest
import torch

from totalreduce.pytorch.replica import ModelReplica
from totalreduce.testing.strategies import ArrayReplica

SHAPES = [(3, 2, 2, 2), (0,), (5,), (2, 3)]
N = 24 + 5 + 6


def model(memory_format) -> list[torch.nn.Parameter]:
    values = torch.arange(float(N)).split([24, 0, 5, 6])
    tensors = [part.clone().view(shape) for part, shape in zip(values, SHAPES, strict=True)]
    tensors[0] = tensors[0].to(memory_format=memory_format)
    return [torch.nn.Parameter(tensor) for tensor in tensors]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_range_of_elements_is_read_and_written(memory_format) -> None:
    parameters = model(memory_format)
    replica = ModelReplica(parameters, torch.optim.SGD(parameters, lr=0.1))
    arrays = ArrayReplica([np.arange(24.0), np.zeros(0), np.arange(24.0, 29), np.arange(29.0, N)])
    expected = np.arange(float(N))
    for begin, end in [(0, N), (3, 9), (20, 32), (24, 29), (30, 31), (7, 7)]:
        for each in (replica, arrays):
            np.testing.assert_array_equal(each.read_range(begin, end), expected[begin:end])
            each.write_range(begin, (-1 - expected[begin:end]).astype(each.dtype))
        expected[begin:end] = -1 - expected[begin:end]
        for each in (replica, arrays):
            np.testing.assert_array_equal(each.read(range(4)), expected)
    assert parameters[0].is_contiguous(memory_format=memory_format)
