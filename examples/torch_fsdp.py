"""Train with FSDP2: every rank keeps a slice of each parameter, its gradient and its optimizer state.

totalreduce run -n 4 examples/torch_fsdp.py --model gpt
torchrun --nproc-per-node 4 examples/torch_fsdp.py --backend gloo
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torch_tasks import Record, batches, loss_of, make_task, parse_options

import totalreduce  # noqa: F401  (brings the back end)

options = parse_options(__doc__)
dist.init_process_group(options.backend)

task = make_task(options)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in task.model.blocks:
    fully_shard(block, mesh=mesh)
model = fully_shard(task.model, mesh=mesh)
optimizer = task.optimizer(model.parameters())
sampler = DistributedSampler(task.data, seed=2)
loader = DataLoader(task.data, batch_size=options.batch, sampler=sampler, drop_last=True)

record = Record()
for inputs, targets in batches(loader, sampler, options.steps):
    loss = loss_of(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record.step(loss)
record.finish(options)
dist.destroy_process_group()
