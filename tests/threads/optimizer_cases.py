"""What the optimizer's tests share: a model in several buckets, data that differ per rank, a reference."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch

from totalreduce.foundation.errors import DeadlineExceededError, MissingTensorError
from totalreduce.foundation.observer import Observer
from totalreduce.groups.group import Group
from totalreduce.pytorch.optimizer import DistributedOptimizer
from totalreduce.server.connection import Connection

torch.set_num_threads(1)  # several ranks share the test machine's few cores

BUCKET_BYTES = 1024  # cuts Net into five buckets

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class Net(torch.nn.Module):
    """Three layers, plus one that is registered first and used last."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.head = torch.nn.Linear(12, 2, dtype=dtype)
        self.first = torch.nn.Linear(6, 16, dtype=dtype)
        self.second = torch.nn.Linear(16, 12, dtype=dtype)
        self.third = torch.nn.Linear(12, 12, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.second(hidden))
        return self.head(torch.tanh(self.third(hidden)))


def batches(
    num_steps: int, size: int = 12, dtype: torch.dtype = torch.float64
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs (size, 6) and targets (size, 2) for each step; 12 divides by 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(11)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(6), draw(2)) for _ in range(num_steps)]


def shard(batch: tuple[torch.Tensor, torch.Tensor], group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's equal part of a batch."""
    return batch[0].chunk(group.world_size)[group.rank], batch[1].chunk(group.world_size)[group.rank]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def flat_grad(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector, zeros for ``None``, a copy."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.detach().flatten() for gradient in gradients])


def train_alone(factory: Factory, num_steps: int = 20, make: Callable[[], torch.nn.Module] = Net) -> torch.Tensor:
    """The reference: one process, whole batches."""
    model = make()
    optimizer = factory(list(model.parameters()))
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return flat(model)


def wrap(
    model: torch.nn.Module, group: Group, factory: Factory = OPTIMIZERS["sgd"], **settings: object
) -> DistributedOptimizer:
    """A distributed optimizer over all parameters, in small buckets."""
    settings.setdefault("bucket_bytes", BUCKET_BYTES)
    return DistributedOptimizer(factory(list(model.parameters())), model, group=group, **settings)


def outcome(step: Callable[[], object]) -> str:
    """Call ``step``; return ``"done"``, or the ranks whose gradients were missed."""
    try:
        step()
    except MissingTensorError as error:
        return f"missed {error.ranks}"
    return "done"


def all_equal(vectors: list[torch.Tensor]) -> bool:
    """Bit-identical."""
    return all(torch.equal(vector, vectors[0]) for vector in vectors)


class Submissions(Observer):
    """Names and priorities of the operations a rank submits, in order."""

    def __init__(self, group: Group) -> None:
        self.seen: list[tuple[str, int]] = []
        group.observers.append(self)

    def submitted(self, name: str, iteration: int, now: float, *, num_bytes: int, priority: int) -> None:
        self.seen.append((name, priority))

    def take(self) -> list[tuple[str, int]]:
        """What was submitted since the last call."""
        seen, self.seen = self.seen, []
        return seen


class Branches(torch.nn.Module):
    """Two branches and a shared stem; the caller says which branch."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.stem, self.left, self.right = net.first, copy.deepcopy(net.second), copy.deepcopy(net.second)
        self.head = net.head
        self.never = torch.nn.Linear(4, 4, dtype=torch.float64)
        torch.nn.init.ones_(self.never.weight)
        torch.nn.init.ones_(self.never.bias)

    def forward(self, inputs: torch.Tensor, branch: str) -> torch.Tensor:
        hidden = torch.tanh(self.stem(inputs))
        chosen = self.left if branch == "left" else self.right
        return self.head(torch.tanh(chosen(hidden)))


@contextlib.contextmanager
def impatient(group: Group, timeout_s: float = 0.3, client: Connection | None = None) -> Iterator[None]:
    """Let this rank alone run out of time soon: a test's other calls, and its other ranks, keep their usual time-out.

    Operations that begin within it keep this time-out: a later call that waits for one of them may have to be repeated.

    Args:
        group: Whose waits and operations get the time-out.
        timeout_s: The time-out in seconds.
        client: A parameter server's client, whose requests get it too.
    """
    engine = group._runner.engine
    usual, engine.config = engine.config, dataclasses.replace(engine.config, timeout_s=timeout_s)
    if client is not None:
        before, client._timeout_s = client._timeout_s, timeout_s
    try:
        yield
    finally:
        engine.config = usual
        if client is not None:
            client._timeout_s = before


def repeat_until_done(call: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> int:
    """Repeat a call that runs out of time, with ``meanwhile`` after each time; return how often it ran out of time."""
    num_repeated = 0
    while True:
        try:
            call()
        except DeadlineExceededError:
            num_repeated += 1
            meanwhile()
        else:
            return num_repeated
