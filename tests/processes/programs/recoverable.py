"""Train a small model in a job that outlives its ranks, and write what it did to a folder.

Files: ``final-RANK.json`` (digest of parameters and optimizer state, steps, epochs),
``samples-SEAT-INCARNATION.jsonl`` (one line for each step, after its vote: version, epoch, samples), and
``place-SEAT-INCARNATION`` (local rank, local world size, number of the host).
"""

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import totalreduce as tr

SYNCS = {
    "none": None,
    "oktopk": tr.OkTopk(density=0.1),
    "topka": tr.TopkA(density=0.1),
    "local_sgd": tr.LocalSGD(period=4),
    "post_local_sgd": tr.PostLocalSGD(start=6, then=tr.LocalSGD(period=4)),
    "local_sgd, int8": tr.LocalSGD(period=3, codec=tr.Int8(), optimizer_state="keep"),
    "diloco": tr.DiLoCo(period=4, fragments=2, codec=tr.Int8()),
    "diloco, overlap": tr.DiLoCo(period=4, fragments=2, overlap=3, codec=tr.Int8(stochastic=True)),
    "diloco, progress": tr.DiLoCo(period=4, fragments=2, overlap=3, mix="progress"),
    "slowmo": tr.SlowMo(period=3),
    "easgd": tr.EASGD(period=3),
    "gossip": tr.Gossip(period=2),
    "gossip, overlap": tr.Gossip(overlap=1),
    "gossip, long overlap": tr.Gossip(graph="random", period=2, overlap=3),
    "strom": tr.Strom(threshold=1e-3),
    "strom, overlap": tr.Strom(threshold=1e-3, overlap=2),
}


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 16, generator=generator)
        self.targets = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return index, self.inputs[index], self.targets[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--sync", default="none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--own-buffers", action="store_true", help="each rank keeps its own running statistics")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--average", action="store_true", help="keep a moving average of a parameter in a buffer")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument(
        "--die", default="", help="SEAT:VERSION:PLACE[:FILE][,...], by the first incarnation of the seat"
    )
    parser.add_argument("--hold", type=int, default=0, help="wait for so many ranks before the second epoch")
    parser.add_argument("--sizes", default="", help="EPOCH:RANKS[,...]: wait for so many ranks before this epoch")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        sys.path.append(str(Path(__file__).parents[2] / "helpers"))
        importlib.import_module("fake_accelerator").load()
    group = tr.init()
    seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
    place = [int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    (arguments.folder / f"place-{seat}-{incarnation}").write_text(json.dumps(place))
    deaths = [death.split(":") for death in arguments.die.split(",") if death]
    mine = {
        (int(version), place): file
        for where, version, place, *file in deaths
        if int(where) == seat and incarnation == 0
    }

    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    sizes = dict(map(int, size.split(":")) for size in arguments.sizes.split(",") if size)

    def die_at(place: str) -> None:
        if told_to_end and place == "forward":
            os._exit(128 + signal.SIGTERM)  # not between the vote and the line in the log
        if (state.version, place) in mine:
            for file in mine[state.version, place]:
                while not (arguments.folder / file).exists():
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    torch.manual_seed(seat)  # tr.recoverable must make the ranks equal
    hidden = 32
    layers = [torch.nn.Linear(16, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(hidden, 4)]
    if arguments.norm:
        layers.insert(1, torch.nn.BatchNorm1d(hidden))
    model = torch.nn.Sequential(*layers).to(arguments.device, getattr(torch, arguments.dtype))
    if arguments.average:
        model.register_buffer("average", torch.zeros(hidden, 16, device=arguments.device))
    kinds = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-1),
    }
    inner = kinds[arguments.optimizer]()
    sync = SYNCS[arguments.sync]
    feedback = tr.ErrorFeedback(elements_min=1) if arguments.sync in ("oktopk", "topka") else None
    buffers = None if arguments.own_buffers else "broadcast"
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, feedback=feedback, buffers=buffers)
    dataset = Numbers(arguments.samples)
    sampler = tr.ElasticSampler(dataset, arguments.batch, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=arguments.workers)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=5, gamma=0.9)
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, losses=[])
    log = (arguments.folder / f"samples-{seat}-{incarnation}.jsonl").open("w", buffering=1)
    snapshots = tr.Snapshots(arguments.snapshots, every=5, keep=100) if arguments.snapshots else None
    with tr.recoverable(state, replicas=arguments.replicas, snapshots=snapshots) as job:
        for epoch in job.epochs(arguments.epochs):
            while (epoch == 1 and group.world_size < arguments.hold) or group.world_size != sizes.get(
                epoch, group.world_size
            ):
                for _ in job.once(f"hold {state.version}"):
                    with job.step():
                        die_at("forward")
                        time.sleep(0.1)
            for indices, inputs, targets in job.batches(loader):
                version, samples = state.version, indices.tolist()
                with job.step():
                    die_at("forward")
                    loss = torch.nn.functional.cross_entropy(
                        model(inputs.to(model[0].weight)).float(), targets.to(arguments.device)
                    )
                    loss.backward()
                    time.sleep(arguments.pause)
                    die_at("backward")
                    optimizer.step()
                    if arguments.average:
                        model.average.lerp_(model[0].weight.detach(), 0.5)
                    die_at("updated")
                    scheduler.step()
                    used = {"version": version, "epoch": epoch, "samples": samples}
                    log.write(json.dumps(used) + "\n")
                if snapshots is not None:
                    snapshots.wait()  # so that none is left out because the one before is still being written
            for _ in job.once("evaluation"):
                with job.step():
                    die_at("once")
                    total = torch.tensor([float(group.rank)])
                    group.allreduce(total).wait()
                    state.losses = [*state.losses, total.item()]
    digest = hashlib.sha256(json.dumps(state.digests(), sort_keys=True).encode()).hexdigest()
    residuals = {
        name: hashlib.sha256(each.cpu().numpy().tobytes()).hexdigest() for name, each in optimizer.residuals.items()
    }
    result = {
        "digest": digest,
        "buffers": {name: each.tolist() for name, each in model.named_buffers()},
        "residuals": residuals,
        "version": state.version,
        "losses": state.losses,
        "lr": inner.param_groups[0]["lr"],
        "world_size": group.world_size,
        "epochs_of_job": job.epoch,
    }
    (arguments.folder / f"final-{group.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
