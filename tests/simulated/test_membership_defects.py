"""Defects that the simulation of memberships must find, each planted into the real rules."""

import dataclasses
import json

import pytest
from memberships import MemoryStore, Plan, Process, SimulatedJob, Violation
from test_memberships import plan_of

from totalreduce.foundation.errors import ProtocolError
from totalreduce.recovery import assembly as assembly_module
from totalreduce.recovery.assembly import ENDED, Assembly, decision_key
from totalreduce.recovery.launcher_store import FIRST_EPOCH, LauncherStore
from totalreduce.recovery.membership import Decision, Membership, Policy, Report


class LivingVersions(Membership):
    """The version is that of the processes that still live: a step that a dead one had finished is lost."""

    def proposal(self, now):
        living = [each for each in self._reports.values() if not self._has_ended(each) and each.has_state]
        self._version = max((each.version for each in living), default=0)
        return super().proposal(now)


class LastVersions(Membership):
    """The version is the one that was reported last."""

    def reported(self, report, now):
        super().reported(report, now)
        if report.has_state:
            self._version = report.version


class Hasty(Membership):
    """Ranks of the last epoch that have said nothing are not awaited."""

    def _awaited(self):
        return []


class SmallReplacement(Membership):
    """With replace, the job goes on before the seat is taken again."""

    def _is_complete(self, living, now, *, has_source):
        return has_source and not self._awaited() if self._has_begun else len(living) >= self._policy.world_size


class DeadMembers(Membership):
    """Processes that have ended become members."""

    def _has_ended(self, report):
        return False


class OldIncarnations(Membership):
    """The first report of a seat counts, and not that of its last incarnation."""

    def reported(self, report, now):
        if report.seat not in self._reports:
            super().reported(report, now)


class NewcomersHaveState(Membership):
    """A process that was just started counts as one with the state."""

    def reported(self, report, now):
        super().reported(dataclasses.replace(report, has_state=True), now)


class Restarted(Membership):
    """After a loss everything begins as in the first epoch."""

    def __init__(self, policy, epoch, last, now):
        super().__init__(policy, epoch, None, now)


class WithoutMinimum(Membership):
    """The smallest number of ranks is forgotten."""

    def _is_complete(self, living, now, *, has_source):
        complete = has_source and (not self._awaited() or now >= self._settled_at)
        return complete if self._has_begun else super()._is_complete(living, now, has_source=has_source)


class LastWriter(MemoryStore):
    """The last proposal counts, and not the first one."""

    def compare_set(self, key, expected, value):
        self.values[key] = value.encode()
        return self.values[key]


class StaleEnds(Assembly):
    """Ends of processes are read only once."""

    def _read_ended(self):
        if not hasattr(self, "known"):
            self.known = super()._read_ended()
        return self.known


class WithoutEnds(Assembly):
    """The launcher's news of ends is not read."""

    def _read_ended(self):
        return {}


class Undead(Assembly):
    """A process that the others have left behind takes part again."""

    def meeting(self, report):
        while True:
            decision = yield from self._decide(dataclasses.replace(report, has_state=False))
            if decision is None:
                return None
            self.current = decision
            if decision.rank_of(self.seat, self.incarnation) is not None:
                return decision


class WithoutInterruption(Assembly):
    """A process that forms a group does not notice that others have given it up."""

    def interruption(self):
        return ""


class WrongEpoch(Assembly):
    """The decision of the last epoch is taken for that of the next one."""

    def _read_decision(self, epoch):
        text = self._store.text(decision_key(epoch)) or (self._store.text(decision_key(epoch - 1)) if epoch > 2 else "")
        return Decision.decode(text) if text else None


class Repeats(Process):
    """A process that was in the vote always repeats its block."""

    def meet(self, *, has_voted):
        decision = yield from super().meet(has_voted=has_voted)
        if has_voted and decision is not None and decision.version > self.version:
            self.version = decision.version
        return decision


class Applies(Process):
    """A process that was in the vote always applies its block."""

    def meet(self, *, has_voted):
        decision = yield from super().meet(has_voted=has_voted)
        if has_voted and decision is not None:
            decision = dataclasses.replace(decision, version=self.version + 1)
        return decision


class VotesAlone(Process):
    """The vote passes when a process has come to it."""

    def vote(self):
        yield False
        return True


class OwnSource(Process):
    """A newcomer begins with its own state instead of the source's."""

    def form(self, decision):
        formed = yield from super().form(decision)
        if formed and self.incarnation and self.version and not getattr(self, "kept", False):
            self.chain = "start"
        self.kept = True
        return formed


