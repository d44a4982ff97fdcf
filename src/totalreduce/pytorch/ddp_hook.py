"""Sparse methods for DistributedDataParallel, over any back end of ``torch.distributed``.

>>> model = DistributedDataParallel(model)                                              # doctest: +SKIP
>>> model.register_comm_hook(*tr.ddp_hook(tr.OkTopk(density=0.01)))                     # doctest: +SKIP

DDP calls the hook when a bucket has its gradients, in the same order on all ranks. Two threads work during backward:
one selects the elements to send, bucket after bucket, while the other exchanges the buckets that were selected. DDP
gets the results of all buckets together, when the last exchange has ended: if a gradient in any bucket is not finite,
all gradients of the pass become NaN.

DDP waits in C++, where every error becomes a bare ``RuntimeError``. So, as in ``c10d.work``, the hook itself waits at
the end of backward, before DDP does, and raises the error that happened.
"""

# Annotations are objects in this file, not text: DDP compares those of a hook with its own classes.

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.kernels import ahead
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.ddp_bucket import BucketLayout, HookBucket, HookSettings, Parameters, Regrouped
from totalreduce.pytorch.ddp_group import HookGroup
from totalreduce.pytorch.ddp_memory import Memory
from totalreduce.pytorch.ddp_steps import StepWatch
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback, Residuals, describe_exemption, states_for
from totalreduce.pytorch.hooks import in_backward
from totalreduce.pytorch.sync_argument import settings_of
from totalreduce.sparse.auto import Auto
from totalreduce.sparse.dense import Dense
from totalreduce.sparse.rounds import with_arrays, with_tensors
from totalreduce.sparse.session import Method, Report, Session
from totalreduce.sparse.worker import Job
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.streams import is_on_accelerator

__all__ = ["HookKeeper", "HookRecord", "SparseHookState", "ddp_hook", "sparse_hook"]

_log = logging.getLogger(__name__)

#: Added to the process group's time-out, so that the group raises its own error first, which says more.
_GRACE_S = 5.0

