"""Order-free and set-free over real sockets: every rank has its own order, its own delays and its own set of
tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "order_free.py"
SOURCE = """
import runpy
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(fleet, steps: int, chaos: int, *, lane: bool = False) -> list[dict[str, float | str]]:
    source = SOURCE.format(argv=[str(PROGRAM), "--steps", str(steps), "--chaos", str(chaos)])
    workers = fleet.start(4, source, TOTALREDUCE_FAST_LANE=str(int(lane)))
    found = [json.loads(worker.read_line("digest", timeout_s=60 + steps)) for worker in workers]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
    return found


def _check(ranks: list[dict[str, float | str]], *, lane: bool = False) -> str:
    assert len({rank["digest"] for rank in ranks}) == 1, "all ranks hold the same bits"
    for rank in ranks:
        if not lane:
            assert rank["floating_messages"] > 0, "nothing floated: the test has no teeth"
            assert 0 < rank["floating_bytes_peak"] <= rank["bound"]
        assert rank["floating_bytes"] == 0
        assert rank["dropped_messages"] == 0
    return str(ranks[0]["digest"])


def test_random_orders_delays_and_sets_give_the_same_bits_twice(fleet):
    digest = _check(_run(fleet, 8, chaos=1))
    assert _check(_run(fleet, 8, chaos=2)) == digest
    assert _check(_run(fleet, 8, chaos=3, lane=True), lane=True) == digest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_steps(fleet):
    assert _check(_run(fleet, 1000, chaos=1)) == _check(_run(fleet, 1000, chaos=2))
