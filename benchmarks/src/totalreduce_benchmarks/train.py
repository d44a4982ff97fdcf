"""``totalreduce bench train``: models trained to the end by sparse methods and DDP; how long that takes."""

from __future__ import annotations

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Setting
from totalreduce.bench.report import Report
from totalreduce_benchmarks.training import TrainPlan, report_trainings


@benchmark(
    "train",
    "totalreduce bench train --models cnn --quick",
    "totalreduce bench train --methods oktopk,topka --json train.json --plot train.png",
    "totalreduce bench train --models cnn --methods coded:codec=int8 --against dense,fp16 --rates 10mbit",
    shared=("ranks", "emulate_hosts"),
    plot=True,
    emulate_hosts=4,
)
def bench_train(setting: Setting, parameters: TrainPlan) -> Report:
    """Train the models of examples/sparse_training.py: what is learnt, and how long that takes on slow links.

    All contestants take the same number of steps with the same batches and learning rates.
    Needs --emulate-hosts, that is root; takes hours as it is.
    """
    return report_trainings("train", setting, parameters)
