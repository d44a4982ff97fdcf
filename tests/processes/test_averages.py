"""Evaluations with averages of the weights, in which a rank is killed: the trained weights come back."""

from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "averages.py"


@pytest.mark.parametrize(
    ("arguments", "final"),
    [
        (["recoverable"], [5.0, 6]),
        (["attempts", "--finally"], [6.0, 5]),
    ],
)
def test_the_trained_weights_come_back(tmp_path: Path, warm_python, arguments, final) -> None:
    made = Run(tmp_path / "run", 2, *arguments, "--die", program=PROGRAM, on_loss="replace")
    assert made.result.exit_code == 0, made.result.errors
    assert len(made.epochs()) == 2
    assert made.finals == [final, final]


@pytest.mark.slow
def test_without_a_finally_an_attempt_ends_with_an_error(tmp_path: Path, warm_python) -> None:
    made = Run(tmp_path / "run", 2, "attempts", "--die", program=PROGRAM, on_loss="replace")
    assert made.result.exit_code == 1
    assert "in a `finally:` (docs/recovery-ddp.md)" in "\n".join(made.result.errors)
    assert made.finals == []
