"""Compiled kernels and their twins in NumPy write the same bits, because both kinds of ranks may be in one job.

Those of lists are compared in ``test_selection_kernels``, ``test_coding`` and ``test_merging``.
"""

import inspect

import numpy as np
import plain_kernels as plain
import pytest

from totalreduce.kernels import coding, merging, quantisation, scattering, selection, updates

KERNELS = (coding, merging, quantisation, scattering, selection, updates)
BLOCK = 320  # a multiple of 64 for signs, of 5 for trits, of 2 for nibbles
SIZES = (0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 129, 33_000)


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_each_kernel_that_python_calls_has_a_twin_with_its_arguments(module) -> None:
    kernels = {name: kernel for name, kernel in vars(module).items() if hasattr(kernel, "signatures")}
    public = {name.lstrip("_"): kernels[name] for name in kernels if name in module.__all__ or name == "_histogram"}
    twins = next(twins for twins in plain.MODULES if twins.__name__.endswith(module.__name__.rpartition(".")[2]))
    assert public.keys() == set(twins.__all__) & {name.lstrip("_") for name in kernels}
    for name, kernel in public.items():
        assert list(inspect.signature(kernel.py_func).parameters) == list(
            inspect.signature(getattr(plain, name)).parameters
        )


def values_of(size: int, kind: str) -> np.ndarray:
    values = np.random.default_rng([size, len(kind)]).standard_normal(size).astype(np.float32)
    match kind:
        case "zeros":
            values[:] = np.where(np.arange(size) % 3, 0.0, -0.0)
        case "ties":
            values[:] = np.round(values * 2) / 4
        case "tiny":
            values *= np.float32(1e-30)
        case "denormal":
            values *= np.float32(1e-39)
        case "large":
            values *= np.float32(1e29)
    return values


KINDS = ("normal", "zeros", "ties", "tiny", "denormal", "large")
ODD = (np.nan, -np.nan, np.inf, -np.inf, 1.1e30)


def both(name: str, *arguments, of=quantisation) -> list[tuple]:
    """Call a kernel and its twin with copies of arrays; return what they return and the bytes of their arrays."""
    results = []
    for kernel in (getattr(of, name), getattr(plain, name)):
        own = [argument.copy() if isinstance(argument, np.ndarray) else argument for argument in arguments]
        returned = kernel(*own)
        results.append((returned, *(argument.tobytes() for argument in own if isinstance(argument, np.ndarray))))
    return results


