"""``DistributedOptimizer``: a torch optimizer that steps with the gradients of all ranks.

The gradients of a step are synchronised in a *round* (``round``). A round has several *reducers*, each of which
synchronises some of the parameters:

* ``reducer.Reducer``: dense gradients, in buckets;
* ``sparse_gradients.SparseReducer``: the rows of sparse gradients;
* ``compressed.CompressedReducer``: gradients that the sparse method (argument ``sync``) compresses;
* ``buffers.BufferReducer``: the model's buffers, which travel with the gradients;
* ``sparse_gradients.SparseResults``: no communication. It converts reduced gradients for ``SparseAdam``.

The first gradient of a step opens its round. Whatever closes the round sends all gradients that have not left, and
waits for those of the other ranks. With ``overlap="backward"`` the end of the backward pass closes it; otherwise
``step()``, ``synchronize()`` or ``join()`` does, or a read of ``param_groups``. If no gradient has come, the call that
closes a round opens it first.

A *plan* says which reducer has which parameters (``planning``); the ranks compare their plans. ``replan()`` and
``add_param_group()`` end the plan and make another one with new reducers. Residuals stay: they are in ``compression``.

If a strategy is used (argument ``sync``), ``stepping.StrategySteps`` says before each step whether the step has a
round. Without a strategy every step has one (``stepping.GradientSteps``).

Other parts: ``deferred`` has the updates that happen in the next forward pass, with ``overlap="iterations"``;
``joining`` has the rounds of a rank without data; ``unfinished`` has the calls that a time-out has interrupted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.pytorch.buffers import BufferMode, BufferReducer
from totalreduce.pytorch.compressing import CompressingOptimizer
from totalreduce.pytorch.compression import Compression, refuse_unfit
from totalreduce.pytorch.deferred import DeferredUpdates
from totalreduce.pytorch.error_feedback import ErrorFeedback
from totalreduce.pytorch.hooks import (
    HookHandles,
    WeakFigures,
    WeakHook,
    backward_pass,
    in_backward,
    in_nested_backward,
    when_backward_ends,
)
from totalreduce.pytorch.initial import Initial, begin_alike
from totalreduce.pytorch.joining import Joining
from totalreduce.pytorch.order import ForwardOrder
from totalreduce.pytorch.planning import ParameterSource, PlanSettings, agree_on_plan
from totalreduce.pytorch.reducer import Arithmetic, Reducer
from totalreduce.pytorch.round import GradientReducer, Phase, Round, RoundGuard
from totalreduce.pytorch.sizes import BUCKET_BYTES, NATIVE_BUCKET_BYTES
from totalreduce.pytorch.sparse_gradients import SparseReducer, SparseResults
from totalreduce.pytorch.stepping import GradientSteps, StrategySteps
from totalreduce.pytorch.sync_argument import settings_of
from totalreduce.pytorch.training import Training
from totalreduce.pytorch.unfinished import INTERRUPTED_ROUND, Call, ClosureLoss, ComparingPlans, EndingPlan, Unfinished
from totalreduce.runner.meter import Figure
from totalreduce.sparse.session import Method
from totalreduce.strategies.strategy import Strategy
from totalreduce.tensors.modes import version_of

__all__ = ["DistributedOptimizer"]


class _SkippedStepError(Exception):
    """Ends the torch optimizer's step from within its closure: the gradients of some rank are not finite."""

    def __init__(self, loss: Any) -> None:
        """``loss``: the closure's loss, reduced."""
        super().__init__()
        self.loss = loss


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return the optimizer's parameters that have gradients, the gradients, and their versions."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(each, each.grad, version_of(each.grad)) for each in parameters if each.grad is not None]


def _unchanged(gradients: list[tuple[torch.Tensor, torch.Tensor, int]]) -> bool:
    """Whether all parameters still have the gradients that ``_gradients`` returned, not changed in place."""
    return all(each.grad is grad and version_of(grad) == version for each, grad, version in gradients)


class _NoStrategyError(ConfigurationError, AttributeError):
    """An optimizer without a strategy was asked for what only a strategy has. ``hasattr`` returns false."""


