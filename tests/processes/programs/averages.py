"""Trains, and evaluates with averages of the weights in between: ``averages.py FOLDER USER [--die] [--finally]``.

USER is ``recoverable`` or ``attempts``. The weight grows by one in each step, and the averages are zeros. With
``--die``, seat 1 kills itself in the second evaluation, when the averages are in.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch

import totalreduce as tr


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("user")
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--finally", action="store_true", dest="has_finally")
    arguments = parser.parse_args()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    dies = arguments.die and os.environ["RANK"] == "1" and os.environ.get("TOTALREDUCE_INCARNATION") == "0"

    def evaluate(average, version: int) -> None:
        trained = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        if dies and version >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments.has_finally:
            try:
                average()
            finally:
                with torch.no_grad():
                    model.weight.copy_(trained)
        else:
            average()
            with torch.no_grad():
                model.weight.copy_(trained)

    if arguments.user == "recoverable":
        group = tr.init()
        optimizer = tr.DistributedOptimizer(inner, model, group=group)
        state = tr.State(model=model, optimizer=optimizer)
        with tr.recoverable(state) as job:
            for end in (2, 4):
                for _ in job.steps(end):
                    with job.step():
                        (-model.weight.sum()).backward()
                        optimizer.step()
                for _ in job.once(f"evaluation {end}"):
                    with job.step():
                        evaluate(lambda: group.allreduce(torch.ones(1)).wait(), state.steps)
        rank = group.rank
    else:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        state = tr.State(model=model, optimizer=inner)
        for attempt in tr.attempts(state):
            with attempt:
                replica = DistributedDataParallel(model)
                for step in range(state.steps, 5):
                    (-replica(torch.ones(1, 1)).sum()).backward()
                    inner.step()
                    inner.zero_grad()
                    attempt.commit()
                    if step % 2:
                        evaluate(lambda: dist.all_reduce(torch.ones(1)), state.version)
                rank = dist.get_rank()
    (arguments.folder / f"final-{rank}.json").write_text(json.dumps([model.weight.item(), state.version]))


if __name__ == "__main__":
    main()
