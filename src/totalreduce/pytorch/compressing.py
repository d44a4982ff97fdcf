"""What a program may ask of ``DistributedOptimizer`` about the sparse method and its residuals."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.pytorch.compression import Compression
from totalreduce.pytorch.unfinished import Call
from totalreduce.pytorch.wrapper import OptimizerWrapper
from totalreduce.sparse.session import Report

if TYPE_CHECKING:
    from totalreduce.sparse.auto import Choice

__all__ = ["CompressingOptimizer"]


class CompressingOptimizer(OptimizerWrapper):
    """The methods of ``DistributedOptimizer`` that read, keep and flush what a sparse method has not sent."""

    _compressed: Compression

    @property
    def compressed(self) -> Compression:
        """The compressed gradients and their residuals."""
        return self._compressed

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Whether gradients of this rank may be in flight."""

    @abstractmethod
    def _check_usable(self, call: Call) -> None:
        """Raise ``ConfigurationError`` if this call is impossible at present."""

    def _check_between_rounds(self) -> None:
        self._check_usable(Call.RESIDUALS)
        if self.in_flight or self._compressed.in_step:
            raise ConfigurationError(
                "gradients of this step have left: call flush_residuals() or load_residual_state_dict() before "
                "backward(), or after step() or zero_grad()"
            )

    @property
    def choices(self) -> list[Choice]:
        """The measurements and decisions of ``tr.Auto``, for each bucket that it could compress."""
        return self._compressed.choices

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """The residuals of this rank by the parameter's name: float32, in the parameter's shape. Read-only.

        They are views, valid until a round ends (in ``step()``, ``synchronize()`` or ``join()``, or when
        ``param_groups`` is read), the plan changes, or residuals are loaded: clone what you keep.
        """
        return self._compressed.shaped_residuals()

    def flush_residuals(self) -> None:
        """Have the next round send all gradients and residuals of the plan, so that no residual of it is left.

        If ``tr.Auto`` stops compressing a parameter after a ``replan()``, its residual is not sent. It stays, and
        ``residual_norm()`` still counts it.

        If you want to evaluate the model after a step, or to discard the residuals, call this on every rank before
        ``backward()`` of that step. Otherwise the model lacks what is still in the residuals. If that round is skipped
        (see ``skipped_steps``), call it again. Do not call it while a rank is in ``join()``: that rank goes on with the
        sparse method, and the exchange fails.

        Raises:
            ConfigurationError: It was called between ``backward()`` and ``step()``.
        """
        self._check_between_rounds()
        if self._compressed.reducer is not None:
            self._compressed.reducer.send_dense = True

    def residual_state_dict(self) -> dict[str, Any]:
        """Return the state of the sparse method on this rank.

        Save it together with ``state_dict()``. Training that is resumed from both has the same results, bit by bit, as
        training that was not interrupted.

        A request of ``flush_residuals`` is not part of the state. Every rank has a state of its own. To resume with a
        different number of ranks, pass the states of all ranks to ``load_residual_state_dict``. Between ``backward()``
        and ``step()`` the state is that before the step, as the parameters are.

        Raises:
            ConfigurationError: Gradients are in flight: it was called between ``backward()`` and ``step()``, with
                ``overlap="step"``.
        """
        self._check_usable(Call.RESIDUALS)
        if self.in_flight:
            raise ConfigurationError(
                "gradients of this step are in flight: call residual_state_dict() before backward(), or after step()"
            )
        return self._compressed.state()

    def load_residual_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Go on from states that ``residual_state_dict`` returned.

        Args:
            states: This rank's state. If the number of ranks has changed: the states of all previous ranks, which are
                distributed over the ranks so that the sum of all residuals stays the same.

        Raises:
            ConfigurationError: States are missing, or of another model. Or it was called between ``backward()`` and
                ``step()``.
        """
        self._check_between_rounds()
        self._compressed.load_state(states)

    def residual_norm(self) -> float:
        """Return the norm of all residuals of this rank."""
        return self._compressed.residuals.norm()

    @property
    def hidden_share(self) -> float | None:
        """The fraction (0 to 1) of the last step's sparse exchange time that overlapped with backward.

        That is the part of the exchange before ``step()`` began to wait, divided by the time of the whole exchange.
        ``None`` if the last step had no sparse exchange.
        """
        overlap = None if self._compressed.reducer is None else self._compressed.reducer.rounds.overlap
        return None if overlap is None or not overlap.exchange_s else overlap.hidden_s / overlap.exchange_s

    @property
    def reports(self) -> list[Report]:
        """The reports of the sparse method on the last step, by bucket."""
        return [] if self._compressed.reducer is None else self._compressed.reducer.rounds.reports()
