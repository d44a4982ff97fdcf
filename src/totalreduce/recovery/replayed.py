"""``replayed``: a loop of collectives and checkpoints that goes on when ranks are lost, by replay of results.

The loop is Rabit's: begin with the last checkpoint, and in each round call collectives and make a checkpoint. If a rank
is lost, each other rank waits inside the call that it is in. The process that is started in its place runs the same
program from the top. It gets the state of the last checkpoint and the results of the calls since then; each of its
calls returns such a result, until it comes to the call in which the others wait. The rules are in ``replay``; this
module forms groups, and moves the data.

What Rabit left to the program is checked here: every call is compared with the log, or with the calls of the other
ranks, in kind, dtype, shape, reduction, root and name; and the values that a checkpoint saves are compared between
ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from types import TracebackType
from typing import Self, final

import torch

from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import (
    ConfigurationError,
    PeerLost,
    PlanMismatchError,
    ProtocolError,
    ReplayMismatchError,
)
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.groups.encoding import PACKED_BYTES_MAX, pack, unpack
from totalreduce.groups.group import Group
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.checkpoint import Checkpoint, Saved
from totalreduce.recovery.epochs import Epochs, ended_early, open_assembly
from totalreduce.recovery.membership import Decision, number_in, reading
from totalreduce.recovery.replay import Call, Entry, Parcel, ReplayLog, Standing, Versions, plan_parcels
from totalreduce.recovery.replicas import Replicas
from totalreduce.tensors.dtypes import dtype_of
from totalreduce.tensors.flats import fetch, host_like
from totalreduce.tensors.modes import write

__all__ = ["ReplayedJob", "replayed"]

#: The tag of the first parcel's messages; parcel n has the n-th tag after it.
_TAG = 0x4EA7
#: The default and the largest bound of the results between two checkpoints. They travel in packed objects.
_LOG_BYTES, _LOG_BYTES_MAX = 256 * 1024 * 1024, PACKED_BYTES_MAX // 2
#: The name under which the store has the ``ReplayMismatchError`` that ends the job.
_MISMATCH = "mismatch"
#: What a process does at the end of the program, for messages.
_END = "the end of the program"


@dataclass(frozen=True, slots=True)
class _Options:
    """What the program has chosen (see ``replayed``)."""

    result_copies: int
    local_replicas: int
    log_bytes: int


def replayed(
    state: Checkpoint, group: Group, *, result_copies: int = 5, local_replicas: int = 2, log_bytes: int = _LOG_BYTES
) -> ReplayedJob:
    """Return the context in which a loop of collectives and checkpoints outlives the loss of processes.

    ::

        group = tr.init()
        state = tr.Checkpoint(centres=first_centres)
        with tr.replayed(state, group) as job:
            for _ in range(job.version, num_rounds):
                sums = sums_of_nearest(points, state.centres)
                job.allreduce(sums)
                state.centres = sums[:, 1:] / sums[:, :1]
                job.checkpoint()

    With ``totalreduce run --on-loss replace`` no loss surfaces in the program: the call in which it is noticed returns
    when a new process has come to the same place. Without it the loop runs as usual, and a loss is ``PeerLost``.

    Between two checkpoints the program must make the same calls with the same contributions when it is run again, so
    it must not depend on anything but its data, the state, and the results of calls. See docs/recovery-replayed.md.

    Args:
        state: The values that outlive the processes. All ranks begin with those of rank 0, but for local values.
        group: All ranks, from ``tr.init``.
        result_copies: On how many ranks the result of a call is kept until the next checkpoint; the result of the last
            call is on all ranks.
        local_replicas: The number of ranks that have a copy of the local values of each rank.
        log_bytes: The most bytes of the results between two checkpoints, with their names and 512 bytes for each; at
            most 512 MiB. A call that exceeds it is a ``ConfigurationError`` on all ranks.

    Raises:
        ConfigurationError: A number is out of range, or the group is of another kind than ``tr.init`` makes it.
    """
    if not isinstance(state, Checkpoint):
        raise ConfigurationError(f"tr.replayed needs a tr.Checkpoint, not a {type(state).__name__}")
    if group.coordinator is not None:
        raise ConfigurationError("tr.replayed needs collectives='engine': a native library cannot replace ranks")
    options = _Options(
        checks.integer("result_copies", result_copies, minimum=1),
        checks.integer("local_replicas", local_replicas, minimum=0),
        checks.integer("log_bytes", log_bytes, minimum=1, maximum=_LOG_BYTES_MAX),
    )
    return ReplayedJob(state, group, options)


@final
class ReplayedJob:
    """A loop of collectives and checkpoints that outlives the loss of processes. Made by ``replayed``.

    One thread uses it. Its calls block, and its collectives are those that are replayed. If the launcher replaces
    ranks, the group's own collectives are refused from ``with`` on, also after it.

    Attributes:
        state: The values that outlive the processes.
        rank: The rank of this process. It does not change.
        world_size: The number of ranks. It does not change.
    """

    def __init__(self, state: Checkpoint, group: Group, options: _Options) -> None:
        """See ``replayed``."""
        self.state, self.rank, self.world_size = state, group.rank, group.world_size
        self._given, self._options = group, options
        self._group: Group | None = None
        self._epochs: Epochs | None = None  #: ``None``: ranks cannot be replaced.
        self._versions = Versions(state.save())
        self._replicas = Replicas(options.local_replicas)
        self._log: ReplayLog[torch.Tensor] = ReplayLog(
            group.rank, group.world_size, result_copies=options.result_copies, bytes_max=options.log_bytes
        )

    @property
    def version(self) -> int:
        """The number of checkpoints of the job so far. In a process that was started again: where it begins."""
        return self._versions.version

    def __enter__(self) -> Self:
        """Meet the other processes, and begin with the state of the job.

        Raises:
            ConfigurationError: This process runs another program, or other settings, than the others. Or the launcher
                was told to go on with fewer ranks, which replay cannot do.
            RecoveryError: Too few processes have come in time, nobody has the state any more, or the job has ended.
            ReplayMismatchError: The job has ended with this error.
        """
        given, settings = self._given, environment.read_settings()
        self._versions.load(0, self.state.save())
        if given.formation is None:
            self._level(given, self._decision)
            return self
        if settings.on_loss == "shrink":
            raise ConfigurationError(
                "tr.replayed cannot go on with fewer ranks, whose part of the results nobody has: use --on-loss replace"
            )
        assembly = open_assembly(settings, self.rank, self.world_size, given.timeout_s)
        assembly.check_program(f"{self.state.describe()}\n{self._options}", given.formation_settings)
        given.operations.gate.refuse(
            "in tr.replayed, the group's own collectives are not replayed: call job.allreduce, job.broadcast or "
            "job.allgather"
        )
        self._epochs = Epochs(
            *(assembly, given.formation, self._level),
            version=lambda: self.version,
            prepare=self._prepare,
            check_end=lambda: _check_not_ended(assembly),
        )
        self._epochs.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until all ranks have come to the end.

        If the launcher replaces ranks, this rank then leaves the group, after an error at once and with its text, so
        that the others learn of it. Otherwise the group is the program's, and stays open.

        Raises:
            ReplayMismatchError, RecoveryError, PeerLost, DeadlineExceededError: As for ``allreduce``.
        """
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._epochs is not None:
                self._epochs.leave("" if error is None else f"{type(error).__name__}: {error}")
            self._group = None

    # ------------------------------------------------------------------------------------------------- what users call

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        name: str = "",
        prepare: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Reduce a tensor over all ranks, in place, with the same bits on all ranks.

        Args:
            tensor: A tensor of any device and shape, and of a dtype that can be reduced (docs/collectives.md).
            op: The reduction.
            name: A name that is compared, too.
            prepare: Is called before the tensor is read, and not when the result is replayed. So it may compute the
                contribution, and must do nothing else that the program needs.

        Returns:
            The tensor.

        Raises:
            ReplayMismatchError: This process makes another call than the others, or than before its loss.
            ConfigurationError: The results since the last checkpoint take more than ``log_bytes``.
            UnsupportedError: The tensor's device, layout or dtype, or the reduction for this dtype, is not supported.
            RecoveryError: The job cannot go on.
            PeerLost: A rank is lost, and the launcher does not replace it.
            DeadlineExceededError: A rank has not come to this call in time, for example a new process that computes
                for longer than the time-out of the group.
        """
        call = _describe(OpKind.ALLREDUCE, tensor, name, op=op)

        def run(group: Group) -> torch.Tensor:
            result = _copy(tensor)  # the tensor is needed again if a rank is lost
            group.control.allreduce(result, name="replay/allreduce", op=op).wait()
            return result

        write(tensor, self._call(call, run, prepare))
        return tensor

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, name: str = "") -> torch.Tensor:
        """Copy the root's tensor into the tensors of all ranks; return the tensor. Raises as for ``allreduce``."""
        root = checks.rank_in("root", root, self.world_size)
        call = _describe(OpKind.BROADCAST, tensor, name, root=root)

        def run(group: Group) -> torch.Tensor:
            result = _copy(tensor)
            group.control.broadcast(result, root=root, name="replay/broadcast")
            return result

        write(tensor, self._call(call, run))
        return tensor

    def allgather(self, tensor: torch.Tensor, *, name: str = "") -> torch.Tensor:
        """Return the tensors of all ranks, of equal shapes, in a new first dimension, on the device of this one's.

        Raises as for ``allreduce``.
        """
        call = _describe(OpKind.ALLGATHER, tensor, name)

        def run(group: Group) -> torch.Tensor:
            result = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device="cpu")
            group.control.allgather(result, _copy(tensor), name="replay/allgather").wait()
            return result

        return self._call(call, run).to(tensor.device, copy=True)

    def checkpoint(self) -> int:
        """Save the state; return the new version. The results since the last checkpoint are dropped.

        The values are copied, so the program may change them afterwards.

        Raises:
            ReplayMismatchError: Another rank does not make a checkpoint here, or a value that is not local differs
                between ranks.
            ConfigurationError: A value is of a type that cannot be saved.
            RecoveryError, PeerLost, DeadlineExceededError: As for ``allreduce``.
        """
        self._live()
        self._check_no_call("a checkpoint")
        before, saved = self.version, self.state.save()
        self._versions.prepare(saved)
        while self.version == before:
            group, decision = self._live(), self._decision
            try:
                self._meet_in(group, {"call": "a checkpoint", **saved.describe()})
                self._exchange(group, decision, before + 1, saved.own)
                self._versions.is_in_vote = True
                group.control.allreduce(torch.zeros(1, dtype=torch.int64, device="cpu"), name="replay/vote").wait()
                self._versions.commit()
                self._committed()
            except PeerLost as error:
                self._recover(error)
        return self.version

    # ----------------------------------------------------------------------------------------------------------- calls

    def _live(self) -> Group:
        """Return the present group. Raises ``ConfigurationError``: the job has not begun, or has ended."""
        if self._group is None:
            raise ConfigurationError(
                "this belongs into the body of `with tr.replayed(state, group) as job`: before it, a process that is "
                "started again could not take part in a call"
            )
        return self._group

    def _call(
        self, call: Call, run: Callable[[Group], torch.Tensor], prepare: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Return the result of a call, from the log or from ``run``. The result belongs to the log."""
        self._live()
        if not self._log.is_replaying:
            self._log.check_room(call)
            if prepare is not None:
                prepare()
        while (result := self._answer(call)) is None:
            group = self._live()
            try:
                self._meet_in(group, {"call": call.describe()})
                made = run(group)
                self._log.append(call, made)
                return made
            except PeerLost as error:
                self._recover(error)
        return result

    def _answer(self, call: Call) -> torch.Tensor | None:
        with self._ended_by_mismatch():
            return self._log.answer(call)

    def _check_no_call(self, description: str) -> None:
        with self._ended_by_mismatch():
            self._log.check_no_call(description)

    def _meet_in(self, group: Group, description: dict[str, str]) -> None:
        """Return when all ranks have come to the same call. Raises ``ReplayMismatchError``.

        It is because of this that ranks differ by one call at most: the root of a broadcast, for example, could
        otherwise go on before the others have come.
        """
        with self._ended_by_mismatch():
            try:
                group.agree("replay/call", description)
            except PlanMismatchError as error:
                raise ReplayMismatchError(self._log.version, self._log.position, error.differences) from None

    @contextlib.contextmanager
    def _ended_by_mismatch(self) -> Iterator[None]:
        """If a ``ReplayMismatchError`` is raised, have all processes raise it. No process is started again then."""
        try:
            yield
        except ReplayMismatchError as error:
            if self._epochs is not None:
                differences = list(error.differences)
                fields = {"version": error.version, "position": error.position, "differences": differences}
                self._epochs.assembly.first_value(_MISMATCH, json.dumps(fields))
                self._epochs.assembly.finish()
            raise

    def _committed(self) -> None:
        """Drop what belongs to the version before."""
        self._replicas.commit()
        self._log.begin(self.version)
        if self._epochs is not None:
            self._epochs.assembly.begin()

    def _finish(self) -> None:
        """Return when all ranks have come to the end of the job."""
        self._check_no_call(_END)
        while True:
            try:
                self._meet_in(self._live(), {"call": _END})
            except PeerLost as error:
                if not self._enter_next(error):
                    return
            else:
                break
        if self._epochs is not None:
            self._epochs.assembly.finish()

    # ------------------------------------------------------------------------------------------------------ memberships

    @property
    def _decision(self) -> Decision:
        """The members of the present group."""
        if self._epochs is not None and self._epochs.assembly.current is not None:
            return self._epochs.assembly.current
        return Decision.of_all(self.world_size)

    def _recover(self, error: PeerLost) -> None:
        """Enter the next epoch after a loss."""
        if not self._enter_next(error):
            raise ended_early()

    def _enter_next(self, error: PeerLost) -> bool:
        """Enter the next epoch after a loss; return false if the job has ended.

        Raises:
            PeerLost: The launcher does not replace ranks.
            ReplayMismatchError: A process has found that it makes other calls.
        """
        if self._epochs is None:
            raise error
        self._epochs.leave(error)
        return self._epochs.enter()

    def _prepare(self, decision: Decision) -> None:
        """Note the version with which an epoch begins."""
        if self._has_state and self._versions.decided(decision.version):
            self._committed()

    @property
    def _has_state(self) -> bool:
        return self._epochs is not None and self._epochs.has_state

    def _level(self, group: Group, decision: Decision) -> None:
        """Give ranks the state and the results that they lack. Collective."""
        self._group, version = group, decision.version
        if not self._has_state:
            self._log.begin(version)
        begins = not any(member.has_state for member in decision.members)
        has_state = self._has_state or (begins and group.rank == decision.source)
        copies = tuple(self._replicas.seats(version)) if has_state else ()
        mine = Standing(has_state, self._log.position, self._log.held, copies)
        standings = [Standing(**said) for said in group.allgather_object(asdict(mine))]
        parcels = plan_parcels(standings, version, with_own=self.state.has_local)
        saved = self._versions.state
        shared, own = saved.shared, saved.own
        for parcel, packed in zip(parcels, _deliver(group, parcels, self._packed), strict=True):
            if packed is None or group.rank not in parcel.requesters:
                continue
            if parcel.kind == "state":
                shared = unpack(packed)
            elif parcel.kind == "own":
                own = packed
            else:
                self._log.install(_unpack_entries(packed))
        if not has_state:
            saved = Saved(shared, own)
            self._versions.load(version, saved)
            self.state.load(saved)
        self._exchange(group, decision, version, saved.own)  # ranks that were lost had copies, too
        self._replicas.commit()

    def _exchange(self, group: Group, decision: Decision, version: int, own: torch.Tensor | None) -> None:
        """Send what this rank has for itself at a version to other ranks, if ranks have anything. Collective."""
        self._replicas.undo()  # an exchange that was interrupted, in this group or in the last one
        if own is not None:
            self._replicas.exchange(group, decision, version, lambda: own)

    def _packed(self, parcel: Parcel) -> torch.Tensor:
        """Return what this rank has of a parcel, as bytes."""
        if parcel.kind == "state":
            return pack(self._versions.state.shared)
        if parcel.kind == "own":
            return self._replicas.copy_of(parcel.numbers[0])
        return _pack_entries(self._log.entries(parcel.numbers))


def _check_not_ended(assembly: Assembly) -> None:
    """Raise the ``ReplayMismatchError`` with which another process has ended the job, if one has."""
    text = assembly.value(_MISMATCH)
    if text:
        with reading(text, "difference between calls") as fields:
            version, position = number_in(fields["version"]), number_in(fields["position"])
            differences = tuple(map(str, fields["differences"]))
        raise ReplayMismatchError(version, position, differences)


def _describe(kind: OpKind, tensor: torch.Tensor, name: str, *, op: ReduceOp = ReduceOp.NONE, root: int = 0) -> Call:
    """Return the description of a call. Raises ``UnsupportedError``, ``ConfigurationError``."""
    return Call(Signature(kind, dtype_of(tensor, name), op, root, tuple(tensor.shape)), checks.operation_name(name))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory, without a history of gradients."""
    copy = host_like(tensor)
    fetch([copy], [tensor])
    return copy


def _pack_entries(entries: dict[int, Entry[torch.Tensor]]) -> torch.Tensor:
    return pack(
        [
            [number, [int(field) for field in astuple(each.call.signature)[:4]], each.call.name, each.result]
            for number, each in entries.items()
        ]
    )


def _unpack_entries(packed: torch.Tensor) -> dict[int, Entry[torch.Tensor]]:
    entries = {}
    for number, (kind, dtype, reduction, root), name, result in unpack(packed):
        shape = tuple(result.shape[1:] if kind == OpKind.ALLGATHER else result.shape)
        signature = Signature(OpKind(kind), DType(dtype), ReduceOp(reduction), root, shape)
        entries[number] = Entry(Call(signature, name), result)
    return entries


def _deliver(
    group: Group, parcels: Sequence[Parcel], packed: Callable[[Parcel], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Send the parcels along their routes; return what this rank has received, by parcel. Collective.

    All lengths travel before the bytes, so that no rank takes more memory than is allowed, and so that a rank can
    receive from several neighbours at the same time. Raises ``PeerLost``, ``ProtocolError``.
    """
    control, rank = group.control, group.rank
    held: list[torch.Tensor | None] = []
    works = []
    for number, parcel in enumerate(parcels):
        source, targets = parcel.route.sources[rank], parcel.route.targets[rank]
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        data = None
        if source is not None:
            control.recv(length, src=source, tag=_TAG + number).wait()
            if not 0 <= int(length) <= PACKED_BYTES_MAX:
                raise ProtocolError(f"rank {source} announces a parcel of {int(length)} bytes")
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        elif targets:
            data = packed(parcel)
            length.fill_(data.numel())
        held.append(data)
        works += [control.send(length.clone(), dst=target, tag=_TAG + number) for target in targets]
    arrivals = {
        number: control.recv(data, src=source, tag=_TAG + number)
        for number, (parcel, data) in enumerate(zip(parcels, held, strict=True))
        if data is not None and (source := parcel.route.sources[rank]) is not None
    }
    for number, (parcel, data) in enumerate(zip(parcels, held, strict=True)):
        if number in arrivals:
            arrivals[number].wait()
        for target in parcel.route.targets[rank]:
            assert data is not None
            works.append(control.send(data, dst=target, tag=_TAG + number))
    for work in works:
        work.wait()
    return held
