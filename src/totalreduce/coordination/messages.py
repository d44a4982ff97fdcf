"""What the ranks of a group say to each other while they agree: a small header and a body.

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

__all__ = ["MALFORMED", "Kind", "decode_bits", "decode_json", "encode", "split"]

#: What reading a JSON value of an unexpected form raises: ``int`` of an infinity and the text of what is nested too
#: deeply among it.
MALFORMED = (TypeError, ValueError, LookupError, OverflowError, RecursionError)

_HEAD = struct.Struct("<BBQ")
#: What the values of a message may take of memory, and what a list, an object, and one more part of either may take.
_VALUE_BYTES_MAX = 40 * 1024 * 1024
_PART_BYTES = ((b"[", 96), (b"{", 300), (b",", 64))


class Kind(enum.IntEnum):
    """What a message is."""

    VOTE = 1
    """A bit vector, to be combined with *and*."""
    INVALID = 2
    """A bit vector, to be combined with *or*."""
    REQUESTS = 3
    """What a rank, and those below it in the tree, ask for beyond the cache. Towards rank 0."""
    RESPONSES = 4
    """What to do about it. Away from rank 0."""
    ASK = 5
    """Have you asked for these?"""
    TELL = 6
    """Of those, what this rank has asked for."""
    ABORT = 7
    """The agreement has ended for good."""
    LEAVE = 8
    """The sender takes part no more: it has closed the agreement in good order."""
    BEGIN = 9
    """A cycle has begun. The votes say it, too, but not those that a rank which has left would have passed on."""


def encode(kind: Kind, cycle: int, round_: int = 0, *, bits: int | None = None, value: Any = None) -> bytes:
    """Write a message with a bit vector or a JSON value."""
    head = _HEAD.pack(kind, round_, cycle)
    if bits is not None:
        return head + bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return head + json.dumps(value, separators=(",", ":")).encode()


def split(message: bytes) -> tuple[Kind, int, int, bytes]:
    """Kind, cycle, round and body of a message.

    Raises:
        ProtocolError: No correct peer sends this.
    """
    try:
        kind, round_, cycle = _HEAD.unpack_from(message)
        return Kind(kind), cycle, round_, message[_HEAD.size :]
    except (struct.error, ValueError) as cause:
        raise ProtocolError("a message of the agreement that no correct peer sends") from cause


def decode_bits(body: bytes, num_bits_max: int) -> int:
    """A bit vector.

    Raises:
        ProtocolError: It is longer than it can be.
    """
    bits = int.from_bytes(body, "little")
    if bits.bit_length() > num_bits_max:
        raise ProtocolError(f"a bit vector of {bits.bit_length()} bits where {num_bits_max} are known")
    return bits


def decode_json(body: bytes) -> Any:
    """A JSON value: data, never code.

    Raises:
        ProtocolError: It is none, or its parts would take more than 40 MiB of memory.
    """
    if sum(body.count(sign) * cost for sign, cost in _PART_BYTES) > _VALUE_BYTES_MAX:
        raise ProtocolError(f"a message of the agreement that takes more than {_VALUE_BYTES_MAX >> 20} MiB of memory")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("a message of the agreement that is no JSON") from cause
