"""Train with FSDP2, and go on when ranks are lost: copies of each rank's shards are in the memory of other ranks.

totalreduce run -n 4 --on-loss replace --spares 1 examples/torch_fsdp_recovery.py --model gpt
totalreduce run -n 4 --on-loss shrink examples/torch_fsdp_recovery.py --model gpt --snapshots snapshots
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch_tasks import loss_of, make_parser, make_task

import totalreduce as tr

parser = make_parser(__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--every", type=int, default=10, help="steps between two copies")
parser.add_argument("--replicas", type=int, default=1, help="ranks that have a copy of each rank's shards")
parser.add_argument("--snapshots", type=Path, help="write the state to this folder, too")
options = parser.parse_args()

copies = tr.ShardCopies(every=options.every, replicas=options.replicas)
snapshots = tr.Snapshots(options.snapshots, every=100) if options.snapshots else None
for attempt in tr.attempts(copies=copies, snapshots=snapshots):
    with attempt:
        task = make_task(options)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in task.model.blocks:
            fully_shard(block, mesh=mesh)
        model = fully_shard(task.model, mesh=mesh)
        optimizer = task.optimizer(model.parameters())
        sampler = tr.ElasticSampler(task.data, batch_size=options.batch, seed=2)
        loader = DataLoader(task.data, batch_sampler=sampler)
        state = tr.State(model=model, optimizer=optimizer, sampler=sampler, total=0.0)
        attempt.synchronize(state)

        begin, first_step = time.perf_counter(), state.steps
        for _ in attempt.epochs(options.epochs):
            for inputs, targets in attempt.batches(loader):
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state.total += loss.item()
                attempt.commit()

        mean = torch.tensor(state.total / state.steps, dtype=torch.float64)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if dist.get_rank() == 0:
            step_ms = 1000 * (time.perf_counter() - begin) / max(1, state.steps - first_step)
            copy_ms = 1000 * copies.seconds / copies.num_copied
            print(f"{state.steps} steps of {step_ms:.1f} ms; mean loss {mean.item()!r}")
            print(
                f"{copies.num_copied} copies of {copy_ms:.1f} ms; they take {copies.num_bytes / 1e6:.1f} MB on rank 0"
            )
