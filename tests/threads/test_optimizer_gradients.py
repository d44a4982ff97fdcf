"""Which gradients the optimizer sees: branches, unused parameters, accumulation, changes after backward."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    Branches,
    Net,
    Submissions,
    all_equal,
    batches,
    flat,
    flat_grad,
    loss_of,
    shard,
    wrap,
)

from totalreduce.foundation.errors import MissingTensorError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch import reducer
from totalreduce.testing import run_ranks

LAZY_MODES = ["step", "iterations"]  # backward() returns before the gradients are those of all ranks
MODES = ["backward", *LAZY_MODES]


def reference_branches(kind: str, choices: list[list[str]]) -> torch.Tensor:
    """One process: the mean of the ranks' losses, rank ``r`` taking branch ``choices[step][r]``."""
    model = Branches()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for batch, branches in zip(batches(len(choices)), choices, strict=True):
        optimizer.zero_grad()
        parts = zip(batch[0].chunk(len(branches)), batch[1].chunk(len(branches)), branches, strict=True)
        losses = [torch.nn.functional.mse_loss(model(x, branch), y) for x, y, branch in parts if branch]
        (torch.stack(losses).sum() / len(branches)).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_each_rank_takes_its_own_branches(kind: str, overlap: str) -> None:
    # The last but one step is the case that no count of hooks can solve: rank 1 has no backward at all.
    choices = [
        ["left", "right", "left"],
        ["left", "left", "left"],
        ["right", "left", "left"],
        ["right", "right", "right"],
        ["left", "", "right"],
        ["right", "left", "right"],
    ]

    def body(group: Group) -> tuple[torch.Tensor, bool, list[str]]:
        model = Branches()
        optimizer = wrap(model, group, OPTIMIZERS[kind], overlap=overlap)
        for batch, branches in zip(batches(len(choices)), choices, strict=True):
            optimizer.zero_grad()
            branch = branches[group.rank]
            if branch:
                inputs, targets = shard(batch, group)
                torch.nn.functional.mse_loss(model(inputs, branch), targets).backward()
            optimizer.step()
        optimizer.flush()
        untouched = bool((model.never.weight == 1).all()) and model.never.weight.grad is None
        return flat(model), untouched, sorted(str(len(s)) for s in optimizer.state.values())

    results = run_ranks(3, body)
    assert (results[0][0] - reference_branches(kind, choices)).abs().max() <= 1e-12
    assert all_equal([result[0] for result in results])
    assert all(untouched for _, untouched, _ in results), "nobody used it: no weight decay, no gradient"


def test_a_branch_used_elsewhere_only_gets_the_reduced_gradient() -> None:
    def body(group: Group) -> tuple[bool, torch.Tensor]:
        model = Branches()
        optimizer = wrap(model, group, overlap="step")
        model(batches(1)[0][0], "left" if group.rank == 0 else "right").sum().backward()
        local = model.left.weight.grad
        optimizer.synchronize()
        return local is None, model.left.weight.grad.clone()

    (missing_0, gradient_0), (missing_1, gradient_1) = run_ranks(2, body)
    assert (missing_0, missing_1) == (False, True)
    assert torch.equal(gradient_0, gradient_1)
    assert gradient_0.abs().max() > 0


@pytest.mark.parametrize("overlap", LAZY_MODES)
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
def test_missing_as_an_error_names_tensor_ranks_and_step_on_every_rank(overlap: str, op: ReduceOp) -> None:
    def body(group: Group) -> tuple[MissingTensorError, bool]:
        model = Branches()
        optimizer = wrap(model, group, on_missing="error", overlap=overlap, op=op)
        before = flat(model)
        model(batches(1)[0][0], "left").sum().backward()
        optimizer.step()  # "never" and "right" are missing on all ranks alike, which is no error
        moved = not torch.equal(flat(model), before)
        optimizer.zero_grad()
        model(batches(1)[0][0], "left" if group.rank == 1 else "right").sum().backward()
        before = flat(model)
        with pytest.raises(MissingTensorError) as caught:
            optimizer.step()
        assert torch.equal(flat(model), before)
        # The optimizer can be used further.
        optimizer.zero_grad()
        model(batches(1)[0][0], "right").sum().backward()
        optimizer.step()
        return caught.value, moved and not torch.equal(flat(model), before)

    for error, moved in run_ranks(3, body):
        assert (error.tensor, error.ranks, error.step) in [
            ("left.weight", (0, 2), 2),
            ("left.bias", (0, 2), 2),
            ("right.weight", (1,), 2),
            ("right.bias", (1,), 2),
        ]
        assert moved


