"""Error feedback: its settings, the buckets of compressed gradients, their residuals, and momentum correction.

``compressed`` exchanges the buckets for ``DistributedOptimizer``, and ``ddp_hook`` those of torch's DDP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.intervals import Interval
from totalreduce.pytorch.sizes import even_bucket_elements
from totalreduce.sparse.session import BucketShape
from totalreduce.tensors.modes import outside_inference_mode

__all__ = [
    "CompressedPlan",
    "ErrorFeedback",
    "MomentumCorrection",
    "Residuals",
    "describe_exemption",
    "flattened",
    "plan_parts",
    "shaped",
    "states_for",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback:
    """The settings of error feedback around a sparse method. Equal on all ranks.

    Attributes:
        momentum: Momentum correction (Lin et al., "Deep Gradient Compression", ICLR 2018): velocities are accumulated
            instead of gradients, and set to zero where they were applied (factor masking). For SGD *without* momentum
            of its own; costs one more float32 for each element.
        clip_norm: Each rank's gradient is clipped to this norm over the square root of the number of ranks before it is
            accumulated. The norm is that of all compressed gradients, so nothing leaves before backward has ended.
        elements_min: Parameters with fewer elements, or one dimension, are not compressed.
        bucket_elements: The size limit of a bucket, whose elements are selected and sent together; larger parameters
            are cut. Default: a quarter of all elements, so that selecting, sending and backward overlap. Of fewer than
            28 million elements it is a third, a half, or all of them, because a bucket has a fixed cost.
        report_every: The number of steps after which rank 0 logs a line for each bucket; 0: never.
        xi_every: The number of steps after which the distance from the best k elements is measured, the paper's xi. It
            is in ``reports``, and the step sends everything twice; 0: never.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    momentum: float = 0.0
    clip_norm: float | None = None
    elements_min: int = 16_384
    bucket_elements: int | None = None
    report_every: int = 0
    xi_every: int = 0

    def __post_init__(self) -> None:
        checks.real_field(self, "momentum", minimum=0, below=1)
        if self.clip_norm is not None:
            checks.real_field(self, "clip_norm", above=0)
        if self.bucket_elements is not None:
            checks.integer_fields(self, "bucket_elements", minimum=1, maximum=2**31 - 1)
        checks.integer_fields(self, "elements_min", "report_every", "xi_every", minimum=0)

    def clip_factor(self, norm: float, world_size: int) -> float:
        """Return the factor by which a rank's gradients are clipped before they are accumulated.

        Each rank clips to ``clip_norm`` over the square root of the number of ranks, because the norm of a sum of
        independent gradients is larger by that root (Lin et al., 2018).

        Args:
            norm: The norm of all compressed gradients of this rank, unscaled. If it is NaN, the factor is 1.0, and the
                selection finds that the gradients are not finite.
            world_size: The number of ranks.
        """
        if self.clip_norm is None or not norm:
            return 1.0
        return min(1.0, self.clip_norm / math.sqrt(world_size) / norm)

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether gradients of this shape are compressed."""
        return len(shape) >= 2 and math.prod(shape) >= max(1, self.elements_min)

    def param_groups(self, parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Return parameter groups for SGD in which every parameter has this momentum exactly once.

        The group of compressed parameters has ``momentum=0``, because momentum correction applies it.
        """
        by_kind: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for parameter in parameters:
            by_kind[self.compresses(parameter.shape)].append(parameter)
        groups = [{"params": by_kind[True], "momentum": 0.0}, {"params": by_kind[False], "momentum": self.momentum}]
        return [group for group in groups if group["params"]]


@dataclass(frozen=True, slots=True)
class CompressedPlan:
    """The compressed parameters of a plan, and their buckets."""

    parameters: tuple[torch.nn.Parameter, ...]  #: The parameters, in registration order.
    specs: tuple[ParameterSpec, ...]  #: Their descriptions.
    buckets: tuple[tuple[Interval, ...], ...]  #: The parts in each bucket, last registered first.

    @classmethod
    def of(
        cls,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        feedback: ErrorFeedback,
        *,
        whole: bool,
    ) -> CompressedPlan:
        """Cut parameters into buckets; see ``plan_parts``."""
        size = feedback.bucket_elements or even_bucket_elements(sum(spec.num_elements for spec in specs))
        return cls(tuple(parameters), tuple(specs), plan_parts(specs, size, whole=whole))

    def document(self) -> list[list[list[object]]]:
        """Return names and ranges by bucket, as JSON values."""
        return [[[self.specs[part.parameter].name, part.begin, part.end] for part in bucket] for bucket in self.buckets]

    def described(self) -> Iterator[tuple[torch.nn.Parameter, ParameterSpec]]:
        """Yield parameters and their descriptions."""
        yield from zip(self.parameters, self.specs, strict=True)

    def shapes(self) -> list[BucketShape]:
        """Return the shapes of the buckets: of whole parameters their matrices; a part is one-dimensional."""
        return [BucketShape(tuple(self._shape(part) for part in bucket)) for bucket in self.buckets]

    def _shape(self, part: Interval) -> tuple[int, ...]:
        spec = self.specs[part.parameter]
        whole = part.size == spec.num_elements
        return spec.matrix if whole and len(spec.shape) >= 2 else (part.size,)


