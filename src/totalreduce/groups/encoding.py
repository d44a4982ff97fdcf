"""Encodes nested plain values as bounded JSON and a list of tensors. Nothing is pickled or executed.

A document is ``{"tensors": [[dtype, shape], ...], "value": node}``. A node is a scalar of JSON, which stands for
itself, or an object with one key, which is the kind of the value::

    {"list": [node, ...]}  {"dict": [[key node, node], ...]}  {"tensor": 0}  {"array": [1, "<f8", [2, 3]]}

The numbers of ``tensor`` and ``array`` are indices in the list of tensors, which holds all bytes. Floats arrive
exactly. A value arrives with the type that was sent. A value of a subclass of these types is refused, because it would
arrive as a value of another type.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import math
import pathlib
import re
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, Final, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.tensors.dtypes import problem_of_values

__all__ = [
    "decode",
    "empty_tensors",
    "encode",
    "pack",
    "pack_refusal",
    "packed_bytes",
    "tensor_problem",
    "unpack",
]

#: The deepest nesting: deeper than any optimizer's state, and far below Python's recursion limit.
_DEPTH_MAX = 32
#: The longest JSON, tensors not counted. A million numbers are shorter.
_DOCUMENT_BYTES_MAX = 24 * 1024 * 1024

#: The largest packed object.
PACKED_BYTES_MAX = 1 << 30

#: The types of tensors, by name.
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    )
}

#: The types of arrays: booleans, integers, floats, complex numbers, times, texts and bytes of a fixed length. No
#: objects, no records, and no ``long double``, whose bytes differ between machines.
_ARRAY_DTYPE: Final = re.compile(
    r"[<>|](b1|[iu][1248]|f[248]|c(8|16)|[SU][1-9]\d{0,8}|[mM]8(\[\d{0,9}[a-zA-Zμ]{1,7}\])?)"
)
_SCALARS: Final = (bool, int, float, str, type(None))
_CODE_POINT_MAX: Final = 0x10FFFF

_SENDABLE: Final = (
    "numbers, strings, bytes, None, tensors, NumPy arrays and scalars, lists, tuples, sets, dicts, OrderedDict, "
    "Counter, argparse.Namespace, enumerations, paths, dates and times, and torch's devices, dtypes and sizes can"
)
_MALFORMED: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError)


def encode(value: object) -> tuple[str, list[torch.Tensor]]:
    """Turn a nested value into JSON and the tensors that hold its bytes.

    Raises:
        ConfigurationError: A part of the value cannot be sent (see ``docs/collectives.md``) or is too large. The
            message says which part.
    """
    writer = _Writer()
    node = writer.node(value, "value", 0)
    described = [[_dtype_name(tensor.dtype), list(tensor.shape)] for tensor in writer.tensors]
    try:
        document = json.dumps({"tensors": described, "value": node})
    except ValueError as error:  # an integer of more digits than Python writes
        raise ConfigurationError(f"it cannot be written as JSON: {error}") from error
    if len(document) > _DOCUMENT_BYTES_MAX:
        raise ConfigurationError(
            f"its plain values take {len(document)} bytes as JSON; the limit is {_DOCUMENT_BYTES_MAX}. Send many "
            "numbers as a tensor or an array"
        )
    return document, writer.tensors


def decode(document: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that ``encode`` has turned into this document and these tensors.

    Raises:
        ProtocolError: ``encode`` makes no such document.
        ConfigurationError: The value has a member of an enumeration that this process does not have.
    """
    return _decode(_parsed(document), tensors)


def empty_tensors(document: str, device: str = "cpu") -> list[torch.Tensor]:
    """Return empty tensors of the types and shapes in a document; those on the device ``meta`` take no memory.

    Raises:
        ProtocolError: ``encode`` makes no such document.
    """
    return _empty(_announced(_parsed(document)), device)


def pack(value: object) -> torch.Tensor:
    """Turn a nested value into bytes: the length of the JSON (8 bytes), the JSON, and the tensors' bytes.

    Raises:
        ConfigurationError: As for ``encode``; or there are more than 1 GiB.
    """
    return _packed(*encode(value))


def packed_bytes(value: object) -> int:
    """Return how many bytes ``pack`` would return if there were no limit. Raises what ``encode`` does."""
    document, tensors = encode(value)
    return 8 + len(document.encode()) + sum(tensor.nbytes for tensor in tensors)


