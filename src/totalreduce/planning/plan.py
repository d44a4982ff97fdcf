"""``totalreduce plan``: predict training steps on machines that one does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from totalreduce.bench.arithmetic import parse_count
from totalreduce.bench.command import benchmark, split_ranks
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.report import Report, Table, number, print_progress, seconds, size
from totalreduce.cli.report import format_bytes, share
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.machines import (
    IDEAL,
    Calibration,
    Machines,
    read_calibration,
    read_machines,
    write_calibration,
)
from totalreduce.planning.traces import Layer, Trace, find_traces, load_trace
from totalreduce.pytorch.sizes import BUCKET_BYTES

if TYPE_CHECKING:
    from totalreduce.planning.prediction import Prediction

__all__ = ["PlanCommand", "make_trace", "plan"]

#: Layers of a model of which only the number of parameters is known, and the forward pass's share of its step.
_LAYERS, _FORWARD_SHARE = 48, 1 / 3


@benchmark(
    "plan",
    "totalreduce plan gpt --ranks 2,8,64,1024",
    "totalreduce plan mlp --machines cluster.toml --by dense,oktopk,diloco:period=100 --plot plan.png",
    "totalreduce plan --parameters 300M --step-ms 100 --rate 8gbit --ideal --ranks 2,10 --by central,dense:ring",
    "totalreduce plan --measure calibration.json",
    plot=True,
)
def plan(
    *,
    trace: Annotated[
        str | None,
        typer.Argument(help="A file of `totalreduce bench trace`, or a name: mlp, gpt, cnn (those shipped)."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="With --script, after `--`: the arguments of the script.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(help="Instead of a trace, FILE.py:FUNCTION, which returns a model and a function of its loss."),
    ] = None,
    num_parameters: Annotated[
        str | None,
        typer.Option("--parameters", help="Instead of a trace, a model of so many parameters in even layers, as 300M."),
    ] = None,
    step_ms: Annotated[float, typer.Option(help="With --parameters: a step without communication.")] = 100.0,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, separated by commas.")
    ] = "2,4,8,16,32,64,128,256,512,1024",
    by: Annotated[
        str,
        typer.Option(
            help="Separated by commas: dense, dense:ring (or another schedule), central, a sparse method, auto, a "
            "strategy; "
            "with settings, as diloco:period=50:codec=int8."
        ),
    ] = "dense,oktopk,local_sgd",
    machines: Annotated[
        Path | None, typer.Option(help="A TOML file with a table [machines]; the next options change its values.")
    ] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help="Ranks on each host.")] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of a host's network card, as 10gbit.")] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Microseconds to another host, as `totalreduce doctor` measures them.")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Cores of a host.")] = None,
    compute: Annotated[float, typer.Option(help="How many times as fast as in the trace the machines compute.")] = 1.0,
    density: Annotated[float, typer.Option(help="Share of the elements that sparse methods send.")] = 0.01,
    bucket: Annotated[float, typer.Option(help="Size of a dense bucket in MiB.")] = BUCKET_BYTES / (1 << 20),
    samples: Annotated[str | None, typer.Option(help="Samples of an epoch, as 1.28M: predicts its time.")] = None,
    batch: Annotated[int, typer.Option(help="Samples of a rank in a step, for --samples.", min=1)] = 32,
    calibration: Annotated[
        Path | None, typer.Option(help="What messages cost on a processor: a file of --measure.")
    ] = None,
    ideal: Annotated[
        bool,
        typer.Option("--ideal", help="Messages take no processor time, and links carry nothing but payload."),
    ] = False,
    measure: Annotated[
        Path | None, typer.Option(help="Measure what messages cost on this machine, write this file, and end.")
    ] = None,
    messages: Annotated[
        int,
        typer.Option(help="Bound of a simulation. What has more messages in a step is extrapolated from fewer ranks."),
    ] = 50_000,
) -> Report | None:
    """Predict step time, hidden share, bytes and costs on machines that one does not have.

    The library's engines, schedules, sparse methods and strategies run on simulated hosts, in virtual time, beside the
    computations of a recorded trace. What is extrapolated is marked. Says which resource limits each step, and which
    would be next.
    """
    if measure is not None:
        from totalreduce.planning.calibration import measure_calibration

        write_calibration(measure, measure_calibration()[0])
        print(f"{measure}: {read_calibration(measure).source}")
        return None
    place = _machines(machines, ranks_per_host=ranks_per_host, rate=rate, latency_us=latency_us, cores=cores)
    if ideal and calibration is not None:
        raise ConfigurationError("--ideal takes the place of a --calibration: leave one of them out")
    costs = IDEAL if ideal else Calibration() if calibration is None else read_calibration(calibration)
    place = replace(place, payload_share=1.0) if ideal else place
    if compute <= 0 or not 0 < density <= 1 or bucket <= 0 or messages < 1:
        raise ConfigurationError("--compute, --bucket and --messages must be positive, and --density from 0 to 1")
    from totalreduce.planning.prediction import Planner, check_contestant, with_epoch  # imports torch

    contestants = [text.strip() for text in by.split(",") if text.strip()]
    if not contestants:
        raise ConfigurationError("--by names nothing")
    for text in contestants:
        check_contestant(text, density)
    sizes = split_ranks("--ranks", ranks)
    model = _model(trace, arguments or [], script, num_parameters, step_ms).scaled(time=1 / compute)
    planner = Planner(
        model,
        place,
        costs,
        density=density,
        bucket_bytes=max(1, int(bucket * (1 << 20))),
        messages=messages,
        progress=print_progress,
    )
    for text in contestants:
        planner.check(text)
    found = [planner.predict(text, size) for text in contestants for size in sizes]
    if samples is not None:
        found = [with_epoch(each, parse_count(samples), batch, place.cost_per_host_hour) for each in found]
    setting = {"model": model.model, "machines": place, "calibration": costs, "messages": messages, "density": density}
    return Report(
        [_table(model, place, costs, found)],
        setting,
        describe_machine(),
        found,
        [],
        lambda path: draw_lines(
            path,
            f"{model.model}: predicted step, {place.describe()}",
            ("ranks", "ms"),
            list(_lines(model, found)),
        ),
    )


class PlanCommand(TyperCommand):
    """``totalreduce plan``, whose words after ``--`` are the script's, however many stand before."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before ``--``."""
        if "--" not in args:
            return super().parse_args(ctx, args)
        end = args.index("--")
        rest = super().parse_args(ctx, args[:end])
        if not ctx.params["arguments"]:  # otherwise the command refuses them
            ctx.params["arguments"] = args[end + 1 :]
        return rest


