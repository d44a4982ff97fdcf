"""The page of a running job: a small HTTP server on the loopback interface, in a thread of the launcher.

Every request must prove the token of the job: by a cookie, which the address that ``totalreduce run`` shows sets, or as
a bearer token. The cookie holds a keyed hash and not the token, because browsers send it to all ports of the host. The
server answers only requests for a loopback host, so that a page of another site cannot read it by a name that leads
here (DNS rebinding). Connections, streams and times are bounded. It reads the folder of the job, once or twice a second
however many pages are open, and never asks a rank for anything. A page that is opened late gets the step times of the
last minutes first.
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
import time
import urllib.parse
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, final

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.observe import metrics
from totalreduce.observe.board import Board
from totalreduce.observe.view import JobView

__all__ = ["TOKEN_CHARACTERS_MIN", "Dashboard"]

_log = logging.getLogger(__name__)

#: A token that a user gives has at least so many characters.
TOKEN_CHARACTERS_MIN = 16
#: Connections and streams of events at the same time. Further ones are refused.
_CONNECTIONS_MAX, _STREAMS_MAX = 32, 12
#: How long a client may take for its whole request, and to take what it is sent, until its connection is closed.
_PATIENCE_S = 5.0
#: The time between two events of a stream, and between two readings of the folder.
_EVENT_S, _READ_S = 1.0, 0.5
#: The step times that a page is sent when it connects, one for each event that it has missed.
_HISTORY = 120
#: How often the server looks whether it is to end.
_LOOK_S = 0.1
#: What a page does without the connection, in milliseconds: it connects again after this time.
_RETRY_MS = 1000
#: What a request says after a question mark. It may have the token, and is not logged.
_QUERY = re.compile(r"\?.*", re.DOTALL)
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@final
class Dashboard:
    """The server of one job's page; a context manager."""

    def __init__(self, board: Board, *, port: int = 0, token: str | None = None) -> None:
        """Listen. Raises ``ConfigurationError``.

        Args:
            board: The folder of the job.
            port: The port; 0: a free one.
            token: What a client must know; by default 32 random bytes.
        """
        if token is not None and (len(token) < TOKEN_CHARACTERS_MIN or not token.isascii() or not token.isprintable()):
            raise ConfigurationError(
                f"the token of the dashboard needs at least {TOKEN_CHARACTERS_MIN} printable ASCII characters: "
                "make one with `openssl rand -hex 32`"
            )
        self.token = token or secrets.token_urlsafe(32)  #: What a client must know.
        self._views = _Views(board)
        try:
            self._server = _Server(self)
            self._server.bind_to(port)
        except OSError as error:
            raise ConfigurationError(f"the dashboard cannot use port {port}: {describe_error(error)}") from error
        self.port: int = self._server.server_address[1]  #: The port on 127.0.0.1.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="totalreduce-dashboard", daemon=True
        )

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={urllib.parse.quote(self.token, safe='')}"

    @property
    def cookie(self) -> str:
        """The name of the cookie. Browsers send the cookies of a host to all its ports."""
        return f"totalreduce-{self.port}"

    @property
    def cookie_value(self) -> str:
        """What the cookie must hold: HMAC-SHA256 of the port with the token, which cannot be found from it."""
        return hmac.new(self.token.encode(), f"cookie:{self.port}".encode(), "sha256").hexdigest()

    @property
    def views(self) -> _Views:
        """What the pages are shown."""
        return self._views

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send a last event to the pages, and end."""
        self._views.end()
        self._server.shutdown()
        self._server.server_close()


@final
class _Views:
    """The present view of the job as JSON, read at most every ``_READ_S`` for all clients together."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.ending = threading.Event()
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._view, self._text = JobView(job="", command="", began_at=0.0, now=0.0), b"{}"
        self._is_over = False
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)
        self._noted_at = float("-inf")
        self._streams = threading.BoundedSemaphore(_STREAMS_MAX)

    def view(self) -> JobView:
        """Return the view."""
        with self._lock:
            self._read()
            return self._view

    def text(self) -> bytes:
        """Return the view as JSON, without a line break."""
        with self._lock:
            self._read()
            return self._text

    def note(self) -> None:
        """Note the present step time for pages that are opened later, if one was not noted a moment ago."""
        with self._lock:
            if self._is_over or time.monotonic() - self._noted_at < _EVENT_S:
                return
            self._noted_at = time.monotonic()
            self._read()
            self._history.append((self._view.compute_s, self._view.exposed_s))

    def history(self) -> bytes:
        """Return the step times of the last minutes as JSON: pairs of seconds, computing and exposed."""
        with self._lock:
            return json.dumps(list(self._history), separators=(",", ":")).encode()

    def end(self) -> None:
        """Have all streams send their last event, and end. The folder of the job is not read afterwards."""
        try:
            with self._lock:
                self._read(is_last=True)
        finally:
            self.ending.set()

    def _read(self, *, is_last: bool = False) -> None:
        """Read the folder of the job, with the lock held, unless that was done a moment ago or the job is over."""
        if self._is_over or (time.monotonic() - self._read_at < _READ_S and not is_last):
            return
        self._read_at, self._is_over = time.monotonic(), is_last
        self._view = JobView.read(self.board, time.time())
        self._text = json.dumps({**self._view.as_dict(), "is_over": is_last}, separators=(",", ":")).encode()

    def open_stream(self) -> bool:
        """Return whether one more stream may be sent."""
        return self._streams.acquire(blocking=False)

    def close_stream(self) -> None:
        """Note the end of a stream."""
        self._streams.release()


