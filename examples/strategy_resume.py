"""Learn to continue a text, by a strategy: stop at any step, and go on with the same bits.

totalreduce run -n 4 examples/strategy_resume.py run-8 --stop-at 130
totalreduce run -n 4 examples/strategy_resume.py run-8

Between two exchanges the ranks have parameters of their own, so each rank saves a file of its own: model, optimizer and
strategy. With as many ranks as before, the second start goes on from there. In tr.recoverable, tr.Snapshots does the
same without a line of the program.
"""

import argparse
import hashlib
import itertools
from pathlib import Path

import torch
from real_data import VOCABULARY, next_characters
from torch import nn
from torch.nn.functional import cross_entropy

import totalreduce as tr

LENGTH = 16
TEXT, NEXT = next_characters(LENGTH)

STRATEGIES = {
    "diloco": lambda: tr.DiLoCo(period=20, codec=tr.Int8()),
    "local-sgd": lambda: tr.LocalSGD(period=8),
    "slowmo": lambda: tr.SlowMo(period=8),
    "easgd": lambda: tr.EASGD(period=4),
    "gossip": tr.Gossip,
}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of a step, which follow from rank and step, so that a job that goes on takes those that are left."""
    places = torch.randint(len(NEXT), (32,), generator=torch.Generator().manual_seed(1_000_000 * rank + step))
    return TEXT[places], NEXT[places]


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", choices=STRATEGIES, default="diloco")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-at", type=int, default=0, help="save and end after so many steps")
    options = parser.parse_args()

    with tr.init() as group:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(8 * LENGTH, VOCABULARY))
        tr.broadcast_parameters(model, group)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = tr.DistributedOptimizer(adam, model, group=group, sync=STRATEGIES[options.strategy]())
        file = options.folder / f"rank{group.rank}.pt"
        first = 0
        if file.exists():  # after DistributedOptimizer was built, with equal parameters on all ranks
            saved = torch.load(file)
            first = saved["step"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            optimizer.strategy_steps.load_state(saved["strategy"])
        last = min(options.steps, options.stop_at or options.steps)
        for step in range(first, last):
            inputs, targets = batch(group.rank, step)
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        options.folder.mkdir(parents=True, exist_ok=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"step": last, "strategy": optimizer.strategy_steps.state(), **states}, file)
        bits = itertools.chain.from_iterable(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        digest = hashlib.sha256(bytes(bits)).hexdigest()[:16]
        print(f"rank {group.rank}: steps {first} to {last}, parameters {digest}", flush=True)


if __name__ == "__main__":
    main()
