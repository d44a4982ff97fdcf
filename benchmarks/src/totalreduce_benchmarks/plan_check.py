"""``totalreduce bench plan``: predicted steps beside measured ones, on emulated hosts of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, TypeVar

import typer

from totalreduce.bench.command import benchmark, split_names, split_ranks
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.records import from_document, to_document
from totalreduce.bench.report import Report, Table, duration, print_progress, seconds
from totalreduce.bench.sampling import Estimate, estimate
from totalreduce.planning.machines import Calibration, Machines
from totalreduce.planning.traces import Trace
from totalreduce_benchmarks.kept import KeptResults

__all__ = ["CheckParameters", "CheckSamples", "PlanFigure", "bench_plan", "compared", "measured_step"]

ALONE = "alone"
_MODELS = ("mlp", "gpt", "cnn")
#: What the error of a prediction may be.
_DENSE_ERROR, _SPARSE_ERROR = 0.10, 0.15
#: Steps in a row take about so long, and are at least so many.
_BLOCK_S, _STEPS_MIN = 2.0, 2
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """A predicted and a measured step.

    Attributes:
        model: The model.
        hosts: The number of emulated hosts, with one rank each.
        rate: Their links' rate.
        contestant: ``dense``, the sparse method, or ``alone``: without communication.
        predicted_s: Seconds of a step by the plan.
        measured_s: Seconds of a step, averaged over ranks.
        error: The predicted time over the median of the measured one, minus 1.
        bound: What the error may be; ``None`` without communication.
        error_as_then: The error of a plan for a machine that computes as fast as this one did during the measurement,
            as steps without communication show that took turns with the others.
    """

    model: str
    hosts: int
    rate: str
    contestant: str
    predicted_s: float
    measured_s: Estimate
    error: float
    bound: float | None
    error_as_then: float


@dataclass(frozen=True, slots=True)
class CheckParameters:
    """What is trained.

    Attributes:
        models: Names of models.
        sync: The sparse method.
        density: The share of the elements that it sends.
        steps: Timed steps in a row at most.
        steps_min: Timed steps in a row at least.
        block_s: Seconds in which timed steps in a row should end.
    """

    models: list[str]
    sync: str
    density: float
    steps: int
    steps_min: int
    block_s: float


@dataclass(frozen=True, slots=True)
class CheckSamples:
    """The seconds of every timed step of one rank, by model and contestant."""

    seconds: dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class _Traces:
    """The recorded trace of each model, by its name."""

    traces: dict[str, Trace]


@dataclass(frozen=True, slots=True)
class _Launch:
    """The seconds of every step of each rank, by model and contestant."""

    ranks: list[CheckSamples]

    def steps(self, model: str) -> dict[str, Estimate]:
        """Return the steps of a model, by contestant."""
        names = self.ranks[0].seconds[model]
        return {name: measured_step([rank.seconds[model][name] for rank in self.ranks]) for name in names}


@dataclass(frozen=True, slots=True)
class _Basis:
    """What predictions for one rate are made from.

    Attributes:
        machines: The emulated hosts.
        calibration: The costs on processors.
    """

    machines: Machines
    calibration: Calibration


@benchmark(
    "plan",
    "totalreduce bench plan --resume plan.jsonl --json plan.json",
    "totalreduce bench plan --models gpt --hosts 2,4 --rates 1gbit --steps 3",
)
def bench_plan(
    *,
    models: Annotated[str, typer.Option(help="Separated by commas: mlp, gpt, cnn.")] = "mlp,cnn,gpt",
    hosts: Annotated[str, typer.Option(help="Numbers of emulated hosts, separated by commas.")] = "2,4,8",
    rates: Annotated[str, typer.Option(help="Rates of their links, separated by commas.")] = "1gbit,100mbit",
    sync: Annotated[str, typer.Option(help="The sparse method.")] = "oktopk",
    density: Annotated[float, typer.Option(help="Share of the elements that it sends.")] = 0.01,
    steps: Annotated[int, typer.Option(help="Timed steps in a row at most; fewer where they are long.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="How often each contestant is measured.", min=1)] = 3,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep each measurement in this file as it ends, and do not repeat those that it has."),
    ] = None,
) -> Report:
    """Compare predictions of `totalreduce plan` with steps that are measured on emulated hosts of this machine.

    Measures the calibration and records the models' traces first, on as many cores as there are. The hosts share the
    cores of this machine, which a prediction takes into account. Each launch measures all models. Needs root and Linux.
    """
    names, links = split_names("--models", models, _MODELS), [text.strip() for text in rates.split(",")]
    sizes = split_ranks("--hosts", hosts)
    from totalreduce.planning.calibration import measure_calibration
    from totalreduce.planning.prediction import check_contestant
    from totalreduce_benchmarks.plan_trace_worker import TraceParameters, TraceSamples

    check_contestant(sync, density)
    cores, kept = describe_machine().cores, KeptResults(resume)
    begin = time.monotonic()

    def result(what: str, key: Sequence[object], kind: type[R], measure: Callable[[], R]) -> R:
        """Return what is kept, or measure and keep it."""
        text = json.dumps([*key])
        print_progress(f"plan: {what}, after {time.monotonic() - begin:.0f} s{' (kept)' if text in kept else ''}")
        if text not in kept:
            kept.keep(text, to_document(measure()))
        return from_document(kind, kept[text])

    def record_traces() -> _Traces:
        ranks = run_benchmark(
            "totalreduce_benchmarks.plan_trace_worker", TraceParameters(names, 10), Setting(ranks=cores), TraceSamples
        ).ranks
        return _Traces({name: _typical([rank.traces[index] for rank in ranks]) for index, name in enumerate(names)})

    def calibrate(rate: str) -> _Basis:
        calibration, latency_s = measure_calibration(rate)
        return _Basis(Machines(rate=rate, latency_us=1e6 * latency_s, cores=cores, emulated=True), calibration)

    def train(rate: str, size: int) -> _Launch:
        parameters = CheckParameters(names, sync, density, steps, min(steps, _STEPS_MIN), _BLOCK_S)
        setting = Setting(ranks=size, hosts=size, rate=rate, rounds=rounds)
        return _Launch(
            run_benchmark("totalreduce_benchmarks.plan_check_worker", parameters, setting, CheckSamples).ranks
        )

    traces = result(
        f"traces of {', '.join(names)}, {cores} at a time", ["traces", names], _Traces, record_traces
    ).traces
    figures: list[PlanFigure] = []
    launches: dict[str, _Launch] = {}
    for rate in links:
        basis = result(f"calibration at {rate}", ["calibration", rate], _Basis, partial(calibrate, rate))
        for size in sizes:
            what, key = f"{size} hosts at {rate}", ["steps", names, sync, density, steps, rounds, size, rate]
            launch = launches[what] = result(what, key, _Launch, partial(train, rate, size))
            found = [
                figure
                for model in names
                for figure in _figures(traces[model], model, size, basis, launch.steps(model), (sync, density))
            ]
            figures += found
            print_progress(_table(found).to_markdown())
    return Report(
        [_table(figures)],
        {"models": names, "hosts": sizes, "rates": links},
        describe_machine(),
        figures,
        {"traces": traces, "launches": launches},
    )


def _figures(
    trace: Trace,
    model: str,
    hosts: int,
    basis: _Basis,
    measured: Mapping[str, Estimate],
    sparse: tuple[str, float],
) -> list[PlanFigure]:
    """Return the figures of a model on so many hosts.

    Args:
        trace: The model's trace.
        model: The model's name.
        hosts: The number of hosts.
        basis: The machines and their costs.
        measured: The seconds of a step, by the contestants' names in ``bench step``.
        sparse: The sparse method and its density.
    """
    from totalreduce.planning.prediction import Planner

    alone, (sync, density) = measured["alone"], sparse
    loss = basis.calibration.sharing_loss if hosts > basis.machines.cores else 0.0
    alone_s = trace.period_s * max(1.0, hosts / basis.machines.cores) / (1.0 - loss)
    rate = basis.machines.rate
    figures = [compared(model, hosts, rate, ALONE, (alone_s, alone.median), alone, None)]
    # The second plan is for a machine that computes as fast as this one did during the measurement.
    planner = Planner(trace, basis.machines, basis.calibration, density=density)
    as_then = planner.with_trace(trace.scaled(time=alone.median / alone_s))
    for name, kind, bound in (("dense", "dense", _DENSE_ERROR), (sync, "totalreduce", _SPARSE_ERROR)):
        predicted_s = (planner.predict(name, hosts).step_s, as_then.predict(name, hosts).step_s)
        figures.append(compared(model, hosts, rate, name, predicted_s, measured[kind], bound))
    return figures


def measured_step(ranks: Sequence[Sequence[float]]) -> Estimate:
    """Return the estimate, over steps, of the ranks' mean. Pure."""
    return estimate([fmean(step) for step in zip(*ranks, strict=True)])


