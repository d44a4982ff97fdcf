"""The gradients that workers push to a shard, of which the rule of a strategy says what becomes of them (``sessions``).

In a step a worker makes one request to each shard (``PUSH_PULL``): with its gradient, and for the values with which the
rule answers it. They are those of the moment at which it is answered.

A plain object: ``now`` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from totalreduce.foundation.errors import ProtocolError
from totalreduce.kernels.arrays import Array
from totalreduce.server.messages import Kind
from totalreduce.server.sessions import Answer, Apply, Push, ServerSession
from totalreduce.server.torch_table import TorchTable

__all__ = ["Gathering"]


@final
class Gathering:
    """The gradients of all workers of one shard.

    Attributes:
        table: The values.
        session: The rule, with what it has observed.
    """

    def __init__(self, serve: Callable[[Apply], ServerSession], num_workers: int, table: TorchTable) -> None:
        """Begin; all workers have the values of the table. ``serve``: makes the rule."""
        self.session, self.table = serve(table.apply), table
        #: By worker: the number of its gradients, and the version of the values that it has.
        self._clocks, self._versions = [0] * num_workers, [0] * num_workers
        self._unanswered: set[int] = set()
        self._answered: list[int] = []  #: Since ``take_answered`` was called last.
        #: By worker that was answered, until its next request: the values that it gets.
        self._values: dict[int, Array] = {}

    def take(self, worker: int, kind: Kind, pushed: Array | None, now: float, *, is_lent: bool) -> None:
        """Take in a request of a worker when it comes, with what it pushes (``TorchTable.take_rates``).

        ``is_lent``: somebody may change what is pushed, after the worker was answered.

        Raises:
            ProtocolError: It is not the gradient of all keys, or this worker has not been answered; or it is something
                else than a gradient, a pull or the end.
        """
        is_gradient = kind is Kind.PUSH_PULL and pushed is not None and pushed.size == self.table.values.size
        if kind is Kind.FINISH:
            self._values.pop(worker, None)
            self._unanswered.discard(worker)
            self._note(self.session.finished(worker, now))
        elif is_gradient and pushed is not None and worker not in self._unanswered:
            gradient = self.table.take_rates(pushed)
            push = Push(worker, self._clocks[worker], self._versions[worker], gradient.copy() if is_lent else gradient)
            self._values.pop(worker, None)
            self._clocks[worker] += 1
            self._unanswered.add(worker)
            self._note(self.session.push(push, now))
        elif kind is not Kind.PULL:
            raise ProtocolError(f"the server of a strategy expects a gradient of worker {worker}, and not {kind.name}")

    def due(self) -> float | None:
        """Return the time at which ``tick`` is to be called; ``None``: not before another method was called."""
        return self.session.due()

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._note(self.session.tick(now))

    def _note(self, answers: Sequence[Answer]) -> None:
        for worker in (answer.worker for answer in answers if answer.worker in self._unanswered):
            self._unanswered.discard(worker)
            self._versions[worker], self._values[worker] = self.session.version, self.table.values
            self._answered.append(worker)

    def take_answered(self) -> list[int]:
        """Return the workers that were answered since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def has_answered(self, worker: int) -> bool:
        """Return whether the last gradient of a worker was answered."""
        return worker not in self._unanswered

    def pull(self, worker: int) -> Array:
        """Return the values with which a worker was answered. Nobody changes them."""
        return self._values.get(worker, self.table.values)
