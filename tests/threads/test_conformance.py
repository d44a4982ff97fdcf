"""The conformance suite over the transports whose ranks are threads."""

import pytest

from totalreduce.testing import check_transport
from totalreduce.testing.conformance_cases import WORLD_SIZES

#: Two world sizes of each transport. `make soak` has every transport at every size.
QUICK = [("tcp", 2), ("tcp", 3), ("inproc", 1), ("inproc", 3)]


@pytest.mark.parametrize(("transport", "world_size"), QUICK)
def test_conformance(transport: str, world_size: int) -> None:
    compared = check_transport(transport, world_sizes=(world_size,))
    assert compared >= 100 * world_size


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_conformance_of_every_combination(transport: str, world_size: int) -> None:
    compared = check_transport(transport, world_sizes=(world_size,), thorough=True, timeout_s=120.0)
    assert compared >= 300 * world_size
