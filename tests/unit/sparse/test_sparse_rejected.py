"""Deliberately wrong sparse methods. The conformance check must reject every one of them, and say why."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from totalreduce.sparse.common import GatheringSession
from totalreduce.sparse.session import Update
from totalreduce.sparse.settings import TopkSettings
from totalreduce.testing.conformance import ConformanceError
from totalreduce.testing.sparse_conformance import check_method


class Honest(GatheringSession):
    """TopkA, as it is; the wrong ones change its exchange."""


class ClearsWhatItDidNotSend(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is not None:
            self._gradients.clear()
        return update


class ClearsOneElementMore(Honest):
    """As a selection by ``>`` does that clears by ``>=``."""

    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is not None:
            unsent = np.setdiff1d(np.arange(self._num_elements, dtype=np.int32), update.indices)
            self._gradients.erase(unsent[:1])
        return update


class KeepsWhatItSent(Honest):
    """So that it is applied twice."""

    def _exchange(self, present):
        kept = self._selection.values.copy()
        update = yield from super()._exchange(present)
        if update is not None:
            self._gradients.put(self._selection.indices, kept)
        return update


class Doubles(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        return None if update is None else replace(update, values=2 * update.values)


class ForgetsWhatRoundingCutsOff(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is not None:
            self._gradients.erase(self._selection.indices)
        return update


class LetsRanksDiffer(Honest):
    """By one unit in the last place."""

    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is None or self._rank == 0:
            return update
        return replace(update, values=np.nextafter(update.values, np.float32(np.inf)))


class LosesTheSmallestIndex(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        return None if update is None else replace(update, indices=update.indices[1:], values=update.values[1:])


class ListsBackwards(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is None:
            return None
        return replace(update, indices=update.indices[::-1].copy(), values=update.values[::-1].copy())


class MovesResiduals(Honest):
    """Between two elements that nobody has applied: no mass is lost by it."""

    def _exchange(self, present):
        update = yield from super()._exchange(present)
        if update is not None:
            unsent = np.setdiff1d(np.arange(self._num_elements, dtype=np.int32), update.indices)[:1]
            self._gradients.add(unsent, np.array([(-1) ** self._rank], np.float32)[: unsent.size])
        return update


class GoesOnAlone(Honest):
    """A rank whose own gradients are finite does not look at the others'."""

    def _exchange(self, present):
        selection = self._selection
        update = yield from super()._exchange(present)
        if update is None and selection.finite:
            return Update(present, selection.indices, selection.values)
        return update


class CountsStepsThatFailed(Honest):
    def _exchange(self, present):
        update = yield from super()._exchange(present)
        self._steps += update is None
        return update


class ForgetsItsSteps(Honest):
    def state(self):
        return {"steps": 0}


class WritesToTheResidual(Honest):
    def accumulate(self, gradients, residuals, scale):
        super().accumulate(gradients, residuals, scale)
        residuals.put(np.zeros(1, np.int32), np.array([7.0], np.float32))


class ForgetsTheScale(Honest):
    def accumulate(self, gradients, residuals, scale):
        super().accumulate(gradients, residuals, 1.0)


class IsNotDeterministic(Honest):
    runs = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        type(self).runs += 1

    def _count(self):
        return super()._count() + self.runs // 7


class SaysThatEverythingIsPresent(Honest):
    def _exchange(self, present):
        return (yield from super()._exchange(np.ones_like(present)))


class MiscountsItsBytes(Honest):
    def exchange(self, present):
        update = yield from super().exchange(present)
        self.report.sent_bytes += 1
        return update


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrong(TopkSettings):
    name: ClassVar[str] = "wrong"

    kind: type[Honest]

    def session(self, shape, rank, world_size):
        return self.kind(self, shape, rank, world_size)


def check(kind: type[Honest], **options) -> None:
    """Three ranks, which lack a segment each in turn; a density that falls; and rounding."""
    if kind is SaysThatEverythingIsPresent:  # what one rank lacks nobody has
        options["world_size"] = 1
    method = Wrong(kind=kind, density=0.02, warmup_steps=3)
    check_method(method, **{"world_size": 3, "shapes": ((150,), (20, 20), (50,)), **options})


def test_the_honest_one_passes() -> None:
    check(Honest)
    check(Honest, world_size=2)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (ClearsWhatItDidNotSend, "is not conserved"),
        (ClearsOneElementMore, "is not conserved"),
        (KeepsWhatItSent, "is not conserved"),
        (Doubles, "is not conserved"),
        (ForgetsWhatRoundingCutsOff, "is not conserved"),
        (LetsRanksDiffer, "rank 1 got other bits than rank 0"),
        (LosesTheSmallestIndex, "is not conserved"),
        (ListsBackwards, "do not ascend"),
        (MovesResiduals, "is not conserved"),
        (GoesOnAlone, "goes on though"),
        (CountsStepsThatFailed, "there are other bits"),
        (ForgetsItsSteps, "there are other bits"),
        (WritesToTheResidual, "the old residual was written to"),
        (ForgetsTheScale, "is not gradient"),
        (IsNotDeterministic, "a second run gives other bits"),
        (SaysThatEverythingIsPresent, "present is not"),
        (MiscountsItsBytes, "bytes; it was"),
    ],
)
def test_wrong_ones_are_rejected(kind: type[Honest], complaint: str) -> None:
    with pytest.raises(ConformanceError, match=complaint):
        check(kind)


def test_what_moves_between_ranks_is_rejected_unless_it_may() -> None:
    """With an even number of ranks, nothing is lost."""
    check(MovesResiduals, world_size=4, moves=True)
    with pytest.raises(ConformanceError, match="has changed elements that were not applied"):
        check(MovesResiduals, world_size=4)
