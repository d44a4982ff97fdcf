"""The group of ranks that users and all higher floors call."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation import checks
from totalreduce.foundation.errors import GroupClosed
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups import agreement, objects
from totalreduce.groups.backends import NativeBackend
from totalreduce.groups.collectives import Collectives
from totalreduce.groups.ending import is_amid_call
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.groups.mesh import MeshBackend, MeshCollectives
from totalreduce.groups.operations import Operations
from totalreduce.groups.plan import Plan, TensorSpec
from totalreduce.groups.statistics import Statistics, snapshot
from totalreduce.groups.steps import StepReport, report_every
from totalreduce.native.collectives import NativeCollectives
from totalreduce.native.coordinator import Coordinator
from totalreduce.native.planned import PlannedReductions
from totalreduce.runner.meter import Meter
from totalreduce.runner.runner import Runner
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["Group"]

_log = logging.getLogger(__name__)


@final
@never_compiled
class Group(Collectives):
    """All ranks of a job, or some of them. Made by ``totalreduce.init``; any thread may call it.

    Each rank submits operations in any order. Names are unique among operations in flight. A process may have several
    groups. Attributes as for ``Collectives``.
    """

    def __init__(self, runner: Runner, name: str = "", *, operations: Operations | None = None) -> None:
        """Make the group of all ranks of an engine, or with ``operations`` the group of some ranks."""
        super().__init__(Operations(runner, name) if operations is None else operations)
        self._runner = runner
        self._control: Group | None = None
        self._coordinators = 0
        self._quiesce: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        #: Forms the group of an epoch: ``init`` with the arguments of this group. ``None``: ranks cannot be replaced.
        self.formation: Callable[..., Group] | None = None
        #: What must be equal on all ranks for that, one setting in a line.
        self.formation_settings = ""
        #: Of the workers of a job in which other ranks only serve: the group of all ranks, which ends with this one.
        self.with_servers: Group | None = None
        if operations is None:
            self._at_close.append(self.operations.staging.close)
            # The exit of the interpreter closes the group, so that other ranks do not take this rank for lost.
            self._finalizer = weakref.finalize(self.operations, _close, runner, self._at_close)

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

    def barrier(self, *, timeout_s: float | None = None) -> Work:
        """Call the callbacks of ``on_quiesce``; return when every rank has called ``barrier``.

        A call after a ``DeadlineExceededError`` waits for the same barrier.

        Raises:
            DeadlineExceededError: A rank is late; the message names it.
            PeerLost: A rank is lost.
        """
        self._flush()
        return self.operations.barrier(timeout_s)

    # ------------------------------------------------------------------------------------------------------- objects

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """Return the root's value on every rank. ``docs/collectives.md`` lists the types; nothing is ever pickled.

        Raises:
            ConfigurationError: The value cannot be sent. All object collectives raise this error, on every rank that
                would get the value.
        """
        return objects.broadcast_object(self.control, value, root=self._root(root))

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return objects.allgather_object(self.control, value)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks, by rank, on the root, and ``None`` on the other ranks."""
        return objects.gather_object(self.control, value, root=self._root(root))

    def scatter_object(self, values: Sequence[Any] | None, *, root: int = 0) -> Any:
        """Return this rank's value out of the root's ``values``, one per rank. The other ranks pass ``None``."""
        return objects.scatter_object(self.control, values, root=self._root(root))

    # ----------------------------------------------------------------------------------------------------- subgroups

    def subgroup(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a group of some ranks of this one, with the same engine, connections and threads.

        All members call it, with the same ranks in the same order; other ranks need not. Ranks of the subgroup count
        from 0, in the order given. The loss of a rank ends all groups of a job.

        Args:
            ranks: Ranks of this group, this rank among them.
            name: Distinguishes subgroups of the same ranks; by default the order of the calls does.

        Raises:
            ConfigurationError: These are not ranks of this group, or this rank is not among them.
            DeadlineExceededError: A native library carries the collectives out, and some member has not called it in
                time.
        """
        group = Group(self._runner, operations=self.operations.subgroup(ranks, name))
        if self.coordinator is not None:
            members = [self.ranks.index(rank) for rank in group.ranks]
            group.barrier()  # MPI moves nothing else while it makes a communicator, so all members come first
            natives = self.coordinator.natives.split(members, self.operations.patience(None))
            if not isinstance(natives, EngineCollectives):  # else ranks of a mesh that form none themselves
                group.use(natives, self.coordinator.config)
        return group

    def workers(self, num_workers: int) -> Group:
        """Return the group of the first ranks of a job, whose other ranks only serve (``totalreduce run --servers``).

        Its attribute ``with_servers`` is this group, which its ``close`` closes.

        Args:
            num_workers: The number of ranks; this rank is among them.
        """
        if self.formation is None:
            group = self.subgroup(range(num_workers), name="workers")
        else:
            group = Group(self._runner, operations=self.operations.within("workers"))
            group.await_formation(self.rank, num_workers, self.formation, self.formation_settings)
        group.with_servers, group._at_close = self, self._at_close
        return group

    @property
    def control(self) -> Group:
        """The same ranks by the engine, for operations that must not depend on a native library.

        totalreduce itself uses it; its names are separate from those of users.
        """
        if self._control is None:
            self._control = Group(self._runner, operations=self.operations.within("control"))
        return self._control

    def keep_order(self) -> None:
        """Have operations wait for those in flight that use the same memory, as torch.distributed promises.

        Otherwise they raise an error. A submission may block then, so callbacks of ``Work.on_done`` must not submit
        operations. Subgroups that are made afterwards do the same.
        """
        self.operations.waits_for_memory = True

    # ------------------------------------------------------------------------------------------------- epochs of a job

    def await_formation(self, rank: int, world_size: int, formation: Callable[..., Group], settings: str = "") -> None:
        """Have the group refuse operations until ``tr.recoverable`` forms it. ``tr.replayed`` forms a group of its own.

        Args:
            rank: The rank that this process probably has then.
            world_size: The number of ranks that the group probably has then.
            formation: Forms the group (see the attribute).
            settings: What must be equal on all ranks that form it, one setting in a line.
        """
        self.rank, self.world_size, self.ranks = rank, world_size, tuple(range(world_size))
        self.formation, self.formation_settings, self._control = formation, settings, self
        self._runner.gate.await_formation(
            "ranks of this job can be replaced (--on-loss), so its group is formed by `with tr.recoverable(...)` or "
            "`with tr.replayed(...)`: move this collective into that context. A process that is started later could "
            "not take part in it here"
        )

    def take_over(self, other: Group) -> None:
        """Become another group, whose object nothing else uses. This group is closed already.

        Callbacks of ``on_quiesce`` stay registered. Subgroups and coordinators of this group stay closed.
        """
        Collectives.__init__(self, other.operations)
        other.meter.go_on(self.meter)
        self._runner, self._control, self._coordinators = other._runner, None, 0
        self._at_close, self._finalizer = other._at_close, other._finalizer
        self._backend = other._backend

    # ---------------------------------------------------------------------------------------------- native libraries

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator of the native library that carries the collectives out; ``None`` if the engine does."""
        return self._backend.coordinator

    def use(self, natives: NativeCollectives, config: CoordinationConfig) -> Coordinator:
        """Have a native library carry out the collectives, in an order on which the ranks agree. Collective.

        Of a mesh (``groups.mesh``), only allreduces of large tensors are ordered; the engine carries out the others.

        Raises:
            PlanMismatchError: The ranks' settings differ; on every rank.
        """
        coordinator = self.coordinate(natives, config)
        is_mesh = isinstance(natives, MeshCollectives)
        self._backend = MeshBackend(self.operations, coordinator) if is_mesh else NativeBackend(coordinator, self.rank)
        return coordinator

    def coordinate(
        self, natives: NativeCollectives | None = None, config: CoordinationConfig | None = None
    ) -> Coordinator:
        """Make a coordinator of this group beside the group's own collectives. Collective.

        Args:
            natives: The library that carries operations out; by default the engine.
            config: The settings; equal on all ranks.

        Raises:
            PlanMismatchError: The ranks' settings differ; on every rank.
        """
        self._coordinators += 1
        config = config or CoordinationConfig()
        if natives is None:  # in a subgroup, the coordinator's unnamed operations are separate from others
            members, name = range(self.world_size), f"coordinated {self._coordinators}"
            natives = EngineCollectives(self.operations.within("control").subgroup(members, name))
        self.agree("coordination", config.shared())
        return Coordinator(self.operations, natives, config, scope=f"{self.operations.scope}#{self._coordinators}")

    def planned(self, names: Sequence[str]) -> PlannedReductions:
        """Return a stream of reductions that come again in every round. Collective with a native library.

        Args:
            names: The names of the operations, equal on all ranks. A native library starts them in this order.
        """
        return self._backend.planned(names)

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
        """Agree on a list of tensors that every step reduces. Collective.

        In a step each rank submits the tensors in any order, and may leave some out.

        Args:
            name: The name of the plan, equal on all ranks, like the other arguments.
            specs: The tensors.
            op: ``SUM`` or ``AVG``.
            on_missing: A tensor that a rank leaves out counts as ``"zero"``, or is an ``"error"`` on all ranks.
            settings: Further values that are compared between the ranks.

        Raises:
            PlanMismatchError: The ranks disagree. All ranks raise this error, with the differences.
        """
        return Plan(self.control, self._backend, name, specs, op=op, on_missing=on_missing, settings=settings)

    def agree(self, name: str, document: Mapping[str, Any]) -> None:
        """Return if all ranks pass an equal JSON document. Collective.

        Raises:
            PlanMismatchError: The documents differ. All ranks raise this error, with the differences.
        """
        agreement.agree(self.control, name, document)

    # -------------------------------------------------------------------------------------------------- observation

    @property
    def observers(self) -> list[Observer]:
        """The observers, which get the events of the engine. Append to the list to observe."""
        return self._runner.engine.observers

    @property
    def timeout_s(self) -> float:
        """Time-out in seconds of waits that name none."""
        return self._runner.engine.config.timeout_s

    @property
    def shares_memory(self) -> bool:
        """Whether ``empty`` makes tensors that other ranks read in place."""
        return (
            not self.operations.closed and self._runner.home.is_here and self._runner.transport.allocate(1) is not None
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor on the CPU that the other ranks of this host read in place, so that messages are not copied.

        Its elements are not initialised. An operation on it is done when the other ranks have read their parts. A child
        process shares the memory, as after ``torch.Tensor.share_memory_``. If ranks share no memory, or there is not
        enough, the tensor is in usual memory.

        Raises:
            GroupClosed: This rank has closed the group.
        """
        if self.operations.closed:
            raise GroupClosed(f"group {self.operations.name!r} is closed")
        return self.operations.empty(*shape, dtype=dtype)

    def statistics(self) -> Statistics:
        """Return numbers of operations and messages since the group was made."""
        return snapshot(self._runner)

    @property
    def meter(self) -> Meter:
        """What is counted of the training's steps. All groups of one ``init`` share it."""
        return self._runner.meter

    def end_step(self) -> None:
        """Note that a step of the training has ended, for ``on_report`` and the live view.

        Training loops that call collectives themselves call this. ``DistributedOptimizer``, and torch optimizers beside
        the back end of ``torch.distributed``, count their steps by themselves.
        """
        self.meter.end_step()

    def on_report(self, callback: Callable[[StepReport], None], *, every: int = 10) -> Callable[[], None]:
        """Have ``callback(report)`` called after every so many steps, in the thread that trains.

        Args:
            callback: Gets the means over these steps on this rank. An exception in it is raised from the step.
            every: The number of steps.

        Returns:
            A function that undoes this.

        Raises:
            ConfigurationError: ``every`` is not a positive integer.
        """
        return report_every(lambda: self._runner, every, callback)

    # -------------------------------------------------------------------------------------------------------- ending

    def on_quiesce(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called before a barrier and before the end; return a function that undoes this."""
        self._quiesce.append(callback)

        def remove() -> None:
            if callback in self._quiesce:
                self._quiesce.remove(callback)

        return remove

    def at_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when the group has ended, at the interpreter's exit at the latest."""
        self._at_close.append(callback)

    def close(self, timeout_s: float = 5.0, *, reason: str = "") -> None:
        """Call the callbacks of ``on_quiesce``, inform the other ranks, and end threads and connections.

        Pending operations fail with ``GroupClosed``; a native library first carries out those on which the ranks have
        agreed, for at most ``timeout_s``. This is not collective: the other ranks get an error with the ``reason`` when
        they need this rank. Closing a subgroup ends no threads and connections, which belong to the
        group of all ranks. A second call does nothing; the same holds for a call in a forked child process.

        All callbacks of ``on_quiesce`` and ``at_close`` are called, also after an exception. Then the first exception
        is raised; the others are logged.

        A signal handler may call this at any moment, and so may a callback of an operation. If it has interrupted a
        call of the library, the group ends in another thread, as soon as the interrupted call lets it, while ``close``
        returns at once and does not call the callbacks of ``on_quiesce``. The interrupted call raises ``GroupClosed``,
        unless it has all it needs. The interpreter ends after the group.
        """
        if self.operations.closed or not self._runner.home.is_here:
            return
        timeout_s = checks.seconds("timeout_s", timeout_s, or_zero=True)
        self.operations.closed = True
        is_amid = is_amid_call()
        steps = [] if is_amid or self._runner.engine.members.verdict is not None else list(self._quiesce)
        steps.append(lambda: self._backend.close(timeout_s, reason))
        if self.operations.parent is None:
            self._finalizer.detach()
            steps.append(lambda: _close(self._runner, self._at_close, timeout_s, reason))
        elif self.with_servers is not None:
            whole = self.with_servers
            steps += [self.operations.close, lambda: whole.close(timeout_s, reason=reason)]
        else:
            steps += [self.operations.close, *self._at_close]
        if is_amid:
            self._runner.carry_out_apart(functools.partial(_call_all, steps))
        else:
            _call_all(steps)

    def _flush(self) -> None:
        for callback in list(self._quiesce):
            callback()


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _close(
    runner: Runner, at_close: list[Callable[[], None]], timeout_s: float = 5.0, reason: str | None = None
) -> None:
    if not runner.home.is_here:  # a forked child process ends: the group and its callbacks belong to the parent
        return
    if reason is None and not hasattr(sys, "ps1"):  # the interpreter ends, perhaps by an exception
        reason = _reason(getattr(sys, "last_value", None))
    final_reason = reason or ""
    callbacks = list(at_close)
    at_close.clear()
    _call_all([lambda: runner.close(timeout_s, final_reason), *callbacks])


def _call_all(steps: Sequence[Callable[[], None]]) -> None:
    """Call all steps in order; then raise the first exception, and log the others."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # also Ctrl-C: the later steps free threads, memory and files
            if first is None:
                first = error
            else:
                _log.error("closing the group: one more callback failed", exc_info=error)
    if first is not None:
        raise first
