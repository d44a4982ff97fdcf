"""A process that leaves the group of one epoch and enters the next one, without a store and without groups."""

from types import SimpleNamespace

import pytest

from totalreduce.foundation.errors import PeerLost, RecoveryError, RendezvousError
from totalreduce.recovery.epochs import Epochs
from totalreduce.recovery.membership import Decision, Member
from totalreduce.transports.liveness import SILENT


class Assembly:
    """Returns decisions that were made beforehand; ``None`` after the last one."""

    def __init__(self, *numbers: int, on_loss: str = "replace") -> None:
        self.seat = self.incarnation = 0
        self.policy = SimpleNamespace(on_loss=on_loss, deadline_s=100.0)
        self.numbers, self.reports, self.suspected = list(numbers), [], []

    def meet(self, *, has_state: bool, version: int) -> Decision | None:
        self.reports.append((has_state, version))
        return decision(self.numbers.pop(0)) if self.numbers else None

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)


def decision(number: int) -> Decision:
    return Decision(number, (Member(0, 0, has_state=number > 1),), 7)


def epochs_of(assembly: Assembly, *failures: Exception, **options):
    """Return the epochs, and what happens in them, as a list. The first attempts to level the ranks fail."""
    events, failing = [], list(failures)

    def level(group, members: Decision) -> None:
        events.append(f"level {members.epoch}")
        if failing:
            raise failing.pop(0)

    epochs = Epochs(
        *(assembly, None, level),
        prepare=lambda members: events.append(f"prepare {members.epoch}"),
        leave=lambda reason: events.append(f"leave: {reason}"),
        **options,
    )
    epochs._form_group = lambda members: events.append(f"form {members.epoch}") or SimpleNamespace(rank=3)
    return epochs, events


def test_an_epoch_that_cannot_be_formed_is_followed_by_the_next_one() -> None:
    assembly = Assembly(1, 2, 3)
    epochs, events = epochs_of(assembly, PeerLost(1, "gone"), RendezvousError("too late"), version=lambda: 9)
    assert not epochs.has_state
    epochs.begin()
    assert epochs.has_state
    steps = [f"{word} {number}" for number in (1, 2, 3) for word in ("prepare", "form", "level")]
    assert [each for each in events if not each.startswith("leave")] == steps
    assert events[3] == f"leave: {PeerLost(1, 'gone')}"
    assert events[7] == "leave: too late"
    assert assembly.reports == [(False, 9)] * 3


def test_an_error_that_no_other_epoch_can_mend_ends_the_process() -> None:
    epochs, events = epochs_of(Assembly(1, 2), RecoveryError("states differ"))
    with pytest.raises(RecoveryError, match="states differ"):
        epochs.enter()
    assert events == ["prepare 1", "form 1", "level 1"]


def test_a_decision_that_is_known_is_entered_first_and_once() -> None:
    assembly = Assembly(6)
    epochs, events = epochs_of(assembly, PeerLost(1, "gone"))
    assert epochs.enter(decision(5))
    assert [each for each in events if each.startswith("form")] == ["form 5", "form 6"]
    assert len(assembly.reports) == 1


def test_a_process_that_comes_too_late_ends() -> None:
    """With ``replace`` its rank was missing; with ``shrink`` there is nothing left to do."""
    for on_loss, error in (("replace", RecoveryError), ("shrink", SystemExit)):
        epochs, _ = epochs_of(Assembly(on_loss=on_loss))
        with pytest.raises(error):
            epochs.begin()
        assert not epochs.enter()


def test_the_launcher_is_told_of_a_silent_rank_and_the_others_of_the_reason() -> None:
    assembly = Assembly(1)
    epochs, events = epochs_of(assembly)
    assert epochs.left_because == "the job began"
    epochs.begin()
    began = epochs.left_at
    for reason in (PeerLost(2, "connection reset"), PeerLost(4, f"{SILENT} for 2 s"), "other processes join"):
        epochs.leave(reason)
        assert events[-1] == f"leave: {reason}"
        assert epochs.left_because == str(reason)
    assert assembly.suspected == [4]
    assert epochs.left_at >= began


def test_the_error_with_which_another_process_has_ended_the_job_is_raised() -> None:
    """Before the decision, and if there is none any more."""
    said: list[str] = []

    def check_end() -> None:
        if said:
            raise RecoveryError(said[0])

    assembly = Assembly(1)
    epochs, _ = epochs_of(assembly, check_end=check_end)
    epochs.begin()
    assembly.meet = lambda **_: said.append("another call")
    with pytest.raises(RecoveryError, match="another call"):
        epochs.enter()
    with pytest.raises(RecoveryError, match="another call"):
        epochs.enter()
    assert said == ["another call"]
