"""A list of indices and values as one block of bytes: what travels.

Layout: count (uint32), number of low bits and kind of values (uint8 each), two bytes of padding; the gaps, Rice-coded;
the values. No elements: no bytes. A block may be longer than it need be (see ``block_bytes_max``).
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import coding
from totalreduce.sparse.accumulator import Array

__all__ = ["ValueKind", "block_bytes_max", "pack", "rounded", "unpack"]

ValueKind = Literal["bfloat16", "float32"]

_HEADER = struct.Struct("<IBBxx")
_WIDTH: dict[ValueKind, int] = {"bfloat16": 2, "float32": 4}
_KINDS: tuple[ValueKind, ...] = ("bfloat16", "float32")


def rounded(values: Array, kind: ValueKind) -> Array:
    """A copy of the values as they will arrive."""
    copy = values.copy()
    if kind == "bfloat16":
        coding.round_values(copy)
    return copy


def block_bytes_max(count: int, span: int, kind: ValueKind) -> int:
    """No block of so many elements, whose indices differ by less than ``span``, is longer."""
    return _HEADER.size + coding.coded_bytes_max(count, span) + count * _WIDTH[kind] if count else 0


def pack(indices: Array, values: Array, begin: int, end: int, kind: ValueKind, *, size: int | None = None) -> Array:
    """Make a block.

    Args:
        indices: int32, ascending, in [begin, end).
        values: float32, rounded to the kind (see ``rounded``).
        begin: Where the indices begin.
        end: Where they end.
        kind: How values travel.
        size: Make it so many bytes long: ``block_bytes_max`` of the same.
    """
    count = indices.size
    room = block_bytes_max(count, end - begin, kind)
    block = np.zeros(room, np.uint8) if size is not None else np.empty(room, np.uint8)
    if not count:
        return block
    parameter = coding.rice_parameter(count, end - begin)
    _HEADER.pack_into(block, 0, count, parameter, _KINDS.index(kind))
    body = _HEADER.size + coding.encode_gaps(indices, begin, parameter, block[_HEADER.size :])
    raw = coding.narrow(values) if kind == "bfloat16" else values
    stop = body + count * _WIDTH[kind]
    block[body:stop] = np.ascontiguousarray(raw).view(np.uint8)
    return block[: stop if size is None else size]


def unpack(block: Array, begin: int, end: int) -> tuple[Array, Array]:
    """The indices and values of a block.

    Raises:
        ProtocolError: It is not one, or has indices outside [begin, end).
    """
    if not block.size:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    if block.size < _HEADER.size:
        raise ProtocolError(f"a block of {block.size} bytes is too short for its header")
    count, parameter, number = _HEADER.unpack_from(block)
    if number >= len(_KINDS) or parameter > 30 or not 0 < count <= end - begin:
        raise ProtocolError(f"a block claims {count} elements of kind {number} out of {end - begin}")
    kind = _KINDS[number]
    coded = block[_HEADER.size :]
    indices = np.empty(count, np.int32)
    used = coding.decode_gaps(coded, begin, end, parameter, indices)
    stop = used + count * _WIDTH[kind]
    if used < 0 or stop > coded.size:
        raise ProtocolError(f"a block of {count} elements is damaged or too short ({block.size} bytes)")
    raw = coded[used:stop].copy()
    return indices, coding.widen(raw.view(np.uint16)) if kind == "bfloat16" else raw.view(np.float32)
