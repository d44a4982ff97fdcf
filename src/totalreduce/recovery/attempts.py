"""``Attempts``: the part of a program that is run again with a new group when a rank is lost.

Unlike the blocks of ``job``, nothing is undone here and there is no vote: each rank counts the steps that it has taken
(``Attempt.commit``). Ranks can differ by one step when the group ends, because the last message of a step reaches some
ranks and not others. The next attempt begins with the state of a rank that has taken the most steps, so no step is lost
that any of the remaining ranks has taken. That needs nothing of the program but that it finds its place by the state,
and costs nothing while no rank is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self, final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.group import Group
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.dealing import needed
from totalreduce.recovery.forming import begin_from_disk, compare_states, seed_generators, send_state
from totalreduce.recovery.runs import Membership, Run, Runs, latest_version
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State

__all__ = ["Attempt", "Attempts"]


class _MembersChange(BaseException):
    """Ends an attempt because processes want to join. No program catches it by ``except Exception``."""


@final
class Attempt(Run):
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
        super().__init__(group, assembly, number, has_begun=state.version > 0)
        self._state, self._seed, self._snapshots = state, seed, snapshots

    @property
    def interruption(self) -> type[BaseException]:
        """The exception that ends an attempt because processes join."""
        return _MembersChange

    def __enter__(self) -> Self:
        """Begin."""
        self._state.drop_gradients()
        seed_generators(self._seed, self._state.version, self.group.rank)
        return self

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, and have the sampler begin each. The first epoch is 0."""
        yield from needed(self._state.sampler, "attempt.epochs").epochs(count)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this rank from the position of the state to the end of the epoch.

        Fewer samples than there are ranks are not used at the end: each rank has a batch in each step.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the state's ``ElasticSampler``, or whose data set is its
                ``ElasticStream``.

        Raises:
            ConfigurationError: It is not, or the loop's body has not called ``commit``.
        """
        dealer = needed(self._state.sampler, "attempt.batches", loader)
        if dealer.is_over:
            return
        iterator = iter(loader)
        # This has drawn a number, at the begin of the epoch or of the attempt: the step begins as after ``commit``.
        seed_generators(self._seed, self._state.version, self.group.rank)
        for batch in dealer.deal(iterator):
            if dealer.next_total < self.group.world_size:
                return
            version = self._state.version
            yield batch
            if self._state.version != version + 1:
                raise ConfigurationError(
                    "a step of attempt.batches ends with attempt.commit(), called once after optimizer.step()"
                )

    def commit(self) -> None:
        """Note that this rank has taken a step: call it once after each ``optimizer.step()``.

        The position of the sampler moves on, and the generators of random numbers are seeded for the next step. If
        processes wait to join (``--on-loss shrink``), the attempt ends on all ranks.
        """
        state = self._state
        state.count(None)
        if state.sampler is not None:
            state.sampler.advance()
        seed_generators(self._seed, state.version, self.group.rank)
        snapshots = self._snapshots
        if snapshots is not None and snapshots.is_due(state.version) and self.group.rank == 0:
            snapshots.write(state.version, 0, self.group.world_size, state.shared(), None)
        self.note_step()
        if self.has_newcomers():
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
        settings: str = "",
    ) -> None:
        """Note the parts; nothing is formed yet.

        Args:
            state: What all ranks begin an attempt with.
            membership: Forms the groups.
            timeout_s: How long the decision who the members are may take.
            seed: Of the generators of random numbers, with the version and the rank.
            verify: Compare SHA-256 of parameters and optimizer state on all ranks when an attempt begins.
            snapshots: Writes the state to disk. The job begins with its last version, if there is one.
            settings: What must be equal on all ranks to form a group, one setting in a line.
        """
        self._settings = settings
        self._state, self._membership, self._timeout_s = state, membership, timeout_s
        self._seed, self._verify = checks.integer("seed", seed), bool(verify)
        self._snapshots = snapshots

    def __iter__(self) -> Iterator[Attempt]:
        """Yield an attempt, and another one whenever the members have changed. Raises what ``Runs`` does."""
        return iter(Runs(self, self._membership, self._timeout_s, self._settings))

    # ------------------------------------------------------------------------------------- a part of a program (Runs)

    @property
    def version(self) -> int:
        """The number of steps that this rank has taken."""
        return self._state.version

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one item in a line."""
        return f"{self._state.describe()}\nseed={self._seed}"

    def begin(self, group: Group, assembly: Assembly | None, number: int) -> Attempt:
        """Return the attempt that begins now."""
        return Attempt(self._state, group, assembly, seed=self._seed, number=number, snapshots=self._snapshots)

    def level(self, group: Group, *, has_state: bool, epoch: int) -> None:  # noqa: ARG002
        """Bring all ranks to the state of the first rank with the latest version. Collective."""
        state = self._state
        source, versions = latest_version(group, state.version if has_state else None)
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