class ForgetsVersion(Process):
    """A process reports the version before the block that it has applied."""

    def meet(self, *, has_voted):
        self.version, version = max(0, self.version - 1), self.version
        meeting = super().meet(has_voted=has_voted)
        decision = yield from meeting
        self.version = version
        return decision


MEMBERSHIPS = [
    LivingVersions,
    LastVersions,
    Hasty,
    SmallReplacement,
    DeadMembers,
    OldIncarnations,
    NewcomersHaveState,
    Restarted,
    WithoutMinimum,
]
ASSEMBLIES = [StaleEnds, WithoutEnds, Undead, WithoutInterruption, WrongEpoch]
PROCESSES = [Repeats, Applies, VotesAlone, OwnSource, ForgetsVersion]


def is_found(make) -> bool:
    for seed in range(400):
        try:
            make(seed).run(4_000)
        except Violation:
            return True
    return False


def plan_with_minimum(seed: int) -> Plan:
    plan = plan_of(seed)
    return dataclasses.replace(plan, policy=dataclasses.replace(plan.policy, min_ranks=plan.policy.world_size - 1))


def plan_with_store_faults(seed: int) -> Plan:
    return dataclasses.replace(plan_of(seed), faults=4, store_faults=True)


@pytest.mark.parametrize("defect", MEMBERSHIPS, ids=lambda defect: defect.__name__)
def test_a_defect_in_the_rules_is_found(defect: type[Membership], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly_module, "Membership", defect)
    plan = plan_with_minimum if defect is WithoutMinimum else plan_of
    assert is_found(lambda seed: SimulatedJob(plan(seed), seed)), defect.__doc__


@pytest.mark.parametrize("defect", ASSEMBLIES, ids=lambda defect: defect.__name__)
def test_a_defect_in_the_exchange_is_found(defect: type[Assembly]) -> None:
    def plan(seed: int) -> Plan:
        return dataclasses.replace(plan_of(seed), store_faults=False)

    assert is_found(lambda seed: SimulatedJob(plan(seed), seed, defect)), defect.__doc__


@pytest.mark.parametrize("defect", PROCESSES, ids=lambda defect: defect.__name__)
def test_a_defect_in_a_process_is_found(defect: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memberships.Process", defect)
    assert is_found(lambda seed: SimulatedJob(plan_of(seed), seed)), defect.__doc__


def test_a_store_in_which_the_last_proposal_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memberships.MemoryStore", LastWriter)
    assert is_found(lambda seed: SimulatedJob(plan_of(seed), seed))


def test_a_new_store_with_the_epochs_of_the_one_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memberships.EPOCHS_UNSEEN", 0)
    assert is_found(lambda seed: SimulatedJob(plan_with_store_faults(seed), seed))


def test_a_rank_that_keeps_the_group_of_a_lost_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found(lambda seed: SimulatedJob(plan_with_store_faults(seed), seed, WithoutInterruption))


def test_values_of_the_store_that_no_process_writes_are_refused() -> None:
    first = {FIRST_EPOCH: b"1"}
    store, policy = MemoryStore(first), Policy("replace", 2)

    def assembly() -> Assembly:
        return Assembly(LauncherStore(lambda _: store), policy, 0, 0, lambda: 0.0)

    for key, value in (
        (ENDED, '{"x": 0}'),
        (ENDED, '{"0": []}'),
        (ENDED, "[]"),
        (decision_key(1), "{}"),
        (decision_key(1), "nothing"),
        (ENDED, "{"),
    ):
        store = MemoryStore({**first, key: value.encode()})
        with pytest.raises(ProtocolError, match="the store holds"):
            for _ in assembly().meeting(Report(0, 0)):
                pass
    store = MemoryStore({**first, decision_key(1): Decision(2, ()).encode().encode()})
    with pytest.raises(ProtocolError, match="membership 2 as that of membership 1"):
        next(assembly().meeting(Report(0, 0)))
    for number in (b"", b"-1", b"1e3", b"9" * 10):
        store = MemoryStore({FIRST_EPOCH: number})
        with pytest.raises(ProtocolError, match="the number of a membership"):
            assembly()
    for text in ("1", json.dumps({"seat": -1}), json.dumps({"seat": True, "incarnation": 0, "version": 0})):
        with pytest.raises(ProtocolError):
            Report.decode(text)
