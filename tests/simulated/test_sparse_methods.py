"""All sparse methods, their ranks in lockstep: what must hold for every one of them, and what each one promises."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.sparse.dense import Dense
from totalreduce.sparse.gaussiank import GaussianK
from totalreduce.sparse.gtopk import GTopk
from totalreduce.sparse.methods import METHODS
from totalreduce.sparse.oktopk import OkTopk
from totalreduce.sparse.powersgd import PowerSGD
from totalreduce.sparse.shared import SharedTopk
from totalreduce.sparse.topka import TopkA
from totalreduce.sparse.topkdsa import TopkDSA
from totalreduce.testing.sparse_conformance import Round, SparseRanks, check_method, check_round, random_gradients

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)
DENSE = ("dense", "powersgd", "coded")
#: Those whose ranks each choose the k largest of what they have.
LOCAL = ("topka", "gtopk", "topkdsa", "oktopk")


def make(name: str, density: float = 0.1, **options):
    """A method's settings, for those that have them."""
    return METHODS[name](**({} if name in DENSE else {"density": density}), **options)


def layouts(n: int) -> list[tuple[tuple[int, ...], ...]]:
    """A bucket of n elements: one segment; several, one of them empty; matrices and a vector."""
    third = n // 3
    return [((n,),), ((third,), (0,), (n - third,)), ((n // 13, 13), (n % 13,))]


def run(method, world_size: int, n: int, steps: int, gradients=None, *, checked: bool = True) -> list[Round]:
    """Some steps of one segment, each of them checked."""
    ranks, gradients = SparseRanks(method, world_size, ((n,),)), gradients or random_gradients(n)
    done = []
    for step in range(steps):
        done.append(ranks.step([gradients(step, rank) for rank in range(world_size)]))
        if checked:
            check_round(done[-1], moves=isinstance(method, GTopk))
    return done


def test_all_methods_are_registered_under_their_names() -> None:
    assert list(METHODS) == ["dense", "topka", "gtopk", "topkdsa", "gaussiank", "oktopk", "shared", "powersgd", "coded"]
    for name in METHODS:
        assert make(name).name == name
        assert make(name) == make(name)
        assert hash(make(name)) == hash(make(name))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * (size in (2, 5, 7) or (size == 8 and name != "oktopk")))
        for name in METHODS
        for size in WORLD_SIZES
    ],
)
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
    k = n if name in ("dense", "coded") else 0 if density == 0 or n == 0 else max(1, round(density * n))
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


# What each method promises.


def received(done: Round) -> int:
    return int(done.traffic.received.max())


def test_ok_topk_sends_what_it_promises_and_selects_what_is_wanted() -> None:
    """The project's goal: 3.2 bytes per element, twice, whatever the number of ranks, once thresholds are known."""
    n, world_size = 2_000_000, 8
    k = n // 100
    rounds = run(OkTopk(density=0.01), world_size, n, 4, quick_gradients(n), checked=False)
    for done in rounds:
        assert abs(done.reports[0].applied - k) < 0.05 * k
        assert received(done) < 1.15 * 2 * 3.2 * k * 7 / 8
    for done in rounds[2:]:
        assert received(done) < 1.02 * 2 * 3.2 * k * 7 / 8
        assert done.traffic.received.max() < 1.10 * done.traffic.received.mean()


def quick_gradients(n: int):
    """Heavy-tailed ones in little time: one array, another piece of it for each step and rank."""
    pool = np.random.default_rng(7).standard_normal(n + 100_000, np.float32)
    pool *= np.abs(pool)

    def gradient(step: int, rank: int) -> np.ndarray:
        begin = (997 * step + 6151 * rank) % 100_000
        return pool[begin : begin + n].copy()

    return gradient


def bytes_by_world_size(method, n: int, world_sizes=(2, 4, 8, 16)) -> np.ndarray:
    gradients = quick_gradients(n)
    return np.array([received(run(method, size, n, 3, gradients, checked=False)[-1]) for size in world_sizes])


