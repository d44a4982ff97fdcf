"""The usual loop of DistributedDataParallel with ``DistributedOptimizer``, written as for DDP: the same parameters.

The reference is DDP itself in small: replicas in one process, gradients averaged after each backward pass outside of
``no_sync()``, buffers of the first replica copied to all before a forward pass. ``tests/processes/test_usual_loop.py``
compares with DDP over gloo.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from optimizer_cases import all_equal
from torch.nn.utils import clip_grad_norm_

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.groups.group import Group
from totalreduce.testing import run_ranks

STEPS = 6


class Net(torch.nn.Module):
    """With running statistics, a large buffer that one step changes, and a buffer of whole numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 12, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(12, dtype=torch.float64)
        self.last = torch.nn.Linear(12, 2, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's own generator
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
        self.register_buffer("mask", torch.zeros(70_000))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(inputs) + int(inputs[0, 0] > 0)
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def batch_of(step: int, rank: int, piece: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + piece)
    inputs = torch.randn(8, 6, dtype=torch.float64, generator=generator) * (1 + rank)
    return inputs, inputs[:, :2] * 2


def loss_of(model: torch.nn.Module, step: int, rank: int, piece: int = 0) -> torch.Tensor:
    inputs, targets = batch_of(step, rank, piece)
    return (model(inputs) - targets).square().mean()


class Loop:
    """What a loop needs of a door: a model, an optimizer, and a context in which gradients are not exchanged."""

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer, no_sync: Callable[[], object], rank: int) -> None:
        self.model, self.optimizer, self.no_sync, self.rank = model, optimizer, no_sync, rank


# The loops: each yields where DDP would copy buffers (before a forward pass), or average gradients (after a backward
# pass); through the library, nothing happens there.


def clipping(loop: Loop) -> Iterator[str]:
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        yield "forward"
        loss_of(loop.model, step, loop.rank).backward()
        yield "backward"
        clip_grad_norm_(loop.model.parameters(), 0.05)
        loop.optimizer.step()


def accumulation(loop: Loop) -> Iterator[str]:
    for step in range(STEPS):
        yield "forward"
        with loop.no_sync():
            loss_of(loop.model, step, loop.rank, 0).backward()
        loss_of(loop.model, step, loop.rank, 1).backward()
        yield "backward"
        clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
        loop.model.zero_grad()


def two_passes(loop: Loop) -> Iterator[str]:
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        for piece in range(2):
            yield "forward"
            loss_of(loop.model, step, loop.rank, piece).backward()
            yield "backward"
        loop.optimizer.step()


