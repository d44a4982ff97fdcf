"""The form in which the copies of a rank's buffers are sent to other ranks.

Small buffers of equal layout go to all ranks as rows of bytes, by an allgather that is prepared once. All others are
packed with the residuals. Which form it is depends on the layouts of all ranks, which may change in each block: ranks
tell each other their layouts with the vote, so that a block of which the copies lack something is voted on again, after
they were sent in the general form.

A buffer that a block changes after the vote, such as a moving average of the parameters, is *late*: its copy is as it
was before. No message can follow then, because each rank finishes the block by itself. So a new rank gets late buffers
from the rank that gives it the parameters, and they should be equal on all ranks.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import final

import torch

from totalreduce.groups.group import Group
from totalreduce.recovery.buffers import BufferRow, RowLayout
from totalreduce.recovery.state import State
from totalreduce.tensors.work import Work

__all__ = ["BufferCopies", "Form"]

#: The most bytes that the buffers of all ranks have to be sent to all ranks. Larger ones are sent to the next ranks.
_ROWS_BYTES_MAX = 128 * 1024


class Form(enum.Enum):
    """What is sent before a vote."""

    NOTHING = "no rank has buffers, and there are no residuals"
    ROWS = "rows of bytes, to all ranks"
    PACKED = "packed buffers and residuals, to the next ranks"


@final
class _Rows:
    """The buffers of all ranks, each as a row of bytes: an allgather that is prepared once."""

    def __init__(self, row: BufferRow, group: Group) -> None:
        """Make the rows. Nothing is sent."""
        self._row, self.layout = row, row.layout
        self._all = torch.zeros(group.world_size, self.layout.num_bytes, dtype=torch.uint8, device="cpu")
        self._mine = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device="cpu")
        self._now = torch.zeros_like(self._mine)
        self._allgather = group.control.prepare_allgather(self._all, self._mine, name="recovery/buffers")
        self._work: Work | None = None

    def start(self) -> None:
        """Send the buffers as they are now, unless they are on their way already. Collective, with ``finish``.

        If they have another layout by now, something is sent that is of no use.
        """
        if self._work is not None:
            return  # optimizer.step() has run out of time, and is repeated
        if self._row.look().digest == self.layout.digest:
            self._row.copy(self._mine)
        self._work = self._allgather.start()

    def finish(self) -> list[torch.Tensor]:
        """Return the rows of all ranks. They are not changed any more. Calls ``start`` if nobody has.

        Raises:
            DeadlineExceededError: The rows have not come in time. The call may be repeated.
        """
        self.start()
        assert self._work is not None
        self._work.wait()
        self._work = None
        return list(self._all.clone())

    def changed(self) -> set[str]:
        """Return the names of the buffers that differ from the row of this rank that was sent last."""
        now = self._row.copy(self._now)
        return self._row.layout.changed(now, self.layout, self._mine)


@final
class BufferCopies:
    """How this rank sends copies of its buffers, in one group."""

    def __init__(self, state: State) -> None:
        """Nothing is sent before ``plan``."""
        self._state = state
        self._row = state.buffer_row()
        self.form = Form.NOTHING  #: The form of the copies, equal on all ranks.
        self.late = set[str]()  #: The names of the buffers that blocks change after the vote.
        self._layouts: int | None = 0  #: What all ranks had in common when the form was chosen.
        self._rows: _Rows | None = None
        self._sent: dict[str, torch.Tensor | None] | None = None  #: Copies of the buffers that were packed last.

    def digest(self, *, looks: bool = False) -> int:
        """Return a number that ranks with buffers of one layout have in common; 0 without buffers.

        Args:
            looks: Look at the buffers even if this was done when rows were started.

        Raises:
            UnsupportedError: A buffer cannot be copied byte by byte.
        """
        return (self._row.look() if looks or self._rows is None else self._row.layout).digest

    @property
    def row_layout(self) -> RowLayout | None:
        """The layout of the rows; ``None`` if the form is another one."""
        return None if self._rows is None else self._rows.layout

    def plan(self, layouts: int | None, group: Group, *, are_sent: bool, have_residuals: bool) -> None:
        """Choose the form. On all ranks, with equal arguments; nothing is sent."""
        num_bytes = group.world_size * self._row.layout.num_bytes
        are_rows = bool(layouts) and are_sent and not have_residuals and 0 < num_bytes <= _ROWS_BYTES_MAX
        self._layouts, self._sent = layouts, None
        self._rows = _Rows(self._row, group) if are_rows else None
        if are_rows:
            self.form = Form.ROWS
        else:
            self.form = Form.NOTHING if layouts == 0 and not have_residuals else Form.PACKED

    def fits(self, layouts: int | None) -> bool:
        """Whether the form is the one that ranks with these layouts choose."""
        return layouts == self._layouts

    def finish_rows(self) -> list[torch.Tensor]:
        """Return the rows of all ranks. See ``_Rows.finish``."""
        assert self._rows is not None
        return self._rows.finish()

    def packed(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers to be packed, and note a copy of them."""
        buffers = self._state.own_buffers()
        self._sent = {name: None if each is None else each.clone() for name, each in buffers.items()}
        return buffers

    def note_late(self) -> None:
        """Note the buffers that the program has changed since they were sent."""
        if self._sent is not None:
            sent, now = self._sent, dict(self._state.named_buffers())
            names = sent.keys() | self._state.own_buffers().keys()
            self.late |= {name for name in names if not _are_same(now.get(name), sent.get(name))}
        elif self._rows is not None:
            self.late |= self._rows.changed()

    def digests_of_late(self) -> dict[str, str]:
        """Return a hash of each late buffer, by name; "" for one that is no more."""
        if not self.late:
            return {}
        parts = self._row.look().parts(self._row.copy())
        return {
            name: hashlib.sha256(parts[name].numpy().data).hexdigest() if name in parts else ""
            for name in sorted(self.late)
        }

    def load(self, buffers: Mapping[str, torch.Tensor | None]) -> None:
        """Set buffers to those that another process had. Late ones are those of the rank that gave the parameters."""
        self._state.load_own_buffers({name: each for name, each in buffers.items() if name not in self.late})


def _are_same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(first, second)
