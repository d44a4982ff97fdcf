"""``DistributedOptimizer``: a torch optimizer whose gradients are those of all ranks.

It wraps the optimizer given (no subclass is made at run time, no method is replaced), and delegates all that
is not communication. What happens between a gradient hook and ``step()`` is in ``reducer``; what happens
after ``step()`` with ``overlap="iterations"`` is in ``deferred``.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from totalreduce.foundation.errors import ConfigurationError, PlanMismatchError
from totalreduce.foundation.types import ReduceOp
from totalreduce.pytorch import internals
from totalreduce.pytorch.deferred import DeferredUpdates
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback, Residuals, states_for
from totalreduce.pytorch.facade import OptimizerFacade
from totalreduce.pytorch.hooks import WeakHook
from totalreduce.pytorch.order import ForwardOrder
from totalreduce.pytorch.planning import GradientPlan, PlanSettings, agree_on_plan, name_parameters, sparse_parameters
from totalreduce.pytorch.reducer import Arithmetic, Reducer, operation_names
from totalreduce.pytorch.round import GradientReducer, Phase, Round
from totalreduce.pytorch.sizes import BUCKET_BYTES, NATIVE_BUCKET_BYTES
from totalreduce.pytorch.sparse_gradients import SparseReducer
from totalreduce.sparse.session import Method, Report

if TYPE_CHECKING:
    from totalreduce.groups.group import Group
    from totalreduce.pytorch.compressed import CompressedReducer
    from totalreduce.sparse.auto import Choice

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(OptimizerFacade):
    """Wraps a torch optimizer so that ``step()`` uses the gradients of all ranks.

    Every rank must call ``step()`` (or ``synchronize()``) equally often; which parameters got gradients, and
    in which order, may differ from rank to rank. See ``docs/optimizer.md``.

    Args:
        optimizer: Any ``torch.optim`` optimizer. It is driven by this one: do not step it yourself.
        model: The module that holds the optimizer's parameters. Model parameters that the optimizer does not
            hold stay local. ``None``: without its names and the order of its modules.
        group: The ranks.
        op: ``AVG`` (the gradient of the average of the ranks' losses) or ``SUM``.
        bucket_bytes: How many bytes of gradients travel as one operation, at most. Default: 4 MiB, or 8 MiB where
            a native library carries the operations out.
        overlap: ``"backward"``: communication runs beside backward, and ``step()`` waits for it.
            ``"iterations"``: ``step()`` returns at once, and each module's next forward waits for its own
            parameters only (with ``on_missing="zero"``).
        on_missing: What to do where some ranks have a gradient and others have not: count ``"zero"`` for
            them, or raise ``MissingTensorError`` on every rank (``"error"``).
        named_parameters: Names that all ranks know, where there is no model; without them places in the optimizer.
        compression: ``"fp16"`` or ``"bf16"``: gradients travel as such.
        gradient_predivide_factor: Averages are divided by this before the sum, and by the rest of the world size
            after it; for gradients near the ends of a half type's range.
        backward_passes_per_step: So many backward passes add up before gradients leave; those of a remainder leave at
            ``step()``. Nothing is divided by it.
        sparse: Sparse gradients are made ``"dense"``, or everybody's rows are ``"gather"``-ed (of modules with
            ``sparse=True``, and of ``SparseAdam``). ``SparseAdam``, which takes no dense gradients, always gets sparse
            ones: with ``"dense"``, they hold the rows that are not zero.
        join_divisor: What averages are divided by while some ranks have joined: ``"world"`` or ``"active"``.
        sync: What is sent of the gradients of large matrices: ``tr.OkTopk(density=0.01)``, another method of
            ``totalreduce.sparse``, ``tr.Auto()``, which measures what is faster, or ``None``: everything. See
            docs/sparse.md.
        feedback: What becomes of the gradients that ``sync`` keeps back.
        grad_scaler: The ``GradScaler`` that scales the loss, so that ``sync`` keeps back unscaled gradients.
        name: Prefix of the operations' names; different for each optimizer that shares a group.

    Raises:
        ConfigurationError: A setting is wrong, or model and optimizer do not fit together.
        UnsupportedError: A parameter that is complex, or on a device that the group's transport cannot read.
        PlanMismatchError: The ranks' models or settings differ; on every rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None = None,
        *,
        group: Group,
        op: ReduceOp = ReduceOp.AVG,
        bucket_bytes: int | None = None,
        overlap: Literal["backward", "iterations"] = "backward",
        on_missing: Literal["zero", "error"] = "zero",
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Literal["none", "fp16", "bf16"] = "none",
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        sparse: Literal["dense", "gather"] = "dense",
        join_divisor: Literal["world", "active"] = "world",
        sync: Method | None = None,
        feedback: ErrorFeedback | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        name: str = "model",
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigurationError("the optimizer is a DistributedOptimizer already: pass the torch optimizer")
        if model is None and overlap == "iterations":
            raise ConfigurationError("overlap='iterations' needs the model, whose modules wait for their gradients")
        if model is not None and named_parameters is not None:
            raise ConfigurationError("pass the model or named_parameters: the model has names already")
        super().__init__(optimizer)
        feedback = feedback or ErrorFeedback()
        if sync is not None:
            _refuse_unfit(optimizer, feedback)
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
            sync=sync,
            feedback=feedback,
        )
        #: It refuses dense gradients: those that were reduced as dense tensors are made sparse again.
        self._takes_sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
        self._residuals, self._grad_scaler = Residuals(), grad_scaler
        #: Steps without an update, because some rank's gradients were not finite (with ``sync`` only).
        self.skipped_steps = 0
        #: What ``tr.Auto`` has measured and decided, for each bucket that it could compress.
        self.choices: list[Choice] = []
        self._model, self._group, self._name = model, group, name
        self._named = None if named_parameters is None else list(named_parameters)
        self._no_sync_depth = 0
        self._deferred: DeferredUpdates | None = None
        self._forget_quiesce: Callable[[], None] | None = None
        self._closed = self._planned = False
        # Shared with the finalizer, which removes the hooks when this object is collected.
        self._handles: list[RemovableHandle] = []
        self._recording: list[RemovableHandle] = []
        self._remove_hooks = weakref.finalize(self, _remove_hooks, self._handles, self._recording)
        self._plan_gradients()

    # -------------------- planning

    def replan(self) -> None:
        """Plan again after parameters were frozen or unfrozen, or the model changed its dtype. Collective.

        Gradients that were not synchronised yet stay, and are reduced at the next ``step()``.

        Raises:
            PlanMismatchError: The ranks' models differ; on every rank. Mend them and call ``replan()`` again.
        """
        self._settle()
        self._plan_gradients()

    def _settle(self) -> None:
        """Have nothing in flight and no hooks. Collective, since no rank knows what the others have sent."""
        self._check_open()
        if not self._planned:
            return  # the last plan failed, on every rank
        if self._round.phase is Phase.SYNCHRONISED and self._settings.op is ReduceOp.SUM:
            raise ConfigurationError(
                "the gradients are sums over the ranks already and would be summed again under the new plan: "
                "call step() or zero_grad() first"
            )
        self.flush()
        self._round.abandon()
        self._round.end()
        self._planned = False
        _remove_hooks(self._handles, self._recording)

    def _plan_gradients(self) -> None:
        settings, groups = self._settings, self._inner.param_groups
        named = name_parameters(self._model, self._named, groups)
        sparse = sparse_parameters(self._model, self._inner)
        plan = agree_on_plan(self._group, self._name, named, groups, settings, sparse)
        methods = [settings.sync] * len(plan.compressed.buckets) if settings.sync is not None else []
        self.choices = []
        if settings.sync is not None and settings.sync.name == "auto" and methods:
            from totalreduce.pytorch import auto

            assert isinstance(settings.sync, auto.Auto), "methods are told apart by their names"
            self.choices = auto.choose_methods(settings.sync, plan.compressed, self._group, self._name)
            whole = auto.sent_whole(plan.compressed, self.choices)
            plan = agree_on_plan(self._group, self._name, named, groups, settings, sparse, whole)
            methods = auto.methods_for(plan.compressed, self.choices)
        self._plan = plan
        arithmetic = Arithmetic.of(
            settings.op,
            self._group.world_size,
            predivide=settings.gradient_predivide_factor,
            wire_dtype=settings.wire_dtype,
            divide_by_active=settings.join_divisor == "active",
            native=self._group.coordinator is not None,
        )
        names = [f"{self._name}.{name}" for name in operation_names(plan.buckets, plan.specs)]
        self._reducer = Reducer(
            self._group,
            self._group.planned(names),
            names,
            plan.parameters,
            plan.specs,
            plan.buckets,
            arithmetic=arithmetic,
            forbid_missing=settings.on_missing == "error",
        )
        self._compressed = self._make_compressed(plan.compressed, methods)
        self._round = self._make_round(plan)
        hooked = self._round.hooked
        self._passes = [0] * len(hooked)
        self._ordered = False
        model = torch.nn.Module() if self._model is None else self._model
        self._order = ForwardOrder(model, {p: index for index, p in enumerate(hooked)})
        self._waits: dict[int, list[int]] | None = None
        for index, parameter in enumerate(hooked):
            hook = WeakHook(self._on_gradient, index)
            self._handles.append(internals.after_gradient(parameter, hook))
        for module in self._order.relevant:
            self._recording.append(module.register_forward_pre_hook(WeakHook(self._on_forward)))
        if self._settings.overlap == "iterations" and self._model is not None:
            for module in self._model.modules():
                self._handles += internals.around_state_dict(module, WeakHook(self._on_state_dict))
        self._planned = True

    def _make_round(self, plan: GradientPlan) -> Round:
        """List the reducers, in the order in which they finish. A new kind of reducer is added here."""
        divisor = functools.partial(self._settings.divisor, world_size=self._group.world_size)
        sparse = SparseReducer(self._group, self._name, list(plan.sparse.values()), list(plan.sparse), divisor)
        reducers: list[GradientReducer] = [self._reducer, sparse]
        if self._compressed is not None:
            reducers.append(self._compressed)
        return Round(reducers, self._group.world_size)

    def _make_compressed(self, plan: CompressedPlan, methods: Sequence[Method]) -> CompressedReducer | None:
        settings, scaler = self._settings, self._grad_scaler
        if not plan.buckets:
            return None
        # Only now: compiled kernels take a second to load.
        from totalreduce.kernels import ahead
        from totalreduce.pytorch.compressed import CompressedReducer
        from totalreduce.sparse.group_driver import GroupDriver
        from totalreduce.sparse.rounds import SparseRounds

        ahead.load()
        rounds = SparseRounds(methods, plan.shapes(), GroupDriver(self._group, self._name))
        return CompressedReducer(
            plan,
            rounds,
            self._residuals,
            settings.feedback,
            rank=self._group.rank,
            world_size=self._group.world_size,
            timeout_s=self._group.timeout_s,
            loss_scale=(lambda: 1.0) if scaler is None else scaler.get_scale,
            divisor=functools.partial(settings.divisor, world_size=self._group.world_size),
        )

    def _use_order(self) -> None:
        if self._ordered or not self._order.seen:
            return
        self._ordered = True
        self._round.use_order(self._order)
        if self._settings.overlap == "backward":
            _remove_hooks(self._recording)

    # -------------------- hooks

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if self._deferred is not None:
            self._check_fresh(index)
            self.flush()
        if self._no_sync_depth:
            if self._round.phase is Phase.SYNCHRONISED:
                self._round.phase = Phase.LOCAL
            return
        self._passes[index] += 1
        if self._passes[index] % self._settings.backward_passes_per_step:
            return
        if self._round.phase is Phase.CLOSED:
            self._synchronize()
        if self._round.phase is not Phase.OPEN:
            self._open_round()
        self._round.ready(index)

    def _open_round(self, *, joined: bool = False) -> None:
        self._use_order()
        if self._takes_sparse_only:  # those of the last step, if the program has not reset them
            self._convert_gradients(lambda gradient: gradient.to_dense() if gradient.is_sparse else gradient)
        self._round.open(joined=joined)

    def _check_fresh(self, index: int) -> None:
        deferred = self._deferred
        assert deferred is not None
        if deferred.forward_seen and self._reducer.bucket_of[index] in deferred.pending:
            raise ConfigurationError(
                f"parameter {self._plan.specs[index].name!r} was used before its deferred update was "
                "applied, because its module was not called as in the first step. Call optimizer.flush() "
                'before such a forward pass, or use overlap="backward".'
            )

    def _on_forward(self, _key: object, module: torch.nn.Module, *_: object) -> None:
        self._order.record(module)
        deferred = self._deferred
        if deferred is None:
            return
        if not torch.is_grad_enabled() or (module is self._model and not module.training):
            self.flush()
            return
        deferred.forward_seen = True
        if self._waits is None:
            self._waits = self._order.waits([bucket.members for bucket in self._plan.buckets])
        self._apply(self._waits[id(module)])

    def _on_state_dict(self, *_: object) -> None:
        self.flush()

    # -------------------- the step

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks and install them as ``parameter.grad``. Collective.

        Call it before clipping or inspecting gradients; the next ``step()`` then does not communicate again.

        Raises:
            MissingTensorError: With ``on_missing="error"``; on every rank, which keep their own gradients.
            PeerLost: A rank died.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``; may be called again.
        """
        self._synchronize()

    def _synchronize(self) -> None:
        """What ``synchronize`` does; for calls that are not the user's."""
        self._check_usable()
        self.flush()
        if self._round.phase is Phase.SYNCHRONISED:
            return
        self._close_round()
        self._round.finish()
        self.skipped_steps += self._round.skipped
        if self._takes_sparse_only:
            self._convert_gradients(lambda gradient: gradient.to_sparse(1))

    def _convert_gradients(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Of the parameters whose gradients are reduced as dense tensors."""
        for parameter in (*self._plan.parameters, *self._plan.compressed.parameters):
            if parameter.grad is not None:
                parameter.grad = convert(parameter.grad)

    def join(self) -> int:
        """Say that this rank has no more data, and take part in the others' rounds until all have joined. Collective.

        It contributes nothing; the others' averages are divided as ``join_divisor`` says. Parameters are not updated
        meanwhile: broadcast them from the rank that is returned.

        Returns:
            The rank that joined last, equal on all ranks.

        Raises:
            ConfigurationError: The optimizer steps with closures (LBFGS), or has sparse gradients only.
            PeerLost: A rank died.
        """
        self._check_usable()
        if isinstance(self._inner, torch.optim.LBFGS) or not self._plan.buckets:
            raise ConfigurationError("join() needs rounds that can be told apart: not LBFGS, and not sparse alone")
        self.flush()
        if self._round.phase is not Phase.LOCAL:
            self._synchronize()
        rounds = 0
        while rounds == 0 or self._round.active:
            rounds += 1
            self._open_round(joined=True)
            self._round.close()
            self._round.finish()
            self.skipped_steps += self._round.skipped
        self._round.phase = Phase.LOCAL
        # Who came last took part in the fewest rounds.
        last = torch.tensor([self._group.rank - rounds * self._group.world_size])
        self._group.control.allreduce(last, name=f"{self._name}.joined", op=ReduceOp.MAX).wait()
        return int(last.item()) % self._group.world_size

    def _close_round(self) -> None:
        self._plan.check_unchanged(self._inner.param_groups)
        if not self._round.in_flight:
            self._open_round()
        self._round.close()

    def flush(self) -> None:
        """Apply every update that ``step()`` deferred. Nothing to do with ``overlap="backward"``.

        Happens by itself before an evaluation or ``no_grad`` forward of the model, ``state_dict()`` and
        ``load_state_dict()`` of model and optimizer, ``synchronize()``, ``group.barrier()`` and
        ``group.close()``. Call it before reading parameters in any other way: copying the model, an average
        of its weights, a norm.
        """
        if self._deferred is not None:
            self._apply(self._reducer.by_urgency)
            self._forget_deferred()

    def _apply(self, buckets: Sequence[int]) -> None:
        assert self._deferred is not None
        try:
            for index in buckets:
                self._deferred.apply(index)
        except ConfigurationError:
            # It would be raised again by every later flush, and hide what comes after.
            self._forget_deferred()
            raise

    def _forget_deferred(self) -> None:
        self._deferred = None
        if self._forget_quiesce is not None:
            self._forget_quiesce()
            self._forget_quiesce = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all ranks. Collective.

        Args:
            closure: Evaluates the model and returns the loss. Its gradients and its loss are reduced over the
                ranks, so that optimizers that decide by the loss (LBFGS) decide equally everywhere.

        Returns:
            The closure's loss, reduced; ``None`` without a closure.

        Raises:
            MissingTensorError: With ``on_missing="error"``; on every rank, before any parameter is changed.
            PeerLost: A rank died.
            DeadlineExceededError: It takes longer than the group's ``timeout_s``; may be called again.
        """
        self._check_usable()
        self.flush()
        if closure is not None:
            result = self._inner.step(self._reduced(closure))
        elif self._defers():
            self._close_round()
            self._deferred = DeferredUpdates(self._inner, self._reducer)
            # Holds this object, too: an optimizer that goes out of scope after its last step still owes an
            # update.
            self._forget_quiesce = self._group.on_quiesce(self.flush)
            result = None
        else:
            self._synchronize()
            result = None
            if not self._round.skipped:
                result = self._inner.step()
            elif self._grad_scaler is None and self.skipped_steps == 1:
                warnings.warn(
                    "a step was skipped on all ranks, because some rank's gradients were not finite; nothing was kept "
                    "of it. DistributedOptimizer.skipped_steps counts such steps.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._round.phase = Phase.LOCAL
        self._passes = [0] * len(self._passes)
        return result

    def _defers(self) -> bool:
        return (
            self._settings.overlap == "iterations"
            and self._settings.on_missing == "zero"
            and self._round.phase is not Phase.SYNCHRONISED
            and self._order.seen
            and not self._plan.sparse
            and not self._takes_sparse_only
            and not isinstance(self._inner, torch.optim.LBFGS)
            and not internals.has_step_hooks(self._inner)
        )

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced_closure() -> Any:
            # Each evaluation is a round of its own, also on a rank where it makes no gradient.
            if self._round.phase is Phase.SYNCHRONISED:
                self._round.phase = Phase.LOCAL
            with torch.enable_grad():
                loss = closure()
            self._synchronize()
            if loss is None:
                return None
            total = torch.as_tensor(loss).detach().clone()
            self._group.control.allreduce(total, name=f"{self._name}.loss", op=self._settings.op, priority=0).wait()
            return total if isinstance(loss, torch.Tensor) else total.item()

        return reduced_closure

    def _check_usable(self) -> None:
        self._check_open()
        if not self._planned:
            raise ConfigurationError("the last replan() failed: mend the model and call it again on every rank")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("this DistributedOptimizer was closed: build a new one")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward only accumulates here; the sum leaves with the next backward outside, or at ``step()``."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does. Reduced gradients still in flight are not lost by it.

        Args:
            set_to_none: ``None`` instead of zeros.
        """
        if not set_to_none and self._deferred is not None:
            owed = self._deferred.contributions()
            for parameter in self._plan.parameters:
                if parameter.grad is not None and id(parameter.grad) in owed:
                    parameter.grad = torch.zeros_like(parameter.grad)
        self._inner.zero_grad(set_to_none)
        if self._round.phase is Phase.SYNCHRONISED:
            self._round.phase = Phase.LOCAL

    def close(self) -> None:
        """Apply what is deferred and remove every hook; the torch optimizer may then be used on its own."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._remove_hooks()
        self._round.end()

    @property
    def resubmissions(self) -> int:
        """How many buckets were sent twice, because gradients changed after backward. 0 in a tidy loop."""
        return self._reducer.resubmissions

    # -------------------- what a sparse method keeps back

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet, by parameter: float32, in the parameter's shape. Only to be read."""
        plan = self._plan.compressed
        return {
            spec.name: self._residuals.of(parameter).as_strided(spec.shape, spec.stride)
            for parameter, spec in plan.described()
        }

    def flush_residuals(self) -> None:
        """Have the next step send whole gradients and all residuals: nothing is kept back after it. On every rank.

        For the last step before an evaluation, or before the residuals are given up. Call it before its backward.
        """
        self._check_usable()
        if self._round.in_flight:
            raise ConfigurationError("gradients of this step have left already: call flush_residuals() before backward")
        if self._compressed is not None:
            self._compressed.send_whole = True

    def residual_state_dict(self) -> dict[str, Any]:
        """What ``sync`` has to know to go on with the same bits, of this rank: save it beside ``state_dict()``.

        Every rank has a state of its own. To go on with fewer or more ranks, or another method, give all of them to
        ``load_residual_state_dict``.
        """
        self._check_usable()
        self.flush()
        sessions = [] if self._compressed is None else self._compressed.rounds.state()
        return {
            "rank": self._group.rank,
            "world_size": self._group.world_size,
            **self._compressed_buckets(),
            "sessions": sessions,
            **self._residuals.state(self._plan.compressed),
        }

    def load_residual_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Go on from what ``residual_state_dict`` returned.

        Args:
            states: This rank's own. Or all of them, if the number of ranks was another one: then each rank takes
                some, so that the sum of all residuals stays what it was.

        Raises:
            ConfigurationError: States are missing, or of another model.
        """
        self._check_usable()
        self.flush()
        own, known = states_for(states, self._group.rank, self._group.world_size)
        self._residuals.load(self._plan.compressed, own)
        here = self._compressed_buckets()
        if self._compressed is not None and all(known[key] == value for key, value in here.items()):
            self._compressed.rounds.load_state(known["sessions"])

    def _compressed_buckets(self) -> dict[str, Any]:
        """What has to be the same for a saved state to be of use beyond its residuals. JSON-ready."""
        return {
            "methods": [] if self._compressed is None else self._compressed.rounds.methods,
            "buckets": self._plan.compressed.document(),
        }

    def residual_norm(self) -> float:
        """Of everything that this rank has not sent yet."""
        return self._residuals.norm()

    @property
    def hidden_share(self) -> float | None:
        """Share of the last step's sparse exchanges that lay beside backward; ``None`` if there were none."""
        overlap = None if self._compressed is None else self._compressed.rounds.overlap
        return None if overlap is None or not overlap.exchange_s else overlap.hidden_s / overlap.exchange_s

    @property
    def reports(self) -> list[Report]:
        """What the sparse method did in the last step, by bucket."""
        return [] if self._compressed is None else self._compressed.reports()

    # -------------------- what the wrapped optimizer answers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The torch optimizer's groups. Reading them while gradients are in flight synchronises first.

        So ``GradScaler`` and clipping code that walks the groups see the gradients of all ranks.
        """
        if self._round.in_flight and not internals.in_backward() and not self._no_sync_depth:
            self._synchronize()
        return self._inner.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters and plan again. Collective.

        Raises:
            ConfigurationError: A parameter is not in the model; the group is not added then.
            PlanMismatchError: The ranks added different groups; on every rank.
        """
        self._settle()
        self._inner.add_param_group(param_group)
        try:
            self._plan_gradients()
        except (ConfigurationError, PlanMismatchError):
            # Every rank is here: see agree_on_plan.
            self._inner.param_groups.pop()
            self._plan_gradients()
            raise

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, rank {self._group.rank} of {self._group.world_size})"


def _refuse_unfit(optimizer: torch.optim.Optimizer, feedback: ErrorFeedback) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("sync= cannot be used with LBFGS, which needs whole gradients")
    twice = [parameter for group in optimizer.param_groups if group.get("momentum") for parameter in group["params"]]
    if feedback.momentum and any(feedback.compresses(parameter.shape) for parameter in twice):
        raise ConfigurationError(
            "ErrorFeedback(momentum=...) takes the place of the optimizer's own momentum for what is compressed: build "
            "it as SGD(feedback.param_groups(model.parameters()), lr=...), or with momentum=0"
        )


def _remove_hooks(*lists: list[RemovableHandle]) -> None:
    for handles in lists:
        while handles:
            handles.pop().remove()
