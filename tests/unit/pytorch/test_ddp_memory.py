"""The residuals of DDP's hook: kept without a copy, and what a hook does with a state that was kept for it."""

import logging

import pytest
import torch

from totalreduce.pytorch.ddp_bucket import Regrouped
from totalreduce.pytorch.ddp_hook import SparseHookState
from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.error_feedback import ErrorFeedback, MomentumCorrection
from totalreduce.sparse.topka import TopkA
from totalreduce.tensors.streams import SideStreams

A, B, C = (torch.nn.Parameter(torch.zeros(2, size)) for size in (2, 3, 4))


def add(memory: Memory, number: float, *, momentum: float = 0.5) -> None:
    """Do to one parameter what a pass does."""
    correction = MomentumCorrection(memory.residuals, momentum)
    flat = torch.full((4,), number)
    correction.correct(A, flat, 1.0)
    memory.spare(A).copy_(flat).add_(memory.residuals.of(A))
    memory.renew(A, correction.pending.pop(A))


def values(memory: Memory) -> list[float]:
    return [float(memory.residuals.of(A)[0]), float(memory.residuals.velocities[A][0])]


def test_passes_whose_steps_are_left_out_leave_no_trace() -> None:
    memory, plain = Memory(), Memory()
    addresses = set()
    for step in range(1, 6):
        for _ in range(step % 3):  # none, one and two
            add(memory, 100.0)
            memory.take_back(A)
        for each in (memory, plain):
            add(each, float(step))
        assert values(memory) == values(plain)
        memory.accept(A)
        plain.accept(A)
        assert not memory.undecided
        addresses |= {memory.residuals.kept[A].data_ptr(), memory.residuals.velocities[A].data_ptr()}
    add(memory, 100.0)
    memory.take_back(A)
    assert values(memory) == values(plain)
    assert len(addresses) == 4, "there are two tensors of each kind"
    memory.take_back(A)
    assert values(memory) == values(plain), "there is nothing to take back any more"


def test_a_first_pass_whose_step_is_left_out() -> None:
    memory = Memory()
    add(memory, 1.0)
    memory.take_back(A)
    assert not memory.residuals.of(A).any()
    assert not memory.residuals.velocities


@pytest.mark.parametrize("left_out", [False, True])
def test_a_pass_does_not_write_into_what_is_kept(left_out: bool) -> None:
    memory, plain = Memory(), Memory()
    addresses = set()
    for step in range(1, 5):
        for _ in range(step % 3):
            add(memory, 100.0)
            if left_out:
                memory.take_back(A)
        memory.go_back()
        for _ in range(step % 3):
            add(memory, float(step))
            add(plain, float(step))
        memory.keep()
        assert values(memory) == values(plain)
        addresses |= {memory.residuals.kept[A].data_ptr(), memory.residuals.velocities[A].data_ptr()}
    add(memory, 100.0)
    memory.go_back()
    assert values(memory) == values(plain)
    assert len(addresses) <= 6, "the memory is used again and again"


def test_before_the_first_keep_there_is_nothing_to_go_back_to() -> None:
    memory = Memory()
    add(memory, 1.0)
    memory.go_back()
    assert not memory.residuals.of(A).any()
    assert not memory.residuals.velocities


def test_gradients_in_other_buckets_go_back_to_their_places() -> None:
    arrived = [(torch.arange(4.0 + 8), (A, C)), (torch.arange(6.0) + 100, (B,))]
    assert not Regrouped.is_possible(arrived, [(B,), (A, C)]), "the same ones"
    assert not Regrouped.is_possible(arrived, [(C, A)])
    assert not Regrouped.is_possible([(arrived[0][0].half(), (A, C)), arrived[1]], [(A, B), (C,)])
    assert Regrouped.is_possible(arrived, [(B, A), (C,)])
    regrouped = Regrouped(arrived, [(B, A), (C,)])
    assert [each.tolist() for each in regrouped.buffers] == [
        [100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0],
    ]
    for buffer in regrouped.buffers:
        buffer.neg_()
    regrouped.write_back(SideStreams())
    assert arrived[0][0].tolist() == [-float(number) for number in range(12)]
    assert arrived[1][0].tolist() == [-100.0 - number for number in range(6)]


def test_a_state_is_not_loaded_over_the_residuals_that_an_attempt_has_kept(caplog) -> None:
    """A program that resumes loads its state where it makes the hook, and so again in each attempt."""

    class Keeper:
        keeps = True

        def keeps_for(self, _hook, _model) -> bool:
            return self.keeps

    caplog.set_level(logging.WARNING, logger="totalreduce")
    state = SparseHookState(TopkA(density=0.5), ErrorFeedback(elements_min=1))
    state._rank_and_size = lambda: (0, 1)
    state._keeper = keeper = Keeper()
    model = torch.nn.Linear(2, 2)
    saved = state.state_dict(model)
    saved["residuals"]["weight"].fill_(3.0)
    state.load_state_dict(saved, model)
    assert state.residual_norm() == 0
    assert "load_state_dict of ddp_hook does nothing here" in caplog.text
    keeper.keeps = False
    state.load_state_dict(saved, model)
    assert state.residual_norm() == 6.0
