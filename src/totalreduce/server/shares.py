"""Which server has which parts of a model's parameters: shares of about the same size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from totalreduce.pytorch.intervals import Interval
from totalreduce.server.layout import Layout

__all__ = ["Shares", "shares_of"]

#: A tensor of fewer elements is not cut: a message costs more than its bytes.
_CUT_ELEMENTS_MIN: Final = 16 * 1024
#: A larger tensor is cut into parts of about a fair share, divided by this number.
_PARTS: Final = 4


def shares_of(sizes: Sequence[int], count: int, *, cuts: bool) -> list[list[Interval]]:
    """Return the parts of each share: the largest part first, each to the share that is smallest so far.

    Args:
        sizes: The number of elements of each tensor.
        count: The number of shares.
        cuts: Cut tensors that are larger than a quarter of a fair share, so that shares have about the same size.
            Otherwise each tensor is one part.
    """
    longest = max(_CUT_ELEMENTS_MIN, -(-sum(sizes) // (_PARTS * count))) if cuts else max(1, *sizes)
    parts = [
        Interval(tensor, begin, min(begin + longest, size))
        for tensor, size in enumerate(sizes)
        for begin in range(0, max(1, size), longest)
    ]
    shares: list[list[Interval]] = [[] for _ in range(count)]
    totals = [0] * count
    for part in sorted(parts, key=lambda part: (-part.size, part)):
        smallest = totals.index(min(totals))
        shares[smallest].append(part)
        totals[smallest] += part.size
    return [_together(sorted(share)) for share in shares]


def _together(parts: Sequence[Interval]) -> list[Interval]:
    """Return parts in which those are one that follow each other."""
    found: list[Interval] = []
    for part in parts:
        if found and found[-1].parameter == part.parameter and found[-1].end == part.begin:
            found[-1] = Interval(part.parameter, found[-1].begin, part.end)
        else:
            found.append(part)
    return found


@final
class Shares:
    """The shares of a model, and the keys in which their gradients and values travel. Each share is a shard.

    The keys of a share are one for each element, one for each part, and those of the learning rates. In a gradient the
    second kind are ones for the parts that a worker has a gradient of, and zeros for others, so that the sum of
    gradients tells which parts the optimizer must leave alone.

    Attributes:
        parts: By share: its parts.
        keys: By share: its keys.
        layout: The keys of all shares that are not empty.
    """

    def __init__(self, sizes: Sequence[int], count: int, *, cuts: bool, num_rates: int) -> None:
        """The first three arguments are those of ``shares_of``; ``num_rates``: the keys of the learning rates."""
        self.parts, self.keys = shares_of(sizes, count, cuts=cuts), list[slice]()
        for share in self.parts:
            begin = self.keys[-1].stop if self.keys else 0
            num_keys = sum(part.size for part in share) + len(share) + num_rates if share else 0
            self.keys.append(slice(begin, begin + num_keys))
        owners = [number for number, share in enumerate(self.parts) if share]
        self.layout = Layout.of_ranges([0, *(self.keys[owner].stop for owner in owners)], owners)
