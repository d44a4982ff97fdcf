"""Which gradients travel together: parameters packed into flat buckets, one dtype each.

The plan is arithmetic on names and shapes and is equal on all ranks; ``Bucket`` holds the memory.

A bucket's memory is ``[gradients | tail]``; ``tail`` says which gradients there are, and in the last bucket more (see
``totalreduce.pytorch.tail``).

With compression the memory that travels is of a half type, and the gradients are views of a second, wide one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.pytorch import internals
from totalreduce.pytorch.tail import Tail, TailLayout

__all__ = ["Bucket", "BucketSpec", "ParameterSpec", "WireFormat", "plan_buckets"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What all ranks must agree on about one parameter.

    Attributes:
        name: First name under which the model lists it.
        aliases: Further names of a shared parameter.
        shape: Shape.
        stride: Memory layout, in elements; the gradient's view of the bucket has the same.
        dtype: As torch writes it, without ``torch.``.
        num_elements: Product of the shape.
        itemsize: Bytes of one element.
        device: Kind of device.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    num_elements: int
    itemsize: int
    device: str = "cpu"

    @classmethod
    def of(
        cls, name: str, aliases: Sequence[str], parameter: torch.Tensor, *, any_device: bool = False
    ) -> ParameterSpec:
        """Describe a parameter.

        Raises:
            UnsupportedError: Its gradient cannot be reduced: complex, not a floating type, or not on the CPU (unless
                ``any_device``: a library that knows accelerators carries the reductions out).
        """
        if parameter.device.type != "cpu" and not any_device:
            raise UnsupportedError(
                f"parameter {name!r} is on {parameter.device}: this group's transport reads CPU memory "
                "only. Move the model to the CPU before building the optimizer, or use tr.init(transport='torch')."
            )
        if not parameter.dtype.is_floating_point:
            raise UnsupportedError(
                f"parameter {name!r} has dtype {parameter.dtype}: only real floating types are synchronised. "
                "Keep complex parameters as torch.view_as_real(...) of a real one."
            )
        dense = _is_dense(parameter)
        stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        return cls(
            name=name,
            aliases=tuple(aliases),
            shape=tuple(parameter.shape),
            stride=tuple(stride),
            dtype=str(parameter.dtype).removeprefix("torch."),
            num_elements=parameter.numel(),
            itemsize=parameter.element_size(),
            device=parameter.device.type,
        )

    def describe(self) -> dict[str, object]:
        """JSON-ready, for the comparison between ranks."""
        document: dict[str, object] = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stride": list(self.stride),
        }
        if self.device != "cpu":
            document["device"] = self.device
        if self.aliases:
            document["aliases"] = list(self.aliases)
        return document


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One bucket of the plan.

    Attributes:
        index: Position in the plan; bucket 0 is ready first in a usual backward pass.
        dtype: Of all its parameters.
        members: Indices of the parameters, in the order of their gradients in memory.
        num_elements: Of the gradients, without the tail.
        num_buckets: In the last bucket of the plan, how many buckets the plan has; 0 in the others.
        device: Kind of device of all its parameters.
    """

    index: int
    dtype: str
    members: tuple[int, ...]
    num_elements: int
    num_buckets: int
    device: str = "cpu"


