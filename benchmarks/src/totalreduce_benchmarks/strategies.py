"""``totalreduce bench strategies``: models trained by strategies, on slow links and with a slow rank."""

from __future__ import annotations

from totalreduce.bench.command import benchmark
from totalreduce.bench.launching import Setting
from totalreduce.bench.report import Report
from totalreduce_benchmarks.training import MODELS, TrainPlan, report_trainings

#: Each strategy, and each rule of the parameter server; with settings that suit a training of 96 steps. The first four
#: are those of ``--quick``.
_METHODS = (
    "local_sgd",
    "diloco:period=24:fragments=4:overlap=10:codec=int8:outer_lr=1.0:outer_momentum=0.0",
    "quorum:n=3:grace_s=0.01",
    "parameter_server:consistency=bounded:tau=4:optimizer=worker",
    *("post_local_sgd", "slowmo", "easgd", "gossip:overlap=1", "async_gossip", "strom:threshold=7e-4"),
    "diloco:period=16",
    *("async:rate=0.25", "stale_synchronous:rate=0.25", "soft_sync:n=2:rate=0.5"),
    "eager:mode=majority",
    "parameter_server:consistency=sequential:codec=int8",
    "parameter_server:consistency=eventual:optimizer=worker",
)


@benchmark(
    "strategies",
    "totalreduce bench strategies --models cnn --quick",
    "totalreduce bench strategies --resume strategies.jsonl --json strategies.json --plot strategies.png",
    "totalreduce bench strategies --models cnn --rates none --slow 1 --first-seed 100 --methods slowmo:momentum=0.2",
    "totalreduce bench strategies --models logistic --keys 10000000 --methods local_sgd,async --rates 100mbit",
    shared=("ranks", "emulate_hosts"),
    plot=True,
    emulate_hosts=4,
    models=",".join(MODELS),
    optimizers="sgd,adamw",
    methods=",".join(_METHODS),
    against="dense,powersgd,post-local",
    steps=96,
    looks=12,
    rates="100mbit,1gbit,10mbit+40ms",
    slow=3.0,
    slow_step_ms=100.0,
)
def bench_strategies(setting: Setting, parameters: TrainPlan) -> Report:
    """Train four models by strategies and by DDP: the loss over steps, bytes and time, and with a slow rank.

    All contestants take the same number of steps with the same batches and learning rates.
    Needs --emulate-hosts, that is root; takes about two hours as it is.
    """
    return report_trainings("strategies", setting, parameters)
