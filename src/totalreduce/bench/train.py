"""``totalreduce bench train``: models trained to the end by sparse methods, strategies and DDP; how long that takes.

The script is ``examples/sparse_training.py``. Two things are measured apart, because a whole dense training at
100 Mbit/s would take hours and every step of it the same time:

- The losses of each contestant, step by step and from several seeds: on this machine's loopback, as links change no
  value.
- The time of its steps on emulated links. A sparse method, whose first steps send more, trains to the end there, too;
  DDP's steps are alike, so some of them will do.

From both follows when a contestant first reached the loss with which dense training ends.

With ``--slow`` the last rank is slower than the others, on this machine's loopback. Here strategies with servers learn
other values, so all methods train to the end, and time counts on rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import wire_limit_s
from totalreduce.bench.command import benchmark, split_names
from totalreduce.bench.launching import Setting, find_script, run_script
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plots import Line, Panel, draw_panels
from totalreduce.bench.report import Report, Table, print_progress
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import rate_bits_per_s

MODELS = ("cnn", "lstm", "gpt")
#: Ways in which DDP over gloo can train; all contestants are compared with ``dense``.
PEERS = ("dense", "fp16", "powersgd", "post-local")
_ALONE = "alone"
#: PowerSGD's hook is plain in the first ten steps.
_UNTIMED_STEPS = 12
_PEER_STEPS = 12
_ALONE_STEPS = 60
_SEEDS_MIN = 2
_LAUNCH_LIMIT_S = 7200.0
_QUICK_STEPS = 40
_LOOKS = 25
_SLOW_MAX = 100


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss and accuracy after a step, and the seconds until then."""

    step: float
    loss: float
    accuracy: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A training from one seed.

    Attributes:
        step_s: The seconds of every step.
        evaluations: Of the model, from time to time.
        seed: The seed.
        sent_bytes: What rank 0 has handed to the network, for evaluations, too; 0 if that is not known.
    """

    step_s: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    seed: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """The document of examples/sparse_training.py: its options, the number of ranks and parameters, and its runs."""

    runs: list[Run]
    model: str = ""
    method: str = ""
    door: str = ""
    steps: int = 0
    density: float = 0.0
    world_size: int = 0
    num_parameters: int = 0

    @property
    def step_s(self) -> list[float]:
        """Seconds of every step of the first run."""
        return self.runs[0].step_s


@dataclass(frozen=True, slots=True)
class ModelSamples:
    """All trainings of one model.

    Attributes:
        learnt: By contestant.
        timed: By rate and contestant, of which one is alone.
        slowed: By contestant: those with a slow rank; empty without ``--slow``.
        slow: How many times longer a step of the slow rank takes.
    """

    learnt: dict[str, Training]
    timed: dict[str, dict[str, Training]]
    slowed: dict[str, Training] = field(default_factory=dict)
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The trainings; the fields are options."""

    models: Annotated[str, typer.Option(help="Separated by commas: cnn, lstm, gpt.")] = "cnn,lstm,gpt"
    methods: Annotated[
        str, typer.Option(help="Sparse methods and strategies of DistributedOptimizer, separated by commas.")
    ] = "oktopk"
    against: Annotated[str, typer.Option(help="DDP over gloo: dense (always), fp16, powersgd, post-local.")] = (
        "dense,fp16,powersgd"
    )
    period: Annotated[int, typer.Option(help="Steps of a strategy between two exchanges.")] = 16
    overlap: Annotated[int, typer.Option(help="Steps beside an exchange of diloco or gossip.")] = 0
    codec: Annotated[str, typer.Option(help="Of a strategy's exchanges and of coded; by default none.")] = ""
    density: Annotated[float, typer.Option(help="Share of the elements that a sparse method sends.")] = 0.01
    threshold: Annotated[float, typer.Option(help="The change of a parameter that strom sends.")] = 3e-4
    steps: Annotated[int, typer.Option(help="Of one training.")] = 1000
    seeds: Annotated[int, typer.Option(help="Trainings of each contestant, at least two.")] = 5
    rates: Annotated[str, typer.Option(help="Of the emulated links, separated by commas.")] = "1gbit,100mbit"
    slow: Annotated[
        float, typer.Option(help="Train also with a last rank whose steps take so many times longer, on loopback.")
    ] = 1.0
    quick: Annotated[
        bool, typer.Option("--quick", help="Forty steps from two seeds: to see it work, not to learn anything.")
    ] = False

    def __post_init__(self) -> None:
        """Refuse plans that cannot work, and unknown names."""
        if self.seeds < _SEEDS_MIN or self.steps < _UNTIMED_STEPS + 2:
            raise ConfigurationError(
                f"bench train needs at least {_SEEDS_MIN} --seeds and {_UNTIMED_STEPS + 2} --steps, "
                f"not {self.seeds} and {self.steps}"
            )
        if not 1 <= self.slow <= _SLOW_MAX:
            raise ConfigurationError(f"--slow is from 1 to {_SLOW_MAX}, not {self.slow:g}")
        split_names("--models", self.models, MODELS)
        contestants_of(self.methods, self.against)
        if not self.links:
            raise ConfigurationError("--rates names none")
        for rate in self.links:
            rate_bits_per_s(rate)

    @property
    def contestants(self) -> list[str]:
        """Dense first."""
        return contestants_of(self.methods, self.against)

    @property
    def links(self) -> list[str]:
        """Rates of the emulated links, each once."""
        return list(dict.fromkeys(rate.strip() for rate in self.rates.split(",") if rate.strip()))


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

    def describe(self) -> str:
        """Return ``91.2 ms, 22.0 s, 2.8x``."""
        seconds = "never" if self.seconds is None else f"{self.seconds:.1f} s"
        gain = "" if self.gain is None else f", {self.gain:.1f}x"
        return f"{1000 * self.step_s:.1f} ms, {seconds}{gain}"


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
        slowed: With a slow rank; ``None`` without ``--slow``.
        pace: A step without a slow rank, on loopback, over one with it: 1 if rank 0 does not wait for the slow rank.
        saving: The bytes that a ring sends for dense gradients, over those that rank 0 has sent on emulated links;
            ``None`` for DDP, whose bytes are not counted.
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
    slowed: LinkFigure | None = None
    pace: float | None = None
    saving: float | None = None


