"""Trains a model that FSDP2 shards, over ``tr.attempts(copies=...)``; ranks kill themselves where --die says so."""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import totalreduce as tr


class Model(torch.nn.Module):
    """A parameter with fewer rows than ranks, one that is not divided evenly, a buffer of each rank, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 33)
        self.norm = torch.nn.BatchNorm1d(33)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(33, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(rows)))))


def shard(model: torch.nn.Module, replicates: int) -> None:
    size = dist.get_world_size()
    if replicates > 1:
        mesh = init_device_mesh("cpu", (replicates, size // replicates), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def digest_of(state: tr.State) -> str:
    """The whole parameters and the whole state of the optimizer, and this rank's buffers. Collective."""
    found = {}
    for name, tensor in state.model.state_dict().items():
        found[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    for index, entry in state.optimizer.state_dict()["state"].items():
        for key, tensor in entry.items():
            found[f"{index} {key}"] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    words = {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in found.items()}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--replicates", type=int, default=1, help="the first dimension of the mesh, for HSDP")
    parser.add_argument("--add", action="store_true", help="put a part of the model into a second group in version 4")
    parser.add_argument("--hold", type=int, default=0, help="wait for so many ranks before the second epoch")
    parser.add_argument("--late", type=float, default=0.0, help="the seconds for which a second process waits")
    parser.add_argument("--snapshots", type=Path)
    parser.add_argument("--snapshots-every", type=int, default=5)
    parser.add_argument(
        "--die",
        default="",
        help="SEAT:VERSION:PLACE[:OTHER SEAT][,...], by the first incarnation; the other dies first",
    )
    arguments = parser.parse_args()
    inputs = torch.randn(arguments.samples, 16, generator=torch.Generator().manual_seed(1))
    dataset = [(index, row, row.sum()) for index, row in enumerate(inputs)]
    copies = tr.ShardCopies(every=arguments.every, replicas=arguments.replicas)
    snapshots = arguments.snapshots and tr.Snapshots(arguments.snapshots, every=arguments.snapshots_every, keep=99)
    log = None
    if int(os.environ.get("TOTALREDUCE_INCARNATION", "0")):
        time.sleep(arguments.late)
    for attempt in tr.attempts(copies=copies, snapshots=snapshots):
        with attempt:
            seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
            log = log or (arguments.folder / f"samples-{seat}-{incarnation}.jsonl").open("w", buffering=1)
            deaths = [death.split(":") for death in arguments.die.split(",") if death and incarnation == 0]
            mine = {(int(death[1]), death[2]): death[3:] for death in deaths if int(death[0]) == seat}
            (arguments.folder / f"pid-{seat}").write_text(str(os.getpid()))

            model = Model()
            shard(model, arguments.replicates)
            optimizer = torch.optim.AdamW((model.last if arguments.add else model).parameters(), lr=1e-2)
            sampler = tr.ElasticSampler(arguments.samples, 8, seed=3)
            state = tr.State(model=model, optimizer=optimizer, sampler=sampler, losses=[])
            loader = DataLoader(dataset, batch_sampler=sampler)

            def die_at(place: str, mine=mine, state=state) -> None:
                if (state.version, place) in mine:
                    for other in mine[state.version, place]:
                        os.kill(int((arguments.folder / f"pid-{other}").read_text()), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

            attempt.synchronize(state)
            weight = model.first.weight
            assert (2 * weight.detach()).device_mesh is weight.device_mesh  # and not that of a group that has ended
            log.write(json.dumps({"begins": state.version, "world_size": dist.get_world_size()}) + "\n")
            begun_at = torch.tensor([time.time()], dtype=torch.float64)
            dist.broadcast(begun_at, src=0)
            for epoch in attempt.epochs(arguments.epochs):
                while epoch == 1 and dist.get_world_size() < arguments.hold:
                    attempt.commit()
                    sampler.load_state_dict({"epoch": 1, "cursor": 0})
                    time.sleep(0.1)
                for indices, rows, targets in attempt.batches(loader):
                    if arguments.add and state.version >= 4 and len(optimizer.param_groups) == 1:
                        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.05})
                    used = {"version": state.version, "epoch": epoch, "samples": indices.tolist()}
                    used["attempt"] = begun_at.item()
                    die_at("forward")
                    loss = torch.nn.functional.mse_loss(model(rows).squeeze(1), targets)
                    loss.backward()
                    die_at("backward")
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    model.zero_grad()
                    die_at("updated")
                    log.write(json.dumps(used) + "\n")  # before commit, which ends the attempt if processes join
                    attempt.commit()
                    if snapshots:
                        snapshots.wait()
                    die_at("committed")
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total)
                if len(state.losses) <= epoch:
                    state.losses = [*state.losses, total.item()]
            digest = digest_of(state)
            rank, world_size = dist.get_rank(), dist.get_world_size()
    final = {"digest": digest, "version": state.version, "losses": state.losses, "world_size": world_size}
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps(final))
    part_bytes = sum(
        tensor.to_local().nbytes
        for entry in [dict(model.named_parameters()), *optimizer.state.values()]
        for tensor in entry.values()
        if hasattr(tensor, "to_local")
    )
    memory = {"copies": copies.num_bytes, "part": part_bytes, "num_copied": copies.num_copied, "counts": copies.version}
    (arguments.folder / f"memory-{rank}.json").write_text(json.dumps(memory))


if __name__ == "__main__":
    main()
