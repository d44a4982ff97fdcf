"""``Attempts``: the part of a program that is run again with a new group when a rank is lost.

Unlike the blocks of ``job``, a step has no vote: each rank counts the steps that it has taken (``Attempt.commit``).
Ranks can differ by one step when the group ends, because the last message of a step reaches some ranks and not others.
The next attempt begins with the state of a rank that has taken the most steps, so no step is lost that any of the
remaining ranks has taken. What the step that is repeated has changed before ``optimizer.step()`` (buffers such as
running statistics, values, hyper-parameters) is undone, so each commit keeps copies of these. Of parameters and of the
optimizer's state there are none, unless collectives come between a step and its commit; a rank that has others than at
its last commit gives them to nobody (``weights``). That needs nothing of the program but that it finds its place by the
state.

A program may commit in the middle of an accumulation, with gradients that no optimizer has used. Such a commit is
*provisional*: it keeps no copies, and a loss undoes it, with those before it back to the last step. So the batches of
these gradients are computed again.

A model that FSDP2 shards is bound to one group, so the program builds it in each attempt and passes its state to
``Attempt.synchronize`` (``ShardedAttempts``). The shards of a lost rank come from copies (``copies``), and all ranks go
back to the version of the copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, RecoveryError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.dealing import batches_of, needed
from totalreduce.recovery.hook_states import HookStates
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.refusals import check_whole
from totalreduce.recovery.runs import Run, latest_version
from totalreduce.recovery.sharing import begin_from_disk, compare_states, seed_generators, send_state
from totalreduce.recovery.snapshots import Snapshots, share_token
from totalreduce.recovery.state import State
from totalreduce.recovery.steps import StepsSinceCommit, has_elements
from totalreduce.recovery.weights import CommitWeights
from totalreduce.recovery.wishes import Wish, handles_signals, wish_to_end

if TYPE_CHECKING:
    from totalreduce.recovery.copies import ShardCopies  # which imports FSDP2: programs for DDP do without it

__all__ = ["Attempt", "Attempts", "Keepers", "ShardedAttempts"]

_log = logging.getLogger(__name__)


class _MembersChange(BaseException):
    """Ends an attempt because processes want to join. No program catches it by ``except Exception``."""


class Keepers(NamedTuple):
    """What keeps the state of an attempt, for what is begun again and for later runs.

    Attributes:
        seed: Of the generators of random numbers.
        snapshots: Writes the state to disk.
        hooks: What the hooks of DDP keep back.
        copies: Keeps copies of a sharded state.
        weights: Tells after a loss whether the weights are those of the last commit; of a state that is not sharded,
            where ranks can be replaced.
    """

    seed: int = 0
    snapshots: Snapshots | None = None
    hooks: HookStates | None = None
    copies: ShardCopies | None = None
    weights: CommitWeights | None = None


@final
class Attempt(Run):
    """One run of the program's part with one group; a context manager.

    Attributes:
        group: The ranks.
        number: The number of this attempt, from 0, as this process counts.
        is_lost: Whether the attempt has ended because the members change.
        is_complete: Whether this rank has come to the end of the program's part.
        preempted: Whether the loop has ended early, on all ranks, because a rank got a signal of
            ``tr.Snapshots(on_signal=...)``. The last version is then on disk, unless writing it has failed, which is
            logged (``snapshots.failed``).
    """

    def __init__(
        self,
        state: State | None,
        group: Group,
        assembly: Assembly | None,
        number: int,
        keepers: Keepers,
    ) -> None:
        """Begin with a state, or with ``copies`` and without a state.

        Args:
            state: The state; ``None``: the program passes it to ``synchronize``.
            group: The ranks.
            assembly: This process in the decisions on members; ``None`` if ranks cannot be replaced.
            number: The number of the attempt.
            keepers: What keeps its state.
        """
        super().__init__(group, assembly, number)
        self._known_state, self._seed = state, keepers.seed
        self._snapshots, self._copies, self._weights = keepers.snapshots, keepers.copies, keepers.weights
        self._hooks = keepers.hooks or HookStates(state, 0)
        self._steps: StepsSinceCommit | None = None
        self._version = 0  #: Of the last commit that is not provisional.
        self.preempted = False

    @property
    def _state(self) -> State:
        if self._known_state is None:
            raise ConfigurationError(
                "with tr.attempts(copies=...) the program builds the model in each attempt: call "
                "attempt.synchronize(tr.State(model=..., optimizer=...)) before the loop"
            )
        return self._known_state

    @property
    def interruption(self) -> type[BaseException]:
        """The exception that ends an attempt because processes join."""
        return _MembersChange

    def __enter__(self) -> Self:
        """Begin."""
        if self._known_state is None:
            # A model that is built now is the same on all ranks and in all attempts.
            seed_generators(self._seed, 0, 0)
        else:
            self._begin(self._known_state)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Do what ``Run.__exit__`` does; steps are not counted any more, and have no vote."""
        if self._steps is not None:
            self._steps.remove()
        self._hooks.rest()
        return super().__exit__(kind, error, traceback)

    def synchronize(self, state: State) -> None:
        """Bring the state that the program has built to the state of the job. Collective, once in an attempt.

        With ``tr.attempts(copies=...)`` only. All ranks get the last version of which all parts are in the memory of
        some rank; else the last version on disk; else the state stays as it was built, and what is not sharded is
        rank 0's. Parts are dealt out anew if the number of ranks has changed.

        Args:
            state: Of this attempt's model, after ``fully_shard``.

        Raises:
            PeerLost: A rank is lost.
            RecoveryError: The copies that are left lack the shards of some ranks, and no version is on disk.
            ConfigurationError: The state is another one than that of the other ranks, or than that of the job.
            UnsupportedError: The model is sharded in a way that is not supported.
        """
        copies, assembly = self._copies, self._assembly
        if copies is None:
            raise ConfigurationError(
                "attempt.synchronize is for tr.attempts(copies=...): tr.attempts(state) does it by itself"
            )
        if self._known_state is not None:
            raise ConfigurationError("attempt.synchronize is called once in an attempt")
        epoch, has_begun = 0, False
        if assembly is None:
            self.group.agree("recovery/state", {"lines": state.describe().splitlines()})
        else:
            assembly.check_equal("state", state.describe())
            assert assembly.current is not None
            epoch, has_begun = assembly.current.epoch, assembly.has_begun()
        copies.synchronize(state, self.group, epoch, self._snapshots, has_begun=has_begun)
        if state.sampler is not None:
            state.sampler.place(self.group.rank, self.group.world_size)
        if self.group.rank == 0 and state.version:
            _log.info("the attempt begins with version %d", state.version)
        self._known_state = state
        self._begin(state)

    def _begin(self, state: State) -> None:
        state.drop_gradients()
        self._version = state.version
        counts = self._weights is not None  # else it does not matter when collectives are called
        self._steps = StepsSinceCommit(state, self._count_operations if counts else None)
        seed_generators(self._seed, state.version, self.group.rank)

    def _count_operations(self) -> int:
        return self.group.statistics().operations

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, and have the sampler begin each. The first epoch is 0."""
        for epoch in needed(self._state.sampler, "attempt.epochs").epochs(count):
            yield epoch
            if self.preempted:
                return

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
        iterator = batches_of(loader)
        # This has drawn a number, at the begin of the epoch or of the attempt: the step begins as after ``commit``.
        seed_generators(self._seed, self._state.version, self.group.rank)
        for batch in dealer.deal(iterator):
            if self.preempted or dealer.next_total < self.group.world_size:
                return
            version = self._state.version
            yield batch
            if self._state.version != version + 1:
                raise ConfigurationError(
                    "each batch of attempt.batches ends with attempt.commit(), called once and after optimizer.step()"
                )

    def commit(self) -> None:
        """Note that this rank has used a batch: call it after ``optimizer.step()``, once for each batch.

        If gradients wait for a step, because the program accumulates them over several batches, the commit counts for
        the time being: a loss undoes it, up to the last commit after a step. Snapshots that are due, processes that
        wait to join, and signals wait for the next step.

        If collectives come between an optimizer's step and this call, a loss in one of them must undo the step: then
        each commit copies parameters and states of optimizers, from the first such commit on (with several optimizers
        from the begin on). What the program changes after this call is undone when a rank is lost in the next step.

        The position of the sampler moves on, and the generators of random numbers are seeded for the next step. If
        processes wait to join (``--on-loss shrink``), the attempt ends on all ranks. If a rank has got a signal of the
        snapshots, the version is on disk when this returns, and the loops end.

        Raises:
            ConfigurationError: An optimizer has made a state that cannot be sent to other ranks.
            PeerLost: A rank is lost.
        """
        state, steps = self._state, self._steps
        if self._is_provisional():
            self._count()
            self._wish_of_all()  # on all ranks, also if another one's gradients are all zero
            return
        are_interrupted = steps is not None and steps.are_interrupted
        self._hooks.end_step()
        if self._version == 0:
            state.check_first_step()
        self._count()
        self._hooks.commit(state.version)
        if self._copies is None:  # else the next attempt builds the model anew
            state.keep()
        if self._weights is not None and steps is not None:
            self._weights.commit(steps.number, are_interrupted=are_interrupted, logs=self.group.rank == 0)
        since, self._version = self._version, state.version
        snapshots = self._snapshots
        if self._copies is not None:
            self._copies.commit(state, since)
        elif snapshots is not None and snapshots.is_due(state.version, since):
            self._write()
        wish = self._wish_of_all()
        if wish is Wish.MEMBERS:
            if self._copies is not None:
                self._copies.complete(state)
            raise _MembersChange
        if wish is Wish.END and snapshots is not None:
            snapshots.write_last(state.version, self._write)
            self.group.control.barrier()  # a rank that left before could have the launcher end rank 0 while it writes
            self.preempted = True
        if steps is not None:
            steps.begin()

    def _is_provisional(self) -> bool:
        """Whether gradients wait for a step. Collective with sharded gradients, if no optimizer has stepped."""
        steps = self._steps
        if steps is None or steps.number or not steps.has_gradients:
            return False
        if self._weights is not None and self._weights.differ():
            return False  # the program has changed them by itself
        are_some = has_elements(self._state.model)
        if self._copies is None:
            return are_some
        found = torch.tensor([are_some], dtype=torch.int64, device="cpu")
        self.group.control.allreduce(found, name="recovery/gradients", op=ReduceOp.MAX).wait()
        return bool(found)

    def _count(self) -> None:
        """Count a batch, and begin the next one."""
        state = self._state
        state.count(None)
        if state.sampler is not None:
            state.sampler.advance()
        seed_generators(self._seed, state.version, self.group.rank)
        self.note_step()

    def _write(self) -> None:
        """Begin to write this rank's part of the present version."""
        state, snapshots, group = self._state, self._snapshots, self.group
        assert snapshots is not None
        if self._copies is not None:
            self._copies.write(state)
        else:
            shared = state.shared() if group.rank == 0 else None
            snapshots.write(state.version, group.rank, group.world_size, shared, self._hooks.current())

    def _wish_of_all(self) -> Wish:
        """Return the largest wish of all ranks. Collective, if ranks can have one."""
        if self.preempted or not (self.takes_newcomers or handles_signals(self._snapshots)):
            return Wish.NOTHING
        return self.agree(wish_to_end(self._snapshots))


