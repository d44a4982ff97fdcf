"""Trainings that are compared by ``bench train`` and ``bench strategies``: what they learn, and how long that takes.

The script is ``examples/sparse_training.py``. A *case* is a model and an optimizer, a *contestant* a way of keeping
ranks in step. Two things are measured apart, because a whole dense training on a slow link would take hours and every
step of it the same time:

- The losses of each contestant, step by step and from several seeds: on this machine's loopback, as links change no
  value.
- The time and the bytes of its steps on emulated links. The contestant and training without communication take turns,
  of a whole period each, so that a disturbance of the machine hits both. A sparse method or ``strom``, whose steps do
  not all send as much, trains to the end instead.

From both follows when a contestant first reached the loss with which dense training ends.

With a slow rank, on loopback, strategies with servers learn other values: they train to the end there, and time counts
on rank 0. The steps of all others are measured in turns there, too.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any, final

import typer

from totalreduce.bench.arithmetic import wire_limit_s
from totalreduce.bench.command import split_names
from totalreduce.bench.launching import Setting, find_script, run_script
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.plots import Line
from totalreduce.bench.records import from_document, to_document
from totalreduce.bench.report import Report, Table, number, print_progress, size
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.emulate import EmulateOptions, rate_bits_per_s
from totalreduce.planning.contestants import make_strategy, name_of, parse_contestant, strategies, takes_own_steps
from totalreduce_benchmarks.kept import KeptResults
from totalreduce_benchmarks.plots import Panel, draw_panels

__all__ = [
    "CaseSamples",
    "Evaluation",
    "LinkFigure",
    "Run",
    "SlowFigure",
    "TrainFigure",
    "TrainPlan",
    "Training",
    "contestants_of",
    "parse_link",
    "report_trainings",
    "summarise",
]

MODELS = ("cnn", "lstm", "gpt", "logistic")
OPTIMIZERS = ("own", "sgd", "adamw")
#: Ways in which DDP over gloo can train; all contestants are compared with ``dense``.
PEERS = ("dense", "fp16", "powersgd", "post-local")
#: Strategies of torchft; in an interpreter that has it.
TORCHFT = ("torchft-local_sgd", "torchft-diloco")
#: Contestants whose first steps are those of dense training.
_POST_LOCAL = ("post-local", "post_local_sgd")
#: PowerSGD's hook is plain in the first ten steps.
_UNTIMED_STEPS = 12
_TURNS = 5
#: No turn begins after so many seconds: on a slow link a step takes long, and always the same time.
_TURNS_S = 20.0
_SEEDS_MIN = 2
_LAUNCH_LIMIT_S = 7200.0
_QUICK_STEPS = 40
_QUICK_METHODS = 4
#: As ``_TURNS`` and ``_TURNS_S``.
_QUICK_TURNS = (2, 1.0)
_SLOW_MAX = 100
#: The value of ``--rates`` with which no links are measured.
_NO_LINKS = "none"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss and accuracy after a step, and the seconds until then."""

    step: float
    loss: float
    accuracy: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A training from one seed, or turns of its steps and of steps without communication.

    Attributes:
        step_s: The seconds of every step on rank 0; of turns, those of an average step of each turn, on the slowest
            rank, because the others wait for it.
        alone_s: Of turns, the same without communication; empty for a training.
        block: The number of steps after which a training does the same again.
        sent_bytes: What rank 0's network interface sent in an average step; 0 on loopback.
        evaluations: The model's from time to time; empty for turns.
        method: The contestant.
        seed: Of the parameters and batches.
    """

    step_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    block: int = 1
    sent_bytes: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    method: str = ""
    seed: int = 0

    @property
    def typical_s(self) -> float:
        """Seconds of a step: the mean of a turn, or of a block of steps of a training, of which the median."""
        return median(self.step_s if self.alone_s else _means(self.step_s[_UNTIMED_STEPS:], self.block))

    @property
    def over_alone(self) -> float | None:
        """The time of a step over that of a step without communication, turn by turn; ``None`` without turns."""
        if not self.alone_s:
            return None
        return median(mine / alone for mine, alone in zip(self.step_s, self.alone_s, strict=True))

    def elapsed(self, step: float) -> float:
        """Return the seconds after so many steps."""
        if self.alone_s:
            return self.typical_s * step
        # As they were; the rest, if the launch did not train to the end, as the typical one.
        known = min(int(step), len(self.step_s))
        return list(accumulate(self.step_s, initial=0.0))[known] + self.typical_s * (step - known)


@dataclass(frozen=True, slots=True)
class Training:
    """Of the document of examples/sparse_training.py, the part of one contestant."""

    runs: list[Run]
    model: str = ""
    optimizer: str = ""
    steps: int = 0
    density: float = 0.0
    local_after: float = 0.0
    world_size: int = 0
    num_parameters: int = 0

    @property
    def first(self) -> Run:
        """The first run."""
        return self.runs[0]


@dataclass(frozen=True, slots=True)
class CaseSamples:
    """All trainings of one model by one optimizer.

    Attributes:
        learnt: By contestant.
        timed: By link and contestant.
        even: By contestant: turns on loopback, whose forward passes take as long as with a slow rank.
        slowed: By contestant: with a slow last rank. Trainings of strategies with servers, turns of all others.
        slow: How many times longer a step of the slow rank takes.
    """

    learnt: dict[str, Training]
    timed: dict[str, dict[str, Training]] = field(default_factory=dict)
    even: dict[str, Training] = field(default_factory=dict)
    slowed: dict[str, Training] = field(default_factory=dict)
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainings:
    """Which trainings are compared; the fields are options."""

    models: Annotated[str, typer.Option(help="Separated by commas: cnn, lstm, gpt, logistic.")] = "cnn,lstm,gpt"
    optimizers: Annotated[
        str, typer.Option(help="sgd, adamw, or own (the model's). Links and slow ranks are measured with the first.")
    ] = "own"
    methods: Annotated[
        str,
        typer.Option(help="Of DistributedOptimizer, separated by commas; settings as in diloco:period=50:codec=int8."),
    ] = "oktopk"
    against: Annotated[str, typer.Option(help="DDP over gloo: dense (always), fp16, powersgd, post-local.")] = (
        "dense,fp16,powersgd"
    )
    density: Annotated[float, typer.Option(help="Share of the elements that a sparse method sends.")] = 0.01
    keys: Annotated[int, typer.Option(help="Parameters of logistic, up to ten million.")] = 1_000_000
    steps: Annotated[int, typer.Option(help="Of one training.")] = 1000
    looks: Annotated[int, typer.Option(help="How often in a training the held-out loss is looked at.")] = 25
    seeds: Annotated[int, typer.Option(help="Trainings of each contestant, at least two.")] = 5
    first_seed: Annotated[
        int, typer.Option(help="Of the first training. Choose settings with other seeds than those that you report.")
    ] = 0


@dataclass(frozen=True, slots=True)
class TrainPlan(Trainings):
    """The trainings, and where they run; the fields are options."""

    rates: Annotated[
        str,
        typer.Option(
            help="Emulated links, separated by commas, with or without a delay, as 10mbit+40ms; none: losses alone."
        ),
    ] = "1gbit,100mbit"
    slow: Annotated[
        float, typer.Option(help="Train also with a last rank whose steps take so many times longer, on loopback.")
    ] = 1.0
    slow_step_ms: Annotated[
        float, typer.Option(help="With --slow, how long a forward pass takes at least: the rank sleeps for the rest.")
    ] = 0.0
    torchft: Annotated[
        Path | None, typer.Option(help="A Python with this package and torchft, whose LocalSGD and DiLoCo take part.")
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep every launch in this file as it ends, and do not repeat those that it has."),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Forty steps from two seeds, with the first four methods, the first model and optimizer, on the first "
            "link: to see it work.",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse plans that cannot work, and unknown names."""
        if self.seeds < _SEEDS_MIN or self.steps < _UNTIMED_STEPS + 2:
            raise ConfigurationError(
                f"trainings are compared with at least {_SEEDS_MIN} --seeds and {_UNTIMED_STEPS + 2} --steps, "
                f"not {self.seeds} and {self.steps}"
            )
        if not 1 <= self.slow <= _SLOW_MAX:
            raise ConfigurationError(f"--slow is from 1 to {_SLOW_MAX}, not {self.slow:g}")
        if self.first_seed < 0:
            raise ConfigurationError(f"--first-seed is 0 or more, not {self.first_seed}")
        if not 1 <= self.keys <= 10_000_000:
            raise ConfigurationError(f"--keys is from 1 to 10,000,000, not {self.keys}")
        split_names("--models", self.models, MODELS)
        split_names("--optimizers", self.optimizers, OPTIMIZERS)
        contestants_of(self.methods, self.against)
        if not self.links and self.rates.strip() != _NO_LINKS:
            raise ConfigurationError(f"--rates names no link; {_NO_LINKS!r} measures none")
        for link in self.links:
            parse_link(link)

    @property
    def contestants(self) -> list[str]:
        """Dense first."""
        more = TORCHFT if self.torchft is not None else ()
        return [*contestants_of(self.methods, self.against), *more]

    @property
    def links(self) -> list[str]:
        """Emulated links, each once; empty if only what is learnt counts."""
        if self.rates.strip() == _NO_LINKS:
            return []
        return list(dict.fromkeys(link.strip() for link in self.rates.split(",") if link.strip()))

    def shortened(self) -> TrainPlan:
        """Return a plan of a few minutes."""
        model, optimizer = self.cases[0]
        methods = [name for name in self.methods.split(",") if name.strip()][:_QUICK_METHODS]
        less = replace(self, models=model, optimizers=optimizer, methods=",".join(methods))
        less = replace(less, rates=(self.links or [_NO_LINKS])[0])
        return replace(less, steps=_QUICK_STEPS, seeds=_SEEDS_MIN, looks=5)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Models and optimizers."""
        models = split_names("--models", self.models, MODELS)
        optimizers = split_names("--optimizers", self.optimizers, OPTIMIZERS)
        return [(model, optimizer) for model in models for optimizer in optimizers]


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """A contestant on one link.

    Attributes:
        step_s: A step's time, on the slowest rank where it was measured in turns, else on rank 0.
        over_alone: How many times longer it is than a step without communication; ``None`` if that is not known.
        sent_bytes: What rank 0's host sent in an average step, headers included.
        seconds: Until the loss was reached, mean over the seeds that reached it; ``None`` if none did.
        gain: How much sooner than dense training; ``None`` if either did not reach it.
    """

    step_s: float
    over_alone: float | None
    sent_bytes: float
    seconds: float | None
    gain: float | None = None

    def describe(self) -> str:
        """Return ``91.2 ms, 1.05x, 22.0 s, 2.8x``."""
        seconds = "never" if self.seconds is None else f"{self.seconds:.1f} s"
        parts = [
            f"{1000 * self.step_s:.1f} ms",
            number(self.over_alone, ".2f") + "x",
            seconds,
            number(self.gain, ".1f") + "x",
        ]
        return ", ".join(part for part in parts if part != "x")


@dataclass(frozen=True, slots=True)
class SlowFigure:
    """A contestant with a slow rank.

    Attributes:
        pace: A step without a slow rank, over one with it: 1 if rank 0 does not wait for the slow rank.
        step_s: A step's time on rank 0, with the slow rank; of whole trainings, the mean of all steps.
        loss: Mean over seeds of the held-out loss on rank 0 in the end.
        reached: How many seeds reached the loss of dense training without a slow rank.
        seconds: When they did, mean; ``None`` if none did.
        share: That time over dense training's with the slow rank; ``None`` if either did not reach the loss.
    """

    pace: float
    step_s: float
    loss: float
    reached: int
    seconds: float | None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class TrainFigure:
    """One contestant in one case.

    Attributes:
        contestant: ``dense``, ``fp16``, ``powersgd``, ``post-local`` (DDP over gloo) or a method of
            DistributedOptimizer, with settings.
        loss: Mean over seeds of the held-out loss in the end.
        loss_sd: Its standard deviation over seeds.
        accuracy: Mean over seeds of the held-out accuracy in the end, from 0 to 1.
        accuracy_sd: Its standard deviation over seeds.
        distance: Mean loss minus that of dense training, in standard deviations of the latter: below 1 it is as good.
        reached: How many seeds reached the loss that dense training ends with (its mean and a standard deviation).
        steps: When they did for the first time, mean.
        links: Figures by link; empty if links were not measured with this optimizer.
        slowed: With a slow rank; ``None`` without ``--slow``.
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
    slowed: SlowFigure | None = None


