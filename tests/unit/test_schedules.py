"""Schedules as mathematics: every rank ends with every contribution exactly once, however the ranks interleave.

The bodies are read as late as a transport may read them (when the receiver uses them), which is the harshest reading of
the contract "causally free".
"""

import math
import random
from collections import Counter

import pytest

from totalreduce.foundation.types import OpKind
from totalreduce.schedules import chain, dissemination, program_for, ring, star, star_program_for
from totalreduce.schedules.actions import NOTHING, Mode, Receive, Send, compile_program

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 13)


class Execution:
    """One lane of one operation on all ranks; a chunk is the multiset of the ranks whose contributions it holds."""

    def __init__(self, kind: OpKind | None, world_size: int, root: int, *, widened: bool) -> None:
        """``kind``: ``None`` for the star."""
        self.programs = [
            star_program_for(rank, world_size, root) if kind is None else program_for(kind, rank, world_size, root)
            for rank in range(world_size)
        ]
        num_chunks = self.programs[0].num_chunks
        self.result = [[Counter([rank]) for _ in range(num_chunks)] for rank in range(world_size)]
        self.partial = [[Counter() for _ in range(num_chunks)] for _ in range(world_size)] if widened else self.result
        self.position = [0] * world_size
        self.wire: dict[tuple[int, int, int], Send] = {}

    def advance(self, rank: int) -> bool:
        """One action of one rank, if it can be done."""
        actions = self.programs[rank].actions
        if self.position[rank] == len(actions):
            return False
        action = actions[self.position[rank]]
        if isinstance(action, Send):
            assert (rank, action.peer, action.step) not in self.wire
            self.wire[rank, action.peer, action.step] = action
        else:
            sent = self.wire.pop((action.peer, rank, action.step), None)
            if sent is None:
                return False
            self.receive(rank, action, sent)
        self.position[rank] += 1
        return True

    def receive(self, rank: int, action: Receive, sent: Send) -> None:
        assert (sent.chunk, sent.partial) == (action.chunk, action.partial)
        if action.chunk == NOTHING:
            return
        body = (self.partial if sent.partial else self.result)[action.peer][sent.chunk]
        if action.mode is Mode.REPLACE:
            self.result[rank][action.chunk] = Counter(body)
        else:
            target = self.partial if action.mode is Mode.COMBINE else self.result
            mine = (self.partial if action.onto_partial else self.result)[rank][action.chunk]
            target[rank][action.chunk] = mine + body

    def run(self, seed: int) -> None:
        generator = random.Random(seed)
        ranks = list(range(len(self.programs)))
        while any(position < len(p.actions) for position, p in zip(self.position, self.programs, strict=True)):
            generator.shuffle(ranks)
            eager = generator.random() < 0.5  # one rank runs as far as it can, or all take turns
            progress = False
            for rank in ranks:
                while self.advance(rank):
                    progress = True
                    if not eager:
                        break
            assert progress, f"deadlock at {self.position}"
        assert not self.wire


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ring_allreduce_combines_every_contribution_once(world_size: int, widened: bool) -> None:
    for seed in range(10):
        execution = Execution(OpKind.ALLREDUCE, world_size, 0, widened=widened)
        execution.run(seed)
        everything = Counter(range(world_size))
        assert execution.result == [[everything] * world_size] * world_size


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_star_allreduce_combines_every_contribution_once(world_size: int, widened: bool) -> None:
    for root in range(world_size):
        execution = Execution(None, world_size, root, widened=widened)
        execution.run(root)
        assert execution.result == [[Counter(range(world_size))]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_chain_broadcast_gives_everybody_the_roots(world_size: int) -> None:
    for root in range(world_size):
        execution = Execution(OpKind.BROADCAST, world_size, root, widened=False)
        execution.run(root)
        assert execution.result == [[Counter([root])]] * world_size


@pytest.mark.parametrize("kind", [*OpKind, None])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nobody_is_done_before_everybody_has_begun(kind: OpKind | None, world_size: int) -> None:
    """What makes a mismatch an error on every rank, and a barrier a barrier."""
    for absent in range(world_size):
        execution = Execution(kind, world_size, world_size // 2, widened=False)
        present = [rank for rank in range(world_size) if rank != absent]
        while any(execution.advance(rank) for rank in present):
            pass
        for rank in present:
            assert execution.position[rank] < len(execution.programs[rank].actions)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_costs(world_size: int) -> None:
    num_bytes = 1000 * world_size
    actions = program_for(OpKind.ALLREDUCE, 0, world_size, 0).actions
    sends = [action for action in actions if isinstance(action, Send)]
    assert ring.cost(world_size, num_bytes) == ring.Cost(len(sends), len(sends) * 1000.0)
    assert chain.cost(world_size, num_bytes).bytes_sent == (num_bytes if world_size > 1 else 0)
    assert chain.cost(world_size, num_bytes).steps == 2 * (world_size - 1)
    assert star.cost(world_size, num_bytes) == star.Cost(2, (world_size - 1) * num_bytes)
    rounds = math.ceil(math.log2(world_size))
    assert dissemination.cost(world_size, 0).steps == rounds
    assert len(program_for(OpKind.BARRIER, 0, world_size, 0).targets) == rounds


def test_the_star_is_for_small_tensors_of_more_than_two_ranks() -> None:
    assert star.pays(5, 1024, 16 * 1024)
    assert not star.pays(5, 1025, 16 * 1024)
    assert not star.pays(2, 0, 16 * 1024)


def test_ring_neighbours_only() -> None:
    program = program_for(OpKind.ALLREDUCE, 2, 5, 0)
    assert program.sources == (1,)
    assert program.targets == (3,)
    assert len(program.receives) == 8


@pytest.mark.parametrize("kind", [Send, Receive])
def test_a_slot_used_twice_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match=r"slot \(peer, step\) = \(1, 0\) twice"):
        compile_program(iter([kind(1, 0, 0), kind(1, 0, 1)]), 2)
