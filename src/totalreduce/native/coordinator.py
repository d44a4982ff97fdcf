"""Operations of a group that another library carries out, in an order on which the ranks agree.

The protocol is ``coordination.negotiator``. This is its place in the world: its messages travel through a channel of
the engine, and what it decides goes to the ``Executor``.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import final

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.negotiator import NegotiationCounters, Negotiator
from totalreduce.coordination.requests import Request
from totalreduce.foundation import checks
from totalreduce.foundation.errors import (
    ConfigurationError,
    GroupClosed,
    ProtocolError,
    TotalReduceError,
)
from totalreduce.foundation.types import OpKind, ReduceOp, operation_id
from totalreduce.native import tuning
from totalreduce.native.collectives import NativeCollectives
from totalreduce.native.executor import Entry, Executor
from totalreduce.native.members import Members
from totalreduce.native.planned import NativeStream, Planned
from totalreduce.runner.handle import Handle
from totalreduce.tensors import dtypes
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import Operands
from totalreduce.tensors.work import Work

__all__ = ["Coordinator"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_NOT_THE_PROGRAM = (_PACKAGE, str(Path(torch.__file__).resolve().parent), "<")
_IN_PLACE = (OpKind.ALLREDUCE, OpKind.BROADCAST)
#: Unnamed operations are called after their kind and number. A name of the program that begins so, or with the escape,
#: is escaped: it never meets an operation without a name.
_ESCAPE = "n:"
_RESERVED = (_ESCAPE, *(f"{kind.name.lower()}#" for kind in OpKind))
_REDUCTIONS = {op: op.name.lower() for op in ReduceOp}
#: Requests that are kept for when their names come again.
_KNOWN_MAX = 100_000


@final
class _Channel:
    """The negotiator as the engine sees it; everything under the engine's lock."""

    def __init__(self, negotiator: Negotiator, ranks: Sequence[int], settle: Callable[[float], bool]) -> None:
        """``ranks``: the members, by index; ``settle`` is called after whatever has happened."""
        self._negotiator, self._settle = negotiator, settle
        self._indices = {rank: index for index, rank in enumerate(ranks)}

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """A message of a member."""
        if peer not in self._indices:
            raise ProtocolError(f"rank {peer} negotiates in a group that it is no member of")
        self._negotiator.receive(self._indices[peer], message, now)
        self._settle(now)

    def fail(self, error: TotalReduceError, now: float) -> None:
        """A rank of the job is lost, which ends all its groups; or this one closes."""
        self._negotiator.fail(error)
        self._settle(now)

    def depart(self, peer: int, reason: str, now: float) -> None:
        """A member has left."""
        if peer in self._indices:
            self._negotiator.depart(self._indices[peer], reason, now)
            self._settle(now)

    def next_due(self) -> float | None:
        """Of the negotiator."""
        return self._negotiator.next_due()

    def tick(self, now: float) -> None:
        """Of the negotiator."""
        self._negotiator.tick(now)
        self._settle(now)


