"""What a group has done so far, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of one rank; all totals since the group was made.

    Attributes:
        operations: Operations submitted.
        payload_bytes: Bytes of the submitted tensors.
        messages_sent: Data messages.
        messages_received: Data messages.
        bytes_sent: Bodies and headers handed to the transport.
        bytes_received: Bodies and headers.
        floating_messages: Messages that arrived before their operation was submitted here.
        floating_bytes: Memory they take now.
        floating_bytes_peak: The most they ever took; at most ``EngineConfig.floating_bytes_max``.
        held_messages: Messages that had to wait for a peer's word that it has submitted the operation.
        dropped_messages: Messages of failed operations or old epochs.
        dropped_bytes: Their bytes.
        promotions: Operations that overtook because somebody waited, here or at a peer.
        mismatches: Disagreements this rank discovered.
        stalls: Stall reports.
        connections: Connections made or accepted (TCP).
        refused_connections: Strangers, wrong keys, garbage (TCP).
        waited_s: Time callers were blocked in ``wait``.
        active_s: Time with at least one operation in flight.
        hidden_share: Share of ``active_s`` in which nobody was blocked: communication hidden behind computation.
        reduce_s: Time spent adding.
    """

    operations: int
    payload_bytes: int
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    floating_messages: int
    floating_bytes: int
    floating_bytes_peak: int
    held_messages: int
    dropped_messages: int
    dropped_bytes: int
    promotions: int
    mismatches: int
    stalls: int
    connections: int
    refused_connections: int
    waited_s: float
    active_s: float
    hidden_share: float
    reduce_s: float

    def as_dict(self) -> dict[str, int | float]:
        """JSON-ready."""
        return asdict(self)
