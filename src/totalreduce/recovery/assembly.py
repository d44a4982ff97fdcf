"""How processes decide on an epoch through a store that outlives them.

Every process appends its report to the epoch's list. Each applies the rules of ``membership`` to what it has read, and
offers its proposal to the store, which accepts the first one (``compare_set``) and shows it to all. So no process
leads, and a process may be lost at any moment. A process of the launcher serves the store (``keeper``); if that is
lost, the decision begins anew in the store of the next one (``launcher_store``).

Reports are appended in one step (``Store.append``), so a process that dies while it reports leaves no gap that others
would wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TypeVar, final

from torch._C._distributed_c10d import PrefixStore, Store

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RecoveryError
from totalreduce.recovery.accusation import Accusation
from totalreduce.recovery.launcher_store import PREFIX, LauncherStore, StoreLost
from totalreduce.recovery.membership import Decision, Membership, Policy, Report, number_in, reading

__all__ = ["BEGUN", "ENDED", "FINISHED", "NEWCOMERS_S", "WAITING", "Assembly", "accusation_key", "decision_key"]

#: A JSON object: by seat the last incarnation that has ended. The keeper writes it.
ENDED = f"{PREFIX}/ended"
#: Set when the first block has taken effect: from then on, somebody must have the state.
BEGUN = f"{PREFIX}/begun"
#: Changes when a process has waited for others for a while: the launcher then looks whether one is stopped.
WAITING = f"{PREFIX}/waiting"
#: How often a group looks for processes that want to join, in seconds (``Assembly.has_newcomers``).
NEWCOMERS_S = 0.25
#: How long a process waits before it says so, and how often.
_WAITING_S = 2.0
#: Set when all ranks have come to the end of the job.
FINISHED = f"{PREFIX}/finished"
#: The time between two looks into the store: short at first, because most decisions take no longer.
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.02


def decision_key(epoch: int) -> str:
    """Return the key under which the store has the decision of an epoch."""
    return f"{PREFIX}/{epoch}/decision"


def accusation_key(seat: int) -> str:
    """Return the key under which the process of a seat says that another process is silent.

    The key is that of the accuser, so that accusations that two processes repeat do not replace each other.
    """
    return f"{PREFIX}/accusation/{seat}"


_Value = TypeVar("_Value", bool, str)


@final
class Assembly:
    """One process in the decisions of its job. One thread uses it."""

    def __init__(
        self,
        store: LauncherStore,
        policy: Policy,
        seat: int,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: returns the time in seconds."""
        self._store, self._clock = store, clock
        self.policy = policy  #: The policy of the job.
        self.seat = seat  #: The seat of this process.
        self.incarnation = incarnation
        #: The decision of the epoch that this process is a member of; ``None`` before the first one.
        self.current: Decision | None = None
        self._waits_since = self._looked_at = clock()
        self._has_begun = False  #: Whether a block has taken effect on this process.
        self._num_said = 0

    def meet(self, *, has_state: bool = False, version: int = 0) -> Decision | None:
        """Take part in the decision of the next epoch; return it when it is made. This process is a member.

        The arguments are the attributes of ``Report``.

        Returns:
            The decision. ``None``: all ranks have come to the end of the job, and there is no further epoch.

        Raises:
            RecoveryError: Too few processes have come before the deadline; or no process with the state is left; or
                the others have gone on without this process, which was silent for too long; or the store is gone, and
                the launcher has not started another one before the deadline.
        """
        meeting = self.meeting(Report(self.seat, self.incarnation, has_state, version))
        pause_s = _PAUSE_S
        while True:
            try:
                waits = next(meeting)
            except StopIteration as end:
                decision: Decision | None = end.value
                return decision
            if waits:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def meeting(self, report: Report) -> Generator[bool, None, Decision | None]:
        """Do what ``meet`` does, one access of the store after the other.

        Yields:
            Between two accesses: whether this process now waits for others.
        """
        while True:
            try:
                decision = yield from self._decide(report)
            except StoreLost as error:
                yield from self._reconnect(error)
                continue
            self._waits_since = self._clock()
            if decision is None:
                return None
            member = decision.rank_of(self.seat, self.incarnation) is not None
            if not member and report.has_state:
                raise RecoveryError(
                    f"the other ranks have formed membership {decision.epoch} without rank {self.seat}, which was "
                    "silent for too long. This process ends, and the launcher can start another one in its place"
                )
            self.current = decision
            if member:
                return decision

    def suspect(self, rank: int) -> None:
        """Tell the launcher that a rank of the current epoch is silent, so that it ends the process."""
        if self.current is None:
            return
        member = self.current.members[rank]
        accusation = Accusation(member.seat, member.incarnation, self.current.epoch)
        self._store.set_lasting(accusation_key(self.seat), accusation.encode())

    def interruption(self) -> str:
        """Return why the group of the current epoch cannot be formed any more; "" if it can."""
        try:
            return self._interruption()
        except StoreLost as error:
            # Members that have not read the decision yet cannot read it any more.
            return str(error)

    def _interruption(self) -> str:
        current = self.current
        assert current is not None
        if current.epoch < self._store.first_epoch:
            return "the store in which its members were decided is lost"
        self._say_that_it_waits()
        ended = self._read_ended()
        for rank, member in enumerate(current.members):
            if member.incarnation <= ended.get(member.seat, -1):
                return f"rank {rank} has ended"
        members = {(member.seat, member.incarnation) for member in current.members}
        for report in self._read_reports(current.epoch + 1):
            if (report.seat, report.incarnation) in members and report.seat != self.seat:
                return f"rank {report.seat} has given membership {current.epoch} up"
        return ""

    def has_newcomers(self, every_s: float = 0.0) -> bool:
        """Return whether a process without the state waits for the next epoch; look once in ``every_s`` seconds."""
        if self._clock() < self._looked_at + every_s:
            return False
        self._looked_at = self._clock()
        try:
            ended = self._read_ended()
            epoch = self._next_epoch(self.current)
            reports = self._read_reports(epoch) if self._store.number(_count_key(epoch)) else []
        except StoreLost:
            self._store.reconnect()
            return False
        return any(each.incarnation > ended.get(each.seat, -1) for each in reports if not each.has_state)

    def begin(self) -> None:
        """Note that a block has taken effect on this process. Only the first call does something."""
        if self._has_begun:
            return
        self._has_begun = True
        self._store.set_lasting(BEGUN, "yes")

    def has_begun(self) -> bool:
        """Return whether a step has taken effect in any epoch, so that the job must not begin anew."""
        return self._until_connected(lambda: self._store.is_set(BEGUN))

    def finish(self) -> None:
        """Note that all ranks have come to the end of the job."""
        # If the store cannot be reached now, the launcher learns it from the end of this process.
        self._store.set_lasting(FINISHED, "yes")

    def first_value(self, name: str, value: str) -> str:
        """Return the value that the first process has set under a name; this one's, if none has."""
        return self._until_connected(lambda: self._store.first_lasting(f"{PREFIX}/value/{name}", value))

    def value(self, name: str) -> str:
        """Return the value that ``first_value`` has set under a name; "" if there is none.

        All processes that have read the value can set it again in a store that begins anew.
        """
        return self._until_connected(lambda: self._store.lasting_text(f"{PREFIX}/value/{name}"))

    def await_value(self, name: str) -> str:
        """Return the value of a name as soon as there is one; "" if the job has come to its end before.

        There is no deadline, because the launcher ends this process.
        """
        while not (value := self.value(name)):
            if self._until_connected(lambda: self._store.is_set(FINISHED)):
                break
            time.sleep(_PAUSE_MAX_S)
        return value

    def check_program(self, program: str, settings: str) -> None:
        """Compare this process's program, and what must be equal to form a group, with the others'; see below."""
        self.check_equal("program", program)
        self.check_equal("settings", settings)

    def check_equal(self, name: str, description: str) -> None:
        """Compare a description of this process's program with that of the process that came first.

        Raises:
            ConfigurationError: They differ. The message has the first line that differs.
        """
        first = self.first_value(name, description)
        difference = checks.first_difference(first.splitlines(), description.splitlines())
        if difference is None:
            return
        there, here = difference
        raise ConfigurationError(
            f"this process cannot join the job, because its {name} is another one: {here!r} here, and {there!r} in the "
            "job. Start the same program with the same arguments"
        )

    def store_of_epoch(self) -> Store:
        """Return the part of the store in which the members of the current epoch form their group."""
        assert self.current is not None
        return PrefixStore(f"{PREFIX}/{self.current.epoch}/group", self._store.raw)

    def _decide(self, report: Report) -> Generator[bool, None, Decision | None]:
        last = self.current
        epoch = self._next_epoch(last)
        while (known := self._read_decision(epoch)) is not None:  # others have decided without this process
            if report.has_state or known.rank_of(self.seat, self.incarnation) is not None:
                return known
            last, epoch = known, epoch + 1
            yield False
        yield False
        text = report.encode() + "\n"
        self._store.append(_reports_key(epoch), text)
        self._store.number(_count_key(epoch), 1)
        membership = Membership(self.policy, epoch, last, self._clock())
        num_counted = num_known = 0
        self._waits_since = self._clock()
        while True:
            yield False
            self._say_that_it_waits()
            # The ends are read before the reports, so that a report counts although its process has ended since. (The
            # report of a process that ends between its report and its count may be overlooked. If it was the only one
            # that had applied its block, the others repeat the block.)
            ended = self._read_ended()
            yield False
            now = self._clock()
            count = self._store.number(_count_key(epoch))
            if count != num_counted:  # else hundreds of ranks would read the same list again and again
                num_counted = count
                reports = self._read_reports(epoch, num_known)
                for other in reports:
                    membership.reported(other, now)
                num_known += len(reports)
            for seat, incarnation in ended.items():
                membership.ended(seat, incarnation)
            yield False
            decision = self._read_decision(epoch)
            if decision is not None:
                return decision
            yield False
            if self._store.is_set(FINISHED):
                return None
            if self._store.is_set(BEGUN):
                membership.begun()
            proposal = membership.proposal(now)
            if proposal is not None:
                yield False
                return Decision.decode(self._store.first(decision_key(epoch), proposal.encode()))
            yield True

    def _say_that_it_waits(self) -> None:
        """Tell the launcher now and then that this process waits: a process that is stopped can say nothing."""
        now = self._clock()
        if now >= self._waits_since + _WAITING_S:
            self._waits_since = now
            self._num_said += 1
            # Not ``set_lasting``: it would connect anew, and this process would then go on in the new store with an
            # epoch of the lost one.
            self._store.set_if_connected(WAITING, f"{self.seat} {self.incarnation} {self._num_said}")

    def _next_epoch(self, last: Decision | None) -> int:
        return max(self._store.first_epoch, 1 if last is None else last.epoch + 1)

    def _reconnect(self, error: StoreLost) -> Generator[bool, None, None]:
        """Return when the store is connected again. Yields, between two attempts, that this process waits.

        Raises:
            RecoveryError: The deadline of the policy has passed.
        """
        give_up_at = self._clock() + self.policy.deadline_s
        while not self._store.reconnect():
            if self._clock() >= give_up_at:
                raise RecoveryError(f"{error}. The launcher has not started it again") from error
            yield True

    def _until_connected(self, access: Callable[[], _Value]) -> _Value:
        """Return what an access of the store returns, when the store is connected."""
        while True:
            try:
                return access()
            except StoreLost as error:
                for _ in self._reconnect(error):
                    time.sleep(_PAUSE_MAX_S)

    def _read_decision(self, epoch: int) -> Decision | None:
        text = self._store.text(decision_key(epoch))
        if not text:
            return None
        decision = Decision.decode(text)
        if decision.epoch != epoch:
            raise ProtocolError(
                f"the store has the decision of membership {decision.epoch} as that of membership {epoch}"
            )
        return decision

    def _read_reports(self, epoch: int, num_known: int = 0) -> list[Report]:
        """Return the reports of an epoch but for the first ones, which are known."""
        lines = self._store.text(_reports_key(epoch)).splitlines()
        return [Report.decode(line) for line in lines[num_known:]]

    def _read_ended(self) -> dict[int, int]:
        text = self._store.text(ENDED)
        if not text:
            return {}
        with reading(text, "list of ended processes") as fields:
            return {int(seat): number_in(incarnation) for seat, incarnation in fields.items()}


def _count_key(epoch: int) -> str:
    """Return the key of the number of reports, which is increased after each one."""
    return f"{PREFIX}/{epoch}/count"


def _reports_key(epoch: int) -> str:
    return f"{PREFIX}/{epoch}/reports"
