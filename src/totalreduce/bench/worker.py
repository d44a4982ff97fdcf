"""A benchmark's worker: ``python -m totalreduce.bench.worker CONFIG``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, get_type_hints

import torch

from totalreduce.bench.context import Context
from totalreduce.bench.launching import Setting
from totalreduce.bench.machine import describe_machine
from totalreduce.bench.records import from_document, to_document
from totalreduce.foundation.environment import read_world


def main(config_path: str) -> None:
    """Measure, write this rank's result, and leave.

    With a context no destructors run: torch's gloo sometimes aborts in them after all work is done.
    """
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    folder = Path(config["folder"])
    document: dict[str, Any]
    has_closed = True
    try:
        measure = importlib.import_module(config["worker"]).measure
        kinds = get_type_hints(measure)
        parameters = from_document(kinds["parameters"], config["parameters"])
        if "context" in kinds:
            context = Context(folder, from_document(Setting, config["setting"]))
            result, machine = measure(context, parameters), context.machine()
            context.close()
        else:
            has_closed = False  # a group of the benchmark's own is closed when the interpreter ends
            result, machine = measure(parameters), describe_machine(threads_per_rank=torch.get_num_threads())
        document = {"result": to_document(result), "environment": to_document(machine)}
    except Exception as error:  # whatever it is, the launcher must hear of it and end the run
        traceback.print_exc()
        document = {"error": f"{type(error).__name__}: {error}", "time": time.time()}
    path = folder / f"rank{read_world().rank}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    if has_closed or "error" in document:
        os._exit(1 if "error" in document else 0)


if __name__ == "__main__":
    main(sys.argv[1])
