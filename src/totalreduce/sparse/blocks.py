"""A list of indices and values as one block of bytes: what travels.

Layout: count (uint32) and kind of values (uint8); the gaps, Rice-coded; the values. No elements: no bytes. A block may
be longer than it need be, with zeros at its end; see ``pack``.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import coding
from totalreduce.sparse.accumulator import Array

__all__ = [
    "ValueKind",
    "block_bytes_max",
    "pack",
    "pack_values",
    "rounded",
    "unpack",
    "unpack_values",
    "value_bytes",
]

#: ``none``: there are indices only.
ValueKind = Literal["bfloat16", "float32", "none"]

_HEADER = struct.Struct("<IB")
_WIDTH: dict[ValueKind, int] = {"bfloat16": 2, "float32": 4, "none": 0}
_KINDS: tuple[ValueKind, ...] = ("bfloat16", "float32", "none")


def rounded(values: Array, kind: ValueKind) -> Array:
    """A copy of the values as they will arrive."""
    copy = values.copy()
    if kind == "bfloat16":
        coding.round_values(copy)
    return copy


def block_bytes_max(count: int, span: int, kind: ValueKind) -> int:
    """No block of so many elements, whose indices differ by less than ``span``, is longer."""
    return _HEADER.size + coding.coded_bytes_max(count, span) + value_bytes(count, kind) if count else 0


def value_bytes(count: int, kind: ValueKind) -> int:
    """So many values take so many bytes."""
    return count * _WIDTH[kind]


def pack_values(values: Array, kind: ValueKind) -> Array:
    """Values that were rounded to the kind (see ``rounded``), as bytes."""
    raw = coding.narrow(values) if kind == "bfloat16" else values
    return np.ascontiguousarray(raw).view(np.uint8)


def unpack_values(raw: Array, kind: ValueKind) -> Array:
    """Undo ``pack_values``."""
    aligned = raw.copy()
    return coding.widen(aligned.view(np.uint16)) if kind == "bfloat16" else aligned.view(np.float32)


def pack(indices: Array, values: Array, begin: int, end: int, kind: ValueKind, *, size: int | None = None) -> Array:
    """Make a block.

    Args:
        indices: int32, ascending, in [begin, end).
        values: float32, rounded to the kind (see ``rounded``); for ``none`` an empty array.
        begin: Where the indices begin.
        end: Where they end.
        kind: How values travel.
        size: Make it so many bytes long: ``block_bytes_max`` of as many elements or more.
    """
    count = indices.size
    block = np.zeros(block_bytes_max(count, end - begin, kind) if size is None else size, np.uint8)
    if not count:
        return block
    _HEADER.pack_into(block.data, 0, count, _KINDS.index(kind))
    parameter = coding.rice_parameter(count, end - begin)
    body = _HEADER.size + coding.encode_gaps(indices, begin, parameter, block[_HEADER.size :])
    stop = body + value_bytes(count, kind)
    block[body:stop] = pack_values(values, kind)
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
    count, number = _HEADER.unpack_from(block.data)
    if number >= len(_KINDS) or count > end - begin:
        raise ProtocolError(f"a block claims {count} elements of kind {number} out of {end - begin}")
    kind = _KINDS[number]
    coded = block[_HEADER.size :]
    if count > 8 * coded.size:  # a gap takes a bit at least: no memory for what cannot have come
        raise ProtocolError(f"a block of {block.size} bytes claims {count} elements")
    indices = np.empty(count, np.int32)
    used = coding.decode_gaps(coded, begin, end, indices)
    stop = used + value_bytes(count, kind)
    if used < 0 or stop > coded.size:
        raise ProtocolError(f"a block of {count} elements is damaged or too short ({block.size} bytes)")
    return indices, unpack_values(coded[used:stop], kind)