def scaling(loop: Loop) -> Iterator[str]:
    """In step 2 the gradients of rank 1 overflow, and both ranks leave the step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2, 0.5)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        yield "forward"
        loss = loss_of(loop.model, step, loop.rank)
        scaler.scale(loss * torch.inf if step == 2 and loop.rank == 1 else loss).backward()
        yield "backward"
        scaler.unscale_(loop.optimizer)
        clip_grad_norm_(loop.model.parameters(), 0.2)
        scaler.step(loop.optimizer)
        scaler.update()
        scheduler.step()


def leaving_out(loop: Loop) -> Iterator[str]:
    """Steps with a large norm are left out, as against spikes of the loss."""
    for step in range(STEPS):
        loop.model.zero_grad()
        yield "forward"
        loss_of(loop.model, step, loop.rank).backward()
        yield "backward"
        if float(clip_grad_norm_(loop.model.parameters(), 10.0)) > 3.0:
            continue
        loop.optimizer.step()


def averaged_weights(loop: Loop) -> Iterator[str]:
    """An average of the weights is swapped in for an evaluation, in which batch normalisation uses its statistics."""
    average = [parameter.detach().clone() for parameter in loop.model.parameters()]
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        yield "forward"
        loss_of(loop.model, step, loop.rank).backward()
        yield "backward"
        loop.optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average, loop.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)
        swap(loop.model, average)
        loop.model.eval()
        yield "forward"
        with torch.no_grad():
            error = loss_of(loop.model, 99, 0)
        loop.model.train()
        swap(loop.model, average)
        loop.optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + float(error))


def swap(model: Net, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            kept = parameter.clone()
            parameter.copy_(value)
            value.copy_(kept)


def large_buffer(loop: Loop) -> Iterator[str]:
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        yield "forward"
        if step == 3:
            loop.model.mask += 1 + loop.rank
        loss_of(loop.model, step, loop.rank).backward()
        yield "backward"
        loop.optimizer.step()


def penalty(loop: Loop) -> Iterator[str]:
    """A checkpointed layer (reentrant), a graph that goes backward twice, and gradients that the program reads."""
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        yield "forward"
        inputs, targets = batch_of(step, loop.rank)
        hidden = torch.utils.checkpoint.checkpoint(loop.model.first, inputs.requires_grad_(), use_reentrant=True)
        loss = (loop.model.last(torch.tanh(loop.model.norm(hidden))) - targets).square().mean()
        loss.backward()
        yield "backward"
        for parameter in loop.model.parameters():
            parameter.grad.add_(0.01 * parameter.grad.norm())
        loop.optimizer.step()


LOOPS = {
    each.__name__: each
    for each in (clipping, accumulation, two_passes, scaling, leaving_out, averaged_weights, large_buffer, penalty)
}


def state_of(model: Net) -> torch.Tensor:
    values = [*model.parameters(), *(each for name, each in model.named_buffers())]
    return torch.cat([each.detach().double().flatten() for each in values])


def as_ddp(loop: Callable[[Loop], Iterator[str]], world_size: int) -> list[torch.Tensor]:
    """Replicas in one process, as DDP would keep them."""
    models = [copy.deepcopy(Net()) for _ in range(world_size)]
    loops = [
        Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), contextlib.nullcontext, rank)
        for rank, model in enumerate(models)
    ]
    runs = [loop(each) for each in loops]
    while True:
        words = [next(run, "end") for run in runs]
        if words[0] == "end":
            return [state_of(model) for model in models]
        if words[0] == "forward":
            for model in models[1:]:
                for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                    mine.data.copy_(first)
        else:
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad.copy_(mean)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_as_for_ddp_gives_what_ddp_gives(name: str, world_size: int) -> None:
    def body(group: Group) -> torch.Tensor:
        model = Net(seed=group.rank)  # nobody has called broadcast_parameters
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = tr.DistributedOptimizer(inner, model, group=group, bucket_bytes=300)
        for _ in LOOPS[name](Loop(model, optimizer, optimizer.no_sync, group.rank)):
            pass
        # DDP copies the buffers before the next forward pass, and the library with the gradients of the step.
        return state_of(model)

    results, expected = run_ranks(world_size, body), as_ddp(LOOPS[name], world_size)
    assert all_equal(results)
    torch.testing.assert_close(results[0], expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("overlap", ["step", "iterations"])
def test_gradients_that_are_still_this_ranks_own_are_not_changed_without_a_word(overlap: str) -> None:
    def body(group: Group) -> None:
        model = Net()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, overlap=overlap
        )
        for _ in range(3):
            loss_of(model, 0, 0).backward()
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(
        RuntimeWarning, match=r"'first.weight' was changed .*call optimizer.synchronize\(\) first"
    ) as seen:
        run_ranks(1, body)
    assert len([each for each in seen if each.category is RuntimeWarning]) == 1, "once is enough"


def test_gradients_accumulated_in_no_sync_alone_are_not_clipped_without_a_word() -> None:
    def body(group: Group) -> None:
        model = Net()
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        with optimizer.no_sync():
            loss_of(model, 0, 0).backward()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    with pytest.warns(RuntimeWarning, match=r"was changed between backward\(\) and step\(\)"):
        run_ranks(1, body)


def test_clipping_what_a_sparse_method_has_selected_is_not_done_without_a_word() -> None:
    def body(group: Group) -> None:
        model = torch.nn.Linear(200, 200)
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=tr.TopkA(density=0.1)
        )
        for _ in range(2):
            model(torch.ones(2, 200)).square().sum().backward()
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(RuntimeWarning, match=r"'weight' was changed .*ErrorFeedback\(clip_norm=\.\.\.\)") as seen:
        run_ranks(1, body)
    assert len(seen) == 1


def test_ranks_that_go_backward_more_often_than_others_are_told_so() -> None:
    """Their rounds would be mixed: the second one of this step with the first one of the others' next step."""

    def body(group: Group) -> str:
        model = Net()
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        with pytest.raises(ConfigurationError, match="more often than others") as caught:  # noqa: PT012
            for step in range(2):
                optimizer.zero_grad()
                for piece in range(2 if group.rank == 1 else 1):
                    loss_of(model, step, group.rank, piece).backward()
                optimizer.step()
        return str(caught.value)

    assert len(set(run_ranks(3, body))) == 1


@pytest.mark.parametrize("initial", ["broadcast", "check", None])
def test_what_ranks_begin_with(initial: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="totalreduce")

    def body(group: Group) -> tuple[torch.Tensor, float, float] | str:
        model = Net(seed=group.rank)
        inner = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + group.rank))
        if group.rank == 0:  # rank 0 has read a checkpoint
            loss_of(model, 0, 0).backward()
            inner.step()
            inner.zero_grad()
        try:
            tr.DistributedOptimizer(inner, model, group=group, initial=initial)
        except PlanMismatchError as error:
            return str(error)
        steps = inner.state[model.last.weight]["step"].item() if inner.state else 0.0
        return state_of(model), inner.param_groups[0]["lr"], steps

    results = run_ranks(3, body)
    if initial == "check":
        assert all("'model.initial'" in each and "first.weight: rank 0 has" in each for each in results)
        assert len(set(results)) == 1
    elif initial == "broadcast":
        assert all_equal([values for values, _, _ in results])
        assert [rest for _, *rest in results] == [[0.1, 1.0]] * 3
        said = [record.message for record in caplog.records if "different values" in record.message]
        assert len(said) == 2, "the model and the optimizer"
    else:
        assert not torch.equal(results[0][0], results[1][0])
        assert [rest for _, *rest in results] == [[0.1, 1.0], [0.2, 0.0], [pytest.approx(0.3), 0.0]]


