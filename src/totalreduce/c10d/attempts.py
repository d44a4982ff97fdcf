"""``attempts``: training with DistributedDataParallel or FSDP2 that outlives the loss of processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from totalreduce.c10d.backend import forming
from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.foundation import environment
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.launch.bootstrap import describe_settings, init
from totalreduce.launch.rendezvous import StoreRank, open_store
from totalreduce.launch.spares import await_seat
from totalreduce.recovery.attempts import Attempt, Attempts, ShardedAttempts
from totalreduce.recovery.epochs import CLOSE_S
from totalreduce.recovery.hook_states import HookStates
from totalreduce.recovery.runs import Runs
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State

if TYPE_CHECKING:
    from totalreduce.recovery.copies import ShardCopies

__all__ = ["attempts"]


def attempts(
    state: State | None = None,
    *,
    copies: ShardCopies | None = None,
    seed: int = 0,
    replicas: int = 1,
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
    these options there is one attempt, and a loss is an error. See docs/recovery-ddp.md.

    A model that FSDP2 shards is built in each attempt, because ``fully_shard`` binds it to the process group. So
    ``tr.attempts(copies=tr.ShardCopies(...))`` takes no state, and the program passes it to ``attempt.synchronize``.

    Args:
        state: What all ranks begin an attempt with.
        copies: Keeps copies of a sharded state; in place of ``state``.
        seed: The generators of torch, NumPy and Python are seeded with it, the version and the rank, at the begin and
            after each ``commit``.
        replicas: The number of ranks that have a copy of what ``tr.ddp_hook`` keeps back on each rank. The copies are
            sent before each ``optimizer.step()``, if there is such a hook. With 0 the residuals of a lost rank are
            lost. Not with ``copies``.
        timeout: Deadline of collectives that name none, and of the decision who the members are.
        verify: Compare SHA-256 of parameters and optimizer state on all ranks when an attempt begins. Not with
            ``copies``.
        snapshots: Writes the state to disk beside training. The job begins with its last version, if there is one.

    Raises:
        ConfigurationError: ``torch.distributed`` is initialised already; or this process runs another program, or other
            settings, than the others; or there is not one of ``state`` and ``copies``.
        RecoveryError: Too few processes have come in time, nobody has the state any more, or the states differ.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "tr.attempts forms the default process group itself: leave dist.init_process_group out"
        )
    if (state is None) == (copies is None):
        raise ConfigurationError("tr.attempts takes a state, or copies=tr.ShardCopies(...) for a model that is sharded")
    await_seat()
    groups = _DefaultProcessGroup(timeout)
    if snapshots is not None:
        snapshots.watch()
    try:
        part: Attempts | ShardedAttempts
        if state is not None:
            part = Attempts(state, seed=seed, replicas=replicas, verify=verify, snapshots=snapshots)
        else:
            assert copies is not None
            part = ShardedAttempts(copies, seed=seed, snapshots=snapshots)
        groups.keeper = part.hooks
        yield from Runs(part, groups, timeout.total_seconds(), describe_settings())
    finally:
        if snapshots is not None:
            snapshots.release()
        groups.leave("the loop over tr.attempts has ended")


@final
class _DefaultProcessGroup:
    """Forms and ends the default process group."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.keeper: HookStates | None = None  #: Keeps what the hooks of DDP keep back.

    def form(self, *, store: StoreRank | None = None, **options: Any) -> Group:
        """Form it with the processes that meet in the store, or with those that the launcher names."""
        if store is None:
            dist.init_process_group(BACKEND_NAME, timeout=self._timeout, **self._meeting())
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
        default.keeper = self.keeper
        return default.group

    def _meeting(self) -> dict[str, Any]:
        """Return the arguments by which the ranks find each other; torch itself knows torchrun's variables alone."""
        world = environment.read_world()
        if world.launcher in ("torchrun", "totalreduce"):
            return {}
        store = HashStore() if world.world_size == 1 else open_store(world, self._timeout.total_seconds())
        return {"store": store, "rank": world.rank, "world_size": world.world_size}

    def leave(self, reason: str) -> None:
        """End it."""
        if not dist.is_initialized():
            return
        default = dist.distributed_c10d._get_default_group()
        if isinstance(default, ProcessGroupTotalReduce):
            default.group.close(CLOSE_S, reason=reason)
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Have DTensor forget the meshes of process groups that have ended.

    It remembers the mesh of each operation's first result, and gives it to the results on equal meshes later. Seen in
    torch 2.13: the results on the next group's mesh then belong to the mesh of the group that has ended.
    """
    if "torch.distributed.tensor" in sys.modules:
        with suppress(ImportError):  # a function that torch does not document
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
