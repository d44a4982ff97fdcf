"""What the engine counts. Plain numbers, read under the runner's lock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Totals since the group was made; bytes are those of all headers and bodies, of control frames too.

    ``sent_to`` and ``received_from`` have the bytes of messages by peer; the fast lane sends none.
    """

    operations: int = 0
    payload_bytes: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    floating_messages: int = 0
    dropped_messages: int = 0
    dropped_bytes: int = 0
    control_sent: int = 0
    held_messages: int = 0
    promotions: int = 0
    mismatches: int = 0
    stalls: int = 0
    reduce_s: float = 0.0
    active_s: float = 0.0
    waited_s: float = 0.0
    sent_to: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    received_from: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
