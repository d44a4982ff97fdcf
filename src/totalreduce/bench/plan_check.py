"""``totalreduce bench plan``: predicted steps beside measured ones, on emulated hosts of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark, split_names
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plan_machines import Machines
from totalreduce.bench.report import Report, Table, print_progress, seconds
from totalreduce.bench.step import StepParameters, StepSamples
from totalreduce.bench.traces import Trace
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["PlanFigure", "bench_plan", "compared", "measured_step_s"]

ALONE = "alone"
_MODELS = ("mlp", "gpt", "cnn")
#: What the error of a prediction may be.
_DENSE_ERROR, _SPARSE_ERROR = 0.10, 0.15


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """A predicted and a measured step.

    Attributes:
        model: The model.
        hosts: The number of emulated hosts, with one rank each.
        rate: Their links' rate.
        contestant: ``dense``, the sparse method, or ``alone``: without communication.
        predicted_s: Seconds of a step by the plan.
        measured_s: Seconds of a step, averaged over ranks, median over steps.
        error: The predicted time over the measured one, minus 1.
        bound: What the error may be; ``None`` without communication.
        error_as_then: The error of a plan for a machine that computes as fast as this one did during the measurement,
            as steps without communication show that took turns with the others.
    """

    model: str
    hosts: int
    rate: str
    contestant: str
    predicted_s: float
    measured_s: float
    error: float
    bound: float | None
    error_as_then: float


@benchmark(
    "plan",
    "totalreduce bench plan --json plan.json",
    "totalreduce bench plan --models gpt --hosts 2,4 --rates 1gbit --steps 3",
)
def bench_plan(
    *,
    models: Annotated[str, typer.Option(help="Separated by commas: mlp, gpt, cnn.")] = "mlp,gpt,cnn",
    hosts: Annotated[str, typer.Option(help="Numbers of emulated hosts, separated by commas.")] = "2,4,8",
    rates: Annotated[str, typer.Option(help="Rates of their links, separated by commas.")] = "1gbit,100mbit",
    sync: Annotated[str, typer.Option(help="The sparse method.")] = "oktopk",
    density: Annotated[float, typer.Option(help="Share of the elements that it sends.")] = 0.01,
    steps: Annotated[int, typer.Option(help="Timed steps in a row, after two untimed ones.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="How often each contestant is measured.", min=1)] = 3,
) -> Report:
    """Compare predictions of `totalreduce plan` with steps that are measured on emulated hosts of this machine.

    Measures the calibration and records the models' traces first, on as many cores as there are. The hosts share the
    cores of this machine, which a prediction takes into account. Needs root and Linux.
    """
    names, links = split_names("--models", models, _MODELS), [text.strip() for text in rates.split(",")]
    sizes = _sizes(hosts)
    from totalreduce.bench.plan_calibration import measure_calibration
    from totalreduce.bench.plan_prediction import Planner, check_contestant
    from totalreduce.bench.plan_trace_worker import TraceParameters, TraceSamples

    check_contestant(sync, density)
    cores = describe_machine().cores
    print_progress(f"plan: traces of {', '.join(names)}, {cores} at a time")
    recorded = run_benchmark("plan_trace_worker", TraceParameters(names, 10), Setting(ranks=cores), TraceSamples).ranks
    figures: list[PlanFigure] = []
    raw = []
    for rate in links:
        print_progress(f"plan: calibration at {rate}")
        calibration, latency_s = measure_calibration(rate)
        machines = Machines(rate=rate, latency_us=1e6 * latency_s, cores=cores, emulated=True)
        for index, model in enumerate(names):
            trace = _typical([each.traces[index] for each in recorded])
            for size in sizes:
                print_progress(f"plan: {model} on {size} hosts at {rate}")
                parameters = StepParameters(
                    model=model, sync=sync, density=density, steps=steps, dense=True, no_communication=True
                )
                setting = Setting(ranks=size, hosts=size, rate=rate, rounds=rounds)
                results = run_benchmark("step_worker", parameters, setting, StepSamples)
                samples = {
                    name: measured_step_s([rank.seconds[name] for rank in results.ranks])
                    for name in ("dense", "totalreduce", "alone")
                }
                alone_s = trace.period_s * max(1.0, size / cores)
                figures.append(compared(model, size, rate, ALONE, (alone_s, samples["alone"]), samples["alone"], None))
                # The same on a machine that computes as fast as this one did during the measurement.
                as_then = trace.scaled(time=samples["alone"] / alone_s)
                for name, kind, bound in (("dense", "dense", _DENSE_ERROR), (sync, "totalreduce", _SPARSE_ERROR)):
                    predicted_s, then_s = (
                        Planner(each, machines, calibration, density=density).predict(name, size).step_s
                        for each in (trace, as_then)
                    )
                    figures.append(compared(model, size, rate, name, (predicted_s, then_s), samples[kind], bound))
                raw += results.raw()
    return Report(
        [_table(figures)], {"models": names, "hosts": sizes, "rates": links}, describe_machine(), figures, raw
    )


def measured_step_s(ranks: Sequence[Sequence[float]]) -> float:
    """Return the median over steps of the ranks' mean. Pure."""
    return median(fmean(step) for step in zip(*ranks, strict=True))


def compared(
    model: str,
    hosts: int,
    rate: str,
    contestant: str,
    predicted: tuple[float, float],
    measured_s: float,
    bound: float | None,
) -> PlanFigure:
    """Return a figure from the seconds of two plans, the second one for the machine as it was then. Pure."""
    errors = [each / measured_s - 1 for each in predicted]
    return PlanFigure(model, hosts, rate, contestant, predicted[0], measured_s, errors[0], bound, errors[1])


def _typical(traces: Sequence[Trace]) -> Trace:
    """Return the trace whose step takes the median time."""
    return sorted(traces, key=lambda trace: trace.period_s)[len(traces) // 2]


def _sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 2 for word in words):
        raise ConfigurationError(f"--hosts takes numbers from 2, as 2,4,8, not {text!r}")
    return [int(word) for word in words]


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
            ("measured", lambda figure: seconds(figure.measured_s)),
            ("error", lambda figure: f"{figure.error:+.1%}"),
            ("must", verdict),
            ("error, compute as then", lambda figure: f"{figure.error_as_then:+.1%}"),
        ],
        figures,
        "alone: no communication. Its error is that of the trace, which was recorded before, and what disturbs the "
        "machine.\nCompute as then: the plan for a machine that computes as fast as this one did in the same launch.",
    )
