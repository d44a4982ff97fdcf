"""Ranks that disagree get the same typed error everywhere, and go on working."""

import pytest
import torch

import totalreduce as tr
from totalreduce.testing import run_ranks


def usual(group: tr.Group) -> tr.Work:
    return group.allreduce(torch.ones(6), name="layer.weight")


def other_shape(group: tr.Group) -> tr.Work:
    return group.allreduce(torch.ones(2, 3), name="layer.weight")


def other_length(group: tr.Group) -> tr.Work:
    return group.allreduce(torch.ones(100_000), name="layer.weight")


def other_dtype(group: tr.Group) -> tr.Work:
    return group.allreduce(torch.ones(6, dtype=torch.float64), name="layer.weight")


def other_reduction(group: tr.Group) -> tr.Work:
    return group.allreduce(torch.ones(6), name="layer.weight", op=tr.ReduceOp.MAX)


def other_kind(group: tr.Group) -> tr.Work:
    return group.broadcast(torch.ones(6), name="layer.weight", async_op=True)


ODD = [
    (other_shape, "allreduce(sum) of float32[2, 3]"),
    (other_length, "allreduce(sum) of float32[100000]"),
    (other_dtype, "allreduce(sum) of float64[6]"),
    (other_reduction, "allreduce(max) of float32[6]"),
    (other_kind, "broadcast(root=0) of float32[6]"),
]


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize(("odd", "shown"), ODD, ids=lambda case: getattr(case, "__name__", ""))
def test_every_rank_raises_and_goes_on(odd, shown: str, transport: str) -> None:
    def body(group: tr.Group) -> tr.MismatchError:
        work = odd(group) if group.rank == 2 else usual(group)
        with pytest.raises(tr.MismatchError) as caught:
            work.wait(timeout_s=20)
        assert work.done()
        assert isinstance(work.exception(), tr.MismatchError)
        for name in ("layer.weight", "another"):
            assert group.allreduce(torch.ones(6), name=name).wait().tolist() == [3.0] * 6
        return caught.value

    for error in run_ranks(3, body, transport=transport):
        assert error.tensor == "layer.weight"
        assert set(error.ranks) in ({1, 2}, {0, 2})
        by_rank = dict(zip(error.ranks, error.values, strict=True))
        assert by_rank.pop(2) == shown
        assert list(by_rank.values()) == ["allreduce(sum) of float32[6]"]


def test_roots_that_differ() -> None:
    def body(group: tr.Group) -> bool:
        for _ in range(3):
            with pytest.raises(tr.MismatchError, match=r"broadcast\(root=0\).*broadcast\(root=1\)|root=1.*root=0"):
                group.broadcast(torch.ones(2), root=group.rank % 2, name="w", timeout_s=20)
        tensor = torch.full((2,), float(group.rank))
        return group.broadcast(tensor, root=1, name="w").wait().tolist() == [1.0, 1.0]

    assert run_ranks(4, body) == [True] * 4


def test_other_operations_are_not_harmed() -> None:
    def body(group: tr.Group) -> list[float]:
        works = [group.allreduce(torch.full((50,), float(i)), name=f"tensor {i}") for i in range(10)]
        odd = group.allreduce(torch.ones(group.rank + 1), name="odd")
        works += [group.allreduce(torch.full((50,), float(i)), name=f"tensor {i}") for i in range(10, 20)]
        with pytest.raises(tr.MismatchError):
            odd.wait(timeout_s=20)
        return [float(work.wait()[0]) for work in works]

    assert run_ranks(2, body) == [[2.0 * index for index in range(20)]] * 2
