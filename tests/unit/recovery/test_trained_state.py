"""Which parameters are trained, as a part of a state: undone with a block, adopted by a process that joins, on disk."""

import copy
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import totalreduce.horovod as hvd
from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError, RendezvousError
from totalreduce.recovery import sharing
from totalreduce.recovery.epochs import Epochs
from totalreduce.recovery.membership import Decision, Member
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State


class Process:
    """A model of three layers. The optimizer has the last two, of which the first one is frozen."""

    def __init__(self, kind=torch.optim.AdamW, width: int = 4, layers: slice = slice(1, 3)) -> None:
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(3)])
        self.model[:2].requires_grad_(False)
        self.optimizer = kind(self.model[layers].parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = State(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def step(self) -> None:
        self.model(torch.ones(2, self.model[0].in_features)).square().sum().backward()
        self.optimizer.step()
        self.state.drop_gradients()

    def change(self) -> None:
        """Train the first layer in a new group, and the second one, and not the last one."""
        self.model.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.25})
        self.model[2].requires_grad_(False)

    def trains(self):
        """What is trained, by shapes and names: groups with their rates, and what requires gradients."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        groups = [([names[each] for each in group["params"]], group["lr"]) for group in self.optimizer.param_groups]
        return groups, [name for name, each in self.model.named_parameters() if each.requires_grad]


BEFORE = [(["1.weight", "2.weight"], 0.1)], ["2.weight"]
AFTER = [(["1.weight", "2.weight"], 0.1), (["0.weight"], 0.25)], ["0.weight", "1.weight"]


def test_a_change_within_a_block_is_undone_and_can_be_made_again() -> None:
    process = Process()
    process.step()
    groups, state = process.optimizer.param_groups, process.state
    (first,) = groups
    state.keep()
    for _ in range(2):
        process.change()
        process.optimizer.state[process.model[0].weight]["step"] = torch.ones(())
        first["lr"] = 7.0
        state.restore()
        assert process.trains() == BEFORE
        assert process.optimizer.param_groups is groups, "schedulers and wrappers refer to the list"
        assert process.optimizer.param_groups[0] is first
        assert [id(parameter) for parameter in process.optimizer.state] == [id(process.model[2].weight)]
    process.change()
    state.keep()
    process.optimizer.param_groups.pop()
    process.model.requires_grad_(True)
    state.restore()
    assert process.trains() == AFTER


def test_a_process_that_joins_trains_what_the_others_train() -> None:
    """Its scheduler was made before it had the second group, as that of the others was."""
    old, new = Process(), Process()
    old.step()
    old.change()
    old.step()
    old.scheduler.step()
    assert new.state.adopt(old.state.outline()) is True
    assert new.trains()[0][0] == BEFORE[0][0], "groups that exist get their settings with the state"
    assert new.trains()[0][1] == old.trains()[0][1], "new ones have theirs at once"
    assert new.trains()[1] == AFTER[1]
    assert new.state.adopt(old.state.outline()) is False
    for process in (new, Process()):
        process.state.load_shared(copy.deepcopy(old.state.shared()))
        assert process.trains() == old.trains()
        assert process.state.digests() == old.state.digests()
        assert process.scheduler.state_dict() == old.scheduler.state_dict()
        old_again = copy.deepcopy(old)
        for each in (old_again, process):
            each.step()
            each.scheduler.step()
        assert process.state.digests() == old_again.state.digests()
        assert process.trains() == old_again.trains()
        old_again.model[0].requires_grad_(False)
        assert process.state.digests() != old_again.state.digests()


def test_groups_that_the_others_do_not_have_are_removed_with_their_state() -> None:
    old, new = Process(), Process()
    new.change()
    new.step()
    new.step()
    new.state.adopt(old.state.outline())
    assert new.trains() == BEFORE
    assert {id(parameter) for parameter in new.optimizer.state} == {id(new.model[1].weight)}


@pytest.mark.parametrize(
    ("new", "theirs", "mine"),
    [
        (Process(width=5), "parameter 0.weight: torch.float32[4, 4]", "parameter 0.weight: torch.float32[5, 5]"),
        (Process(torch.optim.SGD), "optimizer: AdamW", "optimizer: SGD"),
    ],
)
def test_another_program_cannot_adopt_it_and_nothing_changes(new: Process, theirs: str, mine: str) -> None:
    old = Process()
    old.change()
    before = new.trains()
    for call in (new.state.adopt, new.state.load_shared):
        with pytest.raises(ConfigurationError) as caught:
            call(old.state.shared())
        assert f"the state of the job has {theirs!r}, and this process's has {mine!r}" in str(caught.value)
        assert new.trains() == before


def test_a_parameter_that_is_not_in_the_model_is_refused_when_its_group_was_added() -> None:
    process = Process()
    process.state.keep()
    process.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \[7\] in group 1 that is not in the model"):
        process.state.keep()


def test_a_job_goes_on_from_the_disk_with_what_it_has_trained(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="totalreduce")
    old, snapshots = Process(), Snapshots(tmp_path, every=1)
    old.change()
    old.step()
    snapshots.write(1, 0, 1, old.state.shared(), None)
    snapshots.wait()
    for layers in (slice(1, 3), slice(2, 3), slice(0, 3)):
        new = Process(layers=layers)
        sharing.begin_from_disk(new.state, snapshots)
        assert new.state.digests() == old.state.digests()
        assert new.trains() == old.trains()
        assert "the job goes on with those of the snapshot" in caplog.text
        caplog.clear()
    sharing.begin_from_disk(new.state, snapshots)
    assert not caplog.text


def test_snapshots_without_it_need_the_same_groups() -> None:
    """The library has not always written what is trained, and has written the sizes of the groups in the layout."""
    old, new = Process(), Process()
    shared = old.state.shared()
    del shared["trained"]
    shared["layout"] = old.state._layout(shows_groups=True)
    new.state.load_shared(shared)
    assert new.state.digests() == old.state.digests()
    other = Process(layers=slice(2, 3))
    with pytest.raises(ConfigurationError, match=r"AdamW with groups of \[2\] parameters'.*of \[1\] parameters'"):
        other.state.load_shared(shared)


# ------------------------------------------------------------------------------------------------- plans that differ


def enter(error: Exception, *, has_state: bool, joins: bool, deadline_s: float = 100.0) -> tuple[list[str], bool]:
    """Enter an epoch of two ranks, the first time with an error; return why groups were left, and whether one is."""
    decision = Decision(2, (Member(0, 0, has_state), Member(1, 1, not joins)), 5)
    assembly = SimpleNamespace(seat=0, incarnation=0, policy=SimpleNamespace(deadline_s=deadline_s))
    errors, left = [error], []

    def level(*_: object) -> None:
        if errors:
            raise errors.pop()

    assembly.meet = lambda **_: decision
    epochs = Epochs(assembly, None, level, leave=left.append)
    epochs._form_group = lambda _: SimpleNamespace(rank=1)
    return left, epochs.enter()


def test_a_plan_that_differs_is_that_of_the_process_that_joins() -> None:
    """The ranks that have the state go on without it. It ends with the error, and so does a job that has only begun."""
    error = PlanMismatchError("model.plan", ("rank 1 has a parameter 'x'",))
    left, is_formed = enter(error, has_state=True, joins=True)
    assert is_formed
    assert "rank 1 has a parameter 'x'" in left[0]
    for has_state, joins in ((True, False), (False, True), (False, False)):
        with pytest.raises(PlanMismatchError):
            enter(error, has_state=has_state, joins=joins)
    with pytest.raises(PlanMismatchError):
        enter(error, has_state=True, joins=True, deadline_s=0.0)
    assert enter(RendezvousError("a rank has ended"), has_state=False, joins=True)[1]


# -------------------------------------------------------------------------------------------------------- hvd.elastic


def test_states_of_elastic_training_go_back_to_what_was_trained_at_the_last_commit() -> None:
    process = Process()
    state = hvd.elastic.TorchState(process.model, process.optimizer, scheduler=process.scheduler)
    process.step()
    state.save()
    for _ in range(2):
        process.change()
        process.step()
        state.restore()
        assert process.trains() == BEFORE
        assert len(process.optimizer.state) == 1
    process.change()
    state.save()
    process.optimizer.param_groups.pop()
    process.model.requires_grad_(True)
    state.restore()
    assert process.trains() == AFTER


def test_states_of_elastic_training_come_with_what_is_trained() -> None:
    old, new = Process(), Process()
    old.change()
    old.step()
    theirs, mine = (hvd.elastic.TorchState(each.model, each.optimizer) for each in (old, new))
    sent = hvd.elastic.state._Sent(theirs).shared()
    hvd.elastic.state._Sent(mine).load_shared(copy.deepcopy(sent))
    assert new.trains() == old.trains()
    assert torch.equal(new.model[0].weight, old.model[0].weight)


def test_an_optimizer_of_parameters_that_no_model_has_is_left_as_it_is() -> None:
    process, other = Process(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    state = hvd.elastic.ObjectState(model=process.model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    process.model.requires_grad_(True)
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert process.trains()[1] == ["2.weight"]
