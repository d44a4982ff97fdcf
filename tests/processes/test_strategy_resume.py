"""``examples/strategy_resume.py``: a job that is stopped within a period and goes on ends with the same bits."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "strategy_resume.py"
SOURCE = """
import runpy
sys.argv = {argv!r}
sys.path.insert(0, {folder!r})
runpy.run_path({argv!r}[0], run_name="__main__")
"""


def start(fleet, *words):
    """Start two ranks; return a function that waits for what they print."""
    workers = fleet.start(2, SOURCE.format(argv=[str(EXAMPLE), *map(str, words)], folder=str(EXAMPLE.parent)))

    def lines():
        said = [worker.read_line(timeout_s=60.0) for worker in workers]
        assert [worker.wait() for worker in workers] == [0, 0], workers[0].errors()
        return [re.fullmatch(r"rank \d: steps (\d+) to (\d+), parameters (\w{16})", line).groups() for line in said]

    return lines


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "local-sgd", "slowmo", "easgd", "gossip"])
def test_a_stopped_job_goes_on_with_the_same_bits(fleet, tmp_path, strategy):
    options = "--strategy", strategy, "--steps", 60
    whole = start(fleet, tmp_path / "whole", *options)
    start(fleet, tmp_path / "parts", *options, "--stop-at", 33)()  # 33 is within a period of each strategy
    parts = start(fleet, tmp_path / "parts", *options)()
    whole = whole()
    assert [(first, last) for first, last, _ in parts] == [("33", "60")] * 2
    digests = [digest for _, _, digest in whole]
    assert [digest for _, _, digest in parts] == digests
    # DiLoCo's job ends with an exchange, and two ranks that gossip have equal parameters after each step.
    assert len(set(digests)) == (1 if strategy in ("diloco", "gossip") else 2)
