"""Frames about operations that the receiver may not have submitted yet: each one leaves within an allowance, or waits.

The receiver keeps an *entry* of such an operation (``early``) until it has submitted the operation. Therefore this rank
has an allowance of entries at every peer. The first frame about an operation uses a part of it, and says so by the flag
EAGER. Further frames about the operation use nothing, except those that tell of a failure. The peer returns the
allowance (CREDIT) when it has submitted the operations.

If the allowance is used up, the frames of further operations wait, in order, and so do the messages of these
operations. For each of them the peer gets a REQUEST frame without the flag, of which it keeps no entry. It answers with
POSTED if it has submitted the operation. Besides, it sends POSTED for every operation that it submits from then on,
until a REQUEST frame without a key tells it that nothing waits any more. So what waits leaves as soon as the peer has
submitted its operation, or when allowance has come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, final

from totalreduce.engine.early import FAILURES, entry_cost
from totalreduce.engine.operation import Operation
from totalreduce.engine.outbox import NO_KEY, Outbox
from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import Flag, Frame

__all__ = ["Entries", "returned"]

_Key = tuple[int, int]


def returned(used: int, peer: int, amount: int) -> int:
    """Return what is used of an allowance of which a peer has returned a part.

    Raises:
        ProtocolError: The peer returns more than this rank has used.
    """
    if amount > used:
        raise ProtocolError(f"rank {peer} gave back {amount} bytes of an allowance of which {used} are used")
    return used - amount


class _Frame(NamedTuple):
    """A frame that waits."""

    frame: Frame
    body: bytes
    signature: bytes
    on_sent: Callable[[], None] | None


class _Waiting(NamedTuple):
    """The frames about an operation that wait. ``operation`` is ``None`` if it had failed before it was begun."""

    operation: Operation | None
    frames: list[_Frame]


@final
class Entries:
    """The allowances of entries that this rank has at its peers, and the frames that wait for allowance.

    Attributes:
        waiting: By peer, for peers whose allowance is used up: by operation, the frames that wait.
        on_leave: Called with an operation and a peer when the frames that waited have left: its messages may follow.
    """

    __slots__ = ("_outbox", "_share", "_used", "on_leave", "waiting")

    def __init__(self, outbox: Outbox, share: int) -> None:
        """Begin with full allowances. ``share``: the bytes of this rank's entries at each peer, by ``entry_cost``."""
        self._outbox, self._share = outbox, share
        self._used: dict[int, int] = {}
        self.waiting: dict[int, OrderedDict[_Key, _Waiting]] = {}
        self.on_leave: Callable[[Operation, int], None] = lambda _operation, _peer: None

    def tell(
        self,
        peer: int,
        frame: Frame,
        key: _Key,
        operation: Operation | None,
        *,
        body: bytes = b"",
        signature: bytes = bytes(24),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a frame about an operation to a peer, or let it wait.

        Args:
            peer: The peer.
            frame: The frame.
            key: The operation's key.
            operation: The operation; ``None`` if it failed before it was begun.
            body: The body of the frame.
            signature: The packed signature in the frame's header.
            on_sent: See ``OutgoingMessage``.
        """
        waiting, flags = self.waiting.get(peer), Flag.NONE
        if operation is None or peer not in operation.posted_by:
            if waiting is not None and key in waiting:
                waiting[key].frames.append(_Frame(frame, body, signature, on_sent))
                return
            if operation is None or peer not in operation.has_entry_at or frame in FAILURES:
                cost = entry_cost(frame, len(body))
                if waiting is not None or self._used.get(peer, 0) + cost > self._share:
                    if waiting is None:
                        waiting = self.waiting[peer] = OrderedDict()
                    waiting[key] = _Waiting(operation, [_Frame(frame, body, signature, on_sent)])
                    self._outbox.control(peer, Frame.REQUEST, key=key)
                    return
                self._enter(peer, operation, cost)
                flags = Flag.EAGER
        self._outbox.control(peer, frame, key=key, body=body, signature=signature, flags=flags, on_sent=on_sent)

    def waits(self, peer: int, key: _Key) -> bool:
        """Return whether frames about an operation wait, so that its messages do, too."""
        waiting = self.waiting.get(peer)
        return waiting is not None and key in waiting

    def posted(self, peer: int, key: _Key) -> None:
        """Let the frames about an operation leave that a peer has submitted: they need no allowance."""
        waiting = self.waiting.get(peer)
        entry = waiting.pop(key, None) if waiting is not None else None
        if waiting is None or entry is None:
            return
        for waiting_frame in entry.frames:
            if waiting_frame.frame is not Frame.REQUEST:  # it has its answer
                self._send(peer, key, waiting_frame)
        self._end_if_empty(peer, waiting)

    def on_credit(self, peer: int, amount: int) -> None:
        """Note that a peer returns a part of the allowance, and let frames leave that have waited, the oldest first.

        Raises:
            ProtocolError: The peer returns more than this rank has used.
        """
        self._used[peer] = returned(self._used.get(peer, 0), peer, amount)
        waiting = self.waiting.get(peer)
        if waiting is None:
            return
        while waiting:
            key, (operation, frames) = next(iter(waiting.items()))
            failures = [frame for frame in frames if frame.frame in FAILURES]
            others = [frame for frame in frames if frame.frame not in FAILURES]
            cost = sum(entry_cost(frame.frame, len(frame.body)) for frame in (*others[:1], *failures))
            if self._used[peer] + cost > self._share:
                return
            del waiting[key]
            self._enter(peer, operation, cost)
            for frame in (*others, *failures):
                uses_allowance = frame.frame in FAILURES or frame is others[0]
                self._send(peer, key, frame, Flag.EAGER if uses_allowance else Flag.NONE)
            if operation is not None:
                self.on_leave(operation, peer)
        self._end_if_empty(peer, waiting)

    def forget(self, peer: int) -> None:
        """Forget what waits for a peer that has left."""
        self.waiting.pop(peer, None)

    def validate(self) -> None:
        """Check that no allowance is overdrawn, and that nothing waits where allowance is free."""
        for peer, used in self._used.items():
            assert 0 <= used <= self._share, f"{used} bytes of entries at rank {peer}"
        assert all(self.waiting.values())

    def _enter(self, peer: int, operation: Operation | None, cost: int) -> None:
        """Use allowance for frames about an operation, of which the peer makes an entry."""
        self._used[peer] = self._used.get(peer, 0) + cost
        if operation is not None:
            operation.has_entry_at = {*operation.has_entry_at, peer}

    def _send(self, peer: int, key: _Key, waiting: _Frame, flags: int = Flag.NONE) -> None:
        frame, body, signature, on_sent = waiting
        self._outbox.control(peer, frame, key=key, body=body, signature=signature, flags=flags, on_sent=on_sent)

    def _end_if_empty(self, peer: int, waiting: OrderedDict[_Key, _Waiting]) -> None:
        """Tell a peer for which nothing waits any more that it need not speak of every operation."""
        if not waiting:
            del self.waiting[peer]
            self._outbox.control(peer, Frame.REQUEST, key=NO_KEY)
