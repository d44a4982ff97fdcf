"""``totalreduce bench``: every figure the project claims comes from one of these commands."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer

from totalreduce.bench.allreduce import bench_allreduce
from totalreduce.bench.collectives import bench_collectives
from totalreduce.bench.coordination import bench_coordination
from totalreduce.bench.ddp import bench_ddp
from totalreduce.bench.growth import bench_growth
from totalreduce.bench.kernels import bench_kernels
from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.bench.replay import bench_replay
from totalreduce.bench.sparse import bench_sparse
from totalreduce.bench.step import bench_step
from totalreduce.bench.summary import bench_report
from totalreduce.bench.trace import bench_trace
from totalreduce.bench.train import bench_train
from totalreduce.bench.urgent import bench_urgent
from totalreduce.bench.versions import bench_versions

__all__ = ["bench_app"]

bench_app = typer.Typer(
    name="bench",
    help="Measure. Peers take turns in one run; no figure is reported before its results are checked.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _register(name: str, command: Callable[..., None], *examples: str) -> None:
    """Add a command: a failed check ends it with exit code 1, examples end its --help."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except BenchmarkFailedError as error:
            print(f"no figures: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error

    # rich keeps every line break of a docstring, and of an epilog only double ones
    paragraphs = (command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    bench_app.command(name, help=text, epilog="\n\n".join(("[bold]Examples[/bold]", *examples)))(run)


_register(
    "allreduce",
    bench_allreduce,
    "totalreduce bench allreduce -n 2 --against gloo",
    "totalreduce bench allreduce --emulate-hosts 8 --sizes 4MiB,64MiB --against gloo --json out.json",
    "totalreduce bench allreduce -n 4 --against gloo,openmpi,mpich --mpirun mpich=/opt/mpich/bin/mpirun",
)
_register(
    "collectives",
    bench_collectives,
    "totalreduce bench collectives --emulate-hosts 8 --against gloo",
    "totalreduce bench collectives --emulate-hosts 2 --ranks-per-host 4 --kinds allreduce --schedule all",
    "totalreduce bench collectives -n 4 --sizes 4KiB,1MiB,16MiB --against gloo,openmpi",
)
_register(
    "coordination",
    bench_coordination,
    "totalreduce bench coordination -n 4",
    "totalreduce bench coordination -n 4 --horovod /opt/horovod/bin/python --json out.json",
)
_register(
    "urgent",
    bench_urgent,
    "totalreduce bench urgent --emulate-hosts 4",
    "totalreduce bench urgent -n 2 --bulk 64MiB --interval-ms 5 --against fifo",
)
_register(
    "replay",
    bench_replay,
    "totalreduce bench replay --emulate-hosts 4 --against gloo --against fifo",
    "totalreduce bench replay resnet50 --traces-dir traces --ratio 0.5 --emulate-hosts 4",
)
_register(
    "step",
    bench_step,
    "totalreduce bench step --against gloo --no-communication",
    "totalreduce bench step --model gpt --overlap iterations --emulate-hosts 4 --against gloo",
)
_register(
    "sparse",
    bench_sparse,
    "totalreduce bench sparse -n 4 --against gloo,fp16,powersgd-hook",
    "totalreduce bench sparse --emulate-hosts 4 --elements 25.6M --methods oktopk,topka --against gloo --plot out.png",
)
_register(
    "kernels",
    bench_kernels,
    "totalreduce bench kernels",
    "totalreduce bench kernels --elements 100M --density 0.001 --distribution student --json out.json",
)
_register(
    "growth",
    bench_growth,
    "totalreduce bench growth --plot growth.png",
    "totalreduce bench growth --processes 2,4 --lockstep 64,256 --json growth.json",
)
_register(
    "train",
    bench_train,
    "totalreduce bench train --models cnn --quick",
    "totalreduce bench train --methods oktopk,topka --json train.json --plot train.png",
)
_register(
    "ddp",
    bench_ddp,
    "totalreduce bench ddp -n 2",
    "totalreduce bench ddp --script torch_fsdp --model gpt --emulate-hosts 4 -- --batch 4",
)
_register(
    "trace",
    bench_trace,
    "totalreduce bench trace --model gpt --out gpt.json",
    "totalreduce bench replay gpt.json --emulate-hosts 4 --against gloo",
)
_register(
    "report",
    bench_report,
    "totalreduce bench report > figures.md",
    "totalreduce bench report --traces-dir traces --json figures.json",
)
_register(
    "versions",
    bench_versions,
    "totalreduce bench versions --old ../before/src --new src",
    "totalreduce bench versions --old before/bin/python --new after/bin/python --what allreduce --sizes 4KiB -n 2",
)
