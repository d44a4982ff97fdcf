"""Train a model of so many equal layers in one of four ways; rank 0 prints the peak of its memory in bytes."""

import argparse
import resource

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import totalreduce as tr

parser = argparse.ArgumentParser()
parser.add_argument("door", choices=("alone", "optimizer", "ddp", "hook"))
parser.add_argument("layers", type=int)
parser.add_argument("width", type=int)
options = parser.parse_args()

torch.set_num_threads(1)
sync = tr.OkTopk(density=0.01)
model = torch.nn.Sequential(*(torch.nn.Linear(options.width, options.width) for _ in range(options.layers)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if options.door == "optimizer":
    optimizer = tr.DistributedOptimizer(optimizer, model, group=tr.init(), sync=sync)
elif options.door != "alone":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.door == "hook":
        model.register_comm_hook(*tr.ddp_hook(sync))
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, options.width)).square().mean().backward()
    optimizer.step()
print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
