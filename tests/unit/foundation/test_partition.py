"""Index arithmetic: everything is covered exactly once, and no segment is larger than allowed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from totalreduce.engine.layout import OperationLayout
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.partition import balanced_range, exchange_window, lane_count
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.schedules import algorithms_of, program_for
from totalreduce.schedules.actions import Receive, Send


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


@pytest.mark.parametrize(
    ("chunk_bytes", "lanes"), [(512, 2), (1024, 2), (1025, 3), (2048, 4), (2049, 4), (4096, 4), (4097, 5), (8192, 8)]
)
def test_very_large_chunks_have_longer_segments(chunk_bytes: int, lanes: int) -> None:
    longer = lane_count(chunk_bytes, segment_bytes=512, segment_bytes_min=128, lanes_min=2, longest_bytes=1024)
    assert longer == lanes
    plain = lane_count(chunk_bytes, segment_bytes=512, segment_bytes_min=128, lanes_min=2)
    assert plain == max(2, -(-chunk_bytes // 512))


configs = st.builds(
    EngineConfig,
    segment_bytes=st.sampled_from([64, 256, 1024]),
    segment_bytes_min=st.sampled_from([1, 16, 4096]),
    lanes_min=st.sampled_from([1, 2, 5]),
)
HOSTS = ((0,), (0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 2, 0, 1, 2, 0, 1, 2), (0, 0, 0, 0, 1, 1, 1, 1))


@settings(deadline=None)
@given(st.integers(0, 3000), st.sampled_from(HOSTS), st.sampled_from(DType), configs)
@pytest.mark.parametrize("algorithm", algorithms_of(OpKind.ALLREDUCE))
def test_chunks_of_lanes_tile_the_tensor(
    algorithm: Algorithm, num_elements: int, hosts: tuple[int, ...], dtype: DType, config: EngineConfig
) -> None:
    signature = Signature(OpKind.ALLREDUCE, dtype, ReduceOp.SUM, 0, (num_elements,))
    ranks = tuple(range(len(hosts)))
    sent: dict[tuple[int, int, int, int], int] = {}
    received: dict[tuple[int, int, int, int], int] = {}
    for rank in ranks:
        program = program_for(OpKind.ALLREDUCE, algorithm, rank, len(hosts), 0, hosts)
        layout = OperationLayout(signature, program, ranks, [num_elements * dtype.itemsize], config)
        place = 0
        for lane in range(layout.num_lanes):
            for chunk in range(program.num_chunks):
                start, stop = layout.elements(chunk, lane)
                assert start == place
                place = stop
            for action, where in zip(program.actions, layout.regions(lane), strict=True):
                assert where is not None
                first, _ = layout.elements(action.chunk, lane)
                _, last = layout.elements(action.chunk + action.span - 1, lane)
                assert (where.start, where.stop) == (first * dtype.itemsize, last * dtype.itemsize)
                wide = layout.partial_dtype.itemsize
                begin, _ = layout.elements(0, lane)  # an accumulator is one lane's
                assert (where.wide_start, where.wide_stop) == ((first - begin) * wide, (last - begin) * wide)
                assert where.body_bytes == (last - first) * (wide if action.partial else dtype.itemsize)
                # What transports have room for; one element of every chunk goes even where that is more.
                segments = 1 if action.span == 1 else 2
                assert where.body_bytes <= max(segments * config.segment_bytes, action.span * wide)
                if isinstance(action, Send):
                    sent[rank, action.peer, action.step, lane] = where.body_bytes
                else:
                    received[action.peer, rank, action.step, lane] = where.body_bytes
        assert place == num_elements
    assert sent == received


BLOCK_KINDS = (OpKind.ALLGATHER, OpKind.REDUCE_SCATTER, OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL)


@settings(deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=6), st.sampled_from(DType), configs)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_sender_and_receiver_cut_a_block_alike(
    kind: OpKind, counts: list[int], dtype: DType, config: EngineConfig
) -> None:
    """Each knows only the blocks it has; between them every byte of a block travels once, in order."""
    size = len(counts)
    sizes = () if kind in (OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL) else tuple(counts)
    signature = Signature(kind, dtype, ReduceOp.SUM if kind is OpKind.REDUCE_SCATTER else ReduceOp.NONE, 0, (), sizes)
    for algorithm in algorithms_of(kind):
        sent: dict[tuple[int, int, int, int], int] = {}
        received: dict[tuple[int, int, int, int], int] = {}
        for rank in range(size):
            program = program_for(kind, algorithm, rank, size)
            sizes_here = _block_bytes(kind, rank, counts, dtype)
            layout = OperationLayout(signature, program, tuple(range(size)), sizes_here, config)
            for lane in range(layout.num_lanes):
                for action, place in zip(program.actions, layout.regions(lane), strict=True):
                    if place is None:
                        continue
                    assert place.body_bytes <= config.segment_bytes
                    if isinstance(action, Send):
                        sent[rank, action.peer, action.step, lane] = place.body_bytes
                    else:
                        received[action.peer, rank, action.step, lane] = place.body_bytes
            for chunk, num_bytes in enumerate(layout.sizes):
                ranges = [layout.elements(chunk, lane) for lane in range(layout.num_lanes) if _has(layout, chunk, lane)]
                if ranges:
                    assert [ranges[0][0], ranges[-1][1]] == [0, num_bytes // dtype.itemsize]
                    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert sent == received


def _block_bytes(kind: OpKind, rank: int, counts: list[int], dtype: DType) -> list[int]:
    """Bytes of the buffers of one rank; the block from or for rank r has ``counts[r]`` elements."""
    if kind is OpKind.REDUCE_SCATTER:
        counts = [*counts, counts[rank]]
    elif kind is OpKind.ALLTOALL:
        counts = [counts[rank]] * len(counts) + counts  # all blocks that a rank sends are equally large
    elif kind is not OpKind.ALLGATHER and rank != 0:
        counts = [count if index == rank else 0 for index, count in enumerate(counts)]
    return [count * dtype.itemsize for count in counts]


def _has(layout: OperationLayout, chunk: int, lane: int) -> bool:
    """Whether some action of the lane is about the chunk."""
    pairs = zip(layout.program.actions, layout.regions(lane), strict=True)
    return any(action.chunk == chunk and place is not None for action, place in pairs)


def test_a_sum_goes_into_the_output_block() -> None:
    signature = Signature(OpKind.REDUCE_SCATTER, DType.INT32, ReduceOp.SUM, 0, (), (3, 5))
    program = program_for(OpKind.REDUCE_SCATTER, Algorithm.RING, 1, 2)
    layout = OperationLayout(signature, program, (0, 1), [12, 20, 20], EngineConfig())
    [receive] = [p for action, p in zip(program.actions, layout.regions(0), strict=True) if isinstance(action, Receive)]
    assert receive is not None
    assert (receive.buffer, receive.into, receive.start, receive.stop) == (1, 2, 0, 20)


@pytest.mark.parametrize(("bytes_per_s", "num_peers", "window"), [(25e6, 7, 128_571), (125e6, 3, 1_500_000), (1, 9, 1)])
def test_blocks_under_way_take_a_link_the_same_time_for_any_number_of_ranks(bytes_per_s, num_peers, window):
    assert exchange_window(bytes_per_s, num_peers) == window
