"""Agreement that also works when a rank cannot even say what it wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError

if TYPE_CHECKING:
    from totalreduce.groups.group import Group

__all__ = ["agree_or_refuse"]

_Made = TypeVar("_Made")


def agree_or_refuse(
    group: Group, topic: str, make: Callable[[], _Made], describe: Callable[[_Made], Mapping[str, Any]]
) -> _Made:
    """Make something on every rank and compare the descriptions. Collective, also for a rank that fails.

    Args:
        group: The ranks.
        topic: What it is about; equal on all ranks.
        make: Purely local.
        describe: JSON-ready description of what was made.

    Raises:
        ConfigurationError: From ``make``, on the ranks where it refused. The others are told, so that they do
            not wait for something that never comes; where all refuse alike, each raises its own error.
        PlanMismatchError: The descriptions differ, or another rank refused.
    """
    try:
        made = make()
    except ConfigurationError as error:
        with suppress(PlanMismatchError):
            group.agree(topic, {"refused": str(error)})
        raise
    group.agree(topic, describe(made))
    return made
