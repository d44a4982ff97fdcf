"""Copies of a model's buffers: as they were when a block began, and as rows of bytes that other ranks get.

A model has several buffers for each batch normalisation, which are small. To copy them one by one takes longer than the
rest of a block, so the copies of small buffers are parts of one row of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch

from totalreduce.tensors.modes import outside_inference_mode, version_of, write

__all__ = ["BufferRow", "KeptBuffers", "buffer_places"]

#: The most elements of a buffer that is copied in every block.
_SMALL_ELEMENTS = 65_536
#: Where a buffer may begin in a row of bytes: a multiple of any element's size.
_ALIGNMENT = 16

#: Name, dictionary and key of each buffer of a model: the program may put another tensor there.
Places = list[tuple[str, dict[str, torch.Tensor | None], str]]


def buffer_places(model: torch.nn.Module) -> Places:
    """Return where the modules of a model have their buffers."""
    return [
        (f"{prefix}.{key}" if prefix else key, module._buffers, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
    ]


def named_buffers(places: Places) -> list[tuple[str, torch.Tensor]]:
    """Return what ``named_buffers()`` of the model returns, in less time."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, buffers, key in places:
        buffer = buffers[key]
        if buffer is not None:
            found.setdefault(id(buffer), (name, buffer))
    return list(found.values())


@final
class BufferRow:
    """The layout of a model's buffers in a row of bytes, and the copy into such a row.

    Attributes:
        num_bytes: The length of a row.
    """

    def __init__(self, places: Places, takes: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Lay the row out. ``takes``: which buffers are in it, by default all."""
        self._places, self._takes = places, takes
        self._lay_out()

    @outside_inference_mode
    def _lay_out(self) -> None:
        #: Of each place: its buffer, and where the memory of that is. If one of them is another, so is the layout.
        self._seen = [(buffers, key, buffers[key], _address(buffers[key])) for _, buffers, key in self._places]
        #: By name: where the buffer begins in the row, and a tensor of its shape and dtype.
        self._starts: dict[str, tuple[int, torch.Tensor]] = {}
        #: The row as tensors of bytes, one after the other: memory of buffers, or copies of them, and gaps.
        self._parts: list[torch.Tensor] = []
        #: Buffers that are not contiguous, or on another device, and their copies.
        self._distant: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.num_bytes = 0
        for name, buffer in named_buffers(self._places):
            if not self._takes(buffer):
                continue
            plain = buffer.detach()
            if not plain.is_contiguous() or plain.device.type != "cpu":
                self._distant.append(plain)
                plain = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
                self._copies.append(plain)
            self._starts[name] = (self.num_bytes, torch.empty_like(plain, device="meta"))
            gap = -plain.nbytes % _ALIGNMENT
            self._parts += [plain.view(-1).view(torch.uint8), torch.zeros(gap, dtype=torch.uint8, device="cpu")]
            self.num_bytes += plain.nbytes + gap

    @outside_inference_mode
    def copy(self, row: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the buffers into a row, and return it: the given one, unless the layout is another one by now."""
        for buffers, key, buffer, address in self._seen:
            now = buffers[key]
            if now is not buffer or _address(now) != address:
                self._lay_out()
                break
        if row is None or len(row) != self.num_bytes:
            row = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        if self._distant:
            torch._foreach_copy_(self._copies, self._distant)
        if self._parts:
            torch.cat(self._parts, out=row)
        return row

    def read(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers in a row, by name. They share its memory."""
        parts = self.parts(row)
        return {name: parts[name].view(like.dtype).view(like.shape) for name, (_, like) in self._starts.items()}

    def parts(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the bytes of each buffer in a row, by name. They share its memory."""
        return {name: row[start : start + like.nbytes] for name, (start, like) in self._starts.items()}


def _address(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else buffer.data_ptr()


@final
class KeptBuffers:
    """The buffers of a model as they were when the block began.

    Torch counts changes of a tensor (``_version``), but not those by the kernels of batch normalisation. So buffers are
    copied in every block, but for large ones that were not changed by the count: no layer keeps statistics so large.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = buffer_places(model)
        self._small = BufferRow(self._places, _is_small)
        self._row: torch.Tensor | None = None  #: The small buffers when the block began; ``None`` before the first one.
        #: By name: the copy of a large buffer, and the count of its changes.
        self._large: dict[str, tuple[torch.Tensor, int]] = {}
        self._has_large = any(not _is_small(buffer) for _, buffer in self.named())
        self._changed: set[str] = set()

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return what ``named_buffers()`` of the model returns."""
        return named_buffers(self._places)

    def row(self) -> BufferRow:
        """Return a layout of all buffers in a row."""
        return BufferRow(self._places)

    def keep(self) -> None:
        """Copy the buffers that may have changed."""
        if self._places:
            self._row = self._small.copy(self._row)
        if self._has_large:
            for name, buffer in self.named():
                kept = self._large.get(name)
                if not _is_small(buffer) and (kept is None or _differs(kept, buffer)):
                    self._large[name] = (buffer.detach().clone(), version_of(buffer))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers to the copies."""
        small = {} if self._row is None else self._small.read(self._row)
        for name, buffers, key in self._places:
            buffer = buffers[key]
            kept = small[name] if name in small else self._large[name][0] if name in self._large else None
            if buffer is not None and kept is not None and (buffer.shape, buffer.dtype) != (kept.shape, kept.dtype):
                buffers[key] = kept.to(buffer.device, copy=True)  # the program has put another one there
        for name, buffer in self.named():
            if name in small:
                write(buffer, small[name])
            elif name in self._large and _differs(self._large[name], buffer):
                kept, _ = self._large[name]
                write(buffer, kept)
                self._large[name] = (kept, version_of(buffer))

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the buffers that some block has changed."""
        found = {}
        small = {} if self._row is None else self._small.read(self._row)  # none before the first block
        for name, buffer in self.named():
            if name not in self._changed:
                if name in small:
                    is_changed = not torch.equal(buffer.cpu(), small[name])
                else:
                    is_changed = name in self._large and _differs(self._large[name], buffer)
                    is_changed = is_changed and not torch.equal(buffer, self._large[name][0])
                if not is_changed:
                    continue
                self._changed.add(name)
            found[name] = buffer.detach()
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set buffers to those that ``changed`` has returned in another process."""
        buffers = dict(self.named())
        for name, tensor in tensors.items():
            write(buffers[name], tensor)
        self._changed |= tensors.keys()


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() <= _SMALL_ELEMENTS


def _differs(kept: tuple[torch.Tensor, int], buffer: torch.Tensor) -> bool:
    """Whether a large buffer may have other values than its copy."""
    copy, version = kept
    if buffer.is_inference():  # torch counts nothing
        return True
    return version != version_of(buffer) or copy.shape != buffer.shape or copy.dtype != buffer.dtype
