"""Control frames about operations that were not submitted here yet. Submission claims what they said.

A frame that must not be lost makes an *entry*, for which the peer has an allowance; the peer lets frames wait beyond it
(``entries``). Other frames are hints: whoever needs the answer asks again. If a peer has given too many hints, further
ones are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from totalreduce.engine.allowance import Allowance
from totalreduce.foundation.errors import MismatchError, PeerLost, ProtocolError
from totalreduce.foundation.header import Frame

__all__ = ["ENTRY_COST", "FAILURES", "NO_FRAMES", "BoundedTable", "EarlyFrames", "EarlyRecord", "entry_cost"]

#: The bytes of the entries that each peer may have here, by ``entry_cost``.
PEER_BYTES_MAX = 32 * 1024 * 1024
#: The bytes that an entry takes besides its strings: measured, and rounded up.
ENTRY_COST: Final = 1024
#: The operations of which a peer may have given hints, besides those of its entries: 8 MiB.
_HINTS_MAX = 8192
#: Frames that say why an operation fails.
FAILURES: Final = frozenset({Frame.MISMATCH, Frame.LOST})

K = TypeVar("K")
V = TypeVar("V")
_Key = tuple[int, int]


def entry_cost(frame: Frame, body_bytes: int) -> int:
    """Return the part of an allowance that a frame with the flag EAGER takes; sender and receiver count the same."""
    return 3 * ENTRY_COST + body_bytes if frame in FAILURES else ENTRY_COST


class BoundedTable(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets its oldest entries when it is full."""

    def __init__(self, maximum: int, cost: Callable[[V], int] = lambda _: 1) -> None:
        """``maximum``: the largest sum of the costs of all values; by default each value costs 1."""
        super().__init__()
        self._maximum, self._cost = maximum, cost
        self.total = 0

    def __setitem__(self, key: K, value: V) -> None:
        """Insert an entry, and forget the oldest ones if the table is full."""
        if key in self:
            self.total -= self._cost(self[key])
        super().__setitem__(key, value)
        self.total += self._cost(value)
        while self.total > self._maximum:
            self.total -= self._cost(self.popitem(last=False)[1])

    def __delitem__(self, key: K) -> None:
        """Remove an entry."""
        self.total -= self._cost(self[key])
        super().__delitem__(key)


class EarlyRecord:
    """The frames about one operation that came before it was submitted here.

    Mostly one peer is ahead, and of one number a tuple takes a quarter of the memory of a set.

    Attributes:
        posted: Peers that have submitted it.
        requested: Peers that hold messages of it until this rank has submitted it.
        described: By peer: the packed signature that the peer submitted.
        failure: The error with which the operation fails as soon as it is submitted here.
        reported_s: By peer: the seconds that the peer had waited for the operation when this rank last reported that.
        costs: By peer that has an entry: the part of its allowance that the entry takes.
        hinting: Peers that have given a hint about it and have no entry.
    """

    __slots__ = ("costs", "described", "failure", "hinting", "posted", "reported_s", "requested")

    def __init__(self) -> None:
        """Begin without frames."""
        self.posted: tuple[int, ...] = ()
        self.requested: tuple[int, ...] = ()
        self.described: dict[int, bytes] = {}
        self.failure: MismatchError | PeerLost | None = None
        self.reported_s: dict[int, float] = {}
        self.costs: dict[int, int] = {}
        self.hinting: tuple[int, ...] = ()


#: Stands for an operation without frames; it is never changed.
NO_FRAMES = EarlyRecord()


class EarlyFrames:
    """The control frames about operations that were not submitted here, by operation key (id, iteration).

    Attributes:
        allowance: The entries of the peers, in bytes.
        records: By operation; empty most of the time.
    """

    __slots__ = ("_hints", "allowance", "records")

    def __init__(self) -> None:
        """Begin without frames."""
        self.allowance = Allowance(PEER_BYTES_MAX)
        self.records: dict[_Key, EarlyRecord] = {}
        self._hints: dict[int, int] = {}  #: By peer: in how many records it is ``hinting``.

    def of(self, key: _Key) -> EarlyRecord:
        """Return the record of an operation; the caller does not change it."""
        return self.records.get(key, NO_FRAMES)

    def claim(self, key: _Key) -> EarlyRecord:
        """Take out the record of an operation, which is submitted now."""
        record = self.records.pop(key, None)
        if record is None:
            return NO_FRAMES
        for peer, cost in record.costs.items():
            self.allowance.free(peer, cost)
        for peer in record.hinting:
            self._hints[peer] -= 1
        return record

    def enter(self, peer: int, key: _Key, cost: int) -> None:
        """Make an entry of an operation, or add to it, for a frame that has the flag EAGER.

        Raises:
            ProtocolError: The peer has more entries here than its allowance.
        """
        if not self.allowance.take(peer, cost):
            raise ProtocolError(
                f"rank {peer} has spoken of too many operations that were not submitted here: "
                f"{self.allowance.share} bytes are kept of that"
            )
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = EarlyRecord()
        record.costs[peer] = record.costs.get(peer, 0) + cost

    def note_posted(self, peer: int, key: _Key) -> None:
        """Note a POSTED frame, or forget it."""
        record = self._hinted(peer, key)
        if record is not None and peer not in record.posted:
            record.posted += (peer,)

    def note_requested(self, peer: int, key: _Key) -> bool:
        """Note a REQUEST frame. Return ``False`` and note nothing if the peer has no entry of the operation."""
        record = self._entered(peer, key)
        if record is not None and peer not in record.requested:
            record.requested += (peer,)
        return record is not None

    def note_described(self, peer: int, key: _Key, signature: bytes) -> None:
        """Note a DESCRIBE frame with a packed signature."""
        record = self._entered(peer, key)
        if record is not None:
            record.described[peer] = signature

    def note_report(self, peer: int, key: _Key, waited_s: float) -> bool:
        """Note how long the peer has waited for the operation. Returns whether to report it, each time it doubles."""
        record = self._hinted(peer, key)
        if record is None or waited_s < 2 * record.reported_s.get(peer, 0.0):
            return False
        record.reported_s[peer] = waited_s
        return True

    def note_failure(self, peer: int, key: _Key, error: MismatchError | PeerLost) -> bool:
        """Note that the operation fails as soon as it is submitted here, as a frame of the peer says.

        Returns ``False`` and notes nothing if the peer has no entry of the operation.
        """
        record = self._entered(peer, key)
        if record is None:
            return False
        if record.failure is None:
            record.failure = error
        record.described.clear()
        return True

    def _entered(self, peer: int, key: _Key) -> EarlyRecord | None:
        """Return the record of an operation if the peer has an entry of it.

        A correct peer sends no frame about an operation without an entry, unless this rank has submitted the operation.
        """
        record = self.records.get(key)
        return record if record is not None and peer in record.costs else None

    def _hinted(self, peer: int, key: _Key) -> EarlyRecord | None:
        """Return the record of an operation of which a peer gives a hint; ``None`` if the hint is to be forgotten."""
        record = self.records.get(key)
        if record is not None and (peer in record.costs or peer in record.hinting):
            return record
        hints = self._hints.get(peer, 0)
        if hints >= _HINTS_MAX:
            return None
        self._hints[peer] = hints + 1
        if record is None:
            record = self.records[key] = EarlyRecord()
        record.hinting += (peer,)
        return record
