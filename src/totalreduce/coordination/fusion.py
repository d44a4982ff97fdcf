"""Which operations share one call of the native library.

Source: Horovod's fusion with look-ahead: mixed precision interleaves dtypes, so what does not fit the first response
is skipped, not the end of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from totalreduce.coordination.requests import Response

__all__ = ["fuse"]


def fuse(responses: Iterable[Response], threshold_bytes: int) -> list[list[Response]]:
    """Cut responses into batches, each of which one native operation carries out. The same on every rank.

    The most urgent responses come first; responses of one priority keep their order. Less urgent responses join the
    batch of a more urgent one if they fit: a bucket's priority differs from its neighbour's, and small tensors of
    different priorities are to share a batch still.

    A batch begins with the first response that is left and takes what fits it: same dtype, device, reduction, scales
    and joined ranks, up to ``threshold_bytes``. What does not fit keeps its place; the search ends when the batch and
    what was skipped exceed the threshold. Only allreduces are fused: that is where many small tensors occur. A group
    of operations is never mixed with others, so that its result does not depend on what else is ready.
    """
    waiting = deque(sorted(responses, key=lambda response: response.request.priority))
    batches = []
    while waiting:
        first = waiting.popleft()
        batch, skipped = [first], []
        key = first.fusion_key
        size, passed_over = first.request.num_bytes if key else 0, 0
        while key and waiting and size + passed_over <= threshold_bytes:
            candidate = waiting.popleft()
            bytes_more = candidate.request.num_bytes if candidate.fusion_key else 0
            if candidate.fusion_key == key and size + bytes_more <= threshold_bytes:
                batch.append(candidate)
                size += bytes_more
            else:
                skipped.append(candidate)
                passed_over += bytes_more
        waiting.extendleft(reversed(skipped))
        batches.append(batch)
    return batches
