"""One rank of ``bench ps``: pushes and pulls, a table alone, and steps of bounded staleness."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

import totalreduce as tr
from totalreduce.bench import values as sums
from totalreduce.bench.context import Context
from totalreduce.bench.ps import DENSE, SPARSE, PsParameters, PsSamples
from totalreduce.bench.values import WrongResultError
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.server.layout import Layout
from totalreduce.server.serve import serve_group
from totalreduce.server.table import Table

_OPTIMIZERS = {
    "sum": tr.ps.Sum(),
    "sgd": tr.ps.SGD(0.1),
    "momentum": tr.ps.Momentum(0.1),
    "adagrad": tr.ps.Adagrad(0.1),
    "adam": tr.ps.Adam(),
    "ftrl": tr.ps.FTRL(),
}
#: The slow rank computes for so long in each step of bounded staleness, the others for a tenth.
_STEP_S = 0.004


def measure(context: Context, parameters: PsParameters) -> PsSamples:
    """Measure all contestants, in turns; or serve the ranks that do."""
    group = context.group
    if parameters.servers:
        whole, num_workers = context.another_group("servers"), context.world_size - parameters.servers
        if context.rank >= num_workers:
            serve_group(whole)
            return PsSamples({}, {}, {}, 0.0, {}, 0.0)
        group = whole.workers(num_workers)
    samples = _measure(context, group, parameters)
    if parameters.servers:
        group.close()
    return samples


def _measure(context: Context, group: Group, parameters: PsParameters) -> PsSamples:
    seconds: dict[str, list[float]] = {what: [] for what in (*SPARSE, *DENSE)}
    sent: dict[str, list[float]] = {what: [] for what in (*SPARSE, *DENSE)}
    kernels = _kernels(parameters, context.rounds) if context.rank == 0 else {}
    group.barrier()
    hit_rate = _sparse(context, group, parameters, seconds, sent)
    _dense(context, group, parameters, seconds, sent)
    staleness, waited_s = _steps(context, group, parameters)
    return PsSamples(
        seconds=seconds,
        bytes_sent={what: sum(samples) / len(samples) for what, samples in sent.items()},
        kernel_seconds=kernels,
        hit_rate=hit_rate,
        staleness=staleness,
        waited_s=waited_s,
    )


def _lists(parameters: PsParameters, seed: int) -> Iterator[Array]:
    """Yield ever new ascending lists of keys."""
    random = np.random.default_rng(seed)
    while True:
        found = np.unique(random.integers(0, parameters.num_keys, int(1.1 * parameters.num_listed) + 16))
        while len(found) < parameters.num_listed:
            found = np.unique(np.concatenate([found, random.integers(0, parameters.num_keys, parameters.num_listed)]))
        dropped = random.choice(len(found), len(found) - parameters.num_listed, replace=False)
        yield np.delete(found, dropped).astype(np.int32)


def _kernels(parameters: PsParameters, rounds: int) -> dict[str, list[float]]:
    """Time the operations of a table, in this process and on this core alone."""
    layout, optimizer = Layout(parameters.num_keys, [0]), _OPTIMIZERS[parameters.optimizer]
    table = Table(layout, 0, width=1, dtype=np.dtype(np.float32), optimizer=optimizer)
    lists, ones = _lists(parameters, 99), np.ones(parameters.num_listed, np.float32)
    dense, end = table.find_range(0, parameters.num_listed), parameters.num_listed
    taken: dict[str, list[float]] = {}
    for index in range(-1, rounds):
        keys = next(lists)
        rows = table.find_keys(keys)
        for what, run in (
            ("find keys", lambda keys=keys: table.find_keys(keys)),
            ("push listed rows", lambda rows=rows: table.push(rows, ones)),
            ("pull listed rows", lambda rows=rows: table.pull(rows)),
            ("push a range", lambda: table.push(dense, ones[:end])),
            ("pull a range", lambda: table.pull(dense)),
        ):
            begin = time.perf_counter()
            run()
            if index >= 0:
                taken.setdefault(what, []).append(time.perf_counter() - begin)
    return taken


def _timed(
    group: Group,
    client: tr.ps.Connection,
    call: Callable[[], tr.ps.Ticket],
    seconds: list[float],
    sent: list[float],
) -> None:
    before = client.statistics().bytes_sent
    group.barrier()
    begin = time.perf_counter()
    call().wait()
    seconds.append(time.perf_counter() - begin)
    group.barrier()
    sent.append(float(client.statistics().bytes_sent - before))


def _sparse(
    context: Context,
    group: Group,
    parameters: PsParameters,
    seconds: dict[str, list[float]],
    sent: dict[str, list[float]],
) -> float:
    """Push and pull listed keys; return the share of the requests of known keys that travelled as a digest."""
    optimizer = _OPTIMIZERS[parameters.optimizer]
    hits = requests = 0
    with tr.ps.connect(group, num_keys=parameters.num_keys, optimizer=optimizer) as client:
        lists, ones = _lists(parameters, context.rank), np.ones(parameters.num_listed, np.float32)
        out, known = np.zeros(parameters.num_listed, np.float32), next(lists)
        client.push(known, ones).wait()
        for index in range(context.rounds):
            for what in SPARSE:
                keys = known if "known" in what else next(lists)
                before = client.statistics()
                push = what.startswith("push")
                _timed(
                    *(group, client, lambda: client.push(keys, ones) if push else client.pull(keys, out)),  # noqa: B023
                    *(seconds[what], sent[what]),
                )
                after = client.statistics()
                if "known" in what:
                    hits += after.digests - before.digests
                    requests += after.digests + after.lists - before.digests - before.lists
                if not push and parameters.optimizer == "sum" and (keys is known) and out.min() < index + 2:
                    raise WrongResultError("a pull has not seen all pushes of this rank")
            context.report(f"ps: listed keys, round {index + 1} of {context.rounds}")
    return hits / requests


def _dense(
    context: Context,
    group: Group,
    parameters: PsParameters,
    seconds: dict[str, list[float]],
    sent: dict[str, list[float]],
) -> None:
    """Push and pull a range, in turns with an allreduce of as many elements."""
    count = parameters.num_dense
    reduced, pushed = torch.empty(count), torch.empty(count)
    sums.fill(pushed, rank=context.rank)
    with tr.ps.connect(group, num_keys=count) as client:
        out, times = torch.zeros(count), 0
        calls = {
            "push_range": lambda: client.push_range(0, count, pushed),
            "pull_range": lambda: client.pull_range(0, count, out),
            "push_pull_range": lambda: client.push_pull_range(0, count, pushed, out),
        }
        for index in range(context.rounds):
            sums.fill(reduced, rank=context.rank)
            before = group.statistics().bytes_sent
            group.barrier()
            begin = time.perf_counter()
            group.allreduce(reduced, name="bench.ps", schedule="ring").wait()
            seconds[DENSE[0]].append(time.perf_counter() - begin)
            sent[DENSE[0]].append(float(group.statistics().bytes_sent - before))
            group.barrier()  # nobody checks while another rank still works
            sums.check(reduced, world_size=group.world_size, what="allreduce")
            for what, call in calls.items():
                _timed(group, client, call, seconds[what], sent[what])
                times += "push" in what
            context.report(f"ps: a range, round {index + 1} of {context.rounds}")
        client.pull_range(0, count, out).wait()
        factor = times * group.world_size * (group.world_size + 1) // 2
        sums.check_multiple(out, factor, additions=times * group.world_size, what="push_range")


def _steps(context: Context, group: Group, parameters: PsParameters) -> tuple[dict[str, int], float]:
    """Take steps of bounded staleness, rank 0 slower than the others; return a histogram, and the seconds waited."""
    random = np.random.default_rng(context.rank)
    rule, out, ones = tr.ps.Bounded(parameters.bound), np.zeros(1000, np.float32), np.ones(1000, np.float32)
    with tr.ps.connect(group, num_keys=1000, consistency=rule) as client:
        for _ in range(parameters.steps):
            client.pull_range(0, 1000, out).wait()
            time.sleep(2 * random.random() * (_STEP_S if context.rank == 0 else _STEP_S / 10))
            client.push_range(0, 1000, ones)
            client.clock()
        statistics = client.statistics()
    if max(statistics.staleness) > parameters.bound:
        raise WrongResultError(f"a pull was {max(statistics.staleness)} steps ahead; the bound is {parameters.bound}")
    return {str(steps): count for steps, count in statistics.staleness.items()}, statistics.waiting_s
