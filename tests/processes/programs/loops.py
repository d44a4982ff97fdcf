"""Kinds of training loops in a job that outlives its ranks: ``loops.py FOLDER LOOP [--die ...]``.

Files: ``final-RANK.json`` and ``samples-SEAT-INCARNATION.jsonl``, as those of ``recoverable.py``.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import totalreduce as tr

NUM_SAMPLES = 150


class Records(IterableDataset):
    """A data set without a length, which deals its samples out to the workers of a ``DataLoader`` if it can."""

    def __iter__(self):
        worker = get_worker_info()
        yield from range(NUM_SAMPLES) if worker is None else range(worker.id, NUM_SAMPLES, worker.num_workers)


class Loop:
    """One process of the job: the model, its data, and how it dies."""

    def __init__(self, arguments, group) -> None:
        self.kind, self.group = arguments.loop, group
        self.seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
        deaths = [death.split(":") for death in arguments.die.split(",") if death and incarnation == 0]
        self._mine = {(int(version), place) for where, version, place in deaths if int(where) == self.seat}
        self.log = (arguments.folder / f"samples-{self.seat}-{incarnation}.jsonl").open("w", buffering=1)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
        self.targets = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
        torch.manual_seed(self.seat)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)
        )
        self.state: tr.State

    def die_at(self, place: str) -> None:
        if (self.state.version, place) in self._mine:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def collate(self, indices):
        chosen = torch.tensor(indices)
        return chosen, self.inputs[chosen], self.targets[chosen]

    def wrapped(self, inner, model=None, **options):
        return tr.DistributedOptimizer(inner, self.model if model is None else model, group=self.group, **options)

    def note(self, indices, **more) -> None:
        """Note the samples of a step after its vote."""
        used = {"version": self.state.version, "epoch": self.state.sampler.epoch, "samples": indices.tolist(), **more}
        self.log.write(json.dumps(used) + "\n")

    def data(self):
        """Return the sampler or stream, and the loader."""
        if self.kind.startswith("stream"):
            stream = tr.ElasticStream(Records(), 8, collate=self.collate)
            return stream, DataLoader(stream, batch_size=None, num_workers=2 * ("workers" in self.kind))
        sampler = tr.ElasticSampler(NUM_SAMPLES, 8, seed=3, drop_last=self.kind == "compiled")
        return sampler, DataLoader(range(NUM_SAMPLES), batch_sampler=sampler, collate_fn=self.collate)

    def train(self) -> None:
        """Run the kinds with one optimizer."""
        options = {
            "iterations": {"overlap": "iterations"},
            "passes": {"backward_passes_per_step": 2},
        }.get(self.kind, {})
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        optimizer = self.wrapped(inner, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        sampler, loader = self.data()
        model = torch.compile(self.model) if self.kind == "compiled" else self.model
        self.state = tr.State(
            model=self.model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, scaler=scaler, skipped=0
        )
        with tr.recoverable(self.state) as job:
            for _ in job.epochs(2):
                for indices, inputs, targets in job.batches(loader):
                    with job.step():
                        self.die_at("forward")
                        if self.kind in ("accumulation", "passes", "no_sync"):
                            halves = list(zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True))
                            for number, (some, their) in enumerate(halves):
                                quiet = self.kind == "no_sync" and number == 0
                                with optimizer.no_sync() if quiet else nullcontext():
                                    (cross_entropy(model(some), their) / 2).backward()
                                self.die_at("between")
                        else:
                            loss = cross_entropy(model(inputs), targets)
                            if self.kind == "scaler":
                                loss = loss * (float("inf") if self.state.version % 5 == 2 else 1.0)
                                loss = scaler.scale(loss)
                            loss.backward()
                        self.die_at("backward")
                        if self.kind == "clipping":
                            self.die_at("synchronized")
                            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                        if self.kind == "scaler":
                            before = scaler.get_scale()
                            scaler.unscale_(optimizer)
                            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                            scaler.step(optimizer)
                            scaler.update()
                            self.state.skipped += scaler.get_scale() < before
                        else:
                            optimizer.step()
                        scheduler.step()
                        self.die_at("updated")
                        self.note(indices)

    def play(self) -> None:
        """Train a generator and a discriminator, one after the other with each batch."""
        generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        discriminator = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.model = torch.nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        sparse = {"sync": tr.OkTopk(density=0.2), "feedback": tr.ErrorFeedback(elements_min=1)}
        options = sparse if self.kind == "parts sparse" else {}
        optimizers = {
            "discriminator": self.wrapped(
                torch.optim.SGD(discriminator.parameters(), lr=0.05), discriminator, **options
            ),
            "generator": self.wrapped(torch.optim.Adam(generator.parameters(), lr=1e-2), generator, name="generator"),
        }
        sampler, loader = self.data()
        self.state = tr.State(model=self.model, optimizer=optimizers, sampler=sampler, losses={})
        with tr.recoverable(self.state) as job:
            for _ in job.epochs(2):
                for part, (indices, real, _) in job.parts(loader, ("discriminator", "generator")):
                    with job.step():
                        self.die_at("forward")
                        fake = generator(torch.randn(len(real), 4))
                        # The generator's backward pass gives the discriminator gradients, too: they must not count.
                        loss = -discriminator(fake).mean()
                        if part == "discriminator":
                            loss = discriminator(fake.detach()).mean() - discriminator(real).mean()
                        loss.backward()
                        self.die_at("backward")
                        optimizers[part].step()
                        self.die_at("updated")
                        self.note(indices, part=part)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("loop")
    parser.add_argument("--die", default="", help="SEAT:VERSION:PLACE[,...], by the first incarnation of the seat")
    arguments = parser.parse_args()
    group = tr.init()
    loop = Loop(arguments, group)
    if arguments.loop.startswith("parts"):
        loop.play()
    else:
        loop.train()
    state = loop.state
    residuals = {
        f"{name} {key}": hashlib.sha256(each.numpy().tobytes()).hexdigest()
        for name, optimizer in state.optimizers.items()
        for key, each in optimizer.residuals.items()
    }
    final = {
        "digest": hashlib.sha256(json.dumps(state.digests(), sort_keys=True).encode()).hexdigest(),
        "version": state.version,
        "residuals": residuals,
        "lr": [group["lr"] for each in state.optimizers.values() for group in each.param_groups],
    }
    if "scaler" in state.__dict__:
        final |= {"scale": state.scaler.get_scale(), "skipped": int(state.skipped)}
    (arguments.folder / f"final-{group.rank}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