def test_missing_as_an_error_is_the_same_error_everywhere() -> None:
    def body(group: Group) -> str:
        model = Branches()
        optimizer = wrap(model, group, on_missing="error", bucket_bytes=1 << 20, overlap="step")
        model(batches(1)[0][0], "left" if group.rank else "right").sum().backward()
        with pytest.raises(MissingTensorError) as caught:
            optimizer.synchronize()
        return str(caught.value)

    messages = run_ranks(3, body)
    assert len(set(messages)) == 1
    assert "step 1: rank(s) 1, 2 never submitted 'right." in messages[0] or "rank(s) 0 never" in messages[0]


@pytest.mark.parametrize("overlap", MODES)
def test_accumulation_with_no_sync_sends_once(overlap: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, int, int]:
        submissions = Submissions(group)
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["momentum"], overlap=overlap)
        submissions.take()
        for first, second in zip(*[iter(batches(4))] * 2, strict=True):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss_of(model, shard(first, group)).backward()
            assert submissions.take() == []
            loss_of(model, shard(second, group)).backward()
            optimizer.step()
            assert len(submissions.take()) == len(optimizer._dense.buckets)
        optimizer.flush()
        return flat(model), optimizer.resubmissions, len(optimizer._dense.buckets)

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](list(model.parameters()))
    for first, second in zip(*[iter(batches(4))] * 2, strict=True):
        optimizer.zero_grad()
        (loss_of(model, first) + loss_of(model, second)).backward()
        optimizer.step()
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    assert all_equal([result[0] for result in results])
    assert results[0][1] == 0


def test_a_remainder_left_in_no_sync_is_reduced_at_step() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group)
        with optimizer.no_sync():
            loss_of(model, shard(batches(1)[0], group)).backward()
        optimizer.step()
        return flat(model)

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("overlap", MODES)
def test_two_backward_passes_before_step_count_as_their_sum(overlap: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, int]:
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["adamw"], overlap=overlap)
        for first, second in zip(*[iter(batches(6))] * 2, strict=True):
            optimizer.zero_grad()
            loss_of(model, shard(first, group)).backward()
            loss_of(model, shard(second, group)).backward()
            optimizer.step()
        optimizer.flush()
        return flat(model), optimizer.resubmissions

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    for first, second in zip(*[iter(batches(6))] * 2, strict=True):
        optimizer.zero_grad()
        (loss_of(model, first) + loss_of(model, second)).backward()
        optimizer.step()
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    assert all_equal([result[0] for result in results])
    assert (results[0][1] > 0) == (overlap != "backward")  # there each pass is a round of its own


