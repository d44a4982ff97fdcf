"""What connects ``ddp_hook`` with the other ranks: a process group of its own, and the threads beside backward."""

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
from totalreduce.transports.torch_group import destroy, forming_a_group

__all__ = ["Background", "Link"]


@final
class Background:
    """One thread that calls functions in the order in which they came.

    Not a ``ThreadPoolExecutor``: Python waits for its threads when it ends, and this one may wait for a lost rank.
    """

    def __init__(self, name: str) -> None:
        """Starts the thread with the first function."""
        self._name = name
        self._home = HomeProcess(f"the thread {name!r}")
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have it called; returns at once.

        Raises:
            GroupClosed: This is a forked child, and the thread is the parent's.
        """
        self._home.check()
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._queue.put((future, function))
        return future

    def close(self) -> None:
        """End the thread after what it was given; harmless when called twice, and in a forked child."""
        if not self._home.is_here:
            return
        self._queue.put(None)


def _work(given: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := given.get()) is not None:
        future, function = item
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del item, future, function  # what they hold is not kept until the next one comes


@final
class Link:
    """One for each state of ``ddp_hook``.

    Args:
        process_group: DDP's. DDP's own collectives are not to be met, so a group of the same ranks is made.
        settings: Equal on all ranks.

    Attributes:
        driver: Carries actions out.
        worker: The thread in which exchanges go on.
        selecting: The thread in which gradients are taken and selected.
        workspace: Its memory.
        timeout_s: Of the process group.

    Raises:
        PlanMismatchError: The settings differ; on every rank.
        RendezvousError: torch could not make the group.
    """

    def __init__(self, process_group: Any, settings: str) -> None:
        """Collective."""
        ranks = dist.get_process_group_ranks(process_group)
        cpu = torch.device("cpu")
        # As torch does with objects: what is in host memory stays there, if the group has a back end for it.
        device = cpu if cpu in process_group._device_types else torch.device("cuda", torch.cuda.current_device())
        timeout = process_group._get_backend(device).options._timeout
        # torch names a group of a part of the ranks after them, and must not be given the name again: it stays.
        self._stays = len(ranks) < dist.get_world_size()
        with forming_a_group():
            self._group: Any = dist.new_group(
                ranks, timeout, dist.get_backend_config(process_group), use_local_synchronization=self._stays
            )
        self.timeout_s: float = timeout.total_seconds()
        self.driver = C10dDriver(self._group, device)
        self.worker = ExchangeWorker(self.driver, in_order=True)
        self.selecting = Background("totalreduce-selection")
        self.workspace = Workspace()
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
        """Give the group back."""
        if not self._stays:
            destroy(self._group)
