"""Start all ranks from one rank's parameters and optimizer state.

Tensors travel as bytes, packed into a few pieces whatever their dtype, so that hundreds of small ones cost a
handful of operations. Ranks compare names, shapes and dtypes before any of them is written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.agreement import agree_or_refuse, broadcast_json
from totalreduce.groups.encoding import decode, empty_tensors, encode
from totalreduce.groups.group import Group
from totalreduce.pytorch.wrapper import OptimizerWrapper, no_optimizer
from totalreduce.tensors.dtypes import problem_of_values
from totalreduce.tensors.modes import outside_inference_mode
from totalreduce.tensors.values import set_values
from totalreduce.tensors.work import Work

__all__ = [
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_tensors",
    "problem_of_tensor",
    "room_of",
    "slots_of",
]

#: Bytes of one piece: large enough to hide the latency, and small enough to need little memory.
_PIECE_BYTES = 16 * 1024 * 1024
_PIECES_IN_FLIGHT = 2
#: Every dtype's items stay aligned within a piece.
_ALIGNMENT_BYTES = 16


def broadcast_parameters(model: torch.nn.Module | Mapping[str, torch.Tensor], group: Group, root: int = 0) -> None:
    """Copy the root's parameters and buffers to all ranks, in place. Collective.

    Args:
        model: A module, with all its parameters and buffers, also non-persistent ones; or named tensors.
        group: The ranks.
        root: The rank whose values are copied.

    Raises:
        PlanMismatchError: Names, shapes or dtypes differ between ranks; on every rank, before any is written.
        ConfigurationError: A value is no tensor.
        UnsupportedError: A tensor that is sparse, nested, quantised, expanded, on the meta device, of a lazy module
            that has not run yet, or of a class that has its values in other tensors (``DTensor``).
    """
    named = agree_or_refuse(
        group.control,
        "broadcast_parameters",
        lambda: _named_tensors(model),
        lambda named: {"root": root, "tensors": {name: _describe(tensor) for name, tensor in named.items()}},
    )
    distinct = {id(tensor): tensor for tensor in named.values()}
    broadcast_tensors(list(distinct.values()), group, root, "broadcast_parameters")


@outside_inference_mode
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, group: Group, root: int = 0) -> None:
    """Copy the root's optimizer state and hyper-parameters to all ranks. Collective.

    The other ranks may have no state yet, or another one. The state consists of values that the object collectives send
    (see ``docs/collectives.md``); it is never pickled.

    Raises:
        PlanMismatchError: Kind of optimizer or parameter shapes differ between ranks; on every rank.
        ConfigurationError: The root's state holds other values; on every rank. Or this is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(no_optimizer(optimizer))
    shapes = [[list(p.shape) for p in param_group["params"]] for param_group in optimizer.param_groups]
    kind = optimizer.kind if isinstance(optimizer, OptimizerWrapper) else type(optimizer).__qualname__
    state = optimizer.state_dict()
    group.agree("broadcast_optimizer_state", {"root": root, "optimizer": kind, "parameters": shapes})
    message: dict[str, str] = {}
    tensors: list[torch.Tensor] = []
    if group.rank == root:
        try:
            message["document"], tensors = encode(state)
        except ConfigurationError as error:
            message["refused"] = str(error)
    message = broadcast_json(group.control, "broadcast_optimizer_state/document", message, root=root)
    if "refused" in message:
        raise ConfigurationError(f"the optimizer state of rank {root} cannot be broadcast: {message['refused']}")
    if group.rank != root:
        tensors = empty_tensors(message["document"])
    broadcast_tensors(tensors, group, root, "broadcast_optimizer_state")
    # The root loads, too: load_state_dict converts tensors to the parameters' dtype, so the ranks end with equal state.
    optimizer.load_state_dict(decode(message["document"], [tensor.clone() for tensor in tensors]))


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _named_tensors(model: torch.nn.Module | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        named: dict[str, Any] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
    else:
        named = dict(sorted(model.items()))  # packed in this order, which a mapping need not have on all ranks
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(f"{name!r} is a {type(tensor).__name__}, not a tensor. Leave it out.")
        problem = problem_of_tensor(tensor)
        if problem is not None:
            raise UnsupportedError(f"tensor {name!r} {problem}")
    return named


def problem_of_tensor(tensor: torch.Tensor) -> str | None:
    """Say why values cannot be read from a tensor and written to it, and what to do; ``None`` if they can."""
    problem = problem_of_values(tensor)
    if problem is None and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        problem = "is expanded: several elements share memory. Use .contiguous()"
    return problem


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[torch.Tensor], group: Group, root: int, name: str) -> None:
    """Overwrite the tensors with the root's. Collective. Shapes and dtypes are equal on all ranks.

    ``name`` is the prefix of the operations' names.
    """
    in_flight: list[tuple[Work, torch.Tensor, list[torch.Tensor]]] = []
    for number, piece in enumerate(_pieces(tensors)):
        buffer = torch.zeros(sum(map(room_of, piece)), dtype=torch.uint8, device="cpu")
        if group.rank == root:
            for slot, tensor in zip(slots_of(buffer, piece), piece, strict=True):
                slot.copy_(tensor)
        work = group.control.broadcast(buffer, root=root, name=f"{name}/{number}", async_op=True)
        in_flight.append((work, buffer, piece))
        if len(in_flight) > _PIECES_IN_FLIGHT:
            _receive(*in_flight.pop(0), is_root=group.rank == root)
    for arrival in in_flight:
        _receive(*arrival, is_root=group.rank == root)


def _receive(work: Work, buffer: torch.Tensor, piece: list[torch.Tensor], *, is_root: bool) -> None:
    work.wait()
    if not is_root:
        for slot, tensor in zip(slots_of(buffer, piece), piece, strict=True):
            set_values(tensor, slot)


def _pieces(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    pieces: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not pieces or room + room_of(tensor) > _PIECE_BYTES:
            pieces.append([])
            room = 0
        pieces[-1].append(tensor)
        room += room_of(tensor)
    return pieces


def room_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer of ``slots_of``."""
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def slots_of(buffer: torch.Tensor, piece: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a buffer of bytes with the tensors' shapes and dtypes, one after the other."""
    slots = []
    offset = 0
    for tensor in piece:
        num_bytes = tensor.numel() * tensor.element_size()
        slots.append(buffer[offset : offset + num_bytes].view(tensor.dtype).view(tensor.shape))
        offset += room_of(tensor)
    return slots
