"""One rank of ``bench recovery``: steps in blocks of ``tr.recoverable`` and the same steps outside of it, in turn.

The computation of a step is a loop of small matrix products that ends by the clock, so that the time of the computation
is the same in both kinds of steps. A third of it is in the forward pass, and the rest between the layers of the
backward pass, where gradients leave.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

import totalreduce as tr
from totalreduce.pytorch.compression import Compression
from totalreduce.recovery.assembly import Assembly
from totalreduce_benchmarks.recovery import Counts, RecoveryConfig, RecoverySamples, StepSeconds

_LAYERS = 8
_CLASSES = 16
_BATCH = 8
#: Steps of each kind before the first one that is timed.
_WARMUP_STEPS = 5
#: Steps of each kind whose operations, messages and bytes are counted.
_COUNTED_STEPS = 10


class _Points(Dataset[tuple[torch.Tensor, int]]):
    """A data set that never ends before the benchmark does."""

    def __init__(self, features: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(64, features, generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._inputs[index % 64], index % _CLASSES


class _Compute(torch.autograd.Function):
    """Passes values through, and computes for a while: once in forward, twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.compute(1)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.compute(2)
        return gradient, None


class _Clock:
    """Computes until a time is over.

    Attributes:
        slice_s: The time of one call with ``times`` 1.
    """

    def __init__(self) -> None:
        self.slice_s = 0.0
        self._matrix = torch.full((48, 48), 0.5)

    @torch.no_grad()
    def compute(self, times: int) -> None:
        """Compute for ``times`` slices."""
        end = time.perf_counter() + times * self.slice_s
        while time.perf_counter() < end:
            torch.mm(self._matrix, self._matrix)


class _Model(nn.Module):
    def __init__(self, width: int, clock: _Clock, *, normalises: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(_LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(_LAYERS if normalises else 0))
        self.head = nn.Linear(width, _CLASSES)
        self._clock = clock

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            values = layer(values)
            if self.norms:
                values = self.norms[index](values)
            computed: torch.Tensor = _Compute.apply(values.relu(), self._clock)  # type: ignore[no-untyped-call]
            values = computed
        result: torch.Tensor = self.head(values)
        return result


def measure(parameters: RecoveryConfig) -> RecoverySamples:
    """Run both kinds of steps in turn."""
    group = tr.init()
    torch.manual_seed(1)
    clock = _Clock()
    width = max(_CLASSES, int((parameters.elements / _LAYERS) ** 0.5))
    model = _Model(width, clock, normalises=parameters.has == "buffers")
    optimizer = tr.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if parameters.has != "residuals"
        else torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        model,
        group=group,
        sync=tr.OkTopk(density=0.01) if parameters.has == "residuals" else None,
    )
    num_steps = (len(parameters.step_ms) * (parameters.steps + _WARMUP_STEPS) + 2 * _COUNTED_STEPS) * 2
    points = _Points(width, num_steps * _BATCH * group.world_size)
    sampler = tr.ElasticSampler(points, _BATCH)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.wrapped, 1_000_000)
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, best=0.0)
    with tr.recoverable(state) as job:
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(2)).tolist()
        plain = iter(DataLoader(points, batch_sampler=BatchSampler(order, _BATCH, drop_last=True)))
        batches = job.batches(DataLoader(points, batch_sampler=sampler))
        steps = _Steps(job, model, optimizer, scheduler, batches, plain)
        rows = []
        for step_ms in parameters.step_ms:
            clock.slice_s = step_ms * 1e-3 / (3 * _LAYERS)
            for _ in range(_WARMUP_STEPS):
                steps.outside()
                steps.inside()
            seconds = StepSeconds(step_ms, [], [])
            for index in range(parameters.steps):
                # A B, B A, A B: what one kind of step leaves to the next one, a rank that is late, cancels out.
                for is_inside in (index % 2 == 0, index % 2 == 1):
                    begin = time.perf_counter()
                    (steps.inside if is_inside else steps.outside)()
                    (seconds.inside if is_inside else seconds.outside).append(time.perf_counter() - begin)
            rows.append(seconds)
        clock.slice_s = 0.0
        outside, inside = _count(group, steps.outside), _count(group, steps.inside)
        return RecoverySamples(rows, inside, outside, _memory(job, model, optimizer), _parameters(model))


class _Steps:
    """The two kinds of steps, with the same model, optimizer and group."""

    def __init__(
        self,
        job: tr.Job,
        model: nn.Module,
        optimizer: tr.DistributedOptimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        batches: Iterator[Any],
        plain: Iterator[Any],
    ) -> None:
        self._job, self._model, self._optimizer, self._scheduler = job, model, optimizer, scheduler
        self._batches, self._plain = batches, plain

    def inside(self) -> None:
        """Run a step in a block of the job."""
        inputs, targets = next(self._batches)
        with self._job.step():
            self._backward(inputs, targets)
            self._optimizer.step()
            self._scheduler.step()

    def outside(self) -> None:
        """Run a step as a loop without ``tr.recoverable`` does."""
        guard, self._optimizer.guard = self._optimizer.guard, None
        inputs, targets = next(self._plain)
        self._backward(inputs, targets)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        self._optimizer.guard = guard

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        torch.nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]


def _count(group: tr.Group, step: Callable[[], None]) -> Counts:
    """Return what this rank submits and sends in a step, on average."""
    step()
    before = group.statistics()
    for _ in range(_COUNTED_STEPS):
        step()
    after = group.statistics()
    return Counts(
        operations=(after.operations - before.operations) / _COUNTED_STEPS,
        messages=(after.messages_sent - before.messages_sent) / _COUNTED_STEPS,
        bytes_sent=(after.bytes_sent - before.bytes_sent) / _COUNTED_STEPS,
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _memory(job: tr.Job, model: nn.Module, optimizer: tr.DistributedOptimizer) -> int:
    """Return the bytes of the tensors that the job keeps: copies of buffers, and of the state of other ranks."""
    others = (nn.Module, tr.Group, tr.DistributedOptimizer, Compression, Assembly, torch.optim.Optimizer)
    passed = (type, ModuleType, FunctionType, MethodType, *others)
    states = [each for entry in optimizer.wrapped.state.values() for each in entry.values()]
    tensors = [*model.parameters(), *model.buffers(), *(each for each in states if isinstance(each, torch.Tensor))]
    known = {each.untyped_storage().data_ptr() for each in tensors}
    found: dict[int, int] = {}
    seen: set[int] = set()
    pending: list[Any] = [job]
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, passed):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage() if each.device.type == "cpu" else None
            if storage is not None and storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            continue
        pending += gc.get_referents(each)
    return sum(found.values())
