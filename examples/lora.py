"""Fine-tune a small language model with LoRA (Hu et al., 2021) on two hosts: only the adapters' gradients travel.

sudo env PATH="$PATH" totalreduce run --emulate-hosts 2 --emulate-rate 10mbit examples/lora.py
totalreduce run -n 2 examples/lora.py

The model has read Python's documentation, and learns Python's own source code.
"""

import argparse
import inspect
import typing

import torch
from real_data import VOCABULARY, characters, documentation
from small_gpt import SmallGPT
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import totalreduce as tr

MODEL = {"vocabulary": VOCABULARY, "context": 64, "width": 128, "layers": 2, "heads": 4}
BATCH = 8


class LowRank(nn.Module):
    """A weight, and beside it the product of two thin matrices, of which the second one begins with zeros."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses."""
        return weight + self.up @ self.down


def add_adapters(model: SmallGPT, rank: int) -> list[nn.Parameter]:
    """Freeze a model, put adapters into the feed-forward layers of its blocks, and return the adapters' parameters."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for layer in (block.linear1, block.linear2):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross entropy of each next character of windows, ``int64[batch, length + 1]``."""
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, steps: int, draw: torch.Generator) -> None:
    """Take steps on windows of a text that a generator draws."""
    for _ in range(steps):
        starts = torch.randint(len(text) - MODEL["context"], (BATCH, 1), generator=draw)
        loss = loss_of(model, text[starts + torch.arange(MODEL["context"] + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--pretrain", type=int, default=200, help="steps with all parameters, without any exchange")
parser.add_argument("--steps", type=int, default=200, help="steps with adapters, together")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
model = SmallGPT(**MODEL)
# Every rank does the same here. With a checkpoint, load_state_dict() stands in its place.
train(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    characters(documentation()),
    options.pretrain,
    torch.Generator(),
)

with tr.init() as group:
    code = characters(inspect.getsource(typing))
    adapters = add_adapters(model, rank=4)
    optimizer = tr.DistributedOptimizer(torch.optim.AdamW(adapters, lr=3e-3), model, group=group)
    held_out = code[: 64 * (MODEL["context"] + 1)].view(64, -1)
    with torch.no_grad():
        before = loss_of(model, held_out).item()
    group.barrier()
    sent_before = group.statistics().bytes_sent
    train(model, optimizer, code[held_out.numel() :], options.steps, torch.Generator().manual_seed(group.rank))
    sent = (group.statistics().bytes_sent - sent_before) / options.steps
    with torch.no_grad():
        after = loss_of(model, held_out).item()
    of_all, of_adapters = (sum(each.numel() for each in some) for some in (model.parameters(), adapters))
    print(f"rank {group.rank}: loss {before:.3f} before, {after:.6f} after; {sent / 1000:.1f} kB sent in a step")
    if group.rank == 0:
        print(f"the adapters are {of_adapters} of {of_all} parameters, {4 * of_adapters / 1000:.1f} kB of gradients")
    group.barrier()