def contestants_of(methods: str, against: str) -> list[str]:
    """Dense first, then the other peers, then the methods; a method may have settings behind its name.

    Raises:
        ConfigurationError: A name is unknown, or a strategy refuses its settings.
    """
    from totalreduce.sparse.methods import METHODS

    by_name = strategies()
    known = [name for name in (*METHODS, *by_name) if name not in ("dense", "powersgd")]
    peers = [text.strip() for text in against.split(",") if text.strip()]
    split_names("--against", ",".join(map(name_of, peers)), PEERS)
    chosen = [text.strip() for text in methods.split(",") if text.strip()]
    split_names("--methods", ",".join(map(name_of, chosen)), known)
    for text in chosen:
        if name_of(text) in by_name:
            make_strategy(parse_contestant(text))
    return list(dict.fromkeys(["dense", *peers, *chosen]))


def parse_link(text: str) -> tuple[str, float]:
    """Return the rate and the delay in milliseconds of ``10mbit+40ms``; without a delay it is 0."""
    rate, plus, delay = text.partition("+")
    rate_bits_per_s(rate)
    if not plus:
        return rate, 0.0
    try:
        delay_ms = float(delay.removesuffix("ms")) if delay.endswith("ms") else math.nan
    except ValueError:
        delay_ms = math.nan
    if math.isnan(delay_ms):
        raise ConfigurationError(f"a link is a rate with or without a delay, as 10mbit+40ms, not {text!r}")
    EmulateOptions(num_hosts=1, delay_ms=delay_ms)
    return rate, delay_ms


