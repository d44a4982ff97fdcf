"""The compressed gradients of one ``DistributedOptimizer``: their reducer, and their residuals, which outlive plans."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.error_feedback import (
    CompressedPlan,
    ErrorFeedback,
    Residuals,
    describe_exemption,
    shaped,
    states_for,
)
from totalreduce.pytorch.planning import NamedParameters, PlanSettings
from totalreduce.runner.meter import Figure
from totalreduce.sparse.session import Method

if TYPE_CHECKING:
    from totalreduce.pytorch.compressed import CompressedReducer
    from totalreduce.sparse.auto import Auto, Choice

__all__ = ["Compression", "refuse_unfit"]

_log = logging.getLogger(__name__)


@final
class Compression:
    """The compressed gradients of one ``DistributedOptimizer``."""

    def __init__(
        self,
        group: Group,
        name: str,
        settings: PlanSettings,
        grad_scaler: torch.amp.GradScaler | None,
        names: Callable[[], NamedParameters],
    ) -> None:
        """``names`` returns the names of all parameters, also of those that are not in the present plan."""
        self._group = group
        self.name = name  #: The prefix of the operations' names.
        self._settings, self._names = settings, names
        self.grad_scaler = grad_scaler  #: The ``GradScaler``, or ``None``.
        self.residuals = Residuals()  #: The residuals of all parameters.
        #: The measurements and decisions of ``tr.Auto``, for each bucket that it could compress.
        self.choices: list[Choice] = []
        #: The reducer of the present plan; ``None`` if it compresses nothing.
        self.reducer: CompressedReducer | None = None
        self._plan = CompressedPlan((), (), ())
        self._warned: set[str] = set()  #: The kinds of warnings that were shown.
        self._planned: frozenset[torch.nn.Parameter] = frozenset()  #: The parameters of the plan.
        self._digest = ""  #: Of the methods and buckets of the plan.

    def warn_of_skip(self) -> None:
        """Warn once that ``DistributedOptimizer.step`` has skipped a step; with a ``GradScaler`` that is usual."""
        if self.grad_scaler is None:
            self.warn(
                "skip",
                "a step was skipped on all ranks, because some rank's gradients were not finite; parameters and "
                "residuals have not changed. DistributedOptimizer.skipped_steps counts such steps.",
            )

    def warn_of_nothing(self, plan: CompressedPlan, specs: Sequence[ParameterSpec]) -> None:
        """Warn once if the method compresses nothing: ``specs`` are the parameters that are not in its plan."""
        settings = self._settings
        if settings.sync is None or plan.parameters or self.choices or not specs:
            return
        why = describe_exemption(settings.feedback, [(repr(spec.name), spec.shape) for spec in specs])
        self.warn("nothing", f"sync={settings.sync.name!r} {why}", stacklevel=5)

    def warn_of_changes(self) -> None:
        """Warn once if the program has changed what the method has selected; a ``GradScaler`` does so once a step."""
        if self.reducer is None:
            return
        scaled = self.grad_scaler is not None and self.grad_scaler.is_enabled()
        name = self.reducer.changed_by_program(int(scaled))
        if name is not None:
            self.warn(
                "changes",
                f"the gradient of {name!r} was changed between backward() and step(). It has only the elements that "
                "the sparse method has selected, and what is cut off of them is lost. To clip gradients before the "
                "selection, write DistributedOptimizer(..., feedback=tr.ErrorFeedback(clip_norm=...)) instead of "
                "clip_grad_norm_",
            )

    def warn(self, kind: str, text: str, *, stacklevel: int = 4) -> None:
        """Warn, once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)

    def choose(self, plan: CompressedPlan) -> Collection[str]:
        """Measure, with ``tr.Auto``, which buckets are worth compressing; return the other buckets' parameters.

        Collective with ``tr.Auto``.
        """
        self.choices = []
        sync = self._settings.sync
        if sync is None or sync.name != "auto" or not plan.buckets:
            return ()
        from totalreduce.sparse.auto import Auto

        assert isinstance(sync, Auto), "methods are told apart by their names"
        self.choices = _choose_methods(sync, plan, self._group, self.name)
        return _uncompressed(plan, self.choices)

    def use(self, plan: CompressedPlan) -> CompressedReducer | None:
        """Make the reducer of a plan; ``None`` if the plan compresses nothing."""
        send_dense = self.reducer is not None and self.reducer.send_dense
        self._plan, self._planned, self.reducer = plan, frozenset(plan.parameters), None
        settings, scaler, group = self._settings, self.grad_scaler, self._group
        if settings.sync is None or not plan.buckets:
            return None
        # Imported only now, because compiled kernels take a second to load.
        from totalreduce.kernels import ahead
        from totalreduce.pytorch.compressed import CompressedReducer, CompressedSettings
        from totalreduce.sparse.group_driver import GroupDriver
        from totalreduce.sparse.rounds import SparseRounds

        ahead.load()
        methods = _methods_for(plan, self.choices) if self.choices else [settings.sync] * len(plan.buckets)
        self.reducer = CompressedReducer(
            plan,
            SparseRounds(methods, plan.shapes(), GroupDriver(group, self.name)),
            self.residuals,
            CompressedSettings(
                feedback=settings.feedback,
                rank=group.rank,
                world_size=group.world_size,
                timeout_s=group.timeout_s,
                loss_scale=(lambda: 1.0) if scaler is None else scaler.get_scale,
                divisor=functools.partial(settings.divisor, world_size=group.world_size),
            ),
        )
        self.reducer.send_dense = send_dense
        self._digest = hashlib.sha256(json.dumps(self._buckets()).encode()).hexdigest()
        return self.reducer

    @property
    def in_step(self) -> bool:
        """Whether residuals may change when the present step is taken, or stay as they are if it is left out."""
        return self.reducer is not None and self.reducer.in_step

    @property
    def waited_s(self) -> float:
        """The seconds for which steps were blocked by the exchanges of the method so far."""
        return 0.0 if self.reducer is None else self.reducer.rounds.waited_s

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the method for the live view. Any thread, at any time."""
        return {} if self.reducer is None else self.reducer.rounds.figures()

    def shaped_residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals of the plan's parameters by name, in the parameters' shapes."""
        return {spec.name: shaped(self.residuals.of(parameter), spec) for parameter, spec in self._plan.described()}

    def state(self) -> dict[str, Any]:
        """Return the state of this rank that is needed to go on with the same bits."""
        return {
            "rank": self._group.rank,
            "world_size": self._group.world_size,
            **self._buckets(),
            "sessions": [] if self.reducer is None else self.reducer.rounds.state(),
            **self.residuals.state(self._plan),
        }

    def load_state(self, states: tuple[Mapping[str, Any], ...]) -> None:
        """Go on from the states of this rank, or of all ranks of the saved job. Raises ``ConfigurationError``."""
        own, known = states_for(states, self._group.rank, self._group.world_size)
        self.residuals.load(self._plan, own)
        if self.reducer is not None and all(known[key] == value for key, value in self._buckets().items()):
            self.reducer.rounds.load_state(known["sessions"])

    def pending(self) -> dict[str, Any]:
        """Return the part of the state that this rank has for itself, as it is when the present step is taken.

        Not copied; empty if the plan compresses nothing. Parameters that were compressed before, and are frozen now,
        have their residuals in it, too.
        """
        if self.reducer is None:
            return {}
        pending = self.reducer.pending()
        kept = self.residuals
        for flats, key in ((kept.kept, "residuals"), (kept.velocities, "velocities")):
            others = [parameter for parameter in flats if parameter not in self._planned]
            if others:
                names = self._names()
                pending[key].update({names[each][0]: flats[each] for each in others if each in names})
        return {"buckets": self._digest, "sessions": self.reducer.rounds.state(), **pending}

    def load_sessions(self, state: Mapping[str, Any]) -> None:
        """Have the sparse sessions go on from their states in ``pending``. On all ranks or on none.

        Nothing happens if the present plan has other buckets: the sessions have begun anew with it.
        """
        if self.reducer is not None and self.has_buckets_of(state):
            self.reducer.rounds.load_state(state["sessions"])

    def has_buckets_of(self, state: Mapping[str, Any]) -> bool:
        """Whether the present plan has the methods and buckets with which ``pending`` has returned a state."""
        return bool(state.get("buckets", "") == self._digest)

    def load_pending(self, state: Mapping[str, Any], *, adds: bool = False) -> None:
        """Take residuals and velocities over from ``pending`` of another process.

        Args:
            state: What ``pending`` has returned.
            adds: Add them to those of this rank, which goes on in the place of the other process, too.
        """
        named = {name: parameter for parameter, names in self._names().items() for name in names}
        self.residuals.take_over(state, named, adds=adds)

    def _buckets(self) -> dict[str, Any]:
        """Return the methods and buckets as JSON values. The state of sessions is of use only if these are equal."""
        methods = [] if self.reducer is None else self.reducer.rounds.methods
        return {"methods": methods, "buckets": self._plan.document()}


