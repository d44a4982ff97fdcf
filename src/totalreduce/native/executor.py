"""The thread that carries out the operations on which the ranks have agreed. One thread per coordinator.

It starts batches in the agreed order. While the library works on one batch, the thread packs the next one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from totalreduce.coordination.fusion import fuse
from totalreduce.coordination.requests import Response
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.native.collectives import NativeWork
from totalreduce.native.failures import LOOK_S, find_lost_rank
from totalreduce.native.operation import NativeOperation
from totalreduce.native.packing import Batch, Packer

__all__ = ["Executor"]

#: Batches on the wire at the same time: one, and the one that is packed meanwhile.
_IN_FLIGHT = 2


@final
class Executor:
    """Fuses, starts and finishes operations in a thread of its own.

    Args:
        rank: Index of this rank in the group.
        packer: Packs operations, calls the library and unpacks the results.
        fusion_bytes: Upper bound of a batch, in bytes.
        complete: A function that is called with operations that have ended, in the executor's thread.
        report: A function that is called with each batch that has ended.
        lost: A function that returns the loss of a rank, or ``None``.

    Attributes:
        thread: The thread. It ends after ``end``.
    """

    def __init__(
        self,
        rank: int,
        packer: Packer,
        *,
        fusion_bytes: int,
        complete: Callable[[Sequence[NativeOperation], BaseException | None], None],
        report: Callable[[Batch], None],
        lost: Callable[[], TotalReduceError | None],
    ) -> None:
        self._packer, self._fusion_bytes = packer, fusion_bytes
        self._complete, self._report, self._lost = complete, report, lost
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: deque[Batch] = deque()
        self._number = 0
        self._last_fused: tuple[list[Response], list[list[Response]]] = ([], [])
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"totalreduce-{rank}-native", daemon=True)
        self.thread.start()

    def put(self, responses: list[Response], operations: list[NativeOperation | None], now: float) -> None:
        """Carry operations out in this order. An operation is ``None`` if this rank has joined instead."""
        self._inbox.put(lambda: self._carry_out(responses, operations, now))

    def finish(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the executor's thread, which holds no lock."""
        self._inbox.put(action)

    def give_up(self, operations: list[NativeOperation], error: BaseException) -> None:
        """Fail operations that will not be carried out."""
        self._inbox.put(lambda: self._complete(operations, error))

    def end(self) -> None:
        """End the thread when it has carried out all that was put before. Nothing is put afterwards."""
        self._inbox.put(None)

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for its end at most ``timeout_s`` seconds."""
        self.end()
        self.thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------ thread

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait() if self._under_way else self._inbox.get()
            except queue.Empty:
                self._finish_oldest()
                continue
            if item is None:
                while self._under_way:
                    self._finish_oldest()
                return
            item()
            del item  # it holds the operations and their tensors

    def _carry_out(self, responses: list[Response], operations: list[NativeOperation | None], agreed: float) -> None:
        if responses is not self._last_fused[0]:  # steady training steps bring the same list object
            self._last_fused = responses, fuse(responses, self._fusion_bytes)
        by_name = {response.name: operation for response, operation in zip(responses, operations, strict=True)}
        for batch in self._last_fused[1]:
            while len(self._under_way) >= _IN_FLIGHT:
                self._finish_oldest()
            self._start(batch, [by_name[response.name] for response in batch], agreed)

    def _start(self, responses: list[Response], operations: list[NativeOperation | None], agreed: float) -> None:
        begun = time.monotonic()
        batch = Batch(self._number, responses, operations, agreed, begun)
        self._number += 1
        first = responses[0]
        if first.error is not None:
            batch.error = first.error.error()
        elif self._failed() is not None:
            batch.error = self._failure
        else:
            try:
                self._packer.start(batch)
            except ConfigurationError as error:
                batch.error = error  # the library cannot do this, which is so on every rank
            except Exception as error:
                batch.error = self._failure = error
        batch.packed = time.monotonic()
        self._under_way.append(batch)

    def _finish_oldest(self) -> None:
        batch = self._under_way.popleft()
        if batch.error is None and batch.work is not None:
            batch.error = self._wait(batch.work)
        batch.ended = time.monotonic()
        if batch.error is None:
            try:
                batch.finish()
                self._packer.synchronise(batch)
            except Exception as error:
                batch.error = error
        self._packer.release(batch)
        batch.unpacked = time.monotonic()
        self._report(batch)
        for operation in batch.mine:
            if operation.error is not None:
                self._complete([operation], operation.error)
        self._complete([operation for operation in batch.mine if operation.error is None], batch.error)

    def _wait(self, work: NativeWork) -> BaseException | None:
        """Wait for the library, but not for a rank that is lost; return the reason if it failed."""
        try:
            while not work.wait(LOOK_S):
                if self._failed() is not None:
                    return self._failure
        except TotalReduceError as error:
            self._failure = find_lost_rank(error, self._lost)
        return self._failure

    def _failed(self) -> BaseException | None:
        if self._failure is None:
            self._failure = self._lost()
        return self._failure