def report_trainings(command: str, setting: Setting, parameters: TrainPlan) -> Report:
    """Train all cases of a plan; ``command``: its name in messages."""
    plan = parameters.shortened() if parameters.quick else parameters
    if plan.links and setting.hosts < 2:
        raise ConfigurationError(
            f"bench {command} is about links between hosts: --emulate-hosts from 2, not {setting.hosts}"
        )
    launcher = _Launcher(command, plan.resume, partial(_run_script, plan.torchft))
    samples: dict[str, CaseSamples] = {}
    for model, optimizer in plan.cases:
        samples[model if optimizer == "own" else f"{model}, {optimizer}"] = _measure(
            setting, model, optimizer, plan, launcher, is_first=optimizer == plan.cases[0][1]
        )
    figures = {case: summarise(own) for case, own in samples.items()}
    tables: list[Table[TrainFigure]] = []
    for case, own in samples.items():
        tables.append(_table(setting, case, own, figures[case]))
        if own.slowed:
            tables.append(_slow_table(setting, case, own, figures[case]))
    return Report(
        tables,
        setting.as_document(),
        describe_machine(),
        figures,
        [{"plan": to_document(plan), "cases": samples}],
        lambda path: draw_panels(path, "held-out loss, mean over seeds", 2, _panels(samples)),
    )


