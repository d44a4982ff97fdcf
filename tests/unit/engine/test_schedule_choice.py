"""Which schedule: the same on every rank by construction, explicit choices win, sizes and places decide."""

import itertools
import random

import pytest
from engines_by_hand import Cluster, allreduce, values_of

from totalreduce.engine.engine import Engine
from totalreduce.engine.layout import OperationLayout
from totalreduce.engine.submission import Submission
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.types import Algorithm, DType, OpKind, ReduceOp, Signature
from totalreduce.schedules import algorithms_of, program_for
from totalreduce.schedules.actions import Send
from totalreduce.schedules.select import LinkModel, Selector, candidates

LINKS = LinkModel()
KIB, MIB = 1024, 1024 * 1024
SIZES = (0, 1, 100, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 1024 * MIB)
PLACES = {
    "eight hosts": tuple(range(8)),
    "one host": (0,) * 8,
    "two hosts of four": (0, 0, 0, 0, 1, 1, 1, 1),
    "two hosts in turn": (0, 1) * 4,
    "uneven": (0, 0, 0, 0, 0, 1, 1, 2),
}


def choose(kind: OpKind, num_bytes: int, hosts: tuple[int, ...], links: LinkModel = LINKS) -> Algorithm:
    return Selector(links, hosts).choose(kind, num_bytes, tuple(range(len(hosts))))


@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", OpKind)
def test_what_is_chosen_can_be_carried_out(kind: OpKind, hosts: tuple[int, ...]) -> None:
    for num_bytes in SIZES:
        assert choose(kind, num_bytes, hosts) in algorithms_of(kind)
        estimates = candidates(kind, num_bytes, hosts, LINKS)
        assert set(estimates) <= set(algorithms_of(kind))
        assert all(seconds >= 0 for seconds in estimates.values())
        assert choose(kind, num_bytes, hosts[:1]) in algorithms_of(kind)


def test_a_ring_is_chosen_unless_halving_and_doubling_is_clearly_better() -> None:
    for latency_s, chosen in [(64e-5, Algorithm.RING), (256e-5, Algorithm.RING), (1e-2, Algorithm.HALVING_DOUBLING)]:
        links = LinkModel(latency_s=latency_s, bytes_per_s=125e6)
        estimates = candidates(OpKind.ALLREDUCE, 4 * MIB, PLACES["eight hosts"], links)
        ratio = estimates[Algorithm.RING] / estimates[Algorithm.HALVING_DOUBLING]
        assert (ratio < 1.1) == (chosen is Algorithm.RING)
        assert choose(OpKind.ALLREDUCE, 4 * MIB, PLACES["eight hosts"], links) == chosen


def layout_of(
    dtype: DType, num_bytes: int, hosts: tuple[int, ...], kind: OpKind = OpKind.ALLREDUCE, **settings: str
) -> OperationLayout:
    """Return the layout of an operation without a chosen schedule; a reduce-scatter has equal blocks."""
    engine = Engine(0, len(hosts), EngineConfig(**settings), hosts=hosts)  # type: ignore[arg-type]
    count = num_bytes // dtype.itemsize
    block = memoryview(bytearray(num_bytes // len(hosts)))
    buffers = [memoryview(bytearray(num_bytes))] if kind is OpKind.ALLREDUCE else [block] * (len(hosts) + 1)
    signature = Signature(kind, dtype, ReduceOp.SUM, 0, (count,))
    return engine.submit(Submission("name", signature, buffers), 0.0).layout


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE_SCATTER])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_types_go_direct_between_hosts_where_wide_sums_would_travel(kind: OpKind, dtype: DType) -> None:
    """Each element crosses a link as often as those of float32 in a ring, and every time as a half."""
    hosts = PLACES["eight hosts"]
    layout = layout_of(dtype, 16 * MIB, hosts, kind)
    assert layout.program.algorithm == Algorithm.DIRECT
    per_peer = 16 * MIB // 8 * (2 if kind is OpKind.ALLREDUCE else 1)
    assert set(layout.bytes_to.values()) == {per_peer}
    sends = [layout.regions(0)[i] for i, action in enumerate(layout.program.actions) if isinstance(action, Send)]
    assert {region.body_bytes for region in sends} == {region.stop - region.start for region in sends}
    others = [
        layout_of(DType.FLOAT32, 16 * MIB, hosts, kind),
        layout_of(dtype, 16 * MIB, hosts, kind, half_accumulation="native"),
        layout_of(dtype, 16 * MIB, (0, 1), kind),
        layout_of(dtype, 16 * MIB, PLACES["two hosts of four"], kind),
        layout_of(dtype, 2 * MIB, hosts, kind),
    ]
    assert all(other.program.algorithm != Algorithm.DIRECT for other in others)


