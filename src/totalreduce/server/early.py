"""Which gradients leave before the step that uses them. A plain object without thread, socket and clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch

from totalreduce.tensors.modes import version_of

__all__ = ["EarlyBuckets"]


@final
class EarlyBuckets:
    """The buckets of one rank that backward has completed, and whether their gradients have changed since.

    Buckets leave in one order, which is the same in every step: a bucket with a parameter without a gradient holds up
    those behind it until the step. So a worker that runs a step again makes the same pushes in the same order.

    Attributes:
        num_early: The number of buckets that have left early, in all steps.
        num_withdrawn: The number of steps whose gradients have changed after some of them had left.
    """

    def __init__(
        self, buckets: Sequence[Sequence[int]], parameters: Sequence[torch.nn.Parameter], *, is_fixed: bool
    ) -> None:
        """Begin with a step in which buckets leave early, in the order in which backward completes them.

        ``is_fixed``: buckets leave early in every step. Otherwise they do not in a step behind one whose gradients have
        changed between backward and step: a program that clips gradients does so in every step.
        """
        self._buckets, self._parameters, self._is_fixed = [tuple(each) for each in buckets], list(parameters), is_fixed
        self.num_early = self.num_withdrawn = 0
        self._leaves = True
        self._begin()

    def _begin(self) -> None:
        self._next, self._num_left = 0, 0
        self._is_changed = self._is_stopped = False
        #: By parameter that has got its gradient: this gradient, and its version.
        self._seen: dict[int, tuple[torch.Tensor | None, int]] = {}

    @property
    def have_left(self) -> bool:
        """Whether a bucket has left in this step."""
        return self._num_left > 0

    def ready(self, number: int) -> Iterator[tuple[int, ...]]:
        """Note that a parameter has its gradient; yield the buckets that leave now.

        A bucket has left when the next one is asked for, or the iterator has come to its end.
        """
        if number in self._seen:  # another backward pass of the same step
            self._is_changed = True
        gradient = self._parameters[number].grad
        self._seen[number] = gradient, -1 if gradient is None else version_of(gradient)
        while self._next < len(self._buckets) and all(each in self._seen for each in self._buckets[self._next]):
            if self._may_leave():
                yield self._buckets[self._next]
                has_left = self._may_leave()
                self._num_left += has_left
                self.num_early += has_left
            self._next += 1

    def _may_leave(self) -> bool:
        return self._leaves and not self._is_changed and not self._is_stopped

    def stop(self) -> None:
        """Note that the bucket that was yielded last does not leave, nor does another one in this step."""
        self._is_stopped = True

    def rest(self) -> list[int]:
        """Return the parameters whose gradients have not left, in ascending order."""
        left = {number for bucket in self._buckets[: self._num_left] for number in bucket}
        return [number for number in range(len(self._parameters)) if number not in left]

    def have_changed(self) -> bool:
        """Return whether a gradient is another one than backward has left, or was changed in place."""
        if self._is_changed:
            return True
        for number, (gradient, version) in self._seen.items():
            present = self._parameters[number].grad
            if present is not gradient or (present is not None and version_of(present) != version):
                return True
        return False

    def withdraw(self) -> None:
        """Note that what has left in this step was taken back."""
        self._num_left, self._is_changed = 0, True
        self.num_withdrawn += 1

    def end_step(self) -> None:
        """Begin the next step."""
        self._leaves = self._is_fixed or not self.have_changed()
        self._begin()