def compared(
    model: str,
    hosts: int,
    rate: str,
    contestant: str,
    predicted: tuple[float, float],
    measured: Estimate,
    bound: float | None,
) -> PlanFigure:
    """Return a figure from the seconds of two plans, the second one for the machine as it was then. Pure."""
    errors = [each / measured.median - 1 for each in predicted]
    return PlanFigure(model, hosts, rate, contestant, predicted[0], measured, errors[0], bound, errors[1])


def _typical(traces: Sequence[Trace]) -> Trace:
    """Return the trace whose step takes the median time."""
    return sorted(traces, key=lambda trace: trace.period_s)[len(traces) // 2]


def _table(figures: list[PlanFigure]) -> Table[PlanFigure]:
    def verdict(figure: PlanFigure) -> str:
        if figure.bound is None:
            return ""
        return f"{'within' if abs(figure.error) <= figure.bound else 'beyond'} {figure.bound:.0%}"

    return Table(
        "predicted and measured steps on emulated hosts, one rank each",
        [
            ("model", lambda figure: figure.model),
            ("hosts", lambda figure: str(figure.hosts)),
            ("rate", lambda figure: figure.rate),
            ("by", lambda figure: figure.contestant),
            ("predicted", lambda figure: seconds(figure.predicted_s)),
            ("measured", lambda figure: duration(figure.measured_s)),
            ("error", lambda figure: f"{figure.error:+.1%}"),
            ("must", verdict),
            ("error, compute as then", lambda figure: f"{figure.error_as_then:+.1%}"),
        ],
        figures,
        "alone: no communication. Its error is that of the trace, which was recorded before, and what disturbs the "
        "machine.\nCompute as then: the plan for a machine that computes as fast as this one did in the same launch.",
    )
