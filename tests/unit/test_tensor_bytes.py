"""The bytes of tensors: which memory, for how long, and what has none."""

import gc
import weakref

import pytest
import torch

from totalreduce.foundation.errors import UnsupportedError
from totalreduce.groups.tensors import as_bytes


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_a_contiguous_tensor_is_used_in_place(dtype: torch.dtype) -> None:
    whole = torch.arange(24).to(dtype).view(4, 6)
    for tensor in (whole, whole[1:3], whole[2:3, :5], torch.nn.Parameter(whole) if dtype.is_floating_point else whole):
        view, copy_back = as_bytes(tensor, "t", writes=True)
        assert copy_back is None
        assert (view.format, view.nbytes, view.readonly) == ("B", tensor.numel() * dtype.itemsize, False)
        assert bytes(view) == tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        view[:] = bytes(len(view))
        assert not tensor.detach().any()


def test_the_bytes_keep_the_memory_alive() -> None:
    tensor = torch.full((1000,), 3.0)
    view, _ = as_bytes(tensor, "t", writes=True)
    part, alive = view[8:16], weakref.ref(tensor)
    del tensor, view
    gc.collect()
    assert alive() is not None
    assert torch.frombuffer(part, dtype=torch.float32).tolist() == [3.0, 3.0]
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("writes", [False, True])
def test_what_is_negative_in_name_only_is_copied(writes: bool) -> None:
    """The imaginary part of a conjugate: its memory holds the other sign."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    tensor = numbers.conj().imag
    assert tensor.is_neg()
    view, copy_back = as_bytes(tensor, "t", writes=writes)
    values = torch.frombuffer(view, dtype=torch.float32)
    assert values.tolist() == [-2.0, 4.0]
    values.mul_(10)
    assert (copy_back is not None) == writes
    if copy_back is not None:
        copy_back()
        assert numbers.tolist() == [1 + 20j, 3 - 40j]


def test_a_tensor_without_memory_is_refused() -> None:
    zeros = torch._efficientzerotensor((5,))
    with pytest.raises(UnsupportedError, match=r"tensor 't' has no memory .* use \.clone\(\) first"):
        as_bytes(zeros, "t", writes=False)


def test_nothing_is_nothing() -> None:
    view, copy_back = as_bytes(torch.empty(3, 0), "t", writes=True)
    assert (len(view), copy_back) == (0, None)