def test_the_choice_does_not_depend_on_what_was_chosen_before() -> None:
    """Ranks submit in different orders, and a rank remembers its choices."""
    questions = list(itertools.product(OpKind, SIZES, ((0, 1, 2, 3, 4, 5, 6, 7), (0, 4), (3, 2, 1))))
    hosts = PLACES["two hosts of four"]
    answers = []
    for rank in range(4):
        selector = Selector(LINKS, hosts)
        shuffled = random.Random(rank).sample(questions, len(questions))
        answers.append({question: selector.choose(*question) for question in shuffled})
        assert {question: selector.choose(*question) for question in questions} == answers[-1]
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER])
def test_without_shared_memory_large_tensors_do_not_go_direct_on_one_host(kind: OpKind) -> None:
    ranks = (0, 1, 2, 3)
    for shared_memory in (False, True):
        selector = Selector(LINKS, (0,) * 4, shared_memory=shared_memory)
        assert selector.choose(kind, MIB, ranks) is Algorithm.DIRECT
        for num_bytes in (2 * MIB, 64 * MIB):
            wanted = Algorithm.DIRECT if shared_memory else Algorithm.RING
            assert selector.choose(kind, num_bytes, ranks) is wanted


def test_what_is_remembered_is_bounded() -> None:
    selector = Selector(LINKS, (0, 1, 2))
    first = selector.choose(OpKind.ALLREDUCE, 10 * MIB, (0, 1, 2))
    for num_bytes in range(5000):
        selector.choose(OpKind.ALLREDUCE, num_bytes, (0, 1, 2))
    assert len(selector._chosen) <= 4096
    assert selector.choose(OpKind.ALLREDUCE, 10 * MIB, (0, 1, 2)) is first


def test_large_tensors_between_hosts_go_round_a_ring() -> None:
    for size in (3, 4, 5, 8):
        assert choose(OpKind.ALLREDUCE, 256 * MIB, tuple(range(size))) is Algorithm.RING


def test_small_tensors_between_hosts_take_few_steps() -> None:
    quick = (Algorithm.STAR, Algorithm.TREE, Algorithm.HALVING_DOUBLING)
    for size in (4, 8, 16):
        for num_bytes in (0, 4, KIB):
            assert choose(OpKind.ALLREDUCE, num_bytes, tuple(range(size))) in quick
    assert choose(OpKind.ALLREDUCE, 64, tuple(range(4))) is Algorithm.STAR
    assert choose(OpKind.BROADCAST, 64, tuple(range(8))) is Algorithm.TREE
    assert choose(OpKind.REDUCE, 64, tuple(range(8))) is Algorithm.TREE


def test_large_tensors_go_down_a_chain() -> None:
    for kind in (OpKind.BROADCAST, OpKind.REDUCE):
        assert choose(kind, 256 * MIB, tuple(range(8))) is Algorithm.CHAIN


@pytest.mark.parametrize("latency_s", [1.6e-4, 2.56e-3, 2e-2])
@pytest.mark.parametrize("bytes_per_s", [6e7, 1.25e8, 2.5e8])
def test_what_is_not_short_goes_in_pieces_whatever_latency_was_measured(latency_s: float, bytes_per_s: float) -> None:
    """A latency measured on busy cores, or between cities, says nothing about what a piece costs."""
    links = LinkModel(latency_s=latency_s, bytes_per_s=bytes_per_s)
    for kind in (OpKind.BROADCAST, OpKind.REDUCE):
        estimates = candidates(kind, 64 * MIB, tuple(range(8)), links)
        assert min(estimates, key=estimates.__getitem__) is Algorithm.CHAIN


