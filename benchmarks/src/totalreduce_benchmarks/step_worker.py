"""One rank of ``bench step``: the same model trained by DistributedOptimizer, by DDP over gloo, and alone.

Float32 alone cannot prove that two ways to train agree: sums have another order, a rounding error may move an
activation across ReLU's corner, and the difference can grow without anything being wrong (2e-3 of what 24 steps of SGD
with a learning rate of 0.01 changed was seen, where float64 agrees to 1e-14). So every contestant first trains a few
steps in float64, where agreement is tight; the timed float32 replicas are then held to the same bits on all ranks and
to a coarse bound.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr
from totalreduce.bench.context import Context
from totalreduce.bench.methods import make_sync
from totalreduce.bench.values import WrongResultError
from totalreduce.planning.workloads import Workload, loss_of, workload_by_name
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce_benchmarks.step import StepParameters, StepSamples

_WARMUP_STEPS = 2
_SEED = 7
_LEARNING_RATE = 0.001
_EXACT_STEPS = 3
_EXACT_TOLERANCE = 1e-10
_TIMED_TOLERANCE = 1e-2


@dataclass(slots=True)
class Contestant:
    """A way to train: its replica, its optimizer, and the function that makes its parameters final."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]
    close: Callable[[], None]
    steps_done: int = 0
    hidden: list[float] = field(default_factory=list)

    def step(self, workload: Workload, rank: int) -> None:
        """One step on this rank's next batch."""
        inputs, targets = workload.batch_of(_SEED, rank, self.steps_done)
        if inputs.is_floating_point():
            inputs = inputs.to(next(self.model.parameters()).dtype)
        self.optimizer.zero_grad()
        loss_of(self.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps_done += 1
        if isinstance(self.optimizer, tr.DistributedOptimizer) and self.optimizer.hidden_share is not None:
            self.hidden.append(self.optimizer.hidden_share)


def measure(context: Context, parameters: StepParameters) -> StepSamples:
    """Train with every contestant, in turns."""
    workload = workload_by_name(parameters.model)
    workload = replace(workload, batch=parameters.batch or workload.batch)
    compressed = parameters.sync is not None
    exact = None if compressed else _train_exactly(context, workload, parameters)
    names = [*context.peers, *(["timeline"] if parameters.timeline else []), *parameters.chosen_hooks]
    names += ["dense"] if parameters.dense else []
    names += parameters.with_servers
    names += ["alone"] if parameters.no_communication else []
    contestants = {name: make_contestant(context, name, workload, parameters, torch.float32) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent_before = context.group.statistics().bytes_sent
    for index in range(context.rounds):
        for name, contestant in contestants.items():
            seconds[name] += _block(context, contestant, workload, parameters.steps)
        context.report(f"step {workload.name}: round {index + 1} of {context.rounds}")
    bytes_sent = context.group.statistics().bytes_sent - sent_before
    ours = contestants["totalreduce"]
    return StepSamples(
        seconds=seconds,
        bytes_sent=bytes_sent / ours.steps_done,
        num_parameters=len(_flatten(ours.model)),
        difference=_check(context, workload, contestants, torch.float32, None if compressed else _TIMED_TOLERANCE),
        difference_float64=exact,
        hidden_share=fmean(ours.hidden) if ours.hidden else None,
    )


def _train_exactly(context: Context, workload: Workload, parameters: StepParameters) -> float | None:
    """A few untimed steps in float64; returns the difference from DDP."""
    contestants = {name: make_contestant(context, name, workload, parameters, torch.float64) for name in context.peers}
    for contestant in contestants.values():
        for _ in range(_EXACT_STEPS):
            contestant.step(workload, context.rank)
        contestant.finish()
    difference = _check(context, workload, contestants, torch.float64, _EXACT_TOLERANCE)
    for contestant in contestants.values():
        contestant.close()
    context.report(f"step {workload.name}: float64 replicas checked")
    return difference


def make_contestant(
    context: Context, name: str, workload: Workload, parameters: StepParameters, dtype: torch.dtype = torch.float32
) -> Contestant:
    """Return a way to train a model, by its name in ``bench step``; collective."""
    model = workload.model(_SEED).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)
    if name == "alone":
        return Contestant(model, optimizer, _nothing, _nothing)
    if name == "gloo":
        return Contestant(DistributedDataParallel(model), optimizer, _nothing, _nothing)
    if name in _HOOKS:
        # One bucket: the PowerSGD hook's collectives would leave in different orders on the ranks with more.
        replica = DistributedDataParallel(model, bucket_cap_mb=1024)
        replica.register_comm_hook(*_HOOKS[name]())
        return Contestant(replica, optimizer, _nothing, _nothing)
    group = context.group_of(name)
    if name == "dense":
        group = context.own_group("dense")  # its bytes are not those of the sparse one
    if name in parameters.with_servers:
        return _with_servers(context, name, model, optimizer, parameters)
    if name == "timeline":
        folder = tempfile.mkdtemp(prefix="totalreduce-bench-timeline-")
        group = context.another_group("timeline", timeline=folder)
    method = None if name == "dense" or parameters.sync is None else make_sync(parameters.sync, parameters.density)
    elements = None if parameters.bucket_bytes is None else max(1, parameters.bucket_bytes // 4)
    wrapped = tr.DistributedOptimizer(
        optimizer,
        model,
        group=group,
        bucket_bytes=None if method is not None else parameters.bucket_bytes,
        feedback=tr.ErrorFeedback(bucket_elements=elements) if method is not None else None,
        overlap=cast("Literal['backward', 'iterations']", parameters.overlap),
        sync=method,
        name=f"bench.{workload.name}.{name}.{dtype}",
    )
    return Contestant(model, wrapped, wrapped.flush, wrapped.close)


def _with_servers(
    context: Context, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, parameters: StepParameters
) -> Contestant:
    """Return synchronous training with a parameter server, whose servers are the last ranks; collective."""
    group = context.own_group(name)
    wrapped = tr.DistributedOptimizer(
        optimizer,
        model,
        group=group,
        bucket_bytes=parameters.bucket_bytes,
        overlap="iterations" if name == "servers_ahead" else "backward",
        sync=tr.ParameterServer(servers=range(max(0, group.world_size - parameters.servers), group.world_size)),
        name=f"bench.{parameters.model}.{name}",
    )
    return Contestant(model, wrapped, wrapped.flush, wrapped.close)


def _fp16_hook() -> tuple[Any, Any]:
    return None, default_hooks.fp16_compress_hook


def _powersgd_hook() -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=PowerSGD().rank, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


_HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {"fp16": _fp16_hook, "powersgd": _powersgd_hook}


def _block(context: Context, contestant: Contestant, workload: Workload, steps: int) -> list[float]:
    """Steps in a row, the first ones untimed. The last one includes whatever it has put off."""
    durations = []
    context.barrier()
    for step in range(_WARMUP_STEPS + steps):
        begin = time.monotonic()
        contestant.step(workload, context.rank)
        if step == _WARMUP_STEPS + steps - 1:
            contestant.finish()
        if step >= _WARMUP_STEPS:
            durations.append(time.monotonic() - begin)
    return durations


def _check(
    context: Context,
    workload: Workload,
    contestants: dict[str, Contestant],
    dtype: torch.dtype,
    tolerance: float | None,
) -> float | None:
    """Replicas of all ranks must be the same bits, and close to DDP's, whose sums have another order."""
    replicas = {name: _flatten(contestant.model) for name, contestant in contestants.items() if name != "alone"}
    for name, replica in replicas.items():
        digests = context.exchange([float(zlib.crc32(replica.numpy().tobytes()))])
        if any(digest != digests[0] for digest in digests):
            raise WrongResultError(f"the {dtype} replicas trained by {name} differ between ranks")
    if "gloo" not in replicas or tolerance is None:
        return None
    for hook in _HOOKS:
        replicas.pop(hook, None)
    initial = _flatten(workload.model(_SEED).to(dtype))
    changed = float((replicas["gloo"] - initial).double().norm())
    difference = max(float((replica - replicas["gloo"]).double().norm()) / changed for replica in replicas.values())
    if not difference <= tolerance:
        raise WrongResultError(
            f"DistributedOptimizer and DDP trained different models in {dtype}: they differ by {difference:.2e} "
            f"of what training changed (allowed: {tolerance:.0e})"
        )
    return difference


def _flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _nothing() -> None:
    """Nothing is put off, nothing is to be undone."""
