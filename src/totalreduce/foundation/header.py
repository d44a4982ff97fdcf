"""The header: 64 fixed bytes before every body, which say to which part of which operation the body belongs.

A receiver that knows the operation receives the body straight into its destination; otherwise it keeps the message as
*floating*. Source: the Total Reduce design ("isend message head": id, size, state), with the iteration that its
published code had to add, and with the operation's signature, so that a disagreement is an error with both values and
not a hang.

Layout, little endian::

    offset size  field
    0      2     magic 0x5452 ("TR")
    2      1     version
    3      1     frame: data or one of the control frames
    4      4     group epoch
    8      8     operation id
    16     4     iteration of the operation on this group, from 0
    20     4     lane
    24     2     step of the lane's schedule
    26     1     flags
    27     1     reserved, 0
    28     4     body bytes
    32     16    signature: kind, dtype, reduction, 1 if the caller chose the schedule, root (4), shape digest (4),
                 hash of the schedule's name (4)
    48     8     signature: number of elements; of this pair of ranks, where only they know it
    56     4     priority of the sender (signed)
    60     4     reserved, 0

Nothing here allocates memory by a length that came from the network: the receiver decides about that.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature

__all__ = [
    "HEADER_BYTES",
    "Flag",
    "Frame",
    "Header",
    "declare_schedule",
    "pack_signature",
    "unpack_schedule",
    "unpack_signature",
    "with_count",
]

HEADER_BYTES = 64
MAGIC = 0x5452
VERSION = 3

_LAYOUT = struct.Struct("<HBBIQIIHBBI24siI")
_SIGNATURE = struct.Struct("<BBBBIIIQ")
assert _LAYOUT.size == HEADER_BYTES
assert _SIGNATURE.size == 24


class Frame(enum.IntEnum):
    """The type of a message."""

    DATA = 1
    POSTED = 2  # "I have submitted this operation: send all of it"
    CREDIT = 3  # "so many floating bytes of yours have found their operation, and so many bytes of entries"
    MISMATCH = 4  # "two ranks disagree about this operation"
    LOST = 5  # "this rank is lost"
    STATUS_REQUEST = 6  # "have you submitted this operation?"
    STATUS_REPLY = 7
    HEARTBEAT = 8  # of transports that poll; over TCP a heartbeat is one byte (``transports.connection.BEAT``)
    GOODBYE = 9  # "I close the group in good order"
    DESCRIBE = 10  # "this operation id is called so, and this is what I submit under it"
    REQUEST = 11  # "I hold messages of this operation: say when you have submitted it" (engine.entries says more)
    CHANNEL = 12  # a message of a protocol beside the engine; step 1: its last piece
    CHANNEL_BODY = 13  # a part of the bodies that follow such a message, for memory that its receiver knows


class Flag:
    """Bits of the flags byte; plain integers, because an ``IntFlag`` costs microseconds per message."""

    NONE: Final = 0
    EAGER: Final = 1  # sent before the receiver's permission; counts against an allowance of the sender
    URGENT: Final = 2  # a caller waits for this operation; promotes it on the receiver too


@dataclass(slots=True)
class Header:
    """One decoded header. ``signature`` stays packed: comparing 24 bytes is all that the fast path does."""

    frame: Frame
    epoch: int
    operation: int = 0
    iteration: int = 0
    lane: int = 0
    step: int = 0
    flags: int = 0
    body_bytes: int = 0
    signature: bytes = bytes(24)
    priority: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.frame,
            self.epoch,
            self.operation,
            self.iteration,
            self.lane,
            self.step,
            self.flags,
            0,
            self.body_bytes,
            self.signature,
            self.priority,
            0,
        )

    @staticmethod
    def pack_data(
        epoch: int,
        key: tuple[int, int],
        lane: int,
        step: int,
        flags: int,
        body_bytes: int,
        signature: bytes,
        priority: int,
    ) -> bytes:
        """Return the 64 bytes of a data header without making an object, because every message has one."""
        return _LAYOUT.pack(
            MAGIC, VERSION, _DATA, epoch, key[0], key[1], lane, step, flags, 0, body_bytes, signature, priority, 0
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Decode 64 bytes. Raises ``ProtocolError`` if magic, version or frame is wrong."""
        magic, version, frame, epoch, op, iteration, lane, step, flags, _, body, signature, priority, _ = (
            _LAYOUT.unpack(data)
        )
        if magic != MAGIC or version != VERSION:
            raise ProtocolError(f"not a totalreduce header: magic {magic:#06x}, version {version}")
        if frame not in _FRAMES:
            raise ProtocolError(f"unknown frame {frame}")
        return cls(_FRAMES[frame], epoch, op, iteration, lane, step, flags, body, signature, priority)


_DATA = int(Frame.DATA)
_FRAMES = {int(frame): frame for frame in Frame}


#: The schedules of this process by the number that stands for their name on the wire.
_SCHEDULE_NAMES: dict[int, str] = {}


def _schedule_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def declare_schedule(name: str) -> None:
    """Make the name of a schedule known, so that packed signatures can be described. Raises ``ConfigurationError``."""
    known = _SCHEDULE_NAMES.setdefault(_schedule_number(name), name)
    if known != name:
        raise ConfigurationError(f"the schedule names {name!r} and {known!r} have the same hash; rename one")


for _algorithm in Algorithm:
    declare_schedule(_algorithm)


def pack_signature(signature: Signature, carried_out_by: str | None = None) -> bytes:
    """Return the 24 bytes of a signature as they stand in the header.

    ``carried_out_by``: the schedule that the selector has chosen; without it the one that the caller has named. If two
    ranks ever choose differently, their messages must not be taken for parts of one schedule.
    """
    return _SIGNATURE.pack(
        signature.kind,
        signature.dtype,
        signature.reduction,
        signature.algorithm != Algorithm.AUTO,
        signature.root,
        signature.shape_digest,
        _schedule_number(carried_out_by or signature.algorithm),
        signature.num_elements,
    )


def with_count(packed: bytes, num_elements: int) -> bytes:
    """Return a packed signature with another number of elements: that of two ranks in a pairwise collective."""
    return packed[:-8] + num_elements.to_bytes(8, "little")


def unpack_schedule(data: bytes) -> str:
    """Return the name of the schedule that carries an operation out, from the packed signature."""
    number = _SIGNATURE.unpack(data)[6]
    return _SCHEDULE_NAMES.get(number, f"an unknown schedule ({number:#010x})")


def unpack_signature(data: bytes) -> str:
    """Return a description of a packed signature, which has only the number of elements of the shape."""
    kind, dtype, reduction, explicit, root, _, _, count = _SIGNATURE.unpack(data)
    algorithm = unpack_schedule(data) if explicit else Algorithm.AUTO
    try:
        return Signature(
            OpKind(kind), DType(dtype), ReduceOp(reduction), root, (count,), algorithm=algorithm
        ).describe()
    except ValueError:
        return f"an unknown operation (kind {kind}, dtype {dtype}, reduction {reduction})"
