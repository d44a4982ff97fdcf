"""Codecs: what is decoded, what is kept, sizes, damaged codes; each beside a reference in plain NumPy."""

import math

import numpy as np
import pytest

from totalreduce.codecs.codec import TOO_LARGE, Codec
from totalreduce.codecs.codecs import CODECS
from totalreduce.codecs.half import Half
from totalreduce.codecs.int4 import Int4
from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.onebit import OneBit
from totalreduce.codecs.plain import Plain
from totalreduce.codecs.ternary import Ternary
from totalreduce.codecs.threshold import Threshold
from totalreduce.codecs.topk import Topk
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.kernels.quantisation import LIMIT

CASES = [
    Plain(),
    Half(),
    Half(dtype="float16"),
    Int8(),
    Int8(block=7, stochastic=True),
    Int4(),
    Int4(block=6, stochastic=True),
    OneBit(),
    OneBit(block=64),
    Ternary(),
    Ternary(block=10),
    Threshold(threshold=1.5),
    Topk(density=0.05),
    Topk(density=0.3, values="float32"),
]
SIZES = [0, 1, 2, 5, 63, 64, 65, 127, 640, 641, 1009, 20_011]
codecs = pytest.mark.parametrize("codec", CASES, ids=str)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32) * 3


def encoded(codec: Codec, values: np.ndarray, *, seed: int = 5, keeps: bool = True) -> np.ndarray:
    room = np.full(codec.bytes_max(values.size), 0xAB, np.uint8)
    size = codec.encode(values, room, seed=seed, keeps=keeps)
    assert 0 <= size <= room.size
    assert not codec.has_fixed_size or size == room.size
    return room[:size]


def decoded(codec: Codec, code: np.ndarray, count: int) -> np.ndarray:
    out = np.full(count, np.nan, np.float32)
    codec.decode(code, out)
    return out


def plain_blocks(values: np.ndarray, block: int):
    for begin in range(0, values.size, block):
        yield slice(begin, begin + block)


def reference(codec: Codec, values: np.ndarray) -> np.ndarray | None:
    """Return what a codec that does not round at random makes of the values."""
    out = np.zeros_like(values)
    match codec:
        case Plain():
            return values.copy()
        case Half(dtype="float16"):
            return values.astype(np.float16).astype(np.float32)
        case Half():
            bits = values.view(np.uint32).astype(np.uint64)
            return (((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)).view(np.float32)
        case Int8(stochastic=False) | Int4(stochastic=False):
            most = np.float32(127 if isinstance(codec, Int8) else 7)
            for part in plain_blocks(values, codec.block):
                largest = np.abs(values[part]).max()
                out[part] = np.rint(values[part] * (most / largest)) * (largest / most)
            return out
        case OneBit():
            for part in plain_blocks(values, codec.block):
                negative = np.signbit(values[part])
                for sign in (False, True):
                    if (negative == sign).any():
                        out[part][negative == sign] = values[part][negative == sign].mean(dtype=np.float64)
            return out
        case Threshold():
            beyond = np.abs(values) >= np.float32(codec.threshold)
            return np.where(beyond, np.copysign(np.float32(codec.threshold), values), np.float32(0))
        case Topk():
            order = np.argsort(-np.abs(values), kind="stable")[: max(1, round(codec.density * values.size))]
            out[order] = values[order]
            return out if codec.values == "float32" else reference(Half(), out)
    return None


@codecs
@pytest.mark.parametrize("count", SIZES)
def test_what_is_decoded_and_kept_is_what_was_encoded(codec: Codec, count: int) -> None:
    values = numbers(count)
    rest = values.copy()
    code = encoded(codec, rest)
    got = decoded(codec, code, count)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got.astype(np.float64) + rest, values, rtol=0, atol=1e-6)
    expected = reference(codec, values) if count else values
    if expected is not None:
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


@codecs
def test_without_keeps_the_values_stay(codec: Codec) -> None:
    values = numbers(1009)
    untouched = values.copy()
    code = encoded(codec, untouched, keeps=False)
    np.testing.assert_array_equal(untouched, values)
    np.testing.assert_array_equal(code, encoded(codec, values.copy()))


@codecs
def test_a_code_is_added(codec: Codec) -> None:
    values, onto = numbers(1009), numbers(1009, seed=1)
    code = encoded(codec, values)
    out = onto.copy()
    codec.decode(code, out, adds=True)
    np.testing.assert_array_equal(out, onto + decoded(codec, code, 1009))


