"""``Attempts``: the part of a program that is run again with a new group when a rank is lost.

Unlike the blocks of ``job``, nothing is undone here and there is no vote: each rank counts the steps that it has taken
(``Attempt.commit``). Ranks can differ by one step when the group ends, because the last message of a step reaches some
ranks and not others. The next attempt begins with the state of a rank that has taken the most steps, so no step is lost
that any of the remaining ranks has taken. That needs nothing of the program but that it finds its place by the state,
and costs nothing while no rank is lost.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, final

import torch

from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.forming import (
    begin_from_disk,
    compare_states,
    end_too_late,
    enter_next_epoch,
    form_group,
    open_assembly,
    report_loss,
    seed_generators,
    send_state,
)
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.sampler import needed
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State

__all__ = ["Attempt", "Attempts", "Membership"]

_log = logging.getLogger("totalreduce")

#: How often rank 0 looks for processes that want to join.
_NEWCOMERS_S = 0.25


class Membership(Protocol):
    """What forms and ends the groups of the attempts."""

    def form(self, *, store: StoreRank | None = None, **options: Any) -> Group:
        """Form a group with the processes that meet in the store, or with those that the launcher names."""
        ...

    def leave(self, reason: str) -> None:
        """End the group, if there is one, so that the other ranks learn the reason."""
        ...


class _MembersChange(BaseException):
    """Ends an attempt because processes want to join. No program catches it by ``except Exception``."""


@final
class Attempt:
    """One run of the program's part with one group; a context manager.

    Attributes:
        group: The ranks.
        number: The number of this attempt, from 0, as this process counts.
        is_lost: Whether the attempt has ended because the members change.
        is_complete: Whether this rank has come to the end of the program's part.
    """

    def __init__(
        self,
        state: State,
        group: Group,
        assembly: Assembly | None,
        *,
        seed: int,
        number: int,
        snapshots: Snapshots | None,
    ) -> None:
        """``assembly``: ``None`` if ranks cannot be replaced."""
        self.group, self.number = group, number
        self.is_lost = self.is_complete = False
        self.error: PeerLost | None = None  #: Why the attempt has ended, if a rank is lost.
        self._state, self._assembly, self._seed, self._snapshots = state, assembly, seed, snapshots
        self._has_begun = state.version > 0

    def __enter__(self) -> Self:
        """Begin."""
        self._state.drop_gradients()
        seed_generators(self._seed, self._state.version, self.group.rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Wait for all ranks to come to the end. After a loss, return true: the next attempt follows."""
        if error is None:
            self.is_complete = True
            try:
                self.group.control.barrier()
            except PeerLost as lost:
                error = lost
            else:
                return False
        if self._assembly is None:
            if kind is None:
                raise error
            return False
        self.error = _loss_in(error)
        self.is_lost = self.error is not None or isinstance(error, _MembersChange)
        return self.is_lost

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, and have the sampler begin each. The first epoch is 0."""
        yield from needed(self._state.sampler, "attempt.epochs").epochs(count)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this rank from the position of the state to the end of the epoch.

        Fewer samples than there are ranks are not used at the end: each rank has a batch in each step.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the state's ``ElasticSampler``.

        Raises:
            ConfigurationError: It is not, or the loop's body has not called ``commit``.
        """
        sampler = needed(self._state.sampler, "attempt.batches", loader)
        iterator = iter(loader)
        # This has drawn a number, at the begin of the epoch or of the attempt: the step begins as after ``commit``.
        seed_generators(self._seed, self._state.version, self.group.rank)
        while sampler.next_total >= self.group.world_size:
            version = self._state.version
            yield next(iterator)
            if self._state.version != version + 1:
                raise ConfigurationError(
                    "a step of attempt.batches ends with attempt.commit(), called once after optimizer.step()"
                )

    def commit(self) -> None:
        """Note that this rank has taken a step: call it once after each ``optimizer.step()``.

        The position of the sampler moves on, and the generators of random numbers are seeded for the next step. If
        processes wait to join (``--on-loss shrink``), the attempt ends on all ranks.
        """
        state, assembly = self._state, self._assembly
        state.count(None)
        if state.sampler is not None:
            state.sampler.advance()
        seed_generators(self._seed, state.version, self.group.rank)
        snapshots = self._snapshots
        if snapshots is not None and snapshots.is_due(state.version) and self.group.rank == 0:
            snapshots.write(state.version, 0, self.group.world_size, state.shared(), None)
        if assembly is None:
            return
        if not self._has_begun:
            self._has_begun = True
            assembly.begin()
        if assembly.policy.on_loss == "shrink":
            wanted = torch.tensor([int(self.group.rank == 0 and assembly.has_newcomers(_NEWCOMERS_S))])
            self.group.control.allreduce(wanted, name="recovery/newcomers", op=ReduceOp.MAX).wait()
            if wanted:
                raise _MembersChange


