"""Frozen records as JSON and back: settings for workers, samples from workers, figures for files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_document(value: Any) -> Any:
    """Return the value as JSON has it: records and mappings as objects, sequences as lists, paths as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_document(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(item) for item in value]
    if isinstance(value, Enum):
        return value.name.lower()
    return str(value) if isinstance(value, Path) else value


def from_document(kind: type[T], document: Any) -> T:
    """Return the value of this type that ``to_document`` has written; fields that a record does not have are left out.

    Args:
        kind: A record, ``list[...]``, ``tuple[...]``, ``dict[str, ...]``, an optional of these, or a plain type.
        document: Decoded JSON.
    """
    found: T = _decode(kind, document)
    return found


def _decode(kind: Any, document: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if document is None else _decode(inner, document)
    if origin is list:
        return [_decode(arguments[0], item) for item in document]
    if origin is tuple:
        kinds = arguments[:1] * len(document) if arguments[-1] is ... else arguments
        return tuple(_decode(inner, item) for inner, item in zip(kinds, document, strict=True))
    if origin is dict:
        return {key: _decode(arguments[1], item) for key, item in document.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in document.items() if name in hints})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[document.upper()]
    return kind(document) if kind in (Path, float) else document
