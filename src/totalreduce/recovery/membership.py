"""The rules by which processes decide which of them form the next epoch: an object without threads, stores or clocks.

A process that takes part in the decision makes a ``Membership`` for the epoch, passes to it what it learns (the reports
of other processes, and the ends of processes that the launcher has noticed), and asks it for a proposal. Several
processes may make different proposals at the same time; the store accepts the first one (``assembly``). So a proposal
must be *valid* (its members have reported and have not ended, as far as the proposer knows), and need not be the only
valid one. If a member ends after the decision, the group cannot be formed, and the others decide on another epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ProtocolError, RecoveryError

__all__ = ["Decision", "Member", "Membership", "OnLoss", "Policy", "Report", "number_in", "reading"]

OnLoss = Literal["replace", "shrink"]
#: The largest number of seats, incarnations, epochs and versions that is accepted from the store.
_NUMBER_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Policy:
    """What happens when a process is lost. Equal in all processes of a job."""

    #: ``"replace"``: the others wait until the launcher has started the process again, and the world size never
    #: changes. ``"shrink"``: the others go on without it; processes that are started again join later.
    on_loss: OnLoss
    world_size: int  #: The number of ranks with which the job begins.
    min_ranks: int = 1  #: With ``"shrink"``: the smallest world size with which training goes on.
    #: With ``"shrink"``: how long a process of the last epoch may take to report after the first report, before the
    #: others go on without it. It must be longer than the time after which silence counts as a loss, because a process
    #: that has not noticed the loss yet does not report.
    settle_s: float = 10.0
    #: How long a process waits for a decision before it gives up. For a process that joins, the time begins when a
    #: member of the last epoch comes to the decision; in a store that has begun anew, at once.
    deadline_s: float = 300.0
    #: With ``"shrink"``: the number of seats, which is the largest number of ranks. By default as many as the job
    #: begins with.
    max_ranks: int | None = None
    #: The seats that have a process when the job begins, ``world_size`` of them; by default the first ones. Processes
    #: of the others join later.
    first_seats: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Check the values. Raises ``ConfigurationError``: a value is out of range."""
        checks.rank_limits(self.min_ranks, self.world_size, self.num_seats)
        if not self.first_seats:
            object.__setattr__(self, "first_seats", range(self.world_size))

    @property
    def num_seats(self) -> int:
        """The number of seats."""
        return self.world_size if self.max_ranks is None else self.max_ranks


