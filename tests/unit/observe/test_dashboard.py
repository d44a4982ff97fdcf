"""The server of the page of a job: who may read, what is sent, and what a client cannot do to it."""

import hmac
import http.client
import json
import logging
import socket
import threading
import time

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe import dashboard as dashboards
from totalreduce.observe.board import Board
from totalreduce.observe.dashboard import Dashboard
from totalreduce.observe.view import JobView

TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def board_in(folder):
    made = Board(folder)
    made.write_job({"job": "run-7", "command": "train.py", "began_at": 1.0, "num_ranks": 2})
    return made


@pytest.fixture
def board(tmp_path):
    return board_in(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with Dashboard(board_in(tmp_path_factory.mktemp("job")), token=TOKEN) as made:
        yield made


def ask(page, path, headers=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/state", "/events", "/metrics", "/other"])
def test_nothing_is_read_without_the_token(page, path):
    for headers in (
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"{page.cookie}={TOKEN}"},
        {"Cookie": f"{page.cookie}={page.cookie_value[:-1]}"},
        {"Cookie": f"totalreduce-1={page.cookie_value}"},
        {"Cookie": "=;;; \x01"},
        {"Authorization": "Bearer ä"},
    ):
        status, _, content = ask(page, path, {key: text.encode("latin-1") for key, text in headers.items()})
        assert (status, b"run-7" in content) == (403, False), headers


def test_the_token_of_the_address_becomes_a_cookie(page):
    assert page.url == f"http://127.0.0.1:{page.port}/?token={TOKEN}"
    status, headers, _ = ask(page, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/")
    value = hmac.digest(TOKEN.encode(), f"cookie:{page.port}".encode(), "sha256").hex()
    assert headers["Set-Cookie"] == f"{page.cookie}={value}; Path=/; HttpOnly; SameSite=Lax"
    status, headers, content = ask(page, "/", {"Cookie": headers["Set-Cookie"].partition(";")[0]})
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>totalreduce</title>" in content
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(page, "/?token=wrong")[0] == 403
    assert ask(page, f"/state?token={TOKEN}")[0] == 403


@pytest.mark.parametrize("others", ['a={"b": [1]}; {}', "=; ;; x y z=;{}", 'a="; {}', "{} ; b@d=é"])
def test_malformed_cookies_of_other_servers_do_not_matter(page, others):
    cookies = others.replace("{}", f"{page.cookie}={page.cookie_value}")
    assert ask(page, "/state", {"Cookie": cookies.encode("latin-1")})[0] == 200


def test_any_printable_token_logs_in(board):
    token = 'a token; with "all" of\\it, 100 % & + #'
    with Dashboard(board, token=token) as page:
        path = page.url.partition(str(page.port))[2]
        status, headers, _ = ask(page, path)
        assert status == 303
        assert ask(page, "/state", {"Cookie": headers["Set-Cookie"].partition(";")[0]})[0] == 200
        assert ask(page, "/state", {"Authorization": f"Bearer {token}"})[0] == 200


def test_tokens_are_not_logged(page, caplog):
    caplog.set_level(logging.DEBUG, logger="totalreduce.observe")
    ask(page, f"/?token={TOKEN}")
    with socket.create_connection(("127.0.0.1", page.port), timeout=10) as connection:
        connection.sendall(f"GET /?token={TOKEN} HTTP/x\r\n\r\n".encode())
        assert b" 400 " in connection.recv(1000)
    assert "303" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000", "[::1]:1", "127.9.9.9:80"])
def test_hosts_of_this_machine_are_answered(page, host):
    status, _, content = ask(page, "/state", {**BEARER, "Host": host})
    assert (status, json.loads(content)["job"]) == (200, "run-7")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "0.0.0.0"]
)
def test_a_name_that_leads_here_is_refused(page, host):
    """DNS rebinding: a page of another site asks by a name of its own, with the token that it may have guessed."""
    assert ask(page, "/state", {**BEARER, "Host": host})[0] == 421


def test_only_reading_is_possible(page):
    assert ask(page, "/state", BEARER, method="POST")[0] == 501
    assert ask(page, "/../../etc/passwd", BEARER)[0] == 404
    assert ask(page, "/%2e%2e/figures.py", BEARER)[0] == 404


def test_the_page_names_no_other_site():
    folder = dashboards.resources.files("totalreduce.observe") / "page"
    for name in ("page.html", "page.css", "page.js"):
        text = (folder / name).read_text().replace("http://www.w3.org/2000/svg", "")  # the name of SVG, not a link
        assert "http" not in text, name
        assert "//" not in text.replace("// ", ""), name
        assert "innerHTML" not in text