@final
class Attempts:
    """The attempts of one program: iterate over them once."""

    def __init__(
        self,
        state: State,
        membership: Membership,
        *,
        timeout_s: float,
        seed: int = 0,
        verify: bool = True,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Note the parts; nothing is formed yet.

        Args:
            state: What all ranks begin an attempt with.
            membership: Forms the groups.
            timeout_s: How long the decision who the members are may take.
            seed: Of the generators of random numbers, with the version and the rank.
            verify: Compare SHA-256 of parameters and optimizer state on all ranks when an attempt begins.
            snapshots: Writes the state to disk. The job begins with its last version, if there is one.
        """
        self._state, self._membership, self._timeout_s = state, membership, timeout_s
        self._seed, self._verify = checks.integer("seed", seed), bool(verify)
        self._snapshots = snapshots
        self._has_state = False

    def __iter__(self) -> Iterator[Attempt]:
        """Yield an attempt, and another one whenever the members have changed.

        Raises:
            ConfigurationError: This process runs another program, or other settings, than the others. Or the body of
                the loop is not in ``with attempt``.
            RecoveryError: Too few processes have come in time, nobody has the state any more, or the states differ. Or
                the others have ended the job without this rank.
            SystemExit: With ``--on-loss shrink``: the others have ended the job, and there is nothing left to do.
        """
        settings, state = environment.read_settings(), self._state
        if settings.on_loss is None:
            group = self._membership.form()
            self._level(group)
            attempt = self._attempt(group, None, 0)
            yield attempt
            _check_used(attempt)
            return
        world = environment.read_world()
        assembly = open_assembly(settings, world.rank, world.world_size, self._timeout_s)
        assembly.check_equal("program", f"{state.describe()}\nseed={self._seed}")
        is_complete = False
        for number in itertools.count():
            formed = self._form(assembly)
            if formed is None:
                if not is_complete:
                    raise RecoveryError("the other ranks have come to the end of the job, and this rank has not")
                return
            attempt = self._attempt(formed, assembly, number)
            yield attempt
            is_complete = attempt.is_complete
            if not attempt.is_lost:
                _check_used(attempt)
                assembly.finish()
                return
            self._leave(assembly, attempt)

    def _attempt(self, group: Group, assembly: Assembly | None, number: int) -> Attempt:
        return Attempt(self._state, group, assembly, seed=self._seed, number=number, snapshots=self._snapshots)

    def _leave(self, assembly: Assembly, attempt: Attempt) -> None:
        error = attempt.error
        if error is not None:
            report_loss(assembly, attempt.group.rank, error)
        self._membership.leave(str(error) if error is not None else "other processes join")

    def _form(self, assembly: Assembly) -> Group | None:
        """Form the next group, and bring its ranks to one state; ``None``: the job has ended."""
        formed: list[Group] = []

        def enter(decision: Decision) -> None:
            group = form_group(assembly, self._membership.form)
            self._level(group)
            if group.rank == 0:
                _log.info("epoch %d: %d ranks, version %d", decision.epoch, group.world_size, self._state.version)
            formed.append(group)

        def meet() -> Decision | None:
            return assembly.meet(has_state=self._has_state, version=self._state.version)

        if enter_next_epoch(assembly, meet, enter, self._membership.leave):
            return formed[-1]
        if not self._has_state:
            end_too_late(assembly)
        return None

    def _level(self, group: Group) -> None:
        """Bring all ranks to the state of the first rank with the latest version. Collective."""
        state = self._state
        versions = group.control.allgather_object(state.version if self._has_state else -1)
        source = versions.index(max(versions))
        others = [rank for rank, version in enumerate(versions) if version < versions[source]]
        if versions[source] < 0:  # the job begins: rank 0 has what all begin with
            others = [rank for rank in range(group.world_size) if rank != source]
            if group.rank == source:
                begin_from_disk(state, self._snapshots)
        send_state(state, group, source, others)
        if self._verify:
            compare_states(state, group)
        if state.sampler is not None:
            state.sampler.place(group.rank, group.world_size)
        self._has_state = True


def _check_used(attempt: Attempt) -> None:
    if not attempt.is_complete:
        raise ConfigurationError("the body of the loop over tr.attempts is not in the attempt: write `with attempt:`")


def _loss_in(error: BaseException) -> PeerLost | None:
    """Return the loss of a rank that has caused an error; ``None`` if it has another cause.

    ``torch.distributed`` raises errors of its own, whose cause is that of this library.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerLost):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