@codecs
def test_a_code_may_lie_anywhere(codec: Codec) -> None:
    code = encoded(codec, numbers(641))
    moved = np.empty(code.size + 3, np.uint8)
    moved[3:] = code
    np.testing.assert_array_equal(decoded(codec, moved[3:], 641), decoded(codec, code, 641))


@codecs
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 1.1e30])
@pytest.mark.parametrize("place", [0, 640, 1008])
def test_values_that_are_too_large_are_refused(codec: Codec, number: float, place: int) -> None:
    values = numbers(1009)
    values[place] = number
    assert codec.encode(values, np.empty(codec.bytes_max(1009), np.uint8), keeps=True) == TOO_LARGE


@codecs
def test_zeros_and_tiny_values_are_kept(codec: Codec) -> None:
    values = np.zeros(200, np.float32)
    values[3::7] = 1e-38
    rest = values.copy()
    got = decoded(codec, encoded(codec, rest), 200)
    np.testing.assert_allclose(got + rest, values, rtol=1e-6, atol=1e-45)
    assert np.abs(got).max() <= 2e-38


@codecs
def test_the_largest_values_stay_finite(codec: Codec) -> None:
    values = np.full(130, LIMIT, np.float32)
    values[::3] *= -1
    rest = values.copy()
    got = decoded(codec, encoded(codec, rest), 130)
    assert np.isfinite(got).all()
    assert np.isfinite(rest).all()


@pytest.mark.parametrize("codec", [Int8(stochastic=True), Int4(stochastic=True), Ternary()], ids=str)
def test_random_rounding_is_unbiased(codec: Codec) -> None:
    assert codec.is_unbiased
    values = numbers(1000)
    draws = np.stack([decoded(codec, encoded(codec, values.copy(), seed=seed), 1000) for seed in range(2000)])
    step = np.abs(values).max() / {"int8": 127, "int4": 7, "ternary": 1}[codec.name]
    # A value next to one that can be expressed may never become the other one.
    spread = np.maximum(draws.std(axis=0) / math.sqrt(len(draws)), step / len(draws))
    off = np.abs(draws.mean(axis=0, dtype=np.float64) - values) / spread
    assert off.max() < 5
    assert off.mean() < 1  # 0.8 for normal numbers


@pytest.mark.parametrize("codec", [Int8(stochastic=True), Int4(stochastic=True), Ternary()], ids=str)
def test_the_seed_decides(codec: Codec) -> None:
    values = numbers(1000)
    same = [encoded(codec, values.copy(), seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(same[0], same[1])
    assert (same[0] != same[2]).any()


def test_sizes() -> None:
    count = 1 << 20
    bits = {str(codec): 8 * codec.bytes_max(count) / count for codec in CASES if codec.has_fixed_size}
    assert bits["Int8(block=256, stochastic=False)"] == 8.125
    assert bits["Int4(block=128, stochastic=False)"] == 4.25
    assert bits["OneBit(block=512)"] == 1.125
    assert bits["Ternary(block=640)"] < 1.66
    values = numbers(count)
    beyond = np.count_nonzero(np.abs(values) >= 12)
    assert beyond > 50
    assert encoded(Threshold(threshold=12.0), values).size < 4 + 3 * beyond


@codecs
def test_damaged_codes_are_refused(codec: Codec) -> None:
    """Any bytes are a code, or an error: nothing else happens, and nothing infinite comes out of scales."""
    random = np.random.default_rng(3)
    code = encoded(codec, numbers(641))
    out = np.zeros(641, np.float32)
    for size in (0, 1, 4, code.size - 1, code.size + 1):
        # An empty code may list no value, and a list may be longer than necessary (``blocks``).
        if codec.has_fixed_size or 0 < size < code.size:
            with pytest.raises(ProtocolError):
                codec.decode(np.resize(code, size), out)
    for _ in range(300):
        broken = code.copy()
        broken[random.integers(0, code.size, 3)] = random.integers(0, 256, 3)
        try:
            codec.decode(broken, out)
        except ProtocolError:
            continue
        assert np.isfinite(out).all() or isinstance(codec, Plain | Half)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Int8(block=0),
        lambda: Int4(block=3),
        lambda: Int4(block=1 << 40),
        lambda: Ternary(block=5 << 30),
        lambda: OneBit(block=100),
        lambda: Ternary(block=12),
        lambda: Threshold(threshold=0.0),
        lambda: Topk(density=0.0),
        lambda: Topk(density=1.5),
        lambda: Half(dtype="float8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_codecs_by_name() -> None:
    assert {type(codec) for codec in CASES} == {CODECS[name] for name in CODECS}
    with pytest.raises(ConfigurationError, match="codec 'int9' is not known"):
        CODECS["int9"]