#: Launches the script in a setting, by several contestants and with more options, and returns its document.
_RunScript = Callable[[Setting, Sequence[str], Sequence[str]], Training]


def _run_script(torchft: Path | None, setting: Setting, names: Sequence[str], options: Sequence[str]) -> Training:
    door = _door_of(names[0])
    python = str(torchft) if door == "torchft" else sys.executable
    over_gloo = door != "optimizer"
    options = [*options, "--door", "ddp" if over_gloo else "optimizer", "--method", ",".join(names)]
    command = [str(find_script("sparse_training")), *options]
    return run_script(setting, command, Training, over_gloo=over_gloo, timeout_s=_LAUNCH_LIMIT_S, python=python)


@final
class _Launcher:
    """Launches of the script. With a file, every launch is kept as a line of it, and none is repeated."""

    def __init__(self, command: str, path: Path | None, run: _RunScript) -> None:
        self._command, self._run_script = command, run
        self._kept = KeptResults(path)

    def launch(self, setting: Setting, contestants: Iterable[str], options: Sequence[str]) -> dict[str, Training]:
        """Train by several contestants, each in a launch of its own, or measure their steps in turns.

        Turns are short, so they share launches: those of DDP, of DistributedOptimizer, and of torchft.
        """
        keys = {name: json.dumps([setting.describe(), name, *options]) for name in contestants}
        missing = [name for name, key in keys.items() if key not in self._kept]
        by_door = [[name for name in missing if _door_of(name) == door] for door in ("ddp", "optimizer", "torchft")]
        launches = by_door if "--turns" in options else [[name] for name in missing]
        for names in filter(None, launches):
            print_progress(f"{self._command}: {' '.join(options)}, {setting.describe()}: {', '.join(names)}")
            for name, training in self._run(setting, names, options).items():
                self._kept.keep(keys[name], to_document(training))
        return {name: from_document(Training, self._kept[key]) for name, key in keys.items()}

    def _run(self, setting: Setting, names: Sequence[str], options: Sequence[str]) -> dict[str, Training]:
        whole = self._run_script(setting, names, options)
        found = {name: replace(whole, runs=[run for run in whole.runs if run.method == name]) for name in names}
        for name, training in found.items():
            ends = [run.evaluations[-1].loss for run in training.runs if run.evaluations]
            learnt = f", loss {fmean(ends):.4f} in the end" if ends else ""
            print_progress(f"{self._command}:   {name}: {1000 * training.first.typical_s:.1f} ms for a step{learnt}")
        return found


