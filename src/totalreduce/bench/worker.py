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

from totalreduce.bench.context import Context
from totalreduce.bench.launching import Setting
from totalreduce.bench.records import from_document, to_document
from totalreduce.foundation.environment import read_world


def main(config_path: str) -> None:
    """Measure, write this rank's result, and leave without running destructors.

    torch's gloo sometimes aborts in its destructors after all work is done; by then the result is on disk.
    """
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    folder = Path(config["folder"])
    document: dict[str, Any]
    try:
        context = Context(folder, from_document(Setting, config["setting"]))
        measure = importlib.import_module(config["worker"]).measure
        parameters = from_document(get_type_hints(measure)["parameters"], config["parameters"])
        document = {"result": to_document(measure(context, parameters)), "environment": to_document(context.machine())}
        context.close()
    except Exception as error:  # whatever it is, the launcher must hear of it and end the run
        traceback.print_exc()
        document = {"error": f"{type(error).__name__}: {error}", "time": time.time()}
    path = folder / f"rank{read_world().rank}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in document else 0)


if __name__ == "__main__":
    main(sys.argv[1])
