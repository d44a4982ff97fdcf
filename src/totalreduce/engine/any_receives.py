"""Receives from anybody: they wait until one of several ranks has sent, and become ordinary operations then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from totalreduce.engine.early import EarlyFrames
from totalreduce.engine.floating import FloatingStore
from totalreduce.engine.names import NameTable
from totalreduce.foundation.types import Signature

__all__ = ["AnyReceive", "AnyReceives"]

_Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class AnyReceive:
    """A receive from the first of several ranks that sends. It becomes an operation when a message has come.

    Attributes:
        candidates: The name of the message, by sender.
        signature: The signature of the message.
        buffer: Writable bytes.
        scope: As for ``Engine.submit``.
        priority: Smaller is more urgent.
        owner: A value of the caller, which the engine does not read.
        error: Why it ended before a message had come.
    """

    candidates: dict[int, str]
    signature: Signature
    buffer: memoryview
    scope: str
    priority: int
    owner: Any
    error: BaseException | None = None


class AnyReceives:
    """The receives from anybody that wait for a message."""

    __slots__ = ("_departed", "_early", "_floating", "_names", "_waiting")

    def __init__(
        self, names: NameTable, early: EarlyFrames, floating: FloatingStore, departed: Collection[int]
    ) -> None:
        """Begin without receives.

        The key of a candidate's next message follows from ``names``. Whether it was announced shows in ``early`` and
        ``floating``. Announcements of ``departed`` ranks do not count, because the announced message may never come.
        """
        self._names, self._early, self._floating, self._departed = names, early, floating, departed
        self._waiting: list[AnyReceive] = []

    def add(self, receive: AnyReceive) -> None:
        """Let a receive wait."""
        self._waiting.append(receive)

    def first_sender(self, receive: AnyReceive) -> int | None:
        """Return the first candidate whose next message was announced, or ``None``."""
        return next((p for p in receive.candidates if self._is_announced(p, self.next_key(receive, p))), None)

    def take(self, peer: int, key: _Key, *, is_announced: bool = False) -> AnyReceive | None:
        """Take out the oldest receive whose next message from ``peer`` is ``key``, if that was announced.

        ``is_announced``: whether the peer has just said that it has submitted the message.
        """
        is_announced = is_announced and peer not in self._departed
        if self._waiting and (is_announced or self._is_announced(peer, key)):
            for receive in self._waiting:
                if peer in receive.candidates and key == self.next_key(receive, peer):
                    self._waiting.remove(receive)
                    return receive
        return None

    def name_of(self, peer: int, key: _Key) -> str | None:
        """Return the name of message ``key`` of ``peer`` if a receive waits for it, else ``None``."""
        for receive in self._waiting:
            if peer in receive.candidates and key == self.next_key(receive, peer):
                return receive.candidates[peer]
        return None

    def take_all(self, condition: Callable[[AnyReceive], bool] = lambda _: True) -> list[AnyReceive]:
        """Take out all receives that meet a condition."""
        taken = [receive for receive in self._waiting if condition(receive)]
        self._waiting = [receive for receive in self._waiting if not condition(receive)]
        return taken

    def _is_announced(self, peer: int, key: _Key) -> bool:
        """Return whether a peer has sent, or wants to send, a message of an operation that was not submitted here."""
        if key in self._floating:
            return True
        news = self._early.of(key)
        return peer not in self._departed and (bool(news.requested) or bool(news.described))

    def next_key(self, receive: AnyReceive, peer: int) -> _Key:
        """Return the key of the next message of a candidate."""
        record = self._names.record(receive.scope, receive.candidates[peer])
        return record.op_id, record.next_iteration
