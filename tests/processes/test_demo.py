"""``totalreduce demo`` from end to end, on a small scale, and everything that can go wrong with it."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from totalreduce.cli.demo_compare import TOLERANCE, compare
from totalreduce.cli.demo_setup import DemoSettings, built_in_text, read_text
from totalreduce.foundation.errors import ConfigurationError

COMMAND = ["-c", "from totalreduce.cli.main import main; main()", "demo"]


def demo(*arguments, cwd, timeout_s=100, python=sys.executable):
    return subprocess.run(
        [str(python), *COMMAND, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, zygote):
    """One small demo on a text with a zoo of characters; the folder, what it printed, the figures.

    Processes that run tests in parallel share it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            sentence = "Straße, naïve \x1b[31mred\x1b[0m \N{SNOWMAN} and the quick brown fox. "
            (folder / "text.txt").write_text(sentence * 100, "utf-8")
            options = [
                "--text",
                "text.txt",
                "--ranks",
                2,
                "--steps",
                12,
                "--json",
                "figures.json",
                "--timeline",
                "lines",
            ]
            process = demo(*options, cwd=folder, python=zygote.python)  # test_ctrl_c_stops_everything starts cold
            folder.with_suffix(".errors").write_text(process.stderr)
            folder.with_suffix(".printed").write_text(process.stdout)
    assert (folder / "figures.json").exists(), folder.with_suffix(".errors").read_text()
    return folder, folder.with_suffix(".printed").read_text(), json.loads((folder / "figures.json").read_text())


def test_the_workers_learn_and_agree_with_one_process(finished):
    _, _, figures = finished
    ours, alone = figures["distributed"], figures["single"]
    assert figures["passed"] is True
    assert len(ours) == 2
    for rank in ours:
        assert rank["losses"] == ours[0]["losses"]
        assert rank["digest"] == ours[0]["digest"]
    assert len(alone["losses"]) == 12
    assert ours[0]["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert ours[0]["held_out_loss"] == pytest.approx(alone["held_out_loss"], abs=TOLERANCE)
    assert alone["losses"][-1] < alone["losses"][0] - 0.3


def test_bytes_are_those_of_a_ring(finished):
    # Two ranks: each sends its half, then the sum of the other half: the size of all gradients once.
    _, _, figures = finished
    gradients = 4 * figures["comparison"]["parameters"]
    assert gradients <= figures["comparison"]["bytes_sent_per_step"] <= 1.15 * gradients  # weights once, in 12 steps


def test_what_it_prints(finished):
    folder, printed, figures = finished
    assert f"{figures['comparison']['held_out_single']:.6f}" in printed
    for phrase in (
        "2 workers: step 12/12 · loss ",
        "1 process: step 12/12 · loss ",
        "time per step",
        "hidden",
    ):
        assert phrase in printed
    assert "lines/timeline.json" in printed
    assert "ui.perfetto.dev" in printed
    assert "\x1b" not in printed  # the text's own control characters do not reach the terminal
    assert sorted(file.name for file in folder.iterdir()) == ["figures.json", "lines", "text.txt"]


def test_the_timeline_shows_every_rank_and_every_step(finished):
    folder, _, _ = finished
    trace = json.loads((folder / "lines" / "timeline.json").read_text())
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for rank in (0, 1):
        names = [event["name"] for event in events if event["pid"] == rank and event["ph"] == "X"]
        assert {f"loss #{step}" for step in range(12)} <= set(names)
        buckets = {name.rpartition(" #")[0] for name in names if name.startswith("model.bucket")}
        assert len(buckets) >= 3
        assert {f"{bucket} #{step}" for bucket in buckets for step in range(12)} <= set(names)
        assert {"REDUCE", "WAIT", "QUEUED", "WIRE"} <= set(names)
    done = [event["args"]["outcome"] for event in events if "outcome" in event.get("args", {})]
    assert set(done) == {"done"}


def settings(num_steps=3):
    return DemoSettings(folder="", num_ranks=2, distributed=True, num_steps=num_steps, seed=0)


def results(losses=(3.0, 2.0, 1.0), held_out=1.5, digest="a"):
    counters = {"bytes_sent": 300, "hidden_share": 0.5}
    return {
        "losses": list(losses),
        "held_out_loss": held_out,
        "digest": digest,
        "statistics": counters,
        "step_s": 0.1,
        "parameters": 7,
    }


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"losses": (3.0, 2.0 + 0.9e-4, 1.0)}, None),
        ({"losses": (3.0, 2.0 + 1.1e-4, 1.0)}, r"differ by 0\.00011, more than the tolerance of 0\.0001"),
        ({"held_out": 1.6}, r"differ by 0\.1,"),
        ({"held_out": math.nan}, "differ by nan"),
        ({"losses": (3.0, math.nan, 1.0)}, "differ by nan"),
        ({"digest": "b"}, "the workers ended with different parameters"),
    ],
)
def test_a_difference_is_found_wherever_it_is(changed, problem):
    comparison = compare([results(**{**changed, "digest": "a"}), results(**changed)], results(), settings())
    found = comparison.problem()
    assert found is None if problem is None else re.search(problem, found)


def test_figures_are_put_side_by_side():
    comparison = compare([results(), results()], results(), settings())
    assert comparison.bytes_sent_per_step == 100
    assert comparison.tokens_per_step == 2 * 4 * 64
    assert comparison.last_loss_single == 2.0
    assert comparison.first_loss == 3.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*text: No such file"),
        (b"short", "has 5 characters; at least 2,000 are needed"),
        (b"\x7fELF\xff\xfe" * 1000, "not UTF-8 text (byte 4)"),
        (b"abc\0" * 1000, "binary file (a zero at character 3)"),
        (b"a" * 3000, "only one character"),
    ],
)
def test_an_unusable_text_is_a_plain_sentence(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    pattern = message if content is None else re.escape(message)
    with pytest.raises(ConfigurationError, match=pattern):
        read_text(tmp_path / "text")


def test_a_bad_option_is_one_line_and_no_training(tmp_path):
    process = demo("--text", tmp_path, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr == f"totalreduce: --text: cannot read {tmp_path}: Is a directory\n"
    process = demo("--json", "absent/figures.json", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert "--json: cannot write absent/figures.json; its folder must exist" in process.stderr


def test_many_different_characters_become_256(tmp_path):
    letters = "".join(chr(0x4E00 + number) for number in range(600))
    (tmp_path / "text").write_text(letters * 4 + "the", "utf-8")
    text = read_text(tmp_path / "text")
    assert len(text) == 2403
    assert len(set(text)) == 256
    assert text.count("\N{REPLACEMENT CHARACTER}") == 2403 - sum(text.count(c) for c in set(text) - {"\ufffd"})


def test_the_built_in_text_is_prose():
    text = built_in_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 3_000


@pytest.mark.alone
def test_ctrl_c_stops_everything(tmp_path):
    """The launcher says so, exits with 130, and leaves neither workers nor temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "--ranks", "2", "--steps", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        # Where the tests run in the background, Ctrl-C may be ignored, and what is ignored is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(90, process.send_signal, [signal.SIGABRT])  # says where it hangs
    watchdog.start()
    try:
        for line in process.stdout:
            if "2 workers: step" in line:
                break
        else:
            pytest.fail(f"the demo ended by itself:\n{process.communicate()[1]}")
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) >= 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors == "totalreduce demo: stopped by SIGINT\n"
    assert not list(temporary.glob("totalreduce*"))  # torch leaves an empty folder of its own
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
