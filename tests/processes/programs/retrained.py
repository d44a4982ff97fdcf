"""Trains other parameters from time to time, in a job that outlives its ranks: ``retrained.py FOLDER LOOP``.

Layer 2 is unfrozen after 3 steps, layer 0 is put into a new group after 6, and the last layer is frozen after 9. Loops:
``recoverable``, ``sparse`` (with Top-k A) and ``attempts``. ``--odd``: the second process of rank 1 has other names.
"""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr

NUM_STEPS = 12


class Trained:
    """One process of the job: the model, whose first layers are not trained yet, and how it dies."""

    def __init__(self, arguments) -> None:
        self.arguments = arguments
        seat, incarnation = os.environ["RANK"], os.environ.get("TOTALREDUCE_INCARNATION", "0")
        deaths = [death.split(":") for death in arguments.die.split(",") if death]
        self._mine = {(int(version), place) for who, version, place in deaths if who == f"{seat}.{incarnation}"}
        torch.manual_seed(7)
        self.module = torch.nn.Sequential(
            *(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        )
        self.module[0].requires_grad_(False)
        self.module[2].requires_grad_(False)
        self.inner = torch.optim.AdamW(self.module[2:].parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.95)  # before there is a second group
        self.optimizer = self.inner
        self.snapshots = tr.Snapshots(arguments.snapshots, every=9) if arguments.snapshots else None
        self.state: tr.State

    def die_at(self, place: str) -> None:
        if (self.state.version, place) in self._mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def change(self, number: int) -> None:
        """Train other parameters; ``optimizer`` is a ``DistributedOptimizer``, or torch's with DDP."""
        if number == 0:
            self.module[2].requires_grad_(True)
            if self.optimizer is not self.inner:
                self.optimizer.replan()
        elif number == 1:
            self.module[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.module[0].parameters()), "lr": 0.1})
        else:
            self.module[4].requires_grad_(False)
            if self.arguments.loop == "sparse":  # otherwise what is left in the residuals would still be sent
                self.optimizer.replan()

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        rows = torch.randn(8, 16)
        self.die_at("forward")
        return (model(rows).squeeze(1) - rows.sum(1)).square().mean()

    def recoverable(self, **options) -> int:
        group = tr.init()
        model = self.module
        if self.arguments.odd and (group.rank, os.environ["TOTALREDUCE_INCARNATION"]) == (1, "1"):
            model = torch.nn.ModuleDict({"other": model})
        self.optimizer = tr.DistributedOptimizer(self.inner, model, group=group, **options)
        self.state = tr.State(model=self.module, optimizer=self.optimizer, scheduler=self.scheduler)
        with tr.recoverable(self.state, snapshots=self.snapshots) as job:
            for phase in range(4):
                if phase:
                    for _ in job.once(f"change {phase}"):
                        with job.step():
                            self.die_at("change")
                            self.change(phase - 1)
                            self.die_at("changed")
                for _ in job.steps(3 * phase + 3):
                    with job.step():
                        self.loss(self.module).backward()
                        self.die_at("backward")
                        self.optimizer.step()
                        self.scheduler.step()
                        self.die_at("updated")
                    self.wait()
        return group.rank

    def attempts(self) -> int:
        self.state = tr.State(model=self.module, optimizer=self.inner, scheduler=self.scheduler)
        for attempt in tr.attempts(self.state, snapshots=self.snapshots):
            with attempt:
                model = DistributedDataParallel(self.module)
                for step in range(self.state.steps, NUM_STEPS):
                    needed = [
                        not self.module[2].weight.requires_grad,
                        len(self.inner.param_groups) == 1,
                        self.module[4].weight.requires_grad,
                    ]
                    if step and step % 3 == 0 and needed[step // 3 - 1]:
                        self.change(step // 3 - 1)
                        self.die_at("changed")
                        model = DistributedDataParallel(self.module)
                    self.loss(model).backward()
                    self.die_at("backward")
                    self.inner.step()
                    self.inner.zero_grad()
                    self.scheduler.step()
                    self.die_at("updated")
                    attempt.commit()
                    self.wait()
                rank = attempt.group.rank
        return rank

    def wait(self) -> None:
        """Return when the version is on disk, if it is written."""
        if self.snapshots is not None:
            self.snapshots.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("loop", choices=["recoverable", "sparse", "attempts"])
    parser.add_argument("--die", default="", help="SEAT.INCARNATION:VERSION:PLACE[,...]")
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--snapshots", type=Path)
    arguments = parser.parse_args()
    trained = Trained(arguments)
    if arguments.loop == "attempts":
        rank = trained.attempts()
    else:
        sparse = {"sync": tr.TopkA(density=0.2), "feedback": tr.ErrorFeedback(elements_min=1, momentum=0.5)}
        rank = trained.recoverable(**(sparse if arguments.loop == "sparse" else {}))
    state = trained.state
    residuals = {}
    if arguments.loop == "sparse":
        names = {parameter: name for name, parameter in trained.module.named_parameters()}
        kept = trained.optimizer.compressed.residuals
        residuals = {
            f"{kind} {names[parameter]}": hashlib.sha256(flat.numpy().tobytes()).hexdigest()
            for kind, flats in (("residual", kept.kept), ("velocity", kept.velocities))
            for parameter, flat in flats.items()
        }
    final = {
        "digests": state.digests(),
        "version": state.version,
        "lr": [group["lr"] for group in trained.inner.param_groups],
        "frozen": [name for name, each in trained.module.named_parameters() if not each.requires_grad],
        "num_states": len(trained.inner.state),
        "residuals": residuals,
    }
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps(final, sort_keys=True))


if __name__ == "__main__":
    main()