@final
class Attempts:
    """The part of a program whose state all ranks have: what ``Runs`` runs again."""

    def __init__(
        self, state: State, *, seed: int = 0, replicas: int = 1, verify: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        """Note the arguments."""
        self._state, self._snapshots = state, snapshots
        self._seed, self._verify = checks.integer("seed", seed), bool(verify)
        check_whole(state.model, "tr.attempts(state)")
        self._weights = CommitWeights(state)
        #: What the hooks of DDP keep back.
        self.hooks = HookStates(state, checks.integer("replicas", replicas, minimum=0))

    @property
    def version(self) -> int:
        """The number of steps that this rank has taken."""
        return self._state.version

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one item in a line."""
        return f"{self._state.describe()}\nseed={self._seed}, replicas={self.hooks.num_copies}"

    def begin(self, group: Group, assembly: Assembly | None, number: int) -> Attempt:
        """Return the attempt that begins now."""
        weights = None if assembly is None else self._weights
        keepers = Keepers(self._seed, self._snapshots, self.hooks, weights=weights)
        return Attempt(self._state, group, assembly, number, keepers)

    def level(self, group: Group, *, has_state: bool, decision: Decision | None) -> None:
        """Bring all ranks to the state of the first rank with the latest version. Collective.

        What the program has changed since this rank's last commit is undone first. A rank on which that is not possible
        gives its state to nobody.

        Raises:
            RecoveryError: It is possible on no rank.
        """
        state, snapshots, lost = self._state, self._snapshots, ""
        if has_state:
            state.restore()
            lost = self._weights.restore()
        source, versions = latest_version(group, state.version if has_state and not lost else None)
        others = [rank for rank, version in enumerate(versions) if version < versions[source]]
        begins = versions[source] < 0  # rank 0 has what all begin with
        if begins:
            self._check_begin(group, lost)
            others = [rank for rank in range(group.world_size) if rank != source]
            if group.rank == source:
                begin_from_disk(state, snapshots)
        send_state(state, group, source, others)
        state.keep()  # before a rank can be lost again: this is the state to go back to
        if decision is not None:
            self._weights.begin()
        if snapshots is not None:
            share_token(group, snapshots)
        self.hooks.enter(group, decision, state.version, has_state=has_state)
        if begins and snapshots is not None and state.version:
            own = snapshots.read_own(state.version, group.rank, group.world_size)
            self.hooks.begin_with(own, state.version)
        if self._verify:
            compare_states(state, group)
        if state.sampler is not None:
            state.sampler.place(group.rank, group.world_size)

    def _check_begin(self, group: Group, lost: str) -> None:
        """Check that the job has not begun on ranks of which none can go back to its last commit. Collective."""
        said = group.control.allgather_object(lost)
        rank = next((rank for rank, words in enumerate(said) if words), None)
        if rank is not None:
            raise RecoveryError(
                f"a rank was lost when the program had changed {said[rank]} since the last commit (rank {rank}), and "
                "no rank has the weights of its last commit any more. Weights that are put in for a while, such as "
                "averages for an evaluation, must be taken out if a collective raises an error: put the trained ones "
                "back in a `finally:` (docs/recovery-ddp.md). Start the job again from its last snapshot"
            )


@final
class ShardedAttempts:
    """The part of a program whose state is sharded: what ``Runs`` runs again."""

    def __init__(self, copies: ShardCopies, *, seed: int = 0, snapshots: Snapshots | None = None) -> None:
        """Note the arguments."""
        self._copies, self._seed, self._snapshots = copies, checks.integer("seed", seed), snapshots
        self.hooks = HookStates(None, 0)  #: Warns of hooks of DDP, of which nothing is kept.

    @property
    def version(self) -> int:
        """The last version of which all ranks have copies, as this rank knows."""
        return max(0, self._copies.version)

    def describe(self) -> str:
        """Return what must be equal in all processes of the job, one item in a line."""
        return f"{self._copies.describe()}\nseed={self._seed}"

    def begin(self, group: Group, assembly: Assembly | None, number: int) -> Attempt:
        """Return the attempt that begins now."""
        keepers = Keepers(self._seed, self._snapshots, self.hooks, copies=self._copies)
        return Attempt(None, group, assembly, number, keepers)

    def level(self, group: Group, *, has_state: bool, decision: Decision | None) -> None:
        """Note the members. There is no state before the program calls ``Attempt.synchronize``."""
        self.hooks.enter(group, decision, 0, has_state=has_state)
