"""``totalreduce run`` whose outputs fail: the job ends as without that, and says once what fails and what was lost."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from totalreduce.launch.local import run_workers
from totalreduce.observe import reporting

FULL = "No space left on device (ENOSPC)"
#: Both ranks write lines, and then a file, so that it is seen that they have come to the end; rank 1 exits with a code.
SCRIPT = """
import os, sys
rank, lines, code = int(os.environ["RANK"]), int(sys.argv[2]), int(sys.argv[3])
for number in range(lines):
    print("out", number)
    print("err", number, file=sys.stderr)
open(f"{sys.argv[1]}/done{rank}", "w").write("7")
sys.exit(code if rank else 0)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The command of two workers that write so many lines to each stream; and what to check after it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the launcher says that it sets it
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)

    class Job:
        def command(self, *options, lines=50, code=0):
            launcher = [sys.executable, "-m", "totalreduce", "run", "-n", "2", *map(str, options)]
            return [*launcher, str(path), str(tmp_path), str(lines), str(code)]

        def workers(self, *, lines):
            return [sys.executable, str(path), str(tmp_path), str(lines), "0"]

        def has_ended(self):
            return [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["7", "7"]

    return Job()


def run(command, **streams):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, **{**pipes, **streams}, timeout=60, check=False)


def sentences(data):
    """The launcher's own lines."""
    lines = data.decode().splitlines()
    return [line.removeprefix("totalreduce: ") for line in lines if line.startswith("totalreduce: ")]


def warning(name, reason=FULL):
    return f"{name} cannot be written: {reason}. The job goes on; at its end is said what was lost"


@pytest.mark.parametrize(
    ("mode", "code"),
    [("all", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("all", 0), ("rank0", 0), ("rank0", 3)))],
)
def test_standard_output_on_a_full_disk(job, mode, code):
    with open("/dev/full", "wb") as full:
        done = run(job.command("--output", mode, code=code), stdout=full)
    assert (done.returncode, job.has_ended()) == (code, True)
    said = sentences(done.stderr)
    assert said[0] == warning("standard output")
    lines = 100 if mode == "all" else 50
    assert re.fullmatch(rf"standard output: {lines} lines \([\d,]+ bytes\) were lost: .*ENOSPC\)", said[-1])
    assert len([line for line in said if "standard output" in line]) == 2
    assert any("rank 1 failed first: exit code 3" in line for line in said) == bool(code)


def test_standard_error_on_a_full_disk_has_its_sentences_on_standard_output(job):
    with open("/dev/full", "wb") as full:
        done = run(job.command(code=3), stderr=full)
    assert (done.returncode, job.has_ended()) == (3, True)
    said = sentences(done.stdout)
    assert said[0] == warning("standard error")
    assert said[-1].startswith("standard error: 101 lines ("), "all errors, and a sentence"
    assert any("rank 1 failed first: exit code 3" in line for line in said)
    assert sum(line.startswith(b"[") for line in done.stdout.splitlines()) == 100


def test_both_streams_on_one_disk_that_becomes_full(job, small_disk):
    folder = small_disk(64)
    summary = folder.parent / "summary"
    with (folder / "log").open("wb") as log:
        done = run(job.command("--json", summary, lines=5000), stdout=log, stderr=subprocess.STDOUT)
    assert (done.returncode, job.has_ended()) == (0, True)
    [lost] = json.loads(summary.read_text())["lost"]
    kept = (folder / "log").read_bytes()
    match = re.fullmatch(r"the output: ([\d,]+) lines \([\d,]+ bytes\) were lost: .*ENOSPC\)", lost)
    # And the warning. Where the disk became full, a line may have been cut in two.
    assert kept.count(b"\n") + int(match[1].replace(",", "")) in (20_001, 20_002)