def pack_refusal(reason: str) -> torch.Tensor:
    """Return the bytes of a refusal: ``unpack`` raises a ``ConfigurationError`` with the reason."""
    return _packed(json.dumps({"tensors": [], "refused": reason}), [])


def unpack(data: torch.Tensor) -> Any:
    """Return the value that ``pack`` has turned into these bytes.

    Raises:
        ProtocolError: ``pack`` makes no such bytes.
        ConfigurationError: ``pack_refusal`` has made them; or as for ``decode``.
    """
    body = data.numpy().data.cast("B")
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(len(body) - 8, _DOCUMENT_BYTES_MAX):
        raise ProtocolError(f"a packed object of {len(body)} bytes that announces {length} bytes of JSON")
    try:
        document = _parsed(bytes(body[8 : 8 + length]).decode())
    except UnicodeDecodeError as cause:
        raise ProtocolError("a packed object that is no JSON") from cause
    if "refused" in document:
        raise ConfigurationError(str(document["refused"]))
    announced = _announced(document)
    offset = 8 + length
    num_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in announced)
    if num_bytes != len(body) - offset:  # before any memory is taken for them
        raise ProtocolError(f"a packed object that announces {num_bytes} bytes of tensors has {len(body) - offset}")
    tensors = _empty(announced)
    for tensor in tensors:
        part = body[offset : offset + tensor.nbytes]
        if len(part):
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))
        offset += len(part)
    return _decode(document, tensors)


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Say why a tensor, on any device, cannot be sent, and what to do; ``None``: it can."""
    problem = problem_of_values(tensor)
    if problem is None and _dtype_name(tensor.dtype) not in _DTYPES:
        problem = f"has dtype {tensor.dtype}; it must be one of {', '.join(_DTYPES)}"
    return problem


def _packed(document: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    text = document.encode()
    num_bytes = 8 + len(text) + sum(tensor.nbytes for tensor in tensors)
    if num_bytes > PACKED_BYTES_MAX:
        raise ConfigurationError(f"it takes {num_bytes} bytes; the limit is {PACKED_BYTES_MAX}")
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # not reshape: an extent of one may have any stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------- writing


@final
class _Writer:
    """Makes the nodes of one document, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def node(self, value: Any, path: str, depth: int) -> object:
        """Return the node of a value that is nested ``depth`` levels deep; ``path`` is its name in messages.

        Raises:
            ConfigurationError: The value cannot be sent.
        """
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth > _DEPTH_MAX:
            raise ConfigurationError(f"{path}: nested deeper than {_DEPTH_MAX} levels")
        if kind in _SEQUENCES:
            items = [self.node(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
            return {_SEQUENCES[kind]: items}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, path, depth)}
        if kind is OrderedDict:
            # The versions of a module's parts, which load_state_dict uses.
            metadata = self.node(vars(value).get("_metadata"), f"{path}._metadata", depth + 1)
            return {"ordered dict": [self._pairs(value, path, depth), metadata]}
        if kind in _NAMESPACES:
            return {_NAMESPACES[kind]: self._pairs(vars(value), path, depth)}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._attach(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        for kinds, name, write in _WORDS:
            if kind in kinds:
                return {name: write(value)}
        if isinstance(value, enum.Enum):
            return self._member(value, path)
        raise ConfigurationError(f"{path}: a {kind.__name__} cannot be sent; {_hint(value)}")

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[object]:
        return [
            [
                key if type(key) is str else self.node(key, f"the key {key!r:.60} of {path}", depth + 1),
                self.node(item, f"{path}[{key!r:.60}]", depth + 1),
            ]
            for key, item in value.items()
        ]

    def _attach(self, data: bytes | bytearray) -> int:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else nothing
        self.tensors.append(whole)
        return len(self.tensors) - 1

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        problem = tensor_problem(tensor)
        if problem is not None:
            raise ConfigurationError(f"{path}: a tensor cannot be sent: it {problem}")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> object:
        dtype = value.dtype.str
        if _ARRAY_DTYPE.fullmatch(dtype) is None:
            form = "scalar" if isinstance(value, np.generic) else "array"
            advice = " (its elements are Python objects: send a list)" if value.dtype.hasobject else ""
            raise ConfigurationError(
                f"{path}: a NumPy {form} of dtype {value.dtype} cannot be sent{advice}; only booleans, numbers, times, "
                "and texts of a fixed length can"
            )
        index = self._attach(value.tobytes())
        return {"number": [index, dtype]} if isinstance(value, np.generic) else {"array": [index, dtype, value.shape]}

    @staticmethod
    def _member(value: enum.Enum, path: str) -> object:
        kind = type(value)
        module, qualname, name = kind.__module__, kind.__qualname__, value.name
        if name is None or _member_of(module, qualname, name) is not value:
            raise ConfigurationError(
                f"{path}: {value!r} is not {module}.{qualname}.{name}, where the other ranks would look for it: send "
                "its name or its value"
            )
        return {"enum": [module, qualname, name]}


def _hint(value: Any) -> str:
    """Say what to send instead of a value that cannot be sent."""
    if is_dataclass(value) and not isinstance(value, type):
        return "send dataclasses.asdict(...) of it"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "send its _asdict()"
    for kind in (dict, list, tuple, set, frozenset, np.ndarray, str, bytes, int, float):
        if isinstance(value, kind):
            return f"it would arrive as a {kind.__name__}: send a {kind.__name__} that is made of it"
    return f"only {_SENDABLE}"


def _member_of(module: str, qualname: str, name: str) -> enum.Enum | None:
    """Return a member of an enumeration of this process. Nothing is imported, and no code of the module runs."""
    scope: object = sys.modules.get(module)
    for part in qualname.split("."):
        if isinstance(scope, types.ModuleType):
            found = object.__getattribute__(scope, "__dict__")
        elif isinstance(scope, type):
            found = type.__getattribute__(scope, "__dict__")
        else:
            return None
        scope = found.get(part)
    if not isinstance(scope, enum.EnumType):
        return None
    member = scope.__members__.get(name)
    return member if isinstance(member, enum.Enum) else None


# ------------------------------------------------------------------------------------------------------------- reading


def _parsed(document: str) -> dict[str, Any]:
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError) as cause:
        raise ProtocolError("a packed object that is no JSON") from cause
    if not isinstance(parsed, dict) or parsed.keys() not in ({"tensors", "value"}, {"tensors", "refused"}):
        raise ProtocolError(f"a document that no correct peer sends: {str(parsed)[:80]!r}")
    return parsed


