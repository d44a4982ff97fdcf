"""Copies of the state that a rank has for itself, on the ranks after it.

Parameters and the optimizer's state are equal on all ranks, so any rank can give them to a new one. Residuals, the
sparse sessions and the running statistics of a model's buffers are not: with the rank they would be lost. So every rank
sends them to the next ranks before each vote. A copy counts when the vote has passed: then it is what the rank goes on
with, and until then the copy of the version before counts. (Rabit keeps the local models of its ranks so, in a ring.)

Small buffers go to all ranks, by an allgather that overlaps with the exchange of gradients: they change no more after
the forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.encoding import pack, unpack
from totalreduce.groups.group import Group
from totalreduce.recovery.buffers import BufferRow
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.state import State
from totalreduce.tensors.work import Work

__all__ = ["OwnState", "Replicas", "gather_lengths"]

_log = logging.getLogger("totalreduce")

#: The tag of the messages between ranks.
_TAG = 0x5EA7
#: The most bytes that the buffers of all ranks have to be sent to all ranks. Larger ones are sent to the next ranks.
_ROWS_BYTES_MAX = 128 * 1024


@final
class _BufferRows:
    """The buffers of all ranks, each as a row of bytes: an allgather that is prepared once."""

    def __init__(self, layout: BufferRow, group: Group) -> None:
        """Make the rows. Nothing is sent."""
        self._layout = layout
        self._rows = torch.zeros(group.world_size, layout.num_bytes, dtype=torch.uint8)
        self._mine = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self._allgather = group.control.prepare_allgather(self._rows, self._mine, name="recovery/buffers")
        self._work: Work | None = None

    def start(self) -> None:
        """Send the buffers as they are now. Collective.

        Raises:
            ConfigurationError: The program has changed the shapes of buffers.
        """
        if self._work is not None:
            self._work.wait()
        if self._layout.copy(self._mine) is not self._mine:
            raise ConfigurationError("the model's buffers have other shapes than when the job began: keep their shapes")
        self._work = self._allgather.start()

    def finish(self) -> list[torch.Tensor]:
        """Return the rows of all ranks. They are not changed any more. Calls ``start`` if nobody has."""
        if self._work is None:
            self.start()
        assert self._work is not None
        self._work.wait()
        self._work = None
        return list(self._rows.clone())

    def read(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers in a row. They share its memory."""
        return self._layout.read(row)


def gather_lengths(group: Group, length: int) -> torch.Tensor:
    """Return the lengths that the ranks pass, by rank: an int64 tensor. Collective."""
    lengths = torch.zeros(group.world_size, dtype=torch.int64)
    lengths[group.rank] = length
    return group.control.allreduce(lengths, name="recovery/lengths").wait()


@final
class Replicas:
    """The copies that this rank has of other ranks, and the exchange of copies.

    Attributes:
        num_copies: The number of ranks that have a copy of each rank.
    """

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies
        #: By seat: the version, and the packed state.
        self._held: dict[int, tuple[int, torch.Tensor]] = {}
        self._next: dict[int, tuple[int, torch.Tensor]] = {}

    def exchange(self, group: Group, decision: Decision, version: int, mine: torch.Tensor) -> None:
        """Send this rank's own state of a version to the next ranks, and receive those of the ranks before. Collective.

        Args:
            group: The ranks.
            decision: The members of the epoch.
            version: The version that the state belongs to when the vote passes.
            mine: The state as a row of bytes. The lengths of the ranks may differ.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
        """
        self._next = {}
        copies = {}
        control, size = group.control, group.world_size
        lengths = gather_lengths(group, mine.numel())
        for distance in range(1, min(self.num_copies, size - 1) + 1):
            to, source = (group.rank + distance) % size, (group.rank - distance) % size
            copy = torch.empty(int(lengths[source]), dtype=torch.uint8)
            arrival = control.recv(copy, src=source, tag=_TAG)
            departure = control.send(mine, dst=to, tag=_TAG)
            arrival.wait()
            departure.wait()
            copies[decision.members[source].seat] = copy
        self.note(version, copies)

    def note(self, version: int, copies: Mapping[int, torch.Tensor]) -> None:
        """Note copies of a version, by seat. They count when ``commit`` is called."""
        self._next = {seat: (version, copy) for seat, copy in copies.items()}

    def commit(self) -> None:
        """Note that the vote has passed: the copies of the last exchange are those that count."""
        self._held, self._next = self._next or self._held, {}

    def seats(self, version: int) -> list[int]:
        """Return the seats of which this rank has a copy of a version."""
        return [seat for seat, (held, _) in self._held.items() if held == version]

    def send(self, group: Group, seat: int, to: int) -> None:
        """Send the copy of a seat's state to a rank, which calls ``receive``."""
        _, copy = self._held[seat]
        group.control.send(torch.tensor([copy.numel()]), dst=to, tag=_TAG).wait()
        group.control.send(copy, dst=to, tag=_TAG).wait()

    def receive(self, group: Group, source: int) -> torch.Tensor:
        """Receive the copy that a rank sends."""
        length = torch.zeros(1, dtype=torch.int64)
        group.control.recv(length, src=source, tag=_TAG).wait()
        copy = torch.empty(int(length), dtype=torch.uint8)
        group.control.recv(copy, src=source, tag=_TAG).wait()
        return copy

    def copy_of(self, seat: int) -> torch.Tensor:
        """Return the copy of the state of a seat that this rank has."""
        return self._held[seat][1]

    def take(self, seat: int) -> torch.Tensor:
        """Return the copy of the state of a seat that nobody has any more, and forget it."""
        return self._held.pop(seat)[1]

    def forget(self, seat: int) -> None:
        """Forget the copy of a seat's state, if this rank has one."""
        self._held.pop(seat, None)


