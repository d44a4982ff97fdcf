"""What a rank with a model on a parameter server pushes in a step (``dense``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import quantisation
from totalreduce.server.connection import Connection, Ticket
from totalreduce.server.early import EarlyBuckets
from totalreduce.server.rows import WIDTH, ModelRows

__all__ = ["ModelPushes"]


@final
class ModelPushes:
    """The pushes of one rank: gradients, or the changes of its parameters.

    Attributes:
        rows: The parameters.
        inner: The program's torch optimizer.
        client: Takes the pushes.
        keeps_values: Whether servers keep the parameters. Otherwise they keep the mean gradients of the last step.
        takes_gradients: Whether gradients are pushed, and not changes of parameters.
        flags: By parameter, if servers keep no values: whether this rank has a gradient.
        flag_keys: The keys of ``flags``.
        early: The buckets that leave before the step; ``None``: none does.
        tickets: Of the requests of the step that are not known to be done.
    """

    def __init__(
        self,
        rows: ModelRows,
        inner: torch.optim.Optimizer,
        client: Connection,
        *,
        is_synchronous: bool,
        on_server: bool,
        is_coded: bool,
        num_ranks: int,
    ) -> None:
        """Begin with no push. ``on_server``: servers have the rule of the torch optimizer."""
        self.rows, self.inner, self.client, self._is_coded = rows, inner, client, is_coded
        self.keeps_values, self.takes_gradients = on_server or not is_synchronous, on_server or is_synchronous
        self._settings = _settings_of(inner) if on_server else None
        self._divisor = 1 if is_synchronous else num_ranks  # of synchronous steps, servers take the mean
        self._pushed = rows.empty()
        self.flags = np.zeros((-(-len(rows.parameters) // WIDTH), WIDTH), self._pushed.dtype)
        self.flag_keys = np.arange(rows.count, rows.count + len(self.flags))
        self.early: EarlyBuckets | None = None
        self._early_rate: float | None = None  #: The learning rate of what has left early in this step.
        self.tickets: list[Ticket] = []

    @property
    def has_other_settings(self) -> bool:
        """Whether settings have changed that servers have from the begin."""
        return self._settings is not None and self._settings != _settings_of(self.inner)

    def ready(self, number: int) -> None:
        """Push the buckets that are complete with this parameter; servers keep them until the step."""
        early = self.early
        assert early is not None
        for members in early.ready(number):
            rate = self._rate()
            if self.has_other_settings or (early.have_left and rate != self._early_rate):
                early.stop()  # ``step`` says what is wrong, or withdraws
                continue
            self._early_rate = rate
            present = self.rows.read_gradients(self._pushed, members)
            runs = self.rows.runs(present)
            self._divide(runs)
            if not self._is_encodable(runs):
                early.stop()
                continue
            self._push_ranges(runs, is_held=True)

    def push_nothing(self) -> None:
        """Push what belongs to a step that this rank leaves out."""
        self._withdraw()
        self._pushed = self.rows.empty()
        if not self.keeps_values:
            self._push_runs([False] * len(self.rows.parameters), [(0, self.rows.count)], is_held=False)

    def push_gradients(self) -> None:
        """Push the gradients that have not left. If one that has left has changed since, withdraw and push all."""
        early, rows = self.early, self.rows
        is_stale = early is not None and early.have_left and (early.have_changed() or self._rate() != self._early_rate)
        rest = range(len(rows.parameters)) if early is None or is_stale else early.rest()
        if is_stale:
            self._pushed = rows.empty()  # the old memory may still be sent
        present = rows.read_gradients(self._pushed, rest)
        is_rest = [False] * len(present)
        for number in rest:
            is_rest[number] = True
        runs = rows.runs(present if self.keeps_values else is_rest)
        self._divide(runs)
        if not self._is_encodable(runs):
            raise ConfigurationError("a gradient is not finite, or too large to encode: leave this step out")
        if is_stale:
            self._withdraw()
        has = [here or not mine for here, mine in zip(present, is_rest, strict=True)]
        self._push_runs(has, runs, is_held=early is not None and early.have_left)

    def _push_runs(self, present: Sequence[bool], runs: Sequence[tuple[int, int]], *, is_held: bool) -> None:
        """Push ranges of rows; without values on servers, also of which parameters this rank has a gradient."""
        if not self.keeps_values:  # all ranks must know of which parameters no rank has a gradient
            self.flags.reshape(-1)[: len(present)] = present
            self.tickets.append(self.client.push(self.flag_keys, self.flags, exact=True))
        self._push_ranges(runs, is_held=is_held)

    def _push_ranges(self, runs: Sequence[tuple[int, int]], *, is_held: bool) -> None:
        for begin, end in runs:
            values, rate = self._pushed[begin:end], self._rate()
            self.tickets.append(self.client.push_range(begin, end, values, lr=rate, held=is_held))

    def _withdraw(self) -> None:
        """Take back what has left early in this step."""
        if self.early is not None and self.early.have_left:
            self.tickets.append(self.client.withdraw())
            self.early.withdraw()

    def _rate(self) -> float | None:
        """Return the learning rate for the server's optimizer."""
        return None if self._settings is None else float(self.inner.param_groups[0]["lr"])

    def _divide(self, runs: Sequence[tuple[int, int]]) -> None:
        """Divide by the number of ranks, unless the servers do."""
        if self._divisor > 1:
            for begin, end in runs:
                self._pushed[begin:end] /= self._pushed.dtype.type(self._divisor)

    def push_own_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step of the torch optimizer, and push this rank's part of the change; return its loss."""
        rows = self.rows
        before = rows.empty()
        rows.read(before)
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        rows.read(self._pushed)
        self._pushed -= before
        self._divide([(0, rows.count)])
        if not self._is_encodable([(0, rows.count)]):
            raise ConfigurationError("a gradient is not finite, or too large to encode: leave this step out")
        self.tickets.append(self.client.push_range(0, rows.count, self._pushed))
        return loss

    def _is_encodable(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Return whether the codec, if there is one, can encode these rows."""
        return not self._is_coded or all(
            quantisation.within_limit(self._pushed[begin:end].reshape(-1)) for begin, end in runs
        )


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings that may not change: all but learning rates, which are equal in all groups of parameters."""
    rate = optimizer.param_groups[0].get("lr")
    return [
        {name: group[name] for name in optimizer.defaults if name != "lr" or group["lr"] != rate}
        for group in optimizer.param_groups
    ]
