"""Index arithmetic: everything is covered exactly once, and no segment is larger than allowed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from totalreduce.engine.operation import Operation
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.partition import balanced_range, lane_count
from totalreduce.foundation.types import DType, OpKind, ReduceOp, Signature
from totalreduce.schedules import program_for


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_parts_cover_the_whole_once_in_order_and_differ_by_one_at_most(total: int, parts: int) -> None:
    ranges = [balanced_range(total, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert sorted(lengths, reverse=True) == lengths


@pytest.mark.parametrize(
    ("chunk_bytes", "lanes"),
    [(0, 1), (1, 1), (127, 1), (128, 1), (255, 1), (256, 2), (512, 4), (1024, 4), (2048, 4), (2049, 5), (5120, 10)],
)
def test_lanes(chunk_bytes: int, lanes: int) -> None:
    assert lane_count(chunk_bytes, segment_bytes=512, segment_bytes_min=128, lanes_min=4) == lanes


@given(
    st.integers(0, 3000),
    st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    st.sampled_from(DType),
    st.sampled_from([16, 64, 1024]),
    st.sampled_from([1, 16, 4096]),
    st.sampled_from([1, 2, 5]),
)
def test_segments_of_an_operation_tile_the_tensor(
    num_elements: int, world_size: int, dtype: DType, segment_bytes: int, segment_bytes_min: int, lanes_min: int
) -> None:
    config = EngineConfig(segment_bytes=segment_bytes, segment_bytes_min=segment_bytes_min, lanes_min=lanes_min)
    signature = Signature(OpKind.ALLREDUCE, dtype, ReduceOp.SUM, 0, (num_elements,))
    program = program_for(OpKind.ALLREDUCE, 0, world_size, 0)
    result = memoryview(bytearray(num_elements * dtype.itemsize))
    operation = Operation("w", (0, 0), signature, program, result, priority=0, sequence=0, config=config, now=0.0)
    place = 0
    for chunk in range(world_size):
        for lane in range(len(operation.lanes)):
            start, stop = operation.elements(chunk, lane)
            assert start == place
            place = stop
            for partial in (False, True):
                num_bytes = operation.segment_bytes(chunk, lane, partial=partial)
                assert num_bytes == len(operation.segment(chunk, lane, partial=partial)) <= segment_bytes
    assert place == num_elements
