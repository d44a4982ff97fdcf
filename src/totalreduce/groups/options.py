"""The arguments that all collectives have."""

from __future__ import annotations

from typing import NamedTuple

from totalreduce.foundation import checks
from totalreduce.foundation.call_names import UNNAMED
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm
from totalreduce.groups.calling import call_here
from totalreduce.schedules import SCHEDULES

__all__ = ["Options"]


class Options(NamedTuple):
    """The arguments that all collectives have (see ``Group.allreduce``)."""

    name: str | None = None
    schedule: str = "auto"
    priority: int = 0
    timeout_s: float | None = None

    @property
    def shown(self) -> str:
        """The name in messages; checked."""
        return call_here.get()[0] or UNNAMED if self.name is None else checks.operation_name(self.name)

    @property
    def algorithm(self) -> str:
        """The name of the schedule as the engine knows it; checked."""
        if self.schedule == "auto":  # most operations
            return "auto"
        name = self.schedule.lower() if isinstance(self.schedule, str) else self.schedule
        if name != Algorithm.AUTO and name not in SCHEDULES:
            nearest = checks.did_you_mean(name, ("auto", *SCHEDULES))
            raise ConfigurationError(
                f"schedule {self.schedule!r} is not known{nearest}; there are auto, {', '.join(SCHEDULES)}"
            )
        return name
