"""``RankStates``: recovery of a strategy, by which ranks have different parameters between two exchanges.

Between two exchanges ranks take steps by themselves: blocks without a vote. After a block with a vote (a step that ends
with an exchange, or one of ``job.once``; for synchronous steps see below) every rank is at a *point*: other ranks have
a copy of its whole state. All
blocks from the last point on depend on this state, on the samples and on the seeds alone. So the process that replaces
a lost rank begins at the last point and repeats these blocks by itself, until it has come to the version of the others,
which wait for it in the next exchange. No other rank goes back.

What is equal on all ranks at a point and changes after its vote (values, schedulers, the position in the data) comes
from the rank that has the copy.

If a strategy begins with synchronous steps, the ranks have equal parameters until the vote of the first step behind
them, which makes the first point. Until then ``OwnState`` keeps what a rank has for itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, final

import torch

from totalreduce.groups.encoding import pack, unpack
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.replicas import OwnState, Replicas, first_holders, hand_over
from totalreduce.recovery.state import State
from totalreduce.recovery.vote import Vote

__all__ = ["RankStates"]

_log = logging.getLogger(__name__)


@final
class RankStates:
    """The states of ranks at the last point, and their copies on other ranks. Has the methods of ``OwnState``."""

    def __init__(self, state: State, optimizers: Optimizers, num_copies: int) -> None:
        """``optimizers``: those of the state, of which one has a strategy."""
        self._state, self._group, self._optimizers = state, optimizers.group, optimizers
        self.num_copies = num_copies  #: The number of ranks that have a copy; with 0 there are no points.
        self.vote = Vote(optimizers.group)  #: The vote, before which copies are sent.
        self._replicas = Replicas(num_copies)
        self._seats: list[int] = []  #: Of the members, by rank.
        #: This rank's packed state at the last point and after the block, and what all ranks have in common there.
        self._row = self._next_row = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._point: dict[str, Any] = {"version": -1}
        self._seats_at_point: list[int] = []
        #: Keeps the state while the ranks have equal parameters: no point has been made behind the synchronous steps.
        self._equal: OwnState | None = None
        #: Keeps the state in the present block, if its step is synchronous; otherwise the block's vote makes a point.
        self._keeper: OwnState | None = None

    def send(self, decision: Decision) -> None:
        """Send the state, as it is after this block, to other ranks, and have theirs. Collective, before the vote.

        Nothing is sent if the vote of this block has begun.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last point.
            DeadlineExceededError: The copies have not come in time. The call may be repeated.
            ConfigurationError: The state has more bytes than can be sent.
        """
        self._keeper = self._equal if self._optimizers.are_synchronous else None
        if self._keeper is not None:
            self._keeper.send(decision)
        elif self._sends and not self.vote.is_in_flight:
            self._replicas.exchange(self._group, decision, self._state.version + 1, self._pack_next)

    def end_vote(self, decision: Decision) -> int:
        """Return the largest ballot of all ranks. Raises what ``OwnState.end_vote`` does."""
        return self.vote.end() if self._keeper is None else self._keeper.end_vote(decision)

    def commit(self) -> None:
        """Note that a block has taken effect, whose vote has passed: except in synchronous steps, it is a point."""
        if self._keeper is not None:
            self._keeper.commit()
            return
        self._equal = None
        if self._sends:
            self._make_point()

    def _make_point(self) -> None:
        self._replicas.commit()
        self._row, self._point, self._seats_at_point = self._next_row, self._common(), self._seats

    def copy(self, decision: Decision) -> None:
        """Make the present version a point, outside of a block. Collective."""
        if self._equal is not None:
            self._equal.copy(decision)
        elif self._sends:
            self._replicas.exchange(self._group, decision, self._state.version, self._pack_next)
            self._make_point()
        else:  # a rank that trains alone makes no points, and goes on from the last one
            self._seats_at_point = []

    def agree(self) -> None:
        """Do nothing: all ranks have a state for themselves."""

    def current(self) -> dict[str, Any]:
        """Return this rank's state as it is between two blocks."""
        return self._rank_state()

    def load(self, own: Mapping[str, Any]) -> None:
        """Begin with what ``current`` has returned in a process of the same rank. On all ranks."""
        self._load(own, self._common())

    def restore(self, decision: Decision, *, has_state: bool) -> None:
        """Give new ranks the state of the ranks that they replace, at the last point. Collective, in a new epoch.

        If the ranks are others than before, or a copy is lost, new ranks keep the state that they have got from another
        rank, and the present version becomes a point.
        """
        self._replicas.undo()
        seats = self._seats = [member.seat for member in decision.members]
        are_equal = self._equal is not None if has_state else self._optimizers.are_synchronous
        if self._group.allgather_object(are_equal)[decision.source]:
            self._equal = self._equal or OwnState(self._state, self._optimizers, self.num_copies, self.vote)
            self._equal.restore(decision, has_state=has_state)
            return
        self.vote.prepare()
        self._equal = None  # a new rank may have it from an epoch that it did not come into
        if not any(member.has_state for member in decision.members) or not self.num_copies:
            return
        held = self._replicas.seats(self._point["version"]) if has_state else []
        said = self._group.allgather_object({"held": held, "seats": self._seats_at_point if has_state else seats})
        holders = first_holders(words["held"] for words in said)
        are_same = all(words["seats"] == seats for words in said)
        missing = [rank for rank in decision.newcomers if seats[rank] not in holders]
        if are_same and not missing:
            for newcomer in decision.newcomers:
                self._hand_over(seats[newcomer], holders[seats[newcomer]], newcomer)
            # Ranks that were lost had copies, too: without new ones, the next loss could be of a rank without a copy.
            if self._sends:
                self._replicas.exchange(self._group, decision, self._point["version"], lambda: self._row)
                self._replicas.commit()
            return
        if are_same and self._group.rank == decision.source:
            _log.warning(
                "nobody has the state of rank %s: new ranks begin with the parameters of rank %d, and the steps that "
                "lost ranks have taken since the last exchange are lost",
                ", ".join(map(str, missing)),
                decision.source,
            )
        self.copy(decision)

    @property
    def _sends(self) -> bool:
        return self._replicas.are_sent(self._group)

    def _hand_over(self, seat: int, source: int, newcomer: int) -> None:
        """Give the state of a seat at the last point, which rank ``source`` has, to the rank that has the seat now."""
        row = hand_over(self._group, source, newcomer, lambda: self._replicas.copy_of(seat))
        point = hand_over(self._group, source, newcomer, lambda: pack(self._point))
        if row is not None and point is not None:
            self._row, self._point, self._seats_at_point = row, unpack(point), self._seats
            self._load(unpack(row), self._point)

    def _pack_next(self) -> torch.Tensor:
        self._next_row = pack(self._rank_state())
        return self._next_row

    def _rank_state(self) -> dict[str, Any]:
        """Return what differs from rank to rank: tensors, and the state of the strategy."""
        shared = self._state.shared()
        return {
            "model": shared["model"],
            "buffers": shared["buffers"],
            "optimizers": {name: each["state"] for name, each in shared["optimizers"].items()},
            "strategies": {name: each.state_under_way() for name, each in self._optimizers.strategies.items()},
        }

    def _common(self) -> dict[str, Any]:
        """Return a copy of everything else."""
        shared = self._state.shared()
        settings = {name: {**each, "state": {}} for name, each in shared["optimizers"].items()}
        return copy.deepcopy({**shared, "model": {}, "optimizers": settings, "strategies": {}})

    def _load(self, rank_state: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        states = rank_state["optimizers"]
        optimizers = {name: {**each, "state": states[name]} for name, each in common["optimizers"].items()}
        tensors = {key: rank_state[key] for key in ("model", "buffers") if key in rank_state}
        self._state.load_shared({**common, **tensors, "optimizers": optimizers})
        for name, each in self._optimizers.strategies.items():
            each.load_state(rank_state["strategies"][name])
