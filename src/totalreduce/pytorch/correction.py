"""Momentum correction and factor masking: one implementation for ``DistributedOptimizer`` and ``ddp_hook``.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018). A sparse method applies most elements of a gradient many
steps late. If the optimizer applied its momentum to what arrives, the delayed elements would lose theirs. So each rank
keeps a velocity for each element, v = m v + g, and gives the velocity to the method in place of the gradient. Where an
element was applied, its velocity is set to zero (factor masking).
"""

from __future__ import annotations

from typing import final

import torch

from totalreduce.pytorch.error_feedback import Residuals

__all__ = ["MomentumCorrection"]


@final
class MomentumCorrection:
    """The velocities of one round. They replace those of the round before when the round has a result.

    Attributes:
        pending: The velocities of this round, by parameter: float32, flat, on the parameter's device.
    """

    def __init__(self, residuals: Residuals, momentum: float) -> None:
        """``residuals`` has the velocities of the rounds before; ``momentum`` is m, in [0, 1)."""
        self._residuals, self._momentum = residuals, momentum
        self.pending: dict[torch.nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def correct(self, parameter: torch.nn.Parameter, flat: torch.Tensor, loss_scale: float) -> None:
        """Turn a gradient into its velocity, in place; do nothing without momentum.

        Args:
            parameter: The parameter.
            flat: Its gradient: float32, flat. It is divided by ``loss_scale``, because velocities are unscaled.
            loss_scale: The factor of the loss.
        """
        if not self._momentum:
            return
        if loss_scale != 1.0:
            flat.div_(loss_scale)
        velocity = self._residuals.velocities.get(parameter)
        new = self._residuals.spare_velocities.pop(parameter, None)
        new = torch.empty_like(flat) if new is None else new
        if velocity is None:
            new.copy_(flat)
        else:
            torch.add(flat, velocity, alpha=self._momentum, out=new)
            flat.copy_(new)
        self.pending[parameter] = new

    def scale_after(self, loss_scale: float) -> float:
        """Return the factor of the loss that gradients still have after ``correct``."""
        return 1.0 if self._momentum else loss_scale

    def commit(self) -> None:
        """Keep the velocities of this round. The memory of the old ones is used in the next round."""
        velocities, spare = self._residuals.velocities, self._residuals.spare_velocities
        for parameter, new in self.pending.items():
            if parameter in velocities:
                spare[parameter] = velocities[parameter]
            velocities[parameter] = new
        self.pending = {}

    def discard(self) -> None:
        """Forget the velocities of this round: it had no result."""
        self._residuals.spare_velocities.update(self.pending)
        self.pending = {}
