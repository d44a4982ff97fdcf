"""``Optimizers``: the optimizers of a job, of which each block steps at most one.

A backward pass may compute gradients for an optimizer that the block does not step: that of a generator goes through
the discriminator. Its hooks then send these gradients, and the round that they belong to must end on all ranks without
a result. So before the vote the ranks tell each other which optimizers have gradients in flight, and which one they
step. With a single optimizer, there is nothing to tell when it is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.compression import Compression
from totalreduce.pytorch.local_steps import LocalSteps
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.tensors.work import Work

__all__ = ["Optimizers", "steps_of"]


@dataclass(frozen=True, slots=True)
class _Guard:
    """What an optimizer calls in each round (``RoundGuard``)."""

    name: str
    waits_in_backward: bool
    counts: Callable[[], bool]
    step_alone: Callable[[], None]
    wait: Callable[[str], None]
    before_step: Callable[[], None]
    before_commit: Callable[[], None]

    def before_wait(self) -> None:
        self.wait(self.name)


@dataclass(slots=True)
class _Settling:
    """What the ranks tell each other in a block, once."""

    #: Which optimizers have gradients in flight, and which ones are stepped: on this rank, and on any rank when
    #: ``work`` has ended.
    flags: torch.Tensor
    work: Work | None  #: The allreduce of the flags; ``None``: there is one rank.
    dropped: set[str] = field(default_factory=set)  #: The optimizers whose rounds have ended.
    has_ended: bool = False  #: Whether all have ended that must.


@final
class Optimizers:
    """The ``DistributedOptimizer`` objects of a job, by name."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        """Check the optimizers of a state. Raises ``ConfigurationError``."""
        for name, each in optimizers.items():
            if not isinstance(each, DistributedOptimizer):
                what = f"a {type(each).__name__}" + (f" under the name {name!r}" if name else "")
                raise ConfigurationError(
                    f"tr.recoverable needs a state with a DistributedOptimizer, not {what}. For other optimizers, with "
                    "DistributedDataParallel, there is tr.attempts(state)"
                )
        self._all: dict[str, DistributedOptimizer] = dict(optimizers)
        self._check_strategies()
        first, *others = self._all
        self.group: Group = self._all[first].group  #: The group of all of them.
        for other in others:
            group = self._all[other].group
            if group is not self.group:
                raise ConfigurationError(
                    f"all optimizers of a tr.State use one group, but that of {first!r} has {self.group.world_size} "
                    f"ranks, and that of {other!r} is another one, with {group.world_size} ranks: pass the same group= "
                    "to each DistributedOptimizer"
                )
        self._settling: _Settling | None = None  #: What the ranks of the present block have told each other.

    @property
    def compressions(self) -> dict[str, Compression]:
        """The compressed gradients of each optimizer, and their residuals."""
        return {name: each.compressed for name, each in self._all.items()}

    @property
    def compresses(self) -> bool:
        """Whether the plan of any optimizer compresses gradients. Equal on all ranks."""
        return any(each.reducer is not None for each in self.compressions.values())

    def _check_strategies(self) -> None:
        for each in self._all.values():
            if each.strategy is None:
                continue
            obstacle = each.strategy.recovery_obstacle()
            if not obstacle and len(self._all) > 1:
                obstacle = "a state with a strategy has one optimizer"
            if obstacle:
                raise ConfigurationError(f"tr.recoverable does not support sync={each.strategy.name!r}: {obstacle}")

    @property
    def have_strategy(self) -> bool:
        """Whether there is a strategy, by which ranks take steps by themselves. Then there is one optimizer."""
        return any(each.strategy is not None for each in self._all.values())

    @property
    def are_synchronous(self) -> bool:
        """Whether there is a strategy, and the next step exchanges gradients nevertheless. Equal on all ranks."""
        return any(each.exchanges_gradients for each in self.strategies.values())

    @property
    def are_alone(self) -> bool:
        """Whether a rank takes the next step by itself, without a vote. Equal on all ranks."""
        return any(not each.exchanges_gradients and not each.ends_exchange for each in self.strategies.values())

    @property
    def strategies(self) -> dict[str, LocalSteps]:
        """The steps of the strategy, by the name of its optimizer; empty if there is none."""
        return {name: steps_of(each) for name, each in self._all.items() if each.strategy is not None}

    def undo(self) -> None:
        """Undo the steps of a block that does not take effect."""
        for each in self._all.values():
            each.undo()

    def guard(
        self,
        counts: Callable[[], bool],
        step_alone: Callable[[], None],
        before_wait: Callable[[str], None],
        before_step: Callable[[], None],
        before_commit: Callable[[], None],
    ) -> None:
        """Have every optimizer call these functions in its steps; ``before_wait`` is called with its name.

        With several optimizers no round ends in backward: one may be open whose optimizer the block does not step, and
        not on all ranks.
        """
        is_alone = len(self._all) == 1
        for name, each in self._all.items():
            each.guard = _Guard(name, is_alone, counts, step_alone, before_wait, before_step, before_commit)

    def release(self) -> None:
        """Have the optimizers call nothing any more."""
        for each in self._all.values():
            each.guard = None
            if each.strategy is not None:
                with suppress(ConfigurationError):  # no group has been formed, so there are no steps
                    steps_of(each).is_guarded = False

    def form_again(self) -> None:
        """Make the plans in the group after its members have changed. Collective among the new members."""
        for each in self._all.values():
            each.form_again()

    def begin_block(self) -> None:
        """Note that a block begins. Raises ``ConfigurationError``."""
        self._settling = None
        for each in self.strategies.values():
            each.refuse_frozen()

    def end_block(self) -> None:
        """Drop all gradients, also of optimizers that the block has not stepped."""
        for each in self._all.values():
            each.zero_grad()

    def settle(self, stepped: str | None) -> None:
        """End the rounds of all optimizers but the one that this block steps. Collective, once in each block.

        Args:
            stepped: The name of the optimizer that this rank steps; ``None``: the block has no step.

        Raises:
            ConfigurationError: The ranks step different optimizers. On every rank.
            PeerLost: A rank is lost.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``. The call may be repeated.
        """
        found = self._settle(stepped)
        if found != stepped:
            raise ConfigurationError(f"this block steps {_said(stepped)}, and on other ranks it steps {_said(found)}")

    def _settle(self, stepped: str | None) -> str | None:
        """End the rounds of the others; return the name of the optimizer that some rank steps."""
        settling = self._settling
        if (settling is not None and settling.has_ended) or (len(self._all) == 1 and stepped is not None):
            return stepped
        names = list(self._all)
        if settling is None:
            settling = self._settling = self._begin_settling([name == stepped for name in names])
        if settling.work is not None:
            settling.work.wait()
        in_flight, are_stepped = settling.flags.bool().tolist()
        found = [name for name, is_stepped in zip(names, are_stepped, strict=True) if is_stepped]
        if len(found) > 1:
            raise ConfigurationError(
                f"the ranks step different optimizers in one block: {', '.join(map(repr, found))}; this rank steps "
                f"{_said(stepped)}"
            )
        for name, is_in_flight in zip(names, in_flight, strict=True):
            if is_in_flight and name not in found and name not in settling.dropped:
                self._all[name].drop_round()
                settling.dropped.add(name)
        settling.has_ended = True
        return found[0] if found else None

    def _begin_settling(self, are_stepped: list[bool]) -> _Settling:
        are_in_flight = [each.in_flight for each in self._all.values()]
        flags = torch.tensor([are_in_flight, are_stepped], dtype=torch.int64, device="cpu")
        if self.group.world_size == 1:
            return _Settling(flags, None)
        return _Settling(flags, self.group.control.allreduce(flags, name="recovery/optimizers", op=ReduceOp.MAX))


def steps_of(optimizer: DistributedOptimizer) -> LocalSteps:
    """Return the steps of a strategy that ``_check_strategies`` has not refused."""
    steps = optimizer.strategy_steps
    assert isinstance(steps, LocalSteps)
    return steps


def _said(name: str | None) -> str:
    return "no optimizer" if name is None else f"the optimizer {name!r}"
