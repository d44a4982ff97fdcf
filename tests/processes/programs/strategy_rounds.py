"""Trains in rounds by a strategy over ``tr.attempts``, as examples/strategy_rounds.py does. Ranks kill themselves.

Each gradient is one, the learning rate is one, and the parameters begin at zero, so a parameter counts gradients. With
momentum the second parameter counts more: it tells whether the state of servers goes on.
"""

import argparse
import copy
import json
import os
import signal
import time
from pathlib import Path

import torch

import totalreduce as tr

STRATEGIES = {
    "async": tr.Async(scale="none", max_staleness=None),
    "stale_synchronous": tr.StaleSynchronous(slack=2),
    "soft_sync": tr.SoftSync(n=1),
    "eager": tr.Eager(mode="solo"),
    "async_gossip": tr.AsyncGossip(),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--hold", type=int, default=0, help="wait for so many ranks before the last round")
    parser.add_argument("--die", default="", help="SEAT:STEP[,...], by the first incarnation of the seat")
    arguments = parser.parse_args()
    model = torch.nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    groups = [{"params": [model[0]]}, {"params": [model[1]], "momentum": 0.5}]
    kept = torch.optim.SGD(groups, lr=1.0)
    state = tr.State(model=model, optimizer=kept, sizes=[])
    for attempt in tr.attempts(state):
        with attempt:
            seat, incarnation = int(os.environ["RANK"]), int(os.environ.get("TOTALREDUCE_INCARNATION", "0"))
            deaths = [death.split(":") for death in arguments.die.split(",") if death and incarnation == 0]
            last_steps = {int(step) for where, step in deaths if int(where) == seat}
            group, trained = attempt.group, copy.deepcopy(model)
            own_groups = [{**each, "params": [own]} for each, own in zip(groups, trained, strict=True)]
            inner = torch.optim.SGD(own_groups, lr=1.0)
            inner.load_state_dict(copy.deepcopy(kept.state_dict()))
            sync = STRATEGIES[arguments.strategy]
            optimizer = tr.DistributedOptimizer(inner, trained, group=group, sync=sync)
            for number in range(len(state.sizes), arguments.rounds):
                while number == arguments.rounds - 1 and group.world_size < arguments.hold:
                    attempt.commit()  # raises when a process has come
                    time.sleep(0.1)
                for step in range(number * arguments.steps, (number + 1) * arguments.steps):
                    if step in last_steps:
                        os.kill(os.getpid(), signal.SIGKILL)
                    for parameter in trained:
                        parameter.grad = torch.full_like(parameter, -1.0)
                    optimizer.step()
                optimizer.strategy_steps.finish()
                if arguments.strategy == "async_gossip":
                    tr.broadcast_optimizer_state(inner, group)
                else:
                    optimizer.strategy_steps.load_state(optimizer.strategy_steps.state())
                model.load_state_dict(trained.state_dict())
                kept.load_state_dict(copy.deepcopy(inner.state_dict()))
                state.sizes = [*state.sizes, group.world_size]
                attempt.commit()
            optimizer.close()
            rank = group.rank
    final = {"values": [each.unique().tolist() for each in model], "sizes": state.sizes}
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
