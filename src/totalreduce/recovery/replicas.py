"""Copies of the state that a rank has for itself, on the ranks after it.

Parameters and the optimizer's state are equal on all ranks, so any rank can give them to a new one. Residuals, the
sparse sessions and the running statistics of a model's buffers are not: with the rank they would be lost. So every rank
sends them to the next ranks before each vote. A copy counts when the vote has passed: then it is what the rank goes on
with, and until then the copy of the version before counts. (Rabit keeps the local models of its ranks so, in a ring.)

The form of the copies of buffers is chosen in ``buffer_copies``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from totalreduce.foundation.errors import ProtocolError
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, unpack
from totalreduce.groups.group import Group
from totalreduce.recovery.buffer_copies import BufferCopies, Form
from totalreduce.recovery.buffers import RowLayout
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.state import State
from totalreduce.recovery.vote import Vote
from totalreduce.tensors.work import Work

__all__ = ["OwnState", "Replicas", "first_holders", "gather_lengths", "hand_over"]

_log = logging.getLogger(__name__)

#: The tag of the messages between ranks.
_TAG = 0x5EA7


def gather_lengths(group: Group, length: int) -> Work:
    """Begin to gather the lengths that the ranks pass; the result has them by rank, in int64. Collective."""
    lengths = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    lengths[group.rank] = length
    return group.control.allreduce(lengths, name="recovery/lengths")


def _empty_copy(length: int, source: int) -> torch.Tensor:
    if not 0 <= length <= PACKED_BYTES_MAX:
        raise ProtocolError(f"rank {source} announces a copy of {length} bytes; the limit is {PACKED_BYTES_MAX}")
    return torch.empty(length, dtype=torch.uint8, device="cpu")


def hand_over(group: Group, source: int, to: int, row: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Give packed state of rank ``source``, which ``row`` returns there, to another rank; return it on that one.

    Only these two ranks need to call it. It returns ``None`` on all others.
    """
    control = group.control
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    if group.rank == source:
        sent = row()
        control.send(length.fill_(sent.numel()), dst=to, tag=_TAG).wait()
        control.send(sent, dst=to, tag=_TAG).wait()
    if group.rank != to:
        return None
    control.recv(length, src=source, tag=_TAG).wait()
    received = _empty_copy(int(length), source)
    control.recv(received, src=source, tag=_TAG).wait()
    return received


