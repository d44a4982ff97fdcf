"""``totalreduce bench train``: models trained to the end by sparse methods and by DDP, and how long that takes.

What runs is ``examples/sparse_training.py``. Two things are measured apart, because a whole dense training at
100 Mbit/s would take hours and every step of it the same time:

- What each contestant learns, step by step and from several seeds: on this machine's loopback, as links change no
  value.
- What its steps take on emulated links. A sparse method, whose first steps send more, trains to the end there, too;
  DDP's steps are alike, so some of them will do.

From both follows when a contestant's loss was, for the first time, what dense training ends with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import Annotated, Any

import typer

from totalreduce.bench.launching import Setting
from totalreduce.bench.options import HostsOption, JsonOption, RanksOption, make_setting
from totalreduce.bench.plots import Line, Panel, draw_panels, require_matplotlib
from totalreduce.bench.report import print_progress, write_json
from totalreduce.bench.scripts import describe_environment, find_script, launch_script
from totalreduce.bench.sparse import PlotOption
from totalreduce.cli.report import print_table
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import rate_bits_per_s

__all__ = ["LinkFigure", "TrainFigure", "bench_train", "contestants_of", "measure_train", "summarise"]

MODELS = ("cnn", "lstm", "gpt")
#: What DDP over gloo can train with; ``dense`` is what all are compared with.
PEERS = ("dense", "fp16", "powersgd")
_ALONE = "alone"
#: PowerSGD's hook is plain in the first ten steps.
_UNTIMED_STEPS = 12
_PEER_STEPS = 12
_ALONE_STEPS = 60
_SEEDS_MIN = 2
_LAUNCH_LIMIT_S = 7200.0
_QUICK_STEPS = 40
_LOOKS = 25


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What is trained.

    Attributes:
        models: Their names.
        contestants: Dense first.
        rates: Of the emulated links, as ``1gbit``.
        density: Of the sparse methods.
        steps: Of one training.
        seeds: Trainings of each contestant.

    Raises:
        ConfigurationError: Too little to say anything.
    """

    models: list[str]
    contestants: list[str]
    rates: list[str]
    density: float
    steps: int
    seeds: int

    def __post_init__(self) -> None:
        """Refuse plans that cannot work."""
        if self.seeds < _SEEDS_MIN or self.steps < _UNTIMED_STEPS + 2:
            raise ConfigurationError(
                f"bench train needs at least {_SEEDS_MIN} --seeds and {_UNTIMED_STEPS + 2} --steps, "
                f"not {self.seeds} and {self.steps}"
            )


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """A contestant on links of one rate.

    Attributes:
        step_s: A step's time, median, on rank 0.
        seconds: Until the loss was reached, mean over the seeds that reached it; ``None`` if none did.
        gain: How much sooner than dense training; ``None`` if either did not reach it.
    """

    step_s: float
    seconds: float | None
    gain: float | None


@dataclass(frozen=True, slots=True)
class TrainFigure:
    """One contestant on one model.

    Attributes:
        contestant: ``dense``, ``fp16``, ``powersgd`` (DDP over gloo) or a method of DistributedOptimizer.
        loss: Mean over seeds of the held-out loss in the end.
        loss_sd: Its standard deviation over seeds.
        accuracy: Mean over seeds of the held-out accuracy in the end, from 0 to 1.
        accuracy_sd: Its standard deviation over seeds.
        distance: Mean loss minus that of dense training, in standard deviations of the latter: below 1 it is as good.
        reached: How many seeds reached the loss that dense training ends with (its mean and a standard deviation).
        steps: When they did for the first time, mean.
        links: Figures by rate.
    """

    contestant: str
    loss: float
    loss_sd: float
    accuracy: float
    accuracy_sd: float
    distance: float
    reached: int
    steps: float | None
    links: dict[str, LinkFigure]


