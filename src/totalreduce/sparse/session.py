"""What a method is to those who use it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from totalreduce.sparse.actions import Action, Array

if TYPE_CHECKING:
    from totalreduce.sparse.accumulator import Accumulator
    from totalreduce.sparse.candidates import Workspace

__all__ = ["BucketShape", "Method", "Report", "Session", "Update"]


@dataclass(frozen=True, slots=True)
class BucketShape:
    """What a bucket holds; equal on all ranks.

    Attributes:
        shapes: Of its segments, in order. A segment that is a part of a parameter is one-dimensional.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each segment."""
        return [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]

    @property
    def num_elements(self) -> int:
        """Of all segments."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Update:
    """The sum over all ranks of what was applied; the same bits on every rank.

    Attributes:
        present: For each segment whether some rank had a gradient for it.
        indices: int32, ascending: which elements; ``None``: all.
        values: float32: their sums.
    """

    present: Array
    indices: Array | None
    values: Array

    def write_to(self, target: Accumulator, factor: float) -> None:
        """Make the target this, times a factor."""
        if self.indices is None:
            target.assign(self.values, factor)
        else:
            target.assign_sparse(self.indices, self.values, factor)

    def add_to(self, target: Accumulator, factor: float) -> None:
        """Add this, times a factor, to the target."""
        if self.indices is None:
            target.add_all(self.values, factor)
        else:
            target.add(self.indices, self.values, factor)


@dataclass(slots=True)
class Report:
    """What happened to one bucket in one step, on this rank.

    Attributes:
        method: Name of the method that was used.
        k: How many elements were to be sent.
        selected: How many were chosen on this rank.
        applied: How many elements were updated.
        sent_bytes: Payload that left this rank; collectives are counted as direct exchanges, an allreduce as a ring.
        received_bytes: Payload that came.
        imbalance: Largest over mean of the bytes that ranks receive for their regions, 1 being even (of more than 32
            ranks: in the step before).
        local_threshold: Smallest magnitude chosen on this rank.
        global_threshold: Smallest magnitude applied.
        rescans: How often the candidates had to be listed again, since the beginning.
        skipped: Whether some rank's gradients were not finite.
        extra: What was asked for, such as ``xi``.
    """

    method: str = ""
    k: int = 0
    selected: int = 0
    applied: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    imbalance: float = 1.0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    rescans: int = 0
    skipped: bool = False
    extra: dict[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for people."""
        if self.skipped:
            return f"{self.method}: skipped, because some rank's gradients were not finite"
        further = "".join(f", {name} {value:.3g}" for name, value in self.extra.items())
        return (
            f"{self.method}: {self.selected} of {self.k} selected above {self.local_threshold:.3g}, "
            f"{self.applied} applied above {self.global_threshold:.3g}, {self.sent_bytes} bytes sent, "
            f"{self.received_bytes} received, imbalance {self.imbalance:.2f}{further}"
        )


class Session(Protocol):
    """One bucket's state on one rank. A round is ``accumulate`` and then ``exchange``, to its end."""

    report: Report

    def share(self, workspace: Workspace) -> None:
        """List candidates there from now on, as other sessions do that are not at work at the same time."""

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """Make the gradients ``gradients * scale + residuals``, in place, and choose. Local; no GIL while it works."""

    def exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        """Agree with the other ranks on the sum, and leave in the gradients what was not applied: the new residual.

        Args:
            present: For each segment whether this rank had a gradient; those without are zero.

        Returns:
            ``None`` where some rank's gradients are not finite: then the gradients' memory is worthless, and neither
            the residuals nor this object have changed.
        """

    def state(self) -> Mapping[str, Any]:
        """What has to be kept, beside the residuals, to go on with the same bits: numbers and arrays."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Method(Protocol):
    """Settings, as a frozen dataclass; equal on all ranks.

    Attributes:
        name: What users call it.
        whole: Whether it has to see parameters whole, however large they are.
    """

    name: ClassVar[str]
    whole: ClassVar[bool]

    def session(self, shape: BucketShape, rank: int, world_size: int) -> Session:
        """The state of one bucket on one rank."""
