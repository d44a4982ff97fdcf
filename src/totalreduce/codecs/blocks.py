"""Blocks: lists of indices and values, encoded as bytes for a message.

A block has the count (uint32) and the kind of values (uint8), then the gaps between indices, Rice-coded, and then the
values. A list without elements has no bytes. A block may be longer than necessary, with zeros at its end; see ``pack``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels import coding
from totalreduce.kernels.arrays import Array

__all__ = [
    "Lists",
    "ValueKind",
    "block_bytes_max",
    "pack",
    "pack_values",
    "rounded",
    "unpack",
    "unpack_all",
    "unpack_values",
    "value_bytes",
]

#: The encoding of values; ``none``: the block has indices only.
ValueKind = Literal["bfloat16", "float32", "none"]

_HEADER = struct.Struct("<IB")
_WIDTH: dict[ValueKind, int] = {"bfloat16": 2, "float32": 4, "none": 0}
_KINDS: tuple[ValueKind, ...] = ("bfloat16", "float32", "none")


def rounded(values: Array, kind: ValueKind) -> Array:
    """Return a copy of the values, rounded as the receiver will get them."""
    copy = values.copy()
    if kind == "bfloat16":
        coding.round_values(copy)
    return copy


def block_bytes_max(count: int, span: int, kind: ValueKind) -> int:
    """Return the largest size of a block of ``count`` elements whose indices differ by less than ``span``."""
    return _HEADER.size + coding.coded_bytes_max(count, span) + value_bytes(count, kind) if count else 0


def value_bytes(count: int, kind: ValueKind) -> int:
    """Return the number of bytes of ``count`` values."""
    return count * _WIDTH[kind]


def pack_values(values: Array, kind: ValueKind) -> Array:
    """Encode values that were rounded to the kind (see ``rounded``)."""
    raw = coding.narrow(values) if kind == "bfloat16" else values
    return np.ascontiguousarray(raw).view(np.uint8)


def unpack_values(raw: Array, kind: ValueKind) -> Array:
    """Undo ``pack_values``."""
    out = np.empty(raw.size // max(1, _WIDTH[kind]), np.float32)
    _read_values(raw, kind, out)
    return out


def _read_values(raw: Array, kind: ValueKind, out: Array) -> None:
    if kind == "bfloat16":
        coding.widen(raw.copy().view(np.uint16), out)  # a copy, because the values must be aligned
    else:
        out.view(np.uint8)[...] = raw


def pack(indices: Array, values: Array, begin: int, end: int, kind: ValueKind, *, size: int | None = None) -> Array:
    """Make a block.

    Args:
        indices: int32, ascending, in [begin, end).
        values: float32, rounded to the kind (see ``rounded``); for ``none`` an empty array.
        begin: The smallest possible index.
        end: The end of the range of indices.
        kind: The encoding of the values.
        size: The size of the block in bytes: ``block_bytes_max`` of as many elements or more.
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


class Lists(NamedTuple):
    """Lists of indices and values, one after the other."""

    indices: Array  #: int32.
    values: Array  #: float32: a value for each index, or none.
    bounds: Array  #: int64: the beginning of each list, and the end of the last one.


def unpack(block: Array, begin: int, end: int) -> tuple[Array, Array]:
    """Decode the indices and values of a block. Raises ``ProtocolError``."""
    lists = unpack_all([block], [(begin, end)])
    return lists.indices, lists.values


def unpack_all(blocks: Sequence[Array | tuple[Array, Array]], spans: Sequence[tuple[int, int]]) -> Lists:
    """Decode the indices and values of several blocks, one after the other. Raises ``ProtocolError``.

    Args:
        blocks: Blocks with values of one kind; or pairs of indices and values, which are copied.
        spans: The range of indices of each block.
    """
    headers = [
        (block[0].size, None) if isinstance(block, tuple) else _header(block, end - begin)
        for block, (begin, end) in zip(blocks, spans, strict=True)
    ]
    kinds = {kind for _, kind in headers if kind is not None}
    if len(kinds) > 1:
        raise ProtocolError(f"blocks of one exchange have values of different kinds: {sorted(kinds)}")
    bounds = np.cumsum([0, *(count for count, _ in headers)])
    indices = np.empty(bounds[-1], np.int32)
    values = np.empty(0 if "none" in kinds else bounds[-1], np.float32)
    for block, (begin, end), (_, kind), low, high in zip(
        blocks, spans, headers, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
    ):
        if isinstance(block, tuple):
            indices[low:high], values[low:high] = block
        elif kind is not None:
            _read(block[_HEADER.size :], kind, begin, end, indices[low:high], values[low:high])
    return Lists(indices, values, bounds)


def _header(block: Array, span: int) -> tuple[int, ValueKind | None]:
    """Return the number of elements in a block's header, which is checked, and their kind if there are any."""
    if not block.size:
        return 0, None
    if block.size < _HEADER.size:
        raise ProtocolError(f"a block of {block.size} bytes is too short for its header")
    count, number = _HEADER.unpack_from(block.data)
    if number >= len(_KINDS) or count > span:
        raise ProtocolError(f"a block claims {count} elements of kind {number} out of {span}")
    if count > 8 * (block.size - _HEADER.size):  # a gap takes one bit at least
        raise ProtocolError(f"a block of {block.size} bytes claims {count} elements")
    return count, _KINDS[number] if count else None


def _read(coded: Array, kind: ValueKind, begin: int, end: int, indices: Array, values: Array) -> None:
    used = coding.decode_gaps(coded, begin, end, indices)
    stop = used + value_bytes(indices.size, kind)
    if used < 0 or stop > coded.size:
        raise ProtocolError(f"a block of {indices.size} elements is damaged or too short ({coded.size} bytes)")
    _read_values(coded[used:stop], kind, values)
