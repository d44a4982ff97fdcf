"""Train a model of 100 million parameters with SGD by one of three doors; the test measures the memory of all ranks."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr

parser = argparse.ArgumentParser()
parser.add_argument("door", choices=("gloo", "totalreduce", "optimizer"))
parser.add_argument("model", choices=("linear", "narrow", "transformer"))
parser.add_argument("zeros", choices=("none", "zeros", "clipped"))
options = parser.parse_args()


def transformer():
    width = 768
    layers = [torch.nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True) for _ in range(12)]
    return torch.nn.Sequential(torch.nn.Embedding(18_000, width), *layers)


print("pid", os.getpid(), flush=True)
torch.set_num_threads(1)
torch.manual_seed(0)
if options.door == "optimizer":
    group = tr.init()
else:
    dist.init_process_group(options.door)
if options.model == "transformer":
    model = transformer()
else:  # layers of 16 MB, or of 1 MB, which the C library has in its heap
    width, count = (2000, 25) if options.model == "linear" else (500, 400)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if options.door == "optimizer":
    optimizer = tr.DistributedOptimizer(optimizer, model, group=group)
    barrier = group.barrier
else:
    model = DistributedDataParallel(model)
    barrier = dist.barrier
begin = 0.0
for step in range(6):
    if step == 2:
        barrier()
        begin = time.monotonic()
    optimizer.zero_grad(set_to_none=options.zeros != "zeros")
    batch = torch.randint(0, 18_000, (1, 16)) if options.model == "transformer" else torch.randn(2, width)
    model(batch).square().mean().backward()
    if options.zeros == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
barrier()
print("step_s", (time.monotonic() - begin) / 4, flush=True)
