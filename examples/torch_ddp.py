"""Train with DistributedDataParallel.

totalreduce run -n 4 examples/torch_ddp.py --model gpt
torchrun --nproc-per-node 4 examples/torch_ddp.py --backend gloo
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch_tasks import Record, batches, loss_of, make_task, parse_options

import totalreduce  # noqa: F401  (brings the back end)

options = parse_options(__doc__)
dist.init_process_group(options.backend)

task = make_task(options)
model = DistributedDataParallel(task.model)
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