def test_bytes_grow_with_the_number_of_ranks_as_each_method_promises() -> None:
    sizes, n = np.array([2, 4, 8, 16]), 100_000
    linear = bytes_by_world_size(TopkA(density=0.01), n) / (sizes - 1)
    assert linear.max() < 1.02 * linear.min()
    logarithmic = bytes_by_world_size(GTopk(density=0.01), n) / np.log2(sizes)
    assert logarithmic.max() < 1.02 * logarithmic.min()
    flat = bytes_by_world_size(SharedTopk(density=0.01), n)
    assert flat[-1] < 2 * flat[0]
    flat = bytes_by_world_size(PowerSGD(), n) / ((sizes - 1) / sizes)
    assert flat.max() < 1.02 * flat.min()


def test_bytes_of_ok_topk_do_not_grow_with_the_number_of_ranks() -> None:
    sizes, n = np.array([2, 4, 8, 16]), 2_000_000
    flat = bytes_by_world_size(OkTopk(density=0.01), n) / ((sizes - 1) / sizes)
    assert flat.max() < 1.10 * flat.min()


def test_regions_of_ok_topk_follow_an_embedding_whose_first_rows_are_hot() -> None:
    """90 % of the gradient in 1 % of the rows: all of them are sent, and a few of the others."""
    n, world_size, dim = 400_000, 8, 64
    rows = n // dim
    hot = rows // 100 * dim

    def embedding(step: int, rank: int) -> np.ndarray:
        gradient = np.random.default_rng([step, rank]).standard_normal(n, np.float32)
        gradient[:hot] *= 900
        return gradient

    assert np.abs(embedding(0, 0)[:hot]).sum() > 0.89 * np.abs(embedding(0, 0)).sum()
    later = run(OkTopk(density=0.01), world_size, n, 10, embedding)[2:]
    regions = np.array([done.reports[0].imbalance for done in later])
    assert regions.mean() < 1.10
    assert regions.max() < 1.15
    totals = np.sum([done.traffic.received for done in later], axis=0)
    assert totals.max() < 1.10 * totals.mean()
    for done in later:
        assert done.traffic.received.max() < 1.10 * done.traffic.received.mean()
        assert abs(done.reports[0].applied - n // 100) < 0.05 * n // 100


def lopsided(n: int, world_size: int):
    """Every rank has elements of its own, as many everywhere, but those of the first quarter are far larger."""

    def gradient(step: int, rank: int) -> np.ndarray:
        own = np.random.default_rng([step, rank]).random(n, np.float32) + 1
        own[: n // 4] *= 100
        own[np.arange(n) % world_size != rank] = 0
        return own

    return gradient


def test_balancing_hands_on_and_changes_nothing_else() -> None:
    n, world_size = 20_000, 8
    balanced, direct = (
        run(OkTopk(density=1 / 8, balance=balance), world_size, n, 3, lopsided(n, world_size)) for balance in (1.5, 1e9)
    )
    for one, other in zip(balanced, direct, strict=True):
        assert one.bits == other.bits
    assert balanced[0].traffic.rounds == direct[0].traffic.rounds + 1
    assert balanced[0].traffic.sent.max() < 0.8 * direct[0].traffic.sent.max()


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"balance": 1.0},
        {"threshold_interval": 3},
        {"partition_interval": 1},
        {"threshold_interval": 2, "partition_interval": 2, "balance": 1.0, "values": "float32"},
    ],
    ids=str,
)
def test_ok_topk_with_other_settings(world_size: int, options: dict) -> None:
    for gradients in (None, lopsided(3000, world_size)):
        check_method(OkTopk(density=0.05, **options), world_size, ((3000,),), gradients=gradients, steps=5)
    check_method(OkTopk(density=0.5, **options), world_size, ((1,), (world_size,)), steps=4)


