"""``examples/slurm_requeue.sbatch`` on a Slurm of the tests' own: signals, requeues, a node that is lost."""

import os
import re

import pytest
from resumable_runs import EXAMPLES, RESUMABLE, last_version, reports, samples, undisturbed, wait_for
from slurm_site import NODES, REQUEUE_S

EPOCHS = {0: list(range(960)), 1: list(range(960))}


def preempt(slurm, job):
    """Send one rank's step the signal that --signal sends before the end of the time."""
    slurm.command("scancel", "--signal=USR1", f"{job}.0")


def requeue(slurm, job):
    slurm.command("scontrol", "requeue", job)


def lose_node(slurm, job):
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    slurm.command("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")


@pytest.mark.parametrize(
    ("disturb", "loop"),
    [
        pytest.param(preempt, [], id="signal"),
        pytest.param(preempt, ["--ddp"], id="signal-ddp", marks=pytest.mark.slow),
        pytest.param(requeue, [], id="requeue", marks=pytest.mark.slow),
        pytest.param(lose_node, [], id="node", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_slurm_starts_again_changes_no_bit(slurm, zygote, tmp_path, disturb, loop):
    expected = undisturbed(zygote.python, tmp_path / "plain", 2, *loop, "--epochs", "2")
    folder, log = tmp_path / "folder", tmp_path / "job.log"
    variables = {"PYTHON": zygote.python, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PATH": os.environ["PATH"]}
    shape = ["-N", 2, "--ntasks-per-node", 1, "--output", log]
    shape += ["--export", ",".join(f"{name}={value}" for name, value in variables.items())]
    program = [RESUMABLE, folder, *loop, "--epochs", 2, "--step-ms", 15]
    job = slurm.command("sbatch", "--parsable", *shape, EXAMPLES / "slurm_requeue.sbatch", *program)
    wait_for(lambda: last_version(folder) > 25 and (folder / "versions").exists(), what="version 25")
    disturb(slurm, job)
    assert slurm.wait(job, timeout_s=60.0 + REQUEUE_S) == "COMPLETED", log.read_text()
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
