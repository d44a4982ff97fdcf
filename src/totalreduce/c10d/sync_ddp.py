"""Strategies and sparse methods for a model that a framework has wrapped in DistributedDataParallel."""

# Annotations are objects in this file, not text: DDP compares those of a hook with its own classes.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.launch.bootstrap import init
from totalreduce.pytorch.ddp_hook import ddp_hook
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.pytorch.sync_argument import settings_of
from totalreduce.sparse.session import Method
from totalreduce.strategies.strategy import Strategy

__all__ = ["sync_ddp"]


def sync_ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: Method | Strategy | type[Method | Strategy] | str,
    *,
    group: Group | None = None,
    feedback: ErrorFeedback | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> torch.optim.Optimizer:
    """Have a model in DistributedDataParallel be trained by a strategy or a sparse method. Collective.

    Call it once, before the first backward pass, and step with the optimizer that it returns. With a sparse method DDP
    gets ``tr.ddp_hook``, and the optimizer is the one that was given. With a strategy DDP exchanges no gradients any
    more: the returned ``DistributedOptimizer`` exchanges what the strategy says, and has ``strategy_steps``. DDP still
    broadcasts the buffers before each forward pass, unless it was made with ``broadcast_buffers=False``.

    Args:
        model: A ``DistributedDataParallel`` over all ranks, on any back end.
        optimizer: The torch optimizer of its parameters.
        sync: ``tr.DiLoCo(period=100)``, ``tr.OkTopk(density=0.01)``, or another one; see ``DistributedOptimizer``.
        group: The group in which a strategy exchanges; by default one that is made here (``tr.init``), and that stays
            until the process ends.
        feedback: Settings of the residuals of a sparse method.
        grad_scaler: The ``GradScaler`` that scales the loss.

    Raises:
        ConfigurationError: The model is no ``DistributedDataParallel``, or has a communication hook already, or is
            trained by a part of the ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"tr.sync_ddp takes a model in DistributedDataParallel, not a {type(model).__name__}. Without DDP: "
            "tr.DistributedOptimizer(optimizer, model, group=tr.init(), sync=...)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise ConfigurationError(f"tr.sync_ddp takes the torch optimizer, not a {type(optimizer).__name__}")
    settings = settings_of(sync)
    if settings is None:
        raise ConfigurationError("tr.sync_ddp needs a strategy or a sparse method: without one DDP does all by itself")
    members = model.process_group
    hook: tuple[object, Callable[..., object]] = (None, _keep_local)
    if not isinstance(settings, Strategy):
        hook = ddp_hook(settings, feedback=feedback, process_group=members, grad_scaler=grad_scaler)
    elif dist.get_world_size(members) != dist.get_world_size():
        raise ConfigurationError("tr.sync_ddp with a strategy needs a model that all ranks train")
    try:
        model.register_comm_hook(*hook)
    except RuntimeError as error:  # "register_comm_hook ... can only be called once"
        raise ConfigurationError(
            "this DistributedDataParallel has a communication hook already, which would exchange the gradients too"
        ) from error
    if not isinstance(settings, Strategy):
        return optimizer
    # "step": at the end of backward DDP writes the gradients, after the hooks of the optimizer.
    return DistributedOptimizer(
        *(optimizer, model.module),
        group=init(name="sync_ddp") if group is None else group,
        sync=settings,
        overlap="step",
        grad_scaler=grad_scaler,
    )


def _keep_local(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing: the gradients of this rank are the result."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
