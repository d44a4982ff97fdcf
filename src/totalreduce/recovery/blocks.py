"""``Blocks``: the blocks of a job, one after the other: what each may do, its vote, and what undoes it.

See ``job`` for why there is a vote. Optimizers call ``step_alone``, ``before_wait``, ``begin_vote`` and ``end_vote`` in
their steps (``Optimizers.guard``); a block without a step votes at its end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final

from totalreduce.foundation.errors import ConfigurationError, PeerLost
from totalreduce.recovery.assembly import NEWCOMERS_S
from totalreduce.recovery.dealing import needed
from totalreduce.recovery.epochs import Epochs, ended_early
from totalreduce.recovery.membership import Decision
from totalreduce.recovery.optimizers import Optimizers
from totalreduce.recovery.rank_states import RankStates
from totalreduce.recovery.replicas import OwnState
from totalreduce.recovery.sharing import seed_generators
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State
from totalreduce.recovery.weights import BlockWeights
from totalreduce.recovery.wishes import Wish, handles_signals, wish_to_end

__all__ = ["Blocks", "Kind", "RepeatBlock"]

_ALONE = (
    "with a strategy a block with a step calls no collective, because ranks take steps by themselves: move this one "
    "into a block of its own (`for _ in job.once(label):`)"
)
_AFTER_VOTE = (
    "collectives are not possible after optimizer.step() in a block of job.step(), which each rank finishes by itself: "
    "move this one before it, or into a block of its own (`for _ in job.once(label):`). So does a second "
    "optimizer.step(): each optimizer has its block (job.parts)"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a block is: by default a step with data of the program's own."""

    label: str | None = None  #: Of a block of ``Job.once``: its label.
    num_parts: int = 0  #: Of a block with a batch of the sampler: the number of blocks that work on the batch.


class _Phase(enum.Enum):
    """Where the program is."""

    OUTSIDE = "outside of blocks"
    BEFORE_VOTE = "in a block whose vote has not passed"
    AFTER_VOTE = "in a block whose vote has passed"
    ALONE = "in a block that this rank takes by itself, without a vote"


class RepeatBlock(BaseException):
    """Ends a block whose vote has not passed. No program catches it by ``except Exception``."""

    def __init__(self, decision: Decision) -> None:
        """``decision``: the epoch in which the block is repeated."""
        super().__init__()
        self.decision = decision