@benchmark(
    "train",
    "totalreduce bench train --models cnn --quick",
    "totalreduce bench train --methods oktopk,topka --json train.json --plot train.png",
    "totalreduce bench train --models cnn --methods local_sgd,diloco --against dense,post-local --rates 10mbit",
    "totalreduce bench train --models cnn --methods async,quorum --against dense --slow 3",
    shared=("ranks", "emulate_hosts"),
    plot=True,
    emulate_hosts=4,
)
def bench_train(setting: Setting, parameters: TrainPlan) -> Report:
    """Train the three models of examples/sparse_training.py: what is learnt, and how long that takes on slow links.

    All contestants take the same number of steps with the same batches and learning rates.
    Needs --emulate-hosts, that is root; takes hours as it is.
    """
    if setting.hosts < 2:
        raise ConfigurationError(
            f"bench train is about links between hosts: --emulate-hosts from 2, not {setting.hosts}"
        )
    plan = replace(parameters, steps=_QUICK_STEPS, seeds=_SEEDS_MIN) if parameters.quick else parameters
    models = split_names("--models", plan.models, MODELS)
    samples = {model: measure_train(setting, model, plan) for model in models}
    figures = {model: summarise(own) for model, own in samples.items()}
    panels = [_panel(model, rate, samples[model]) for model in models for rate in plan.links]
    return Report(
        [_table(setting, model, samples[model], figures[model]) for model in models],
        setting.as_document(),
        describe_machine(),
        figures,
        [{"plan": plan, "models": samples}],
        lambda path: draw_panels(path, "held-out loss over training time, seed 0", len(plan.links), panels),
    )


def contestants_of(methods: str, against: str) -> list[str]:
    """Dense first, then the other peers, then the methods."""
    from totalreduce.sparse.methods import METHODS
    from totalreduce.strategies.strategies import STRATEGIES

    known = [name for name in (*METHODS, *STRATEGIES) if name not in PEERS]
    peers = split_names("--against", against, PEERS)
    return ["dense", *(peer for peer in peers if peer != "dense"), *split_names("--methods", methods, known)]


