"""The buffers of a model, which each round makes those of one rank, or the average of all.

A rank's forward passes change running statistics by the samples of this rank. DistributedDataParallel copies the
buffers of rank 0 to all ranks before a forward pass. Here they travel beside the gradients of the step, and the next
forward pass begins with the same values. All small buffers are one row of bytes. A large one, such as a mask, seldom
changes: it is sent only if torch has counted a change on some rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.broadcast import problem_of_tensor, room_of, slots_of
from totalreduce.pytorch.round import GradientReducer
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.streams import is_on_accelerator
from totalreduce.tensors.work import Work, host_copy_of

__all__ = ["BufferMode", "BufferReducer"]

#: How the buffers of the ranks become equal.
BufferMode = Literal["broadcast", "average"]

_log = logging.getLogger(__name__)

#: The largest number of elements of a small buffer.
_SMALL_ELEMENTS = 65_536


@dataclass(slots=True)
class _Place:
    """One buffer of the model."""

    name: str
    #: The module's dictionary of buffers, in which the program may put another tensor.
    buffers: dict[str, torch.Tensor | None]
    key: str  #: Its key there.
    like: torch.Tensor  #: A tensor on ``meta`` of the planned shape and dtype.
    version: int  #: Of a large buffer: its count of changes when the ranks had the same values last.
    is_odd: bool = False  #: Whether it was said that the buffer has not the planned shape any more.

    def present(self) -> torch.Tensor | None:
        """Return the buffer; ``None`` if it is not the planned kind of tensor any more."""
        tensor = self.buffers.get(self.key)
        if tensor is None or (tensor.shape, tensor.dtype) != (self.like.shape, self.like.dtype):
            return None
        return tensor


@final
class _SmallBuffers:
    """Buffers that travel in one message: those of the root, and behind them a flag for each.

    Attributes:
        row: The message.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places, likes = places, [place.like for place in places]
        num_bytes = sum(map(room_of, likes)) + len(likes)
        self.row = torch.zeros(num_bytes, dtype=torch.uint8, device=_device_of(places))
        self._slots = slots_of(self.row, likes)
        #: Of each buffer: whether it has the planned shape. The second is that of the root, after ``read``.
        self._valid, self._has_shape = self.row[num_bytes - len(likes) :], [0] * len(likes)

    def __bool__(self) -> bool:
        return bool(self._places)

    def write(self) -> None:
        """Write the buffers of this rank into the message."""
        present = [place.present() for place in self._places]
        self._valid.fill_(1)
        for flag in (self._valid[number] for number, each in enumerate(present) if each is None):
            flag.zero_()
        slots = [slot for slot, each in zip(self._slots, present, strict=True) if each is not None]
        if slots:
            torch._foreach_copy_(slots, [each.detach() for each in present if each is not None])

    def read(self, work: Work) -> None:
        """Take the flags, from host memory: no stream has to end for them."""
        self._has_shape = _host_part(work, self._valid).tolist()

    def install(self) -> None:
        """Set the buffers to those of the message."""
        for place, slot, has_shape in zip(self._places, self._slots, self._has_shape, strict=True):
            _set(place, slot if has_shape else None)


