"""Submits the operations of one group to the engine, with the scope of their names and the memory in flight.

Operations that are carried out again and again are prepared once, as MPI's persistent operations are.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Hashable, MutableMapping, Sequence
from typing import final

import torch

from totalreduce.engine.any_receives import AnyReceive
from totalreduce.engine.submission import Submission
from totalreduce.foundation import checks
from totalreduce.foundation.call_names import UNNAMED
from totalreduce.foundation.errors import ConfigurationError, GroupClosed
from totalreduce.foundation.types import ReduceOp, successor_name
from totalreduce.groups import checked
from totalreduce.groups.calling import call_here, origin_of_call, surroundings
from totalreduce.groups.checked import CheckedOperation
from totalreduce.groups.options import Options
from totalreduce.runner.gate import Gate
from totalreduce.runner.handle import Handle
from totalreduce.runner.runner import Runner
from totalreduce.tensors.barriers import Barriers
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.memory import MemoryInFlight, Operands, Place
from totalreduce.tensors.staging import Staging
from totalreduce.tensors.work import Work

__all__ = ["Operations", "PreparedOperation", "check_not_in_callback"]

#: The number of threads of one rank that may wait in barriers at the same time.
_BARRIER_NAMES = 64
#: Scopes of names that the library gives. Scopes of subgroups begin with a quote or a digit, users' names with "n:".
_BARRIERS, _MESSAGES = "barrier/", "message/"


@final
@never_compiled
class Operations:
    """Submits operations of one group to the engine. Any thread may call it.

    Args:
        runner: The engine of this rank.
        name: The name of the group, for messages.
        ranks: The members' numbers in the job; by default all ranks.
        scope: Prefix of the operations' names, different for each group of a job; empty for the group of all ranks.
        parent: The operations from which these were derived. The reference keeps the group of all ranks open, which
            closes when nothing refers to its operations any more.
        memory: The record of memory in flight, which groups may share.

    Attributes:
        rank: Index of this process in the group, from 0.
        world_size: Number of ranks of the group.
        waits_for_memory: Whether an operation waits for those in flight that use the same memory, instead of raising
            an error. Subgroups that are made afterwards do the same.
        closed: Whether the group takes no more operations.
        staging: Carries tensors of accelerators to host memory and back.
    """

    def __init__(
        self,
        runner: Runner,
        name: str,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        parent: Operations | None = None,
        memory: MemoryInFlight | None = None,
    ) -> None:
        self.runner, self.name, self.scope, self.parent = runner, name, scope, parent
        self.ranks = runner.engine.members.everybody if ranks is None else ranks
        self.rank, self.world_size = self.ranks.index(runner.engine.rank), len(self.ranks)
        self.waits_for_memory = self.closed = False
        self._memory = MemoryInFlight() if memory is None else memory
        self.staging: Staging
        if parent is not None:
            self.staging = parent.staging
        else:
            self.staging = Staging(f"totalreduce-{self.rank}-stager", runner.transport.allocate, runner.wait)
        self._inner: dict[str, Operations] = {}
        self._subgroups: Counter[tuple[int, ...]] = Counter()
        self._num_made: Counter[str] = Counter()  #: By name: how often ``own_name`` was called.
        self._barriers = Barriers()

    @property
    def gate(self) -> Gate:
        """Whether operations of this group, and of all groups of the same engine, are taken at present."""
        return self.runner.gate

    def submit(
        self,
        operation: CheckedOperation,
        name: str | None,
        priority: int,
        timeout_s: float | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        repeats: bool = False,
    ) -> Work:
        """Submit an operation; return at once.

        Args:
            operation: The operation, made by ``groups.checked``.
            name: The name of the operation; ``None``: the engine numbers it.
            priority: Operations with a smaller number are more urgent.
            timeout_s: Deadline in seconds of a ``wait`` that names none.
            ranks: The ranks of the job that take part; by default all ranks of the group.
            scope: A further prefix of the name, for names that totalreduce itself gives.
            repeats: Whether several operations of this name may be in flight.
        """
        submission, patience_s = self.submission(
            operation, name, priority, timeout_s, ranks=ranks, scope=scope, repeats=repeats
        )
        return self.start(submission, operation.operands, operation.results, patience_s)

    def submission(
        self,
        operation: CheckedOperation,
        name: str | None,
        priority: int,
        timeout_s: float | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        scope: str = "",
        repeats: bool = False,
    ) -> tuple[Submission, float]:
        """Return what ``start`` needs besides an operation; the arguments are those of ``submit``."""
        patience_s, priority = self.patience(timeout_s), checks.priority(priority)
        title, place, once = "", "", ""
        if name is None:
            title, place = call_here.get()
            origin = origin_of_call()
            if origin is not None:
                once, place = origin.name_next(self.scope, self.ranks)
                title = f"{title or operation.signature.kind.name.lower()} {place}"
        elif scope is _MESSAGES and ranks is not None:
            title = f"message from rank {ranks[0]} to rank {ranks[1]} with tag {name.rpartition(' ')[2]}"
            title += _of_place()
        submission = Submission(
            name,
            operation.signature,
            operation.buffers,
            ranks or self.ranks,
            self.scope + scope,
            repeats,
            priority,
            title,
            place,
            once,
        )
        return submission, patience_s

    def start(
        self, submission: Submission, operands: Operands | None, results: torch.Tensor | None, patience_s: float
    ) -> Work:
        """Submit an operation that was checked before; return at once.

        Args:
            submission: The operation.
            operands: Its tensors; ``None`` for bytes that belong to no tensor.
            results: The tensor that ``Work.wait`` returns.
            patience_s: Deadline in seconds of a ``wait`` that names none.
        """
        runner = self.runner
        runner.home.check()
        if self.closed:
            self._check_open()
        is_staged = operands is not None and operands.staged is not None
        if is_staged or (self.staging.jobs and self._is_behind(submission)):
            return self._start_staged(submission, operands, results, patience_s)
        if operands is None:
            handle = runner.submit(submission)
        else:
            self._memory.claim(operands, wait_s=patience_s if self.waits_for_memory else None)
            try:
                if operands.preparations:
                    operands.prepare()
                handle = runner.submit(submission, operands.end)
            except BaseException:
                operands.end(well=False)
                raise
        name = handle.operation.name if handle.operation is not None else submission.name or UNNAMED
        return Work(runner, handle, results, name, patience_s, ranks=self.ranks)

    def _is_behind(self, submission: Submission) -> bool:
        """Return whether an operation of this name, or another one without a name, waits for its tensors."""
        return self.staging.holds(_place(submission))

    def _start_staged(
        self, submission: Submission, operands: Operands | None, results: torch.Tensor | None, patience_s: float
    ) -> Work:
        """Have an operation submitted when its tensors are in host memory; return at once.

        Operations without names are matched by their order, so they are submitted behind such an operation, too.
        """
        name = submission.name
        if name is not None and not submission.repeats and self._is_behind(submission):
            raise ConfigurationError(
                f"an operation named {name!r} is already in flight on rank {self.rank}; wait for it or use another name"
            )
        shown = submission.title or name or UNNAMED
        tensors, end = (None, None) if operands is None else (operands.staged, operands.end)
        submit = functools.partial(self.runner.submit, submission, end)
        if operands is not None:
            self._memory.claim(operands, wait_s=patience_s if self.waits_for_memory else None)
        try:
            if operands is not None:
                operands.prepare()
            handle = self.staging.submit(shown, tensors, _place(submission), submit, end)
        except BaseException:
            if operands is not None:
                operands.end(well=False)
            raise
        return Work(self.staging, handle, results, shown, patience_s, ranks=self.ranks)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, priority: int, timeout_s: float | None) -> Work:
        """Send a tensor to a rank of the group (see ``Group.send``)."""
        return self._message(tensor, self.rank, self._peer(dst), tag, priority, timeout_s)

    def receive(self, tensor: torch.Tensor, src: int, tag: int, priority: int, timeout_s: float | None) -> Work:
        """Receive a tensor from a rank of the group (see ``Group.recv``)."""
        return self._message(tensor, self._peer(src), self.rank, tag, priority, timeout_s)

    def receive_any(self, tensor: torch.Tensor, tag: int, priority: int, timeout_s: float | None) -> Work:
        """Receive a tensor from the rank of the group that sends first (see ``Group.recv``)."""
        self._check_open()
        patience_s = self.patience(timeout_s)
        name = f"a message from any rank with tag {tag}{_of_place()}"
        operation = checked.message(tensor, name, writes=True, staging=self.staging)
        candidates = {
            rank: _message_name(place, self.rank, tag) for place, rank in enumerate(self.ranks) if place != self.rank
        }
        if not candidates:
            raise ConfigurationError("there is no other rank in the group that could send")
        buffer, operands = operation.buffers[0], operation.operands
        assert buffer is not None
        assert operands is not None
        priority, scope = checks.priority(priority), self.scope + _MESSAGES
        self.claim(operands, patience_s)
        try:
            operands.prepare()
            if operands.staged is not None:
                operands.staged.await_copies()
            handle = Handle(operands.end, name)
            self.runner.receive_any(AnyReceive(candidates, operation.signature, buffer, scope, priority, handle))
        except BaseException:
            operands.end(well=False)
            raise
        if operands.staged is not None:
            begun = self.staging.begun(name, operands.staged, handle)
            return Work(self.staging, begun, operation.results, name, patience_s, ranks=self.ranks)
        return Work(self.runner, handle, operation.results, name, patience_s, ranks=self.ranks)

    def barrier(self, timeout_s: float | None) -> Work:
        """Return when every rank has called it (see ``Group.barrier``)."""
        patience_s = self.patience(timeout_s)

        def submit() -> Work:
            # The barriers of a job share a few names, because the engine never forgets a name.
            name = f"barrier#{next(self._barriers.numbers) % _BARRIER_NAMES}"
            return self.submit(checked.barrier(), name, -1, patience_s, scope=_BARRIERS)

        return self._barriers.wait(submit, patience_s)

    def claim(self, operands: Operands, patience_s: float, beside: Sequence[Operands] = ()) -> None:
        """Claim the memory of an operation until ``operands.end``.

        Args:
            operands: The operation's tensors.
            patience_s: Seconds to wait for operations that use the same memory, with ``waits_for_memory``.
            beside: Operations that begin together with this one, and have claimed their memory.

        Raises:
            ConfigurationError: An operation in flight uses the same memory (see ``MemoryInFlight.claim``).
            DeadlineExceededError: With ``waits_for_memory``: such an operation has not ended in time.
        """
        self._memory.claim(operands, wait_s=patience_s if self.waits_for_memory else None, beside=beside)

    def own_name(self, name: str) -> str:
        """Return a name for the operations of an object: with a number, if the name was asked for before."""
        self._num_made[name] += 1
        return successor_name(name, self._num_made[name] - 1)

    def patience(self, timeout_s: float | None) -> float:
        """Return the time-out in seconds: ``timeout_s``, or that of the group if it is ``None``."""
        return self.runner.engine.config.timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor in memory that the other ranks of this host can read (see ``Group.empty``).

        Also while the group is being closed: a native library still carries operations out, and needs memory for them.
        """
        self.runner.home.check()
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = self.runner.transport.allocate(num_bytes) if num_bytes else None
        if memory is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(memory).view(dtype).view(shape)

    # ----------------------------------------------------------------------------------------------- other operations

    def subgroup(self, ranks: Sequence[int], name: str | None) -> Operations:
        """Return operations of some ranks of the group (see ``Group.subgroup``)."""
        members = checks.ranks_in(ranks, self.world_size)
        if name is not None:
            checks.operation_name(name)
        if self.rank not in members:
            raise ConfigurationError(f"rank {self.rank} is not among {list(members)}; only members make a subgroup")
        shown, quoted = f"{self.name}/{name}", repr(name)
        if name is None:
            quoted = str(self._subgroups[members])  # without quotes, so that no user's name is the same
            shown = f"{self.name}/{quoted}"
            self._subgroups[members] += 1
        scope = f"{self.scope}{quoted}({','.join(map(str, members))})/"
        return self._derived(shown, tuple(self.ranks[rank] for rank in members), scope, self._memory)

    def within(self, purpose: str) -> Operations:
        """Return operations of the same ranks for totalreduce itself, with names separate from those of users."""
        inner = self._inner.get(purpose)
        if inner is None:
            scope = f"{self.scope}{purpose}/"
            inner = self._inner[purpose] = self._derived(f"{self.name}/{purpose}", self.ranks, scope, self._memory)
        return inner

    def apart(self) -> Operations:
        """Return the same operations with another record of memory, for callers that have claimed the memory."""
        return self._derived(self.name, self.ranks, self.scope, MemoryInFlight())

    def close(self) -> None:
        """Take no more operations. For the group of all ranks the engine refuses them, once it is closed."""
        self.closed = True
        if self.parent is not None:
            for inner in self._inner.values():
                inner.close()

    # -------------------------------------------------------------------------------------------------------- details

    def _derived(self, name: str, ranks: tuple[int, ...], scope: str, memory: MemoryInFlight) -> Operations:
        derived = Operations(self.runner, name, ranks, scope, self, memory)
        derived.waits_for_memory = self.waits_for_memory
        return derived

    def _message(
        self, tensor: torch.Tensor, src: int, dst: int, tag: int, priority: int, timeout_s: float | None
    ) -> Work:
        name = _message_name(src, dst, tag)
        operation = checked.message(tensor, name, writes=dst == self.rank, staging=self.staging)
        ranks = (self.ranks[src], self.ranks[dst])
        return self.submit(operation, name, priority, timeout_s, ranks=ranks, scope=_MESSAGES, repeats=True)

    def _check_open(self) -> None:
        self.runner.home.check()
        if self.closed and self.parent is not None:
            raise GroupClosed(f"rank {self.rank} has closed the subgroup {self.name!r}; make a new one with subgroup()")

    def _peer(self, peer: int) -> int:
        peer = checks.integer("the other rank", peer)
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ConfigurationError(f"{peer} is not another rank than {self.rank} of a group of {self.world_size}")
        return peer


