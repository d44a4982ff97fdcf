"""A shard whose gradients a strategy applies: who is answered when, with which values, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch

from totalreduce.server.clocks import Eventual
from totalreduce.server.gathering import Gathering
from totalreduce.server.messages import Form, Header, Kind, Message, Spec
from totalreduce.server.served import Async, Quorum, StaleSynchronous
from totalreduce.server.served_steps import ServedStrategy
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard
from totalreduce.server.shares import Shares
from totalreduce.server.torch_table import TorchTable

F32 = np.dtype(np.float32)
#: Two elements, whether there is a gradient of them, and a learning rate in two words.
KEYS = 5


class Rig:
    """A server of one parameter with two elements, and two workers of other ranks."""

    def __init__(self, strategy: ServedStrategy) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([parameter], lr=5.0)
        shares = Shares([2], 1, cuts=True, num_rates=2)
        assert shares.layout.num_keys == KEYS
        table = TorchTable(shares, 0, [parameter], inner, F32)
        gathering = Gathering(partial(strategy.serve, 2), 2, table)
        shard = Shard(9, table, Spec(KEYS, 1, F32), Eventual(), 2, gathering=gathering)
        self.server = Server(9)
        self.server.begin_epoch({0: [9]}, {0: shard})
        self.numbers = [-1, -1]

    def ask(self, worker: int, kind: Kind, values=None, end: int = KEYS, now: float = 0.0):
        previous, self.numbers[worker] = self.numbers[worker], self.numbers[worker] + 1
        form = Form.RANGE if kind.pushes or kind.pulls else Form.NOTHING
        size = 0 if values is None else values.nbytes
        header = Header(
            kind, form, number=previous + 1, previous=previous, mark=previous + 1, end=end, value_bytes=size
        )
        return self.answers(self.server.take(worker, Message(header, None, values), now))

    def push(self, worker: int, gradient: float, rate: float = 1.0, now: float = 0.0):
        rates = np.array([rate], np.float64).view(np.float32)
        return self.ask(
            worker, Kind.PUSH_PULL, np.concatenate([np.array([gradient, 0, 1], np.float32), rates]), now=now
        )

    def answers(self, messages):
        """By worker: the first element of the values, or the kind of an answer without values."""
        return {
            worker: message.header.kind
            if message.header.kind is not Kind.DONE or message.values is None
            else float(message.values[0])
            for worker, message in messages
        }


def test_a_worker_is_answered_when_the_rule_says_so_and_with_the_values_of_this_moment() -> None:
    rig = Rig(StaleSynchronous(slack=1))
    assert rig.push(0, -1.0) == {0: 1.0}
    assert rig.push(0, -2.0) == {}
    assert rig.push(1, -4.0, rate=0.5) == {1: 5.0, 0: 5.0}


def test_a_pull_behind_the_end_has_the_last_values() -> None:
    rig = Rig(Async())
    assert rig.push(0, -1.0) == {0: 1.0}
    assert rig.ask(0, Kind.FINISH) == {0: Kind.DONE}
    assert rig.push(1, -4.0) == {1: 5.0}
    assert rig.ask(0, Kind.PULL) == {0: 5.0}


def test_a_worker_that_finishes_lets_others_go_on() -> None:
    rig = Rig(Quorum(n=2))
    assert rig.push(0, -3.0) == {}
    assert rig.ask(1, Kind.FINISH) == {1: Kind.DONE, 0: 3.0}


def test_a_server_does_what_is_due() -> None:
    rig = Rig(Quorum(n=1, grace_s=0.5))
    assert rig.server.due() is None
    assert rig.push(0, -2.0, now=10.0) == {}
    assert rig.server.due() == 10.5
    assert rig.answers(rig.server.tick(10.4)) == {}
    assert rig.answers(rig.server.tick(10.5)) == {0: 2.0}
    assert rig.server.due() is None


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.ASSIGN, Kind.CLOCK, Kind.SAVE, Kind.WITHDRAW, Kind.MEET])
def test_what_a_strategy_does_not_ask_is_refused(kind: Kind) -> None:
    rig = Rig(Async())
    values = np.zeros(KEYS, np.float32) if kind.pushes else None
    assert rig.ask(0, kind, values) == {0: Kind.REFUSED}
    assert rig.push(0, -1.0) == {0: 1.0}


def test_a_part_of_a_gradient_and_a_second_one_are_refused() -> None:
    rig = Rig(Quorum(n=2))
    assert rig.ask(0, Kind.PUSH_PULL, np.zeros(2, np.float32), end=2) == {0: Kind.REFUSED}
    assert rig.push(0, -1.0) == {}
    assert rig.push(0, -1.0) == {0: Kind.REFUSED}
    assert rig.push(1, -3.0) == {1: 2.0, 0: 2.0}
