"""Defects that the simulation of replay must find, each planted into the real rules or into what a process does.

The first five are Rabit's, or what Rabit's design forbids.
"""

import dataclasses

import pytest
from memberships import Violation
from replays import Lost, ReplayedSimulation, Replayer, ReplayPlan
from test_replays import plan_of, policy_of

from totalreduce.foundation.types import OpKind
from totalreduce.recovery import replay
from totalreduce.recovery.replay import ReplayLog, Versions
from totalreduce.recovery.replicas import Replicas
from totalreduce.recovery.routing import Route


class SizeOnly(ReplayLog):
    """A replayed call is compared by the size of its result alone (Rabit)."""

    def answer(self, call):
        entry = self._entries.get(self.position)
        if entry is not None and self._bytes_of(entry.call) == self._bytes_of(call):
            call = entry.call
        return super().answer(call)


class NotTheLast(ReplayLog):
    """The last result is kept only where an older one would be kept."""

    def append(self, call, result):
        super().append(call, result)
        last = self.position - 1
        if last % self._round != self._place:
            del self._entries[last]


class KeepsTooLittle(ReplayLog):
    """Older results are kept on no rank."""

    def append(self, call, result):
        super().append(call, result)
        self._entries.pop(self.position - 2, None)


class OneTooMany(ReplayLog):
    """A replayed call does not move the position on: the next one gets the same result."""

    def answer(self, call):
        before, result = self.position, super().answer(call)
        if before == 0:
            self.position = before
        return result


class NeverCommits(Versions):
    """A rank that was in the vote always makes its checkpoint again, although others have gone on."""

    def decided(self, version):
        self.version, self.is_in_vote = version, False
        return False


class AlwaysCommits(Versions):
    """A rank that was in the vote always takes it for passed."""

    def decided(self, version):
        return super().decided(self.version + 1 if self.is_in_vote else version)


class OldCopies(Replicas):
    """A copy of any version is given to a new process (the local state is one version too old)."""

    def commit(self):
        self._held, self._next, self._kept = getattr(self, "_kept", {}), {}, dict(self._next or self._held)

    def seats(self, version):
        return list(self._held)


class HastyCopies(Replicas):
    """A copy counts before the vote has passed: the one of the version before is gone."""

    def note(self, version, copies):
        super().note(version, copies)
        self._held = self._next


class DropsBeforeTheVote(Replayer):
    """The log is dropped when a checkpoint begins, and not when its vote has passed."""

    def vote(self):
        self.log.begin(self.version)
        yield from super().vote()


class OnePhase(Replayer):
    """A checkpoint counts without a vote."""

    def vote(self):
        yield False


class ForgetsTheVote(Replayer):
    """A rank does not say that it was in the vote."""

    def vote(self):
        yield from self.collective(None)


class WithoutMeeting(Replayer):
    """Ranks do not meet before a call: the root of a broadcast goes on before the others have come."""

    def meet_in(self, description):
        yield False


class WithoutCopies(Replayer):
    """After a loss, the local states are not copied again."""

    def exchange(self, version, mine):
        if version > self.version:
            yield from super().exchange(version, mine)


class ForgetsContribution(Replayer):
    """A call that is repeated contributes the result of the first attempt, which was reduced in place."""

    def run(self, call, contribution):
        self.spoilt = getattr(self, "spoilt", {})
        key = (self.version, self.log.position)
        contribution = self.spoilt.get(key, contribution)
        self.spoilt[key] = contribution + " spoilt"
        return (yield from super().run(call, contribution))


class RepeatsFinishedCalls(Replayer):
    """A rank that was in a call repeats it after a loss, although another rank has its result."""

    def call(self, call, contribution):
        result = self.log.answer(call)
        while result is None:
            try:
                yield from self.meet_in(call.describe())
                result = yield from self.run(call, contribution)
                self.log.append(call, result)
            except Lost:
                yield from self.recover()
        return result


class WithoutState(Replayer):
    """A new process begins with its own state."""

    def packed(self, parcel):
        return "start" if parcel.kind == "state" else super().packed(parcel)


class StateTooEarly(Replayer):
    """A new process counts as one with the state before it has the results."""

    def level(self, decision):
        self.has_state, self.was_new = True, not self.has_state
        yield from super().level(decision)


def straight(world_size, holders, requesters):
    """Every requester asks the first holder: distances are not kept, and an edge is used twice."""
    source = min(holders)
    sources = [source if rank in requesters and rank not in holders else None for rank in range(world_size)]
    targets = [()] * world_size
    targets[source] = tuple(rank for rank in requesters if rank not in holders) * 2
    return Route((0,) * world_size, tuple(sources), tuple(targets))


def is_found(make, num_seeds: int = 60) -> bool:
    for seed in range(num_seeds):
        try:
            make(seed).run(4_000)
        except (Violation, AssertionError, KeyError):
            return True
    return False


def crowded(seed: int) -> ReplayPlan:
    """Return a plan with faults, of 4 or 8 ranks with few copies: a rank keeps each second or fourth result."""
    size = (4, 8)[seed % 2]
    kinds = (OpKind.BROADCAST, OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.BROADCAST)
    return ReplayPlan(policy_of(size), target=3, faults=5, kinds=kinds, result_copies=2, local_replicas=1)


def deviating(seed: int) -> ReplayPlan:
    return dataclasses.replace(plan_of(seed), deviates=(1, seed % 2), faults=4)


LOGS = [(SizeOnly, deviating), (NotTheLast, crowded), (KeepsTooLittle, crowded), (OneTooMany, plan_of)]


@pytest.mark.parametrize(("defect", "plan"), LOGS, ids=lambda value: value.__name__)
def test_a_defect_in_the_log_is_found(defect, plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ReplayLog", defect)
    assert is_found(lambda seed: ReplayedSimulation(plan(seed), seed)), defect.__doc__


@pytest.mark.parametrize("defect", [NeverCommits, AlwaysCommits], ids=lambda defect: defect.__name__)
def test_a_defect_in_the_versions_is_found(defect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "Versions", defect)
    assert is_found(lambda seed: ReplayedSimulation(crowded(seed), seed)), defect.__doc__


@pytest.mark.parametrize("defect", [OldCopies, HastyCopies], ids=lambda defect: defect.__name__)
def test_a_defect_in_the_copies_is_found(defect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayedSimulation, "replicas_kind", defect)
    assert is_found(lambda seed: ReplayedSimulation(crowded(seed), seed)), defect.__doc__


PROCESSES = [
    DropsBeforeTheVote,
    OnePhase,
    ForgetsTheVote,
    WithoutMeeting,
    WithoutCopies,
    ForgetsContribution,
    RepeatsFinishedCalls,
    WithoutState,
    StateTooEarly,
]


@pytest.mark.parametrize("defect", PROCESSES, ids=lambda defect: defect.__name__)
def test_a_defect_in_a_process_is_found(defect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayedSimulation, "process_kind", defect)
    assert is_found(lambda seed: ReplayedSimulation(crowded(seed), seed)), defect.__doc__


def test_routes_that_send_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "find_route", straight)
    assert is_found(lambda seed: ReplayedSimulation(crowded(seed), seed))


def test_without_a_defect_nothing_is_found() -> None:
    assert not is_found(lambda seed: ReplayedSimulation(crowded(seed), seed), 15)
    assert not is_found(lambda seed: ReplayedSimulation(deviating(seed), seed), 15)
