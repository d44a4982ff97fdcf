"""One process of ``totalreduce bench ps-faults``: a worker that counts what it pushes, or a server."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

import totalreduce as tr
from totalreduce.foundation import environment
from totalreduce.kernels.arrays import Array
from totalreduce_benchmarks.faults_records import read_stop
from totalreduce_benchmarks.ps_faults_records import PsFaultsConfig

#: By the name of a rule.
RULES: Final[dict[str, tr.ps.Consistency]] = {
    "sequential": tr.ps.Sequential(),
    "bounded": tr.ps.Bounded(2),
    "eventual": tr.ps.Eventual(),
}


def keys_of(config: PsFaultsConfig, rank: int, step: int) -> Array:
    """Return the keys that a worker pushes in a step."""
    return np.flatnonzero(np.random.default_rng([rank, step]).random(config.keys) < 0.05)


def main() -> None:
    """Run one process."""
    config = PsFaultsConfig(**json.loads(Path(sys.argv[1]).read_text()))
    folder, group = Path(config.folder), tr.init()
    rank, num_ranks = group.rank, group.world_size
    client = tr.ps.connect(
        group,
        num_keys=config.keys,
        width=config.num_workers,
        consistency=RULES[config.rule],
        workers=config.num_workers,
        servers=range(num_ranks - config.num_servers, num_ranks),
        replicas=config.replicas,
    )
    if rank < config.num_workers:
        work(config, folder, rank, client)
    client.close(24 * 3600.0)
    group.close()


def work(config: PsFaultsConfig, folder: Path, rank: int, client: tr.ps.Connection) -> None:
    """Push ones to random keys, and compare what is pulled with what was pushed."""
    incarnation = environment.read_settings().incarnation
    counts, wrong = np.zeros(config.keys, np.float32), 0
    out, done = np.empty((config.keys, config.num_workers), np.float32), 0
    with (folder / f"blocks-{rank}-{incarnation}.jsonl").open("w", buffering=1) as log:
        for step in client.steps(sys.maxsize):
            while done < step:  # what the process in whose place this one is has pushed
                counts[keys_of(config, rank, done)] += 1
                done += 1
            stop = read_stop(folder)
            if stop and step >= stop:
                break
            begin = time.time()
            client.pull_range(0, config.keys, out).wait(120.0)
            pulled = time.time()
            # A process that runs a step again may see what was pushed in it before.
            seen, mine = out[:, rank], keys_of(config, rank, step)
            allowed = counts.copy()
            allowed[mine] += 1
            wrong += int(((seen != counts) & (seen != allowed)).sum())
            update = np.zeros((len(mine), config.num_workers), np.float32)
            update[:, rank] = 1
            client.push(mine, update).wait(120.0)
            pushed = time.time()
            time.sleep(config.step_ms / 1e3)
            # "at" is when the step began. The injector takes a step that began after a decision on members for the sign
            # that all servers have the state. Its end says less: its answers may have come before the decision.
            log.write(json.dumps({"done": step + 1, "at": begin, "pulled": pulled, "pushed": pushed}) + "\n")
    client.pull_range(0, config.keys, out).wait(120.0)
    wrong += int((out[:, rank] != counts).sum())
    (folder / f"final-{rank}.json").write_text(json.dumps({"wrong": wrong, "steps": done}))


if __name__ == "__main__":
    main()
