"""``recoverable``: a training loop that goes on when ranks are lost, and takes in ranks that come.

Of a block (``Job.step``) either all ranks apply the changes or none. In a block, first everything happens that can be
repeated: forward, backward, the exchange of gradients. Then the ranks vote, in ``optimizer.step()`` or at the end of a
block without it. A vote is one allreduce, so it passes on a rank only if all ranks have come to it; and a rank that has
come to it can finish the block without the others. So after a loss all survivors repeat the block, or all have applied
it, and none needs the parameters of another one. Only a process that was just started gets the state of a survivor.

What a block may change before the vote is small (``State.keep``): gradients, random numbers, buffers of the model,
positions, values. Residuals and parameters change after it (``Round.finish``), so undoing a block copies neither; but a
program may change parameters before it (``weights``).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

import torch

from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.foundation.types import ReduceOp
from totalreduce.recovery.assembly import NEWCOMERS_S, Assembly
from totalreduce.recovery.dealing import batches_of, needed
from totalreduce.recovery.forming import (
    compare_states,
    end_too_late,
    ended_early,
    enter_next_epoch,
    form_group,
    open_assembly,
    read_from_disk,
    report_loss,
    seed_generators,
    send_state,
    share_outline,
)
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.rank_states import RankStates
from totalreduce.recovery.replicas import OwnState
from totalreduce.recovery.snapshots import Snapshots, share_token
from totalreduce.recovery.state import State
from totalreduce.recovery.weights import BlockWeights
from totalreduce.recovery.wishes import Wish, handles_signals, wish_to_end

__all__ = ["Change", "Job", "recoverable"]

_log = logging.getLogger(__name__)

#: How long the end of a group may take whose members are lost.
_CLOSE_S = 1.0
_NO_COLLECTIVES = (
    "with a strategy a block with a step calls no collective, because ranks take steps by themselves: move this one "
    "into a block of its own (`for _ in job.once(label):`)"
)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the members of a job, as one process saw it.

    Attributes:
        epoch: The number of the membership that began.
        world_size: Its number of ranks.
        version: The version of the state with which it began.
        reason: Why the one before ended.
        noticed_at: The time of day, in seconds, at which this process learned that.
        seconds: The time from then until the new group had one state.
    """

    epoch: int
    world_size: int
    version: int
    reason: str
    noticed_at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a block is: by default a step with data of the program's own.

    Attributes:
        label: Of a block of ``Job.once``: its label.
        num_parts: Of a block with a batch of the sampler: the number of blocks that work on the batch.
    """

    label: str | None = None
    num_parts: int = 0


class _Phase(enum.Enum):
    """Where the program is."""

    OUTSIDE = "outside of blocks"
    BEFORE_VOTE = "in a block whose vote has not passed"
    AFTER_VOTE = "in a block whose vote has passed"
    ALONE = "in a block that this rank takes by itself, without a vote"


@dataclass(frozen=True, slots=True)
class _Options:
    """What the program has chosen (see ``recoverable``)."""

    seed: int
    verify: bool
    snapshots: Snapshots | None


class _RepeatBlock(BaseException):
    """Ends a block whose vote has not passed. No program catches it by ``except Exception``."""

    def __init__(self, decision: Decision) -> None:
        """``decision``: the epoch in which the block is repeated."""
        super().__init__()
        self.decision = decision


def recoverable(
    state: State, *, seed: int = 0, replicas: int = 1, verify: bool = True, snapshots: Snapshots | None = None
) -> Job:
    """Return the context in which a training loop outlives the loss of processes.

    ::

        with tr.recoverable(state) as job:
            for epoch in job.epochs(10):
                for batch in job.batches(loader):
                    with job.step():
                        loss_of(model, batch).backward()
                        optimizer.step()

    The launcher decides what happens after a loss: ``totalreduce run --on-loss replace`` or ``shrink``. Without it, the
    loop runs as usual, and a loss ends the job. All ranks begin with the state of one of them, so there is no need to
    broadcast parameters. See docs/recovery.md.

    Args:
        state: What is recovered.
        seed: With this seed, the version and the rank, every block seeds the generators of torch, NumPy and Python, so
            that a block that is repeated, or a process that replaces another one, draws the same numbers.
        replicas: The number of ranks that have a copy of the residuals and of the model's buffers of each rank. The
            copies are sent before each vote, if there are any residuals or buffers. With 0 the residuals of a lost rank
            are lost. With a strategy each rank's whole state is copied after each exchange; with 0 the steps of a lost
            rank since the last exchange are lost.
        verify: Compare SHA-256 of parameters and optimizer state on all ranks after each change of the members. Not
            with a strategy, by which they differ.
        snapshots: Writes the state to disk beside training. The job begins with its last version, if there is one.

    Raises:
        ConfigurationError: An optimizer of the state is no ``DistributedOptimizer``, or has a strategy that is not
            supported; the optimizers have different groups; the group is of another kind than ``tr.init`` makes it; or
            a number is out of range.
    """
    options = _Options(checks.integer("seed", seed), bool(verify), snapshots)
    return Job(state, Optimizers(state.optimizers), replicas, options)


@final
class Job:
    """A training loop that outlives the loss of processes. Made by ``recoverable``; one thread uses it.

    Attributes:
        state: What is recovered.
        group: The ranks. The object stays the same when its members change; ``rank`` and ``world_size`` do not.
        epoch: The number of memberships so far; 0 if ranks cannot be replaced.
        changes: The last changes of the members that this process has seen, a thousand at most.
    """

    def __init__(self, state: State, optimizers: Optimizers, replicas: int, options: _Options) -> None:
        """See ``recoverable``; ``optimizers`` are those of the state."""
        self.state, self.group, self._optimizers = state, optimizers.group, optimizers
        self.epoch = 0
        self.changes: deque[Change] = deque(maxlen=1000)
        self._left = (time.time(), "the job began")  #: When and why the last group ended.
        self._options = options
        states = RankStates if optimizers.have_strategy else OwnState
        self._own: OwnState | RankStates = states(state, optimizers, checks.integer("replicas", replicas, minimum=0))
        self._weights = BlockWeights(state, optimizers.group)
        self._assembly: Assembly | None = None
        self._phase = _Phase.OUTSIDE
        self._has_begun = False  #: Whether the body of the loop has begun a block.
        self._is_in_loop = False
        self._kind = _Kind()  #: The kind of the block.
        self._agreed = Wish.NOTHING  #: The result of the last vote.
        self._pending: Decision | None = None  #: The next epoch, if it was decided before the end of a block.

    def __enter__(self) -> Self:
        """Meet the other processes, and begin with the state of the job.

        Raises:
            ConfigurationError: This process runs another program, or other settings, than the others.
            RecoveryError: Too few processes have come in time, or the job has ended.
            SystemExit: With ``--on-loss shrink``: the others have ended the job, and there is nothing left to do.
        """
        if self._options.snapshots is not None:
            self._options.snapshots.watch()
        try:
            self._begin()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until all ranks have come to the end. After an error leave the group, so that the others learn of it."""
        try:
            if kind is None:
                self._finish()
            else:
                self.group.close(_CLOSE_S, reason=f"{kind.__name__}: {error}")
        finally:
            self._let_go()

    def _begin(self) -> None:
        """Form the group, if the launcher can replace ranks, and have all ranks begin with one state."""
        state, group, settings = self.state, self.group, environment.read_settings()
        if group.coordinator is not None:
            raise ConfigurationError("tr.recoverable needs collectives='engine': a native library cannot replace ranks")
        self._optimizers.guard(
            lambda: self.batch_counts, self._step_alone, self._before_wait, self._begin_vote, self._end_vote
        )
        if group.formation is None:
            if group.world_size > 1 and group.rank == 0:
                _log.warning("the launcher does not replace ranks: a loss ends the job (totalreduce run --on-loss)")
            saved = read_from_disk(self._options.snapshots) if group.rank == 0 else None
            # The optimizers have plans already, and these are made again only if any rank needs another one.
            has_changed = torch.tensor([share_outline(state, group, 0, saved)], dtype=torch.bool, device="cpu")
            group.control.allreduce(has_changed, name="recovery/outline", op=ReduceOp.MAX).wait()
            if has_changed:
                self._optimizers.form_again()
            if saved is not None:
                state.load_shared(saved)
            send_state(state, group, 0, range(1, group.world_size))
            share_token(group, self._options.snapshots)
            self._read_own()
            self._place()
            if handles_signals(self._options.snapshots):
                self._own.vote.prepare()
            return
        assembly = self._assembly = open_assembly(settings, group.rank, group.world_size, group.timeout_s)
        assembly.check_equal(
            "program", f"{state.describe()}\nseed={self._options.seed}, replicas={self._own.num_copies}"
        )
        assembly.check_equal("settings", group.formation_settings)
        group.close(_CLOSE_S)
        if not self._form_group(has_state=False):
            end_too_late(assembly)

    def _let_go(self) -> None:
        """Return when what this rank writes is on disk; optimizers and signals then belong to the program again."""
        self._optimizers.release()
        if self._options.snapshots is not None:
            self._options.snapshots.release()

    @property
    def preempted(self) -> bool:
        """Whether the loop has ended early on all ranks, because one got a signal of ``tr.Snapshots(on_signal=...)``.

        The last version is then on disk, unless writing it has failed, which is logged (``snapshots.failed``).
        """
        return self._agreed is Wish.END

    # ------------------------------------------------------------------------------------------------- what users call

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch. A batch comes again until its block has taken effect.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the state's ``ElasticSampler``, or whose data set is its
                ``ElasticStream``.

        Raises:
            ConfigurationError: It is not; or the loop's body is not in ``with job.step()``.
        """
        for _, batch in self._parts_of_batches("job.batches", loader, 1):
            yield batch

    def parts(self, loader: Iterable[Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield each batch of the rest of the epoch several times, once for each part of a step, with the part's name.

        Each part is a block, so a step with several optimizers has a part for each::

            for part, batch in job.parts(loader, ("discriminator", "generator")):
                with job.step():
                    losses[part](batch).backward()
                    optimizers[part].step()

        A part that has taken effect does not come again: if ranks are lost or join between the first part and the last
        one, the other parts work on the same samples of all ranks. The next batch comes when the last part has taken
        effect. (If ranks are lost in a step, the shares of the rest are then larger than ``batch_size``.)

        Args:
            loader: As for ``batches``.
            names: The names of the parts, in order; equal on all ranks.

        Raises:
            ConfigurationError: As ``batches``; or there are no names, or one comes twice.
        """
        if isinstance(names, str) or not names or len(set(names)) < len(names):
            raise ConfigurationError(f"job.parts needs different names of the parts of a step, not {names!r}")
        for part, batch in self._parts_of_batches("job.parts", loader, len(names)):
            yield names[part], batch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, and have the sampler begin each. The first epoch is 0."""
        for epoch in needed(self.state.sampler, "job.epochs").epochs(count):
            yield epoch
            if self.preempted:
                return

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left, for a loop with data of its own: the first is 0.

        A number comes again until its block has taken effect.
        """
        count = checks.integer("the number of steps", count)
        while self.state.steps < count and not self.preempted:
            yield from self._until_effective(self.state.steps, _Kind())

    def once(self, label: str) -> Iterator[None]:
        """Yield until one block has taken effect, for work that is no step, once in each epoch of the sampler.

        In such a block the program may call collectives, for example to evaluate the model, and set values of the
        state::

            for _ in job.once("evaluation"):
                with job.step():
                    state.best = max(state.best, evaluate(model, group))

        Args:
            label: A name of the work. If it has taken effect already, in this epoch of the sampler (without a sampler:
                in this job), nothing is yielded: a process that joins the job later comes to this place, too.
        """
        if not (self.state.is_done(label) or self.preempted):
            yield from self._until_effective(None, _Kind(label))

    @property
    def batch_counts(self) -> bool:
        """Whether the samples of the present block count.

        They do not on a rank that has none in this step, because fewer are left than there are ranks. It works on a
        sample that counts on another rank, and its gradients are left out.
        """
        return not self._kind.num_parts or needed(self.state.sampler, "a batch").next_share > 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a block, which takes effect on all ranks or on none.

        If a rank is lost before the vote has passed, the block ends, the remaining ranks (and new ones) form a group,
        and ``batches``, ``parts``, ``steps`` or ``once`` let the block run again. After ``optimizer.step()`` each rank
        finishes the block by itself: collectives raise ``ConfigurationError`` there.

        Raises:
            ConfigurationError: A block is running already; or it is not the only one in the body of a loop; or it has
                two steps of optimizers, or ends with gradients and without a step.
            RecoveryError: The job cannot go on.
        """
        if self._phase is not _Phase.OUTSIDE:
            raise ConfigurationError("a block of job.step() is running already: the blocks of a job follow one another")
        if not self._is_in_loop or self._has_begun:
            raise ConfigurationError(
                "a block of job.step() is the only one in the body of a loop over job.batches, job.parts, job.steps or "
                "job.once, which runs it again after a loss. For several blocks with one batch there is job.parts"
            )
        self._has_begun = True
        with self._block():
            yield

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        """Run a block; see ``step``."""
        self._phase = _Phase.BEFORE_VOTE
        try:
            takes_step_alone = self._optimizers.have_strategy and not self._optimizers.are_synchronous
            if takes_step_alone and self._kind.label is None:
                self.group.operations.gate.refuse(_NO_COLLECTIVES)
            self.state.keep()
            self._keep_weights()
            self._seed_generators()
            self._optimizers.begin_block()
            yield
            if self._phase is _Phase.BEFORE_VOTE:
                self._end_without_step()
        except PeerLost as error:
            if self._phase is not _Phase.BEFORE_VOTE or not self._leave_group(error):
                raise
            self._undo()
            self._form_again(None)
        except _RepeatBlock as repeat:
            self._undo()
            self._form_again(repeat.decision)
        else:
            self._commit()
            if self._pending is not None or self._agreed is Wish.MEMBERS:
                self._form_again(self._pending)
            elif self._agreed is Wish.END:
                self._end_early()
        finally:
            self._phase = _Phase.OUTSIDE

    # ----------------------------------------------------------------------------------------------------------- blocks

    def _parts_of_batches(self, user: str, loader: Iterable[Any], num_parts: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of the part, and the batch, until all parts of all steps of the epoch have taken effect."""
        dealer = needed(self.state.sampler, user, loader)
        if dealer.part >= num_parts:
            raise ConfigurationError(
                f"{dealer.part} parts of the present step have taken effect, and {user} gives a step {num_parts}: go "
                "on with the parts that the step has begun with"
            )
        while not (dealer.is_over or self.preempted):
            place = dealer.place_now
            self._seed_generators()  # a DataLoader draws the seed of its workers
            for batch in dealer.deal(batches_of(loader)):
                cursor = dealer.cursor
                while dealer.place_now == place and dealer.cursor == cursor and not self.preempted:
                    yield from self._until_effective((dealer.part, batch), _Kind(num_parts=num_parts))
                if dealer.place_now != place or self.preempted:
                    break

    def _until_effective(self, value: Any, kind: _Kind) -> Iterator[Any]:
        """Yield a value until a block has taken effect; a batch, no longer than it is this rank's batch."""
        if self._is_in_loop:
            raise ConfigurationError(
                "a loop over job.once, job.steps, job.parts or job.batches is in the body of another one: ranks may "
                "change in it, and the outer loop's batch would be another rank's. Move it behind the outer loop"
            )
        version, sampler = self.state.version, self.state.sampler
        place = None if sampler is None else sampler.place_now
        self._is_in_loop = True
        try:
            while self.state.version == version:
                self._has_begun, self._kind = False, kind
                yield value
                if not self._has_begun:
                    raise ConfigurationError("the loop's body is not in a block: write `with job.step():` around it")
                if kind.num_parts and sampler is not None and sampler.place_now != place:
                    return
        finally:
            self._is_in_loop = False

    def _end_without_step(self) -> None:
        """Vote at the end of a block without ``optimizer.step()``.

        Gradients that are not finite are those of a step that a ``GradScaler`` has left out.
        """
        gradients = [each.grad for each in self.state.model.parameters() if each.grad is not None]
        if self._kind.label is None and gradients and all(bool(each.isfinite().all()) for each in gradients):
            raise ConfigurationError(
                "a block of job.step() has ended with gradients and without optimizer.step(): at the end of a block "
                "all gradients are reset, so these would be lost. To accumulate gradients, call backward() several "
                "times in one block, each time with a part of its batch. To leave a step out, call "
                "optimizer.zero_grad() on every rank"
            )
        self.group.operations.gate.take()
        self._weights.compare()
        self._optimizers.settle(None)
        self._begin_vote()
        self._end_vote()

    def _keep_weights(self) -> None:
        """Remember parameters and states of optimizers, if the block may have to be undone."""
        label, sampler = self._kind.label, self.state.sampler
        if self._assembly is not None and (label is not None or not self._optimizers.are_alone):
            part = sampler.part if self._kind.num_parts and sampler is not None else 0
            self._weights.begin(part if label is None else label)

    def _seed_generators(self) -> None:
        seed_generators(self._options.seed, self.state.version, self.group.rank)

    def _step_alone(self) -> None:
        """Note that this rank takes the step of a strategy by itself. The block takes effect without a vote."""
        self._check_phase()
        self._phase = _Phase.ALONE

    def _before_wait(self, name: str) -> None:
        """End the rounds of the other optimizers.

        ``DistributedOptimizer`` calls it when its gradients have left, or before the exchange of a strategy.
        """
        self._check_phase()
        self._weights.compare()
        self.group.operations.gate.take()
        self._optimizers.settle(name)

    def _check_phase(self) -> None:
        """Raise ``ConfigurationError`` unless an optimizer may step now."""
        if self._phase is _Phase.OUTSIDE:
            raise ConfigurationError(
                "backward() or optimizer.step() was called outside of a block: write `with job.step():` around both"
            )
        if self._phase is not _Phase.BEFORE_VOTE:
            raise ConfigurationError(
                "two optimizers were stepped in one block of job.step(), or one twice, or backward() was called after "
                "optimizer.step(): each step has its block (job.parts)"
            )

    def _begin_vote(self) -> None:
        """Tell the other ranks that this one can finish the block. Until ``_end_vote``, what changes can be undone.

        ``DistributedOptimizer`` calls it in ``step()``, when this rank has the gradients of all ranks.

        Raises:
            PeerLost: A rank was lost before this one had come to the vote.
        """
        if self._assembly is not None:
            assert self._assembly.current is not None
            self._own.send(self._assembly.current)
        elif not handles_signals(self._options.snapshots):
            return
        # Without a launcher that replaces ranks a block needs no vote, but the ranks must agree on the last one.
        self._own.vote.begin(self._wish(), self._samples_of_block())

    def _end_vote(self) -> None:
        """Return when it is certain that all ranks finish the block.

        Raises:
            _RepeatBlock: A rank was lost before all had come to the vote.
        """
        group, assembly = self.group, self._assembly
        if assembly is not None:
            try:
                assert assembly.current is not None
                self._agreed = Wish(self._own.end_vote(assembly.current))
            except PeerLost as error:
                self._leave_group(error)
                decision = assembly.meet(has_state=True, version=self.state.version)
                if decision is None:
                    raise ended_early() from error
                if decision.version <= self.state.version:
                    raise _RepeatBlock(decision) from None
                self._pending = decision
        elif handles_signals(self._options.snapshots):
            self._agreed = Wish(self._own.vote.end())
        self._phase = _Phase.AFTER_VOTE
        group.operations.gate.refuse(
            "collectives are not possible after optimizer.step() in a block of job.step(), which each rank finishes by "
            "itself: move this one before it, or into a block of its own (`for _ in job.once(label):`). So does a "
            "second optimizer.step(): each optimizer has its block (job.parts)"
        )

    def _commit(self) -> None:
        """Count a block that has taken effect."""
        self.group.operations.gate.take()
        if self._kind.label is None and self.state.steps == 0:
            self.state.check_first_step()
        self.state.count(self._kind.label)
        if self._assembly is not None:
            self._assembly.begin()
        self.state.drop_gradients()
        self._optimizers.end_block()
        self._weights.end()
        if self._kind.num_parts:
            needed(self.state.sampler, "a batch").advance(self._kind.num_parts)
        if self._assembly is not None and self._phase is not _Phase.ALONE:
            self._own.commit()

        snapshots = self._options.snapshots
        if snapshots is not None and snapshots.is_due(self.state.version):
            self._agree_on_own()
            self._write()

    def _agree_on_own(self) -> None:
        """Have all ranks agree on whether ranks have a state for themselves, where no vote tells that. Collective."""
        if self._assembly is None:
            self._own.agree()

    def _write(self) -> None:
        """Begin to write this rank's parts of the present version."""
        state, group, snapshots = self.state, self.group, self._options.snapshots
        assert snapshots is not None
        shared = state.shared() if group.rank == 0 else None
        snapshots.write(state.version, group.rank, group.world_size, shared, self._own.current())

    def _end_early(self) -> None:
        """Write the last version, and return when it is on disk on all ranks. Collective.

        A rank that left before could have the launcher end the others while they write.
        """
        assert self._options.snapshots is not None
        self._agree_on_own()
        self._options.snapshots.write_last(self.state.version, self._write)
        try:
            self.group.barrier()
        except PeerLost as error:
            if not self._leave_group(error):
                raise
            self._form_again(None)  # the signal is not forgotten: the next vote ends the loop
            return
        if self.group.rank == 0:
            _log.info("the loop ends early at version %d, because of a signal", self.state.version)

    def _read_own(self) -> None:
        """Begin with what this rank had for itself in the version on disk, if the job begins with one."""
        snapshots = self._options.snapshots
        if snapshots is not None and self.state.version > 0:
            own = snapshots.read_own(self.state.version, self.group.rank, self.group.world_size)
            if own is not None:
                self._own.load(own)

    def _undo(self) -> None:
        self.group.operations.gate.take()
        self._optimizers.undo()
        self._weights.undo(have_stepped=self._optimizers.have_strategy)
        self.state.restore()

    def _samples_of_block(self) -> int:
        """Return the number of samples of all ranks in the block; 0 if it has no batch."""
        return needed(self.state.sampler, "a batch").next_total if self._kind.num_parts else 0

    def _wish(self) -> Wish:
        """Return what this rank asks of all ranks; rank 0 looks for processes that can join after this block."""
        sampler, assembly = self.state.sampler, self._assembly
        wish = wish_to_end(self._options.snapshots)
        if wish is Wish.END or assembly is None or assembly.policy.on_loss != "shrink" or self.group.rank != 0:
            return wish
        if sampler is not None and not sampler.has_samples_for(assembly.policy.num_seats, self._kind.num_parts):
            return wish
        return Wish.MEMBERS if assembly.has_newcomers(NEWCOMERS_S) else wish

    # ------------------------------------------------------------------------------------------------------ memberships

    def _leave_group(self, error: PeerLost) -> bool:
        """Close the group after a loss; return whether ranks can be replaced."""
        assembly = self._assembly
        if assembly is None:
            return False
        self._left = (time.time(), str(error))
        report_loss(assembly, self.group.rank, error)
        self.group.close(_CLOSE_S, reason=str(error))
        return True

    def _form_again(self, decision: Decision | None) -> None:
        if not self.group.operations.closed:
            self._left = (time.time(), "other processes join")
            self.group.close(_CLOSE_S, reason="the members of the group change")
        if not self._form_group(has_state=True, decision=decision):
            raise ended_early()

    def _form_group(self, *, has_state: bool, decision: Decision | None = None) -> bool:
        """Decide on the next epoch, if ``decision`` is not it, and form its group. This rank then has the state.

        Returns:
            Whether there is a group; ``False``: the job has ended.
        """
        assembly = self._assembly
        assert assembly is not None

        def meet() -> Decision | None:
            nonlocal decision
            met, decision = decision, None
            return met or assembly.meet(has_state=has_state, version=self.state.version)

        def enter(met: Decision) -> None:
            self._pending, self._agreed = None, Wish.NOTHING
            self._enter_epoch(assembly, met, has_state=has_state)

        return enter_next_epoch(assembly, meet, enter, lambda reason: self.group.close(_CLOSE_S, reason=reason))

    def _enter_epoch(self, assembly: Assembly, decision: Decision, *, has_state: bool) -> None:
        """Form the group of an epoch, and have all members begin with one state. Collective."""
        state, group, version = self.state, self.group, decision.version
        rank = decision.rank_of(assembly.seat, assembly.incarnation)
        assert rank is not None
        assert group.formation is not None
        if has_state and state.version != version:
            raise RecoveryError(f"rank {rank} has version {state.version} of the state, and the others have {version}")
        group.take_over(form_group(assembly, group.formation))
        begins = not any(member.has_state for member in decision.members)
        saved = read_from_disk(self._options.snapshots) if begins and rank == decision.source else None
        share_outline(state, group, decision.source, saved)
        self._optimizers.form_again()
        if saved is not None:
            state.load_shared(saved)
        send_state(state, group, decision.source, decision.newcomers)
        share_token(group, self._options.snapshots)
        self._own.restore(decision, has_state=has_state)
        if begins:
            self._read_own()
            self._own.copy(decision)
        if self._options.verify and not self._optimizers.have_strategy:
            compare_states(state, group)
        self._place()
        group.meter.begin_at(state.version)
        self.epoch = decision.epoch
        at, why = self._left
        self.changes.append(Change(decision.epoch, group.world_size, version, why, at, time.time() - at))
        if rank == 0:
            _log.info("membership %d: %d ranks, version %d", decision.epoch, group.world_size, version)

    def _place(self) -> None:
        if self.state.sampler is not None:
            self.state.sampler.place(self.group.rank, self.group.world_size)

    # --------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Return when all ranks have come to the end of the job."""
        while self._assembly is not None:
            try:
                self.group.barrier()
            except PeerLost as error:
                self._leave_group(error)
                if self.preempted:
                    # The last version is on disk. No process is to be started in the place of one that has ended.
                    self._assembly.finish()
                    return
                if not self._form_group(has_state=True):
                    return
            else:
                self._assembly.finish()
                return
