"""Compares documents of all ranks: one small allreduce shows that they are equal, and every rank gets the differences.

A document is canonical JSON. Ranks compare settings and plans once, so training steps cost nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.collectives import Collectives

__all__ = ["agree", "agree_or_refuse", "broadcast_json"]

_Made = TypeVar("_Made")

_DIGEST_BYTES = 16
_DIFFERENCES_MAX = 20
#: The longest document that is broadcast for comparison.
_DOCUMENT_BYTES_MAX = 64 * 1024 * 1024


def agree(group: Collectives, name: str, document: Mapping[str, Any]) -> None:
    """Return if all ranks pass an equal document; else raise the same error on all of them.

    Args:
        group: The ranks that compare their documents.
        name: Subject of the comparison, for messages; equal on all ranks.
        document: JSON-ready values.

    Raises:
        PlanMismatchError: Documents differ. The message has the differences to rank 0, at most a screenful.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    digests = torch.zeros(group.world_size, _DIGEST_BYTES, dtype=torch.uint8, device="cpu")
    digests[group.rank] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    group.allreduce(digests, name=f"{name}/digest", op=ReduceOp.MAX).wait()
    others = [rank for rank in range(group.world_size) if not torch.equal(digests[rank], digests[0])]
    if not others:
        return
    reference = broadcast_json(group, f"{name}/reference", json.loads(text), root=0)
    lines: list[str] = []
    for rank in others[:_DIFFERENCES_MAX]:
        mine = _differences(reference, json.loads(text), rank) if rank == group.rank else []
        lines += broadcast_json(group, f"{name}/differences", mine, root=rank)
    if len(lines) > _DIFFERENCES_MAX:
        lines = [*lines[:_DIFFERENCES_MAX], f"... and {len(lines) - _DIFFERENCES_MAX} more"]
    raise PlanMismatchError(name, tuple(lines))


def agree_or_refuse(
    group: Collectives, name: str, make: Callable[[], _Made], describe: Callable[[_Made], Mapping[str, Any]]
) -> _Made:
    """Make an object on every rank and compare the descriptions. Collective, also for a rank that cannot make it.

    Args:
        group: The ranks.
        name: Subject of the comparison, for messages; equal on all ranks.
        make: Makes the object; does not communicate.
        describe: Returns the object's description as JSON values.

    Raises:
        ConfigurationError: From ``make``, on the ranks where it refused. The other ranks are told, so that they do not
            wait; where all refuse alike, each raises its own error.
        PlanMismatchError: The descriptions differ, or another rank refused.
    """
    try:
        made = make()
    except ConfigurationError as error:
        with suppress(PlanMismatchError):
            agree(group, name, {"refused": str(error)})
        raise
    agree(group, name, describe(made))
    return made


def broadcast_json(group: Collectives, name: str, value: Any, *, root: int) -> Any:
    """Broadcast a JSON value: its length, then its bytes.

    Raises:
        ValueError: The value is larger than 64 MiB.
    """
    body = json.dumps(value).encode() if group.rank == root else b""
    if len(body) > _DOCUMENT_BYTES_MAX:
        raise ValueError(f"{name!r} takes {len(body)} bytes as JSON; the limit is {_DOCUMENT_BYTES_MAX}")
    length = torch.tensor([len(body)], dtype=torch.int64, device="cpu")
    group.broadcast(length, root=root, name=f"{name}/length")
    data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    if group.rank == root:
        data.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    group.broadcast(data, root=root, name=f"{name}/data")
    return json.loads(data.numpy().tobytes())


def _differences(reference: Any, mine: Any, rank: int, path: str = "") -> list[str]:
    """Return one line per difference between rank 0's document and this rank's."""
    parts = _parts(reference, mine)
    if parts is None:
        return [] if reference == mine else [f"{path}: rank 0 has {_short(reference)}, rank {rank} has {_short(mine)}"]
    theirs, own = parts
    lines = []
    for key in dict.fromkeys([*theirs, *own]):
        where = path + key if path else key.removeprefix(".")
        if key not in own:
            lines.append(f"{where}: rank 0 has {_short(theirs[key])}, rank {rank} has nothing")
        elif key not in theirs:
            lines.append(f"{where}: rank 0 has nothing, rank {rank} has {_short(own[key])}")
        else:
            lines += _differences(theirs[key], own[key], rank, where)
    return lines


def _parts(*values: Any) -> list[dict[str, Any]] | None:
    """Return the parts of two objects or nested lists by their paths; ``None``: the values are compared as a whole."""
    if all(isinstance(value, dict) for value in values):
        return [{f".{key}": part for key, part in value.items()} for value in values]
    if all(isinstance(value, list) for value in values) and any(
        isinstance(part, (dict, list)) for value in values for part in value
    ):
        return [{f"[{index}]": part for index, part in enumerate(value)} for value in values]
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
