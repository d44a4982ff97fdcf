"""The steps of asynchronous gossip: a thread of each passive rank answers, beside training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import DeadlineExceededError, GroupClosed
from totalreduce.foundation.forking import HomeProcess
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.pytorch.replica import ModelReplica, check_equal
from totalreduce.pytorch.stepping import StrategySteps
from totalreduce.strategies.async_gossip import AsyncGossip, GossipNode
from totalreduce.strategies.strategy import TrainingOfRank
from totalreduce.tensors.compilation import never_compiled
from totalreduce.tensors.work import Work

__all__ = ["GossipSteps"]

_QUESTIONS, _ANSWERS = 0, 1
#: How long the thread waits for a question, at most, before it looks whether it is to end.
_LOOK_S = 0.05
#: How long the end of the thread is waited for.
_END_S = 5.0


@final
class _Sent:
    """Messages that have not left yet, whose memory must stay."""

    def __init__(self) -> None:
        self._works: deque[tuple[Work, torch.Tensor]] = deque()

    def send(self, group: Group, message: Array, to: int, tag: int) -> None:
        """Send a message, uint8, which nobody changes from now on.

        Raises the error of an earlier message that could not be sent.
        """
        block = torch.from_numpy(message)
        self._works.append((group.send(block, dst=to, tag=tag), block))
        while self._works and self._works[0][0].done():
            ended, _ = self._works.popleft()
            error = ended.exception()
            if error is not None and not isinstance(error, GroupClosed):
                raise error


@final
@never_compiled
class GossipSteps(StrategySteps):
    """Asynchronous gossip on this rank.

    Attributes:
        strategy: The settings.
        is_interrupted: Always false: a step waits for no other rank.
    """

    strategy: AsyncGossip

    def __init__(self, strategy: AsyncGossip, training: TrainingOfRank) -> None:
        """Begin. Collective; errors as of ``LocalSteps``."""
        group = training.group
        self.strategy, self._inner = strategy, training.optimizer
        self._home = HomeProcess("the thread of a strategy")
        self._replica = ModelReplica(training.parameters, training.optimizer)
        check_equal(self._replica, strategy.name, group, training.name)
        self._group = group.control.subgroup(range(group.world_size), name=f"{training.name}.gossip")
        self._everything = range(len(self._replica.sizes))
        self._node = GossipNode(strategy, group.rank, group.world_size, self._replica.read(self._everything))
        self._lock, self._sent = threading.Lock(), _Sent()
        self._awaited: tuple[Work, torch.Tensor] | None = None
        self._finals: list[Work] = []  #: Of ``finish``: that all ranks call it, the average, and that all have it.
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="totalreduce-gossip", daemon=True)
        if not self._node.is_active:
            self._thread.start()

    @property
    def exchanges(self) -> int:
        """The number of averages in which this rank had a part."""
        with self._lock:
            return self._node.exchanges

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with this rank's gradients, and do what ``stepped`` does; return the closure's loss.

        Raises:
            PeerLost: A rank is lost.
        """
        self._home.check()
        loss = self._inner.step() if closure is None else self._inner.step(closure)
        self.stepped()
        return loss

    def stepped(self) -> None:
        """Note that a step has ended: add what has come from other ranks, and begin an exchange. No rank waits.

        Raises:
            PeerLost: A rank is lost.
        """
        self._take_answer(0.0)
        self._check_thread()
        with self._lock:
            values = self._replica.read(self._everything)
            partner = self._node.stepped(values)
            self._replica.write(self._everything, values)
        if partner is not None:
            answer = torch.empty(values.nbytes, dtype=torch.uint8, device="cpu")
            self._awaited = self._group.recv(answer, src=partner, tag=_ANSWERS), answer
            self._sent.send(self._group, values.view(np.uint8), partner, _QUESTIONS)

    def _check_thread(self) -> None:
        """Raise the error with which the thread has ended."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def _take_answer(self, timeout_s: float) -> None:
        """Take the answer of a passive rank in, if it comes within ``timeout_s``; 0: if it has come already."""
        if self._awaited is None:
            return
        work, answer = self._awaited
        if timeout_s or work.done():
            work.wait(timeout_s or None)
            self._awaited = None
            with self._lock:
                self._node.answered(answer.numpy().view(self._replica.dtype))

    def _run(self) -> None:
        """Answer questions, in the thread of a passive rank."""
        try:
            while not self._is_closed:
                values = np.empty(sum(self._replica.sizes), self._replica.dtype)
                source = self._await_question(torch.from_numpy(values.view(np.uint8)))
                if source is not None:
                    with self._lock:
                        change = self._node.asked(values)
                    self._sent.send(self._group, change.view(np.uint8), source, _ANSWERS)
        except BaseException as error:
            with self._lock:
                self._error = error

    def _await_question(self, values: torch.Tensor) -> int | None:
        """Receive the parameters of an active rank; return the rank. ``None``: the thread is to end."""
        work = self._group.recv(values, src=None, tag=_QUESTIONS)
        while not self._is_closed:
            try:
                work.wait(_LOOK_S)
            except DeadlineExceededError:
                continue
            return work.source
        return None

    def figures(self) -> dict[str, int | float | str]:
        """Return the strategy's name, and the number of averages. Any thread."""
        return {"strategy": self.strategy.name, "exchanges": self.exchanges}

    def trains(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the strategy trains these parameters."""
        return self._replica.holds(parameters)

    def finish(self) -> None:
        """Wait until all ranks have called this, and set the parameters to the average of all ranks. Collective.

        Ranks may have taken different numbers of steps. Training may go on afterwards.

        Raises:
            PeerLost: A rank is lost.
            TotalReduceError: The thread that answers other ranks has failed before; this is its error.
            DeadlineExceededError: Another rank has not called this within the group's ``timeout_s``. Repeat the call.
        """
        self._home.check()
        self._check_thread()
        group = self._group
        self._take_answer(group.timeout_s)
        if not self._finals:
            self._finals.append(group.allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), name="finish/all"))
        self._finals[0].wait()
        if len(self._finals) == 1:  # all ranks have their answers, so nobody asks any more
            with self._lock:
                values = self._replica.read(self._everything)
                self._node.settle(values)
                self._replica.write(self._everything, values)
            self._finals.append(group.allreduce(torch.from_numpy(values), name="finish/mean", op=ReduceOp.AVG))
        mean = self._finals[1].wait().numpy()
        with self._lock:
            self._replica.write(self._everything, mean)
            self._node.settle(mean)
        if len(self._finals) == 2:
            self._finals.append(group.allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), name="finish/end"))
        self._finals[2].wait()  # no rank is asked before it has the average
        self._finals.clear()

    def close(self) -> None:
        """End the thread. Other ranks that ask this one get no answer: call ``finish`` before."""
        self._is_closed = True
        if self._home.is_here and self._thread.ident is not None:
            self._thread.join(_END_S)