def make_trace(num_parameters: int, step_s: float) -> Trace:
    """Return the trace of a model of which only the number of parameters and the time of a step are known.

    All layers have one size and take one time; the backward pass takes twice as long as the forward pass.
    """
    layers = min(_LAYERS, num_parameters)
    forward_s = step_s * _FORWARD_SHARE
    backward_s = step_s - forward_s
    rows = []
    for index in range(layers):
        elements = num_parameters * (index + 1) // layers - num_parameters * index // layers
        # The last layer's gradient is the first one; the clock starts there.
        ready_s = backward_s * (layers - 1 - index) / layers
        rows.append(Layer(ready_s, backward_s + forward_s * index / layers, elements))
    return Trace(f"{num_parameters / 1e6:g} M parameters", "--parameters: even layers", tuple(rows), step_s)


def _model(
    trace: str | None, arguments: Sequence[str], script: str | None, parameters: str | None, step_ms: float
) -> Trace:
    if script is not None and parameters is None:
        from totalreduce.planning.script import trace_script

        if trace is not None:
            raise ConfigurationError(
                f"a plan needs one model: leave {trace!r} or --script out; the script's own arguments stand after `--`"
            )
        return trace_script(script, arguments)
    if arguments:
        raise ConfigurationError(f"a plan takes one trace; {' '.join(arguments)} would be arguments of a --script")
    if sum(each is not None for each in (trace, script, parameters)) != 1:
        raise ConfigurationError("a plan needs one model: a trace, --script or --parameters")
    if trace is not None:
        return load_trace(find_traces([trace], [])[0])
    assert parameters is not None
    if step_ms <= 0:
        raise ConfigurationError(f"--step-ms must be positive, not {step_ms:g}")
    return make_trace(parse_count(parameters), step_ms / 1000)


def _machines(path: Path | None, **given: Any) -> Machines:
    known = Machines() if path is None else read_machines(path)
    return replace(known, **{name: value for name, value in given.items() if value is not None})


def _lines(model: Trace, found: Sequence[Prediction]) -> Iterator[Line]:
    for name in dict.fromkeys(each.contestant for each in found):
        for is_extrapolated in (False, True):
            own = [each for each in found if (each.contestant, each.is_extrapolated) == (name, is_extrapolated)]
            if own:
                what = f"{name}, extrapolated" if is_extrapolated else name
                yield Line(what, [each.ranks for each in own], [1000 * each.step_s for each in own], is_extrapolated)
    every = sorted({each.ranks for each in found})
    yield Line("no communication", every, [1000 * model.period_s] * len(every))


def _table(model: Trace, place: Machines, costs: Calibration, found: Sequence[Prediction]) -> Table[Prediction]:
    def name(each: Prediction) -> str:
        schedules = f" ({', '.join(each.schedules)})" if each.schedules and ":" not in each.contestant else ""
        return f"{each.contestant}: {each.chosen}{schedules}" if each.chosen else each.contestant + schedules

    def limits(each: Prediction) -> str:
        return f"{each.limit} ({each.busy[each.limit]:.0%}), next {each.next_limit} ({each.busy[each.next_limit]:.0%})"

    def by(each: Prediction) -> str:
        return f"extrapolated from {each.simulated_ranks}" if each.is_extrapolated else "simulated"

    columns: list[tuple[str, Any]] = [
        ("by", name),
        ("ranks", lambda each: str(each.ranks)),
        ("prediction", by),
        ("step", lambda each: seconds(each.step_s)),
        ("exchange", lambda each: seconds(each.exchange_s)),
        ("waiting", lambda each: seconds(each.exposed_s)),
        ("hidden", lambda each: share(each.hidden_share)),
        ("sent per rank", lambda each: size(each.sent_bytes)),
        ("per link", lambda each: size(each.link_bytes)),
        ("limited by", limits),
    ]
    if any(each.epoch_s is not None for each in found):
        columns.append(("epoch", lambda each: "" if each.epoch_s is None else f"{each.epoch_s / 3600:.3g} h"))
    if any(each.epoch_cost is not None for each in found):
        columns.append(("cost per epoch", lambda each: number(each.epoch_cost, ".2f")))
    return Table(
        f"{model.model} ({format_bytes(model.num_bytes)} of gradients, {1000 * model.period_s:.4g} ms without "
        f"communication) on {place.describe()}",
        columns,
        found,
        f"Calibration: {costs.source}. Limited by: the resource that is busy for the largest share of a step; latency "
        "is what no resource explains.\nExtrapolated: fewer ranks were simulated, whose messages cost what those of "
        "all ranks would cost.",
    )
