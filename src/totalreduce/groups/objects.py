"""Object collectives: they block, and send values of plain types in a bounded encoding (see ``encoding.py``).

Lengths travel first, so that no rank takes more memory than was announced and is allowed. If a value cannot be sent,
the reason is sent instead, and the operation fails on every rank that would get the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.collectives import Collectives
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, pack_refusal, unpack

__all__ = ["allgather_object", "broadcast_object", "gather_object", "scatter_object"]


def broadcast_object(group: Collectives, value: Any, *, root: int) -> Any:
    """Return the root's value on every rank."""
    refusal = None
    if group.rank == root:
        packed, refusal = _packed(group, value)
        length = torch.tensor([packed.numel()], dtype=torch.int64, device="cpu")
        group.broadcast(length, root=root)
    else:
        length = torch.tensor([0], dtype=torch.int64, device="cpu")
        group.broadcast(length, root=root)
        packed = _memory(length)
    group.broadcast(packed, root=root)
    if refusal is not None:
        raise refusal
    return value if group.rank == root else unpack(packed)


def allgather_object(group: Collectives, value: Any) -> list[Any]:
    """Return the values of all ranks on every rank."""
    packed, _ = _packed(group, value)
    lengths = torch.empty(group.world_size, dtype=torch.int64, device="cpu")
    group.allgather(lengths, torch.tensor([packed.numel()], dtype=torch.int64, device="cpu")).wait()
    parts = [_memory(length) for length in lengths]
    group.allgather(parts, packed).wait()
    return [unpack(part) for part in parts]


def gather_object(group: Collectives, value: Any, *, root: int) -> list[Any] | None:
    """Return the values of all ranks on the root."""
    is_root = group.rank == root
    packed, refusal = _packed(group, value)
    lengths = torch.empty(group.world_size, dtype=torch.int64, device="cpu") if is_root else None
    group.gather(lengths, torch.tensor([packed.numel()], dtype=torch.int64, device="cpu"), root=root).wait()
    parts = None if lengths is None else [_memory(length) for length in lengths]
    group.gather(parts, packed, root=root).wait()
    if refusal is not None:
        raise refusal
    return None if parts is None else [unpack(part) for part in parts]


def scatter_object(group: Collectives, values: Sequence[Any] | None, *, root: int) -> Any:
    """Return this rank's value out of the root's values."""
    parts = lengths = refusal = None
    if group.rank == root:
        parts, refusal = _all_packed(group, values)
        lengths = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device="cpu")
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    group.scatter(length, lengths, root=root).wait()
    data = _memory(length)
    group.scatter(data, parts, root=root).wait()
    if refusal is not None:
        raise refusal
    return unpack(data)


def _packed(group: Collectives, value: Any) -> tuple[torch.Tensor, ConfigurationError | None]:
    """Return the packed value; or the packed reason of a refusal, and the error that this rank raises afterwards."""
    try:
        return pack(value), None
    except ConfigurationError as error:
        return _refused(group, error)


def _all_packed(
    group: Collectives, values: Sequence[Any] | None
) -> tuple[list[torch.Tensor], ConfigurationError | None]:
    try:
        if values is None or len(values) != group.world_size:
            raise ConfigurationError(f"the root must pass {group.world_size} values, one per rank")
        return [pack(value) for value in values], None
    except ConfigurationError as error:
        packed, refusal = _refused(group, error)
        return [packed] * group.world_size, refusal


def _refused(group: Collectives, error: ConfigurationError) -> tuple[torch.Tensor, ConfigurationError]:
    refusal = ConfigurationError(
        f"rank {group.ranks[group.rank]} has an object that cannot be sent. {error}. Objects are never pickled: send "
        "what they are made of, and make them anew on the other side"
    )
    return pack_refusal(str(refusal)), refusal


def _memory(length: torch.Tensor) -> torch.Tensor:
    num_bytes = int(length)
    if not 0 <= num_bytes <= PACKED_BYTES_MAX:
        raise ProtocolError(f"an object of {num_bytes} bytes was announced; the limit is {PACKED_BYTES_MAX}")
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
