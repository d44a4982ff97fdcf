"""Strategies, their ranks in lockstep: what they compute, beside loops in plain NumPy."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.topk import Topk
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.partition import balanced_range
from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
from totalreduce.strategies.easgd import EASGD
from totalreduce.strategies.gossip import Gossip, partners
from totalreduce.strategies.outer import DiLoCo, HeavyBall, Nesterov, SlowMo
from totalreduce.strategies.strom import Strom
from totalreduce.testing.strategies import ArrayReplica, StrategyRanks

SIZES = (1, 2, 3, 4, 5, 7, 8)
sizes = pytest.mark.parametrize("world_size", SIZES)
SHAPE = [7, 30, 1, 12]
N = sum(SHAPE)


def start(dtype=np.float64) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(size).astype(dtype) for size in SHAPE]


def update(step: int, rank: int, dtype=np.float64) -> np.ndarray:
    return (np.random.default_rng([step, rank]).standard_normal(N) / 10).astype(dtype)


def run(strategy, world_size: int, steps: int, dtype=np.float64, ranks: StrategyRanks | None = None, first: int = 0):
    ranks = ranks or StrategyRanks(strategy, world_size, start(dtype))
    for step in range(first, first + steps):
        ranks.step([update(step, rank, dtype) for rank in range(world_size)])
    return ranks


def everybody(ranks: StrategyRanks) -> np.ndarray:
    return np.stack([ranks.parameters(rank) for rank in range(len(ranks.replicas))])


def begin(world_size: int) -> np.ndarray:
    return np.tile(np.concatenate(start()), (world_size, 1))


@sizes
def test_parameters_are_averaged_after_each_period(world_size: int) -> None:
    ranks, expected = StrategyRanks(LocalSGD(period=3), world_size, start()), begin(world_size)
    for step in range(8):
        ranks.step([update(step, rank) for rank in range(world_size)])
        expected += [update(step, rank) for rank in range(world_size)]
        if step % 3 == 2:
            expected[:] = expected.mean(axis=0)
            assert len({parameters.tobytes() for parameters in everybody(ranks)}) == 1
        np.testing.assert_allclose(everybody(ranks), expected, rtol=0, atol=1e-12)


def test_averages_are_weighted_by_samples() -> None:
    ranks = StrategyRanks(LocalSGD(period=2, weights="samples"), 3, start())
    expected, weights = begin(3), np.array([[3.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
    for step in range(2):
        ranks.step([update(step, rank) for rank in range(3)], weights[step])
        expected += [update(step, rank) for rank in range(3)]
    mean = np.average(expected, axis=0, weights=weights.sum(axis=0))
    np.testing.assert_allclose(everybody(ranks), np.tile(mean, (3, 1)), rtol=0, atol=1e-6)
    unweighted = run(LocalSGD(period=2), 3, 2)
    assert np.abs(everybody(unweighted)[0] - mean).max() > 1e-3
    for step in range(2):  # no rank has counted samples: all count alike
        ranks.step([update(step, rank) for rank in range(3)], [0.0] * 3)
    mean = mean + np.mean([sum(update(step, rank) for step in range(2)) for rank in range(3)], axis=0)
    np.testing.assert_allclose(everybody(ranks), np.tile(mean, (3, 1)), rtol=0, atol=1e-6)


def test_the_state_of_the_optimizer_is_kept_or_averaged() -> None:
    for policy, expected in (("keep", [0.0, 1.0, 2.0]), ("average", [1.0] * 3)):
        ranks = StrategyRanks(LocalSGD(period=2, optimizer_state=policy), 3, start())
        for rank, replica in enumerate(ranks.replicas):
            replica.state = np.full(5, float(rank))
        run(None, 3, 2, ranks=ranks)
        assert [replica.state.tolist() for replica in ranks.replicas] == [[number] * 5 for number in expected]


def test_states_of_other_tensors_are_not_averaged() -> None:
    ranks = StrategyRanks(LocalSGD(period=2, optimizer_state="average"), 3, start())
    for rank, replica in enumerate(ranks.replicas):  # equal sizes, of different tensors
        replica.state, replica.state_layout = np.zeros(5), f"{rank // 2}.momentum_buffer:5"
    with pytest.raises(ConfigurationError, match="optimizer_state='keep'"):
        run(None, 3, 2, ranks=ranks)


def test_many_samples_are_counted_exactly() -> None:
    ranks = StrategyRanks(LocalSGD(period=2, weights="samples"), 2, start())
    for _ in range(2):
        ranks.step([np.zeros(N)] * 2, [2.0**24 + 1, 1.0])
    np.testing.assert_allclose(everybody(ranks), begin(2), rtol=1e-15, atol=0)


@sizes
def test_averages_and_averaged_updates_are_the_same(world_size: int) -> None:
    """The survey's equivalence of parameter averaging and update-based methods, with plain SGD."""
    averaged = run(LocalSGD(period=4), world_size, 12)
    for outer in (Nesterov(1.0, 0.0), HeavyBall(1.0, 0.0)):
        moved = run(DiLoCo(period=4, outer=outer), world_size, 12)
        np.testing.assert_allclose(everybody(moved), everybody(averaged), rtol=0, atol=1e-12)


