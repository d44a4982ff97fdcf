"""The models that the benchmarks train; batches depend on nothing but the seed. No dropout, no batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from totalreduce.cli.models import MLP, SmallGPT
from totalreduce.foundation.errors import ConfigurationError

_VOCABULARY = 96
_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its data."""

    name: str  #: As given on the command line.
    batch: int  #: Examples per rank and step.
    build: Callable[[], nn.Module]  #: Makes the model; draws from torch's global generator.
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  #: Inputs and targets of a batch, from a generator.

    def model(self, seed: int) -> nn.Module:
        """Equal on every rank for equal seeds."""
        torch.manual_seed(seed)
        return self.build()

    def batch_of(self, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, different for every rank and step."""
        generator = torch.Generator().manual_seed((seed * 10_007 + step) * 10_007 + rank)
        return self.draw(self.batch, generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the last dimension of the model's output."""
    logits: Tensor = model(inputs)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class SmallCNN(nn.Sequential):
    """Convolutions of growing width for 32 x 32 images, 4.3 million parameters, group norm throughout."""

    def __init__(self, widths: tuple[int, ...] = (64, 64, 128, 128, 256, 256, 512)) -> None:
        layers: list[nn.Module] = []
        before = 3
        for width in widths:
            stride = 2 if before not in (3, width) else 1
            convolution = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(8, width), nn.ReLU()]
            before = width
        layers += [
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * before, 768),
            nn.ReLU(),
            nn.Linear(768, 10),
        ]
        super().__init__(*layers)


def _build_gpt() -> nn.Module:
    return SmallGPT(_VOCABULARY, _CONTEXT, width=256, num_layers=6, num_heads=4)


def _draw_tokens(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(_VOCABULARY, (batch, _CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _draw_images(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    targets = torch.randint(10, (batch,), generator=generator)
    return torch.randn(batch, 3, 32, 32, generator=generator), targets


def _draw_vectors(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    targets = torch.randint(200, (batch,), generator=generator)
    return torch.randn(batch, 784, generator=generator), targets


WORKLOADS = {
    "mlp": Workload("mlp", 64, MLP, _draw_vectors),
    "gpt": Workload("gpt", 4, _build_gpt, _draw_tokens),
    "cnn": Workload("cnn", 8, SmallCNN, _draw_images),
}


def workload_by_name(name: str) -> Workload:
    """Look a workload up."""
    if name not in WORKLOADS:
        raise ConfigurationError(f"--model is one of {', '.join(WORKLOADS)}, not {name!r}")
    return WORKLOADS[name]
