"""``tr.sync_ddp``: strategies behind DDP, as frameworks wrap it, each with the lines that docs/frameworks.md shows."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import totalreduce as tr
from totalreduce.launch.local import run_workers

PROGRAM = Path(__file__).parent / "programs" / "sync_ddp.py"
VALUES = """
import runpy
sys.argv = [{program!r}, {backend!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NEEDS = {"lightning": "pytorch_lightning", "ddp": "torch"}


@pytest.mark.parametrize(
    "framework",
    ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("accelerate", "lightning", "transformers"))],
)
def test_parameters_are_averaged_after_each_period_only(framework):
    needed = NEEDS.get(framework, framework)
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    command = [sys.executable, str(PROGRAM), framework]
    result = run_workers(command, num_workers=2, output="capture", timeout_s=100)
    assert result.exit_code == 0, result.errors
    for output in result.output:
        # With DDP's own exchange they would never differ; without any, always.
        assert json.loads(output.splitlines()[-1]) == [True, False, True, False]


@pytest.mark.parametrize(("backend", "size"), [("totalreduce", 2), pytest.param("gloo", 4, marks=pytest.mark.slow)])
def test_accumulation_and_a_step_that_overflows_have_the_values_that_are_computed_by_hand(fleet, backend, size):
    program = str(PROGRAM.with_name("sync_ddp_values.py"))
    # Two cores and other tests: a process that gets no turn for seconds is not dead.
    workers = fleet.start(size, VALUES.format(program=program, backend=backend), TOTALREDUCE_PEER_TIMEOUT_S="30")
    for worker in workers:
        assert worker.wait(timeout_s=100) == 0, worker.errors()


def test_a_model_without_ddp_is_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(tr.ConfigurationError, match=r"not a Linear. Without DDP: tr.DistributedOptimizer"):
        tr.sync_ddp(model, torch.optim.SGD(model.parameters()), tr.LocalSGD(period=2))
