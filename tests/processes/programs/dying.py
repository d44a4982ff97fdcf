"""Run a program of ``tr.replayed`` that kills itself in some places, and write what it ends with to a folder.

``dying.py FOLDER DEATHS PROGRAM ARGUMENTS…``. DEATHS is a list of ``SEAT:INCARNATION:VERSION:PLACE``. The places:
``call N`` and ``result N`` (before and after the N-th call since the checkpoint), ``exchange`` (before copies of the
local values are sent), ``vote`` (before the vote of a checkpoint), ``committed`` (after it), ``parcels`` (before a new
group's ranks send each other what they lack), ``level`` (after that).
"""

import functools
import hashlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from totalreduce.recovery import replayed
from totalreduce.recovery.replicas import Replicas

ReplayedJob = replayed.ReplayedJob
FOLDER, DEATHS, *sys.argv = sys.argv[1:]
SEAT, INCARNATION = os.environ["RANK"], os.environ["TOTALREDUCE_INCARNATION"]
jobs = []


def die_at(place: str) -> None:
    if f"{SEAT}:{INCARNATION}:{jobs[-1].version}:{place}" in DEATHS.split(","):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def around(owner, name, before="", after=""):
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments, **options):
        position = jobs[-1]._log.position if jobs else 0
        if before:
            die_at(before.replace("#", str(position)))
        result = inner(*arguments, **options)
        if after:
            die_at(after.replace("#", str(position)))
        return result

    setattr(owner, name, outer)


class Job(ReplayedJob):
    def __enter__(self):
        jobs.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        saved = self.state.save()
        own = None if saved.own is None else hashlib.sha256(saved.own.numpy()).hexdigest()
        final = {"version": self.version, "shared": saved.describe(), "own": own}
        if error[0] is None:
            (Path(FOLDER) / f"final-{SEAT}.json").write_text(json.dumps(final))


around(ReplayedJob, "_call", "call #", "result #")
around(ReplayedJob, "_committed", "", "committed")
around(Replicas, "exchange", "exchange", "vote")
around(replayed, "_deliver", "parcels", "level")
replayed.ReplayedJob = Job
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
