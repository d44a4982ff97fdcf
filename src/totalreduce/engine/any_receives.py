"""Receives from anybody: they wait until one of several ranks has sent, and become ordinary operations then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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

    __slots__ = ("_names", "_waiting")

    def __init__(self, names: NameTable) -> None:
        """``names``: the names that were submitted here, from which the key of a candidate's next message follows."""
        self._names = names
        self._waiting: list[AnyReceive] = []

    def add(self, receive: AnyReceive) -> None:
        """Let a receive wait."""
        self._waiting.append(receive)

    def next_keys(self, receive: AnyReceive) -> Iterator[tuple[int, _Key]]:
        """Yield each candidate and the key of the next message from it."""
        for peer in receive.candidates:
            yield peer, self._next_key(receive, peer)

    def take(self, peer: int, key: _Key) -> AnyReceive | None:
        """Take out the oldest receive for which ``key`` is the next message from ``peer``, if there is one."""
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

    def _next_key(self, receive: AnyReceive, peer: int) -> _Key:
        record = self._names.record(receive.scope, receive.candidates[peer])
        return record.op_id, record.next_iteration
