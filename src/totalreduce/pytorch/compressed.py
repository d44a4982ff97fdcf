"""The reducer of compressed gradients: from gradient hooks to sparse exchanges, and back to ``parameter.grad``.

A bucket leaves when its parameters have their gradients. In the memory of a gradient, the residual is added to it: this
is the *accumulated gradient*. What the round does not apply of it becomes the residual when the optimizer steps
(``commit``). If the step is left out (``undo``), the residual stays as it was before the round, so its memory is kept
until then, and takes a gradient of the next round. So there are two float32 values for each element beside the
gradients, and nothing is copied.

A gradient that comes after its bucket has left (a second backward pass) is added to the residual: it is sent in a later
round.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """The settings of a ``CompressedReducer``."""

    feedback: ErrorFeedback
    rank: int
    world_size: int
    timeout_s: float  #: Seconds that ``finish`` waits.
    #: Returns the factor by which the loss, and so the gradients, are multiplied at present.
    loss_scale: Callable[[], float]
    divisor: Callable[[int], int]  #: Returns the number by which sums are divided, given the number of ranks with data.


@dataclass(slots=True)
class _RoundState:
    """The state of one round."""

    scale: float = 1.0  #: The factor of the loss.
    dense: bool = False  #: Whether everything is sent.
    joined: bool = False  #: Whether this rank takes part without gradients.
    closed: bool = False  #: Whether all buckets have left.
    left: set[int] = field(default_factory=set)  #: The buckets that have left.
    present: set[int] = field(default_factory=set)  #: The parameters that had a gradient.
    #: The gradients that were taken, by parameter: flat, float32. After ``finish`` they are what the round does not
    #: apply.
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The updates of the buckets, between ``finish`` and ``install``; ``None``: the round is skipped.
    result: list[Update] | None = None
    active: int = 0  #: The number of ranks with data.
    #: Whether the round has ended and its step has not: ``commit`` makes ``accumulated`` the residuals.
    ended: bool = False
    #: The gradients that were installed, and their counts of changes, by parameter.
    installed: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)


@final
@never_compiled
class CompressedReducer(GradientReducer):
    """The compressed buckets of one plan."""

    readiness: BucketReadiness

    def __init__(
        self, plan: CompressedPlan, rounds: SparseRounds, residuals: Residuals, settings: CompressedSettings
    ) -> None:
        self._plan = plan
        self.rounds = rounds  #: Exchanges the buckets.
        self.parameters = plan.parameters
        self._residuals, self._settings = residuals, settings
        self._correction = MomentumCorrection(residuals, settings.feedback.momentum)
        self.readiness = BucketReadiness(self.buckets_members)
        self._priorities = list(range(len(plan.buckets)))[::-1]
        self._streams = SideStreams()
        self._state = _RoundState(closed=True)
        self._round = 0
        self.send_dense = False  #: Whether the next round sends everything.
        self._end = weakref.finalize(self, rounds.close)

    @property
    def buckets_members(self) -> list[list[int]]:
        """The parameters of each bucket."""
        return [sorted({part.parameter for part in bucket}) for bucket in self._plan.buckets]

    def set_priorities(self, priorities: Mapping[int, int]) -> None:  # noqa: D102
        for index, priority in priorities.items():
            self._priorities[index] = priority

    def begin(self, *, joined: bool = False, again: bool = False) -> None:  # noqa: ARG002
        """Open a round."""
        if self._state.ended:
            self._resolve()
        self._state = _RoundState(self._settings.loss_scale(), self.send_dense, joined)
        self.send_dense = self.skipped = False
        self._round += 1
        self._correction.discard()
        self.readiness.begin()

    def ready(self, member: int) -> None:
        """Send the buckets of the parameter that wait for no other gradient."""
        for index in self.readiness.fired(member):
            if index not in self._state.left and self._settings.feedback.clip_norm is None:
                self._send(index, 1.0)

    def close(self) -> None:
        """Send the buckets that have not left; clip before, if that is wanted."""
        state, feedback = self._state, self._settings.feedback
        if state.closed:
            return
        state.closed = True
        if not state.joined:
            self.readiness.close()
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
        """Return the residuals and velocities by name, as ``commit`` leaves them: flat, not copied."""
        state, pending = self._state, self._correction.pending
        residuals, velocities = {}, {}
        for member, (parameter, spec) in enumerate(self._plan.described()):
            residual, velocity = self._residuals.of(parameter), self._residuals.velocities.get(parameter)
            if state.ended:
                residual, velocity = state.accumulated[member], pending.get(parameter, velocity)
            residuals[spec.name] = residual
            if velocity is not None:
                velocities[spec.name] = velocity
        return {"residuals": residuals, "velocities": velocities}

    def install(self) -> None:
        """Make the results the gradients. What was accumulated and not applied becomes the residuals in ``commit``."""
        settings, state = self._settings, self._state
        updates, active = state.result, state.active
        if updates is None:
            self._install_nan()
        elif not active:  # all ranks have joined, so no rank applies anything
            self._take_back(updates)
        else:
            self._install(updates, state.scale / settings.divisor(active))
        state.result = None
        if settings.rank == 0 and _every(settings.feedback.report_every, self._round):
            for index, report in enumerate(self.rounds.reports()):
                _log.info("step %d, bucket %d: %s", self._round, index, report.describe())

    @property
    def in_step(self) -> bool:
        """Whether a round has ended, and ``commit`` or ``undo`` is to come."""
        return self._state.ended

    def commit(self) -> None:
        """Make what was accumulated and not applied the residuals, and keep the velocities."""
        if self._state.ended:
            self._commit(range(len(self.parameters)))

    def undo(self) -> None:
        """Leave residuals and velocities as they were before the round."""
        if self._state.ended:
            self._commit(())

    def changed_by_program(self, times: int) -> str | None:
        """Return the name of a parameter whose result the program has changed more often than so many times."""
        for member, (gradient, version) in self._state.installed.items():
            if self.parameters[member].grad is gradient and gradient._version > version + times:
                return self._plan.specs[member].name
        return None

    def abandon(self) -> None:
        """End an open round without a result. Elements that were sent go back to the residuals.

        Gradients whose buckets have not left stay. If the round was to send everything, the next one is. If no rank
        had a gradient, the residuals of every rank stay as they were.
        """
        state = self._state
        updates = self._end_exchange()
        if updates is not None and any(update.present.any() for update in updates):
            if state.result is None:
                self._mask(updates)
            self._take_back(updates)
        self.commit()
        state.accumulated.clear()

    def drop(self) -> None:
        """End an open round without a result; residuals and velocities stay as they were. See ``abandon``."""
        self._end_exchange()
        self.undo()
        self._correction.discard()
        self._state.accumulated.clear()

    def _end_exchange(self) -> list[Update] | None:
        """Send the buckets that have not left, without gradients, and return what has come."""
        state = self._state
        self.send_dense = state.dense
        if not state.closed:
            self.readiness.close()
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
            self._take(part.parameter)
        gradients = [state.accumulated[part.parameter][part.begin : part.end] for part in bucket]
        residuals = [self._residuals.of(parameters[part.parameter])[part.begin : part.end] for part in bucket]
        self.rounds.start(
            index,
            accumulator_of(gradients, self._streams),
            accumulator_of(residuals, self._streams),
            present=[part.parameter in state.present for part in bucket],
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
            flat = torch.zeros(spec.num_elements, dtype=torch.float32, device=parameter.device)
        else:
            state.present.add(member)
            flat = flattened(gradient, spec)
            parameter.grad = None
        if not state.joined:
            self._correction.correct(parameter, flat, state.scale)
        state.accumulated[member] = flat

    def _install_nan(self) -> None:
        """Make the gradients NaN: those of some rank are not finite, or the result is too large for a parameter."""
        state = self._state
        self.skipped = True
        self._correction.discard()
        if not state.joined:
            for member, accumulated in state.accumulated.items():
                self._set_gradient(member, accumulated.fill_(math.nan))
        state.accumulated.clear()

    def _install(self, updates: Sequence[Update], factor: float) -> None:
        """Make the updates times the factor the gradients."""
        state, spare = self._state, self._residuals.spare
        results = {}
        for member, accumulated in state.accumulated.items():
            parameter = self.parameters[member]
            memory = spare.pop(parameter, None)
            results[parameter] = torch.empty_like(accumulated) if memory is None else memory
        wanted: set[int] = set()
        for index, update in enumerate(updates):
            bucket = self._plan.buckets[index]
            target = self._target(index, results)
            update.write_to(target, factor)
            if update.indices is None:
                self._keep_unused(index, update)
            counts = [0] * len(bucket) if update.indices is None else target.spread(update.indices)
            wanted.update(
                part.parameter
                for part, present, count in zip(bucket, update.present, counts, strict=True)
                if present or count
            )
        if not self._round_off(results, wanted, factor):
            self._install_nan()
            return
        self._end_round()
        if not state.joined:
            for member in state.accumulated:
                self.parameters[member].grad = None
                if member in wanted:
                    self._set_gradient(member, results[self.parameters[member]])

    @torch.no_grad()
    def _keep_unused(self, index: int, update: Update) -> None:
        """Keep what an update of all elements has of parameters without a gradient on any rank: it is residuals.

        Each rank adds an equal share to what it has accumulated. The gradients stay ``None``, so that the optimizer
        does not touch these parameters.
        """
        share, begin = 1.0 / self._settings.world_size, 0
        for part, present in zip(self._plan.buckets[index], update.present, strict=True):
            end = begin + part.end - part.begin
            if not present:
                flat = self._state.accumulated[part.parameter][part.begin : part.end]
                flat.add_(torch.from_numpy(update.values[begin:end]).to(flat.device), alpha=share)
            begin = end

    @torch.no_grad()
    def _round_off(self, results: Mapping[torch.nn.Parameter, torch.Tensor], wanted: set[int], factor: float) -> bool:
        """Round results to the dtypes of their parameters, and give the errors back to what was accumulated.

        Each rank takes an equal share of the error, so the sum of all residuals is exact.

        Returns:
            Whether the rounded results are finite, which is equal on all ranks.
        """
        share = 1.0 / factor / self._settings.world_size
        for member in sorted(wanted):
            parameter = self.parameters[member]
            if parameter.dtype.itemsize >= torch.float32.itemsize:
                continue
            exact = results[parameter]
            rounded = exact.to(parameter.dtype)
            if not bool(rounded.isfinite().all()):
                return False
            self._state.accumulated[member].add_(exact.sub_(rounded), alpha=share)
            exact.copy_(rounded)
        return True

    def _end_round(self) -> None:
        """Add late gradients to what was accumulated: it is complete, and becomes the residuals in ``commit``."""
        state = self._state
        for member, accumulated in state.accumulated.items():
            late = self.parameters[member].grad
            if late is not None and not state.joined:
                accumulated.add_(flattened(late, self._plan.specs[member]), alpha=1.0 / state.scale)
        state.ended = True

    def _commit(self, members: Collection[int]) -> None:
        """End the step: what was accumulated of these parameters becomes the residuals."""
        state, kept, spare = self._state, self._residuals.kept, self._residuals.spare
        for member in members:
            parameter = self.parameters[member]
            spare[parameter], kept[parameter] = kept[parameter], state.accumulated[member]
        if members:
            self._correction.commit({self.parameters[member] for member in members})
        self._correction.discard()
        state.ended = False
        state.accumulated.clear()
        state.installed.clear()

    def _resolve(self) -> None:
        """Commit the parameters whose installed gradients the program has not reset before this round.

        If any installed gradient was set to zero, all count as reset, also those to which backward has added since.
        """
        installed = self._state.installed
        there = {member for member, (gradient, _) in installed.items() if self.parameters[member].grad is gradient}
        if any(not bool(installed[member][0].any()) for member in there):
            there = set()
        if there or not installed:
            there.update(self._state.accumulated.keys() - installed.keys())  # nothing of these was applied
        self._commit(there)

    def _mask(self, updates: Sequence[Update]) -> None:
        """Set velocities of this round to zero where elements were applied (factor masking)."""
        velocities = self._correction.pending
        for index, update in enumerate(updates):
            if velocities and update.indices is not None:
                self._target(index, velocities).erase(update.indices)

    def _take_back(self, updates: Sequence[Update]) -> None:
        """Make everything that was accumulated the residuals: each rank takes its share of the updates back."""
        accumulated = {self.parameters[member]: flat for member, flat in self._state.accumulated.items()}
        for index, update in enumerate(updates):
            update.add_to(self._target(index, accumulated), 1.0 / self._settings.world_size)
        self._end_round()

    def _target(self, index: int, flats: Mapping[torch.nn.Parameter, torch.Tensor]) -> Accumulator:
        """Return the accumulator of a bucket over flat tensors, by parameter."""
        parts = [flats[self.parameters[part.parameter]][part.begin : part.end] for part in self._plan.buckets[index]]
        return accumulator_of(parts, self._streams)

    def _set_gradient(self, member: int, flat: torch.Tensor) -> None:
        parameter, spec = self.parameters[member], self._plan.specs[member]
        gradient = shaped(flat, spec).to(parameter.dtype)  # the same memory, if the parameter is float32
        parameter.grad = gradient
        self._state.installed[member] = gradient, gradient._version


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