#: By kernel: the scales of a block, the bytes of its codes, and the arguments between size of block and scales.
ENCODERS = {
    "bytes": (1, BLOCK, [(7, stochastic, keeps) for stochastic in (False, True) for keeps in (False, True)]),
    "nibbles": (
        1,
        BLOCK // 2,
        [(2**40 + 3, stochastic, keeps) for stochastic in (False, True) for keeps in (False, True)],
    ),
    "trits": (1, BLOCK // 5, [(5, keeps) for keeps in (False, True)]),
    "signs": (2, BLOCK // 8, [(keeps,) for keeps in (False, True)]),
}


def room(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    scales, code_bytes, _ = ENCODERS[name]
    blocks = -(-size // BLOCK)
    codes = np.full(blocks * code_bytes, 0x55, np.int8 if name == "bytes" else np.uint8)
    return np.full(scales * blocks, -9.0, np.float32), codes[:size] if name == "bytes" else codes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bytes", "nibbles", "trits"])
def test_codes_and_what_is_kept_are_the_same(name: str, kind: str) -> None:
    for size in SIZES:
        values, (scales, codes) = values_of(size, kind), room(name, size)
        for settings in ENCODERS[name][2]:
            ours, twins = both(f"encode_{name}", values, BLOCK, *settings, scales, codes)
            assert ours == twins
            assert ours[0] is True


@pytest.mark.parametrize("kind", KINDS)
def test_signs_and_means_are_the_same_but_for_the_order_of_sums(kind: str) -> None:
    for size in SIZES:
        values = values_of(size, kind)
        for (keeps,) in ENCODERS["signs"][2]:
            results = []
            for kernel in (quantisation.encode_signs, plain.encode_signs):
                rest, (means, codes) = values.copy(), room("signs", size)
                assert kernel(rest, BLOCK, keeps, means, codes)
                results.append((rest, means, codes))
            (rest, means, codes), (plain_rest, plain_means, plain_codes) = results
            assert codes.tobytes() == plain_codes.tobytes()
            largest = np.abs(values).max(initial=0.0) * 1e-4
            assert np.allclose(means, plain_means, rtol=1e-4, atol=largest)
            assert np.allclose(rest, plain_rest, rtol=1e-4, atol=largest)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ENCODERS)
def test_what_cannot_be_encoded_is_refused_by_both(name: str, odd: float) -> None:
    for place in (0, BLOCK, 3 * BLOCK + 10):
        values, (scales, codes) = values_of(3 * BLOCK + 11, "normal"), room(name, 3 * BLOCK + 11)
        values[place] = odd
        for settings in ENCODERS[name][2]:
            for kernel in (getattr(quantisation, f"encode_{name}"), getattr(plain, f"encode_{name}")):
                assert kernel(values.copy(), BLOCK, *settings, scales, codes) is False
        assert both("within_limit", values)[0][0] == both("within_limit", values)[1][0] == False  # noqa: E712


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_any_codes_become_the_same_values(name: str, adds: bool) -> None:
    generator = np.random.default_rng(1)
    for size in SIZES:
        scales, codes = room(name, size)
        scales[:] = generator.standard_normal(scales.size) * np.float32(2e30)
        codes.view(np.uint8)[:] = generator.integers(0, 256 if size % 2 else 243, codes.size)
        ours, twins = both(f"decode_{name}", scales, codes, BLOCK, adds, values_of(size, "large"))
        if name == "trits" and not ours[0]:  # the values of a damaged code are undefined
            ours, twins = ours[:1], twins[:1]
        assert ours == twins


def test_halves_are_the_same() -> None:
    halves = np.arange(0, 1 << 16, 3, dtype=np.uint32) << 16
    values = (halves[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel().view(np.float32)
    for keeps in (False, True):
        finite = values[np.isfinite(values)]
        ours, twins = both("round_halves", finite, keeps, np.zeros(finite.size, np.uint16))
        assert ours == twins
    ours, twins = both("round_values", values, of=coding)
    assert ours == twins


@pytest.mark.parametrize("count", [0, 1, 8, 777])
def test_quanta_are_the_same(count: int) -> None:
    values, quantum = values_of(2000, "ties"), np.float32(0.3)
    index = np.sort(np.random.default_rng(2).choice(2000, count, replace=False)).astype(np.int32)
    for keeps in (False, True):
        ours, twins = both("take_quanta", values, quantum, index, keeps, np.zeros((count + 7) // 8, np.uint8))
        assert ours == twins
    codes = np.random.default_rng(3).integers(0, 256, (count + 7) // 8).astype(np.uint8)
    ours, twins = both("write_quanta", codes, quantum, index, values)
    assert ours == twins


def test_damaged_codes_of_indices_are_the_same_or_refused() -> None:
    generator = np.random.default_rng(4)
    for trial in range(400):
        coded = generator.integers(0, 256, generator.integers(0, 60)).astype(np.uint8)
        coded[: trial % 50] &= generator.integers(0, 256, coded[: trial % 50].size).astype(np.uint8)
        end = int(10 ** generator.uniform(0, 9))
        count = int(generator.integers(0, 200))
        decoded = []
        for kernel in (coding.decode_gaps, plain.decode_gaps):
            index = np.zeros(count, np.int32)
            used = kernel(coded, 3, end, index)
            decoded.append((used, index.tobytes() if used >= 0 else b""))
        assert decoded[0] == decoded[1]


def test_a_sum_of_two_lists_has_the_zeros_of_a_sum_of_three() -> None:
    """A compiled sum of two lists has no branches, and multiplies what is missing by zero."""
    index, value = np.array([0, 2, 1, 3], np.int32), np.array([-0.0, -0.0, -1.0, -0.0], np.float32)
    out = []
    for bounds in ([0, 2, 4], [0, 2, 4, 4]):
        for kernel in (merging.sum_sparse, plain.sum_sparse):
            total = np.empty(4, np.float32)
            assert kernel(index, value, np.array(bounds), np.empty(4, np.int32), total) == 4
            out.append(total.tobytes())
    assert out == [np.array([0.0, -1.0, 0.0, 0.0], np.float32).tobytes()] * 4


UPDATES = {
    "add": (0, lambda kind: (kind(-0.3),)),
    "momentum": (1, lambda kind: (kind(0.1), kind(0.9))),
    "adagrad": (1, lambda kind: (kind(0.1), kind(1e-10))),
    "adam": (3, lambda kind: (1e-3, 0.9, 0.999, 1e-8)),
    "ftrl": (2, lambda kind: (0.1, 1.0, 0.5, 1.0)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_tables_are_the_same(name: str, width: int, dtype: type) -> None:
    """Each copy of a shard applies what is pushed, so that a copy on another machine must not differ."""
    num_states, scalars = UPDATES[name]
    generator = np.random.default_rng(width)
    num_rows = 40_000 // width
    chosen = np.sort(generator.choice(num_rows, num_rows // 3, replace=False))
    sizes = [num_rows * width] * (1 + min(num_states, 2)) + [num_rows] * (num_states == 3)
    tables = [np.abs(generator.standard_normal(size)).astype(dtype) for size in sizes]
    if name == "adam":
        tables[-1] = generator.integers(0, 2000, num_rows).astype(dtype)
    for rows in (chosen, np.empty(0, np.int64)):
        gradients = generator.standard_normal((rows.size or num_rows) * width).astype(dtype)
        gradients[:3] = 0.0, -0.0, 1e-30
        ours, twins = both(name, *tables, rows, width, gradients, *scalars(dtype), of=updates)
        assert ours == twins
    ours, twins = both("read", tables[0], chosen, width, np.zeros(chosen.size * width, dtype), of=updates)
    assert ours == twins


@pytest.mark.parametrize(
    "keys", [[], [5], [0, 9], [5, 5], [6, 5], [-1], [10], [3, 4], [9, 3, -4], [0, 1, 2, 7, 8, 9, 30]]
)
def test_wrong_keys_are_the_same(keys: list[int]) -> None:
    listed = np.array(keys, np.int64)
    begins, ends, offsets = np.array([0, 5, 8]), np.array([3, 7, 10]), np.array([0, 3, 5, 7])
    for part in (slice(0, 3), slice(0, 0)):
        own = [
            kernel(listed, begins[part], ends[part], offsets, np.zeros(len(keys), np.int64))
            for kernel in (updates.locate, plain.locate)
        ]
        assert own[0] == own[1]
    ours, twins = both("locate", np.array([0, 2, 5, 6, 8, 9]), begins, ends, offsets, np.zeros(6, np.int64), of=updates)
    assert ours == twins
    assert ours[0] == -1
    for begin, end in ((0, 10), (5, 6), (-3, 40)):
        ours, twins = both("first_wrong", listed, begin, end, of=updates)
        assert ours == twins