@pytest.mark.parametrize("overlap", LAZY_MODES)
def test_a_second_backward_on_one_rank_only(overlap: str) -> None:
    """The others learn from the last bucket that something must be sent again."""

    def body(group: Group) -> tuple[torch.Tensor, int]:
        model = Net()
        optimizer = wrap(model, group, overlap=overlap)
        first, second = batches(2)
        loss_of(model, shard(first, group)).backward()
        if group.rank == 1:
            model.third(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, shard(second, group)).backward()
        optimizer.step()
        optimizer.flush()
        return flat(model), optimizer.resubmissions

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    first, second = batches(2)
    (loss_of(model, first) + model.third(torch.ones(1, 12, dtype=torch.float64)).sum() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, second).backward()
    optimizer.step()
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    assert all_equal([result[0] for result in results])
    assert results[0][1] == results[1][1] > 0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_one_rank_drops_its_gradients_after_backward(owner: str, set_to_none: bool) -> None:
    """A bad batch on rank 0: its gradients are zeroed although some have left already."""

    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        loss_of(model, shard(batches(1)[0], group)).backward()
        if group.rank == 0:
            (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        optimizer.step()
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    inputs, targets = batches(1)[0]
    (torch.nn.functional.mse_loss(model(inputs[6:]), targets[6:]) / 2).backward()
    optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


def test_all_ranks_drop_a_step_and_go_on() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group)
        bad, good = batches(2)
        loss_of(model, shard(bad, group)).backward()
        optimizer.zero_grad()
        loss_of(model, shard(good, group)).backward()
        optimizer.step()
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    loss_of(model, batches(2)[1]).backward()
    optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12


@pytest.mark.parametrize("overlap", MODES)
def test_clipping_after_synchronize_clips_the_global_norm(overlap: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, float, int]:
        submissions = Submissions(group)
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["momentum"], overlap=overlap)
        for batch in batches(5):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            submissions.take()
            optimizer.step()
            assert submissions.take() == [], "step() does not communicate again"
        return flat(model), float(norm), optimizer.resubmissions

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](list(model.parameters()))
    for batch in batches(5):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    assert abs(results[0][1] - float(norm)) <= 1e-12
    assert results[0][2] == 0


def test_clipping_by_the_groups_sees_reduced_gradients_without_synchronize() -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group)
        loss_of(model, shard(batches(1)[0], group)).backward()
        for param_group in optimizer.param_groups:
            for parameter in param_group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    loss_of(model, batches(1)[0]).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.filterwarnings("ignore:the gradient of")
