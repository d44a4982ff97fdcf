"""What counts as hidden: the time in which some bucket was under way and nobody waited."""

import pytest

from totalreduce.sparse.rounds import Overlap


@pytest.mark.parametrize(
    ("spans", "waits_from", "exchange", "hidden"),
    [
        ([(1.0, 3.0)], 5.0, 2.0, 2.0),
        ([(1.0, 3.0)], 2.5, 2.0, 1.5),
        ([(1.0, 3.0)], 0.5, 2.0, 0.0),
        ([(4.0, 6.0), (1.0, 3.0)], 5.0, 4.0, 3.0),  # the gap between them is no communication
        ([(1.0, 4.0), (2.0, 3.0), (3.0, 6.0)], 3.5, 5.0, 2.5),  # together from 1 to 6
        ([(2.0, 2.0)], 3.0, 0.0, 0.0),
        ([], 3.0, 0.0, 0.0),
    ],
)
def test_buckets_that_overlap_count_once(spans, waits_from, exchange, hidden):
    assert Overlap.of(spans, waits_from) == Overlap(exchange, hidden)
