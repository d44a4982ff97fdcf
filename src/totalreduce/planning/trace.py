"""``totalreduce bench trace``: record a trace of a real model for ``totalreduce bench replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from totalreduce.bench.command import benchmark
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.named_files import write_named
from totalreduce.planning.traces import Trace, as_document


@benchmark(
    "trace",
    "totalreduce bench trace --model gpt --out gpt.json",
    "totalreduce bench replay gpt.json --emulate-hosts 4 --against gloo",
    json=False,
)
def bench_trace(
    *,
    out: Annotated[Path, typer.Option(help="File to write.")],
    model: Annotated[str, typer.Option(help="mlp, gpt or cnn.")] = "gpt",
    steps: Annotated[int, typer.Option(help="Steps to take the median of.", min=1)] = 10,
) -> None:
    """Record when each layer's gradient is ready and when the next forward pass needs it."""
    # torch takes a second to import; the other commands' launchers do without it.
    from totalreduce.planning.recording import record_trace
    from totalreduce.planning.workloads import workload_by_name

    recorded = record_trace(workload_by_name(model), num_steps=steps)
    try:
        write_named(out, _format(recorded))
    except OSError as error:
        raise ConfigurationError(f"cannot write --out {out}: {error.strerror}") from error
    print(
        f"{out}: {len(recorded.layers)} layers, {format_bytes(recorded.num_bytes)}, "
        f"compute {recorded.compute_s * 1000:.1f} ms, of it forward {recorded.forward_s * 1000:.1f} ms"
    )


def _format(recorded: Trace) -> str:
    """One layer per line, so that a difference between two traces can be read."""
    document = as_document(recorded)
    layers = ",\n".join(f"  {json.dumps(layer)}" for layer in document.pop("layers"))
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    return f'{{\n{head},\n "layers": [\n{layers}\n ]\n}}\n'