def refuse_unfit(optimizer: torch.optim.Optimizer, feedback: ErrorFeedback) -> None:
    """Check that the gradients of a torch optimizer can be compressed. Raises ``ConfigurationError``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("sync= cannot be used with LBFGS, which needs whole gradients")
    twice = [parameter for group in optimizer.param_groups if group.get("momentum") for parameter in group["params"]]
    if feedback.momentum and any(feedback.compresses(parameter.shape) for parameter in twice):
        raise ConfigurationError(
            "ErrorFeedback(momentum=...) takes the place of the optimizer's own momentum for what is compressed: build "
            "it as SGD(feedback.param_groups(model.parameters()), lr=...), or with momentum=0"
        )


def _choose_methods(settings: Auto, plan: CompressedPlan, group: Group, name: str) -> list[Choice]:
    """Measure how long the plan's buckets take, and return the decision for each; equal on all ranks. Collective."""
    from totalreduce.sparse.auto import choose
    from totalreduce.sparse.group_driver import GroupDriver

    def dense(num_elements: int) -> float:
        tensor = group.empty(num_elements).zero_()
        begin = time.monotonic()
        group.allreduce(tensor, name=f"{name}.auto.{num_elements}").wait()
        return time.monotonic() - begin

    def average(numbers: Sequence[float]) -> list[float]:
        means = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        group.control.allreduce(means, name=f"{name}.auto", op=ReduceOp.AVG).wait()
        return [float(mean) for mean in means]

    choices = choose(settings, plan.shapes(), GroupDriver(group, f"{name}.auto"), dense, average)
    if group.rank == 0:
        for choice in dict.fromkeys(choice.describe() for choice in choices):
            _log.info("%s: buckets of %s", name, choice)
    return choices


def _uncompressed(plan: CompressedPlan, choices: Sequence[Choice]) -> set[str]:
    """Return the names of the parameters with a part in a bucket that is not worth compressing."""
    return {
        plan.specs[part.parameter].name
        for bucket, choice in zip(plan.buckets, choices, strict=True)
        if choice.method is None
        for part in bucket
    }


def _methods_for(plan: CompressedPlan, choices: Sequence[Choice]) -> list[Method]:
    """Return the method of each bucket of the final plan: that of the measured bucket which is nearest in size."""
    chosen = [(choice.num_elements, choice.method) for choice in choices if choice.method is not None]

    def nearest(size: int) -> Method:
        return min(chosen, key=lambda pair: abs(pair[0] - size))[1]

    return [nearest(shape.num_elements) for shape in plan.shapes()]
