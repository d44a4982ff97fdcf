"""The measuring program of ``bench versions`` on ranks as threads: training steps are timed, replicas are compared."""

import pytest

from totalreduce.testing import run_ranks
from totalreduce_benchmarks import versions_worker


def test_sparse_steps_are_timed_and_their_messages_counted():
    config = {"seconds": 0.001, "elements": 20_000}
    for (case,) in run_ranks(2, lambda group: versions_worker._sparse(group, config)):
        assert (len(case["seconds"]), case["operations"]) == (3, 3)
        assert min(case["seconds"]) > 0
        assert case["cpu_s"] > 0
        assert case["messages"] >= 3


def test_replicas_that_differ_end_the_rank():
    def body(group):
        model = versions_worker._Flat(5)
        model.weight.data[3] = group.rank
        with pytest.raises(SystemExit, match="replicas differ"):
            versions_worker._require_equal_replicas(group, model)

    run_ranks(2, body)
