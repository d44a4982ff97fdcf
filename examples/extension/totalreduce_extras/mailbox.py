"""A transport: messages as files in a directory that all ranks can see. It is slow and short, and it is complete.

The directory is the value of ``MAILBOX``. A message is a file ``<receiver>/<sender>-<number>``, which appears whole: it
is written under another name first. A rank that cannot be seen to live is found by the file ``<rank>/alive``, which it
touches; when the file is older than ``silence_s``, the rank is lost.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.header import HEADER_BYTES, Header
from totalreduce.launch.transports import JoinRequest, TransportSpec, host_numbers, meet
from totalreduce.transports.base import Endpoint, Transport, TransportCounters

_PENDING_MAX = 8  # files that wait for one receiver; a full mailbox holds the sender up
_POLL_S = 0.001


class MailboxTransport(Transport):
    """One rank's mailboxes."""

    def __init__(self, rank: int, world_size: int, directory: Path, silence_s: float) -> None:
        self.rank, self.world_size, self.counters = rank, world_size, TransportCounters()
        self._directory, self._silence_s = directory, silence_s
        self._own = directory / str(rank)
        self._own.mkdir(parents=True, exist_ok=True)
        self._sent, self._received = [0] * world_size, [0] * world_size
        self._met: set[int] = set()
        self._lost: set[int] = {rank}
        self._endpoint: Endpoint | None = None
        self._awake, self._closed = False, False
        self._next_check = 0.0

    @property
    def ranks_per_host(self) -> int:
        return self.world_size

    def attach(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def progress(self) -> bool:
        assert self._endpoint is not None
        self._watch(self._endpoint)
        sent = [self._send(self._endpoint, peer) for peer in tuple(self._endpoint.ready_peers())]
        received = [self._receive(self._endpoint, peer) for peer in range(self.world_size) if peer not in self._lost]
        return any(sent) or any(received)

    def wait(self, timeout_s: float, *, eager: bool = False) -> None:  # noqa: ARG002  (it polls)
        if not self._awake:
            time.sleep(min(timeout_s, _POLL_S))
        self._awake = False

    def wake(self) -> None:
        self._awake = True

    def connected_peers(self) -> Collection[int]:
        return self._met

    def idle(self) -> bool:
        return True  # a message leaves whole

    def close(self, timeout_s: float) -> None:  # noqa: ARG002  (nothing is under way)
        self._closed = True

    def _send(self, endpoint: Endpoint, peer: int) -> bool:
        box, progress = self._directory / str(peer), False
        while not (box / f"{self.rank}-{self._sent[peer] - _PENDING_MAX}").exists():
            message = endpoint.next_message(peer)
            if message is None:
                break
            draft = self._own / f"draft-{peer}"
            draft.write_bytes(message.header + (b"" if message.body is None else bytes(message.body)))
            box.mkdir(exist_ok=True)
            draft.rename(box / f"{self.rank}-{self._sent[peer]}")
            self._sent[peer] += 1
            self._met.add(peer)
            endpoint.message_sent(message)
            progress = True
        return progress

    def _receive(self, endpoint: Endpoint, peer: int) -> bool:
        progress = False
        while endpoint.may_receive():
            path = self._own / f"{peer}-{self._received[peer]}"
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                break
            self._received[peer] += 1
            path.unlink()
            self._met.add(peer)
            progress = True
            try:
                delivery = endpoint.accept(peer, Header.unpack(content[:HEADER_BYTES]))
                delivery.view[:] = content[HEADER_BYTES:]
            except (ProtocolError, ValueError) as error:
                self._lose(endpoint, peer, f"protocol violation: {error}")
                break
            endpoint.delivered(delivery)
        return progress

    def _watch(self, endpoint: Endpoint) -> None:
        now = time.time()
        if now < self._next_check:
            return
        self._next_check = now + self._silence_s / 8
        (self._own / "alive").touch()
        for peer in self._met - self._lost:
            try:
                silent_s = now - os.stat(self._directory / str(peer) / "alive").st_mtime
            except FileNotFoundError:
                continue
            if silent_s > self._silence_s:
                self._lose(endpoint, peer, f"its mailbox has been silent for {silent_s:.1f} s")

    def _lose(self, endpoint: Endpoint, peer: int, reason: str) -> None:
        self._lost.add(peer)
        endpoint.peer_lost(peer, reason)


def _connect(request: JoinRequest) -> Transport:
    directory = os.environ.get("MAILBOX")
    if directory is None:
        raise ConfigurationError("transport 'mailbox' needs a directory that all ranks can see: set MAILBOX")
    members = meet(request)  # all ranks are here, with equal settings
    rank, world_size = MAILBOX.rank_and_size(request.store)
    link = MailboxTransport(rank, world_size, Path(directory) / request.name, request.tcp.silence_s)
    link.set_hosts(host_numbers(members))
    return link


MAILBOX = TransportSpec(connect=_connect)
