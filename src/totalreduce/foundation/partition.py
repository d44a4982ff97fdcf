"""Index arithmetic: the division of a tensor between ranks and lanes, and of a model into ranges of elements.

All functions are pure, and equal on all ranks.

A tensor is cut into ``num_chunks`` chunks (one per rank in a ring), each chunk into ``num_lanes`` lanes. Boundaries
depend on the element count and on the settings the group agreed on, never on arrival, so results are the same bits
under any schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = [
    "PIECE_BYTES_MIN",
    "balanced_range",
    "exchange_window",
    "lane_count",
    "parts_of_range",
    "pipeline_pieces",
]

#: The smallest piece of a pipeline: below this size a message costs more than its bytes.
PIECE_BYTES_MIN = 64 * 1024
#: The smallest piece takes as long as so many messages without a body: c in ``pipeline_pieces``.
_MESSAGES_PER_PIECE = 8
#: How long the link of a host takes for what is under way to all others at a time in an exchange of blocks. Measured
#: with an alltoall of 16 MiB on 8 hosts, medians in ms. At 200 Mbit/s, where the bytes need 620: 18 and 36 ms of the
#: link 650 to 660, 72 ms 655 to 720, no limit 720 to 770. At 1 Gbit/s (2 cores for all; the bytes need 124): 18 ms 139,
#: 36 ms 138, 72 ms 141 to 144.
_EXCHANGE_S = 0.036
#: So many lanes keep sending, receiving and adding going at the same time; more of them only cost processor time.
_MANY_LANES = 4


def balanced_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of part ``index`` of ``total`` elements in parts that differ by at most one.

    >>> [balanced_range(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (1 if index < larger else 0)


def parts_of_range(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tensors that a range of elements touches, with the first and behind the last element in each.

    Args:
        sizes: The number of elements of each tensor; the tensors lie one behind the other.
        begin: The first element of the range.
        end: That behind the last one.

    >>> list(parts_of_range([4, 2, 5], 3, 8))
    [(0, 3, 4), (1, 0, 2), (2, 0, 2)]
    """
    start = 0
    for tensor, size in enumerate(sizes):
        first, last = max(begin - start, 0), min(end - start, size)
        if first < last:
            yield tensor, first, last
        start += size


def lane_count(
    chunk_bytes: int, *, segment_bytes: int, segment_bytes_min: int, lanes_min: int, longest_bytes: int = 0
) -> int:
    """Return the number of lanes into which a chunk is cut.

    Large chunks are cut so that no segment exceeds ``segment_bytes`` (the quantum of preemption), or, where a chunk
    has more than ``_MANY_LANES`` of these, ``longest_bytes``, if that is more. Smaller chunks are still cut into
    ``lanes_min`` lanes while segments stay above ``segment_bytes_min``, because a single lane leaves the wire idle
    while the receiver adds.
    """
    by_quantum = -(-chunk_bytes // segment_bytes)
    if longest_bytes > segment_bytes:
        by_quantum = max(min(by_quantum, _MANY_LANES), -(-chunk_bytes // longest_bytes))
    by_pipelining = min(lanes_min, chunk_bytes // segment_bytes_min)
    return max(1, by_quantum, by_pipelining)


def pipeline_pieces(num_ranks: int, num_bytes: int, piece_bytes_min: int) -> int:
    """Return the number of pieces in which ``num_bytes`` pass through a pipeline of ranks.

    Filling and emptying the pipeline takes n-2 piece times, so there are many pieces, but none below
    ``piece_bytes_min``. S pieces of N bytes and a message that costs as much time as c bytes together take
    (S+n-2)(N/S+c) bytes' time, which is least at S = sqrt(N(n-2)/c). Measured with 16 MiB on 8 hosts at 1 Gbit/s (2
    cores for all): 240 pieces 153 to 158 ms and 25 ms of processor time per rank, 110 pieces 149 to 151 ms and 18 ms.
    """
    behind = max(1, num_ranks - 2)
    cheapest = math.isqrt(num_bytes * behind * _MESSAGES_PER_PIECE // piece_bytes_min)
    return max(1, min(40 * behind, num_bytes // piece_bytes_min, cheapest))


def exchange_window(bytes_per_s: float, num_peers: int) -> int:
    """Return how many bytes of each block may be under way, where a rank exchanges blocks with ``num_peers`` others.

    The messages of all pairs of ranks share the links. If each rank sends as fast as its socket allows, the queues of
    the network overflow, and of some pairs the last message comes when the others have long ended, over links that are
    idle otherwise. ``bytes_per_s``: the bandwidth of the link of a host.
    """
    return max(1, int(_EXCHANGE_S * bytes_per_s / num_peers))
