"""Programs whose snapshots are in ``tests/recorded``, written by an older version of the library.

``python tests/helpers/recorded_snapshots.py FOLDER`` writes them with the library that is installed; the program of
``hooks`` is ``tests/processes/programs/hooked.py``, under ``totalreduce run -n 2``. ``tests/threads`` loads them.
"""

import sys
from pathlib import Path

import torch

import totalreduce as tr
from totalreduce.recovery.copies import ShardCopies
from totalreduce.recovery.state import State
from totalreduce.testing import run_ranks

RECORDED = Path(__file__).parents[1] / "recorded"
#: The version that was written.
VERSION = 6
#: The kinds of states of ``tr.recoverable``, and their strategies.
STRATEGIES = {"residuals": None, "buffers": None, "diloco": lambda: tr.DiLoCo(period=4)}


class Model(torch.nn.Module):
    """Its buffer differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.0, 1.0, 12).reshape(3, 4))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        self.seen += torch.tensor([1.0 + rank, step])
        return (self.weight * torch.arange(12.0).add(rank + step).cos().reshape(3, 4)).sum()


def begin(kind: str, group, folder: Path):
    """Return the context of a job, and its optimizer."""
    model = Model()
    options = {}
    if kind == "residuals":
        options["sync"] = tr.TopkA(density=0.25)
        options["feedback"] = tr.ErrorFeedback(elements_min=0)
    if STRATEGIES[kind] is not None:
        options["sync"] = STRATEGIES[kind]()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = tr.DistributedOptimizer(adam, model, group=group, buffers=None, **options)
    state = tr.State(model=model, optimizer=optimizer, best=0.0)
    return tr.recoverable(state, snapshots=tr.Snapshots(folder, every=VERSION)), optimizer


def train(kind: str, group, folder: Path):
    """Take steps up to the version."""
    job, optimizer = begin(kind, group, folder)
    with job:
        for step in job.steps(VERSION):
            with job.step():
                job.state.model(group.rank, step).backward()
                optimizer.step()
                job.state.best = 10.0 + step


def make_sharded() -> State:
    model = Model()
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), best=0.0)


def train_sharded(group, folder: Path):
    state, copies = make_sharded(), ShardCopies(every=2)
    snapshots = tr.Snapshots(folder, every=VERSION)
    copies.synchronize(state, group, 1, snapshots, has_begun=False)
    for step in range(VERSION):
        state.model.weight.data += 1.0 + group.rank
        state.best = 10.0 + step
        state.count(None)
        copies.commit(state, state.version - 1)
    snapshots.wait()
    group.barrier()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for kind in STRATEGIES:
        run_ranks(2, lambda group, kind=kind: train(kind, group, folder / kind))
    run_ranks(2, lambda group: train_sharded(group, folder / "shards"))
