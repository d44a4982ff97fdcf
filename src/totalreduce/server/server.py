"""The shards that one rank holds: requests and what is passed on in, answers and what is passed on out.

Chain replication (van Renesse and Schneider, OSDI 2004), with the difference that the head answers pulls. The head of a
shard's chain carries out the requests of workers, in an order that it chooses. It passes each one that changes the
shard on to the next server, which carries it out in the same order, and passes it on likewise. The head answers when
all servers behind it have confirmed. So what a worker was told is done is held by the whole chain, and each server has
carried out what those behind it have, and perhaps more.

A plain object without thread, socket and clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from totalreduce.foundation.errors import ProtocolError
from totalreduce.server.messages import LISTS_BYTES_MAX, Form, Header, Kind, Lru, Message, list_bytes
from totalreduce.server.shard import Reply, Request, Shard

if TYPE_CHECKING:
    from totalreduce.server.gathering import Gathering

__all__ = ["Server"]

#: Of a change: the worker that has asked for it, and its mark.
_Name = tuple[int, int]


@final
@dataclass(slots=True)
class _Passed:
    """A change that the servers behind this one have not confirmed.

    Attributes:
        message: As it was passed on, with its list of keys.
        replies: What the head answers to workers when it is confirmed.
    """

    message: Message
    replies: list[tuple[int, Message]] = field(default_factory=list)


@final
@dataclass(slots=True)
class _Copy:
    """A shard that this rank holds, and its place in the chain.

    Attributes:
        shard: The shard.
        before: The rank before this one; ``None``: this one is the head.
        behind: The rank behind this one; ``None``: there is none.
        passed: The changes that were passed on and not confirmed, in order.
        lists: The digests of the lists that the rank behind this one knows.
    """

    shard: Shard
    before: int | None = None
    behind: int | None = None
    passed: dict[_Name, _Passed] = field(default_factory=dict)
    lists: Lru[bool] = field(default_factory=lambda: Lru(LISTS_BYTES_MAX))


@final
class Server:
    """What a rank serves.

    Attributes:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        """Begin without shards."""
        self.rank = rank
        self._copies: dict[int, _Copy] = {}
        self._released_version = 0
        #: The shards that have something to do at certain times.
        self._timed: list[tuple[_Copy, Gathering]] = []

    @property
    def shards(self) -> dict[int, Shard]:
        """The shards that this rank holds, by number."""
        return {number: copy.shard for number, copy in self._copies.items()}

    @property
    def version(self) -> int:
        """The number of pushes that were applied to shards of which this rank is the head."""
        heads = (copy.shard for copy in self._copies.values() if copy.before is None)
        return self._released_version + sum(shard.table.version for shard in heads)

    @property
    def is_finished(self) -> bool:
        """Whether all workers have finished, and the servers behind this one have confirmed that."""
        return all(copy.shard.is_finished and not copy.passed for copy in self._copies.values())

    def has_finished(self, worker: int) -> bool:
        """Return whether a rank is no worker, or has finished."""
        return all(copy.shard.has_finished(worker) for copy in self._copies.values())

    def release(self) -> None:
        """Drop all shards: nothing is asked any more."""
        self._released_version, self._copies, self._timed = self.version, {}, []

    # --------------------------------------------------------------------------------------------------------- epochs

    def begin_epoch(self, chains: Mapping[int, Sequence[int]], shards: Mapping[int, Shard]) -> None:
        """Begin to serve shards, in chains of ranks. All servers of a chain have carried out the same changes."""
        self._copies = {}
        for number, shard in shards.items():
            place, chain = chains[number].index(self.rank), chains[number]
            shard.begin_epoch()
            self._copies[number] = _Copy(
                shard,
                before=chain[place - 1] if place else None,
                behind=chain[place + 1] if place + 1 < len(chain) else None,
            )
        copies = self._copies.values()
        self._timed = [(copy, copy.shard.gathering) for copy in copies if copy.shard.gathering is not None]

    def unconfirmed(self, number: int) -> list[tuple[int, Message]]:
        """Return the changes of a shard, with their workers, that servers behind this one may not have, in order."""
        copy = self._copies.get(number)
        return [] if copy is None else [(worker, each.message) for (worker, _), each in copy.passed.items()]

    # ------------------------------------------------------------------------------------------------------- messages

    def take(self, source: int, message: Message, now: float = 0.0) -> list[tuple[int, Message]]:
        """Take in a message of another server, or of a worker; return ranks and what is sent to them.

        ``now``: the time in seconds.

        Raises:
            ProtocolError: No correct rank sends this. Nothing has changed.
        """
        header = message.header
        copy = self._copies.get(header.shard)
        if copy is None:
            raise ProtocolError(f"rank {source} sends a message about shard {header.shard}, which this rank has not")
        if header.kind is Kind.REPLICATED:
            return self._confirmed(copy, source, header)
        if header.origin >= 0:
            return self._replicate(copy, source, message)
        if copy.before is not None:
            raise ProtocolError(
                f"rank {source} sends a request for shard {header.shard}, of which rank {self.rank} is not the head"
            )
        return [each for reply in copy.shard.take(source, message, now) for each in self._after(copy, reply)]

    def due(self) -> float | None:
        """Return the time at which ``tick`` is to be called; ``None``: not before another method was called."""
        if not self._timed:
            return None
        return min((due for _, gathering in self._timed if (due := gathering.due()) is not None), default=None)

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Do what is due; return what ``take`` returns."""
        replies = ((copy, reply) for copy, _ in self._timed for reply in copy.shard.tick(now))
        return [each for copy, reply in replies for each in self._after(copy, reply)]

    def _after(self, copy: _Copy, reply: Reply) -> list[tuple[int, Message]]:
        """Return what is sent when the head has carried out a request."""
        name = (reply.worker, reply.mark)
        out = []
        if reply.change is not None and copy.behind is not None:
            out.append((copy.behind, self._pass_on(copy, reply.worker, reply.change)))
        if reply.mark >= 0 and name in copy.passed:
            copy.passed[name].replies.append((reply.worker, reply.message))
        else:
            out.append((reply.worker, reply.message))
        return out

    def _replicate(self, copy: _Copy, source: int, message: Message) -> list[tuple[int, Message]]:
        header = message.header
        if source != copy.before or not header.kind.is_request:
            raise ProtocolError(
                f"rank {source} passes on a change of shard {header.shard}, and is not before "
                f"rank {self.rank} in its chain"
            )
        change = copy.shard.replicate(header.origin, message)
        if copy.behind is not None and change is not None:
            return [(copy.behind, self._pass_on(copy, header.origin, change))]
        return [(source, _confirmation(header))]

    def _pass_on(self, copy: _Copy, worker: int, change: Request) -> Message:
        """Note a change that is passed on, and return its message: with a digest for a list that is known there."""
        message, rows = change.message, change.rows
        # The servers behind answer no pull.
        kind = Kind.PUSH if message.header.kind is Kind.PUSH_PULL else message.header.kind
        header = replace(message.header, kind=kind, origin=worker)
        keys = message.keys
        if header.form in (Form.LIST, Form.DIGEST):
            assert rows is not None
            keys = copy.shard.list_of(rows) if keys is None else keys
            header = replace(header, form=Form.LIST)
        whole = Message(header, keys, message.values)
        copy.passed[worker, header.mark] = _Passed(whole)
        if header.form is Form.LIST:
            if copy.lists.get(header.digest):
                return Message(replace(header, form=Form.DIGEST), None, message.values)
            copy.lists.put(header.digest, True, list_bytes(header.end))
        return whole

    def _confirmed(self, copy: _Copy, source: int, header: Header) -> list[tuple[int, Message]]:
        passed = copy.passed.pop((header.origin, header.mark), None) if source == copy.behind else None
        if passed is None:
            raise ProtocolError(f"rank {source} confirms a change that was not passed on to it")
        return passed.replies if copy.before is None else [(copy.before, _confirmation(header))]


def _confirmation(header: Header) -> Message:
    return Message(Header(Kind.REPLICATED, shard=header.shard, origin=header.origin, mark=header.mark))
