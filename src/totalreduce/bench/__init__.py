"""``totalreduce bench``: every figure the project claims comes from one of these commands.

A benchmark is a function that ``command.benchmark`` makes a command. Its options are a record. The function
``launching.run_benchmark`` starts a worker for each rank and returns a record from each; figures are records, too. A
benchmark returns a ``report.Report``, which is printed and saved in one place. What a worker measures is in
``NAME_worker.py``.

An option that makes no sense is a ``ConfigurationError`` before anything starts (exit code 2); a rank that fails and a
result that is wrong are a ``BenchmarkFailedError`` (exit code 1), and there is no figure.
"""

from __future__ import annotations

import typer

from totalreduce.bench.allreduce import bench_allreduce
from totalreduce.bench.collectives import bench_collectives
from totalreduce.bench.coordination import bench_coordination
from totalreduce.bench.ddp import bench_ddp
from totalreduce.bench.growth import bench_growth
from totalreduce.bench.kernels import bench_kernels
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
for _command in (
    bench_allreduce,
    bench_collectives,
    bench_coordination,
    bench_urgent,
    bench_replay,
    bench_step,
    bench_sparse,
    bench_kernels,
    bench_growth,
    bench_train,
    bench_ddp,
    bench_versions,
    bench_trace,
    bench_report,
):
    _command.add_to(bench_app)
