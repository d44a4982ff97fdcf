"""The part of a sharded state that one rank has: taken from a state, packed, and loaded by the same or other ranks.

A ``Part`` has what ``State.shared`` returns, but its sharded tensors (``DTensor``) are apart: the rank's elements, and
their place in the whole tensor. So a part says by itself which elements it has, and other ranks than those that wrote
the parts can load them. Plain tensors (buffers, parameters that FSDP ignores, the optimizer's counters of steps) belong
to the rank: where the number of ranks is the same, a rank gets back its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RecoveryError, UnsupportedError
from totalreduce.groups.encoding import decode, empty_tensors, encode
from totalreduce.groups.group import Group
from totalreduce.pytorch.broadcast import room_of, slots_of
from totalreduce.recovery.resharding import Box, Transfer, transfers
from totalreduce.recovery.sharing import send_value
from totalreduce.recovery.state import State
from totalreduce.tensors.flats import fetch

__all__ = ["PackedPart", "Part", "Piece", "load_parts", "load_rest", "part_of", "unpack_part"]

#: Where a value is in what ``State.shared`` returns.
Path = tuple[str | int, ...]

#: The bytes of the tensors that one exchange moves, unless a single tensor has more.
_BATCH_BYTES = 16 * 1024 * 1024
#: A packed part begins with the length of its document, and its tensors begin at a multiple of the other number.
_LENGTH_BYTES, _ALIGNMENT_BYTES = 8, 16


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one sharded tensor that one rank has."""

    shape: tuple[int, ...]  #: The shape of the whole tensor.
    box: Box  #: Which elements these are.
    elements: torch.Tensor  #: The elements, in the shape of the box.


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of a sharded state."""

    shared: dict[str, Any]  #: What ``State.shared`` returns, with ``None`` in place of each sharded tensor.
    pieces: dict[Path, Piece]  #: The rank's elements of each sharded tensor, by its path in ``shared``.

    def plain(self) -> dict[str, Any]:
        """Return the part as a value that can be encoded."""
        pieces = {path: [each.shape, each.box.offset, each.elements] for path, each in self.pieces.items()}
        return {"shared": self.shared, "pieces": pieces}

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the part of which ``plain`` has returned this value. Raises ``ProtocolError``."""
        try:
            pieces = {
                path: Piece(tuple(shape), Box(tuple(offset), tuple(elements.shape)), elements)
                for path, (shape, offset, elements) in value["pieces"].items()
            }
            return cls(value["shared"], pieces)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a part of a sharded state that no correct rank writes: {error!r:.200}") from error


# ------------------------------------------------------------------------------------------------------------- packing


@final
class PackedPart:
    """A part that is about to be copied into one row of bytes."""

    def __init__(self, part: Part) -> None:
        document, self._tensors = encode(part.plain())
        self._document = document.encode()
        self.num_bytes = _begin(len(self._document)) + sum(map(room_of, self._tensors))  #: The length of the row.

    def copy_into(self, row: torch.Tensor) -> None:
        """Copy the part into a row of ``num_bytes`` bytes."""
        length = torch.tensor([len(self._document)], dtype=torch.int64, device="cpu")
        row[:_LENGTH_BYTES] = length.view(torch.uint8)
        end = _LENGTH_BYTES + len(self._document)
        row[_LENGTH_BYTES:end] = torch.frombuffer(bytearray(self._document), dtype=torch.uint8)
        if self._tensors:
            slots = slots_of(row[_begin(len(self._document)) :], self._tensors)
            fetch(slots, self._tensors)


