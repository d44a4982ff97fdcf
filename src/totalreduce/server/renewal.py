"""Forms the groups of a parameter server, one after the other, and hands its shards over from one to the next.

Which process does what is decided by rules without I/O: who is a member (``recovery.membership``), which servers hold a
shard (``placement``), and who gets it from whom (``handover``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from totalreduce.foundation.errors import PeerLost
from totalreduce.groups.group import Group
from totalreduce.recovery.assembly import NEWCOMERS_S, Assembly
from totalreduce.recovery.epochs import Epochs
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.sharing import send_value
from totalreduce.server.handover import Handover, Holdings, Standing
from totalreduce.server.placement import chains_of

__all__ = ["Epoch", "Renewal"]


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """A group, and who serves what in it.

    Attributes:
        group: The ranks; nothing else uses it.
        seats: By rank of the group: the seat, which is the rank in the program.
        servers: By shard: the seat that serves it.
        clocks: By worker: its clock.
    """

    group: Group
    seats: tuple[int, ...]
    servers: dict[int, int]
    clocks: tuple[int, ...]

    def clock_of(self, rank: int) -> int:
        """Return the clock of a rank; 0 if it is no worker."""
        return self.clocks[rank] if rank < len(self.clocks) else 0


@final
class Renewal:
    """The epochs of one process. One thread uses it."""

    def __init__(
        self,
        assembly: Assembly,
        formation: Callable[..., Group],
        holdings: Holdings,
        *,
        servers: Sequence[int],
        shards: Sequence[int],
        replicas: int,
    ) -> None:
        """Form nothing yet. ``servers``: the seats that hold shards, if their processes are members."""
        self._epochs, self._holdings = Epochs(assembly, formation, self._level), holdings
        self._servers, self._shards, self._replicas = servers, shards, replicas
        self._entered: Epoch | None = None  #: The epoch that was entered last.

    @property
    def patience_s(self) -> float | None:
        """After how many seconds ``has_newcomers`` is to be called again; ``None``: never."""
        return NEWCOMERS_S if self._epochs.assembly.policy.on_loss == "shrink" else None

    def has_newcomers(self) -> bool:
        """Return whether processes wait to join, and this is the one that looks for them. It looks now and then."""
        assembly = self._epochs.assembly
        current = assembly.current
        if self.patience_s is None or current is None or current.members[0].seat != assembly.seat:
            return False
        return assembly.has_newcomers(self.patience_s)

    def begin(self) -> Epoch:
        """Enter the first epoch of this process.

        Raises:
            RecoveryError: Too few processes have come in time, or all servers of a shard are lost.
            SystemExit: With ``--on-loss shrink``: the others have ended the job.
        """
        self._epochs.begin()
        assert self._entered is not None
        return self._entered

    def renew(self, reason: PeerLost | str) -> Epoch | None:
        """Leave the group, and enter the next epoch; ``None``: the others have ended the job.

        Raises:
            RecoveryError: As for ``begin``.
        """
        self._epochs.leave(reason)
        return self._entered if self._epochs.enter() else None

    def end(self, *, is_complete: bool) -> None:
        """Leave the group. ``is_complete``: all workers have finished, so the job has ended."""
        if is_complete:
            self._epochs.assembly.finish()
        self._epochs.leave("this rank has ended its connection to the parameter server")

    def _level(self, group: Group, decision: Decision) -> None:
        """Bring all servers of each chain to the same state. Collective."""
        holdings, control = self._holdings, group.control
        members = tuple((member.seat, member.incarnation) for member in decision.members)
        seats = tuple(seat for seat, _ in members)
        standings = [Standing.read(each) for each in control.allgather_object(holdings.standing().describe())]
        chains = chains_of(self._shards, self._servers, seats, self._replicas)
        plan = holdings.plan(decision.epoch, members, standings, chains)
        for shard, handover in plan.handovers.items():
            for seat in handover.behind:
                changes = _send(handover, (seat,), group, seats, partial(holdings.unconfirmed, shard))
                if seat == seats[group.rank]:
                    holdings.catch_up(shard, changes)
        clocks = holdings.settle([each for part in control.allgather_object(holdings.clocks()) for each in part])
        for shard, handover in plan.handovers.items():
            if handover.fresh:
                state = _send(handover, handover.fresh, group, seats, partial(holdings.state, shard))
                if seats[group.rank] in handover.fresh:
                    holdings.accept(shard, state)
        holdings.get_ready()
        control.barrier()
        holdings.serve()
        self._epochs.assembly.begin()
        self._entered = Epoch(group, seats, {shard: chain[0] for shard, chain in chains.items()}, clocks)


def _send(
    handover: Handover, receivers: Sequence[int], group: Group, seats: Sequence[int], make: Callable[[], Any]
) -> Any:
    """Give a value of the source to some seats, and return it on these; the other ranks return at once."""
    source = handover.source
    assert source is not None
    seat = seats[group.rank]
    if seat != source and seat not in receivers:
        return None
    value = make() if seat == source else None
    return send_value(value, group, seats.index(source), [seats.index(each) for each in receivers])
