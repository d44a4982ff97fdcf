"""Loops of ``tr.replayed`` that lose processes, in virtual time: the real rules of replay and of memberships.

``ReplayLog``, ``Versions``, ``plan_parcels`` with its routes, ``Replicas`` and ``Assembly`` are the library's. What is
simulated is the exchange of bytes: a collective is a table of what the ranks have entered, a message is an entry in a
table. Between two accesses of these tables any process may be killed or frozen. ``Replayer`` does what ``ReplayedJob``
does.

The program is deterministic, so an undisturbed run has one course, computed without processes (``Undisturbed``). Every
result that a process gets is compared with it: so each contribution counts exactly once, and all ranks get the same.
"""

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field
from types import SimpleNamespace

from memberships import Plan, SimulatedJob, Violation

from totalreduce.foundation.errors import RecoveryError, ReplayMismatchError
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.recovery import replay
from totalreduce.recovery.membership import Decision, Report
from totalreduce.recovery.replay import Call, Standing
from totalreduce.recovery.replicas import Replicas

KINDS = (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER)


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def call_of(size: int, kind: OpKind, position: int) -> Call:
    reduction = ReduceOp.SUM if kind is OpKind.ALLREDUCE else ReduceOp.NONE
    root = position % size if kind is OpKind.BROADCAST else 0
    return Call(Signature(kind, DType.FLOAT32, reduction, root, (4, 6)))


def result_of(call: Call, contributions: dict[int, str]) -> str:
    if call.signature.kind is OpKind.BROADCAST:
        return contributions[call.signature.root]
    return digest(sorted(contributions.items()))


def contribution_of(rank: int, own: str, shared: str, position: int) -> str:
    return digest("contribution", rank, own, shared, position)


@dataclass
class ReplayPlan(Plan):
    """What happens to a job of ``tr.replayed``.

    Attributes:
        kinds: The calls of each round.
        result_copies: As in ``tr.replayed``.
        local_replicas: As in ``tr.replayed``.
        deviates: Seat 1, when it was started again, makes another call, with a result of the same size, in this
            place: (version, position).
    """

    fault_rate: float = 0.006
    kinds: tuple[OpKind, ...] = KINDS
    result_copies: int = 3
    local_replicas: int = 2
    deviates: tuple[int, int] | None = None


class Undisturbed:
    """The course of the program without faults.

    Attributes:
        results: By version and position: the call and its result.
        chains: By version: the value of the checkpoint that is equal on all ranks.
        owns: By version: the values that the ranks have for themselves.
    """

    def __init__(self, plan: ReplayPlan) -> None:
        size = plan.policy.world_size
        self.results: dict[tuple[int, int], tuple[Call, str]] = {}
        chain, own = "start", [f"own {rank}" for rank in range(size)]
        self.chains, self.owns = [chain], [own]
        for version in range(plan.target):
            begin, begin_own = chain, own
            for position, kind in enumerate(plan.kinds):
                call = call_of(size, kind, position)
                parts = {rank: contribution_of(rank, begin_own[rank], begin, position) for rank in range(size)}
                result = result_of(call, parts)
                self.results[version, position] = (call, result)
                chain, own = digest(chain, result), [digest(each, result) for each in own]
            self.chains.append(chain)
            self.owns.append(own)


class Lost(Exception):
    """A rank of the group is lost."""


@dataclass
class Group:
    """The group of an epoch: what its ranks have entered. It is broken when a member has ended or left."""

    decision: Decision
    entered: dict[int, dict[int, object]] = field(default_factory=dict)
    mail: dict[tuple, object] = field(default_factory=dict)
    formed: set[int] = field(default_factory=set)
    broken: bool = False