def plan_buckets(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Cut the parameters into buckets, last registered first: the order in which backward makes gradients.

    A bucket is closed when the next parameter would make it larger than ``bucket_bytes``; a parameter larger
    than that has a bucket of its own. The first registered parameter is always in the last bucket.

    Args:
        parameters: In registration order.
        bucket_bytes: Upper bound of the gradients in one bucket, at least 1.
    """
    open_buckets: dict[tuple[str, str], list[int]] = {}
    open_bytes: dict[tuple[str, str], int] = {}
    closed: list[tuple[tuple[str, str], list[int]]] = []
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        num_bytes = spec.num_elements * spec.itemsize
        kind = spec.dtype, spec.device
        if kind in open_buckets and open_bytes[kind] + num_bytes > bucket_bytes:
            closed.append((kind, open_buckets.pop(kind)))
            open_bytes[kind] = 0
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + num_bytes
    # The bucket of parameter 0 comes last: it is the last one ready and the first one needed.
    closed.extend(sorted(open_buckets.items(), key=lambda item: -item[1][-1]))
    return tuple(
        BucketSpec(
            index=position,
            dtype=dtype,
            members=tuple(members),
            num_elements=sum(parameters[member].num_elements for member in members),
            num_buckets=len(closed) if position == len(closed) - 1 else 0,
            device=device,
        )
        for position, ((dtype, device), members) in enumerate(closed)
    )


class Empty(Protocol):
    """Makes a flat tensor."""

    def __call__(self, num_elements: int, /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """With whatever is in its memory."""


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How gradients travel, and what this rank says of them.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        dtype: What the gradients are cast to; ``None``: as they are.
        scale: Factor before the reduction.
        reports_absence: Whether a rank says which gradients it has not.
    """

    rank: int
    world_size: int
    dtype: torch.dtype | None = None
    scale: float = 1.0
    reports_absence: bool = False

    def tail(self, spec: BucketSpec) -> TailLayout:
        """The tail of a bucket."""
        num_ranks = self.world_size if spec.num_buckets else 0
        return TailLayout(len(spec.members), self.reports_absence, spec.num_buckets, num_ranks)


class _Memory:
    """One flat tensor and the views into it; with compression a wide one beside it.

    Attributes:
        flat: What travels.
        slots: Of ``flat``, by parameter.
        tail: The end of ``flat``.
        wide: The reduced gradients where ``flat`` is of another dtype, else the same memory.
        views: Of ``wide``, by parameter.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[ParameterSpec],
        empty: Empty,
        device: torch.device,
        wire: WireFormat,
    ) -> None:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        members = [parameters[member] for member in spec.members]
        layout = wire.tail(spec)
        self.flat = empty(spec.num_elements + layout.num_elements, dtype=wire.dtype or dtype, device=device).zero_()
        self.tail = Tail(self.flat[spec.num_elements :], layout)
        self.slots = _views(self.flat, members)
        self.wide, self.views = self.flat[: spec.num_elements], self.slots
        if self.flat.dtype is not dtype:
            self.wide = torch.zeros(spec.num_elements, dtype=dtype, device=device)
            self.views = _views(self.wide, members)
        self._begin = self.wide.data_ptr()
        self._end = self._begin + self.wide.numel() * self.wide.element_size()

    def contains(self, tensor: torch.Tensor) -> bool:
        return self._begin <= tensor.data_ptr() < self._end

    def widen(self) -> None:
        """Bring the reduced gradients to their own dtype."""
        if self.slots is not self.views:
            self.wide.copy_(self.flat[: len(self.wide)])


def _views(flat: torch.Tensor, members: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    views = []
    offset = 0
    for member in members:
        views.append(flat.as_strided(member.shape, member.stride, offset))
        offset += member.num_elements
    return views


class Bucket:
    """The memory of one bucket, and this rank's gradients that were copied into it.

    Args:
        spec: Its place in the plan.
        parameters: The live parameters of the whole plan.
        parameter_specs: Their descriptions, in the same order.
        empty: Makes flat tensors; ``Group.empty`` makes them where they need not be copied to be sent.
        wire: How the gradients travel.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        parameter_specs: Sequence[ParameterSpec],
        empty: Empty,
        wire: WireFormat,
    ) -> None:
        self.spec = spec
        self.parameters = [parameters[member] for member in spec.members]
        self._specs = parameter_specs
        self._empty, self._wire = empty, wire
        self._memory = self._make()
        self._spare: _Memory | None = None
        #: The gradients as they were when last copied, ``None`` where there was none, and their versions
        #: then.
        self.local: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    def _make(self) -> _Memory:
        return _Memory(self.spec, self._specs, self._empty, self.parameters[0].device, self._wire)

    @property
    def flat(self) -> torch.Tensor:
        """What is handed to the allreduce: the gradients and the tail, one-dimensional."""
        return self._memory.flat

    def capture(self) -> None:
        """Remember the parameters' present gradients as this rank's contribution."""
        self.local = [parameter.grad for parameter in self.parameters]
        self._versions = [0 if grad is None else internals.version_of(grad) for grad in self.local]

    def release(self) -> None:
        """Let go of the remembered gradients."""
        self.local, self._versions = [], []

    def replaced(self) -> bool:
        """Whether some parameter's gradient is another one than remembered, or was changed in place."""
        return any(parameter.grad is not grad for parameter, grad in zip(self.parameters, self.local, strict=True)) or (
            self.overwritten()
        )

    def overwritten(self) -> bool:
        """Whether a remembered gradient was changed in place."""
        return any(
            grad is not None and internals.version_of(grad) != version
            for grad, version in zip(self.local, self._versions, strict=True)
        )

    def same_local(self, position: int) -> bool:
        """Whether the parameter at ``position`` still has the remembered gradient, unchanged."""
        grad = self.local[position]
        return (
            grad is not None
            and self.parameters[position].grad is grad
            and internals.version_of(grad) == self._versions[position]
        )

    @torch.no_grad()
    def pack(self, changed: Collection[int] = (), *, joined: bool = False) -> None:
        """Copy the remembered gradients and what is to be said of them into the flat tensor.

        Args:
            changed: In the last bucket: the buckets whose gradients changed after they had left.
            joined: This rank takes part without data.

        The remembered gradients must stay readable until the step is over, since they may be needed a second
        time. Where they are views of this bucket (``zero_grad(set_to_none=False)``), a second flat tensor
        takes turns with the first.

        Raises:
            UnsupportedError: A sparse gradient.
            ConfigurationError: A gradient's dtype, device or shape is not the planned one.
        """
        for position, grad in enumerate(self.local):
            if grad is not None:
                self._check(position, grad)
        if any(grad is not None and self._memory.contains(grad) for grad in self.local):
            spare = self._spare or self._make()
            self._memory, self._spare = spare, self._memory
        memory = self._memory
        targets, sources, absent, missing = [], [], [], []
        for position, (grad, view) in enumerate(zip(self.local, memory.slots, strict=True)):
            if grad is None:
                absent.append(view)
                missing.append(position)
                continue
            targets.append(view)
            sources.append(grad.clone() if memory.contains(grad) else grad.detach())
        if self._wire.scale == 1.0:
            internals.copy_into(targets, sources)
        else:  # in one pass
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, self._wire.scale, out=target)
        internals.fill_zero(absent)
        memory.tail.write(missing, changed, rank=self._wire.rank, joined=joined)

    def _check(self, position: int, grad: torch.Tensor) -> None:
        view = self._memory.views[position]
        if (
            grad.dtype is view.dtype
            and grad.layout is torch.strided
            and grad.shape == view.shape
            and grad.device == view.device
        ):
            return
        name = self._specs[self.spec.members[position]].name
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name!r} has a sparse gradient ({grad.layout}), which cannot be synchronised. "
                "Build its module with sparse=False."
            )
        raise ConfigurationError(
            f"parameter {name!r} was planned as {view.dtype}{list(view.shape)} on {view.device} but its gradient is "
            f"{grad.dtype}{list(grad.shape)} on {grad.device}. Convert or move the model before building "
            "DistributedOptimizer, or call its replan() on every rank afterwards."
        )

    @property
    def tail(self) -> Tail:
        """After the reduction: what all ranks said."""
        return self._memory.tail

    def rescale(self, factor: float) -> None:
        """Multiply the reduced gradients."""
        if factor != 1.0:
            self._memory.wide.mul_(factor)

    def widen(self) -> None:
        """The reduction is done: bring the gradients to their own dtype."""
        self._memory.widen()

    def reduced(self) -> list[torch.Tensor | None]:
        """The reduced gradient of each parameter, a view of ``flat``, or ``None`` where no rank had one."""
        return [
            view if present else None for view, present in zip(self._memory.views, self.tail.present(), strict=True)
        ]