def plan_parts(
    specs: Sequence[ParameterSpec], bucket_elements: int, *, whole: bool
) -> tuple[tuple[Interval, ...], ...]:
    """Cut parameters into buckets, last registered first: the order in which backward makes gradients.

    All parts of a bucket are on one kind of device. With ``whole`` parameters are not cut; one that is larger than
    ``bucket_elements`` has a bucket of its own.
    """
    buckets: list[tuple[Interval, ...]] = []
    filling: list[Interval] = []
    room = bucket_elements
    for member in reversed(range(len(specs))):
        begin, end = 0, specs[member].num_elements
        elsewhere = filling and specs[filling[-1].parameter].device != specs[member].device
        if filling and (elsewhere or (whole and end > room)):
            buckets.append(tuple(filling))
            filling, room = [], bucket_elements
        while begin < end:
            stop = end if whole else min(end, begin + room)
            filling.append(Interval(member, begin, stop))
            room -= stop - begin
            begin = stop
            if room <= 0:
                buckets.append(tuple(filling))
                filling, room = [], bucket_elements
    if filling:
        buckets.append(tuple(filling))
    return tuple(buckets)


class Residuals:
    """The residuals by parameter: float32, one-dimensional, in the order of the parameter's memory, on its device."""

    def __init__(self) -> None:
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}  #: The residuals.
        #: Memory for the gradients of the next round; its contents do not matter.
        self.spare: dict[torch.nn.Parameter, torch.Tensor] = {}
        #: With momentum correction, the velocities, as large as the residuals.
        self.velocities: dict[torch.nn.Parameter, torch.Tensor] = {}
        #: Memory for the velocities of the next round; its contents do not matter.
        self.spare_velocities: dict[torch.nn.Parameter, torch.Tensor] = {}

    @outside_inference_mode
    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the residual of a parameter; zeros at first."""
        if parameter not in self.kept:
            self.kept[parameter] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        return self.kept[parameter]

    def state(self, plan: CompressedPlan) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of residuals and velocities by name, in the parameters' shapes."""
        return {
            "residuals": {spec.name: shaped(self.of(p), spec).clone() for p, spec in plan.described()},
            "velocities": {
                spec.name: shaped(self.velocities[p], spec).clone()
                for p, spec in plan.described()
                if p in self.velocities
            },
        }

    @outside_inference_mode
    def load(self, plan: CompressedPlan, states: Sequence[Mapping[str, Mapping[str, torch.Tensor]]]) -> None:
        """Set residuals and velocities to the sums of some ranks' states, or to nothing without states.

        Raises:
            ConfigurationError: The states are of another model.
        """
        for state in states:
            shapes = {name: tuple(kept.shape) for name, kept in state["residuals"].items()}
            wanted = {spec.name: spec.shape for spec in plan.specs}
            if shapes != wanted:
                odd = sorted(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
                raise ConfigurationError(
                    f"the saved residuals are of another model: {odd[0]!r} is {shapes.get(odd[0], 'missing')} in them "
                    f"and {wanted.get(odd[0], 'not compressed')} here"
                )
        for mine, key in ((self.kept, "residuals"), (self.velocities, "velocities")):
            mine.clear()
            for parameter, spec in plan.described():
                for state in states:
                    if spec.name in state[key]:
                        if parameter not in mine:
                            mine[parameter] = torch.zeros(
                                spec.num_elements, dtype=torch.float32, device=parameter.device
                            )
                        shaped(mine[parameter], spec).add_(state[key][spec.name].to(parameter.device))

    @outside_inference_mode
    def take_over(
        self,
        flats: Mapping[str, Mapping[str, torch.Tensor]],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        adds: bool = False,
    ) -> None:
        """Take residuals and velocities over from another process. They are copied.

        Args:
            flats: The "residuals" and "velocities" by name, each as in this class.
            parameters: The parameters by name.
            adds: Add them to those of this rank, which goes on in the place of the other process, too.
        """
        for mine, key in ((self.kept, "residuals"), (self.velocities, "velocities")):
            for name, flat in flats.get(key, {}).items():
                parameter = parameters[name]
                if adds and parameter in mine:
                    mine[parameter].add_(flat.to(parameter.device))
                else:
                    mine[parameter] = flat.to(parameter.device, copy=True)

    def norm(self) -> float:
        """Return the norm of all residuals together."""
        norms = [float(torch.linalg.vector_norm(kept, dtype=torch.float64)) for kept in self.kept.values()]
        return math.hypot(*norms)


@final
class MomentumCorrection:
    """The velocities of one round. They replace those of the round before if the step is taken (``commit``).

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018). A sparse method applies most elements of a gradient
    many steps late. If the optimizer applied its momentum to the applied elements, the delayed ones would lose theirs.
    So each rank keeps a velocity for each element, v = m v + g, and gives the velocity to the method in place of the
    gradient. Where an element was applied, its velocity is set to zero (factor masking).
    """

    def __init__(self, residuals: Residuals, momentum: float) -> None:
        """``residuals`` has the velocities of the rounds before; ``momentum`` is m, in [0, 1)."""
        self._residuals, self._momentum = residuals, momentum
        #: The velocities of this round, by parameter: float32, flat, on the parameter's device.
        self.pending: dict[torch.nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def correct(self, parameter: torch.nn.Parameter, flat: torch.Tensor, loss_scale: float) -> None:
        """Turn a gradient into its velocity, in place; do nothing without momentum.

        Args:
            parameter: The parameter.
            flat: Its gradient: float32, flat. It is divided by ``loss_scale``, because velocities are unscaled.
            loss_scale: The factor of the loss.
        """
        if not self._momentum:
            return
        if loss_scale != 1.0:
            flat.div_(loss_scale)
        velocity = self._residuals.velocities.get(parameter)
        new = self._residuals.spare_velocities.pop(parameter, None)
        new = torch.empty_like(flat) if new is None else new
        if velocity is None:
            new.copy_(flat)
        else:
            torch.add(flat, velocity, alpha=self._momentum, out=new)
            flat.copy_(new)
        self.pending[parameter] = new

    def scale_after(self, loss_scale: float) -> float:
        """Return the factor of the loss that gradients still have after ``correct``."""
        return 1.0 if self._momentum else loss_scale

    def commit(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Keep the velocities of this round, of these parameters. The next round uses the old memory."""
        velocities, spare = self._residuals.velocities, self._residuals.spare_velocities
        for parameter in self.pending.keys() & parameters:
            if parameter in velocities:
                spare[parameter] = velocities[parameter]
            velocities[parameter] = self.pending.pop(parameter)

    def discard(self) -> None:
        """Forget the velocities of this round: it had no result."""
        self._residuals.spare_velocities.update(self.pending)
        self.pending = {}


def describe_exemption(feedback: ErrorFeedback, gradients: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Return why no gradient is compressed, and what to write instead. ``gradients``: names and shapes."""
    sizes = [(math.prod(shape), name) for name, shape in gradients if len(shape) >= 2]
    said = "none has two dimensions"
    if sizes:
        number, name = max(sizes)
        said = f"the largest one of two dimensions or more, {name}, has {number} elements"
    return (
        f"compresses no gradient of this model: all {len(gradients)} parameters are below the limit of "
        f"{feedback.elements_min} elements ({said}), so all gradients are sent as they are. To compress smaller ones, "
        "write feedback=tr.ErrorFeedback(elements_min=...)"
    )


def states_for(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """Distribute saved states among the ranks: this rank's own state, or those of all ranks of the saved job.

    Returns:
        The states whose residuals this rank adds up, so that the sum over all ranks stays the same; and the state from
        which it takes everything else: its own, or any if it has none.

    Raises:
        ConfigurationError: States are missing.
    """
    by_rank = {state["rank"]: state for state in states}
    old_size = max((state["world_size"] for state in states), default=0)
    if not states or (by_rank.keys() != set(range(old_size)) and (*by_rank, old_size) != (rank, world_size)):
        raise ConfigurationError(
            f"residuals were saved by {old_size} ranks and there are {world_size} now: give the states of all of them, "
            f"not only of {sorted(by_rank)}; or, if the number is the same, of rank {rank}"
        )
    own = [by_rank[old] for old in sorted(by_rank) if old % world_size == rank]
    return own, by_rank.get(rank, states[0])


def shaped(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return a view of the flat tensor with the parameter's shape and order of memory."""
    return flat.as_strided(spec.shape, spec.stride)


def flattened(gradient: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return the gradient as float32, flat, in the order of the parameter's memory; without a copy if possible."""
    gradient = gradient.detach()
    alone = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if gradient.dtype is not torch.float32 or gradient.stride() != spec.stride or not alone:
        own = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=gradient.device)
        gradient = own.copy_(gradient)
    return gradient.as_strided((spec.num_elements,), (1,))
