"""What a step with ``overlap="iterations"`` has asked servers for, and what has come of it, bucket by bucket.

The buckets are asked for in the order in which forward needs them, and each server answers in this order. So the first
layers compute while the values of later ones are on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch

from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.deferred import Update
from totalreduce.server.connection import Ticket
from totalreduce.server.rows import ModelRows

__all__ = ["ArrivingBuckets", "await_all", "note_step"]


@final
class ArrivingBuckets:
    """The buckets of one rank; ``DeferredUpdates`` takes them when forward needs them.

    Attributes:
        buckets_members: The parameters of each bucket, by number.
        by_urgency: Indices of the buckets, the one that forward needs first first.
    """

    def __init__(self, rows: ModelRows, pulled: Array, flags: Array | None, optimizer: torch.optim.Optimizer) -> None:
        """Begin without buckets.

        Args:
            rows: The parameters.
            pulled: Has what is pulled, of all rows.
            flags: ``None``: servers have the parameters, which are pulled. Otherwise mean gradients are pulled, and
                here, by parameter, whether a rank has one.
            optimizer: The torch optimizer.
        """
        self._rows, self._pulled, self._flags, self._optimizer = rows, pulled, flags, optimizer
        self.buckets_members: list[tuple[int, ...]] = []
        self.by_urgency: list[int] = []
        #: The tickets that every bucket, or the end of the step, needs; and those of each bucket that was not taken.
        self._common: list[Ticket] = []
        self._tickets: dict[int, list[Ticket]] = {}
        self._flush: Callable[[], None] | None = None
        #: By parameter: its gradient when the step ended, and its version.
        self._used: list[tuple[torch.Tensor | None, int]] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters."""
        return self._rows.parameters

    def begin(self, priorities: Mapping[int, int], common: list[Ticket], flush: Callable[[], None]) -> None:
        """Note that a step ends.

        Args:
            priorities: By bucket: its place in the order in which forward needs them.
            common: The tickets of the step. Those that are done are taken out.
            flush: Takes all buckets.
        """
        self.by_urgency = sorted(priorities, key=priorities.__getitem__)
        self._common, self._flush = common, flush
        self._used = [(each.grad, _version(each.grad)) for each in self.parameters]

    def pull(self, pull_range: Callable[[int, int], Ticket]) -> None:
        """Ask for all buckets; ``pull_range`` asks for the rows from the first to before the second number."""
        for index in self.by_urgency:
            self._tickets[index] = [pull_range(*run) for run in self._rows.runs_of(self.buckets_members[index])]

    def take(self, index: int) -> list[Update]:
        """Wait for one bucket; take over its parameters, or return the updates that its gradients make.

        Nothing is left to do for a bucket that was not asked for. Errors as of ``Ticket.wait``. The call may be
        repeated then.
        """
        if index not in self._tickets:
            return []
        await_all(self._tickets[index])
        if self._flags is not None or len(self._tickets) == 1:
            # The flags, or everything else: memory of what was pushed is used again in the next step.
            await_all(self._common)
        del self._tickets[index]
        if not self._tickets:
            self._flush = None
        members = self.buckets_members[index]
        if self._flags is None:
            self._rows.write(self._pulled, members)
            note_step(self._optimizer)
            return []
        updates = []
        for number, gradient in zip(members, self.gradients(members), strict=True):
            parameter = self.parameters[number]
            used, version = self._used[number]
            is_unchanged = parameter.grad is used and _version(used) == version
            updates.append(Update(parameter, gradient, gradient if is_unchanged else parameter.grad))
        return updates

    def gradients_needed(self, index: int) -> list[torch.Tensor]:
        """Return none: gradients are copied before they are pushed."""
        del index
        return []

    def gradients(self, numbers: Iterable[int]) -> list[torch.Tensor | None]:
        """Return the gradients of all ranks that have come for some parameters; ``None`` where no rank has one."""
        assert self._flags is not None
        flags, found = self._flags.reshape(-1), list[torch.Tensor | None]()
        for number in numbers:
            parameter, mean = self.parameters[number], self._rows.of(self._pulled, number)
            found.append(mean.to(parameter.device, parameter.dtype, copy=True) if flags[number] else None)
        return found

    def settle(self) -> None:
        """Take all buckets that were not taken."""
        if self._flush is not None:
            self._flush()


def await_all(tickets: list[Ticket]) -> None:
    """Wait for tickets, and take those that are done out of the list. Errors as of ``Ticket.wait``."""
    while tickets:
        tickets[0].wait()
        tickets.pop(0)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that parameters were updated elsewhere. Otherwise torch's schedulers warn that no step was taken."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
