"""The ranks with which one rank exchanges the messages of a cycle.

In round r of a vote every rank sends to the rank 2**r further on, and receives from the rank 2**r before it. Requests
travel up a binomial tree to its root, rank 0, and responses travel down the same tree.
"""

from __future__ import annotations

from typing import final

__all__ = ["Topology"]


@final
class Topology:
    """The neighbours of one rank.

    Attributes:
        rank: Index of this rank in the group.
        world_size: Number of ranks of the group.
        num_rounds: Number of rounds of a vote, ceil(log2(world_size)).
        parent: The rank to which this rank sends requests: its own number without the lowest one-bit.
        children: The ranks that send their requests to this rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.num_rounds = (world_size - 1).bit_length()
        self.parent = rank & (rank - 1)
        levels = (rank & -rank).bit_length() - 1 if rank else self.num_rounds
        self.children = [rank + (1 << level) for level in range(levels) if rank + (1 << level) < world_size]

    def vote_target(self, round_: int) -> int:
        """Return the rank to which this rank sends its vote in a round."""
        return (self.rank + (1 << round_)) % self.world_size

    def vote_source(self, round_: int) -> int:
        """Return the rank from which this rank receives a vote in a round."""
        return (self.rank - (1 << round_)) % self.world_size

    def subtree(self, child: int) -> range:
        """Return a child and all ranks whose requests reach this rank through that child."""
        return range(child, min(child + (child & -child), self.world_size))
