"""Train until a file exists, in a job that outlives its ranks; for tests of the live view."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import totalreduce as tr


def main() -> None:
    stop = Path(sys.argv[1])
    group = tr.init()
    torch.manual_seed(0)
    inputs = torch.randn(512, 64)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(64, 1)
    sync = tr.OkTopk(density=0.25)
    inner, feedback = torch.optim.SGD(model.parameters(), lr=1e-3), tr.ErrorFeedback(elements_min=0)
    optimizer = tr.DistributedOptimizer(inner, model, group=group, sync=sync, feedback=feedback)
    sampler = tr.ElasticSampler(dataset, batch_size=16)
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler, stops=False)
    with tr.recoverable(state) as job:
        for _ in job.epochs(1_000_000):
            for features, targets in job.batches(DataLoader(dataset, batch_sampler=sampler)):
                with job.step():
                    wanted = group.allreduce(torch.tensor([float(stop.exists())]), name="stop").wait()
                    state.stops = state.stops or bool(wanted.item())
                    (model(features) - targets).square().mean().backward()
                    optimizer.step()
            if state.stops:
                break
    group.close()


if __name__ == "__main__":
    main()
