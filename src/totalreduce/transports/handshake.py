"""The handshake by which the two ends of a connection prove that they belong to one job. It does no I/O.

::

    connector                                   acceptor
    HELLO(job, group epoch, ranks, nonce_c) ->
                                             <- CHALLENGE(nonce_s, HMAC(key, "acceptor" + hello + nonce_s))
    PROOF(HMAC(key, "connector" + hello + nonce_s)) ->

The two labels make a reflected answer invalid, and fresh nonces a recorded one. The codes cover both ranks, the job and
the epoch, so an answer for one pair of ranks is invalid for another. All messages have a fixed length. Later messages
are neither encrypted nor authenticated one by one; TLS does that.

Over TLS the same messages are exchanged inside the channel, and ``TlsChannel.binding`` is appended to the transcript
under both codes: an answer given on one connection is invalid on another, so they cannot be relayed between two.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from typing import final

from totalreduce.foundation.errors import AuthenticationError

__all__ = ["Acceptor", "Connector", "JobIdentity"]

_MAGIC = b"TRh1"
_HELLO = struct.Struct("<4s16sIII16s")
_CHALLENGE_BYTES = 16 + 32
_PROOF_BYTES = 32
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The membership that a peer must prove."""

    key: bytes  #: Shared secret, at least 16 bytes.
    job_id: str  #: Name of the job and of the group.
    epoch: int  #: Version of the membership.

    def __post_init__(self) -> None:
        """Refuse a key that could be guessed."""
        if len(self.key) < 16:
            raise AuthenticationError(f"the job's key has {len(self.key)} bytes; it needs at least 16")

    @property
    def digest(self) -> bytes:
        """Hash of the job id, 16 bytes."""
        return hashlib.blake2b(self.job_id.encode(), digest_size=16).digest()

    def code(self, label: bytes, transcript: bytes) -> bytes:
        """Return the HMAC-SHA256 of one side's transcript."""
        return hmac.new(self.key, label + transcript, hashlib.sha256).digest()


@final
class Connector:
    """The side that opens the connection."""

    def __init__(self, identity: JobIdentity, rank: int, peer: int) -> None:
        """Prepare the HELLO in ``outgoing``."""
        self._identity = identity
        self._hello = _HELLO.pack(_MAGIC, identity.digest, identity.epoch, rank, peer, os.urandom(_NONCE_BYTES))
        self._binding = b""
        self.outgoing = self._hello  #: The HELLO.
        self.peer = peer  #: Rank at the other end.
        self.needed = _CHALLENGE_BYTES  #: How many bytes ``feed`` takes next; 0 when the handshake is complete.

    def bind(self, binding: bytes) -> None:
        """Make the codes valid for one connection only; before the first ``feed``."""
        self._binding = binding

    def feed(self, data: bytes) -> bytes:
        """Take the CHALLENGE, return the PROOF. Raises ``AuthenticationError``: the acceptor does not know the key."""
        nonce, code = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        transcript = self._hello + nonce + self._binding
        if not hmac.compare_digest(code, self._identity.code(b"acceptor", transcript)):
            raise AuthenticationError(f"the process at rank {self.peer}'s address does not know the job's key")
        self.needed = 0
        return self._identity.code(b"connector", transcript)


@final
class Acceptor:
    """The side that accepts the connection; its attributes are those of ``Connector``, without ``outgoing``."""

    def __init__(self, identity: JobIdentity, rank: int, world_size: int) -> None:
        """Begin without knowing the peer: ``peer`` is -1 until the HELLO has come."""
        self._identity, self._rank, self._world_size = identity, rank, world_size
        self._transcript = self._binding = b""
        self.peer = -1
        self.needed = _HELLO.size

    def bind(self, binding: bytes) -> None:
        """Make the codes valid for one connection only; before the first ``feed``."""
        self._binding = binding

    def feed(self, data: bytes) -> bytes:
        """Take the HELLO, return the CHALLENGE; then take the PROOF, return nothing. Raises ``AuthenticationError``."""
        if not self._transcript:
            return self._challenge(data)
        if not hmac.compare_digest(data, self._identity.code(b"connector", self._transcript)):
            raise AuthenticationError(f"a process that claims to be rank {self.peer} does not know the job's key")
        self.needed = 0
        return b""

    def _challenge(self, data: bytes) -> bytes:
        magic, digest, epoch, source, target, _ = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise AuthenticationError("a stranger connected: not a totalreduce handshake")
        if not hmac.compare_digest(digest, self._identity.digest) or epoch != self._identity.epoch:
            raise AuthenticationError("a process of another job or membership connected")
        if target != self._rank or source == self._rank or source >= self._world_size:
            raise AuthenticationError(f"a connection from rank {source} to rank {target} reached rank {self._rank}")
        self.peer = source
        nonce = os.urandom(_NONCE_BYTES)
        self._transcript = data + nonce + self._binding
        self.needed = _PROOF_BYTES
        return nonce + self._identity.code(b"acceptor", self._transcript)
