"""The agreement of a group's ranks on one order of native operations, and this rank's operations in flight.

``coordination.negotiator`` is the protocol. ``Agreement`` sends the messages of the protocol through a channel of the
engine, and passes operations that are ready on all ranks to the ``Executor``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.negotiator import Negotiator
from totalreduce.foundation.errors import ConfigurationError, GroupClosed, PeerLost, ProtocolError, TotalReduceError
from totalreduce.foundation.types import operation_id
from totalreduce.native.executor import Executor
from totalreduce.native.failures import GRACE_S
from totalreduce.native.operation import NativeOperation, program_line
from totalreduce.native.packing import Batch, Packer
from totalreduce.runner.handle import Handle
from totalreduce.runner.runner import Runner
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import Operands
from totalreduce.tensors.work import Work

__all__ = ["Agreement", "Members"]

#: How long a rank leaves the cores to others when the ranks have agreed, where ranks share cores. Measured with 4 ranks
#: on 2 cores and 161 tensors: all ranks knew of the agreement after 1.1 ms, and after 1.8 with ``sched_yield``, after
#: which Linux mostly went on with the same thread. Steps took the same time.
_GIVE_WAY_S = 50e-6


class Members(Protocol):
    """The ranks of a group, and the resources that their operations share (see ``groups.operations.Operations``)."""

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    name: str
    runner: Runner

    def claim(self, operands: Operands, patience_s: float, beside: Sequence[Operands]) -> None:
        """Claim the memory of an operation until ``operands.end``."""

    def patience(self, timeout_s: float | None) -> float:
        """Return the time-out in force, in seconds."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor on the CPU, if possible in memory that the other ranks of the host can read."""

    def barrier(self, timeout_s: float | None) -> Work:
        """Return when every rank has called it; the engine carries it out."""