def test_a_reader_that_goes(job):
    launcher = subprocess.Popen(job.command(lines=20_000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout.read(1) == b"["
    launcher.stdout.close()
    launcher.stdout = None
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, job.has_ended()) == (0, True)
    said = sentences(errors)
    assert said[0] == warning("standard output", "Broken pipe (EPIPE)")
    assert re.fullmatch(r"standard output: [\d,]+ lines \([\d,]+ bytes\) were lost: Broken pipe \(EPIPE\)", said[-1])
    assert len(said) == 2


def test_streams_that_are_closed_from_the_beginning(job, tmp_path):
    summary = tmp_path / "summary"
    command = 'exec "$@" <&- >&- 2>&-'
    done = run(["sh", "-c", command, "sh", *job.command("--json", summary, code=3)])
    assert (done.returncode, job.has_ended()) == (3, True)
    document = json.loads(summary.read_text())
    assert [loss.partition(":")[0] for loss in document["lost"]] == ["standard output", "standard error"]
    done = run(["sh", "-c", 'exec "$@" >&-', "sh", *job.command()])
    assert (done.returncode, sentences(done.stderr)[0]) == (0, warning("standard output", "it is closed"))


def test_no_other_file_gets_the_descriptors_of_streams_that_are_closed(tmp_path):
    """What a library writes to descriptor 2 of the launcher must not get into one of its files."""
    path = tmp_path / "worker.py"
    path.write_text(
        """
import os, sys
links = ["/proc/self/fd/0", *(f"/proc/{os.getppid()}/fd/{number}" for number in range(3))]
open(sys.argv[1], "w").write(" ".join(os.readlink(link) if os.path.lexists(link) else "closed" for link in links))
"""
    )
    launcher = [sys.executable, "-m", "totalreduce", "run", str(path), str(tmp_path / "found")]
    done = run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *launcher])
    assert (done.returncode, (tmp_path / "found").read_text().split()) == (0, ["/dev/null"] * 4)


def test_a_pipe_that_does_not_block_gets_every_line_also_with_a_slow_reader(job, tmp_path):
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    with (tmp_path / "errors").open("wb") as errors:
        launcher = subprocess.Popen(job.command(lines=20_000), stdout=ours, stderr=errors)
    os.close(ours)
    found = bytearray()
    while data := os.read(theirs, 1 << 12):
        found += data
        if len(found) < 1 << 16:
            time.sleep(0.02)
    os.close(theirs)
    assert (launcher.wait(60), sentences((tmp_path / "errors").read_bytes()), job.has_ended()) == (0, [], True)
    lines = found.decode().splitlines()
    assert {rank: [line for line in lines if line.startswith(f"[{rank}]")] for rank in range(2)} == {
        rank: [f"[{rank}] out {number}" for number in range(20_000)] for rank in range(2)
    }


@contextlib.contextmanager
def narrow_output(bytes_max=100_000):
    """A pipe of 4 KiB as this process's standard output, of whose bytes so many may wait; yields its other end."""
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    options = {**reporting.ReportWriter.__init__.__kwdefaults__, "bytes_max": bytes_max}
    with pytest.MonkeyPatch.context() as patch, os.fdopen(ours, "w") as file:
        patch.setattr(sys, "stdout", file)
        patch.setattr(reporting.ReportWriter.__init__, "__kwdefaults__", options)
        yield theirs
    with contextlib.suppress(OSError):
        os.close(theirs)


def test_a_reader_that_reads_nothing_costs_lines_and_not_the_job(job, monkeypatch):
    """The workers are held back at first, because the reader may be slow; after a while they go on without it."""
    monkeypatch.setattr(reporting, "_PATIENCE_S", 0.5)
    with narrow_output():
        result = run_workers(job.workers(lines=20_000), num_workers=2, timeout_s=60.0)
    assert (result.exit_code, job.has_ended()) == (0, True)
    [lost] = result.lost
    assert re.fullmatch(r"standard output: [\d,]+ lines \([\d,]+ bytes\) were lost: its reader is too slow: .*", lost)


@pytest.mark.alone  # the reader is a thread of the launcher, and what it is given at the end has a limit in time
def test_a_slow_reader_holds_the_workers_back_and_gets_every_line(job):
    """What workers have left in their pipes is taken at their end, in addition: as much again as may wait has room."""
    found = bytearray()

    def read(descriptor):
        time.sleep(2.0)  # so long that the workers would have written everything
        while data := os.read(descriptor, 1 << 12):
            found.extend(data)

    with narrow_output(500_000) as theirs:
        reader = threading.Thread(target=read, args=(theirs,))
        reader.start()
        result = run_workers(job.workers(lines=60_000), num_workers=2, timeout_s=60.0)
        sys.stdout.close()
        reader.join(20)
    assert (result.exit_code, result.lost, found.count(b"\n")) == (0, (), 120_000)


