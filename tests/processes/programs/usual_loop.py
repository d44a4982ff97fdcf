"""One loop as its author wrote it for DistributedDataParallel: ``usual_loop.py FOLDER DOOR [--die PLACE]``.

It has everything at once: gradient accumulation in ``no_sync()``, a GradScaler whose gradients overflow in one step,
clipping in the usual place, a scheduler, a sampler, batch normalisation, and an average of the weights that is swapped
in for an evaluation. Each rank writes ``final-RANK.json``. ``--die``: rank 1 kills itself there, once.
"""

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import totalreduce as tr

STEPS, BATCH = 12, 8
#: The steps in which ranks evaluate before they train, the step with an overflow, and that in which rank 1 dies.
EVALUATES, OVERFLOWS, DIES = (4, 8), 5, 8


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12)
        self.last = torch.nn.Linear(12, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Task:
    """The model, its data, and the parts of a step, which do not depend on the door."""

    def __init__(self, door: str, die: str) -> None:
        self.seat, self.die = int(os.environ["RANK"]), die
        self.is_first_life = os.environ.get("TOTALREDUCE_INCARNATION", "0") == "0"
        # With DDP, and so with its counterpart, all ranks begin with what rank 0 has.
        torch.manual_seed(self.seat if door in ("ddp", "optimizer") else 0)
        self.model = Net().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(192, 6, dtype=torch.float64, generator=generator)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.errors: list[float] = []

    def make_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS, cycle_momentum=False)

    def die_at(self, place: str, step: int) -> None:
        if (self.seat, step, place, self.is_first_life) == (1, DIES, self.die, True):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def batches(self, step: int, rank: int, world_size: int):
        """The two halves of this rank's batch, as a DistributedSampler deals them out."""
        sampler = DistributedSampler(range(len(self.inputs)), world_size, rank, shuffle=True, seed=2)
        sampler.set_epoch(step)
        chosen = self.inputs[list(sampler)[:BATCH]] * (1 + rank)
        return chosen.split(BATCH // 2)

    def loss(self, model, inputs):
        return (model(inputs) - inputs[:, :2].square()).square().mean()

    def evaluate(self, forward, all_reduce, step: int) -> None:
        """Find the error of the average of the weights, which takes their place meanwhile."""
        trained = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.set_weights(self.average)
        try:
            self.model.eval()
            with torch.no_grad():
                error = self.loss(forward, self.inputs)
            self.die_at("evaluation", step)
            self.errors = [*self.errors, float(all_reduce(error.reshape(1)))]
        finally:
            self.model.train()
            self.set_weights(trained)

    @torch.no_grad()
    def set_weights(self, values) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.copy_(value)

    def step(self, step: int, rank: int, world_size: int, forward, optimizer, no_sync) -> None:
        halves = self.batches(step, rank, world_size)
        for number, inputs in enumerate(halves):
            with no_sync() if number == 0 else contextlib.nullcontext():
                loss = self.loss(forward, inputs) / len(halves)
                if step == OVERFLOWS and rank == 1:
                    loss = loss * torch.inf
                self.scaler.scale(loss).backward()
        self.die_at("backward", step)
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(optimizer)
        self.scaler.update()
        with torch.no_grad():
            for mean, parameter in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)

    def write(self, folder: Path, rank: int) -> None:
        final = {
            "parameters": torch.cat([each.detach().flatten() for each in self.model.parameters()]).tolist(),
            "average": torch.cat([each.flatten() for each in self.average]).tolist(),
            "buffers": [each.double().flatten().tolist() for each in self.model.buffers()],
            "errors": self.errors,
            "scale": self.scaler.get_scale(),
        }
        (folder / f"final-{rank}.json").write_text(json.dumps(final))


def through_process_group(tensor):
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    return tensor / dist.get_world_size()


def ddp(task: Task, folder: Path) -> None:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, scheduler = DistributedDataParallel(task.model), task.make_scheduler(task.optimizer)
    task.average = [parameter.detach().clone() for parameter in task.model.parameters()]
    for step in range(STEPS):
        if step in EVALUATES:
            task.evaluate(model, through_process_group, step)
        task.optimizer.zero_grad()
        task.step(step, rank, world_size, model, task.optimizer, model.no_sync)
        scheduler.step()
    task.write(folder, rank)
    dist.destroy_process_group()


def optimizer(task: Task, folder: Path) -> None:
    group = tr.init()
    wrapped = tr.DistributedOptimizer(task.optimizer, task.model, group=group)
    task.average = [parameter.detach().clone() for parameter in task.model.parameters()]
    scheduler = task.make_scheduler(wrapped)

    def all_reduce(tensor):
        return group.allreduce(tensor, op=tr.ReduceOp.AVG).wait()

    for step in range(STEPS):
        if step in EVALUATES:
            task.evaluate(task.model, all_reduce, step)
        wrapped.zero_grad()
        task.step(step, group.rank, group.world_size, task.model, wrapped, wrapped.no_sync)
        scheduler.step()
    task.write(folder, group.rank)
    group.close()


def recoverable(task: Task, folder: Path) -> None:
    group = tr.init()
    wrapped = tr.DistributedOptimizer(task.optimizer, task.model, group=group)
    scheduler = task.make_scheduler(wrapped)
    state = tr.State(
        model=task.model,
        optimizer=wrapped,
        scheduler=scheduler,
        scaler=task.scaler,
        average=task.average,
        errors=task.errors,
    )

    def all_reduce(tensor):
        return group.allreduce(tensor, op=tr.ReduceOp.AVG).wait()

    with tr.recoverable(state) as job:
        for step in job.steps(STEPS):
            with job.step():
                task.average, task.errors = state.average, state.errors
                if step in EVALUATES:
                    task.evaluate(task.model, all_reduce, step)
                task.step(step, group.rank, group.world_size, task.model, wrapped, wrapped.no_sync)
                scheduler.step()
                state.average, state.errors = task.average, task.errors
        task.average, task.errors = state.average, state.errors
        task.write(folder, group.rank)
    group.close()


def attempts(task: Task, folder: Path) -> None:
    scheduler = task.make_scheduler(task.optimizer)
    state = tr.State(
        model=task.model,
        optimizer=task.optimizer,
        scheduler=scheduler,
        scaler=task.scaler,
        average=task.average,
        errors=task.errors,
    )
    for attempt in tr.attempts(state):
        with attempt:
            model = DistributedDataParallel(task.model)
            rank, world_size = dist.get_rank(), dist.get_world_size()
            for step in range(state.steps, STEPS):
                task.average, task.errors = state.average, state.errors
                if step in EVALUATES:
                    task.evaluate(model, through_process_group, step)
                task.optimizer.zero_grad()
                task.step(step, rank, world_size, model, task.optimizer, model.no_sync)
                scheduler.step()
                state.average, state.errors = task.average, task.errors
                attempt.commit()
            task.write(folder, rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("door", choices=("ddp", "optimizer", "recoverable", "attempts"))
    parser.add_argument("--die", default="", choices=("", "evaluation", "backward"))
    arguments = parser.parse_args()
    globals()[arguments.door](Task(arguments.door, arguments.die), arguments.folder)
