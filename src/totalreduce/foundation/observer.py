"""The events that the engine reports to observers: one method per event, all optional to implement.

Times are seconds of the clock that drives the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Observer"]


class Observer:
    """An observer that does nothing. Methods are called under the engine's lock and must return quickly."""

    def submitted(self, name: str, iteration: int, now: float, *, num_bytes: int, priority: int) -> None:
        """The operation was submitted on this rank."""

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
        """A caller waits for the operation, on this rank or on a peer."""

    def waited(self, name: str, iteration: int, begin: float, end: float) -> None:
        """The caller was blocked in ``wait`` from ``begin`` to ``end``."""

    def done(self, name: str, iteration: int, now: float, *, error: BaseException | None) -> None:
        """The operation ended, with or without an error."""

    def requested(self, name: str, now: float, *, rank: int) -> None:
        """Rank 0 has learnt that ``rank`` is ready for an operation on whose order the ranks agree.

        Operations in the response cache are agreed on without requests, and are not reported here.
        """

    def coordinated(
        self,
        name: str,
        iteration: int,
        *,
        kind: str,
        num_bytes: int,
        batch: int,
        fused: int,
        submitted: float,
        agreed: float,
        begun: float,
        packed: float,
        ended: float,
        unpacked: float,
        error: BaseException | None,
    ) -> None:
        """An operation that a native library carried out has ended, with or without an error.

        It is the only event of its operation besides ``waited``. If it failed on the way, later times may equal earlier
        ones.

        Args:
            name: Name of the operation.
            iteration: How often the name was submitted before.
            kind: The collective, ``"allreduce"`` for instance.
            num_bytes: Size of this operation's tensor.
            batch: Number of the native operation, equal on all ranks.
            fused: How many tensors shared the native operation.
            submitted: When it was submitted on this rank.
            agreed: When the ranks had agreed that it is ready everywhere; ``submitted`` for operations of a plan,
                which need no agreement.
            begun: When packing into the fusion buffer began.
            packed: When the native operation was started.
            ended: When the native operation had ended.
            unpacked: When the results were copied out, which ends the operation.
            error: Its error, if it failed.
        """

    def stalled(self, report: Mapping[str, object], now: float) -> None:
        """A stall report was made."""
