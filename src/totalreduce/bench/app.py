"""The application of ``totalreduce bench``: its commands. Workers do without this module."""

from __future__ import annotations

import typer

from totalreduce.bench.allreduce import bench_allreduce
from totalreduce.bench.codecs import bench_codecs
from totalreduce.bench.collectives import bench_collectives
from totalreduce.bench.coordination import bench_coordination
from totalreduce.bench.ddp import bench_ddp
from totalreduce.bench.faults import bench_faults
from totalreduce.bench.growth import bench_growth
from totalreduce.bench.kernels import bench_kernels
from totalreduce.bench.observe import bench_observe
from totalreduce.bench.plan_check import bench_plan
from totalreduce.bench.ps import bench_ps
from totalreduce.bench.ps_faults import bench_ps_faults
from totalreduce.bench.recovery import bench_recovery
from totalreduce.bench.replay import bench_replay
from totalreduce.bench.sparse import bench_sparse
from totalreduce.bench.step import bench_step
from totalreduce.bench.strategies import bench_strategies
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
    bench_codecs,
    bench_ps,
    bench_ps_faults,
    bench_growth,
    bench_plan,
    bench_train,
    bench_strategies,
    bench_ddp,
    bench_faults,
    bench_recovery,
    bench_observe,
    bench_versions,
    bench_trace,
    bench_report,
):
    _command.add_to(bench_app)
