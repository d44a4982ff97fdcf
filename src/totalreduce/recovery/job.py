"""``recoverable``: a training loop that goes on when ranks are lost, and takes in ranks that come.

Of a block (``Job.step``) either all ranks apply the changes or none. In a block, first everything happens that can be
repeated: forward, backward, the exchange of gradients. Then the ranks vote, in ``optimizer.step()`` or at the end of a
block without it. A vote is one allreduce, so it passes on a rank only if all ranks have come to it; and a rank that has
come to it can finish the block without the others. So after a loss all survivors repeat the block, or all have applied
it, and none needs the parameters of another one. Only a process that was just started gets the state of a survivor.

What a block may change before the vote is small (``State.keep``): gradients, random numbers, buffers of the model,
positions, values. Residuals and parameters change after the vote (``Round.commit``), so no block copies them to be
undone, unless the program itself has changed parameters before the vote (``weights``).

An *epoch* of the data is a pass over it (``Job.epochs``). Elsewhere an epoch is one membership of the job, from one
change of its members to the next (``epochs``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError, PeerLost, RecoveryError
from totalreduce.groups.group import Group
from totalreduce.recovery.blocks import Blocks, Kind, RepeatBlock
from totalreduce.recovery.dealing import batches_of, needed
from totalreduce.recovery.epochs import CLOSE_S, JOINING, Epochs, ended_early, open_assembly
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.sharing import compare_states, read_from_disk, send_state, share_outline
from totalreduce.recovery.snapshots import Snapshots, share_token
from totalreduce.recovery.state import State
from totalreduce.recovery.wishes import Wish, handles_signals

__all__ = ["Change", "Job", "recoverable"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the members of a job, as one process saw it."""

    epoch: int  #: The number of the membership that began.
    world_size: int
    version: int  #: The version of the state with which it began.
    reason: str  #: Why the membership before ended.
    noticed_at: float  #: The time of day, in seconds, at which this process learned of that end.
    seconds: float  #: The time from then until the new group had one state.


@dataclass(frozen=True, slots=True)
class _Options:
    """What the program has chosen (see ``recoverable``)."""

    seed: int
    replicas: int
    verify: bool
    snapshots: Snapshots | None


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
    optimizers = Optimizers(state.optimizers)
    copies = checks.integer("replicas", replicas, minimum=0)
    return Job(state, optimizers, _Options(checks.integer("seed", seed), copies, bool(verify), snapshots))