def test_changing_local_gradients_after_backward_is_not_lost() -> None:
    """Without ``synchronize()``, a change by hand is a change of this rank's contribution."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        model = Net()
        optimizer = wrap(model, group, overlap="step")
        loss_of(model, shard(batches(1)[0], group)).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(group.rank + 1)
        local = flat_grad(model)
        optimizer.synchronize()
        return flat_grad(model), local

    results = run_ranks(2, body)
    expected = (results[0][1] + results[1][1]) / 2
    assert (results[0][0] - expected).abs().max() <= 1e-15
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("owner", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_zeroing_gradients(set_to_none: bool, owner: str, overlap: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, OPTIMIZERS["adamw"], overlap=overlap)
        for batch in batches(6):
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        optimizer.flush()
        assert optimizer.resubmissions == 0
        return flat(model)

    results = run_ranks(2, body)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    for batch in batches(6):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_memory_of_gradients_that_will_not_come_again_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch, set_to_none: bool
) -> None:
    """The C library kept that of the first backward pass, as much as the model, beside the tensors of buckets."""
    calls: list[int] = []
    monkeypatch.setattr(reducer, "give_back_freed_memory", lambda: calls.append(1))

    def body(group: Group) -> list[int]:
        model = Net()
        optimizer, counts = wrap(model, group, OPTIMIZERS["momentum"], bucket_bytes=1 << 20), []
        for batch in batches(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            counts.append(len(calls))
        return counts

    assert run_ranks(1, body) == [[1, 1, 1, 1]]


@pytest.mark.parametrize("overlap", MODES)
def test_gradients_that_are_never_zeroed_accumulate_as_in_one_process(overlap: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net()
        optimizer = wrap(model, group, overlap=overlap)
        for batch in batches(5):
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
        optimizer.flush()
        return flat(model)

    results = run_ranks(3, body)
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    for batch in batches(5):
        loss_of(model, batch).backward()
        optimizer.step()
    assert (results[0] - flat(model)).abs().max() <= 1e-12
    assert all_equal(results)


def test_reading_learning_rates_between_steps_does_not_communicate() -> None:
    def body(group: Group) -> int:
        model = Net()
        optimizer = wrap(model, group, overlap="iterations")
        for batch in batches(2):
            optimizer.zero_grad()
            loss_of(model, shard(batch, group)).backward()
            optimizer.step()
            if group.rank == 0:  # one rank alone, as loggers do: nothing collective may hang on it
                assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.flush()
        return optimizer._dense.round

    assert run_ranks(2, body) == [2, 2]


def test_bfloat16_float16_and_float32_side_by_side() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(
                torch.nn.Parameter(torch.ones(5, dtype=dtype))
                for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.bfloat16)
            )
            self.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, scale: float) -> torch.Tensor:
            return torch.stack([(weight * scale).sum().double() for weight in self.weights]).sum()

    def body(group: Group) -> tuple[list[float], bool]:
        model = Mixed()
        optimizer = wrap(model, group, bucket_bytes=1 << 20)
        model(float(group.rank + 1)).backward()
        optimizer.synchronize()
        assert len(optimizer._dense.buckets) == 4
        return [float(weight.grad.double().mean()) for weight in model.weights], model.unused.grad is None

    for gradients, unused in run_ranks(4, body):
        assert gradients == [2.5] * 5
        assert unused


def test_a_parameter_keeps_its_memory_layout() -> None:
    def body(group: Group) -> tuple[bool, float]:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = wrap(model, group)
        with torch.no_grad():
            model.weight.copy_(torch.arange(model.weight.numel()).view(model.weight.shape))
        (model.weight * model.weight.detach() * (group.rank + 1)).sum().backward()
        optimizer.synchronize()
        same_layout = model.weight.grad.stride() == model.weight.stride()
        return same_layout, float((model.weight.grad - 1.5 * model.weight.detach()).abs().max())

    assert run_ranks(2, body) == [(True, 0.0), (True, 0.0)]


def test_shared_parameters_count_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(7, 6, dtype=torch.float64)
            self.out = torch.nn.Linear(6, 7, bias=False, dtype=torch.float64)
            self.out.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embedding(tokens))

    weights = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens = torch.arange(8) % 7

    def fresh() -> Tied:
        model = Tied()
        with torch.no_grad():
            model.embedding.weight.copy_(weights)
        return model

    def body(group: Group) -> tuple[torch.Tensor, tuple[str, ...], tuple[str, ...]]:
        model = fresh()
        optimizer = wrap(model, group, OPTIMIZERS["adamw"], overlap="iterations")
        for _ in range(4):
            optimizer.zero_grad()
            part = tokens.chunk(2)[group.rank]
            torch.nn.functional.cross_entropy(model(part), part).backward()
            optimizer.step()
        optimizer.flush()
        (spec,) = optimizer._plan.specs
        return flat(model), (spec.name,), spec.aliases

    results = run_ranks(2, body)
    model = fresh()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    assert (results[0][0] - flat(model)).abs().max() <= 1e-12
    assert results[0][1:] == (("embedding.weight",), ("out.weight",))


def test_activation_checkpointing_in_both_flavours() -> None:
    class Checkpointed(Net):
        use_reentrant = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs))
            hidden = torch.utils.checkpoint.checkpoint(
                lambda x: torch.tanh(self.third(torch.tanh(self.second(x)))),
                hidden,
                use_reentrant=self.use_reentrant,
            )
            return self.head(hidden)

    def body(group: Group) -> list[torch.Tensor]:
        results = []
        for use_reentrant in (False, True):
            for overlap in MODES:
                model = Checkpointed()
                model.use_reentrant = use_reentrant
                optimizer = wrap(model, group, overlap=overlap, name=f"model.{use_reentrant}.{overlap}")
                for batch in batches(4):
                    optimizer.zero_grad()
                    loss_of(model, shard(batch, group)).backward()
                    optimizer.step()
                optimizer.close()
                results.append(flat(model))
        return results

    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    for batch in batches(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    for rank_results in run_ranks(2, body):
        for result in rank_results:
            assert (result - flat(model)).abs().max() <= 1e-12