@sizes
def test_synchronous_steps_first(world_size: int) -> None:
    ranks, expected = (
        StrategyRanks(PostLocalSGD(start=5, then=LocalSGD(period=2)), world_size, start()),
        begin(world_size),
    )
    for step in range(9):
        updates = np.stack([update(step, rank) for rank in range(world_size)])
        assert ranks.sessions[0].exchanges_gradients() == (step < 5)
        ranks.step(list(updates))
        expected += updates.mean(axis=0) if step < 5 else updates
        if step in (6, 8):
            expected[:] = expected.mean(axis=0)
        np.testing.assert_allclose(everybody(ranks), expected, rtol=0, atol=1e-12)


@sizes
def test_with_period_one_gradients_are_exchanged_and_nothing_else(world_size: int) -> None:
    ranks = run(LocalSGD(period=1), world_size, 5)
    assert all(session.exchanges_gradients() for session in ranks.sessions)
    assert not ranks.sent.any()


@sizes
@pytest.mark.parametrize(("overlap", "mix"), [(0, 0.25), (2, 0.25), (2, "progress"), (0, "progress")])
def test_diloco_is_what_the_papers_say(world_size: int, overlap: int, mix: float | str) -> None:
    """Fragments in turn, an outer Nesterov step for each, and mixing where training has gone on."""
    lr, momentum, period = 0.7, 0.9, 6
    strategy = DiLoCo(period=period, outer=Nesterov(lr, momentum), fragments=3, overlap=overlap, mix=mix)
    ranks = StrategyRanks(strategy, world_size, start())
    edges = [balanced_range(N, 3, number)[0] for number in range(3)] + [N]
    assert set(edges) & set(np.cumsum(SHAPE)) == {N}  # fragments begin and end within tensors
    parts = [slice(*ends) for ends in pairwise(edges)]
    expected, common, velocity = begin(world_size), begin(1)[0], np.zeros(N)
    waiting = []
    for step in range(1, 20):
        updates = [update(step, rank) for rank in range(world_size)]
        ranks.step(updates)
        expected += updates
        for number, part in enumerate(parts):
            if step % period == ((number + 1) * period // 3) % period:
                begun = expected[:, part].copy()
                waiting.append((step + overlap, part, begun, (common[part] - begun).mean(axis=0)))
        for due, part, begun, delta in list(waiting):
            if due == step:
                waiting = [each for each in waiting if each[1] is not part]
                velocity[part] = momentum * velocity[part] + delta
                common[part] -= lr * (delta + momentum * velocity[part])
                if mix == "progress":
                    expected[:, part] += common[part] - begun
                else:
                    share = mix if overlap else 0.0
                    expected[:, part] = share * expected[:, part] + (1 - share) * common[part]
        np.testing.assert_allclose(everybody(ranks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("fragments", "wanted"), [(1, [N]), (4, [13, 13, 12, 12])])
def test_fragments_are_parts_of_the_same_size(fragments: int, wanted: list[int]) -> None:
    replica = ArrayReplica(start())
    session = DiLoCo(period=8, fragments=fragments).session(replica, 0, 1)
    assert [len(part) for part in session.state()["shared"]["common"]] == wanted


def test_there_are_no_fragments_without_elements() -> None:
    session = DiLoCo(period=8, fragments=5).session(ArrayReplica([np.zeros(1), np.zeros(0), np.zeros(2)]), 0, 1)
    assert [len(part) for part in session.state()["shared"]["common"]] == [1, 1, 1]
    nothing = DiLoCo(period=8, fragments=5).session(ArrayReplica([np.zeros(0)]), 0, 1)
    assert [len(part) for part in nothing.state()["shared"]["common"]] == [0]


@sizes
def test_slowmo_has_heavy_ball_momentum(world_size: int) -> None:
    ranks, expected = StrategyRanks(SlowMo(period=2, lr=0.8, momentum=0.6), world_size, start()), begin(world_size)
    common, velocity = begin(1)[0], np.zeros(N)
    for step in range(8):
        updates = [update(step, rank) for rank in range(world_size)]
        ranks.step(updates)
        expected += updates
        if step % 2:
            velocity = 0.6 * velocity + (common - expected.mean(axis=0))
            common = common - 0.8 * velocity
            expected[:] = common
        np.testing.assert_allclose(everybody(ranks), expected, rtol=0, atol=1e-12)


@sizes
def test_easgd_pulls_ranks_and_centre_together(world_size: int) -> None:
    ranks, expected, centre = (
        StrategyRanks(EASGD(period=2, beta=0.6), world_size, start()),
        begin(world_size),
        begin(1)[0],
    )
    for step in range(8):
        updates = [update(step, rank) for rank in range(world_size)]
        ranks.step(updates)
        expected += updates
        if step % 2:
            distance = expected - centre
            expected -= 0.6 / world_size * distance
            centre = centre + 0.6 / world_size * distance.sum(axis=0)
        np.testing.assert_allclose(everybody(ranks), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ranks.sessions[0].state()["shared"]["centre"], centre, rtol=0, atol=1e-12)


@sizes
@pytest.mark.parametrize("graph", ["ring", "exponential", "random"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_gossip_keeps_the_sum_and_comes_to_the_average(world_size: int, graph: str, overlap: int) -> None:
    ranks = StrategyRanks(Gossip(graph=graph, overlap=overlap), world_size, start())
    updates = np.stack([update(0, rank) for rank in range(world_size)])
    ranks.step(list(updates))
    for _ in range(300):
        ranks.step(list(np.zeros_like(updates)))
    weights = [session.state()["own"]["weight"] for session in ranks.sessions]
    if not overlap:
        assert sum(weights) == pytest.approx(world_size)
    mean = begin(1)[0] + updates.mean(axis=0)
    np.testing.assert_allclose(everybody(ranks), np.tile(mean, (world_size, 1)), rtol=0, atol=1e-3)


@sizes
@pytest.mark.parametrize("graph", ["ring", "exponential", "random"])
def test_partners_are_pairs_of_sender_and_receiver(world_size: int, graph: str) -> None:
    for number in range(20):
        found = [partners(Gossip(graph=graph), number, rank, world_size) for rank in range(world_size)]
        for rank, (to, source) in enumerate(found):
            assert (to is None) == (source is None)
            if to is not None:
                assert found[to][1] == rank
                assert to != rank
        resting = sum(to is None for to, _ in found)
        assert resting == (1 if world_size == 1 else world_size % 2 if graph == "random" else 0)


@sizes
@pytest.mark.parametrize("overlap", [0, 2])
def test_strom_sends_what_has_added_up_to_a_threshold(world_size: int, overlap: int) -> None:
    """Beside a loop in NumPy: signs of accumulated elements, applied by all ranks after the same step."""
    quantum = np.float32(0.06)
    ranks = StrategyRanks(Strom(threshold=0.06, overlap=overlap), world_size, start())
    common, rests, sent = begin(1)[0], np.zeros((world_size, N), np.float32), []
    for step in range(12):
        updates = [update(step, rank) for rank in range(world_size)]
        ranks.step(updates)
        for rest, each in zip(rests, updates, strict=True):
            rest += ((common + each - common) / world_size).astype(np.float32)
        signs = np.where(np.abs(rests) >= quantum, np.sign(rests), 0).astype(np.float32)
        rests -= signs * quantum
        sent.append((signs * quantum).sum(axis=0))
        if step >= overlap:
            common = common + sent[step - overlap]
        assert len({parameters.tobytes() for parameters in everybody(ranks)}) == 1
        np.testing.assert_allclose(ranks.parameters(0), common, rtol=0, atol=1e-6)
        for session, rest in zip(ranks.sessions, rests, strict=True):
            np.testing.assert_allclose(session.state()["own"]["rest"], rest, rtol=0, atol=1e-6)
    assert 0.1 < np.mean(np.array(sent) != 0) < 1


@sizes
def test_strom_loses_nothing(world_size: int) -> None:
    """What the ranks have moved on average is what was applied and what waits on the ranks."""
    ranks, total = StrategyRanks(Strom(threshold=0.11), world_size, start()), np.zeros(N)
    for step in range(40):
        updates = [update(step, rank) for rank in range(world_size)]
        ranks.step(updates)
        total += np.mean(updates, axis=0)
    rests = np.sum([session.state()["own"]["rest"] for session in ranks.sessions], axis=0, dtype=np.float64)
    assert np.abs(rests).max() > 0.01
    np.testing.assert_allclose(ranks.parameters(0) - begin(1)[0] + rests, total, rtol=0, atol=1e-6)


@sizes
@pytest.mark.parametrize(("smallest", "floor"), [(None, 0.1), (0.4, 0.4), (1.0, 1.0)])
def test_the_threshold_of_strom_falls_with_the_learning_rate(
    world_size: int, smallest: float | None, floor: float
) -> None:
    """Each element moves by its own threshold, so what is sent shows the threshold; rank 0 learns more slowly."""
    settings = Strom(threshold=1.0, smallest=smallest)
    ranks = StrategyRanks(settings, world_size, [np.zeros(1, np.float32)])
    expected, rests = np.zeros(1), np.zeros(world_size)
    for rate in (0.5, 2.0, 2.0, 1.0, 0.5, 0.02, 0.0, 3.0):
        for rank, replica in enumerate(ranks.replicas):
            replica.learning_rate = rate if rank else rate / 2
        ranks.step([np.full(1, 1.3 * world_size, np.float32)] * world_size)
        rests += 1.3
        largest = max(2.0 if rate < 3 else 3.0, rate) if rate != 0.5 or expected.any() else 0.5
        threshold = max(floor, rate / largest)
        sent = np.where(rests >= threshold, threshold, 0.0)
        rests -= sent
        expected += sent.sum()
        np.testing.assert_allclose(ranks.parameters(0), expected, rtol=1e-6)
    assert len({parameters.tobytes() for parameters in everybody(ranks)}) == 1


def test_strom_goes_on_with_the_largest_learning_rate_of_a_saved_state() -> None:
    first, second = (StrategyRanks(Strom(threshold=1.0), 1, [np.zeros(1, np.float32)]) for _ in range(2))
    first.replicas[0].learning_rate = 2.0
    first.step([np.zeros(1, np.float32)])
    second.steps = first.steps
    second.sessions[0].load_state(first.sessions[0].state())
    second.replicas[0].learning_rate = 1.0
    second.step([np.ones(1, np.float32)])
    np.testing.assert_array_equal(second.parameters(0), [0.5])


def test_strom_sends_bytes_for_elements_beyond_the_threshold_only() -> None:
    size, listed = 100_000, 100
    ranks = StrategyRanks(Strom(threshold=0.25), 4, [np.zeros(size, np.float32)])
    moves = np.zeros(size, np.float32)
    moves[:: size // listed] = 4.0  # of each rank a quarter counts
    ranks.step([moves] * 4)
    np.testing.assert_array_equal(ranks.parameters(0), moves / 4)  # one threshold of each rank
    assert len(set(ranks.sent.tolist())) == 1
    # To each rank a header of 16 bytes, and the message: half of the paper's 32 bits for an element.
    assert 3 * (16 + listed) < ranks.sent[0] < 3 * (16 + 2 * listed)
    ranks.step([np.zeros(size, np.float32)] * 4)  # what was beyond the threshold is sent step by step
    np.testing.assert_array_equal(ranks.parameters(0), moves / 2)


@pytest.mark.parametrize(("moved", "is_warned"), [(0.02, True), (0.005, False)])
def test_strom_warns_once_if_its_threshold_is_too_small(
    moved: float, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Elements move by 24 thresholds in a step, of which each rank sends one."""
    ranks = StrategyRanks(Strom(threshold=0.25), 2, [np.zeros(1000, np.float32)])
    moves = np.zeros(1000, np.float32)
    moves[: int(1000 * moved)] = 12.0
    for _ in range(8):
        ranks.step([moves] * 2)
    found = [record.getMessage() for record in caplog.records]
    expected = "after 1 steps of Strom(threshold=0.25), 2 % of the elements have to send more than 10 thresholds"
    assert [text.split(", of which")[0] for text in found] == [expected] * is_warned


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("overlap", [0, 1])
def test_strom_does_not_hide_values_that_are_no_numbers(number: float, overlap: int) -> None:
    """A rank that has diverged shows on all ranks; elements that have not stay what they are."""
    ranks = StrategyRanks(Strom(threshold=0.05, overlap=overlap), 3, start(np.float32))
    calm = StrategyRanks(Strom(threshold=0.05, overlap=overlap), 3, start(np.float32))
    for step in range(1 + overlap):
        updates = [update(step, rank, np.float32) for rank in range(3)]
        calm.step(updates)
        updates[1][4] = number if step == 0 else 0.0
        with np.errstate(all="ignore"):
            ranks.step(updates)
    found = everybody(ranks)
    assert len({parameters.tobytes() for parameters in found}) == 1
    assert np.isnan(found[0, 4]) or abs(found[0, 4]) > 1e36
    others = np.arange(N) != 4
    assert np.isfinite(found[:, others]).all()
    assert np.abs(found[:, others] - everybody(calm)[:, others]).max() < 0.2  # rank 1 has sent all it had
    assert not ranks.sessions[1].state()["own"]["rest"][others].any() or overlap


def test_strom_refuses_messages_of_impossible_sizes() -> None:
    impossible = [(-1, 0.1), (1 << 40, 0.1), (0, 0.0), (4 * N + 4, 0.0), (0, -0.1), (0, math.nan), (0, math.inf)]
    for size, threshold in impossible:
        session = Strom(threshold=0.1).session(StrategyRanks(Gossip(), 1, start()).replicas[0], 0, 2)
        exchange = session.stepped(0.0)[0].exchange
        mine = next(exchange).block
        header = np.array([(size, threshold)], [("size", np.int64), ("threshold", np.float64)])
        with pytest.raises(ProtocolError, match="rank 1 announces"):
            exchange.send([mine, header.view(np.uint8)])


CODED = [
    LocalSGD(period=2, codec=Int8()),
    DiLoCo(period=2, codec=Int8(), outer=Nesterov(1.0, 0.0)),
    EASGD(period=2, codec=Int8()),
    DiLoCo(period=2, codec=Topk(density=0.2), outer=Nesterov(1.0, 0.0)),
]


@sizes
@pytest.mark.parametrize("strategy", CODED, ids=str)
def test_with_a_codec_nothing_is_lost(strategy, world_size: int) -> None:
    """The mean of what ranks have moved is what was applied and what they have not sent, to the rounding of float32."""
    ranks = StrategyRanks(strategy, world_size, start(np.float32))
    total, common = np.zeros(N), begin(1)[0]
    for step in range(10):
        updates = [update(step, rank, np.float32) for rank in range(world_size)]
        ranks.step(updates)
        total += np.mean(updates, axis=0, dtype=np.float64)
        if step % 2 == 0 or isinstance(strategy, EASGD):
            continue
        states = [session.state() for session in ranks.sessions]
        rests = [
            np.concatenate(state["own"]["rests"]) if "rests" in state["own"] else state["own"]["rest"]
            for state in states
        ]
        applied = everybody(ranks)[0].astype(np.float64) - common
        sign = -1 if isinstance(strategy, DiLoCo) else 1  # its updates stand in the place of gradients
        np.testing.assert_allclose(applied + sign * np.mean(rests, axis=0, dtype=np.float64), total, rtol=0, atol=1e-5)
        assert len({parameters.tobytes() for parameters in everybody(ranks)}) == 1
    if isinstance(strategy, EASGD):
        assert len({session.state()["shared"]["centre"].tobytes() for session in ranks.sessions}) == 1


@dataclass(frozen=True)
class Watched:
    """Int8, and a list of what was called."""

    calls: list[str]
    name: ClassVar[str] = "watched"
    has_fixed_size: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = False

    def bytes_max(self, count: int) -> int:
        return Int8().bytes_max(count)

    def encode(self, values, out, *, seed: int = 0, keeps: bool = False) -> int:
        self.calls.append("encode")
        return Int8().encode(values, out, seed=seed, keeps=keeps)

    def decode(self, coded, out, *, adds: bool = False) -> None:
        self.calls.append(f"decode adds={adds}")
        Int8().decode(coded, out, adds=adds)


@pytest.mark.parametrize("make", [LocalSGD, DiLoCo, EASGD])
def test_the_kernels_of_a_codec_are_loaded_before_the_first_step(make) -> None:
    """To compile them takes seconds, which do not belong to the first exchange."""
    calls: list[str] = []
    make(codec=Watched(calls)).session(ArrayReplica(start(np.float32)), 0, 2)
    assert sorted(set(calls)) == ["decode adds=False", "decode adds=True", "encode"]


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("strategy", [*CODED, DiLoCo(period=2, overlap=1, codec=Int8())], ids=str)
def test_a_codec_does_not_hide_values_that_are_no_numbers(strategy, number: float) -> None:
    """A rank that has diverged shows on all ranks, with the values that there are without a codec."""
    found = []
    for which in (strategy, dataclasses.replace(strategy, codec=None)):
        ranks = StrategyRanks(which, 3, start(np.float32))
        for step in range(3):
            updates = [update(step, rank, np.float32) for rank in range(3)]
            if step == 1:
                updates[1][4] = number
            with np.errstate(all="ignore"):
                ranks.step(updates)
        common = ranks.sessions[0].state()["shared"]["centre"] if isinstance(strategy, EASGD) else ranks.parameters(0)
        assert np.isnan(common[4]) or abs(common[4]) > 1e36
        found.append(np.concatenate([common, *everybody(ranks)]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


ALL = [
    LocalSGD(period=3),
    LocalSGD(period=3, codec=Int8()),
    PostLocalSGD(start=2, then=LocalSGD(period=2)),
    DiLoCo(period=4, fragments=2, codec=Int8(stochastic=True)),
    SlowMo(period=2),
    EASGD(period=2, codec=Int8()),
    Gossip(graph="random"),
    Strom(threshold=0.05),
]


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_run_goes_on_from_its_state_bit_by_bit(strategy) -> None:
    whole = run(strategy, 4, 12, np.float32)
    first = run(strategy, 4, 7, np.float32)
    second = StrategyRanks(strategy, 4, start(np.float32))
    for rank in range(4):
        second.replicas[rank].write(range(len(SHAPE)), first.parameters(rank))
        second.sessions[rank].load_state(first.sessions[rank].state())
    second.steps = 7
    run(strategy, 4, 5, np.float32, second, 7)
    np.testing.assert_array_equal(everybody(second), everybody(whole))


OVERLAPPING = [
    DiLoCo(period=4, fragments=2, overlap=3, codec=Int8(stochastic=True)),
    DiLoCo(period=4, fragments=2, overlap=3, mix="progress"),
    *(Gossip(graph=graph, overlap=1) for graph in ("ring", "exponential", "random")),
    Gossip(graph="random", period=2, overlap=5),
    Strom(threshold=0.05, overlap=1),
    Strom(threshold=0.05, overlap=4),
]


@sizes
@pytest.mark.parametrize("strategy", OVERLAPPING, ids=str)
def test_exchanges_that_are_restarted_from_a_state_change_no_bit(strategy, world_size: int) -> None:
    whole, ranks = (StrategyRanks(strategy, world_size, start(np.float32)) for _ in range(2))
    for step in range(12):
        run(strategy, world_size, 1, np.float32, whole, step)
        run(strategy, world_size, 1, np.float32, ranks, step)
        states = [copy.deepcopy(session.state()) for session in ranks.sessions]
        ranks.sessions = [strategy.session(each, rank, world_size) for rank, each in enumerate(ranks.replicas)]
        for session, state in zip(ranks.sessions, states, strict=True):
            session.load_state(state)
        ranks.restart(ranks.under_way)
    np.testing.assert_array_equal(everybody(ranks), everybody(whole))


@pytest.mark.parametrize("graph", ["ring", "exponential", "random"])
@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize(("num_kept", "num_new"), [(4, 0), (3, 1), (1, 0)])
def test_messages_of_gossip_reach_the_ranks_that_are_left(graph, overlap: int, num_kept: int, num_new: int) -> None:
    """They go to the partners among the new members. A rank that joins has sent none."""
    strategy, world_size = Gossip(graph=graph, overlap=overlap), num_kept + num_new
    before, after = run(strategy, 5, 6), StrategyRanks(strategy, world_size, start())
    states = [copy.deepcopy(session.state()) for session in before.sessions]
    total = np.zeros(N + 1)  # of parameters times weights, and of weights
    for rank in range(world_size):
        own = states[rank]["own"] if rank < num_kept else after.sessions[rank].state()["own"]
        parameters = before.parameters(rank if rank < num_kept else 0)
        after.replicas[rank].write(range(len(SHAPE)), parameters)
        after.sessions[rank].load_state({"shared": states[0]["shared"], "own": own})
        total += own["weight"] * np.append(parameters, 1.0) + np.sum(own["messages"], axis=0)
    after.steps = 6
    after.restart(before.under_way)
    after.finish()
    np.testing.assert_allclose(everybody(after), np.tile(total[:-1] / total[-1], (world_size, 1)), rtol=0, atol=1e-12)


@sizes
@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_at_the_end_all_ranks_have_the_same_parameters(strategy, world_size: int) -> None:
    """The mean of all ranks, with what codecs have kept back; with EASGD the centre; with Strom what all have."""
    ranks = run(strategy, world_size, 7)
    states = [copy.deepcopy(session.state()) for session in ranks.sessions]
    owns, shared, before = [state["own"] for state in states], states[0]["shared"], everybody(ranks)
    ranks.finish()
    after = everybody(ranks)
    if isinstance(strategy, EASGD):
        expected = shared["centre"]
    elif isinstance(strategy, Strom):
        expected = shared["common"]
    elif isinstance(strategy, DiLoCo | SlowMo):  # rests of common parameters minus own ones
        expected = np.mean(before - [np.concatenate(own["rests"]) for own in owns], axis=0)
    elif isinstance(strategy, Gossip):
        expected = np.mean(before * [[own["weight"]] for own in owns], axis=0)
    else:
        has_rest = owns[0]["rest"].size > 0
        expected = np.mean(before + [own["rest"] if has_rest else np.zeros(N) for own in owns], axis=0)
    assert len({parameters.tobytes() for parameters in after}) == 1
    np.testing.assert_allclose(after[0], expected, rtol=0, atol=1e-12)


@sizes
@pytest.mark.parametrize(("period", "overlap"), [(1, 0), (1, 1), (3, 2)])
def test_gossip_ends_with_the_mean_of_all_ranks(world_size: int, period: int, overlap: int) -> None:
    """Also of what is under way. Updates that do not depend on the parameters change the mean by their own mean."""
    ranks = run(Gossip(period=period, overlap=overlap), world_size, 7)
    ranks.finish()
    mean = np.mean([update(step, rank) for step in range(7) for rank in range(world_size)], axis=0) * 7
    np.testing.assert_allclose(everybody(ranks), np.concatenate(start()) + np.tile(mean, (world_size, 1)), atol=1e-12)


@pytest.mark.parametrize(("period", "overlap"), [(1, 1), (1, 2), (1, 8), (4, 4)])
def test_gossip_with_overlap_trains_as_without(period: int, overlap: int) -> None:
    """Gradient descent on a parabola: with many messages under way, weights are small, and updates are not divided."""
    ranks = StrategyRanks(Gossip(period=period, overlap=overlap), 4, start())
    for _ in range(100):
        ranks.step([-0.2 * ranks.parameters(rank) for rank in range(4)])
    ranks.finish()
    assert np.abs(everybody(ranks)).max() < 0.1


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_training_goes_on_after_its_end(strategy) -> None:
    """Ranks that have finished go on as ranks do that begin with these parameters, weights and velocities."""
    ranks = run(strategy, 4, 5)
    ranks.finish()
    middle = everybody(ranks)
    run(strategy, 4, 8, ranks=ranks, first=5)
    ranks.finish()
    assert len({parameters.tobytes() for parameters in everybody(ranks)}) == 1
    updates = np.mean([update(step, rank) for step in range(5, 13) for rank in range(4)], axis=0) * 8
    if isinstance(strategy, LocalSGD | PostLocalSGD | Gossip):
        np.testing.assert_allclose(everybody(ranks), middle + updates, rtol=0, atol=1e-7)


@pytest.mark.parametrize("strategy", [LocalSGD(period=3), DiLoCo(period=3), PostLocalSGD(start=6), SlowMo(period=6)])
def test_nothing_is_exchanged_at_the_end_if_all_ranks_have_the_same_parameters(strategy) -> None:
    ranks = run(strategy, 3, 6)
    before, sent = everybody(ranks), ranks.sent.copy()
    ranks.finish()
    np.testing.assert_array_equal(everybody(ranks), before)
    np.testing.assert_array_equal(ranks.sent, sent)


def test_periods_save_bytes() -> None:
    dense = 2 * N * 4 * 3 / 4  # what a ring sends in a step
    for period in (1, 4, 16):
        if period > 1:
            ranks = run(LocalSGD(period=period), 4, 32, np.float32)
            assert ranks.sent.max() / 32 < 1.1 * dense / period
    ranks = run(DiLoCo(period=16, codec=Int8(block=16), fragments=2), 4, 32, np.float32)
    assert ranks.sent.max() / 32 < 0.6 * dense / 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(period=0),
        lambda: LocalSGD(weights="heavy"),
        lambda: LocalSGD(weights="samples", codec=Int8()),
        lambda: LocalSGD(period=1, weights="samples"),
        lambda: LocalSGD(period=1, codec=Int8()),
        lambda: LocalSGD(codec="int8"),
        lambda: LocalSGD(codec=Int8),
        lambda: EASGD(codec=8),
        lambda: DiLoCo(codec="int8"),
        lambda: DiLoCo(outer=0.7),
        lambda: DiLoCo(outer=Nesterov),
        lambda: PostLocalSGD(start=-1),
        lambda: PostLocalSGD(start=1, then=DiLoCo()),
        lambda: DiLoCo(period=4, overlap=4),
        lambda: DiLoCo(period=2, fragments=3),
        lambda: DiLoCo(mix=1.0),
        lambda: DiLoCo(mix="steps"),
        lambda: Nesterov(0.0),
        lambda: SlowMo(momentum=1.0),
        lambda: EASGD(beta=0.0),
        lambda: Gossip(graph="torus"),
        lambda: Strom(threshold=0.0),
        lambda: Strom(threshold=0.1, overlap=-1),
        lambda: Strom(threshold=0.1, smallest=0.2),
        lambda: Strom(threshold=0.1, smallest=0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()
