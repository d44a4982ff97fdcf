"""How workers' output is cut into lines and put on one terminal, and when workers are stopped."""

import signal

import pytest

from totalreduce.launch.ending import Escalation
from totalreduce.launch.lines import LineStream, Printer, Tail


def shown(stream, *events):
    """Feed (time, bytes), or look for what is overdue at (time, None); the pieces as (text, ends)."""
    pieces = []
    for now, data in events:
        pieces += stream.overdue(now) if data is None else stream.feed(data, now)
    return [(piece.text.decode(), piece.ends) for piece in pieces]


class Screen:
    """One terminal with the output of several streams."""

    def __init__(self):
        self.written = b""
        self.printer = Printer(self._write)
        self.streams = {}

    def _write(self, data):
        self.written += data

    def feed(self, key, data, now, *, in_place=False):
        stream = self.streams.setdefault(key, LineStream(in_place=in_place))
        for piece in stream.overdue(now) if data is None else stream.feed(data, now):
            self.printer.show(piece, f"[{key}] ".encode(), key)


def test_lines_are_whole_whatever_the_pieces():
    stream = LineStream(in_place=False)
    events = [(0.0, b"one\ntw"), (0.0, b"o\r"), (0.0, b"\n"), (0.0, b"\nthree")]
    assert shown(stream, *events) == [("one", True), ("two", True), ("", True)]
    assert [piece.text for piece in stream.close(0.0)] == [b"three"]


def test_an_unfinished_line_is_shown_after_a_moment_and_continued():
    stream = LineStream(in_place=False)
    assert shown(stream, (0.0, b"loading "), (0.1, None)) == []
    assert shown(stream, (0.21, None), (0.5, b"done\n")) == [("loading ", False), ("done", True)]


def test_an_endless_line_is_not_kept():
    stream = LineStream(in_place=False)
    assert shown(stream, (0.0, b"x" * 70_000)) == [("x" * 70_000, False)]


def test_a_progress_bar_in_a_file_leaves_its_last_state_and_one_line_in_ten_seconds():
    stream = LineStream(in_place=False)
    bar = [(i * 0.5, b"\r%d%%" % i) for i in range(1, 30)]
    texts = shown(stream, *bar, (15.0, None), (15.0, b"\rdone\n"))
    assert texts == [("1%", True), ("21%", True), ("done", True)]


def test_a_progress_bar_stays_in_place_on_a_terminal():
    screen = Screen()
    for percent in (1, 2):
        screen.feed(0, b"%d%%\r" % percent, 0.0, in_place=True)
    screen.feed(0, b"3%\n", 0.0)
    assert screen.written == b"[0] 1%\r[0] 2%\x1b[K\r[0] 3%\x1b[K\n"


def test_another_rank_erases_the_bar_for_its_line_and_the_bar_comes_back():
    screen = Screen()
    screen.feed(0, b"\r1%", 0.0, in_place=True)
    screen.feed(0, None, 0.3)
    screen.feed(1, b"hello\n", 0.4)
    screen.feed(0, b"\r2%\n", 0.5)
    assert screen.written == b"[0] 1%\r\x1b[K[1] hello\n[0] 2%\n"


def test_two_streams_never_share_a_line():
    screen = Screen()
    screen.feed(0, b"wait", 0.0)
    screen.feed(0, None, 0.3)
    screen.feed(1, b"other\n", 0.4)
    screen.feed(0, b"\n", 0.5)
    screen.feed(0, b"next\n", 0.5)
    assert screen.written == b"[0] wait\n[1] other\n[0] next\n"


def test_an_open_line_is_ended_at_the_end():
    screen = Screen()
    screen.feed(0, b"wait", 0.0)
    screen.feed(0, None, 0.3)
    screen.printer.finish()
    screen.printer.finish()
    assert screen.written == b"[0] wait\n"


def test_tail_is_bounded_and_counts_what_it_drops():
    tail = Tail(10)
    for _ in range(100):
        tail.feed(b"abcdefg\n")
    assert tail.text() == "g\nabcdefg\n"
    assert tail.dropped_bytes == 790
    assert tail.lines() == ("g", "abcdefg")


def test_survivors_of_a_failure_get_time_then_sigterm_then_sigkill():
    escalation = Escalation(linger_s=3.0, grace_s=5.0)
    assert not escalation.stopping
    escalation.failed(10.0)
    escalation.failed(12.0)
    assert escalation.stopping
    assert [escalation.due(now) for now in (12.9, 13.0, 13.1, 17.9, 18.0, 30.0)] == [
        *(None, signal.SIGTERM, None, None, signal.SIGKILL, None)
    ]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (signal.SIGINT, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]),
        (signal.SIGTERM, [signal.SIGTERM, None, signal.SIGKILL]),
    ],
)
def test_an_interruption_is_passed_on_and_made_harder(by, expected):
    escalation = Escalation(linger_s=3.0, grace_s=4.0)
    escalation.interrupted(by, 0.0)
    assert [escalation.due(now) for now in (0.0, 2.0, 4.0)] == expected


def test_a_second_interruption_kills_at_once():
    escalation = Escalation(linger_s=3.0, grace_s=4.0)
    escalation.interrupted(signal.SIGINT, 0.0)
    escalation.interrupted(signal.SIGINT, 0.1)
    assert escalation.due(0.1) is signal.SIGKILL


def test_an_overtaken_signal_is_not_sent():
    escalation = Escalation(linger_s=0.0, grace_s=0.0)
    escalation.failed(1.0)
    assert escalation.due(5.0) is signal.SIGKILL
    assert escalation.due(6.0) is None
    assert escalation.stopping
