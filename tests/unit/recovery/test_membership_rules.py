"""The rules of ``Membership`` in courses of events that the simulation meets rarely."""

import pytest

from totalreduce.foundation.errors import RecoveryError
from totalreduce.recovery.membership import Decision, Member, Membership, Policy, Report


def first_decision(*seats: int) -> Decision:
    return Decision(1, tuple(Member(seat, 0, has_state=False) for seat in seats))


def test_a_job_does_not_begin_anew_while_a_member_of_the_first_epoch_may_have_taken_a_step() -> None:
    """Seats 0 and 1 have decided on epoch 1, seat 0 has taken a step and works on; seats 1 to 3 are too new to know."""
    policy = Policy("shrink", 2, settle_s=5.0, deadline_s=60.0, max_ranks=4)
    membership = Membership(policy, 2, first_decision(0, 1), 0.0)
    for seat, incarnation in ((1, 1), (2, 0), (3, 0)):
        membership.reported(Report(seat, incarnation), 0.0)
    membership.ended(1, 0)
    assert membership.proposal(1.0) is None, "seat 0 may have the state of the job"
    membership.reported(Report(0, 0, has_state=True, version=1), 2.0)
    decision = membership.proposal(2.0)
    assert decision is not None
    assert [(each.seat, each.has_state) for each in decision.members] == [(0, True), (1, False), (2, False), (3, False)]
    assert decision.version == 1


def test_a_job_that_lost_all_members_of_the_first_epoch_before_a_step_begins_anew() -> None:
    policy = Policy("replace", 2, deadline_s=60.0)
    membership = Membership(policy, 2, first_decision(0, 1), 0.0)
    for seat in (0, 1):
        membership.ended(seat, 0)
        membership.reported(Report(seat, 1), 0.0)
    assert membership.proposal(0.0) == Decision(2, (Member(0, 1, has_state=False), Member(1, 1, has_state=False)))


@pytest.mark.parametrize("on_loss", ["replace", "shrink"])
def test_in_a_new_store_the_state_is_lost_only_when_every_seat_has_a_process_without_it(on_loss: str) -> None:
    """Seat 1 was replaced before the store was lost. Its second process has the state, and works on."""
    membership = Membership(Policy(on_loss, 3, settle_s=5.0, deadline_s=60.0), 1001, None, 0.0)
    membership.begun()
    for seat in (0, 1, 2):
        membership.ended(seat, 0)
    membership.reported(Report(0, 1), 0.0)
    membership.reported(Report(2, 1), 0.0)
    assert membership.proposal(1.0) is None, "the second process of seat 1 may have the state"
    membership.reported(Report(1, 1, has_state=True, version=7), 2.0)
    decision = membership.proposal(2.0)
    assert decision is not None
    assert (decision.source, decision.version, len(decision.members)) == (1, 7, 3)


def test_in_a_new_store_an_error_says_that_the_state_is_lost() -> None:
    membership = Membership(Policy("replace", 2, deadline_s=60.0), 1001, None, 0.0)
    membership.begun()
    membership.reported(Report(0, 1), 0.0)
    membership.ended(1, 0)
    assert membership.proposal(59.0) is None
    with pytest.raises(RecoveryError, match="no process that has the state of the job has come within 60 s"):
        membership.proposal(60.0)
    membership.reported(Report(1, 1), 60.0)
    with pytest.raises(RecoveryError, match="all processes that had the state of the job have ended"):
        membership.proposal(60.0)


def test_in_a_new_store_a_job_that_may_have_begun_waits_for_its_first_seats() -> None:
    """The keeper was lost before the launcher had learned that the job had begun, and seats 0 and 1 have the state."""
    policy = Policy("shrink", 2, settle_s=5.0, deadline_s=60.0, max_ranks=4)
    membership = Membership(policy, 1001, None, 0.0)
    for seat in (2, 3):
        membership.reported(Report(seat, 0), 0.0)
    assert membership.proposal(1.0) is None
    for seat in (0, 1):
        membership.reported(Report(seat, 0, has_state=True, version=1), 2.0)
    decision = membership.proposal(2.0)
    assert decision is not None
    assert (decision.version, len(decision.members)) == (1, 4)


def test_shrinking_in_a_new_store_waits_no_longer_than_the_others_have_to_report() -> None:
    policy = Policy("shrink", 3, settle_s=5.0, deadline_s=60.0)
    membership = Membership(policy, 1001, None, 0.0)
    membership.reported(Report(0, 0, has_state=True, version=7), 1.0)
    membership.reported(Report(2, 1), 1.0)
    assert membership.proposal(5.9) is None
    decision = membership.proposal(6.0)
    assert decision is not None
    assert [each.seat for each in decision.members] == [0, 2]


def test_a_newcomer_waits_as_long_as_the_others_work() -> None:
    """Its deadline begins when the members of the last epoch come to the decision, which may be after a long block."""
    policy = Policy("shrink", 2, min_ranks=2, settle_s=5.0, deadline_s=60.0, max_ranks=3)
    last = Decision(4, (Member(0, 0, has_state=True), Member(1, 0, has_state=True)), 9)
    membership = Membership(policy, 5, last, 0.0)
    membership.reported(Report(2, 0), 0.0)
    assert membership.proposal(1000.0) is None
    membership.ended(1, 0)
    membership.ended(2, 0)
    membership.reported(Report(0, 0, has_state=True, version=9), 1000.0)
    assert membership.proposal(1059.0) is None
    with pytest.raises(RecoveryError, match="needs 2 ranks, and 1 have come within 60 s"):
        membership.proposal(1060.0)
