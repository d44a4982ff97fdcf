"""Scratch segments: where a received segment stays until it is added. Bounded and reused."""

from __future__ import annotations

__all__ = ["ScratchPool"]


class ScratchPool:
    """Byte buffers by size. ``available`` says whether a transport may read on; ``take`` never refuses.

    Buffers are reused because fresh pages cost more than the addition itself (a page fault per 4 KiB).
    """

    def __init__(self, limit: int) -> None:
        """``limit``: segments in use before ``available`` turns false."""
        self._limit = limit
        self._free: list[bytearray] = []
        self.in_use = 0

    @property
    def available(self) -> bool:
        """Whether another segment may be taken."""
        return self.in_use < self._limit

    def take(self, num_bytes: int) -> memoryview:
        """A buffer of exactly ``num_bytes``."""
        self.in_use += 1
        for position, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                del self._free[position]
                return memoryview(buffer)[:num_bytes]
        if self._free:  # all too small: replace one, so that the pool cannot grow beyond its limit
            self._free.pop()
        return memoryview(bytearray(num_bytes))

    def give(self, view: memoryview) -> None:
        """Return a buffer."""
        self.in_use -= 1
        buffer = view.obj
        assert isinstance(buffer, bytearray)
        if len(self._free) < self._limit:
            self._free.append(buffer)