class Replayer:
    """One process of a seat."""

    def __init__(self, job: "ReplayedSimulation", seat: int, incarnation: int) -> None:
        plan = job.plan
        self.job, self.seat, self.incarnation = job, seat, incarnation
        self.assembly = job.assembly_of(seat, incarnation)
        self.has_state = self.frozen = self.ended = self.done = self.failed = False
        self.size = plan.policy.world_size
        self.shared, self.own = "start", f"own {seat}"
        # Looked up at each use, so that tests can plant defects.
        self.versions = replay.Versions((self.shared, self.own))
        self.log = replay.ReplayLog(seat, self.size, result_copies=plan.result_copies, bytes_max=1 << 30)
        self.replicas = job.replicas_kind(plan.local_replicas)
        self.group: Group | None = None
        self.num_entered = 0
        self.life = self.live()

    @property
    def version(self) -> int:
        return self.versions.version

    @property
    def chain(self) -> str:
        return self.versions.state[0]

    # --------------------------------------------------------------------------------------------------- the program

    def live(self) -> Generator[bool, None, None]:
        """Yield after each action whether the process waits."""
        if not (yield from self.form()):
            raise RecoveryError("too late")
        plan = self.job.plan
        while self.version < plan.target:
            version, shared, own = self.version, self.shared, self.own
            for position, kind in enumerate(plan.kinds):
                call = call_of(self.size, kind, position)
                if plan.deviates == (version, position) and self.seat == 1 and self.incarnation:
                    call = Call(Signature(kind, DType.INT32, call.signature.reduction, call.signature.root, (8, 3)))
                result = yield from self.call(call, contribution_of(self.seat, self.own, self.shared, position))
                self.job.check_result(version, position, call, result)
                shared, own = digest(shared, result), digest(own, result)
            self.shared, self.own = shared, own
            yield from self.checkpoint()
        yield from self.finish()

    # ----------------------------------------------------------------------------------- what ``ReplayedJob`` does

    def call(self, call: Call, contribution: str) -> Generator[bool, None, str]:
        while (result := self.log.answer(call)) is None:
            try:
                yield from self.meet_in(call.describe())
                made = yield from self.run(call, contribution)
                self.log.append(call, made)
                return made
            except Lost:
                yield from self.recover()
        return result

    def run(self, call: Call, contribution: str) -> Generator[bool, None, str]:
        root = call.signature.root if call.signature.kind is OpKind.BROADCAST else None
        parts = yield from self.collective(contribution, root)
        return result_of(call, parts)

    def checkpoint(self) -> Generator[bool, None, None]:
        self.log.check_no_call("a checkpoint")
        before = self.version
        self.versions.prepare((self.shared, self.own))
        while self.version == before:
            try:
                yield from self.meet_in(f"a checkpoint of {self.shared}")
                yield from self.exchange(before + 1, self.own)
                yield from self.vote()
                self.versions.commit()
                self.committed()
            except Lost:
                yield from self.recover()

    def vote(self) -> Generator[bool, None, None]:
        self.versions.is_in_vote = True
        yield from self.collective(None)

    def committed(self) -> None:
        self.replicas.commit()
        self.log.begin(self.version)
        if self.version == 1:
            self.assembly.begin()

    def finish(self) -> Generator[bool, None, None]:
        self.log.check_no_call("the end")
        while True:
            try:
                yield from self.meet_in("the end")
            except Lost:
                if not (yield from self.form()):
                    return
            else:
                self.job.has_finished = True
                self.assembly.finish()
                return

    def meet_in(self, description: str) -> Generator[bool, None, None]:
        said = yield from self.collective(description)
        if len(set(said.values())) > 1:
            raise ReplayMismatchError(self.log.version, self.log.position, tuple(map(str, said.values())))

    def recover(self) -> Generator[bool, None, None]:
        if not (yield from self.form()):
            raise RecoveryError("the other ranks have come to the end of the job, and this rank has not")

    def form(self) -> Generator[bool, None, bool]:
        """Enter epochs until there is a group whose ranks are level; ``False``: the job has ended."""
        while True:
            self.leave()
            self.check_not_ended()
            report = Report(self.seat, self.incarnation, self.has_state, self.version)
            decision = yield from self.assembly.meeting(report)
            if decision is None:
                self.check_not_ended()
                return False
            self.job.decided(decision)
            try:
                if self.has_state and self.versions.decided(decision.version):
                    self.committed()
                yield from self.join(decision)
                yield from self.level(decision)
            except Lost:
                continue
            except RecoveryError as error:  # ``_may_end`` leaves enough ranks
                raise Violation(str(error)) from error
            return True

    def join(self, decision: Decision) -> Generator[bool, None, None]:
        self.group, self.num_entered = self.job.group_of(decision), 0
        self.group.formed.add(self.seat)
        while len(self.group.formed) < self.size:
            yield True
            if self.group.broken or self.assembly.interruption():
                raise Lost

    def level(self, decision: Decision) -> Generator[bool, None, None]:
        version = decision.version
        if not self.has_state:
            self.log.begin(version)
        begins = not any(member.has_state for member in decision.members)
        has_state = self.has_state or (begins and self.seat == decision.source)
        copies = tuple(self.replicas.seats(version)) if has_state else ()
        said = yield from self.collective(Standing(has_state, self.log.position, self.log.held, copies))
        parcels = replay.plan_parcels([said[rank] for rank in range(self.size)], version, with_own=True)
        shared, own = self.versions.state
        for number, parcel in enumerate(parcels):
            source, data = parcel.route.sources[self.seat], None
            if source is not None:
                data = yield from self.mail_from(number, source)
            elif parcel.route.targets[self.seat]:
                data = self.packed(parcel)
            for target in parcel.route.targets[self.seat]:
                self.send(number, target, data)
            yield False
            if self.seat in parcel.requesters:
                if parcel.kind == "state":
                    shared = data
                elif parcel.kind == "own":
                    own = data
                else:
                    self.log.install(data)
        if not has_state:
            self.versions.load(version, (shared, own))
            self.shared, self.own = shared, own
        yield from self.exchange(version, self.versions.state[1])
        self.replicas.commit()
        self.has_state = True

    def packed(self, parcel: replay.Parcel) -> object:
        if parcel.kind == "state":
            return self.versions.state[0]
        if parcel.kind == "own":
            return self.replicas.copy_of(parcel.numbers[0])
        return self.log.entries(parcel.numbers)

    def exchange(self, version: int, mine: str) -> Generator[bool, None, None]:
        """Send this rank's own state to the next ranks, and receive those of the ranks before."""
        purpose, self.num_entered = ("copy", self.num_entered), self.num_entered + 1
        copies, distances = {}, range(1, min(self.job.plan.local_replicas, self.size - 1) + 1)
        for distance in distances:
            self.send(purpose, (self.seat + distance) % self.size, mine)
        for distance in distances:
            source = (self.seat - distance) % self.size
            copies[source] = yield from self.mail_from(purpose, source)
        self.replicas.note(version, copies)

    # ------------------------------------------------------------------------------------------------- the exchange

    def collective(self, value: object, root: int | None = None) -> Generator[bool, None, dict[int, object]]:
        """Return what all ranks have entered; with a root, what the root has entered, without the others."""
        group = self.group
        entered = group.entered.setdefault(self.num_entered, {})
        self.num_entered += 1
        entered[self.seat] = value
        while True:
            complete = len(entered) == self.size if root is None else root in entered
            yield not complete
            # If the collective is complete and a rank is lost, either may come first.
            if complete and (not group.broken or self.job.random.random() < 0.5):
                return dict(entered)
            if group.broken:
                raise Lost

    def send(self, purpose: object, to: int, data: object) -> None:
        key = (purpose, self.seat, to)
        if key in self.group.mail:
            raise Violation(f"{key} was sent twice")
        self.group.mail[key] = data

    def mail_from(self, purpose: object, source: int) -> Generator[bool, None, object]:
        key = (purpose, source, self.seat)
        while True:
            there = key in self.group.mail
            yield not there
            if there and (not self.group.broken or self.job.random.random() < 0.5):
                return self.group.mail[key]
            if self.group.broken:
                raise Lost

    def leave(self) -> None:
        if self.group is not None:
            self.group.broken = True

    def check_not_ended(self) -> None:
        if self.assembly.value("mismatch"):
            raise ReplayMismatchError(0, 0, ("as another process has said",))


