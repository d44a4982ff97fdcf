"""One of the processes with which ``bench plan`` records traces: as many at a time as there are cores."""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.bench.context import Context
from totalreduce.planning.recording import record_trace
from totalreduce.planning.traces import Trace
from totalreduce.planning.workloads import workload_by_name

__all__ = ["TraceParameters", "TraceSamples", "measure"]


@dataclass(frozen=True, slots=True)
class TraceParameters:
    """What is recorded.

    Attributes:
        models: Names of models.
        steps: Steps of which the median counts.
    """

    models: list[str]
    steps: int


@dataclass(frozen=True, slots=True)
class TraceSamples:
    """The traces of one process, in the order of the models."""

    traces: list[Trace]


def measure(context: Context, parameters: TraceParameters) -> TraceSamples:
    """Record every model while the other processes record it, too."""
    traces = []
    for model in parameters.models:
        context.barrier()
        traces.append(record_trace(workload_by_name(model), num_steps=parameters.steps))
    return TraceSamples(traces)
