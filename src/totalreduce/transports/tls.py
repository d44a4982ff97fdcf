"""TLS 1.3 for one connection of the TCP transport, without blocking.

``TlsCredentials`` holds the contents of a rank's three files. A ``TlsChannel`` lies between a ``Connection`` and its
socket; it has the two methods that a connection needs of a socket, with the same meaning: ``send`` and ``recv_into``,
which raise ``BlockingIOError`` where the socket would.

Two ends accept each other if each has a certificate that one authority has signed. Names in certificates do not count:
ranks are found by address. Then the ends prove inside the channel (``handshake.py``) that they know the job's key,
over ``TlsChannel.binding``. So the claim "I am rank 3" is valid for this connection and these two certificates only.

The TLS library works on memory, not on the socket: one system call then moves up to 16 records, and an error of the
socket is never mistaken for one of TLS. Readiness has the same meaning as without TLS: ``BlockingIOError`` is raised
only when the socket is empty (or full) and no byte is left that could be decrypted, so no edge of epoll is missed.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import cast, final

from totalreduce.foundation.config import Tls
from totalreduce.foundation.errors import AuthenticationError, ConfigurationError
from totalreduce.foundation.named_files import read_named

__all__ = ["HIDDEN_BYTES_MAX", "HungUp", "TlsChannel", "TlsCredentials"]

_log = logging.getLogger(__name__)

#: The longest plaintext of one record.
_RECORD_BYTES = 16 * 1024
#: How much is encrypted at a time. More would only wait in this process, where no message can overtake it.
_BATCH_BYTES = 4 * _RECORD_BYTES
#: How much is read from the socket at a time; one record before the peer has proved its membership.
_PULL_BYTES = 16 * _RECORD_BYTES
#: How much of a body may be in the TLS library, in an incomplete record, and no longer in the socket.
HIDDEN_BYTES_MAX = _RECORD_BYTES + 1024

#: A fatal "protocol version" alert, not encrypted, for a peer without TLS.
_SPEAK_TLS = bytes.fromhex("15 0303 0002 0246")
#: Codes of X.509 verification (``X509_V_ERR_*``) that mean "no chain to the authority".
_NOT_SIGNED = frozenset({2, 18, 19, 20, 21})
_NOT_YET_VALID, _EXPIRED = 9, 10
#: The longest file of certificates that is read; those of all public authorities take 256 KiB.
_FILE_BYTES_MAX = 4 << 20


class HungUp(ConnectionResetError):
    """The other end closed the connection in the middle of the TLS handshake."""


@final
class TlsCredentials:
    """A rank's certificate and key, and the authority that it trusts."""

    def __init__(self, tls: Tls) -> None:
        """Load the files, and check them with a handshake of this rank with itself.

        Raises:
            ConfigurationError: A file cannot be used, or the others could not accept this certificate.
        """
        self.files = tls
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, tls)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
        self._server.num_tickets = 0  # sessions are not resumed
        #: For all channels: a transport reads from one of them at a time.
        self.scratch = memoryview(bytearray(_PULL_BYTES))
        self.digest = hashlib.sha256(self._shake_own_hand()).digest()

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, accepting: bool) -> ssl.SSLObject:
        """Return one end of a TLS connection over two memory buffers."""
        return (self._server if accepting else self._client).wrap_bio(incoming, outgoing, server_side=accepting)

    def verdict(self, error: ssl.SSLCertVerificationError) -> str:
        """Return what is wrong with a certificate, as the end of a sentence whose subject is the certificate."""
        match error.verify_code:
            case code if code in _NOT_SIGNED:
                return f"was not signed by CA {self.files.ca} ({error.verify_message})"
            case code if code == _EXPIRED:
                return "has expired"
            case code if code == _NOT_YET_VALID:
                return "is not valid yet; do the clocks agree?"
            case _:
                return f"is not acceptable: {error.verify_message}"

    def _shake_own_hand(self) -> bytes:
        """Connect this rank to itself, in memory; returns the certificate (DER) that others will see."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client, server = self.wrap(back, there, accepting=False), self.wrap(there, back, accepting=True)
        for end in (client, server, client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise ConfigurationError(
                    f"TLS: this rank's own certificate {self.files.cert} {self.verdict(error)}"
                ) from error
            except ssl.SSLError as error:
                raise ConfigurationError(
                    f"TLS: certificate {self.files.cert} and key {self.files.key} do not work: {_reason(error)}"
                ) from error
        certificate = client.getpeercert(binary_form=True)
        assert certificate is not None, "a handshake with CERT_REQUIRED succeeded"
        return certificate


@final
class TlsChannel:
    """One end of a TLS connection over a non-blocking socket."""

    def __init__(self, sock: socket.socket, credentials: TlsCredentials, *, other: str, accepting: bool) -> None:
        """Prepare a channel over a socket, which need not be connected yet.

        ``other`` is the name of the other end in errors; ``accepting``: the other end has opened the connection.
        """
        self.ready = False  #: Whether the TLS handshake is complete.
        #: Whether the other end has proved that it knows the job's key; the owner sets it. Until then a TLS error is an
        #: ``AuthenticationError``, afterwards the end of the connection.
        self.trusted = False
        self._sock, self._credentials, self._other, self._accepting = sock, credentials, other, accepting
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = credentials.wrap(self._incoming, self._outgoing, accepting=accepting)
        self._spoken = False
        self._broken: AuthenticationError | ConnectionAbortedError | None = None
        self._unsent = memoryview(b"")  #: Encrypted bytes that the socket has not taken yet.
        self._owed = 0  #: How many of the caller's bytes are in ``_unsent``.

    def advance(self) -> None:
        """Go on with the handshake; returns when it is complete.

        Raises:
            AuthenticationError: The other end has no valid certificate, refuses this rank's, or does not use TLS.
            BlockingIOError: The other end must send first.
            HungUp: The other end closed the connection.
            OSError: The connection ended.
        """
        while True:
            self._flush()
            if self.ready:
                return
            try:
                self._tls.do_handshake()
                self.ready = True
            except ssl.SSLWantReadError:
                if not self._outgoing.pending:
                    self._pull()
            except ssl.SSLError as error:
                raise self._failure(error) from error
            self._collect()

    def binding(self) -> bytes:
        """Return bytes that both ends of this connection know, and that no other connection has.

        They are the SHA-256 of both certificates, the opener's first, and the opener's Finished message ("tls-unique"),
        a code over all messages and fresh keys of the handshake. An attacker in the middle has two connections, so two
        different bindings, even with a certificate of the authority or a rank's own key.
        """
        certificate, finished = self._tls.getpeercert(binary_form=True), self._tls.get_channel_binding("tls-unique")
        if not certificate or not finished:
            raise AuthenticationError(f"{ssl.OPENSSL_VERSION} does not say what binds a connection")
        mine, theirs = self._credentials.digest, hashlib.sha256(certificate).digest()
        return (theirs + mine if self._accepting else mine + theirs) + finished

    def say_why(self) -> None:
        """Send the TLS alert with the reason of the refusal, if the socket takes it."""
        self._collect()
        if not self._spoken:  # the other end does not use TLS, and the library has no answer for it
            self._unsent = memoryview(_SPEAK_TLS)
        try:
            self._flush()
        except OSError as error:
            _log.debug("%s is not told why it is refused: %s", self._other, error)

    def send(self, views: Sequence[memoryview | bytes]) -> int:
        """Encrypt and send the first bytes of ``views``; returns how many, when the socket has taken all of them.

        Raises:
            BlockingIOError: The socket is full. The next call must be for the same bytes: they are encrypted already.
            OSError: The connection ended.
        """
        if not self._owed:
            self._owed = self._encrypt(views)
        self._flush()
        sent, self._owed = self._owed, 0
        return sent

    def recv_into(self, view: memoryview) -> int:
        """Receive and decrypt; returns how many bytes, or 0 if the other end has closed its direction.

        Raises:
            AuthenticationError: The other end refuses this rank (see ``trusted``).
            BlockingIOError: No byte has arrived.
            OSError: The connection ended, or bytes were changed on the way.
        """
        while True:
            count = self._decrypt(view)
            if count:
                return count
            self._pull()

    def _encrypt(self, views: Sequence[memoryview | bytes]) -> int:
        parts: list[memoryview | bytes] = []
        total = 0
        for view in views:
            part = view[: _BATCH_BYTES - total]
            parts.append(part)
            total += len(part)
            if total == _BATCH_BYTES:
                break
        if total <= _RECORD_BYTES:
            parts = [b"".join(parts)]  # one record costs less than two, on both sides
        try:
            for part in parts:
                self._tls.write(part)
        except ssl.SSLError as error:
            raise self._failure(error) from error
        self._collect()
        return total

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt all records that have arrived, as far as there is room; returns how many bytes."""
        count = 0
        if self._broken is not None:
            raise self._broken
        try:
            while count < len(view):
                count += cast("int", self._tls.read(len(view) - count, view[count:]))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._broken = self._failure(error)
            if not count:  # else the next call raises it, after the bytes before the error
                raise self._broken from error
        return count

    def _pull(self) -> None:
        """Move bytes from the socket to the TLS library."""
        scratch = self._credentials.scratch
        try:
            count = self._sock.recv_into(scratch if self.trusted else scratch[:_RECORD_BYTES])
        except ConnectionResetError:
            if self.ready:
                raise
            count = 0
        if count == 0:
            if self.ready:
                raise ConnectionResetError("the connection was closed by the other end")
            raise HungUp(f"{self._other} hung up when TLS began; is TLS set on every rank?")
        self._incoming.write(scratch[:count])

    def _collect(self) -> None:
        """Move bytes from the TLS library to those that wait for the socket."""
        if self._outgoing.pending:
            self._spoken = True
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())

    def _flush(self) -> None:
        """Move bytes that wait to the socket."""
        while self._unsent:
            sent = self._sock.send(self._unsent)
            self._unsent = self._unsent[sent:]

    def _failure(self, error: ssl.SSLError) -> AuthenticationError | ConnectionAbortedError:
        if self.trusted:
            return ConnectionAbortedError(f"TLS: {_reason(error)}")
        return AuthenticationError(self._describe(error))

    def _describe(self, error: ssl.SSLError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the certificate of {self._other} {self._credentials.verdict(error)}"
        reason = error.reason or ""
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            mine = self._credentials.files.cert
            return f"{self._other} does not accept this rank's certificate {mine}: {_reason(error)}"
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return f"{self._other} has no certificate"
        return f"{self._other} does not speak TLS 1.3 as a rank does: {_reason(error)}; is TLS set on every rank?"


def _context(side: ssl._SSLMethod, tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the job's own authority and the job's key decide about membership
    context.verify_mode = ssl.CERT_REQUIRED
    for path in (tls.cert, tls.key, tls.ca):
        try:
            read_named(Path(path), _FILE_BYTES_MAX, is_trusted=True)
        except OSError as error:
            raise ConfigurationError(f"TLS: {path}: {error.strerror}; it must be readable on every host") from error
    if side is ssl.PROTOCOL_TLS_SERVER and Path(tls.key).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("the TLS key %s can be used by other users: `chmod 600 %s`", tls.key, tls.key)

    def refuse_password() -> str:  # by default OpenSSL asks at the terminal
        raise ConfigurationError(f"TLS: the key {tls.key} is encrypted; decrypt it with `openssl pkey`")

    try:
        context.load_cert_chain(tls.cert, tls.key, password=refuse_password)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"TLS: {tls.cert} and {tls.key} are not a certificate in PEM form and its private key: {_reason(error)}"
        ) from error
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(f"TLS: {tls.ca} holds no certificate in PEM form: {_reason(error)}") from error
    return context


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
