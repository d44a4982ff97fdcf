"""The state between ``init`` and ``shutdown``: the job's group, the process sets, the timeline.

Horovod's interface consists of functions, so a process has one such object, ``context``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation import environment
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.horovod.process_sets import ProcessSet, global_process_set, ranks_of_communicator
from totalreduce.launch.address import host_identity
from totalreduce.launch.bootstrap import init
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.native.coordinator import Coordinator
from totalreduce.observe import Timeline, rank_path
from totalreduce.pytorch.adasum import Adasum
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.recovery.epochs import CLOSE_S

__all__ = ["Context", "Locality", "Members", "context"]

#: Back ends of torch.distributed that are not used for tensors on devices. "totalreduce" is, where ranks are not
#: replaced: it copies them to pinned memory and back, in order with the kernels of the program.
_NOT_FOR_DEVICES = frozenset({"gloo", "mpi", "fake"})
_STALL_WARNING_S = 10.0
#: Share of the time-out after which all ranks together give up an operation that some rank does not submit, with one
#: error. The rest of the time is for messages about it, before a rank's own wait ends.
_STALL_ABORT_SHARE = 0.9
#: What operations raise before the group is formed, where ranks can be replaced.
_NOT_FORMED = (
    "ranks of this job can be replaced (--on-loss), so its group is formed by the function with @hvd.elastic.run: move "
    "this collective into that function. A process that is started later could not take part in it here"
)


@dataclass(frozen=True, slots=True)
class Locality:
    """The rank of this process among those of its host, and among the processes of all hosts with its local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool

    @classmethod
    def among(cls, places: Sequence[tuple[int, int]], rank: int) -> Locality:
        """Compute it from the local rank and the local size of every rank."""
        local_rank, local_size = places[rank]
        alike = [other for other, (their_local_rank, _) in enumerate(places) if their_local_rank == local_rank]
        sizes = {size for _, size in places}
        return cls(local_rank, local_size, alike.index(rank), len(alike), len(sizes) == 1)


@final
@dataclass(eq=False, slots=True)
class Members:
    """A process set that this process is a member of."""

    ranks: tuple[int, ...]  #: The members, as ranks of the job.
    group: Group  #: The group of these ranks.
    formed: Coordinator | None  #: The coordinator; ``None`` before the group is formed.
    #: The optimizers in use, by name, in the order in which they were made: ``join`` takes part in their rounds.
    optimizers: weakref.WeakValueDictionary[str, DistributedOptimizer] = field(
        default_factory=weakref.WeakValueDictionary
    )
    #: The number of objects of each kind that were made for the set; their names contain it.
    made: Counter[str] = field(default_factory=Counter)
    adasums: dict[str, Adasum] = field(default_factory=dict)  #: The ``Adasum`` of each operation's name.

    @classmethod
    def of(cls, group: Group, ranks: Sequence[int], config: CoordinationConfig) -> Members:
        """Make the coordinator of a process set. Collective among the members."""
        return cls(tuple(ranks), group, group.coordinator or group.coordinate(config=config))

    @property
    def coordinator(self) -> Coordinator:
        """Carries out collectives that come in any order. Raises ``ConfigurationError``."""
        if self.formed is None:
            raise ConfigurationError(_NOT_FORMED)
        return self.formed

    def root(self, rank: int) -> int:
        """Return the index of a root in the set, given its rank in the job. Raises ``ConfigurationError``."""
        if rank not in self.ranks:
            raise ConfigurationError(
                f"root_rank {rank} is not among the process set's ranks {list(self.ranks)} (roots are ranks of the job)"
            )
        return self.ranks.index(rank)

    def name(self, kind: str) -> str:
        """Return a new name, equal on all ranks if they make their objects of each kind in the same order."""
        self.made[kind] += 1
        return f"{kind}.{self.made[kind]}"

    def adasum(self, name: str | None) -> Adasum:
        """Return the ``Adasum`` of operations with this name; all unnamed operations share one."""
        name = "adasum" if name is None else f"adasum.{name}"
        if name not in self.adasums:
            self.adasums[name] = Adasum(self.group.control, name)
        return self.adasums[name]

    def close(self) -> None:
        """End the set: pending operations fail, and other optimizers may take the models' parameters."""
        for optimizer in list(self.optimizers.values()):
            optimizer.close()
        if self.formed is not None:
            self.formed.close()
        self.group.close()

    def form_again(self, config: CoordinationConfig) -> None:
        """Begin anew, with ``config``, after the group has other members. Collective among these."""
        self.ranks = tuple(range(self.group.world_size))
        self.formed = self.group.coordinate(config=config)
        self.adasums.clear()


