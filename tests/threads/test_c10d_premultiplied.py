"""``ReduceOp.PREMUL_SUM``: the products of every rank's elements and its factor are added up."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import totalreduce as tr
from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.testing import run_ranks

SIZE = 3
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FACTORS = pytest.mark.parametrize("kind", ["number", "tensor"])


def values(rank: int, dtype: torch.dtype, count: int = 60) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float32) / 7 + rank).to(dtype)


def factor_of(rank: int, kind: str, dtype: torch.dtype) -> float | torch.Tensor:
    """Return a factor that differs from rank to rank, as a number or as a tensor."""
    return 0.3 + rank if kind == "number" else torch.tensor([0.3 + rank], dtype=dtype)


def options(make: Any, factor: float | torch.Tensor, **fields: Any) -> Any:
    made = make()
    made.reduceOp = dist._make_nccl_premul_sum(factor)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def expected(kind: str, dtype: torch.dtype, count: int = 60) -> torch.Tensor:
    """Return the sum of the products, each of which is rounded; sums of 16 bits are accumulated in 32."""
    products = [values(rank, dtype, count) * factor_of(rank, kind, dtype) for rank in range(SIZE)]
    return sum(product.float() for product in products).to(dtype)


def run(body: Any) -> list[Any]:
    def on_rank(group: tr.Group) -> Any:
        store: Any = dist.HashStore()
        made: Any = ProcessGroupTotalReduce(
            group, store, timedelta(seconds=20), devices=["cpu"], others={}, close_others=lambda: None
        )
        try:
            return body(made)
        finally:
            made.shutdown()

    return run_ranks(SIZE, on_rank, engine=tr.EngineConfig(timeout_s=20.0, half_accumulation="float32"))


@TYPES
@FACTORS
def test_all_reductions_add_up_products(dtype: torch.dtype, kind: str) -> None:
    def body(made: Any) -> dict[str, torch.Tensor]:
        rank = made.rank()
        factor = factor_of(rank, kind, dtype)
        outputs = {}

        def own() -> torch.Tensor:
            return values(rank, dtype)

        made.allreduce([all_reduced := own()], options(c10d.AllreduceOptions, factor)).wait()
        outputs["all_reduce"] = all_reduced
        strided = values(rank, dtype).repeat_interleave(2)[::2]
        made.allreduce([strided], options(c10d.AllreduceOptions, factor)).wait()
        outputs["strided"] = strided
        scalar = values(rank, dtype)[5].clone()
        made.allreduce([scalar], options(c10d.AllreduceOptions, factor)).wait()
        outputs["scalar"] = scalar
        several = [own(), own()]
        made.allreduce_coalesced(several, options(c10d.AllreduceCoalescedOptions, factor)).wait()
        outputs["coalesced"] = torch.stack(several)

        reduced = own()
        made.reduce([reduced], options(c10d.ReduceOptions, factor, rootRank=1)).wait()
        outputs["reduce"] = reduced

        blocks, output = list(own().chunk(SIZE)), torch.empty(20, dtype=dtype)
        made.reduce_scatter([output], [blocks], options(c10d.ReduceScatterOptions, factor)).wait()
        outputs["reduce_scatter"], outputs["blocks"] = output, torch.cat(blocks)

        single, whole = torch.empty(20, dtype=dtype), own()
        made.reduce_scatter_single(single, whole, options(c10d.ReduceScatterOptions, factor)).wait()
        outputs["single"], outputs["whole"] = single, whole

        parts, wholes = [torch.empty(20, dtype=dtype) for _ in range(2)], [own(), own()]
        made.reduce_scatter_single_coalesced(parts, wholes, options(c10d.ReduceScatterOptions, factor)).wait()
        outputs["parts"], outputs["wholes"] = torch.stack(parts), torch.stack(wholes)
        return outputs

    total = expected(kind, dtype)
    for rank, outputs in enumerate(run(body)):
        mine, own = total[20 * rank : 20 * rank + 20], values(rank, dtype)
        torch.testing.assert_close(outputs["all_reduce"], total)
        torch.testing.assert_close(outputs["strided"], total)
        torch.testing.assert_close(outputs["scalar"], total[5])
        torch.testing.assert_close(outputs["coalesced"], torch.stack([total, total]))
        if rank == 1:
            torch.testing.assert_close(outputs["reduce"], total)
        else:
            assert torch.equal(outputs["reduce"], own)
        for name in ("reduce_scatter", "single"):
            torch.testing.assert_close(outputs[name], mine)
        torch.testing.assert_close(outputs["parts"], torch.stack([mine, mine]))
        for name in ("blocks", "whole"):
            assert torch.equal(outputs[name], own), "what is only read does not change"
        assert torch.equal(outputs["wholes"], torch.stack([own, own]))


def test_the_same_bits_on_all_ranks() -> None:
    def body(made: Any) -> bytes:
        tensor = torch.sin(torch.arange(10_000, dtype=torch.float32) * (made.rank() + 1))
        made.allreduce([tensor], options(c10d.AllreduceOptions, 1 / 3)).wait()
        return tensor.numpy().tobytes()

    results = run(body)
    assert results[0] == results[1] == results[2]


def tell_when_it_waits(memory: Any, told: threading.Event) -> None:
    deadline = time.monotonic() + 20
    while not memory._waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    told.set()


def test_what_is_in_flight_ends_before_the_tensor_is_multiplied() -> None:
    told = threading.Event()

    def body(made: Any) -> float:
        tensor = torch.full((1000,), 2.0)
        if made.rank() == 2:
            assert told.wait(20)
        first = made.allreduce([tensor], dist.ReduceOp.PRODUCT)
        if made.rank() == 0:
            assert not first.is_completed()
            threading.Thread(target=tell_when_it_waits, args=(made.group.operations._memory, told)).start()
        second = made.allreduce([tensor], options(c10d.AllreduceOptions, 10.0))
        second.wait()
        return tensor.unique().item()

    assert run(body) == [2.0**SIZE * 10.0 * SIZE] * SIZE


def test_what_cannot_be_multiplied() -> None:
    def body(made: Any) -> list[str]:
        texts = []
        for tensor, op in (
            (torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
            (torch.ones(3), dist.ReduceOp.PREMUL_SUM),
            (torch.eye(3).to_sparse(), dist._make_nccl_premul_sum(0.5)),
        ):
            with pytest.raises(ValueError, match=r"sum|SUM") as caught:
                made.allreduce([tensor], op)
            texts.append(str(caught.value))
        return texts

    for texts in run(body):
        for text, part in zip(texts, ["not torch.int32", "has no factor", "sparse"], strict=True):
            assert part in text
