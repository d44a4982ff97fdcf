"""Strategies whose ranks live in one process: no thread, no network, every byte counted. Public.

``StrategyRanks`` has a session and an array of parameters for each rank. ``step`` adds an update to each rank's
parameters, as a local step does, and carries the exchanges out that begin; their results are applied when they are due.
``finish`` ends a training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from totalreduce.foundation.partition import parts_of_range
from totalreduce.kernels.arrays import Array
from totalreduce.strategies.strategy import HostElements, Pending, RestartableSession, Strategy, StrategySession
from totalreduce.testing.lockstep import run_exchanges

__all__ = ["ArrayReplica", "StrategyRanks"]


@final
class ArrayReplica(HostElements):
    """A ``Replica`` that is a list of arrays."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = list(arrays)  #: The tensors, one-dimensional, of one dtype.
        self.state = np.zeros(0, arrays[0].dtype)  #: Stands for the state of an optimizer.
        self.state_layout = ""  #: Stands for the names of its tensors.
        self.sizes = [array.size for array in arrays]  #: The number of elements of each tensor.
        self.dtype: np.dtype[Any] = arrays[0].dtype
        self.learning_rate = 0.0  #: Stands for that of an optimizer.

    def read(self, tensors: Sequence[int]) -> Array:
        """Return a copy of the elements of these tensors."""
        return np.concatenate([self.arrays[tensor] for tensor in tensors])

    def write(self, tensors: Sequence[int], values: Array) -> None:
        """Set the elements of these tensors."""
        begin = 0
        for tensor in tensors:
            array = self.arrays[tensor]
            array[:] = values[begin : begin + array.size]
            begin += array.size

    def read_range(self, begin: int, end: int) -> Array:
        """Return a copy of a range of elements of all tensors, which lie one behind the other."""
        parts = [self.arrays[tensor][first:last] for tensor, first, last in parts_of_range(self.sizes, begin, end)]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def write_range(self, begin: int, values: Array) -> None:
        """Set a range of elements."""
        done = 0
        for tensor, first, last in parts_of_range(self.sizes, begin, begin + values.size):
            self.arrays[tensor][first:last] = values[done : done + last - first]
            done += last - first

    def describe_state(self) -> str:
        """Return ``state_layout``."""
        return self.state_layout

    def read_state(self) -> Array:
        """Return a copy of ``state``."""
        return self.state.copy()

    def write_state(self, values: Array) -> None:
        """Set ``state``."""
        self.state = values


@final
class StrategyRanks:
    """All ranks of a strategy."""

    def __init__(self, strategy: Strategy, world_size: int, start: Sequence[Array]) -> None:
        """``start``: the tensors with which all ranks begin; they are copied."""
        self.replicas = [ArrayReplica([array.copy() for array in start]) for _ in range(world_size)]  #: By rank.
        #: By rank.
        self.sessions = [strategy.session(replica, rank, world_size) for rank, replica in enumerate(self.replicas)]
        self.sent = np.zeros(world_size, np.int64)  #: By rank: the bytes that it has sent.
        self.steps = 0  #: The number of steps.
        self._waiting: list[tuple[int, list[tuple[Pending, Any]]]] = []

    def parameters(self, rank: int) -> Array:
        """Return a copy of a rank's parameters."""
        replica = self.replicas[rank]
        return replica.read(range(len(replica.sizes)))

    def step(self, updates: Sequence[Array], weights: Sequence[float] | None = None) -> None:
        """Take a step on all ranks.

        Args:
            updates: What is added to the parameters of each rank. In a step in which the strategy exchanges gradients,
                their mean is added on all ranks.
            weights: What the step counts on each rank.
        """
        synchronous = {session.exchanges_gradients() for session in self.sessions}
        assert len(synchronous) == 1, "ranks differ in whether gradients are exchanged"
        if synchronous.pop():
            updates = [np.mean(updates, axis=0, dtype=updates[0].dtype)] * len(updates)
        for replica, update in zip(self.replicas, updates, strict=True):
            everything = range(len(replica.sizes))
            replica.write(everything, replica.read(everything) + update)
        self.steps += 1
        begun = [
            session.stepped(1.0 if weights is None else weights[rank]) for rank, session in enumerate(self.sessions)
        ]
        self._carry_out(begun)
        self._apply_due(self.steps)

    def finish(self) -> None:
        """Make the parameters of all ranks equal, as ``strategy_steps.finish()`` does. More steps may follow."""
        self._apply_due(math.inf)
        self._carry_out([session.ending() for session in self.sessions])
        self._apply_due(self.steps)

    @property
    def under_way(self) -> list[tuple[int, int]]:
        """The exchanges whose results are not applied: the channel of each, and the steps after which it is due."""
        return [(done[0][0].channel, due) for due, done in self._waiting]

    def restart(self, under_way: Sequence[tuple[int, int]]) -> None:
        """Have exchanges begin anew from the states of the sessions, as ``tr.recoverable`` does after a loss."""
        self._waiting.clear()
        for channel, due in under_way:
            self._carry_out([[_restarted(session, channel, due)] for session in self.sessions])

    def _carry_out(self, begun: Sequence[list[Pending]]) -> None:
        """Run the exchanges that begin after a step; ``begun``: by rank."""
        for pending in zip(*begun, strict=True):
            assert len({(each.channel, each.due) for each in pending}) == 1, "ranks begin different exchanges"
            results, traffic = run_exchanges([each.exchange for each in pending])
            self.sent += traffic.sent
            self._waiting.append((pending[0].due, list(zip(pending, results, strict=True))))

    def _apply_due(self, steps: float) -> None:
        """Apply the results that are due after so many steps."""
        for due, done in list(self._waiting):
            if due <= steps:
                self._waiting.remove((due, done))
                for session, (each, result) in zip(self.sessions, done, strict=True):
                    session.apply(each.channel, result)


def _restarted(session: StrategySession, channel: int, due: int) -> Pending:
    assert isinstance(session, RestartableSession)
    return session.restart(channel, due)