@final
@never_compiled
class PreparedOperation:
    """An operation that was checked once, to be started again and again. Any thread may call it.

    ``Group.prepare_allreduce`` makes one that holds the memory of its tensor: as long as it exists, that cannot be
    resized. ``Group.allreduce`` keeps one for each name, which refers to its tensor weakly and holds the memory only
    while the operation is in flight.
    """

    __slots__ = (
        "_described",
        "_operands",
        "_operations",
        "_options",
        "_patience_s",
        "_place",
        "_results",
        "_submission",
        "_tensor",
    )

    def __init__(
        self, operations: Operations, operation: CheckedOperation, options: Options, place: Place | None = None
    ) -> None:
        """Prepare an operation.

        Args:
            operations: The group's operations, which submit it.
            operation: The operation, made by ``groups.checked``.
            options: Its name, priority, schedule and time-out.
            place: Where its tensor lies, if the memory is held only while the operation is in flight: then ``start_on``
                submits it.
        """
        tensor = operation.results
        self._operations, self._options, self._place = operations, options, place
        self._submission, self._patience_s = operations.submission(
            operation, options.name, options.priority, options.timeout_s
        )
        if tensor is not None:
            self._tensor, self._described = weakref.ref(tensor), _description(tensor)
        self._operands, self._results = (operation.operands, tensor) if place is None else (None, None)

    def __repr__(self) -> str:
        submission = self._submission
        return f"<PreparedOperation {submission.name!r}: {submission.signature.describe()}>"

    @property
    def is_current(self) -> bool:
        """Whether the tensor still has the memory that it had when the operation was prepared."""
        return self._operands is None or not self._operands.has_moved

    def is_allreduce_of(self, tensor: torch.Tensor, op: ReduceOp, options: Options) -> bool:
        """Return whether it is an allreduce of a tensor, which lies where it did, with these arguments."""
        return (
            self._tensor() is tensor
            and self._submission.signature.reduction is op
            and self._options == options
            and self._described == _description(tensor)
        )

    def start(self) -> Work:
        """Submit the operation once more; return at once.

        The n-th start on one rank meets the n-th start, or the n-th ``allreduce`` of this name, on the others.

        Raises:
            ConfigurationError: The operation is in flight; or the tensor was given other memory.
            PeerLost: A rank is lost.
            GroupClosed: This rank has closed the group.
        """
        operands = self._operands
        if operands is not None and operands.has_moved:
            raise ConfigurationError(
                f"{self._submission.name!r}: the tensor of this prepared operation was given other memory "
                "(by .data = …, set_ or resize_): prepare the operation again"
            )
        check_not_in_callback(self._submission.name)
        return self._operations.start(self._submission, operands, self._results, self._patience_s)

    def start_on(
        self,
        tensor: torch.Tensor,
        kept_in: MutableMapping[str, PreparedOperation] | None = None,
        operands: Operands | None = None,
    ) -> Work:
        """Submit an operation of which ``is_allreduce_of`` is true; return at once. Raises what ``start`` does.

        Args:
            tensor: The tensor.
            kept_in: The table that keeps this object until the operation fails, if it does not hold the memory.
            operands: What the check has made of the tensor, at the first start.
        """
        operands = operands or self._operands
        if operands is None:
            assert self._place is not None
            operands = Operands.again(self._place, tensor)
        operands.kept_in = kept_in
        return self._operations.start(self._submission, operands, tensor, self._patience_s)


def _description(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what makes the bytes of a tensor others, if it changes."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()


def _place(submission: Submission) -> Hashable:
    """Return what operations have in common that meet those of other ranks in their order."""
    return submission.scope, submission.name, submission.once


def _of_place() -> str:
    """Return which group a message belongs to, where torch.distributed sends it; else ""."""
    place = call_here.get()[1]
    return f" {place}" if place else ""


def check_not_in_callback(name: str | None) -> None:
    """Refuse a prepared operation without a name in a callback of a future, where its number would not be certain."""
    if name is None and surroundings.get() is not None:
        raise ConfigurationError("a callback of a future uses a prepared operation without a name: prepare it with one")


def _message_name(src: int, dst: int, tag: int) -> str:
    return f"message {src} to {dst}, tag {checks.integer('tag', tag)}"
