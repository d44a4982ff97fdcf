"""``ShardCopies``: copies of sharded states in the memory of other ranks, so that a lost rank's shards are not lost.

Every few steps each rank copies its part of the state (``parts``) to host memory, and sends it to some of the ranks
after it beside training. A version *counts* when all ranks have all copies of it. A rank learns that by the allreduce
of lengths with which the next version of the same epoch begins: no rank submits it before its messages of the last
version have ended. In the first version of an epoch nothing follows from it, because the messages before it have ended
with the loss. So training keeps two versions, and gives up the older one when the younger one counts. When an epoch
begins, a rank keeps the last version that counts and the one that the ranks go on with, until the first version of the
epoch counts: a further loss may leave either of them without a part.

After a loss every rank says which parts of which versions it has, and all choose the last version that is whole. That
needs no vote before a step, and costs the steps since that version.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import RecoveryError, TotalReduceError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.groups import probe
from totalreduce.groups.group import Group
from totalreduce.recovery.parts import PackedPart, Part, load_parts, load_rest, part_of, unpack_part
from totalreduce.recovery.replicas import gather_lengths
from totalreduce.recovery.resharding import Held, Source, choose, distances
from totalreduce.recovery.snapshots import Snapshots, share_token
from totalreduce.recovery.state import State
from totalreduce.tensors.modes import outside_inference_mode
from totalreduce.tensors.work import Work

__all__ = ["ShardCopies"]

_log = logging.getLogger(__name__)

#: The tag of the messages between ranks.
_TAG = 0x5EA8
#: Training is more urgent than copies.
_PRIORITY = 1 << 20


@dataclass(frozen=True, slots=True)
class _Version:
    """What this rank has of one version."""

    epoch: int  #: The epoch in which it was copied.
    version: int  #: The version of the state.
    world_size: int  #: The number of ranks of that epoch.
    rows: dict[int, torch.Tensor]  #: The packed parts by the rank that has written them, this rank's first.

    @property
    def key(self) -> tuple[int, int]:
        """What orders versions: a job that went back to an older version has smaller numbers that are newer."""
        return self.epoch, self.version


@dataclass(slots=True)
class _Messages:
    """The messages of a version that has not ended on this rank."""

    arrivals: dict[int, tuple[torch.Tensor, Work]] = field(default_factory=dict)  #: By rank: the row that it sends.
    departures: list[Work] = field(default_factory=list)  #: The messages to other ranks.


@final
class ShardCopies:
    """Keeps copies of a model that FSDP2 shards, in the memory of the ranks, through the attempts of a job.

    ::

        copies = tr.ShardCopies(every=10, replicas=1)
        for attempt in tr.attempts(copies=copies):
            with attempt:
                model = make_model()
                fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
                optimizer = torch.optim.AdamW(model.parameters())
                state = tr.State(model=model, optimizer=optimizer, sampler=sampler)
                attempt.synchronize(state)
                ...

    Two versions are kept, and of each the own part and the parts of ``replicas`` other ranks. With AdamW in float32 a
    part has 12 bytes for each parameter of the shard, so with one replica that is 48 bytes of host memory. For a moment
    at the begin of an attempt there can be a third version.

    Attributes:
        every: The number of steps between two copies.
        replicas: The number of other ranks that have a copy of each part.
        version: The last version that counts, as this rank knows; -1 before the first one.
        num_copied: The number of versions that this process has copied.
        seconds: The time in which training has waited for that.
    """

    def __init__(self, *, every: int = 10, replicas: int = 1) -> None:
        """Note the settings; nothing is copied.

        Args:
            every: Copy each version that is a multiple of this number. After a loss the job goes on from the last
                version that counts: fewer than twice so many steps are computed again.
            replicas: How many other ranks get a copy of each rank's part. If a rank and all that have its copy are lost
                at the same time, the job needs a snapshot on disk.

        Raises:
            ConfigurationError: A number is not positive.
        """
        self.every = checks.integer("every", every, minimum=1)
        self.replicas = checks.integer("replicas", replicas, minimum=1)
        self.num_copied, self.seconds = 0, 0.0
        self._versions: list[_Version] = []  #: From old to new; the messages are those of the last one.
        self._messages = _Messages()
        self._counted = (0, -1)  #: Epoch and version of the last version that counts, as this rank knows.
        self._spare_rows: list[torch.Tensor] = []
        self._group: Group | None = None
        self._epoch = 0
        self._snapshots: Snapshots | None = None

    @property
    def version(self) -> int:
        """The last version that counts, as this rank knows; -1 before the first one."""
        return self._counted[1]

    @property
    def num_bytes(self) -> int:
        """The bytes of host memory that the copies take now."""
        rows = [row for version in self._versions for row in version.rows.values()] + self._spare_rows
        return sum(
            row.untyped_storage().nbytes() for row in [*rows, *(row for row, _ in self._messages.arrivals.values())]
        )

    # ------------------------------------------------------------------------------------------- for recovery.attempts

    def describe(self) -> str:
        """Return what must be equal on all ranks."""
        return f"copies: every={self.every}, replicas={self.replicas}"

    def synchronize(
        self, state: State, group: Group, epoch: int, snapshots: Snapshots | None, *, has_begun: bool
    ) -> None:
        """Bring all ranks to the state of the job, and copy it. Collective, at the begin of an epoch.

        Args:
            state: As the program has built it.
            group: The ranks of the epoch.
            epoch: The number of the epoch.
            snapshots: Writes the state to disk; may have a version to begin with.
            has_begun: Whether a step has taken effect in an earlier epoch.

        Raises:
            PeerLost: A rank is lost.
            RecoveryError: The parts of a rank are lost, and no version is on disk. Or a file on disk is damaged.
            ConfigurationError, UnsupportedError: As ``parts.load_parts``.
        """
        self._end_messages()
        self._group, self._epoch, self._snapshots = group, epoch, snapshots
        said = group.control.allgather_object(
            {
                "held": [[each.epoch, each.version, each.world_size, list(each.rows)] for each in self._versions],
                "counted": self._counted,
                "has begun": has_begun or self.version > 0,
            }
        )
        held = [[Held(each[0], each[1], each[2], tuple(each[3])) for each in words["held"]] for words in said]
        source = choose(held)
        self._counted = max(words["counted"] for words in said)
        chosen = None if source is None or source.missing else (source.epoch, source.version)
        # A version that is not whole is of no use any more. Of the last one that counts all copies were there, of the
        # chosen one some may be missing: so after another loss perhaps the first one is whole and the other one is not.
        self._versions = [
            each for each in self._versions if chosen and each.key in (chosen, min(chosen, self._counted))
        ]
        if source is not None and chosen is not None:
            mine = {}
            for part, rank in source.servers.items():
                if rank == group.rank:
                    mine[part] = unpack_part(next(each.rows[part] for each in self._versions if each.key == chosen))
            load_parts(state, group, mine, source.servers, source.world_size)
        elif not self._load_from_disk(state, group, source):
            if any(words["has begun"] for words in said):
                raise RecoveryError(self._shortage(source))
            load_rest(state, group)
        share_token(group, snapshots)
        self._copy(state)
        self.complete(state)

    def commit(self, state: State, since: int) -> None:
        """Copy the state if its version is due, for other ranks and for the disk. Collective, after each step.

        Args:
            state: The state.
            since: The version after the step before. Those between cannot be copied.

        Raises:
            PeerLost: A rank is lost.
        """
        if state.version // self.every > since // self.every:
            self._copy(state)
        if self._snapshots is not None and self._snapshots.is_due(state.version, since):
            self.write(state)

    def write(self, state: State) -> None:
        """Copy this rank's part of the state, and begin to write it to disk. On all ranks."""
        snapshots, group = self._snapshots, self._group
        assert snapshots is not None
        assert group is not None
        snapshots.write_shard(state.version, group.rank, group.world_size, part_of(state).plain())

    def complete(self, state: State) -> None:
        """Return when the present version counts on all ranks. Collective.

        Raises:
            PeerLost: A rank is lost.
        """
        assert self._group is not None
        if self._versions[-1].version != state.version:
            self._copy(state)
        self._receive()
        self._group.control.barrier()
        self._count()

    # ------------------------------------------------------------------------------------------------------ one version

    def _copy(self, state: State) -> None:
        """Copy a version, and begin to send it."""
        begin = time.perf_counter()
        group = self._group
        assert group is not None
        packed = PackedPart(part_of(state))
        self._receive()
        lengths = gather_lengths(group, packed.num_bytes).wait()
        if self._versions and self._versions[-1].epoch == self._epoch:
            self._count()
        rank, size = group.rank, group.world_size
        mine = self._row(packed.num_bytes)
        packed.copy_into(mine)
        self._versions.append(_Version(self._epoch, state.version, size, {rank: mine}))
        hosts = probe.selector_of(group).hosts_of(group.ranks)
        for distance in distances(hosts, self.replicas):
            source, target = (rank - distance) % size, (rank + distance) % size
            row = self._row(int(lengths[source]))
            arrival = group.control.recv(row, src=source, tag=_TAG, priority=_PRIORITY)
            self._messages.arrivals[source] = row, arrival
            departure = group.control.send(mine, dst=target, tag=_TAG, priority=_PRIORITY)
            self._messages.departures.append(departure)
        self._spare_rows = []
        self.num_copied += 1
        self.seconds += time.perf_counter() - begin

    def _receive(self) -> None:
        """Wait for the messages of the last version, if there is one."""
        messages = self._messages
        for source, (row, work) in messages.arrivals.items():
            work.wait()
            self._versions[-1].rows[source] = row
        for work in messages.departures:
            work.wait()
        self._messages = _Messages()

    def _end_messages(self) -> None:
        """Keep the copies that had arrived when the last group ended. The messages of that group have ended."""
        for source, (row, work) in self._messages.arrivals.items():
            if work.done() and work.exception() is None:
                self._versions[-1].rows[source] = row
        self._messages = _Messages()

    def _count(self) -> None:
        """Note that the last version counts, and give up those before it. On all ranks its messages have ended."""
        self._counted = self._versions[-1].key
        # The next version takes the memory of one version; that of a third one is given back.
        self._spare_rows = [row for each in self._versions[-2:-1] for row in each.rows.values()]
        self._versions = self._versions[-1:]

    @outside_inference_mode
    def _row(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a packed part, of a version that was given up if that is long enough."""
        for index, row in enumerate(self._spare_rows):
            memory = row.untyped_storage()
            if memory.nbytes() >= num_bytes:
                del self._spare_rows[index]
                return torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)[:num_bytes]
        # A little longer, because values of the program may take more digits next time.
        return torch.empty(num_bytes + num_bytes // 64 + 4096, dtype=torch.uint8, device="cpu")[:num_bytes]

    # ------------------------------------------------------------------------------------------------------------- disk

    def _load_from_disk(self, state: State, group: Group, source: Source | None) -> bool:
        """Load the last version on disk; return whether there is one. Collective."""
        snapshots = self._snapshots
        if snapshots is not None:
            snapshots.wait()  # what this process still writes could replace a part of the version that is read
        group.control.barrier()
        words: Any = None
        problem = ""
        if snapshots is not None and group.rank == 0:
            try:
                version = snapshots.latest()
                words = [version, *snapshots.shards_of(version)] if version else None
            except (TotalReduceError, OSError) as error:
                problem = describe_error(error)
        words, problem = group.broadcast_object([words, problem])
        if problem:
            raise RecoveryError(problem)
        if snapshots is None or words is None:
            return False
        version, world_size, token = words
        servers = {part: part % group.world_size for part in range(world_size)}
        parts: dict[int, Part] = {}
        try:
            for part, rank in servers.items():
                if rank == group.rank:
                    parts[part] = Part.of(snapshots.read_shard(version, part, token))
        except (TotalReduceError, OSError) as error:
            problem = describe_error(error)
        problems = [each for each in group.control.allgather_object(problem) if each]
        if problems:
            raise RecoveryError(problems[0])
        load_parts(state, group, parts, servers, world_size)
        if group.rank == 0:
            why = "" if source is None else f": {_lost(source)}"
            _log.warning("the job goes on from version %d, from %s%s", version, snapshots.folder, why)
        return True

    def _shortage(self, source: Source | None) -> str:
        return (
            f"{_lost(source)}: these ranks and the ranks with copies of their parts ({self.replicas} of each) were "
            "lost together, and there is no snapshot on disk. Use more replicas (tr.ShardCopies(replicas=...)), or "
            "snapshots (tr.attempts(copies=copies, snapshots=tr.Snapshots(...)))"
        )


def _lost(source: Source | None) -> str:
    if source is None:
        return "nobody has the shards of any rank any more"
    ranks = ", ".join(map(str, source.missing))
    return f"nobody has the shards of rank {ranks} of {source.world_size} ranks, of version {source.version}, any more"
