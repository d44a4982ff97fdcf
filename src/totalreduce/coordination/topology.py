"""The ranks with which one rank exchanges the messages of a cycle.

Votes travel by dissemination with radix 4: in round r of a vote every rank sends to the ranks 4**r, 2 * 4**r and
3 * 4**r further on, and receives from the ranks as far before it. So up to four ranks have one round. Requests travel
up a binomial tree to its root, rank 0, and responses travel down the same tree.
"""

from __future__ import annotations

from typing import Final, final

__all__ = ["Topology"]

#: With radix 2 a rank sends fewer messages (2 instead of 3 among four ranks), but a vote has more rounds (2 instead of
#: 1). Where ranks share cores, a round takes longer than a message, because it ends with a switch of processes.
_RADIX: Final = 4


@final
class Topology:
    """The neighbours of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank  #: Index of this rank in the group.
        self.world_size = world_size
        offsets = []
        stride = 1
        while stride < world_size:
            offsets.append(range(stride, min(_RADIX * stride, world_size), stride))
            stride *= _RADIX
        self.num_rounds = len(offsets)  #: Number of rounds of a vote, ceil(log4(world_size)).
        #: By round: the ranks to which this rank sends its vote.
        self.vote_targets = [[(rank + offset) % world_size for offset in each] for each in offsets]
        #: By round: the ranks from which this rank receives a vote.
        self.vote_sources = [[(rank - offset) % world_size for offset in each] for each in offsets]
        #: The rank to which this rank sends requests: its own number without the lowest one-bit.
        self.parent = rank & (rank - 1)
        levels = (rank & -rank).bit_length() - 1 if rank else (world_size - 1).bit_length()
        #: The ranks that send their requests to this rank.
        self.children = [rank + (1 << level) for level in range(levels) if rank + (1 << level) < world_size]

    def subtree(self, child: int) -> range:
        """Return a child and all ranks whose requests reach this rank through that child."""
        return range(child, min(child + (child & -child), self.world_size))
