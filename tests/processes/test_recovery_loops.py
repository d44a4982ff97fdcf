"""What a training loop may do in a recoverable job: killed ranks are replaced, and no bit changes."""

from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "loops.py"


def run(folder: Path, loop: str, deaths: str = "", num_workers: int = 2, **options) -> Run:
    arguments = [loop, *(["--die", deaths] if deaths else [])]
    made = Run(folder, num_workers, *arguments, program=PROGRAM, **{"on_loss": "replace", **options})
    assert made.result.exit_code == 0, made.result.errors
    return made


def compare(folder: Path, loop: str, deaths: str) -> tuple[Run, Run]:
    """Return a run without faults and one with them, whose ends are equal."""
    plain, disturbed = run(folder / "plain", loop), run(folder / "disturbed", loop, deaths)
    assert len(disturbed.epochs()) == 1 + len(deaths.split(","))
    assert disturbed.finals == plain.finals
    assert len({final["digest"] for final in plain.finals}) == 1
    return plain, disturbed


@pytest.mark.parametrize("loop", ["parts", pytest.param("parts sparse", marks=pytest.mark.slow)])
def test_a_step_with_several_optimizers(tmp_path: Path, warm_python, loop: str) -> None:
    """Rank 1 dies in the second part of a step, and rank 0 in the first part, when its vote has passed."""
    plain, disturbed = compare(tmp_path, loop, "1:5:backward,0:10:updated")
    assert [event["version"] for event in disturbed.epochs()] == [0, 5, 11]
    assert [final["version"] for final in plain.finals] == [40, 40]
    assert bool(plain.finals[0]["residuals"]) == (loop == "parts sparse")
