"""A carrier that a program adds (``examples/extension``): it carries operations out, or gives them back to messages."""

import sys
from pathlib import Path

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, MismatchError, PeerLost
from totalreduce.runner.carriers import CARRIERS
from totalreduce.testing import run_ranks
from totalreduce.testing.ranks import make_groups

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "extension"))
from totalreduce_extras import table

sys.path.pop(0)


@pytest.fixture(autouse=True)
def added():
    CARRIERS.add("table", table.make)
    table._tables.clear()
    yield
    CARRIERS.remove("table")
    assert all(not each.places for each in table._tables.values()), "every operation has left the table"
    table._tables.clear()


def sums_of(group, name="table"):
    sums = [group.allreduce(torch.arange(6.0) + 10 * group.rank + turn, name=name).wait().tolist() for turn in range(3)]
    return sums, group.statistics().messages_sent


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_it_carries_out_what_it_takes_without_messages(world_size):
    ranks = sum(range(world_size))
    wanted = [[world_size * (at + turn) + 10.0 * ranks for at in range(6)] for turn in range(3)]
    assert run_ranks(world_size, sums_of) == [(wanted, 0)] * world_size
    by_messages = run_ranks(world_size, lambda group: sums_of(group, "other"))
    assert all(sums == wanted and num_sent > 0 for sums, num_sent in by_messages)


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_what_one_rank_does_not_take_messages_carry_out_on_all(refusing, monkeypatch):
    """In the star of three the root sends nothing before it has received something, so it must hear of the refusal."""
    original = table.TableCarrier.take
    monkeypatch.setattr(
        table.TableCarrier, "take", lambda self, op: None if self._rank == refusing else original(self, op)
    )
    wanted = [[3 * (at + turn) + 30.0 for at in range(6)] for turn in range(3)]
    results = run_ranks(3, sums_of)
    assert [sums for sums, _ in results] == [wanted] * 3
    assert sum(num_sent for _, num_sent in results) > 0


def test_a_mismatch_is_given_back_and_found_by_messages():
    def body(group):
        with pytest.raises(MismatchError, match="table"):
            group.allreduce(torch.ones(3 + group.rank), name="table").wait()
        return group.allreduce(torch.ones(2), name="table").wait().tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_a_rank_that_has_left_fails_what_waits_for_it_at_the_table():
    groups = make_groups(3)
    for work in [group.allreduce(torch.ones(4), name="they meet") for group in groups]:
        work.wait()
    work = groups[0].allreduce(torch.ones(4), name="table")
    assert "1 of 3 tensors on the table" in work._handle.operation.progress()
    groups[2].close()
    with pytest.raises(PeerLost, match="rank 2"):
        work.wait()
    for group in groups[:2]:
        group.close()


def test_a_carrier_is_a_function_that_returns_a_carrier():
    with pytest.raises(ConfigurationError, match="the carrier 'four' is a function of a transport"):
        CARRIERS.add("four", 4)
    CARRIERS.add("five", lambda _transport: 5)
    try:
        with pytest.raises(ConfigurationError, match="the carrier 'five' makes an engine"):
            make_groups(1)
    finally:
        CARRIERS.remove("five")
