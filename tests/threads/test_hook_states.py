"""What hooks of DDP keep back through attempts, with ranks as threads and hooks that only have residuals."""

import logging
from dataclasses import dataclass

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.pytorch.ddp_bucket import Memory
from totalreduce.pytorch.ddp_hook import HookRecord
from totalreduce.recovery import hook_states
from totalreduce.recovery.hook_states import HookStates
from totalreduce.recovery.membership import Decision, Member
from totalreduce.recovery.state import State
from totalreduce.testing import run_ranks


class Hook:
    """A hook of a DDP over some layers, one bucket each. A pass adds a number to their residuals."""

    def __init__(self, keeper: HookStates, layers, world_size: int) -> None:
        self.memory, self.steps, self.world_size, self.resumed = Memory(), 0, world_size, None
        self._keeper, self._buckets = keeper, [tuple(layer.parameters()) for layer in layers]

    def record(self) -> HookRecord:
        sessions = {key: {"number": self.steps} for key in self._buckets}
        return HookRecord("a method", self.steps, 0, self._buckets, sessions)

    def resume(self, record: HookRecord) -> None:
        self.steps, self.resumed = record.steps, record

    def backward(self, gradient: float) -> None:
        for key in self._buckets:
            if self.steps == 0 or self.resumed is None or key[0] not in self.memory:
                self._keeper.meet(self, key)
            for parameter in key:
                self.memory.spare(parameter).copy_(self.memory.residuals.of(parameter) + gradient)
                self.memory.renew(parameter, None)
        self.steps += 1
        self._keeper.note_pass()

    def end_step(self) -> None:
        """Every step is taken."""

    def kept(self) -> list[float]:
        return [float(self.memory.residuals.of(key[0])[0]) for key in self._buckets]