@pytest.mark.parametrize("num_bytes", [4, KIB, MIB, 64 * MIB])
def test_ranks_of_one_host_exchange_directly(num_bytes: int) -> None:
    for kind in (OpKind.ALLREDUCE, OpKind.ALLGATHER, OpKind.REDUCE_SCATTER):
        assert Algorithm.DIRECT in candidates(kind, num_bytes, (0,) * 4, LINKS)
        assert Algorithm.DIRECT not in candidates(kind, num_bytes, (0, 0, 1, 1), LINKS)
    assert choose(OpKind.ALLREDUCE, 16 * MIB, (0,) * 4) is Algorithm.DIRECT
    assert choose(OpKind.ALLREDUCE, 256 * MIB, (0,) * 4) is Algorithm.RING


@pytest.mark.parametrize("place", ["two hosts of four", "two hosts in turn", "uneven"])
def test_large_tensors_of_several_ranks_per_host_are_reduced_there_first(place: str) -> None:
    assert choose(OpKind.ALLREDUCE, 64 * MIB, PLACES[place]) is Algorithm.HIERARCHICAL


def test_one_rank_per_host_has_no_hierarchy() -> None:
    for num_bytes in SIZES:
        assert Algorithm.HIERARCHICAL not in candidates(OpKind.ALLREDUCE, num_bytes, PLACES["eight hosts"], LINKS)
        assert Algorithm.HIERARCHICAL not in candidates(OpKind.ALLREDUCE, num_bytes, PLACES["one host"], LINKS)


def test_more_bytes_never_cost_less() -> None:
    for kind, hosts in itertools.product(OpKind, PLACES.values()):
        for smaller, larger in itertools.pairwise(SIZES):
            before, after = (candidates(kind, num_bytes, hosts, LINKS) for num_bytes in (smaller, larger))
            for algorithm in algorithms_of(kind):
                # More pieces follow each other more closely, so that a little more may cost a little less.
                assert after.get(algorithm, 1.0) >= 0.5 * before.get(algorithm, 1.0), (kind, algorithm, larger)


