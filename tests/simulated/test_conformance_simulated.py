"""The conformance suite in virtual time."""

import pytest

from totalreduce.testing import check_simulated
from totalreduce.testing.conformance_cases import WORLD_SIZES


# ``broken/test_rejected.py`` runs the suite with three ranks twice, with a transport that does nothing wrong.
@pytest.mark.parametrize(
    "world_size", [size if size in (1, 2, 4) else pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES]
)
def test_conformance(world_size: int) -> None:
    assert check_simulated(world_sizes=(world_size,)) >= 100 * world_size


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_conformance_of_every_combination(world_size: int) -> None:
    assert check_simulated(world_sizes=(world_size,), thorough=True, seed=7) >= 300 * world_size