Hook = Callable[["SparseHookState", GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class HookRecord:
    """What a hook needs, beside residuals and velocities, to go on with the same bits."""

    method: str  #: The name of the sparse method.
    steps: int  #: See ``SparseHookState``.
    skipped_steps: int  #: See ``SparseHookState``.
    layout: list[Parameters]  #: The parameters of each bucket of the last pass.
    #: The states of the sessions, with tensors instead of arrays, by the parameters of their buckets.
    sessions: dict[Parameters, dict[str, Any]]

    def renamed(self, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
        """Return the record as plain values and tensors. Buckets with a parameter that has no name are left out."""

        def listed(keys: Iterable[Parameters]) -> list[list[str]]:
            return [[names[each] for each in key] for key in keys if names.keys() >= set(key)]

        sessions = {key: state for key, state in self.sessions.items() if names.keys() >= set(key)}
        return {
            "method": self.method,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "layout": listed(self.layout),
            "buckets": listed(sessions),
            "sessions": list(sessions.values()),
        }

    @classmethod
    def named(cls, record: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter]) -> "HookRecord":
        """Return the record of which ``renamed`` has returned the values; buckets of other models are left out."""

        def key_of(names: Sequence[str]) -> Parameters | None:
            return tuple(parameters[name] for name in names) if parameters.keys() >= set(names) else None

        layout = [key_of(names) for names in record.get("layout", ())]  # states have not always had it
        sessions = [(key_of(names), state) for names, state in zip(record["buckets"], record["sessions"], strict=True)]
        return cls(
            method=record["method"],
            steps=record["steps"],
            skipped_steps=record["skipped_steps"],
            layout=[] if None in layout else cast("list[Parameters]", layout),
            sessions={key: state for key, state in sessions if key is not None},
        )

    def without_sessions(self) -> "HookRecord":
        """Return the record of a hook whose sessions begin anew."""
        return replace(self, sessions={})


class HookKeeper(Protocol):
    """Keeps what hooks keep back, while DDP objects, hooks and process groups come and go (``tr.attempts``).

    It is the attribute ``keeper`` of the default process group.
    """

    def meet(self, hook: "SparseHookState", parameters: Parameters) -> None:
        """Give a hook what was kept of a bucket's parameters, which come for the first time."""
        ...

    def note_pass(self) -> None:
        """Note that a backward pass has changed what a hook keeps back."""
        ...

    def keeps_for(self, hook: "SparseHookState", model: torch.nn.Module) -> bool:
        """Whether something is kept of a model's parameters, with which the hook will begin."""
        ...


def ddp_hook(
    method: Method | type[Method] | str,
    *,
    feedback: ErrorFeedback | None = None,
    process_group: dist.ProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> tuple["SparseHookState", Hook]:
    """Return the two arguments of ``DistributedDataParallel.register_comm_hook``: a state and a hook. Collective.

    The state belongs to one model. Large parameters of two or more dimensions are compressed; others are summed in the
    same exchange. In ``tr.attempts`` the hook goes on with the residuals of the hook of the last attempt, also in the
    place of a rank that was lost.

    Args:
        method: ``tr.OkTopk(density=0.01)`` or another method of ``totalreduce.sparse``; or its class or name, for the
            defaults.
        feedback: Settings of the residuals. DDP's ``bucket_cap_mb`` takes the place of ``bucket_elements``.
        process_group: DDP's; ``None``: the default one. A group of the same ranks is made for the exchanges.
        grad_scaler: The ``GradScaler`` that scales the loss, so that residuals are unscaled.

    Raises:
        ConfigurationError: ``tr.Auto``, which is for ``DistributedOptimizer``.
        PlanMismatchError: The ranks' settings differ; on every rank.
        RendezvousError: torch could not make a group.
    """
    state = SparseHookState(settings_of(method, "method"), feedback or ErrorFeedback(), process_group, grad_scaler)
    state.connect()
    return state, sparse_hook


@never_compiled
def sparse_hook(state: "SparseHookState", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket of a backward pass; called by DDP."""
    return state.reduce(bucket)


@final
class SparseHookState:
    """The state of ``ddp_hook`` between backward passes.

    ``state_dict`` is for checkpoints: it has names. The state can be pickled, too, as torch's own can (``torch.save``):
    then it is registered with another DDP model of the same structure and settings, whose parameters it recognises by
    the order in which they come in the first pass. ``process_group`` is the default one then, unless set before that
    pass.

    Attributes:
        method: The sparse method.
        feedback: Settings of the residuals.
        process_group: DDP's; ``None``: the default one.
        grad_scaler: Scales the loss.
        steps: The number of backward passes that had a result.
        skipped_steps: The number of passes without one, because some rank's gradients were not finite: all gradients
            were NaN.
        reports: The reports of the method on the last pass, by bucket.
        memory: The residuals and velocities of this rank.
    """

    def __init__(
        self,
        method: Method,
        feedback: ErrorFeedback,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if isinstance(method, Auto):
            raise ConfigurationError("tr.Auto is for DistributedOptimizer; give ddp_hook one method")
        self.method, self.feedback = method, feedback
        self.process_group, self.grad_scaler = process_group, grad_scaler
        self.steps = self.skipped_steps = 0
        self.reports: list[Report] = []
        self.memory = Memory()
        self._steps = StepWatch(self.memory)
        self._sessions = _Sessions(_Pickled())
        self._sends_all = False
        self._own_group: HookGroup | None = None
        self._keeper: HookKeeper | None = None
        self._pass = _Pass()

    def connect(self) -> HookGroup:
        """Make the group and the threads of the exchanges, unless they exist. Collective."""
        if self._own_group is None:
            ahead.load()
            group = self.process_group or dist.group.WORLD
            self._own_group = HookGroup(group, f"{self.method!r} {self.feedback!r}")
            # Not at exit: a thread that waits for a lost rank would keep the process.
            weakref.finalize(self, self._own_group.close).atexit = False
            if not isinstance(self.method, Dense):  # it keeps nothing back
                self._keeper = getattr(dist.group.WORLD, "keeper", None)
        return self._own_group

    def close(self) -> None:
        """End the threads and the group of the exchanges; the model cannot go backward with them any more."""
        if self._own_group is not None:
            self._own_group.close()
            self._own_group.close_group()

    # -------------------- a backward pass

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin the exchange of a bucket; see ``sparse_hook``. Raises ``UnsupportedError``."""
        own_group, buffer, this = self.connect(), bucket.buffer(), self._pass
        if bucket.index() == 0 and this.arrived:
            self._abandon(own_group)
            this = self._pass
        if buffer.layout is not torch.strided:
            raise UnsupportedError("ddp_hook: a bucket of sparse gradients (Embedding(sparse=True)); use sparse=False")
        parameters = cast("Parameters", tuple(bucket.parameters()))
        if self._keeper is not None and parameters not in self._sessions:
            self._keeper.meet(self, parameters)
        self._sessions.meet(parameters, self.memory.residuals)
        this.arrived.append((buffer, parameters))
        if not self._sessions.expected:
            self._add(buffer, parameters, own_group)
        future = this.future_of(buffer)
        if bucket.is_last():
            if self._sessions.expected:
                self._regroup(own_group)
            self._end_pass(own_group)
        return future

    def _add(self, buffer: torch.Tensor, parameters: Parameters, own_group: HookGroup) -> None:
        """Add a bucket to the pass, and begin its exchange, unless gradients are clipped."""
        layout = self._sessions.layout(parameters, self.feedback)
        for stretch in layout.compressed:
            self._steps.watch(stretch.parameter)
            if stretch.parameter in self.memory.undecided:  # no gradient of it has come in this pass
                self._steps.decide(stretch.parameter)
        session = self._session(parameters, layout, own_group) if layout.compressed else None
        driver = own_group.driver
        settings = HookSettings(self.feedback, driver.rank, driver.world_size, self.memory, own_group.streams)
        made = HookBucket(buffer, layout, session, settings)
        self._pass.buckets.append(made)
        self._pass.parameters.append(parameters)
        if self.feedback.clip_norm is None:
            self._start(self._pass, made, own_group)

    def _regroup(self, own_group: HookGroup) -> None:
        """Add the buckets of the first pass after a state was loaded; if possible, those of the pass before the state.

        A new DDP has other buckets in its first pass than in later ones. With the buckets of the saved sessions, the
        pass has the bits that it would have had with the old DDP.
        """
        this, expected = self._pass, self._sessions.expected
        self._sessions.expected = []
        buckets = this.arrived
        if Regrouped.is_possible(buckets, expected):
            this.regrouped = Regrouped(buckets, expected)
            buckets = list(zip(this.regrouped.buffers, expected, strict=True))
        for buffer, parameters in buckets:
            self._add(buffer, parameters, own_group)

    def _session(self, parameters: Parameters, layout: BucketLayout, own_group: HookGroup) -> Session:
        def make(method: Method) -> Session:
            session = method.session(layout.shape, own_group.driver.rank, own_group.driver.world_size)
            session.share(own_group.workspace)
            return session

        if self._sends_all:
            return make(Dense())
        return self._sessions.session(parameters, lambda: make(self.method), self.steps)

    def _start(self, this: "_Pass", made: HookBucket, own_group: HookGroup) -> None:
        selected = own_group.selecting.submit(functools.partial(self._select, this, made))
        # The worker's thread waits for the selection, and so exchanges buckets in the order in which they came.
        job = Job(len(this.jobs), selected.result, made.exchange, 0)
        this.jobs.append(job)
        own_group.worker.start(job)

    def _select(self, this: "_Pass", made: HookBucket) -> None:
        if self.feedback.clip_norm is None:
            made.take(self._loss_scale)
        elif this.clip is None:
            for each in this.buckets:
                each.take(self._loss_scale)
            norm = math.hypot(*(each.norm() for each in this.buckets))
            this.clip = self.feedback.clip_factor(norm, self.connect().driver.world_size)
        made.accumulate(1.0 if this.clip is None else this.clip)

    def _end_pass(self, own_group: HookGroup) -> None:
        this, self._pass = self._pass, _Pass()
        self._sends_all = False
        if self.feedback.clip_norm is not None:
            for made in this.buckets:
                self._start(this, made, own_group)
        ended = own_group.selecting.submit(functools.partial(self._finish, this, own_group.timeout_s + _GRACE_S))
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(ended.result)

    def _finish(self, this: "_Pass", timeout_s: float) -> None:
        try:
            if this.wait(timeout_s):
                for made in this.buckets:
                    made.commit()
                self.steps += 1
            else:
                for made in this.buckets:
                    made.spoil()
                self.skipped_steps += 1
            if this.regrouped is not None:
                this.regrouped.write_back(self.connect().streams)
            if self._keeper is not None and self._sessions.by_bucket:
                self._keeper.note_pass()
        except BaseException as error:
            this.end(error)
            raise
        if self.steps + self.skipped_steps == 1:
            self._warn_of_nothing(this.parameters)
        self.reports = [made.report for made in this.buckets]
        self._sessions.keep_only(this.parameters)
        this.end(None)

    def _warn_of_nothing(self, buckets: Sequence[Parameters]) -> None:
        """Warn if the method compresses no gradient of the first pass."""
        if not self._sessions.by_bucket and not isinstance(self.method, Dense):
            gradients = [(f"of shape {tuple(each.shape)}", each.shape) for bucket in buckets for each in bucket]
            _log.warning("tr.ddp_hook(%r) %s", self.method, describe_exemption(self.feedback, gradients))

    def _abandon(self, own_group: HookGroup) -> None:
        """Wait, in the thread that selects, for the exchanges of a pass that broke off: they use its memory."""
        this, self._pass = self._pass, _Pass()
        own_group.selecting.submit(functools.partial(this.wait, own_group.timeout_s + _GRACE_S))

    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    @property
    def world_size(self) -> int:
        """The number of ranks among which the hook works."""
        return self.connect().driver.world_size

    # -------------------- residuals and checkpoints

    def flush_residuals(self) -> None:
        """Have the next backward pass send all gradients and residuals. On every rank.

        For the last step before an evaluation, or before the residuals are given up.
        """
        self._sends_all = True

    def residual_norm(self) -> float:
        """Return the norm of all residuals of this rank."""
        self._steps.decide_left_out()
        return self.memory.residuals.norm()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state of this rank that is needed to go on: save it beside the model's and the optimizer's.

        Every rank has a state of its own. The residuals are kept with all their bits. A new DDP begins with other
        buckets than an old one has; its first step exchanges those of the old one. Raises ``ConfigurationError``.
        """
        self._steps.decide_left_out()
        plan = self._plan(model)
        names = {parameter: name for name, parameter in _inner(model).named_parameters()}
        record = self.record()
        if any(parameter not in names for key in record.sessions for parameter in key):
            raise ConfigurationError("state_dict needs the model for which ddp_hook has worked")
        rank, world_size = self._rank_and_size()
        return {"rank": rank, "world_size": world_size, **record.renamed(names), **self.memory.residuals.state(plan)}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], model: torch.nn.Module) -> None:
        """Go on from states that ``state_dict`` returned.

        Args:
            state: This rank's own. Or those of all ranks, if their number was another one: then each rank takes some,
                so that the sum of all residuals stays the same.
            model: The model, wrapped or not.

        Raises:
            ConfigurationError: States are missing, or of another model.
        """
        if self._keeper is not None and self._keeper.keeps_for(self, _inner(model)):
            _log.warning(
                "load_state_dict of ddp_hook does nothing here: tr.attempts has kept the residuals of the last attempt "
                "or of the disk. Call it only while state.steps is 0"
            )
            return
        states = [state] if isinstance(state, Mapping) else list(state)
        own, known = states_for(states, *self._rank_and_size())
        self.end_step()
        self.memory.residuals.load(self._plan(model), own)
        self.resume(HookRecord.named(known, dict(_inner(model).named_parameters())))

    def end_step(self) -> None:
        """Note that no optimizer will use the gradients of the last pass any more.

        If none has used a gradient, its residual and velocity are those from before the pass, unless the gradient is
        still there.
        """
        self._steps.decide_all()

    def record(self) -> HookRecord:
        """Return what is needed, beside residuals and velocities, to go on after the last pass. Copied."""
        sessions = {key: with_tensors(state) for key, state in self._sessions.states().items()}
        return HookRecord(self.method.name, self.steps, self.skipped_steps, self._sessions.buckets(), sessions)

    def resume(self, record: HookRecord) -> None:
        """Go on after the pass of a record; the sessions of another method begin anew."""
        self.steps, self.skipped_steps = record.steps, record.skipped_steps
        is_same = record.method == self.method.name
        sessions = {key: with_arrays(state) for key, state in record.sessions.items()} if is_same else {}
        self._sessions.replace(sessions, record.layout if sessions else [])

    def _rank_and_size(self) -> tuple[int, int]:
        group = self.process_group or dist.group.WORLD
        return dist.get_rank(group), dist.get_world_size(group)

    def _plan(self, model: torch.nn.Module) -> CompressedPlan:
        """Return the compressed parameters, in registration order."""
        described = [
            (parameter, ParameterSpec.of(name, (), parameter))
            for name, parameter in _inner(model).named_parameters()
            if parameter.requires_grad
        ]
        compressed = [(parameter, spec) for parameter, spec in described if self.feedback.compresses(spec.shape)]
        return CompressedPlan(tuple(p for p, _ in compressed), tuple(spec for _, spec in compressed), ())

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the process group, as torch's ``PowerSGDState`` does."""
        self._steps.decide_left_out()
        settings = {"method": self.method, "feedback": self.feedback, "grad_scaler": self.grad_scaler}
        counts = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        return {**settings, **counts, "_sessions": self._sessions.pickled(self.memory.residuals)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a model whose parameters are not known yet."""
        SparseHookState.__init__(self, state["method"], state["feedback"])
        self.__dict__.update({**state, "_sessions": _Sessions(state["_sessions"])})


@final
@dataclass(frozen=True, slots=True)
class _Pickled:
    """The residuals, velocities and states of sessions of a pickled state, by the numbers of parameters."""

    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    velocities: dict[int, torch.Tensor] = field(default_factory=dict)
    sessions: dict[tuple[int, ...], Mapping[str, Any]] = field(default_factory=dict)

    def hand_over(self, number: int, parameter: torch.nn.Parameter, residuals: Residuals) -> None:
        """Move the residual and the velocity of a parameter to ``residuals``. Raises ``ConfigurationError``."""
        for mine, theirs in ((self.residuals, residuals.kept), (self.velocities, residuals.velocities)):
            if number in mine:
                kept = mine.pop(number)
                if kept.numel() != parameter.numel():
                    raise ConfigurationError(
                        f"the pickled state of ddp_hook is of another model, or DDP has other settings: parameter "
                        f"{number} has {parameter.numel()} elements here and {kept.numel()} there"
                    )
                theirs[parameter] = kept


@final
class _Sessions:
    """The sessions and layouts of DDP's buckets, by the buckets' parameters.

    ``pickled`` is the state of an earlier process, from which parameters get theirs when they come.
    """

    def __init__(self, pickled: _Pickled) -> None:
        self.by_bucket: dict[Parameters, Session] = {}
        #: The layouts of all buckets, also of those without a session.
        self.layouts: dict[Parameters, BucketLayout] = {}
        self.saved: dict[Parameters, Mapping[str, Any]] = {}  #: The states of sessions that are not made yet.
        #: The buckets of the pass before the saved states, until the first pass after they were loaded.
        self.expected: list[Parameters] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}  #: In the order in which parameters came.
        self._pickled = pickled

    def __contains__(self, parameters: Parameters) -> bool:
        """Whether these were the parameters of a bucket of the last pass."""
        return parameters in self.layouts

    def meet(self, parameters: Parameters, residuals: Residuals) -> None:
        """Give the parameters of a bucket that come for the first time their pickled residuals."""
        for parameter in parameters:
            if parameter not in self._numbers:
                number = self._numbers[parameter] = len(self._numbers)
                self._pickled.hand_over(number, parameter, residuals)
        if self._pickled.sessions:
            state = self._pickled.sessions.pop(tuple(self._numbers[parameter] for parameter in parameters), None)
            if state is not None:
                self.saved[parameters] = state

    def layout(self, parameters: Parameters, feedback: ErrorFeedback) -> BucketLayout:
        """Return the layout of a bucket."""
        layout = self.layouts.get(parameters)
        if layout is None:
            layout = self.layouts[parameters] = BucketLayout.of(parameters, feedback)
        return layout

    def buckets(self) -> list[Parameters]:
        """Return the buckets of the last pass, also if it was before the saved states were loaded."""
        return list(self.layouts or self.expected)

    def session(self, parameters: Parameters, make: Callable[[], Session], steps: int) -> Session:
        """Return the session of a bucket. A new one continues the saved state, or the schedule after ``steps``."""
        session = self.by_bucket.get(parameters)
        if session is None:
            session = self.by_bucket[parameters] = make()
            saved = self.saved.pop(parameters, None)
            session.load_state({**session.state(), "steps": steps} if saved is None else saved)
        return session

    def keep_only(self, buckets: Sequence[Parameters]) -> None:
        """Forget the buckets that DDP does not have any more."""
        for known in (self.layouts, self.by_bucket):
            for gone in set(known) - set(buckets):
                del known[gone]

    def states(self) -> dict[Parameters, Mapping[str, Any]]:
        """Return the states of all sessions, also of those that are not made yet."""
        return {**self.saved, **{key: session.state() for key, session in self.by_bucket.items()}}

    def replace(self, saved: Mapping[Parameters, Mapping[str, Any]], layout: list[Parameters]) -> None:
        """Go on from saved states of sessions, which belong to a pass with these buckets."""
        self.by_bucket.clear()
        self.layouts.clear()
        self.saved, self.expected, self._pickled = dict(saved), layout, _Pickled()

    def pickled(self, residuals: Residuals) -> _Pickled:
        """Return the residuals and the states of all sessions by the numbers of parameters."""
        numbers, waiting = self._numbers, self._pickled
        return _Pickled(
            {**waiting.residuals, **{numbers[p]: kept for p, kept in residuals.kept.items()}},
            {**waiting.velocities, **{numbers[p]: velocity for p, velocity in residuals.velocities.items()}},
            {**waiting.sessions, **{tuple(numbers[p] for p in key): state for key, state in self.states().items()}},
        )


@final
class _Pass:
    """The buckets of one backward pass, in the order in which they came."""

    def __init__(self) -> None:
        self.arrived: list[tuple[torch.Tensor, Parameters]] = []  #: DDP's buckets: their buffers and parameters.
        self.buckets: list[HookBucket] = []  #: The buckets that are exchanged.
        self.parameters: list[Parameters] = []  #: The parameters of each bucket.
        self.regrouped: Regrouped | None = None  #: The gradients in other buckets than DDP's; ``None``: in DDP's own.
        self.jobs: list[Job] = []  #: The exchanges of the buckets.
        #: The factor of the gradients; ``None`` before it is computed, and without clipping.
        self.clip: float | None = None
        self._gates: list[torch.futures.Future[None]] = []
        self._error: BaseException | None = None

    def future_of(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return the future for which DDP waits; it is complete after ``end``."""
        devices: list[int | str | torch.device] = [buffer.device] if is_on_accelerator(buffer) else []
        gate: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        self._gates.append(gate)

        def outcome(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error  # only a callback that raises puts an error into a future
            return buffer

        return gate.then(outcome)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the exchanges of all buckets; return whether their sums are finite, which is equal on all ranks.

        Raises:
            torch.distributed.DistBackendError: A rank is lost, or does not come within ``timeout_s`` for a bucket.
        """
        finite = True
        for number, job in enumerate(self.jobs):
            begin = time.monotonic()
            try:
                finite = job.result.result(timeout_s) and finite
            except FutureTimeoutError as error:
                if job.result.done():
                    raise  # the exchange's own error
                text = f"Timed out after {time.monotonic() - begin:.1f} s in the sparse exchange of bucket {number}"
                raise dist.DistBackendError(text) from error
        return finite

    def end(self, error: BaseException | None) -> None:
        """Complete the futures for which DDP waits."""
        self._error = error
        # DDP keeps the futures, and with them this object, until after it has packed its buckets anew.
        self.arrived, self.buckets, self.parameters, self.jobs, self.regrouped = [], [], [], [], None
        for gate in self._gates:
            gate.set_result(None)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
