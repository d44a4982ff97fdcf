"""Nested plain values and tensors as bounded JSON plus a list of tensors. Nothing is pickled or executed.

Scalars stand for themselves; everything else is an object with one key that says what it is::

    {"list": [...]}  {"tuple": [...]}  {"dict": [[key, value], ...]}  {"tensor": [dtype, shape]}  {"bytes": [count]}

Tensors come in the order in which they occur. Floats survive exactly, as Python writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.tensors import problem_of_layout

__all__ = ["decode", "empty_tensors", "encode", "pack", "unpack"]

#: Deeper than any optimizer's state, and far below Python's recursion limit.
_DEPTH_MAX = 32
#: Tensors do not count; a million numbers do not reach it.
_DOCUMENT_BYTES_MAX = 24 * 1024 * 1024

#: Of a whole packed object.
PACKED_BYTES_MAX = 1 << 30

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}


def encode(value: object) -> tuple[str, list[torch.Tensor]]:
    """Turn a nested value into JSON and the tensors that occur in it.

    Raises:
        ConfigurationError: It holds something else than tensors, numbers, strings, ``None``, lists, tuples
            and dicts, or too much of it; the message says where.
    """
    tensors: list[torch.Tensor] = []
    document = json.dumps(_encode(value, tensors, "state", 0))
    if len(document) > _DOCUMENT_BYTES_MAX:
        raise ConfigurationError(
            f"its plain values take {len(document)} bytes as JSON; the limit is {_DOCUMENT_BYTES_MAX}"
        )
    return document, tensors


def decode(document: str, tensors: list[torch.Tensor]) -> Any:
    """The value that ``encode`` turned into ``document``, with these tensors in it.

    Raises:
        ProtocolError: ``encode`` makes no such document.
    """
    remaining = iter(tensors)
    return _decode(json.loads(document), remaining, 0)


def empty_tensors(document: str) -> list[torch.Tensor]:
    """Memory for the tensors of a document, in order.

    Raises:
        ProtocolError: ``encode`` makes no such document.
    """
    found: list[torch.Tensor] = []
    for dtype, shape in _tensor_nodes(json.loads(document), 0):
        if dtype not in _DTYPES or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
            raise ProtocolError(f"a tensor of dtype {dtype!r} and shape {shape!r} was announced")
        found.append(torch.empty(shape, dtype=_DTYPES[dtype]))
    return found


def pack(value: object) -> torch.Tensor:
    """A nested value as bytes: length of the JSON (8 bytes), the JSON, the tensors' bytes one after the other.

    Raises:
        ConfigurationError: See ``encode``; or more than 1 GiB in all.
    """
    document, tensors = encode(value)
    text = document.encode()
    parts: list[bytes | memoryview] = [
        len(text).to_bytes(8, "little"),
        text,
        *(_bytes_of(tensor) for tensor in tensors),
    ]
    num_bytes = sum(map(len, parts))
    if num_bytes > PACKED_BYTES_MAX:
        raise ConfigurationError(f"an object of {num_bytes} bytes; the limit is {PACKED_BYTES_MAX}")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """The value that ``pack`` turned into these bytes.

    Raises:
        ProtocolError: ``pack`` makes no such bytes.
    """
    body = data.numpy().data.cast("B")
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(len(body) - 8, _DOCUMENT_BYTES_MAX):
        raise ProtocolError(f"a packed object of {len(body)} bytes that announces {length} bytes of JSON")
    try:
        document = bytes(body[8 : 8 + length]).decode()
        tensors = empty_tensors(document)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("a packed object that is no JSON") from cause
    place = 8 + length
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        part = body[place : place + num_bytes]
        if len(part) != num_bytes:
            raise ProtocolError("a packed object that is shorter than it announces")
        if num_bytes:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))
        place += num_bytes
    return decode(document, tensors)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # not reshape: an extent of one may have any stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _encode(value: object, tensors: list[torch.Tensor], path: str, depth: int) -> object:
    if depth > _DEPTH_MAX:
        raise ConfigurationError(f"{path}: nested deeper than {_DEPTH_MAX} levels")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        problem = problem_of_layout(value)
        if problem is None and value.is_meta:
            problem = "is on meta and has no values"
        if problem is None and name not in _DTYPES:
            problem = f"has dtype {value.dtype}; it must be one of {', '.join(_DTYPES)}"
        if problem is not None:
            raise ConfigurationError(f"{path}: a tensor cannot be broadcast: it {problem}")
        tensors.append(value)
        return {"tensor": [name, list(value.shape)]}
    if isinstance(value, (bytes, bytearray)):
        tensors.append(
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        )
        return {"bytes": [len(value)]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise ConfigurationError(f"{path}: a key of type {type(key).__name__} cannot be broadcast")
            pairs.append([key, _encode(item, tensors, f"{path}[{key!r}]", depth + 1)])
        return {"dict": pairs}
    raise ConfigurationError(
        f"{path}: a {type(value).__name__} cannot be broadcast; only tensors, numbers, strings, bytes, None, lists, "
        "tuples and dicts can"
    )


def _decode(node: Any, tensors: Iterator[torch.Tensor], depth: int) -> Any:
    kind, items = _open(node, depth)
    if kind == "scalar":
        return items
    if kind == "tensor":
        return next(tensors)
    if kind == "bytes":
        return next(tensors).numpy().tobytes()
    if kind == "dict":
        return {key: _decode(item, tensors, depth + 1) for key, item in items}
    decoded = [_decode(item, tensors, depth + 1) for item in items]
    return decoded if kind == "list" else tuple(decoded)


def _tensor_nodes(node: Any, depth: int) -> Iterator[tuple[str, list[int]]]:
    kind, items = _open(node, depth)
    if kind == "tensor":
        dtype, shape = items
        yield dtype, shape
    elif kind == "bytes":
        yield "uint8", items
    elif kind != "scalar":
        for item in items:
            yield from _tensor_nodes(item[1] if kind == "dict" else item, depth + 1)


def _open(node: Any, depth: int) -> tuple[str, Any]:
    if node is None or isinstance(node, (bool, int, float, str)):
        return "scalar", node
    if depth <= _DEPTH_MAX and isinstance(node, dict) and len(node) == 1:
        kind, items = next(iter(node.items()))
        if kind in ("list", "tuple", "dict", "tensor", "bytes") and isinstance(items, list):
            return kind, items
    raise ProtocolError(f"unknown value in a broadcast document: {str(node)[:80]!r}")
