"""Default sizes of buckets, for the optimizer and for the commands that measure it. Imports no torch."""

from __future__ import annotations

__all__ = ["BUCKET_BYTES", "NATIVE_BUCKET_BYTES", "even_bucket_elements"]

#: The default size of a bucket, which travels as one operation of the engine.
BUCKET_BYTES = 4 * 1024 * 1024
#: The same for a native library. Every native operation has a fixed cost, as high as that of a megabyte or more (gloo
#: with 4 ranks on one host: 5 ms), and the first one should begin early. Measured with 58 MB of gradients and gloo,
#: against DDP: 25 MiB 1.13x, 6 MiB 0.99x.
NATIVE_BUCKET_BYTES = 8 * 1024 * 1024

_BUCKETS = 4
#: A bucket costs as much processor time besides its elements as three to five million of them (4 ranks, Ok-Topk: 5 ms).
#: Measured on 4 hosts with half a core each, a bucket's least size 3 and 7 million: a training step with 14.6 million
#: elements 260 and 240 ms, an exchange of 25.6 million 85 and 75 ms. Where cores are idle while gradients come, larger
#: buckets take up to 3 ms longer at the end of a step.
_BUCKET_ELEMENTS_MIN = 7_000_000
_BUCKET_ELEMENTS_MAX = 2**31 - 1


def even_bucket_elements(num_elements: int) -> int:
    """Return the default number of elements in each bucket of a sparse method.

    It is a quarter of all elements, so that selecting, sending and backward overlap; of fewer than 28 million a third,
    a half, or all, because a bucket has a fixed cost. All buckets have one size, because a small last bucket has that
    cost too.
    """
    num_buckets = max(1, min(_BUCKETS, num_elements // _BUCKET_ELEMENTS_MIN))
    return max(1, min(-(-num_elements // num_buckets), _BUCKET_ELEMENTS_MAX))
