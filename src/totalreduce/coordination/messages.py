"""The messages by which the ranks of a group agree: a small header and a body.

::

    offset  size  field (little endian)
    0       1     kind
    1       1     round of a vote
    2       8     cycle, from 0
    10      n     a bit vector (VOTE, INVALID), else a JSON value
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any

from totalreduce.foundation.errors import ProtocolError

__all__ = ["MALFORMED", "STATUS_BITS", "Kind", "decode_bits", "decode_json", "encode", "split"]

#: The exceptions that reading a JSON value of an unexpected form raises. ``int`` of an infinity and deeply nested texts
#: raise the last two.
MALFORMED = (TypeError, ValueError, LookupError, OverflowError, RecursionError)

_HEAD = struct.Struct("<BBQ")
#: The memory that the values of a message may take, and upper bounds for a list, an object, and one more part of both.
_VALUE_BYTES_MAX = 40 * 1024 * 1024
_PART_BYTES = ((b"[", 96), (b"{", 300), (b",", 64))
#: The first bits of a vote do not stand for operations (``Cycles``).
STATUS_BITS = 2


class Kind(enum.IntEnum):
    """The kinds of messages."""

    VOTE = 1  #: A bit vector, to be combined with *and*
    INVALID = 2  #: A bit vector, to be combined with *or*
    REQUESTS = 3  #: The uncached requests of a rank and of the ranks below it in the tree. Towards rank 0.
    RESPONSES = 4  #: The answer of rank 0 to the requests of all ranks. Away from rank 0.
    QUESTION = 5  #: Names of late operations: which of them has the receiver submitted?
    ANSWER = 6  #: The names among those of a question that the sender has submitted
    ABORT = 7  #: The agreement has ended for good
    LEAVE = 8  #: The sender has closed the agreement in good order, and takes part no more
    BEGIN = 9  #: A cycle has begun. Votes say it, too, but a rank that has left passes no votes on.


def encode(kind: Kind, cycle: int, round_: int = 0, *, bits: int | None = None, value: Any = None) -> bytes:
    """Write a message with a bit vector or a JSON value."""
    head = _HEAD.pack(kind, round_, cycle)
    if bits is not None:
        return head + bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return head + json.dumps(value, separators=(",", ":")).encode()


def split(message: bytes) -> tuple[Kind, int, int, bytes]:
    """Return the kind, cycle, round and body of a message. Raises ``ProtocolError``."""
    try:
        kind, round_, cycle = _HEAD.unpack_from(message)
        return Kind(kind), cycle, round_, message[_HEAD.size :]
    except (struct.error, ValueError) as cause:
        raise ProtocolError("a message of the agreement that no correct peer sends") from cause


def decode_bits(body: bytes, num_bits_max: int) -> int:
    """Read a bit vector. Raises ``ProtocolError``."""
    bits = int.from_bytes(body, "little")
    if bits.bit_length() > num_bits_max:
        raise ProtocolError(f"a bit vector of {bits.bit_length()} bits where {num_bits_max} are known")
    return bits


def decode_json(body: bytes) -> Any:
    """Read a JSON value. Raises ``ProtocolError``."""
    if sum(body.count(sign) * cost for sign, cost in _PART_BYTES) > _VALUE_BYTES_MAX:
        raise ProtocolError(f"a message of the agreement that takes more than {_VALUE_BYTES_MAX >> 20} MiB of memory")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("a message of the agreement that is no JSON") from cause
