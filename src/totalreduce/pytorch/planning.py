"""The plan of a ``DistributedOptimizer``: the gradients that are reduced and their buckets, equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.pytorch.buckets import BucketSpec, ParameterSpec, device_labels, plan_buckets
from totalreduce.pytorch.buffers import BufferMode
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback
from totalreduce.pytorch.hooks import has_weak_hook
from totalreduce.pytorch.initial import Initial
from totalreduce.sparse.session import Method
from totalreduce.strategies.strategy import Strategy

__all__ = ["GradientPlan", "NamedParameters", "ParameterSource", "PlanSettings", "agree_on_plan", "build_plan"]

#: The names of each parameter.
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
    overlap: Literal["backward", "step", "iterations"]
    on_missing: Literal["zero", "error"]
    compression: Literal["none", "fp16", "bf16"]
    gradient_predivide_factor: float
    backward_passes_per_step: int
    sparse: Literal["dense", "gather"]
    join_divisor: Literal["world", "active"]
    sync: Method | None
    strategy: Strategy | None
    feedback: ErrorFeedback
    initial: Initial | None
    buffers: BufferMode | None

    def divisor(self, active: int, world_size: int) -> int:
        """Return the number by which sums are divided where ``active`` of ``world_size`` ranks have data."""
        if self.op is not ReduceOp.AVG:
            return 1
        return active if self.join_divisor == "active" and active else world_size

    def adds_up(self, active: int, world_size: int) -> bool:
        """Whether reduced gradients, with further ones added on each rank, may be reduced once more.

        They may if averaging leaves equal gradients as they are: unless ranks that have joined add zeros. ``active`` of
        ``world_size`` ranks have data.
        """
        return self.op is ReduceOp.AVG and self.divisor(active, world_size) == active

    def check_adds_up(self, active: int, world_size: int) -> None:
        """Refuse a backward pass that adds gradients to reduced ones, unless they may be reduced once more.

        Raises:
            ConfigurationError: Reducing the sum would change the gradients that are reduced already.
        """
        if not self.adds_up(active, world_size):
            raise ConfigurationError(
                "this backward pass adds gradients to those that synchronize() has reduced already, and reducing them "
                f"again with op={self.op.name} and join_divisor={self.join_divisor!r} would change these: call step() "
                "or zero_grad() first"
            )

    def repeatable(self, active: int, world_size: int) -> bool:
        """Whether reduced gradients stay what they are if they are reduced again. Arguments as of ``adds_up``.

        A sparse method would add residuals, and select some of the elements once more.
        """
        return self.sync is None and self.adds_up(active, world_size)

    def __post_init__(self) -> None:
        if checks.reduction(self.op) not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigurationError(f"gradients are reduced by tr.ReduceOp.AVG or tr.ReduceOp.SUM, not {self.op!r}")
        checks.integer_fields(self, "bucket_bytes", "backward_passes_per_step", minimum=1)
        checks.one_of("overlap", self.overlap, ("backward", "step", "iterations"))
        checks.one_of("on_missing", self.on_missing, ("zero", "error"))
        checks.one_of("compression", self.compression, _WIRE_DTYPES)
        checks.real_field(self, "gradient_predivide_factor", above=0)
        factor = self.gradient_predivide_factor
        if factor != 1.0 and self.op is not ReduceOp.AVG:
            raise ConfigurationError(
                f"gradient_predivide_factor splits the division of an average; it cannot be {factor} with "
                f"{self.op.name.lower()}"
            )
        checks.one_of("sparse", self.sparse, ("dense", "gather"))
        if self.sync is not None and (self.overlap == "iterations" or self.on_missing != "zero"):
            raise ConfigurationError(
                f"sync={self.sync.name!r} needs overlap='backward' or 'step', and on_missing='zero', not "
                f"{self.overlap!r} and {self.on_missing!r}: what is selected cannot be taken back one by one"
            )
        if self.strategy is not None and self.overlap == "iterations" and not self.strategy.can_defer:
            raise ConfigurationError(
                f"sync={self.strategy.name!r} needs overlap='backward': in most of its steps no gradient is exchanged"
            )
        if self.strategy is not None and not self.strategy.can_sum and self.op is not ReduceOp.AVG:
            raise ConfigurationError(f"sync={self.strategy.name!r} takes the average of all ranks, and not op=SUM")
        checks.one_of("join_divisor", self.join_divisor, ("world", "active"))
        if self.initial is not None:
            checks.one_of("initial", self.initial, ("broadcast", "check"))
        if self.buffers is not None:
            checks.one_of("buffers", self.buffers, ("broadcast", "average"))

    def document(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        settings = {**asdict(self), "op": self.op.name.lower()}
        if self.sync is not None:
            settings["sync"]["method"] = self.sync.name
        if self.strategy is not None:
            settings["strategy"]["name"] = self.strategy.name
        return settings

    @property
    def can_form_group(self) -> bool:
        """Whether the steps of a strategy can form a group whose ranks have not met."""
        return self.strategy is not None and self.strategy.can_form_group

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype to which gradients are cast while they travel; ``None``: they are not."""
        return _WIRE_DTYPES[self.compression]


