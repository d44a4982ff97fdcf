"""What a step with ``overlap="iterations"`` has asked servers for, and what has come of it, bucket by bucket.

The buckets are asked for in the order in which forward needs them, and each server answers in this order. So the first
layers compute while the values of later ones are on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import final

import torch

from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.deferred import Update
from totalreduce.server.connection import Ticket
from totalreduce.server.rows import ModelRows
from totalreduce.tensors.modes import version_of

__all__ = ["ArrivingBuckets", "await_all"]


@final
class ArrivingBuckets:
    """The buckets of one rank; ``DeferredUpdates`` takes them when forward needs them.

    Attributes:
        buckets_members: The parameters of each bucket, by number.
        by_urgency: Indices of the buckets, the one that forward needs first first.
        once: The context in which updates are made; see ``DeferredBuckets``.
    """

    def __init__(
        self,
        rows: ModelRows,
        pulled: Array,
        flags: Array | None,
        once: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin without buckets.

        Args:
            rows: The parameters.
            pulled: Has what is pulled, of all rows.
            flags: ``None``: servers have the parameters, which are pulled. Otherwise mean gradients are pulled, and
                here, by parameter, whether a rank has one.
            once: See above.
        """
        self._rows, self._pulled, self._flags, self.once = rows, pulled, flags, once
        self.buckets_members: list[tuple[int, ...]] = []
        self.by_urgency: list[int] = []
        #: The tickets that every bucket, or the end of the step, needs; and those of each bucket that is not released.
        self._common: list[Ticket] = []
        self._tickets: dict[int, list[Ticket]] = {}
        self._flush: Callable[[], None] | None = None
        #: By parameter: its gradient when the step ended, and its version; where gradients are pulled.
        self._used: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters."""
        return self._rows.parameters

    @property
    def is_waiting(self) -> bool:
        """Whether a bucket was asked for and is not released."""
        return bool(self._tickets)

    def pull(
        self,
        priorities: Mapping[int, int],
        pull_range: Callable[[int, int], Ticket],
        common: list[Ticket],
        flush: Callable[[], None],
    ) -> None:
        """Ask for all buckets at the end of a step, in the order of ``priorities``; ``flush`` has all of them taken.

        ``common``: the tickets of the step. Those that are done are taken out.
        """
        self.by_urgency = sorted(priorities, key=priorities.__getitem__)
        self._common, self._flush = common, flush
        if self._flags is not None:
            gradients = ((number, parameter.grad) for number, parameter in enumerate(self.parameters))
            self._used = {number: (each, version_of(each)) for number, each in gradients if each is not None}
        for index in self.by_urgency:
            self._tickets[index] = [pull_range(*run) for run in self._rows.runs_of(self.buckets_members[index])]

    def take(self, index: int) -> list[Update]:
        """Wait for one bucket; take over its parameters, or return the updates that its gradients make.

        Errors as of ``Ticket.wait``. May be repeated until the bucket is released. For one that was not asked for, or
        that is released, nothing is left to do.
        """
        if index not in self._tickets:
            return []
        await_all(self._tickets[index])
        if self._flags is not None or len(self._tickets) == 1:
            # The flags, or everything else: memory of what was pushed is used again in the next step.
            await_all(self._common)
        members = self.buckets_members[index]
        if self._flags is None:
            self._rows.write(self._pulled, members)
            return []
        return [
            Update(self.parameters[number], gradient, gradient if self._is_unchanged(number) else present)
            for number, gradient in zip(members, self.gradients(members), strict=True)
            for present in (self.parameters[number].grad,)
        ]

    def _is_unchanged(self, number: int) -> bool:
        """Return whether a parameter still has the gradient with which the step ended."""
        gradient, version = self._used.get(number, (None, 0))
        return gradient is not None and self.parameters[number].grad is gradient and version_of(gradient) == version

    def release(self, index: int) -> None:
        """Note that nothing is left to do for a bucket."""
        self._tickets.pop(index, None)
        for number in self.buckets_members[index]:
            self._used.pop(number, None)

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
        """Have all buckets taken that are asked for."""
        if self._flush is not None and self._tickets:
            self._flush()

    def drain(self) -> None:
        """Wait for buckets that will not be taken, and forget them, before their memory is used again."""
        for index in list(self._tickets):
            await_all(self._tickets[index])
            await_all(self._common)
            self.release(index)


def await_all(tickets: list[Ticket]) -> None:
    """Wait for tickets, and take those that are done out of the list. Errors as of ``Ticket.wait``."""
    while tickets:
        tickets[0].wait()
        tickets.pop(0)
