"""Which peers are alive: heartbeats that are due, and peers that have been silent for too long.

A transport sends a heartbeat to a peer to which nothing else has left for ``heartbeat_s``. A peer that falls silent is
lost within about ``silence_s``: a transport looks for silent peers every half heartbeat, so it allows a silence that is
shorter by that time, and by a tenth at most. Time in which this process did not run (it was stopped, or starved of
processor time) is not the silence of a peer. But the peers hear nothing from this process in that time, and may end
their connections to it. Then only this process knows why (``explain_end``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

from totalreduce.foundation.config import TcpConfig

__all__ = ["SILENT", "Liveness", "Pulse"]

#: The beginning of the reason for the loss of a peer that is silent, and may still run.
SILENT = "silent for"
#: The allowed silence is shorter than ``silence_s`` by this share at most, whatever the time between two looks is.
_SHARE_MAX = 0.1
#: A pause of this process of at least this share of ``silence_s`` can have made a peer give it up.
_OWN_SHARE_MIN = 0.75


@final
class Pulse:
    """The times of the last messages from and to a peer."""

    __slots__ = ("heard_at", "spoke_at")

    def __init__(self, now: float) -> None:
        #: When something last came from the peer, and last left for it, in seconds.
        self.heard_at = self.spoke_at = now

    def silence_s(self, now: float) -> float:
        """Return for how long nothing has come."""
        return now - self.heard_at


@final
class Liveness:
    """Decides about the pulses of a transport's peers."""

    __slots__ = ("_between_looks_s", "_config", "_looked_at", "_pause", "due_at")

    def __init__(self, config: TcpConfig, now: float) -> None:
        self._config = config
        self._between_looks_s = config.heartbeat_s / 2
        self._looked_at = now
        #: The end and the length of the last pause of this process after which peers may have given it up.
        self._pause = -math.inf, 0.0
        self.due_at = 0.0  #: When ``look`` is to be called next.

    def look(self, pulses: Iterable[Pulse], now: float) -> None:
        """Call this at ``due_at``, before the decisions about the pulses.

        If this process has not looked for a long time, that time counts for no peer as silence.
        """
        beat = self._config.heartbeat_s
        self.due_at = now + self._between_looks_s
        away, self._looked_at = now - self._looked_at, now
        if away >= self._config.silence_s * _OWN_SHARE_MIN:
            self._pause = now, away
        if away > 2 * beat:
            for pulse in pulses:
                pulse.heard_at = min(now, pulse.heard_at + away)

    def verdict(self, pulse: Pulse, now: float, *, extra_s: float = 0.0) -> str | None:
        """Return why a peer is lost, if it was silent for too long; ``extra_s`` is allowed in addition."""
        silence_s, limit_s = pulse.silence_s(now), self._config.silence_s
        if silence_s <= limit_s - min(self._between_looks_s, _SHARE_MAX * limit_s) + extra_s:
            return None
        cause = (
            "stopped, frozen or cut off from the network; if its host was only busy, raise TOTALREDUCE_PEER_TIMEOUT_S"
        )
        return f"{SILENT} {silence_s:.1f} s ({cause})"

    def explain_end(self, reason: str, now: float) -> str:
        """Return the reason for the loss of a peer that has ended its connection, with what this process knows of it.

        A peer that hears nothing for too long ends the connection without a message. To this process that looks like
        the end of the peer. So the reason says it if this process itself has sent nothing for about as long, and this
        pause ended less than ``silence_s`` ago or has not ended yet.
        """
        limit_s = self._config.silence_s
        ended_at, pause_s = self._pause
        if now - self._looked_at >= limit_s * _OWN_SHARE_MIN:
            ended_at, pause_s = now, now - self._looked_at
        if now - ended_at > limit_s:
            return reason
        return (
            f"{reason}; before that, this process itself sent no heartbeat for {pause_s:.1f} s, because it was stopped "
            "or got no processor time, so the other rank may have given it up; if its host was only busy, raise "
            "TOTALREDUCE_PEER_TIMEOUT_S"
        )

    def is_beat_due(self, pulse: Pulse, now: float) -> bool:
        """Return whether a heartbeat is to leave for a peer, and note that one leaves."""
        if now - pulse.spoke_at < self._config.heartbeat_s:
            return False
        pulse.spoke_at = now
        return True
