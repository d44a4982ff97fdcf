"""What the torch_*, lightning_* and accelerate_* examples train, and how they report it.

Two tasks: a small residual network that reads handwritten digits, and a small GPT for the letters of Python's own
documentation. Nothing here knows which back end carries the gradients.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from real_data import VOCABULARY, characters, digits, documentation
from small_gpt import SmallGPT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, CONTEXT = 10, 64


class Residual(nn.Module):
    """Two convolutions and a way around them, as in ResNet."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.around = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """``float[batch, before, height, width]`` to ``float[batch, width, height / stride, width / stride]``."""
        hidden = functional.relu(self.first_norm(self.first(pictures)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.around(pictures))


class SmallResNet(nn.Module):
    """Residual blocks whose width doubles where their pictures halve; 2.8 million parameters at width 32.

    Args:
        width: Channels of the first blocks.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        widths = [width << stage for stage in (0, 0, 1, 1, 2, 2, 3, 3)]
        pairs = itertools.pairwise([width, *widths])
        self.blocks = nn.Sequential(*(Residual(before, after, 1 + (before != after)) for before, after in pairs))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """``float[batch, 3, height, width]`` to logits, ``float[batch, CLASSES]``."""
        return self.head(self.blocks(self.stem(pictures)).mean((2, 3)))


@dataclass(frozen=True)
class Task:
    """A model, equal on every rank, and what it learns from.

    Attributes:
        model: Its ``blocks`` are what FSDP shards one by one.
        data: Inputs and targets.
        optimizer: Makes the optimizer for the model's parameters.
    """

    model: nn.Module
    data: TensorDataset
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def make_task(options: argparse.Namespace) -> Task:
    """The task of ``--model``."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    if options.model == "cnn":
        model: nn.Module = SmallResNet(options.width or 32)
        pictures, labels = digits()
        chosen = torch.arange(options.examples) % len(labels)
        inputs = functional.interpolate(pictures[chosen], size=(32, 32)).repeat(1, 3, 1, 1)
        data = TensorDataset(inputs.to(dtype), labels[chosen])
        return Task(model.to(dtype), data, lambda ps: torch.optim.SGD(ps, lr=0.002, momentum=0.9))
    model = SmallGPT(VOCABULARY, CONTEXT, width=options.width or 256, layers=options.layers, heads=4)
    letters = characters(documentation())
    starts = torch.arange(options.examples) * CONTEXT % (len(letters) - CONTEXT)
    tokens = letters[starts[:, None] + torch.arange(CONTEXT + 1)]
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return Task(model.to(dtype), data, lambda ps: torch.optim.AdamW(ps, lr=3e-4))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the last dimension."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def parse_options(description: str | None) -> argparse.Namespace:
    """The command line that most of these examples share."""
    parser = make_parser(description)
    parser.add_argument("--backend", default="totalreduce", help="of torch.distributed: totalreduce, gloo, ...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="rank 0 writes losses and step times to this file")
    return parser.parse_args()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of ``make_task``, which all these examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("cnn", "gpt"), default="cnn")
    parser.add_argument("--batch", type=int, default=8, help="examples per rank and step")
    parser.add_argument("--examples", type=int, default=1024, help="in the data set")
    parser.add_argument("--width", type=int, help="of the model; 32 for cnn, 256 for gpt")
    parser.add_argument("--layers", type=int, default=6, help="of gpt")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the parameters")
    return parser


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any], steps: int) -> Iterator[list[Tensor]]:
    """So many batches, over as many epochs as that takes."""

    def epochs() -> Iterator[list[Tensor]]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)  # another order in every epoch
            yield from loader

    return itertools.islice(epochs(), steps)


class Record:
    """Losses and step times of this rank."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._since = time.perf_counter()

    def step(self, loss: Tensor) -> None:
        """A step is over."""
        self._losses.append(loss.item())
        now = time.perf_counter()
        self._seconds.append(now - self._since)
        self._since = now

    def finish(self, options: argparse.Namespace) -> None:
        """Print and write the averages over all ranks; on rank 0, but collective."""
        both = torch.tensor([self._losses, self._seconds], dtype=torch.float64)
        dist.all_reduce(both)
        losses, seconds = (both / dist.get_world_size()).tolist()
        if dist.get_rank():
            return
        for step, loss in enumerate(losses):
            print(f"step {step + 1}: loss {loss!r}")
        print(f"median step {1000 * sorted(seconds)[len(seconds) // 2]:.1f} ms on {options.backend}", file=sys.stderr)
        if options.json is not None:
            facts = {"backend": options.backend, "model": options.model, "world_size": dist.get_world_size()}
            options.json.write_text(json.dumps({**facts, "losses": losses, "step_s": seconds}) + "\n")
