"""One rank gets a signal that the job must end soon: all ranks write one version, and a new start goes on from it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from resumable_runs import RESUMABLE, last_version, processes, reports, samples, undisturbed, wait_for

from totalreduce.launch.local import run_workers
from totalreduce.launch.restarts import RecoveryOptions

WITH_LOADER = Path(__file__).parent / "programs" / "loader_signals.py"
SIZE = ["--samples", "480", "--epochs", "2"]


def run(python, folder, *arguments, told=None, recovery=None):
    """Run the example on three ranks; when it has taken 15 steps, send one process a signal."""
    command = [str(python), str(RESUMABLE), str(folder), *SIZE, *arguments]

    def tell():
        wait_for(lambda: last_version(folder) > 15, what="version 15")
        os.kill(processes(folder)[told], signal.SIGUSR1)

    teller = threading.Thread(target=tell)
    if told is not None:
        teller.start()
    result = run_workers(command, num_workers=3, output="capture", timeout_s=100.0, recovery=recovery)
    if told is not None:
        teller.join()
    return result, "\n".join(result.output)


@pytest.mark.parametrize(
    ("loop", "on_loss"),
    [
        pytest.param([], None, id="optimizer"),
        pytest.param(["--ddp"], None, id="ddp", marks=pytest.mark.slow),
        pytest.param([], "replace", id="optimizer-replace", marks=pytest.mark.slow),
        pytest.param([], "shrink", id="optimizer-shrink", marks=pytest.mark.slow),
        pytest.param(["--ddp"], "shrink", id="ddp-shrink", marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_told_and_all_write_one_version(zygote, tmp_path, loop, on_loss):
    recovery = None if on_loss is None else RecoveryOptions(on_loss=on_loss)
    expected = undisturbed(zygote.python, tmp_path / "plain", 3, *loop, *SIZE)
    folder = tmp_path / "folder"
    arguments = [*loop, "--step-ms", "60", "--every", "1000"]
    result, output = run(zygote.python, folder, *arguments, told=2, recovery=recovery)
    assert result.exit_code == os.EX_TEMPFAIL, result.errors
    assert [worker.exit_code for worker in result.workers] == [os.EX_TEMPFAIL] * 3
    stops = reports(output, "stops at")
    assert [end[:2] for end in stops] == [(0, 3), (1, 3), (2, 3)]
    (version,) = {end[2] for end in stops}
    assert version >= 16
    (written,) = (folder / "versions").iterdir()
    assert int(written.name.removeprefix("version-")) == version
    again, output = run(zygote.python, folder, *loop, recovery=recovery)
    assert again.exit_code == 0, again.errors
    assert [end[2:] for end in reports(output)] == [expected] * 3
    assert samples(folder) == {0: list(range(480)), 1: list(range(480))}


@pytest.mark.slow  # each takes ten seconds of processor time: the workers of the DataLoader import torch, too
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(signal.SIGUSR1, "launcher", id="SIGUSR1"),
        pytest.param(signal.SIGTERM, "launcher", id="SIGTERM"),
        pytest.param(signal.SIGUSR1, "all", id="SIGUSR1-to-all-processes"),  # as some batch systems do
    ],
)
def test_the_workers_of_a_loader_live_until_the_version_is_written(tmp_path, start, number, to):
    command = [sys.executable, "-m", "totalreduce", "run", "--grace", "60", WITH_LOADER, tmp_path / "versions", start]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout.readline() == "[0] running\n"
        if to == "launcher":
            launcher.send_signal(number)
        else:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
            os.killpg(next(pid for pid, line in lines.items() if b"loader_signals" in line), number)
        output, _ = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
        launcher.wait()
    preempted, version = output.splitlines()[-1].removeprefix("[0] preempted ").split()
    assert preempted == "True"
    assert launcher.returncode == (128 + signal.SIGTERM if number == signal.SIGTERM else 0)
    assert [int(path.name.removeprefix("version-")) for path in (tmp_path / "versions").iterdir()] == [int(version)]
