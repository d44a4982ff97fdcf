"""``totalreduce bench kernels``: the time of selecting, coding and adding on one core, beside a copy and torch.topk.

Everything runs in this process, in one thread; NumPy, Numba and torch are imported when the command is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from totalreduce.bench.arithmetic import format_count, parse_count
from totalreduce.bench.command import benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.methods import DISTRIBUTIONS, DistributionOption, make_method
from totalreduce.bench.report import Report, Table, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.foundation.errors import ConfigurationError

FUSED = "select + residual"
COPY = "plain copy"
TOPK = "torch.topk"
#: So many ranks' selections are added up.
_LISTS = 4
#: float32 that are read before each kernel of elements: more than caches hold.
_ELSEWHERE = 1 << 26


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something to time.

    Attributes:
        name: Of the work.
        items: Elements that it reads, or selected ones.
        selected: Whether ``items`` are selected ones.
        item_bytes: Bytes to be read and written for each; ``None`` where that depends on the data.
        prepare: Untimed, before each call.
        run: The call.
    """

    name: str
    items: int
    selected: bool
    item_bytes: float | None
    prepare: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One kernel.

    Attributes:
        kernel: Its name.
        items: See ``Kernel``.
        selected: See ``Kernel``.
        ns_per_item: Nanoseconds for each.
        bytes_per_s: Traffic; ``None`` where it depends on the data.
        over_copy: Its time divided by that of the copy, round by round; ``None`` for those of selected elements.
        topk_over: torch.topk's time divided by its own, round by round: above 1, it is faster.
    """

    kernel: str
    items: int
    selected: bool
    ns_per_item: Estimate
    bytes_per_s: float | None
    over_copy: Estimate | None
    topk_over: Estimate | None


@benchmark(
    "kernels",
    "totalreduce bench kernels",
    "totalreduce bench kernels --elements 100M --density 0.001 --distribution student --json out.json",
)
def bench_kernels(
    *,
    elements: Annotated[str, typer.Option(help="Elements of the gradient, float32, as 25M.")] = "25M",
    density: Annotated[float, typer.Option(help="Share of the elements that is selected, from 0 to 1.")] = 0.01,
    distribution: DistributionOption = "normal",
    rounds: Annotated[int, typer.Option(help="How often each kernel is measured.")] = 11,
) -> Report:
    """Time the kernels of the sparse methods on one core, in turns with a plain copy of as many bytes and torch.topk.

    The fused pass adds the residual and lists large elements: it reads two float32 for each element and writes one, 12
    bytes. So does the copy, which copies one and a half.

    Coding and adding are timed for each selected element.
    """
    count = parse_count(elements)
    make_method("topka", density)  # says whether the density makes sense
    if distribution not in DISTRIBUTIONS:
        raise ConfigurationError(f"--distribution is {', '.join(DISTRIBUTIONS)}, not {distribution!r}")
    if rounds < 1:
        raise ConfigurationError(f"--rounds must be at least 1, not {rounds}")
    k = round(density * count)
    if not 1 <= k < count:
        raise ConfigurationError(f"a density of {density:g} selects {k} of {count} elements; some must be, and not all")
    seconds, kernels = measure(count, k, distribution, rounds)
    figures = summarise(kernels, seconds)
    what = f"{format_count(count)} float32 ({distribution}), {format_count(k)} selected, one core"
    setting = {"elements": count, "k": k, "distribution": distribution, "rounds": rounds}
    return Report(_tables(what, rounds, figures), setting, describe_machine(), figures, seconds)


def measure(num_elements: int, k: int, distribution: str, rounds: int) -> tuple[dict[str, list[float]], list[Kernel]]:
    """Seconds of every call by kernel, one call of each in every round; and the kernels."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernels = _kernels(num_elements, k, distribution)
        seconds: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
        for index in range(-1, rounds):
            for kernel in kernels:
                kernel.prepare()
                begin = time.perf_counter()
                kernel.run()
                elapsed = time.perf_counter() - begin
                if index >= 0:
                    seconds[kernel.name].append(elapsed)
            print_progress(f"kernels: round {index + 1} of {rounds}" if index >= 0 else "kernels: compiled")
    finally:
        torch.set_num_threads(threads)
    return seconds, kernels


def summarise(kernels: Sequence[Kernel], seconds: dict[str, list[float]]) -> list[KernelFigure]:
    """From samples to figures. Pure."""
    figures = []
    for kernel in kernels:
        own = seconds[kernel.name]
        typical = estimate(own).median
        compared = not kernel.selected
        figures.append(
            KernelFigure(
                kernel.name,
                kernel.items,
                kernel.selected,
                estimate([1e9 * sample / kernel.items for sample in own]),
                None if kernel.item_bytes is None else kernel.item_bytes * kernel.items / typical,
                ratio_estimate(own, seconds[COPY]) if compared and kernel.name != COPY else None,
                ratio_estimate(seconds[TOPK], own) if compared and kernel.name != TOPK else None,
            )
        )
    return figures