@final
class Blocks:
    """The blocks of a job. One thread uses it."""

    def __init__(
        self, state: State, optimizers: Optimizers, num_replicas: int, seed: int, snapshots: Snapshots | None
    ) -> None:
        """Begin none yet. The arguments are those of ``recoverable``, and the optimizers of the state."""
        self._state, self._group, self._optimizers = state, optimizers.group, optimizers
        self._seed, self._snapshots = seed, snapshots
        self._weights = BlockWeights(state, optimizers.group)
        states = RankStates if optimizers.have_strategy else OwnState
        #: What each rank has for itself, and its copies on other ranks; it has the vote.
        self.own: RankStates | OwnState = states(state, optimizers, num_replicas)
        #: The epochs of this process; ``None`` if ranks cannot be replaced. Then a block votes only if a signal can end
        #: the loop, because the ranks must agree on the last block.
        self.epochs: Epochs | None = None
        self.kind = Kind()  #: What the present block is, or the next one.
        self.wish = Wish.NOTHING  #: The largest wish of all ranks, of the last vote in this epoch.
        #: The next epoch, if a rank was lost in the last vote and the vote had passed on another rank.
        self.next_epoch: Decision | None = None
        self._phase = _Phase.OUTSIDE

    # ---------------------------------------------------------------------------------------------- for the job

    @property
    def is_running(self) -> bool:
        """Whether the program is in a block."""
        return self._phase is not _Phase.OUTSIDE

    @property
    def can_be_undone(self) -> bool:
        """Whether the vote of the block has not passed on this rank."""
        return self._phase is _Phase.BEFORE_VOTE

    @property
    def counts(self) -> bool:
        """Whether the samples of this rank count in the block (see ``Job.batch_counts``)."""
        return not self.kind.num_parts or needed(self._state.sampler, "a batch").next_share > 0

    def begin(self) -> None:
        """Begin a block of the present kind."""
        self._phase = _Phase.BEFORE_VOTE
        state, optimizers, label = self._state, self._optimizers, self.kind.label
        if label is None and optimizers.have_strategy and not optimizers.are_synchronous:
            self._group.operations.gate.refuse(_ALONE)
        state.keep()
        if self.epochs is not None and (label is not None or not optimizers.are_alone):
            part = needed(state.sampler, "a batch").part if self.kind.num_parts else 0
            self._weights.begin(part if label is None else label)
        self.seed_generators()
        optimizers.begin_block()

    def end(self) -> None:
        """Vote, unless a step of an optimizer has done so. Raises ``ConfigurationError``.

        Gradients that are not finite are those of a step that a ``GradScaler`` has left out.
        """
        if self._phase is not _Phase.BEFORE_VOTE:
            return
        gradients = [each.grad for each in self._state.model.parameters() if each.grad is not None]
        if self.kind.label is None and gradients and all(bool(each.isfinite().all()) for each in gradients):
            raise ConfigurationError(
                "a block of job.step() has ended with gradients and without optimizer.step(): at the end of a block "
                "all gradients are reset, so these would be lost. To accumulate gradients, call backward() several "
                "times in one block, each time with a part of its batch. To leave a step out, call "
                "optimizer.zero_grad() on every rank"
            )
        self._settle(None)
        self.begin_vote()
        self.end_vote()

    def commit(self) -> None:
        """Count a block that has taken effect."""
        state, label, num_parts = self._state, self.kind.label, self.kind.num_parts
        self._group.operations.gate.take()
        if label is None and state.steps == 0:
            state.check_first_step()
        state.count(label)
        if self.epochs is not None:
            self.epochs.assembly.begin()
        state.drop_gradients()
        self._optimizers.end_block()
        self._weights.end()
        if num_parts:
            needed(state.sampler, "a batch").advance(num_parts)
        if self.epochs is not None and self._phase is not _Phase.ALONE:
            self.own.commit()

    def undo(self) -> None:
        """Undo a block that is to be repeated."""
        self._group.operations.gate.take()
        self._optimizers.undo()
        self._weights.undo(have_stepped=self._optimizers.have_strategy)
        self._state.restore()

    def leave(self) -> None:
        """Note that the program has left the block."""
        self._phase = _Phase.OUTSIDE

    def begin_epoch(self) -> None:
        """Note that an epoch begins: what was agreed in the last one has been done."""
        self.wish, self.next_epoch = Wish.NOTHING, None

    def seed_generators(self) -> None:
        """Seed the generators of random numbers for the next block."""
        seed_generators(self._seed, self._state.version, self._group.rank)

    # ---------------------------------------------------------------------------------------------- for optimizers

    def step_alone(self) -> None:
        """Note that this rank takes the step of a strategy by itself. The block takes effect without a vote."""
        self._check_phase()
        self._phase = _Phase.ALONE

    def before_wait(self, name: str) -> None:
        """End the rounds of the other optimizers.

        ``DistributedOptimizer`` calls it when its gradients have left, or before the exchange of a strategy.
        """
        self._check_phase()
        self._settle(name)

    def begin_vote(self) -> None:
        """Tell the other ranks that this one can finish the block. Until ``end_vote``, what changes can be undone.

        ``DistributedOptimizer`` calls it in ``step()``, when this rank has the gradients of all ranks.

        Raises:
            PeerLost: A rank was lost before this one had come to the vote.
        """
        if self.epochs is not None:
            self.own.send(self._members)
        if self._votes:
            num_samples = needed(self._state.sampler, "a batch").next_total if self.kind.num_parts else 0
            self.own.vote.begin(self._wish(), num_samples)

    def end_vote(self) -> None:
        """Return when it is certain that all ranks finish the block. Raises ``RepeatBlock``."""
        if self.epochs is not None:
            try:
                self.wish = Wish(self.own.end_vote(self._members))
            except PeerLost as error:
                self.epochs.leave(error)
                decision = self.epochs.meet()
                if decision is None:
                    raise ended_early() from error
                if decision.version <= self._state.version:
                    raise RepeatBlock(decision) from None
                self.next_epoch = decision
        elif self._votes:
            self.wish = Wish(self.own.vote.end())
        self._phase = _Phase.AFTER_VOTE
        self._group.operations.gate.refuse(_AFTER_VOTE)

    @property
    def _votes(self) -> bool:
        return self.epochs is not None or handles_signals(self._snapshots)

    @property
    def _members(self) -> Decision:
        assert self.epochs is not None
        assert self.epochs.assembly.current is not None
        return self.epochs.assembly.current

    def _settle(self, stepped: str | None) -> None:
        """Have no other step follow in this block than that of one optimizer; ``None``: of no optimizer."""
        self._weights.compare()
        self._group.operations.gate.take()
        self._optimizers.settle(stepped)

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

    def _wish(self) -> Wish:
        """Return what this rank asks of all ranks; rank 0 looks for processes that can join after this block."""
        wish = wish_to_end(self._snapshots)
        if wish is Wish.END or self.epochs is None or self._group.rank != 0:
            return wish
        assembly, sampler = self.epochs.assembly, self._state.sampler
        if assembly.policy.on_loss != "shrink":
            return wish
        if sampler is not None and not sampler.has_samples_for(assembly.policy.num_seats, self.kind.num_parts):
            return wish
        return Wish.MEMBERS if assembly.has_newcomers(NEWCOMERS_S) else wish
