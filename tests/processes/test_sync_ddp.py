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


def test_a_model_without_ddp_is_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(tr.ConfigurationError, match=r"not a Linear. Without DDP: tr.DistributedOptimizer"):
        tr.sync_ddp(model, torch.optim.SGD(model.parameters()), tr.LocalSGD(period=2))
