"""Jobs that freeze and unfreeze parameters, and add groups to optimizers, and lose ranks before, in and after that.

A kind of fault: what a process plans depends on more than the values of its state, and one process with another plan
ends all others.
"""

from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "retrained.py"


@pytest.fixture(autouse=True)
def _warm(warm_python) -> None:
    """Processes need no imports."""


def run(folder: Path, loop: str, deaths: str = "", *arguments: str, on_loss: str = "replace", **options) -> Run:
    made = Run(folder, 2, loop, "--die", deaths, *arguments, program=PROGRAM, on_loss=on_loss, **options)
    assert made.result.exit_code == 0, made.result.errors
    return made


#: Versions 3, 7 and 11 are blocks in which other parameters begin to be trained.
DEATHS = {
    "recoverable": "1.0:3:changed,0.0:6:backward,1.1:7:change,0.1:11:changed,1.2:13:updated",
    "sparse": "1.0:3:changed,0.0:6:backward,1.1:7:changed,0.1:12:backward",
    "attempts": "1.0:3:changed,0.0:4:backward,1.1:6:changed,0.1:10:updated",
}


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=pytest.mark.slow) if loop == "recoverable" else loop for loop in DEATHS]
)
def test_no_bit_changes(tmp_path: Path, loop: str) -> None:
    plain, disturbed = run(tmp_path / "plain", loop), run(tmp_path / "disturbed", loop, DEATHS[loop])
    assert len(disturbed.epochs()) == 1 + len(DEATHS[loop].split(","))
    assert disturbed.finals == plain.finals
    assert plain.finals[0]["digests"] == plain.finals[1]["digests"]
    assert plain.finals[0]["frozen"] == ["4.weight", "4.bias"]
    assert len(plain.finals[0]["lr"]) == 2
    assert bool(plain.finals[0]["residuals"]) == (loop == "sparse")


def test_a_newcomer_with_another_plan_is_refused_alone(tmp_path: Path) -> None:
    """Its optimizer knows the parameters by other names. The next process that is started is as it should be."""
    made = run(tmp_path / "run", "recoverable", "1.0:5:forward", "--odd")
    assert [event["incarnation"] for event in made.events if event["event"] == "started"] == [0, 0, 1, 2]
    assert [final["version"] for final in made.finals] == [15, 15]
    assert "PlanMismatchError" in made.result.errors[1]
    assert "other.4.weight" in made.result.errors[1]
    assert "Traceback" not in made.result.errors[0]


@pytest.mark.slow
def test_without_a_lost_rank_a_group_that_was_not_committed_is_added_again(tmp_path: Path) -> None:
    """All other ranks undo it, also those that had added it when the rank died."""
    made = run(tmp_path / "run", "attempts", "1.0:6:changed", on_loss="shrink", restarts=0)
    assert [(event["version"], len(event["members"])) for event in made.epochs()] == [(0, 2), (6, 1)]
    (final,) = made.finals
    assert (final["version"], len(final["lr"]), final["frozen"]) == (12, 2, ["4.weight", "4.bias"])


@pytest.mark.parametrize("loop", ["sparse", pytest.param("attempts", marks=pytest.mark.slow)])
def test_a_job_that_is_started_again_goes_on_with_what_it_has_trained(tmp_path: Path, loop: str) -> None:
    snapshots = ["--snapshots", str(tmp_path / "snapshots")]  # of version 9 alone, behind the second change
    plain = run(tmp_path / "plain", loop, "", *snapshots)
    again = run(tmp_path / "again", loop, "", *snapshots)
    assert "the job begins with version 9" in again.result.errors[0]
    assert "the job goes on with those of the snapshot" in again.result.errors[0]
    assert again.finals == plain.finals
