"""Writers of what only reports: whatever happens to their target, they raise nothing, and count what is lost."""

import contextlib
import errno
import fcntl
import io
import logging
import os
import pty
import socket
import stat
import threading

import pytest

from totalreduce.cli.run import _write_summary
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.files import replacing
from totalreduce.observe import reporting
from totalreduce.observe.logs import ReportHandler
from totalreduce.observe.reporting import ReportWriter, open_report

LINE = b"0123456789abcde\n"
FULL = "No space left on device (ENOSPC)"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def said():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def waiting(monkeypatch, clock):
    """Has a function called whenever a writer waits, in place of waiting. It gets the seconds."""

    def use(wait):
        poll = reporting._poll
        monkeypatch.setattr(reporting, "_poll", lambda which, seconds: wait(seconds) if seconds else poll(which, 0.0))

    return use


@pytest.fixture
def pipe():
    """The two ends of a pipe that holds 4 KiB."""
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    yield theirs, ours
    for descriptor in (theirs, ours):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_all(descriptor):
    """What a reader finds who comes late."""
    os.set_blocking(descriptor, False)
    found = bytearray()
    with contextlib.suppress(BlockingIOError):
        while data := os.read(descriptor, 1 << 16):
            found += data
    return bytes(found)


def in_the_background(descriptor):
    """A reader; returns a function that waits for the end of the stream and returns what came."""
    found = bytearray()

    def read():
        while data := os.read(descriptor, 1 << 16):
            found.extend(data)

    thread = threading.Thread(target=read)
    thread.start()

    def result():
        thread.join(20)
        return bytes(found)

    return result


def test_a_file_is_written_at_once(tmp_path, said):
    writer = open_report(tmp_path / "events", "--events", said.append)
    writer.write(LINE)
    assert (tmp_path / "events").read_bytes() == LINE
    writer.write(LINE * 2)
    writer.close()
    assert ((tmp_path / "events").read_bytes(), said, writer.describe_loss()) == (LINE * 3, [], "")


def test_a_full_disk_is_said_once_and_tried_again_with_a_new_line(small_disk, said):
    folder = small_disk(64)
    (folder / "other").write_bytes(bytes(40 << 10))
    writer = open_report(folder / "events", "--events", said.append)
    line = b"x" + LINE  # whose length does not divide that of a page
    for _ in range(4096):
        writer.write(line)
    size = (folder / "events").stat().st_size
    assert 0 < size < 64 << 10
    (folder / "other").unlink()
    writer.write(b"after\n")
    writer.close()
    kept = size // len(line)
    torn = line[: size % len(line)]
    assert torn
    assert (folder / "events").read_bytes() == line * kept + torn + b"\nafter\n"
    name = f"--events {folder / 'events'}"
    assert said == [f"{name} cannot be written: {FULL}. The job goes on; at its end is said what was lost"]
    lost = 4096 * len(line) - size
    assert writer.describe_loss() == f"{name}: {4096 - kept:,} lines ({lost:,} bytes) were lost: {FULL}"


def test_a_device_that_is_full(said):
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = ReportWriter("standard output", descriptor, said.append)
    writer.write(LINE)
    writer.write(LINE)
    writer.close()
    os.close(descriptor)
    assert said == [f"standard output cannot be written: {FULL}. The job goes on; at its end is said what was lost"]
    assert (writer.loss.lines, writer.loss.num_bytes, writer.is_failing) == (2, 32, True)


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal", "closed descriptor"])
def test_a_reader_that_is_gone(kind, said):
    if kind == "pipe":
        theirs, ours = os.pipe()
    elif kind == "socket":
        theirs, ours = (end.detach() for end in socket.socketpair())
    else:
        theirs, ours = pty.openpty()
    writer = ReportWriter("standard error", ours, said.append)
    os.close(theirs)
    if kind == "closed descriptor":
        os.close(ours)
        writer = ReportWriter("standard error", ours, said.append)
    for _ in range(3):
        writer.write(LINE)
    writer.close()
    if kind != "closed descriptor":
        os.close(ours)
    assert len(said) == 1
    assert said[0].startswith("standard error cannot be written: ")
    assert (writer.loss.lines, writer.loss.num_bytes) == (3, 48)


def test_a_descriptor_that_was_found_closed_is_not_tried_again(tmp_path, said):
    """Another file may have its number by then."""
    closed = os.open(tmp_path / "first", os.O_WRONLY | os.O_CREAT)
    os.close(closed)
    writer = ReportWriter("standard error", closed, said.append)
    writer.write(LINE)
    other = os.open(tmp_path / "second", os.O_WRONLY | os.O_CREAT)
    if other != closed:
        os.dup2(other, closed)
    writer.write(LINE)
    writer.close()
    for each in {other, closed}:
        os.close(each)
    assert [(tmp_path / name).read_bytes() for name in ("first", "second")] == [b"", b""]
    assert (len(said), writer.loss.lines) == (1, 2)


