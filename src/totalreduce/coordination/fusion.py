"""Fuses operations: decides which of them share one call of the native library.

Source: Horovod's fusion with look-ahead. Mixed precision interleaves dtypes, so a response that does not fit is skipped
and does not end the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from totalreduce.coordination.requests import Response

__all__ = ["fuse"]


def fuse(responses: Iterable[Response], threshold_bytes: int) -> list[list[Response]]:
    """Cut responses into batches, each of which one native operation carries out. The same on every rank.

    The most urgent responses come first; responses of one priority keep their order. Less urgent responses join the
    batch of a more urgent one if they fit: every bucket has a priority of its own, and small ones are to share a batch.

    A batch begins with the first response that is left, and takes later ones of the same ``Response.fusion_key``, up to
    ``threshold_bytes``. Other responses keep their places. The search ends when the batch and the responses that were
    skipped exceed the threshold. Allreduces of one type, device and reduction are fused, and allgathers of one type and
    device. A group of operations is never mixed with others: its result does not depend on what else is ready.
    """
    waiting = deque(sorted(responses, key=lambda response: response.request.priority))
    batches = []
    while waiting:
        first = waiting.popleft()
        batch, skipped = [first], []
        key = first.fusion_key
        size, passed_over = first.fusion_bytes, 0
        while key and waiting and size + passed_over <= threshold_bytes:
            candidate = waiting.popleft()
            bytes_more = candidate.fusion_bytes
            if candidate.fusion_key == key and size + bytes_more <= threshold_bytes:
                batch.append(candidate)
                size += bytes_more
            else:
                skipped.append(candidate)
                passed_over += bytes_more
        waiting.extendleft(reversed(skipped))
        batches.append(batch)
    return batches