@final
@never_compiled
class Agreement:
    """The agreement of one group on this rank. Making one is collective; any thread may call it.

    It implements ``engine.channels.Channel``, whose methods are called under the engine's lock.

    Args:
        members: The group.
        config: Settings, equal on all ranks.
        packer: Starts operations in the library.
        report: A function that is called with each batch that has ended.
        joined: A function that is called once when all ranks have joined, before ``join`` returns.
        scope: A name that no other agreement of the job has.
    """

    def __init__(
        self,
        members: Members,
        config: CoordinationConfig,
        packer: Packer,
        report: Callable[[Batch], None],
        joined: Callable[[], None],
        scope: str,
    ) -> None:
        self._members, self._runner = members, members.runner
        #: The protocol. It is changed under the engine's lock only. Without the lock, threads read ``ended`` and
        #: ``membership.joined``, whose values are never changed but replaced, and copy ``membership.departed``.
        self.negotiator = Negotiator(members.rank, members.world_size, config, ranks=members.ranks)
        self.number = operation_id(f"coordination of {scope!r}")  #: The number of the channel.
        self._indices = {rank: index for index, rank in enumerate(members.ranks)}
        #: By name: all operations of this rank in flight, and those among them on which the ranks have not agreed.
        self._in_flight: dict[str, NativeOperation] = {}
        self._not_agreed: dict[str, NativeOperation] = {}
        self._iterations: dict[str, int] = {}
        self._joining: Handle | None = None  #: The join that is under way; it ends when all ranks have joined.
        self._join: Handle | None = None  #: The same, until a call of ``join`` has returned.
        self._last_joined: int | None = None
        self._report_joined = joined
        self._has_ended = False
        self._closed: GroupClosed | None = None  #: Set when this rank begins to close the agreement.
        self._executor = Executor(
            members.rank,
            packer,
            fusion_bytes=config.fusion_bytes,
            complete=self._complete,
            report=report,
            lost=lambda: self.negotiator.ended,
            failed=self._break_off,
        )

        def begin(now: float) -> bool:
            self._runner.engine.channels.open(self.number, self, now)
            return True

        try:
            self._runner.act(begin)
        except BaseException:
            self._executor.end()
            raise
        self._runner.join_at_close(self._executor.thread)

    # ---------------------------------------------------------------------------------------------------- operations

    def submit(self, operations: Sequence[NativeOperation], patience_s: float) -> None:
        """Submit operations, all or none of them, and claim their memory.

        Raises:
            ConfigurationError: An operation in flight has the same name or uses the same memory; or too many operations
                of this rank wait for the other ranks.
            TotalReduceError: The reason for which the agreement has ended.
        """
        where, size = program_line(), sum(operation.request.num_bytes for operation in operations)

        def submit(now: float) -> bool:
            self.check_alive()
            for operation in operations:
                name = operation.request.name
                if name in self._in_flight:
                    raise ConfigurationError(
                        f"an operation called {name!r} is in flight on this rank: wait for it, or use another name"
                    )
            negotiator = self.negotiator
            news = negotiator.timer.has_news
            requests = [operation.request for operation in operations]
            has_run = negotiator.submit(requests, now, where=where, num_bytes=size)
            for operation in operations:
                name = operation.request.name
                self._in_flight[name] = self._not_agreed[name] = operation
                operation.submitted_at, operation.iteration = now, self._iterations.get(name, 0)
                if operation.request.cached:
                    self._iterations[name] = operation.iteration + 1
            return (has_run and self._take_output(now)) or not news

        claimed: list[Operands] = []
        try:
            for operation in operations:
                self._members.claim(operation.operands, patience_s, claimed)
                claimed.append(operation.operands)
                operation.handle = Handle(operation.operands.end)
            for operation in operations:
                operation.begin()
            self._runner.act(submit)
        except BaseException:
            for operands in claimed:
                operands.end(well=False)
            raise

    def join(self, patience_s: float) -> int:
        """Wait for this rank's operations, then for all ranks to join; return the rank that joined last.

        Raises:
            DeadlineExceededError: Some rank has not joined after ``patience_s`` seconds.
        """
        for operation in list(self._in_flight.values()):
            self.wait(operation.handle, patience_s)

        handle = Handle()

        def begin(now: float) -> bool:
            nonlocal handle
            if self._join is None:  # else an earlier call ran out of time
                self.check_alive()
                self._join = self._joining = handle
                self.negotiator.join(now)
            handle = self._join
            return self._take_output(now)

        self._runner.act(begin)
        self.wait(handle, patience_s)
        with self._runner.locked():
            if self._join is handle:
                self._join = None
        if handle.error is not None:
            raise handle.error.with_traceback(None)
        assert self._last_joined is not None, "the wait ends when a rank has joined last"
        return self._last_joined

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait until an operation has ended (see ``Waiter``)."""
        if handle.done:
            return

        def hurry(now: float) -> bool:
            self.negotiator.hurry(now)
            self._take_output(now)
            return False  # wakes no thread: ``Runner.wait`` below makes sure that the messages leave

        self._runner.act(hurry)
        self._runner.wait(handle, timeout_s, explain=lambda now: self._explain(handle, now))

    def close(self, timeout_s: float, reason: str, release: Callable[[], None]) -> None:
        """Carry out what the ranks have agreed on, and leave the agreement (see ``Coordinator.close``).

        ``release`` is called when this rank does not use the library any more.
        """
        deadline = time.monotonic() + timeout_s
        name = f"the group {self._members.name!r}"
        error = self._closed = GroupClosed(f"rank {self._members.rank} has closed {name}")

        def leave(now: float) -> bool:
            said = f"it has closed {name}" + (f" after {reason}" if reason else "")
            self.negotiator.leave(error, said, self._executor.carried_out)
            has_messages = self._take_output(now)
            self._runner.engine.channels.close(self.number)
            return has_messages

        try:
            self._executor.drain(timeout_s)
        finally:  # also after Ctrl-C: without this message, the other ranks would wait for this one
            try:
                with suppress(GroupClosed):  # the engine is closed, and has informed the other ranks and this channel
                    self._runner.act(leave)
            finally:
                self._executor.close(max(0.0, deadline - time.monotonic()), release)

    def check_alive(self) -> None:
        """Raise the error with which the agreement has ended, or ``GroupClosed`` once ``close`` was called here."""
        error = self.negotiator.ended or self._closed
        if error is not None:
            raise error.with_traceback(None)

    def lost(self) -> TotalReduceError | None:
        """Return the reason why reductions of a plan that are pending cannot end; ``None`` if there is none.

        The ranks do not say which of these reductions they have carried out. So a rank that has left the agreement
        counts as lost only ``GRACE_S`` seconds later: what it has carried out has ended on the other ranks by then.
        """
        if self.negotiator.ended is not None:
            return self.negotiator.ended
        late = time.monotonic() - GRACE_S
        for index, departure in list(self.negotiator.membership.departed.items()):
            if departure.at < late:
                return PeerLost(self._members.ranks[index], departure.reason)
        return None

    # -------------------------------------------------------------------------- the channel: under the engine's lock

    def receive(self, peer: int, message: bytes, now: float) -> None:
        if peer not in self._indices:
            raise ProtocolError(f"rank {peer} negotiates in a group that it is no member of")
        self.negotiator.receive(self._indices[peer], message, now)
        self._take_output(now)

    def fail(self, error: TotalReduceError, now: float) -> None:
        self.negotiator.fail(error)
        self._take_output(now)

    def depart(self, peer: int, reason: str, now: float) -> None:
        if peer in self._indices:
            self.negotiator.depart(self._indices[peer], reason, now)
            self._take_output(now)

    def next_due(self) -> float | None:
        return self.negotiator.next_due()

    def tick(self, now: float) -> None:
        self.negotiator.tick(now)
        self._take_output(now)

    def _take_output(self, now: float) -> bool:
        """Send the negotiator's messages and carry out its decisions; return whether there was a message."""
        negotiator, engine, ranks = self.negotiator, self._runner.engine, self._members.ranks
        has_messages = bool(negotiator.outbox)
        for peer, message in negotiator.outbox:
            engine.channels.post(ranks[peer], self.number, message)
        negotiator.outbox.clear()
        for (name, index), observer in itertools.product(negotiator.cycles.table.pop_arrivals(), engine.observers):
            observer.requested(name, now, rank=ranks[index])
        responses = negotiator.cycles.pop_responses()
        if responses:
            self._executor.finish(self._let_others_learn)
            self._executor.put(responses, [self._not_agreed.pop(response.name, None) for response in responses], now)
        for report in negotiator.pop_stalls():
            engine.reports.publish(report, now)
        if self._joining is not None and negotiator.membership.last_joined is not None:
            self._last_joined = negotiator.membership.last_joined
            self._end_join(self._joining, None)
        if negotiator.ended is not None:
            self._end(negotiator.ended)
        return has_messages

    def _let_others_learn(self) -> None:
        """Let the other ranks learn of an agreement before this one packs, which takes four times as long."""
        runner = self._runner
        runner.let_messages_leave()
        if len(os.sched_getaffinity(0)) < runner.transport.ranks_per_host:
            time.sleep(_GIVE_WAY_S)

    def _end(self, error: TotalReduceError) -> None:
        if self._joining is not None:
            self._end_join(self._joining, error)
        if self._not_agreed:
            self._executor.give_up(list(self._not_agreed.values()), error)
            self._not_agreed.clear()
        if not self._has_ended:
            self._has_ended = True
            self._executor.end()

    def _end_join(self, handle: Handle, error: BaseException | None) -> None:
        self._joining = None

        def finish() -> None:
            if error is None:
                self._report_joined()
            self._runner.complete([handle], error)

        self._executor.finish(finish)

    def _explain(self, handle: Handle, now: float) -> tuple[str, str]:
        for name, operation in self._in_flight.items():
            if operation.handle is handle:
                return name, self.negotiator.explain(name, now)
        return "join", "not every rank has joined"

    # --------------------------------------------------------------------------------------- in the executor's thread

    def _complete(self, operations: Sequence[NativeOperation], error: BaseException | None) -> None:
        with self._runner.locked():
            for operation in operations:
                self._in_flight.pop(operation.request.name, None)
        self._runner.complete([operation.handle for operation in operations], error)

    def _break_off(self, failure: BaseException) -> None:
        """End the agreement on all ranks, because of an error in this rank's executor."""
        reason = f"it could not carry an operation out: {failure!r}"
        if isinstance(failure, TotalReduceError):
            error = failure
        else:
            error = TotalReduceError(f"rank {self._members.rank}: the coordinator has ended, because {reason}")
            error.__cause__ = failure

        def abort(now: float) -> bool:
            self.negotiator.abort(error, reason)
            return self._take_output(now)

        with suppress(TotalReduceError):  # the engine has ended, and has informed the other ranks and this channel
            self._runner.act(abort)
