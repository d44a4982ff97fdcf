"""Runs a training program of the tests under ``--on-loss``, and reads what its processes wrote."""

import json
import sys
from pathlib import Path

from totalreduce.launch.local import run_workers
from totalreduce.launch.restarts import RecoveryOptions

PROGRAM = Path(__file__).parent / "programs" / "recoverable.py"


class Run:
    """One run of the program: its result, its events, and the files that the processes wrote."""

    def __init__(
        self,
        folder: Path,
        num_workers: int,
        *arguments: str,
        on_event=None,
        program=PROGRAM,
        num_servers=0,
        hosts=None,
        emulate=None,
        python=None,
        **options,
    ):
        self.folder, self.events = folder, []
        folder.mkdir()

        def follow(event):
            self.events.append(event)
            if on_event is not None:
                on_event(event)

        self.result = run_workers(
            [str(python or sys.executable), str(program), str(folder), *arguments],
            num_workers=num_workers,
            num_servers=num_servers,
            where=hosts or emulate,
            output="capture",
            timeout_s=300.0,
            recovery=RecoveryOptions(on_event=follow, **options) if options else None,
        )
        self.finals = [json.loads(path.read_text()) for path in sorted(folder.glob("final-*.json"))]

    def epochs(self):
        return [event for event in self.events if event["event"] == "epoch"]

    def blocks(self):
        """Return by epoch and version the samples of all ranks in the steps that took effect."""
        found = {}
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            for line in path.read_text().splitlines():
                block = json.loads(line)
                found.setdefault((block["epoch"], block["version"]), []).extend(block["samples"])
        return found
