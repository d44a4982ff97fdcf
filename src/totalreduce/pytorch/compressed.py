"""Gradients that are not sent whole: from hooks to sparse exchanges, and from their results to ``parameter.grad``.

A bucket leaves when its parameters have their gradients, and takes their memory with it: the gradient becomes the
accumulated gradient and, when the round is over, the residual, while the memory of the old residual becomes
``parameter.grad``. So nothing is copied, and beside the gradients there is one residual of float32.

A gradient that comes after its bucket has left (a second backward pass) is added to the residual: it is sent later, not
lost.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from totalreduce.pytorch.correction import MomentumCorrection
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback, Residuals, flattened, shaped
from totalreduce.pytorch.readiness import Readiness
from totalreduce.pytorch.round import GradientReducer
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.device import Lane, accumulator_of
from totalreduce.sparse.rounds import SparseRounds
from totalreduce.sparse.session import Report, Update
from totalreduce.tensors.compilation import never_compiled

__all__ = ["CompressedReducer"]

_log = logging.getLogger("totalreduce")


@final
@never_compiled
class CompressedReducer(GradientReducer):
    """The compressed buckets of one plan and the round that is under way.

    Args:
        plan: What to reduce.
        rounds: Exchanges its buckets.
        residuals: Outlive the plan.
        feedback: Settings.
        rank: This one's.
        world_size: Number of ranks.
        timeout_s: Patience of ``finish``.
        loss_scale: Returns the factor by which the loss, and so the gradients, are multiplied at present.
        divisor: Returns the number by which sums are divided, of the number of ranks with data.
    """

    def __init__(
        self,
        plan: CompressedPlan,
        rounds: SparseRounds,
        residuals: Residuals,
        feedback: ErrorFeedback,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        loss_scale: Callable[[], float],
        divisor: Callable[[int], int],
    ) -> None:
        """See the class."""
        self.plan, self.rounds, self.parameters = plan, rounds, plan.parameters
        self._divisor = divisor
        self._end = weakref.finalize(self, rounds.close)
        self._residuals, self._feedback = residuals, feedback
        self._rank, self._world_size = rank, world_size
        self._timeout_s, self._loss_scale = timeout_s, loss_scale
        self._lane = Lane()
        self._members = [sorted({part.member for part in bucket}) for bucket in plan.buckets]
        self._readiness = Readiness(self._members)
        self._priorities = list(range(len(plan.buckets)))[::-1]
        self._left: set[int] = set()
        self._present: set[int] = set()
        self._accumulated: dict[int, torch.Tensor] = {}
        self._correction = MomentumCorrection(residuals, feedback.momentum)
        self._scale = 1.0
        self._round = 0
        self._whole = False
        self.send_whole = False  #: The next round sends everything.
        self.joined = False
        self.closed = True
        self.skipped = False  #: The last round ended without a result, because of gradients that are not finite.

    @property
    def buckets_members(self) -> list[list[int]]:
        """The parameters of each bucket."""
        return self._members

    def set_priorities(self, priorities: Mapping[int, int]) -> None:
        """Set the urgency of buckets by index; a smaller number leaves first."""
        for index, priority in priorities.items():
            self._priorities[index] = priority

    def begin(self, *, joined: bool = False) -> None:
        """Open a round. The one before is over."""
        self.joined, self.closed, self.skipped = joined, False, False
        self._whole, self.send_whole = self.send_whole, False
        self._round += 1
        self._left.clear()
        self._present.clear()
        self._accumulated.clear()
        self._correction.discard()
        self._readiness.begin()
        self._scale = self._loss_scale()

    def ready(self, member: int) -> None:
        """A parameter's gradient was accumulated; its buckets leave if that was the last they waited for."""
        for index in self._readiness.fired(member):
            if index not in self._left and self._feedback.clip_norm is None:
                self._leave(index, 1.0)

    def close(self) -> None:
        """Send what has not left."""
        if self.closed:
            return
        self.closed = True
        if not self.joined:
            self._readiness.close()
        clip = 1.0
        if self._feedback.clip_norm is not None:
            for member in range(len(self.plan.parameters)):
                self._take(member)
            clip = self._feedback.clip_factor(self._norm(), self._world_size)
        for index in sorted(range(len(self.plan.buckets)), key=lambda index: (self._priorities[index], -index)):
            if index not in self._left:
                self._leave(index, clip)

    def finish(self, active: int) -> int:
        """Wait for a closed round and install its results. May be called again after it raised."""
        updates = self.rounds.finish(self._timeout_s)
        self.skipped = updates is None
        if updates is None:
            for member, accumulated in self._accumulated.items():
                accumulated.fill_(math.nan)
                self._install(member, accumulated)
        else:
            self._commit(updates, self._scale / self._divisor(active))
        self._accumulated.clear()
        if self._rank == 0 and _every(self._feedback.report_every, self._round):
            for index, report in enumerate(self.reports()):
                _log.info("step %d, bucket %d: %s", self._round, index, report.describe())
        return active

    def abandon(self) -> None:
        """End an open round without a result. Collective. What was sent goes back to the residuals.

        Gradients whose buckets have not left stay.
        """
        self.joined = self.closed = True
        for index in range(len(self.plan.buckets)):
            if index not in self._left:
                self._leave(index, 1.0)
        updates = self.rounds.finish(self._timeout_s)
        if updates is not None:
            self._commit(updates, 1.0)
            for index, update in enumerate(updates):
                # Every rank takes back its share of what all have applied.
                update.add_to(self._target(index, self._residuals.kept), 1.0 / self._world_size)
        self._accumulated.clear()

    def end(self) -> None:
        """End the thread of the exchanges."""
        self._end()

    def reports(self) -> list[Report]:
        """What happened in the last round, by bucket."""
        return self.rounds.reports()

    # -------------------- a bucket leaves

    def _leave(self, index: int, clip: float) -> None:
        self._left.add(index)
        bucket = self.plan.buckets[index]
        for part in bucket:
            self._take(part.member)
        gradients = [self._accumulated[part.member][part.begin : part.end] for part in bucket]
        residuals = [self._residuals.of(self.plan.parameters[part.member])[part.begin : part.end] for part in bucket]
        self.rounds.start(
            index,
            accumulator_of(gradients, self._lane),
            accumulator_of(residuals, self._lane),
            present=[part.member in self._present for part in bucket],
            scale=clip if self._feedback.momentum else clip / self._scale,
            priority=self._priorities[index],
            whole=self._whole,
            xi=_every(self._feedback.xi_every, self._round),
        )

    @torch.no_grad()
    def _take(self, member: int) -> None:
        """Take a parameter's gradient away from it: flat, float32, in memory that nobody else has."""
        if member in self._accumulated:
            return
        parameter, spec = self.plan.parameters[member], self.plan.specs[member]
        gradient = parameter.grad
        if self.joined or gradient is None:
            flat = torch.zeros(spec.num_elements, device=parameter.device)
        else:
            self._present.add(member)
            flat = flattened(gradient, spec)
            parameter.grad = None
        if not self.joined:
            self._correction.correct(parameter, flat, self._scale)
        self._accumulated[member] = flat

    def _norm(self) -> float:
        """Return the norm of all gradients of this rank, unscaled. Velocities are unscaled already."""
        norm = math.sqrt(sum(float(flat.square().sum(dtype=torch.float64)) for flat in self._accumulated.values()))
        return norm if self._feedback.momentum else norm / self._scale

    # -------------------- and comes back

    def _commit(self, updates: Sequence[Update], factor: float) -> None:
        kept = self._residuals.kept
        results = {member: kept[self.plan.parameters[member]] for member in self._accumulated}
        velocities = self._correction.pending
        wanted: set[int] = set()
        for index, update in enumerate(updates):
            bucket = self.plan.buckets[index]
            target = self._target(index, {self.plan.parameters[member]: flat for member, flat in results.items()})
            update.write_to(target, factor)
            # Where everything is applied, ``present`` says for which parameters there were gradients.
            counts = [0] * len(bucket) if update.indices is None else target.spread(update.indices)
            wanted.update(
                part.member
                for part, present, count in zip(bucket, update.present, counts, strict=True)
                if present or count
            )
            if velocities and update.indices is not None:  # factor masking: what was applied loses its velocity
                self._target(index, velocities).erase(update.indices)
        self._correction.commit()
        for member, accumulated in self._accumulated.items():
            parameter = self.plan.parameters[member]
            late = parameter.grad
            if late is not None and not self.joined:
                accumulated.add_(flattened(late, self.plan.specs[member]), alpha=1.0 / self._scale)
            kept[parameter] = accumulated
            if not self.joined:
                parameter.grad = None
                if member in wanted:
                    self._install(member, results[member])

    def _target(self, index: int, flats: Mapping[torch.nn.Parameter, torch.Tensor]) -> Accumulator:
        parts = [flats[self.plan.parameters[part.member]][part.begin : part.end] for part in self.plan.buckets[index]]
        return accumulator_of(parts, self._lane)

    def _install(self, member: int, flat: torch.Tensor) -> None:
        parameter, spec = self.plan.parameters[member], self.plan.specs[member]
        parameter.grad = shaped(flat, spec).to(parameter.dtype)  # itself, if that is float32


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