def unpack_part(row: torch.Tensor) -> Part:
    """Return the part in a row of bytes. Its tensors share the memory of the row. Raises ``ProtocolError``."""
    length = int(row[:_LENGTH_BYTES].view(torch.int64)) if row.numel() >= _LENGTH_BYTES else -1
    if not 0 <= length <= row.numel() - _LENGTH_BYTES:
        raise ProtocolError(f"a packed part of {row.numel()} bytes with a document of {length} bytes")
    document = bytes(row[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy()).decode(errors="replace")
    tensors = empty_tensors(document, device="meta")  # no memory is taken for what a wrong document announces
    body = row[_begin(length) :]
    if sum(map(room_of, tensors)) != body.numel():
        raise ProtocolError(f"a packed part with {body.numel()} bytes of tensors, and its document has other lengths")
    return Part.of(decode(document, slots_of(body, tensors)))


def _begin(document_bytes: int) -> int:
    return -(-(_LENGTH_BYTES + document_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# -------------------------------------------------------------------------------------------------------- from a state


def part_of(state: State) -> Part:
    """Return this rank's part of a state. Its tensors share the state's memory.

    Raises:
        UnsupportedError: A tensor is sharded in a way of which another rank cannot load it.
        ConfigurationError: A sharded tensor is neither a parameter nor of the optimizer's state of a parameter.
    """
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward pass, parameters can be whole
    parameters = state.parameters_by_path()
    pieces: dict[Path, Piece] = {}
    shared = _without_shards(state.shared(), (), parameters, pieces)
    return Part(shared, pieces)


def _without_shards(node: Any, path: Path, parameters: Mapping[Path, torch.Tensor], pieces: dict[Path, Piece]) -> Any:
    """Return a value with ``None`` in place of each sharded tensor, and note its elements in ``pieces``."""
    if isinstance(node, DTensor):
        parameter = parameters.get(path, parameters.get(path[:-1]))
        pieces[path] = _piece(node, parameter, path)
        return None
    if isinstance(node, Mapping):
        rest = {key: _without_shards(value, (*path, key), parameters, pieces) for key, value in node.items()}
        return rest if type(node) is dict else node  # others are values of the program, in which no shard is accepted
    if isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _without_shards(value, (*path, index), parameters, pieces)
    return node


def _piece(tensor: DTensor, parameter: torch.Tensor | None, path: Path) -> Piece:
    if parameter is None:
        raise ConfigurationError(
            f"{_shown(path)} of the state is a sharded tensor, and only parameters and the optimizer's state of a "
            "parameter may be sharded: keep the whole tensor (.full_tensor()), or leave it out of the state"
        )
    if not isinstance(parameter, DTensor) or (tensor.device_mesh, tensor.placements) != (
        parameter.device_mesh,
        parameter.placements,
    ):
        raise UnsupportedError(f"{_shown(path)} is sharded in another way than its parameter, which is not supported")
    box = _box(tuple(tensor.shape), parameter, path)
    return Piece(tuple(tensor.shape), box, tensor.to_local())


def _box(shape: tuple[int, ...], parameter: DTensor, path: Path) -> Box:
    """Return the elements that this rank has of a tensor that is sharded as a parameter is."""
    shards = [each for each in parameter.placements if type(each) is Shard]
    others = [each for each in parameter.placements if type(each) not in (Shard, Replicate)]
    if len(shards) > 1 or others:
        raise UnsupportedError(
            f"{_shown(path)} has the placements {parameter.placements}. Copies are made of FSDP2 on a mesh of one "
            "dimension and of HSDP, where one dimension shards and the others replicate; not with tensor parallelism"
        )
    extents, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return Box(tuple(offset), tuple(extents))


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


# ---------------------------------------------------------------------------------------------------------- to a state


@torch.no_grad()
def load_parts(
    state: State, group: Group, parts: Mapping[int, Part], servers: Mapping[int, int], world_size: int
) -> None:
    """Load a state whose parts some ranks have. Collective.

    Each rank gets from the others what its shards lack. Memory for messages: for two exchanges of one batch, or of the
    elements of the largest tensor that a rank has.

    Args:
        state: The state, whose model is sharded among the ranks of the group.
        group: The ranks.
        parts: By number: the parts that this rank gives to the others.
        servers: By number: the rank that gives the part. Equal on all ranks.
        world_size: The number of parts.

    Raises:
        RecoveryError: No part has some of the elements.
        ConfigurationError: It is the state of another model.
        UnsupportedError: A parameter is sharded in a way that is not supported.
    """
    control = group.control
    described: dict[int, dict[Path, Any]] = {}
    for words in control.allgather_object({part: _described(each) for part, each in parts.items()}):
        described.update(words)
    first = min(servers)
    outline = {key: parts[first].shared.get(key) for key in ("layout", "trained")} if first in parts else None
    state.adopt(control.broadcast_object(outline, root=servers[first]))
    tensors = _Tensors(described, state.parameters_by_path())
    wanted = control.allgather_object([[box.offset, box.shape] for box in tensors.boxes.values()])
    shared = _send_rest(group, parts, servers, world_size)
    index_of = {path: index for index, path in enumerate(tensors.paths)}
    for number, batch in enumerate(tensors.batches()):
        plans = {}
        for path in batch:
            needed = [Box(tuple(words[index_of[path]][0]), tuple(words[index_of[path]][1])) for words in wanted]
            plans[path] = transfers(tensors.held(path), servers, needed, _shown(path))
        received = _exchange(control, number, plans, parts, tensors)
        for path, elements in received.items():
            _put(shared, path, tensors.whole(path, elements))
    state.load_shared(shared)


@torch.no_grad()
def load_rest(state: State, group: Group) -> None:
    """Give what is not sharded, of rank 0's state, to all ranks. Collective."""
    part = part_of(state)
    rest = send_value(part.shared, group, 0, range(1, group.world_size))
    parameters = state.parameters_by_path()
    for path, piece in part.pieces.items():
        parameter = parameters.get(path, parameters.get(path[:-1]))
        assert isinstance(parameter, DTensor)
        _put(rest, path, _whole(piece.elements, piece.shape, parameter))
    if group.rank != 0:
        state.load_shared(rest)


@final
class _Tensors:
    """The sharded tensors of a state."""

    def __init__(self, described: Mapping[int, dict[Path, Any]], parameters: Mapping[Path, torch.Tensor]) -> None:
        """``described``: by part: what ``_described`` returns."""
        self._described = described
        self._about = described[min(described)]
        self.paths = list(self._about)  #: Their paths, in the same order on all ranks.
        self._parameters: dict[Path, DTensor] = {}
        self.boxes: dict[Path, Box] = {}  #: By path: the elements that this rank needs.
        for path, (_, shape, _, _) in self._about.items():
            parameter = parameters.get(path, parameters.get(path[:-1]))
            is_parameter = path in parameters
            if not isinstance(parameter, DTensor) or (is_parameter and tuple(parameter.shape) != tuple(shape)):
                found = "nothing" if parameter is None else f"{type(parameter).__name__}{list(parameter.shape)}"
                raise ConfigurationError(
                    f"the state of the job has a sharded tensor {_shown(path)} of shape {list(shape)}, and the model "
                    f"of this process has {found} there: build and shard the same model"
                )
            self._parameters[path] = parameter
            self.boxes[path] = _box(tuple(shape), parameter, path)

    def held(self, path: Path) -> dict[int, Box]:
        """Return the elements that each part has of a tensor."""
        found = {}
        for part, words in self._described.items():
            if path not in words:
                raise RecoveryError(f"part {part} of the state lacks {_shown(path)}, which another part has")
            _, _, offset, extents = words[path]
            found[part] = Box(tuple(offset), tuple(extents))
        return found

    def dtype(self, path: Path) -> torch.dtype:
        """Return the type of a tensor's elements."""
        dtype: torch.dtype = self._about[path][0]
        return dtype

    def batches(self) -> Iterator[list[Path]]:
        """Yield the paths in batches, equal on all ranks, of as many bytes as one exchange moves."""
        batch: list[Path] = []
        room = 0
        for path in self.paths:
            # The first part's elements are the most that any part has.
            num_bytes = self.held(path)[min(self._described)].numel * self.dtype(path).itemsize
            if batch and room + num_bytes > _BATCH_BYTES:
                yield batch
                batch, room = [], 0
            batch.append(path)
            room += num_bytes
        if batch:
            yield batch

    def whole(self, path: Path, elements: torch.Tensor) -> DTensor:
        """Return the sharded tensor of which these are this rank's elements."""
        return _whole(elements, self._about[path][1], self._parameters[path])


def _described(part: Part) -> dict[Path, Any]:
    return {
        path: [each.elements.dtype, each.shape, each.box.offset, each.box.shape] for path, each in part.pieces.items()
    }


def _send_rest(group: Group, parts: Mapping[int, Part], servers: Mapping[int, int], world_size: int) -> dict[str, Any]:
    """Return what is not sharded: that of this rank's own part; that of part 0, if the number of ranks has changed."""
    needed = [rank if world_size == group.world_size else 0 for rank in range(group.world_size)]
    mine: dict[str, Any] = {}
    for part in sorted(set(needed)):
        source = servers[part]
        receivers = [rank for rank in range(group.world_size) if needed[rank] == part and rank != source]
        if group.rank == source or group.rank in receivers:
            value = send_value(parts[part].shared if group.rank == source else None, group, source, receivers)
            if needed[group.rank] == part:
                mine = _cloned(value)
    return mine


def _cloned(value: Any) -> Any:
    document, tensors = encode(value)
    return decode(document, [tensor.clone() for tensor in tensors])


def _exchange(
    control: Group,
    number: int,
    plans: Mapping[Path, Sequence[Transfer]],
    parts: Mapping[int, Part],
    tensors: _Tensors,
) -> dict[Path, torch.Tensor]:
    """Carry the transfers of a batch of tensors out; return this rank's elements. Collective."""
    inputs = [
        _joined(
            parts[each.part].pieces[path].elements[each.box.within(parts[each.part].pieces[path].box)]
            for path, plan in plans.items()
            for each in plan
            if each.source == control.rank and each.target == rank
        )
        for rank in range(control.world_size)
    ]
    mine = [(path, each) for path, plan in plans.items() for each in plan if each.target == control.rank]
    lengths = [0] * control.world_size
    for path, each in mine:
        lengths[each.source] += each.box.numel * tensors.dtype(path).itemsize
    outputs = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
    control.alltoall(outputs, inputs, name=f"recovery/parts/{number}").wait()
    found = {path: torch.empty(tensors.boxes[path].shape, dtype=tensors.dtype(path), device="cpu") for path in plans}
    begins = [0] * control.world_size
    for path, each in mine:
        begin = begins[each.source]
        begins[each.source] = end = begin + each.box.numel * tensors.dtype(path).itemsize
        place = found[path][each.box.within(tensors.boxes[path])]
        source = outputs[each.source][begin:end]
        # A copy of bytes, because the elements need not begin at a multiple of their size.
        place.copy_(source.clone().view(tensors.dtype(path)).view(place.shape))
    return found


def _joined(slices: Iterator[torch.Tensor]) -> torch.Tensor:
    rows = [each.contiguous().view(-1).view(torch.uint8) for each in slices]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device="cpu")


def _whole(elements: torch.Tensor, shape: Sequence[int], parameter: DTensor) -> DTensor:
    """Return a tensor of a shape, sharded as a parameter is, of which these are this rank's elements."""
    return DTensor.from_local(
        elements.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, dtype=elements.dtype, device="meta").stride(),
    )


def _put(shared: dict[str, Any], path: Path, tensor: torch.Tensor) -> None:
    node: Any = shared
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = tensor