_WIRE_DTYPES: dict[str, torch.dtype | None] = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """The objects from which a ``DistributedOptimizer`` takes its parameters and their names."""

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module | None  #: The module that holds its parameters, or ``None``.
    #: Names and parameters that the program gave instead of a model, or ``None``.
    named: Sequence[tuple[str, torch.nn.Parameter]] | None

    def names(self) -> NamedParameters:
        """Return the names of each parameter: those of the model, those given, or places in the optimizer.

        Raises:
            ConfigurationError: A name is given to two parameters.
        """
        if self.model is not None:
            pairs = list(self.model.named_parameters(remove_duplicate=False))
        elif self.named is not None:
            pairs = list(self.named)
            twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            if twice:
                raise ConfigurationError(
                    f"named_parameters has {twice[0]!r} more than once: names must tell tensors apart"
                )
        else:
            pairs = [
                (f"{number}.{place}", parameter)
                for number, group in enumerate(self.optimizer.param_groups)
                for place, parameter in enumerate(group["params"])
            ]
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in pairs:
            names.setdefault(parameter, []).append(name)
        return names

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what all ranks are to begin with: parameters, and of a model its buffers, too, by name."""
        found: dict[str, torch.Tensor] = {names[0]: parameter for parameter, names in self.names().items()}
        return found if self.model is None else found | dict(self.model.named_buffers())

    def refuse_wrapped(self) -> None:
        """Refuse a model whose gradients are synchronised by another part of torch. Raises ``ConfigurationError``."""
        modules = () if self.model is None else self.model.modules()
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        if any(isinstance(module, DistributedDataParallel) for module in modules):
            raise ConfigurationError(
                "the model is wrapped in DistributedDataParallel, which sends the gradients already: pass the module "
                "in it (model.module), and call that module in the loop. Or leave DistributedOptimizer out, and write "
                "torch.distributed.init_process_group('totalreduce') before DistributedDataParallel"
            )
        if any(type(each).__name__ in ("DTensor", "FlatParameter") for each in parameters):
            raise ConfigurationError(
                "the model is sharded (FSDP, or tensor parallelism), and sends its gradients itself: leave "
                "DistributedOptimizer out, and write torch.distributed.init_process_group('totalreduce')"
            )

    def sparse(self) -> Collection[torch.Tensor]:
        """Return the parameters whose gradients will be sparse, as far as modules and the optimizer tell."""
        if isinstance(self.optimizer, torch.optim.SparseAdam):
            return {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        return {
            module.weight
            for module in (self.model.modules() if self.model is not None else ())
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        }


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """The gradients that are reduced, and their buckets."""

    #: Trainable parameters with dense, uncompressed gradients, in the model's registration order, each once.
    parameters: tuple[torch.nn.Parameter, ...]
    specs: tuple[ParameterSpec, ...]  #: Their descriptions.
    buckets: tuple[BucketSpec, ...]  #: Their buckets.
    compressed: CompressedPlan  #: The parameters whose gradients a sparse method compresses.
    #: The parameters whose sparse gradients are gathered, by name, in the same order.
    sparse: Mapping[str, torch.nn.Parameter]
    #: The optimizer's parameters that were not trainable when the plan was made.
    frozen: tuple[torch.nn.Parameter, ...]
    num_given: int  #: The number of parameters in the optimizer's groups when the plan was made.

    def document(self, settings: PlanSettings) -> dict[str, object]:
        """Return everything that must be equal on all ranks, as JSON values."""
        return {
            "settings": settings.document(),
            "parameters": {spec.name: spec.describe() for spec in (*self.specs, *self.compressed.specs)},
            "sparse": {name: list(parameter.shape) for name, parameter in self.sparse.items()},
            "buckets": [[self.specs[member].name for member in bucket.members] for bucket in self.buckets],
            "compressed": self.compressed.document(),
        }

    def check_unchanged(self, groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]]) -> None:
        """Refuse to go on where the optimizer trains a parameter that is not in the plan.

        Raises:
            ConfigurationError: A parameter was unfrozen, or added to the torch optimizer itself.
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
    source: ParameterSource,
    settings: PlanSettings,
    uncompressed: Collection[str] = (),
    *,
    compares: bool = True,
) -> GradientPlan:
    """Build the plan and compare it with the other ranks'. Collective, unless ``compares`` is false.

    Raises:
        ConfigurationError: As ``build_plan``.
        PlanMismatchError: The ranks' models or settings differ, or another rank refused its own.
    """

    def build() -> GradientPlan:
        return build_plan(
            source.names(),
            source.optimizer.param_groups,
            settings,
            sparse=source.sparse(),
            uncompressed=uncompressed,
            native=group.coordinator is not None,
        )

    if not compares:
        return build()
    return agree_or_refuse(group.control, f"{name}.plan", build, lambda plan: plan.document(settings))


