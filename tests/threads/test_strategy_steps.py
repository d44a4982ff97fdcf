"""A strategy from outside makes its own steps, which ``DistributedOptimizer`` knows as ``StrategySteps``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import totalreduce as tr
from totalreduce.pytorch.stepping import StrategySteps
from totalreduce.strategies.strategy import Strategy, TrainingOfRank
from totalreduce.testing import run_ranks


@dataclass(frozen=True, kw_only=True)
class Alternating(Strategy):
    """Every second step exchanges gradients; in the others each rank adds its rank to the parameters."""

    name: ClassVar[str] = "alternating"

    def steps(self, training: TrainingOfRank) -> Any:
        return AlternatingSteps(self, training)


class AlternatingSteps(StrategySteps):
    sees_gradients = True

    def __init__(self, strategy: Alternating, training: TrainingOfRank) -> None:
        self.strategy, self._training = strategy, training
        self.calls: list[str] = []

    @property
    def exchanges_gradients(self) -> bool:
        return self.calls.count("stepped") == self.calls.count("step")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls.append("step")
        for parameter in self._training.parameters:
            parameter.data += self._training.group.rank
        return "a loss" if closure is None else closure()

    def stepped(self) -> None:
        self.calls.append("stepped")

    def use_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        self.calls.append(f"buckets {[list(bucket) for bucket in buckets]}")

    def ready(self, number: int) -> None:
        self.calls.append(f"ready {number}")

    def figures(self) -> dict[str, int | float | str]:
        return {"strategy": "alternating"}

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        return list(parameters) == list(self._training.parameters)

    def close(self) -> None:
        self.calls.append("close")


def test_a_strategy_makes_its_own_steps() -> None:
    def body(group):
        parameter = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([parameter], lr=1.0)
        optimizer = tr.DistributedOptimizer(inner, group=group, sync=Alternating())
        steps, values, losses = optimizer.strategy_steps, [], []
        for _ in range(4):
            optimizer.zero_grad()
            (parameter * (group.rank + 1)).sum().backward()
            losses.append(optimizer.step())
            values.append(parameter.item())
        try:
            optimizer.join()
        except tr.ConfigurationError as error:
            losses.append(str(error))
        optimizer.close()
        return values, losses, steps.calls

    for rank, (values, losses, calls) in enumerate(run_ranks(2, body)):
        assert values == [-1.5, -1.5 + rank, -3.0 + rank, -3.0 + 2 * rank]  # the mean gradient is 1.5
        assert losses[:4] == [None, "a loss", None, "a loss"]
        assert losses[4] == "join() does not support sync='alternating': give all ranks the same number of steps"
        assert calls == ["buckets [[0]]", "stepped", "ready 0", "step", "stepped", "ready 0", "step", "close"]