@final
class Job:
    """A training loop that outlives the loss of processes. Made by ``recoverable``; one thread uses it.

    Attributes:
        state: What is recovered.
        group: The ranks. The object stays the same when its members change; ``rank`` and ``world_size`` do not.
        epoch: The number of memberships so far; 0 if ranks cannot be replaced.
        changes: The last changes of the members that this process has seen, a thousand at most.
    """

    def __init__(self, state: State, optimizers: Optimizers, options: _Options) -> None:
        """See ``recoverable``; ``optimizers`` are those of the state."""
        self.state, self.group, self._optimizers = state, optimizers.group, optimizers
        self.epoch = 0
        self.changes: deque[Change] = deque(maxlen=1000)
        self._options = options
        self._blocks = Blocks(state, optimizers, options.replicas, options.seed, options.snapshots)
        self._has_begun = False  #: Whether the body of the loop has begun a block.
        self._is_in_loop = False

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
                self.group.close(CLOSE_S, reason=f"{kind.__name__}: {error}")
        finally:
            self._let_go()

    def _begin(self) -> None:
        """Form the group, if the launcher can replace ranks, and have all ranks begin with one state."""
        state, group, settings = self.state, self.group, environment.read_settings()
        if group.coordinator is not None:
            raise ConfigurationError("tr.recoverable needs collectives='engine': a native library cannot replace ranks")
        blocks = self._blocks
        self._optimizers.guard(
            lambda: blocks.counts, blocks.step_alone, blocks.before_wait, blocks.begin_vote, blocks.end_vote
        )
        if group.formation is None:
            if group.world_size > 1 and group.rank == 0:
                _log.warning("the launcher does not replace ranks: a loss ends the job (totalreduce run --on-loss)")
            self._give_one_state(group, Decision.of_all(group.world_size))
            if handles_signals(self._options.snapshots):
                blocks.own.vote.prepare()
            return
        assembly = open_assembly(settings, group.rank, group.world_size, group.timeout_s)
        program = f"{state.describe()}\nseed={self._options.seed}, replicas={self._options.replicas}"
        assembly.check_program(program, group.formation_settings)
        group.close(CLOSE_S)
        blocks.epochs = Epochs(
            assembly, self._form, self._give_one_state, version=lambda: state.version, prepare=self._prepare
        )
        blocks.epochs.begin()

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
        return self._blocks.wish is Wish.END

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
        one, the remaining parts work on the same samples, which are dealt again to the present ranks. (After a loss
        their batches are therefore larger than ``batch_size``.) The next batch comes when the last part has taken
        effect.

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
            yield from self._until_effective(self.state.steps, Kind())

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
            yield from self._until_effective(None, Kind(label))

    @property
    def batch_counts(self) -> bool:
        """Whether the samples of the present block count.

        At the end of an epoch fewer samples may be left than there are ranks. A rank without a sample of its own then
        works on one that counts on another rank, and its gradients are left out.
        """
        return self._blocks.counts

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
        if self._blocks.is_running:
            raise ConfigurationError("a block of job.step() is running already: the blocks of a job follow one another")
        if not self._is_in_loop or self._has_begun:
            raise ConfigurationError(
                "a block of job.step() is the only one in the body of a loop over job.batches, job.parts, job.steps or "
                "job.once, which runs it again after a loss. For several blocks with one batch there is job.parts"
            )
        self._has_begun = True
        blocks = self._blocks
        try:
            blocks.begin()
            yield
            blocks.end()
        except PeerLost as error:
            if blocks.epochs is None or not blocks.can_be_undone:
                raise
            blocks.epochs.leave(error)
            blocks.undo()
            self._enter_next(None)
        except RepeatBlock as repeat:
            blocks.undo()
            self._enter_next(repeat.decision)
        else:
            blocks.commit()
            if self._options.snapshots is not None and self._options.snapshots.is_due(self.state.version):
                self._agree_on_own()
                self._write()
            if blocks.next_epoch is not None or blocks.wish is Wish.MEMBERS:
                self._enter_next(blocks.next_epoch)
            elif blocks.wish is Wish.END:
                self._end_early()
        finally:
            blocks.leave()

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
            self._blocks.seed_generators()  # a DataLoader draws the seed of its workers
            for batch in dealer.deal(batches_of(loader)):
                cursor = dealer.cursor
                while dealer.cursor == cursor and self._keeps_batches(place):
                    yield from self._until_effective((dealer.part, batch), Kind(num_parts=num_parts))
                if not self._keeps_batches(place):
                    break

    def _keeps_batches(self, place: tuple[int, int]) -> bool:
        """Whether the batches that were dealt for a place are still this rank's, and the loop is to go on."""
        return needed(self.state.sampler, "a batch").place_now == place and not self.preempted

    def _until_effective(self, value: Any, kind: Kind) -> Iterator[Any]:
        """Yield a value until a block has taken effect.

        A batch is given up when a change of members has given this rank another place (``Dealer.place_now``).
        """
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
                self._has_begun, self._blocks.kind = False, kind
                yield value
                if not self._has_begun:
                    raise ConfigurationError("the loop's body is not in a block: write `with job.step():` around it")
                if kind.num_parts and sampler is not None and sampler.place_now != place:
                    return
        finally:
            self._is_in_loop = False

    # ------------------------------------------------------------------------------------------------------------- disk

    def _agree_on_own(self) -> None:
        """Have all ranks agree on whether ranks have a state of their own, if no launcher has them vote. Collective."""
        if self._blocks.epochs is None:
            self._blocks.own.agree()

    def _write(self) -> None:
        """Begin to write this rank's parts of the present version."""
        state, group, snapshots = self.state, self.group, self._options.snapshots
        assert snapshots is not None
        shared = state.shared() if group.rank == 0 else None
        snapshots.write(state.version, group.rank, group.world_size, shared, self._blocks.own.current())

    def _end_early(self) -> None:
        """Write the last version, and return when it is on disk on all ranks. Collective.

        If a rank ended before the others, the launcher might end these while they write.
        """
        assert self._options.snapshots is not None
        self._agree_on_own()
        self._options.snapshots.write_last(self.state.version, self._write)
        try:
            self.group.barrier()
        except PeerLost as error:
            if self._blocks.epochs is None:
                raise
            self._blocks.epochs.leave(error)
            self._enter_next(None)  # the signal is not forgotten: the next vote ends the loop
            return
        if self.group.rank == 0:
            _log.info("the loop ends early at version %d, because of a signal", self.state.version)

    def _read_own(self) -> None:
        """Begin with what this rank had for itself in the version on disk, if the job begins with one."""
        snapshots = self._options.snapshots
        if snapshots is not None and self.state.version > 0:
            own = snapshots.read_own(self.state.version, self.group.rank, self.group.world_size)
            if own is not None:
                self._blocks.own.load(own)

    # ------------------------------------------------------------------------------------------------------ memberships

    def _enter_next(self, decision: Decision | None) -> None:
        """Enter the next epoch, which is ``decision`` if it is decided already."""
        epochs = self._blocks.epochs
        assert epochs is not None
        if not self.group.operations.closed:  # no rank was lost
            epochs.leave(JOINING)
        if not epochs.enter(decision):
            raise ended_early()

    def _prepare(self, decision: Decision) -> None:
        """Note which epoch begins; refuse it if its state is not of this rank's version."""
        epochs, version = self._blocks.epochs, self.state.version
        assert epochs is not None
        self._blocks.begin_epoch()
        if epochs.has_state and version != decision.version:
            raise RecoveryError(f"this rank has version {version} of the state, and the others have {decision.version}")

    def _form(self, **options: Any) -> Group:
        """Form the group of an epoch, and have the job's group become it."""
        assert self.group.formation is not None
        self.group.take_over(self.group.formation(**options))
        return self.group

    def _give_one_state(self, group: Group, decision: Decision) -> None:
        """Have all members of a group begin with one state. Collective."""
        state, options, blocks = self.state, self._options, self._blocks
        epochs, own = blocks.epochs, blocks.own
        begins = not any(member.has_state for member in decision.members)
        saved = read_from_disk(options.snapshots) if begins and group.rank == decision.source else None
        has_changed = share_outline(state, group, decision.source, saved)
        # Without a launcher the optimizers have plans already, and these are made again only if any rank needs it.
        if epochs is not None or any(group.control.allgather_object(has_changed)):
            self._optimizers.form_again()
        if saved is not None:
            state.load_shared(saved)
        send_state(state, group, decision.source, decision.newcomers)
        share_token(group, options.snapshots)
        if epochs is not None:
            own.restore(decision, has_state=epochs.has_state)
        if begins:
            self._read_own()
        if state.sampler is not None:
            state.sampler.place(group.rank, group.world_size)
        if epochs is None:
            return
        if begins:
            own.copy(decision)
        if options.verify and not self._optimizers.have_strategy:
            compare_states(state, group)
        group.meter.begin_at(state.version)
        self.epoch, at = decision.epoch, epochs.left_at
        change = (decision.epoch, group.world_size, decision.version, epochs.left_because, at, time.time() - at)
        self.changes.append(Change(*change))

    # --------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Return when all ranks have come to the end of the job."""
        epochs = self._blocks.epochs
        while epochs is not None:
            try:
                self.group.barrier()
            except PeerLost as error:
                epochs.leave(error)
                if self.preempted:
                    break  # The last version is on disk. No process is to be started in the place of the lost one.
                if not epochs.enter():
                    return
            else:
                break
        if epochs is not None:
            epochs.assembly.finish()
