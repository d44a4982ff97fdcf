"""What a ``tr.State`` cannot hold: found when it is made, or after the first step, and not when a rank is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.encoding import encode, tensor_problem

__all__ = ["check_model", "check_optimizers", "check_whole"]

#: By module and name of a class, because an import of these modules takes long: why it is refused.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): (
        "tr.State needs the module itself, not DistributedDataParallel: model.module"
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "tr.State does not support FullyShardedDataParallel (FSDP1), whose parameters are parts of flat tensors: shard "
        "the model with FSDP2 (torch.distributed.fsdp.fully_shard), and use tr.attempts(copies=tr.ShardCopies(...))"
    ),
    ("torch.jit._script", "RecursiveScriptModule"): (
        "tr.State does not support a module of torch.jit.script: use the module itself, compiled by torch.compile"
    ),
}
_OPTIMIZERS = {
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"): (
        "tr.State does not support ZeroRedundancyOptimizer: each rank has the state of some of the parameters, which "
        "would be lost with the rank. Use the optimizer itself, or shard the model with FSDP2 "
        "(torch.distributed.fsdp.fully_shard) and use tr.attempts(copies=tr.ShardCopies(...))"
    ),
    ("torch.distributed.optim.post_localSGD_optimizer", "PostLocalSGDOptimizer"): (
        "tr.State does not support PostLocalSGDOptimizer, by which ranks have different parameters. Use "
        "tr.recoverable with tr.DistributedOptimizer(..., sync=tr.PostLocalSGD(...))"
    ),
    ("torch.distributed.optim.named_optimizer", "_NamedOptimizer"): (
        "tr.State does not support _NamedOptimizer, whose state has names in place of numbers. Use the optimizer itself"
    ),
}


def check_model(model: torch.nn.Module) -> None:
    """Check the modules and the parameters of a model. Its buffers are checked where they are copied.

    Raises ``ConfigurationError``, ``UnsupportedError``.
    """
    for module in model.modules():
        _refuse(module, _WRAPPERS)
    for name, parameter in model.named_parameters():
        problem = tensor_problem(_local(parameter))
        if problem is not None:
            raise UnsupportedError(f"the parameter {name!r} {problem}")
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ConfigurationError(
                f"the parameter {name!r} has an optimizer that steps in backward() (_apply_optimizer_in_backward). If "
                "a rank were lost in backward(), some parameters would have changed and others not: call "
                "optimizer.step() after backward()"
            )


def check_whole(model: torch.nn.Module, user: str) -> None:
    """Check that no parameter is sharded. Raises ``ConfigurationError``."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ConfigurationError(
                f"the parameter {name!r} is sharded, and {user} needs whole parameters on each rank. For a model that "
                "FSDP2 shards there is tr.attempts(copies=tr.ShardCopies(...))"
            )


def check_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Check the optimizers, their hyper-parameters, and their state, which most of them make in their first step.

    Raises:
        ConfigurationError: An optimizer is of a kind that cannot be recovered; or a hyper-parameter, or a value in an
            optimizer's state, cannot be sent to other ranks.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, optimizer in optimizers.items():
        _refuse(optimizer, _OPTIMIZERS)
        title = f"optimizer {name!r}" if name else "optimizer"
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    _check_value(value, f"the {title} has a hyper-parameter {key!r} in group {number}")
        for parameter, entry in optimizer.state.items():
            owner = names.get(id(parameter), "a parameter")
            for key, value in entry.items():
                _check_value(value, f"the {title} has a state {key!r} of {owner}")


def _check_value(value: Any, what: str) -> None:
    try:
        encode(_local(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"{what} that other ranks cannot get after a loss: {error}") from error


def _local(value: Any) -> Any:
    """Return the rank's elements of a sharded tensor, and anything else as it is."""
    return value.to_local() if isinstance(value, torch.Tensor) and hasattr(value, "to_local") else value


def _refuse(value: object, reasons: Mapping[tuple[str, str], str]) -> None:
    for key in _classes_of(value):
        if key in reasons:
            raise ConfigurationError(reasons[key])


def _classes_of(value: object) -> Iterator[tuple[str, str]]:
    yield from ((kind.__module__, kind.__qualname__) for kind in type(value).__mro__)
