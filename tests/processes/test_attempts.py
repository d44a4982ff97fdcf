"""DistributedDataParallel over ``tr.attempts``: bits, samples, members, errors after the death of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "attempts.py"


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Processes of the tests in ``make test`` need no imports; those of slow tests begin as users' processes do."""
    if request.node.get_closest_marker("slow") is None:
        request.getfixturevalue("warm_python")


def test_replaced_ranks_change_no_bit(tmp_path: Path) -> None:
    """Rank 1 dies before it sends gradients, rank 2 when the others may have the step, and rank 0 after that."""
    plain = Run(tmp_path / "plain", 3, program=PROGRAM, on_loss="replace")
    deaths = "1:5:loss,2:9:updated,0:14:backward"
    disturbed = Run(tmp_path / "disturbed", 3, "--die", deaths, program=PROGRAM, on_loss="replace", spares=1)
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert len(disturbed.epochs()) == 4
    assert disturbed.finals == plain.finals
    assert [final["version"] for final in plain.finals] == [20, 20, 20]
    assert len({final["digest"] for final in plain.finals}) == 1
    assert plain.finals[0]["losses"] == [3.0, 3.0]


@pytest.mark.slow
def test_without_the_lost_ranks_the_others_go_on_and_newcomers_join(tmp_path: Path) -> None:
    arguments = ["--die", "1:3:forward,0:5:forward", "--hold", "3"]
    run = Run(tmp_path / "run", 3, *arguments, program=PROGRAM, on_loss="shrink")
    assert run.result.exit_code == 0, run.result.errors
    sizes = [len(event["members"]) for event in run.epochs()]
    assert sizes[:2] == [3, 2]
    assert sizes[-1] == 3
    assert len(run.finals) == 3
    assert len({final["digest"] for final in run.finals}) == 1
    used = [sample for (epoch, _), samples in run.blocks().items() if epoch == 0 for sample in samples]
    assert sorted(used) == list(range(240))


@pytest.mark.slow
def test_without_the_launcher_a_loss_is_an_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "totalreduce",
        "run",
        "-n",
        "2",
        str(PROGRAM),
        str(tmp_path),
        "--die",
        "1:3:forward",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 137
    assert "rank 1 is lost" in result.stderr
    assert not list(tmp_path.glob("final-*"))
