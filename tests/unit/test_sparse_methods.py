"""All sparse methods, their ranks in lockstep: what must hold for every one of them, and what each one promises."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.sparse.actions import Alltoall
from totalreduce.sparse.dense import Dense
from totalreduce.sparse.gaussiank import GaussianK
from totalreduce.sparse.gtopk import GTopk
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.shared import SharedTopk
from totalreduce.sparse.topka import TopkA
from totalreduce.sparse.topkdsa import TopkDSA
from totalreduce.testing.lockstep import run_exchanges
from totalreduce.testing.sparse_conformance import Round, SparseRanks, check_method, check_round, random_gradients

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)
DENSE = ("dense", "powersgd")
#: Those whose ranks each choose the k largest of what they have.
LOCAL = ("topka", "gtopk", "topkdsa", "oktopk")


def make(name: str, density: float = 0.1, **options):
    """A method's settings, for those that have them."""
    return METHODS[name](**({} if name in DENSE else {"density": density}), **options)


def layouts(n: int) -> list[tuple[tuple[int, ...], ...]]:
    """A bucket of n elements: one segment; several, one of them empty; matrices and a vector."""
    third = n // 3
    return [((n,),), ((third,), (0,), (n - third,)), ((n // 13, 13), (n % 13,))]


def run(method, world_size: int, n: int, steps: int, gradients=None, **options) -> list[Round]:
    """Some steps of one segment, each of them checked."""
    ranks, gradients = SparseRanks(method, world_size, ((n,),)), gradients or random_gradients(n)
    done = []
    for step in range(steps):
        done.append(ranks.step([gradients(step, rank) for rank in range(world_size)]))
        check_round(done[-1], moves=isinstance(method, GTopk), **options)
    return done


def test_all_methods_are_registered_under_their_names() -> None:
    assert list(METHODS) == ["dense", "topka", "gtopk", "topkdsa", "gaussiank", "oktopk", "shared", "powersgd"]
    for name in METHODS:
        assert make(name).name == name
        assert make(name) == make(name)
        assert hash(make(name)) == hash(make(name))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_conformance(name: str, world_size: int) -> None:
    """Everything that ``check_method`` asks for, at all sizes and densities; layouts and kinds of values in turn."""
    sizes = sorted({0, 1, world_size - 1, world_size, world_size + 1, 17, 1000, 4099})
    turns = itertools.count(world_size)
    for n in sizes:
        for density in [0.0] if name in DENSE else sorted({0.0, 1 / max(n, 1), 0.1, 1.0}):
            turn = next(turns)
            method = make(name, density)
            if hasattr(method, "values"):
                method = replace(method, values=("bfloat16", "float32")[turn % 2])
            for round_ in check_method(method, world_size, layouts(n)[turn % 3], steps=3, moves=name == "gtopk"):
                check_selected(name, density, n, round_)


def check_selected(name: str, density: float, n: int, done: Round) -> None:
    """How many were chosen on every rank, and applied."""
    k = n if name == "dense" else 0 if density == 0 or n == 0 else max(1, round(density * n))
    some = [min(k, np.count_nonzero(accumulated)) for accumulated in done.accumulated]
    selected, applied = [report.selected for report in done.reports], done.reports[0].applied
    if name in LOCAL:
        assert selected == some
    if name == "gaussiank":
        assert all(3 * least / 4 <= count for least, count in zip(some, selected, strict=True))
        assert max(selected) <= 5 * k / 4
    if name == "shared":
        assert sorted(selected)[:-1] == [0] * (len(selected) - 1)
        assert applied == max(selected)
    if name == "gtopk":
        assert applied <= k
    if name in ("topka", "topkdsa", "gtopk", "oktopk"):
        assert applied > 0 or k == 0 or not any(some)
    if name in DENSE:
        assert applied == n
    assert {report.method for report in done.reports} == {name}


@pytest.mark.parametrize("name", METHODS)
def test_sixteen_ranks(name: str) -> None:
    check_method(make(name), 16, ((40, 30), (11,)), steps=2, moves=name == "gtopk")


@pytest.mark.parametrize("name", METHODS)
def test_every_rank_finds_what_is_not_finite_anywhere(name: str) -> None:
    """In the first and in the last element, in the gradient and in the sum with the residual, and with k = 0."""
    n, world_size = 300, 3
    for density, value, place, culprit in itertools.product((0.0, 0.1), (np.nan, np.inf, 3e38), (0, n - 1), range(3)):
        ranks = SparseRanks(make(name, density), world_size, ((n // 10, 10),))
        ranks.step([random_gradients(n)(0, rank) for rank in range(world_size)])
        kept = [residual.tobytes() for residual in ranks.residuals]
        gradients = [random_gradients(n)(1, rank) for rank in range(world_size)]
        gradients[culprit][place] = value
        done = ranks.step(gradients)
        assert done.updates == [None] * world_size
        assert all(report.skipped for report in done.reports)
        assert [residual.tobytes() for residual in ranks.residuals] == kept


@pytest.mark.parametrize("name", METHODS)
def test_where_nobody_has_anything_nothing_is_applied(name: str) -> None:
    n = 500
    for done in check_method(make(name), 3, ((50, 10),), gradients=lambda *_: np.zeros(n, np.float32)):
        assert not done.applied.any()
        assert not np.any(done.residuals)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_equal_magnitudes_are_applied_at_last(name: str, world_size: int) -> None:
    """Signs: no threshold divides them. All that every rank has is as large as anything else."""
    n = 400

    def signs(step: int, rank: int) -> np.ndarray:
        return np.where(np.random.default_rng([step, rank]).random(n) < 0.5, np.float32(-0.5), np.float32(0.5))

    check_method(make(name), world_size, ((20, 20),), gradients=signs, moves=name == "gtopk")
    for fill in (signs, lambda step, rank: np.full(n, 0.25, np.float32)):
        rounds = run(make(name), world_size, n, 30, fill)
        touched = np.zeros(n, bool)
        for done in rounds:
            touched |= done.applied != 0
        assert touched.mean() > 0.9


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ok_topk_applies_some_of_what_is_equal_though_no_bound_is_near_k(world_size: int) -> None:
    """Everybody's selection is somewhere else, and all sums are equal: all or none reach a bound."""
    n = 800

    def apart(step: int, rank: int) -> np.ndarray:
        gradient = np.zeros(n, np.float32)
        gradient[rank * 100 : rank * 100 + 100] = 0.5
        return gradient

    for done in run(OkTopk(density=0.1), world_size, n, 6, apart):
        assert done.reports[0].applied > 0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in DENSE])
def test_what_was_applied_is_cleared_but_for_the_rounding(name: str) -> None:
    """In its simplest form: one rank, one step."""
    n, k = 1000, 100
    gradient = random_gradients(n)(0, 0)
    for values in ("float32", "bfloat16") if name != "shared" else ("float32",):
        options = {} if name == "shared" else {"values": values}
        (done,) = run(make(name, **options), 1, n, 1)
        update, residual = done.updates[0], done.residuals[0]
        if name not in ("gaussiank", "oktopk"):
            assert np.array_equal(update.indices, np.sort(np.argsort(-np.abs(gradient), kind="stable")[:k]))
        unsent = np.ones(n, bool)
        unsent[update.indices] = False
        assert residual[unsent].tobytes() == gradient[unsent].tobytes()
        cut_off = np.abs(residual[~unsent])
        assert (cut_off <= (np.abs(gradient[~unsent]) / 256 if values == "bfloat16" else 0.0)).all()
        assert values == "float32" or cut_off.any()


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_again_and_again_arrives(name: str) -> None:
    """Error feedback: over many steps, what was applied is what was given, but for the last few steps' residual."""
    n, world_size, steps = 600, 3, 60
    fixed = [random_gradients(n)(0, rank) for rank in range(world_size)]
    rounds = run(make(name), world_size, n, steps, lambda step, rank: fixed[rank].copy())
    applied = np.sum([done.applied for done in rounds], axis=0, dtype=np.float64)
    given = steps * np.sum(fixed, axis=0, dtype=np.float64)
    assert np.abs(given - applied).sum() < 0.35 * np.abs(given).sum()


@pytest.mark.parametrize("name", METHODS)
def test_another_number_of_ranks_goes_on_from_the_old_states(name: str) -> None:
    """What no longer fits is dropped; the residuals of ranks that are no more are others' now."""
    shapes, n = ((30, 20), (17,)), 617
    before = SparseRanks(make(name), 4, shapes)
    for step in range(3):
        before.step([random_gradients(n)(step, rank) for rank in range(4)])
    for world_size in (1, 3, 6):
        ranks = SparseRanks(make(name), world_size, shapes)
        for rank, session in enumerate(ranks.sessions):
            session.load_state(before.sessions[min(rank, 3)].state())
        for rank, residual in enumerate(before.residuals):
            ranks.residuals[rank % world_size] = ranks.residuals[rank % world_size] + residual
        for step in range(3, 6):
            done = ranks.step([random_gradients(n)(step, rank) for rank in range(world_size)])
            check_round(done, moves=name == "gtopk")


@pytest.mark.parametrize("name", METHODS)
def test_density_falls_while_it_warms_up(name: str) -> None:
    if name in DENSE:
        with pytest.raises(TypeError):
            METHODS[name](warmup_steps=3)
        return
    n, method = 4096, make(name, 1 / 64, warmup_steps=4, warmup_density=0.25)
    counts = [max(report.k for report in done.reports) for done in run(method, 2, n, 6)]
    assert counts == [1024, 512, 256, 128, 64, 64]
    check_method(method, 3, ((n,),), steps=5, moves=name == "gtopk")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: TopkA(density=-0.1),
        lambda: TopkA(density=1.5),
        lambda: TopkA(density=math.nan),
        lambda: SharedTopk(warmup_density=2.0),
        lambda: SharedTopk(warmup_steps=-1),
        lambda: OkTopk(density=0.0, warmup_steps=5),
        lambda: TopkDSA(values="float16"),
        lambda: OkTopk(threshold_interval=0),
        lambda: OkTopk(partition_interval=0),
        lambda: OkTopk(balance=0.5),
        lambda: OkTopk(balance=math.nan),
        lambda: GaussianK(passes=0),
        lambda: PowerSGD(rank=0),
        lambda: PowerSGD(seed=-1),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong) -> None:
    with pytest.raises(ConfigurationError):
        wrong()


@pytest.mark.parametrize("name", ["topka", "gtopk", "topkdsa", "oktopk", "shared"])
def test_blocks_that_are_damaged_on_the_way_raise(name: str) -> None:
    """Whatever a peer sends becomes a typed error or numbers, and nothing is written where it should not be."""
    n, generator = 2000, np.random.default_rng(0)
    errors = 0
    for _ in range(40):
        ranks = SparseRanks(make(name), 3, ((n,),))
        for rank, session in enumerate(ranks.sessions):
            session.accumulate(
                ranks._cut(random_gradients(n)(0, rank)), ranks._cut(ranks.residuals[rank]), 1.0
            )
        try:
            run_exchanges([damaging(session.exchange(np.ones(1, bool)), generator) for session in ranks.sessions])
        except ProtocolError:
            errors += 1
    assert errors > 5


def damaging(exchange, generator):
    """The same exchange, but some block that it is given has one wrong byte at its beginning."""
    reply = None
    while True:
        try:
            action = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield action
        if isinstance(reply, list) and not (isinstance(action, Alltoall) and reply[0].size == reply[-1].size == 1):
            victim = int(generator.integers(len(reply)))
            reply = list(reply)
            if reply[victim].size > 20:
                reply[victim] = reply[victim].copy()
                reply[victim][generator.integers(0, 10)] ^= 1 << generator.integers(0, 8)
    return None
