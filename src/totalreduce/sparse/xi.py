"""xi: the distance of a method's result from the best k elements, on which the convergence of Ok-Topk depends.

Li and Hoefler (PPoPP 2022), assumption 1: with G the ranks' gradients and e their residuals, the difference between
the k largest elements of the mean of G + e and what the method applies is at most xi times the norm of the mean
gradient. Measuring it takes two dense allreduces, so it is done on request and now and then.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from totalreduce.kernels import selection
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allreduce, Array
from totalreduce.sparse.session import Session, Update

__all__ = ["with_xi"]


def with_xi(
    session: Session, present: Array, gradients: Accumulator, residuals: Accumulator, world_size: int
) -> Generator[Action, Any, Update | None]:
    """Run a session's exchange, and add ``extra["xi"]`` to its report unless the step is skipped.

    Args:
        session: The session, which has accumulated.
        present: See ``Session.exchange``.
        gradients: The accumulated gradients.
        residuals: The residuals that were added to them.
        world_size: Number of ranks.
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
