"""``totalreduce bench growth``: the bytes that a rank receives and sends as the number of ranks grows.

With real processes on this host, and in lockstep in one process, where a thousand ranks fit: their sessions are those
of the library, nothing is estimated. There all ranks take turns in one piece of memory for the gradient: what a session
leaves in it as residual is not kept, every step selects from a fresh gradient.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from totalreduce.bench.arithmetic import bus_factor, format_count, parse_count, parse_sizes
from totalreduce.bench.command import benchmark, split_names, split_ranks
from totalreduce.bench.launching import Setting, run_benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.methods import make_method
from totalreduce.bench.plots import Line, draw_lines
from totalreduce.bench.report import Report, Table, print_progress, size
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.schedules import SCHEDULES
from totalreduce_benchmarks.sparse import SparseParameters, SparseSamples

if TYPE_CHECKING:
    from totalreduce.sparse.actions import Exchange
    from totalreduce.sparse.session import Update
    from totalreduce.testing.lockstep import Traffic

PROCESSES, SIMULATED = "processes", "lockstep"
#: Those whose exchange only writes to the gradients, so that ranks may share them.
_METHODS = ("oktopk", "topka", "gtopk")
_SEED = 13
_SIGNAL = 0.1


@dataclass(frozen=True, slots=True)
class GrowthFigure:
    """One method on so many ranks, payload of one step.

    Attributes:
        method: Its name.
        ranks: How many.
        by: ``processes`` or ``lockstep``.
        k: How many elements a rank has selected.
        received_bytes: By the average rank.
        received_bytes_max: By the rank that receives most.
        sent_bytes: By the average rank.
        sent_bytes_max: By the rank that sends most; a broadcast is counted as if its root sent to every rank.
        bytes_per_selected: Received by the rank that receives most, for each element that it has selected.
        wire_bytes: Received with the engine's headers; ``None`` in lockstep.
        first_bytes: Received in the very first step, in which Ok-Topk agrees on regions and looks for its threshold;
            ``None`` for processes.
    """

    method: str
    ranks: int
    by: str
    k: int
    received_bytes: float
    received_bytes_max: float
    sent_bytes: float
    sent_bytes_max: float
    bytes_per_selected: float
    wire_bytes: float | None
    first_bytes: float | None


@benchmark(
    "growth",
    "totalreduce bench growth --plot growth.png",
    "totalreduce bench growth --processes 2,4 --lockstep 64,256 --json growth.json",
    "totalreduce bench growth --dense --lockstep 2,8,32,128 --sizes 4KiB,1MiB",
    plot=True,
)
def bench_growth(
    *,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, each a process on this host; may be empty.")] = (
        "2,4,8,16"
    ),
    lockstep: Annotated[str, typer.Option(help="Numbers of ranks in lockstep in one process; may be empty.")] = (
        "2,8,32,128,512,1024"
    ),
    elements: Annotated[str, typer.Option(help="Elements of the processes' gradient.")] = "2M",
    selected: Annotated[str, typer.Option(help="Elements that a rank in lockstep selects.")] = "100k",
    density: Annotated[float, typer.Option(help="Share of the elements that is selected.")] = 0.01,
    methods: Annotated[str, typer.Option(help="oktopk, topka, gtopk.")] = "oktopk,topka,gtopk",
    dense: Annotated[
        bool,
        typer.Option("--dense", help="Count the messages and the processor time of a dense allreduce by schedule."),
    ] = False,
    sizes: Annotated[str, typer.Option(help="With --dense: bytes of the tensor, separated by commas.")] = "4KiB,1MiB",
    schedules: Annotated[str, typer.Option(help="With --dense: names of schedules; all: every one.")] = "all",
) -> Report:
    """Count the bytes of a rank over the number of ranks: real processes, and up to a thousand ranks in lockstep.

    Ok-Topk's stay where they are, those of TopkA grow as the number of ranks does, and those of gTopk's busiest rank as
    its logarithm.
    Lockstep with 1024 ranks takes two minutes of one core and 5 GiB of memory for Ok-Topk, and half of that for each of
    the others.

    With --dense, real engines carry out an allreduce over a simulated network, by every schedule, on as many ranks as
    --lockstep says.
    """
    if dense:
        from totalreduce_benchmarks.growth_dense import (
            dense_report,  # imports torch, which the command's help does without
        )

        wanted = [] if schedules == "all" else split_names("--schedules", schedules, tuple(SCHEDULES))
        return dense_report(split_ranks("--lockstep", lockstep), parse_sizes(sizes), wanted)
    names = split_names("--methods", methods, _METHODS)
    numbers, simulated = (
        split_ranks(option, text, may_be_empty=True)
        for option, text in (("--processes", processes), ("--lockstep", lockstep))
    )
    if not numbers and not simulated:
        raise ConfigurationError("with neither --processes nor --lockstep there is nothing to count")
    k = parse_count(selected)
    if not 0 < density <= 0.5:
        raise ConfigurationError(f"--density must be above 0 and at most 0.5 here, not {density:g}")
    if k / density >= 2**31:
        raise ConfigurationError(f"{k} are not {density:g} of less than 2^31 elements; ask for fewer --selected")
    parameters = SparseParameters(elements=elements, density=density, methods=",".join(names), bucket_elements=elements)
    figures: list[GrowthFigure] = []
    raw: list[dict[str, Any]] = []
    for ranks in numbers:
        print_progress(f"growth: {ranks} processes")
        # What the ranks of several hosts would send is counted: in memory that ranks share there are no messages.
        setting = Setting(ranks=ranks, rounds=2, transport="tcp")
        results = run_benchmark("totalreduce_benchmarks.sparse_worker", parameters, setting, SparseSamples)
        figures += [figure_of_processes(name, results.ranks) for name in names]
        raw += [{"ranks": ranks, "results": results.raw()}]
    for ranks in simulated:
        figures += [simulate(name, ranks, k, density) for name in names]
    figures.sort(key=lambda figure: (names.index(figure.method), figure.ranks, figure.by))
    return Report(
        [_table(density, figures)],
        {"density": density, "selected": k, "parameters": parameters},
        describe_machine(),
        figures,
        raw,
        lambda path: draw_lines(
            path,
            f"payload that a rank receives in one step, density {density:g}",
            ("ranks", "most received, bytes per selected element"),
            list(_lines(figures, density)),
        ),
    )


def figure_of_processes(name: str, samples: list[SparseSamples]) -> GrowthFigure:
    """From the samples of ``bench sparse``, with one bucket. Pure."""
    ranks = [rank.contestants[name] for rank in samples]
    steps = list(zip(*(rank.bytes for rank in ranks), strict=True))
    k = ranks[0].counts[0][0][0]

    def mean(column: int) -> float:
        return fmean(row[column] for step in steps for row in step)

    def most(column: int) -> float:
        return fmean(max(row[column] for row in step) for step in steps)

    return GrowthFigure(
        name, len(samples), PROCESSES, k, mean(3), most(3), mean(2), most(2), most(3) / k, mean(1), None
    )


def simulate(name: str, world_size: int, k: int, density: float) -> GrowthFigure:
    """Two steps of one bucket on so many ranks, of which the second one counts.

    Args:
        name: Of the method.
        world_size: Number of ranks.
        k: How many elements each selects.
        density: Their share of all.
    """
    import numpy as np

    from totalreduce.sparse.accumulator import HostAccumulator
    from totalreduce.sparse.candidates import Workspace
    from totalreduce.sparse.session import BucketShape
    from totalreduce.testing.lockstep import run_exchanges

    begin = time.monotonic()
    method, num_elements = make_method(name, density), round(k / density)
    shape = BucketShape(((num_elements,),))
    sessions = [method.session(shape, rank, world_size) for rank in range(world_size)]
    workspace = Workspace()
    for session in sessions:
        session.share(workspace)
    generator = np.random.default_rng(_SEED)
    noise = generator.standard_normal(2 * num_elements, dtype=np.float32)
    signal = generator.standard_normal(num_elements, dtype=np.float32) * np.float32(_SIGNAL)
    gradient = np.empty(num_elements, np.float32)
    gradients, in_common = HostAccumulator([gradient]), HostAccumulator([signal])
    traffics: list[Traffic] = []
    steps = 2 if name == "oktopk" else 1  # the others' steps are all alike
    for step in range(steps):
        for session in sessions:
            turn = int(generator.integers(num_elements))
            np.copyto(gradient, noise[turn : turn + num_elements])
            session.accumulate(gradients, in_common, 1.0)
        present, last = np.ones(1, np.bool_), step == steps - 1
        ended: list[bool] = []
        exchanges = [_cut_short(session.exchange(present), ended, last=last) for session in sessions]
        traffics.append(run_exchanges(exchanges)[1])
        print_progress(
            f"growth: {name}, {world_size} ranks in lockstep: step {step + 1} of {steps}, "
            f"{time.monotonic() - begin:.0f} s"
        )
    first, final = traffics[0], traffics[-1]
    most = float(final.received.max())
    return GrowthFigure(
        name,
        world_size,
        SIMULATED,
        k,
        float(final.received.mean()),
        most,
        float(final.sent.mean()),
        float(final.sent.max()),
        most / k,
        None,
        float(first.received.mean()),
    )


def _cut_short(exchange: Generator[Any, Any, Update | None], ended: list[bool], *, last: bool) -> Exchange:
    """The same exchange, whose result is dropped.

    Rank 0 is asked first. When it has no more to send in the last step, no rank has: the others would only repeat its
    computation.
    """
    reply = None
    while not (last and ended):
        try:
            action = exchange.send(reply)
        except StopIteration:
            ended.append(True)
            return
        reply = yield action


def _lines(figures: list[GrowthFigure], density: float) -> Iterator[Line]:
    for method in dict.fromkeys(figure.method for figure in figures):
        for by in (PROCESSES, SIMULATED):
            own = [figure for figure in figures if (figure.method, figure.by) == (method, by)]
            if own:
                ranks = [figure.ranks for figure in own]
                yield Line(f"{method}, {by}", ranks, [figure.bytes_per_selected for figure in own], by == SIMULATED)
    every = sorted({figure.ranks for figure in figures})
    yield Line("dense, computed", every, [4 * bus_factor(size) / density for size in every], dashed=True)


def _table(density: float, figures: list[GrowthFigure]) -> Table[GrowthFigure]:
    return Table(
        f"payload of one step by number of ranks, density {density:g}",
        [
            ("method", lambda figure: figure.method),
            ("ranks", lambda figure: str(figure.ranks)),
            ("by", lambda figure: figure.by),
            ("selected", lambda figure: format_count(figure.k)),
            ("received", lambda figure: size(figure.received_bytes)),
            ("most received", lambda figure: size(figure.received_bytes_max)),
            ("sent", lambda figure: size(figure.sent_bytes)),
            ("most sent", lambda figure: size(figure.sent_bytes_max)),
            ("most received per selected", lambda figure: f"{figure.bytes_per_selected:.2f} B"),
            ("with headers", lambda figure: size(figure.wire_bytes)),
            ("first step", lambda figure: size(figure.first_bytes)),
        ],
        figures,
        f"Per rank. A dense ring receives {8 / density:.3g} B per selected element, but for a factor of (n - 1) / n.",
    )
