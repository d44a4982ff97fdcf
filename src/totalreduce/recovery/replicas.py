"""Copies of the state that a rank has for itself, on the ranks after it.

Parameters and the optimizer's state are equal on all ranks, so any rank can give them to a new one. Residuals, the
sparse sessions and the running statistics of a model's buffers are not: with the rank they would be lost. So every rank
sends them to the next ranks before each vote. A copy counts when the vote has passed: then it is what the rank goes on
with, and until then the copy of the version before counts. (Rabit keeps the local models of its ranks so, in a ring.)

Small buffers go to all ranks, by an allgather.

A buffer that a block changes after the vote, such as a moving average of the parameters, is *late*: its copy is as it
was before. No message can follow then, because each rank finishes the block by itself. So a new rank gets late buffers
from the rank that gives it the parameters, and they should be equal on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, unpack
from totalreduce.groups.group import Group
from totalreduce.recovery.buffers import BufferRow
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.state import State
from totalreduce.recovery.vote import Vote
from totalreduce.tensors.modes import outside_inference_mode
from totalreduce.tensors.work import Work

__all__ = ["Exchange", "OwnState", "Replicas", "gather_lengths", "send_row"]

_log = logging.getLogger(__name__)

#: The tag of the messages between ranks.
_TAG = 0x5EA7
#: The most bytes that the buffers of all ranks have to be sent to all ranks. Larger ones are sent to the next ranks.
_ROWS_BYTES_MAX = 128 * 1024
_OTHER_SHAPES = "the model's buffers have other shapes than when the job began: keep their shapes"


@final
class _BufferRows:
    """The buffers of all ranks, each as a row of bytes: an allgather that is prepared once."""

    @outside_inference_mode
    def __init__(self, layout: BufferRow, group: Group) -> None:
        """Make the rows. Nothing is sent."""
        self._layout = layout
        self._rows = torch.zeros(group.world_size, layout.num_bytes, dtype=torch.uint8, device="cpu")
        self._mine = torch.zeros(layout.num_bytes, dtype=torch.uint8, device="cpu")
        self._now = torch.zeros_like(self._mine)
        self._allgather = group.control.prepare_allgather(self._rows, self._mine, name="recovery/buffers")
        self._work: Work | None = None

    def start(self) -> None:
        """Send the buffers as they are now, unless they are on their way already. Collective, with ``finish``.

        Raises:
            ConfigurationError: The program has changed the shapes of buffers.
        """
        if self._work is not None:
            return  # optimizer.step() has run out of time, and is repeated
        if self._layout.copy(self._mine) is not self._mine:
            raise ConfigurationError(_OTHER_SHAPES)
        self._work = self._allgather.start()

    def finish(self) -> list[torch.Tensor]:
        """Return the rows of all ranks. They are not changed any more. Calls ``start`` if nobody has.

        Raises:
            DeadlineExceededError: The rows have not come in time. The call may be repeated.
        """
        self.start()
        assert self._work is not None
        self._work.wait()
        self._work = None
        return list(self._rows.clone())

    def changed(self) -> set[str]:
        """Return the names of the buffers that differ from the row of this rank that was sent last."""
        now = self._layout.copy(self._now)
        if torch.equal(now, self._mine):
            return set()
        if len(now) != len(self._mine):
            raise ConfigurationError(_OTHER_SHAPES)
        sent = self._layout.parts(self._mine)
        return {name for name, part in self._layout.parts(now).items() if not torch.equal(part, sent[name])}


def gather_lengths(group: Group, length: int) -> Work:
    """Begin to gather the lengths that the ranks pass; the result has them by rank, in int64. Collective."""
    lengths = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    lengths[group.rank] = length
    return group.control.allreduce(lengths, name="recovery/lengths")


def _empty_copy(length: int, source: int) -> torch.Tensor:
    if not 0 <= length <= PACKED_BYTES_MAX:
        raise ProtocolError(f"rank {source} announces a copy of {length} bytes; the limit is {PACKED_BYTES_MAX}")
    return torch.empty(length, dtype=torch.uint8, device="cpu")


def send_row(group: Group, row: torch.Tensor, to: int) -> None:
    """Send packed state to a rank, which calls ``Replicas.receive``."""
    group.control.send(torch.tensor([row.numel()], dtype=torch.int64, device="cpu"), dst=to, tag=_TAG).wait()
    group.control.send(row, dst=to, tag=_TAG).wait()


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
        """Send this rank's own state to the next ranks, and receive those of the ranks before. See ``begin``."""
        self.begin(group, decision, version, mine).finish()

    def begin(self, group: Group, decision: Decision, version: int, mine: torch.Tensor) -> Exchange:
        """Begin an exchange of the ranks' own states of a version. Collective.

        Args:
            group: The ranks.
            decision: The members of the epoch.
            version: The version that the state belongs to when the vote passes.
            mine: This rank's own state as a row of bytes. The lengths of the ranks may differ.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
        """
        self._next = {}
        return Exchange(self, group, decision, version, mine)

    def note(self, version: int, copies: Mapping[int, torch.Tensor]) -> None:
        """Note copies of a version, by seat. They count when ``commit`` is called."""
        self._next = {seat: (version, copy) for seat, copy in copies.items()}

    def commit(self) -> None:
        """Note that the vote has passed: the copies of the last exchange are those that count."""
        self._held, self._next = self._next or self._held, {}

    def undo(self) -> None:
        """Note that the block of the last exchange has not taken effect: its copies never count."""
        self._next = {}

    def seats(self, version: int) -> list[int]:
        """Return the seats of which this rank has a copy of a version."""
        return [seat for seat, (held, _) in self._held.items() if held == version]

    def send(self, group: Group, seat: int, to: int) -> None:
        """Send the copy of a seat's state to a rank, which calls ``receive``."""
        send_row(group, self._held[seat][1], to)

    def receive(self, group: Group, source: int) -> torch.Tensor:
        """Receive packed state that a rank sends."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        group.control.recv(length, src=source, tag=_TAG).wait()
        copy = _empty_copy(int(length), source)
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
class Exchange:
    """The messages of an exchange of copies: each rank's own state to the next ranks."""

    def __init__(self, replicas: Replicas, group: Group, decision: Decision, version: int, mine: torch.Tensor) -> None:
        """See ``Replicas.begin``."""
        self._replicas, self._group, self._decision = replicas, group, decision
        self._version, self._mine = version, mine
        self._lengths = gather_lengths(group, mine.numel())
        self._copies: dict[int, torch.Tensor] = {}
        self._works: list[Work] | None = None  #: The messages with states, when they have begun.

    def finish(self) -> None:
        """Note the copies of other ranks when they have come.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
            DeadlineExceededError: They have not come in time. The call may be repeated.
        """
        lengths = self._lengths.wait()
        if self._works is None:
            self._works = self._begin_messages(lengths)
        for work in self._works:
            work.wait()
        self._replicas.note(self._version, self._copies)

    def _begin_messages(self, lengths: torch.Tensor) -> list[Work]:
        control, rank, size = self._group.control, self._group.rank, self._group.world_size
        works = []
        for distance in range(1, min(self._replicas.num_copies, size - 1) + 1):
            to, source = (rank + distance) % size, (rank - distance) % size
            copy = _empty_copy(int(lengths[source]), source)
            works.append(control.recv(copy, src=source, tag=_TAG))
            works.append(control.send(self._mine, dst=to, tag=_TAG))
            self._copies[self._decision.members[source].seat] = copy
        return works


