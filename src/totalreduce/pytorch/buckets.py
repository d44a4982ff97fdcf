"""Which gradients travel together: parameters packed into flat buckets, one dtype each.

The plan is arithmetic on names and shapes and is equal on all ranks; ``Bucket`` holds the memory.

A bucket's memory is ``[gradients | presence | changed]``:

* *presence*, one element per parameter: 1 where this rank has a gradient. After the reduction it is above
  zero exactly where some rank has one, so a parameter that nobody used keeps ``grad=None`` as in one process.
* *changed*, only in the last bucket, one element per bucket: above zero where some rank's gradients changed
  after the bucket had left (see ``reducer``).

Both are sums of at most ``world_size`` ones: exact in every dtype for "is it zero", and for counting up to
256 ranks in bfloat16 and 2,048 in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.pytorch import internals

__all__ = ["Bucket", "BucketSpec", "ParameterSpec", "plan_buckets"]


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
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    num_elements: int
    itemsize: int

    @classmethod
    def of(cls, name: str, aliases: Sequence[str], parameter: torch.Tensor) -> ParameterSpec:
        """Describe a parameter.

        Raises:
            UnsupportedError: Its gradient cannot be reduced: not on the CPU, complex, or not a floating type.
        """
        if parameter.device.type != "cpu":
            raise UnsupportedError(
                f"parameter {name!r} is on {parameter.device}: gradients are synchronised on the CPU only. "
                "Move the model to the CPU before building the optimizer."
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
        )

    def describe(self) -> dict[str, object]:
        """JSON-ready, for the comparison between ranks."""
        document: dict[str, object] = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stride": list(self.stride),
        }
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
        num_flags: Length of the *changed* part: the number of buckets in the last one, 0 in the others.
    """

    index: int
    dtype: str
    members: tuple[int, ...]
    num_elements: int
    num_flags: int


def plan_buckets(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Cut the parameters into buckets, last registered first: the order in which backward makes gradients.

    A bucket is closed when the next parameter would make it larger than ``bucket_bytes``; a parameter larger
    than that has a bucket of its own. The first registered parameter is always in the last bucket.

    Args:
        parameters: In registration order.
        bucket_bytes: Upper bound of the gradients in one bucket, at least 1.
    """
    open_buckets: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    closed: list[tuple[str, list[int]]] = []
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        num_bytes = spec.num_elements * spec.itemsize
        if spec.dtype in open_buckets and open_bytes[spec.dtype] + num_bytes > bucket_bytes:
            closed.append((spec.dtype, open_buckets.pop(spec.dtype)))
            open_bytes[spec.dtype] = 0
        open_buckets.setdefault(spec.dtype, []).append(index)
        open_bytes[spec.dtype] = open_bytes.get(spec.dtype, 0) + num_bytes
    # The bucket of parameter 0 comes last: it is the last one ready and the first one needed.
    closed.extend(sorted(open_buckets.items(), key=lambda item: -item[1][-1]))
    return tuple(
        BucketSpec(
            index=position,
            dtype=dtype,
            members=tuple(members),
            num_elements=sum(parameters[member].num_elements for member in members),
            num_flags=len(closed) if position == len(closed) - 1 else 0,
        )
        for position, (dtype, members) in enumerate(closed)
    )


class Empty(Protocol):
    """Makes a flat tensor."""

    def __call__(self, num_elements: int, /, *, dtype: torch.dtype) -> torch.Tensor:
        """With whatever is in its memory."""


class _Memory:
    """One flat tensor and the views into it."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[ParameterSpec], empty: Empty) -> None:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        members = [parameters[member] for member in spec.members]
        tail = spec.num_elements + len(members)
        self.flat = empty(tail + spec.num_flags, dtype=dtype).zero_()
        self.presence = self.flat[spec.num_elements : tail]
        self.flags = self.flat[tail:]
        self.views: list[torch.Tensor] = []
        offset = 0
        for member in members:
            self.views.append(self.flat.as_strided(member.shape, member.stride, offset))
            offset += member.num_elements
        self._begin = self.flat.data_ptr()
        self._end = self._begin + self.flat.numel() * self.flat.element_size()

    def contains(self, tensor: torch.Tensor) -> bool:
        return self._begin <= tensor.data_ptr() < self._end


class Bucket:
    """The memory of one bucket, and this rank's gradients that were copied into it.

    Args:
        spec: Its place in the plan.
        parameters: The live parameters of the whole plan.
        parameter_specs: Their descriptions, in the same order.
        empty: Makes flat tensors; ``Group.empty`` makes them where they need not be copied to be sent.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        parameter_specs: Sequence[ParameterSpec],
        empty: Empty,
    ) -> None:
        self.spec = spec
        self.parameters = [parameters[member] for member in spec.members]
        self._specs = parameter_specs
        self._empty = empty
        self._memory = _Memory(spec, parameter_specs, empty)
        self._spare: _Memory | None = None
        #: The gradients as they were when last copied, ``None`` where there was none, and their versions
        #: then.
        self.local: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    @property
    def flat(self) -> torch.Tensor:
        """What is handed to the allreduce, shape ``(num_elements + len(members) + num_flags,)``."""
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
    def pack(self, flags: Sequence[int] = ()) -> None:
        """Copy the remembered gradients, their presence and the flags into the flat tensor.

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
            spare = self._spare or _Memory(self.spec, self._specs, self._empty)
            self._memory, self._spare = spare, self._memory
        memory = self._memory
        targets, sources, absent, missing = [], [], [], []
        for position, (grad, view) in enumerate(zip(self.local, memory.views, strict=True)):
            if grad is None:
                absent.append(view)
                missing.append(position)
                continue
            targets.append(view)
            sources.append(grad.clone() if memory.contains(grad) else grad.detach())
        internals.copy_into(targets, sources)
        internals.fill_zero(absent)
        memory.presence.fill_(1)
        if missing:
            memory.presence[missing] = 0
        if self.spec.num_flags:
            memory.flags.copy_(torch.tensor(flags or [0] * self.spec.num_flags))

    def _check(self, position: int, grad: torch.Tensor) -> None:
        view = self._memory.views[position]
        if grad.dtype is view.dtype and grad.layout is torch.strided and grad.shape == view.shape and grad.is_cpu:
            return
        name = self._specs[self.spec.members[position]].name
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name!r} has a sparse gradient ({grad.layout}), which cannot be synchronised. "
                "Build its module with sparse=False."
            )
        raise ConfigurationError(
            f"parameter {name!r} was planned as {view.dtype}{list(view.shape)} on cpu but its gradient is "
            f"{grad.dtype}{list(grad.shape)} on {grad.device}. Convert or move the model before building "
            "DistributedOptimizer, or call its replan() on every rank afterwards."
        )

    def presence(self) -> list[float]:
        """One number per parameter, after the reduction: 0.0 where no rank had a gradient."""
        values: list[float] = self._memory.presence.tolist()
        return values

    def flags(self) -> list[float]:
        """One number per bucket of the plan, after the reduction; only in the last bucket."""
        values: list[float] = self._memory.flags.tolist()
        return values

    def reduced(self) -> list[torch.Tensor | None]:
        """The reduced gradient of each parameter, a view of ``flat``, or ``None`` where no rank had one."""
        return [
            view if present > 0 else None for view, present in zip(self._memory.views, self.presence(), strict=True)
        ]
