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
        failed: A function that is called with the error because of which no more operations can be carried out, in the
            executor's thread.

    Attributes:
        thread: The thread. It ends after ``end``.
        carried_out: How many of the operations on which the ranks have agreed have ended in the library.
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
        failed: Callable[[BaseException], None],
    ) -> None:
        self._packer, self._fusion_bytes = packer, fusion_bytes
        self._complete, self._report, self._lost, self._failed = complete, report, lost, failed
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: deque[Batch] = deque()
        self._number = self.carried_out = 0
        self._last_fused: tuple[list[Response], list[list[Response]]] = ([], [])
        self._failure: BaseException | None = None
        self._has_ended = threading.Event()
        self._releases: deque[Callable[[], None]] = deque()  #: To be called once, when the thread has ended.
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

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was put before is carried out, for at most ``timeout_s`` seconds."""
        if threading.current_thread() is self.thread:  # in a callback of an operation
            return
        drained, deadline = threading.Event(), time.monotonic() + timeout_s

        def settle() -> None:
            while self._under_way:
                self._finish_oldest()
            drained.set()

        self._inbox.put(settle)
        while self.thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            if drained.wait(min(left_s, LOOK_S)):
                return

    def close(self, timeout_s: float, release: Callable[[], None]) -> None:
        """End the thread, and wait for its end at most ``timeout_s`` seconds.

        ``release`` is called when no collective is under way any more: by this method, or later by the thread.
        """
        self.end()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout_s)
        self._releases.append(release)
        if self._has_ended.is_set():
            self._release()

    # ------------------------------------------------------------------------------------------------------ thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._has_ended.set()
            self._release()

    def _release(self) -> None:
        try:
            release = self._releases.popleft()
        except IndexError:  # another thread may have taken it
            return
        release()

    @torch.no_grad()
    def _work(self) -> None:
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
        elif self._find_failure() is not None:
            batch.error = self._failure
        else:
            try:
                with self._packer.beside(batch):
                    self._packer.start(batch)
            except ConfigurationError as error:
                batch.error = error  # the library cannot do this, which is so on every rank
            except Exception as error:
                batch.error = error
                self._fail(error)
        batch.packed = time.monotonic()
        self._under_way.append(batch)

    def _finish_oldest(self) -> None:
        batch = self._under_way.popleft()
        with self._packer.beside(batch):
            if batch.error is None and batch.work is not None:
                batch.error = self._wait(batch.work)
            batch.ended = time.monotonic()
            if self._failure is None:
                self.carried_out += len(batch.responses)
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
                if self._find_failure() is not None:
                    return self._failure
        except Exception as error:
            self._fail(find_lost_rank(error, self._lost))
        return self._failure

    def _find_failure(self) -> BaseException | None:
        if self._failure is None:
            self._failure = self._lost()
        return self._failure

    def _fail(self, error: BaseException) -> None:
        """Carry out nothing any more: the other ranks call the library for operations that this rank cannot do."""
        self._failure = error
        self._failed(error)