def test_what_a_reader_does_not_take_at_once_waits_and_flags_of_the_pipe_stay(pipe, said):
    theirs, ours = pipe
    writer = ReportWriter("standard output", ours, said.append)
    for _ in range(1000):
        writer.write(LINE)
    assert (writer.is_pending, writer.is_full, os.get_blocking(ours)) == (True, False, True)
    result = in_the_background(theirs)
    writer.close()
    os.close(ours)
    assert (result(), said, writer.describe_loss()) == (LINE * 1000, [], "")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_target_that_does_not_block_gets_everything(kind, said):
    if kind == "pipe":
        theirs, ours = os.pipe()
    else:
        theirs, ours = (end.detach() for end in socket.socketpair())
    os.set_blocking(ours, False)
    writer = ReportWriter("standard output", ours, said.append)
    data = LINE * 40_000
    writer.write(data)
    assert writer.is_pending
    result = in_the_background(theirs)
    writer.close()
    os.close(ours)
    assert (result() == data, said, writer.describe_loss()) == (True, [], "")


def test_a_slow_reader_is_waited_for_a_while_and_then_costs_lines(pipe, said, clock):
    theirs, ours = pipe
    writer = ReportWriter("standard output", ours, said.append, bytes_max=32_000, clock=clock)
    for _ in range(3000):
        writer.write(LINE)
    assert (writer.is_full, writer.loss.lines) == (True, 0), "the caller should wait, and nothing is lost"
    clock.now += 10.0
    assert not writer.is_full, "the caller has waited long enough"
    for _ in range(7):
        writer.write(LINE)
    writer.write(b"urgent\n", is_urgent=True)
    reason = f"its reader is too slow: {3000 * 16 - 4096:,} bytes wait"
    assert said == [f"standard output cannot be written: {reason}. The job goes on; at its end is said what was lost"]
    assert writer.describe_loss() == f"standard output: 7 lines (112 bytes) were lost: {reason}"
    result = in_the_background(theirs)
    writer.close()
    os.close(ours)
    assert result() == LINE * 3000 + b"urgent\n"


def test_memory_for_a_reader_that_never_reads_is_bounded(pipe, said, clock, waiting):
    _, ours = pipe
    writer = ReportWriter("standard output", ours, said.append, bytes_max=32_000, clock=clock)
    for _ in range(10_000):
        writer.write(LINE, is_urgent=True)
    assert 10_000 - writer.loss.lines == (4096 + 64_000) // 16
    waits = []

    def wait(seconds):
        waits.append(seconds)
        clock.now += 6.0

    waiting(wait)
    writer.close()
    assert len(waits) == 2, "it has waited for ten seconds"
    assert (writer.loss.lines, len(said)) == (10_000 - 4096 // 16, 1)


def test_a_terminal_that_is_held_is_waited_for(said, clock, waiting):
    theirs, ours = pty.openpty()
    writer = ReportWriter("standard output", ours, said.append, clock=clock)
    data = LINE * 10_000
    writer.write(data)
    assert writer.is_pending, "a write has not blocked"
    readers = []

    def wait(_seconds):
        clock.now += 3600.0
        if clock.now > 10 * 3600.0 and not readers:
            readers.append(threading.Thread(target=read))
            readers[0].start()

    found = bytearray()

    def read():
        while len(found) < len(data) + data.count(b"\n"):
            found.extend(os.read(theirs, 1 << 16))

    waiting(wait)
    writer.close()
    readers[0].join(20)
    os.close(ours)
    os.close(theirs)
    assert (bytes(found).replace(b"\r\n", b"\n") == data, said) == (True, [])


def test_a_writer_that_waits_does_so_once_for_a_reader_that_is_stuck(pipe, said, clock, waiting):
    """As that of a rank's log: lines must not wait for the next one, and none may hold the rank up."""
    theirs, ours = pipe
    writer = ReportWriter("the log", ours, said.append, wait_s=1.0, clock=clock)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        clock.now += 0.6

    waiting(wait)
    for _ in range(300):
        writer.write(LINE)
    assert len(waits) == 2, "one write has waited"
    assert read_all(theirs) == LINE * 256
    writer.write(LINE)
    writer.close()
    assert read_all(theirs) == LINE * 45


def test_streams_without_a_descriptor_are_written_at_once(said):
    """Those of a notebook, or of a test."""
    stream = io.StringIO()
    writer = ReportWriter("standard output", stream, said.append)
    writer.write("ä\n".encode())
    assert stream.getvalue() == "ä\n"
    stream.close()
    writer.write(LINE)
    writer.close()
    assert (len(said), writer.loss.lines) == (1, 1)


def test_the_descriptor_of_a_stream_that_was_closed_is_not_used(tmp_path, said):
    """Another file may have it."""
    file = (tmp_path / "first").open("w")
    writer = ReportWriter("the log", file, said.append)
    writer.write(LINE)
    descriptor = file.fileno()
    file.close()
    other = os.open(tmp_path / "second", os.O_WRONLY | os.O_CREAT)
    os.dup2(other, descriptor)
    writer.write(LINE)
    for each in {other, descriptor}:
        os.close(each)
    assert [(tmp_path / name).read_bytes() for name in ("first", "second")] == [LINE, b""]
    assert (len(said), writer.loss.lines) == (1, 1)


def test_a_stream_that_was_closed_from_the_beginning(said):
    writer = ReportWriter("standard output", None, said.append)
    writer.write(LINE)
    writer.close()
    assert len(said) == 1
    assert writer.describe_loss() == "standard output: 1 lines (16 bytes) were lost: it is closed"


def test_a_wrong_path_is_an_error_and_a_full_disk_is_not(tmp_path, monkeypatch, said):
    with pytest.raises(ConfigurationError, match=r"cannot write --events .*absent/events: No such file or directory"):
        open_report(tmp_path / "absent" / "events", "--events", said.append)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuse)
    writer = open_report(tmp_path / "events", "--events", said.append)
    writer.write(LINE)
    writer.close()
    name = f"--events {tmp_path / 'events'}"
    assert said == [f"{name} cannot be written: {FULL}. The job goes on; at its end is said what was lost"]
    assert writer.describe_loss() == f"{name}: 1 lines (16 bytes) were lost: {FULL}"


