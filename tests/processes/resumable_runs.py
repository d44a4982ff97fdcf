"""Reads what the processes of ``examples/resumable.py`` have written and said."""

import json
import re
import time
from collections import defaultdict
from pathlib import Path

from totalreduce.launch.local import run_workers

EXAMPLES = Path(__file__).parents[2] / "examples"
RESUMABLE = EXAMPLES / "resumable.py"
#: A line that a rank prints at the end of its loop.
_REPORT = re.compile(
    r"rank (\d+) of (\d+) (stops at|has finished with) version (\d+), digest ([0-9a-f]+)", re.MULTILINE
)


def reports(text, word="has finished with"):
    """Return for each rank that has come to an end: rank, world size, version, digest; in the order of ranks."""
    found = [
        (int(rank), int(size), int(version), digest)
        for rank, size, verb, version, digest in _REPORT.findall(text)
        if verb == word
    ]
    return sorted(found)


def steps(folder):
    """Return the lines of all processes, by version."""
    lines = defaultdict(list)
    for path in (folder / "steps").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            if text.endswith("}"):
                line = json.loads(text)
                lines[line["version"]].append(line)
    return lines


def processes(folder):
    """Return the ids of the processes that have written lines, in the order of their ranks."""
    ranks = {}
    for path in (folder / "steps").glob("*.jsonl"):
        lines = path.read_text().splitlines()
        if lines:
            ranks[int(path.name.split("-")[1])] = json.loads(lines[0])["rank"]
    return sorted(ranks, key=ranks.__getitem__)


def world_sizes(folder):
    """Return the numbers of ranks that took the steps that count, in the order of the steps."""
    return [_last(lines)[0]["world_size"] for _, lines in sorted(steps(folder).items())]


def samples(folder):
    """Return, by epoch, the samples of the steps that count, sorted."""
    used = defaultdict(list)
    for lines in steps(folder).values():
        for line in _last(lines):
            used[line["epoch"]] += line["samples"]
    return {epoch: sorted(numbers) for epoch, numbers in used.items()}


def _last(lines):
    lines.sort(key=lambda line: line["at"])
    return lines[-lines[-1]["world_size"] :]


def wait_for(condition, timeout_s=100.0, what="it"):
    """Return what the condition returns, as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return value


def last_version(folder, world_size=None):
    """Return the last version that a process has come to (in a world of so many ranks); 0 if there is none."""
    return max(
        (
            version
            for version, lines in steps(folder).items()
            if world_size is None or any(line["world_size"] == world_size for line in lines)
        ),
        default=0,
    )


def undisturbed(python, folder, num_workers, *arguments):
    """Return version and digest at the end of a run in which nothing happens."""
    command = [str(python), str(RESUMABLE), str(folder), *arguments]
    result = run_workers(command, num_workers=num_workers, output="capture", timeout_s=100.0)
    assert result.exit_code == 0, result.errors
    ends = reports("\n".join(result.output))
    assert len({end[2:] for end in ends}) == 1
    return ends[0][2:]
