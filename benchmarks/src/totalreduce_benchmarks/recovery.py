"""``totalreduce bench recovery``: what ``tr.recoverable`` costs a training step while no rank is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark, split_names
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.report import Report, Table, duration, print_progress, size, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.local import RecoveryOptions

__all__ = ["Counts", "RecoveryConfig", "RecoverySamples", "StepSeconds", "bench_recovery", "summarise"]

_HAS = ("none", "buffers", "residuals")
_WORKER = "totalreduce_benchmarks.recovery_worker"


@dataclass(frozen=True, slots=True)
class RecoveryParameters:
    """The training; the fields are options."""

    step_ms: Annotated[str, typer.Option(help="Computation of a step in ms. Several: each is measured.")] = "26,50,100"
    has: Annotated[
        str,
        typer.Option(
            help="What each rank has for itself, each measured. none. buffers: eight batch normalisations. residuals: "
            "those of Ok-Topk."
        ),
    ] = "none,buffers,residuals"
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each kind.")] = 200
    elements: Annotated[int, typer.Option(min=2048, help="Elements of the model's parameters, about.")] = 2_000_000
    on_loss: Annotated[str, typer.Option(help="replace or shrink.")] = "replace"

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        split_names("--has", self.has, _HAS)
        checks.one_of("--on-loss", self.on_loss, ("replace", "shrink"))
        if any(step_ms < 0 for step_ms in self.computations()):
            raise ConfigurationError(f"--step-ms {self.step_ms}: a time cannot be negative")

    def computations(self) -> list[float]:
        """Return the times of the computation in ms."""
        try:
            return [float(word) for word in self.step_ms.split(",")]
        except ValueError:
            raise ConfigurationError(
                f"--step-ms is numbers with commas, such as 26,50,100, not {self.step_ms}"
            ) from None


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """What the workers of one run do.

    Attributes:
        step_ms: The times of the computation of a step, one after the other.
        has: What each rank has for itself: ``none``, ``buffers`` or ``residuals``.
        steps: The number of timed steps of each kind.
        elements: The number of elements of the model, about.
    """

    step_ms: list[float]
    has: str
    steps: int
    elements: int


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The times of one rank with one time of computation.

    Attributes:
        step_ms: The time of the computation.
        inside: Of each step in a block of ``tr.recoverable``.
        outside: Of each step outside of it, which was taken before or after that of the same index.
    """

    step_ms: float
    inside: list[float]
    outside: list[float]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a rank does in one kind of step.

    Attributes:
        operations: Operations that it submits.
        messages: Data messages that it sends. None in the fast lane.
        bytes_sent: Bodies and headers; in the fast lane what the other ranks read of its memory.
    """

    operations: float
    messages: float
    bytes_sent: float


@dataclass(frozen=True, slots=True)
class RecoverySamples:
    """The samples of one rank.

    Attributes:
        rows: For each time of computation.
        inside: What it sends in a step in a block.
        outside: What it sends in a step outside of it.
        memory_bytes: The memory of the copies that the job keeps.
        num_parameters: The number of elements of the model.
    """

    rows: list[StepSeconds]
    inside: Counts
    outside: Counts
    memory_bytes: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class RecoveryFigure:
    """The cost of blocks with one time of computation.

    Attributes:
        has: What each rank has for itself.
        step_ms: The time of the computation.
        outside_s: The time of a step outside of the job, mean of the ranks.
        ratio: The time of a step in a block, divided by that of one outside.
        added_s: The difference of the two.
        operations: Operations of a step that blocks add, of the average rank.
        messages: Messages of a step that blocks add.
        bytes_sent: Bytes of a step that blocks add.
        bytes_share: The same divided by those of a step outside.
        memory_bytes: The memory of the copies that a rank keeps.
    """

    has: str
    step_ms: float
    outside_s: Estimate
    ratio: Estimate
    added_s: Estimate
    operations: float
    messages: float
    bytes_sent: float
    bytes_share: float
    memory_bytes: float


@benchmark(
    "recovery",
    "totalreduce bench recovery -n 2",
    "totalreduce bench recovery -n 4 --has buffers --step-ms 50 --steps 500",
    "totalreduce bench recovery --emulate-hosts 4 --on-loss shrink",
    shared=("ranks", "emulate_hosts", "emulate_rate"),
    ranks=2,
)
def bench_recovery(setting: Setting, parameters: RecoveryParameters) -> Report:
    """Measure what tr.recoverable costs a training step while no rank is lost.

    A step in a block and the same step outside of it take turns, in the same processes, with the same model, optimizer
    and group. Ranks should have a core each.
    """
    figures, raw = [], []
    recovery = RecoveryOptions(on_loss="shrink" if parameters.on_loss == "shrink" else "replace", restarts=0)
    for has in split_names("--has", parameters.has, _HAS):
        config = RecoveryConfig(parameters.computations(), has, parameters.steps, parameters.elements)
        samples = run_benchmark(_WORKER, config, setting, RecoverySamples, recovery=recovery).ranks
        figures += summarise(has, samples)
        raw.append({"has": has, "ranks": samples})
        print_progress(f"recovery: {has}: done")
    table = Table(
        f"a step in tr.recoverable beside the same step outside, {setting.describe()}",
        [
            ("ranks have", lambda f: f.has),
            ("computation", lambda f: f"{f.step_ms:g} ms"),
            ("step outside (95 %)", lambda f: duration(f.outside_s)),
            ("inside / outside", lambda f: times(f.ratio, 4)),
            ("added (95 %)", lambda f: duration(f.added_s)),
            ("operations", lambda f: f"+{f.operations:.4g}"),
            ("messages", lambda f: f"+{f.messages:.4g}"),
            ("bytes sent", lambda f: f"+{size(f.bytes_sent)}, {f.bytes_share:.3%}"),
            ("memory", lambda f: f"+{size(f.memory_bytes)}"),
        ],
        figures,
        f"{samples[0].num_parameters / 1e6:.1f} M parameters; {parameters.steps} steps of each kind, in turn. "
        "Operations, messages, bytes: what a step in a block adds, on the average rank.",
    )
    return Report([table], {**setting.as_document(), **asdict(parameters)}, describe_machine(), figures, raw)


def summarise(has: str, ranks: Sequence[RecoverySamples]) -> list[RecoveryFigure]:
    """Return a figure for each time of computation, from the samples of all ranks."""
    figures = []
    for rows in zip(*(rank.rows for rank in ranks), strict=True):
        inside = [fmean(samples) for samples in zip(*(row.inside for row in rows), strict=True)]
        outside = [fmean(samples) for samples in zip(*(row.outside for row in rows), strict=True)]
        bytes_sent = fmean(rank.inside.bytes_sent - rank.outside.bytes_sent for rank in ranks)
        bytes_outside = fmean(rank.outside.bytes_sent for rank in ranks)
        figures.append(
            RecoveryFigure(
                has=has,
                step_ms=rows[0].step_ms,
                outside_s=estimate(outside),
                ratio=ratio_estimate(inside, outside),
                added_s=estimate([one - other for one, other in zip(inside, outside, strict=True)]),
                operations=fmean(rank.inside.operations - rank.outside.operations for rank in ranks),
                messages=fmean(rank.inside.messages - rank.outside.messages for rank in ranks),
                bytes_sent=bytes_sent,
                bytes_share=bytes_sent / bytes_outside if bytes_outside else 0.0,
                memory_bytes=fmean(rank.memory_bytes for rank in ranks),
            )
        )
    return figures
