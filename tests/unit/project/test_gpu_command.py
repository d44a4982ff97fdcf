"""``make gpu``: green without a GPU, with the reason; red if a check fails. The checks themselves: ``tests/gpu``."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

RUN = Path(__file__).parents[2] / "gpu" / "run.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", RUN)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_check_is_skipped_with_the_reason(gpu, tmp_path, capsys) -> None:
    assert gpu.main(["--json", str(tmp_path / "out.json")]) == 0
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert [each["name"] for each in checks] == [check.name for check in gpu.CHECKS]
    assert {each["outcome"] for each in checks} == {"skipped"}
    assert all(each["reason"] == gpu.why_not() != "" for each in checks)
    assert capsys.readouterr().out.splitlines()[-1] == f"0 passed, {len(checks)} skipped, 0 failed"


@pytest.mark.parametrize(
    ("name", "code", "text", "outcome"),
    [
        ("nccl-2", 1, "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", "skipped"),
        ("nccl", 1, "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", "failed"),
        ("ddp", 1, "AssertionError: the sum is wrong", "failed"),
        ("ddp", None, "", "failed"),
        ("ddp", 0, "no figures were written", "failed"),
        ("tests", 0, "61 passed in 70 s", "passed"),
        ("tests", 4, "error: unrecognized arguments: --timeout", "skipped"),
    ],
)
def test_what_a_check_comes_to(gpu, monkeypatch, capsys, name, code, text, outcome) -> None:
    monkeypatch.setattr(gpu, "_compile", lambda: None)
    monkeypatch.setattr(gpu, "_call", lambda command, limit_s: (code, text))
    monkeypatch.setattr(gpu, "machine", dict)
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    assert gpu.main([name]) == (1 if outcome == "failed" else 0)
    assert capsys.readouterr().out.startswith(f"{name:<17}{outcome}")


def test_checks_that_find_no_time_are_skipped(gpu, monkeypatch, capsys) -> None:
    for name in ("_compile", "machine"):  # they take seconds, and are run by a test of all checks
        monkeypatch.setattr(gpu, name, dict)
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    monkeypatch.setattr(gpu, "BUDGET_S", 1.0)
    assert gpu.main(["ddp"]) == 0
    assert "the 1 s for all checks are over" in capsys.readouterr().out


def test_a_check_that_hangs_is_killed_with_its_processes(gpu) -> None:
    code, _ = gpu._call(["sleep", "60"], 0.3)
    assert code is None
