"""A group of ranks: the object everything else is written against."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from totalreduce.engine.runner import Runner
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.groups import agreement, tensors
from totalreduce.groups.plan import Plan, TensorSpec
from totalreduce.groups.statistics import Statistics
from totalreduce.groups.work import Work
from totalreduce.kernels import supports

__all__ = ["Group"]

#: So many threads of one rank may wait in barriers at the same time.
_BARRIER_NAMES = 64


class _WaitClock(Observer):
    """Adds up how long callers were blocked."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def waited(self, name: str, iteration: int, begin: float, end: float) -> None:  # noqa: ARG002
        self.waited_s += end - begin


@final
class Group:
    """All ranks of a job, joined by one engine. Made by ``totalreduce.init``; usable from any thread.

    Operations may be submitted in any order on different ranks. Names are unique among operations in flight.
    Several groups can live in one process.

    Attributes:
        rank: This process's index, from 0.
        world_size: Number of ranks.
        name: The group's name.
    """

    def __init__(self, runner: Runner, name: str) -> None:
        """Wrap a running engine."""
        self._runner = runner
        self._engine = runner.engine
        self.rank, self.world_size, self.name = self._engine.rank, self._engine.world_size, name
        self._waits = _WaitClock()
        self._engine.observers.append(self._waits)
        self._quiesce: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._barriers = itertools.count()
        self._late_barrier: Work | None = None
        self._closed = False
        # The interpreter's exit closes the group, so that a finished rank is not taken for a dead one.
        self._finalizer = weakref.finalize(self, _close, runner, self._at_close)

    def __repr__(self) -> str:
        return f"<Group {self.name!r} rank {self.rank} of {self.world_size}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._quiesce.clear()  # deferred work of a failed step must not hide the failure
        self.close()

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place; returns at once.

        All ranks end with bit-identical results, run after run. float16 and bfloat16 are accumulated in float32.

        Args:
            tensor: Any shape, from 0 elements; CPU, strided; need not be contiguous.
            name: Equal on all ranks. ``None``: the n-th unnamed operation meets the n-th unnamed one elsewhere.
            op: How to reduce.
            priority: Smaller is more urgent; equal ones leave in the order of submission.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ValueError: The name is in flight already.
            UnsupportedError: The tensor's device, layout or dtype, or the reduction for this dtype.
            PeerLost: A rank is gone.
            GroupClosed: This rank closed the group.
        """
        shown = name or "unnamed"
        dtype = tensors.dtype_of(tensor, shown)
        op = ReduceOp(op)
        if op is ReduceOp.NONE or not supports(dtype, op):
            raise ConfigurationError(f"tensor {shown!r}: {op.name} of {dtype.name.lower()} is not defined")
        signature = Signature(OpKind.ALLREDUCE, dtype, op, 0, tuple(tensor.shape))
        return self._submit(tensor, signature, name, priority, timeout_s, writes=True)

    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Work:
        """Copy the root's tensor to all ranks, in place; blocks unless ``async_op``.

        Raises:
            ConfigurationError: ``root`` is no rank of the group.
            DeadlineExceededError: Not finished in time (when blocking).
            ValueError: As for ``allreduce``, like the other errors.
        """
        if not 0 <= root < self.world_size:
            raise ConfigurationError(f"root {root} is no rank of a group of {self.world_size}")
        dtype = tensors.dtype_of(tensor, name or "unnamed")
        signature = Signature(OpKind.BROADCAST, dtype, ReduceOp.NONE, root, tuple(tensor.shape))
        work = self._submit(tensor, signature, name, priority, timeout_s, writes=self.rank != root)
        if not async_op:
            work.wait()
        return work

    def barrier(self, *, timeout_s: float | None = None) -> Work:
        """Return when every rank has called it; deferred work (see ``on_quiesce``) is flushed first.

        Called again after a ``DeadlineExceededError`` it goes on waiting for the same barrier.

        Raises:
            DeadlineExceededError: Some rank did not come in time; the message names it.
            PeerLost: A rank is gone.
        """
        self._flush()
        # One that ran out of time is still pending: coming back means waiting for it, not for one more.
        work, self._late_barrier = self._late_barrier, None
        if work is None:
            signature = Signature(OpKind.BARRIER, DType.UINT8, ReduceOp.NONE, 0, (0,))
            nothing = torch.empty(0, dtype=torch.uint8)
            # A few names in turn: a name is remembered for ever, and a job has as many barriers as it likes.
            name = f"barrier#{next(self._barriers) % _BARRIER_NAMES}"
            work = self._submit(nothing, signature, name, -1, timeout_s, writes=False)
        try:
            work.wait(timeout_s)
        except DeadlineExceededError:
            self._late_barrier = work
            raise
        return work

    # -------------------------------------------------------------------------------------------------------- plans

    def plan(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        op: ReduceOp = ReduceOp.AVG,
        on_missing: Literal["zero", "error"] = "zero",
        settings: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Agree on a list of tensors that every step will reduce. Collective.

        In a step each rank may submit them in its own order, and leave some out (see ``Plan``).

        Raises:
            PlanMismatchError: On every rank, with the differences, if the ranks disagree.
        """
        return Plan(self, name, specs, op=op, on_missing=on_missing, settings=settings)

    def agree(self, name: str, document: Mapping[str, Any]) -> None:
        """Return if all ranks pass an equal JSON document. Collective.

        Raises:
            PlanMismatchError: On every rank, with readable differences.
        """
        agreement.agree(self, name, document)

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def observers(self) -> list[Observer]:
        """Who is told what the engine does; append to watch."""
        return self._engine.observers

    def statistics(self) -> Statistics:
        """Numbers since the group was made."""
        transport = self._runner.transport.counters
        with self._runner.locked():
            counters, floating = self._engine.counters, self._engine.floating
            active_s = self._engine.active_s(time.monotonic())
            waited_s = self._waits.waited_s
            return Statistics(
                operations=counters.operations,
                payload_bytes=counters.payload_bytes,
                messages_sent=counters.messages_sent,
                messages_received=counters.messages_received,
                bytes_sent=counters.bytes_sent,
                bytes_received=counters.bytes_received,
                floating_messages=counters.floating_messages,
                floating_bytes=floating.total_bytes,
                floating_bytes_peak=floating.peak_bytes,
                held_messages=counters.held_messages,
                dropped_messages=counters.dropped_messages,
                dropped_bytes=counters.dropped_bytes,
                promotions=counters.promotions,
                mismatches=counters.mismatches,
                stalls=counters.stalls,
                connections=transport.connections,
                refused_connections=transport.refused_connections,
                waited_s=waited_s,
                active_s=active_s,
                hidden_share=max(0.0, 1.0 - waited_s / active_s) if active_s > 0 else 1.0,
                reduce_s=counters.reduce_s,
            )

    # -------------------------------------------------------------------------------------------------------- ending

    def on_quiesce(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called before a barrier and before the end; returns a function that undoes this."""
        self._quiesce.append(callback)

        def remove() -> None:
            if callback in self._quiesce:
                self._quiesce.remove(callback)

        return remove

    def at_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the group has ended, at the interpreter's exit at the latest."""
        self._at_close.append(callback)

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush deferred work, tell the peers, end threads and connections; harmless when called twice.

        Pending operations fail with ``GroupClosed``. Not collective: the others notice when they need this rank.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._engine.lost is None:
                self._flush()
        finally:
            self._finalizer.detach()
            _close(self._runner, self._at_close, timeout_s)

    def _flush(self) -> None:
        for callback in list(self._quiesce):
            callback()

    def _submit(
        self,
        tensor: torch.Tensor,
        signature: Signature,
        name: str | None,
        priority: int,
        timeout_s: float | None,
        *,
        writes: bool,
    ) -> Work:
        if not -(2**31) <= priority < 2**31:
            raise ConfigurationError(f"priority {priority} does not fit into 32 bits")
        if timeout_s is not None and timeout_s <= 0:
            raise ConfigurationError(f"timeout_s must be positive, not {timeout_s}")
        shown = name if name is not None else "unnamed"
        view, finalise = tensors.as_bytes(tensor, shown, writes=writes)
        handle = self._runner.submit(name, signature, view, priority=priority, finalise=finalise)
        assert handle.operation is not None
        patience = self._engine.config.timeout_s if timeout_s is None else timeout_s
        return Work(self._runner, handle, tensor, handle.operation.name, patience)


def _close(runner: Runner, at_close: list[Callable[[], None]], timeout_s: float = 2.0) -> None:
    runner.close(timeout_s)
    for callback in at_close:
        callback()
    at_close.clear()
