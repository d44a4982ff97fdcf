"""Entry of every benchmark worker: ``python -m totalreduce.bench.worker CONFIG``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol, cast

from totalreduce.bench.context import Context, open_context
from totalreduce.foundation.environment import read_world

__all__ = ["main"]

_MODULES = {
    "allreduce": "totalreduce.bench.allreduce_worker",
    "collectives": "totalreduce.bench.collectives_worker",
    "coordination": "totalreduce.bench.coordination_worker",
    "urgent": "totalreduce.bench.urgent_worker",
    "replay": "totalreduce.bench.replay_worker",
    "sparse": "totalreduce.bench.sparse_worker",
    "step": "totalreduce.bench.step_worker",
}


class _Worker(Protocol):
    """A worker module: one function that measures and checks on this rank."""

    def measure(self, context: Context, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank measured, ready for JSON."""
        ...


def main(config_path: str) -> None:
    """Measure, write this rank's result, and leave without running destructors.

    torch's gloo sometimes aborts in its destructors after all work is done; by then the result is on disk.
    """
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    rank = read_world().rank
    document: dict[str, Any]
    try:
        context = open_context(config)
        module = cast("_Worker", importlib.import_module(_MODULES[config["kind"]]))
        document = {"result": module.measure(context, config["parameters"])}
        document["result"]["environment"] = context.environment()
        context.close()
    except Exception as error:  # whatever it is, the launcher must hear of it and end the run
        traceback.print_exc()
        document = {"error": f"{type(error).__name__}: {error}", "time": time.time()}
    _write(Path(config["folder"]) / f"rank{rank}.json", document)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in document else 0)


def _write(path: Path, document: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main(sys.argv[1])
