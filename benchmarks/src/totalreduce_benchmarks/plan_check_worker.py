"""One rank of ``bench plan``: several models trained densely, by a sparse method, and alone, in one launch."""

from __future__ import annotations

import time

from totalreduce.bench.context import Context
from totalreduce.planning.workloads import Workload, workload_by_name
from totalreduce_benchmarks.plan_check import CheckParameters, CheckSamples
from totalreduce_benchmarks.step import StepParameters
from totalreduce_benchmarks.step_worker import Contestant, make_contestant

#: Ways of training, by their names in ``bench step``: without communication, densely, by the sparse method.
CONTESTANTS = ("alone", "dense", "totalreduce")


def measure(context: Context, parameters: CheckParameters) -> CheckSamples:
    """Train the models one after the other, each one by all contestants in turns."""
    found = {}
    for model in parameters.models:
        workload = workload_by_name(model)
        options = StepParameters(
            model=model, sync=parameters.sync, density=parameters.density, dense=True, no_communication=True
        )
        contestants = {name: make_contestant(context, name, workload, options) for name in CONTESTANTS}
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        counts: dict[str, int] = {}
        for index in range(context.rounds):
            for name, contestant in contestants.items():
                if name not in counts:
                    counts[name] = _count(context, contestant, workload, parameters)
                seconds[name] += _block(context, contestant, workload, counts[name])
            context.report(f"plan:   {model}: round {index + 1} of {context.rounds}")
        for contestant in contestants.values():
            contestant.close()
        found[model] = seconds
    return CheckSamples(found)


def _count(context: Context, contestant: Contestant, workload: Workload, parameters: CheckParameters) -> int:
    """Take first steps, which find thresholds and make memory; return how many steps of a block are timed.

    All ranks return the same number.
    """
    contestant.step(workload, context.rank)
    begin = time.monotonic()
    contestant.step(workload, context.rank)
    step_s = max(took for [took] in context.exchange([time.monotonic() - begin]))
    return max(parameters.steps_min, min(parameters.steps, int(parameters.block_s / step_s)))


def _block(context: Context, contestant: Contestant, workload: Workload, steps: int) -> list[float]:
    """Return the seconds of steps in a row, after one that is not timed because another contestant ran before it."""
    context.barrier()
    contestant.step(workload, context.rank)
    took = []
    for _ in range(steps):
        begin = time.monotonic()
        contestant.step(workload, context.rank)
        took.append(time.monotonic() - begin)
    return took