def build_plan(
    names: NamedParameters,
    groups: Iterable[Mapping[str, Sequence[torch.nn.Parameter]]],
    settings: PlanSettings,
    *,
    sparse: Collection[torch.Tensor] = (),
    uncompressed: Collection[str] = (),
    native: bool = False,
) -> GradientPlan:
    """Plan the gradients of the optimizer's trainable parameters. Purely local.

    The gradients of parameters that the optimizer does not hold stay local. ``names`` has an order that is equal on all
    ranks; ``uncompressed`` are the names of parameters that are not compressed, whatever the settings say; ``native``:
    a native library reduces.

    Raises:
        ConfigurationError: A parameter is not in the model, is uninitialised, or is already synchronised by
            another ``DistributedOptimizer``; or there is nothing to train.
        UnsupportedError: A gradient would be sparse or complex, or a parameter has no memory.
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
    labels = device_labels(chosen, native=native)
    gathered: dict[str, torch.nn.Parameter] = {}
    compressed: dict[torch.nn.Parameter, ParameterSpec] = {}
    dense: dict[torch.nn.Parameter, ParameterSpec] = {}
    for parameter in chosen:
        name, *aliases = names[parameter]
        _refuse_unusable(name, parameter)
        if settings.sparse == "gather" and parameter in sparse:
            gathered[name] = parameter
            continue
        spec = ParameterSpec.of(name, aliases, parameter, labels[parameter.device])
        compresses = settings.sync is not None and settings.feedback.compresses(spec.shape)
        (compressed if compresses and name not in uncompressed else dense)[parameter] = spec
    return GradientPlan(
        parameters=tuple(dense),
        specs=tuple(dense.values()),
        buckets=plan_buckets(tuple(dense.values()), settings.bucket_bytes),
        compressed=CompressedPlan.of(
            tuple(compressed),
            tuple(compressed.values()),
            settings.feedback,
            whole=settings.sync is not None and settings.sync.whole,
        ),
        sparse=gathered,
        frozen=tuple(parameter for parameter in given if not parameter.requires_grad),
        num_given=len(given),
    )


def _refuse_unusable(name: str, parameter: torch.nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ConfigurationError(
            f"parameter {name!r} is not initialised yet: run one forward pass of its lazy module before "
            "building DistributedOptimizer."
        )
    if parameter.is_meta:
        raise UnsupportedError(
            f"parameter {name!r} is on meta and has no values: move the model with .to_empty(device=…)"
        )
    if has_weak_hook(parameter):
        raise ConfigurationError(
            f"parameter {name!r} is already synchronised by another DistributedOptimizer. Close that one "
            "first, or give each optimizer its own parameters."
        )
