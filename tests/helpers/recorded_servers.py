"""Programs with servers whose states are in ``tests/recorded/servers``, written by an older version of the library.

``python tests/helpers/recorded_servers.py FOLDER`` writes them with the library that is installed. ``tests/threads``
loads them.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import totalreduce as tr
from totalreduce.testing import run_ranks

RECORDED = Path(__file__).parents[1] / "recorded" / "servers"
#: By name: the strategy, and the torch optimizer.
STRATEGIES = {
    "async": (lambda: tr.Async(), lambda groups: torch.optim.Adam(groups, lr=0.1)),
    "stale_synchronous": (lambda: tr.StaleSynchronous(slack=2), lambda groups: torch.optim.Adagrad(groups, lr=0.1)),
    "soft_sync": (lambda: tr.SoftSync(n=1), lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    "quorum": (lambda: tr.Quorum(n=1), lambda groups: torch.optim.NAdam(groups, lr=0.1)),
    "eager": (lambda: tr.Eager(mode="solo"), lambda groups: torch.optim.ASGD(groups, lr=0.1)),
}
#: The number of keys of the parameter server, and the step after which it is saved.
NUM_KEYS, SAVED_STEP = 100, 3


class Model(torch.nn.Module):
    """A parameter that is cut between servers if it has 120 rows, a transposed one, and one without gradients."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.arange(150.0 * rows).reshape(rows, 150) / (150 * rows))
        self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t() / 12)
        self.unused = torch.nn.Parameter(torch.ones(5))

    def forward(self, step: int) -> torch.Tensor:
        return (self.large * (step + 1.0)).sum() + (self.turned * self.turned.detach().cos()).sum()


def make(name: str):
    """Return a model, and its torch optimizer with two groups of parameters."""
    model = Model(120 if name == "async" else 2)
    groups = [{"params": [model.large, model.unused]}, {"params": [model.turned], "lr": 0.05}]
    return model, STRATEGIES[name][1](groups)


def wrap(group, name: str, model, inner):
    return tr.DistributedOptimizer(inner, model, group=group, sync=STRATEGIES[name][0]())


def train(model, optimizer, steps: range) -> None:
    """Take steps with these numbers."""
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def train_served(name: str, group) -> dict:
    """Return the states after two steps of rank 0 alone."""
    model, inner = make(name)
    optimizer = wrap(group, name, model, inner)
    train(model, optimizer, range(2 if group.rank == 0 else 0))
    optimizer.strategy_steps.finish()
    strategy = optimizer.strategy_steps.state()
    optimizer.close()
    return {"model": model.state_dict(), "strategy": strategy, "optimizer": optimizer.state_dict()}


class ServerModel(torch.nn.Module):
    """Its gradients are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.linspace(0.0, 1.0, size) for size in (200, 7)])

    def forward(self) -> torch.Tensor:
        return sum(part.sum() for part in self.parts)


def make_served_model(group, restore: Path | None = None):
    """Return a model on a parameter server, and its optimizer."""
    model = ServerModel()
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    sync = tr.ParameterServer(consistency=tr.ps.Eventual(), restore=restore)
    return model, tr.DistributedOptimizer(inner, model, group=group, sync=sync)


def save_model(group, folder: Path) -> None:
    model, optimizer = make_served_model(group)
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    group.barrier()
    optimizer.strategy_steps.save(folder)
    optimizer.strategy_steps.finish()
    optimizer.close()


def connect(group, **settings):
    """Return a connection to a parameter server with Adam."""
    sequential = tr.ps.Sequential()
    return tr.ps.connect(group, num_keys=NUM_KEYS, optimizer=tr.ps.Adam(0.1), consistency=sequential, **settings)


def save_keys(group, folder: Path) -> None:
    with connect(group, initial=1.0) as client:
        for step in client.steps(SAVED_STEP):
            mine = np.arange(step + group.rank, NUM_KEYS, 2)
            client.push(mine, (mine + step).astype(np.float32))
        client.save(folder)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in STRATEGIES:
        states = run_ranks(3, lambda group, name=name: train_served(name, group))
        torch.save(states[0], folder / f"{name}.pt")
    run_ranks(2, lambda group: save_model(group, folder / "parameter_server"))
    run_ranks(2, lambda group: save_keys(group, folder / "keys"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