class DistributedOptimizer(CompressingOptimizer):
    """Wraps a torch optimizer so that ``step()`` uses the gradients of all ranks.

    Every rank must take part in the same rounds. Each ``step()`` is one round, and a ``synchronize()`` before it
    belongs to that round. With a closure, each evaluation of the closure is a round of its own. Which parameters have
    gradients, and in which order they come, may differ from rank to rank. The constructor is collective, too: it
    compares the ranks' plans. See ``docs/optimizer.md``.

    Args:
        optimizer: Any ``torch.optim`` optimizer. Do not call its ``step()``; ``DistributedOptimizer.step()`` calls it.
        model: The module that holds the optimizer's parameters, or ``None``. The gradients of model parameters that the
            optimizer does not hold stay local.
        group: The ranks, as ``tr.init()`` returns them. Required.
        op: ``AVG``: gradients are averaged over the ranks. ``SUM``: they are added.
        bucket_bytes: The size limit of a bucket, whose gradients travel as one operation. Default: 4 MiB. With a
            native library: 8 MiB, or the coordinator's ``fusion_bytes`` if that is smaller.
        overlap: Until when communication may go on. ``"backward"``: ``backward()`` returns when the gradients are those
            of all ranks, as with DistributedDataParallel. So every backward pass outside of ``no_sync()`` is a round:
            in a step, a rank makes as many of these passes as the other ranks, or none. ``"step"``: ``step()`` waits,
            and the gradients are this rank's own until then. Only steps are rounds, so ranks may make different numbers
            of backward passes. With ``op=SUM``, ``"backward"`` means ``"step"``. ``"iterations"``: ``step()`` without a
            closure returns at once. Before its next forward pass, each module waits only for the gradients of its own
            parameters. ``step()`` waits and updates all parameters, as with ``"step"``, if the gradients are already
            synchronised (by ``synchronize()``, or because ``param_groups`` was read, as ``GradScaler`` does); if a step
            hook is registered on the torch optimizer or for all torch optimizers; or if no module of ``model`` has run
            since the plan was made. ``"iterations"`` requires ``model`` and cannot be combined with ``sync``, except
            with ``tr.ParameterServer``, whose values or gradients then come in the order in which forward needs them.
            ``DistributedOptimizer`` uses ``"step"`` instead, without an error, if ``on_missing="error"``, if sparse
            gradients are gathered, or if the torch optimizer is LBFGS or SparseAdam.
        on_missing: What to do if only some ranks have a gradient of a parameter. ``"zero"``: the others count as having
            zeros. ``"error"``: every rank raises ``MissingTensorError``. ``"error"`` does not apply to sparse gradients
            that are gathered, and cannot be combined with ``sync``.
        named_parameters: Pairs of name and parameter, for use without ``model``; the names are equal on all ranks.
            Without model and names, a parameter is named by its index in ``optimizer.param_groups``.
        compression: The dtype in which dense gradients travel: ``"fp16"``, ``"bf16"``, or ``"none"``, which keeps their
            own dtype. It does not apply to sparse gradients that are gathered, nor to those that the sparse method
            (``sync``) sends.
        gradient_predivide_factor: With ``AVG``, dense gradients are divided by this factor before the sum and by
            ``world_size / factor`` after it. Use a factor above 1 if sums overflow in float16, and one below 1 if
            gradients underflow.
        backward_passes_per_step: The number of backward passes whose gradients are accumulated before they are sent.
            If ``step()`` is called after fewer passes, it sends the gradients accumulated so far. The sum is not
            divided by this number.
        sparse: For gradients in torch's sparse layout, as modules with ``sparse=True`` make them. ``"dense"``: they are
            reduced as dense ones. ``"gather"``: each rank collects the gradient rows of all ranks, for the weights of
            ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` in ``model``, and for all parameters of
            ``SparseAdam``. ``SparseAdam`` accepts only sparse gradients, so with ``"dense"`` its reduced gradients
            are converted back to sparse ones, which hold the rows that are not zero.
        join_divisor: The divisor of averages while some ranks have no more data (see ``join``): ``"world"``, all ranks,
            or ``"active"``, the ranks with data.
        sync: The sparse method. Of the gradients of large matrices it sends selected elements only; other gradients
            are reduced as dense ones. ``tr.OkTopk(density=0.01)``, another one of ``totalreduce.sparse``, or
            ``tr.Auto()``, which measures for each bucket whether compression is faster than dense reduction. ``None``:
            nothing is compressed. See docs/sparse.md. Or a strategy, by which most steps exchange no gradients:
            ``tr.LocalSGD(period=16)``, ``tr.DiLoCo(period=100)``, or another one of docs/strategies.md. A class or a
            name (``"oktopk"``) has the defaults.
        feedback: Settings of the residuals, in which a sparse method keeps the elements that it did not send.
        grad_scaler: The ``GradScaler`` in use, if any. Gradients are divided by its loss scale before they are added to
            the residuals.
        initial: What happens if ranks begin with other parameters, buffers, or states of the torch optimizer than rank
            0. ``"broadcast"``: they get those of rank 0, as with DistributedDataParallel. ``"check"``: every rank
            raises ``PlanMismatchError``. ``None``: nothing is compared. Strategies that need equal parameters raise
            ``ConfigurationError`` in any case, because a rank may have loaded a state of its own.
        buffers: How the model's buffers (running statistics, for example) stay equal on all ranks; they travel with the
            gradients of each step. ``"broadcast"``: they are those of the lowest rank with data, as with
            DistributedDataParallel. ``"average"``: floating-point buffers are averaged. ``None``: each rank keeps its
            own, as in steps in which a strategy exchanges no gradients, and without ``model``.
        name: Prefix of the operations' names. Optimizers that are in use at the same time have different names. If a
            name is used again in a group, the n-th optimizer gets the prefix ``name (n)``. So all ranks construct the
            same number of optimizers with each name, in the same order. Calls that raise an error count, too.

    Raises:
        ConfigurationError: A setting is wrong, or model and optimizer do not fit together.
        UnsupportedError: A subclass of ``ConfigurationError``: a parameter is complex.
        PlanMismatchError: The ranks' models or settings differ, or another rank cannot make a plan. Every rank raises
            it, except one that raises its own ``ConfigurationError``.
        DeadlineExceededError: The ranks did not compare their plans within the group's ``timeout_s``, for instance
            because another rank has refused its arguments before the comparison.
        PeerLost: A rank died.

    Attributes:
        skipped_steps: The number of rounds without an update. All ranks skip a round if a gradient that ``sync``
            compresses is not finite on some rank. Other gradients that are not finite skip no round.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None = None,
        *,
        group: Group | None = None,
        op: ReduceOp = ReduceOp.AVG,
        bucket_bytes: int | None = None,
        overlap: Literal["backward", "step", "iterations"] = "backward",
        on_missing: Literal["zero", "error"] = "zero",
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Literal["none", "fp16", "bf16"] = "none",
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        sparse: Literal["dense", "gather"] = "dense",
        join_divisor: Literal["world", "active"] = "world",
        sync: Method | Strategy | type[Method | Strategy] | str | None = None,
        feedback: ErrorFeedback | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        initial: Initial | None = "broadcast",
        buffers: BufferMode | None = "broadcast",
        name: str = "model",
    ) -> None:
        if group is None:
            given = "The second argument is the model; write" if isinstance(model, Group) else "Write"
            raise ConfigurationError(
                f"tr.DistributedOptimizer needs the group of ranks. {given} "
                "tr.DistributedOptimizer(optimizer, model, group=tr.init())"
            )
        # An earlier optimizer of this name may have been closed while only some ranks had submitted an operation. The
        # number in the prefix keeps the operations of this optimizer from being matched with such an operation. Every
        # call counts, also one that raises an error: if a rank refuses its arguments below and the others run out of
        # time in the comparison of plans, all ranks have the same number afterwards.
        own_name = group.operations.own_name(name)
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigurationError("the optimizer is a DistributedOptimizer already: pass the torch optimizer")
        if model is None and overlap == "iterations":
            raise ConfigurationError("overlap='iterations' needs the model: its modules wait for their gradients")
        if model is not None and named_parameters is not None:
            raise ConfigurationError("pass either model or named_parameters, not both: the model has names already")
        super().__init__(optimizer)
        self._source = ParameterSource(optimizer, model, None if named_parameters is None else tuple(named_parameters))
        self._source.refuse_wrapped()
        feedback = feedback or ErrorFeedback()
        settings = settings_of(sync)
        strategy = settings if isinstance(settings, Strategy) else None
        method = None if isinstance(settings, Strategy) else settings
        if method is not None:
            refuse_unfit(optimizer, feedback)
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES
            if group.coordinator is not None:
                bucket_bytes = max(1, min(NATIVE_BUCKET_BYTES, group.coordinator.config.fusion_bytes))
        self._settings = PlanSettings(
            optimizer=self.kind,
            op=op,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            on_missing=on_missing,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            backward_passes_per_step=backward_passes_per_step,
            sparse=sparse,
            join_divisor=join_divisor,
            sync=method,
            strategy=strategy,
            feedback=feedback,
            initial=initial,
            buffers=buffers,
        )
        self._group, self._name, self._given_name = group, own_name, name
        #: Takes part in every step, and can end it. ``tr.recoverable`` sets it.
        self.guard: RoundGuard | None = None
        self._compressed = Compression(group, self._name, self._settings, grad_scaler, self._source.names)
        self._hooks = HookHandles()
        #: The steps of the strategy. Without a strategy, and before the first plan, all steps exchange gradients.
        self._steps: StrategySteps = GradientSteps()
        self._no_sync_depth = 0
        self._pass = -1  #: The backward pass at whose end the round is to be closed; -1: none.
        self._planned = self._closed = False
        self._round = Round([], group.world_size)  #: Until there is a plan, a round without reducers.
        #: The call that a time-out has interrupted, and that must be repeated.
        self._unfinished: Unfinished | None = None
        self.skipped_steps = 0
        # Otherwise the ranks have not met yet, and whoever forms the group calls ``form_again``.
        if group.operations.gate.is_formed or self._settings.can_form_group:
            self._plan_gradients(begins=True)

    # -------------------- planning

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._group

    def describe(self) -> str:
        """Return the settings, which are equal on all ranks, in one line."""
        return f"DistributedOptimizer settings: {json.dumps(self._settings.document(), sort_keys=True, default=str)}"

    @property
    def strategy(self) -> Strategy | None:
        """The settings of the strategy (``sync``), if there is one."""
        return self._settings.strategy

    def form_again(self) -> None:
        """Make a plan in the group after its members have changed. Collective among the new members.

        Gradients in flight are dropped. Parameters, the torch optimizer's state and residuals stay, and the sparse
        sessions begin anew. A strategy goes on in ``tr.recoverable``, and begins anew otherwise. ``tr.recoverable`` and
        ``hvd.elastic.run`` call this.

        Raises:
            PlanMismatchError, ConfigurationError, UnsupportedError, DeadlineExceededError, PeerLost: As ``replan``.
        """
        if self._planned:
            self._planned, self._unfinished = False, None
            self._remove_plan()
        self._name = self._group.operations.own_name(self._given_name)
        self._compressed.name = self._name
        self._steps.close()
        goes_on = self.guard is not None and self._steps.outlives_group
        if not goes_on:
            self._steps = GradientSteps()
        self._plan_gradients()
        if goes_on:
            self._steps.enter(self._group, self._name)

    @property
    def in_flight(self) -> bool:
        """Whether gradients of this rank may be in flight."""
        return self._round.in_flight

    def drop_round(self) -> None:
        """End the present round without a result: gradients, residuals and parameters are as if it had not begun.

        Collective, also among ranks without gradients in flight. ``tr.recoverable`` calls this for an optimizer that a
        block does not step: the backward pass for another optimizer has computed gradients for this one, too.

        Raises:
            DeadlineExceededError: It takes longer than the group's ``timeout_s``.
            PeerLost: A rank died.
        """
        self._round.drop()
        self._inner.zero_grad()

    def undo(self) -> None:
        """Undo the present step, which does not take effect: residuals and a strategy's state are as before it.

        ``tr.recoverable`` calls this, before ``form_again`` if a rank was lost.
        """
        self._steps.undo()
        self._round.undo()

    def replan(self) -> None:
        """Plan again after parameters were frozen or unfrozen, or the model changed its dtype. Collective.

        Gradients that are not synchronised yet are kept, and the next ``step()`` reduces them. With ``sync``, gradients
        that have already been sent return to the residuals. The ranks compare settings, names, shapes, dtypes and
        buckets of the trainable parameters. They do not compare hyper-parameters, nor parameters that are frozen. Call
        ``replan()`` on every rank after the same number of rounds: if ``step()`` timed out on this rank but succeeded
        on others, repeat it before ``replan()``.

        Raises:
            PlanMismatchError: The ranks' models or settings differ, or another rank cannot make a plan. Every rank
                raises it, except one that raises its own ``ConfigurationError``. Correct the models and call
                ``replan()`` again.
            ConfigurationError: Before anything has changed: the optimizer is closed; another call ran out of time and
                must be repeated; gradients that ``sync`` compresses have left in a block of ``tr.recoverable``; or the
                gradients are reduced already (by ``synchronize()``), and the next ``step()`` would change them if it
                reduced them again: with ``op=SUM``, with ``sync``, or with ``join_divisor="world"`` where ranks have
                joined. Or after the old plan was removed (correct the cause and call ``replan()`` again): no parameter
                is trainable; or one is not in the model, not initialised, or synchronised by another
                ``DistributedOptimizer``.
            UnsupportedError: A subclass of ``ConfigurationError``: this rank has no plan because a parameter is
                complex. Correct that and call ``replan()`` again.
            DeadlineExceededError: A wait exceeded the group's ``timeout_s``. If gradients in flight did not arrive in
                time, repeat the call: until it returns, calls that use gradients may raise ``ConfigurationError``. If
                the ranks did not compare their plans in time, only ``close()`` is possible: other collective calls
                raise ``ConfigurationError``.
            PeerLost: A rank died.
        """
        self._end_plan()
        self._plan_gradients()

    def _end_plan(self) -> None:
        """End the round and remove the hooks.

        Collective. A bucket completes only when all ranks have submitted it, and other ranks may already have submitted
        theirs. So every rank submits the buckets that it has not sent yet, marked as having no gradients.
        """
        self._check_usable(Call.PLAN, planned=False)
        if not self._planned:
            return  # The last plan failed, on every rank, so no round or hooks are left to end.
        repeatable = self._settings.repeatable(self._round.active, self._group.world_size)
        if self._round.phase is Phase.SYNCHRONISED and not repeatable:
            raise ConfigurationError(
                "the gradients are reduced already, and reducing them again under the new plan would change them: "
                "call step() or zero_grad() first"
            )
        if self.guard is not None and self._compressed.reducer is not None and self._round.in_flight:
            raise ConfigurationError(
                "the gradients of this block have been sent, and a new plan would add them to the residuals, which is "
                "not undone if a rank is lost: call replan() and add_param_group() before backward(), or in a block of "
                "their own (job.once)"
            )
        self.flush()
        try:
            self._round.abandon()
        except DeadlineExceededError:
            self._unfinished = EndingPlan()
            raise
        self._unfinished = None
        self._planned = False
        self._remove_plan()

    def _remove_plan(self) -> None:
        """Remove the hooks, and end the reducers' threads and operations."""
        self._hooks.remove()
        self._deferred.end()
        self._round.end()
        self._group.meter.sources.pop(self._name, None)

    def _plan_gradients(self, *, begins: bool = False) -> None:
        """Agree with the other ranks on a plan, and make its reducers and hooks. Collective.

        ``begins``: the ranks compare what they begin with, as the settings say.
        """
        group, name, source, settings = self._group, self._name, self._source, self._settings
        try:
            # A strategy that forms the group in its first step compares there what must be equal on all ranks.
            compares = group.operations.gate.is_formed or not settings.can_form_group
            plan = agree_on_plan(group, name, source, settings, compares=compares)
            uncompressed = self._compressed.choose(plan.compressed)
            if self._compressed.choices:
                plan = agree_on_plan(group, name, source, settings, uncompressed)
        except DeadlineExceededError:
            self._unfinished = ComparingPlans()
            raise
        self._plan = plan
        if begins and settings.initial is not None and settings.strategy is None:
            begin_alike(source.tensors(), self._inner, group, name, settings.initial)
        self._compressed.warn_of_nothing(plan.compressed, plan.specs)
        trained = (*plan.parameters, *plan.sparse.values())
        if settings.strategy is not None and self._steps.strategy is None:
            training = Training(trained, self._inner, group, name, compares=self.guard is None)
            self._steps = settings.strategy.steps(training)
        self._steps.check_trains(trained)
        self._steps.use_buckets([bucket.members for bucket in plan.buckets])
        arithmetic = Arithmetic.of(
            settings.op,
            group.world_size,
            predivide=settings.gradient_predivide_factor,
            wire_dtype=settings.wire_dtype,
            divide_by_active=settings.join_divisor == "active",
            native=group.coordinator is not None,
        )
        self._dense = Reducer(
            group,
            name,
            plan.parameters,
            plan.specs,
            plan.buckets,
            arithmetic=arithmetic,
            forbid_missing=settings.on_missing == "error",
        )
        dense, self._buffers = self._dense, None
        if source.model is not None and settings.buffers is not None and group.world_size > 1:
            made = BufferReducer(
                source.model, group, name, settings.buffers, lambda: min(dense.active_ranks, default=0)
            )
            self._buffers = made if made.exists else None
        self._round = Round(self._make_reducers(), group.world_size)
        hooked = self._round.hooked
        model = torch.nn.Module() if source.model is None else source.model
        self._round.order = order = ForwardOrder(model, {parameter: index for index, parameter in enumerate(hooked)})
        arriving = self._dense if self._steps.arriving is None else self._steps.arriving
        names = [spec.name for spec in plan.specs]
        self._deferred = DeferredUpdates(self._inner, arriving, names, order, group)
        # Deferred updates are applied one bucket of dense gradients at a time. That excludes LBFGS, which needs all
        # gradients at once, and SparseAdam, which needs sparse gradients.
        by_buckets = not plan.sparse and not isinstance(self._inner, torch.optim.LBFGS | torch.optim.SparseAdam)
        if settings.overlap == "iterations" and settings.on_missing == "zero" and by_buckets:
            self._deferred.watch(model)
            if self._buffers is not None:
                self._hooks.before_forward((model,), WeakHook(self._settle_buffers))
        else:
            order.watch()
        gathered = set(plan.sparse.values())
        for index, parameter in enumerate(hooked):
            self._hooks.after_gradient(parameter, WeakHook(self._on_gradient, index, parameter not in gathered))
        group.meter.sources[name] = WeakFigures(self._figures)
        self._planned = True

    def _make_reducers(self) -> list[GradientReducer]:
        """List the reducers, in the order in which they finish. A new kind of reducer is added here."""
        plan, compressed = self._plan, self._compressed.use(self._plan.compressed)
        divisor = functools.partial(self._settings.divisor, world_size=self._group.world_size)
        reducers: list[GradientReducer] = [
            self._dense,
            SparseReducer(self._group, self._name, list(plan.sparse.values()), list(plan.sparse), divisor),
        ]
        if compressed is not None:
            reducers.append(compressed)
        if self._buffers is not None:
            reducers.append(self._buffers)
        if isinstance(self._inner, torch.optim.SparseAdam):  # it refuses dense gradients
            reducers.append(SparseResults((*plan.parameters, *plan.compressed.parameters)))
        return reducers

    # -------------------- a step

    def _on_gradient(self, index: int, made_dense: bool, parameter: torch.Tensor) -> None:
        """Record that backward has added to the gradient of a parameter; called by the parameter's hook.

        Args:
            index: The parameter's index in ``Round.hooked``.
            made_dense: Whether a sparse gradient becomes a dense one. Otherwise its rows are gathered.
            parameter: The parameter.
        """
        if self._deferred.guards_hooks:
            self._deferred.before_gradient(parameter)
        if self.guard is not None and not self.guard.counts():  # this rank has no sample of its own in this step
            parameter.grad = None
        steps, round_ = self._steps, self._round
        if not steps.exchanges_gradients:
            is_for_sparse_adam = isinstance(self._inner, torch.optim.SparseAdam)  # it refuses dense gradients
            steps.note_gradient(parameter, keeps_sparse=is_for_sparse_adam or not made_dense)
            if steps.sees_gradients and not self._no_sync_depth:
                with round_.lock:
                    round_.passes[index] += 1
                    if round_.passes[index] % self._settings.backward_passes_per_step == 0:
                        steps.ready(index)
            return
        if made_dense and parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if self._unfinished is not None:
            self._unfinished.refuse_gradient(round_.phase, self.close)
        if round_.phase is Phase.CLOSED:
            raise ConfigurationError(INTERRUPTED_ROUND)
        if round_.phase is Phase.SYNCHRONISED:
            self._settings.check_adds_up(round_.active, self._group.world_size)
        if self._pass != backward_pass():
            self._pass = backward_pass()
            when_backward_ends(WeakHook(self._after_backward))
        if self._no_sync_depth:
            round_.forget_result()
            return
        round_.passes[index] += 1
        if round_.passes[index] % self._settings.backward_passes_per_step:
            round_.forget_result()
            return
        if round_.phase is not Phase.OPEN:
            round_.open()
        round_.ready(index)

    @property
    def _waits_in_backward(self) -> bool:
        """Whether the present backward pass ends the round that it has opened."""
        return (
            self._settings.overlap == "backward"
            and self._settings.op is ReduceOp.AVG
            and (self.guard is None or self.guard.waits_in_backward)
        )

    def _after_backward(self) -> None:
        """Close the round at the end of a backward pass; wait for it when all optimizers have closed theirs.

        A nested pass, such as that of a checkpoint, may compute only some of the gradients. Then the end of the outer
        pass closes the round; or ``step()`` does, if this optimizer gets no gradient after the nested pass.
        """
        self._pass, is_nested = -1, in_nested_backward()
        if self._round.phase is Phase.OPEN and self._waits_in_backward and not self._no_sync_depth:
            if is_nested and not self._round.is_complete:
                return
            self._check_usable(Call.BACKWARD)
            self._close_round()
            when_backward_ends(WeakHook(self._synchronize))
        elif not is_nested:
            self._dense.watch.note()

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks and install them as ``parameter.grad``. Collective.

        Call it before clipping or inspecting gradients; the next ``step()`` without a closure then does not communicate
        again. If all ranks skip that ``step()``, call this optimizer's ``zero_grad()``, not only ``model.zero_grad()``.
        Otherwise a rank without a gradient in the next backward pass still counts as synchronised: its next ``step()``
        does not communicate, and the others raise ``DeadlineExceededError``.

        Raises:
            ConfigurationError: The optimizer is closed; ``join()``, ``replan()`` or ``add_param_group()`` must be
                repeated; or a parameter was unfrozen or converted since the last plan.
            MissingTensorError: With ``on_missing="error"``. Every rank raises it and keeps its local gradients.
            PeerLost: A rank died.
            DeadlineExceededError: The wait exceeded the group's ``timeout_s``. The call may be repeated. Until it
                returns, ``parameter.grad`` still holds the gradient of this rank, if it is dense or gathered.
        """
        self._synchronize()

    def _synchronize(self) -> None:
        """Implement ``synchronize``.

        Within this class call this method, not ``synchronize()``: Horovod's subclass overrides ``synchronize()`` to
        note that the program called it.
        """
        self._check_usable(Call.SYNCHRONIZE)
        self.flush()
        if not self._steps.exchanges_gradients:
            return
        if self._round.phase is not Phase.SYNCHRONISED:
            self._close_round()
            if self.guard is not None:
                self.guard.before_wait()
            self._round.finish()
            self.skipped_steps += self._round.skipped

    def _close_round(self) -> None:
        """Send all gradients that have not left; open a round first if none is open."""
        self._plan.check_unchanged(self._inner.param_groups)
        if not self._round.in_flight:
            self._round.open()
        if not in_backward():
            self._dense.watch.warn()
        self._round.close()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all ranks. Collective.

        Args:
            closure: Evaluates the model and returns the loss: a number, a tensor of one element, or ``None``. Its
                gradients and its loss are reduced over the ranks, so that optimizers whose control flow depends on the
                loss (LBFGS) take the same branch on all ranks. ``op`` and ``join_divisor`` apply to the loss, too.

        Returns:
            The closure's loss, reduced; ``None`` without a closure.

        Raises:
            ConfigurationError: As ``synchronize``; or the closure's loss has more than one element. Or, after
                ``synchronize()``, the closure has computed no gradients, and reducing the present ones again would
                change them: with ``op=SUM``, with ``sync``, or with ``join_divisor="world"`` where ranks have joined.
            MissingTensorError: With ``on_missing="error"``. Every rank raises it before the gradients of the round are
                applied.
            PeerLost: A rank died.
            DeadlineExceededError: The wait exceeded the group's ``timeout_s``. Repeat ``step()``. Repeat
                ``step(closure)`` if the closure had not been called yet, or had returned: a closure that had returned
                is not called a second time. If the time-out occurred in the closure, or with LBFGS, close the
                optimizer and load a checkpoint.
        """
        self._check_usable(Call.STEP if closure is None else Call.STEP_WITH_CLOSURE)
        if closure is not None and self.guard is not None:
            raise ConfigurationError(
                "tr.recoverable does not support step(closure), which may change the parameters several times: "
                "call backward() and then step() without a closure"
            )
        self.flush()
        if not self._steps.exchanges_gradients:
            self._plan.check_unchanged(self._inner.param_groups)
            result = self._steps.take(closure, self.guard, self._deferred, self.flush)
            self._round.restart_passes()
            self._count_step()
            return result
        if self._pass != -1 and self._round.phase is Phase.OPEN and self._waits_in_backward:
            self._pass = -1  # torch has not called ``_after_backward``
            self._compressed.warn(
                "end of backward",
                "torch does not say when backward() ends, as with compiled autograd, so the gradients have been this "
                "rank's own until step(). If they are clipped or read before step(), call optimizer.synchronize() "
                "first; or build the optimizer with overlap='step'",
                stacklevel=3,
            )
        result = None
        if closure is not None:
            try:
                result = self._inner.step(self._reduced(closure))
            except _SkippedStepError as skipped:
                result = skipped.loss
            self._round.commit()
        elif self._round.phase is not Phase.SYNCHRONISED and self._deferred.possible and self.guard is None:
            self._close_round()
            self._deferred.begin(self.flush)
            self._round.commit()
        else:
            self._synchronize()
            if self.guard is not None:
                self.guard.before_step()
                self.guard.before_commit()
            self._compressed.warn_of_changes()
            self._round.commit()
            if not self._round.skipped:
                result = self._inner.step()
        if self._round.skipped:
            self._compressed.warn_of_skip()
        self._round.end_step()
        self._steps.stepped()
        self._count_step()
        return result

    def _count_step(self) -> None:
        """Have the meter count the step that has ended, with the waits of which the engine does not know."""
        self._group.meter.end_step(elsewhere_s=self._compressed.waited_s + self._steps.waited_s)

    def _figures(self) -> dict[str, Figure]:
        """Return the figures of the sparse method or the strategy for the live view. Any thread, at any time."""
        return {"skipped_steps": self.skipped_steps, **self._compressed.figures(), **self._steps.figures()}

    @property
    def strategy_steps(self) -> Any:
        """The steps of the strategy, with what a program may ask of them.

        A ``LocalSteps``; of a strategy with servers a ``ServedSteps``, or a ``SynchronousSteps`` where the settings
        leave no choice; of ``tr.AsyncGossip`` a ``GossipSteps``; of ``tr.ParameterServer`` a ``ServerSteps``.

        Raises:
            ConfigurationError: ``sync`` is no strategy. It is an ``AttributeError``, too, for ``hasattr``.
        """
        if self._steps.strategy is None:
            raise _NoStrategyError("this DistributedOptimizer has no strategy: sync=tr.LocalSGD(...), for example")
        return self._steps

    #: The older name of ``strategy_steps``.
    local_steps = strategy_steps

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls the given one, and reduces its gradients and its loss over the ranks."""

        def reduced_closure() -> Any:
            # The loss of an earlier ``step(closure)`` that timed out after its closure had returned, if there was one.
            unfinished, self._unfinished = self._unfinished, None
            if not isinstance(unfinished, ClosureLoss):
                # ``before`` are gradients that are reduced already, and that another reduction would change. If the
                # closure leaves them as they are, they are refused below.
                repeatable = self._settings.repeatable(self._round.active, self._group.world_size)
                reduced = self._round.phase is Phase.SYNCHRONISED
                before = _gradients(self._inner) if reduced and not repeatable else []
                # An optimizer such as LBFGS calls the closure several times per step, and the last call has left the
                # round synchronised. Without this line, a rank whose closure computes no gradient in the present call
                # would not take part in ``_synchronize`` below, while the other ranks wait for it.
                self._round.forget_result()
                with torch.enable_grad():
                    unfinished = ClosureLoss(closure())
                if before and self._round.phase is Phase.LOCAL and _unchanged(before):
                    self._round.phase = Phase.SYNCHRONISED
                    raise ConfigurationError(
                        "the closure has neither computed nor reset gradients, and those of the last synchronize() are "
                        "reduced already: reducing them again would change them. Call step() without a closure, or "
                        "zero_grad() and backward() in the closure"
                    )
            try:
                self._synchronize()
                ranks = self._dense.active_ranks
                divisor = self._settings.divisor(len(ranks), self._group.world_size)
                loss = unfinished.reduced(self._group, self._name, ranks, divisor)
            except DeadlineExceededError:
                self._unfinished = unfinished
                raise
            if self._round.skipped:
                raise _SkippedStepError(loss)
            return loss

        return reduced_closure

    def flush(self) -> None:
        """Apply every update that ``step()`` deferred. With ``overlap="backward"`` there are none.

        It is called automatically before a forward pass in eval mode or under ``no_grad``, before ``state_dict()`` and
        ``load_state_dict()`` of model and optimizer, and before ``synchronize()``, ``group.barrier()`` and
        ``group.close()``. Call it before you read parameters in other ways, for example to copy the model, to average
        its weights, or to compute a norm.
        """
        if self._planned:
            self._deferred.flush()
            self._settle_buffers()

    def _settle_buffers(self, *_: object) -> None:
        """Set the buffers of a step whose updates were deferred."""
        if self._buffers is not None and not self._round.in_flight:
            self._buffers.settle()

    def join(self) -> int:
        """Announce that this rank has no more data, and take part in rounds until all ranks have joined. Collective.

        A rank that has joined contributes no gradients; with ``sync`` it still contributes its residuals. The other
        ranks divide averages as ``join_divisor`` says. Neither the parameters nor the optimizer's state of this rank
        are updated meanwhile: broadcast both afterwards from the rank that is returned, with ``broadcast_parameters``
        and ``broadcast_optimizer_state``. After ``DeadlineExceededError`` repeat ``join()``: it goes on.

        With ``sync=tr.LocalSGD(...)`` a rank that has joined takes part in the averages of parameters. Its weight in
        the first average is the number of its steps (or samples) since the average before, and 0 in later ones. In the
        end all ranks have the same parameters.

        Returns:
            The rank that joined last, equal on all ranks.

        Raises:
            ConfigurationError: The torch optimizer is LBFGS, or no gradient is reduced in a dense bucket: all of them
                are gathered as sparse ones, or compressed by ``sync``; or another call ran out of time and must be
                repeated.
            MissingTensorError: With ``on_missing="error"``. ``join()`` first finishes the round that an earlier
                ``backward()`` has opened. If gradients are missing in that round, this rank has not joined.
            DeadlineExceededError: A wait exceeded the group's ``timeout_s``. The call may be repeated.
            PeerLost: A rank died.
        """
        self._check_usable(Call.JOIN)
        if not self._steps.is_synchronous:
            return self._steps.join(is_guarded=self.guard is not None)
        if isinstance(self._inner, torch.optim.LBFGS) or not self._plan.buckets:
            raise ConfigurationError(
                "join() does not support LBFGS, and needs at least one parameter with dense gradients that sync= does "
                "not compress"
            )
        joining = self._unfinished
        if not isinstance(joining, Joining):
            self.flush()
            if self._round.phase is not Phase.LOCAL:
                self._synchronize()
            self._unfinished = joining = Joining(self._group, self._name, self._round)
        last = joining.finish()
        self.skipped_steps += joining.skipped_steps
        self._unfinished = None
        self._round.forget_result()
        return last

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this context.

        They are sent with the next backward pass outside the context that completes ``backward_passes_per_step``, or by
        ``step()``. Passes in the context do not count: with 2, the second pass after the context sends. With ``sync``,
        use the context only for passes before the one that sends: gradients of later passes are added to the residuals,
        and sent in a later round.
        """
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does. Updates that ``step()`` has deferred are still applied.

        If the gradients are reduced and ``step()`` was not called, the step is left out, and with ``sync`` the
        residuals are as before. Gradients that are in flight are not recalled with ``sync``: the next ``step()``
        applies them.

        Raises:
            ConfigurationError: A ``step(closure)`` ran out of time and must be repeated. It needs the gradients.
        """
        if self._unfinished is not None:
            self._unfinished.check(Call.ZERO_GRAD)
        if not set_to_none and self._planned:
            self._deferred.keep_contributions()
        self._inner.zero_grad(set_to_none)
        self._round.undo()
        self._round.restart_passes()
        if self._planned:
            self._dense.watch.forget()

    def close(self) -> None:
        """Apply deferred updates and remove every hook; the torch optimizer may then be used on its own.

        Gradients that ``step()`` has not synchronised are not waited for, and those that were not sent yet are not
        sent. Call ``close()`` on every rank after the same ``step()``: a rank that goes on raises
        ``DeadlineExceededError`` in its next step.

        The optimizer is closed also if this raises an error. Updates that could not be applied are then dropped: some
        parameters are those before the last step and others those after it. ``state_dict()`` of model and optimizer
        then works, even if it raised this error before.

        Raises:
            PeerLost: A rank died before its gradients for the deferred updates had arrived.
            DeadlineExceededError: These gradients did not arrive within the group's ``timeout_s``. To wait longer,
                repeat ``flush()`` before ``close()``.
            ConfigurationError: A deferred update is impossible, see docs/optimizer.md.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed, self._unfinished = True, None
            self._steps.close()
            if self._planned:
                self._remove_plan()

    def _check_usable(self, call: Call, *, planned: bool = True) -> None:
        """Raise an error if the optimizer is closed, or another call must be repeated before this one.

        ``planned``: it is also an error if the last plan has failed.
        """
        if self._closed:
            raise ConfigurationError("this DistributedOptimizer was closed: build a new one")
        if self._unfinished is not None:
            self._unfinished.check(call)
        if planned and not self._planned:
            raise ConfigurationError(
                self._group.operations.gate.reason
                or "the last plan failed: correct the model and call replan() on every rank"
            )

    @property
    def resubmissions(self) -> int:
        """The number of buckets sent twice since the last plan: a rank's gradients had changed after they had left."""
        return self._dense.resubmissions

    # -------------------- parameter groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The torch optimizer's groups of parameters. Reading them synchronises gradients that are in flight.

        So ``GradScaler`` and clipping code that loop over the groups see the gradients of all ranks. Exception: in
        backward and in ``no_sync()`` reading does not synchronise.

        Reading does not synchronise either if no round is open on this rank: it has had no gradient since the last
        step, or only in ``no_sync()`` or in fewer than ``backward_passes_per_step`` passes. Synchronising is
        collective, and one rank may read hyper-parameters between steps while the others do not. Where ranks may differ
        in this, call ``synchronize()`` on every rank before you clip or unscale. Otherwise ranks with an open round
        clip the reduced gradients, while a rank without one clips only its local gradients, and its ``step()`` applies
        the reduced gradients unclipped. After ``close()`` reading never synchronises.

        Raises:
            ConfigurationError, MissingTensorError, PeerLost, DeadlineExceededError: As ``synchronize``.
        """
        if self._round.in_flight and not in_backward() and not self._no_sync_depth and not self._closed:
            self._synchronize()
        return self._inner.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters and plan again. Collective.

        The group is not added if this raises ``ConfigurationError`` or ``PlanMismatchError``, or the torch optimizer's
        error. All ranks then make a plan without the new group, and training can go on. If a rank cannot make that
        plan, every rank is left without a plan, and ``replan()`` must be called on every rank. The ranks compare what
        ``replan`` compares: they do not notice groups with other hyper-parameters, or other frozen parameters.

        Raises:
            ConfigurationError: As ``replan``; above all, a parameter is not in the model.
            UnsupportedError: As ``replan``.
            PlanMismatchError: The ranks added different groups, or some rank's torch optimizer has refused a group with
                trainable parameters. A rank whose torch optimizer refused the group raises that optimizer's error, and
                the other ranks raise ``PlanMismatchError``. If the second plan, without the group, fails too, then a
                rank that cannot make it raises its own ``ConfigurationError``, and all others raise
                ``PlanMismatchError``.
            DeadlineExceededError: As ``replan``. If gradients in flight did not arrive in time, the group was not
                added.
            PeerLost: A rank died.
        """
        self._end_plan()
        try:
            self._inner.add_param_group(param_group)
        except Exception:
            with suppress(ConfigurationError, PlanMismatchError):
                # Ranks whose torch optimizer accepted the group are in the second ``try`` block; this is the same
                # collective comparison as theirs. If a rank accepted a group with trainable parameters, the plans
                # differ, and the comparison fails on every rank; it also does if a rank cannot make a plan. Then the
                # accepting ranks remove the group, and all ranks compare a second time. If every rank refused its
                # group, the first comparison succeeds.
                self._plan_gradients()
            if not self._planned:
                self._plan_gradients()
            raise
        try:
            self._plan_gradients()
        except (ConfigurationError, PlanMismatchError):
            # Every rank has raised one of the two (see agree_on_plan), so all ranks plan again without the group.
            self._inner.param_groups.pop()
            self._plan_gradients()
            raise

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, rank {self._group.rank} of {self._group.world_size})"
