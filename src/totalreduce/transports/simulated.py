"""A network in virtual time: latency, bandwidth, seeded delays, links that fall silent, ranks that crash.

One thread, one event queue, one seeded random generator: the same seed gives the same events. It drives any number of
``Endpoint`` objects, the same ones that run over sockets. A link carries one message at a time and keeps their order,
as a TCP connection does; a body is copied at the moment its last byte leaves. Between two ranks there is one link in
each direction, and a second one for bulk, if the endpoint queues bulk apart.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from totalreduce.foundation.errors import ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Header
from totalreduce.transports.base import Endpoint, Outgoing
from totalreduce.transports.simulated_hosts import HostModel, SimulatedHosts

__all__ = ["LinkModel", "SimulatedNetwork"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """The speed of one direction of one link."""

    bytes_per_s: float = 125e6  #: Bandwidth.
    latency_s: float = 50e-6  #: From the last byte leaving to the last byte arriving.
    #: The largest random addition to the latency, uniform; the order of messages does not change.
    jitter_s: float = 0.0


#: How many messages of a link may be under way on their source where hosts are simulated: one is on the network card,
#: and one waits in the socket's memory.
_DEPTH_WITH_HOSTS = 2
#: Where bodies are not carried, shorter ones are: control frames are data of the protocol.
_UNCARRIED_BYTES_MIN = 16 * 1024 + 1


@dataclass(slots=True)
class _Link:
    model: LinkModel
    under_way: int = 0
    silent: bool = False
    clear_at: float = 0.0
    inbox: deque[tuple[bytes, bytes | None]] = field(default_factory=deque)


class _Links(dict[tuple[int, int], _Link]):
    """Links that are made at their first use."""

    def __init__(self, make: Callable[[tuple[int, int]], _Link]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, pair: tuple[int, int]) -> _Link:
        link = self[pair] = self._make(pair)
        return link


@final
class SimulatedNetwork:
    """All ranks, all links and the clock."""

    def __init__(
        self,
        world_size: int,
        *,
        seed: int = 0,
        default: LinkModel | None = None,
        links: dict[tuple[int, int], LinkModel] | None = None,
        silence_s: float = 2.0,
        reset_s: float = 0.01,
        one_port: bool = False,
        traced: bool = True,
        hosts: HostModel | None = None,
        carries: bool = True,
    ) -> None:
        """Make an idle network.

        Args:
            world_size: Number of ranks.
            seed: Seed of all random delays.
            default: Model of the links that are not in ``links``.
            links: Models by (source, target).
            silence_s: Time until a silent link is noticed.
            reset_s: Time until a crash is noticed.
            one_port: Whether a rank sends one message at a time, as through one network card, instead of one on every
                link.
            traced: Whether to keep ``trace``.
            hosts: The hosts. With them, links have a latency only: the network cards have the bandwidth.
            carries: As the attribute.
        """
        self.world_size = world_size
        self.now = 0.0  #: Virtual time in seconds.
        self.random = random.Random(seed)
        #: (time, event, rank, peer, bytes) of all events, for comparing two runs.
        self.trace: list[tuple[float, str, int, int, int]] = []
        self._silence_s, self._reset_s = silence_s, reset_s
        model, models = default or LinkModel(), links or {}
        #: The links of all but bulk, and those of bulk. Made at the first use: a thousand ranks have a million links.
        self._links = tuple(_Links(lambda pair: _Link(models.get(pair, model))) for _ in range(2))
        self._one_port, self._traced = one_port, traced
        #: Whether bodies are carried. If not, long ones take their time, and memory is left as it is.
        self.carries = carries
        #: The ranks' hosts; ``None``: messages take no processor time, and every link has a bandwidth of its own.
        self.hosts = None if hosts is None else SimulatedHosts(self, hosts)
        self._depth = 1 if hosts is None else _DEPTH_WITH_HOSTS
        self._sending: set[int] = set()
        self._endpoints: dict[int, Endpoint] = {}
        #: By rank: peers whose messages, bulk or not, have arrived and were not accepted yet.
        self._unread: list[set[tuple[int, bool]]] = [set() for _ in range(world_size)]
        self._crashed: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def attach(self, rank: int, endpoint: Endpoint) -> None:
        """Put an endpoint on the network."""
        self._endpoints[rank] = endpoint

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` at a virtual time."""
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` after a delay."""
        self.at(self.now + delay_s, action)

    def crash(self, rank: int, *, spread_s: float = 0.0) -> None:
        """End a rank; every peer's connection to it is reset shortly after.

        The peers notice it one after the other, at random times within ``spread_s``.
        """
        self._note("crash", rank, rank, 0)
        self._crashed.add(rank)
        for peer, delay_s in self._spread(rank, spread_s):
            self.after(self._reset_s + delay_s, lambda peer=peer: self._reset(peer, rank))  # type: ignore[misc]

    def stop(self, rank: int, *, spread_s: float = 0.0) -> None:
        """Freeze a rank for good; every peer notices its silence after ``silence_s``; ``spread_s`` as of ``crash``."""
        self._note("stop", rank, rank, 0)
        self._crashed.add(rank)
        for peer, delay_s in self._spread(rank, spread_s):
            self.after(self._silence_s + delay_s, lambda peer=peer: self._lose(peer, rank, "silent"))  # type: ignore[misc]

    def _spread(self, rank: int, spread_s: float) -> list[tuple[int, float]]:
        return [(peer, self.random.uniform(0.0, spread_s)) for peer in range(self.world_size) if peer != rank]

    def cut(self, a: int, b: int) -> None:
        """Silence both directions between two ranks; both ends notice after ``silence_s``."""
        self._note("cut", a, b, 0)
        for source, target in ((a, b), (b, a)):
            self._silence(source, target)
            self.after(
                self._silence_s,
                lambda source=source, target=target: self._lose(source, target, "silent"),  # type: ignore[misc]
            )

    def step(self) -> bool:
        """Handle the next event; returns whether there was one."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def poke(self, rank: int) -> None:
        """Look again at an endpoint that may have something to send, or room to receive."""
        if rank in self._crashed:
            return
        self._start_all(rank)
        for peer, bulk in sorted(self._unread[rank]):
            self._deliver(peer, rank, bulk=bulk)

    def _start_all(self, source: int) -> None:
        """Begin the next message on every link of a rank that is not busy."""
        for bulk in (False, True):
            for peer in sorted(self._endpoints[source].ready_peers(bulk=bulk)):
                if source in self._sending and self._one_port:
                    return
                while self._link(source, peer, bulk=bulk).under_way < self._depth and self._start(
                    source, peer, bulk=bulk
                ):
                    pass

    def _link(self, source: int, target: int, *, bulk: bool) -> _Link:
        return self._links[bulk][source, target]

    def _silence(self, source: int, target: int) -> None:
        for links in self._links:
            links[source, target].silent = True

    def _start(self, source: int, target: int, *, bulk: bool = False) -> bool:
        """Begin the next message on a link; returns whether there was one."""
        link = self._link(source, target, bulk=bulk)
        if source in self._crashed:
            return False
        message = self._endpoints[source].next_message(target, bulk=bulk)
        if message is None:
            return False
        link.under_way += 1
        self._sending.add(source)
        num_bytes = HEADER_BYTES + (len(message.body) if message.body is not None else 0)

        def left() -> None:
            self._left(source, target, message, num_bytes, bulk=bulk)

        if self.hosts is None:
            self.after(num_bytes / link.model.bytes_per_s, left)
        else:
            self.hosts.send(source, target, num_bytes, left)
        return True

    def _left(self, source: int, target: int, message: Outgoing, num_bytes: int, *, bulk: bool) -> None:
        link = self._link(source, target, bulk=bulk)
        link.under_way -= 1
        self._sending.discard(source)
        if source in self._crashed:
            return
        body = self._carried(message)
        self._note("sent", source, target, num_bytes)
        if not link.silent:
            delay = link.model.latency_s + self.random.uniform(0.0, link.model.jitter_s)
            link.clear_at = max(link.clear_at, self.now + delay)  # a later message never overtakes
            self.at(link.clear_at, lambda: self._reach(source, target, message.header, body, num_bytes, bulk=bulk))
        self._endpoints[source].message_sent(message)
        self.poke(source)

    def _carried(self, message: Outgoing) -> bytes | None:
        """Return a copy of a message's body; ``None`` if it is not carried."""
        if message.body is None:
            return b""
        is_carried = self.carries or len(message.body) < _UNCARRIED_BYTES_MIN
        return bytes(message.body) if is_carried else None

    def _reach(
        self, source: int, target: int, header: bytes, body: bytes | None, num_bytes: int, *, bulk: bool
    ) -> None:
        """Bring a message that has reached its host to its rank."""
        if self.hosts is None:
            self._arrive(source, target, header, body, bulk=bulk)
        else:
            self.hosts.receive(source, target, num_bytes, lambda: self._arrive(source, target, header, body, bulk=bulk))

    def _arrive(self, source: int, target: int, header: bytes, body: bytes | None, *, bulk: bool) -> None:
        self._link(source, target, bulk=bulk).inbox.append((header, body))
        self._unread[target].add((source, bulk))
        self._deliver(source, target, bulk=bulk)

    def _deliver(self, source: int, target: int, *, bulk: bool = False) -> None:
        link, endpoint = self._link(source, target, bulk=bulk), self._endpoints[target]
        while link.inbox and target not in self._crashed and not link.silent and endpoint.may_receive():
            packed, body = link.inbox.popleft()
            try:
                header = Header.unpack(packed)
                self._note("arrived", target, source, HEADER_BYTES + header.body_bytes)
                delivery = endpoint.accept(source, header)
                if body is not None:
                    delivery.view[:] = body
                endpoint.delivered(delivery)
            except ProtocolError as error:
                self._end(target, source, f"protocol violation: {error}")
                return
        if not link.inbox:
            self._unread[target].discard((source, bulk))
        if target not in self._crashed:
            self._start_all(target)

    def _end(self, rank: int, peer: int, reason: str) -> None:
        """Drop the connection of ``rank`` to ``peer``, where it is reset shortly after."""
        for source, target in ((rank, peer), (peer, rank)):
            self._silence(source, target)
        self._lose(rank, peer, reason)
        self.after(self._reset_s, lambda: self._reset(peer, rank))

    def _reset(self, rank: int, peer: int) -> None:
        """End the connection of ``rank`` to ``peer``, which has crashed or dropped it, when its messages are read."""
        links = [self._link(peer, rank, bulk=bulk) for bulk in (False, True)]
        if any(link.inbox and not link.silent for link in links):
            self.after(self._reset_s, lambda: self._reset(rank, peer))
        else:
            self._lose(rank, peer, "its connection ended")

    def _lose(self, rank: int, peer: int, reason: str) -> None:
        if rank in self._crashed:
            return
        self._note("lost", rank, peer, 0)
        self._endpoints[rank].peer_lost(peer, reason)
        self.poke(rank)

    def _note(self, what: str, rank: int, peer: int, num_bytes: int) -> None:
        if self._traced:
            self.trace.append((self.now, what, rank, peer, num_bytes))
