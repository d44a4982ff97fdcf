"""Numbers of operations and messages of a rank so far."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields

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
        floating_bytes: Memory of these messages now.
        floating_bytes_peak: The largest ``floating_bytes`` so far; at most ``EngineConfig.floating_bytes_max``.
        held_messages: Messages that waited until a peer said that it has submitted the operation.
        dropped_messages: Messages of failed operations or earlier memberships.
        dropped_bytes: Bytes of these messages.
        promotions: Operations that became more urgent because a thread waited for them, here or at a peer.
        mismatches: Mismatches that this rank discovered.
        stalls: Stall reports.
        connections: Connections made or accepted (TCP).
        refused_connections: Connections of strangers, with a wrong key or with garbage (TCP).
        waited_s: Time callers were blocked in ``wait``.
        active_s: Time with at least one operation in flight.
        hidden_share: Share of ``active_s`` in which no thread was blocked: communication hidden behind computation.
        reduce_s: Time spent adding, without the additions of the fast lane and of the relay.
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
        """Return a JSON-ready form."""
        return asdict(self)


def snapshot(runner: Runner) -> Statistics:
    """Return the numbers of a rank since its group was made."""
    engine, transport = runner.engine, runner.transport.counters
    with runner.locked():
        counters, floating = engine.counters, engine.reception.floating
        active_s = engine.table.active_s(time.monotonic())
        numbers = {field.name: getattr(counters, field.name, 0) for field in fields(Statistics)}
        numbers |= {
            "floating_bytes": floating.total_bytes,
            "floating_bytes_peak": floating.peak_bytes,
            "connections": transport.connections,
            "refused_connections": transport.refused_connections,
            "active_s": active_s,
            "hidden_share": max(0.0, 1.0 - counters.waited_s / active_s) if active_s > 0 else 1.0,
        }
        return Statistics(**numbers)
