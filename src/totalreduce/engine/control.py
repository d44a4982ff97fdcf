"""The bodies of control frames: one class for each frame that says something in words, with its encoding.

A body is a JSON object of at most ``CONTROL_BYTES_MAX`` bytes. It is data from another rank: it is never evaluated, and
every text in it is cut to a bound before it is kept. Frames without a class here (POSTED, REQUEST, CREDIT, CHANNEL)
say everything in their header, or carry bytes of another protocol.

All ``decode`` functions raise ``ProtocolError`` for a body that no correct rank sends.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeGuard

from totalreduce.foundation.checks import NAME_BYTES_MAX
from totalreduce.foundation.errors import MismatchError, PeerLost, ProtocolError

__all__ = [
    "CONTROL_BYTES_MAX",
    "Description",
    "Farewell",
    "LossNotice",
    "MessageFacts",
    "StatusReply",
    "StatusRequest",
    "decode_mismatch",
    "encode_mismatch",
]

#: The longest body of a control frame that is accepted, in bytes.
CONTROL_BYTES_MAX = 16 * 1024
#: The longest texts in control frames, in characters.
_TEXT_CHARACTERS_MAX, _REASON_CHARACTERS_MAX = 2048, 500


class Description(NamedTuple):
    """DESCRIBE: what the sender submits under a name. The packed signature is in the header.

    Attributes:
        name: The name of the operation.
        text: The signature in words, for error messages.
    """

    name: str
    text: str

    def encode(self) -> bytes:
        """Return the body."""
        return json.dumps({"name": self.name, "is": self.text[:_TEXT_CHARACTERS_MAX]}).encode()

    @classmethod
    def decode(cls, body: bytes, peer: int) -> Description:
        """Read a body that rank ``peer`` has sent."""
        document = _decode(body, peer)
        return cls(_text(document, "name", NAME_BYTES_MAX), _text(document, "is"))


class LossNotice(NamedTuple):
    """LOST: a rank is lost. The header's key names the operation that fails; without a key, every operation fails.

    Attributes:
        rank: The lost rank.
        reason: Why, in the words of the rank that has found the loss.
        reporter: That rank; ``None`` if it is this one.
    """

    rank: int
    reason: str
    reporter: int | None = None

    @property
    def text(self) -> str:
        """The reason, with the rank that has reported it."""
        return self.reason if self.reporter is None else f"{self.reason} (reported by rank {self.reporter})"

    def error(self) -> PeerLost:
        """Return a new error that names the lost rank."""
        return PeerLost(self.rank, self.text)

    def encode(self) -> bytes:
        """Return the body."""
        return json.dumps(self.fields()).encode()

    @classmethod
    def decode(cls, body: bytes, peer: int, world_size: int) -> LossNotice:
        """Read a body that rank ``peer`` has sent. Without a reporter in the body, ``peer`` has found the loss."""
        return cls.read(_decode(body, peer), peer, world_size)

    def fields(self) -> dict[str, int | str]:
        """Return the fields of the body."""
        fields: dict[str, int | str] = {"rank": self.rank, "reason": self.reason[:_REASON_CHARACTERS_MAX]}
        return fields if self.reporter is None else {**fields, "reporter": self.reporter}

    @classmethod
    def read(cls, document: dict[str, Any], peer: int, world_size: int) -> LossNotice:
        """Read the fields of a body, which may be a part of another body."""
        lost, reporter = document.get("rank"), document.get("reporter", peer)
        if not _is_rank(lost, world_size) or not _is_rank(reporter, world_size):
            raise ProtocolError(
                f"rank {peer} says that rank {reporter!r} reports the loss of {lost!r}: there is no such rank"
            )
        return cls(lost, _text(document, "reason", _REASON_CHARACTERS_MAX), reporter)


#: What a rank has usually come to that leaves without a reason while others need it.
_ADVICE = "(if it had fewer batches: optimizer.join(), or torch's Join, lets ranks have different numbers)"


class Farewell(NamedTuple):
    """GOODBYE: the sender has closed the group. The body is empty if there is nothing to say.

    Attributes:
        reason: Why, in words; may be empty.
        first: The rank that departed before all others, if the sender knows of one. The sender may have closed the
            group because of that departure, and the receiver may not know of it yet.
    """

    reason: str = ""
    first: LossNotice | None = None

    def encode(self) -> bytes:
        """Return the body."""
        document: dict[str, Any] = {"reason": self.reason[:_REASON_CHARACTERS_MAX]} if self.reason else {}
        if self.first is not None:
            document["first"] = self.first.fields()
        return json.dumps(document).encode() if document else b""

    @classmethod
    def decode(cls, body: bytes, peer: int, world_size: int) -> Farewell:
        """Read a body that rank ``peer`` has sent. The reason becomes the words that ``PeerLost`` shows."""
        document = _decode(body, peer) if body else {}
        first = document.get("first")
        if first is not None and not isinstance(first, dict):
            raise ProtocolError(f"a GOODBYE frame of rank {peer} that names {first!r} as a departed rank")
        after = f" after {_text(document, 'reason', _REASON_CHARACTERS_MAX)}" if "reason" in document else f" {_ADVICE}"
        notice = None if first is None else LossNotice.read(first, peer, world_size)
        return cls(f"it has closed the group{after}", notice)


class MessageFacts(NamedTuple):
    """A message between two ranks, for reports.

    Attributes:
        source: The rank that sends it.
        target: The rank that receives it.
        size: Number and type of the elements on the rank that waits, in words.
    """

    source: int
    target: int
    size: str

    def missing(self, rank: int) -> str:
        """Return what one of the two ranks has not done."""
        call = f"send to rank {self.target}" if rank == self.source else f"recv from rank {self.source}"
        return f"rank {rank} has not called {call}"


class StatusRequest(NamedTuple):
    """STATUS_REQUEST: the sender asks whether the receiver has submitted an operation.

    Attributes:
        name: The name of the operation.
        waited_s: How long ago the sender has submitted it, in seconds.
        message: What it sends, if it is a message between two ranks.
    """

    name: str
    waited_s: float
    message: MessageFacts | None = None

    def encode(self) -> bytes:
        """Return the body."""
        message = {} if self.message is None else {"message": self.message}
        return json.dumps({"name": self.name, "waited_s": round(self.waited_s, 3), **message}).encode()

    @classmethod
    def decode(cls, body: bytes, peer: int) -> StatusRequest:
        """Read a body that rank ``peer`` has sent."""
        document = _decode(body, peer)
        waited_s = document.get("waited_s", 0.0)
        if not isinstance(waited_s, (int, float)):
            raise ProtocolError(f"rank {peer} asks for an operation that is late by {waited_s!r}")
        return cls(_text(document, "name", NAME_BYTES_MAX), waited_s, _read_message(document, peer))


class StatusReply(NamedTuple):
    """STATUS_REPLY: whether the sender has submitted the operation, and its progress in words."""

    submitted: bool
    progress: str

    def encode(self) -> bytes:
        """Return the body."""
        return json.dumps({"submitted": self.submitted, "progress": self.progress}).encode()

    @classmethod
    def decode(cls, body: bytes, peer: int) -> StatusReply:
        """Read a body that rank ``peer`` has sent."""
        document = _decode(body, peer)
        return cls(bool(document.get("submitted")), _text(document, "progress"))


def encode_mismatch(error: MismatchError) -> bytes:
    """Return the body of a MISMATCH frame: the operation, two ranks, and the signature of each in words."""
    return json.dumps({"tensor": error.tensor, "ranks": error.ranks, "values": error.values}).encode()


def decode_mismatch(body: bytes, peer: int) -> MismatchError:
    """Read the body of a MISMATCH frame that rank ``peer`` has sent."""
    document = _decode(body, peer)
    try:
        ranks = tuple(int(rank) for rank in document["ranks"])
        values = tuple(str(value)[:_TEXT_CHARACTERS_MAX] for value in document["values"])
        return MismatchError(str(document["tensor"])[:NAME_BYTES_MAX], ranks, values)
    except (KeyError, OverflowError, TypeError, ValueError) as cause:
        raise ProtocolError("a MISMATCH frame that cannot be read") from cause


def _decode(body: bytes, peer: int) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError(f"a control frame of rank {peer} that is no JSON") from cause
    if not isinstance(document, dict):
        raise ProtocolError(f"a control frame of rank {peer} that is no JSON object")
    return document


def _read_message(document: dict[str, Any], peer: int) -> MessageFacts | None:
    match document.get("message"):
        case None:
            return None
        case [int(source), int(target), str(size)]:
            return MessageFacts(source, target, size[:_TEXT_CHARACTERS_MAX])
        case other:
            raise ProtocolError(f"rank {peer} asks for a message that is {other!r:.100}")


def _is_rank(value: object, world_size: int) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < world_size


def _text(document: dict[str, Any], field: str, characters_max: int = _TEXT_CHARACTERS_MAX) -> str:
    return str(document.get(field, "?"))[:characters_max]
