"""Training with several ranks equals training with one, in both modes of overlap."""

from __future__ import annotations

import random
import time

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    Net,
    Submissions,
    all_equal,
    batches,
    flat,
    loss_of,
    shard,
    train_alone,
    wrap,
)

from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.buckets import ParameterSpec, plan_buckets
from totalreduce.testing import run_ranks

MODES = ["backward", "iterations"]


def train(
    group: Group, kind: str, overlap: str, *, num_steps: int = 20, delays: random.Random | None = None
) -> torch.Tensor:
    model = Net()
    optimizer = wrap(model, group, OPTIMIZERS[kind], overlap=overlap)
    for batch in batches(num_steps):
        optimizer.zero_grad()
        if delays:
            time.sleep(delays.random() * 0.004)
        loss_of(model, shard(batch, group)).backward()
        if delays:
            time.sleep(delays.random() * 0.004)
        optimizer.step()
    optimizer.close()
    assert optimizer.resubmissions == 0
    return flat(model)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process_on_the_whole_batch(world_size: int, kind: str, overlap: str) -> None:
    reference = train_alone(OPTIMIZERS[kind])
    results = run_ranks(world_size, lambda group: train(group, kind, overlap))
    assert (results[0] - reference).abs().max() <= 1e-12
    assert (reference - flat(Net())).abs().max() > 1e-2, "the reference did train"
    assert all_equal(results)


def test_two_runs_with_random_delays_and_both_modes_give_the_same_bits() -> None:
    def run(seed: int, overlap: str) -> torch.Tensor:
        results = run_ranks(
            4,
            lambda group: train(group, "adamw", overlap, num_steps=10, delays=random.Random(seed + group.rank)),
        )
        assert all_equal(results)
        return results[0]

    reference = run(100, "backward")
    assert torch.equal(run(200, "backward"), reference)
    assert torch.equal(run(300, "iterations"), reference)
    assert torch.equal(run(400, "iterations"), reference)


def test_over_tcp() -> None:
    results = run_ranks(3, lambda group: train(group, "adamw", "iterations"), transport="tcp")
    assert (results[0] - train_alone(OPTIMIZERS["adamw"])).abs().max() <= 1e-12
    assert all_equal(results)


def test_sum_is_the_sum_of_the_ranks_losses() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, op=ReduceOp.SUM)
        loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        return flat(model)

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    (3 * loss_of(model, batches(1)[0])).backward()
    optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12


def test_buckets_leave_during_backward_and_each_once() -> None:
    def body(group: Group) -> tuple[list[str], list[str], list[str]]:
        submissions = Submissions(group)
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        submissions.take()
        loss_of(model, batches(1)[0]).backward()
        early = [name for name, _ in submissions.take()]
        optimizer.step()
        return early, [name for name, _ in submissions.take()], optimizer._dense.names

    early, late, names = run_ranks(2, body)[0]
    assert names[0] == "model.bucket0[third.bias]"
    assert names[-2:] == ["model.bucket4[first.bias .. head.bias]", "model.bucket5[head.weight]"]
    assert sorted(early) == names[:-1]
    # The last bucket closes the round and is never early.
    assert late == names[-1:]


def test_priorities_follow_the_first_forward_not_the_registration() -> None:
    def body(group: Group) -> dict[str, int]:
        submissions = Submissions(group)
        model = Net()
        optimizer = wrap(model, group, bucket_bytes=1)  # one bucket per parameter
        names = [bucket.spec.members for bucket in optimizer._dense.buckets]
        submissions.take()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        submitted = dict(submissions.take())
        return {
            optimizer._plan.specs[member[0]].name: submitted[optimizer._dense.names[index]]
            for index, member in enumerate(names)
        }

    priorities = run_ranks(2, body)[0]
    order = ["first.weight", "second.weight", "third.weight", "head.bias"]
    assert [priorities[name] for name in order] == sorted(priorities[name] for name in order)
    assert priorities["first.weight"] < priorities["third.weight"]
    # head.weight is in the last bucket, for whose word all others wait.
    assert priorities["head.weight"] == min(priorities.values())


def test_backward_mode_leaves_no_forward_hooks_behind() -> None:
    def body(group: Group) -> int:
        model = Net()
        optimizer = wrap(model, group)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    assert run_ranks(1, body) == [0]


def _spec(name: str, num_elements: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, (), (num_elements,), (1,), dtype, num_elements, 4 if dtype == "float32" else 2)


def test_plan_keeps_to_the_size_and_the_reverse_order() -> None:
    specs = [_spec("a", 10), _spec("b", 30), _spec("c", 5), _spec("d", 100), _spec("e", 5)]
    plan = plan_buckets(specs, bucket_bytes=150)
    assert [bucket.members for bucket in plan] == [(4,), (3,), (2, 1), (0,)]
    assert [bucket.num_elements for bucket in plan] == [5, 100, 35, 10]
    assert [bucket.num_buckets for bucket in plan] == [0, 0, 0, 4]


def test_plan_never_mixes_dtypes_and_ends_with_the_first_parameter() -> None:
    specs = [_spec("a", 4), _spec("b", 4, "bfloat16"), _spec("c", 4), _spec("d", 4, "bfloat16")]
    plan = plan_buckets(specs, bucket_bytes=1000)
    assert [(bucket.dtype, bucket.members) for bucket in plan] == [("bfloat16", (3, 1)), ("float32", (2, 0))]