def read_events(page, count):
    """Return the views of the first events of a stream, after the history with which it begins."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.request("GET", "/events", headers=BEARER)
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert [answer.readline() for _ in range(3)] == [b"retry: 1000\n", b"\n", b"event: history\n"]
    assert answer.readline().startswith(b"data: [")
    found = []
    while len(found) < count and (line := answer.readline()):
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    return found, connection, answer


def test_views_are_pushed_and_the_last_one_says_that_the_job_is_over(board, monkeypatch):
    monkeypatch.setattr(dashboards, "_EVENT_S", 0.02)
    monkeypatch.setattr(dashboards, "_READ_S", 0.0)
    with Dashboard(board, token=TOKEN) as page:
        (first, second), connection, answer = read_events(page, 2)
        assert (first["job"], first["is_over"], second["now"] > first["now"]) == ("run-7", False, True)
        board.write_job({"job": "run-8"})
        page.views.end()
        board.remove()  # as the launcher does, which may be faster than the streams
        assert page.views.view().job == "run-8"
    lines = [line for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
    last = json.loads(lines[-1][6:])
    assert (last["job"], last["is_over"]) == ("run-8", True)
    connection.close()


def test_a_page_that_is_opened_late_gets_the_step_times_so_far(board, monkeypatch):
    monkeypatch.setattr(dashboards, "_EVENT_S", 0.01)
    monkeypatch.setattr(dashboards, "_READ_S", 0.0)
    monkeypatch.setattr(dashboards, "_LOOK_S", 0.01)
    noted = threading.Semaphore(0)
    with Dashboard(board, token=TOKEN) as page:
        views, note = page.views, page.views.note

        def note_and_tell():
            note()
            if len(views._history) == dashboards._HISTORY:
                noted.release()

        monkeypatch.setattr(views, "note", note_and_tell)
        monkeypatch.setattr(
            JobView,
            "read",
            lambda *_: JobView(job="", command="", began_at=0.0, now=0.0, step_s=0.3, compute_s=0.2, exposed_s=0.1),
        )
        assert noted.acquire(timeout=20)
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
        connection.request("GET", "/events", headers=BEARER)
        answer = connection.getresponse()
        lines = [answer.readline() for _ in range(4)]
        connection.close()
    assert lines[2] == b"event: history\n"
    history = json.loads(lines[3].removeprefix(b"data: "))
    assert len(history) == dashboards._HISTORY  # bounded
    assert history[-1] == [0.2, 0.1]


def test_streams_and_connections_are_bounded(page, monkeypatch):
    streams = [read_events(page, 1) for _ in range(dashboards._STREAMS_MAX)]
    assert ask(page, "/events", BEARER)[0] == 503
    assert ask(page, "/state", BEARER)[0] == 200
    idle = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(dashboards._CONNECTIONS_MAX)]
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask(page, "/state", BEARER)
    for each in idle:
        each.close()
    for _, connection, answer in streams:
        answer.close()
        connection.close()
    give_up_at = time.monotonic() + 10.0
    while True:  # the threads of the connections notice their ends
        try:
            assert ask(page, "/state", BEARER)[0] == 200
            return
        except (http.client.RemoteDisconnected, ConnectionResetError):
            assert time.monotonic() < give_up_at
            time.sleep(0.05)


def test_a_page_that_does_not_read_is_dropped(board, monkeypatch):
    """Nothing is kept for it but what the kernel's buffers hold."""
    monkeypatch.setattr(dashboards, "_EVENT_S", 0.0)
    monkeypatch.setattr(dashboards._Handler, "timeout", 0.2)
    board.write_job({"job": "x" * 1_000_000})
    with Dashboard(board, token=TOKEN) as page:
        taken, acquire = threading.Event(), page.views._streams.acquire

        def take(*, blocking):
            is_taken = acquire(blocking=blocking)
            if is_taken:
                taken.set()
            return is_taken

        monkeypatch.setattr(page.views._streams, "acquire", take)
        lagging = socket.create_connection(("127.0.0.1", page.port))
        lagging.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        give_up_at = time.monotonic() + 20.0
        assert taken.wait(20)
        while page.views._streams._value < dashboards._STREAMS_MAX:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        lagging.close()


def test_a_request_that_does_not_come_is_not_waited_for(board, monkeypatch):
    monkeypatch.setattr(dashboards._Handler, "timeout", 0.1)
    with Dashboard(board, token=TOKEN) as page:
        silent = socket.create_connection(("127.0.0.1", page.port), timeout=10)
        silent.sendall(b"GET /state HT")
        assert silent.recv(100) == b""
        silent.close()


def test_a_request_that_comes_byte_by_byte_is_not_waited_for(board, monkeypatch):
    monkeypatch.setattr(dashboards._Handler, "timeout", 0.2)
    with Dashboard(board, token=TOKEN) as page, socket.create_connection(("127.0.0.1", page.port)) as slow:
        slow.settimeout(0.05)
        slow.sendall(b"GET /state HTTP/1.1\r\nX: ")
        give_up_at = time.monotonic() + 5.0
        while True:
            assert time.monotonic() < give_up_at
            try:
                slow.sendall(b"x")
                assert slow.recv(100) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_several_requests_come_on_one_connection(page):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    for _ in range(2):
        connection.request("GET", "/state", headers=BEARER)
        assert json.loads(connection.getresponse().read())["job"] == "run-7"
    connection.close()


def test_mistakes_are_errors(board):
    with pytest.raises(ConfigurationError, match="at least 16 printable ASCII characters"):
        Dashboard(board, token="short")
    with Dashboard(board) as page, pytest.raises(ConfigurationError, match=f"cannot use port {page.port}"):
        Dashboard(board, port=page.port)


def test_tokens_are_new_for_each_job(board):
    with Dashboard(board) as one, Dashboard(board) as other:
        assert len(one.token) == 43  # 32 bytes
        assert one.token != other.token
