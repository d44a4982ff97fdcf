"""Trees: logarithmic latency. Binomial broadcast and reduce, and allreduce over two binary trees.

*Binomial*: in round k the 2**k ranks that have the data pass it on; a reduce is the same backwards. ceil(log2 n) steps,
but an inner rank sends the tensor several times: for small tensors. Behind a broadcast empty messages, the consent,
come back up (see ``chain``).

*Double tree*: every half of the tensor is reduced up and broadcast down a binary tree of its own, and the trees are
laid so that an inner rank of one is a leaf of the other: every rank sends and receives about twice the tensor in all,
in 2 log2 n steps, and lanes follow each other. Source: Sanders, Speck and Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Comput. 35 (2009), DOI 10.1016/j.parco.2009.09.001; NCCL has the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

from totalreduce.foundation.types import Algorithm, OpKind
from totalreduce.schedules.actions import NOTHING, Cost, Mode, Receive, Schedule, Send, compile_program
from totalreduce.schedules.spec import ScheduleSpec

__all__ = ["SCHEDULES", "binomial_broadcast", "binomial_cost", "binomial_reduce", "cost", "double_tree_allreduce"]


def _masks(position: int, world_size: int) -> list[int]:
    """Distances to the children of a position in the binomial tree with root 0, nearest first."""
    masks, mask = [], 1
    while mask < world_size and not position & mask:
        if position + mask < world_size:
            masks.append(mask)
        mask *= 2
    return masks


def binomial_reduce(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    position = (rank - root) % world_size
    masks = _masks(position, world_size)
    for mask in masks:
        child = position + mask
        last = position == 0 and mask == masks[-1]
        yield Receive(
            (child + root) % world_size,
            0,
            0,
            Mode.COMBINE_LAST if last else Mode.COMBINE,
            partial=bool(_masks(child, world_size)),
            onto_partial=mask != masks[0],
        )
    if position:
        parent = position & (position - 1)
        yield Send((parent + root) % world_size, 0, 0, partial=bool(masks))


def binomial_broadcast(rank: int, world_size: int, root: int) -> Schedule:
    """Yield the actions of one lane on ``rank``."""
    position = (rank - root) % world_size
    parent = ((position & (position - 1)) + root) % world_size
    children = [(position + mask + root) % world_size for mask in reversed(_masks(position, world_size))]
    if position:
        yield Receive(parent, 0, 0)
    for child in children:
        yield Send(child, 0, 0)
    for child in children:
        yield Receive(child, 1, NOTHING, once=True)
    if position:
        yield Send(parent, 1, NOTHING, once=True)


def binomial_cost(world_size: int, num_bytes: int, *, consent: bool = False) -> Cost:
    """ceil(log2 n) rounds (and as many for the consent); the root sends (or receives) the tensor in every one."""
    rounds = (world_size - 1).bit_length()
    return Cost(2 * rounds if consent else rounds, float(rounds * num_bytes))


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's neighbours in a binary tree."""

    parent: int | None
    children: tuple[int, ...]


def _place(index: int, size: int) -> _Place:
    """Neighbours of node ``index`` (from 1) in the tree in which every odd node is a leaf."""
    low, high, parent = 1, size, None
    while True:
        node = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
        if node == index:
            break
        parent = node
        low, high = (low, node - 1) if index < node else (node + 1, high)
    below = [(low, node - 1), (node + 1, high)]
    children = tuple(first - 1 + (1 << ((last - first + 1).bit_length() - 1)) for first, last in below if first <= last)
    return _Place(parent, children)


def _tree(rank: int, world_size: int, which: int) -> _Place:
    """Neighbours of a rank in one of the two trees; the second is the first, shifted by one rank."""
    place = _place((rank + which) % world_size + 1, world_size)

    def rank_of(index: int) -> int:
        return (index - 1 - which) % world_size

    return _Place(
        None if place.parent is None else rank_of(place.parent), tuple(rank_of(child) for child in place.children)
    )


def double_tree_allreduce(rank: int, world_size: int) -> Schedule:
    """Yield the actions of one lane on ``rank``; chunk 0 goes over the first tree, chunk 1 over the second."""
    trees = [_tree(rank, world_size, which) for which in (0, 1)]
    for which, tree in enumerate(trees):
        for child in tree.children:
            last = tree.parent is None and child == tree.children[-1]
            yield Receive(
                child,
                which,
                which,
                Mode.COMBINE_LAST if last else Mode.COMBINE,
                partial=bool(_tree(child, world_size, which).children),
                onto_partial=child != tree.children[0],
            )
        if tree.parent is not None:
            yield Send(tree.parent, which, which, partial=bool(tree.children))
    for which, tree in enumerate(trees):
        if tree.parent is not None:
            yield Receive(tree.parent, 2 + which, which)
        for child in tree.children:
            yield Send(child, 2 + which, which)


def cost(world_size: int, num_bytes: int, num_pieces: int = 1, widening: int = 1) -> Cost:
    """Up and down both trees; an inner rank of one tree has two children there and is a leaf of the other.

    A level of a tree takes the time of two halves of the tensor, and the pieces follow each other from level to level.
    ``widening``: of unfinished sums, which are most of what goes up.
    """
    depth = world_size.bit_length() - 1
    if depth == 0:
        return Cost(0, 0.0)
    num_bytes_up = num_bytes / 2 if world_size == 2 else num_bytes * (num_pieces + depth - 1) / num_pieces
    widened = widening if world_size > 2 else 1
    return Cost(2 * depth, (1.0 + widened) * num_bytes_up, depth + num_pieces - 1)


SCHEDULES = (
    ScheduleSpec(
        kind=OpKind.ALLREDUCE,
        name=Algorithm.TREE,
        make=lambda at: compile_program(
            double_tree_allreduce(at.rank, at.world_size), 2, partial_sums=at.world_size > 2
        ),
        # In shared memory a star takes as long, and its order of addition is one that the fast lane can keep.
        cost=lambda work: None if work.shared else cost(work.world_size, work.num_bytes, work.lanes, work.widening),
    ),
    ScheduleSpec(
        kind=OpKind.BROADCAST,
        name=Algorithm.TREE,
        make=lambda at: compile_program(
            binomial_broadcast(at.rank, at.world_size, at.root), 1, pipeline_ranks=at.world_size
        ),
        cost=lambda work: binomial_cost(work.world_size, work.num_bytes, consent=True),
    ),
    ScheduleSpec(
        kind=OpKind.REDUCE,
        name=Algorithm.TREE,
        make=lambda at: compile_program(
            binomial_reduce(at.rank, at.world_size, at.root),
            1,
            partial_sums=at.world_size > 2,
            preserves=at.rank != at.root,
            pipeline_ranks=at.world_size,
        ),
        # In shared memory for the same reason as above.
        cost=lambda work: None if work.shared else binomial_cost(work.world_size, work.num_bytes),
    ),
)
