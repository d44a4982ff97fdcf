"""Predictions of ``totalreduce plan``: which ways of keeping in step are simulated, on how many ranks, and what limits.

A simulation has a bound on the messages of its ranks. What has more ranks is extrapolated: fewer ranks are simulated,
whose messages cost what those of all ranks would cost by the estimates of the schedule that is chosen for all ranks
(dense), or by the rounds of the sessions and the growth of their bytes (sparse methods and strategies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from totalreduce.bench.arithmetic import bus_factor
from totalreduce.bench.methods import make_sync
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.groups.probe import rounded
from totalreduce.planning.contestants import (
    make_strategy,
    name_of,
    parse_contestant,
    parse_settings,
    strategies,
)
from totalreduce.planning.fusion import optimizer_messages
from totalreduce.planning.machines import Calibration, Machines
from totalreduce.planning.simulation import Bucket, Dense, Local, Scaling, SimulatedSteps, Sparse, StepParts, simulate
from totalreduce.planning.traces import ELEMENT_BYTES, Layer, Trace
from totalreduce.planning.traffic import Begun, Script, record_method, record_strategy, script_totals
from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.sizes import BUCKET_BYTES, even_bucket_elements
from totalreduce.schedules import specs_of
from totalreduce.schedules.select import candidates
from totalreduce.schedules.spec import LinkModel, ScheduleSpec, Workload
from totalreduce.sparse.actions import Allreduce, Broadcast, Messages

if TYPE_CHECKING:
    from totalreduce.sparse.auto import Auto
    from totalreduce.sparse.session import BucketShape

__all__ = ["CENTRAL", "Planner", "Prediction", "check_contestant"]

#: All ranks send their gradients to one rank, which adds them: the way there, without additions and the way back.
CENTRAL = "central"
_DENSE = "dense"
#: ``tr.Auto``: the method, or dense exchange, that is chosen by the predicted times of a bucket.
_AUTO = "auto"
_NEEDS_SERVERS = "its workers push to servers, which take steps of their own, and a plan has steps of all ranks"
#: Strategies that cannot be predicted, and why.
_UNPREDICTED = {
    "strom": "the bytes that it sends depend on the values of gradients",
    **dict.fromkeys(("async", "stale_synchronous", "soft_sync", "quorum", "eager", "parameter_server"), _NEEDS_SERVERS),
}
#: PowerSGD multiplies and adds as long as so many selections take, of which a part is for each rank of the factors.
#: Measured on a matrix of 2,048 rows and columns: ranks 1, 4 and 8 take 2.7, 5.0 and 7.0 times as long as Ok-Topk.
_POWERSGD_EFFORT, _POWERSGD_EFFORT_OF_RANK = 2.2, 0.6
#: Sparse methods and strategies are recorded on so many ranks at most: a session's memory is that of a gradient.
_SESSIONS_MAX = 32
#: Copies of the parameters on a rank: parameters, gradients, buckets, and two of the optimizer.
_COPIES = 5
#: Messages that an allreduce of many bytes is cut into, beside those that its schedule counts.
_LANES = 2


@dataclass(frozen=True, slots=True)
class Prediction(StepParts):
    """One way of keeping in step on so many ranks."""

    contestant: str  #: Its name.
    ranks: int  #: The number of ranks.
    hosts: int  #: The number of hosts.
    simulated_ranks: int  #: How many ranks were simulated; fewer than ``ranks``: the rest is extrapolated.
    #: The schedules of the dense allreduces, that with the most bytes first; empty otherwise.
    schedules: tuple[str, ...]
    sent_bytes: float  #: Sent by the average rank in an average step, headers included.
    link_bytes: float  #: Through the busiest host's link, in its busier direction, in an average step.
    busy: dict[str, float]  #: The share of a step in which each resource is busy, by its name.
    limit: str  #: The resource that limits the step.
    next_limit: str  #: The resource that would limit it next.
    epoch_s: float | None = None  #: Seconds of an epoch; ``None`` if the number of samples is not known.
    epoch_cost: float | None = None  #: What an epoch costs; ``None`` if samples or costs are not known.
    chosen: str = ""  #: The way of keeping in step that ``auto`` chooses; empty for others.

    @property
    def is_extrapolated(self) -> bool:
        """Whether fewer ranks were simulated."""
        return self.simulated_ranks < self.ranks


def check_contestant(text: str, density: float) -> None:
    """Refuse a contestant that cannot be predicted. Raises ``ConfigurationError``."""
    _kind_of(text, density)


def _kind_of(text: str, density: float) -> Any:
    """Return the sparse method, ``Auto`` or the strategy of a contestant; ``None`` for dense."""
    from totalreduce.sparse.methods import METHODS

    name, words = name_of(text), _words(text)
    if name in (_DENSE, CENTRAL):
        schedules = [spec.name for spec in specs_of(OpKind.ALLREDUCE)]
        if len(words) > (name == _DENSE) or set(words) - set(schedules):
            raise ConfigurationError(f"dense has one schedule behind it, of {', '.join(schedules)}: {text!r}")
        return None
    by_name = strategies()
    if name in _UNPREDICTED:
        raise ConfigurationError(
            f"{name!r} cannot be predicted: {_UNPREDICTED[name]}. Measure it with `totalreduce bench strategies "
            f"--methods {name}`"
        )
    if name in by_name:
        return make_strategy(parse_contestant(text))
    known = dict.fromkeys((_DENSE, CENTRAL, _AUTO, *METHODS, *by_name))
    if name not in known:
        can = ", ".join(each for each in known if each not in _UNPREDICTED)
        raise ConfigurationError(f"{name!r} is unknown; plan knows {can}")
    try:
        return make_sync(name, density, **parse_settings(text, words))
    except TypeError as error:
        raise ConfigurationError(f"{text!r}: {error}") from error


def _words(text: str) -> list[str]:
    """Return what stands behind a contestant's name: the settings, or the schedule of ``dense:ring``."""
    return text.split(":")[1:]


