"""What is submitted to an engine: one value from a group's method down to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from totalreduce.foundation.types import Signature

__all__ = ["Submission"]


class Submission(NamedTuple):
    """One operation as a rank submits it.

    Attributes:
        name: Equal on all ranks, unique among operations in flight. ``None``: the n-th unnamed operation here meets the
            n-th unnamed one elsewhere.
        signature: The kind of collective, the element type, the shape, the reduction and the root.
        buffers: Writable bytes, input and output: of the tensor, or of one block per chunk of the schedule; ``None``
            for blocks of other ranks.
        ranks: The ranks that take part, this rank included; ``None``: all. Roots are positions in this tuple.
        scope: Distinguishes the names of one subgroup from those of another.
        repeats: The name may be in flight several times: the n-th here meets the n-th elsewhere.
        priority: Smaller is more urgent; 32 bits signed.
        title: How errors and reports call the operation instead of by its name. If it has none, its number and
            ``place`` follow (``call_names.call_name``).
        place: What operations without a name are counted in.
        once: A name that no other operation ever has, equal on all ranks. ``name`` is ``None`` then: the operation is
            not counted, and nothing is kept of it when it has ended.
    """

    name: str | None
    signature: Signature
    buffers: Sequence[memoryview | None]
    ranks: tuple[int, ...] | None = None
    scope: str = ""
    repeats: bool = False
    priority: int = 0
    title: str = ""
    place: str = ""
    once: str = ""