def test_a_named_pipe_without_a_reader_delays_nothing(tmp_path, said):
    os.mkfifo(tmp_path / "pipe")
    writer = open_report(tmp_path / "pipe", "--events", said.append)
    writer.write(LINE)
    assert (len(said), writer.loss.lines) == (1, 1)


def test_a_document_replaces_another_one_as_a_whole_or_not_at_all(tmp_path, small_disk):
    path = tmp_path / "document"
    for content in (b"one", b"two"):
        with replacing(path, mode=0o600) as file:
            file.write(content)
        assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folder = small_disk(64)
    (folder / "document").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"), replacing(folder / "document") as file:
        file.write(bytes(1 << 20))
    assert [(each.name, each.read_bytes()) for each in folder.iterdir()] == [("document", b"old")]


def test_a_summary_that_does_not_fit_on_the_disk_leaves_no_part_of_a_document(small_disk, said):
    path = small_disk(64) / "summary"
    _write_summary(path, {"command": ["x" * 100_000]}, said.append)
    assert path.read_bytes() == b""
    assert said == [f"--json {path} cannot be written: {FULL}. The job goes on; at its end is said what was lost"]


def record(text):
    return logging.LogRecord("totalreduce.transports", logging.WARNING, "file.py", 1, text, (), None)


def test_a_rank_writes_its_log_to_a_reader_that_reads_nothing_without_being_held_up(pipe, clock, waiting):
    theirs, ours = pipe
    waits = []
    with os.fdopen(os.dup(ours), "w") as stream:
        handler = ReportHandler(stream)
        handler._writer._clock = clock

        def wait(seconds):
            waits.append(seconds)
            clock.now += 1.0

        waiting(wait)
        for _ in range(100):
            handler.handle(record("x" * 99))
        assert len(waits) == 1
        found = read_all(theirs)
        handler.flush()
        found += read_all(theirs)
        handler.flush()
        handler.close()
    assert found + read_all(theirs) == (b"x" * 99 + b"\n") * 100


def test_a_log_on_a_full_disk_and_one_that_cannot_be_formatted(capsys):
    with open("/dev/full", "w") as stream:
        handler = ReportHandler(stream)
        handler.handle(record("text"))
        assert handler._writer.loss.lines == 1
        broken = record("%d")
        broken.args = ("no number",)
        handler.handle(broken)  # logging itself says that
        handler.close()
    assert "Logging error" in capsys.readouterr().err


def test_a_forked_child_does_not_write_what_waits_in_its_parent(pipe):
    theirs, ours = pipe
    with os.fdopen(os.dup(ours), "w") as stream:
        handler = ReportHandler(stream)
        handler._writer._wait_s = 0.0
        for _ in range(50):
            handler.handle(record("x" * 99))
        pid = os.fork()
        if not pid:
            handler.handle(record("c" * 299))
            os._exit(handler._writer._num_queued == 300)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        result = in_the_background(theirs)
        handler.close()
    os.close(ours)
    assert result() == (b"x" * 99 + b"\n") * 50
