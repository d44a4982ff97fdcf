"""Rounds of strategies that ``tr.recoverable`` refuses, over ``tr.attempts``: ranks are lost and come.

A parameter counts gradients, and one with momentum shows whether the state of servers goes on (see the program).
"""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "strategy_rounds.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "strategy_rounds.py"
STEPS = 5
SERVED = ["async", "stale_synchronous", "soft_sync"]


def after(num_gradients: int) -> list[list[float]]:
    """Return the two parameters after so many gradients."""
    velocity = value = 0.0
    for _ in range(num_gradients):
        velocity = 0.5 * velocity + 1.0
        value += velocity
    return [[num_gradients], [pytest.approx(value, abs=1e-5)]]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("on_loss", [pytest.param("replace", marks=pytest.mark.slow), "shrink"])
@pytest.mark.parametrize(
    "strategy", [SERVED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in [*SERVED[1:], "async_gossip"])]
)
def test_every_round_counts_once(tmp_path: Path, strategy: str, on_loss: str) -> None:
    """Rank 1 is killed in the second round of three."""
    options = {"spares": 1} if on_loss == "replace" else {"restarts": 0}
    run = Run(tmp_path / "run", 3, "--strategy", strategy, "--die", "1:7", program=PROGRAM, on_loss=on_loss, **options)
    assert run.result.exit_code == 0, run.result.errors
    sizes = [3, 3, 3] if on_loss == "replace" else [3, 2, 2]
    assert [len(event["members"]) for event in run.epochs()] == sizes[:2]
    gradients = STEPS * (len(sizes) if strategy == "async_gossip" else sum(sizes))
    assert run.finals == [{"values": after(gradients), "sizes": sizes}] * sizes[-1]


@pytest.mark.slow
def test_a_process_that_joins_begins_with_the_next_round(tmp_path: Path) -> None:
    """The process of the rank that was killed begins anew, and the others wait for it before the last round."""
    arguments = ["--strategy", "async", "--rounds", "4", "--die", "1:7", "--hold", "3"]
    run = Run(tmp_path / "run", 3, *arguments, program=PROGRAM, on_loss="shrink")
    assert run.result.exit_code == 0, run.result.errors
    sizes = run.finals[0]["sizes"]
    assert (len(sizes), sizes[0], sizes[-1]) == (4, 3, 3)
    assert run.finals == [{"values": after(STEPS * sum(sizes)), "sizes": sizes}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["quorum", "async-gossip"])
def test_the_example_ends_with_equal_parameters(strategy: str) -> None:
    options = ["run", "-n", "2", "--on-loss", "replace", str(EXAMPLE), "--rounds", "3", "--strategy", strategy]
    result = subprocess.run(
        [sys.executable, "-m", "totalreduce", *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split(": ", 1)[1] for line in result.stdout.splitlines() if " rounds, " in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
