"""``totalreduce bench codecs``: the time of encoding and decoding on one core, beside a copy, and sizes of codes.

Everything runs in this process, in one thread; NumPy, Numba and torch are imported when the command is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from totalreduce.bench.arithmetic import format_count, parse_count
from totalreduce.bench.command import benchmark
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.methods import DISTRIBUTIONS, DistributionOption
from totalreduce.bench.report import Report, Table, print_progress, times
from totalreduce.bench.sampling import Estimate, estimate, ratio_estimate
from totalreduce.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from totalreduce.codecs.codec import Codec

_COPY = "copy"


@dataclass(frozen=True, slots=True)
class CodecFigure:
    """One codec."""

    codec: str  #: Its settings.
    bits_per_value: float  #: The size of the code.
    error: float  #: The root mean square of what the code does not express, divided by that of the values.
    encode_ns: Estimate  #: Nanoseconds for each value, with the residual.
    decode_ns: Estimate  #: Nanoseconds for each value.
    encode_speed: Estimate  #: The time of a copy of the values divided by that of encoding, round by round.
    decode_speed: Estimate  #: The same for decoding.


@benchmark("codecs", "totalreduce bench codecs", "totalreduce bench codecs --elements 100M --json out.json")
def bench_codecs(
    *,
    elements: Annotated[str, typer.Option(help="The number of values, float32, as 25M.")] = "16M",
    distribution: DistributionOption = "normal",
    rounds: Annotated[int, typer.Option(help="How often each codec is measured.")] = 11,
) -> Report:
    """Time the codecs on one core, in turns with a plain copy of the values.

    Encoding leaves in the values what the code does not express: it reads them, and writes them and the code.
    """
    count = parse_count(elements)
    if distribution not in DISTRIBUTIONS:
        raise ConfigurationError(f"--distribution is {', '.join(DISTRIBUTIONS)}, not {distribution!r}")
    if rounds < 1 or count < 1:
        raise ConfigurationError(f"--rounds and --elements must be at least 1, not {rounds} and {elements}")
    seconds, sizes, errors = measure(count, distribution, rounds)
    figures = summarise(count, seconds, sizes, errors)
    setting = {"elements": count, "distribution": distribution, "rounds": rounds}
    title = f"codecs, {format_count(count)} float32 ({distribution}), one core"
    return Report([_table(title, rounds, figures)], setting, describe_machine(), figures, seconds)


def measure(
    count: int, distribution: str, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int], dict[str, float]]:
    """Return the seconds of every call, and for each codec the size of its code in bytes and its relative error."""
    import numpy as np
    import torch

    from totalreduce.bench.gradients import GradientSource

    values, work, out = (np.zeros(count, np.float32) for _ in range(3))
    GradientSource(count, distribution, 0).write(values, 0)
    seconds: dict[str, list[float]] = {_COPY: []}
    sizes: dict[str, int] = {}
    errors: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index in range(-1, rounds):
            taken = {_COPY: _timed(lambda: np.copyto(out, values))}
            for codec in _codecs(float(np.abs(values).std())):
                name, room = str(codec), np.zeros(codec.bytes_max(count), np.uint8)
                np.copyto(work, values)
                begin = time.perf_counter()
                sizes[name] = codec.encode(work, room, keeps=True)
                taken[f"{name} encode"] = time.perf_counter() - begin
                errors[name] = float(np.linalg.norm(work) / np.linalg.norm(values))
                code = room[: sizes[name]]
                begin = time.perf_counter()
                codec.decode(code, out)
                taken[f"{name} decode"] = time.perf_counter() - begin
            if index >= 0:
                for what, sample in taken.items():
                    seconds.setdefault(what, []).append(sample)
            print_progress(f"codecs: round {index + 1} of {rounds}" if index >= 0 else "codecs: compiled")
    finally:
        torch.set_num_threads(threads)
    return seconds, sizes, errors


def summarise(
    count: int, seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int], errors: Mapping[str, float]
) -> list[CodecFigure]:
    """Return the figures of samples. Pure."""
    copy = seconds[_COPY]
    return [
        CodecFigure(
            name,
            8 * size / count,
            errors[name],
            estimate([1e9 * sample / count for sample in seconds[f"{name} encode"]]),
            estimate([1e9 * sample / count for sample in seconds[f"{name} decode"]]),
            ratio_estimate(copy, seconds[f"{name} encode"]),
            ratio_estimate(copy, seconds[f"{name} decode"]),
        )
        for name, size in sizes.items()
    ]


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _codecs(deviation: float) -> list[Codec]:
    from totalreduce.codecs.half import Half
    from totalreduce.codecs.int4 import Int4
    from totalreduce.codecs.int8 import Int8
    from totalreduce.codecs.onebit import OneBit
    from totalreduce.codecs.plain import Plain
    from totalreduce.codecs.ternary import Ternary
    from totalreduce.codecs.threshold import Threshold
    from totalreduce.codecs.topk import Topk

    return [
        Plain(),
        Half(),
        Half(dtype="float16"),
        Int8(),
        Int8(stochastic=True),
        Int4(),
        Int4(stochastic=True),
        Ternary(),
        OneBit(),
        Threshold(threshold=round(5 * deviation, 3) or 1e-3),
        Topk(density=0.01),
    ]


def _table(title: str, rounds: int, figures: Sequence[CodecFigure]) -> Table[CodecFigure]:
    return Table(
        title,
        [
            ("codec", lambda figure: figure.codec),
            ("bits per value", lambda figure: f"{figure.bits_per_value:.3g}"),
            ("error", lambda figure: f"{figure.error:.3g}"),
            ("encode, ns", lambda figure: f"{figure.encode_ns.median:.3g}"),
            ("speed / copy", lambda figure: times(figure.encode_speed)),
            ("decode, ns", lambda figure: f"{figure.decode_ns.median:.3g}"),
            ("speed / copy", lambda figure: times(figure.decode_speed)),
        ],
        figures,
        f"Median of {rounds} rounds. Error: root mean square of what is not expressed, relative to the values.",
    )
