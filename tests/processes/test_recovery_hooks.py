"""``tr.attempts`` with ``tr.ddp_hook``: what ranks keep back outlives DDP objects, process groups and processes."""

import shutil
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "hooked.py"


@pytest.fixture(autouse=True)
def _warm(warm_python) -> None:
    """Processes need no imports."""


def run(folder: Path, ranks: int, method: str, deaths: str = "", *arguments: str, on_loss="replace", **options) -> Run:
    made = Run(folder, ranks, method, "--die", deaths, *arguments, program=PROGRAM, on_loss=on_loss, **options)
    assert made.result.exit_code == 0, made.result.errors
    return made


#: DDP changes its buckets after the first pass, so the buckets of a new DDP are not those that the sessions belong to.
DEATHS = "1.0:2:forward,0.0:3:backward,1.1:6:updated"
OFTEN = {("oktopk", 3)}


@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        pytest.param(method, ranks, marks=() if (method, ranks) in OFTEN else pytest.mark.slow)
        for method in ("topka", "oktopk", "powersgd")
        for ranks in (2, 3)
    ],
)
def test_no_bit_changes(tmp_path: Path, method: str, ranks: int) -> None:
    plain = run(tmp_path / "plain", ranks, method)
    disturbed = run(tmp_path / "disturbed", ranks, method, DEATHS)
    assert len(disturbed.epochs()) == 4
    assert disturbed.finals == plain.finals
    assert all(final["norm"] > 0 for final in plain.finals)
    assert len({final["residuals"] for final in plain.finals}) == ranks


@pytest.mark.parametrize("method", ["topka", pytest.param("oktopk", marks=pytest.mark.slow)])
def test_a_rank_that_is_a_step_behind_goes_on_with_its_residuals_after_the_step(tmp_path: Path, method: str) -> None:
    """Rank 1 dies after its step. Rank 2 has taken it, too, and rank 0 has not learnt the result of the vote."""
    plain = run(tmp_path / "plain", 3, method)
    disturbed = run(tmp_path / "disturbed", 3, method, "1.0:4:updated", "--behind", "4")
    assert [event["version"] for event in disturbed.epochs()] == [0, 5]
    assert disturbed.finals == plain.finals


KINDS = {
    "bfloat16": ["--dtype", "bfloat16"],
    "a step that a scaler leaves out": ["--overflow", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_with(tmp_path: Path, kind: str) -> None:
    """The vote of a step that a ``GradScaler`` leaves out is in ``attempt.commit()``."""
    plain = run(tmp_path / "plain", 2, "topka", "", *KINDS[kind])
    disturbed = run(tmp_path / "disturbed", 2, "topka", "1.0:4:backward,0.0:5:forward", *KINDS[kind])
    assert disturbed.finals == plain.finals
    assert plain.finals[0]["steps"] == ([10, 9, 1] if "scaler" in kind else [10, 10, 0])


@pytest.mark.parametrize("method", ["topka", pytest.param("oktopk", marks=pytest.mark.slow)])
def test_a_loss_in_the_middle_of_an_accumulation_undoes_its_passes(tmp_path: Path, method: str) -> None:
    """Each batch has a commit, and each second one a step: rank 1 dies before one, and rank 0 after another."""
    plain = run(tmp_path / "plain", 2, method, "", "--accumulate", "2")
    disturbed = run(tmp_path / "disturbed", 2, method, "1.0:3:forward,0.0:7:updated", "--accumulate", "2")
    assert disturbed.finals == plain.finals
    assert plain.finals[0]["steps"] == [10, 10, 0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topka", "oktopk", "powersgd"])
def test_a_job_that_is_started_again_goes_on_with_its_residuals(tmp_path: Path, method: str) -> None:
    """From the version 5. In the second job a rank is lost before the first step: its copy was made from the disk."""
    snapshots = ["--snapshots", str(tmp_path / "snapshots")]
    plain = run(tmp_path / "plain", 2, method, "", *snapshots)
    shutil.rmtree(tmp_path / "snapshots" / "version-000000010")
    again = run(tmp_path / "again", 2, method, "1.0:5:forward", *snapshots)
    assert "the job begins with version 5" in again.result.errors[0]
    assert again.finals == plain.finals


@pytest.mark.slow
def test_without_copies_the_residuals_of_a_lost_rank_begin_at_zero(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", 2, "topka", "", "--replicas", "0")
    disturbed = run(tmp_path / "disturbed", 2, "topka", "1.0:9:forward", "--replicas", "0")
    assert "nobody has the residuals of rank 1: they begin at zero" in disturbed.result.errors[0]
    assert [final["steps"] for final in disturbed.finals] == [[10, 10, 0]] * 2
    assert 0 < disturbed.finals[1]["norm"] < plain.finals[1]["norm"]
