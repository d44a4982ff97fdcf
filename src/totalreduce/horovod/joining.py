"""Ranks with less data than others."""

from __future__ import annotations

import queue
import threading

from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import global_process_set

__all__ = ["join"]


def join(device: int = -1) -> int:  # noqa: ARG001  (Horovod makes its zeros there)
    """Say that this rank has no more data, and lend the others nothing but zeros until all have joined. Collective.

    It takes part in their allreduces and barriers, and in the steps of every ``DistributedOptimizer`` of all ranks that
    is in use here. Averages are divided by the number of ranks as before, those that have joined included. The other
    operations raise ``UnsupportedError`` while some ranks have joined.

    Args:
        device: Accepted, without effect.

    Returns:
        The rank that joined last, equal on all ranks.

    Raises:
        DeadlineExceededError: The others go on for longer than the time-out.
        PeerLost: A rank is gone.
    """
    members = context.members(global_process_set)
    # Each waits for the others' next operation, whichever comes; so each has its thread.
    bodies = [members.coordinator.join, *(optimizer.join for optimizer in members.optimizers)]
    outcomes: queue.SimpleQueue[tuple[int, int | BaseException]] = queue.SimpleQueue()

    def run(place: int) -> None:
        try:
            outcomes.put((place, bodies[place]()))
        except BaseException as error:
            outcomes.put((place, error))

    for place in range(len(bodies)):
        threading.Thread(target=run, args=(place,), name="totalreduce-join", daemon=True).start()
    last: dict[int, int] = {}
    while len(last) < len(bodies):
        place, outcome = outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        last[place] = outcome
    return last[0]  # the optimizers' rounds may have ended in another order