def _measure(
    setting: Setting, model: str, optimizer: str, plan: TrainPlan, launcher: _Launcher, *, is_first: bool
) -> CaseSamples:
    """Launch all trainings of a case; those on links and with a slow rank for the first optimizer only."""
    common = ["--model", model, "--steps", str(plan.steps), "--density", str(plan.density)]
    common += [] if optimizer == "own" else ["--optimizer", optimizer]
    common += ["--width", str(plan.keys)] if model == "logistic" else []
    common += ["--first-seed", str(plan.first_seed)] if plan.first_seed else []
    trains = [*common, "--evaluations", str(plan.looks), "--seeds"]
    most, seconds = _QUICK_TURNS if plan.quick else (_TURNS, _TURNS_S)
    turns = [*common, "--turns", str(most), "--turns-s", str(seconds)]
    here, everybody = replace(setting, hosts=0), plan.contestants
    samples = CaseSamples(launcher.launch(here, everybody, [*trains, str(plan.seeds)]), slow=plan.slow)
    if not is_first:
        return samples
    uneven = [name for name in everybody if _is_uneven(name)]
    served = [name for name in everybody if takes_own_steps(parse_contestant(name), setting.ranks)]
    for link in plan.links:
        rate, delay_ms = parse_link(link)
        there, counted = replace(setting, rate=rate, delay_ms=delay_ms), ["--interface", "eth0"]
        others = [name for name in everybody if name not in uneven]
        samples.timed[link] = {
            **launcher.launch(there, others, [*turns, *counted]),
            **launcher.launch(there, uneven, [*trains, "1", *counted]),
        }
    if plan.slow > 1:
        each, slowly = ["--step-ms", str(plan.slow_step_ms)], ["--slow", str(plan.slow)]
        others = [name for name in everybody if name not in served]
        samples.even.update(launcher.launch(here, everybody, [*turns, *each]))
        samples.slowed.update(launcher.launch(here, others, [*turns, *each, *slowly]))
        samples.slowed.update(launcher.launch(here, served, [*trains, str(plan.seeds), *each, *slowly]))
    return samples


def summarise(samples: CaseSamples) -> list[TrainFigure]:
    """From the script's documents to figures. Pure."""
    ends = {name: [run.evaluations[-1] for run in training.runs] for name, training in samples.learnt.items()}
    dense = [end.loss for end in ends["dense"]]
    goal = fmean(dense) + stdev(dense)
    figures: list[TrainFigure] = []
    for name, training in samples.learnt.items():
        losses, accuracies = [end.loss for end in ends[name]], [end.accuracy for end in ends[name]]
        reached = [step for run in training.runs if (step := _first_step(run.evaluations, goal)) is not None]
        links = {link: _on_link(samples, link, name, reached) for link in samples.timed}
        slowed = _with_slow_rank(samples, name, reached, goal) if name in samples.slowed else None
        own = TrainFigure(
            contestant=name,
            loss=fmean(losses),
            loss_sd=stdev(losses),
            accuracy=fmean(accuracies),
            accuracy_sd=stdev(accuracies),
            distance=(fmean(losses) - fmean(dense)) / (stdev(dense) or math.inf),
            reached=len(reached),
            steps=fmean(reached) if reached else None,
            links=links,
            slowed=slowed,
        )
        figures.append(_compared(own, figures[0] if figures else own))
    return figures


