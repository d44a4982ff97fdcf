"""The training job of ``totalreduce bench faults``: a small model, real steps, and a log of every block.

Run as ``python -m totalreduce_benchmarks.faults_worker CONFIG``; the file CONFIG has ``FaultsConfig`` as JSON. Rank r
writes ``final-r.json`` (a ``Final``) at the end, and each process ``blocks-SEAT-INCARNATION.jsonl``: a line before each
vote (``about``: version, epoch of the job, epoch of the data, samples), one after each block that took effect
(``done``: version, digest, time of day), and one after each change of the members (``change``: a ``job.Change``).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import totalreduce as tr
from totalreduce.foundation import environment
from totalreduce_benchmarks.faults_records import SAMPLES, FaultsConfig, Final, read_stop

_FEATURES, _HIDDEN, _CLASSES = 32, 64, 8


class Points(Dataset[tuple[int, torch.Tensor, int]]):
    """The data set: the index of a sample, its input and its target."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(SAMPLES, _FEATURES, generator=generator).to(dtype)
        self._targets = torch.randint(0, _CLASSES, (SAMPLES,), generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self._inputs[index], self._targets[index]


class Model(torch.nn.Module):
    """A small model with batch normalisation, dropout, and a parameter that makes its state larger."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, _HIDDEN),
            torch.nn.BatchNorm1d(_HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(_HIDDEN, _CLASSES),
        )
        self.ballast = torch.nn.Parameter(torch.zeros(max(1, elements // 256), 256))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # noqa: D102
        output: torch.Tensor = self.body(inputs)
        return output + self.ballast[0].sum() * 0.1


def make_optimizer(config: FaultsConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the job."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def digest_of(state: tr.State) -> str:
    """Return SHA-256 of parameters and optimizer state."""
    return sha256(json.dumps(state.digests(), sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Train until the file ``stop`` says so."""
    config = FaultsConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(config.folder)
    group = tr.init()
    seat = environment.read_world().rank
    incarnation = environment.read_settings().incarnation
    dtype: torch.dtype = getattr(torch, config.dtype)
    torch.manual_seed(seat)
    model = Model(config.elements).to(dtype)
    inner = make_optimizer(config, model)
    sync = tr.OkTopk(density=0.05) if config.sync == "oktopk" else None
    feedback = tr.ErrorFeedback(elements_min=1) if sync is not None else None
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, feedback=feedback)
    points = Points(dtype)
    sampler = tr.ElasticSampler(points, 4, seed=5)
    loader = DataLoader(points, batch_sampler=sampler)
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler, stop=0)
    times = [time.monotonic()]
    log = (folder / f"blocks-{seat}-{incarnation}.jsonl").open("a", buffering=1, encoding="utf-8")

    def write(**fields: Any) -> None:
        log.write(json.dumps({"seat": seat, **fields}) + "\n")

    (folder / f"pid-{seat}").write_text(str(os.getpid()), encoding="utf-8")
    snapshots = tr.Snapshots(folder / "snapshots", every=config.snapshot_every) if config.snapshot_every else None
    with tr.recoverable(state, replicas=config.replicas, snapshots=snapshots) as job:
        known_epoch = job.epoch
        for _ in job.epochs(1_000_000):
            if 0 < state.stop <= state.version:
                break
            for indices, inputs, targets in job.batches(loader):
                version = state.version
                with job.step():
                    loss = torch.nn.functional.cross_entropy(model(inputs).float(), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    time.sleep(config.step_ms / 1e3)
                    samples = indices.tolist()
                    write(about=version, job_epoch=job.epoch, data_epoch=sampler.epoch, samples=samples)
                    stop = torch.tensor([read_stop(folder) if group.rank == 0 else 0])
                    group.broadcast(stop, root=0)
                    optimizer.step()
                    state.stop = int(stop)  # type: ignore[attr-defined]  # a value of the program
                if job.epoch > known_epoch:
                    known_epoch = job.epoch
                    write(change=asdict(job.changes[-1]))
                if state.version > version:
                    times.append(time.monotonic())
                    write(done=state.version, digest=digest_of(state), at=time.time(), world_size=group.world_size)
                if 0 < state.stop <= state.version:
                    break
    steps = sorted(after - before for before, after in itertools.pairwise(times[1:]))
    step_s = steps[len(steps) // 2] if steps else 0.0
    buffers = sha256(json.dumps([each.tolist() for each in model.buffers()]).encode()).hexdigest()
    final = Final(state.version, digest_of(state), buffers, group.world_size, step_s)
    (folder / f"final-{group.rank}.json").write_text(json.dumps(asdict(final)), encoding="utf-8")


if __name__ == "__main__":
    main()
