"""Start all ranks from the same state, and exchange plain values.

These block, and are called in the same order on all ranks. Nothing is ever pickled: what came over a network and is
unpickled could run any code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.encoding import encode
from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import ProcessSet, global_process_set
from totalreduce.pytorch import broadcast

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's tensors to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or lists of such. Tensors
            without names are told apart by their places.
        root_rank: A rank of the job.
        process_set: Which ranks.

    Raises:
        PlanMismatchError: Names, shapes or dtypes differ between ranks; on every rank, before any is written.
        ConfigurationError: A value is no tensor, or ``root_rank`` is not among the ranks.
    """
    members = context.members(process_set)
    pairs = params.items() if isinstance(params, Mapping) else enumerate(params)
    named: dict[str, Any] = {}
    for place, value in pairs:
        name, tensor = value if isinstance(value, tuple) else (place, value)
        if str(name) in named:
            raise ConfigurationError(f"params has {str(name)!r} more than once: names must tell tensors apart")
        named[str(name)] = tensor
    # Ranks may have built their dicts in different orders; what travels is packed in this one.
    ordered = dict(sorted(named.items()))
    broadcast.broadcast_parameters(ordered, members.group.control, members.root(root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001  (Horovod takes a step with it, to make state)
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and hyper-parameters to all ranks, for every optimizer of ``torch.optim``.

    Args:
        optimizer: A torch optimizer or a ``DistributedOptimizer``, whose ``step`` is not called. Only the root needs to
            have state.
        root_rank: A rank of the job.
        model: Accepted, not needed.
        process_set: Which ranks.

    Raises:
        PlanMismatchError: Kind of optimizer or parameter shapes differ between ranks; on every rank.
        ConfigurationError: The root's state holds something else than plain values and tensors; on every rank.
    """
    members = context.members(process_set)
    broadcast.broadcast_optimizer_state(optimizer, members.group.control, members.root(root_rank))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001  (their order tells them apart)
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's value on every rank.

    Args:
        obj: Made of numbers, strings, bytes, ``None``, tensors, lists, tuples, and dicts with strings or integers as
            keys; up to 1 GiB. Ignored on the other ranks.
        root_rank: A rank of the job.
        name: Accepted, not needed.
        process_set: Which ranks.

    Raises:
        ConfigurationError: The value holds something else; on every rank.
    """
    members = context.members(process_set)
    root = members.root(root_rank)
    envelope = members.group.broadcast_object(_envelope(obj) if members.group.rank == root else None, root=root)
    return _opened([envelope], [root_rank])[0]


def allgather_object(
    obj: Any,
    name: str | None = None,  # noqa: ARG001  (their order tells them apart)
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's value, by rank, on every rank; values as for ``broadcast_object``.

    Raises:
        ConfigurationError: A value holds something else; on every rank.
    """
    members = context.members(process_set)
    return _opened(members.group.allgather_object(_envelope(obj)), members.ranks)


def _envelope(value: Any) -> dict[str, Any]:
    """The value, or why it cannot travel: the others must not wait for it."""
    try:
        encode(value)
    except ConfigurationError as error:
        return {"refused": str(error)}
    return {"value": value}


def _opened(envelopes: Iterable[dict[str, Any]], ranks: Iterable[int]) -> list[Any]:
    values = []
    for envelope, rank in zip(envelopes, ranks, strict=True):
        if "refused" in envelope:
            raise ConfigurationError(
                f"rank {rank}: {envelope['refused']}. Horovod would pickle it; this library never unpickles what comes "
                "over the network. Send what the object is made of, and make it anew on the other side"
            )
        values.append(envelope["value"])
    return values
