"""The settings of a parameter server that are sent to ranks that only serve, and the variables of these ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

import totalreduce as tr
from totalreduce.foundation.environment import read_settings, read_world
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.launch.hosts import Place
from totalreduce.launch.local import EmulateOptions, run_workers
from totalreduce.launch.restarts import RecoveryOptions
from totalreduce.launch.workers import common_environment, seat_environment
from totalreduce.recovery.epochs import open_assembly
from totalreduce.server.optimizers import Optimizer
from totalreduce.server.setup import Setup

GIVEN = {
    "num_keys": 100,
    "width": 2,
    "dtype": "float32",
    "optimizer": None,
    "consistency": None,
    "servers": None,
    "workers": None,
    "shards": None,
    "replicas": 1,
    "codec": None,
    "initial": 0.5,
}


def setup(**changes) -> Setup:
    return Setup.checked(6, 4, **{**GIVEN, **changes})


@pytest.mark.parametrize(
    "optimizer",
    [tr.ps.Sum(), tr.ps.SGD(0.1), tr.ps.Momentum(1 / 3), tr.ps.Adagrad(2), tr.ps.Adam(eps=1e-9), tr.ps.FTRL(l1=3)],
)
@pytest.mark.parametrize("rule", [tr.ps.Sequential(77), tr.ps.Bounded(3), tr.ps.Eventual()])
@pytest.mark.parametrize(
    "codec",
    [
        None,
        tr.Half(dtype="float16"),
        tr.Int8(block=64),
        tr.Int4(),
        tr.OneBit(),
        tr.Ternary(),
        tr.Threshold(threshold=0.1),
    ],
)
def test_a_server_gets_what_the_workers_have(optimizer, rule, codec) -> None:
    sent = setup(optimizer=optimizer, consistency=rule, codec=codec, shards=9, replicas=2)
    got = Setup.decode(sent.encode(), 6)
    assert got == sent
    assert got.describe() == sent.describe()


def test_ranks_that_only_serve_are_the_servers_by_default() -> None:
    assert (setup().servers, setup().workers, setup().shards) == ((4, 5), 4, 2)
    without = Setup.checked(4, 4, **GIVEN)
    assert (without.servers, without.workers, without.shards) == ((0, 1, 2, 3), 4, 4)
    with pytest.raises(ConfigurationError, match="workers must be from 1 to 4"):
        setup(workers=5)


@dataclass(frozen=True)
class _Own(Optimizer):
    def update(self, values, states, rows, width, gradients) -> None:
        """Do nothing."""


def test_what_is_code_cannot_be_sent() -> None:
    with pytest.raises(ConfigurationError, match=r"initial is a function.*give a number"):
        setup(initial=lambda keys: keys).encode()
    with pytest.raises(ConfigurationError, match=r"_Own\(\).*cannot be sent"):
        setup(optimizer=_Own()).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"name": "eval"}},
        {"optimizer": {"name": "SGD", "rate": 1}},
        {"optimizer": None},
        {"servers": 3},
        {"codec": 7},
    ],
)
def test_a_text_that_no_worker_sends_is_refused(change) -> None:
    document = {**json.loads(setup().encode()), **change}
    with pytest.raises(ProtocolError, match="no description"):
        Setup.decode(json.dumps(document), 6)


@pytest.mark.parametrize(
    "change", [{"num_keys": 0}, {"servers": [9]}, {"codec": {"name": "none such"}}, {"dtype": "x"}]
)
def test_values_are_checked_on_the_server_too(change) -> None:
    with pytest.raises(ConfigurationError):
        Setup.decode(json.dumps({**json.loads(setup().encode()), **change}), 6)
    for text in ("", "[]", "{}"):
        with pytest.raises(ProtocolError):
            Setup.decode(text, 6)


def test_torchs_variables_are_about_workers_and_the_librarys_about_all_ranks() -> None:
    common = common_environment({}, 4, master_address="10.0.0.1", job_id="job", num_servers=2)
    for rank in (3, 5):
        variables = {**common, **seat_environment(rank, Place("host", 0, rank, 6), has_servers=True)}
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), "4")
        world = read_world(variables)
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (rank, 6, rank, 6)
        assert (world.master_address, world.job_id, read_settings(variables).servers) == ("10.0.0.1", "job", 2)
    inner = common_environment(common, 1, master_address="10.0.0.1", job_id="inner")
    assert read_settings(inner).servers == 0
    assert "TOTALREDUCE_WORLD_SIZE" not in inner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_servers": -1}, "number of servers"),
        ({"num_servers": 2, "where": EmulateOptions(num_hosts=2)}, "2 workers and 2 servers"),
        ({"num_servers": 1, "recovery": RecoveryOptions(on_loss="shrink", max_ranks=1)}, "--max-ranks"),
        ({"num_servers": 1, "recovery": RecoveryOptions(on_loss="shrink", min_ranks=3)}, "--min-ranks"),
    ],
)
def test_the_launcher_refuses_what_does_not_go_together(options, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_workers(["true"], num_workers=2, **options)


def test_only_a_parameter_server_forms_the_group_of_a_job_with_servers() -> None:
    """``tr.recoverable`` knows the workers alone, and would wait for the servers in vain."""
    variables = {"TOTALREDUCE_KEEPER": "127.0.0.1:1", "TOTALREDUCE_SERVERS": "2", "TOTALREDUCE_BEGIN_RANKS": "0-3"}
    with pytest.raises(ConfigurationError, match=r"only tr\.ps\.connect forms its group"):
        open_assembly(read_settings(variables), 0, 2, 1.0)
