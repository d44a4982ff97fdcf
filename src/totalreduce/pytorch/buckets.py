"""Buckets: dense gradients of one dtype that travel together in one flat tensor.

The plan is arithmetic on names and shapes and is equal on all ranks; ``Bucket`` holds the memory.

The memory of a bucket is ``[gradients | tail]``; the flags in the tail say which gradients the ranks have (see
``totalreduce.pytorch.tail``). With ``compression=`` the memory that travels is of a half type, and the reduced
gradients are views of a second tensor of the parameters' dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.pytorch.tail import Tail, TailLayout
from totalreduce.tensors.modes import outside_inference_mode, version_of
from totalreduce.tensors.work import Work, host_copy_of

__all__ = ["Bucket", "BucketSpec", "ParameterSpec", "WireFormat", "device_labels", "plan_buckets"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The description of one parameter, which must be equal on all ranks."""

    name: str  #: The first name under which the model lists the parameter.
    aliases: tuple[str, ...]  #: Further names of a shared parameter.
    shape: tuple[int, ...]  #: The parameter's shape.
    stride: tuple[int, ...]  #: Its memory layout, in elements; the gradient's view of the bucket has the same.
    dtype: str  #: The name of its dtype without ``torch.``.
    num_elements: int  #: The product of the shape.
    itemsize: int  #: Bytes of one element.
    device: str = ""  #: What tells its device from those of other parameters, equal on all ranks (``device_labels``).

    @classmethod
    def of(cls, name: str, aliases: Sequence[str], parameter: torch.Tensor, device: str = "") -> ParameterSpec:
        """Describe a parameter.

        Raises:
            UnsupportedError: The gradient cannot be reduced: it is complex, or not of a floating type.
        """
        if not parameter.dtype.is_floating_point:
            raise UnsupportedError(
                f"parameter {name!r} has dtype {parameter.dtype}: only real floating types are synchronised. "
                "Keep complex parameters as torch.view_as_real(...) of a real one."
            )
        dense = _is_dense(parameter)
        stride = (
            parameter.stride() if dense else torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()
        )
        return cls(
            name=name,
            aliases=tuple(aliases),
            shape=tuple(parameter.shape),
            stride=tuple(stride),
            dtype=str(parameter.dtype).removeprefix("torch."),
            num_elements=parameter.numel(),
            itemsize=parameter.element_size(),
            device=device,
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the matrix that the parameter is in the order of its memory.

        It is the matrix of the first dimension against all others, or its transpose if the first dimension is the
        innermost one of the memory, as in weights from ``torch.from_numpy(array.T)``; the others may be in any order.
        If the first dimension lies between others in the memory, the outermost one takes its place.
        """
        inward = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], self.shape[dim] == 1))
        outermost = next((dim for dim in inward if self.shape[dim] > 1), 0)
        innermost = next((dim for dim in reversed(inward) if self.shape[dim] > 1), 0)
        rows = self.shape[outermost] if self.shape else 1
        if innermost == 0 != outermost:
            return self.num_elements // self.shape[0], self.shape[0]
        return rows, self.num_elements // max(1, rows)

    def describe(self) -> dict[str, object]:
        """Return the description as JSON values, for the comparison between ranks."""
        document: dict[str, object] = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stride": list(self.stride),
        }
        if self.device:
            document["device"] = self.device
        if self.aliases:
            document["aliases"] = list(self.aliases)
        return document


def device_labels(tensors: Iterable[torch.Tensor], *, native: bool = False) -> dict[torch.device, str]:
    """Return labels for the devices of tensors, equal on all ranks although the devices' indices differ.

    The engine sees host memory only, so the label is a device's number in the order of the tensors; the first one has
    none. With ``native``, for a library that works on the devices themselves, it is the kind of the device, too.
    """
    labels: dict[torch.device, str] = {}
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        device = tensor.device
        if device not in labels:
            kind = device.type if native and device.type != "cpu" else ""
            number = numbers[kind]
            numbers[kind] += 1
            labels[device] = f"{kind}{number or ''}"
    return labels


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
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
    """One bucket of the plan."""

    index: int  #: Position in the plan; bucket 0 is ready first in a usual backward pass.
    dtype: str  #: The dtype of all its parameters.
    members: tuple[int, ...]  #: Indices of the parameters, in the order of their gradients in memory.
    num_elements: int  #: Number of elements of the gradients, without the tail.
    num_buckets: int  #: In the last bucket of the plan the number of the plan's buckets; 0 in the others.
    device: str = ""  #: The device of all its parameters, as in their descriptions.


def plan_buckets(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Cut the parameters into buckets, last registered first: the order in which backward makes gradients.

    A bucket is closed when the next parameter would make it larger than ``bucket_bytes``; a parameter larger than that
    has a bucket of its own. The first registered parameter is always in the last bucket.

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


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How gradients travel, and which flags this rank sends with them."""

    rank: int
    world_size: int
    dtype: torch.dtype | None = None  #: The dtype to which gradients are cast; ``None``: they are not.
    scale: float = 1.0  #: Factor before the reduction.
    reports_absence: bool = False  #: Whether a rank reports the gradients that it does not have.

    def tail(self, spec: BucketSpec) -> TailLayout:
        """Return the layout of a bucket's tail."""
        num_ranks = self.world_size if spec.num_buckets else 0
        return TailLayout(len(spec.members), self.reports_absence, spec.num_buckets, num_ranks)


class _Memory:
    """One flat tensor and the views into it; with a wire dtype a second, wide tensor beside it."""

    def __init__(
        self,
        spec: BucketSpec,
        members: Sequence[ParameterSpec],
        empty: Callable[..., torch.Tensor],
        device: torch.device,
        wire: WireFormat,
    ) -> None:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        layout = wire.tail(spec)
        #: The tensor that travels.
        self.flat = empty(spec.num_elements + layout.num_elements, dtype=wire.dtype or dtype, device=device).zero_()
        self.tail = Tail(self.flat[spec.num_elements :], layout)  #: The end of ``flat``.
        self.slots = _views(self.flat, members)  #: The view of ``flat`` for each parameter.
        #: The reduced gradients in the parameters' dtype; the same memory as ``flat`` if that has this dtype.
        self.wide = self.flat[: spec.num_elements]
        self.views = self.slots  #: The view of ``wide`` for each parameter.
        if self.flat.dtype is not dtype:
            self.wide = torch.zeros(spec.num_elements, dtype=dtype, device=device)
            self.views = _views(self.wide, members)
        self.begin = self.wide.data_ptr()  #: Address of the first byte of ``wide``.
        self.end = self.begin + self.wide.numel() * self.wide.element_size()  #: Address after its last byte.


def _views(flat: torch.Tensor, members: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    views = []
    offset = 0
    for member in members:
        views.append(flat.as_strided(member.shape, member.stride, offset))
        offset += member.num_elements
    return views


class Bucket:
    """The memory of one bucket, this rank's gradients that were copied into it, and its reduction in one round."""

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        empty: Callable[..., torch.Tensor],
        wire: WireFormat,
    ) -> None:
        self.spec = spec  #: Its place in the plan.
        self.parameters = [parameters[member] for member in spec.members]
        self.specs = [specs[member] for member in spec.members]  #: Their descriptions.
        self._empty, self._wire = empty, wire
        self._spare: _Memory | None = None
        #: The gradients as they were when last captured; ``None`` where there was none.
        self.local: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self.priority = 0  #: The priority of its reduction.
        self.work: Work | None = None  #: Its reduction in this round; ``None`` before it is submitted.
        self._complete = False

    @cached_property
    def _memory(self) -> _Memory:  # made for the first gradient that travels: with some strategies none does
        return self._make()

    @outside_inference_mode
    def _make(self) -> _Memory:
        return _Memory(self.spec, self.specs, self._empty, self.parameters[0].device, self._wire)

    @property
    def tail(self) -> Tail:
        """The flags of all ranks, after the reduction."""
        return self._memory.tail

    def begin(self) -> None:
        """Begin a round, in which the bucket is not submitted yet."""
        self.work, self._complete = None, False

    def capture(self, *, empty: bool = False) -> None:
        """Remember the parameters' present gradients as this rank's contribution; with ``empty`` none of them."""
        self.local, self._versions = [], []
        for parameter in self.parameters:
            grad = None if empty else parameter.grad
            self.local.append(grad)
            self._versions.append(0 if grad is None else version_of(grad))

    def release(self) -> None:
        """Let go of the remembered gradients."""
        self.local, self._versions = [], []

    def replaced(self) -> bool:
        """Whether a parameter has another gradient than the remembered one, or that one was changed in place."""
        for position, parameter in enumerate(self.parameters):
            grad = self.local[position]
            if parameter.grad is not grad or (grad is not None and version_of(grad) != self._versions[position]):
                return True
        return False

    def overwritten(self) -> bool:
        """Whether a remembered gradient was changed in place."""
        return any(
            grad is not None and version_of(grad) != version
            for grad, version in zip(self.local, self._versions, strict=True)
        )

    def same_local(self, position: int) -> bool:
        """Whether the parameter at ``position`` still has the remembered gradient, unchanged."""
        grad = self.local[position]
        return (
            grad is not None and self.parameters[position].grad is grad and version_of(grad) == self._versions[position]
        )

    def pack(self, changed: Collection[int] = (), *, joined: bool = False, again: bool = False) -> torch.Tensor:
        """Copy the remembered gradients and this rank's flags into the flat tensor, and return that.

        The remembered gradients must stay readable until the step is over, since they may be needed a second time.
        Where they are views of this bucket (``zero_grad(set_to_none=False)``), a second flat tensor takes turns with
        the first.

        Args:
            changed: In the last bucket the indices of the buckets whose gradients changed after they had left.
            joined: This rank takes part without data.
            again: This rank has finished a round since its last step.

        Raises:
            UnsupportedError: A sparse gradient.
            ConfigurationError: A gradient's dtype, device or shape is not the planned one.
        """
        memory = self._memory
        targets, sources, absent, missing = [], [], [], []
        overlaps = False
        for position, (grad, view) in enumerate(zip(self.local, memory.views, strict=True)):
            if grad is None:
                absent.append(memory.slots[position])
                missing.append(position)
                continue
            if (
                grad.dtype is not view.dtype
                or grad.layout is not torch.strided
                or grad.shape != view.shape
                or grad.device != view.device
            ):
                raise self._misfit(position, grad)
            overlaps = overlaps or memory.begin <= grad.data_ptr() < memory.end
            targets.append(memory.slots[position])
            sources.append(grad.detach())
        if overlaps:
            self._memory, self._spare = self._spare or self._make(), memory
            memory = self._memory
            targets = [slot for slot, grad in zip(memory.slots, self.local, strict=True) if grad is not None]
            absent = [memory.slots[position] for position in missing]
            sources = [
                source.clone() if memory.begin <= source.data_ptr() < memory.end else source for source in sources
            ]
        if self._wire.scale != 1.0:  # in one pass
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, self._wire.scale, out=target)
        elif targets:  # one call: for small gradients a loop in Python costs more than the bytes
            torch._foreach_copy_(targets, sources)
        if absent:
            torch._foreach_zero_(absent)
        memory.tail.write(missing, changed, rank=self._wire.rank, joined=joined, again=again)
        return memory.flat

    def _misfit(self, position: int, grad: torch.Tensor) -> ConfigurationError:
        view, name = self._memory.views[position], self.specs[position].name
        if grad.layout is not torch.strided:
            return UnsupportedError(
                f"parameter {name!r} has a sparse gradient ({grad.layout}), which cannot be synchronised. "
                "Build its module with sparse=False."
            )
        return ConfigurationError(
            f"parameter {name!r} was planned as {view.dtype}{list(view.shape)} on {view.device} but its gradient is "
            f"{grad.dtype}{list(grad.shape)} on {grad.device}. Convert or move the model before building "
            "DistributedOptimizer, or call its replan() on every rank afterwards."
        )

    def wait(self) -> None:
        """Wait for the reduction; then ``tail`` has the flags of all ranks. Errors as of ``Work.wait``."""
        assert self.work is not None, "the round was closed, so every bucket was submitted"
        self.work.wait()
        copy = host_copy_of(self.work)
        self.tail.read(None if copy is None else copy[self.spec.num_elements :])

    def complete(self, factor: float) -> None:
        """Wait for the reduction, bring the gradients to the parameters' dtype, and multiply them by the factor.

        Only the first call of a round multiplies.
        """
        if self._complete:
            return
        self.wait()
        self._complete = True
        memory = self._memory
        if memory.slots is not memory.views:
            memory.wide.copy_(memory.flat[: len(memory.wide)])
        if factor != 1.0:
            memory.wide.mul_(factor)

    def reduced(self) -> list[torch.Tensor | None]:
        """Return the reduced gradient of each parameter, a view of the bucket; ``None`` where no rank had one."""
        memory = self._memory
        return [view if present else None for view, present in zip(memory.views, memory.tail.present(), strict=True)]