def test_rank_0_alone_inherits_a_terminal_and_only_that(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text("import sys; print([file.isatty() for file in (sys.stdout, sys.stderr)])")
    theirs, ours = pty.openpty()
    as_without_nohup = ["env", "--default-signal=HUP"]
    command = [*as_without_nohup, sys.executable, "-m", "totalreduce", "run", "-n", "2", "--output", "rank0", str(path)]
    done = run(command, stdout=ours)
    os.close(ours)
    assert (done.returncode, os.read(theirs, 1000)) == (0, b"[True, False]\r\n")
    os.close(theirs)


@pytest.mark.parametrize("mode", ["all", "rank0"])
def test_a_terminal_that_goes_while_its_hang_up_is_ignored(tmp_path, mode):
    """As under ``nohup``, whose job goes on without the terminal."""
    path = tmp_path / "worker.py"
    path.write_text(
        """
import os, sys, time
print("begin", file=sys.stderr)
while not os.path.exists(sys.argv[1]): time.sleep(0.02)
print("out")
print("err", file=sys.stderr)
open(sys.argv[1] + "-too", "w").close()
"""
    )
    theirs, ours = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "totalreduce", "run", "--output", mode, path, tmp_path / "go"],
        stdout=ours,
        stderr=ours,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(ours)
    shown = b""
    while b"begin" not in shown:
        shown += os.read(theirs, 1000)
    os.close(theirs)
    (tmp_path / "go").touch()
    assert launcher.wait(30) == 0
    assert (tmp_path / "go-too").exists()


def test_events_and_the_summary_on_a_full_disk(job):
    options = ["--on-loss", "replace", "--restarts", "0", "--events", "/dev/full", "--json", "/dev/full"]
    done = run(job.command(*options, lines=1, code=3))
    assert (done.returncode, job.has_ended()) == (3, True)
    said = [line for line in sentences(done.stderr) if "/dev/full" in line]
    assert said[0] == warning("--events /dev/full")
    assert re.fullmatch(rf"--events /dev/full: \d+ lines \([\d,]+ bytes\) were lost: {re.escape(FULL)}", said[2])
    assert said[1] == warning("--json /dev/full")
    assert len(said) == 3


def test_files_of_the_output_on_a_full_disk(job, small_disk):
    folder = small_disk(64)
    done = run(job.command("--output", folder / "logs", lines=5000, code=3))
    assert (done.returncode, job.has_ended(), done.stdout) == (3, True, b"")
    said = sentences(done.stderr)
    assert len([line for line in said if "cannot be written" in line]) == 1
    assert re.fullmatch(rf"the output {folder}/logs/rank\d.log cannot be written: .*", said[0])
    lost = [line for line in said if "were lost" in line]
    kept = [(folder / "logs" / f"rank{rank}.log").read_bytes() for rank in range(2)]
    total = sum(int(re.search(r"([\d,]+) lines", line)[1].replace(",", "")) for line in lost)
    # Where the disk became full, a line may have been cut in two.
    assert sum(data.count(b"\n") for data in kept) + total in (20_000, 20_001, 20_002)
    assert any(line.startswith("  err ") for line in said), (
        "the last lines of the rank that failed are known nevertheless"
    )


@pytest.mark.parametrize(
    "options",
    [["--json", "{}/absent/summary"], ["--on-loss", "replace", "--events", "{}/absent/events"], ["--json", "{}"]],
)
def test_paths_that_are_wrong_are_mistakes_before_the_job_begins(job, tmp_path, options):
    done = run(job.command(*(option.format(tmp_path) for option in options)))
    assert (done.returncode, done.stderr.count(b"cannot write --")) == (2, 1)
    assert not (tmp_path / "done0").exists()
