"""The tail of a bucket: flags about the gradients of the ranks, in the memory behind the gradients.

The tail is reduced together with the gradients and costs no message of its own. So it is summed or averaged in the
bucket's dtype, in an order and with intermediate roundings that depend on the library that carries the operation out.
Counts of ranks do not survive that: in bfloat16 256 + 1 is 256, and the average of 511 ones and a zero is 1.

Therefore the tail has flags only. A flag is an element that is 1 on the ranks where a condition holds and 0 on the
other ranks. After the reduction it is only compared with zero. A rounded sum of numbers that are not negative is zero
if all of them are, and never smaller than the largest of them, so the comparison is exact for every dtype, number of
ranks and order. It is exact for averages, too, as long as 1 / (number of ranks) is not rounded to zero, which takes
more than 2**24 ranks in float16 and more than 2**100 in bfloat16 and float32.

The flags are these:

* *present*, for every parameter: the rank has a gradient. Where no rank has one, ``grad`` stays ``None``, as in one
  process.
* *absent*, for every parameter, if the plan forbids that gradients are missing: the rank takes part with data and has
  no gradient. A gradient is missing where both flags are set.
* *changed*, in the last bucket, for every bucket: gradients changed on the rank after the bucket had left (see
  ``reducer``).
* *joined*, in the last bucket, for every rank: it has no data any more. The number of such ranks is exact because each
  rank has a flag of its own. Counters for blocks of ranks would be fewer elements, but if a library divides before it
  adds, their sums are exact in some orders only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch

__all__ = ["Tail", "TailLayout"]


@dataclass(frozen=True, slots=True)
class TailLayout:
    """The numbers of flags in the tail of one bucket. Equal on all ranks."""

    num_parameters: int  #: Number of parameters of the bucket.
    reports_absence: bool  #: Whether there are *absent* flags.
    num_buckets: int = 0  #: Number of *changed* flags: the number of buckets in the last bucket, 0 in the others.
    #: Number of *joined* flags: the world size in the last bucket, 0 in the others. If there are any, the flags *first*
    #: and *again* follow.
    num_ranks: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Numbers of *present*, *absent*, *changed* and *joined* flags, and of *first* and *again*, in this order."""
        num_absent = self.num_parameters if self.reports_absence else 0
        return self.num_parameters, num_absent, self.num_buckets, self.num_ranks, 2 if self.num_ranks else 0

    @property
    def num_elements(self) -> int:
        """The number of elements of the tail."""
        return sum(self.sizes)


@final
class Tail:
    """The tail of one bucket in memory."""

    def __init__(self, memory: torch.Tensor, layout: TailLayout) -> None:
        self._memory, self._layout = memory, layout
        #: The flags after the reduction: in ``memory``, or in a copy of it in host memory.
        self._read = memory.split_with_sizes(layout.sizes)

    def read(self, copy: torch.Tensor | None) -> None:
        """After the reduction, take the flags from a copy of the memory if there is one: no stream has to end first."""
        memory = self._memory if copy is None else copy.clone()
        if not memory.is_cpu:
            memory = memory.cpu()
        self._read = memory.split_with_sizes(self._layout.sizes)

    def write(
        self,
        missing: Sequence[int],
        changed: Collection[int] = (),
        *,
        rank: int = 0,
        joined: bool = False,
        again: bool = False,
    ) -> None:
        """Set this rank's flags.

        Args:
            missing: Positions of the parameters that have no gradient on this rank.
            changed: Buckets whose gradients changed after they had left; only in the last bucket.
            rank: This rank.
            joined: This rank takes part without data. Its gradients are not expected, so none of them is absent.
            again: This rank has finished a round since its last step.
        """
        # An index or a value from the host empties an accelerator's queue, so they are used only where necessary.
        present, absent, differing, without_data, turn = self._memory.split_with_sizes(self._layout.sizes)
        self._memory.zero_()
        present.fill_(1)
        if missing:
            present[list(missing)] = 0
            if self._layout.reports_absence and not joined:
                absent[list(missing)] = 1
        if changed:
            differing[list(changed)] = 1
        if self._layout.num_ranks:
            (without_data[rank] if joined else turn[int(again)]).fill_(1)

    def present(self) -> list[bool]:
        """Return, after the reduction, for every parameter whether some rank had a gradient."""
        return (self._read[0] != 0).tolist()

    def missing(self) -> list[bool]:
        """Return, after the reduction, for every parameter whether some but not all ranks with data had a gradient.

        All are ``False`` if the layout does not report absence.
        """
        if not self._layout.reports_absence:
            return [False] * self._layout.num_parameters
        return ((self._read[0] != 0) & (self._read[1] != 0)).tolist()

    def changed(self) -> list[int]:
        """Return, after the reduction of the last bucket, the buckets that changed on some rank, in ascending order."""
        return self._read[2].nonzero().flatten().tolist()

    def joined(self) -> list[int]:
        """Return, after the reduction of the last bucket, the ranks that took part without data, in ascending order."""
        return self._read[3].nonzero().flatten().tolist()

    def are_in_different_rounds(self) -> bool:
        """Whether, after the reduction of the last bucket, some rank is in its first round of a step, and some not."""
        return bool((self._read[4] != 0).all())
