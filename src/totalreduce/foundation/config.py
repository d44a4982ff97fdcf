"""Settings of the engine and of the transports: an explicit argument > the environment > the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import OpKind

__all__ = ["OWN_SETTINGS", "OWN_TCP_SETTINGS", "EngineConfig", "TcpConfig", "Tls"]

#: The settings of ``EngineConfig`` that only concern what a rank does by itself: ranks may differ in them.
OWN_SETTINGS = frozenset({"scheduling", "starvation_limit", "scratch_segments", "stall_warning_s", "timeout_s"})
#: The same for ``TcpConfig``: how a rank treats its own sockets, and how long it waits while it connects.
OWN_TCP_SETTINGS = frozenset(
    (
        *("notsent_lowat_bytes", "congestion", "relay"),
        *("connect_timeout_s", "handshake_timeout_s", "pending_handshakes_max"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How operations are cut, ordered and watched.

    All settings must be equal on all ranks, which is compared when a group forms, but for those in ``OWN_SETTINGS``.
    """

    segment_bytes: int = 512 * 1024
    """The largest body of one message, which no other message interrupts. Measured: 256 KiB costs 20 % on one host,
    1 MiB gains nothing. On links of at least 0.5 Gbit/s between hosts it is longer (``engine.planner``)."""
    segment_bytes_min: int = 128 * 1024
    """A chunk is not cut into lanes smaller than this for the sake of pipelining. It grows with ``segment_bytes``."""
    lanes_min: int = 2
    """How many lanes a chunk is cut into, if large enough, so that sending, receiving and adding overlap. Measured with
    4 MiB on 8 hosts at 1 Gbit/s (2 cores for all): 2 lanes 92 % of the wire, 4 lanes 84 % (twice the messages)."""
    half_accumulation: Literal["float32", "native"] = "float32"
    """``float32``: partial sums of float16 and bfloat16 travel as float32 (the first hop and the allgather stay
    half), so a result is rounded once. ``native``: rounded at every hop, a quarter to a third fewer bytes."""
    eager_bytes: int = 1024 * 1024
    """How much of one operation a rank sends to a peer before it knows that the peer has submitted the operation."""
    floating_bytes_max: int = 64 * 1024 * 1024
    """Bound of the memory for messages, of all peers, whose operations this rank has not submitted yet."""
    fast_lane: bool | None = None
    """Whether ranks of one host carry collectives out in memory that they share, without messages (``fastlane``).
    ``None``: as ``TOTALREDUCE_FAST_LANE`` says, and by default they do."""
    bulk_bytes: int = 32 * 1024
    """An operation with a longer message than this is bulk: over TCP its messages leave by a connection of their own,
    so that other messages overtake them at any byte. 32 KiB take a quarter of a millisecond at 1 Gbit/s."""
    scheduling: Literal["priority", "fifo"] = "priority"
    """``fifo`` ignores priorities and promotion, for comparisons in benchmarks."""
    starvation_limit: int = 64
    """After so many messages have overtaken the oldest message, the oldest one leaves."""
    scratch_segments: int = 16
    """The largest number of received segments that wait to be added. At this number the transport stops reading."""
    stall_warning_s: float = 10.0
    """An operation pending longer than this is reported, with the ranks that did not submit it; 0: never."""
    timeout_s: float = 300.0
    """Deadline of a wait that names none."""
    schedules: Mapping[OpKind, str] = field(default_factory=dict)
    """Names of schedules by kind of operation, instead of the selector's choice; equal on all ranks."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        checks.integer_fields(
            self,
            *("segment_bytes", "segment_bytes_min", "lanes_min", "eager_bytes", "floating_bytes_max"),
            *("bulk_bytes", "starvation_limit", "scratch_segments"),
            minimum=1,
        )
        if self.segment_bytes % 16 or self.segment_bytes > 1 << 30:
            raise ConfigurationError(f"segment_bytes must be a multiple of 16 up to 1 GiB, not {self.segment_bytes}")
        checks.seconds_fields(self, "timeout_s")
        checks.seconds_fields(self, "stall_warning_s", or_zero=True)
        checks.one_of("half_accumulation", self.half_accumulation, ("float32", "native"))
        checks.one_of("scheduling", self.scheduling, ("priority", "fifo"))
        for kind, algorithm in self.schedules.items():
            if not isinstance(kind, OpKind) or not isinstance(algorithm, str):
                raise ConfigurationError(
                    f"schedules maps OpKind to the name of a schedule, not {kind!r} to {algorithm!r}"
                )

    @property
    def has_fast_lane(self) -> bool:
        """Whether the fast lane is on: it is, unless an argument or the environment has switched it off."""
        return self.fast_lane is not False

    def wire_settings(self) -> dict[str, int | str]:
        """Return the settings that must be equal on all ranks, for the comparison at the rendezvous.

        They are all but ``OWN_SETTINGS``, so that a new one is compared unless somebody has thought about it.
        """
        wire = {name: value for name, value in asdict(self).items() if name not in OWN_SETTINGS}
        wire["fast_lane"] = "on" if self.has_fast_lane else "off"
        return wire | {"schedules": ", ".join(f"{k.name}={v}" for k, v in sorted(self.schedules.items()))}


@dataclass(frozen=True, kw_only=True, slots=True)
class TcpConfig:
    """How the TCP transport treats its sockets and its peers.

    ``heartbeat_s`` and ``silence_s`` must be equal on all ranks, which is compared when a group forms: a rank that
    sends heartbeats less often than another one allows for would be lost.
    """

    notsent_lowat_bytes: int = 512 * 1024
    """``TCP_NOTSENT_LOWAT``: no message of the same connection overtakes unsent bytes in the kernel, but a busy host
    needs time to refill them (the kernel asks at half of them). Measured with 8 ranks on 2 cores at 1 Gbit/s: 128 KiB
    cost 3 % of the bandwidth. With 1 MiB the replayed step of the gpt trace takes 326 ms, not 305, because what is
    urgent there is large. Small messages have a connection of their own."""
    congestion: str | None = None
    """Congestion control by name. ``None``: the system's, but ``cubic`` (or ``reno``) where the round trip is shorter
    than 5 ms: BBR's pacing made loopback 1.3x to 1.5x slower, and every ten seconds it empties a link for 0.2 s, for
    which a whole ring waits (64 MiB, 8 hosts at 1 Gbit/s: 94.1 % of the wire instead of 95)."""
    relay: bool | None = None
    """Whether a compiled function moves the messages of large operations (``relay``). Without it the engine does, with
    the same messages and the same results; so ranks may differ in this. ``None``: as ``TOTALREDUCE_RELAY`` says, and by
    default it does."""
    heartbeat_s: float = 0.25
    """The time between two heartbeats of an idle connection, in both directions."""
    silence_s: float = 2.0
    """A peer that falls silent is lost within this time (stopped, cut off). A crash is noticed at once."""
    connect_timeout_s: float = 20.0
    """How long it may take to connect to a peer, handshake included."""
    handshake_timeout_s: float = 5.0
    """How long a connected process may take to prove its membership."""
    pending_handshakes_max: int = 64
    """The largest number of connections without proof of membership; further ones replace the oldest."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        checks.seconds_fields(self, "heartbeat_s", "silence_s", "connect_timeout_s", "handshake_timeout_s")
        if self.heartbeat_s >= self.silence_s:
            raise ConfigurationError(
                f"heartbeat_s ({self.heartbeat_s:g}) must be smaller than silence_s ({self.silence_s:g})"
            )
        checks.integer_fields(self, "notsent_lowat_bytes", "pending_handshakes_max", minimum=1, maximum=2**31 - 1)

    def wire_settings(self) -> dict[str, int | float | str]:
        """Return the settings that must be equal on all ranks: all but ``OWN_TCP_SETTINGS``."""
        return {name: value for name, value in asdict(self).items() if name not in OWN_TCP_SETTINGS}

    @property
    def has_relay(self) -> bool:
        """Whether the relay is on: it is, unless an argument or the environment has switched it off."""
        return self.relay is not False


@dataclass(frozen=True, slots=True)
class Tls:
    """Three PEM files, with which the TCP transport encrypts, and accepts no rank without a certificate.

    Every rank has its own certificate, or all share one. Host names in certificates do not count, only the signature.
    See ``docs/security.md`` for the commands that make the files.
    """

    cert: str | Path
    """This rank's certificate, followed by intermediate certificates if there are any."""
    key: str | Path
    """The private key of the certificate, not encrypted; readable by its owner only."""
    ca: str | Path
    """The authorities whose signature makes a certificate one of the job's. Those of the system do not count."""
