"""The goodput of plain TCP on the same links: one raw stream from each rank to the next, all at once.

The nominal rate of a link counts Ethernet frames; with 1,500-byte packets TCP's payload tops out near 95.5 %
of it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

_BLOCK_BYTES = 256 * 1024
_PATIENCE_S = 20.0

Exchange = Callable[[Sequence[float]], list[list[float]]]


class _Samples(Protocol):
    """Samples of a rank that include the goodput of plain TCP streams in the same run."""

    @property
    def goodput_bits_per_s(self) -> list[float]: ...


def mean_goodput(ranks: Sequence[_Samples]) -> float:
    """Return the bits per second of a plain TCP stream, averaged over links and over the run."""
    return fmean(sample for rank in ranks for sample in rank.goodput_bits_per_s)


def goodput_caption(ranks: Sequence[_Samples]) -> str:
    """Return the sentence that says it below a table."""
    return f"Plain TCP stream in the same run: {mean_goodput(ranks) / 1e9:.3f} Gbit/s per link."


def ring_goodput(*, rank: int, members: Sequence[int], address: str, exchange: Exchange, seconds: float = 1.0) -> float:
    """Bits per second of payload that this rank receives from its neighbour while all members send.

    Args:
        rank: Of this process.
        members: Ranks of the processes that stream, each to the next, the last one to the first: one per host where
            there are several hosts, so that every link carries one stream. The other ranks call this too and get the
            members' mean.
        address: IPv4 address of this process.
        exchange: Gathers every rank's numbers; also keeps the ranks together.
        seconds: How long to send.
    """
    with socket.create_server((address, 0), backlog=1) as listener:
        listener.settimeout(_PATIENCE_S)
        octets = [float(octet) for octet in socket.inet_aton(address)]
        everyone = exchange([*octets, float(listener.getsockname()[1])])
        goodput = 0.0
        if rank in members:
            *next_octets, port = everyone[members[(members.index(rank) + 1) % len(members)]]
            target = ".".join(str(int(octet)) for octet in next_octets)
            with socket.create_connection((target, int(port)), timeout=_PATIENCE_S) as outgoing:
                incoming, _ = listener.accept()
                with incoming:
                    incoming.settimeout(_PATIENCE_S)
                    exchange([0.0])
                    goodput = _stream(outgoing, incoming, seconds)
        else:
            exchange([0.0])
        everyone = exchange([goodput])
    return goodput or sum(found for (found,) in everyone) / len(members)


def _stream(outgoing: socket.socket, incoming: socket.socket, seconds: float) -> float:
    sender = threading.Thread(target=_send, args=(outgoing, seconds), name="goodput-sender", daemon=True)
    sender.start()
    buffer = bytearray(_BLOCK_BYTES)
    received = incoming.recv_into(buffer)
    begin, counted = time.monotonic(), 0
    while received:
        received = incoming.recv_into(buffer)
        counted += received
    elapsed = time.monotonic() - begin
    sender.join(_PATIENCE_S)
    return counted * 8 / elapsed


def _send(outgoing: socket.socket, seconds: float) -> None:
    block = bytes(_BLOCK_BYTES)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        outgoing.sendall(block)
    outgoing.shutdown(socket.SHUT_WR)
