"""How servers go on after a change of the members: plain objects without I/O, which ``renewal`` has.

When an epoch begins, each member says which shards it has, and from which epoch on it has them (``Standing``). From
the same standings all members make the same plan. A shard is taken from its *source*: the first server of its chain in
the last epoch that has served requests, among those that are left. By the order of the chain, the source has carried
out every change that any of the others has. The source tells the others which changes they may lack, and gives the
shard to servers that are new in its chain.

An epoch has served requests only if all of its members had their shards when it began. If one of them says that it had
not, the epoch is void, and the shards are where the epoch before it left them.

``Holdings`` has the shards of one process. Its methods are called in this order, on all members, and each stage ends on
all of them before the next one begins:

1. ``standing``, and with those of all members ``plan``;
2. ``unconfirmed`` on the source of each shard, ``catch_up`` on the servers behind it, one after the other;
3. ``clocks``, and with those of all members ``settle``;
4. ``state`` on the source, ``accept`` on the servers that are new in the chain;
5. ``get_ready``; when all members are ready, ``serve``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, final

from totalreduce.foundation.errors import ProtocolError, RecoveryError
from totalreduce.server.clocks import ABSENT
from totalreduce.server.messages import Message, Spec
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard

__all__ = ["Handover", "Holdings", "Plan", "Standing"]


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """What a process says of itself when an epoch begins.

    Attributes:
        member: Its seat and its incarnation.
        epoch: The last epoch for which it has made a plan; 0: there is none.
        base: The epoch from which that one has got the shards; 0: it made them.
        is_ready: Whether it had all of its shards of ``epoch``, so that it was ready to serve them.
        members: The members of ``epoch``.
        places: By shard that it has, and by epoch (``epoch``, ``base``): its place in the chain, from 0.
    """

    member: tuple[int, int]
    epoch: int = 0
    base: int = 0
    is_ready: bool = False
    members: tuple[tuple[int, int], ...] = ()
    places: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the standing as a value that can be sent."""
        return asdict(self)

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Self:
        """Return the standing that another process has described.

        Raises:
            ProtocolError: The value is none.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise ProtocolError(f"a member describes its shards in another way: {error}") from error


@final
@dataclass(frozen=True, slots=True)
class Handover:
    """How the servers of a shard come to the same state.

    Attributes:
        source: The seat that has carried out the most; ``None``: all make the shard, because the job begins.
        behind: The seats that have the shard, and may lack changes of the source.
        fresh: The seats that get the shard from the source.
    """

    source: int | None
    behind: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What happens when an epoch begins. Equal on all members.

    Attributes:
        epoch: The number of the epoch.
        base: The epoch whose shards are handed over; 0: the job begins.
        chains: By shard: the seats that hold it, the head first.
        handovers: By shard.
    """

    epoch: int
    base: int
    chains: Mapping[int, tuple[int, ...]]
    handovers: Mapping[int, Handover]

    @classmethod
    def make(cls, epoch: int, standings: Sequence[Standing], chains: Mapping[int, tuple[int, ...]]) -> Self:
        """Make the plan of an epoch, from the standings of all members.

        Raises:
            RecoveryError: All servers that had a shard are lost. On all members.
        """
        base = _base(standings)
        handovers: dict[int, Handover] = {}
        lost: list[int] = []
        for shard, chain in chains.items():
            if base == 0:
                handovers[shard] = Handover(None)
                continue
            places = {each.member[0]: each.places.get(shard, {}).get(base) for each in standings}
            holders = sorted((place, seat) for seat, place in places.items() if place is not None)
            if not holders:
                lost.append(shard)
                continue
            source = holders[0][1]
            behind = tuple(seat for _, seat in holders[1:] if seat in chain)
            fresh = tuple(seat for seat in chain if places[seat] is None)
            handovers[shard] = Handover(source, behind, fresh)
        if lost or any(not chain for chain in chains.values()):
            raise RecoveryError(
                f"all servers of {len(lost) or 'all'} of {len(chains)} shards are lost, so the values of their keys "
                "are, too. Start the job again; more replicas (tr.ps.connect) survive more losses at a time"
            )
        return cls(epoch, base, chains, handovers)


@final
@dataclass(slots=True)
class _Held:
    """A shard that this process has.

    Attributes:
        shard: The shard.
        places: By epoch: the place of this process in the chain.
        caught_up: What this process has carried out since it served the shard last, as values that can be sent.
    """

    shard: Shard
    places: dict[int, int] = field(default_factory=dict)
    caught_up: list[Any] = field(default_factory=list)


