"""Numbers about the operations of a rank so far."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from totalreduce.runner.runner import Runner

__all__ = ["Statistics", "snapshot"]


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
        promotions: Operations that became more urgent because a thread waited for them, here or at a peer.
        mismatches: Disagreements this rank discovered.
        stalls: Stall reports.
        connections: Connections made or accepted (TCP).
        refused_connections: Strangers, wrong keys, garbage (TCP).
        waited_s: Time callers were blocked in ``wait``.
        active_s: Time with at least one operation in flight.
        hidden_share: Share of ``active_s`` in which no thread was blocked: communication hidden behind computation.
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


def snapshot(runner: Runner) -> Statistics:
    """The numbers of a rank since its group was made."""
    engine, transport = runner.engine, runner.transport.counters
    with runner.locked():
        counters, floating = engine.counters, engine.reception.floating
        active_s = engine.table.active_s(time.monotonic())
        waited_s = counters.waited_s
        return Statistics(
            operations=counters.operations,
            payload_bytes=counters.payload_bytes,
            messages_sent=counters.messages_sent,
            messages_received=counters.messages_received,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            floating_messages=counters.floating_messages,
            floating_bytes=floating.total_bytes,
            floating_bytes_peak=floating.peak_bytes,
            held_messages=counters.held_messages,
            dropped_messages=counters.dropped_messages,
            dropped_bytes=counters.dropped_bytes,
            promotions=counters.promotions,
            mismatches=counters.mismatches,
            stalls=counters.stalls,
            connections=transport.connections,
            refused_connections=transport.refused_connections,
            waited_s=waited_s,
            active_s=active_s,
            hidden_share=max(0.0, 1.0 - waited_s / active_s) if active_s > 0 else 1.0,
            reduce_s=counters.reduce_s,
        )
