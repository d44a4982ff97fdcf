"""Trains with DistributedDataParallel over ``tr.attempts``; ranks kill themselves where --die says so."""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import totalreduce as tr


class Model(torch.nn.Module):
    """Its running statistics are those of the steps' numbers, so they are equal on all ranks, whichever are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
        self.statistics = torch.nn.BatchNorm1d(1, affine=False)

    def forward(self, rows: torch.Tensor, version: int) -> torch.Tensor:
        self.statistics(torch.tensor([[version - 1.0], [version + 1.0]]))
        return self.layers(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", type=int, default=0, help="wait for so many ranks before the second epoch")
    parser.add_argument("--die", default="", help="SEAT:VERSION:PLACE[,...], by the first incarnation of the seat")
    arguments = parser.parse_args()
    inputs = torch.randn(arguments.samples, 16, generator=torch.Generator().manual_seed(1))
    dataset = [(index, row, row.sum()) for index, row in enumerate(inputs)]
    torch.manual_seed(7)
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    sampler = tr.ElasticSampler(arguments.samples, 8, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = tr.State(model=module, optimizer=optimizer, sampler=sampler, scheduler=scheduler, losses=[])
    log = None
    for attempt in tr.attempts(state):
        with attempt:
            seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
            log = log or (arguments.folder / f"samples-{seat}-{incarnation}.jsonl").open("w", buffering=1)
            deaths = [death.split(":") for death in arguments.die.split(",") if death and incarnation == 0]
            mine = {(int(version), place) for where, version, place in deaths if int(where) == seat}

            def die_at(place: str, mine=mine) -> None:
                if (state.version, place) in mine:
                    os.kill(os.getpid(), signal.SIGKILL)

            model = DistributedDataParallel(module)
            for epoch in attempt.epochs(arguments.epochs):
                while epoch == 1 and dist.get_world_size() < arguments.hold:
                    attempt.commit()
                    sampler.load_state_dict({"epoch": 1, "cursor": 0})
                    time.sleep(0.1)
                for indices, rows, targets in attempt.batches(loader):
                    used = {"version": state.version, "epoch": epoch, "samples": indices.tolist()}
                    die_at("forward")
                    loss = torch.nn.functional.mse_loss(model(rows, state.version).squeeze(1), targets)
                    die_at("loss")
                    loss.backward()
                    time.sleep(arguments.pause)
                    die_at("backward")
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    die_at("updated")
                    attempt.commit()
                    log.write(json.dumps(used) + "\n")
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total)
                if len(state.losses) <= epoch:
                    state.losses = [*state.losses, total.item()]
            rank, world_size = dist.get_rank(), dist.get_world_size()
    digest = hashlib.sha256(json.dumps(state.digests(), sort_keys=True).encode()).hexdigest()
    final = {"digest": digest, "version": state.version, "losses": state.losses, "lr": scheduler.get_last_lr()}
    final |= {"world_size": world_size, "buffers": [buffer.tolist() for buffer in module.buffers()]}
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
