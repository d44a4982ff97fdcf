"""Object collectives: values of plain types in a bounded encoding (see ``encoding``). Nothing is ever unpickled.

Lengths go first, so that nobody takes memory for more than was announced and is allowed. They block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, unpack

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["allgather_object", "broadcast_object", "gather_object", "scatter_object"]


def broadcast_object(group: Group, value: Any, *, root: int) -> Any:
    """The root's value on every rank."""
    packed = pack(value) if group.rank == root else None
    length = torch.tensor([0 if packed is None else packed.numel()])
    group.broadcast(length, root=root)
    data = _memory(length) if packed is None else packed
    group.broadcast(data, root=root)
    return value if packed is not None else unpack(data)


def allgather_object(group: Group, value: Any) -> list[Any]:
    """Every rank's value on every rank."""
    packed = pack(value)
    lengths = torch.empty(group.world_size, dtype=torch.int64)
    group.allgather(lengths, torch.tensor([packed.numel()])).wait()
    parts = [_memory(length) for length in lengths]
    group.allgather(parts, packed).wait()
    return [unpack(part) for part in parts]


def gather_object(group: Group, value: Any, *, root: int) -> list[Any] | None:
    """Every rank's value on the root."""
    packed, is_root = pack(value), group.rank == root
    lengths = torch.empty(group.world_size, dtype=torch.int64) if is_root else None
    group.gather(lengths, torch.tensor([packed.numel()]), root=root).wait()
    parts = None if lengths is None else [_memory(length) for length in lengths]
    group.gather(parts, packed, root=root).wait()
    return None if parts is None else [unpack(part) for part in parts]


def scatter_object(group: Group, values: Sequence[Any] | None, *, root: int) -> Any:
    """This rank's one of the root's values."""
    parts = lengths = None
    if group.rank == root:
        if values is None or len(values) != group.world_size:
            raise ConfigurationError(f"the root must pass {group.world_size} values, one per rank")
        parts = [pack(value) for value in values]
        lengths = torch.tensor([part.numel() for part in parts])
    length = torch.empty(1, dtype=torch.int64)
    group.scatter(length, lengths, root=root).wait()
    data = _memory(length)
    group.scatter(data, parts, root=root).wait()
    return unpack(data)


def _memory(length: torch.Tensor) -> torch.Tensor:
    num_bytes = int(length)
    if not 0 <= num_bytes <= PACKED_BYTES_MAX:
        raise ProtocolError(f"an object of {num_bytes} bytes was announced; the limit is {PACKED_BYTES_MAX}")
    return torch.empty(num_bytes, dtype=torch.uint8)
