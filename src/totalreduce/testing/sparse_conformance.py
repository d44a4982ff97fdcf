"""The properties that every sparse method must have, and their tests. Public.

``SparseRanks`` runs all ranks of a method in lockstep and keeps their residuals; ``check_round`` checks one step;
``check_method`` runs several steps three times and returns the rounds of the first run:

    >>> from totalreduce.sparse.topka import TopkA
    >>> len(check_method(TopkA(density=0.1), world_size=3, shapes=((20, 4), (7,))))
    4

The properties are:

- All ranks get the same bits, and a second run gets them again.
- *Conservation*: for every element, the sum of the ranks' accumulated gradients is the applied value plus the sum of
  the new residuals.
- If a rank's gradient is not finite, no residual and no session changes on any rank.
- A new session with the state of the old one continues with the same bits.
- Residuals are read and not written, and segments are present if some rank had a gradient for them.
- The report has the number of bytes that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.accumulator import Accumulator, HostAccumulator
from totalreduce.sparse.session import BucketShape, Method, Report, Session, Update
from totalreduce.testing.conformance import ConformanceError
from totalreduce.testing.lockstep import Traffic, run_exchanges

__all__ = ["Gradients", "Round", "SparseRanks", "check_method", "check_round", "random_gradients"]

#: Returns the gradient of a step and a rank: a new array, float32 of one dimension, equal for equal arguments.
Gradients = Callable[[int, int], Array]
#: Makes a bucket of these segments.
Memory = Callable[[Sequence[Array]], Accumulator]

#: Relative to the sum of an element's magnitudes: float32 rounds each of up to sixteen additions by 6e-8.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Round:
    """One step of all ranks."""

    accumulated: list[Array]  #: By rank, before the exchange: float32, all segments.
    residuals: list[Array]  #: By rank, after the exchange.
    present: Array  #: Whether a rank had a gradient for a segment; shape (world size, segments).
    updates: list[Update | None]  #: By rank.
    reports: list[Report]  #: By rank.
    traffic: Traffic  #: The bytes of all actions.

    @property
    def applied(self) -> Array:
        """The update of rank 0 at its full length; zero if the step was skipped."""
        dense = np.zeros(self.accumulated[0].size, np.float32)
        update = self.updates[0]
        if update is not None:
            dense[slice(None) if update.indices is None else update.indices] = update.values
        return dense

    @property
    def bits(self) -> list[bytes]:
        """The bytes of the update and of all residuals."""
        return [array.tobytes() for array in (self.applied, *self.residuals)]


class SparseRanks:
    """One bucket on all ranks, in lockstep."""

    def __init__(
        self, method: Method, world_size: int, shapes: Sequence[Sequence[int]], memory: Memory = HostAccumulator
    ) -> None:
        self._method, self._memory = method, memory
        self._shape = BucketShape(tuple(tuple(shape) for shape in shapes))
        self._edges = np.cumsum([0, *self._shape.sizes]).tolist()
        #: By rank, float32, all segments; zero at the beginning.
        self.residuals = [np.zeros(self._shape.num_elements, np.float32) for _ in range(world_size)]
        self.sessions = self._new_sessions()  #: By rank.

    def step(self, gradients: Sequence[Array], *, scale: float = 1.0, present: Array | None = None) -> Round:
        """Run one round on all ranks.

        Args:
            gradients: By rank, float32, all segments; their memory becomes the residuals.
            scale: Factor of the gradients.
            present: See ``Round``; by default all ranks have gradients for all segments.

        Raises:
            ConformanceError: The accumulated gradient is not the sum, or a residual was written to.
        """
        world_size = len(self.sessions)
        if present is None:
            present = np.ones((world_size, len(self._shape.shapes)), bool)
        before = [residual.copy() for residual in self.residuals]
        with np.errstate(over="ignore", invalid="ignore"):
            sums = [g * np.float32(scale) + r for g, r in zip(gradients, self.residuals, strict=True)]
        for rank, session in enumerate(self.sessions):
            session.accumulate(self._cut(gradients[rank]), self._cut(self.residuals[rank]), scale)
            same = np.array_equal(gradients[rank], sums[rank], equal_nan=True)
            _require(same, f"rank {rank}: the accumulated gradient is not gradient * scale + residual")
        updates, traffic = run_exchanges(
            [session.exchange(mine) for session, mine in zip(self.sessions, present, strict=True)]
        )
        for rank, residual in enumerate(self.residuals):
            _require(_equal(residual, before[rank]), f"rank {rank}: the old residual was written to")
        if updates[0] is not None:
            self.residuals = list(gradients)
        reports = [session.report for session in self.sessions]
        return Round(sums, [r.copy() for r in self.residuals], present, updates, reports, traffic)

    def restart(self) -> None:
        """Replace the sessions by new ones with the same states."""
        states = [session.state() for session in self.sessions]
        self.sessions = self._new_sessions()
        for session, state in zip(self.sessions, states, strict=True):
            for name, value in state.items():
                plain = all(isinstance(part, (int, float, np.ndarray)) for part in np.ravel(value).tolist())
                _require(plain, f"{name} of the state is made of something else than numbers")
            session.load_state(state)

    def _new_sessions(self) -> list[Session]:
        size = len(self.residuals)
        return [self._method.session(self._shape, rank, size) for rank in range(size)]

    def _cut(self, flat: Array) -> Accumulator:
        return self._memory([flat[low:high] for low, high in pairwise(self._edges)])


def random_gradients(num_elements: int, *, seed: int = 0) -> Gradients:
    """Return normally distributed gradients, with another deviation on every rank and in every step."""

    def gradient(step: int, rank: int) -> Array:
        generator = np.random.default_rng([seed, step, rank])
        return generator.standard_normal(num_elements, np.float32) * np.float32(2.0 ** generator.integers(-3, 4))

    return gradient


def check_method(
    method: Method,
    world_size: int,
    shapes: Sequence[Sequence[int]],
    *,
    gradients: Gradients | None = None,
    steps: int = 4,
    moves: bool = False,
    memory: Memory = HostAccumulator,
) -> list[Round]:
    """Run the steps three times: as they are, again, and with a step that fails and a restart before each.

    Args:
        method: Settings of the method.
        world_size: Number of ranks.
        shapes: Shapes of the bucket's segments; with more than one, every rank lacks one of them in turn.
        gradients: The gradients; by default ``random_gradients``.
        steps: Number of steps.
        moves: Whether a rank may change the residuals of elements that are not applied (gTopk).
        memory: Makes a bucket of its segments, whose memory it must use.

    Returns:
        The rounds of the first run.

    Raises:
        ConformanceError: A property does not hold.
    """
    plan = _Plan(BucketShape(tuple(tuple(shape) for shape in shapes)), world_size, gradients)
    ranks, rounds = SparseRanks(method, world_size, shapes, memory), []
    for step in range(steps):
        rounds.append(plan.run(ranks, step))
        check_round(rounds[-1], moves=moves)
    again, restarted = (SparseRanks(method, world_size, shapes, memory) for _ in range(2))
    for step, first in enumerate(rounds):
        _require(plan.run(again, step).bits == first.bits, f"step {step}: a second run gives other bits")
        plan.fail(restarted, step)
        restarted.restart()
        same = plan.run(restarted, step).bits == first.bits
        _require(same, f"step {step}: after steps that failed, and restarts, there are other bits")
    return rounds


def check_round(done: Round, *, moves: bool = False) -> None:
    """Check one step whose gradients are finite; for the arguments and errors see ``check_method``."""
    num_elements, first = done.accumulated[0].size, done.updates[0]
    for rank, (update, report) in enumerate(zip(done.updates, done.reports, strict=True)):
        _require(update is not None and not report.skipped, f"rank {rank} has skipped a step that is finite")
        assert update is not None
        assert first is not None
        _require(_same_update(update, first), f"rank {rank} got other bits than rank 0")
        _require(report.applied == update.values.size, f"rank {rank}: applied is {report.applied}")
        sent, received = int(done.traffic.sent[rank]), int(done.traffic.received[rank])
        _require(
            (report.sent_bytes, report.received_bytes) == (sent, received),
            f"rank {rank} reports {report.sent_bytes} and {report.received_bytes} bytes; it was {sent} and {received}",
        )
    assert first is not None
    _require(_equal(first.present, np.logical_or.reduce(done.present)), "present is not what some rank had")
    _require(first.values.dtype == np.float32, "values are not float32")
    if first.indices is not None:
        _require(first.indices.dtype == np.int32, "indices are not int32")
        ascending = np.diff(np.concatenate([[-1], first.indices, [num_elements]])) > 0
        _require(bool(ascending.all()), "indices do not ascend, or are outside the bucket")
    _check_mass(done)
    if first.indices is not None and not moves:
        untouched = np.ones(num_elements, bool)
        untouched[first.indices] = False
        for rank, (before, after) in enumerate(zip(done.accumulated, done.residuals, strict=True)):
            same = _equal(before[untouched], after[untouched])
            _require(same, f"rank {rank} has changed elements that were not applied")


def _check_mass(done: Round) -> None:
    accumulated = np.stack(done.accumulated).astype(np.float64)
    had, kept = _over_ranks(accumulated), _over_ranks(np.stack(done.residuals).astype(np.float64))
    scale = _over_ranks(np.abs(accumulated)) + np.abs(done.applied)
    # A float32 is rounded by half a denormal at least.
    lost = np.abs(had - done.applied - kept) > _TOLERANCE * scale + len(done.residuals) * 1e-45
    for index in np.flatnonzero(lost)[:1]:
        amounts = f"of {had[index]}, {done.applied[index]} was applied and {kept[index]} is left"
        _require(False, f"element {index} is not conserved: {amounts}")


@dataclass(frozen=True, slots=True)
class _Plan:
    """The gradients of all ranks in every step."""

    shape: BucketShape
    world_size: int
    gradients: Gradients | None

    def run(self, ranks: SparseRanks, step: int) -> Round:
        present = self._present(step)
        return ranks.step(self._make(step, present), scale=0.5, present=present)

    def fail(self, ranks: SparseRanks, step: int) -> None:
        """Run a step in which one element of one rank is not finite."""
        if not self.shape.num_elements:
            return
        present = self._present(step)
        gradients = self._make(step, present)
        culprit, index = step % self.world_size, 7919 * (step + 1) % self.shape.num_elements
        gradients[culprit][index] = (np.nan, np.inf, -np.inf)[step % 3]
        before = ranks.residuals
        done = ranks.step(gradients, scale=0.5, present=present)
        for rank, (update, report) in enumerate(zip(done.updates, done.reports, strict=True)):
            _require(update is None and report.skipped, f"rank {rank} goes on though rank {culprit} is not finite")
        _require(ranks.residuals is before, "residuals were replaced in a step that was skipped")

    def _present(self, step: int) -> Array:
        present = np.ones((self.world_size, len(self.shape.shapes)), bool)
        if present.shape[1] > 1:
            present[range(self.world_size), (np.arange(self.world_size) + step) % present.shape[1]] = False
        return present

    def _make(self, step: int, present: Array) -> list[Array]:
        make = self.gradients or random_gradients(self.shape.num_elements)
        there = [np.repeat(mine, self.shape.sizes) for mine in present]
        return [np.where(there[rank], make(step, rank), np.float32(0.0)) for rank in range(self.world_size)]


def _over_ranks(rows: Array) -> Array:
    total: Array = rows.sum(axis=0)
    return total


def _same_update(one: Update, other: Update) -> bool:
    if one.indices is None or other.indices is None:
        same = one.indices is other.indices
    else:
        same = _equal(one.indices, other.indices)
    return same and _equal(one.values, other.values) and _equal(one.present, other.present)


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays have the same bits."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _require(truth: bool, complaint: str) -> None:
    if not truth:
        raise ConformanceError(complaint)