@final
class Holdings:
    """The shards of one process.

    Attributes:
        server: Serves them.
    """

    def __init__(
        self, member: tuple[int, int], server: Server, spec: Spec, make_shard: Callable[[int, bool], Shard]
    ) -> None:
        """Begin without shards. ``make_shard``: with the values with which the job begins, or with zeros."""
        self.server = server
        self._seat, self._spec, self._make_shard = member[0], spec, make_shard
        self._held: dict[int, _Held] = {}
        self._plan: Plan | None = None
        self._standing = Standing(member)

    def standing(self) -> Standing:
        """Return what this process says of itself."""
        places = {shard: dict(held.places) for shard, held in self._held.items()}
        return replace(self._standing, places=places)

    def plan(
        self,
        epoch: int,
        members: tuple[tuple[int, int], ...],
        standings: Sequence[Standing],
        chains: Mapping[int, tuple[int, ...]],
    ) -> Plan:
        """Make the plan of an epoch, from the standings of all members; if the job begins, make the shards.

        Raises:
            RecoveryError: All servers that had a shard are lost. On all members.
        """
        plan = Plan.make(epoch, standings, chains)
        self._standing = replace(self._standing, epoch=epoch, base=plan.base, is_ready=False, members=members)
        self._plan = plan
        if plan.base == 0:
            self._held = {s: _Held(self._make_shard(s, True)) for s, chain in chains.items() if self._seat in chain}
        return plan

    def unconfirmed(self, shard: int) -> list[Any]:
        """Return the changes of a shard, in order, that servers behind this one may lack; the value can be sent."""
        passed = [
            (worker, self._spec.encode(message.header), message.keys, message.values)
            for worker, message in self.server.unconfirmed(shard)
        ]
        return passed + self._held[shard].caught_up

    def catch_up(self, shard: int, changes: Sequence[Any]) -> None:
        """Carry out what ``unconfirmed`` has returned on another server.

        Raises:
            ProtocolError: A change cannot be carried out.
        """
        held = self._held[shard]
        for worker, header, keys, values in changes:
            message = Message(self._spec.decode(header), keys, values)
            if held.shard.replicate(worker, message) is not None:
                held.caught_up.append((worker, header, keys, values))

    def clocks(self) -> list[list[int]]:
        """Return the clocks of the workers in each shard that this process has."""
        return [held.shard.all_clocks for held in self._held.values()]

    def settle(self, clocks: Sequence[list[int]]) -> tuple[int, ...]:
        """End the steps that some shard knows to have ended, from the clocks of all members; return those of workers.

        Workers that are no members when the job begins are absent. One that comes later begins where the slowest of
        the others is.
        """
        if not clocks or len({len(each) for each in clocks}) > 1:
            raise ProtocolError("the members have clocks of different numbers of workers")
        assert self._plan is not None
        seats = {seat for seat, _ in self._standing.members}
        known = [max(each) for each in zip(*clocks, strict=True)]
        if self._plan.base == 0:
            latest = tuple(clock if worker in seats else ABSENT for worker, clock in enumerate(known))
        else:
            begin = min((clock for clock in known if clock != ABSENT), default=ABSENT)
            latest = tuple(begin if c == ABSENT and worker in seats else c for worker, c in enumerate(known))
        for held in self._held.values():
            held.shard.settle(latest)
        return latest

    def state(self, shard: int) -> dict[str, Any]:
        """Return the state of a shard. Nothing is copied."""
        return self._held[shard].shard.state()

    def accept(self, shard: int, state: Mapping[str, Any]) -> None:
        """Take over a shard from its source. The arrays are used, and not copied.

        Raises:
            ProtocolError: Values have another shape or type than those of this table.
        """
        self._held[shard] = _Held(self._make_shard(shard, False))
        self._held[shard].shard.load_state(state)

    def get_ready(self) -> None:
        """Note that this process has all shards of the plan."""
        assert self._plan is not None
        for shard, chain in self._plan.chains.items():
            if self._seat in chain:
                self._held[shard].places[self._plan.epoch] = chain.index(self._seat)
        self._standing = replace(self._standing, is_ready=True)

    def serve(self) -> None:
        """Begin to serve: all members are ready, so places of earlier epochs are of no use any more."""
        assert self._plan is not None
        epoch = self._plan.epoch
        self._held = {
            shard: _Held(held.shard, {epoch: held.places[epoch]})
            for shard, held in self._held.items()
            if epoch in held.places
        }
        self.server.begin_epoch(self._plan.chains, {shard: held.shard for shard, held in self._held.items()})


def _base(standings: Sequence[Standing]) -> int:
    """Return the last epoch that may have served requests."""
    latest = max(standings, key=lambda each: each.epoch)
    members: Collection[tuple[int, int]] = latest.members
    is_void = any(each.member in members and not (each.epoch == latest.epoch and each.is_ready) for each in standings)
    return latest.base if is_void else latest.epoch
