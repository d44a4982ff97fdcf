"""What ``ddp_hook`` keeps back: residuals and velocities in versions, so that to go back needs no copy.

A pass writes a new version of each tensor. Until an optimizer has used the gradients of the pass, the version before it
can come back, because the program may leave the step out. And the version of the last commit of ``tr.attempts`` can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from totalreduce.pytorch.error_feedback import Residuals

__all__ = ["Memory"]

_Parameter = torch.nn.Parameter
_Flats = dict[_Parameter, torch.Tensor]


@final
class _Versions:
    """Flat tensors of one kind by parameter. Memory that no version needs is used again."""

    __slots__ = ("_before", "_held", "_spare", "now")

    def __init__(self, now: _Flats, spare: _Flats) -> None:
        """``now``: the present version; ``spare``: memory with any contents. Both are changed in place."""
        self.now, self._spare = now, spare
        self._before: dict[_Parameter, torch.Tensor | None] = {}  #: Before a pass whose step has not been taken.
        self._held: _Flats = {}  #: Of the last ``keep``.

    def renew(self, parameter: _Parameter, new: torch.Tensor) -> None:
        """Make a tensor the present version; the one before it is kept."""
        if parameter in self._before:
            self.accept(parameter)
        self._before[parameter] = self.now.get(parameter)
        self.now[parameter] = new

    def accept(self, parameter: _Parameter) -> None:
        """Give up the version before the present one."""
        self._give_up(parameter, self._before.pop(parameter, None))

    def take_back(self, parameter: _Parameter) -> None:
        """Make the version before the present one the present one again."""
        if parameter in self._before:
            self._set(parameter, self._before.pop(parameter))

    def keep(self) -> None:
        """Have ``go_back`` return to the present version."""
        for parameter in [*self._before]:
            self.accept(parameter)
        before, self._held = self._held, dict(self.now)
        for parameter, old in before.items():
            self._give_up(parameter, old)

    def go_back(self) -> None:
        """Return to the version of ``keep``, or to nothing."""
        for parameter in [*self._before]:
            self.take_back(parameter)
        for parameter in [*self.now]:
            self._set(parameter, self._held.get(parameter))

    def give(self, parameter: _Parameter, flat: torch.Tensor | None) -> None:
        """Begin with a tensor, and keep it."""
        if flat is not None:
            self._held[parameter] = self.now[parameter] = flat

    def take(self, parameter: _Parameter) -> torch.Tensor | None:
        """Return the present version of a parameter, and forget the parameter."""
        for each in (self._before, self._held, self._spare):
            each.pop(parameter, None)
        return self.now.pop(parameter, None)

    def _set(self, parameter: _Parameter, flat: torch.Tensor | None) -> None:
        old = self.now.pop(parameter)
        if flat is not None:
            self.now[parameter] = flat
        self._give_up(parameter, old)

    def _give_up(self, parameter: _Parameter, flat: torch.Tensor | None) -> None:
        """Use the memory of a version again, unless it is another version, too."""
        if flat is not None and flat is not self._held.get(parameter) and flat is not self.now.get(parameter):
            self._spare[parameter] = flat


@final
class Memory:
    """The residuals and velocities of a rank.

    Attributes:
        residuals: The residuals and velocities that the next pass begins with.
        undecided: The parameters whose last pass no optimizer has used yet, with the number of changes of each one that
            torch had counted then.
    """

    def __init__(self) -> None:
        self.residuals = residuals = Residuals()
        self._residuals = _Versions(residuals.kept, residuals.spare)
        self._velocities = _Versions(residuals.velocities, residuals.spare_velocities)
        self._kinds = self._residuals, self._velocities
        self.undecided: dict[_Parameter, int] = {}

    def spare(self, parameter: _Parameter) -> torch.Tensor:
        """Return the tensor that will be the next residual of a parameter, with any contents."""
        spare = self.residuals.spare
        if parameter not in spare:
            spare[parameter] = torch.empty_like(self.residuals.of(parameter))
        return spare[parameter]

    def renew(self, parameter: _Parameter, velocity: torch.Tensor | None) -> None:
        """Make the spare tensor the residual, and a tensor the velocity; it is not decided yet whether they stay."""
        self._residuals.renew(parameter, self.residuals.spare.pop(parameter))
        if velocity is not None:
            self._velocities.renew(parameter, velocity)
        self.undecided[parameter] = parameter._version

    def accept(self, parameter: _Parameter) -> None:
        """Note that the step with the last gradient of a parameter was taken."""
        self.undecided.pop(parameter, None)
        for each in self._kinds:
            each.accept(parameter)

    def take_back(self, parameter: _Parameter) -> None:
        """Set residual and velocity to what they were before the last pass, whose step was left out."""
        self.undecided.pop(parameter, None)
        for each in self._kinds:
            each.take_back(parameter)

    def pending(self) -> dict[str, dict[_Parameter, torch.Tensor]]:
        """Return residuals and velocities as they are when the present step is taken: flat, not copied."""
        return {"residuals": self.residuals.kept, "velocities": self.residuals.velocities}

    def load(
        self,
        pending: Mapping[str, Mapping[str, torch.Tensor]],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        adds: bool,
    ) -> None:
        """Begin with what ``pending`` has returned in another process, by names. See ``Residuals.take_over``."""
        self.residuals.take_over(pending, parameters, adds=adds)

    def keep(self) -> None:
        """Have ``go_back`` return to what the residuals and velocities are now. The step of the last pass was taken."""
        self.undecided.clear()
        for each in self._kinds:
            each.keep()

    def go_back(self) -> None:
        """Set residuals and velocities to what they were when ``keep`` was called, or to nothing."""
        self.undecided.clear()
        for each in self._kinds:
            each.go_back()

    def give(self, parameter: _Parameter, flats: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        """Begin with a residual and a velocity that ``take`` has returned, and keep them."""
        for each, flat in zip(self._kinds, flats, strict=True):
            each.give(parameter, flat)

    def take(self, parameter: _Parameter) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the residual and the velocity of a parameter, and forget it; ``None`` where there is none."""
        self.undecided.pop(parameter, None)
        return self._residuals.take(parameter), self._velocities.take(parameter)

    def __contains__(self, parameter: _Parameter) -> bool:
        """Whether a parameter has a residual."""
        return parameter in self.residuals.kept

    def parameters(self) -> list[_Parameter]:
        """Return the parameters that have a residual or a velocity."""
        return [*{**self.residuals.kept, **self.residuals.velocities}]