def test_ok_topk_looks_for_thresholds_and_cuts_when_it_should() -> None:
    n = 50_000
    ranks, thresholds = SparseRanks(OkTopk(density=0.02, threshold_interval=3), 4, ((n,),)), []
    for step in range(9):
        done = ranks.step([quick_gradients(n)(step, rank) for rank in range(4)])
        assert 0.5 * n / 50 < done.reports[0].applied < 3 * n / 50
        thresholds.append([session.state()["threshold"] for session in ranks.sessions])
    assert all(len(set(bounds)) == 1 for bounds in thresholds)
    assert [one == other for one, other in itertools.pairwise(thresholds)] == [True, True, False] * 2 + [True, True]
    plain = run(OkTopk(density=0.02), 4, n, 7, quick_gradients(n))
    assert [done.traffic.rounds for done in plain[3:]] == [4] * 4
    cut = run(OkTopk(density=0.02, partition_interval=2), 4, n, 7, quick_gradients(n))
    assert [done.traffic.rounds for done in cut[3:]] == [4, 5, 4, 5]


def test_a_region_of_topk_dsa_travels_as_plain_values_where_that_is_shorter() -> None:
    n, world_size = 8000, 8
    for values, width in (("bfloat16", 2), ("float32", 4)):
        for done in check_method(TopkDSA(density=1.0, values=values), world_size, ((n,),)):
            # Split and gather, plain; what says so, and gaps of all elements, a bit each.
            assert received(done) < (2 * width + 0.3) * n * 7 / 8 + 1000
    sparse = run(TopkDSA(density=0.01), world_size, 80_000, 2)[1]
    assert received(sparse) < 4 * 3.3 * 800 * 2

    def half(step: int, rank: int) -> np.ndarray:
        gradient = random_gradients(n)(step, rank)
        gradient[n // 2 :] = 0
        return gradient

    for done in check_method(TopkDSA(density=0.4), world_size, ((n,),), gradients=half):
        assert not done.applied[n // 2 :].any()


def test_gaussian_k_corrects_its_threshold_whatever_the_distribution() -> None:
    n, k = 30_000, 300
    shapes = {
        "normal": lambda x: x,
        "heavy tails": lambda x: x**5,
        "far heavier": lambda x: np.exp(3 * x),
        "light tails": np.tanh,
        "shifted": lambda x: x + 10,
        "one outlier": lambda x: np.where(np.arange(n) == 5, np.float32(1e30), x),
        "mostly zero": lambda x: np.where(np.arange(n) % 50, np.float32(0), x),
        "tiny": lambda x: x * np.float32(1e-40),
    }
    for name, shape in shapes.items():
        rounds = run(
            GaussianK(density=0.01), 1, n, 2, lambda step, rank, shape=shape: shape(random_gradients(n)(step, 0))
        )
        for done in rounds:
            assert 3 * k / 4 <= done.reports[0].selected <= 5 * k / 4, name
            assert done.reports[0].rescans <= 20 * 2, name


def test_gaussian_k_takes_some_where_it_runs_out_of_passes() -> None:
    heavy = random_gradients(5000)(0, 0) ** 7
    for passes in (1, 2, 3):
        (done,) = run(GaussianK(density=0.01, passes=passes), 1, 5000, 1, lambda *_: heavy.copy())
        assert 0 < done.reports[0].selected <= 63
        assert done.reports[0].rescans <= passes


def test_gtopk_keeps_what_it_drops_where_it_was_dropped() -> None:
    """Four ranks with other elements each: the two weaker ones of a pair stay with the rank that merged them."""
    gradients = np.zeros((4, 8), np.float32)
    for rank in range(4):
        gradients[rank, 2 * rank : 2 * rank + 2] = 1.0 + rank
    ranks = SparseRanks(GTopk(density=0.25), 4, ((8,),))
    done = ranks.step([gradient.copy() for gradient in gradients])
    assert done.applied.tolist() == [0, 0, 0, 0, 0, 0, 4, 4]
    assert done.residuals[0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert done.residuals[1].tolist() == [0] * 8
    assert done.residuals[2].tolist() == [0, 0, 0, 0, 3, 3, 0, 0]
    assert done.residuals[3].tolist() == [0] * 8


def test_gtopk_takes_as_many_rounds_as_the_tree_is_high() -> None:
    for world_size in (1, 2, 3, 4, 5, 7, 8, 9, 16):
        (done,) = run(GTopk(density=0.1), world_size, 100, 1)
        assert done.traffic.rounds == 1 + math.ceil(math.log2(world_size)) + 1


def test_every_rank_leads_in_turn() -> None:
    rounds = run(SharedTopk(density=0.1), 3, 200, 7)
    assert [[report.selected for report in done.reports].index(20) for done in rounds] == [0, 1, 2, 0, 1, 2, 0]
    for step, done in enumerate(rounds):
        leader = done.accumulated[step % 3]
        assert np.array_equal(done.updates[0].indices, np.sort(np.argsort(-np.abs(leader), kind="stable")[:20]))


def low_rank(rows: int, columns: int, rank: int):
    def gradient(step: int, worker: int) -> np.ndarray:
        generator = np.random.default_rng([step, worker])
        left, right = np.random.default_rng(step).standard_normal((rows, rank)), generator.random((rank, columns))
        return (left @ right).astype(np.float32).ravel()

    return gradient


def test_power_sgd_is_exact_where_the_rank_suffices() -> None:
    """Also of a fourth-order tensor, which is a matrix of its first dimension by the others."""
    for shape in ((40, 60), (40, 15, 2, 2)):
        for done in check_method(PowerSGD(rank=3), 3, (shape,), gradients=low_rank(40, 60, 3)):
            had = np.sum(done.accumulated, axis=0)
            assert np.abs(done.applied - had).max() < 1e-4 * np.abs(had).max()


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_power_sgd_of_other_ranks(rank: int) -> None:
    """Also where it is more than a matrix can have, and where a matrix lies at an odd address."""
    check_method(PowerSGD(rank=rank), 3, ((3,), (61, 37), (5, 300), (20, 20, 3)))


def test_power_sgd_approaches_the_best_approximation() -> None:
    """By its warm start: the same matrix again and again, without residuals, as in a power iteration."""
    matrix = np.random.default_rng(0).standard_normal((60, 80)) * 0.8 ** np.arange(80)
    best = np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[4:])
    ranks, errors = SparseRanks(PowerSGD(rank=4), 1, ((60, 80),)), []
    for _ in range(12):
        done = ranks.step([matrix.astype(np.float32).ravel()])
        errors.append(float(np.linalg.norm(matrix.ravel() - done.applied)) / best)
        ranks.residuals[0][...] = 0
    assert errors[0] > 1.1
    assert errors[-1] < 1.01


def test_power_sgd_sends_factors_of_what_becomes_shorter_and_the_rest_whole() -> None:
    shapes = ((100, 50), (30,), (4, 5), (0, 7), (1, 64), (20, 5, 5))
    (done, *_) = check_method(PowerSGD(rank=4), 2, shapes)
    numbers = 4 * (100 + 50) + 30 + 20 + 0 + 64 + 4 * (20 + 25)
    assert done.reports[0].k == numbers
    assert received(done) == 4 * numbers + 1  # and the greeting
    plain = slice(5000, 5000 + 30 + 20 + 64)
    assert not np.any([residual[plain] for residual in done.residuals])


def test_power_sgd_recovers_from_zeros_and_refuses_to_overflow() -> None:
    ranks, normal = SparseRanks(PowerSGD(), 2, ((50, 40),)), random_gradients(2000)
    for step in range(6):
        gradients = [normal(step, rank) if step % 3 else np.zeros(2000, np.float32) for rank in range(2)]
        if step % 3 == 0:
            for residual in ranks.residuals:
                residual[...] = 0
        done = ranks.step(gradients)
        check_round(done)
        assert done.applied.any() == bool(step % 3)
    state = ranks.sessions[0].state()["factors"].tobytes()
    done = ranks.step([np.full(2000, 3e37, np.float32) for _ in range(2)])
    assert done.updates == [None, None]
    assert ranks.sessions[0].state()["factors"].tobytes() == state


def test_dense_applies_everything() -> None:
    for done in run(Dense(), 3, 100, 2):
        assert not np.any(done.residuals)
        assert np.allclose(done.applied, np.sum(done.accumulated, axis=0), rtol=1e-6)
