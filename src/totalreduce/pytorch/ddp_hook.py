"""Sparse methods for DistributedDataParallel, over any back end of ``torch.distributed``.

>>> model = DistributedDataParallel(model)                                              # doctest: +SKIP
>>> model.register_comm_hook(*tr.ddp_hook(tr.OkTopk(density=0.01)))                     # doctest: +SKIP

DDP calls the hook when a bucket's gradients are there, in the same order on all ranks. Two threads work beside
backward: one chooses what to send, bucket after bucket, while the other exchanges what was chosen before. No bucket's
result is given to DDP before all are known: a NaN anywhere makes the whole backward pass one without effect.

DDP waits in C++, where any error is a bare ``RuntimeError``. So, as in ``c10d.work``, the hook waits itself at the end
of backward, ahead of DDP, and raises what really happened.
"""

# Annotations are objects in this file, not text: DDP compares those of a hook with its own classes.

import functools
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from totalreduce.foundation.errors import ConfigurationError, UnsupportedError
from totalreduce.kernels import ahead
from totalreduce.pytorch import internals
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.ddp_bucket import HookBucket, Layout, Memory
from totalreduce.pytorch.ddp_link import Link
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback, Residuals, states_for
from totalreduce.sparse.auto import Auto
from totalreduce.sparse.dense import Dense
from totalreduce.sparse.device import Lane
from totalreduce.sparse.session import Method, Report, Session
from totalreduce.sparse.worker import Job
from totalreduce.tensors.compilation import never_compiled

__all__ = ["SparseHookState", "ddp_hook", "sparse_hook"]

#: The process group's own time-out, which knows more, comes first.
_GRACE_S = 5.0

Parameters = tuple[torch.nn.Parameter, ...]
Hook = Callable[["SparseHookState", GradBucket], torch.futures.Future[torch.Tensor]]


