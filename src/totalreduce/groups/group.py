"""A group of ranks: the object everything else is written against."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, GroupClosed
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.types import Algorithm, OpKind, ReduceOp
from totalreduce.groups import agreement, objects, requests
from totalreduce.groups.engine_collectives import EngineCollectives, OrderFree
from totalreduce.groups.plan import Plan, TensorSpec
from totalreduce.groups.requests import Blocks, Request
from totalreduce.groups.statistics import Statistics
from totalreduce.native.collectives import NativeCollectives
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.planned import PlannedReductions
from totalreduce.runner.handle import Handle
from totalreduce.runner.runner import Runner
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import MemoryInFlight, Operands
from totalreduce.tensors.work import Work

__all__ = ["Group"]

_log = logging.getLogger(__name__)

#: So many threads of one rank may wait in barriers at the same time.
_BARRIER_NAMES = 64
#: Scopes of names that the library gives. Scopes of subgroups begin with a quote or a digit, users' names with "n:".
_BARRIERS, _MESSAGES = "barrier/", "message/"


@final
@never_compiled
class Group:
    """All ranks of a job, joined by one engine. Made by ``totalreduce.init``; usable from any thread.

    Operations may be submitted in any order on different ranks. Names are unique among operations in flight.
    Several groups can live in one process.

    Attributes:
        rank: This process's index in the group, from 0.
        world_size: Number of ranks of the group.
        ranks: Their numbers in the whole job; errors such as ``PeerLost`` speak of those.
        name: The group's name.
    """

    def __init__(
        self,
        runner: Runner,
        name: str,
        *,
        parent: Group | None = None,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
    ) -> None:
        """Wrap a running engine; the last three are for ``subgroup``."""
        self._runner = runner
        self._engine = runner.engine
        self.ranks = self._engine.members.everybody if ranks is None else ranks
        self.rank, self.world_size, self.name = self.ranks.index(self._engine.rank), len(self.ranks), name
        self._parent, self._scope = parent, scope
        self._memory: MemoryInFlight = MemoryInFlight() if parent is None else parent._memory
        self._waits_for_memory: bool = parent is not None and parent._waits_for_memory
        self._coordinator: Coordinator | None = None
        self._inner: dict[str, Group] = {}
        self._subgroups: Counter[tuple[int, ...]] = Counter()
        self._coordinators = 0
        self._quiesce: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._barriers = itertools.count()
        self._late_barrier: Work | None = None
        self._closed = False
        if parent is None:
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
        self.close(reason=_reason(error))

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place; returns at once.

        All ranks end with bit-identical results; so does another run that chooses the same schedule. float16 and
        bfloat16 are accumulated in float32, unless ``EngineConfig.half_accumulation`` says otherwise.

        Args:
            tensor: Any shape, from 0 elements; CPU, strided; need not be contiguous.
            name: Equal on all ranks. ``None``: the n-th unnamed operation meets the n-th unnamed one elsewhere.
            op: How to reduce.
            schedule: ``auto``, ``ring``, ``star``, ``tree``, ``halving_doubling``, ``direct`` or ``hierarchical``.
            priority: Smaller is more urgent; equal ones leave in the order of submission. 32 bits, signed. It has no
                effect yet where a native library carries operations out (see ``coordinator``): they leave in the
                order on which the ranks agree.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ValueError: The name is in flight already, or ``priority`` is no such number.
            UnsupportedError: The tensor's device, layout or dtype, or the reduction for this dtype.
            PeerLost: A rank is gone.
            GroupClosed: This rank closed the group.
        """
        if self._coordinator is not None:
            _check_ignored(schedule, priority)
            return self._coordinator.allreduce(tensor, name=name, op=op, timeout_s=timeout_s)
        request = requests.reduction(
            OpKind.ALLREDUCE, tensor, _shown(name), op=op, root=0, algorithm=_algorithm(schedule), writes=True
        )
        return self.submit(request, name, priority, timeout_s)

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks into the root's, in place; the others' tensors stay as they are.

        Args and Raises as for ``allreduce``; ``schedule`` is ``auto``, ``chain`` or ``tree``.
        """
        request = requests.reduction(
            OpKind.REDUCE,
            tensor,
            _shown(name),
            op=op,
            root=self._root(root),
            algorithm=_algorithm(schedule),
            writes=self.rank == root,
        )
        return self.submit(request, name, priority, timeout_s)

    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Work:
        """Copy the root's tensor to all ranks, in place; blocks unless ``async_op``.

        ``schedule`` is ``auto``, ``chain`` or ``tree``.

        Raises:
            ConfigurationError: ``root`` is no rank of the group.
            DeadlineExceededError: Not finished in time (when blocking).
            ValueError: As for ``allreduce``, like the other errors.
        """
        root = self._root(root)
        if self._coordinator is not None:
            _check_ignored(schedule, priority)
            work = self._coordinator.broadcast(tensor, root=root, name=name, timeout_s=timeout_s)
        else:
            request = requests.broadcast(
                tensor, _shown(name), root=root, algorithm=_algorithm(schedule), writes=self.rank != root
            )
            work = self.submit(request, name, priority, timeout_s)
        if not async_op:
            work.wait()
        return work

    def allgather(
        self,
        outputs: Blocks,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor on every rank; returns at once.

        Args:
            outputs: One tensor per rank, of any sizes (allgatherv), or one contiguous tensor for equal blocks.
            tensor: This rank's block, as large as its place in ``outputs``.
            name: As for ``allreduce``, like the other arguments.
            schedule: ``auto``, ``ring`` or ``direct``.
            priority: Smaller is more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ConfigurationError: Sizes, dtypes or the number of tensors do not fit together here.
            MismatchError: By ``wait``: ranks disagree about the sizes.
        """
        if self._coordinator is not None:
            _check_ignored(schedule, priority)
            places = requests.listed(outputs, self.world_size, _shown(name), "outputs")
            return self._coordinator.allgather(
                tensor.reshape(-1), outputs=places, copied=[tensor], name=name, timeout_s=timeout_s
            )
        request = requests.allgather(
            outputs, tensor, _shown(name), rank=self.rank, size=self.world_size, algorithm=_algorithm(schedule)
        )
        return self.submit(request, name, priority, timeout_s)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        inputs: Blocks,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        schedule: str = "auto",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce the r-th block of all ranks into rank r's tensor; returns at once.

        The inputs are only read. The tensor may be this rank's block of them, which takes the result then.

        Args:
            tensor: The result, as large as this rank's place in ``inputs``.
            inputs: One tensor per rank, of sizes equal on all ranks, or one contiguous tensor for equal blocks.
            name: As for ``allreduce``, like the other arguments and the errors.
            op: How to reduce.
            schedule: ``auto``, ``ring`` or ``direct``.
            priority: Smaller is more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.
        """
        if self._coordinator is not None:
            _check_ignored(schedule, priority)
            parts = requests.listed(inputs, self.world_size, _shown(name), "inputs")
            if any(part.numel() != tensor.numel() for part in parts):
                raise ConfigurationError(f"{_shown(name)!r}: the native library takes equal blocks only")
            whole = torch.stack([part.reshape(-1) for part in parts])
            return self._coordinator.reduce_scatter(
                whole, op=op, outputs=[tensor], copied=parts, name=name, timeout_s=timeout_s
            )
        request = requests.reduce_scatter(
            tensor,
            inputs,
            _shown(name),
            op=op,
            rank=self.rank,
            size=self.world_size,
            algorithm=_algorithm(schedule),
        )
        return self.submit(request, name, priority, timeout_s)

    def gather(
        self,
        outputs: Blocks | None,
        tensor: torch.Tensor,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor on the root, in ``outputs`` (``None`` elsewhere); sizes may differ (gatherv)."""
        request = requests.gather(
            outputs, tensor, _shown(name), rank=self.rank, size=self.world_size, root=self._root(root)
        )
        return self.submit(request, name, priority, timeout_s)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Blocks | None,
        *,
        root: int = 0,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Give every rank its block of the root's ``inputs`` (``None`` elsewhere); sizes may differ (scatterv)."""
        request = requests.scatter(
            tensor, inputs, _shown(name), rank=self.rank, size=self.world_size, root=self._root(root)
        )
        return self.submit(request, name, priority, timeout_s)

    def alltoall(
        self,
        outputs: Blocks,
        inputs: Blocks,
        *,
        name: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Give block r of ``inputs`` to rank r; ``outputs[r]`` is what rank r had for this one (alltoallv).

        ``outputs[i]`` on rank j is as large as ``inputs[j]`` on rank i; a difference is a ``MismatchError`` on both.
        """
        if self._coordinator is not None:
            _check_ignored("auto", priority)
            places = requests.listed(outputs, self.world_size, _shown(name), "outputs")
            parts = requests.listed(inputs, self.world_size, _shown(name), "inputs")
            whole, splits = torch.cat([part.reshape(-1) for part in parts]), [part.numel() for part in parts]
            return self._coordinator.alltoall(
                whole, splits, outputs=places, copied=parts, name=name, timeout_s=timeout_s
            )
        request = requests.alltoall(outputs, inputs, _shown(name), rank=self.rank, size=self.world_size)
        return self.submit(request, name, priority, timeout_s)

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
            # A few names in turn: a name is remembered for ever, and a job has as many barriers as it likes.
            name = f"barrier#{next(self._barriers) % _BARRIER_NAMES}"
            work = self.submit(requests.barrier(), name, -1, timeout_s, scope=_BARRIERS)
        try:
            work.wait(timeout_s)
        except DeadlineExceededError:
            self._late_barrier = work
            raise
        return work

    # ------------------------------------------------------------------------------------------------------ messages

    def send(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, priority: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Send a tensor to a rank; returns at once. The n-th message with a tag meets the n-th receive with it.

        The work is done when the tensor's memory may be reused, which says nothing about the receiver.

        Raises:
            ConfigurationError: ``dst`` is no other rank of the group.
        """
        dst = self._peer(dst)
        name = _message_name(self.rank, dst, _tag(tag))
        request = requests.message(tensor, name, writes=False)
        ranks = (self.ranks[self.rank], self.ranks[dst])
        return self.submit(request, name, priority, timeout_s, ranks=ranks, scope=_MESSAGES, repeats=True)

    def recv(
        self,
        tensor: torch.Tensor,
        *,
        src: int | None,
        tag: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Work:
        """Receive a tensor from a rank, or with ``src=None`` from whoever sends first; returns at once.

        ``Work.source`` is the sender's rank when the work is done. Dtype and number of elements must be the sender's.

        Raises:
            ConfigurationError: ``src`` is no other rank of the group.
        """
        if src is not None:
            src = self._peer(src)
            name = _message_name(src, self.rank, _tag(tag))
            request = requests.message(tensor, name, writes=True)
            ranks = (self.ranks[src], self.ranks[self.rank])
            return self.submit(request, name, priority, timeout_s, ranks=ranks, scope=_MESSAGES, repeats=True)
        self._check_open()
        tag, patience = _tag(tag), self._patience(timeout_s)
        request = requests.message(tensor, "a message from any rank", writes=True)
        candidates = {
            rank: _message_name(place, self.rank, tag) for place, rank in enumerate(self.ranks) if place != self.rank
        }
        if not candidates:
            raise ConfigurationError("there is no other rank in the group that could send")
        buffer = request.buffers[0]
        assert buffer is not None
        priority = checks.priority(priority)

        def begin(finish: Callable[[], None] | None, release: Callable[[], None] | None) -> Handle:
            return self._runner.receive_any(
                candidates,
                request.signature,
                buffer,
                scope=self._scope + _MESSAGES,
                priority=priority,
                finish=finish,
                release=release,
            )

        handle = self._begin(request, patience, begin)
        return Work(self._runner, handle, request.results, "a message from any rank", patience, ranks=self.ranks)

    # ------------------------------------------------------------------------------------------------------- objects

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """The root's value on every rank. What may be sent is in ``docs/collectives.md``; nothing is ever pickled.

        Raises:
            ConfigurationError: The value cannot be sent; on every rank. So do the other object collectives, on every
                rank that would get the value.
        """
        return objects.broadcast_object(self.control, value, root=self._root(root))

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        return objects.allgather_object(self.control, value)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Every rank's value, by rank, on the root; ``None`` elsewhere."""
        return objects.gather_object(self.control, value, root=self._root(root))

    def scatter_object(self, values: Sequence[Any] | None, *, root: int = 0) -> Any:
        """This rank's one of the root's ``values`` (one per rank; ``None`` elsewhere)."""
        return objects.scatter_object(self.control, values, root=self._root(root))

    # ----------------------------------------------------------------------------------------------------- subgroups

    def subgroup(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """A group of some ranks of this one, over the same engine, connections and threads. Not collective.

        Every member calls it, with the same ranks in the same order. Ranks of the subgroup count from 0, in the order
        given. The loss of a rank ends all groups of a job.

        Args:
            ranks: Ranks of this group, this one among them.
            name: Tells subgroups of the same ranks apart; by default they are told apart by the order of the calls.

        Raises:
            ConfigurationError: Not ranks of this group, or this rank is not among them.
        """
        members = checks.ranks_in(ranks, self.world_size)
        if name is not None:
            checks.operation_name(name)
        if self.rank not in members:
            raise ConfigurationError(f"rank {self.rank} is not among {list(members)}; only members make a subgroup")
        shown, quoted = f"{self.name}/{name}", repr(name)
        if name is None:
            quoted = str(self._subgroups[members])  # without quotes, so that nobody's own name is the same
            shown = f"{self.name}/{quoted}"
            self._subgroups[members] += 1
        scope = f"{self._scope}{quoted}({','.join(map(str, members))})/"
        group = Group(self._runner, shown, parent=self, ranks=tuple(self.ranks[rank] for rank in members), scope=scope)
        if self._coordinator is not None:
            natives = self._coordinator.natives.split(members, self._patience(None))
            group.use(natives, self._coordinator.config)
        return group

    def _within(self, purpose: str) -> Group:
        """The same ranks for what the library itself does: operations whose names never meet those of users."""
        group = self._inner.get(purpose)
        if group is None:
            scope = f"{self._scope}{purpose}/"
            group = Group(self._runner, f"{self.name}/{purpose}", parent=self, ranks=self.ranks, scope=scope)
            self._inner[purpose] = group
        return group

    @property
    def control(self) -> Group:
        """The same ranks by messages alone, for what must not depend on a library that carries operations out.

        The library's own operations are done through it; their names never meet those of users.
        """
        return self._within("control")

    def claim_apart(self) -> None:
        """Have operations of this group claim memory apart from those of other groups, like subgroups made afterwards.

        For a group that carries out operations whose memory was claimed already, by whoever submitted them.
        """
        self._memory = MemoryInFlight()

    def claim(self, operands: Operands, patience_s: float) -> Callable[[], None]:
        """Claim the memory of an operation; returns what releases it.

        Args:
            operands: The operation's.
            patience_s: How long to wait for operations that use the same memory, where the group waits for them (see
                ``keep_order``).

        Raises:
            ConfigurationError: An operation in flight uses the same memory (see ``MemoryInFlight.claim``).
            DeadlineExceededError: The group waits for such operations, and one has not ended in time.
        """
        memory = self._memory
        memory.claim(operands, wait_s=patience_s if self._waits_for_memory else None)
        return lambda: memory.release(operands)

    def keep_order(self) -> None:
        """Have operations wait for those in flight that use the same memory, instead of raising an error.

        It is what torch.distributed promises. A submission may block then, so it must not be made in a callback of
        ``Work.on_done``. Subgroups that are made afterwards do the same.
        """
        self._waits_for_memory = True

    # ---------------------------------------------------------------------------------------------- native libraries

    @property
    def coordinator(self) -> Coordinator | None:
        """Who has a native library carry the collectives out, if that is so."""
        return self._coordinator

    def use(self, natives: NativeCollectives, config: CoordinationConfig) -> Coordinator:
        """Have a native library carry out what it can, in an order on which the ranks agree. Collective.

        Raises:
            PlanMismatchError: The ranks' settings differ; on every rank.
        """
        self._coordinator = self.coordinate(natives, config)
        return self._coordinator

    def coordinate(
        self, natives: NativeCollectives | None = None, config: CoordinationConfig | None = None
    ) -> Coordinator:
        """A coordinator of this group, beside its own collectives: groups of operations, joining ranks. Collective.

        Args:
            natives: Who carries operations out; by default the engine.
            config: Its settings; equal on all ranks.

        Raises:
            PlanMismatchError: The ranks' settings differ; on every rank.
        """
        self._coordinators += 1
        if natives is None:  # nobody else's unnamed operations may meet its own
            name = f"coordinated {self._coordinators}"
            natives = EngineCollectives(self.control.subgroup(range(self.world_size), name=name))
        return Coordinator(
            self,
            self._runner,
            natives,
            config or CoordinationConfig(),
            scope=f"{self._scope}#{self._coordinators}",
            patience=self._patience,
        )

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        """Reductions that come again in every round, without any metadata. Collective where a library needs one order.

        Args:
            names: Of the operations, in the order in which they are expected; equal on all ranks.
        """
        if self._coordinator is None:
            return OrderFree(self._within("planned"), names)
        return self._coordinator.planned(names)

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
        agreement.agree(self.control, name, document)

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def observers(self) -> list[Observer]:
        """Who is told what the engine does; append to watch."""
        return self._engine.observers

    @property
    def timeout_s(self) -> float:
        """Patience, in seconds, of waits that name none."""
        return self._engine.config.timeout_s

    @property
    def shares_memory(self) -> bool:
        """Whether ``empty`` makes tensors that other ranks read where they lie."""
        return not self._closed and self._runner.home.is_here and self._runner.transport.allocate(1) is not None

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor that the other ranks of this host read where it lies, so that nothing is staged in between.

        It is a CPU tensor like any other, and its elements are what the memory last held. An operation on it is done
        when the others have read what they need of it. A child process shares the memory, as after
        ``torch.Tensor.share_memory_``. Where ranks share no memory, or there is not enough, it is in usual memory.

        Raises:
            GroupClosed: This rank closed the group.
        """
        if self._closed:
            raise GroupClosed(f"group {self.name!r} is closed")
        self._runner.home.check()
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = self._runner.transport.allocate(num_bytes) if num_bytes else None
        if memory is None:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def statistics(self) -> Statistics:
        """Numbers since the group was made."""
        transport = self._runner.transport.counters
        with self._runner.locked():
            counters, floating = self._engine.counters, self._engine.reception.floating
            active_s = self._engine.table.active_s(time.monotonic())
            waited_s = counters.waited_s
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

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(
        self,
        request: Request,
        name: str | None,
        priority: int,
        timeout_s: float | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        repeats: bool = False,
    ) -> Work:
        """Submit what ``groups.requests`` has made: for callers that have bytes and no tensors. Past a coordinator.

        Args:
            request: What to do.
            name: As for ``allreduce``, like the other arguments and the errors.
            priority: Smaller is more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.
            ranks: Those of the whole group that take part, if not all of this group do.
            scope: Sets names of the library apart from those of users.
            repeats: The name may be in flight several times.
        """
        self._check_open()
        patience, priority = self._patience(timeout_s), checks.priority(priority)

        def begin(finish: Callable[[], None] | None, release: Callable[[], None] | None) -> Handle:
            return self._runner.submit(
                name,
                request.signature,
                request.buffers,
                ranks=ranks or self.ranks,
                scope=self._scope + scope,
                repeats=repeats,
                priority=priority,
                finish=finish,
                release=release,
            )

        handle = self._begin(request, patience, begin)
        assert handle.operation is not None
        return Work(self._runner, handle, request.results, handle.operation.name, patience, ranks=self.ranks)

    def _begin(
        self,
        request: Request,
        patience_s: float,
        begin: Callable[[Callable[[], None] | None, Callable[[], None] | None], Handle],
    ) -> Handle:
        """Submit an operation when its memory is free, and have the memory released when it has ended."""
        operands = request.operands
        if operands is None:
            return begin(None, None)
        release = self.claim(operands, patience_s)
        try:
            operands.prepare()
            return begin(operands.finish, release)
        except BaseException:
            release()
            raise

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

    def close(self, timeout_s: float = 5.0, *, reason: str = "") -> None:
        """Flush deferred work, tell the peers, end threads and connections; harmless when called twice.

        Pending operations fail with ``GroupClosed``; the others' error says the ``reason``, if there is one. Not
        collective: the others notice when they need this rank. A subgroup only stops taking operations: threads and
        connections are the whole group's. In a forked child this does nothing: the group is the parent's.

        Every callback of ``on_quiesce`` and ``at_close`` is called, whether or not an earlier one raised. The first
        exception is raised when all of this is done; further ones are logged.
        """
        if self._closed or not self._runner.home.is_here:
            return
        timeout_s = checks.seconds("timeout_s", timeout_s, or_zero=True)
        self._closed = True
        steps = list(self._quiesce) if self._engine.members.lost is None else []
        coordinator = self._coordinator
        if coordinator is not None:
            steps.append(lambda: coordinator.close(timeout_s, reason=reason))
        if self._parent is None:
            self._finalizer.detach()
            steps.append(lambda: _close(self._runner, self._at_close, timeout_s, reason))
        else:
            steps += [*(inner.close for inner in self._inner.values()), *self._at_close]
        _call_all(steps)

    def _flush(self) -> None:
        for callback in list(self._quiesce):
            callback()

    def _check_open(self) -> None:
        self._runner.home.check()
        if self._closed and self._parent is not None:  # of the whole group the engine says it
            raise GroupClosed(f"rank {self.rank} has closed the subgroup {self.name!r}; make a new one with subgroup()")

    def _patience(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    def _root(self, root: int) -> int:
        return checks.rank_in("root", root, self.world_size)

    def _peer(self, peer: int) -> int:
        peer = checks.whole_number("the other rank", peer)
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ConfigurationError(f"{peer} is not another rank than {self.rank} of a group of {self.world_size}")
        return peer


def _shown(name: str | None) -> str:
    return "unnamed" if name is None else checks.operation_name(name)


def _message_name(src: int, dst: int, tag: int) -> str:
    return f"message {src} to {dst}, tag {tag}"


def _tag(tag: int) -> int:
    return checks.whole_number("tag", tag)


def _check_ignored(schedule: str, priority: int) -> None:
    """Check the arguments that a native library has no use for."""
    checks.priority(priority)
    if schedule != "auto":
        raise ConfigurationError(f"schedule {schedule!r}: a native library chooses its schedules by itself")


def _algorithm(schedule: str) -> Algorithm:
    try:
        return Algorithm[schedule.upper()]
    except (KeyError, AttributeError) as cause:
        known = ", ".join(algorithm.name.lower() for algorithm in Algorithm)
        raise ConfigurationError(f"schedule {schedule!r} is not known; there are {known}") from cause


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _close(
    runner: Runner, at_close: list[Callable[[], None]], timeout_s: float = 5.0, reason: str | None = None
) -> None:
    if not runner.home.is_here:  # the interpreter of a forked child ends: the group and its callbacks are the parent's
        return
    if reason is None and not hasattr(sys, "ps1"):  # the interpreter ends: of an exception that nobody caught?
        reason = _reason(getattr(sys, "last_value", None))
    final_reason = reason or ""
    callbacks = list(at_close)
    at_close.clear()
    _call_all([lambda: runner.close(timeout_s, final_reason), *callbacks])


def _call_all(steps: Sequence[Callable[[], None]]) -> None:
    """Call all of them in order; raise the first exception afterwards, and log the others."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # also Ctrl-C: what comes after frees threads, memory and files
            if first is None:
                first = error
            else:
                _log.error("closing the group: one more callback failed", exc_info=error)
    if first is not None:
        raise first