def first_holders(held: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return the first rank that has a copy of each seat's state."""
    holders: dict[int, int] = {}
    for rank, seats in enumerate(held):
        for seat in seats:
            holders.setdefault(seat, rank)
    return holders


@final
class Replicas:
    """The copies that this rank has of other ranks, and the exchange of copies."""

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies  #: The number of ranks that have a copy of each rank.
        #: By seat: the version, and the packed state.
        self._held: dict[int, tuple[int, torch.Tensor]] = {}
        self._next: dict[int, tuple[int, torch.Tensor]] = {}
        self._under_way: _Exchange | None = None  #: The exchange that has not ended.

    def are_sent(self, group: Group) -> bool:
        """Whether the ranks of a group send copies to each other."""
        return self.num_copies > 0 and group.world_size > 1

    def exchange(self, group: Group, decision: Decision, version: int, mine: Callable[[], torch.Tensor]) -> None:
        """Send this rank's own state to the next ranks, and receive those of the ranks before, if copies are sent.

        Collective. The copies count when ``commit`` is called.

        Args:
            group: The ranks.
            decision: The members of the epoch.
            version: The version that the state belongs to when the vote passes.
            mine: Returns this rank's own state as a row of bytes. The lengths of the ranks may differ.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
            DeadlineExceededError: The copies have not come in time. The call may be repeated, and then goes on with the
                state that it has begun to send.
        """
        if not self.are_sent(group):
            return
        if self._under_way is None:
            self._next = {}
            self._under_way = _Exchange(group, self.num_copies, mine())
        copies = self._under_way.finish()
        self._under_way = None
        self.note(version, {decision.members[rank].seat: copy for rank, copy in copies.items()})

    def note(self, version: int, copies: Mapping[int, torch.Tensor]) -> None:
        """Note copies of a version, by seat. They count when ``commit`` is called."""
        self._next = {seat: (version, copy) for seat, copy in copies.items()}

    def commit(self) -> None:
        """Note that the vote has passed: the copies of the last exchange are those that count."""
        self._held, self._next = self._next or self._held, {}

    def carry_over(self, version: int) -> None:
        """Have the copies that count be those of a version, too: what is copied has not changed since."""
        self._held = {seat: (version, copy) for seat, (_, copy) in self._held.items()}

    def undo(self) -> None:
        """Note that the block of the last exchange has not taken effect, or its group has ended: no copy counts."""
        self._next, self._under_way = {}, None

    def seats(self, version: int) -> list[int]:
        """Return the seats of which this rank has a copy of a version."""
        return [seat for seat, (held, _) in self._held.items() if held == version]

    def copy_of(self, seat: int) -> torch.Tensor:
        """Return the copy of the state of a seat that this rank has."""
        return self._held[seat][1]

    def take_orphans(self, held: Iterable[int], seats: Collection[int], mine: Collection[int]) -> list[torch.Tensor]:
        """Forget the copies of seats that no rank has any more; return those that this rank goes on with.

        Args:
            held: The seats of which this rank has a copy.
            seats: The seats of the ranks.
            mine: The seats of which this rank is the first one that has a copy.
        """
        orphans = {seat: self._held.pop(seat)[1] for seat in held if seat not in seats}
        return [copy for seat, copy in orphans.items() if seat in mine]


@final
class _Exchange:
    """The messages of an exchange of copies: each rank's own state to the next ranks."""

    def __init__(self, group: Group, num_copies: int, mine: torch.Tensor) -> None:
        self._group, self._num_copies, self._mine = group, num_copies, mine
        self._lengths = gather_lengths(group, mine.numel())
        self._copies: dict[int, torch.Tensor] = {}
        self._works: list[Work] | None = None  #: The messages with states, when they have begun.

    def finish(self) -> dict[int, torch.Tensor]:
        """Return the copies of other ranks, by rank, when they have come. The call may be repeated after a time-out."""
        lengths = self._lengths.wait()
        if self._works is None:
            self._works = self._begin_messages(lengths)
        for work in self._works:
            work.wait()
        return self._copies

    def _begin_messages(self, lengths: torch.Tensor) -> list[Work]:
        control, rank, size = self._group.control, self._group.rank, self._group.world_size
        works = []
        for distance in range(1, min(self._num_copies, size - 1) + 1):
            to, source = (rank + distance) % size, (rank - distance) % size
            copy = self._copies[source] = _empty_copy(int(lengths[source]), source)
            works.append(control.recv(copy, src=source, tag=_TAG))
            works.append(control.send(self._mine, dst=to, tag=_TAG))
        return works


@final
class OwnState:
    """The state that this rank has for itself, through the epochs of a job, and its copies on other ranks."""

    def __init__(self, state: State, optimizers: Optimizers, num_copies: int, vote: Vote | None = None) -> None:
        """``optimizers``: those of the state; ``vote``: ``None``: one of its own."""
        self._state, self._group, self._optimizers = state, optimizers.group, optimizers
        self.num_copies = num_copies  #: The number of ranks that have a copy.
        self.vote = vote or Vote(optimizers.group)  #: The vote, before which copies are sent.
        self._replicas = Replicas(num_copies)
        self._world_size = self._group.world_size  #: Of the last epoch.
        #: By optimizer the states of the sparse sessions, at the present version and after the block.
        self._sessions: dict[str, dict[str, Any]] = {}
        self._next_sessions: dict[str, dict[str, Any]] = {}
        self._buffers = BufferCopies(state)
        #: The layout of the copies that count, and of those of the last exchange, if they are rows of buffers.
        self._held_layout: RowLayout | None = None
        self._next_layout: RowLayout | None = None

    def send(self, decision: Decision) -> None:
        """Send the state, as it is after this block, to other ranks, and have theirs. Collective, before the vote.

        Nothing is sent if the vote of this block has begun.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
            DeadlineExceededError: The copies have not come in time. The call may be repeated.
            UnsupportedError: A buffer cannot be copied byte by byte.
        """
        if not self.vote.is_in_flight:
            self._next_sessions = self._send(decision, self._state.version + 1)
            self.vote.layout = self._buffers.digest()

    def end_vote(self, decision: Decision) -> int:
        """Return the largest ballot of all ranks, when all have come to the vote and have all copies.

        If the buffers of a rank have another layout than the rows, all ranks send all buffers, and vote again.

        Raises:
            ConfigurationError, PeerLost, DeadlineExceededError: As ``Vote.end``.
        """
        vote = self.vote
        if not vote.is_second:
            ballot = vote.end()
            if self._buffers.form is Form.PACKED or self._buffers.fits(vote.layouts):
                return ballot
            vote.announce_second()
        if not vote.has_begun:
            self._next_sessions = self._send_packed(decision, self._state.version + 1)
            vote.begin_second()
        return vote.end()

    def commit(self) -> None:
        """Note that a block has taken effect, whose vote has passed."""
        self._commit_copies()
        self._sessions = self._next_sessions
        self._buffers.note_late()
        if not self._buffers.fits(self.vote.layouts):
            self._plan(self.vote.layouts)

    def agree(self) -> None:
        """Have all ranks choose one form of the copies, outside of a block. Collective."""
        digests = self._group.control.allgather_object(self._buffers.digest(looks=True))
        self._plan(digests[0] if len(set(digests)) == 1 else None)

    def _plan(self, layouts: int | None) -> None:
        are_sent = self._replicas.are_sent(self._group)
        self._buffers.plan(layouts, self._group, are_sent=are_sent, have_residuals=self._optimizers.compresses)
        self.vote.layouts = layouts

    def copy(self, decision: Decision) -> None:
        """Have other ranks copy this rank's own state of the present version, outside of a block. Collective."""
        self.agree()
        if self._state.version > 0:
            self._sessions = self._send(decision, self._state.version)
            self._commit_copies()

    def _commit_copies(self) -> None:
        self._replicas.commit()
        self._held_layout = self._next_layout

    def current(self) -> dict[str, Any] | None:
        """Return this rank's own state as it is between two blocks; ``None`` if no rank has any. See ``agree``."""
        if self._buffers.form is Form.NOTHING:
            return None
        return {"optimizers": self._pending(), "buffers": self._state.own_buffers()}

    def load(self, own: Mapping[str, Any]) -> None:
        """Begin with what ``current`` has returned in a process of the same rank. On all ranks."""
        self._load(own)
        self._load_sessions()

    def _pending(self) -> dict[str, dict[str, Any]]:
        """Return the residuals and sessions of all optimizers as they will be after this block; not copied."""
        return {name: each.pending() for name, each in self._optimizers.compressions.items()}

    def _load(self, own: Mapping[str, Any]) -> None:
        """Begin with the buffers and residuals that another process had, and note its sessions."""
        self._buffers.load(own["buffers"])
        self._load_residuals(own)
        self._sessions = _sessions_of(own["optimizers"])

    def _load_residuals(self, own: Mapping[str, Any], *, adds: bool = False) -> None:
        for name, each in self._optimizers.compressions.items():
            if each.reducer is not None:
                each.load_pending(own["optimizers"][name], adds=adds)

    def _load_sessions(self) -> None:
        for name, each in self._optimizers.compressions.items():
            if each.reducer is not None:
                each.load_sessions(self._sessions[name])

    def restore(self, decision: Decision, *, has_state: bool) -> None:
        """Give new ranks the state of the ranks that they replace, from the copies. Collective, in a new epoch.

        A rank that has a copy of a rank that nobody replaces adds the residuals to its own, so that nothing is lost of
        what was accumulated.
        """
        same_size, self._world_size = self._world_size == self._group.world_size, self._group.world_size
        self.vote.prepare()
        self._replicas.undo()
        if decision.version == 0:
            self.agree()
            return
        held = self._replicas.seats(decision.version) if has_state else []
        said = self._group.allgather_object(
            {
                "held": held,
                "had own": has_state and self._buffers.form is not Form.NOTHING,
                "late": self._buffers.digests_of_late() if has_state else {},
                "sessions": has_state and same_size and self._knows_sessions(),
            }
        )
        self._buffers.late = {name for words in said for name in words["late"]}
        if any(words["had own"] for words in said):
            self._share_own(decision, held, said)
        # Ranks that were lost had copies, too: without new ones, the next loss could be of a rank without a copy.
        self.copy(decision)

    def _share_own(self, decision: Decision, held: Sequence[int], said: Sequence[Mapping[str, Any]]) -> None:
        """Give new ranks what lost ranks had for themselves, and add what nobody goes on with to this rank's own."""
        holders = first_holders(words["held"] for words in said)
        seats = [member.seat for member in decision.members]
        for newcomer in decision.newcomers:
            source = holders.get(seats[newcomer])
            if source is None:
                _log.warning(
                    "nobody has the residuals and buffers of rank %d: its residuals begin at zero, and its buffers are "
                    "those of rank %d",
                    newcomer,
                    decision.source,
                )
            else:
                self._hand_over(seats[newcomer], source, newcomer)
        if decision.newcomers and self._group.rank == 0:
            self._warn_of_late([words["late"] for words in said], decision.source)
        mine = [seat for seat, holder in holders.items() if holder == self._group.rank]
        orphans = self._replicas.take_orphans(held, seats, mine)
        if self._optimizers.compresses and self._held_layout is None:
            for orphan in orphans:
                self._load_residuals(unpack(orphan), adds=True)
        if self._are_known(said, decision.newcomers, seats, holders):
            self._load_sessions()

    def _hand_over(self, seat: int, source: int, newcomer: int) -> None:
        """Give the copy of a seat's state that rank ``source`` has to the rank that now has the seat."""
        received = hand_over(self._group, source, newcomer, lambda: self._packed_copy_of(seat))
        if received is not None:
            self._load(unpack(received))

    def _packed_copy_of(self, seat: int) -> torch.Tensor:
        copy = self._replicas.copy_of(seat)
        if self._held_layout is None:
            return copy
        return pack({"optimizers": {}, "buffers": self._held_layout.read(copy)})

    def _warn_of_late(self, digests: Sequence[Mapping[str, str]], source: int) -> None:
        for name in sorted(self._buffers.late):
            if len({each[name] for each in digests if name in each}) > 1:
                _log.warning(
                    "the buffer %s differs between ranks, and blocks change it after optimizer.step(): new ranks get "
                    "that of rank %d, and not that of the rank which they replace. Change it before optimizer.step()",
                    name,
                    source,
                )

    def _knows_sessions(self) -> bool:
        """Whether this rank has noted the states of the sparse sessions of every optimizer, in its present plan."""
        compressions = self._optimizers.compressions
        return all(
            each.has_buckets_of(self._sessions.get(name, {}))
            for name, each in compressions.items()
            if each.reducer is not None
        )

    def _are_known(
        self,
        said: Sequence[Mapping[str, Any]],
        newcomers: Sequence[int],
        seats: Sequence[int],
        holders: Mapping[int, int],
    ) -> bool:
        """Whether all ranks know the states of their sparse sessions: otherwise all begin anew."""
        return self._optimizers.compresses and all(
            seats[rank] in holders if rank in newcomers else words["sessions"] for rank, words in enumerate(said)
        )

    def _send(self, decision: Decision, version: int) -> dict[str, dict[str, Any]]:
        """Send the state as that of a version; return the states of the sparse sessions, by optimizer."""
        form = self._buffers.form
        if form is Form.NOTHING:
            return {}
        if form is Form.PACKED:
            return self._send_packed(decision, version)
        rows = enumerate(self._buffers.finish_rows())
        others = {decision.members[rank].seat: row for rank, row in rows if rank != self._group.rank}
        self._replicas.note(version, others)
        self._next_layout = self._buffers.row_layout
        return {}

    def _send_packed(self, decision: Decision, version: int) -> dict[str, dict[str, Any]]:
        """Do what ``_send`` does, by messages to the next ranks."""
        pending = self._pending()
        self._replicas.exchange(
            *(self._group, decision, version),
            lambda: pack({"optimizers": pending, "buffers": self._buffers.packed()}),
        )
        self._next_layout = None
        return _sessions_of(pending)


def _sessions_of(pending: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by optimizer what ``Compression.load_sessions`` needs."""
    return {name: {key: each[key] for key in ("buckets", "sessions") if key in each} for name, each in pending.items()}
