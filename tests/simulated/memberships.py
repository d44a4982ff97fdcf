"""Jobs that lose processes, in virtual time: the real ``Assembly`` and ``Membership`` over a store in memory.

Every process is a generator that does one thing at a time: access the store, enter a vote, learn its result, finish a
block. A seeded scheduler chooses whose turn it is, and which processes are killed, frozen and started again. What the
simulation leaves out is the exchange of bytes: a vote is a set of the members that have entered it.

The state of a process is a chain of digests: of the state before, and of the members with whom the block was computed.
So two processes have equal chains only if the same members contributed to the same blocks.
"""

import hashlib
import json
import random
from collections.abc import Generator
from dataclasses import dataclass, field

from totalreduce.foundation.errors import RecoveryError
from totalreduce.recovery.assembly import BEGUN, ENDED, FINISHED, Assembly
from totalreduce.recovery.launcher_store import FIRST_EPOCH, PREFIX, LauncherStore
from totalreduce.recovery.membership import Decision, Policy, Report

#: The number of epochs that a store which begins anew passes over (``launch.restarts``).
EPOCHS_UNSEEN = 1000


class Violation(AssertionError):
    """The protocol has broken a promise."""


class MemoryStore:
    """The methods of ``torch.distributed``'s store that ``LauncherStore`` calls."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values
        self.is_lost = False

    @property
    def values(self) -> dict[str, bytes]:
        if self.is_lost:
            raise RuntimeError("the server has gone")
        return self._values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, b"") + value.encode()

    def add(self, key: str, amount: int) -> int:
        number = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(number).encode()
        return number

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = value.encode()
        return self.values[key]


@dataclass
class Group:
    """The group of an epoch. It is broken when a member has ended, left, or was found silent."""

    decision: Decision
    entered: dict[int, set[int]] = field(default_factory=dict)  #: By version: the ranks that came to the vote.
    formed: set[int] = field(default_factory=set)
    broken: bool = False


@dataclass
class Plan:
    """What happens to a job.

    Attributes:
        policy: The policy.
        target: The version at which the job ends.
        faults: How many faults there are at most.
        fault_rate: How likely a fault is in a turn.
        crash_at: Instead of random faults: (turn, seat) of crashes.
        store_lost_at: Turns at which the store is lost, too.
        store_faults: Whether random faults take the store, too.
        hears: How likely the launcher learns in a turn what is new in the store.
    """

    policy: Policy
    target: int = 4
    faults: int = 3
    fault_rate: float = 0.03
    crash_at: tuple[tuple[int, int], ...] = ()
    store_lost_at: tuple[int, ...] = ()
    store_faults: bool = False
    hears: float = 0.3


class Process:
    """One process of a seat."""

    def __init__(self, job: "SimulatedJob", seat: int, incarnation: int) -> None:
        self.job, self.seat, self.incarnation = job, seat, incarnation
        self.assembly: Assembly
        self.has_state = self.frozen = self.ended = self.done = False
        self.version, self.chain = 0, "start"
        self.group: Group | None = None
        self.life = self.live()

    def live(self) -> Generator[bool, None, None]:
        """Yield after each action whether the process waits."""
        decision: Decision | None = None
        while self.job.store.is_lost:
            yield True
        self.assembly = self.job.assembly_of(self.seat, self.incarnation)
        while True:
            if decision is None:
                decision = yield from self.meet(has_voted=False)
                if decision is None:
                    if self.has_state and self.version < self.job.plan.target:  # as ``Job._form_again``
                        raise RecoveryError("the other ranks have come to the end of the job, and this rank has not")
                    return
            formed = yield from self.form(decision)
            decision = None
            while formed and self.version < self.job.plan.target:
                passed = yield from self.vote()
                if passed is None:  # a rank was lost before this one came to the vote
                    break
                if passed is False:
                    decision = yield from self.meet(has_voted=True)
                    if decision is None:
                        raise Violation("the job ended before its last block")
                    if decision.version <= self.version:
                        break
                self.apply()
                yield False
                if passed is False or self.job.has_newcomers(self):
                    self.leave()
                    break
            else:
                if formed and (yield from self.vote_at_end()):
                    return

    def meet(self, *, has_voted: bool) -> Generator[bool, None, Decision | None]:
        self.leave()
        decision = yield from self.assembly.meeting(Report(self.seat, self.incarnation, self.has_state, self.version))
        if decision is not None:
            self.job.decided(decision)
        return decision

    def form(self, decision: Decision) -> Generator[bool, None, bool]:
        """Enter the group of an epoch and get the state; ``False`` if it cannot be formed any more."""
        job = self.job
        if self.has_state and self.version != decision.version:
            raise Violation(f"seat {self.seat} has version {self.version} in epoch {decision.epoch}: {decision}")
        group = self.group = job.group_of(decision)
        rank = decision.rank_of(self.seat, self.incarnation)
        group.formed.add(rank)
        while len(group.formed) < len(decision.members):
            yield True
            if group.broken or self.assembly.interruption():
                self.leave()
                return False
        source = job.process_of(decision.members[decision.source])
        if not self.has_state and rank != decision.source:
            if group.broken or source is None or (source.version, source.group) != (decision.version, group):
                self.leave()
                return False
            self.version, self.chain = source.version, source.chain
        yield False
        self.has_state = True
        return True

    def vote(self) -> Generator[bool, None, bool | None]:
        """Enter the vote; ``None`` if a rank is lost before, ``False`` if one is lost after."""
        group = self.group
        assert group is not None
        yield False
        if group.broken:
            return None
        entered = group.entered.setdefault(self.version, set())
        entered.add(group.decision.rank_of(self.seat, self.incarnation))
        while True:
            yield len(entered) < len(group.decision.members)
            complete = len(entered) == len(group.decision.members)
            # If the vote is complete and a rank is lost, either may come first.
            if complete and (not group.broken or self.job.random.random() < 0.5):
                return True
            if group.broken:
                return False

    def vote_at_end(self) -> Generator[bool, None, bool]:
        """Return whether the job has ended for this process."""
        if (yield from self.vote()):
            self.job.has_finished = True
            self.assembly.finish()
            return True
        return False

    def apply(self) -> None:
        assert self.group is not None
        members = [(member.seat, member.incarnation) for member in self.group.decision.members]
        self.chain = hashlib.sha256(f"{self.chain} {self.group.decision.epoch} {members}".encode()).hexdigest()[:16]
        self.version += 1
        self.assembly.begin()

    def leave(self) -> None:
        if self.group is not None:
            self.group.broken = True


class SimulatedJob:
    """A job under a seed."""

    def __init__(self, plan: Plan, seed: int, assembly: type[Assembly] = Assembly) -> None:
        self.plan, self.random, self._assembly = plan, random.Random(seed), assembly
        self.store = MemoryStore({FIRST_EPOCH: b"1"})
        self.has_finished = False
        self._begun_was_told, self._first_epoch = False, 1  #: What the launcher knows.
        self._decisions: dict[int, Decision] = {}
        self.now = 0.0
        self.groups: dict[int, Group] = {}
        self.trace = hashlib.sha256()
        self._ended: dict[int, int] = {}
        self._silent: list[tuple[float, Process]] = []
        self._store_random, self._store_restart_at = random.Random(seed + 1), 0.0
        #: Seats beyond those with which the job begins are taken some time later.
        joining = range(plan.policy.world_size, plan.policy.num_seats)
        self._restart_at = {seat: self.random.uniform(0.0, 4.0) for seat in joining}
        self.processes = {seat: self.new_process(seat, 0) for seat in range(plan.policy.world_size)}

    def new_process(self, seat: int, incarnation: int) -> "Process":
        return Process(self, seat, incarnation)

    def assembly_of(self, seat: int, incarnation: int) -> Assembly:
        store = LauncherStore(lambda _timeout_s: self.store)
        return self._assembly(store, self.plan.policy, seat, incarnation, lambda: self.now)

    def group_of(self, decision: Decision) -> Group:
        return self.groups.setdefault(decision.epoch, Group(decision))

    def process_of(self, member) -> Process | None:
        process = self.processes.get(member.seat)
        same = process is not None and process.incarnation == member.incarnation and not process.ended
        return process if same else None

    def has_newcomers(self, process: Process) -> bool:
        shrinks = self.plan.policy.on_loss == "shrink"
        return shrinks and process.version < self.plan.target and process.assembly.has_newcomers()

    def decided(self, decision: Decision) -> None:
        """Check a decision that a process has got against that of the others."""
        other = self._decisions.setdefault(decision.epoch, decision)
        if other != decision:
            raise Violation(f"two decisions of epoch {decision.epoch}: {decision} and {other}")
        policy, size = self.plan.policy, len(decision.members)
        least = policy.world_size if policy.on_loss == "replace" or decision.epoch == 1 else policy.min_ranks
        if not least <= size <= policy.num_seats:
            raise Violation(f"epoch {decision.epoch} has {size} ranks, and {least} to {policy.num_seats} are allowed")

    def run(self, turns: int = 20_000) -> str:
        """Run the job to its end; return a digest of its course.

        Raises:
            Violation: A promise was broken.
        """
        faults = self.plan.faults
        for turn in range(turns):
            self.now += 0.01
            self._launcher()
            running = [each for each in self.processes.values() if not (each.ended or each.frozen or each.done)]
            for at, seat in self.plan.crash_at:
                if at == turn and self._may_end(self.processes[seat]):
                    self._end(self.processes[seat])
            if turn in self.plan.store_lost_at:
                self._lose_store()
            if not self.plan.crash_at and faults and self.random.random() < self.plan.fault_rate:
                faults -= self._cause_fault()
            if running:
                self._turn(self.random.choice(running))
            if all(each.done for each in self.processes.values()) and not self._restart_at:
                self._check_end()
                return self.trace.hexdigest()
        versions = {seat: (each.version, each.ended, each.frozen) for seat, each in self.processes.items()}
        raise Violation(f"the job has not ended after {turns} turns: {versions}")

    def _turn(self, process: Process) -> None:
        if process.ended or process.done:
            return
        try:
            next(process.life)
        except StopIteration:
            process.done = True
        except RecoveryError:
            self._end(process, restarts=True)  # left behind: another process takes its seat
        self.trace.update(f"{process.seat} {process.incarnation} {process.version} {process.chain}\n".encode())
        self._check()

    def _check(self) -> None:
        chains: dict[int, set[str]] = {}
        for process in self.processes.values():
            # A process that was left behind may have applied a block that the others repeat; it never goes on.
            if process.has_state and not process.ended and self._is_current(process):
                chains.setdefault(process.version, set()).add(process.chain)
        for version, different in chains.items():
            if len(different) > 1:
                raise Violation(f"version {version} of the state differs between processes")

    def _is_current(self, process: Process) -> bool:
        latest = max(self.groups, default=0)
        group = self.groups.get(latest)
        return group is not None and group.decision.rank_of(process.seat, process.incarnation) is not None

    def _check_end(self) -> None:
        ends = {(each.version, each.chain) for each in self.processes.values() if each.has_state and not each.ended}
        if len(ends) != 1 or next(iter(ends))[0] != self.plan.target:
            raise Violation(f"the ranks end with {ends}, and not all with version {self.plan.target}")
        versions = [self.groups[epoch].decision.version for epoch in sorted(self.groups)]
        if versions != sorted(versions):
            raise Violation(f"versions went back: {versions}")

    def _may_end(self, process: Process) -> bool:
        """Whether the job can survive the end of a process: another one has the state, or nobody has."""
        if process.ended or process.done or self.has_finished:
            return False
        holders = [each for each in self.processes.values() if each.has_state and not each.ended and not each.frozen]
        current = [each for each in holders if self._is_current(each)]
        return not holders or any(each is not process for each in current)

    def _cause_fault(self) -> int:
        if self.plan.store_faults and self._store_random.random() < 0.3:
            self._lose_store()
            return 1
        process = self.random.choice(list(self.processes.values()))
        if not self._may_end(process) or process.frozen:
            return 0
        if self.random.random() < 0.7:
            self._end(process)
        else:
            process.frozen = True
            self._silent.append((self.now + 2.0, process))
        return 1

    def _end(self, process: Process, *, restarts: bool = True) -> None:
        process.ended = True
        process.leave()
        if restarts:
            self._restart_at[process.seat] = self.now + self.random.uniform(0.0, 2.0)

    def _lose_store(self) -> None:
        self.store.is_lost = True
        self._store_restart_at = self.now + self._store_random.uniform(0.0, 2.0)

    def _say_who_has_ended(self) -> None:
        if not self.store.is_lost:
            self.store.set(ENDED, json.dumps(self._ended))

    def _keep_store(self) -> None:
        """Note what the store has, now and then, and start it again if it is lost."""
        if not self.store.is_lost:
            if self._store_random.random() < self.plan.hears:
                self._begun_was_told = BEGUN in self.store.values
                self._first_epoch = max(self._first_epoch, max(self._decisions, default=0) + 1)
        elif self.now >= self._store_restart_at:
            self._first_epoch += EPOCHS_UNSEEN
            self.store = MemoryStore({FIRST_EPOCH: str(self._first_epoch).encode()})
            self._say_who_has_ended()
            if self._begun_was_told:
                self.store.set(BEGUN, "yes")
            if any(process.done for process in self.processes.values()):
                self.store.set(FINISHED, "yes")

    def _launcher(self) -> None:
        self._keep_store()
        for seat, process in self.processes.items():
            if process.ended and self._ended.get(seat, -1) < process.incarnation and self.random.random() < 0.3:
                self._ended[seat] = process.incarnation
                self._say_who_has_ended()
        for at, process in list(self._silent):
            if self.now >= at:
                self._silent.remove((at, process))
                process.leave()  # the others find it silent
                if self.plan.policy.on_loss == "replace" or self.random.random() < 0.5:
                    self._end(process)  # the launcher kills it
                else:
                    self._silent.append((self.now + self.random.uniform(0.0, 20.0), process))
                    process.frozen = self.random.random() < 0.5
                    if not process.frozen:
                        self._silent.pop()
        for seat, at in list(self._restart_at.items()):
            last = self.processes.get(seat)
            if self.now >= at and (last is None or self._ended.get(seat, -1) >= last.incarnation):
                del self._restart_at[seat]
                if not self.has_finished:
                    self.processes[seat] = self.new_process(seat, 0 if last is None else last.incarnation + 1)
                elif last is not None:
                    last.done = True


def reports_key(epoch: int) -> str:
    return f"{PREFIX}/{epoch}/reports"