@final
class OwnState:
    """The state that this rank has for itself, through the epochs of a job, and its copies on other ranks.

    Attributes:
        num_copies: The number of ranks that have a copy.
        vote: The vote, before which copies are sent.
    """

    def __init__(self, state: State, optimizers: Optimizers, num_copies: int, vote: Vote | None = None) -> None:
        """``optimizers``: those of the state; ``vote``: ``None``: one of its own."""
        self._state, self._group, self._optimizers = state, optimizers.group, optimizers
        self.num_copies, self.vote = num_copies, vote or Vote(optimizers.group)
        self._replicas = Replicas(num_copies)
        self._world_size = self._group.world_size  #: Of the last epoch.
        #: By optimizer the states of the sparse sessions, at the present version and after the block.
        self._sessions: dict[str, list[dict[str, Any]]] = {}
        self._next_sessions: dict[str, list[dict[str, Any]]] = {}
        self._rows: _BufferRows | None = None  #: For small buffers.
        self._sends = False  #: Whether there is anything to send before a vote.
        self._sending: Exchange | None = None  #: The exchange that has not ended.
        #: Copies of the buffers in the last exchange of this epoch that had no rows; ``None`` if there was none.
        self._sent: dict[str, torch.Tensor] | None = None
        #: Whether the copies that count are rows of buffers. Another number of ranks may have another form of copies.
        self._holds_rows = False
        self._late: set[str] = set()  #: Buffers that blocks change after the vote.

    @property
    def _exists(self) -> bool:
        """Whether ranks have residuals or buffers, which differ from rank to rank. Equal on all ranks."""
        return self._optimizers.compresses or next(self._state.model.buffers(), None) is not None

    def send(self, decision: Decision) -> None:
        """Send the state, as it is after this block, to other ranks, and have theirs. Collective, before the vote.

        Nothing is sent if the vote of this block has begun.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
            DeadlineExceededError: The copies have not come in time. The call may be repeated.
        """
        if self._sends and not self.vote.is_in_flight:
            self._next_sessions = self._send(decision, self._state.version + 1)

    def commit(self) -> None:
        """Note that a block has taken effect, whose vote has passed."""
        self._commit_copies()
        self._sessions = self._next_sessions
        self._late |= self._changed_since_sent()

    def copy(self, decision: Decision) -> None:
        """Have other ranks copy this rank's own state of the present version, outside of a block. Collective."""
        if self._exists and self._state.version > 0:
            self._sessions = self._send(decision, self._state.version)
            self._commit_copies()

    def _commit_copies(self) -> None:
        self._replicas.commit()
        self._holds_rows = self._rows is not None

    def _changed_since_sent(self) -> set[str]:
        """Return the names of the buffers that the program has changed since they were sent."""
        if self._rows is not None:
            return self._rows.changed()
        sent = self._sent
        if sent is None:
            return set()
        now = dict(self._state.named_buffers())
        names = sent.keys() | self._state.own_buffers().keys()
        return {name for name in names if name not in sent or not torch.equal(now[name], sent[name])}

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
        self._load_buffers(own["buffers"])
        self._load_residuals(own)
        self._sessions = _sessions_of(own["optimizers"])

    def _load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set buffers to those that another process had. Late ones are those of the rank that gave the parameters."""
        self._state.load_own_buffers({name: each for name, each in buffers.items() if name not in self._late})

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
        self.vote.prepare()
        layout = self._state.buffer_row()
        self._rows = _BufferRows(layout, self._group) if self._has_small_buffers(layout) else None
        self._sends, self._sending, self._sent = self._exists, None, None
        self._replicas.undo()
        if not self._exists or decision.version == 0:
            return
        held = self._replicas.seats(decision.version) if has_state else []
        said = self._group.allgather_object(
            {
                "held": held,
                "are rows": self._holds_rows,
                "late": self._digests_of_late() if has_state else {},
                "sessions": has_state and same_size and self._knows_sessions(),
            }
        )
        self._late = {name for words in said for name in words["late"]}
        holders: dict[int, int] = {}
        for holder, words in enumerate(said):
            for seat in words["held"]:
                holders.setdefault(seat, holder)
        seats = [member.seat for member in decision.members]
        for newcomer in decision.newcomers:
            source = holders.get(seats[newcomer])
            if source is None:
                _log.warning("nobody has the residuals and buffers of rank %d: they begin anew", newcomer)
            else:
                self._hand_over(seats[newcomer], source, newcomer, are_rows=said[source]["are rows"])
        if decision.newcomers and self._group.rank == 0:
            self._warn_of_late([words["late"] for words in said], decision.source)
        for seat in held:
            if seat not in seats:
                if holders[seat] == self._group.rank and self._optimizers.compresses and not self._holds_rows:
                    self._load_residuals(unpack(self._replicas.take(seat)), adds=True)
                self._replicas.forget(seat)
        if self._are_known(said, decision.newcomers, seats, holders):
            self._load_sessions()
        # Ranks that were lost had copies, too: without new ones, the next loss could be of a rank without a copy.
        self.copy(decision)

    def _hand_over(self, seat: int, source: int, newcomer: int, *, are_rows: bool) -> None:
        """Give the copy of a seat's state that rank ``source`` has to the rank that now has the seat."""
        if self._group.rank == source:
            self._replicas.send(self._group, seat, newcomer)
        elif self._group.rank == newcomer:
            copy = self._replicas.receive(self._group, source)
            if are_rows:
                self._load_buffers(self._state.buffer_row().read(copy))
            else:
                self._load(unpack(copy))

    def _digests_of_late(self) -> dict[str, str]:
        if not self._late:
            return {}
        layout = self._state.buffer_row()
        parts = layout.parts(layout.copy())
        return {name: hashlib.sha256(parts[name].numpy().data).hexdigest() for name in sorted(self._late)}

    def _warn_of_late(self, digests: Sequence[Mapping[str, str]], source: int) -> None:
        for name in sorted(self._late):
            if len({each[name] for each in digests if name in each}) > 1:
                _log.warning(
                    "the buffer %s differs between ranks, and blocks change it after optimizer.step(): new ranks get "
                    "that of rank %d, and not that of the rank which they replace. Change it before optimizer.step()",
                    name,
                    source,
                )

    def _knows_sessions(self) -> bool:
        """Whether this rank has noted the states of the sparse sessions of every optimizer."""
        compressions = self._optimizers.compressions
        return all(name in self._sessions for name, each in compressions.items() if each.reducer is not None)

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
            if self._sending is None:
                buffers = self._state.own_buffers()
                self._sent = {name: each.clone() for name, each in buffers.items()}
                own = pack({"optimizers": pending, "buffers": buffers})
                self._sending = self._replicas.begin(self._group, decision, version, own)
            self._sending.finish()
            self._sending = None
        return _sessions_of(pending)


def _sessions_of(pending: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: each.get("sessions", []) for name, each in pending.items()}
