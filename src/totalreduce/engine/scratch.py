"""Scratch segments: the memory of a received segment until it is added to the result. Bounded and reused."""

from __future__ import annotations

__all__ = ["ScratchPool", "ScratchSegment"]


class ScratchSegment:
    """Memory that is lent by a pool.

    Attributes:
        view: Exactly as many bytes as were asked for.
    """

    __slots__ = ("_pool", "view")

    def __init__(self, pool: ScratchPool, view: memoryview) -> None:
        """Made by ``ScratchPool.take``."""
        self._pool, self.view = pool, view

    def release(self) -> None:
        """Give the memory back to the pool. Called once."""
        self._pool.give(self.view)


class ScratchPool:
    """Lends segments and reuses their memory: fresh pages cost more than an addition (a page fault per 4 KiB).

    ``available`` tells a transport whether it may read on; ``take`` never refuses.

    Attributes:
        in_use: How many segments are lent.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: the number of segments in use from which on ``available`` is false."""
        self._limit = limit
        self._free: list[bytearray] = []
        self.in_use = 0

    @property
    def available(self) -> bool:
        """Whether another segment may be lent."""
        return self.in_use < self._limit

    def take(self, num_bytes: int) -> ScratchSegment:
        """Lend a segment of exactly ``num_bytes``."""
        self.in_use += 1
        for position, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                del self._free[position]
                return ScratchSegment(self, memoryview(buffer)[:num_bytes])
        if self._free:  # all too small: replace one, so that the pool cannot grow beyond its limit
            self._free.pop()
        return ScratchSegment(self, memoryview(bytearray(num_bytes)))

    def give(self, view: memoryview) -> None:
        """Take the memory of a segment back."""
        self.in_use -= 1
        buffer = view.obj
        assert isinstance(buffer, bytearray)
        if len(self._free) < self._limit:
            self._free.append(buffer)
