"""From a model and its optimizer to a plan that all ranks have agreed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parameter import UninitializedParameter

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch import internals
from totalreduce.pytorch.buckets import BucketSpec, ParameterSpec, plan_buckets
from totalreduce.pytorch.consent import agree_or_refuse
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback
from totalreduce.pytorch.hooks import WeakHook
from totalreduce.sparse.session import Method

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["GradientPlan", "PlanSettings", "agree_on_plan", "build_plan", "name_parameters", "sparse_parameters"]

#: Names of each parameter, the first one first.
NamedParameters = Mapping[torch.nn.Parameter, Sequence[str]]


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
    compression: Literal["none", "fp16", "bf16"]
    gradient_predivide_factor: float
    backward_passes_per_step: int
    sparse: Literal["dense", "gather"]
    join_divisor: Literal["world", "active"]
    sync: Method | None
    feedback: ErrorFeedback

    def divisor(self, active: int, world_size: int) -> int:
        """Return the number by which sums are divided where ``active`` of ``world_size`` ranks have data."""
        if self.op is not ReduceOp.AVG:
            return 1
        return active if self.join_divisor == "active" and active else world_size

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigurationError(f"gradients are reduced by SUM or AVG, not {self.op!r}")
        checks.whole_fields(self, "bucket_bytes", "backward_passes_per_step", minimum=1)
        checks.one_of("overlap", self.overlap, ("backward", "iterations"))
        checks.one_of("on_missing", self.on_missing, ("zero", "error"))
        if self.compression not in _WIRE_DTYPES:
            raise ConfigurationError(f"compression is one of {', '.join(_WIRE_DTYPES)}, not {self.compression!r}")
        checks.real_field(self, "gradient_predivide_factor", above=0)
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op is not ReduceOp.AVG:
            raise ConfigurationError(
                f"gradient_predivide_factor splits the division of an average; it cannot be {factor} with "
                f"{self.op.name.lower()}"
            )
        checks.one_of("sparse", self.sparse, ("dense", "gather"))
        if self.sync is not None and (self.overlap != "backward" or self.on_missing != "zero"):
            raise ConfigurationError(
                f"sync={self.sync.name!r} needs overlap='backward' and on_missing='zero', not "
                f"{self.overlap!r} and {self.on_missing!r}: what is selected cannot be taken back one by one"
            )
        checks.one_of("join_divisor", self.join_divisor, ("world", "active"))

    def document(self) -> dict[str, object]:
        """JSON-ready."""
        settings = {**asdict(self), "op": self.op.name.lower()}
        if self.sync is not None:
            settings["sync"]["method"] = self.sync.name
        return settings

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What gradients are cast to while they travel."""
        return _WIRE_DTYPES[self.compression]


_WIRE_DTYPES: dict[str, torch.dtype | None] = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Which gradients are reduced, and how they are packed.

    Attributes:
        parameters: Trainable parameters of the optimizer, in the model's registration order, each once.
        specs: Their descriptions.
        buckets: How they are packed.
        compressed: Those that are not reduced whole, which are none of the above.
        sparse: Parameters whose gradients are gathered instead, by name, in the same order.
        frozen: The optimizer's parameters that were not trainable when the plan was made.
        num_given: How many parameters the optimizer's groups held then.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketSpec, ...]
    compressed: CompressedPlan
    sparse: Mapping[str, torch.nn.Parameter]
    frozen: tuple[torch.nn.Parameter, ...]
    num_given: int

    def document(self, settings: PlanSettings) -> dict[str, object]:
        """JSON-ready: everything that must be equal on all ranks."""
        return {
            "settings": settings.document(),
            "parameters": {spec.name: spec.describe() for spec in (*self.specs, *self.compressed.specs)},
            "sparse": {name: list(parameter.shape) for name, parameter in self.sparse.items()},
            "buckets": [[self.specs[member].name for member in bucket.members] for bucket in self.buckets],
            "compressed": self.compressed.document(),
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
    named: NamedParameters,
    groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]],
    settings: PlanSettings,
    sparse: Collection[torch.Tensor],
    whole: Collection[str] = (),
) -> GradientPlan:
    """Build the plan and compare it with the other ranks'. Collective.

    Raises:
        ConfigurationError: As ``build_plan``.
        PlanMismatchError: The ranks' models or settings differ, or another rank refused its own.
    """
    return agree_or_refuse(
        group,
        f"{name}.plan",
        lambda: build_plan(
            named, groups, settings, sparse=sparse, whole=whole, any_device=group.coordinator is not None
        ),
        lambda plan: plan.document(settings),
    )


def name_parameters(
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]],
) -> NamedParameters:
    """What all ranks call the parameters: as the model does, or as given, or by their places in the optimizer.

    Raises:
        ConfigurationError: A name is given to two parameters.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
    elif named_parameters is not None:
        given = list(named_parameters)
        twice = sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1)
        if twice:
            raise ConfigurationError(f"named_parameters has {twice[0]!r} more than once: names must tell tensors apart")
        for name, parameter in given:
            names.setdefault(parameter, []).append(name)
    else:
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(parameter, []).append(f"{number}.{place}")
    return names


def sparse_parameters(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> Collection[torch.Tensor]:
    """Parameters whose gradients will be sparse, as far as their modules or the optimizer tell."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {
        module.weight
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }


def build_plan(
    names: NamedParameters,
    groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]],
    settings: PlanSettings,
    *,
    sparse: Collection[torch.Tensor] = (),
    whole: Collection[str] = (),
    any_device: bool = False,
) -> GradientPlan:
    """Plan the gradients of the optimizer's trainable parameters. Purely local.

    Parameters of the model that the optimizer does not hold are left alone: their gradients stay local.

    Args:
        names: Names of each parameter, in an order equal on all ranks.
        groups: The optimizer's.
        settings: Of the optimizer.
        sparse: Parameters with sparse gradients, which are gathered if the settings say so.
        whole: Names of parameters that are not compressed, whatever the settings say.
        any_device: Whether gradients may be elsewhere than on the CPU.

    Raises:
        ConfigurationError: A parameter is not in the model, is uninitialised, or is already synchronised by
            another ``DistributedOptimizer``; or there is nothing to train.
        UnsupportedError: A gradient would be sparse, complex, or where the group cannot read it.
    """
    given = [parameter for group in groups for parameter in group["params"]]
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
    for parameter in chosen:
        _refuse_unusable(names[parameter][0], parameter)
    gathers = settings.sparse == "gather"
    gathered = [p for p in chosen if gathers and p in sparse]
    reduced = [p for p in chosen if not (gathers and p in sparse)]
    described = {p: ParameterSpec.of(names[p][0], names[p][1:], p, any_device=any_device) for p in reduced}
    few: dict[torch.nn.Parameter, ParameterSpec] = {}
    rest: dict[torch.nn.Parameter, ParameterSpec] = {}
    for p, spec in described.items():
        compressed = settings.sync is not None and spec.name not in whole and settings.feedback.compresses(spec.shape)
        (few if compressed else rest)[p] = spec
    return GradientPlan(
        parameters=tuple(rest),
        specs=tuple(rest.values()),
        buckets=plan_buckets(tuple(rest.values()), settings.bucket_bytes),
        compressed=CompressedPlan.of(
            tuple(few),
            tuple(few.values()),
            settings.feedback,
            whole=settings.sync is not None and settings.sync.whole,
        ),
        sparse={names[p][0]: p for p in gathered},
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
