"""``attempts``: training with DistributedDataParallel that outlives the loss of processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from totalreduce.c10d.backend import forming
from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.launch.bootstrap import describe_settings, init
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.launch.spares import await_seat
from totalreduce.recovery.attempts import Attempt, Attempts
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State

__all__ = ["attempts"]


def attempts(
    state: State,
    *,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    verify: bool = True,
    snapshots: Snapshots | None = None,
) -> Iterator[Attempt]:
    """Yield attempts to run a training loop, each with a new default process group of ``torch.distributed``.

    ::

        state = tr.State(model=module, optimizer=optimizer, sampler=sampler)  # any optimizer of torch
        for attempt in tr.attempts(state):
            with attempt:
                model = DistributedDataParallel(module)
                for epoch in attempt.epochs(10):
                    for batch in attempt.batches(loader):
                        loss_of(model, batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        attempt.commit()

    An attempt begins when the processes have formed the group, and all have the state of a rank that has taken the most
    steps. If a rank is lost, the attempt ends on the other ranks, without an error, and the next one follows: with a
    new process in place of the lost one (``totalreduce run --on-loss replace``), or without it (``shrink``). Without
    these options there is one attempt, and a loss is an error. See docs/recovery.md.

    Args:
        state: What all ranks begin an attempt with.
        seed: The generators of torch, NumPy and Python are seeded with it, the version and the rank, at the begin and
            after each ``commit``.
        timeout: Deadline of collectives that name none, and of the decision who the members are.
        verify: Compare SHA-256 of parameters and optimizer state on all ranks when an attempt begins.
        snapshots: Writes the state to disk beside training. The job begins with its last version, if there is one.

    Raises:
        ConfigurationError: ``torch.distributed`` is initialised already; or this process runs another program, or other
            settings, than the others.
        RecoveryError: Too few processes have come in time, nobody has the state any more, or the states differ.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "tr.attempts forms the default process group itself: leave dist.init_process_group out"
        )
    await_seat()
    membership = _DefaultProcessGroup(timeout)
    try:
        yield from Attempts(
            state,
            membership,
            timeout_s=timeout.total_seconds(),
            seed=seed,
            verify=verify,
            snapshots=snapshots,
            settings=describe_settings(),
        )
    finally:
        if snapshots is not None:
            snapshots.wait()
        membership.leave("the loop over tr.attempts has ended")


@final
class _DefaultProcessGroup:
    """Forms and ends the default process group."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def form(self, *, store: StoreRank | None = None, **options: Any) -> Group:
        """Form it with the processes that meet in the store, or with those that the launcher names."""
        if store is None:
            dist.init_process_group(BACKEND_NAME, timeout=self._timeout)
        else:
            name = "torch.distributed"
            with forming(init(name=name, timeout_s=self._timeout.total_seconds(), store=store, **options)):
                dist.init_process_group(
                    BACKEND_NAME,
                    store=store.store,
                    rank=store.rank,
                    world_size=store.world_size,
                    timeout=self._timeout,
                )
        default = dist.distributed_c10d._get_default_group()
        assert isinstance(default, ProcessGroupTotalReduce)
        return default.group

    def leave(self, reason: str) -> None:
        """End it."""
        if not dist.is_initialized():
            return
        default = dist.distributed_c10d._get_default_group()
        if isinstance(default, ProcessGroupTotalReduce):
            default.group.close(1.0, reason=reason)
        dist.destroy_process_group()