def bench_train(
    *,
    models: Annotated[str, typer.Option(help="Separated by commas: cnn, lstm, gpt.")] = "cnn,lstm,gpt",
    methods: Annotated[str, typer.Option(help="Of DistributedOptimizer, separated by commas.")] = "oktopk",
    against: Annotated[
        str, typer.Option(help="DDP over gloo: dense (always), fp16, powersgd.")
    ] = "dense,fp16,powersgd",
    density: Annotated[float, typer.Option(help="Share of the elements that a sparse method sends.")] = 0.01,
    steps: Annotated[int, typer.Option(help="Of one training.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Trainings of each contestant, at least two.")] = 5,
    rates: Annotated[str, typer.Option(help="Of the emulated links, separated by commas.")] = "1gbit,100mbit",
    quick: Annotated[
        bool, typer.Option("--quick", help="Forty steps from two seeds: to see it work, not to learn anything.")
    ] = False,
    ranks: RanksOption = None,
    emulate_hosts: HostsOption = 4,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Train the three models of examples/sparse_training.py: what is learnt, and how long that takes on slow links.

    All contestants take the same number of steps with the same batches and learning rates.
    Needs --emulate-hosts, that is root; takes hours as it is.
    """
    require_matplotlib(plot)
    setting = make_setting(ranks, emulate_hosts, "1gbit", None, 1)
    if setting.hosts < 2:
        raise ConfigurationError(
            f"bench train is about links between hosts: --emulate-hosts from 2, not {emulate_hosts}"
        )
    plan = TrainPlan(
        models=_split(models, MODELS, "--models"),
        contestants=contestants_of(methods, against),
        rates=_rates(rates),
        density=density,
        steps=_QUICK_STEPS if quick else steps,
        seeds=_SEEDS_MIN if quick else seeds,
    )
    figures, documents = {}, {}
    for model in plan.models:
        documents[model] = measure_train(setting, model, plan)
        figures[model] = summarise(documents[model])
        _print(setting, model, documents[model], figures[model])
    raw = [{"environment": describe_environment(), "plan": asdict(plan), "models": documents}]
    columns = {model: [asdict(figure) for figure in column] for model, column in figures.items()}
    write_json(json, "train", setting, columns, raw)
    panels = [_panel(model, rate, documents[model]) for model in plan.models for rate in plan.rates]
    draw_panels(plot, "held-out loss over training time, seed 0", len(plan.rates), panels)


def contestants_of(methods: str, against: str) -> list[str]:
    """Dense first, then the other peers, then the methods.

    Raises:
        ConfigurationError: There is no such method or peer.
    """
    from totalreduce.sparse.methods import METHODS

    known = [name for name in METHODS if name not in PEERS]
    peers = _split(against, PEERS, "--against")
    return ["dense", *(peer for peer in peers if peer != "dense"), *_split(methods, known, "--methods")]


def measure_train(setting: Setting, model: str, plan: TrainPlan) -> dict[str, Any]:
    """Launch all trainings of one model.

    Args:
        setting: The links' rate in it is not used.
        model: Its name.
        plan: What else.

    Returns:
        What the script wrote: ``learnt`` by contestant, ``timed`` by rate and contestant (``alone`` has no
        communication).

    Raises:
        BenchmarkFailedError: A launch failed; names the rank that failed first.
        ConfigurationError: The setting cannot be run here, for example because of missing rights.
    """
    common = ["--model", model, "--steps", str(plan.steps), "--density", str(plan.density)]
    common += ["--evaluations", str(_LOOKS)]
    learnt, timed = {}, {}
    for contestant in plan.contestants:
        here = replace(setting, hosts=0)
        learnt[contestant] = _launch(here, contestant, [*common, "--seeds", str(plan.seeds)])
    for rate in plan.rates:
        there = replace(setting, rate=rate)
        timed[rate] = {
            contestant: _launch(there, contestant, [*common, "--stop-after", str(_timed_steps(contestant, plan))])
            for contestant in (_ALONE, *plan.contestants)
        }
    return {"learnt": learnt, "timed": timed}


def summarise(documents: dict[str, Any]) -> list[TrainFigure]:
    """From what the script wrote to figures. Pure."""
    learnt = documents["learnt"]
    ends = {name: [run["evaluations"][-1] for run in document["runs"]] for name, document in learnt.items()}
    dense = [end["loss"] for end in ends["dense"]]
    goal = fmean(dense) + stdev(dense)
    figures = []
    for name, document in learnt.items():
        losses, accuracies = ([end[what] for end in ends[name]] for what in ("loss", "accuracy"))
        reached = [step for run in document["runs"] if (step := _first_step(run["evaluations"], goal)) is not None]
        figures.append(
            TrainFigure(
                contestant=name,
                loss=fmean(losses),
                loss_sd=stdev(losses),
                accuracy=fmean(accuracies),
                accuracy_sd=stdev(accuracies),
                distance=(fmean(losses) - fmean(dense)) / (stdev(dense) or math.inf),
                reached=len(reached),
                steps=fmean(reached) if reached else None,
                links={
                    rate: _on_link(timed[name]["runs"][0]["step_s"], reached)
                    for rate, timed in documents["timed"].items()
                },
            )
        )
    by_rate = figures[0].links
    return [
        replace(figure, links={rate: _compared(link, by_rate[rate]) for rate, link in figure.links.items()})
        for figure in figures
    ]


def _timed_steps(contestant: str, plan: TrainPlan) -> int:
    if contestant in PEERS:
        return min(plan.steps, _UNTIMED_STEPS + _PEER_STEPS)
    return min(plan.steps, _ALONE_STEPS) if contestant == _ALONE else plan.steps


def _launch(setting: Setting, contestant: str, options: Sequence[str]) -> dict[str, Any]:
    door = "ddp" if contestant in PEERS else "optimizer"
    command = [str(find_script("sparse_training")), *options, "--method", contestant, "--door", door]
    document = launch_script(setting, command, over_gloo=door == "ddp", timeout_s=_LAUNCH_LIMIT_S)
    end = document["runs"][-1]["evaluations"][-1]
    step_ms = 1000 * median(document["runs"][0]["step_s"][_UNTIMED_STEPS:])
    print_progress(
        f"train {document['model']}: {contestant}, {setting.describe()}: {step_ms:.1f} ms for a step; "
        f"loss {end['loss']:.4f} after {end['step']}"
    )
    return document


def _first_step(evaluations: list[dict[str, float]], goal: float) -> float | None:
    """When the held-out loss was first at the goal, between two looks at it by a straight line."""
    before: dict[str, float] | None = None
    for now in evaluations:
        if now["loss"] <= goal:
            if before is None:
                return now["step"]
            part = (before["loss"] - goal) / (before["loss"] - now["loss"])
            return before["step"] + part * (now["step"] - before["step"])
        before = now
    return None


def _on_link(step_s: list[float], reached: list[float]) -> LinkFigure:
    typical = median(step_s[_UNTIMED_STEPS:])
    # As they were; the rest, if the launch did not train to the end, as the typical one.
    elapsed = [0.0, *accumulate(step_s)]
    seconds = [
        elapsed[min(int(step), len(step_s))] + typical * (step - min(int(step), len(step_s))) for step in reached
    ]
    return LinkFigure(typical, fmean(seconds) if seconds else None, None)


def _compared(link: LinkFigure, dense: LinkFigure) -> LinkFigure:
    if link.seconds is None or dense.seconds is None:
        return link
    return replace(link, gain=dense.seconds / link.seconds)


def _split(text: str, known: Sequence[str], option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(known):
        raise ConfigurationError(f"{option} takes {', '.join(known)}, not {text!r}")
    return names


def _rates(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigurationError("--rates names none")
    for name in names:
        rate_bits_per_s(name)
    return names


def _print(setting: Setting, model: str, documents: dict[str, Any], figures: list[TrainFigure]) -> None:
    rates = list(documents["timed"])
    dense = documents["learnt"]["dense"]
    rows = [
        (
            figure.contestant if figure.contestant not in PEERS else f"DDP / gloo, {figure.contestant}",
            f"{figure.loss:.4f} ± {figure.loss_sd:.4f}",
            f"{figure.accuracy:.2%} ± {figure.accuracy_sd:.2%}",
            f"{figure.distance:+.2f}",
            f"{figure.reached}" if figure.steps is None else f"{figure.reached}, step {figure.steps:.0f}",
            *(
                f"{1000 * link.step_s:.1f} ms, "
                + ("never" if link.seconds is None else f"{link.seconds:.1f} s")
                + ("" if link.gain is None else f", {link.gain:.1f}x")
                for link in figure.links.values()
            ),
        )
        for figure in figures
    ]
    shares = []
    for rate, timed in documents["timed"].items():
        alone = median(timed[_ALONE]["runs"][0]["step_s"][_UNTIMED_STEPS:])
        wire = (
            2 * (dense["world_size"] - 1) / dense["world_size"] * 32 * dense["num_parameters"] / rate_bits_per_s(rate)
        )
        shares.append(f"{rate}: arithmetic {1000 * alone:.1f} ms, dense on the wire {wire / alone:.1f}x that")
    print_table(
        f"{model}, {dense['num_parameters'] / 1e6:.1f} M parameters, {dense['steps']} steps from {len(dense['runs'])} "
        f"seeds, density {dense['density']:g}, {setting.ranks} ranks on {setting.hosts} emulated hosts",
        (
            "by",
            "held-out loss",
            "accuracy",
            "sd from dense",
            "seeds at its loss",
            *(f"{rate}: step, time, gain" for rate in rates),
        ),
        rows,
        f"Its loss: where dense training ends, a standard deviation granted. {'; '.join(shares)}.",
    )


def _panel(model: str, rate: str, documents: dict[str, Any]) -> Panel:
    lines = []
    for name, document in documents["learnt"].items():
        step_s = documents["timed"][rate][name]["runs"][0]["step_s"]
        looks = document["runs"][0]["evaluations"]
        seconds = [_on_link(step_s, [look["step"]]).seconds or 0.0 for look in looks]
        lines.append(Line(name, seconds, [look["loss"] for look in looks]))
    return Panel(f"{model}, {rate}", ("s", "loss"), lines)
