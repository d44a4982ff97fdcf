"""Functions that copy state from one rank to all, and exchange plain values.

They block, and all ranks call them in the same order. Values are never pickled, because unpickling bytes from a network
could run any code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import ProcessSet, global_process_set
from totalreduce.pytorch import broadcast
from totalreduce.pytorch.wrapper import OptimizerWrapper

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "fill_missing_gradients",
]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's tensors to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or lists of such. Tensors
            without names are named by their index.
        root_rank: The rank of the root in the job.
        process_set: The ranks.

    Raises:
        PlanMismatchError: Names, shapes or dtypes differ between ranks; on every rank, before any is written.
        ConfigurationError: A value is no tensor, or ``root_rank`` is not among the ranks.
    """
    members = context.members(process_set)
    if isinstance(params, torch.Tensor | torch.nn.Module | str) or not isinstance(params, Iterable):
        raise ConfigurationError(
            f"params must be a dict or a list of tensors, such as model.state_dict(), not a {type(params).__name__}"
        )
    pairs = params.items() if isinstance(params, Mapping) else enumerate(params)
    named: dict[str, Any] = {}
    for place, value in pairs:
        name, tensor = value if isinstance(value, tuple) and len(value) == 2 else (place, value)
        if str(name) in named:
            raise ConfigurationError(f"params has {str(name)!r} more than once: names must tell tensors apart")
        named[str(name)] = tensor
    broadcast.broadcast_parameters(named, members.group.control, members.root(root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and hyper-parameters to all ranks, for every optimizer of ``torch.optim``.

    Afterwards every trainable parameter of the optimizer has a gradient, as with Horovod: zeros where it had none.

    Args:
        optimizer: A torch optimizer or a ``DistributedOptimizer``, whose ``step`` is not called. Only the root needs to
            have state.
        root_rank: The rank of the root in the job.
        model: Accepted, without effect: Horovod makes state by a step with it.
        process_set: The ranks.

    Raises:
        PlanMismatchError: Kind of optimizer or parameter shapes differ between ranks; on every rank.
        ConfigurationError: The root's state holds other values than plain ones and tensors; on every rank.
    """
    members = context.members(process_set)
    broadcast.broadcast_optimizer_state(optimizer, members.group.control, members.root(root_rank))
    fill_missing_gradients(optimizer)


def fill_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter without a gradient a gradient of zeros, for ``SparseAdam`` a sparse one.

    Horovod's functions leave such gradients, and programs read them. ``zero_grad()`` removes them.
    """
    inner = optimizer.wrapped if isinstance(optimizer, OptimizerWrapper) else optimizer
    needs_sparse = isinstance(inner, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if needs_sparse else zeros


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's value on every rank.

    Args:
        obj: The value: plain values, tensors, NumPy arrays and containers of them, up to 1 GiB (see
            ``docs/collectives.md``). Ignored on the other ranks.
        root_rank: The rank of the root in the job.
        name: Accepted, without effect.
        process_set: The ranks.

    Raises:
        ConfigurationError: The value cannot be sent; on every rank.
    """
    members = context.members(process_set)
    return members.group.broadcast_object(obj, root=members.root(root_rank))


def allgather_object(
    obj: Any,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank; values are as for ``broadcast_object``.

    Raises:
        ConfigurationError: A value cannot be sent; on every rank.
    """
    return context.members(process_set).group.allgather_object(obj)
