"""What ``ddp_hook`` has of its own to reach the other ranks: a process group of its own, and its threads."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from totalreduce.foundation.errors import PlanMismatchError
from totalreduce.foundation.forking import HomeProcess
from totalreduce.sparse.actions import Allgather
from totalreduce.sparse.c10d_driver import C10dDriver
from totalreduce.sparse.candidates import Workspace
from totalreduce.sparse.worker import ExchangeWorker
from totalreduce.tensors.streams import SideStreams
from totalreduce.transports.torch_group import destroy, forming_a_group

__all__ = ["HookGroup"]


@final
class _Background:
    """One thread that calls functions in the order in which they came.

    This is no ``ThreadPoolExecutor``, for whose threads Python waits at its end: this one may wait for a lost rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._home = HomeProcess(f"the thread {name!r}")
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the function called; return at once. Raises ``GroupClosed``."""
        self._home.check()
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._queue.put((future, function))
        return future

    def close(self) -> None:
        """End the thread after the functions it was given; harmless when called twice, and in a forked child."""
        if self._home.is_here:
            self._queue.put(None)


def _work(given: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := given.get()) is not None:
        future, function = item
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del item, future, function  # else their memory would be kept until the next function comes


@final
class HookGroup:
    """The process group and the threads of one ``ddp_hook``; ``settings`` must be equal on all ranks.

    The process group has the ranks of DDP's, so that its collectives do not mix with DDP's own.

    Raises:
        PlanMismatchError: The settings differ; on every rank.
        RendezvousError: torch could not make the group.
    """

    def __init__(self, process_group: Any, settings: str) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        cpu = torch.device("cpu")
        # As torch does with objects: host memory is sent from there, if the group has a back end for it.
        accelerator = torch.accelerator.current_accelerator()
        if cpu in process_group._device_types or accelerator is None:
            device = cpu
        else:
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        timeout = process_group._get_backend(device).options._timeout
        # torch names a group of some of the ranks after them, and refuses the same name later: the group stays.
        self._stays = len(ranks) < dist.get_world_size()
        with forming_a_group():
            self._group: Any = dist.new_group(
                ranks, timeout, dist.get_backend_config(process_group), use_local_synchronization=self._stays
            )
        self.timeout_s: float = timeout.total_seconds()  #: The process group's time-out in seconds.
        self.driver = C10dDriver(self._group, device)  #: Carries out the actions of exchanges.
        self.worker = ExchangeWorker(self.driver, in_order=True)  #: The thread in which exchanges run.
        self.selecting = _Background("totalreduce-selection")  #: The thread in which gradients are taken and selected.
        self.workspace = Workspace()  #: The memory for selection.
        self.streams = SideStreams()  #: The streams on which GPUs copy.
        self._compare(settings)

    def _compare(self, settings: str) -> None:
        own = np.frombuffer(bytearray(hashlib.sha256(settings.encode()).digest()), np.uint8)
        action = Allgather(own, [own.size] * self.driver.world_size)
        digests = self.driver.start(action, channel=0, step=0, priority=0).reply()
        odd = [rank for rank, other in enumerate(digests) if not np.array_equal(other, own)]
        if odd:
            difference = f"ranks {odd} have other settings than rank {self.driver.rank}: {settings}"
            raise PlanMismatchError("ddp_hook", (difference,))

    def close(self) -> None:
        """End the threads; harmless when called twice."""
        self.selecting.close()
        self.worker.close()

    def close_group(self) -> None:
        """Destroy the group, unless torch needs it for its name."""
        if not self._stays:
            destroy(self._group)