@final
class OwnState:
    """The state that this rank has for itself, through the epochs of a job, its copies on other ranks, and the vote.

    Attributes:
        num_copies: The number of ranks that have a copy.
    """

    def __init__(self, state: State, optimizers: Optimizers, num_copies: int) -> None:
        """``optimizers``: those of the state."""
        self._state, self._group, self._optimizers = state, optimizers.group, optimizers
        self.num_copies = num_copies
        self._replicas = Replicas(num_copies)
        self._world_size = self._group.world_size  #: Of the last epoch.
        #: By optimizer the states of the sparse sessions, at the present version and after the block.
        self._sessions: dict[str, list[dict[str, Any]]] = {}
        self._next_sessions: dict[str, list[dict[str, Any]]] = {}
        self._rows: _BufferRows | None = None  #: For small buffers.
        self._sends = False  #: Whether there is anything to send before a vote.
        #: What ranks vote with (``begin_vote``), and the total with its sign changed, so that MAX finds the smallest
        #: one. An element of a tensor takes 20 times as long to set.
        self._ballot = np.zeros(3, np.int64)
        self._num_samples = 0  #: What this rank has voted with.
        self._voting: Work | PeerLost | None = None  #: The vote in flight, or why it could not begin.

    @property
    def _exists(self) -> bool:
        """Whether ranks have residuals or buffers, which differ from rank to rank. Equal on all ranks."""
        return self._optimizers.compresses or next(self._state.model.buffers(), None) is not None

    def begin(self) -> None:
        """Send what may be sent while gradients are exchanged. Collective, before ``send``; may be left out."""
        if self._rows is not None:
            self._rows.start()

    def send(self, decision: Decision) -> None:
        """Send the state, as it is after this block, to other ranks, and have theirs. Collective, before the vote.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
        """
        if self._sends:
            self._next_sessions = self._send(decision, self._state.version + 1)

    def prepare_vote(self) -> None:
        """Prepare the votes of a new group; ``restore`` does it."""
        ballot = torch.from_numpy(self._ballot)
        self._vote = self._group.control.prepare_allreduce(ballot, name="recovery/vote", op=ReduceOp.MAX)
        self._voting = None

    def begin_vote(self, ballot: int, num_samples: int) -> None:
        """Give this rank's ballot, unless the vote of this block has begun. Collective, with ``end_vote``.

        Args:
            ballot: What this rank votes with.
            num_samples: The number of samples of all ranks in the step.
        """
        if self._voting is None:
            self._ballot[:] = ballot, num_samples, -num_samples
            self._num_samples = num_samples
            try:
                self._voting = self._vote.start()
            except PeerLost as error:
                self._voting = error

    def end_vote(self) -> int:
        """Return the largest ballot of all ranks, when all have come to the vote.

        Raises:
            ConfigurationError: The ranks disagree about the number of samples. On every rank.
            PeerLost: A rank is lost, and others may have the result.
            DeadlineExceededError: A rank has not come to the vote in time. The call may be repeated.
        """
        assert self._voting is not None, "begin_vote comes first"
        if isinstance(self._voting, PeerLost):
            raise self._voting
        self._voting.wait()
        self._voting = None
        largest, most, fewest = self._ballot.tolist()
        if most != -fewest:
            raise ConfigurationError(
                f"a step has {-fewest} samples on some rank and {most} on another one; on rank {self._group.rank} it "
                f"has {self._num_samples}: the data set must be the same on all ranks"
            )
        return int(largest)

    def commit(self) -> None:
        """Note that the vote has passed."""
        self._replicas.commit()
        self._sessions = self._next_sessions

    def current(self) -> dict[str, Any] | None:
        """Return this rank's own state as it is between two blocks; ``None`` if no rank has any."""
        return {"optimizers": self._pending(), "buffers": self._state.own_buffers()} if self._exists else None

    def load(self, own: Mapping[str, Any]) -> None:
        """Begin with what ``current`` has returned in a process of the same rank. On all ranks."""
        self._load(own)
        self._load_sessions()

    def _pending(self) -> dict[str, dict[str, Any]]:
        """Return the residuals and sessions of all optimizers as they will be after this block; not copied."""
        return {name: each.pending() for name, each in self._optimizers.compressions.items()}

    def _load(self, own: Mapping[str, Any]) -> None:
        """Begin with the buffers and residuals that another process had, and note its sessions."""
        self._state.load_own_buffers(own["buffers"])
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

        Args:
            decision: The members of the epoch.
            has_state: Whether this rank had the state of the job.
        """
        same_size, self._world_size = self._world_size == self._group.world_size, self._group.world_size
        self.prepare_vote()
        layout = self._state.buffer_row()
        self._rows = _BufferRows(layout, self._group) if self._has_small_buffers(layout) else None
        self._sends = self._exists
        if not self._exists or decision.version == 0:
            return
        held = self._replicas.seats(decision.version) if has_state else []
        said = self._group.allgather_object({"held": held, "sessions": has_state and same_size})
        holders: dict[int, int] = {}
        for holder, words in enumerate(said):
            for seat in words["held"]:
                holders.setdefault(seat, holder)
        seats = [member.seat for member in decision.members]
        for newcomer in decision.newcomers:
            self._hand_over(seats[newcomer], holders.get(seats[newcomer]), newcomer)
        for seat in held:
            if seat not in seats:
                if holders[seat] == self._group.rank and self._optimizers.compresses:
                    self._load_residuals(unpack(self._replicas.take(seat)), adds=True)
                self._replicas.forget(seat)
        if self._are_known(said, decision.newcomers, seats, holders):
            self._load_sessions()
        # Ranks that were lost had copies, too: without new ones, the next loss could be of a rank without a copy.
        self._sessions = self._send(decision, decision.version)
        self._replicas.commit()

    def _hand_over(self, seat: int, source: int | None, newcomer: int) -> None:
        """Give the copy of a seat's state that rank ``source`` has to the rank that now has the seat."""
        rank = self._group.rank
        if source is None:
            _log.warning("nobody has the residuals and buffers of rank %d: they begin anew", newcomer)
        elif rank == source:
            self._replicas.send(self._group, seat, newcomer)
        elif rank == newcomer:
            copy = self._replicas.receive(self._group, source)
            if self._rows is not None:
                self._state.load_own_buffers(self._rows.read(copy))
                return
            self._load(unpack(copy))

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

    def _has_small_buffers(self, layout: BufferRow) -> bool:
        """Whether the ranks have buffers, which may go to all ranks, and nothing else. Equal on all ranks."""
        size = self._group.world_size
        needed = size > 1 and self.num_copies > 0 and not self._optimizers.compresses
        return needed and 0 < size * layout.num_bytes <= _ROWS_BYTES_MAX

    def _send(self, decision: Decision, version: int) -> dict[str, list[dict[str, Any]]]:
        """Send the state as that of a version; return the states of the sparse sessions, by optimizer."""
        if self._rows is not None:
            rows = enumerate(self._rows.finish())
            others = {decision.members[rank].seat: row for rank, row in rows if rank != self._group.rank}
            self._replicas.note(version, others)
            return {}
        pending = self._pending()
        if self.num_copies and self._group.world_size > 1:
            own = {"optimizers": pending, "buffers": self._state.own_buffers()}
            self._replicas.exchange(self._group, decision, version, pack(own))
        return _sessions_of(pending)


def _sessions_of(pending: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: each.get("sessions", []) for name, each in pending.items()}
