"""When the pulls of workers went on after a fault, according to their records."""

from __future__ import annotations

import pytest

from totalreduce_benchmarks.ps_faults import _resumed

#: A worker's steps, in seconds: the begin, the end of the pull, and the end of the push. The fault is at 10.
BEFORE, LATER = (9.0, 9.01, 9.02), (15.0, 15.01, 15.02)


def records(*steps: tuple[float, float, float]) -> list[dict[str, float]]:
    return [dict(zip(("at", "pulled", "pushed"), step, strict=True)) for step in (BEFORE, *steps, LATER)]


@pytest.mark.parametrize(
    ("steps", "first", "longest"),
    [
        ([(9.99, 10.3, 10.31), (10.33, 10.34, 10.35)], 0.3, 0.3),
        # A push has waited: the pull behind it is the first answer. A later pull has waited for something else.
        ([(9.98, 9.99, 10.3), (10.32, 10.33, 10.34), (11.0, 11.2, 11.21)], 0.33, 0.33),
        ([(9.98, 9.99, 10.3), (10.32, 10.33, 10.34), (11.0, 11.9, 11.91)], 0.33, 1.9),
        ([(9.98, 10.01, 10.02), (13.0, 14.0, 14.01)], 0.0, 0.0),  # begun too late to be of this fault
    ],
    ids=["a pull", "a push", "a longer pull", "nothing"],
)
def test_the_first_and_the_longest_wait_after_a_fault(steps, first: float, longest: float) -> None:
    assert _resumed(10.0, [records(*steps)]) == pytest.approx((first, longest))


def test_the_slowest_worker_counts_and_those_that_were_not_there_do_not() -> None:
    slow, fast = records((9.99, 10.5, 10.51)), records((9.99, 10.2, 10.21))
    began_later = records((9.99, 10.9, 10.91))[1:-1]
    began_later[0]["at"] = 10.1
    assert _resumed(10.0, [fast, slow, [], began_later]) == pytest.approx((0.5, 0.5))