def _door_of(contestant: str) -> str:
    if name_of(contestant) in TORCHFT:
        return "torchft"
    return "ddp" if name_of(contestant) in PEERS else "optimizer"


def _is_uneven(contestant: str) -> bool:
    """Whether what is sent changes in the course of a training: sparse methods, and Strom's threshold."""
    from totalreduce.sparse.methods import METHODS

    name = name_of(contestant)
    return name not in PEERS and (name in METHODS or name == "strom")


def _means(values: Sequence[float], block: int) -> list[float]:
    """Return the mean of each block of so many values; what is left of a block in the end counts as one."""
    return [fmean(values[begin : begin + block]) for begin in range(0, len(values), block)]


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


def _after(
    samples: CaseSamples, timed: Mapping[str, Training], name: str, step: float, read: Callable[[Run, float], float]
) -> float:
    """Return the seconds or bytes that a contestant has needed for so many steps.

    Args:
        samples: Of the case.
        timed: Where: by contestant. Post-local SGD was measured in its later steps; its first ones are dense ones.
        name: The contestant.
        step: The number of steps.
        read: Returns what a run has needed for a number of steps.
    """
    if name_of(name) not in _POST_LOCAL:
        return read(timed[name].first, step)
    training = samples.learnt[name]
    start = min(step, round(training.local_after * training.steps))
    return read(timed["dense"].first, start) + read(timed[name].first, step - start)


def _sent_after(run: Run, step: float) -> float:
    return run.sent_bytes * step


def _on_link(samples: CaseSamples, link: str, name: str, reached: Sequence[float]) -> LinkFigure:
    timed = samples.timed[link]
    run, steps = timed[name].first, samples.learnt[name].steps
    seconds = [_after(samples, timed, name, step, Run.elapsed) for step in reached]
    sent_bytes = _after(samples, timed, name, steps, _sent_after) / steps if steps else 0.0
    return LinkFigure(run.typical_s, run.over_alone, sent_bytes, fmean(seconds) if seconds else None)


def _with_slow_rank(samples: CaseSamples, name: str, reached: Sequence[float], goal: float) -> SlowFigure:
    """Return the figure of a contestant with a slow rank; ``reached``: steps at which the loss was reached without."""
    training, ends = samples.slowed[name], [run.evaluations[-1].loss for run in samples.learnt[name].runs]
    if not training.first.alone_s:  # it was trained to the end
        found = [(run, _first_step(run.evaluations, goal)) for run in training.runs]
        seconds = [run.elapsed(step) for run, step in found if step is not None]
        ends = [run.evaluations[-1].loss for run in training.runs]
        # Not the median: a bound may hold rank 0 back in some steps, and in others not.
        step_s = fmean(fmean(run.step_s) for run in training.runs)
    else:  # what it learns does not depend on the speed of ranks
        seconds = [_after(samples, samples.slowed, name, step, Run.elapsed) for step in reached]
        step_s = training.first.typical_s
    pace = samples.even[name].first.typical_s / step_s
    return SlowFigure(pace, step_s, fmean(ends), len(seconds), fmean(seconds) if seconds else None)