@final
@never_compiled
class Coordinator:
    """Collectives of a group that a native library carries out. Any thread. Making one is collective.

    Tensors may be submitted in any order on different ranks, under names that are equal on all of them; what is ready
    everywhere is fused and handed to the library in one order. Made for each ``Group`` whose transport has such a
    library; or by hand, with whatever carries operations out.

    Args:
        group: The members; its engine carries the agreement's messages.
        natives: The library, with the same members.
        config: Compared between the ranks.
        scope: Tells groups of one job apart.
        patience: From the time-out given to the one in force.

    Raises:
        PlanMismatchError: The ranks' settings differ; on every rank.
    """

    def __init__(
        self,
        group: Members,
        natives: NativeCollectives,
        config: CoordinationConfig,
        *,
        scope: str,
    ) -> None:
        self.config, self.natives = config, natives
        self._group, self._runner, self._engine, self._patience = (
            group,
            group.runner,
            group.runner.engine,
            group.patience,
        )
        self._negotiator = Negotiator(group.rank, group.world_size, config, ranks=group.ranks)
        #: What is in flight here, by name; of that, what the ranks have not agreed on.
        self._entries: dict[str, Entry] = {}
        self._waiting: dict[str, Entry] = {}
        self._iterations: dict[str, int] = {}
        self._known: dict[str, Request] = {}  #: The last allreduce by name.
        self._joining: Handle | None = None
        self._join: Handle | None = None  #: What ``join`` waits for, until it has returned.
        self._last_joined: int | None = None
        self._over = False
        self._unnamed: Counter[OpKind] = Counter()
        self._number = operation_id(f"coordination of {scope!r}")
        self._executor = Executor(
            group.rank,
            natives,
            fusion_bytes=config.fusion_bytes,
            divide_by_active=config.join_divisor == "active",
            empty=lambda count, dtype: group.empty(count, dtype=dtype),
            complete=self._complete,
            report=self._report,
            lost=lambda: self._negotiator.ended,
        )
        self._channel = _Channel(self._negotiator, group.ranks, self._settle)

        def begin(now: float) -> bool:
            self._engine.channels.open(self._number, self._channel, now)
            return True

        self._runner.act(begin)

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place; returns at once.

        Args:
            tensor: Any shape; of a device that the library knows; need not be contiguous.
            name: Equal on all ranks. ``None``: the n-th unnamed operation meets the n-th unnamed one elsewhere, and
                never one with a name; such operations are not remembered, so that each costs a slow agreement.
            op: How to reduce.
            prescale: Factor before the reduction; integers are multiplied as float64 and cut off.
            postscale: Factor after it.
            timeout_s: Deadline in seconds of a ``wait`` that names none.

        Raises:
            ConfigurationError: The name is no name of an operation, or it is in flight; the reduction is none; more
                than 32,768 operations of this rank wait for the others; or the memory is in flight.
            UnsupportedError: A tensor that is sparse, nested or quantised.
            PeerLost: A rank is gone.
            StallError: The agreement has ended.
        """
        return self.grouped_allreduce(
            [tensor], name=name, op=op, prescale=prescale, postscale=postscale, timeout_s=timeout_s
        )[0]

    def grouped_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        timeout_s: float | None = None,
    ) -> list[Work]:
        """Reduce several tensors, all or none of them: what is wrong with one fails all, on every rank.

        Args and Raises as for ``allreduce``.
        """
        _check_reduction(op)
        with self._named(name, OpKind.ALLREDUCE) as (base, cached):
            batch = (base, len(tensors)) if len(tensors) > 1 else None
            entries = []
            for index, tensor in enumerate(tensors):
                shown = base if batch is None else f"{base}.{index}of{len(tensors)}"
                dtypes.check_dense(tensor, shown)
                request = self._known.get(shown)
                if (
                    request is None
                    or request.shape != tensor.shape
                    or request.dtype != _dtype_name(tensor.dtype)
                    or request.reduction != _REDUCTIONS[op]
                    or request.prescale != prescale
                    or request.postscale != postscale
                    or request.batch != batch
                    or request.device != tensor.device.type
                ):
                    request = Request(
                        shown,
                        OpKind.ALLREDUCE,
                        *self._described(tensor, shown),
                        reduction=_REDUCTIONS[op],
                        prescale=float(prescale),
                        postscale=float(postscale),
                        batch=batch,
                        cached=cached,
                    )
                    self._remember(request)
                entries.append(self._entry(request, tensor, writes=True))
            return self._submit(entries, timeout_s)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int = 0, name: str | None = None, timeout_s: float | None = None
    ) -> Work:
        """Copy the root's tensor to all ranks, in place; returns at once.

        Raises:
            ConfigurationError: ``root`` is no rank of the group.
        """
        if not 0 <= root < self._group.world_size:
            raise ConfigurationError(f"root {root} is no rank of a group of {self._group.world_size}")
        with self._named(name, OpKind.BROADCAST) as (shown, cached):
            request = Request(shown, OpKind.BROADCAST, *self._described(tensor, shown), root=int(root), cached=cached)
            entry = self._entry(request, tensor, writes=self._group.rank != root)
            return self._submit([entry], timeout_s)[0]

    def allgather(
        self,
        tensor: torch.Tensor,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Collect every rank's tensor, one behind the other along the first dimension; the others are equal.

        ``Work.wait`` returns the whole, unless ``outputs`` has a place for every rank's part. ``copied``: what the
        tensor was copied from, which no operation in flight may write.
        """
        with self._named(name, OpKind.ALLGATHER) as (shown, cached):
            dtypes.check_dense(tensor, shown)
            tensor = tensor.view(1) if not tensor.dim() else tensor
            request = Request(shown, OpKind.ALLGATHER, *self._described(tensor, shown), cached=cached)
            return self._submit([self._entry(request, tensor, outputs, copied)], timeout_s)[0]

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None = None,
        *,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        received: list[int] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Send ``splits[r]`` rows of the tensor to each rank r, one after the other; without splits equally many.

        ``Work.wait`` returns what came, by rank, unless ``outputs`` has a place for each part; ``received`` is then
        filled with the rows from each rank. ``copied`` as for ``allgather``.

        Raises:
            ConfigurationError: The splits are not one for each rank, or do not add up to the rows.
        """
        size = self._group.world_size
        with self._named(name, OpKind.ALLTOALL) as (shown, cached):
            dtypes.check_dense(tensor, shown)
            rows = len(tensor) if tensor.dim() else 0
            if splits is None:
                if rows % size or not tensor.dim():
                    raise ConfigurationError(f"{shown!r}: {rows} rows do not divide among {size} ranks; pass splits")
                splits = [rows // size] * size
            splits = tuple(int(split) for split in splits)
            if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
                raise ConfigurationError(
                    f"{shown!r}: splits must be {size} numbers from 0 that add up to {rows} rows, not {list(splits)}"
                )
            request = Request(shown, OpKind.ALLTOALL, *self._described(tensor, shown), splits=splits, cached=cached)
            entry = self._entry(request, tensor, outputs, copied)
            if received is not None:
                entry.rows = received
            return self._submit([entry], timeout_s)[0]

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Reduce over all ranks and return this rank's rows by ``Work.wait``; first ranks get one more if uneven.

        ``outputs`` and ``copied`` as for ``allgather``, with one place.
        """
        _check_reduction(op)
        with self._named(name, OpKind.REDUCE_SCATTER) as (shown, cached):
            dtypes.check_dense(tensor, shown)
            if not tensor.dim():
                raise ConfigurationError(f"{shown!r}: a scalar has no rows to scatter")
            request = Request(
                shown,
                OpKind.REDUCE_SCATTER,
                *self._described(tensor, shown),
                reduction=_REDUCTIONS[op],
                prescale=float(prescale),
                postscale=float(postscale),
                cached=cached,
            )
            return self._submit([self._entry(request, tensor, outputs, copied)], timeout_s)[0]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it, or joined.

        Raises:
            DeadlineExceededError: Some rank did not come in time; the message names it.
        """
        with self._named(None, OpKind.BARRIER) as (shown, cached):
            work = self._submit(
                [self._entry(Request(shown, OpKind.BARRIER, cached=cached), torch.empty(0))], timeout_s
            )[0]
        work.wait()

    def join(self, *, timeout_s: float | None = None) -> int:
        """Say that this rank has no more data; take part in the others' reductions until all have joined.

        It contributes what changes nothing: zeros to sums. Averages are divided as ``config.join_divisor`` says.

        Returns:
            The rank that joined last, equal on all ranks.

        Raises:
            DeadlineExceededError: It takes longer; the others go on, and ``join`` may be called again.
        """
        patience = self._patience(timeout_s)
        for entry in list(self._entries.values()):
            self.wait(entry.handle, patience)

        handle = Handle()

        def begin(now: float) -> bool:
            nonlocal handle
            if self._join is None:  # else an earlier call ran out of time
                self._check_alive()
                self._join = self._joining = handle
                self._negotiator.join(now)
            handle = self._join
            return self._settle(now)

        self._runner.act(begin)
        self.wait(handle, patience)
        with self._runner.locked():
            if self._join is handle:
                self._join = None
        if handle.error is not None:
            raise handle.error.with_traceback(None)
        self._unnamed.clear()  # who joined early has counted fewer of them
        assert self._last_joined is not None, "that is what ended the wait"
        return self._last_joined

    def planned(self, names: Sequence[str]) -> NativeStream:
        """Reductions in a planned order, apart from everything else. Collective."""
        patience_s = self._patience(None)
        return NativeStream(
            self.natives.split(range(self._group.world_size), patience_s),
            names,
            lost=lambda: self._negotiator.ended,
            patience_s=patience_s,
            reported=self._report_planned if self._engine.observers else None,
        )

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that have no more data, as far as this rank has heard."""
        return self._negotiator.joined

    @property
    def ended(self) -> TotalReduceError | None:
        """Why nothing can be submitted any more: a rank is lost, ranks stalled, or it was closed; ``None`` before."""
        return self._negotiator.ended

    @property
    def counters(self) -> NegotiationCounters:
        """What the agreement has cost so far."""
        return self._negotiator.counters

    def store(self, path: str | Path) -> None:
        """Write the settings to a file, for ``tr.init(coordination=path)`` in later runs.

        Raises:
            OSError: It cannot be written.
        """
        tuning.write_settings(self.config, path)

    def cache_snapshot(self) -> list[tuple[str, int]]:
        """Names and bits of the response cache, least recently used first; equal on all ranks."""
        with self._runner.locked():
            return self._negotiator.cache.snapshot()

    def close(self, timeout_s: float = 5.0, *, reason: str = "") -> None:
        """End it here; what is pending fails. Harmless when called twice, and in a forked child.

        Not collective. The other ranks are told: their operations that need this rank, and later ones, fail with
        ``PeerLost``, which names this rank and says the ``reason``, if there is one.
        """
        if not self._runner.home.is_here:
            return
        name = f"the group {self._group.name!r}"

        def leave(now: float) -> bool:
            error = GroupClosed(f"rank {self._group.rank} has closed {name}")
            self._negotiator.leave(error, f"it has closed {name}" + (f" after {reason}" if reason else ""))
            says = self._settle(now)
            self._engine.channels.close(self._number)
            return says

        with suppress(GroupClosed):  # there is nobody who would tell the others, and the channel has been told
            self._runner.act(leave)
        self._executor.close(timeout_s)
        self.natives.close()

    # ------------------------------------------------------------------------------------------------------ waiting

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for an operation of this coordinator (see ``Waiter``)."""
        if handle.done:
            return

        def hurry(now: float) -> bool:
            self._negotiator.hurry(now)
            self._settle(now)
            return False  # whoever waits moves the messages, or wakes who does

        self._runner.act(hurry)
        self._runner.wait(handle, timeout_s, explain=lambda now: self._explain(handle, now))

    def _explain(self, handle: Handle, now: float) -> tuple[str, str]:
        for name, entry in self._entries.items():
            if entry.handle is handle:
                return name, self._negotiator.explain(name, now)
        return "join", "not every rank has joined"

    # -------------------------------------------------------------------------------------------------- submissions

    def _remember(self, request: Request) -> None:
        """Most names come again with equal requests, and making one is a third of what a submission costs."""
        if request.cached:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[request.name] = request

    @contextmanager
    def _named(self, name: str | None, kind: OpKind) -> Iterator[tuple[str, bool]]:
        """The name of an operation that is submitted within the context, and whether the operation will come again.

        An unnamed operation that is refused gives its number back. Otherwise this rank would count unnamed operations
        differently from the other ranks from then on.
        """
        if name is not None:
            name = checks.operation_name(name)
            yield (_ESCAPE + name if name.startswith(_RESERVED) else name), True
            return
        self._unnamed[kind] = number = self._unnamed[kind] + 1
        try:
            yield f"{kind.name.lower()}#{number}", False
        except BaseException:
            if self._unnamed[kind] == number:  # another thread may have taken the next one
                self._unnamed[kind] -= 1
            raise

    @staticmethod
    def _described(tensor: torch.Tensor, name: str) -> tuple[str, int, tuple[int, ...], str]:
        dtypes.check_dense(tensor, name)
        return _dtype_name(tensor.dtype), tensor.element_size(), tuple(tensor.shape), tensor.device.type

    def _entry(
        self,
        request: Request,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None = None,
        copied: Sequence[torch.Tensor] = (),
        *,
        writes: bool = False,
    ) -> Entry:
        """An operation and the memory that it uses: ``writes`` if the tensor takes the result, too."""
        operands = Operands(request.name)
        operands.hold(tensor, writes=writes)
        for output in outputs or ():
            dtypes.check_dense(output, request.name)
            operands.hold(output, writes=True)
        for source in copied:
            operands.read_now(source)
        ready = None
        if tensor.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(tensor.device))
        # The program may give its tensors other memory meanwhile; the operation keeps to what they have now.
        places = None if outputs is None else [output.detach() for output in outputs]
        return Entry(request, tensor, tensor.detach(), operands, places, ready)

    def _submit(self, entries: Sequence[Entry], timeout_s: float | None) -> list[Work]:
        patience = self._patience(timeout_s)
        where, size = _caller(), sum(entry.request.num_bytes for entry in entries)

        def submit(now: float) -> bool:
            self._check_alive()
            for entry in entries:
                name = entry.request.name
                if name in self._entries:
                    raise ConfigurationError(
                        f"an operation called {name!r} is in flight on this rank: wait for it, or use another name"
                    )
            negotiator = self._negotiator
            news = negotiator.has_news
            negotiator.submit([entry.request for entry in entries], now, where=where, num_bytes=size)
            for entry in entries:
                name = entry.request.name
                self._entries[name] = self._waiting[name] = entry
                entry.submitted, entry.iteration = now, self._iterations.get(name, 0)
                if entry.request.cached:
                    self._iterations[name] = entry.iteration + 1
            return self._settle(now) or not news

        releases: list[Callable[[], None]] = []
        try:
            for entry in entries:
                releases.append(self._group.claim(entry.operands, patience))
                entry.handle = Handle(entry.operands.finish, releases[-1])
            self._runner.act(submit)
        except BaseException:
            for release in releases:
                release()
            raise
        return [Work(self, entry.handle, _result_of(entry), entry.request.name, patience) for entry in entries]

    def _check_alive(self) -> None:
        error = self._negotiator.ended
        if error is not None:
            raise error.with_traceback(None)

    # ------------------------------------------------------------------------------------------- under the lock

    def _settle(self, now: float) -> bool:
        """Send what the negotiator has to say, and carry out what it has decided; returns whether it said anything."""
        negotiator = self._negotiator
        says = bool(negotiator.outbox)
        for peer, message in negotiator.outbox:
            self._engine.channels.post(self._group.ranks[peer], self._number, message)
        negotiator.outbox.clear()
        for (name, index), observer in itertools.product(negotiator.pop_arrivals(), self._engine.observers):
            observer.requested(name, now, rank=self._group.ranks[index])
        responses = negotiator.pop_responses()
        if responses:
            entries = [self._waiting.pop(response.name, None) for response in responses]
            self._executor.put(responses, entries, now)
        for report in negotiator.pop_stalls():
            self._engine.reports.publish(report, now)
        if self._joining is not None and negotiator.last_joined is not None:
            self._last_joined = negotiator.last_joined
            self._end_join(self._joining, None)
        if negotiator.ended is not None and self._joining is not None:
            self._end_join(self._joining, negotiator.ended)
        if negotiator.ended is not None and self._waiting:
            self._executor.give_up(list(self._waiting.values()), negotiator.ended)
            self._waiting.clear()
        if negotiator.ended is not None and not self._over:
            self._over = True
            self._executor.end()
        return says

    def _end_join(self, handle: Handle, error: BaseException | None) -> None:
        self._joining = None
        self._executor.finish(lambda: self._runner.complete([handle], error))

    # --------------------------------------------------------------------------------------- in the executor's thread

    def _complete(self, entries: Sequence[Entry], error: BaseException | None) -> None:
        with self._runner.locked():
            for entry in entries:
                self._entries.pop(entry.request.name, None)
        self._runner.complete([entry.handle for entry in entries], error)

    def _report(
        self,
        entries: Sequence[Entry],
        times: tuple[float, float, float, float, float],
        batch: int,
        fused: int,
        error: BaseException | None,
    ) -> None:
        observers = self._engine.observers
        if not observers:
            return
        agreed, begun, packed, ended, unpacked = times
        with self._runner.locked():
            for entry, observer in itertools.product(entries, observers):
                request = entry.request
                observer.coordinated(
                    request.name,
                    entry.iteration,
                    kind=request.kind.name.lower(),
                    num_bytes=request.num_bytes,
                    batch=batch,
                    fused=fused,
                    submitted=entry.submitted,
                    agreed=agreed,
                    begun=begun,
                    packed=packed,
                    ended=ended,
                    unpacked=unpacked,
                    error=error,
                )

    def _report_planned(self, planned: Planned) -> None:
        with self._runner.locked():
            for observer in self._engine.observers:
                observer.coordinated(
                    planned.name,
                    planned.round,
                    kind="allreduce",
                    num_bytes=planned.tensor.numel() * planned.tensor.element_size(),
                    batch=planned.number,
                    fused=1,
                    submitted=planned.submitted_at,
                    agreed=planned.submitted_at,
                    begun=planned.started_at,
                    packed=planned.started_at,
                    ended=planned.ended_at,
                    unpacked=planned.ended_at,
                    error=planned.error,
                )


def _check_reduction(op: ReduceOp) -> None:
    if op is ReduceOp.NONE:
        raise ConfigurationError("op NONE reduces nothing")


def _result_of(entry: Entry) -> torch.Tensor | Callable[[], torch.Tensor | None]:
    if entry.request.kind in _IN_PLACE:
        return entry.submitted_tensor
    return lambda: entry.result


def _caller() -> object:
    """Where in the program an operation was submitted: the first place outside this package and torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            return _Place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


@dataclass(slots=True)
class _Place:
    """A line of the program; put into words only where somebody stalls."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_qualname}"


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
