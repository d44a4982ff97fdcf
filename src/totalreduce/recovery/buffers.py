"""Copies of a model's buffers: as they were when a block began, and as rows of bytes that other ranks get.

A model has several buffers for each batch normalisation, which are small. To copy them one by one takes longer than the
rest of a block, so the copies of small buffers are parts of one row of bytes.

A program may change the shape of a buffer, and register, replace or remove buffers, at any time, and differently on
each rank: a cache of positions grows with the longest sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.recovery.places import Places
from totalreduce.recovery.watch import Watch
from totalreduce.tensors.flats import fetch, host_like
from totalreduce.tensors.modes import outside_inference_mode
from totalreduce.tensors.values import set_values

__all__ = ["BufferRow", "KeptBuffers", "RowLayout", "buffers_of", "follow_state_dict"]

#: The most elements of a buffer that is copied in every block.
_SMALL_ELEMENTS = 65_536
#: Where a buffer may begin in a row of bytes: a multiple of any element's size.
_ALIGNMENT = 16


def buffers_of(model: torch.nn.Module) -> Places:
    """Return where the modules of a model have their buffers."""
    return Places(model, "buffers")


@final
@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Which buffers are in a row of bytes, and where."""

    #: By name: where the buffer begins in the row, and a tensor of its shape and dtype.
    starts: dict[str, tuple[int, torch.Tensor]]
    num_bytes: int  #: The length of a row.
    #: A number that is equal for layouts with the same names, dtypes and shapes; 0 if there are no buffers.
    digest: int

    def read(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers in a row, by name. They share its memory."""
        parts = self.parts(row)
        return {name: parts[name].view(like.dtype).view(like.shape) for name, (_, like) in self.starts.items()}

    def parts(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the bytes of each buffer in a row, by name. They share its memory."""
        return {name: row[start : start + like.nbytes] for name, (start, like) in self.starts.items()}

    def changed(self, row: torch.Tensor, layout: RowLayout, other: torch.Tensor) -> set[str]:
        """Return the names of the buffers that differ between a row and another one of another layout."""
        if layout.digest == self.digest and torch.equal(row, other):
            return set()
        mine, theirs = self.read(row), layout.read(other)
        return {
            name
            for name in mine.keys() | theirs.keys()
            if name not in mine or name not in theirs or not _are_equal(mine[name], theirs[name])
        }


@final
class BufferRow:
    """The copy of a model's buffers into a row of bytes.

    Attributes:
        layout: The layout of the last call of ``look``.
    """

    def __init__(self, places: Places, takes: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Lay the row out.

        Args:
            places: Where the buffers are. Nothing else calls its ``look``.
            takes: Which buffers are in the row, by default all.
        """
        self._places, self._takes = places, takes
        self._lay_out()

    @outside_inference_mode
    def _lay_out(self) -> None:
        #: The row as tensors of bytes, one after the other: memory of buffers, or copies of them, and gaps.
        self._parts: list[torch.Tensor] = []
        #: Buffers that are not contiguous, or on another device, and their copies.
        self._distant: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        starts: dict[str, tuple[int, torch.Tensor]] = {}
        num_bytes = 0
        for name, buffer in self._places.named:
            if not self._takes(buffer):
                continue
            plain = buffer.detach()
            if not plain.is_contiguous() or plain.device.type != "cpu" or plain.is_conj() or plain.is_neg():
                self._distant.append(plain)
                plain = host_like(plain)
                self._copies.append(plain)
            starts[name] = (num_bytes, torch.empty_like(plain, device="meta"))
            gap = -plain.nbytes % _ALIGNMENT
            self._parts += [
                plain.view(-1).view(torch.uint8),
                torch.zeros(gap, dtype=torch.uint8, device="cpu"),
            ]
            num_bytes += plain.nbytes + gap
        self.layout = RowLayout(starts, num_bytes, _digest(starts))

    def look(self) -> RowLayout:
        """Return the layout of the buffers as they are now. Raises what ``Places.look`` does."""
        if self._places.look():
            self._lay_out()
        return self.layout

    @outside_inference_mode
    def copy(self, row: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the buffers into a row, and return it: the given one, unless the layout has another length by now."""
        num_bytes = self.look().num_bytes
        if row is None or len(row) != num_bytes:
            row = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if self._distant:
            fetch(self._copies, self._distant)
        if self._parts:
            torch.cat(self._parts, out=row)
        return row


def _digest(starts: Mapping[str, tuple[int, torch.Tensor]]) -> int:
    """Return 62 bits of a hash of names, dtypes and shapes; 0 if there are none."""
    if not starts:
        return 0
    text = repr([(name, str(like.dtype), tuple(like.shape)) for name, (_, like) in starts.items()])
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2) | 1


@final
@dataclass(frozen=True, slots=True)
class _Large:
    """A large buffer, with a copy."""

    name: str
    buffer: torch.Tensor
    address: int  #: Where its memory was when the copy was made.
    copy: torch.Tensor

    @property
    def is_in_place(self) -> bool:
        """Whether the buffer has the memory and the shape that it had when the copy was made."""
        return self.buffer.data_ptr() == self.address and self.buffer.shape == self.copy.shape


@final
class KeptBuffers:
    """The buffers of a model as they were when the block began.

    Torch counts changes of a tensor (``_version``), but not those by the kernels of batch normalisation. So buffers are
    copied in every block, but for large ones of which neither the count nor some elements have changed: no layer keeps
    statistics so large.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Note where the buffers are; nothing is copied. Raises what ``Places.look`` does."""
        self._model = model
        self._places = buffers_of(model)
        self._small = BufferRow(self._places, _is_small)
        self._row: torch.Tensor | None = None  #: The small buffers when the block began; ``None`` before the first one.
        self._layout: RowLayout | None = None  #: The layout when the block began.
        self._large: list[_Large] = []  #: The large buffers when the block began.
        self._watch = Watch([])  #: Of the large buffers.
        self._changed: set[str] = set()  #: The large buffers that some block before this one has changed.
        self._known: set[str] = set()  #: All names that buffers have had when a block began.

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return what ``named_buffers()`` of the model returns."""
        return self._places.live()

    def row(self) -> BufferRow:
        """Return a layout of all buffers in a row."""
        return BufferRow(buffers_of(self._model))

    def keep(self) -> None:
        """Copy the buffers that may have changed. Raises what ``Places.look`` does."""
        self._row = self._small.copy(self._row)
        if self._large:
            self._keep_changed()
        if self._small.layout is not self._layout:
            self._keep_others(is_first=self._layout is None)
            self._layout = self._small.layout
        self._known.update(name for name, _ in self._places.named)

    def _keep_changed(self) -> None:
        """Copy the large buffers that have changed, and still have the same memory."""
        for index in self._watch.changed():
            each = self._large[index]
            self._changed.add(each.name)
            if each.is_in_place:
                each.copy.copy_(each.buffer.detach())
        self._watch.note()

    def _keep_others(self, *, is_first: bool) -> None:
        """Copy the large buffers that there were not when the last block began, or that have got other memory."""
        before = {each.name: each for each in self._large}
        self._large = []
        for name, buffer in self._places.named:
            if _is_small(buffer):
                continue
            kept = before.get(name)
            if kept is None or kept.buffer is not buffer or not kept.is_in_place:
                kept = _Large(name, buffer, buffer.data_ptr(), buffer.detach().clone())
                if not is_first:
                    self._changed.add(name)
            self._large.append(kept)
        self._watch = Watch([each.buffer for each in self._large])

    def restore(self) -> None:
        """Set the buffers to the copies."""
        if self._layout is None or self._row is None:
            return
        self._places.put_back()
        small = self._layout.read(self._row)
        for name, buffer in self._places.named:
            if name in small:
                set_values(buffer, small[name])
        for index in self._watch.changed():
            set_values(self._large[index].buffer, self._large[index].copy)

    def own(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers that may differ from rank to rank, by name; ``None`` for those that are no more.

        These are the small ones, and the large ones that some block has changed. They are not copied.
        """
        unchanged = {each.name for each in self._large} - self._changed
        unchanged -= {self._large[index].name for index in self._watch.changed()}
        still = {each.name: each for each in self._large if each.name in unchanged}
        now = dict(self.named())
        found: dict[str, torch.Tensor | None] = {}
        for name, buffer in now.items():
            if name not in still or still[name].buffer is not buffer or not still[name].is_in_place:
                found[name] = buffer.detach()
        return found | dict.fromkeys(sorted(self._known - now.keys()))

    def describe(self) -> dict[str, list[Any]]:
        """Return, by name, of each place: the name under which ``named`` has its tensor, and whether it is persistent.

        The first one is ``None`` where a place has no tensor.
        """
        names = {id(buffer): name for name, buffer in self.named()}
        return {
            name: [None if buffer is None else names[id(buffer)], is_persistent]
            for name, buffer, is_persistent in self._places.entries()
        }

    def check(self, names: Sequence[str]) -> None:
        """Check that buffers of these names can be set. Raises ``ConfigurationError``."""
        for name in names:
            obstacle = self._places.obstacle(name)
            if obstacle:
                raise ConfigurationError(
                    f"the state of the job has a buffer {name!r}, and {obstacle}: start the program that the state is "
                    "of"
                )

    def set_all(self, described: Mapping[str, Sequence[Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """Set all places to what ``describe`` and ``named`` have returned in another process, and no others."""
        self._places.remove_others(described.keys())
        made: dict[str, torch.Tensor] = {}
        used: set[int] = set()  # two places may have had one tensor, and have two now
        for name, (first, _) in described.items():
            if first == name:
                before = self._places.get(name)
                made[name] = self._filled(name, None if id(before) in used else before, tensors[name])
                used.add(id(made[name]))
        for name, (first, is_persistent) in described.items():
            tensor = None if first is None else made[first]
            self._places.set(name, tensor, is_persistent=bool(is_persistent))

    def load(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Set buffers to those that ``own`` has returned in another process. A new one is not persistent."""
        for name, values in tensors.items():
            before = self._places.get(name)
            tensor = None if values is None else self._filled(name, before, values)
            if before is not None and tensor is not None:
                self._places.exchange(before, tensor)
            elif tensor is not before:
                self._places.set(name, tensor)
        self._changed |= tensors.keys()
        self._known |= tensors.keys()

    def _filled(self, name: str, before: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        """Return a buffer with these values: the present one, if it has their shape and dtype, or else a new one."""
        if before is not None and (before.shape, before.dtype) == (values.shape, values.dtype):
            set_values(before, values)
            return before
        return values.detach().to(self._places.device_of(name), copy=True)


def follow_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Have a model's persistent buffers be those of a ``state_dict()`` of it, so that ``load_state_dict`` can load it.

    Values are not set. Otherwise torch refuses buffers that have another shape, or were registered or removed, since
    the state was made.
    """
    places = buffers_of(model)
    for name, buffer, is_persistent in list(places.entries()):
        if is_persistent and buffer is not None and name not in state:
            places.set(name, None)
    for name, values in state.items():
        if isinstance(values, torch.Tensor) and not places.obstacle(name):
            before = places.get(name)
            if before is None and not places.loads_plainly(name):
                continue  # a value of the module's own, which it loads by itself
            if before is None or (before.shape, before.dtype) != (values.shape, values.dtype):
                after = torch.empty_like(values, device=places.device_of(name))
                if before is None:
                    places.set(name, after, is_persistent=True)
                else:
                    places.exchange(before, after)


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() <= _SMALL_ELEMENTS


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    same_form = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same_form and torch.equal(first.cpu(), second.cpu())