@final
class Planner:
    """Predicts the steps of one model on one kind of machines.

    Args:
        trace: The model's step.
        machines: The hosts.
        calibration: The costs on processors.
        density: The share of the elements that sparse methods send.
        bucket_bytes: Up to how many bytes small layers are fused for dense exchanges.
        messages: About how many messages a simulation has at most.
        progress: Told about every simulation that takes long.
    """

    def __init__(
        self,
        trace: Trace,
        machines: Machines,
        calibration: Calibration,
        *,
        density: float = 0.01,
        bucket_bytes: int = BUCKET_BYTES,
        messages: int = 50_000,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._trace, self._machines, self._calibration = trace, machines, calibration
        self._density, self._bucket_bytes, self._messages = density, bucket_bytes, messages
        self._progress = progress
        self._scripts: dict[tuple[str, int, BucketShape], Script] = {}
        self._begun: dict[tuple[str, int], list[Begun]] = {}
        #: The elements of a sparse method's bucket; ``None``: as ``DistributedOptimizer`` chooses them.
        self._bucket_elements: int | None = None

    def with_trace(self, trace: Trace) -> Planner:
        """Return a planner for the same layers at other times, which shares what is recorded of exchanges."""
        planner = copy(self)
        planner._trace = trace
        return planner

    def check(self, text: str) -> None:
        """Refuse a contestant that cannot be predicted for this model.

        Raises:
            ConfigurationError: Its bytes follow from the shapes of parameters, which the model does not say; and as
                for ``check_contestant``.
        """
        kind = _kind_of(text, self._density)
        if getattr(kind, "whole", False) and not all(layer.shapes for layer in self._trace.layers):
            raise ConfigurationError(
                f"{text!r} cannot be predicted for {self._trace.model}: its bytes follow from the shapes of "
                "parameters, which this model does not say. Give `--script FILE.py:FUNCTION` in place of --parameters, "
                "or record the trace again, as `totalreduce bench trace --model gpt --out gpt.json`"
            )

    def predict(self, text: str, ranks: int) -> Prediction:
        """Predict the steps of one contestant. Raises ``ConfigurationError``."""
        self.check(text)
        if ranks % self._machines.ranks_per_host:
            raise ConfigurationError(f"{ranks} ranks do not fill hosts of {self._machines.ranks_per_host} ranks")
        kind = _kind_of(text, self._density)
        if name_of(text) == _AUTO:
            chosen = self._choice_of_auto(text, kind, ranks)
            return replace(self.predict(chosen, ranks), contestant=text, chosen=chosen)
        if kind is None:
            steps, scaling, schedules = self._dense(text, ranks)
        else:
            steps, scaling = self._recorded(text, kind, ranks)
            schedules = ()
        return self._prediction(text, ranks, steps, scaling, schedules)

    def _choice_of_auto(self, text: str, auto: Auto, ranks: int) -> str:
        """Return what ``tr.Auto`` chooses by the times in which one bucket is exchanged while nothing is computed.

        All buckets have about one size, so that one choice is that of all.
        """
        from totalreduce.sparse.auto import decide

        size = max(bucket.elements for bucket, _ in self._buckets(whole=False))
        moment_s = 1e-9
        trial = self.with_trace(Trace(f"a bucket of {size:,} elements", "auto", (Layer(0.0, moment_s, size),)))
        trial._bucket_elements = size
        trial._progress = lambda what: self._progress(f"{what} ({text} tries it with one bucket)")
        methods = {method.name: method for method in auto.candidates()}
        texts = {name: ":".join([name, *_words(text)]) for name in methods}
        dense_s = trial.predict(_DENSE, ranks).exchange_s
        sparse_s = [trial.predict(text, ranks).step_s for text in texts.values()]
        choice = decide(size, list(methods.values()), dense_s, sparse_s)
        return _DENSE if choice.method is None else texts[choice.method.name]

    def _dense(self, text: str, ranks: int) -> tuple[SimulatedSteps, Scaling, tuple[str, ...]]:
        if name_of(text) == CENTRAL:
            how = Dense(self._bucket_bytes, kind=OpKind.GATHER)
        else:
            how = Dense(self._bucket_bytes, next(iter(_words(text)), Algorithm.AUTO))
        elements = [layer.elements for layer in self._trace.layers]
        sizes = [(each.end - each.begin) * ELEMENT_BYTES for each in optimizer_messages(elements, self._bucket_bytes)]
        simulated = self._fitting(ranks, lambda size: _dense_messages(how, sizes, self._hosts(size), self._links))
        chosen = [_chosen(how, size, self._hosts(ranks), self._links) for size in sizes]
        bytes_of: dict[str, int] = {}
        for spec, size in zip(chosen, sizes, strict=True):
            bytes_of[spec.name] = bytes_of.get(spec.name, 0) + size
        schedules = tuple(sorted(bytes_of, key=lambda name: -bytes_of[name]))
        scaling = Scaling()
        if simulated < ranks:
            if how.kind is OpKind.ALLREDUCE:
                how = replace(how, schedule=schedules[0])  # that of all ranks, not the one that fewer would choose
            scaling = _dense_scaling(chosen, sizes, self._hosts(simulated), self._hosts(ranks), self._links)
        return self._simulate(text, how, ranks, simulated, scaling), scaling, schedules

    def _recorded(self, text: str, kind: Any, ranks: int) -> tuple[SimulatedSteps, Scaling]:
        """Predict a sparse method or a strategy."""
        simulated = self._fitting(ranks, lambda size: self._messages_of(text, kind, size), most=_SESSIONS_MAX)
        scaling = Scaling()
        if simulated < ranks:
            scripts, fewer = (self._scripts_of(text, kind, size) for size in (simulated, max(2, simulated // 2)))
            growth = _growth(_sent_blocks(scripts), _sent_blocks(fewer), simulated / max(2, simulated // 2))
            scaling = _recorded_scaling(scripts, growth, self._hosts(simulated), self._hosts(ranks), self._links)
        how = self._how(text, kind, simulated)
        return self._simulate(text, how, ranks, simulated, scaling), scaling

    def _how(self, text: str, kind: Any, ranks: int) -> Sparse | Local:
        from totalreduce.strategies.strategy import Strategy

        if isinstance(kind, Strategy):
            key, period = (text, ranks), getattr(kind, "period", 1)
            if key not in self._begun:
                sizes = [layer.elements for layer in self._trace.layers]
                self._begun[key] = record_strategy(kind, ranks, sizes, 2 * period)
            return Local(period, self._begun[key])
        buckets, effort = self._buckets(whole=kind.whole), _effort(kind)
        for _, shape in buckets:
            if (text, ranks, shape) not in self._scripts:
                self._scripts[text, ranks, shape] = record_method(kind, ranks, shape)
        return Sparse(
            [replace(bucket, effort=effort) for bucket, _ in buckets],
            [self._scripts[text, ranks, shape] for _, shape in buckets],
        )

    def _buckets(self, *, whole: bool) -> list[tuple[Bucket, BucketShape]]:
        return _sparse_buckets(self._trace, self._bucket_elements, whole=whole)

    def _scripts_of(self, text: str, kind: Any, ranks: int) -> list[Script]:
        """Return what all buckets, or all exchanges of two periods, send."""
        how = self._how(text, kind, ranks)
        return list(how.scripts) if isinstance(how, Sparse) else [each.script for each in how.begun]

    def _messages_of(self, text: str, kind: Any, ranks: int) -> float:
        """Return the messages of the busiest rank."""
        return sum(script_totals(script)[0] for script in self._scripts_of(text, kind, ranks))

    def _fitting(self, ranks: int, messages: Callable[[int], float], most: int = 1 << 30) -> int:
        """Return the number of ranks to simulate: all, or a power of two of hosts whose messages are not too many."""
        per_host = self._machines.ranks_per_host
        size = ranks
        while size > 2 * per_host and (size > most or size * messages(size) > self._messages):
            hosts = size // per_host
            size = per_host * (1 << (hosts.bit_length() - 1) if hosts & (hosts - 1) else hosts // 2)
        return size

    def _simulate(
        self, name: str, how: Dense | Sparse | Local, ranks: int, simulated: int, scaling: Scaling
    ) -> SimulatedSteps:
        extrapolated = f", {simulated} simulated" if simulated < ranks else ""
        self._progress(f"plan: {name}, {ranks} ranks{extrapolated}")
        machines = self._machines
        if machines.emulated and simulated < ranks:  # fewer ranks share fewer cores
            machines = replace(machines, cores=max(1, round(machines.cores * simulated / ranks)))
        return simulate(self._trace, how, simulated, machines, self._calibration, scaling)

    def _prediction(
        self, name: str, ranks: int, steps: SimulatedSteps, scaling: Scaling, schedules: tuple[str, ...]
    ) -> Prediction:
        machines, step_s = self._machines, steps.step_s
        busy = {
            "compute": steps.compute_s / step_s,
            "rate of a link": steps.card_s / step_s,
            "CPU for messages": steps.moved_s / step_s,
        }
        # What none of these explains is time in which messages are on their way.
        busy["latency"] = max(0.0, 1.0 - sum(busy.values()))
        if machines.memory_gib:
            elements = sum(layer.elements for layer in self._trace.layers)
            used = machines.ranks_per_host * _COPIES * elements * ELEMENT_BYTES
            busy["host memory"] = used / (machines.memory_gib * (1 << 30))
        order = sorted(busy, key=lambda each: -busy[each])
        if busy.get("host memory", 0.0) > 1.0:
            order = ["host memory", *(each for each in order if each != "host memory")]
        return Prediction(
            contestant=name,
            ranks=ranks,
            hosts=ranks // machines.ranks_per_host,
            simulated_ranks=steps.ranks,
            schedules=schedules,
            step_s=step_s,
            compute_s=steps.compute_s,
            exposed_s=steps.exposed_s,
            exchange_s=steps.exchange_s,
            hidden_share=steps.hidden_share,
            sent_bytes=steps.sent_bytes * scaling.num_bytes,
            link_bytes=steps.card_bytes * scaling.num_bytes,
            busy=busy,
            limit=order[0],
            next_limit=order[1],
        )

    def _hosts(self, ranks: int) -> tuple[int, ...]:
        return self._machines.hosts(ranks)

    @property
    def _links(self) -> LinkModel:
        """What the selector knows of the links."""
        return rounded(self._machines.links)


def with_epoch(prediction: Prediction, samples: int, batch: int, cost_per_host_hour: float) -> Prediction:
    """Return the prediction with the time and the cost of an epoch."""
    epoch_s = math.ceil(samples / (batch * prediction.ranks)) * prediction.step_s
    cost = epoch_s / 3600 * prediction.hosts * cost_per_host_hour if cost_per_host_hour else None
    return replace(prediction, epoch_s=epoch_s, epoch_cost=cost)


def _effort(method: Any) -> float:
    """Return how long a method computes before it sends, in times of a selection."""
    from totalreduce.sparse.powersgd import PowerSGD

    if isinstance(method, PowerSGD):
        return _POWERSGD_EFFORT + _POWERSGD_EFFORT_OF_RANK * method.rank
    return 1.0


def _sparse_buckets(trace: Trace, bucket_elements: int | None, *, whole: bool) -> list[tuple[Bucket, BucketShape]]:
    """Cut layers as ``DistributedOptimizer`` cuts parameters with a sparse method; with ``whole`` their parameters."""
    from totalreduce.pytorch.error_feedback import plan_parts
    from totalreduce.sparse.session import BucketShape

    parameters = [
        (layer, shape)
        for layer in trace.layers
        for shape in (map(_matrix, layer.shapes) if whole else [(layer.elements,)])
    ]
    specs = [
        ParameterSpec(str(index), (), shape, (), "float32", math.prod(shape), ELEMENT_BYTES)
        for index, (_, shape) in enumerate(parameters)
    ]
    elements = bucket_elements or even_bucket_elements(sum(spec.num_elements for spec in specs))
    parts = plan_parts(specs, elements, whole=whole)
    buckets = []
    for index, bucket in enumerate(parts):
        ready_s = max(parameters[part.parameter][0].ready_s for part in bucket)
        size = sum(part.end - part.begin for part in bucket)
        shape = BucketShape(tuple(specs[part.parameter].shape for part in bucket) if whole else ((size,),))
        buckets.append((Bucket(ready_s, size, len(parts) - 1 - index), shape))
    return buckets


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the matrix that a method compresses of a parameter with more than one dimension."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape),)


def _chosen(how: Dense, num_bytes: int, hosts: tuple[int, ...], links: LinkModel) -> ScheduleSpec:
    name = how.schedule
    if name == Algorithm.AUTO:
        estimates = candidates(how.kind, num_bytes, hosts, links)
        name = min(estimates, key=estimates.__getitem__)
    return next(spec for spec in specs_of(how.kind) if spec.name == name)


def _dense_messages(how: Dense, sizes: Sequence[int], hosts: tuple[int, ...], links: LinkModel) -> float:
    """Return about how many messages a rank sends in a step."""
    count = 0.0
    for size in sizes:
        workload = Workload(size, hosts, links)
        cost = _chosen(how, size, hosts, links).cost(workload)
        steps = 2 * math.log2(len(hosts)) if cost is None else cost.steps + cost.messages
        count += steps * _LANES * max(1, workload.lanes // _LANES)
    return count


def _dense_scaling(
    specs: Sequence[ScheduleSpec],
    sizes: Sequence[int],
    simulated: tuple[int, ...],
    hosts: tuple[int, ...],
    links: LinkModel,
) -> Scaling:
    """Return how much more the allreduces of all ranks cost than those of the simulated ones, by their estimates."""

    def factor(by: LinkModel) -> float:
        one = _dense_seconds(specs, sizes, simulated, by)
        return _dense_seconds(specs, sizes, hosts, by) / one if one else 1.0

    messages = factor(_latency_alone(links))
    return Scaling(latency=messages, messages=messages, num_bytes=factor(_bytes_alone(links)))


def _growth(now: float, then: float, between: float) -> float:
    """Return the exponent of a power law: 0 for what does not depend on the number of ranks, 1 for what is linear."""
    if between <= 1 or not now or not then:
        return 0.0
    return min(1.0, max(0.0, math.log(now / then) / math.log(between)))


def _sent_blocks(scripts: Sequence[Script]) -> float:
    """Return the bytes that the busiest rank sends, but for allreduces and broadcasts, whose sizes do not grow."""
    blocks = [[each for each in script if each.kind not in (Allreduce, Broadcast)] for script in scripts]
    return sum(script_totals(script)[1] for script in blocks)


def _recorded_scaling(
    scripts: Sequence[Script],
    growth: float,
    simulated: tuple[int, ...],
    hosts: tuple[int, ...],
    links: LinkModel,
) -> Scaling:
    """Return how much more recorded exchanges cost all ranks than the simulated ones.

    A rank exchanges blocks with every other rank at once. Rounds of messages between pairs are as many as the logarithm
    of the number of ranks. Broadcasts are trees, and allreduces have the schedule that the selector chooses.
    """

    def costs(of: tuple[int, ...]) -> tuple[float, float, float]:
        """Return latencies, messages and bytes."""
        size, more = len(of), math.log2(len(of)) / math.log2(len(simulated))
        latencies = messages = num_bytes = 0.0
        for script in scripts:
            for each in script:
                if each.kind is Allreduce:
                    [block] = each.sends[0]
                    spec = _chosen(Dense(0), block, of, links)
                    seconds = _dense_seconds([spec], [block], of, _latency_alone(links)) / links.latency_s
                    latencies, messages = latencies + seconds, messages + seconds
                    num_bytes += bus_factor(size) * block
                    continue
                if each.kind is Broadcast:
                    [block], depth = each.sends[each.root], math.log2(size)
                    latencies, messages, num_bytes = latencies + depth, messages + depth, num_bytes + depth * block
                    continue
                is_paired = each.kind is Messages
                latencies += more if is_paired else 1.0
                messages += more if is_paired else size - 1
        blocks = _sent_blocks(scripts)
        return latencies, messages, num_bytes + blocks * (size / len(simulated)) ** growth

    one, all_ranks = costs(simulated), costs(hosts)
    latency, messages, num_bytes = (
        (all_of / of_one if of_one else 1.0) for all_of, of_one in zip(all_ranks, one, strict=True)
    )
    return Scaling(latency=latency, messages=messages, num_bytes=num_bytes)


def _latency_alone(links: LinkModel) -> LinkModel:
    """Return links on which bytes take no time."""
    return replace(links, bytes_per_s=1e18, local_bytes_per_s=1e18)


def _bytes_alone(links: LinkModel) -> LinkModel:
    """Return links without latency."""
    return replace(links, latency_s=1e-15, local_latency_s=1e-15)


def _dense_seconds(
    specs: Sequence[ScheduleSpec], sizes: Sequence[int], hosts: tuple[int, ...], links: LinkModel
) -> float:
    """Return the sum of the schedules' own estimates."""
    pairs = zip(specs, sizes, strict=True)
    return sum(spec.estimate(Workload(size, hosts, links)) or 0.0 for spec, size in pairs)