def _kernels(num_elements: int, k: int, distribution: str) -> list[Kernel]:
    import numpy as np
    import torch

    from totalreduce.bench.gradients import GradientSource
    from totalreduce.codecs import blocks
    from totalreduce.kernels import merging, selection
    from totalreduce.sparse.accumulator import HostAccumulator
    from totalreduce.sparse.selector import Selector

    source = GradientSource(num_elements, distribution, 0)
    fresh, residual, gradient = (np.zeros(num_elements, np.float32) for _ in range(3))
    source.write(residual, 0)
    lists = []
    for number in range(_LISTS):
        source.write(fresh, number + 1)
        np.copyto(gradient, fresh)
        found = Selector().accumulate(HostAccumulator([gradient]), HostAccumulator([residual]), 1.0, k)
        lists.append((found.indices.copy(), blocks.rounded(found.values, "bfloat16")))
    indices, values = lists[-1]
    count = indices.size
    packed = blocks.pack(indices, values, 0, num_elements, "bfloat16")

    # As the step before would have set it: a quarter more than k are listed.
    bound = max(1, selection.kth_magnitude([gradient], min(num_elements, k + k // 4)).bits)
    threshold = np.array(bound, np.int32).view(np.float32)
    listed_index, listed_value = np.empty(3 * k + 8192, np.int32), np.empty(3 * k + 8192, np.float32)
    selector = Selector()
    original = np.concatenate([fresh, residual[: num_elements // 2]])
    copied = np.empty_like(original)

    elsewhere = np.ones(_ELSEWHERE, np.float32)  # written: zeros would be one page

    def refill() -> None:
        np.copyto(gradient, fresh)
        elsewhere.max()  # so that before each kernel the caches have none of its data

    def fused() -> object:
        return selection.accumulate(gradient, residual, np.float32(1.0), bound, 0, listed_index, listed_value, 0)

    def exact() -> object:
        return selector.accumulate(HostAccumulator([gradient]), HostAccumulator([residual]), 1.0, k)

    def unfused() -> object:
        np.add(gradient, residual, out=gradient)
        chosen = np.flatnonzero(np.abs(gradient) >= threshold)
        return chosen.astype(np.int32), gradient[chosen]

    def topk() -> object:
        return torch.topk(torch.from_numpy(gradient).abs(), k, sorted=False)

    def nothing() -> None:
        """There is nothing to prepare."""

    whole, each, n = 12.0, count, num_elements
    joined = blocks.unpack_all(lists, [(0, n)] * _LISTS)
    return [
        Kernel(FUSED, n, False, whole, refill, fused),
        Kernel("exactly k (all of a selection)", n, False, None, refill, exact),
        Kernel(COPY, n, False, whole, refill, lambda: np.copyto(copied, original)),
        Kernel("the same by NumPy, unfused", n, False, None, refill, unfused),
        Kernel(TOPK, n, False, None, refill, topk),
        Kernel("round to bfloat16", each, True, None, nothing, lambda: blocks.rounded(values, "bfloat16")),
        Kernel("pack", each, True, None, nothing, lambda: blocks.pack(indices, values, 0, n, "bfloat16")),
        Kernel("unpack", each, True, None, nothing, lambda: blocks.unpack(packed, 0, n)),
        Kernel(
            f"add {_LISTS} lists up",
            sum(own.size for own, _ in lists),
            True,
            None,
            nothing,
            lambda: merging.add_up(*joined),
        ),
        Kernel("find in another list", each, True, None, nothing, lambda: merging.found_in(indices, lists[0][0])),
    ]


def _tables(what: str, rounds: int, figures: Sequence[KernelFigure]) -> list[Table[KernelFigure]]:
    def nanoseconds(figure: KernelFigure) -> str:
        own = figure.ns_per_item
        return f"{own.median:.3g} \\[{own.low:.3g}, {own.high:.3g}]"

    return [
        Table(
            f"selection, {what}",
            [
                ("kernel", lambda figure: figure.kernel),
                ("ns per element (95 %)", nanoseconds),
                ("GB/s", lambda figure: "" if figure.bytes_per_s is None else f"{figure.bytes_per_s / 1e9:.1f}"),
                ("time / copy", lambda figure: times(figure.over_copy)),
                ("faster than torch.topk", lambda figure: times(figure.topk_over)),
            ],
            [figure for figure in figures if not figure.selected],
            f"Median of {rounds} rounds. GB/s: reads and writes. torch.topk: of magnitudes, without the residual.",
        ),
        Table(
            "what is selected",
            [
                ("kernel", lambda figure: figure.kernel),
                ("elements", lambda figure: format_count(figure.items)),
                ("ns per selected element (95 %)", nanoseconds),
            ],
            [figure for figure in figures if figure.selected],
        ),
    ]
