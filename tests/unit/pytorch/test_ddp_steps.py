"""How DDP's hook finds out whether the step with the gradients of its last pass was taken."""

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.optim.optimizer as optimizers

from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.ddp_steps import StepWatch


class Loop:
    """One parameter whose residual counts the passes whose steps were taken."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.memory = Memory()
        self.watch = StepWatch(self.memory)
        self.watch.watch(self.weight)
        self.passes = 0

    def backward(self, *, ends_pass: bool = True) -> None:
        (self.weight * 2).sum().backward()
        if ends_pass:
            self.memory.spare(self.weight).copy_(self.memory.residuals.of(self.weight) + 1)
            self.memory.renew(self.weight, None)

    def count(self) -> float:
        self.watch.decide_left_out()
        return float(self.memory.residuals.of(self.weight)[0])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_a_step_that_the_program_leaves_out(kind: type[torch.optim.Optimizer], to_none: bool) -> None:
    loop = Loop()
    optimizer = kind([loop.weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad(set_to_none=to_none)
        loop.backward()
        return 0.0

    taken = 0.0
    for step in range(6):
        if step in (0, 3, 4):
            closure()
            optimizer.zero_grad(set_to_none=to_none)
            assert loop.count() == taken
            continue
        before = loop.count()
        optimizer.step(closure)
        taken = loop.count()
        assert taken == before + 1 or (kind is torch.optim.LBFGS and taken > before)


def test_a_gradient_that_is_still_there_is_accumulated() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD([loop.weight], lr=0.1)
    for _ in range(3):
        loop.backward()
        loop.backward(ends_pass=False)  # in no_sync()
        loop.backward()
        assert loop.count() == 2
        optimizer.step()
        optimizer.zero_grad()
        assert loop.count() == 2
        loop.memory.residuals.of(loop.weight).zero_()


def test_a_pass_after_one_that_was_left_out_is_decided_before_its_gradient_is_added() -> None:
    """Without the hook on the gradient, the one that was reset could not be told from one that is accumulated."""
    loop = Loop()
    optimizer = torch.optim.SGD([loop.weight], lr=0.1)
    loop.backward()
    optimizer.step()
    for _ in range(3):
        optimizer.zero_grad()
        loop.backward(ends_pass=False)
        assert not loop.memory.undecided
        loop.backward()
    assert loop.count() == 2


class Scaled(torch.optim.SGD):
    """An optimizer that leaves a step out by itself, as torch's fused ones do on a GPU."""

    def step(self, closure=None):
        if not getattr(self, "found_inf", torch.zeros(1)).item():
            super().step(closure)


def test_a_fused_optimizer_that_leaves_a_step_out() -> None:
    loop = Loop()
    optimizer = Scaled([loop.weight], lr=0.1)
    loop.backward()
    optimizer.step()
    optimizer.zero_grad()
    loop.backward()
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    assert loop.count() == 1


def test_a_parameter_whose_gradient_the_program_removes_before_the_step() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD([loop.weight], lr=0.1)
    for removed in (False, True):
        loop.backward()
        if removed:
            loop.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert loop.count() == 1


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_of_torch_amp(fused: bool) -> None:
    loop = Loop()
    optimizer = torch.optim.SGD([loop.weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflows in (False, True, False):
        scaler.scale(torch.ones(()))  # the scaler wants to be used before step()
        loop.backward()
        if overflows:
            assert loop.weight.grad is not None
            loop.weight.grad.fill_(torch.inf)  # a parameter beside those of DDP, for instance
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert loop.count() == 2


def test_updates_without_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")
    loop = Loop()
    for _ in range(2):
        loop.backward()
        with torch.no_grad():
            loop.weight -= 0.1
        loop.weight.grad = None
    assert (loop.count(), caplog.text) == (2, "")
    for _ in range(2):
        loop.backward()
        loop.weight.data -= 0.1
        loop.weight.grad = None
    assert loop.count() == 4
    assert caplog.text.count("takes the step as taken") == 1


def test_a_watch_ends_with_its_object_and_no_copy_has_it() -> None:
    loop = Loop()
    weight = loop.weight
    model = copy.deepcopy(torch.nn.ParameterList([weight]))
    hooks = optimizers._global_optimizer_post_hooks
    number, watch = len(hooks), weakref.ref(loop.watch)
    del loop
    gc.collect()
    assert watch() is None
    assert len(hooks) == number - 1
    assert not weight._backward_hooks
    assert not model[0]._backward_hooks
