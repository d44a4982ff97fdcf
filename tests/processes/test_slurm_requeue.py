"""``slurm_requeue.sbatch`` and ``slurm_shell.sh`` of the examples on a Slurm of the tests' own: signals, lost nodes."""

import os
import re
import signal
import subprocess
import sys

import pytest
from resumable_runs import (
    EXAMPLES,
    RESUMABLE,
    last_version,
    processes,
    reports,
    samples,
    undisturbed,
    wait_for,
    world_sizes,
)
from slurm_site import NODES, REQUEUE_S, find

SIZE = ["--samples", "480", "--epochs", "2"]
SHELL = EXAMPLES / "slurm_shell.sh"
EPOCHS = {0: list(range(480)), 1: list(range(480))}


def preempt(slurm, job, _folder):
    """Send the job's tasks the signal that --signal sends before the end of the time."""
    slurm.command("scancel", "--signal=USR1", f"{job}.0")


def requeue(slurm, job, _folder):
    slurm.command("scontrol", "requeue", job)


def crash(_slurm, _job, folder):
    os.kill(processes(folder)[-1], signal.SIGKILL)


def lose_node(slurm, _job=None, _folder=None):
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")


def exported(python):
    """Return the option that gives a job these variables, and none of the tests' launcher."""
    names = {"PYTHON": python, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PATH": os.environ["PATH"]}
    return ["--export", ",".join(f"{name}={value}" for name, value in names.items())]


@pytest.mark.parametrize(
    ("disturb", "loop"),
    [
        pytest.param(preempt, [], id="signal", marks=pytest.mark.slow),
        pytest.param(preempt, ["--ddp"], id="signal-ddp", marks=pytest.mark.slow),
        pytest.param(requeue, [], id="requeue", marks=pytest.mark.slow),
        pytest.param(crash, [], id="crash", marks=pytest.mark.slow),
        pytest.param(lose_node, [], id="node", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_slurm_starts_again_changes_no_bit(slurm, zygote, tmp_path, disturb, loop):
    expected = undisturbed(zygote.python, tmp_path / "plain", 2, *loop, *SIZE)
    folder, log = tmp_path / "folder", tmp_path / "job.log"
    shape = ["-N", 2, "--ntasks-per-node", 1, "--output", log, *exported(zygote.python)]
    program = [RESUMABLE, folder, *loop, *SIZE, "--step-ms", 20]
    job = slurm.command("sbatch", "--parsable", *shape, EXAMPLES / "slurm_requeue.sbatch", *program)
    wait_for(lambda: last_version(folder) > 25 and (folder / "versions").exists(), what="version 25")
    disturb(slurm, job, folder)
    assert slurm.wait(job, timeout_s=180.0 + REQUEUE_S) == "COMPLETED", log.read_text()
    text = log.read_text()
    ends = reports(text)
    assert [end[:2] for end in ends] == [(0, 2), (1, 2)], text
    assert [end[2:] for end in ends] == [expected] * 2
    assert samples(folder) == EPOCHS
    begun = [int(version) for version in re.findall(r"the job begins with version (\d+)", text)]
    assert len(begun) == 1, text
    if disturb is preempt:
        stops = reports(text, "stops at")
        assert [end[2] for end in stops] == begun * 2, text


@pytest.mark.parametrize(
    ("code", "starts", "asks"),
    [(0, 0, False), (75, 9, True), (1, 0, True), (1, 3, False)],
    ids=["success", "signal", "first loss", "last loss"],
)
def test_the_script_asks_slurm_for_another_start(tmp_path, code, starts, asks):
    """The script with commands in the place of Slurm's; the jobs above, with a Slurm, are in ``make soak``."""
    asked = tmp_path / "asked"
    commands = {
        "srun": f'echo "$@" > {tmp_path / "ran"}; exit {code}',
        "scontrol": f'echo "$@" > {asked}; kill $PPID',  # as Slurm ends the script of a job that it starts again
    }
    for name, text in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(starts)}
    variables |= {"PYTHON": "python3", "RETRIES": "3"}
    command = ["bash", str(EXAMPLES / "slurm_requeue.sbatch"), "train.py", "folder"]
    done = subprocess.run(command, env={**os.environ, **variables}, timeout=60, check=False)
    assert done.returncode == (-signal.SIGTERM if asks else code)
    assert asked.exists() == asks
    if asks:
        assert asked.read_text() == "requeue 7\n"
    assert (tmp_path / "ran").read_text().endswith(" --wait=60 --export=ALL python3 -u train.py folder\n")


@pytest.mark.slow
def test_the_launcher_replaces_ranks_in_a_job_of_one_node(slurm, zygote, tmp_path):
    expected = undisturbed(zygote.python, tmp_path / "plain", 2, *SIZE)
    folder, log = tmp_path / "folder", tmp_path / "job.log"
    launch = f"{sys.executable} -m totalreduce run -n 2 --on-loss replace --no-python {zygote.python}"
    program = " ".join(map(str, [RESUMABLE, folder, *SIZE, "--step-ms", 20]))
    shape = ["-N", 1, "-n", 1, "-c", 4, "--output", log, *exported(zygote.python)]
    job = slurm.command("sbatch", "--parsable", *shape, "--wrap", f"srun {launch} {program}")
    wait_for(lambda: last_version(folder) > 15, what="version 15")
    os.kill(processes(folder)[0], signal.SIGKILL)
    assert slurm.wait(job, timeout_s=180.0) == "COMPLETED", log.read_text()
    assert [end[2:] for end in reports(log.read_text())] == [expected] * 2
    assert len(processes(folder)) == 3


def allocate(slurm, *command):
    """Start a command with an allocation of both nodes."""
    line = [find("salloc"), "-N", "2", "--ntasks-per-node", "2", *map(str, command)]
    environment = {**os.environ, **slurm.environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=environment, text=True, **pipes)


def test_the_shell_runs_a_command_line_on_a_node(slurm):
    process = allocate(slurm, SHELL, NODES[1], "read word; echo $word from $SLURMD_NODENAME; exit 7")
    output, errors = process.communicate("hello\n", timeout=60)
    assert (process.returncode, output) == (7, f"hello from {NODES[1]}\n"), errors


@pytest.mark.slow
def test_the_loss_of_its_node_is_a_lost_connection(slurm):
    process = allocate(slurm, "--no-kill", SHELL, NODES[1], "echo begun; sleep 300")
    assert process.stdout.readline() == "begun\n"
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    try:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 255, errors
    finally:
        slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")


@pytest.mark.slow
def test_a_job_goes_on_without_the_node_that_it_has_lost(slurm, zygote, tmp_path):
    folder = tmp_path / "folder"
    launch = [sys.executable, "-m", "totalreduce", "run", "-H", ",".join(f"{node}:1" for node in NODES)]
    launch += ["--on-loss", "shrink", "--remote-shell", SHELL, "--no-python", zygote.python]
    process = allocate(slurm, "--no-kill", *launch, RESUMABLE, folder, *SIZE, "--step-ms", 50)
    wait_for(lambda: last_version(folder, 2) > 15, what="version 15")
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    try:
        os.kill(processes(folder)[-1], signal.SIGKILL)  # Slurm's node is none whose processes end with it
        output, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
    finally:
        slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    (end,) = reports(output)
    assert end[:2] == (0, 1), output
    sizes = world_sizes(folder)
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {1, 2}
    assert samples(folder) == EPOCHS
