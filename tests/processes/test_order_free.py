"""Order-free and set-free over real sockets: every rank has its own order, its own delays and its own set of
tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from totalreduce.launch.local import run_workers

PROGRAM = Path(__file__).with_name("programs") / "order_free.py"


def _run(steps: int, chaos: int, num_workers: int = 4) -> list[dict[str, float | str]]:
    result = run_workers(
        [sys.executable, str(PROGRAM), "--steps", str(steps), "--chaos", str(chaos)],
        num_workers=num_workers,
        output="capture",
        timeout_s=60 + steps,
    )
    assert result.exit_code == 0, "\n".join(result.output)
    return [json.loads(line) for output in result.output for line in output.splitlines() if '"digest"' in line]


def _check(ranks: list[dict[str, float | str]]) -> str:
    assert len({rank["digest"] for rank in ranks}) == 1, "all ranks hold the same bits"
    for rank in ranks:
        assert rank["floating_messages"] > 0, "nothing floated: the test has no teeth"
        assert 0 < rank["floating_bytes_peak"] <= rank["bound"]
        assert rank["floating_bytes"] == 0
        assert rank["dropped_messages"] == 0
    return str(ranks[0]["digest"])


def test_random_orders_delays_and_sets_give_the_same_bits_twice():
    assert _check(_run(30, chaos=1)) == _check(_run(30, chaos=2))


@pytest.mark.slow
def test_a_thousand_steps():
    assert _check(_run(1000, chaos=1)) == _check(_run(1000, chaos=2))