@final
class _AveragedBuffers:
    """Buffers of floating-point numbers, of which the average over the ranks with data is taken.

    Attributes:
        sums: What is added up: the buffers, of each the number of ranks where it has the planned shape, and the number
            of ranks with data.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        wide = any(place.like.dtype == torch.float64 for place in places)
        sizes = [place.like.numel() for place in places]
        dtype = torch.float64 if wide else torch.float32
        self.sums = torch.zeros(sum(sizes) + len(sizes) + 1, dtype=dtype, device=_device_of(places))
        *self._terms, self._counts = self.sums.split_with_sizes([*sizes, len(sizes) + 1])
        self._counted = [0.0] * (len(sizes) + 1)  #: The counts of all ranks, after ``read``.

    def __bool__(self) -> bool:
        return bool(self._places)

    def write(self, *, joined: bool) -> None:
        """Write the terms of this rank; ``joined``: it has no data."""
        self._counts.fill_(float(not joined))
        for place, term, count in zip(self._places, self._terms, self._counts, strict=False):
            tensor = None if joined else place.present()
            if tensor is None:
                term.zero_()
                count.zero_()
            else:
                term.view(place.like.shape).copy_(tensor.detach())

    def read(self, work: Work) -> None:
        """Take the counts, from host memory: no stream has to end for them."""
        self._counted = _host_part(work, self._counts).tolist()

    def install(self) -> None:
        """Set the buffers to the averages."""
        *counts, num_ranks = self._counted
        for place, term, count in zip(self._places, self._terms, counts, strict=False):
            _set(place, term.view(place.like.shape) / count if count == num_ranks else None)


@final
@never_compiled
class BufferReducer(GradientReducer):
    """Makes the buffers of a model equal on all ranks, in every round."""

    hooked = False
    parameters = ()

    def __init__(
        self, model: torch.nn.Module, group: Group, name: str, mode: BufferMode, root: Callable[[], int]
    ) -> None:
        """Find the buffers. Those that cannot be sent, and those that DDP is told to ignore, are left out.

        Args:
            model: The module.
            group: The ranks.
            name: Prefix of the operations' names.
            mode: ``"broadcast"``: all get those of the root. ``"average"``: floating-point buffers are averaged over
                the ranks with data, and others are those of the root.
            root: Returns the lowest rank that had data in the round before.
        """
        self._group, self._name, self._root = group.control, f"{name}.buffers", root
        places = _places_of(model)
        averages = [mode == "average" and place.like.is_floating_point() for place in places]
        is_small = [place.like.numel() <= _SMALL_ELEMENTS for place in places]
        kinds = list(zip(places, averages, is_small, strict=True))
        self._averaged = _AveragedBuffers([place for place, averaged, _ in kinds if averaged])
        self._small = _SmallBuffers([place for place, averaged, small in kinds if small and not averaged])
        self._large = [place for place, averaged, small in kinds if not small and not averaged]
        #: Of each large buffer: whether it has changed on a rank, and whether it has another shape there.
        self._flags = torch.zeros(2, len(self._large), dtype=torch.uint8, device="cpu")
        self._works: list[tuple[Work, Callable[[Work], None] | None]] = []  #: And who reads the result's host memory.
        self._sent: list[tuple[_Place, torch.Tensor, Work]] | None = None  #: Large buffers that have changed.
        self._closed = self._joined = False
        self._root_now = 0

    @property
    def exists(self) -> bool:
        """Whether there is any buffer to make equal. Equal on all ranks, since their models are."""
        return bool(self._small or self._large or self._averaged)

    def begin(self, *, joined: bool = False, again: bool = False) -> None:  # noqa: ARG002
        """Open a round. The one before has ended, unless its updates were deferred."""
        self.settle()
        self._joined, self._closed = joined, False

    def close(self) -> None:
        """Send the buffers as the forward passes of the step have left them."""
        if self._closed:
            return
        self._closed, self._works, self._sent, self._root_now = True, [], None, self._root()
        if self._small:
            if self._group.rank == self._root_now:
                self._small.write()
            row = self._group.broadcast(self._small.row, root=self._root_now, name=f"{self._name}/row", async_op=True)
            self._works.append((row, self._small.read))
        if self._large:
            for number, place in enumerate(self._large):
                tensor = place.present()
                self._flags[0, number] = tensor is not None and tensor._version != place.version
                self._flags[1, number] = tensor is None
            self._works.append(
                (self._group.allreduce(self._flags, name=f"{self._name}/changed", op=ReduceOp.MAX), None)
            )
        if self._averaged:
            self._averaged.write(joined=self._joined)
            sums = self._group.allreduce(self._averaged.sums, name=f"{self._name}/sums")
            self._works.append((sums, self._averaged.read))

    def finish(self, active: int) -> int:
        """Wait for the buffers, and send large ones that have changed. May be called again after it raised."""
        for work, _ in self._works:
            work.wait()
        if self._sent is None:
            for work, read in self._works:
                if read is not None:
                    read(work)
            self._sent = [self._send(place) for place in self._changed()]
        for _, _, work in self._sent:
            work.wait()
        return active

    @torch.no_grad()
    def install(self) -> None:
        """Set the buffers, unless this rank has joined.

        They are written through ``data``: for a second backward pass of the same graph they count as unchanged.
        """
        if not self._joined and self._closed:
            if self._group.rank != self._root_now:
                self._small.install()
                for place, values, _ in self._sent or []:
                    _set(place, values)
            self._averaged.install()
        for place, _, _ in self._sent or []:
            tensor = place.present()
            place.version = 0 if tensor is None else tensor._version
        self._closed, self._works, self._sent = False, [], None

    def settle(self) -> None:
        """End a round whose updates were deferred: wait for the buffers, and set them."""
        if self._closed:
            self.finish(0)
            self.install()

    def abandon(self) -> None:
        """End the round without a result: other ranks may have sent their buffers."""
        self.close()
        self.finish(0)
        self._closed, self._works, self._sent = False, [], None

    def _changed(self) -> list[_Place]:
        """Return the large buffers that have changed on some rank, and have the planned shape on all."""
        changed, odd = self._flags.bool()
        return [place for place, sends in zip(self._large, (changed & ~odd).tolist(), strict=True) if sends]

    def _send(self, place: _Place) -> tuple[_Place, torch.Tensor, Work]:
        tensor = place.present()
        device = "cpu" if tensor is None else tensor.device
        values = torch.empty(place.like.shape, dtype=place.like.dtype, device=device)
        if tensor is not None and self._group.rank == self._root_now:
            values.copy_(tensor.detach())
        name = f"{self._name}/{place.name}"
        flat = values.view(-1).view(torch.uint8)
        return place, values, self._group.broadcast(flat, root=self._root_now, name=name, async_op=True)


def _device_of(places: Sequence[_Place]) -> torch.device:
    """Return the accelerator on which all of the buffers are, so that to write them waits for no kernel, or the CPU."""
    devices = {
        tensor.device for place in places if (tensor := place.present()) is not None and is_on_accelerator(tensor)
    }
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _host_part(work: Work, end: torch.Tensor) -> torch.Tensor:
    """Return the end of the tensor of an operation in host memory, after ``Work.wait``."""
    copy = host_copy_of(work)
    return end.cpu() if copy is None else copy[len(copy) - len(end) :]


def _set(place: _Place, values: torch.Tensor | None) -> None:
    """Set a buffer; ``None``: it has not the planned shape on the root, or not on every rank."""
    tensor = place.present()
    if tensor is not None and values is not None:
        tensor.data.copy_(values)
    elif not place.is_odd:
        place.is_odd = True
        _log.warning(
            "the buffer %s has another shape or dtype than when the optimizer was built (%s%s), so each rank keeps its "
            "own until replan()",
            place.name,
            place.like.dtype,
            list(place.like.shape),
        )


def _places_of(model: torch.nn.Module) -> list[_Place]:
    """Return the buffers that can be sent, each once, in the order of the modules."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    places: dict[int, _Place] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None or name in ignored or id(tensor) in places:
                continue
            problem = problem_of_tensor(tensor)
            if problem is None and tensor.is_inference():
                problem = "was made in inference mode, and cannot be written"
            if problem is not None:
                _log.warning("the buffer %s stays this rank's own: it %s", name, problem)
                continue
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            places[id(tensor)] = _Place(name, module._buffers, key, like, tensor._version)
    return list(places.values())
