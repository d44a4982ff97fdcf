"""What the benchmarks' figures mean, and where their intervals come from."""

import math
import random

import pytest

from totalreduce.bench.arithmetic import (
    bus_factor,
    parse_size,
    parse_sizes,
    repetitions,
    wire_limit_s,
)
from totalreduce.bench.sampling import estimate, percentile, ratio_estimate
from totalreduce.cli.report import format_bytes
from totalreduce.foundation.errors import ConfigurationError
from totalreduce_benchmarks.replay import scheduling_ceiling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4KiB", 4096),
        ("1MiB", 1 << 20),
        ("2.5MB", 2_500_000),
        ("1 GiB", 1 << 30),
        ("512", 512),
        ("7b", 7),
        ("64kib", 65536),
    ],
)
def test_a_size_with_its_unit_is_bytes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-4KiB", "4 Mibi", "0", "0.2", "1e6", "4KiB 5KiB"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigurationError, match=r"4KiB|at least one byte"):
        parse_size(text)


def test_a_list_of_sizes_keeps_its_order():
    assert parse_sizes("1MiB, 4KiB,64MiB") == [1 << 20, 4096, 64 << 20]


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4 KiB"), (64 << 20, "64 MiB"), (1000, "1000 B"), (3 << 29, "1.5 GiB")]
)
def test_bytes_are_written_in_binary_units(size, text):
    assert format_bytes(size) == text


def test_bus_factor_is_that_of_nccl_tests():
    assert bus_factor(1) == 0
    assert bus_factor(2) == 1
    assert bus_factor(8) == 1.75


def test_the_wire_limit_of_64_mib_on_8_hosts_at_1_gbit():
    # 2 * 7 / 8 * 67,108,864 bytes * 8 bits / 1e9 bits per second
    assert wire_limit_s(64 << 20, 8, 1e9) == pytest.approx(0.939524096, abs=1e-12)


def test_small_operations_are_repeated_and_large_ones_are_not():
    assert [repetitions(size) for size in (1, 4096, 1 << 20, 4 << 20, 16 << 20, 64 << 20)] == [
        20,
        20,
        16,
        4,
        1,
        1,
    ]


def test_the_ceiling_is_highest_where_communication_equals_compute():
    forward_s, compute_s = 1.0, 3.0
    assert scheduling_ceiling(forward_s, compute_s, 3.0) == pytest.approx(1 + 1 / 3)
    assert scheduling_ceiling(forward_s, compute_s, 1.5) == 1.0  # hidden behind the backward pass already
    assert scheduling_ceiling(forward_s, compute_s, 6.0) == pytest.approx(7 / 6)


def test_percentile_is_a_sample_never_an_invention():
    samples = list(range(100, 0, -1))
    assert percentile(samples, 0.5) == 50
    assert percentile(samples, 0.99) == 99
    assert percentile(samples, 1.0) == 100
    assert percentile([3.0], 0.01) == 3.0
    for bad in (0, 1.5):
        with pytest.raises(ValueError, match="share"):
            percentile(samples, bad)
    with pytest.raises(ValueError, match="samples"):
        percentile([], 0.5)


def test_median_and_whole_range_of_few_samples():
    found = estimate([5.0, 1.0, 3.0])
    assert (found.median, found.low, found.high, found.num_samples) == (3.0, 1.0, 5.0, 3)
    assert estimate([2.0, 4.0]).median == 3.0
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_the_interval_leaves_out_what_the_binomial_allows():
    # n = 15: P(fewer than 4 of 15 below the median) = 0.0176 <= 0.025 < P(fewer than 5) = 0.0592
    found = estimate([float(value) for value in range(15)])
    assert (found.median, found.low, found.high) == (7.0, 3.0, 11.0)
    # n = 6 is the first for which leaving out nothing covers 95 %: 1 - 2 / 64 = 96.9 %
    assert (estimate(list(range(6))).low, estimate(list(range(6))).high) == (0, 5)


def test_the_interval_covers_the_true_median_at_least_95_times_in_a_hundred():
    generator = random.Random(11)
    hits = 0
    for _ in range(2000):
        found = estimate([generator.expovariate(1.0) for _ in range(20)])
        hits += found.low <= math.log(2) <= found.high
    assert hits / 2000 >= 0.945


def test_a_ratio_is_taken_round_by_round():
    # A disturbance that doubles one round for both leaves the ratio alone.
    found = ratio_estimate([2.0, 4.0, 2.0], [1.0, 2.0, 1.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        ratio_estimate([1.0], [1.0, 2.0])