@final
class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.dashboard = dashboard
        self._connections = threading.BoundedSemaphore(_CONNECTIONS_MAX)

    def bind_to(self, port: int) -> None:
        """Listen at a port. Raises ``OSError`` if that is impossible."""
        self.server_address = ("127.0.0.1", port)
        try:
            self.server_bind()
            self.server_activate()
        except OSError:
            self.server_close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own, if there are not too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and count it no more."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def service_actions(self) -> None:
        """Note the present step time. Called every ``_LOOK_S``, also while nobody asks."""
        try:
            self.dashboard.views.note()
        except Exception:
            # What only shows a job must not end its server.
            _log.debug("the step time could not be noted", exc_info=True)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (the signature of the base class)
        """Note an error of a connection: a client that has gone is none of the launcher's."""
        _log.debug("a request to the dashboard ended with an error", exc_info=True)


@final
class _RequestBytes(io.RawIOBase):
    """The bytes that come on a connection. One request must come as a whole within a time, however it is divided."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self._connection, self._patience_s = connection, patience_s
        self._give_up_at = 0.0

    def begin(self) -> None:
        """Await the next request."""
        self._give_up_at = time.monotonic() + self._patience_s

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come. Raises ``TimeoutError`` if the time is over."""
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no whole request came within {self._patience_s} s")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._patience_s)


@final
class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "totalreduce", ""
    timeout = _PATIENCE_S

    def setup(self) -> None:
        """Begin a connection."""
        super().setup()
        self.rfile.close()
        self._requests = _RequestBytes(self.connection, self.timeout)
        self.rfile = io.BufferedReader(self._requests)

    def handle_one_request(self) -> None:
        """Await a request, and answer it."""
        self._requests.begin()
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request."""
        dashboard = self.server.dashboard
        target = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(target.query)
        if not _is_loopback(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers requests for 127.0.0.1 and localhost")
        elif "token" in query and target.path == "/":
            if not self._is_token(query["token"][0]):
                self._refuse(HTTPStatus.FORBIDDEN, "this is not the token of the job")
                return
            # The token leaves the address of the page, so that nobody sees it there or in the history.
            self.send_response(HTTPStatus.SEE_OTHER)
            cookie = f"{dashboard.cookie}={dashboard.cookie_value}; Path=/; HttpOnly; SameSite=Lax"
            self._end_headers({"Location": "/", "Set-Cookie": cookie, "Content-Length": "0"})
        elif not self._may_read():
            self._refuse(HTTPStatus.FORBIDDEN, "the token of the job is missing: open the address that the job shows")
        elif target.path in _FILES:
            name, kind = _FILES[target.path]
            self._answer(resources.files("totalreduce.observe").joinpath("page", name).read_bytes(), kind)
        elif target.path == "/state":
            self._answer(dashboard.views.text(), "application/json")
        elif target.path == "/events":
            self._stream(dashboard.views)
        elif target.path == "/metrics":
            self._answer_metrics(dashboard.views)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name in the base class)
        """Log requests only if a user looks for them, and without queries: the token may be in one."""
        _log.debug("%s", _QUERY.sub("?...", format % args))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log an answer."""
        self.log_message("%s, %s bytes: %s", code, size, self.requestline)

    def _may_read(self) -> bool:
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(credentials.strip()):
            return True
        # Cookies of other servers of this host come along. Some parsers drop all cookies if one of them is malformed.
        cookies = [part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";")]
        wanted = self.server.dashboard.cookie_value
        return any(name == self.server.dashboard.cookie and _is_equal(value, wanted) for name, _, value in cookies)

    def _is_token(self, text: str) -> bool:
        return _is_equal(text, self.server.dashboard.token)

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self._end_headers({"Content-Type": kind, "Content-Length": str(len(content))})
        self.wfile.write(content)

    def _answer_metrics(self, views: _Views) -> None:
        try:
            content, kind = metrics.exposition(views.view())
        except ConfigurationError as error:
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, str(error))
        else:
            self._answer(content, kind)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        content = (reason + "\n").encode()
        self.close_connection = True
        self.send_response(status)
        self._end_headers(
            {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(content)), "Connection": "close"}
        )
        self.wfile.write(content)

    def _end_headers(self, headers: dict[str, str]) -> None:
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, views: _Views) -> None:
        """Send a view every second, until the client has gone, does not read, or the job is over."""
        if not views.open_stream():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{_STREAMS_MAX} pages are open already")
            return
        try:
            self.close_connection = True
            self.send_response(HTTPStatus.OK)
            self._end_headers({"Content-Type": "text/event-stream", "Connection": "close"})
            self.wfile.write(f"retry: {_RETRY_MS}\n\nevent: history\ndata: ".encode() + views.history() + b"\n\n")
            is_last = False
            while not is_last:
                is_last = views.ending.is_set()
                self.wfile.write(b"data: " + views.text() + b"\n\n")
                views.ending.wait(_EVENT_S)
        except OSError:
            _log.debug("a page of the dashboard has gone or does not read")
        finally:
            views.close_stream()


def _is_equal(text: str, secret: str) -> bool:
    """Compare a text with a secret in a time that does not depend on the secret."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), secret.encode())


def _is_loopback(host: str) -> bool:
    """Whether the value of a Host header names the loopback interface, with or without a port."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return name is not None and ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