def _compared(own: TrainFigure, dense: TrainFigure) -> TrainFigure:
    """Return a figure with its gains over dense training."""

    def ratio(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one / other

    links = {
        link: replace(figure, gain=ratio(dense.links[link].seconds, figure.seconds))
        for link, figure in own.links.items()
    }
    slowed = own.slowed
    if slowed is not None and dense.slowed is not None:
        slowed = replace(slowed, share=ratio(slowed.seconds, dense.slowed.seconds))
    return replace(own, links=links, slowed=slowed)


def _describe_peer(figure: TrainFigure) -> str:
    is_peer = _door_of(figure.contestant) == "ddp"
    return f"DDP / gloo, {figure.contestant}" if is_peer else figure.contestant


def _table(setting: Setting, case: str, samples: CaseSamples, figures: list[TrainFigure]) -> Table[TrainFigure]:
    def reached(figure: TrainFigure) -> str:
        return f"{figure.reached}" if figure.steps is None else f"{figure.reached}, step {figure.steps:.0f}"

    def link(name: str) -> Callable[[TrainFigure], str]:
        return lambda figure: figure.links[name].describe()

    def sent(figure: TrainFigure) -> str:
        return size(list(figure.links.values())[-1].sent_bytes)

    dense = samples.learnt["dense"]
    shares = []
    for name, timed in samples.timed.items():
        run = timed["dense"].first
        if run.alone_s:
            alone = median(run.alone_s)
            wire = wire_limit_s(4 * dense.num_parameters, dense.world_size, rate_bits_per_s(parse_link(name)[0]))
            shares.append(f"{name}: arithmetic {1000 * alone:.1f} ms, dense on the wire {wire / alone:.1f}x that")
    place = (setting if samples.timed else replace(setting, hosts=0)).describe()
    return Table(
        f"{case}, {dense.num_parameters / 1e6:.1f} M parameters, {dense.steps} steps from {len(dense.runs)} "
        f"seeds, density {dense.density:g}, {place}",
        [
            ("by", _describe_peer),
            ("held-out loss", lambda figure: f"{figure.loss:.4f} ± {figure.loss_sd:.4f}"),
            ("accuracy", lambda figure: f"{figure.accuracy:.2%} ± {figure.accuracy_sd:.2%}"),
            ("sd from dense", lambda figure: f"{figure.distance:+.2f}"),
            ("seeds at its loss", reached),
            *([("sent per step", sent)] if samples.timed else []),
            *((f"{name}: step, over alone, time, gain", link(name)) for name in samples.timed),
        ],
        figures,
        f"Its loss: where dense training ends, a standard deviation granted.{''.join(f' {each}.' for each in shares)}",
    )


def _slow_table(setting: Setting, case: str, samples: CaseSamples, figures: list[TrainFigure]) -> Table[TrainFigure]:
    def of(read: Callable[[SlowFigure], str]) -> Callable[[TrainFigure], str]:
        return lambda figure: "" if figure.slowed is None else read(figure.slowed)

    return Table(
        f"{case}, the last of {setting.ranks} ranks {samples.slow:g}x slower, on loopback",
        [
            ("by", _describe_peer),
            ("pace of rank 0", of(lambda slow: f"{slow.pace:.2f}")),
            ("step", of(lambda slow: f"{1000 * slow.step_s:.1f} ms")),
            ("held-out loss", of(lambda slow: f"{slow.loss:.4f}")),
            ("seeds at dense's loss", of(lambda slow: f"{slow.reached}")),
            ("time", of(lambda slow: "never" if slow.seconds is None else f"{slow.seconds:.1f} s")),
            ("of dense's time", of(lambda slow: number(slow.share, ".2f"))),
        ],
        figures,
        "Pace: a step of rank 0 where no rank is slow, over its step here.",
    )


def _panels(samples: Mapping[str, CaseSamples]) -> list[Panel]:
    panels = []
    for case, own in samples.items():
        curves = {name: _mean_curve(training) for name, training in own.learnt.items()}
        lines = [Line(name, steps, losses) for name, (steps, losses) in curves.items()]
        panels.append(Panel(f"{case}, over steps", ("steps", "loss"), lines))
        if not own.timed:
            continue
        last = list(own.timed)[-1]
        for title, unit, link, scale, read in (
            ("over bytes sent", "MiB sent by rank 0", last, 1 / (1 << 20), _sent_after),
            *((f"over time, {link}", "s", link, 1.0, Run.elapsed) for link in own.timed),
        ):
            lines = [
                Line(name, [scale * _after(own, own.timed[link], name, step, read) for step in steps], losses)
                for name, (steps, losses) in curves.items()
            ]
            panels.append(Panel(f"{case}, {title}", (unit, "loss"), lines))
    return panels


def _mean_curve(training: Training) -> tuple[list[float], list[float]]:
    """Return steps and the mean over seeds of the losses then."""
    looks: list[Any] = list(zip(*(run.evaluations for run in training.runs), strict=True))
    return [look[0].step for look in looks], [fmean(each.loss for each in look) for look in looks]