@final
@dataclass(slots=True)
class _Lasting:
    """What outlives a change of the members: what the program has made before the group was formed for the first time.

    Newly started processes have the same. What the function with ``@hvd.elastic.run`` makes is made again by each call.
    """

    #: The optimizers, in the order in which they were made. The references are strong, so that the list is the same on
    #: all ranks, whenever their garbage is collected.
    optimizers: list[DistributedOptimizer] = field(default_factory=list)
    made: Counter[str] = field(default_factory=Counter)  #: The numbers of objects of each kind (see ``Members``).


@final
class Context:
    """The state of Horovod's interface. Used from one thread, except for operations and their handles."""

    def __init__(self) -> None:
        self.transport: str = "auto"  #: The transport of the job, or of the last one.
        self._group: Group | None = None
        self._locality: Locality | None = None
        self._config = CoordinationConfig()
        self._known: dict[int, list[ProcessSet]] = {}
        self._members: dict[int, Members] = {}
        self._next_set = 1
        self._timeline: Timeline | None = None
        self._lasting = _Lasting()  #: Used where ranks can be replaced.

    @property
    def is_initialized(self) -> bool:
        """Whether there is a job."""
        return self._group is not None

    @property
    def formed_group(self) -> Group | None:
        """The group of all ranks; ``None`` if there is no job, or its group is not formed yet (``elastic``)."""
        return None if self._group is None or self._members[0].formed is None else self._group

    @property
    def group(self) -> Group:
        """The group of all ranks. Raises ``ConfigurationError``: there is no job."""
        if self._group is None:
            raise ConfigurationError("totalreduce.horovod is not initialised: call hvd.init() first")
        return self._group

    @property
    def locality(self) -> Locality:
        """The place of this process among the hosts; raises as ``group`` does."""
        self.group  # noqa: B018  (raises)
        assert self._locality is not None
        return self._locality

    # ------------------------------------------------------------------------------------------- beginning and end

    def start(
        self,
        comm: Any,
        process_sets: Sequence[ProcessSet],
        *,
        transport: str | None,
        timeout_s: float | None,
        timeline: str | Path | None,
        coordination: CoordinationConfig | None,
    ) -> None:
        """Join the job (see ``basics.init``)."""
        if self._group is not None:
            formed = self._members[0].formed
            if self._group.formation is not None or formed is None or formed.ended is None:
                return
            self.stop()  # all ranks know that the job has failed, so they do not count this rank as lost
        self._config = coordination or _default_config(timeout_s)
        self.transport = transport or ("torch" if _is_on_accelerators() else "auto")
        # The name is different from those of the program's own groups.
        self._group = group = init(
            self.transport, name="horovod", timeout_s=timeout_s, timeline=timeline, coordination=self._config
        )
        try:
            everybody = range(group.world_size)
            _check_complete(comm, everybody)
            self._known[0] = [global_process_set]
            if group.formation is None:
                self._locality = Locality.among(_places(group), group.rank)
                self._members[0] = Members.of(group, everybody, self._config)
            else:
                self._await_formation(group, process_sets)
            global_process_set.register(0, everybody, group.rank)
            for process_set in process_sets:
                self.add(process_set)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leave the job (see ``basics.shutdown``)."""
        group, self._group = self._group, None
        if group is None:
            return
        self.stop_timeline(group)
        for number in sorted(self._members, reverse=True):  # the last set is that of all ranks, and ends the job
            self._members[number].close()
        group.close()
        self._members.clear()
        for known in self._known.values():
            for process_set in known:
                process_set.invalidate()
        self._known.clear()
        self._next_set, self._locality, self._lasting = 1, None, _Lasting()

    # -------------------------------------------------------------------------------- members that change (``elastic``)

    def _await_formation(self, group: Group, process_sets: Sequence[ProcessSet]) -> None:
        """Take the place of this process from the launcher's variables until ``form`` is called."""
        if self.transport == "torch":
            raise UnsupportedError(
                "ranks cannot be replaced (--on-loss) where torch.distributed carries the operations out"
            )
        if process_sets:
            raise UnsupportedError(
                "hvd.init() takes no process sets where ranks can be replaced (--on-loss), because the ranks change: "
                "add them in the function with @hvd.elastic.run"
            )
        group.operations.gate.refuse(_NOT_FORMED)
        world = environment.read_world()
        whole = world.local_world_size
        self._locality = Locality(world.local_rank, whole, world.rank // whole, -(-world.world_size // whole), True)
        self._members[0] = Members(tuple(range(group.world_size)), group, None)

    def form(self, *, store: StoreRank | None = None, **options: Any) -> Group:
        """Form the job's group anew with the processes that meet in the store. Collective among these.

        The optimizers that go on have no plans before ``plan_again``. Without a store the group is the one that
        ``start`` has formed.
        """
        group = self.group
        if store is None:
            return group
        members, lasting = self._members[0], self._lasting
        if members.formed is None:
            lasting.made = members.made.copy()
        assert group.formation is not None
        group.take_over(group.formation(store=store, **options))
        self._locality = Locality.among(_places(group), group.rank)
        members.made = lasting.made.copy()
        members.form_again(self._config)
        global_process_set.register(0, members.ranks, group.rank)
        if self._timeline is not None:
            group.observers.append(self._timeline)
        return group

    def plan_again(self) -> None:
        """Plan the gradients of the optimizers that go on, in a group that ``form`` has formed. Collective."""
        for optimizer in self._lasting.optimizers:  # all ranks have the same ones, in the same order
            optimizer.form_again()

    def leave(self, reason: str) -> None:
        """End the group, so that the other ranks learn the reason, and what belongs to its members."""
        group, members = self.group, self._members[0]
        group.close(CLOSE_S, reason=reason)
        for optimizer in list(members.optimizers.values()):
            if all(optimizer is not each for each in self._lasting.optimizers):
                optimizer.close()
        if members.formed is not None:
            members.formed.close(CLOSE_S, reason=reason)
        for number in [number for number in self._known if number != 0]:
            removed = self._members.pop(number, None)
            if removed is not None:
                removed.close()
            for process_set in self._known.pop(number):
                process_set.invalidate()
        self._next_set = 1

    # ------------------------------------------------------------------------------------------------ process sets

    def add(self, process_set: ProcessSet) -> None:
        """Register a process set (see ``basics.add_process_set``)."""
        group, number = self.group, self._next_set
        ranks = agree_or_refuse(
            group.control, f"process set {number}", lambda: self._checked(process_set), lambda ranks: {"ranks": ranks}
        )
        self._next_set += 1
        if group.rank in ranks:
            subgroup = group.subgroup(ranks, name=f"process set {number}")
            self._members[number] = Members.of(subgroup, ranks, self._config)
        self._known[number] = [process_set]
        process_set.register(number, ranks, group.rank)

    def _checked(self, process_set: ProcessSet) -> list[int]:
        size = self.group.world_size
        if not isinstance(process_set, ProcessSet):
            raise ConfigurationError(f"process sets are made with hvd.ProcessSet, not {process_set!r:.60}")
        if process_set.process_set_id is not None:
            raise ConfigurationError(f"{process_set} is known already")
        ranks = process_set.ranks
        if not ranks or ranks[-1] >= size:
            raise ConfigurationError(f"{process_set} is not made of ranks of a job of {size}")
        for number, known in self._known.items():
            if known[0].ranks == ranks:
                raise ConfigurationError(f"process set {number} has the ranks {ranks} already: use that one")
        return ranks

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a process set (see ``basics.remove_process_set``)."""
        number = self.number(process_set)
        if number == 0:
            return False
        self.group.agree(f"removal of process set {number}", {"process set": number})
        members = self._members.pop(number, None)
        if members is not None:
            members.close()
        for known in self._known.pop(number):
            known.invalidate()
        return True

    def by_id(self, number: int) -> ProcessSet:
        """Return the process set with this id (see ``basics.process_set_by_id``)."""
        self.group  # noqa: B018  (raises)
        if number not in self._known:
            raise ConfigurationError(f"there is no process set with id {number}")
        return self._known[number][0]

    def members(self, process_set: ProcessSet) -> Members:
        """Return the members of a process set, for a collective. Raises ``ConfigurationError``."""
        members = self.declared(process_set)
        members.coordinator  # noqa: B018  (raises)
        return members

    def declared(self, process_set: ProcessSet) -> Members:
        """Return the members of a process set, whose group need not be formed yet. Raises ``ConfigurationError``."""
        members = self._members.get(self.number(process_set))
        if members is None:
            raise ConfigurationError(f"rank {self.group.rank} is not a member of {process_set}")
        return members

    def enlist(self, optimizer: DistributedOptimizer, name: str, process_set: ProcessSet) -> None:
        """Note that an optimizer of a process set is in use."""
        members = self.declared(process_set)
        members.optimizers[name] = optimizer
        if members.formed is None:
            self._lasting.optimizers.append(optimizer)

    def forget(self, optimizer: DistributedOptimizer) -> None:
        """Note that an optimizer is not in use any more."""
        self._lasting.optimizers = [each for each in self._lasting.optimizers if each is not optimizer]
        for members in self._members.values():
            for name in [name for name, each in members.optimizers.items() if each is optimizer]:
                del members.optimizers[name]

    def number(self, process_set: ProcessSet) -> int:
        """Return the id of a process set. Raises ``ConfigurationError``."""
        self.group  # noqa: B018  (raises)
        if not isinstance(process_set, ProcessSet):
            raise ConfigurationError(f"process_set is a ProcessSet, not {process_set!r:.60}")
        number = process_set.process_set_id
        if number is None or process_set not in self._known.get(number, ()):
            raise ConfigurationError(
                f"{process_set} is not known: pass it to hvd.init(process_sets=[...]) or to hvd.add_process_set()"
            )
        return number

    # ---------------------------------------------------------------------------------------------------- timeline

    def start_timeline(self, path: str | Path) -> None:
        """Record a trace from now on (see ``basics.start_timeline``)."""
        group = self.group
        if self._timeline is not None:
            raise ConfigurationError(f"a timeline is being recorded to {self._timeline.path}: call stop_timeline()")
        try:
            path = Path(path)
        except TypeError:
            raise ConfigurationError(f"file_path is the path of a file, not {path!r:.60}") from None
        # Rank 0 writes the file that was named, as with Horovod.
        mine = path if group.rank == 0 else rank_path(path.with_suffix(".json"), group.rank)
        self._timeline = Timeline(group.rank, mine)
        group.observers.append(self._timeline)

    def stop_timeline(self, group: Group | None = None) -> None:
        """Write the trace, if one is being recorded."""
        observers = (group or self.group).observers
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            if timeline in observers:
                observers.remove(timeline)
            timeline.close()


def _default_config(timeout_s: float | None) -> CoordinationConfig:
    """Return settings in which an operation waits for late ranks about as long as a caller waits for it."""
    patience_s = timeout_s or environment.read_settings().timeout_s or EngineConfig().timeout_s
    return CoordinationConfig(
        stall_warning_s=min(_STALL_WARNING_S, patience_s / 2), stall_abort_s=_STALL_ABORT_SHARE * patience_s
    )


def _is_on_accelerators() -> bool:
    """Whether the program's process group takes tensors on devices (NCCL and its like, "totalreduce")."""
    if not (dist.is_available() and dist.is_initialized() and torch.accelerator.is_available()):
        return False
    config = str(dist.get_backend_config()).lower()  # "cpu:gloo,cuda:nccl"
    parts = [part.rpartition(":") for part in config.split(",")]
    others = _NOT_FOR_DEVICES | ({"totalreduce"} if environment.read_settings().on_loss is not None else set())
    return any(device != "cpu" and name not in others for device, _, name in parts)


def _check_complete(comm: Any, everybody: range) -> None:
    """Refuse a communicator of some ranks, from which Horovod makes the world: here a process set has them."""
    ranks = list(everybody)
    if comm:
        ranks = ranks_of_communicator(comm) or (list(comm) if isinstance(comm, Iterable) else [comm])
    if Counter(ranks) != Counter(everybody):
        raise ConfigurationError(
            f"comm names the ranks {ranks}, but hvd.init() is for all {len(everybody)} ranks of the job: leave it out "
            "and use a process set for some of them"
        )


def _places(group: Group) -> list[tuple[int, int]]:
    """Return the local rank and local size of every rank. Collective.

    They are those of the launcher's variables. An unknown launcher, or ``init_process_group`` by hand, leaves no
    variables; then they are computed from the ranks' hosts.
    """
    given = None
    with suppress(ConfigurationError):
        world = environment.read_world()
        if (world.rank, world.world_size) == (group.rank, group.world_size):
            given = [world.local_rank, world.local_world_size]
    known = group.allgather_object([host_identity(), given])
    if all(theirs is not None for _, theirs in known):
        return [(theirs[0], theirs[1]) for _, theirs in known]
    hosts = [host for host, _ in known]
    return [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]


#: The context of this process.
context = Context()
