"""Learn to continue a text, in rounds of asynchronous steps; lost workers are replaced or left out, and new ones join.

totalreduce run -n 3 --on-loss replace examples/strategy_rounds.py
totalreduce run --hosts-file hosts --on-loss shrink examples/strategy_rounds.py

With these strategies each rank has state that no other rank has, as the server of some of the parameters. So a round
trains a copy of the model. At the end of a round all ranks have the same parameters and optimizer state, and keep them
in a tr.State. After a loss, all ranks begin the round again with these.
"""

import argparse
import copy
import hashlib
import os
from datetime import timedelta

import torch
from real_data import VOCABULARY, next_characters
from torch import nn
from torch.nn.functional import cross_entropy

import totalreduce as tr

LENGTH = 16
TEXT, NEXT = next_characters(LENGTH)

STRATEGIES = {
    "async": lambda: tr.Async(max_staleness=8),
    "stale-synchronous": lambda: tr.StaleSynchronous(slack=3),
    "soft-sync": lambda: tr.SoftSync(n=1),
    "quorum": lambda: tr.Quorum(n=1, grace_s=0.01),
    "eager": lambda: tr.Eager(mode="solo"),
    "async-gossip": tr.AsyncGossip,
}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of a step."""
    places = torch.randint(len(NEXT), (32,), generator=torch.Generator().manual_seed(1_000_000 * rank + step))
    return TEXT[places], NEXT[places]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", choices=STRATEGIES, default="async")
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--steps", type=int, default=50, help="of a round")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(8 * LENGTH, VOCABULARY))
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = tr.State(model=model, optimizer=adam)
for attempt in tr.attempts(state, timeout=timedelta(minutes=30)):  # ranks may differ by so much within a round
    with attempt:
        # What a round changes: the state keeps the model and the optimizer of the last round that has ended.
        trained = copy.deepcopy(model)
        inner = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        inner.load_state_dict(copy.deepcopy(adam.state_dict()))  # it keeps the tensors that it is given
        sync = STRATEGIES[options.strategy]()
        optimizer = tr.DistributedOptimizer(inner, trained, group=attempt.group, sync=sync)
        steps = optimizer.strategy_steps
        for number in range(state.version, options.rounds):
            for step in range(number * options.steps, (number + 1) * options.steps):
                inputs, targets = batch(attempt.group.rank, step)
                optimizer.zero_grad()
                cross_entropy(trained(inputs), targets).backward()
                optimizer.step()
            steps.finish()  # waits for all ranks; then all have the same parameters
            if isinstance(sync, tr.AsyncGossip):
                tr.broadcast_optimizer_state(inner, attempt.group)
            else:
                steps.load_state(steps.state())  # the state of the optimizers of all servers
            model.load_state_dict(trained.state_dict())
            adam.load_state_dict(copy.deepcopy(inner.state_dict()))
            attempt.commit()
        optimizer.close()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:16]
print(f"rank {os.environ['RANK']}: {state.version} rounds, parameters {digest}", flush=True)
