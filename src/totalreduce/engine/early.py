"""Control frames about operations that were not submitted here yet. Submission claims what they said.

What is kept of a peer's frames has a bound in bytes. A peer that is so far ahead of this rank that the bound is reached
is refused: if this rank forgot a frame, the peer could wait for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from totalreduce.foundation.errors import MismatchError, PeerLost, ProtocolError

__all__ = ["ENTRY_COST", "NO_FRAMES", "BoundedTable", "EarlyFrames", "EarlyRecord"]

#: The bytes that may be kept of the frames of one peer, by the costs below.
_PEER_BYTES_MAX = 32 * 1024 * 1024
#: The bytes that an entry takes besides its strings: measured, and rounded up.
ENTRY_COST = 1024

K = TypeVar("K")
V = TypeVar("V")
_Key = tuple[int, int]


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

    Attributes:
        posted: Peers that have submitted it.
        requested: Peers that hold messages of it until this rank has submitted it.
        described: By peer: the packed signature that the peer submitted.
        failure: The error with which the operation fails as soon as it is submitted here.
        urgent: Whether a caller on another rank is blocked on it.
        reported_s: By peer: the seconds that the peer had waited for the operation when this rank last reported that.
        costs: By peer: the bytes that its frames take.
    """

    __slots__ = ("costs", "described", "failure", "posted", "reported_s", "requested", "urgent")

    def __init__(self) -> None:
        """Begin without frames."""
        self.posted: set[int] | tuple[()] = ()
        self.requested: set[int] | tuple[()] = ()
        self.described: dict[int, bytes] = {}
        self.failure: MismatchError | PeerLost | None = None
        self.urgent = False
        self.reported_s: dict[int, float] = {}
        self.costs: dict[int, int] = {}


#: Stands for an operation without frames; it is never changed.
NO_FRAMES = EarlyRecord()


class EarlyFrames:
    """The control frames about operations that were not submitted here, by operation key (id, iteration)."""

    __slots__ = ("_spent", "records")

    def __init__(self) -> None:
        """Begin without frames."""
        #: By operation; empty most of the time.
        self.records: dict[_Key, EarlyRecord] = {}
        self._spent: dict[int, int] = {}

    def of(self, key: _Key) -> EarlyRecord:
        """Return the record of an operation; the caller does not change it."""
        return self.records.get(key, NO_FRAMES)

    def claim(self, key: _Key) -> EarlyRecord:
        """Take out the record of an operation, which is submitted now."""
        record = self.records.pop(key, None)
        if record is None:
            return NO_FRAMES
        for peer, cost in record.costs.items():
            self._spent[peer] -= cost
        return record

    def note_posted(self, peer: int, key: _Key) -> None:
        """Note a POSTED frame.

        Raises:
            ProtocolError: The bound of the peer is reached. This holds for every ``note_`` method.
        """
        record = self._charged(peer, key)
        if isinstance(record.posted, tuple):
            record.posted = set()
        record.posted.add(peer)

    def note_requested(self, peer: int, key: _Key) -> None:
        """Note a REQUEST frame."""
        record = self._charged(peer, key)
        if isinstance(record.requested, tuple):
            record.requested = set()
        record.requested.add(peer)

    def note_described(self, peer: int, key: _Key, signature: bytes) -> None:
        """Note a DESCRIBE frame with a packed signature."""
        self._charged(peer, key).described[peer] = signature

    def note_urgent(self, peer: int, key: _Key) -> None:
        """Note that a caller is blocked on the operation, as a message of the peer says."""
        self._charged(peer, key).urgent = True

    def note_report(self, peer: int, key: _Key, waited_s: float) -> bool:
        """Note how long the peer has waited for the operation. Returns whether to report it, each time it doubles."""
        record = self._charged(peer, key)
        if waited_s < 2 * record.reported_s.get(peer, 0.0):
            return False
        record.reported_s[peer] = waited_s
        return True

    def note_failure(self, peer: int, key: _Key, error: MismatchError | PeerLost) -> None:
        """Note that the operation fails as soon as it is submitted here, as a frame of the peer says."""
        record = self._charged(peer, key, len(str(error)) + 2 * ENTRY_COST if self.of(key).failure is None else 0)
        if record.failure is None:
            record.failure = error
        record.described.clear()

    def _charged(self, peer: int, key: _Key, extra: int = 0) -> EarlyRecord:
        """Return the entry of an operation, and count its bytes for the peer whose frame is about it."""
        record = self.records.get(key)
        cost = extra if record is not None and peer in record.costs else extra + ENTRY_COST
        if cost:
            spent = self._spent.get(peer, 0) + cost
            if spent > _PEER_BYTES_MAX:
                raise ProtocolError(
                    f"rank {peer} has spoken of too many operations that were not submitted here: "
                    f"{_PEER_BYTES_MAX >> 20} MiB are kept of that"
                )
            self._spent[peer] = spent
        if record is None:
            record = self.records[key] = EarlyRecord()
        if cost:
            record.costs[peer] = record.costs.get(peer, 0) + cost
        return record
