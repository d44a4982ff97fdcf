"""``totalreduce bench observe``: what the live view costs a training step."""

from __future__ import annotations

import contextlib
import http.client
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, final

import typer

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.report import Report, Table, duration, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.launch.live import LiveJob
from totalreduce.observe.dashboard import Dashboard

__all__ = ["OBSERVED", "ObserveConfig", "ObserveSamples", "bench_observe", "summarise"]

_WORKER = "totalreduce_benchmarks.observe_worker"
#: This file is in the folder of the run while blocks of observed steps run.
OBSERVED = "observed"
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class ObserveParameters:
    """The training; the fields are options."""

    blocks: Annotated[int, typer.Option(min=1, help="Blocks of observed steps, and as many of others.")] = 10
    block_s: Annotated[float, typer.Option(min=0.01, help="Seconds of a block, about.")] = 2.0
    per_second: Annotated[float, typer.Option(min=0.1, help="Documents of each rank per second. A job writes one.")] = (
        10.0
    )
    width: Annotated[int, typer.Option(min=8, help="Width of the six layers of the model.")] = 512
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step on each rank.")] = 128


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """What the workers do.

    Attributes:
        folder: Where ``OBSERVED`` is.
        board: The folder of the job.
        blocks: The number of blocks of either kind.
        block_s: The seconds of a block, about.
        per_second: The documents of each rank per second in observed blocks.
        width: The width of the layers.
        batch: The samples of a step on each rank.
    """

    folder: str
    board: str
    blocks: int
    block_s: float
    per_second: float
    width: int
    batch: int


@dataclass(frozen=True, slots=True)
class ObserveSamples:
    """The samples of one rank.

    Attributes:
        observed_s: Of each observed block: the mean time of a step.
        plain_s: Of each other block, in turns with the observed ones.
        observed_cpu_s: Of each observed block: the processor time of the process in a step, mean.
        plain_cpu_s: Of each other block.
        document_cpu_s: The processor time that one document takes.
        end_step_s: The time that counting a step takes.
        documents_per_s: The number of documents that were written in a second of observed blocks.
    """

    observed_s: list[float]
    plain_s: list[float]
    observed_cpu_s: list[float]
    plain_cpu_s: list[float]
    document_cpu_s: float
    end_step_s: float
    documents_per_s: float


@dataclass(frozen=True, slots=True)
class ObserveFigure:
    """The cost of the live view.

    Attributes:
        plain_s: The time of a step that nobody sees, mean of the ranks.
        ratio: The time of an observed step divided by that.
        cpu_ratio: Likewise of the processor time of all threads, which other programs of the machine disturb less.
        per_second: The documents of each rank per second in observed blocks, mean.
        scaled: The processor time that a step of a job, whose ranks write one document per second, takes more: a share.
        document_cpu_s: The processor time of one document, mean of the ranks. So this is also the share of a core that
            one document per second takes.
        end_step_s: The time that counting a step takes.
    """

    plain_s: Estimate
    ratio: Estimate
    cpu_ratio: Estimate
    per_second: float
    scaled: Estimate
    document_cpu_s: float
    end_step_s: float


@benchmark(
    "observe",
    "totalreduce bench observe -n 2",
    "totalreduce bench observe -n 4 --blocks 60 --per-second 1",
    shared=("ranks", "emulate_hosts", "emulate_rate"),
    ranks=2,
)
def bench_observe(setting: Setting, parameters: ObserveParameters) -> Report:
    """Measure what the live view costs a training step.

    Blocks of steps with and without it take turns in the same processes. In observed blocks each rank writes its
    figures, the dashboard runs, one page reads it, and another one is connected and never reads.
    """
    samples = _run(setting, parameters)
    figure = summarise(samples)
    table = Table(
        f"observed steps beside others, {setting.describe()}",
        [
            ("step (95 %)", lambda f: duration(f.plain_s)),
            ("documents/s of a rank", lambda f: f"{f.per_second:.1f}"),
            ("time, observed / not", lambda f: times(f.ratio, 4)),
            ("processor time", lambda f: times(f.cpu_ratio, 4)),
            ("of which at 1/s", lambda f: f"{f.scaled.median:.3%} \\[{f.scaled.low:.3%}, {f.scaled.high:.3%}]"),
            ("a document", lambda f: f"{f.document_cpu_s * 1e6:.0f} µs of a core"),
            ("counting a step", lambda f: f"{f.end_step_s * 1e6:.2f} µs"),
        ],
        [figure],
        f"{parameters.blocks} blocks of either kind, {parameters.block_s:g} s each, in turn. At 1/s: the difference of "
        "the processor times divided by the number of documents per second, because a job writes one.",
    )
    return Report([table], {**setting.as_document(), **asdict(parameters)}, describe_machine(), [figure], samples)


def _run(setting: Setting, parameters: ObserveParameters) -> list[ObserveSamples]:
    """Run the workers beside a dashboard; return the samples by rank."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="totalreduce-observe-")))
        live = stack.enter_context(LiveJob())
        live.begin("bench-observe", [_WORKER], setting.ranks)
        config = ObserveConfig(str(folder), str(live.board.path), **asdict(parameters))
        stack.enter_context(_Pages(stack.enter_context(Dashboard(live.board)), folder / OBSERVED))
        return run_benchmark(_WORKER, config, setting, ObserveSamples).ranks


@final
class _Pages:
    """Two clients of the dashboard, while a file exists: one that reads all events, and one that reads none."""

    def __init__(self, dashboard: Dashboard, flag: Path) -> None:
        self._dashboard, self._flag = dashboard, flag
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if not self._flag.exists():
                continue
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError, http.client.HTTPException):
                reading, _ = (self._open(stack) for _ in range(2))
                while self._flag.exists() and not self._stop.is_set() and reading.readline():
                    continue

    def _open(self, stack: contextlib.ExitStack) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._dashboard.port, timeout=5.0)
        stack.callback(connection.close)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {self._dashboard.token}"})
        return stack.enter_context(connection.getresponse())


def summarise(ranks: Sequence[ObserveSamples]) -> ObserveFigure:
    """Return the figure of all ranks' samples."""

    def means(samples: Callable[[ObserveSamples], list[float]]) -> list[float]:
        return [fmean(blocks) for blocks in zip(*map(samples, ranks), strict=True)]

    observed, plain = means(lambda rank: rank.observed_s), means(lambda rank: rank.plain_s)
    observed_cpu, plain_cpu = means(lambda rank: rank.observed_cpu_s), means(lambda rank: rank.plain_cpu_s)
    per_second = fmean(rank.documents_per_s for rank in ranks)
    return ObserveFigure(
        plain_s=estimate(plain),
        ratio=ratio_estimate(observed, plain),
        cpu_ratio=ratio_estimate(observed_cpu, plain_cpu),
        per_second=per_second,
        scaled=estimate([(one / other - 1) / per_second for one, other in zip(observed_cpu, plain_cpu, strict=True)]),
        document_cpu_s=fmean(rank.document_cpu_s for rank in ranks),
        end_step_s=fmean(rank.end_step_s for rank in ranks),
    )