def ddp_hook(
    method: Method,
    *,
    feedback: ErrorFeedback | None = None,
    process_group: dist.ProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> tuple["SparseHookState", Hook]:
    """What ``DistributedDataParallel.register_comm_hook`` takes: a state and a hook. Collective.

    The state belongs to one model. Parameters with two or more dimensions are compressed, small ones are reduced whole
    in the same exchange.

    Args:
        method: ``tr.OkTopk(density=0.01)`` or another method of ``totalreduce.sparse``.
        feedback: What becomes of the gradients that are kept back. DDP's ``bucket_cap_mb`` has the place of
            ``bucket_elements``.
        process_group: DDP's; ``None``: the default one. A group of the same ranks is made for the exchanges.
        grad_scaler: The ``GradScaler`` that scales the loss, so that unscaled gradients are kept back.

    Raises:
        ConfigurationError: ``tr.Auto``, which is for ``DistributedOptimizer``.
        PlanMismatchError: The ranks' settings differ; on every rank.
        RendezvousError: torch could not make a group.
    """
    state = SparseHookState(method, feedback or ErrorFeedback(), process_group, grad_scaler)
    state.connect()
    return state, sparse_hook


@never_compiled
def sparse_hook(state: "SparseHookState", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: DDP calls it for each bucket of a backward pass; ``state`` does the work."""
    return state.reduce(bucket)


@final
class SparseHookState:
    """What is kept between backward passes; made by ``ddp_hook``.

    ``state_dict`` is for checkpoints: it has names. The state can be pickled, too, as torch's own can (``torch.save``):
    then it is registered with another DDP model of the same structure and settings, whose parameters it knows by the
    order in which they come in the first pass. ``process_group`` is the default one then, unless set before that pass.

    Attributes:
        method: Settings.
        feedback: Settings.
        process_group: DDP's; ``None``: the default one.
        grad_scaler: Scales the loss.
        steps: Backward passes that had a result.
        skipped_steps: Those that had none, because some rank's gradients were not finite: all gradients were NaN.
        reports: What the method did in the last pass, by bucket.
    """

    def __init__(
        self,
        method: Method,
        feedback: ErrorFeedback,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Nothing was kept back."""
        if isinstance(method, Auto):
            raise ConfigurationError("tr.Auto is for DistributedOptimizer; give ddp_hook one method")
        self.method, self.feedback = method, feedback
        self.process_group, self.grad_scaler = process_group, grad_scaler
        self.steps = self.skipped_steps = 0
        self.reports: list[Report] = []
        self._memory, self._lane = Memory(), Lane()
        self._layouts: dict[Parameters, Layout] = {}
        self._sessions: dict[Parameters, Session] = {}
        #: Of sessions that are not there yet.
        self._saved: dict[Parameters, Mapping[str, Any]] = {}
        #: In which order parameters were met, and what was pickled of those that were not met yet.
        self._order: dict[torch.nn.Parameter, int] = {}
        self._pickled = _Pickled()
        self._whole = False
        self._link: Link | None = None
        self._pass = _Pass()

    def connect(self) -> None:
        """Make the group and the threads of the exchanges, unless they are there. Collective."""
        if self._link is None:
            ahead.load()
            self._link = link = Link(self.process_group or dist.group.WORLD, f"{self.method!r} {self.feedback!r}")
            # Not at exit: a thread that waits for a lost rank would keep the process.
            weakref.finalize(self, link.close).atexit = False

    def close(self) -> None:
        """End the threads and the group of the exchanges; the model cannot go backward with them any more."""
        if self._link is not None:
            self._link.close()
            self._link.close_group()

    # -------------------- a backward pass

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin with a bucket; see ``sparse_hook``.

        Raises:
            UnsupportedError: Gradients that are sparse, or not of a real floating type.
        """
        self.connect()
        if bucket.index() == 0 and self._pass.buckets:
            self._abandon()
        parameters = cast("Parameters", tuple(bucket.parameters()))
        self._meet(parameters)
        made = self._make(parameters, bucket.buffer())
        self._pass.buckets.append(made)
        self._pass.parameters.append(parameters)
        if self.feedback.clip_norm is None:
            self._leave(self._pass, made)
        future = self._pass.future_of(bucket.buffer())
        if bucket.is_last():
            self._end_pass()
        return future

    def _meet(self, parameters: Parameters) -> None:
        for parameter in parameters:
            if parameter not in self._order:
                number = self._order[parameter] = len(self._order)
                self._pickled.hand_over(number, parameter, self._memory.residuals)
        sessions = self._pickled.sessions
        if sessions:
            state = sessions.pop(tuple(self._order[parameter] for parameter in parameters), None)
            if state is not None:
                self._saved[parameters] = state

    def _make(self, parameters: Parameters, buffer: torch.Tensor) -> HookBucket:
        if buffer.layout is not torch.strided:
            raise UnsupportedError("ddp_hook: a bucket of sparse gradients (Embedding(sparse=True)); use sparse=False")
        assert self._link is not None
        layout = self._layouts.get(parameters)
        if layout is None:
            layout = self._layouts[parameters] = Layout.of(parameters, self.feedback)
        driver = self._link.driver
        session = self._session(parameters, layout) if layout.compressed else None
        return HookBucket(
            buffer,
            layout,
            session,
            self._memory,
            self._lane,
            self.feedback,
            rank=driver.rank,
            world_size=driver.world_size,
        )

    def _session(self, parameters: Parameters, layout: Layout) -> Session:
        if self._whole:
            return self._new_session(Dense(), layout)
        session = self._sessions.get(parameters)
        if session is None:
            session = self._sessions[parameters] = self._new_session(self.method, layout)
            # DDP has packed its buckets anew: a schedule goes on where it was.
            saved = self._saved.pop(parameters, None)
            session.load_state({**session.state(), "steps": self.steps} if saved is None else saved)
        return session

    def _new_session(self, method: Method, layout: Layout) -> Session:
        assert self._link is not None
        session = method.session(layout.shape, self._link.driver.rank, self._link.driver.world_size)
        session.share(self._link.workspace)
        return session

    def _leave(self, this: "_Pass", made: HookBucket) -> None:
        assert self._link is not None
        selected = self._link.selecting.submit(functools.partial(self._select, this, made))
        # The other thread waits for that one, and so exchanges buckets in the order in which they came.
        job = Job(len(this.jobs), selected.result, made.exchange, 0)
        this.jobs.append(job)
        self._link.worker.start(job)

    def _select(self, this: "_Pass", made: HookBucket) -> None:
        if self.feedback.clip_norm is None:
            made.take(self._loss_scale)
        elif this.clip is None:
            for each in this.buckets:
                each.take(self._loss_scale)
            norm = math.hypot(*(each.norm() for each in this.buckets))
            assert self._link is not None
            this.clip = self.feedback.clip_factor(norm, self._link.driver.world_size)
        made.accumulate(1.0 if this.clip is None else this.clip)

    def _end_pass(self) -> None:
        this, self._pass = self._pass, _Pass()
        self._whole = False
        assert self._link is not None
        if self.feedback.clip_norm is not None:
            for made in this.buckets:
                self._leave(this, made)
        ended = self._link.selecting.submit(functools.partial(self._finish, this, self._link))
        if internals.in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(ended.result)

    def _finish(self, this: "_Pass", link: Link) -> None:
        try:
            if this.wait(link.timeout_s + _GRACE_S):
                for made in this.buckets:
                    made.commit()
                self.steps += 1
            else:
                for made in this.buckets:
                    made.spoil()
                self.skipped_steps += 1
        except BaseException as error:
            this.end(error)
            raise
        self.reports = [made.report for made in this.buckets]
        for known in (self._layouts, self._sessions):
            for gone in set(known) - set(this.parameters):
                del known[gone]
        this.end(None)

    def _abandon(self) -> None:
        """The pass before broke off; let its exchanges end before its memory is used again."""
        this, self._pass = self._pass, _Pass()
        assert self._link is not None
        self._link.selecting.submit(functools.partial(this.wait, self._link.timeout_s + _GRACE_S))

    def _loss_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()

    # -------------------- what is kept back

    def flush_residuals(self) -> None:
        """Have the next backward pass send whole gradients and all residuals. On every rank.

        For the last step before an evaluation, or before the residuals are given up.
        """
        self._whole = True

    def residual_norm(self) -> float:
        """Of all that this rank keeps back."""
        return self._memory.residuals.norm()

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """What has to be known to go on, of this rank: save it beside the model's and the optimizer's.

        Every rank has a state of its own. The residuals are kept with all their bits. A new DDP begins with other
        buckets than an old one has, so that its first step may choose other elements to send.

        Args:
            model: The model, wrapped or not.

        Raises:
            ConfigurationError: It is another model.
        """
        plan = self._plan(model)
        names = {parameter: name for name, parameter in _inner(model).named_parameters()}
        states = {**self._saved, **{key: session.state() for key, session in self._sessions.items()}}
        if any(parameter not in names for key in states for parameter in key):
            raise ConfigurationError("state_dict needs the model for which ddp_hook has worked")
        rank, world_size = self._place()
        return {
            "rank": rank,
            "world_size": world_size,
            "method": self.method.name,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "buckets": [[names[parameter] for parameter in key] for key in states],
            "sessions": [_with_tensors(state) for state in states.values()],
            **self._memory.residuals.state(plan),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], model: torch.nn.Module) -> None:
        """Go on from what ``state_dict`` returned.

        Args:
            state: This rank's own. Or those of all ranks, if their number was another one: then each rank takes some,
                so that the sum of all residuals stays what it was.
            model: The model, wrapped or not.

        Raises:
            ConfigurationError: States are missing, or of another model.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        rank, world_size = self._place()
        own, known = states_for(states, rank, world_size)
        self._memory.residuals.load(self._plan(model), own)
        self.steps, self.skipped_steps = known["steps"], known["skipped_steps"]
        self._sessions.clear()
        self._saved.clear()
        self._pickled = _Pickled()
        if known["method"] == self.method.name:
            parameters = dict(_inner(model).named_parameters())
            for names, session in zip(known["buckets"], known["sessions"], strict=True):
                if parameters.keys() >= set(names):
                    self._saved[tuple(parameters[name] for name in names)] = _with_arrays(session)

    def _place(self) -> tuple[int, int]:
        group = self.process_group or dist.group.WORLD
        return dist.get_rank(group), dist.get_world_size(group)

    def _plan(self, model: torch.nn.Module) -> CompressedPlan:
        """The compressed parameters, in registration order."""
        described = [
            (parameter, ParameterSpec.of(name, (), parameter, any_device=True))
            for name, parameter in _inner(model).named_parameters()
            if parameter.requires_grad
        ]
        few = [(parameter, spec) for parameter, spec in described if self.feedback.compresses(spec.shape)]
        return CompressedPlan(tuple(p for p, _ in few), tuple(spec for _, spec in few), ())

    def __getstate__(self) -> dict[str, Any]:
        """As torch's ``PowerSGDState``: all but the process group."""
        settings = {"method": self.method, "feedback": self.feedback, "grad_scaler": self.grad_scaler}
        counts = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        sessions = {**self._saved, **{key: session.state() for key, session in self._sessions.items()}}
        pickled = _Pickled(
            {**self._pickled.residuals, **self._numbered(self._memory.residuals.kept)},
            {**self._pickled.velocities, **self._numbered(self._memory.residuals.velocities)},
            {**self._pickled.sessions, **{tuple(self._order[p] for p in key): sessions[key] for key in sessions}},
        )
        return {**settings, **counts, "_pickled": pickled}

    def _numbered(self, tensors: Mapping[torch.nn.Parameter, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {self._order[parameter]: tensor for parameter, tensor in tensors.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a model that is not known yet."""
        SparseHookState.__init__(self, state["method"], state["feedback"])
        self.__dict__.update(state)


@final
@dataclass(frozen=True, slots=True)
class _Pickled:
    """What a pickled state has kept, by the numbers of parameters."""

    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    velocities: dict[int, torch.Tensor] = field(default_factory=dict)
    sessions: dict[tuple[int, ...], Mapping[str, Any]] = field(default_factory=dict)

    def hand_over(self, number: int, parameter: torch.nn.Parameter, residuals: Residuals) -> None:
        """What there is of a parameter.

        Raises:
            ConfigurationError: It has another size.
        """
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
class _Pass:
    """The buckets of one backward pass, in the order in which they came.

    Attributes:
        buckets: Those that have come.
        parameters: Theirs.
        jobs: Their exchanges.
        clip: Factor of the gradients; ``None``: not known, or none.
    """

    def __init__(self) -> None:
        self.buckets: list[HookBucket] = []
        self.parameters: list[Parameters] = []
        self.jobs: list[Job] = []
        self.clip: float | None = None
        self._gates: list[torch.futures.Future[None]] = []
        self._error: BaseException | None = None

    def future_of(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """What DDP waits for; complete after ``end``."""
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        gate: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        self._gates.append(gate)

        def outcome(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error  # only a callback that raises puts an error into a future
            return buffer

        return gate.then(outcome)

    def wait(self, timeout_s: float) -> bool:
        """Until all buckets are through; whether their sums are finite, on all ranks.

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
                    raise  # its own
                text = f"Timed out after {time.monotonic() - begin:.1f} s in the sparse exchange of bucket {number}"
                raise dist.DistBackendError(text) from error
        return finite

    def end(self, error: BaseException | None) -> None:
        """Let DDP go on."""
        self._error = error
        # DDP keeps the futures until the next pass, and with them this; it packs its buckets anew before that.
        self.buckets, self.parameters, self.jobs = [], [], []
        for gate in self._gates:
            gate.set_result(None)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _with_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """As it is saved: ``torch.load`` trusts tensors."""
    return {
        key: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for key, value in state.items()
    }


def _with_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
