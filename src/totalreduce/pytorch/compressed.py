"""The reducer of compressed gradients: from gradient hooks to sparse exchanges, and back to ``parameter.grad``.

A bucket leaves when its parameters have their gradients. The memory of these becomes the accumulated gradient and, when
the round is over, the residual, while the memory of the old residual becomes ``parameter.grad``. So nothing is copied,
and there is one float32 residual beside the gradients.

A gradient that comes after its bucket has left (a second backward pass) is added to the residual: it is sent in a later
round.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from totalreduce.pytorch.error_feedback import (
    CompressedPlan,
    ErrorFeedback,
    MomentumCorrection,
    Residuals,
    flattened,
    shaped,
)
from totalreduce.pytorch.round import BucketReadiness, GradientReducer
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.device import accumulator_of
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import Update
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.streams import SideStreams

__all__ = ["CompressedReducer", "CompressedSettings"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedSettings:
    """The settings of a ``CompressedReducer``.

    Attributes:
        feedback: Error feedback.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Seconds that ``finish`` waits.
        loss_scale: Returns the factor by which the loss, and so the gradients, are multiplied at present.
        divisor: Returns the number by which sums are divided, given the number of ranks with data.
    """

    feedback: ErrorFeedback
    rank: int
    world_size: int
    timeout_s: float
    loss_scale: Callable[[], float]
    divisor: Callable[[int], int]


@dataclass(slots=True)
class _RoundState:
    """The state of one round.

    Attributes:
        scale: The factor of the loss.
        dense: Whether everything is sent.
        joined: Whether this rank takes part without gradients.
        closed: Whether all buckets have left.
        left: The buckets that have left.
        present: The parameters that had a gradient.
        accumulated: The gradients that were taken, by parameter: flat, float32.
        result: The updates of the buckets, after ``finish``; ``None``: the round is skipped.
        active: The number of ranks with data.
    """

    scale: float = 1.0
    dense: bool = False
    joined: bool = False
    closed: bool = False
    left: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    result: list[Update] | None = None
    active: int = 0


@final
@never_compiled
class CompressedReducer(GradientReducer):
    """The compressed buckets of one plan.

    Attributes:
        rounds: Exchanges the buckets.
        send_dense: Whether the next round sends everything.
    """

    def __init__(
        self, plan: CompressedPlan, rounds: SparseRounds, residuals: Residuals, settings: CompressedSettings
    ) -> None:
        self._plan, self.rounds, self.parameters = plan, rounds, plan.parameters
        self._residuals, self._settings = residuals, settings
        self._correction = MomentumCorrection(residuals, settings.feedback.momentum)
        self._readiness = BucketReadiness(self.buckets_members)
        self._priorities = list(range(len(plan.buckets)))[::-1]
        self._streams = SideStreams()
        self._state = _RoundState(closed=True)
        self._round = 0
        self.send_dense = False
        self._end = weakref.finalize(self, rounds.close)

    @property
    def buckets_members(self) -> list[list[int]]:
        """The parameters of each bucket."""
        return [sorted({part.member for part in bucket}) for bucket in self._plan.buckets]

    def set_priorities(self, priorities: Mapping[int, int]) -> None:  # noqa: D102
        for index, priority in priorities.items():
            self._priorities[index] = priority

    def begin(self, *, joined: bool = False) -> None:
        """Open a round."""
        self._state = _RoundState(self._settings.loss_scale(), self.send_dense, joined)
        self.send_dense = self.skipped = False
        self._round += 1
        self._correction.discard()
        self._readiness.begin()

    def ready(self, member: int) -> None:
        """Send the buckets of the parameter that wait for no other gradient."""
        for index in self._readiness.fired(member):
            if index not in self._state.left and self._settings.feedback.clip_norm is None:
                self._send(index, 1.0)

    def close(self) -> None:
        """Send the buckets that have not left; clip before, if that is wanted."""
        state, feedback = self._state, self._settings.feedback
        if state.closed:
            return
        state.closed = True
        if not state.joined:
            self._readiness.close()
        clip = 1.0
        if feedback.clip_norm is not None:
            for member in range(len(self.parameters)):
                self._take(member)
            squares = (float(flat.square().sum(dtype=torch.float64)) for flat in state.accumulated.values())
            norm = math.sqrt(sum(squares)) / self._correction.scale_after(state.scale)
            clip = feedback.clip_factor(norm, self._settings.world_size)
        for index in sorted(range(len(self._plan.buckets)), key=lambda index: (self._priorities[index], -index)):
            if index not in state.left:
                self._send(index, clip)

    def finish(self, active: int) -> int:
        """Wait for a closed round. May be called again after it raised."""
        state = self._state
        state.result = self.rounds.finish(self._settings.timeout_s)
        state.active = active
        self.skipped = state.result is None
        if state.result is not None and active:
            self._mask(state.result)
        return active

    def pending(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the residuals and velocities that ``install`` will set, by name: flat, float32, not copied.

        Between ``finish`` and ``install``.
        """
        state, pending = self._state, self._correction.pending
        residuals, velocities = {}, {}
        for member, (parameter, spec) in enumerate(self._plan.described()):
            residuals[spec.name] = self._residuals.of(parameter)
            velocity = self._residuals.velocities.get(parameter)
            if state.result is not None and state.active:
                residuals[spec.name] = self._with_late_gradient(member)
                velocity = pending.get(parameter, velocity)
            if velocity is not None:
                velocities[spec.name] = velocity
        return {"residuals": residuals, "velocities": velocities}

    def install(self) -> None:
        """Make the results the gradients, and what was accumulated and not applied the residuals."""
        settings, state = self._settings, self._state
        updates, active = state.result, state.active
        if updates is None and not state.joined:
            for member, accumulated in state.accumulated.items():
                accumulated.fill_(math.nan)
                self._install(member, accumulated)
        elif updates is not None and active:
            self._commit(updates, state.scale / settings.divisor(active))
        elif updates is not None:  # all ranks have joined, so no rank applies anything
            self._take_back(updates)
        state.accumulated.clear()
        state.result = None
        if settings.rank == 0 and _every(settings.feedback.report_every, self._round):
            for index, report in enumerate(self.rounds.reports()):
                _log.info("step %d, bucket %d: %s", self._round, index, report.describe())

    def abandon(self) -> None:
        """End an open round without a result. Elements that were sent go back to the residuals.

        Gradients whose buckets have not left stay. If the round was to send everything, the next one is.
        """
        state = self._state
        updates = self._end_exchange()
        if updates is not None:
            if state.result is None:
                self._mask(updates)
            self._take_back(updates)
        state.accumulated.clear()

    def drop(self) -> None:
        """End an open round without a result; residuals and velocities stay as they were. See ``abandon``."""
        self._end_exchange()
        self._correction.discard()
        self._state.accumulated.clear()

    def _end_exchange(self) -> list[Update] | None:
        """Send the buckets that have not left, without gradients, and return what has come."""
        state = self._state
        self.send_dense = state.dense
        if not state.closed:
            self._readiness.close()
        state.joined = state.closed = True
        for index in range(len(self._plan.buckets)):
            if index not in state.left:
                self._send(index, 1.0)
        return self.rounds.finish(self._settings.timeout_s) if state.result is None else state.result

    def end(self) -> None:
        """End the thread of the exchanges."""
        self._end()

    def _send(self, index: int, clip: float) -> None:
        state, parameters = self._state, self.parameters
        state.left.add(index)
        bucket = self._plan.buckets[index]
        for part in bucket:
            self._take(part.member)
        gradients = [state.accumulated[part.member][part.begin : part.end] for part in bucket]
        residuals = [self._residuals.of(parameters[part.member])[part.begin : part.end] for part in bucket]
        self.rounds.start(
            index,
            accumulator_of(gradients, self._streams),
            accumulator_of(residuals, self._streams),
            present=[part.member in state.present for part in bucket],
            scale=clip / self._correction.scale_after(state.scale),
            priority=self._priorities[index],
            dense=state.dense,
            xi=_every(self._settings.feedback.xi_every, self._round),
        )

    @torch.no_grad()
    def _take(self, member: int) -> None:
        """Take a parameter's gradient away from it: flat, float32, in memory that nothing else uses."""
        state = self._state
        if member in state.accumulated:
            return
        parameter, spec = self.parameters[member], self._plan.specs[member]
        gradient = parameter.grad
        if state.joined or gradient is None:
            flat = torch.zeros(spec.num_elements, device=parameter.device)
        else:
            state.present.add(member)
            flat = flattened(gradient, spec)
            parameter.grad = None
        if not state.joined:
            self._correction.correct(parameter, flat, state.scale)
        state.accumulated[member] = flat

    def _commit(self, updates: Sequence[Update], factor: float) -> None:
        """Make the updates times the factor the gradients, and what was accumulated and not applied the residuals."""
        state, kept = self._state, self._residuals.kept
        results = {self.parameters[member]: kept[self.parameters[member]] for member in state.accumulated}
        wanted: set[int] = set()
        for index, update in enumerate(updates):
            bucket = self._plan.buckets[index]
            target = self._target(index, results)
            update.write_to(target, factor)
            # Where everything is applied, ``present`` says for which parameters there were gradients.
            counts = [0] * len(bucket) if update.indices is None else target.spread(update.indices)
            wanted.update(
                part.member
                for part, present, count in zip(bucket, update.present, counts, strict=True)
                if present or count
            )
        self._correction.commit()
        for member in state.accumulated:
            parameter = self.parameters[member]
            kept[parameter] = self._with_late_gradient(member)
            if not state.joined:
                parameter.grad = None
                if member in wanted:
                    self._install(member, results[parameter])

    def _with_late_gradient(self, member: int) -> torch.Tensor:
        """Return what was accumulated, and add to it, once, a gradient that came after the bucket had left."""
        state, parameter = self._state, self.parameters[member]
        accumulated, late = state.accumulated[member], parameter.grad
        if late is not None and not state.joined:
            accumulated.add_(flattened(late, self._plan.specs[member]), alpha=1.0 / state.scale)
            parameter.grad = None
        return accumulated

    def _mask(self, updates: Sequence[Update]) -> None:
        """Set velocities to zero where elements were applied (factor masking). They are those of this round only."""
        velocities = self._correction.pending
        for index, update in enumerate(updates):
            if velocities and update.indices is not None:
                self._target(index, velocities).erase(update.indices)

    def _take_back(self, updates: Sequence[Update]) -> None:
        """Make everything that was accumulated the residuals: each rank takes its share of the updates back."""
        self._commit(updates, 1.0)
        for index, update in enumerate(updates):
            update.add_to(self._target(index, self._residuals.kept), 1.0 / self._settings.world_size)

    def _target(self, index: int, flats: Mapping[torch.nn.Parameter, torch.Tensor]) -> Accumulator:
        """Return the accumulator of a bucket over flat tensors, by parameter."""
        parts = [flats[self.parameters[part.member]][part.begin : part.end] for part in self._plan.buckets[index]]
        return accumulator_of(parts, self._streams)

    def _install(self, member: int, flat: torch.Tensor) -> None:
        parameter, spec = self.parameters[member], self._plan.specs[member]
        parameter.grad = shaped(flat, spec).to(parameter.dtype)  # the same memory, if the parameter is float32


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