@dataclass(frozen=True, slots=True)
class Report:
    """What a process says of itself when it comes to a decision."""

    seat: int
    incarnation: int  #: How often its seat was started before it.
    has_state: bool = False  #: Whether it has the state of the job. A process that was just started has not.
    #: With the state: its version. A process that was in the vote of its block when the group ended does not know
    #: whether the vote has passed, and reports the version before it.
    version: int = 0

    def encode(self) -> str:
        """Return the text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Report:
        """Read the text of a report. Raises ``ProtocolError``: the text is no report."""
        with reading(text, "report") as fields:
            numbers = [number_in(fields[name]) for name in ("seat", "incarnation", "version")]
            has_state = _flag(fields["has_state"])
        return cls(numbers[0], numbers[1], has_state, numbers[2])


@dataclass(frozen=True, slots=True)
class Member:
    """A process of an epoch."""

    seat: int
    incarnation: int
    has_state: bool  #: Whether it had the state of the job when the epoch was decided. In the first epoch nobody has.


@dataclass(frozen=True, slots=True)
class Decision:
    """The membership of an epoch."""

    epoch: int  #: The number of the epoch, from 1.
    members: tuple[Member, ...]  #: The processes, by rank.
    #: The version of the state with which the epoch begins. The vote of the block before it has passed: a process that
    #: had come to this vote applies what it has computed, and then has this version, too.
    version: int = 0

    @classmethod
    def of_all(cls, world_size: int) -> Decision:
        """Return the members of a job whose ranks cannot be replaced, which begins."""
        return cls(1, tuple(Member(seat, 0, has_state=False) for seat in range(world_size)))

    def rank_of(self, seat: int, incarnation: int) -> int | None:
        """Return the rank of a process in this epoch; ``None`` if it is not a member."""
        for rank, member in enumerate(self.members):
            if (member.seat, member.incarnation) == (seat, incarnation):
                return rank
        return None

    @property
    def source(self) -> int:
        """The rank whose state all members begin with: the first one that has the state, else rank 0."""
        return next((rank for rank, member in enumerate(self.members) if member.has_state), 0)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The ranks that get the state from others: those without it, but for the source."""
        return tuple(rank for rank, member in enumerate(self.members) if not member.has_state and rank != self.source)

    def encode(self) -> str:
        """Return the text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Decision:
        """Read the text of a decision. Raises ``ProtocolError``: the text is no decision."""
        with reading(text, "decision") as fields:
            epoch, version = number_in(fields["epoch"]), number_in(fields["version"])
            members = tuple(
                Member(number_in(each["seat"]), number_in(each["incarnation"]), _flag(each["has_state"]))
                for each in fields["members"]
            )
        return cls(epoch, members, version)


@final
class Membership:
    """What one process knows while the members of an epoch are being decided."""

    def __init__(self, policy: Policy, epoch: int, last: Decision | None, now: float) -> None:
        """Begin with nothing known.

        Args:
            policy: The policy of the job.
            epoch: The number of the epoch.
            last: The decision of the epoch before; ``None`` for the first epoch, and for a process that comes to the
                first decision in a store that has begun anew.
            now: The time in seconds.
        """
        self._policy, self._epoch, self._last = policy, epoch, last
        self._reports: dict[int, Report] = {}  #: By seat: the report of its last incarnation.
        self._ended: dict[int, int] = {}  #: By seat: the last incarnation that has ended.
        #: The latest version that any process has reported, also one that has ended since.
        self._version = 0 if last is None else last.version
        #: Whether a process has, or had, the state of the job. Until then every decision is as the first one.
        self._has_begun = last is not None and any(member.has_state for member in last.members)
        self._give_up_at = now + policy.deadline_s
        self._settled_at = float("inf")

    def reported(self, report: Report, now: float) -> None:
        """Note the report of a process, which may be this one."""
        known = self._reports.get(report.seat)
        if known is None or known.incarnation < report.incarnation:
            self._reports[report.seat] = report
        if report.has_state:
            self._has_begun = True
            self._version = max(self._version, report.version)
            self._settled_at = min(self._settled_at, now + self._policy.settle_s)

    def begun(self) -> None:
        """Note that a block has taken effect, in this epoch or in an earlier one."""
        self._has_begun = True

    def ended(self, seat: int, incarnation: int) -> None:
        """Note that a process has ended, as the launcher says. Its reports must have been noted before."""
        self._ended[seat] = max(incarnation, self._ended.get(seat, -1))

    def proposal(self, now: float) -> Decision | None:
        """Return the members that this process proposes; ``None`` if it waits for others.

        Raises:
            RecoveryError: The deadline has passed, and the message says which seats are missing. Or no process that
                has the state of the job is left.
        """
        living = {seat: report for seat, report in sorted(self._reports.items()) if not self._has_ended(report)}
        has_source = any(report.has_state for report in living.values())
        if self._is_complete(living, now, has_source=has_source):
            members = tuple(Member(seat, each.incarnation, each.has_state) for seat, each in living.items())
            return Decision(self._epoch, members, self._version)
        if self._has_begun and not has_source and not self._awaited():
            raise RecoveryError(
                f"membership {self._epoch}: all processes that had the state of the job have ended, so nothing is left "
                "to recover from. Start the job again from a checkpoint on disk"
            )
        if self._is_group_at_work():
            self._give_up_at = now + self._policy.deadline_s
        if now >= self._give_up_at:
            raise RecoveryError(self._shortage(living, has_source=has_source))
        return None

    def _is_complete(self, living: Mapping[int, Report], now: float, *, has_source: bool) -> bool:
        policy = self._policy
        if not self._has_begun:
            # Somebody who is awaited may have taken the first step, which this process does not know yet.
            return len(living) >= policy.world_size and not self._awaited()
        if not has_source:
            return False
        if policy.on_loss == "replace":
            return len(living) >= policy.world_size
        return len(living) >= policy.min_ranks and (not self._awaited() or now >= self._settled_at)

    def _awaited(self) -> list[int]:
        """Return the seats of processes that may have the state of the job, and have neither reported nor ended."""
        if self._last is not None:
            return [each.seat for each in self._last.members if not self._knows_of(each.seat, each.incarnation)]
        if self._epoch == 1:
            return []
        # The store has begun anew, and nobody knows which processes formed the last epoch: any seat may have the state.
        # Until the job has begun, only the first seats are certain to have processes.
        seats = range(self._policy.num_seats) if self._has_begun else self._policy.first_seats
        return [seat for seat in seats if seat not in self._reports or self._has_ended(self._reports[seat])]

    def _is_group_at_work(self) -> bool:
        """Whether the group of the last epoch goes on: only newcomers have reported, and wait for its next change."""
        if self._last is None:
            return False
        members = {(each.seat, each.incarnation) for each in self._last.members}
        has_reported = any((each.seat, each.incarnation) in members for each in self._reports.values())
        return not has_reported and bool(self._awaited())

    def _has_ended(self, report: Report) -> bool:
        return report.incarnation <= self._ended.get(report.seat, -1)

    def _knows_of(self, seat: int, incarnation: int) -> bool:
        report = self._reports.get(seat)
        return (report is not None and report.incarnation >= incarnation) or self._ended.get(seat, -1) >= incarnation

    def _shortage(self, living: Mapping[int, Report], *, has_source: bool) -> str:
        policy = self._policy
        if self._has_begun and not has_source:
            return (
                f"membership {self._epoch}: no process that has the state of the job has come within "
                f"{policy.deadline_s:g} s. If all of them have ended, start the job again from a checkpoint on disk"
            )
        wanted = policy.min_ranks if policy.on_loss == "shrink" and self._has_begun else policy.world_size
        missing = ", ".join(str(seat) for seat in policy.first_seats if seat not in living)
        return (
            f"membership {self._epoch} needs {wanted} ranks, and {len(living)} have come within {policy.deadline_s:g} "
            f"s. Missing: rank {missing or 'none'}. See why these processes do not start, or allow more restarts"
        )


@contextmanager
def reading(text: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of the JSON object that a value of the store is.

    Raises:
        ProtocolError: The value is no object, or the body raises ``KeyError``, ``TypeError`` or ``ValueError``. The
            message has ``kind``, the name of what is expected.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError(fields)
        yield fields
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the store holds {text[:100]!r} where a {kind} is expected") from error


def number_in(value: object) -> int:
    """Return a field of a value of the store that is a number; raise ``ValueError`` if it is none, or too large."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(value)
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value
