"""The interfaces of sparse methods and their sessions."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action

if TYPE_CHECKING:
    from totalreduce.sparse.accumulator import Accumulator
    from totalreduce.sparse.candidates import Workspace

__all__ = ["BucketShape", "Method", "Report", "Session", "Update"]


@dataclass(frozen=True, slots=True)
class BucketShape:
    """The shapes of a bucket's segments; equal on all ranks."""

    #: The shape of each segment, whose elements lie in this order: rows and columns of a matrix, or the number of
    #: elements of a vector or a part of a parameter. A parameter whose memory has another order of dimensions than its
    #: shape is the matrix that its memory is (``ParameterSpec.matrix``).
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each segment."""
        return [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]

    @property
    def num_elements(self) -> int:
        """The number of elements of all segments."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Update:
    """The sums over all ranks that are applied; the same bits on every rank."""

    present: Array  #: For each segment whether some rank had a gradient for it.
    indices: Array | None  #: int32, ascending: the indices of the elements; ``None``: all elements.
    values: Array  #: float32: the sums.

    def write_to(self, target: Accumulator, factor: float) -> None:
        """Set the target to this update times a factor."""
        if self.indices is None:
            target.assign(self.values, factor)
        else:
            target.assign_sparse(self.indices, self.values, factor)

    def add_to(self, target: Accumulator, factor: float) -> None:
        """Add this update times a factor to the target."""
        if self.indices is None:
            target.add_all(self.values, factor)
        else:
            target.add(self.indices, self.values, factor)


@dataclass(slots=True)
class Report:
    """The numbers of one bucket in one step on this rank."""

    method: str = ""  #: Name of the method that was used.
    k: int = 0  #: The number of elements to send.
    selected: int = 0  #: The number of elements selected on this rank.
    applied: int = 0  #: The number of elements updated.
    #: Payload sent by this rank; collectives are counted as direct exchanges, an allreduce as a ring.
    sent_bytes: int = 0
    received_bytes: int = 0  #: Payload received.
    #: The largest number of bytes that a rank receives for its region, divided by the mean; 1 is even. With more than
    #: 32 ranks it is that of the step before.
    imbalance: float = 1.0
    local_threshold: float = 0.0  #: Smallest magnitude selected on this rank.
    global_threshold: float = 0.0  #: Smallest magnitude applied.
    rescans: int = 0  #: The number of times that candidates were listed again, since the beginning.
    skipped: bool = False  #: Whether some rank's gradients were not finite.
    extra: dict[str, float] = field(default_factory=dict)  #: Numbers that were asked for, such as ``xi``.

    def describe(self) -> str:
        """Return one line for a log."""
        if self.skipped:
            return f"{self.method}: skipped, because some rank's gradients were not finite"
        further = "".join(f", {name} {value:.3g}" for name, value in self.extra.items())
        return (
            f"{self.method}: {self.selected} of {self.k} selected above {self.local_threshold:.3g}, "
            f"{self.applied} applied above {self.global_threshold:.3g}, {self.sent_bytes} bytes sent, "
            f"{self.received_bytes} received, imbalance {self.imbalance:.2f}{further}"
        )


class Session(Protocol):
    """The state of one bucket on one rank. A round is ``accumulate``, and then ``exchange`` until it ends."""

    report: Report

    def share(self, workspace: Workspace) -> None:
        """Use a workspace that is shared with sessions which do not accumulate at the same time."""

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """Compute ``gradients * scale + residuals`` in the gradients' memory, and select. Local; releases the GIL."""

    def exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        """Exchange the selection with the other ranks, and leave the new residual in the gradients' memory.

        Args:
            present: For each segment whether this rank had a gradient; segments without one are zero.

        Returns:
            The sums to apply. ``None`` if some rank's gradients are not finite: then the contents of the gradients'
            memory are undefined, and neither the residuals nor this object have changed.
        """

    def state(self) -> Mapping[str, Any]:
        """Return the numbers and arrays that are needed, beside the residuals, to go on with the same bits."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class Method(Protocol):
    """The settings of a sparse method, as a frozen dataclass; equal on all ranks."""

    name: ClassVar[str]  #: The method's name.
    whole: ClassVar[bool]  #: Whether parameters must not be cut into parts, however large they are.

    def session(self, shape: BucketShape, rank: int, world_size: int) -> Session:
        """Return the session of one bucket on one rank."""
