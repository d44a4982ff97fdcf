"""What the engine tells whoever wants to watch: one method per fact, all optional to implement.

Measurement lives in observers, never in the protocol. Times are seconds of the clock that drives the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Observer"]


class Observer:
    """The null observer: override what you care about. Methods are called under the engine's lock: be quick."""

    def submitted(self, name: str, iteration: int, now: float, *, num_bytes: int, priority: int) -> None:
        """The operation was submitted here."""

    def first_byte(self, name: str, iteration: int, now: float) -> None:
        """The first message of the operation left or arrived."""

    def sent(self, name: str, iteration: int, now: float, *, peer: int, lane: int, step: int, num_bytes: int) -> None:
        """A message was handed to the transport completely."""

    def received(
        self, name: str, iteration: int, now: float, *, peer: int, lane: int, step: int, num_bytes: int
    ) -> None:
        """A message of a submitted operation arrived completely."""

    def floating(self, name: str, iteration: int, now: float, *, peer: int, num_bytes: int) -> None:
        """A message arrived before its operation was submitted here; ``name`` may be a hexadecimal id."""

    def reduced(self, name: str, iteration: int, now: float, *, lane: int, step: int, seconds: float) -> None:
        """A received segment was added to the local one, which took ``seconds``."""

    def promoted(self, name: str, iteration: int, now: float) -> None:
        """Somebody is blocked on the operation, here or at a peer."""

    def waited(self, name: str, iteration: int, begin: float, end: float) -> None:
        """The caller was blocked in ``wait`` from ``begin`` to ``end``."""

    def done(self, name: str, iteration: int, now: float, *, error: BaseException | None) -> None:
        """The operation finished, well or with an error."""

    def stalled(self, report: Mapping[str, object], now: float) -> None:
        """A stall report was made."""
