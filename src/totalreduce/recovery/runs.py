"""Runs: a part of a program that is run again, with a new group, when the members of a job change.

``Runs`` enters the epochs one after the other (``epochs``), and has the ranks come to one state before each run. What
this state is, and how ranks come to it, is up to a ``Restartable``: ``tr.attempts`` (``attempts``) and Horovod's
elastic training (``horovod.elastic``) each have one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, final

import torch

from totalreduce.foundation import environment
from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.recovery.assembly import NEWCOMERS_S, Assembly
from totalreduce.recovery.epochs import JOINING, Epochs, ended_early, open_assembly
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.wishes import Wish

__all__ = ["Groups", "Restartable", "Run", "Runs", "latest_version"]


class Groups(Protocol):
    """What forms and ends the groups of the runs."""

    def form(self, *, store: StoreRank | None = None, **options: Any) -> Group:
        """Form a group with the processes that meet in the store, or with those that the launcher names."""
        ...

    def leave(self, reason: str) -> None:
        """End the group, if there is one, so that the other ranks learn the reason."""
        ...


class Run(ABC):
    """One run of the program's part with one group; a context manager.

    Attributes:
        group: The ranks.
        number: The number of this run, from 0, as this process counts.
        is_lost: Whether the run has ended because the members change.
        is_complete: Whether this rank has come to the end of the program's part.
        error: The loss of a rank with which the run has ended; ``None`` if there was none.
    """

    def __init__(self, group: Group, assembly: Assembly | None, number: int) -> None:
        """Note the group.

        Args:
            group: The ranks.
            assembly: This process in the decisions; ``None`` if ranks cannot be replaced.
            number: See the attribute.
        """
        self.group, self.number = group, number
        self.is_lost = self.is_complete = False
        self.error: PeerLost | None = None
        self._assembly = assembly

    @property
    @abstractmethod
    def interruption(self) -> type[BaseException]:
        """The exception that ends a run on all ranks because processes join."""

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Wait for all ranks to come to the end. After a loss, return true: the next run follows."""
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
        self.is_lost = self.error is not None or isinstance(error, self.interruption)
        return self.is_lost

    def note_step(self) -> None:
        """Note that a step has taken effect: from then on, the job does not begin anew without the state."""
        if self._assembly is not None:
            self._assembly.begin()

    @property
    def takes_newcomers(self) -> bool:
        """Whether processes can join between two steps; equal on all ranks."""
        return self._assembly is not None and self._assembly.policy.on_loss == "shrink"

    def has_newcomers(self) -> bool:
        """Return whether processes wait to join; equal on all ranks. Collective if ``takes_newcomers``."""
        return self.takes_newcomers and self.agree(Wish.NOTHING) is Wish.MEMBERS

    def agree(self, wish: Wish) -> Wish:
        """Return the largest wish of all ranks; rank 0 wishes for the members that wait. Collective."""
        assembly = self._assembly
        if assembly is not None and self.takes_newcomers and self.group.rank == 0:
            wish = max(wish, Wish.MEMBERS if assembly.has_newcomers(NEWCOMERS_S) else Wish.NOTHING)
        largest = torch.tensor([int(wish)], dtype=torch.int64, device="cpu")
        self.group.control.allreduce(largest, name="recovery/wish", op=ReduceOp.MAX).wait()
        return Wish(int(largest))


_AnyRun = TypeVar("_AnyRun", bound=Run)
_MadeRun_co = TypeVar("_MadeRun_co", bound=Run, covariant=True)


class Restartable(Protocol[_MadeRun_co]):
    """The part of the program that is run again, and its state."""

    @property
    def version(self) -> int:
        """How far this rank's state is: larger on a rank whose state is later."""
        ...

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one line for each item."""
        ...

    def level(self, group: Group, *, has_state: bool, decision: Decision | None) -> None:
        """Bring all ranks to the state of a rank with the latest version. Collective."""
        ...

    def begin(self, group: Group, assembly: Assembly | None, number: int) -> _MadeRun_co:
        """Return the run that begins now; the arguments are those of ``Run``."""
        ...


@final
class Runs(Generic[_AnyRun]):
    """The runs of a program's part: iterate over them once."""

    def __init__(self, part: Restartable[_AnyRun], groups: Groups, timeout_s: float, settings: str) -> None:
        """Note the arguments; nothing is formed yet."""
        self._part, self._groups, self._timeout_s, self._settings = part, groups, timeout_s, settings

    def __iter__(self) -> Iterator[_AnyRun]:
        """Yield a run, and another one whenever the members have changed.

        Raises:
            ConfigurationError: This process runs another program, or other settings, than the others. Or the body of
                the loop is not in ``with`` the run.
            RecoveryError: Too few processes have come in time, nobody has the state any more, or the states differ. Or
                the others have ended the job without this rank.
            SystemExit: With ``--on-loss shrink``: the others have ended the job, and there is nothing left to do.
        """
        settings, part = environment.read_settings(), self._part
        if settings.on_loss is None:
            group = self._groups.form()
            part.level(group, has_state=False, decision=None)
            run = part.begin(group, None, 0)
            yield run
            _check_used(run)
            return
        world = environment.read_world()
        assembly = open_assembly(settings, world.rank, world.world_size, self._timeout_s)
        assembly.check_program(part.describe(), self._settings)

        def level(group: Group, decision: Decision) -> None:
            part.level(group, has_state=epochs.has_state, decision=decision)
            if not group.meter.totals.steps:
                group.meter.begin_at(part.version)

        epochs = Epochs(assembly, self._groups.form, level, version=lambda: part.version, leave=self._groups.leave)
        epochs.begin()
        for number in itertools.count():
            run = part.begin(epochs.group, assembly, number)
            yield run
            if not run.is_lost:
                _check_used(run)
                assembly.finish()
                return
            epochs.leave(JOINING if run.error is None else run.error)
            if not epochs.enter():
                if not run.is_complete:
                    raise ended_early()
                return


def latest_version(group: Group, version: int | None) -> tuple[int, list[int]]:
    """Return the first rank with the latest version of the state, and the version of each rank. Collective.

    Args:
        group: The ranks.
        version: The version of this rank; ``None`` if it has no state. Such ranks have -1 in the result. If no rank has
            the state, the first rank of the result is 0.
    """
    versions = group.control.allgather_object(-1 if version is None else version)
    return versions.index(max(versions)), versions


def _check_used(run: Run) -> None:
    if not run.is_complete:
        raise ConfigurationError("the body of the loop over tr.attempts is not in the attempt: write `with attempt:`")


def _loss_in(error: BaseException) -> PeerLost | None:
    """Return the loss of a rank that has caused an error; ``None`` if it has another cause.

    ``torch.distributed`` raises errors of its own, whose cause is that of this library. ``SystemExit`` and
    ``KeyboardInterrupt`` end the program, even if it was a loss that made the program raise them.
    """
    seen: BaseException | None = error if isinstance(error, Exception) else None
    known: list[BaseException] = []  # a program can make an error its own cause
    while seen is not None and all(seen is not each for each in known):
        if isinstance(seen, PeerLost):
            return seen
        known.append(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None
