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

    __slots__ = ("_early", "_floating", "_names", "_waiting")

    def __init__(self, names: NameTable, early: EarlyFrames, floating: FloatingStore) -> None:
        """Begin without receives.

        The key of a candidate's next message follows from ``names``. Whether it was announced shows in ``early`` and
        ``floating``.
        """
        self._names, self._early, self._floating = names, early, floating
        self._waiting: list[AnyReceive] = []

    def add(self, receive: AnyReceive) -> None:
        """Let a receive wait."""
        self._waiting.append(receive)

    def first_sender(self, receive: AnyReceive, departed: Collection[int]) -> int | None:
        """Return the first candidate whose next message has arrived or was announced, or ``None``.

        Announcements of ``departed`` ranks do not count, because the announced message may never come.
        """
        for peer in receive.candidates:
            key = self._next_key(receive, peer)
            if key in self._floating or (peer not in departed and self._is_announced(key)):
                return peer
        return None

    def take(self, peer: int, key: _Key) -> AnyReceive | None:
        """Take out the oldest receive whose next message from ``peer`` is ``key``, if that was announced."""
        if self._waiting and self._is_announced(key):
            for receive in self._waiting:
                if peer in receive.candidates and key == self._next_key(receive, peer):
                    self._waiting.remove(receive)
                    return receive
        return None

    def take_all(self, condition: Callable[[AnyReceive], bool] = lambda _: True) -> list[AnyReceive]:
        """Take out all receives that meet a condition."""
        taken = [receive for receive in self._waiting if condition(receive)]
        self._waiting = [receive for receive in self._waiting if not condition(receive)]
        return taken

    def _is_announced(self, key: _Key) -> bool:
        """Return whether a peer has sent, or wants to send, a message of an operation that was not submitted here."""
        news = self._early.of(key)
        return key in self._floating or bool(news.requested) or bool(news.described)

    def _next_key(self, receive: AnyReceive, peer: int) -> _Key:
        record = self._names.record(receive.scope, receive.candidates[peer])
        return record.op_id, record.next_iteration
