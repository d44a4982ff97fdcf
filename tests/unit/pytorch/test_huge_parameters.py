"""A parameter of more than 2^31 elements: cut into buckets whose indices fit into 32 bits."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from totalreduce.pytorch.buckets import ParameterSpec
from totalreduce.pytorch.error_feedback import CompressedPlan, ErrorFeedback
from totalreduce.sparse.accumulator import HostAccumulator
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.testing.lockstep import run_exchanges

ROWS, COLUMNS = 32_769, 1 << 16
EVERY = 1000


@pytest.mark.slow
@pytest.mark.parametrize("bucket_elements", [None, 2**31 - 1])
def test_more_elements_than_an_index_can_count(bucket_elements: int | None) -> None:
    """Takes 17 GiB: the gradient, and as much for what is applied."""
    n = ROWS * COLUMNS
    parameter = torch.nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta"))
    spec = ParameterSpec.of("huge", (), parameter)
    plan = CompressedPlan.of([parameter], [spec], ErrorFeedback(bucket_elements=bucket_elements), whole=False)
    parts = [part for bucket in plan.buckets for part in bucket]
    assert parts[0].begin == 0
    assert parts[-1].end == n > 2**31
    assert all(one.end == other.begin for one, other in pairwise(parts))
    gradient, residual = np.zeros(n, np.float32), np.zeros(n, np.float32)
    gradient[::EVERY] = np.arange(gradient[::EVERY].size) % 5 + 1
    applied = 0
    for bucket, shape in zip(plan.buckets, plan.shapes(), strict=True):
        memory = [gradient[part.begin : part.end] for part in bucket]
        kept = HostAccumulator([residual[part.begin : part.end] for part in bucket])
        session = OkTopk(density=1.01 / EVERY, values="float32").session(shape, 0, 1)
        session.accumulate(HostAccumulator(memory), kept, 1.0)
        (update,), _ = run_exchanges([session.exchange(np.ones(1, np.bool_))])
        assert update is not None
        assert update.indices is not None
        assert np.array_equal((update.indices + np.int64(bucket[0].begin)) % EVERY, np.zeros(update.indices.size))
        update.write_to(kept, 1.0)
        applied += update.indices.size
    assert applied == gradient[::EVERY].size == np.count_nonzero(residual[::EVERY])
    assert not gradient[::EVERY].any()
    assert residual[2**31 // EVERY * EVERY + EVERY] == (2**31 // EVERY + 1) % 5 + 1
