"""Kernels against torch, bit by bit."""

import pytest
import torch

from totalreduce.foundation.types import DType, ReduceOp
from totalreduce.kernels import combine, supports

REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
PAIRS = [(dtype, op) for dtype in DType for op in REDUCTIONS if supports(dtype, op)]
SIZES = (0, 1, 7, 32_767, 32_768, 32_769, 65_537)
OPERATIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
NAN, INF = float("nan"), float("inf")


def torch_type(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.name.lower())


def values(dtype: DType, num_elements: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64):
        return (torch.randn(num_elements, generator=generator, dtype=torch.float64) * 100).to(torch_type(dtype))
    return torch.randint(-(2**40), 2**40, (num_elements,), generator=generator).to(torch_type(dtype))


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def reference(
    op: ReduceOp, local: torch.Tensor, incoming: torch.Tensor, out: torch.dtype, divisor: int
) -> torch.Tensor:
    if local.dtype is torch.bool:
        return local | incoming if op in (ReduceOp.SUM, ReduceOp.MAX) else local & incoming
    if local.dtype in (torch.float16, torch.bfloat16):
        local, incoming = local.float(), incoming.float()
    total = OPERATIONS[op](local, incoming)
    if divisor != 1:
        rounding = None if total.is_floating_point() else "trunc"
        total = torch.div(total, divisor, rounding_mode=rounding)
    return total.to(out)


def combined(
    op: ReduceOp, local: torch.Tensor, incoming: torch.Tensor, destination: torch.Tensor, divisor: int = 1
) -> torch.Tensor:
    dtypes = {getattr(torch, dtype.name.lower()): dtype for dtype in DType}
    combine(
        op,
        view(local),
        view(incoming),
        view(destination),
        local_dtype=dtypes[local.dtype],
        incoming_dtype=dtypes[incoming.dtype],
        destination_dtype=dtypes[destination.dtype],
        divisor=divisor,
    )
    return destination


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_in_place(dtype: DType, op: ReduceOp, num_elements: int) -> None:
    local, incoming = values(dtype, num_elements, 1), values(dtype, num_elements, 2)
    divisor = 3 if op is ReduceOp.AVG else 1
    wanted = reference(op, local, incoming, local.dtype, divisor)
    assert_same(combined(op, local, incoming, local, divisor), wanted)


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_half_types_are_widened_and_rounded_once(dtype: DType, op: ReduceOp, num_elements: int) -> None:
    local, half = values(dtype, num_elements, 1), values(dtype, num_elements, 2)
    wide = values(DType.FLOAT32, num_elements, 3)
    for mine, theirs in ((local, half), (local, wide), (wide, half)):
        for out in (torch.float32, local.dtype):
            destination = torch.empty(num_elements, dtype=out)
            wanted = reference(op, mine.float(), theirs.float(), out, 1)
            assert_same(combined(op, mine, theirs, destination), wanted)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_not_a_number_and_infinity(dtype: DType, op: ReduceOp) -> None:
    special = torch.tensor([NAN, INF, -INF, 1.0, 0.0, -0.0], dtype=torch_type(dtype))
    local, incoming = (grid.flatten() for grid in torch.meshgrid(special, special, indexing="ij"))
    local, incoming = local.contiguous(), incoming.contiguous()
    wanted = reference(op, local, incoming, local.dtype, 1)
    assert_same(combined(op, local, incoming, torch.empty_like(local)), wanted)


def test_overflow_becomes_infinity_silently() -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert combined(ReduceOp.SUM, largest, largest.clone(), largest).tolist() == [INF] * 3


def test_integers_wrap() -> None:
    local = torch.tensor([127, -128], dtype=torch.int8)
    assert combined(ReduceOp.SUM, local, torch.tensor([1, -1], dtype=torch.int8), local).tolist() == [-128, 127]


@pytest.mark.parametrize("divisor", [2, 3, 127, 128, 200, 256, 1000])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64])
def test_averages_of_integers_round_towards_zero_for_any_number_of_ranks(dtype: DType, divisor: int) -> None:
    info = torch.iinfo(torch_type(dtype))
    numbers = torch.tensor([info.min, info.max, -7 if info.min else 7, -1 if info.min else 1, 0, 1, 7])
    local = numbers.to(torch_type(dtype))
    wanted = [-(-n // divisor) if n < 0 else n // divisor for n in local.tolist()]
    assert combined(ReduceOp.AVG, local, torch.zeros_like(local), local, divisor).tolist() == wanted


def test_unaligned_memory() -> None:
    """A segment begins where the one before it ended; a receive buffer, anywhere."""
    memory = memoryview(bytearray(8 * 5 + 1))[1:]
    memory[:] = view(torch.arange(5, dtype=torch.float64)).tobytes()
    local = torch.full((5,), 10.0, dtype=torch.float64)
    combine(
        ReduceOp.SUM,
        view(local),
        memory,
        view(local),
        local_dtype=DType.FLOAT64,
        incoming_dtype=DType.FLOAT64,
        destination_dtype=DType.FLOAT64,
    )
    assert local.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]


def test_only_the_average_of_truth_values_is_undefined() -> None:
    assert [pair for pair in ((d, op) for d in DType for op in REDUCTIONS) if not supports(*pair)] == [
        (DType.BOOL, ReduceOp.AVG)
    ]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])
def test_incoming_bytes_may_be_read_only(dtype: DType) -> None:
    """As a peer's are in shared memory; torch would warn its users of that, once in a process."""
    local, incoming = values(dtype, 1000, 1), values(dtype, 1000, 2)
    wanted = torch.add(local.float(), incoming.float()).to(local.dtype)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        combine(
            ReduceOp.SUM,
            view(local),
            view(incoming).toreadonly(),
            view(local),
            local_dtype=dtype,
            incoming_dtype=dtype,
            destination_dtype=dtype,
        )
    finally:
        torch.set_warn_always(always)
    assert_same(local, wanted)
