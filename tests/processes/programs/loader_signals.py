"""A loop with worker processes of a ``DataLoader`` that a signal ends early. Arguments: FOLDER START."""

import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import totalreduce as tr


class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4)


if __name__ == "__main__":
    group = tr.init()
    model = torch.nn.Linear(4, 1)
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group)
    sampler = tr.ElasticSampler(4000, batch_size=4)
    loader = DataLoader(Slow(), batch_sampler=sampler, num_workers=2, multiprocessing_context=sys.argv[2])
    state = tr.State(model=model, optimizer=optimizer, sampler=sampler)
    asked = tr.Snapshots(sys.argv[1], every=10**6, on_signal=(signal.SIGUSR1, signal.SIGTERM))
    with tr.recoverable(state, snapshots=asked) as job:
        for _ in job.epochs(1):
            for inputs in job.batches(loader):
                if state.version == 1:
                    print("running", flush=True)
                with job.step():
                    model(inputs).square().mean().backward()
                    optimizer.step()
    print("preempted", job.preempted, state.version, flush=True)
    group.close()
