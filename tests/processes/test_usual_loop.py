"""A loop written for DDP gives DDP's parameters by every door of the library, also after the loss of a rank."""

from pathlib import Path

import pytest
from recovery_runs import Run

PROGRAM = Path(__file__).parent / "programs" / "usual_loop.py"


@pytest.fixture(scope="module")
def reference(tmp_path_factory, zygote):
    """What DDP over gloo gives on two ranks."""
    run = Run(tmp_path_factory.mktemp("usual") / "gloo", 2, "ddp", program=PROGRAM, python=zygote.python)
    assert run.result.exit_code == 0, run.result.errors
    return run.finals


def check(finals, reference):
    assert len(finals) == len(reference) == 2
    for mine, other in zip(finals, reference, strict=True):
        assert mine["parameters"] == pytest.approx(other["parameters"], abs=1e-9)
        assert mine["average"] == pytest.approx(other["average"], abs=1e-9)
        assert mine["errors"] == pytest.approx(other["errors"], abs=1e-9)
        assert mine["scale"] == other["scale"] == 128.0
    # DDP copies the buffers of rank 0 before the next forward pass, so its other ranks have those of their last one.
    for mine, other in zip(finals[0]["buffers"], reference[0]["buffers"], strict=True):
        assert mine == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("door", ["ddp", "optimizer", "recoverable", "attempts"])
def test_a_loop_as_for_ddp(door, reference, tmp_path, warm_python, monkeypatch):
    monkeypatch.setenv("BACKEND", "totalreduce")
    run = Run(tmp_path / door, 2, door, program=PROGRAM)
    assert run.result.exit_code == 0, run.result.errors
    assert not any("Warning" in text for text in run.result.errors), run.result.errors
    check(run.finals, reference)


@pytest.mark.parametrize("place", ["evaluation", "backward"])
@pytest.mark.parametrize("door", ["recoverable", "attempts"])
def test_a_loop_as_for_ddp_after_a_loss(door, place, reference, tmp_path, warm_python):
    run = Run(tmp_path / door, 2, door, "--die", place, program=PROGRAM, on_loss="replace")
    assert run.result.exit_code == 0, run.result.errors
    assert any(event["event"] == "epoch" and event["version"] > 0 for event in run.events)
    check(run.finals, reference)