class Process:
    """A process of a job of ``tr.attempts``, which has a hook for each of two layers in an attempt."""

    def __init__(self, num_copies: int = 1) -> None:
        self.model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.state = State(model=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.hooks: list[Hook] = []
        self.keeper = HookStates(self.state, num_copies)
        self.has_state = False

    def enter(self, group, decision: Decision, version: int) -> None:
        """Begin an attempt; this rank has the parameters of a version."""
        self.group = group
        self.state.version = version
        self.keeper.enter(group, decision, version, has_state=self.has_state)
        self.has_state = True
        self.hooks = [Hook(self.keeper, [layer], group.world_size) for layer in self.model]

    def backward(self, gradient: float) -> None:
        for factor, hook in enumerate(self.hooks):
            hook.backward(gradient * (1 + 10 * factor))

    def commit(self) -> None:
        self.keeper.end_step()
        self.state.count(None)
        self.keeper.commit(self.state.version)

    def step(self, gradient: float) -> None:
        self.backward(gradient)
        self.state.optimizer.step()
        self.commit()

    def kept(self) -> list[float]:
        return [each for hook in self.hooks for each in hook.kept()]


def members(*incarnations: int | None, epoch: int = 1) -> Decision:
    """A decision: by seat the incarnation, and ``None`` for a seat without a process."""
    found = [(seat, each) for seat, each in enumerate(incarnations) if each is not None]
    return Decision(epoch, tuple(Member(seat, each, False) for seat, each in found), 0)


def train(world_size: int, num_steps: int, num_copies: int = 1) -> list[Process]:
    """Return processes whose ranks r have accumulated (1 + r) in each step, and ten times more in the second layer."""

    def body(group):
        process = Process(num_copies)
        process.enter(group, members(*[0] * world_size), 0)
        for _ in range(num_steps):
            process.step(1.0 + group.rank)
        group.barrier()
        return process

    return run_ranks(world_size, body)


def go_on(processes: list[Process], decision: Decision, version: int, then=lambda process: None) -> list[list[float]]:
    """Enter the next attempt, take a step of nothing, and return what ranks keep back. ``then`` is called before."""

    def body(group):
        process = processes[group.rank]
        process.enter(group, decision, version)
        then(process)
        process.step(0.0)
        group.barrier()
        return process.kept()

    return run_ranks(len(processes), body)


def test_a_new_rank_goes_on_with_the_copy_and_the_others_with_their_own() -> None:
    first, _, third = train(3, 4)
    new = Process()
    assert go_on([first, new, third], members(0, 1, 0, epoch=2), 4) == [[4.0, 44.0], [8.0, 88.0], [12.0, 132.0]]
    assert [hook.steps for hook in new.hooks] == [5, 5]
    assert all(hook.resumed.sessions for process in (first, new, third) for hook in process.hooks)
    # The next loss is of a rank whose copy was made when the attempt began, or in its step.
    other = Process()
    assert go_on([other, new, third], members(1, 1, 0, epoch=3), 5)[0] == [4.0, 44.0]


def test_without_the_lost_rank_nothing_of_the_residuals_is_lost() -> None:
    """The next rank has them now. The sessions begin anew on all ranks, after the same number of steps."""
    first, _, third = train(3, 4)
    assert go_on([first, third], members(0, None, 0, epoch=2), 4) == [[4.0, 44.0], [8.0 + 12.0, 88.0 + 132.0]]
    assert not any(hook.resumed.sessions for process in (first, third) for hook in process.hooks)
    joins = Process()
    assert go_on([first, joins, third], members(0, 1, 0, epoch=3), 5)[1] == [0.0, 0.0]
    assert {hook.steps for process in (first, joins, third) for hook in process.hooks} == {6}


def test_residuals_that_are_lost_with_their_copy_are_said_to_be(caplog) -> None:
    first, *_ = train(3, 4)
    assert go_on([first], members(0, None, None, epoch=2), 4) == [[4.0 + 12.0, 44.0 + 132.0]]
    assert "nobody has the residuals of 1 ranks that are lost" in caplog.text


@pytest.mark.parametrize("has_voted", [False, True])
def test_a_step_that_is_repeated_begins_with_the_residuals_of_the_last_commit(has_voted: bool) -> None:
    """No rank has taken it: ranks are lost in the pass, or all that knew the result of the vote."""
    processes = train(2, 3)

    def lose() -> int:
        raise PeerLost(1, "gone")

    def body(group):
        process = processes[group.rank]
        process.enter(group, members(0, 0, epoch=2), 3)
        process.backward(100.0)
        if has_voted:
            process.keeper._vote.end = lose
            with pytest.raises(PeerLost):
                process.state.optimizer.step()
        group.barrier()

    run_ranks(2, body)
    assert go_on(processes, members(0, 0, epoch=3), 3) == [[3.0, 33.0], [6.0, 66.0]]
    assert {hook.steps for process in processes for hook in process.hooks} == {4}


@pytest.mark.parametrize("num_provisional", [0, 2])
def test_a_rank_that_is_behind_and_the_copies_that_it_has_are_of_the_step_that_others_have_taken(
    num_provisional: int,
) -> None:
    """Rank 0 has not learnt the result of the vote, and has the copy of rank 2, which is lost."""
    processes = train(3, 2)

    def body(group):
        process = processes[group.rank]
        process.enter(group, members(0, 0, 0, epoch=2), 2)
        for _ in range(num_provisional):
            process.backward(0.0)
            process.state.count(None)
        process.backward(1.0 + group.rank)
        process.keeper.settle()
        if group.rank:
            process.commit()
        group.barrier()

    run_ranks(3, body)
    first, second, _ = processes
    new = Process()
    kept = go_on([first, second, new], members(0, 0, 1, epoch=3), 3 + num_provisional)
    assert kept == [[3.0, 33.0], [6.0, 66.0], [9.0, 99.0]]
    assert {hook.steps for process in (first, second, new) for hook in process.hooks} == {4 + num_provisional}


def test_a_rank_whose_last_step_does_not_count_goes_on_with_its_copy_of_the_step_before() -> None:
    """It has averages in, and so gives its parameters to nobody. No other rank has taken the step."""
    processes = train(2, 3)

    def body(group):
        process = processes[group.rank]
        process.enter(group, members(0, 0, epoch=2), 3)
        process.backward(100.0)
        process.keeper.settle()
        if group.rank:
            process.commit()
        group.barrier()

    run_ranks(2, body)
    assert go_on(processes, members(0, 0, epoch=3), 3) == [[3.0, 33.0], [6.0, 66.0]]
    assert {hook.steps for process in processes for hook in process.hooks} == {4}
    assert all(hook.resumed.sessions for process in processes for hook in process.hooks)


def test_copies_count_after_steps_without_a_pass() -> None:
    processes = train(2, 3)

    def body(group):
        process = processes[group.rank]
        process.enter(group, members(0, 0, epoch=2), 3)
        process.commit()
        process.commit()
        group.barrier()

    run_ranks(2, body)
    assert go_on([processes[0], Process()], members(0, 1, epoch=3), 5) == [[3.0, 33.0], [6.0, 66.0]]


def test_a_hook_of_a_new_ddp_in_the_same_attempt_goes_on() -> None:
    [process] = train(1, 3)
    old = process.hooks
    process.hooks = [Hook(process.keeper, list(process.model), 1)]  # one DDP over both layers
    process.step(1.0)
    assert process.kept() == [4.0, 34.0]
    assert process.keeper._hooks == process.hooks, "the old ones are given up"
    assert not any(hook.memory.parameters() for hook in old)


def test_without_copies_a_new_rank_begins_at_zero_and_it_is_said(caplog) -> None:
    first, _ = train(2, 3, num_copies=0)
    assert go_on([first, Process(0)], members(0, 1, epoch=2), 3) == [[3.0, 33.0], [0.0, 0.0]]
    assert "nobody has the residuals of rank 1: they begin at zero" in caplog.text


def test_what_is_on_disk_has_copies_before_the_first_step() -> None:
    saved = [process.keeper.current() for process in train(2, 3)]
    processes = [Process(), Process()]

    def body(group):
        process = processes[group.rank]
        process.enter(group, members(0, 0), 3)
        process.keeper.begin_with(saved[group.rank], 3)
        group.barrier()

    run_ranks(2, body)
    assert go_on([processes[0], Process()], members(0, 1, epoch=2), 3) == [[3.0, 33.0], [6.0, 66.0]]


def test_without_a_hook_there_is_neither_a_vote_nor_anything_to_write() -> None:
    def body(group):
        process = Process()
        process.enter(group, members(0, 0), 0)
        before = group.statistics().bytes_sent
        process.state.optimizer.step()
        process.commit()
        return group.statistics().bytes_sent - before, process.keeper.current()

    assert run_ranks(2, body) == [(0, None)] * 2


@dataclass
class Case:
    keeper: HookStates
    layer: torch.nn.Module
    world_size: int
    words: str


def case(kind: str) -> Case:
    process = Process()
    if kind == "sharded":
        return Case(HookStates(None, 0), process.model[0], 2, "for DDP there is tr.attempts(state)")
    if kind == "some ranks":
        return Case(process.keeper, process.model[0], 1, "leave process_group= out")
    return Case(process.keeper, torch.nn.Linear(2, 2), 2, "tr.State(model=torch.nn.ModuleDict({...}), ...)")


@pytest.mark.parametrize("kind", ["sharded", "some ranks", "another model"])
def test_where_residuals_would_be_lost_a_warning_says_so_once(kind: str, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")

    def body(group):
        made = case(kind)
        made.keeper.enter(group, members(0, 0), 0, has_state=False)
        hook = Hook(made.keeper, [made.layer], made.world_size)
        for _ in range(2):
            hook.backward(1.0)
        made.keeper.settle()
        return made.words

    [words, _] = run_ranks(2, body)
    assert len(caplog.messages) == 2  # one on each rank
    assert all("the residuals of tr.ddp_hook are lost when an attempt ends" in each for each in caplog.messages)
    assert all(words in each for each in caplog.messages)


def test_residuals_that_are_too_large_for_a_copy_are_an_error_that_names_the_argument(monkeypatch) -> None:
    def refuse(_value):
        raise ConfigurationError("it takes 9 bytes; the limit is 8")

    monkeypatch.setattr(hook_states, "pack", refuse)
    with pytest.raises(ConfigurationError, match=r"takes 9 bytes.*tr.attempts\(state, replicas=0\)"):
        train(2, 1)