def measure_train(setting: Setting, model: str, plan: TrainPlan) -> ModelSamples:
    """Launch all trainings of one model.

    Args:
        setting: The links' rate in it is not used.
        model: Its name.
        plan: The trainings.
    """
    common = ["--model", model, "--steps", str(plan.steps), "--density", str(plan.density)]
    common += ["--evaluations", str(_LOOKS), "--period", str(plan.period), "--overlap", str(plan.overlap)]
    common += ["--threshold", str(plan.threshold)]
    common += ["--codec", plan.codec] if plan.codec else []
    here = replace(setting, hosts=0)
    learnt = {
        contestant: _launch(here, contestant, [*common, "--seeds", str(plan.seeds)]) for contestant in plan.contestants
    }
    timed = {}
    for rate in plan.links:
        there = replace(setting, rate=rate)
        timed[rate] = {
            contestant: _launch(there, contestant, [*common, "--stop-after", str(_timed_steps(contestant, plan))])
            for contestant in (_ALONE, *plan.contestants)
        }
    slowed = {}
    if plan.slow > 1:
        slowly = [*common, "--slow", str(plan.slow)]
        for contestant in plan.contestants:
            steps = ["--stop-after", str(_timed_steps(contestant, plan))] if contestant in PEERS else []
            slowed[contestant] = _launch(here, contestant, [*slowly, *steps])
    return ModelSamples(learnt, timed, slowed, plan.slow)


def summarise(samples: ModelSamples) -> list[TrainFigure]:
    """From the script's documents to figures. Pure."""
    ends = {name: [run.evaluations[-1] for run in training.runs] for name, training in samples.learnt.items()}
    dense = [end.loss for end in ends["dense"]]
    goal = fmean(dense) + stdev(dense)
    figures: list[TrainFigure] = []
    for name, training in samples.learnt.items():
        losses, accuracies = [end.loss for end in ends[name]], [end.accuracy for end in ends[name]]
        reached = [step for run in training.runs if (step := _first_step(run.evaluations, goal)) is not None]
        links = {rate: _on_link(timed[name].step_s, reached) for rate, timed in samples.timed.items()}
        of_dense = figures[0].links if figures else links
        slowed = _with_slow_rank(name, samples.slowed[name], reached, goal) if samples.slowed else None
        pace = None if slowed is None else _typical(training.step_s) / slowed.step_s
        if slowed is not None:
            slowed = _compared(slowed, (figures and figures[0].slowed) or slowed)
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
                links={rate: _compared(link, of_dense[rate]) for rate, link in links.items()},
                slowed=slowed,
                pace=pace,
                saving=_saving(next((timed[name] for timed in samples.timed.values()), None)),
            )
        )
    return figures


def _timed_steps(contestant: str, plan: TrainPlan) -> int:
    if contestant in PEERS:
        return min(plan.steps, _UNTIMED_STEPS + _PEER_STEPS)
    return min(plan.steps, _ALONE_STEPS) if contestant == _ALONE else plan.steps


def _launch(setting: Setting, contestant: str, options: Sequence[str]) -> Training:
    door = "ddp" if contestant in PEERS else "optimizer"
    command = [str(find_script("sparse_training")), *options, "--method", contestant, "--door", door]
    training = run_script(setting, command, Training, over_gloo=door == "ddp", timeout_s=_LAUNCH_LIMIT_S)
    end = training.runs[-1].evaluations[-1]
    print_progress(
        f"train {training.model}: {contestant}, {setting.describe()}: {1000 * _typical(training.step_s):.1f} ms for a "
        f"step; loss {end.loss:.4f} after {end.step:g}"
    )
    return training


def _saving(timed: Training | None) -> float | None:
    """Return the bytes that a ring sends for dense gradients, over those that a contestant has sent."""
    if timed is None or not timed.runs[0].sent_bytes:
        return None
    run = timed.runs[0]
    ring = 2 * (timed.world_size - 1) / timed.world_size * 4 * timed.num_parameters * len(run.step_s)
    return ring / run.sent_bytes


def _typical(step_s: Sequence[float]) -> float:
    return median(step_s[_UNTIMED_STEPS:])