class ReplayedSimulation(SimulatedJob):
    """A job of ``tr.replayed`` under a seed."""

    process_kind = Replayer
    replicas_kind = Replicas

    def __init__(self, plan: ReplayPlan, seed: int) -> None:
        self.undisturbed = Undisturbed(plan)
        self.num_losses = 0
        super().__init__(plan, seed)

    def new_process(self, seat: int, incarnation: int) -> Replayer:
        return self.process_kind(self, seat, incarnation)

    def group_of(self, decision: Decision) -> Group:
        return self.groups.setdefault(decision.epoch, Group(decision))

    def check_result(self, version: int, position: int, call: Call, result: str) -> None:
        made, expected = self.undisturbed.results[version, position]
        if call != made:
            raise Violation(f"call {position} after version {version} is none of the job's, and got a result")
        if result != expected:
            raise Violation(f"call {position} after version {version} returned {result} and not {expected}")

    def _turn(self, process: Replayer) -> None:
        before = process.version
        try:
            super()._turn(process)
        except ReplayMismatchError as error:
            if self.plan.deviates is None:
                raise Violation(f"a mismatch where all processes make the same calls: {error}") from error
            process.assembly.first_value("mismatch", str(error))
            process.assembly.finish()
            self.has_finished = True
            process.leave()
            process.done = process.failed = True
        if process.version < before:
            raise Violation(f"seat {process.seat} went back from version {before} to {process.version}")
        course, version = self.undisturbed, process.version
        expected = (course.chains[version], course.owns[version][process.seat])
        if process.has_state and process.versions.state != expected:
            raise Violation(f"seat {process.seat} has another state of version {version} than without a fault")

    def _check(self) -> None:
        """See ``_turn``: each state is compared with the undisturbed one, so states need not be compared."""

    def _end(self, process: Replayer, *, restarts: bool = True) -> None:
        self.num_losses += 1
        if self.num_losses > 200:
            raise Violation("processes end again and again: the job cannot be recovered")
        super()._end(process, restarts=restarts)

    def _may_end(self, process: Replayer) -> bool:
        """Whether the job must survive the end of a process: enough others have what a new process needs."""
        if process.ended or process.done or self.has_finished:
            return False
        if not process.has_state:
            return True
        alive = [
            each
            for each in self.processes.values()
            if each.has_state and not (each.ended or each.frozen) and each is not process
        ]
        plan = self.plan
        most = min(plan.result_copies - 1, plan.local_replicas, plan.policy.world_size - 1)
        return plan.policy.world_size - len(alive) <= most

    def _check_end(self) -> None:
        if any(process.failed for process in self.processes.values()):
            if not all(process.failed or process.ended for process in self.processes.values()):
                raise Violation("a mismatch has ended some processes and not all")
            return
        super()._check_end()


def summary(job: ReplayedSimulation) -> SimpleNamespace:
    """Return what happened in a job, so that tests can see that the faults have come."""
    processes = job.processes.values()
    return SimpleNamespace(
        epochs=len(job.groups),
        restarted=sum(process.incarnation > 0 for process in processes),
        failed=sum(process.failed for process in processes),
    )
