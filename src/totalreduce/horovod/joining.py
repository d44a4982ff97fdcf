"""``join``, for ranks with less data than others."""

from __future__ import annotations

import queue
import threading

from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import global_process_set

__all__ = ["join"]


def join(device: int = -1) -> int:  # noqa: ARG001
    """Announce that this rank has no more data, and contribute zeros until all ranks have joined. Collective.

    The rank takes part in the allreduces and barriers of the others, and in the steps of every ``DistributedOptimizer``
    over all ranks that is in use here. Averages are divided by the number of all ranks, joined ones included. The other
    operations raise ``UnsupportedError`` while some ranks have joined.

    Returns:
        The rank that joined last, equal on all ranks.

    Raises:
        DeadlineExceededError: The others go on for longer than the time-out.
        PeerLost: A rank is gone.
    """
    members = context.members(global_process_set)
    # Each of them waits for the next operation of the other ranks, so each has a thread.
    bodies = [members.coordinator.join, *(optimizer.join for optimizer in members.optimizers.values())]
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
    return last[0]  # the optimizers' rounds may have ended in another order of ranks
