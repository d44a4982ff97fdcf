"""Train in a job that goes on after it was stopped: by a time limit, by preemption, or because processes were lost.

sbatch -N 2 --ntasks-per-node 4 examples/slurm_requeue.sbatch examples/resumable.py /shared/run-7
torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
    --rdzv-id run-7 examples/resumable.py /shared/run-7
totalreduce run -n 4 --on-loss replace examples/resumable.py run-7

Start it again with the same folder, and it goes on from the last version there. The exit code is 75 if a signal has
ended it early, else 0. With --ddp the gradients are DistributedDataParallel's, else DistributedOptimizer's.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from real_data import VOCABULARY, next_characters
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import totalreduce as tr

LENGTH = 16


class Log:
    """One file per process, with one line for each step that this rank begins.

    Steps that a loss has interrupted, and those after the last version on disk, are taken again: of the lines of one
    version the last ones count, as many as there were ranks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"steps-{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1)

    def step(self, state: tr.State, epoch: int, indices: Tensor, group: tr.Group) -> None:
        """Write the line of a step, before its gradients are exchanged, so that no loss comes in between."""
        step = {"version": state.version, "epoch": epoch, "samples": indices.tolist(), "at": time.time()}
        step |= {"rank": group.rank, "world_size": group.world_size}
        self._file.write(json.dumps(step) + "\n")


def train(parts: dict[str, Any], options: argparse.Namespace, snapshots: tr.Snapshots, log: Log) -> bool:
    """Train with the library's own optimizer; return whether a signal has ended the job early."""
    model, loader, group = parts["model"], parts.pop("loader"), tr.init()
    optimizer = parts["optimizer"] = tr.DistributedOptimizer(parts["optimizer"], model, group=group)
    state = tr.State(**parts)
    with tr.recoverable(state, snapshots=snapshots) as job:
        for epoch in job.epochs(options.epochs):
            for indices, inputs, targets in job.batches(loader):
                with job.step():
                    log.step(state, epoch, indices, group)
                    cross_entropy(model(inputs), targets).backward()
                    time.sleep(options.step_ms / 1000)
                    optimizer.step()
        report(state, job.preempted, group.rank, group.world_size)
    return job.preempted


def train_ddp(parts: dict[str, Any], options: argparse.Namespace, snapshots: tr.Snapshots, log: Log) -> bool:
    """Train with DistributedDataParallel; return whether a signal has ended the job early."""
    loader, optimizer, preempted = parts.pop("loader"), parts["optimizer"], False
    state = tr.State(**parts)
    for attempt in tr.attempts(state, snapshots=snapshots):
        with attempt:
            model = DistributedDataParallel(state.model)
            for epoch in attempt.epochs(options.epochs):
                for indices, inputs, targets in attempt.batches(loader):
                    log.step(state, epoch, indices, attempt.group)
                    cross_entropy(model(inputs), targets).backward()
                    time.sleep(options.step_ms / 1000)
                    optimizer.step()
                    optimizer.zero_grad()
                    attempt.commit()
            report(state, attempt.preempted, attempt.group.rank, attempt.group.world_size)
        preempted = attempt.preempted
    return preempted


def report(state: tr.State, preempted: bool, rank: int, world_size: int) -> None:
    """Print the version, and a number that differs if one bit of parameters or optimizer state does."""
    digest = hashlib.sha256(json.dumps(state.digests(), sort_keys=True).encode()).hexdigest()[:16]
    word = "stops at" if preempted else "has finished with"
    print(f"rank {rank} of {world_size} {word} version {state.version}, digest {digest}", flush=True)


def main() -> int:
    """Train, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where versions of the state are written, on all machines the same")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--every", type=int, default=10, help="steps between versions on disk")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a step takes so much longer")
    options = parser.parse_args()

    text, following = next_characters(LENGTH)
    places = torch.linspace(0, len(following) - 1, options.samples).long()
    data = TensorDataset(torch.arange(options.samples), text[places], following[places])
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(8 * LENGTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), hidden, nn.Linear(64, VOCABULARY))
    sampler = tr.ElasticSampler(data, options.batch, seed=2)
    parts = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "sampler": sampler,
        "loader": DataLoader(data, batch_sampler=sampler),
    }
    snapshots = tr.Snapshots(
        options.folder / "versions", every=options.every, on_signal=(signal.SIGUSR1, signal.SIGTERM)
    )
    run = train_ddp if options.ddp else train
    return os.EX_TEMPFAIL if run(parts, options, snapshots, Log(options.folder / "steps")) else 0


if __name__ == "__main__":
    sys.exit(main())