def test_ranks_that_begin_alike_send_no_values() -> None:
    def body(group: Group) -> int:
        model = torch.nn.Linear(300, 300)
        torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        before = group.statistics().bytes_sent
        tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        return group.statistics().bytes_sent - before

    assert max(run_ranks(2, body)) < 20_000


@pytest.mark.parametrize("buffers", ["broadcast", "average", None])
@pytest.mark.parametrize("overlap", ["backward", "step", "iterations"])
def test_buffers(buffers: str | None, overlap: str) -> None:
    def body(group: Group) -> tuple[list[float], list[int], list[float]]:
        model = Net()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model, group=group, buffers=buffers, overlap=overlap
        )
        for step in range(2):
            optimizer.zero_grad()
            outputs = model(torch.full((4, 6), 1.0 + group.rank, dtype=torch.float64))
            model.mask += group.rank + 1 if step else 0
            outputs.sum().backward()
            optimizer.step()
        optimizer.flush()
        return model.norm.running_mean.tolist(), model.seen.tolist(), model.mask[:1].tolist()

    results = run_ranks(3, body)
    means, counts, masks = zip(*results, strict=True)
    with torch.no_grad():
        outputs = [Net().first(torch.full((1, 6), 1.0 + rank, dtype=torch.float64))[0] for rank in range(3)]
    alone = [0.19 * output for output in outputs]  # two steps with a momentum of 0.1
    expected = {
        "broadcast": [alone[0]] * 3,
        "average": [sum(alone) / 3] * 3,
        None: alone,
    }[buffers]
    for mean, value in zip(means, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), value)
    assert list(counts) == [[10] * 3] * 3
    wanted = {"broadcast": [1.0] * 3, "average": [2.0] * 3, None: [1.0, 2.0, 3.0]}[buffers]
    assert [mask[0] for mask in masks] == wanted


def test_a_buffer_that_changes_its_shape_stays_each_ranks_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")

    def body(group: Group) -> tuple[list[float], list[float]]:
        model = Net()
        model.register_buffer("cache", torch.zeros(2), persistent=False)
        model.register_buffer("fixed", torch.zeros(2))
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        for step in range(3):
            optimizer.zero_grad()
            model.cache = torch.full((2 + step * group.rank,), 1.0 + group.rank)
            model.fixed.fill_(1.0 + group.rank)
            loss_of(model, step, group.rank).backward()
            optimizer.step()
        return model.cache.tolist(), model.fixed.tolist()

    assert run_ranks(2, body) == [([1.0] * 2, [1.0] * 2), ([2.0] * 4, [1.0] * 2)]
    said = [record.message for record in caplog.records if "the buffer cache has another shape" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("wrapper", ["ddp", "ddp in a module"])
def test_a_model_in_ddp_is_refused_with_what_to_write(wrapper: str) -> None:
    class Fake(torch.nn.parallel.DistributedDataParallel):
        """DDP without a process group, of which this process has none."""

        def __init__(self, module: torch.nn.Module) -> None:
            torch.nn.Module.__init__(self)
            self.module = module

    def body(group: Group) -> None:
        model: torch.nn.Module = Fake(Net())
        if wrapper != "ddp":
            model = torch.nn.Sequential(model)
        with pytest.raises(ConfigurationError, match=r"pass the module in it \(model.module\)"):
            tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)

    run_ranks(1, body)


def test_a_method_that_compresses_nothing_says_so_once_with_the_numbers() -> None:
    def body(group: Group) -> None:
        model = Net().float()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, sync=tr.OkTopk(density=0.01)
        )
        optimizer.replan()

    words = r"all 6 parameters are below the limit of 16384 elements .*'first.weight', has 72 elements.*elements_min"
    with pytest.warns(RuntimeWarning, match=words) as seen:
        run_ranks(1, body)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_a_backward_pass_whose_end_torch_does_not_tell_is_not_taken_for_one_that_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with compiled autograd, which drops what was to run at the end of the pass."""
    monkeypatch.setattr("totalreduce.pytorch.optimizer.when_backward_ends", lambda callback: None)

    def body(group: Group) -> None:
        model = Net()
        optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
        for synchronizes in (True, False, False):
            optimizer.zero_grad()
            loss_of(model, 0, 0).backward()
            if synchronizes:
                optimizer.synchronize()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match=r"this rank's own until step\(\).*call optimizer.synchronize\(\)") as seen:
        run_ranks(1, body)
    assert len(seen) == 1
