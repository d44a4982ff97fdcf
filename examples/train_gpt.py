"""Train a small character GPT on all ranks.

totalreduce run -n 4 examples/train_gpt.py
torchrun --nproc-per-node 4 examples/train_gpt.py
examples/mpirun.sh -n 4 examples/train_gpt.py
sbatch -N 2 --ntasks-per-node 2 examples/slurm.sh examples/train_gpt.py --steps 50
"""

import argparse

import torch
from real_data import VOCABULARY, characters, documentation
from small_gpt import SmallGPT
from torch.nn import functional

import totalreduce as tr

BATCH, CONTEXT = 8, 64

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

data = characters(documentation())

torch.set_num_threads(1)
with tr.init() as group:
    torch.manual_seed(0)
    model = SmallGPT(VOCABULARY, CONTEXT, width=128, layers=4, heads=4)
    optimizer = tr.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, group=group)
    batches = torch.Generator().manual_seed(group.rank)  # every rank draws its own batches
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=batches)
        windows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if group.rank == 0 and step % 10 == 9:
            hidden = group.statistics().hidden_share
            print(f"step {step + 1}: loss {loss.item():.3f}, {hidden:.0%} of the communication hidden")
    with torch.no_grad():  # nothing is exchanged here: the losses are equal because the weights are
        windows = data[: BATCH * (CONTEXT + 1)].view(BATCH, CONTEXT + 1)
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    print(f"rank {group.rank} of {group.world_size}: the text's beginning has loss {loss.item():.6f}")
    group.barrier()
