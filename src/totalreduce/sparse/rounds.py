"""The rounds of exchanges in which the compressed buckets of one model are reduced."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import DeadlineExceededError
from totalreduce.kernels import selection
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allreduce, Carrier
from totalreduce.sparse.candidates import Workspace
from totalreduce.sparse.session import BucketShape, Method, Report, Session, Update
from totalreduce.sparse.worker import ExchangeWorker, Job

__all__ = ["Overlap", "SparseRounds", "with_arrays", "with_tensors"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The time of a round's communication, and the part of it that ran beside other work."""

    exchange_s: float  #: The time in which some bucket was exchanged, from its first message to its result.
    hidden_s: float  #: The part of that time before ``finish`` was called.

    @classmethod
    def of(cls, spans: Sequence[tuple[float, float]], waits_from: float) -> Overlap:
        """Compute both from the times at which buckets began and ended, and at which ``finish`` was called."""
        exchange = hidden = 0.0
        reached = -math.inf
        for begin, end in sorted(spans):
            new = max(begin, reached)
            exchange += max(0.0, end - new)
            hidden += max(0.0, min(end, waits_from) - new)
            reached = max(reached, end)
        return cls(exchange, hidden)


@final
class SparseRounds:
    """The sessions of all buckets, and the thread in which they work; ``in_order`` is that of ``ExchangeWorker``."""

    def __init__(
        self, methods: Sequence[Method], shapes: Sequence[BucketShape], carrier: Carrier, *, in_order: bool = False
    ) -> None:
        self._shapes, self._carrier = shapes, carrier
        self.methods = [method.name for method in methods]  #: The name of each bucket's method.
        self._workspace = Workspace()
        #: The session of each bucket.
        self.sessions = [self._new_session(method, shape) for method, shape in zip(methods, shapes, strict=True)]
        self._latest = list(self.sessions)
        self._jobs: list[Job | None] = [None] * len(shapes)
        self._worker = ExchangeWorker(carrier, in_order=in_order)
        self.overlap = Overlap(0.0, 0.0)  #: The times of the last round.
        self.waited_s = 0.0  #: The seconds for which ``finish`` was blocked so far.

    def start(
        self,
        bucket: int,
        gradients: Accumulator,
        residuals: Accumulator,
        *,
        present: Sequence[bool],
        scale: float = 1.0,
        priority: int = 0,
        dense: bool = False,
        xi: bool = False,
    ) -> None:
        """Start the exchange of one bucket. Every rank starts every bucket once in each round.

        Args:
            bucket: The bucket's index.
            gradients: They become the new residuals, and must be left alone until ``finish``.
            residuals: As large as the gradients; only read.
            present: Whether this rank has a gradient, by segment; where it has none, the elements are zero.
            scale: Factor of the gradients.
            priority: Smaller is more urgent.
            dense: Send everything this time, whatever the method; on all ranks.
            xi: Measure xi this time (see ``_with_xi``), which sends everything twice; on all ranks.
        """
        session: Session = self.sessions[bucket]
        if dense:
            from totalreduce.sparse.dense import Dense

            session = self._new_session(Dense(), self._shapes[bucket])
        self._latest[bucket] = session
        flags = np.array(present, np.bool_)

        def exchange() -> Generator[Action, Any, Update | None]:
            if xi:
                return _with_xi(session, flags, gradients, residuals, self._carrier.world_size)
            return session.exchange(flags)

        job = Job(bucket, lambda: session.accumulate(gradients, residuals, scale), exchange, priority)
        self._jobs[bucket] = job
        self._worker.start(job)

    def finish(self, timeout_s: float) -> list[Update] | None:
        """Wait for every bucket.

        Returns:
            The update of each bucket. ``None`` on all ranks if some rank's gradients were not finite, in any bucket:
            then the residuals have not changed, and the contents of the gradients' memory are undefined.

        Raises:
            DeadlineExceededError: It takes too long; may be called again.
            PeerLost: A rank died.
        """
        self._worker.hurry()
        called = time.monotonic()
        deadline = called + timeout_s
        updates: list[Update] = []
        finite = True
        for bucket, job in enumerate(self._jobs):
            assert job is not None, "every bucket was started"
            try:
                update: Update | None = job.result.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError as cause:
                if job.result.done():
                    raise  # the exchange's own error
                raise DeadlineExceededError(
                    f"waited {timeout_s:g} s for the sparse exchange of bucket {bucket}: another rank is late, or does "
                    "not take part in this round"
                ) from cause
            if update is None:
                finite = False
            else:
                updates.append(update)
        self.overlap = Overlap.of([job.span for job in self._jobs if job is not None], called)
        self.waited_s += time.monotonic() - called
        self._jobs = [None] * len(self._jobs)
        return updates if finite else None

    def reports(self) -> list[Report]:
        """Return the report on the last round, by bucket."""
        return [session.report for session in self._latest]

    def figures(self) -> dict[str, int | float | str]:
        """Return what the last round has selected and sent, of all buckets together. Any thread, at any time."""
        reports = self.reports()
        num_elements = sum(shape.num_elements for shape in self._shapes)
        selected = sum(report.selected for report in reports)
        return {
            "method": ", ".join(sorted({report.method for report in reports if report.method})),
            "density": selected / num_elements if num_elements else 0.0,
            "selected": selected,
            "applied": sum(report.applied for report in reports),
            "elements": num_elements,
            "sent_bytes": sum(report.sent_bytes for report in reports),
            "imbalance": max((report.imbalance for report in reports), default=1.0),
        }

    def state(self) -> list[dict[str, Any]]:
        """Return the states of the sessions, by bucket. Between rounds only."""
        return [with_tensors(session.state()) for session in self.sessions]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from states of the sessions. Between rounds only."""
        for session, saved in zip(self.sessions, state, strict=True):
            session.load_state(with_arrays(saved))

    def close(self) -> None:
        """End the thread; harmless when called twice."""
        self._worker.close()

    def _new_session(self, method: Method, shape: BucketShape) -> Session:
        session = method.session(shape, self._carrier.rank, self._carrier.world_size)
        session.share(self._workspace)
        return session


def with_tensors(state: Any) -> Any:
    """Return a copy of nested dicts and lists with tensors instead of arrays: ``torch.load`` trusts tensors."""
    if isinstance(state, Mapping):
        return {key: with_tensors(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_tensors(value) for value in state]
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def with_arrays(state: Any) -> Any:
    """Undo ``with_tensors``."""
    if isinstance(state, Mapping):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        return [with_arrays(value) for value in state]
    return state.cpu().numpy().copy() if isinstance(state, torch.Tensor) else state


def _with_xi(
    session: Session, present: Array, gradients: Accumulator, residuals: Accumulator, world_size: int
) -> Generator[Action, Any, Update | None]:
    """Run a session's exchange, and add ``extra["xi"]`` to its report unless the step is skipped.

    xi is the distance of the result from the best k elements, on which the convergence of Ok-Topk depends. Li and
    Hoefler (PPoPP 2022), assumption 1: with G the ranks' gradients and e their residuals, the difference between the k
    largest elements of the mean of G + e and the applied elements is at most xi times the norm of the mean gradient.
    The measurement takes two dense allreduces.
    """
    total = gradients.flat()
    with np.errstate(invalid="ignore", over="ignore"):  # a step that is not finite is skipped
        mean_gradient = yield Allreduce(total - residuals.flat())
        total = yield Allreduce(total)
        norm = float(np.linalg.norm(mean_gradient.astype(np.float64))) / world_size
    update = yield from session.exchange(present)
    if update is not None:
        session.report.extra["xi"] = _distance(total, update, session.report.k) / world_size / norm if norm else 0.0
    return update


def _distance(total: Array, update: Update, k: int) -> float:
    best = np.zeros_like(total)
    if k:
        least = selection.kth_magnitude([total], min(k, total.size))
        chosen = (total.view(np.int32) & 0x7FFFFFFF) >= max(least.bits, 1)
        best[chosen] = total[chosen]
    if update.indices is None:
        best -= update.values
    else:
        best[update.indices] -= update.values
    return float(np.linalg.norm(best.astype(np.float64)))
