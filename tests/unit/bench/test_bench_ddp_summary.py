"""``bench ddp``: from what the launches wrote to figures, and which losses end it without any."""

import math

import pytest

from totalreduce.bench.ddp import ALONE, DdpLaunch, differences_of, summarise
from totalreduce.bench.launching import BenchmarkFailedError

LOSSES = [4.0, 3.5, 3.0, 2.5, 2.25]


def launch(step_s, losses=LOSSES):
    """Three untimed steps, then two that take so long."""
    return DdpLaunch(list(losses), [9.0, 9.0, 9.0, step_s, step_s])


def test_ratios_are_taken_round_by_round():
    ours, theirs = summarise(
        {
            "totalreduce": [launch(1.0), launch(2.0), launch(4.0)],
            "gloo": [launch(2.0), launch(2.0), launch(5.0)],
        }
    )
    assert (ours.backend, ours.seconds.median, ours.ratio) == ("totalreduce", 2.0, None)
    assert (theirs.backend, theirs.seconds.median) == ("gloo", 2.0)
    assert (theirs.ratio.low, theirs.ratio.median, theirs.ratio.high) == (0.5, 0.8, 1.0)
    assert ours.difference == theirs.difference == 0.0


def test_replicas_without_an_exchange_may_have_other_losses():
    *_, alone = summarise({"totalreduce": [launch(3.0)], "gloo": [launch(4.0)], ALONE: [launch(2.0, [1.0] * 5)]})
    assert (alone.backend, alone.seconds.median, alone.ratio.median, alone.difference) == (ALONE, 2.0, 1.5, 0.0)


def test_the_largest_difference_of_any_launch_is_reported():
    off = [*LOSSES[:2], 3.0 * (1 + 2e-4), *LOSSES[3:]]
    _, theirs = summarise({"totalreduce": [launch(1.0)] * 2, "gloo": [launch(1.0), launch(1.0, off)]})
    assert theirs.difference == pytest.approx(2e-4)


@pytest.mark.parametrize("wrong", [LOSSES[0] * 1.2, math.nan])
@pytest.mark.parametrize("backend", ["totalreduce", "gloo"])
def test_other_losses_are_no_figure(backend, wrong):
    launches = {"totalreduce": [launch(1.0)] * 2, "gloo": [launch(1.0)] * 2}
    launches[backend] = [launch(1.0), launch(1.0, [wrong, *LOSSES[1:]])]
    with pytest.raises(BenchmarkFailedError, match=f"losses on {backend} differ"):
        summarise(launches)


def test_the_tolerance_is_what_was_asked_for():
    losses = {"totalreduce": [LOSSES], "gloo": [[loss * (1 + 1e-9) for loss in LOSSES]]}
    assert differences_of(losses, 1e-8)["gloo"] == pytest.approx(1e-9)
    with pytest.raises(BenchmarkFailedError, match="rounding explains 1e-10"):
        differences_of(losses, 1e-10)
