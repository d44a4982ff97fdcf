"""Settings of coordination that fit a library: the arithmetic, and the file."""

import json

import pytest

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.native.tuning import fitting, read_settings, write_settings

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("fixed_s", "s_per_mib", "fusion_mib", "cycle_ms"),
    [
        (0.005, 0.0017, 32, 1.0),  # gloo with 4 ranks on one host: 16 x 5 / 1.7 = 47 MiB
        (0.0001, 0.01, 1, 0.5),  # a slow link: whatever it is, small is enough
        (0.05, 0.0001, 128, 8.0),  # ruled by the fixed cost: as much as is allowed
    ],
)
def test_a_costly_operation_is_worth_waiting_for(fixed_s, s_per_mib, fusion_mib, cycle_ms):
    seconds = {size: fixed_s + s_per_mib * (size - 4 * KIB) / MIB for size in (4 * KIB, MIB, 8 * MIB)}
    config = fitting(seconds, CoordinationConfig(cache_capacity=7))
    assert config.fusion_bytes in (fusion_mib * MIB, 2 * fusion_mib * MIB)
    assert config.cycle_s * 1e3 == cycle_ms
    assert config.cache_capacity == 7


def test_noise_hardly_moves_the_decision_and_a_falling_line_breaks_nothing():
    steady = fitting({4096: 0.005, 8 * MIB: 0.019}, CoordinationConfig())
    assert fitting({4096: 0.0052, 8 * MIB: 0.0195}, CoordinationConfig()) == steady
    assert fitting({4096: 0.005, 8 * MIB: 0.004}, CoordinationConfig()).fusion_bytes == 128 * MIB


def test_what_is_stored_is_what_is_read(tmp_path):
    path = tmp_path / "coordination.json"
    config = CoordinationConfig(cache_capacity=33, fusion_bytes=5 * MIB, join_divisor="active", cycle_s=0.002)
    write_settings(config, path)
    assert read_settings(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not hold"),
        ("[]", "does not hold"),
        (json.dumps({"format": "x", "settings": {}}), "its format is 'x'"),
        (json.dumps({"format": "totalreduce-coordination-1", "settings": {"speed": 3}}), "speed"),
        (
            json.dumps({"format": "totalreduce-coordination-1", "settings": {"cache_capacity": -3}}),
            "cache_capacity must be at least 0",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "coordination.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_settings(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_settings(tmp_path / "none.json")