def _announced(document: dict[str, Any]) -> list[tuple[torch.dtype, list[int]]]:
    """Return the dtypes and shapes of a document's tensors."""
    try:
        return [(_DTYPES[dtype], _checked_shape(shape)) for dtype, shape in document["tensors"]]
    except _MALFORMED as cause:
        raise ProtocolError(f"tensors that no correct peer sends: {str(document['tensors'])[:80]!r}") from cause


def _empty(announced: Iterable[tuple[torch.dtype, list[int]]], device: str = "cpu") -> list[torch.Tensor]:
    try:
        return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in announced]
    except (RuntimeError, TypeError, OverflowError) as cause:
        raise ProtocolError("tensors were announced that do not fit into memory") from cause


def _checked_shape(shape: Any) -> list[int]:
    extents = _listed(shape)
    if any(type(extent) is not int or extent < 0 for extent in extents):
        raise ValueError(shape)
    return extents


def _decode(document: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    try:
        return _Reader(tensors).value(document["value"], 0)
    except ConfigurationError:  # which is a ValueError, too
        raise
    except _MALFORMED as cause:
        raise ProtocolError(f"a value that no correct peer sends: {str(document.get('value'))[:80]!r}") from cause


@final
class _Reader:
    """Makes a value of the nodes of one document. Raises one of ``_MALFORMED`` for other nodes than ``_Writer``'s."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def value(self, node: Any, depth: int) -> Any:
        """Return the value of a node that is nested ``depth`` levels deep."""
        if isinstance(node, _SCALARS):
            return node
        if depth > _DEPTH_MAX:
            raise ValueError(depth)
        [(kind, content)] = node.items()
        if kind in _SEQUENCE_KINDS:
            return _SEQUENCE_KINDS[kind]([self.value(item, depth + 1) for item in _listed(content)])
        if kind in _MAPPING_KINDS:
            return _MAPPING_KINDS[kind](self._pairs(content, depth))
        match kind:
            case "ordered dict":
                pairs, metadata = content
                ordered = OrderedDict(self._pairs(pairs, depth))
                if metadata is not None:
                    vars(ordered)["_metadata"] = self.value(metadata, depth + 1)
                return ordered
            case "tensor":
                return self._attached(content)
            case "bytes" | "bytearray":
                data = self._attached(content).numpy().tobytes()
                return data if kind == "bytes" else bytearray(data)
            case "array":
                return self._array(*content)
            case "number":
                index, dtype = content
                return self._array(index, dtype, [])[()]
            case "enum":
                return _found_member(*content)
        return _WORD_KINDS[kind](content)

    def _pairs(self, pairs: Any, depth: int) -> dict[Any, Any]:
        return {self.value(key, depth + 1): self.value(item, depth + 1) for key, item in _listed(pairs)}

    def _attached(self, index: Any) -> torch.Tensor:
        if type(index) is not int or index < 0:
            raise ValueError(index)
        return self._tensors[index]

    def _array(self, index: Any, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        if _ARRAY_DTYPE.fullmatch(dtype) is None:
            raise ValueError(dtype)
        data = self._attached(index)
        if data.dtype is not torch.uint8:
            raise ValueError(data.dtype)
        flat = data.view(-1).numpy().view(np.dtype(dtype))
        if flat.dtype.kind == "U" and flat.view(f"{flat.dtype.str[0]}u4").max(initial=0) > _CODE_POINT_MAX:
            raise ValueError("a text that is no Unicode")
        return flat.reshape(_checked_shape(shape))


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(content)
    return content


def _found_member(module: str, qualname: str, name: str) -> enum.Enum:
    member = _member_of(module, qualname, name)
    if member is None:
        raise ConfigurationError(
            f"{module}.{qualname}.{name} was sent, but this rank has imported no such member of an enumeration: import "
            "it here, too, or send its name or its value"
        )
    return member


# --------------------------------------------------------------------------------------------------------------- kinds

_SEQUENCES: Final[dict[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", Counter: "counter"}
_NAMESPACES: Final[dict[type, str]] = {argparse.Namespace: "namespace", types.SimpleNamespace: "simple namespace"}


def _with_attributes(namespace: Any, attributes: dict[Any, Any]) -> Any:
    if not all(type(name) is str for name in attributes):
        raise TypeError(attributes)
    vars(namespace).update(attributes)  # not as keywords: "self" is a name, too
    return namespace


def _wall_clock(value: datetime.datetime | datetime.time) -> str:
    """Write a time by ISO 8601, which loses the names of time zones: such times are refused."""
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise ConfigurationError(
            f"the time zone {value.tzinfo} of {value} cannot be sent: convert it with astimezone(datetime.timezone.utc)"
        )
    return value.isoformat()


def _complex(parts: Any) -> complex:
    real, imaginary = parts
    return complex(float(real), float(imaginary))


#: Types, the kind of their nodes, and the function that writes them.
_WORDS: Final[tuple[tuple[tuple[type, ...], str, Callable[[Any], object]], ...]] = (
    ((complex,), "complex", lambda value: [value.real, value.imag]),
    ((pathlib.PosixPath, pathlib.WindowsPath), "path", str),
    ((pathlib.PurePosixPath,), "posix path", str),
    ((pathlib.PureWindowsPath,), "windows path", str),
    ((datetime.datetime,), "datetime", _wall_clock),
    ((datetime.date,), "date", datetime.date.isoformat),
    ((datetime.time,), "time", _wall_clock),
    ((datetime.timedelta,), "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    ((torch.device,), "device", str),
    ((torch.dtype,), "dtype", _dtype_name),
)

_SEQUENCE_KINDS: Final[dict[str, Callable[[list[Any]], Any]]] = {name: kind for kind, name in _SEQUENCES.items()}
_MAPPING_KINDS: Final[dict[str, Callable[[dict[Any, Any]], Any]]] = {
    "dict": dict,
    "counter": Counter,
    "namespace": lambda pairs: _with_attributes(argparse.Namespace(), pairs),
    "simple namespace": lambda pairs: _with_attributes(types.SimpleNamespace(), pairs),
}
_WORD_KINDS: Final[dict[str, Callable[[Any], Any]]] = {
    "complex": _complex,
    "path": pathlib.Path,
    "posix path": pathlib.PurePosixPath,
    "windows path": pathlib.PureWindowsPath,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "device": torch.device,
    "dtype": {_dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}.__getitem__,
}