def test_slow_links_and_fast_ones_are_told_apart() -> None:
    """With messages as dear as a megabyte a megabyte is small; with messages for nothing nothing is."""
    hosts = PLACES["eight hosts"]
    patient = LinkModel(latency_s=1.0, bytes_per_s=1e6)
    assert choose(OpKind.ALLREDUCE, MIB // 8, hosts, patient) is not Algorithm.RING
    eager = LinkModel(latency_s=1e-9, bytes_per_s=1e6)
    assert choose(OpKind.ALLREDUCE, MIB, hosts, eager) in (Algorithm.RING, Algorithm.HALVING_DOUBLING)


def test_a_subgroup_is_where_its_ranks_are() -> None:
    selector = Selector(LINKS, PLACES["two hosts in turn"])
    assert selector.hosts_of((7, 0, 2)) == (1, 0, 0)
    assert selector.choose(OpKind.ALLREDUCE, 64 * MIB, (0, 2, 4, 6)) is Algorithm.DIRECT
    assert selector.choose(OpKind.ALLREDUCE, 64 * MIB, (0, 1)) is not Algorithm.HIERARCHICAL


def test_a_setting_wins() -> None:
    selector = Selector(LINKS, (0,) * 4, {OpKind.ALLREDUCE: Algorithm.TREE})
    for num_bytes in SIZES:
        assert selector.choose(OpKind.ALLREDUCE, num_bytes, (0, 1, 2, 3)) is Algorithm.TREE
    assert selector.choose(OpKind.ALLGATHER, MIB, (0, 1, 2, 3)) in algorithms_of(OpKind.ALLGATHER)


def test_what_the_caller_asks_for_wins_over_the_settings() -> None:
    cluster = Cluster(4, schedules={OpKind.ALLREDUCE: Algorithm.RING})
    asked = [cluster.submit(rank, "asked", [1.0], allreduce(1, algorithm=Algorithm.STAR)) for rank in range(4)]
    usual = [cluster.submit(rank, "usual", [1.0]) for rank in range(4)]
    assert {operation.program.algorithm for operation in asked} == {Algorithm.STAR}
    assert {operation.program.algorithm for operation in usual} == {Algorithm.RING}
    cluster.run()
    assert all(values_of(operation) == [4.0] for operation in (*asked, *usual))


def test_a_setting_that_cannot_be_carried_out() -> None:
    cluster = Cluster(2, schedules={OpKind.ALLREDUCE: Algorithm.CHAIN})
    with pytest.raises(ConfigurationError, match="allreduce has no schedule 'chain'; there is ring, star"):
        cluster.submit(0, "w")
    assert cluster.engines[0].table.num_active == 0


def test_the_middle_of_a_star_depends_on_the_name() -> None:
    """Many small operations at the same time are spread over the ranks."""
    cluster = Cluster(4, schedules={OpKind.ALLREDUCE: Algorithm.STAR})
    middles = set()
    for number in range(20):
        operation = cluster.submit(0, f"tensor {number}", [1.0])
        middles.add(0 if len(operation.program.sources) == 3 else operation.program.sources[0])
        root = next(iter({0} if len(operation.program.sources) == 3 else operation.program.sources))
        assert operation.program.actions == program_for(OpKind.ALLREDUCE, Algorithm.STAR, 0, 4, root).actions
    assert middles == {0, 1, 2, 3}


def test_other_links_are_used_for_the_next_operations() -> None:
    cluster = Cluster(8, schedules={})

    def chosen() -> set[Algorithm]:
        operations = [cluster.submit(rank, "w", [1.0] * 100) for rank in range(8)]
        cluster.run()
        assert all(values_of(operation) == [8.0] * 100 for operation in operations)
        return {operation.program.algorithm for operation in operations}

    [before] = chosen()
    for engine in cluster.engines:
        engine.planner.use_links(LinkModel(latency_s=1e-9, bytes_per_s=1.0))
    [after] = chosen()
    assert before is not after
    assert after in (Algorithm.RING, Algorithm.HALVING_DOUBLING)


@pytest.mark.parametrize(("bytes_per_s", "factor", "largest"), [(4e7, 1, 1), (6.7e7, 2, 4), (2.7e8, 4, 4)])
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1)])
def test_segments_are_longer_on_fast_links_between_ranks_that_share_no_memory(
    hosts: tuple[int, ...], bytes_per_s: float, factor: int, largest: int
) -> None:
    """``largest``: how much longer segments of chunks of more than four segments are."""
    cluster = Cluster(3)
    cluster.engines = [Engine(rank, 3, cluster.config, hosts=hosts) for rank in range(3)]

    def lengths(name: str, count: int = 192) -> set[int]:
        operations = [cluster.submit(rank, name, [1.0] * count) for rank in range(3)]
        cluster.run()
        assert all(values_of(operation) == [3.0] * count for operation in operations)
        layouts = [operation.layout for operation in operations]
        lanes = [layout.regions(lane) for layout in layouts for lane in range(layout.num_lanes)]
        return {region.body_bytes for lane in lanes for region in lane if region is not None}

    assert lengths("before") == {64}
    for engine in cluster.engines:
        engine.planner.use_links(LinkModel(bytes_per_s=bytes_per_s))
    assert lengths("after") == ({64 * factor} if hosts == (0, 1, 2) else {64})
    assert lengths("large", 480) == ({64 * largest} if hosts == (0, 1, 2) else {64})
    for engine in cluster.engines:
        engine.planner.use_links(LinkModel(bytes_per_s=4e7))
    assert lengths("again") == lengths("large again", 480) == {64}
