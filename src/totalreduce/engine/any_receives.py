"""Receives from anybody: they wait until one of several ranks has sent, and become ordinary operations then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from totalreduce.engine.control import StatusRequest
from totalreduce.engine.early import EarlyFrames
from totalreduce.engine.floating import FloatingStore
from totalreduce.engine.names import NameTable, following
from totalreduce.engine.outbox import Outbox
from totalreduce.engine.submission import Submission
from totalreduce.foundation.header import Frame
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


class Submit(Protocol):
    """``Engine.submit``."""

    def __call__(self, submission: Submission, now: float, *, owner: Any, matches_next: bool) -> object:
        """Submit an operation."""


class AnyReceives:
    """The receives from anybody that wait for a message."""

    __slots__ = ("_asking", "_departed", "_early", "_floating", "_names", "_outbox", "_rank", "_submit", "_waiting")

    def __init__(
        self,
        rank: int,
        names: NameTable,
        early: EarlyFrames,
        floating: FloatingStore,
        departed: Collection[int],
        outbox: Outbox,
        asking: Collection[int],
        submit: Submit,
    ) -> None:
        """Begin without receives.

        Args:
            rank: This rank.
            names: The names, from which the key of a candidate's next message follows.
            early: Frames about messages that were announced; ``floating`` has messages that have come.
            floating: The messages that came before their operation was submitted.
            departed: Ranks whose announcements do not count, because the announced message may never come.
            outbox: Takes questions to peers.
            asking: The peers that this rank keeps no announcements of (``Rendezvous.asking``). They are asked instead.
            submit: Submits the operation that a receive becomes.
        """
        self._rank, self._names, self._early, self._floating = rank, names, early, floating
        self._departed, self._outbox, self._asking, self._submit = departed, outbox, asking, submit
        self._waiting: list[AnyReceive] = []

    def receive(self, receive: AnyReceive, now: float) -> bool:
        """Let a receive become an operation, if a candidate has announced its next message; return whether it has.

        If several have, the first of them in the order of ``candidates`` is taken. No older receive waits for that
        message: it would have got the message when that was announced.
        """
        for peer in receive.candidates:
            if self._is_announced(peer, self._next_key(receive, peer)):
                self._become(receive, peer, now)
                return True
        return False

    def add(self, receive: AnyReceive) -> None:
        """Let a receive wait."""
        self._waiting.append(receive)
        for peer in receive.candidates:
            if peer in self._asking:
                self._ask(peer, self._next_key(receive, peer))

    def match(self, peer: int, key: _Key, now: float, *, is_announced: bool = False) -> None:
        """Match a peer's message ``key``, and the next ones of its name, with the receives that wait for them.

        Each receive that gets a message is submitted as an operation. Only messages that have begun to arrive, or that
        a control frame has announced, are matched.

        ``is_announced``: whether the peer has just said that it has submitted the message.
        """
        is_announced = is_announced and peer not in self._departed
        while self._waiting and (is_announced or self._is_announced(peer, key)):
            receive = self._waiting_for(peer, key)
            if receive is None:
                break
            self._waiting.remove(receive)
            self._become(receive, peer, now)
            key, is_announced = (key[0], following(key[1])), False
        if peer in self._asking:
            self._ask(peer, key)

    def _become(self, receive: AnyReceive, peer: int, now: float) -> None:
        submission = Submission(
            receive.candidates[peer],
            receive.signature,
            [receive.buffer],
            ranks=(peer, self._rank),
            scope=receive.scope,
            repeats=True,
            priority=receive.priority,
        )
        self._submit(submission, now, owner=receive.owner, matches_next=False)  # ``match`` does so itself

    def _ask(self, peer: int, key: _Key) -> None:
        """Ask a peer whether it has submitted message ``key``, if a receive waits for it.

        If the peer submits the message later, its announcement comes then.
        """
        receive = self._waiting_for(peer, key)
        if receive is not None:
            question = StatusRequest(receive.candidates[peer], 0.0).encode()
            self._outbox.control(peer, Frame.STATUS_REQUEST, key=key, body=question)

    def _waiting_for(self, peer: int, key: _Key) -> AnyReceive | None:
        """Return the oldest receive whose next message of ``peer`` is ``key``."""
        for receive in self._waiting:
            if peer in receive.candidates and key == self._next_key(receive, peer):
                return receive
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

    def _next_key(self, receive: AnyReceive, peer: int) -> _Key:
        """Return the key of the next message of a candidate."""
        record = self._names.record(receive.scope, receive.candidates[peer])
        return record.op_id, record.next_iteration
