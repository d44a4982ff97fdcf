"""The description of machines, and the calibration: what is read, and what is refused."""

import dataclasses

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.planning.calibration import Cost, solve, solve_beside
from totalreduce.planning.machines import (
    IDEAL,
    Calibration,
    Machines,
    read_calibration,
    read_machines,
    write_calibration,
)


def written(folder, text):
    path = folder / "machines.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_description_is_read(tmp_path):
    path = written(tmp_path, '[machines]\nranks_per_host = 4\nrate = "10gbit"\nlatency_us = 60\ncores = 16\n')
    machines = read_machines(path)
    assert machines == Machines(ranks_per_host=4, rate="10gbit", latency_us=60, cores=16)
    assert machines.hosts(8) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert machines.card_bytes_per_s == pytest.approx(1.25e9 * 1448 / 1514)
    assert machines.links.latency_s == pytest.approx(60e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[machines\n", "is not TOML"),
        ("[hosts]\ncores = 1\n", "must have one table"),
        ("[machines]\ncore = 1\n", "not core"),
        ("[machines]\ncores = 0\n", "cores must be a whole number"),
        ("[machines]\ncores = 1.5\n", "cores must be a whole number"),
        ('[machines]\nrate = "fast"\n', "a rate is a number"),
        ("[machines]\nrate = 10\n", "machines.toml"),
        ("[machines]\nlatency_us = -1\n", "latency_us must be a number"),
        ("[machines]\nlatency_us = inf\n", "latency_us must be a number"),
        ("[machines]\nemulated = 1\n", "emulated is true or false"),
        ("[machines]\npayload_share = 0\n", "payload_share must be above 0"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_machines(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read the machines .*none\.toml"):
        read_machines(tmp_path / "none.toml")
    with pytest.raises(ConfigurationError, match=r"plan --measure .*none\.json. writes it"):
        read_calibration(tmp_path / "none.json")


def test_a_calibration_is_written_and_read(tmp_path):
    path = tmp_path / "calibration.json"
    calibration = dataclasses.replace(Calibration(), message_s=1e-5, source="measured here")
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"message_s": "x"}'])
def test_a_file_without_a_calibration_is_refused(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="does not hold a calibration"):
        read_calibration(path)


def test_costs_must_be_finite_and_rates_positive():
    assert IDEAL.message_s == 0.0
    for wrong in ({"message_s": -1e-6}, {"byte_s": float("nan")}, {"copy_bytes_per_s": 0.0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            dataclasses.replace(Calibration(), **wrong)


def test_the_costs_of_operations_messages_and_bytes_follow_from_three_kinds_of_allreduces():
    operation_s, message_s, byte_s, rate = 3e-4, 2e-5, 4e-10, 5e9

    def cost(messages, num_bytes, reduced):
        processor_s = operation_s + 2 * messages * message_s + 2 * num_bytes * byte_s + reduced / rate
        return Cost(processor_s, messages, num_bytes, reduced)

    costs = [cost(2, 0, 0), cost(8, 8e6, 4e6), cost(128, 8e6, 4e6)]
    assert solve(costs, rate) == pytest.approx((operation_s, message_s, byte_s))


def test_what_messages_cost_beside_the_process_follows_from_what_training_loses():
    small, large = Cost(1e-4, 2, 128, 0), Cost(5e-3, 8, 8e6, 4e6)
    message_s, byte_s = 3e-5, 5e-10

    def lost(cost):
        beside_s = 2 * cost.messages * message_s + 2 * cost.num_bytes * byte_s
        return dataclasses.replace(cost, processor_s=cost.processor_s + beside_s)

    found = solve_beside([small, large], [lost(small), lost(large)])
    assert found == pytest.approx((message_s, byte_s), rel=0.01)
    assert solve_beside([small, large], [small, dataclasses.replace(large, processor_s=0.0)]) == (0.0, 0.0)


def test_a_core_cannot_lose_all_of_its_time():
    with pytest.raises(ConfigurationError, match="sharing_loss of a calibration must be positive and below 1, not 1"):
        dataclasses.replace(Calibration(), sharing_loss=1.0)
