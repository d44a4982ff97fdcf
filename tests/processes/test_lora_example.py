"""``examples/lora.py``: the adapters learn, and nothing but their gradients travels."""

import re
import sys
from pathlib import Path

import pytest

from totalreduce.launch.local import run_workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"
RANKS = 2


def fine_tune(pretrain, steps):
    """The loss before and after, the kB that a rank sends in a step, and the kB of the adapters' gradients."""
    command = [sys.executable, str(EXAMPLE), "--pretrain", str(pretrain), "--steps", str(steps)]
    result = run_workers(command, num_workers=RANKS, output="capture", timeout_s=300)
    assert result.exit_code == 0, result.errors
    text = "".join(result.output)
    reports = set(re.findall(r"loss ([\d.]+) before, ([\d.]+) after; ([\d.]+) kB sent", text))
    assert len(reports) == 1, text  # the losses are equal because the weights are
    before, after, sent = map(float, reports.pop())
    assert "the adapters are 10240 of 448000 parameters" in text
    return before, after, sent, float(re.search(r"([\d.]+) kB of gradients", text)[1])


def test_only_gradients_of_adapters_travel(warm_python):
    before, after, sent, gradients = fine_tune(2, 10)
    assert after < before
    # A ring of two ranks sends each of two halves once, and its sum once.
    assert sent == pytest.approx(gradients, rel=0.05)


@pytest.mark.slow
def test_the_fine_tuned_model_knows_the_new_text_better(warm_python):
    before, after, *_ = fine_tune(200, 200)
    assert after < before - 0.15
