"""The progress line: a bar in a terminal, a line now and then elsewhere."""

import contextlib
import io

import pytest
from rich.console import Console
from rich.text import Text

from totalreduce.observe.progress import TrainingProgress, TrainingReport


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def report(step, **more):
    return TrainingReport(step=step, loss=2.34567, tokens_per_s=12345.6, **more)


def test_a_report_names_what_it_knows():
    assert report(1).describe() == "loss 2.346 · 12,346 tokens/s"
    full = report(1, sent_bytes=5_000_000, hidden_share=0.876)
    assert full.describe() == "loss 2.346 · 12,346 tokens/s · 5.0 MB sent per rank · 88% hidden"


def test_without_a_terminal_it_is_a_line_now_and_then_and_the_last_one():
    out, clock = io.StringIO(), FakeClock()
    console = Console(file=out, force_terminal=False, width=40)
    with TrainingProgress("[demo]", 100, console, interval_s=5.0, clock=clock) as progress:
        for step in range(1, 101):
            clock.now = step * 0.11
            progress.update(report(step))
    steps = [line.partition(" · ")[0] for line in out.getvalue().splitlines()]
    assert steps == [
        "[demo]: step 1/100",
        "[demo]: step 47/100",
        "[demo]: step 93/100",
        "[demo]: step 100/100",
    ]


def test_in_a_terminal_of_80_columns_everything_is_seen():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with TrainingProgress("4 workers", 100, console) as progress:
        progress.update(report(100, sent_bytes=5_000_000, hidden_share=0.5))
    shown = Text.from_ansi(out.getvalue()).plain
    assert "step 100/100" in shown
    assert "loss 2.346 · 12,346 tokens/s · 5.0 MB sent per rank · 50% hidden" in shown
    assert "━━━━━━━━━━" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_that_cannot_be_written_costs_the_line_and_not_the_training(is_terminal, caplog):
    full = open("/dev/full", "w")  # noqa: SIM115  (closing it raises an error)
    console = Console(file=full, force_terminal=is_terminal, width=80)
    with TrainingProgress("demo", 3, console, interval_s=0.0) as progress:
        for step in range(1, 4):
            progress.update(report(step))
    with contextlib.suppress(OSError):
        full.close()
    assert caplog.messages.count("the progress of demo is not shown any more: No space left on device (ENOSPC)") == 1
