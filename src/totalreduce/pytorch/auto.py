"""``sync=tr.Auto()``: measure which buckets of a plan are worth compressing, and by which method."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch.error_feedback import CompressedPlan
from totalreduce.sparse.auto import Auto, Choice, choose
from totalreduce.sparse.group_driver import GroupDriver
from totalreduce.sparse.session import Method

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["Auto", "choose_methods", "methods_for", "uncompressed"]

_log = logging.getLogger("totalreduce")


def choose_methods(settings: Auto, plan: CompressedPlan, group: Group, name: str) -> list[Choice]:
    """Measure how long the plan's buckets take, and return the decision for each; equal on all ranks. Collective."""

    def dense(num_elements: int) -> float:
        tensor = group.empty(num_elements).zero_()
        begin = time.monotonic()
        group.allreduce(tensor, name=f"{name}.auto.{num_elements}").wait()
        return time.monotonic() - begin

    def average(numbers: Sequence[float]) -> list[float]:
        means = torch.tensor(numbers, dtype=torch.float64)
        group.control.allreduce(means, name=f"{name}.auto", op=ReduceOp.AVG).wait()
        return [float(mean) for mean in means]

    choices = choose(settings, plan.shapes(), GroupDriver(group, f"{name}.auto"), dense, average)
    if group.rank == 0:
        for choice in dict.fromkeys(choice.describe() for choice in choices):
            _log.info("%s: buckets of %s", name, choice)
    return choices


def uncompressed(plan: CompressedPlan, choices: Sequence[Choice]) -> set[str]:
    """Return the names of the parameters with a part in a bucket that is not worth compressing."""
    return {
        plan.specs[part.member].name
        for bucket, choice in zip(plan.buckets, choices, strict=True)
        if choice.method is None
        for part in bucket
    }


def methods_for(plan: CompressedPlan, choices: Sequence[Choice]) -> list[Method]:
    """Return the method of each bucket of the final plan: that of the measured bucket which is nearest in size."""
    chosen = [(choice.num_elements, choice.method) for choice in choices if choice.method is not None]

    def nearest(size: int) -> Method:
        return min(chosen, key=lambda pair: abs(pair[0] - size))[1]

    return [nearest(shape.num_elements) for shape in plan.shapes()]
