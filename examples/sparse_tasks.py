"""What ``sparse_training.py`` trains: the Ok-Topk paper's three kinds of model, and one of many keys, all small.

A network for the handwritten digits that scikit-learn brings along, an LSTM for the words and a GPT for the letters
of Python's own documentation. Three to five million parameters each, and batches so small that on 1 Gbit/s a dense
allreduce takes several times as long as the arithmetic: what large models are to fast processors. Beside them a
logistic regression on keys of which few are frequent, as words and users are. Nothing here communicates.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from real_data import VOCABULARY, characters, documentation
from real_data import digits as load_digits
from small_gpt import SmallGPT
from torch import Tensor, nn
from torch.nn import functional

WORDS, CONTEXT = 4096, 32
STRETCH, LOOKED_AT = 16, 256
EVALUATION_BATCH = 32
#: Keys of an example of the logistic regression, and held-out examples.
KEYS, HELD_OUT = 32, 2048


class DigitsCNN(nn.Sequential):
    """Two convolutions and a wide hidden layer for pictures of 8 x 8; 4.8 million parameters.

    Args:
        width: Of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )


class WordLSTM(nn.Module):
    """An embedding, one LSTM and a linear layer; 3.0 million parameters at width 256.

    Args:
        width: Of the embedding and of the LSTM's state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """``int64[batch, length]`` to logits, ``float[batch, length, WORDS]``."""
        return self.head(self.lstm(self.embedding(words))[0])


class KeyRegression(nn.Module):
    """Logistic regression: a weight for every key.

    Args:
        width: The number of keys.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(width, 1, mode="sum")
        nn.init.zeros_(self.weights.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, keys: Tensor) -> Tensor:
        """``int64[batch, KEYS]`` to the logits of both classes, ``float[batch, 2]``."""
        score = self.weights(keys % self.weights.num_embeddings) + self.bias
        return torch.cat([torch.zeros_like(score), score], dim=1)


@dataclass(frozen=True)
class Optimizer:
    """A kind of optimizer.

    Attributes:
        name: As the command line has it.
        make: Takes parameter groups, each with its momentum, and the learning rate.
        momentum: Where a sparse method's is, unless asked otherwise: ``"optimizer"``, on what arrives, or
            ``"correction"``, before elements are selected. Adam learns faster by the latter, SGD by the former.
        density_warmup: For this part of the steps more is sent than asked for, which Adam needs and SGD does not.
    """

    name: str
    make: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
    momentum: str
    density_warmup: float


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        build: Makes the model; draws from torch's global generator. Takes its width.
        width: If nothing else is asked for.
        optimizer: Name of its optimizer, if nothing else is asked for.
        learning_rates: The largest one, by optimizer.
        batch: Examples per rank and step.
        draw: So many examples from those to train with, by a generator: inputs and targets.
        held_out: Inputs and targets that are never trained with.
    """

    build: Callable[[int], nn.Module]
    width: int
    optimizer: str
    learning_rates: dict[str, float]
    batch: int
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


def make_task(name: str) -> Task:
    """One of ``TASKS``."""
    return TASKS[name]()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the last dimension."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, rank: int, world_size: int) -> Tensor:
    """This rank's share of what was held out: ``float64[3]``, the sums of losses and hits and their number."""
    sums = torch.zeros(3, dtype=torch.float64)
    batches = list(zip(*(part.split(EVALUATION_BATCH) for part in task.held_out), strict=True))
    for inputs, targets in batches[rank::world_size]:
        logits = model(inputs)
        hits = (logits.argmax(-1) == targets).sum()
        sums += torch.tensor([loss_of(logits, targets).item() * targets.numel(), hits, targets.numel()])
    return sums


def digits() -> Task:
    """1,797 handwritten digits of 8 x 8 pixels (UCI, by way of scikit-learn), every fifth held out."""
    pictures, labels = load_digits()
    chosen = torch.arange(len(labels)) % 5 == 0

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.randint(int((~chosen).sum()), (count,), generator=generator)
        return pictures[~chosen][places], labels[~chosen][places]

    rates = {"sgd": 0.02, "adamw": 5e-4}
    return Task(DigitsCNN, 4608, "sgd", rates, 4, draw, (pictures[chosen], labels[chosen]))


def words() -> Task:
    """The documentation's 4,096 most frequent words; all others are one more."""
    found = re.findall(r"\w+|[^\w\s]", documentation())
    known = {word: number for number, (word, _) in enumerate(Counter(found).most_common(WORDS - 1))}
    tokens = torch.tensor([known.get(word, WORDS - 1) for word in found])
    return _text_task(WordLSTM, 256, {"sgd": 1.0, "adamw": 1e-2}, 3, tokens)


def letters() -> Task:
    """The documentation, letter by letter."""

    def build(width: int) -> nn.Module:
        return SmallGPT(VOCABULARY, CONTEXT, width=width, layers=4, heads=4)

    return _text_task(build, 256, {"sgd": 0.05, "adamw": 5e-4}, 1, characters(documentation()))


def keys() -> Task:
    """A million keys, whose frequencies fall as their numbers grow (Zipf), and a true weight for each.

    ``--width`` says how many keys the model has. Those beyond share weights with others.
    """

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # The logarithm of a key is uniform, so that its frequency is 1 / (key + 1).
        places = torch.rand(count, KEYS, dtype=torch.float64, generator=generator)
        found = (1e7**places).long() - 1
        chance = torch.sigmoid(_true_weights(found).sum(1) / KEYS**0.5 * 3)
        return found, (torch.rand(count, generator=generator) < chance).long()

    held_out = draw(HELD_OUT, torch.Generator().manual_seed(1))
    return Task(KeyRegression, 1_000_000, "sgd", {"sgd": 0.5, "adamw": 0.02}, 64, draw, held_out)


def _true_weights(found: Tensor) -> Tensor:
    """Return a weight from -1 to 1 for each key, which depends on nothing else."""
    return ((found * 2_654_435_761) % 4_294_967_291 % 2001 - 1000).float() / 1000


TASKS = {"cnn": digits, "lstm": words, "gpt": letters, "logistic": keys}


def _text_task(
    build: Callable[[int], nn.Module],
    width: int,
    learning_rates: dict[str, float],
    batch: int,
    tokens: Tensor,
) -> Task:
    """Windows of ``CONTEXT`` tokens. Of every ten stretches the first is held out, and some of it looked at."""
    windows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    chosen = torch.arange(len(windows)) // STRETCH % 10 == 0
    training = windows[~chosen]

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = training[torch.randint(len(training), (count,), generator=generator)]
        return drawn[:, :-1], drawn[:, 1:]

    held_out = windows[chosen][:: max(1, int(chosen.sum()) // LOOKED_AT)]
    return Task(build, width, "adamw", learning_rates, batch, draw, (held_out[:, :-1], held_out[:, 1:]))


def _sgd(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=learning_rate, fused=True)


def _adam(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    for group in groups:
        group["betas"] = (group.pop("momentum"), 0.99)
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


OPTIMIZERS = {
    "sgd": Optimizer("sgd", _sgd, "optimizer", 0.0),
    "adamw": Optimizer("adamw", _adam, "correction", 0.05),
}
