"""A cable pulled in the middle of a collective of torch.distributed: torch's error names a rank, on both sides."""

import re
import time
from pathlib import Path

import pytest
from test_faults_hosts import SILENCE_S, Job, pytestmark  # noqa: F401  (the same rights are needed here)

from totalreduce.launch.emulate import EmulatedNetwork

PROGRAM = Path(__file__).parents[1] / "processes" / "programs" / "c10d_until_lost.py"
COLLECTIVES = (
    *("ddp", "allreduce"),
    *("broadcast from 0", "broadcast from 1", "reduce to 0", "reduce to 1", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather to 0", "gather to 1"),
    *("scatter from 0", "scatter from 1", "send and recv", "recv from anybody", "barrier", "fsdp"),
)


@pytest.fixture(scope="module")
def network():
    with EmulatedNetwork(3, "1gbit") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_cut_link_is_a_torch_error_on_both_sides(network, collective):
    job = Job(network, PROGRAM, collective)
    try:
        for event in ("ready", "there"):
            for rank in range(3):
                job.expect(rank, event)
        network.cut(1)
        since = time.monotonic()
        for rank in range(3):
            lost = job.expect(rank, "lost", timeout_s=10)
            print(f"{collective}: rank {rank} knew after {lost['at'] - since:.3f} s: {lost['text']}")
            assert {"DistBackendError", "DistError"} <= set(lost["kinds"]), lost
            assert lost["at"] - since < SILENCE_S
            # Who is cut off sees everybody fall silent, and names one of them.
            assert lost["rank"] in ((0, 2) if rank == 1 else (1,))
            assert re.search(rf"\brank {lost['rank']}\b", lost["text"])
            assert job.expect(rank, "next")["rank"] == lost["rank"]
            assert job.expect(rank, "destroyed", timeout_s=5)["seconds"] < 3.0
    finally:
        network.restore(1)
        job.close()