def _first_step(evaluations: list[Evaluation], goal: float) -> float | None:
    """When the held-out loss was first at the goal, between two looks at it by a straight line."""
    before: Evaluation | None = None
    for now in evaluations:
        if now.loss <= goal:
            if before is None:
                return now.step
            part = (before.loss - goal) / (before.loss - now.loss)
            return before.step + part * (now.step - before.step)
        before = now
    return None


def _on_link(step_s: list[float], reached: list[float]) -> LinkFigure:
    typical = _typical(step_s)
    # As they were; the rest, if the launch did not train to the end, as the typical one.
    elapsed = [0.0, *accumulate(step_s)]
    seconds = [
        elapsed[min(int(step), len(step_s))] + typical * (step - min(int(step), len(step_s))) for step in reached
    ]
    return LinkFigure(typical, fmean(seconds) if seconds else None, None)


def _with_slow_rank(name: str, training: Training, reached: list[float], goal: float) -> LinkFigure:
    """Return the figure of a contestant with a slow rank.

    Args:
        name: The contestant. What DDP learns does not depend on the speed of ranks.
        training: With the slow rank.
        reached: Of DDP: the steps at which the loss was reached without the slow rank.
        goal: The loss.
    """
    if name not in PEERS:
        step = _first_step(training.runs[0].evaluations, goal)
        reached = [] if step is None else [step]
    return _on_link(training.step_s, reached)


def _compared(link: LinkFigure, dense: LinkFigure) -> LinkFigure:
    if link.seconds is None or dense.seconds is None:
        return link
    return replace(link, gain=dense.seconds / link.seconds)


def _table(setting: Setting, model: str, samples: ModelSamples, figures: list[TrainFigure]) -> Table[TrainFigure]:
    def peer(figure: TrainFigure) -> str:
        return figure.contestant if figure.contestant not in PEERS else f"DDP / gloo, {figure.contestant}"

    def reached(figure: TrainFigure) -> str:
        return f"{figure.reached}" if figure.steps is None else f"{figure.reached}, step {figure.steps:.0f}"

    def link(rate: str) -> Callable[[TrainFigure], str]:
        return lambda figure: figure.links[rate].describe()

    def slowed(figure: TrainFigure) -> str:
        return "" if figure.slowed is None or figure.pace is None else f"{figure.pace:.2f}, {figure.slowed.describe()}"

    dense = samples.learnt["dense"]
    shares = []
    for rate, timed in samples.timed.items():
        alone = _typical(timed[_ALONE].step_s)
        wire = wire_limit_s(4 * dense.num_parameters, dense.world_size, rate_bits_per_s(rate))
        shares.append(f"{rate}: arithmetic {1000 * alone:.1f} ms, dense on the wire {wire / alone:.1f}x that")
    return Table(
        f"{model}, {dense.num_parameters / 1e6:.1f} M parameters, {dense.steps} steps from {len(dense.runs)} "
        f"seeds, density {dense.density:g}, {setting.ranks} ranks on {setting.hosts} emulated hosts",
        [
            ("by", peer),
            ("held-out loss", lambda figure: f"{figure.loss:.4f} ± {figure.loss_sd:.4f}"),
            ("accuracy", lambda figure: f"{figure.accuracy:.2%} ± {figure.accuracy_sd:.2%}"),
            ("sd from dense", lambda figure: f"{figure.distance:+.2f}"),
            ("bytes of dense", lambda figure: "" if figure.saving is None else f"1/{figure.saving:.0f}"),
            ("seeds at its loss", reached),
            *((f"{rate}: step, time, gain", link(rate)) for rate in samples.timed),
            *([(f"last rank {samples.slow:g}x slower: pace, step, time, gain", slowed)] if samples.slowed else []),
        ],
        figures,
        f"Its loss: where dense training ends, a standard deviation granted. {'; '.join(shares)}.",
    )


def _panel(model: str, rate: str, samples: ModelSamples) -> Panel:
    lines = []
    for name, training in samples.learnt.items():
        step_s = samples.timed[rate][name].step_s
        looks = training.runs[0].evaluations
        seconds = [_on_link(step_s, [look.step]).seconds or 0.0 for look in looks]
        lines.append(Line(name, seconds, [look.loss for look in looks]))
    return Panel(f"{model}, {rate}", ("s", "loss"), lines)
