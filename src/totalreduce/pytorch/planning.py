"""From a model and its optimizer to a plan that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parameter import UninitializedParameter

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch import internals
from totalreduce.pytorch.buckets import BucketSpec, ParameterSpec, plan_buckets
from totalreduce.pytorch.consent import agree_or_refuse
from totalreduce.pytorch.hooks import WeakHook

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["GradientPlan", "PlanSettings", "agree_on_plan", "build_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """The settings of a ``DistributedOptimizer``; they must be equal on all ranks.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    optimizer: str
    op: ReduceOp
    bucket_bytes: int
    overlap: Literal["backward", "iterations"]
    on_missing: Literal["zero", "error"]

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigurationError(f"gradients are reduced by SUM or AVG, not {self.op!r}")
        if self.bucket_bytes < 1:
            raise ConfigurationError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}")
        if self.overlap not in ("backward", "iterations"):
            raise ConfigurationError(f"overlap is 'backward' or 'iterations', not {self.overlap!r}")
        if self.on_missing not in ("zero", "error"):
            raise ConfigurationError(f"on_missing is 'zero' or 'error', not {self.on_missing!r}")


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Which gradients are reduced, and how they are packed.

    Attributes:
        parameters: Trainable parameters of the optimizer, in the model's registration order, each once.
        specs: Their descriptions.
        buckets: How they are packed.
        frozen: The optimizer's parameters that were not trainable when the plan was made.
        num_given: How many parameters the optimizer's groups held then.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketSpec, ...]
    frozen: tuple[torch.nn.Parameter, ...]
    num_given: int

    def document(self, settings: PlanSettings) -> dict[str, object]:
        """JSON-ready: everything that must be equal on all ranks."""
        return {
            "settings": {**asdict(settings), "op": settings.op.name.lower()},
            "parameters": {spec.name: spec.describe() for spec in self.specs},
            "buckets": [[self.specs[member].name for member in bucket.members] for bucket in self.buckets],
        }

    def check_unchanged(self, groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]]) -> None:
        """Refuse to go on where the optimizer trains a parameter that the plan does not know.

        Raises:
            ConfigurationError: A parameter was unfrozen, or added behind the plan's back.
        """
        unfrozen = sum(parameter.requires_grad for parameter in self.frozen)
        added = sum(len(group["params"]) for group in groups) - self.num_given
        if unfrozen or added:
            raise ConfigurationError(
                f"{unfrozen} parameter(s) were unfrozen and {added} added since the gradients were planned: "
                "they would not be synchronised. Call optimizer.replan() on every rank after unfreezing, and "
                "add groups with DistributedOptimizer.add_param_group()."
            )


def agree_on_plan(
    group: Group,
    name: str,
    model: torch.nn.Module,
    groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]],
    settings: PlanSettings,
) -> GradientPlan:
    """Build the plan and compare it with the other ranks'. Collective.

    Raises:
        ConfigurationError: As ``build_plan``.
        PlanMismatchError: The ranks' models or settings differ, or another rank refused its own.
    """
    return agree_or_refuse(
        group,
        f"{name}.plan",
        lambda: build_plan(model, groups, settings.bucket_bytes),
        lambda plan: plan.document(settings),
    )


def build_plan(
    model: torch.nn.Module, groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]], bucket_bytes: int
) -> GradientPlan:
    """Plan the gradients of the optimizer's trainable parameters. Purely local.

    Parameters of the model that the optimizer does not hold are left alone: their gradients stay local.

    Raises:
        ConfigurationError: A parameter is not in the model, is uninitialised, or is already synchronised by
            another ``DistributedOptimizer``; or there is nothing to train.
        UnsupportedError: A gradient would be sparse, complex, or not on the CPU.
    """
    given = [parameter for group in groups for parameter in group["params"]]
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    strangers = [parameter for parameter in given if parameter not in names]
    if strangers:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in strangers[:5])
        raise ConfigurationError(
            f"{len(strangers)} parameter(s) of the optimizer are not in the model (shapes {shapes}): they "
            "have no name that all ranks know. Pass the model that holds them, or make them attributes of it."
        )
    wanted = {parameter for parameter in given if parameter.requires_grad}
    chosen = [parameter for parameter in names if parameter in wanted]
    if not chosen:
        raise ConfigurationError(
            "no parameter of the optimizer is trainable: nothing to synchronise. Set requires_grad first."
        )
    _refuse_sparse_modules(model, wanted)
    for parameter in chosen:
        _refuse_unusable(names[parameter][0], parameter)
    specs = tuple(ParameterSpec.of(names[p][0], names[p][1:], p) for p in chosen)
    return GradientPlan(
        parameters=tuple(chosen),
        specs=specs,
        buckets=plan_buckets(specs, bucket_bytes),
        frozen=tuple(parameter for parameter in given if not parameter.requires_grad),
        num_given=len(given),
    )


def _refuse_unusable(name: str, parameter: torch.nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ConfigurationError(
            f"parameter {name!r} is not initialised yet: run one forward pass of its lazy module before "
            "building DistributedOptimizer."
        )
    if any(isinstance(hook, WeakHook) and hook.alive for hook in internals.gradient_hooks(parameter)):
        raise ConfigurationError(
            f"parameter {name!r} is already synchronised by another DistributedOptimizer. Close that one "
            "first, or give each optimizer its own parameters."
        )


def _refuse_sparse_modules(model: torch.nn.Module, wanted: set[torch.nn.Parameter]) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse and module.weight in wanted:
            name = f"{path}.weight" if path else "weight"
            raise UnsupportedError(
                f"parameter {name!r} would have sparse gradients, which cannot be synchronised yet. "
                "Build its module with sparse=False."
            )
