"""Negotiators by hand: what the cache says, who sends what, groups, joins, leaving, and what no correct peer sends."""

from __future__ import annotations

import json
import random

import pytest
from parley import CHANGES, Parley, ask, changed, group, names

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.messages import Kind, decode_bits, encode, split
from totalreduce.coordination.negotiator import Negotiator
from totalreduce.coordination.requests import Request
from totalreduce.coordination.stall import WaitingOperation
from totalreduce.coordination.table import RequestTable
from totalreduce.foundation.errors import (
    ConfigurationError,
    GroupClosed,
    MismatchError,
    PeerLost,
    ProtocolError,
    StallError,
    TotalReduceError,
    UnsupportedError,
)
from totalreduce.foundation.types import OpKind

SIZES = (1, 2, 3, 4, 5, 8)
GATHERLIKE = (OpKind.ALLGATHER, OpKind.BROADCAST, OpKind.REDUCE_SCATTER, OpKind.ALLTOALL)


def votes(world_size: int) -> int:
    """The messages of one rank's vote: to the ranks 1, 2, 3, 4, 8, 12, 16, 32, ... further on, as far as they go."""
    return sum(offset < world_size for offset in (1, 2, 3, 4, 8, 12, 16, 32, 48))


def rounds(world_size: int) -> int:
    """ceil(log2), without the formula of the code."""
    count = 0
    while 2**count < world_size:
        count += 1
    return count


USUAL = ask("w", 3, 4, reduction="avg", prescale=0.5)


# ----------------------------------------------------------------------------------------------------------- cycles


@pytest.mark.parametrize("world_size", SIZES)
def test_the_second_step_moves_only_votes(world_size: int) -> None:
    parley = Parley(world_size)
    requests = [ask(f"w{index}", index + 1) for index in range(20)]
    for rank in range(world_size):
        parley.submit(rank, *random.Random(rank).sample(requests, 20))
    first = parley.take()
    assert sorted(names(first)) == sorted(f"w{index}" for index in range(20))
    slow = [rank.counters.slow_cycles for rank in parley.ranks]
    for step in range(3):
        parley.sent.clear()
        before = [rank.counters.cycles for rank in parley.ranks]
        for rank in range(world_size):
            parley.submit(rank, *random.Random(100 * step + rank).sample(requests, 20))
        again = parley.take()
        assert names(again) == names(first), "by ascending bit, which is the order of the first step"
        for rank, counts in enumerate(parley.counts()):
            cycles = parley.ranks[rank].counters.cycles - before[rank]
            assert counts == {Kind.VOTE: cycles * votes(world_size)} or world_size == 1
            assert cycles == 1 or world_size == 1
        for counters in (rank.counters for rank in parley.ranks):
            assert counters.hits == 20 * (step + 1)
            assert counters.misses == 20
    assert [rank.counters.slow_cycles for rank in parley.ranks] == slow


@pytest.mark.parametrize("world_size", SIZES)
def test_a_slow_cycle_costs_one_request_and_one_response_a_rank(world_size: int) -> None:
    parley = Parley(world_size)
    parley.submit_all(ask("a"))
    parley.take()
    counts = parley.counts(cycle=0)
    assert sum(count[Kind.REQUESTS] for count in counts) == sum(count[Kind.RESPONSES] for count in counts)
    assert [count[Kind.REQUESTS] for count in counts] == [0] + [1] * (world_size - 1)
    assert all(count[Kind.VOTE] == votes(world_size) for count in counts)
    assert not any(count[Kind.INVALID] for count in counts)
    assert max(count[Kind.RESPONSES] for count in counts) == rounds(world_size), "the tree is no star"


@pytest.mark.parametrize("world_size", SIZES)
def test_idle_ranks_say_nothing(world_size: int) -> None:
    parley = Parley(world_size, cycle_s=0.005)
    assert all(rank.next_due() is None for rank in parley.ranks)
    parley.submit_all(ask("a"))
    parley.take()
    parley.sent.clear()
    for second in range(1, 20):
        parley.tick(float(second))
        assert all(rank.next_due() is None for rank in parley.ranks)
    assert not parley.sent


def test_status_bits_are_inverted() -> None:
    parley = Parley(3)
    parley.submit(1, ask("a"))
    vote = decode_bits(split(parley.sent[0].message)[3], 100)
    assert vote & 0b11 == 0b10, "only 'uncached' is not so"
    parley.run()
    parley.submit(0, ask("a"))
    parley.submit(2, ask("a"))
    assert names(parley.take()) == ["a"]
    parley.sent.clear()
    parley.submit(2, ask("a"))
    assert decode_bits(split(parley.sent[0].message)[3], 100) == 0b111
    parley.run()  # the others have nothing: no bit is common, no status is raised
    parley.sent.clear()
    parley.submit(0, ask("a", 5))
    assert decode_bits(split(parley.sent[0].message)[3], 100) == 0b000, "uncached and invalid, and no hit"


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_is_the_same_error_on_every_rank(world_size: int, change: str) -> None:
    for odd in {0, 1 % world_size, world_size - 1}:
        parley = Parley(world_size)
        parley.submit_all(USUAL, ask("other"))
        parley.take()
        for rank in range(world_size):
            parley.submit(rank, changed(USUAL, **CHANGES[change]) if rank == odd else USUAL, ask("other"))
        responses = parley.take()
        by_name = {response.name: response for response in responses}
        if change == "group" and world_size == 1:
            assert names(responses) == ["other"], "the rest of the group is missing"
            continue
        assert sorted(by_name) == ["other", "w"]
        assert by_name["other"].error is None, "nothing else is harmed"
        disagreement = by_name["w"].error
        if world_size == 1:
            assert disagreement is None
            continue
        assert disagreement is not None
        error = disagreement.error()
        assert isinstance(error, MismatchError)
        usual = tuple(rank for rank in range(world_size) if rank != odd)
        assert sorted(error.sets) == sorted([(odd,), usual])
        assert error.sets[0][0] == 0
        by_set = dict(zip(error.sets, error.values, strict=True))
        assert by_set[usual] == USUAL.describe()
        assert by_set[odd,] == changed(USUAL, **CHANGES[change]).describe()
        assert "w" not in dict(parley.snapshot())
        # and the name can be used again, as before and otherwise
        parley.submit_all(ask("w", 7))
        assert [response.error for response in parley.take()] == [None]


def test_or_only_when_something_is_invalid() -> None:
    parley = Parley(5)
    parley.submit_all(ask("a"), ask("b"), ask("c"))
    parley.take()
    parley.submit_all(ask("a"), ask("b"), ask("d"))
    parley.take()
    assert not any(count[Kind.INVALID] for count in parley.counts())
    cycles = set(parley.cycles[0])
    for rank in range(5):
        parley.submit(rank, *([ask("b", 9)] if rank in (1, 3) else [ask("a"), ask("b", 9)]))
    parley.take()
    for cycle in set(parley.cycles[0]) - cycles:
        assert {count[Kind.INVALID] for count in parley.counts(cycle=cycle)} in ({0}, {4})
    assert sum(count[Kind.INVALID] for count in parley.counts()) == 20, "in one cycle, four of every rank"


def test_a_change_on_all_ranks_is_no_error_and_a_hit_elsewhere_is_asked_in_the_same_cycle() -> None:
    parley = Parley(4)
    parley.submit_all(ask("a"), ask("b"))
    parley.take()
    cycles = parley.ranks[0].counters.cycles
    parley.submit_all(ask("b"), ask("a", 9))
    responses = parley.take()
    assert sorted(names(responses)) == ["a", "b"]
    assert all(response.error is None for response in responses)
    assert next(response.request.shape for response in responses if response.name == "a") == (9,)
    assert parley.ranks[0].counters.cycles == cycles + 1
    parley.submit_all(ask("a"))  # it was (9,) only once
    assert [response.request.shape for response in parley.take()] == [(4,)]


def test_a_hit_that_is_invalid_elsewhere_reaches_rank_0_in_the_same_cycle() -> None:
    parley = Parley(3)
    parley.submit_all(ask("a"))
    parley.take()
    cycles = parley.ranks[0].counters.cycles
    for rank in range(3):
        parley.submit(rank, ask("a", 9) if rank == 2 else ask("a"))
    (response,) = parley.take()
    assert response.error is not None
    assert parley.ranks[0].counters.cycles == cycles + 1


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7])
def test_more_names_than_the_cache_holds(world_size: int, capacity: int) -> None:
    parley = Parley(world_size, cache_capacity=capacity)
    generator = random.Random(capacity)
    for step in range(30):
        chosen = [ask(f"w{index}") for index in generator.sample(range(9), generator.randint(1, 5))]
        for rank in range(world_size):
            parley.submit(rank, *random.Random(step * 10 + rank).sample(chosen, len(chosen)))
            if generator.random() < 0.3:
                parley.run()
        assert sorted(names(parley.take())) == sorted(request.name for request in chosen)
        assert len(parley.snapshot()) <= capacity
        assert all(bit < capacity for _, bit in parley.snapshot())
    hits = {rank.counters.hits for rank in parley.ranks}
    assert len(hits) == 1
    assert bool(hits.pop()) == bool(capacity)


def test_unnamed_operations_leave_the_cache_alone() -> None:
    parley = Parley(3, cache_capacity=2)
    parley.submit_all(ask("a"), ask("b"))
    parley.take()
    for number in range(5):
        parley.submit_all(ask(f"allreduce#{number}", cached=False))
        assert len(parley.take()) == 1
    assert parley.snapshot() == [("a", 0), ("b", 1)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_more_requests_than_one_cycle_takes(world_size: int) -> None:
    parley = Parley(world_size, cache_capacity=4000, cycle_s=1.0)
    requests = [ask(f"w{index}") for index in range(2100)]
    for rank in range(world_size):
        parley.submit(rank, *(requests if rank % 2 else reversed(requests)))
    parley.tick(1.0)
    parley.run()  # the clock stands still: the rest is not put off
    responses = parley.responses()
    assert len(responses) == 2100
    parley.check()
    lists = [
        [requests for rank, requests, _ in json.loads(split(sent.message)[3]) if rank == sent.source]
        for sent in parley.sent
        if sent.kind is Kind.REQUESTS
    ]
    assert all(len(requests) <= 1024 for (requests,) in lists)
    assert parley.ranks[0].counters.slow_cycles >= 3
    for answers in parley.answers:
        answers.clear()
    parley.submit_all(*requests)
    parley.tick(10.0)
    assert len(parley.take()) == 2100
    assert parley.ranks[0].counters.misses == 2100


def test_a_group_that_is_larger_than_a_cycle_comes_as_a_whole() -> None:
    parley = Parley(2, cache_capacity=4000)
    parley.submit_all(*group("g", *[(3,)] * 1500))
    responses = parley.take()
    assert len(responses) == 1500
    assert sum(bool(cycle.responses) for cycle in parley.cycles[0].values()) == 1


def test_collecting_while_nobody_is_blocked() -> None:
    parley = Parley(2, cycle_s=0.5)
    parley.now = 10.0
    parley.submit_all(ask("a"))
    assert not parley.sent
    assert parley.ranks[0].next_due() == pytest.approx(10.5)
    parley.now = 10.3
    parley.submit_all(ask("b"))
    assert parley.ranks[0].next_due() == pytest.approx(10.5), "the first one counts"
    parley.tick(10.4)
    assert not parley.sent
    parley.tick(10.6)
    parley.run()
    assert names(parley.responses()) == ["a", "b"]
    assert parley.ranks[0].counters.cycles == 1
    parley.sent.clear()
    parley.submit(1, ask("a"))
    assert not parley.sent
    parley.hurry(1)  # somebody is blocked
    assert len(parley.sent) == 1
    parley.hurry(0)  # without news
    assert len(parley.sent) == 1
    parley.run()
    parley.submit(0, ask("a"))
    parley.submit(1, ask("b"))
    parley.hurry(0)
    parley.run()
    assert names(parley.responses()) == ["a", "b", "a"]
    assert parley.ranks[1].next_due() is None, "rank 1 was drawn in, with what it had"


def test_enough_bytes_begin_a_cycle_at_once() -> None:
    parley = Parley(2, cycle_s=0.5, fusion_bytes=100)
    parley.ranks[0].timer._not_before = 100.0
    parley.submit(0, ask("a"), num_bytes=60)
    assert not parley.sent
    parley.submit(0, ask("b"), num_bytes=40)
    assert parley.sent


# ----------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("world_size", SIZES)
def test_a_group_is_ready_as_a_whole(world_size: int) -> None:
    parley = Parley(world_size)
    for step in range(3):
        for rank in range(world_size):
            members = group("g", (1,), (2,), (3,))
            parley.submit(rank, *random.Random(step * 7 + rank).sample(members, 3))
            parley.run()
            assert (rank == world_size - 1) == bool(parley.responses(rank))
        assert len(parley.take()) == 3
    assert parley.ranks[0].counters.misses == 3


def test_half_a_group_waits() -> None:
    table = RequestTable(2)
    a, b = group("g", (1,), (2,))
    table.add(0, [a, b])
    table.add(1, [a])
    assert table.answer() == []
    table.add(1, [b])
    assert names(table.answer()) == ["g.0of2", "g.1of2"]
    assert len(table) == 0


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_one_bad_member_fails_its_group_and_nothing_else(world_size: int, *, cached: bool) -> None:
    for odd in (0, world_size - 1):
        parley = Parley(world_size)
        usual = group("g", (1,), (2,), (3,)) + group("h", (4,), (5,)) + [ask("single")]
        if cached:
            parley.submit_all(*usual)
            parley.take()
        for rank in range(world_size):
            parley.submit(
                rank,
                *(group("g", (1,), (9,), (3,)) + group("h", (4,), (5,)) + [ask("single")] if rank == odd else usual),
            )
        responses = {response.name: response for response in parley.take()}
        assert len(responses) == 6
        for name, response in responses.items():
            if name.startswith("g."):
                assert response.error is not None
                assert response.error.tensor == "g.1of3"
                error = response.error.error()
                assert isinstance(error, MismatchError)
                assert "g.1of3" in str(error)
            else:
                assert response.error is None
        parley.submit_all(*usual)
        assert all(response.error is None for response in parley.take())


def test_a_group_of_which_one_member_was_evicted_is_asked_for_anew_as_a_whole() -> None:
    parley = Parley(3, cache_capacity=3)
    parley.submit_all(*group("g", (1,), (2,)))
    parley.submit_all(ask("x"))
    parley.take()
    parley.submit_all(ask("y"))
    parley.take()
    assert [name for name, _ in parley.snapshot()] == ["g.1of2", "x", "y"]
    parley.submit_all(*group("g", (1,), (2,)))
    assert names(parley.take()) == ["g.0of2", "g.1of2"]
    assert [name for name, _ in parley.snapshot()] == ["y", "g.0of2", "g.1of2"]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_group_differently(odd: int) -> None:
    single = [ask("g.0of2", 1), ask("g.1of2", 2)]
    for other in (
        single,
        [changed(request, batch=("h", 2)) for request in single],
        [changed(single[0], batch=("h", 1)), single[1]],
    ):
        parley = Parley(3)
        for rank in range(3):
            parley.submit(rank, *(other if rank == odd else group("g", (1,), (2,))))
        responses = parley.take()
        assert sorted(names(responses)) == ["g.0of2", "g.1of2"]
        for response in responses:
            assert response.error is not None
            error = response.error.error()
            assert isinstance(error, MismatchError)
            assert "in the group 'g' of 2" in str(error)
        assert all(len(rank.submissions.waiting) == 0 for rank in parley.ranks)


def test_a_group_of_two_against_one_of_three() -> None:
    parley = Parley(2)
    names_ = ["a", "b", "c"]
    parley.submit(0, *[ask(name, batch=("g", 2)) for name in names_[:2]], ask("c"))
    parley.submit(1, *[ask(name, batch=("h", 3)) for name in names_])
    responses = parley.take()
    assert sorted(names(responses)) == names_
    assert all(response.error is not None for response in responses)


# ------------------------------------------------------------------------------------------------------------- join


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world_size", SIZES)
def test_each_rank_first_to_have_no_more_data(world_size: int, *, cached: bool) -> None:
    for first in range(world_size):
        parley = Parley(world_size)
        if cached:
            parley.submit_all(ask("a"), ask("b"))
            parley.take()
        snapshot = parley.snapshot()
        order = [(first + step) % world_size for step in range(world_size)]
        for place, rank in enumerate(order):
            parley.join(rank)
            parley.settle()
            active = order[place + 1 :]
            for other in active:
                parley.submit(other, ask("a"), ask("b"))
                if cached:  # a mix: one that nobody knows
                    parley.submit(other, ask(f"new {place}"))
                parley.settle()
            responses = parley.take()
            assert sorted(names(responses)) == ((["a", "b"] + [f"new {place}"] * cached) if active else [])
            assert all(response.joined == tuple(sorted(order[: place + 1])) for response in responses)
            assert all(response.error is None for response in responses)
            expected = tuple(order[: place + 1]) if active else ()
            assert all(set(negotiator.membership.joined) == set(expected) for negotiator in parley.ranks)
        assert {negotiator.membership.last_joined for negotiator in parley.ranks} == {order[-1]}
        assert sorted(parley.snapshot()) == sorted(snapshot), "nothing of it is remembered"


@pytest.mark.parametrize("world_size", SIZES)
def test_all_join_in_one_cycle_and_again(world_size: int) -> None:
    parley = Parley(world_size)
    parley.submit_all(ask("a"))
    parley.take()
    for _ in range(3):
        for rank in reversed(range(world_size)):
            parley.join(rank)
        parley.settle()
        assert parley.take() == [], "all have lent, and nobody had data"
        assert len({negotiator.membership.last_joined for negotiator in parley.ranks}) == 1
        assert {negotiator.membership.last_joined for negotiator in parley.ranks} <= set(range(world_size))
        assert all(negotiator.membership.joined == () for negotiator in parley.ranks)
        parley.submit_all(ask("a"))
        (response,) = parley.take()
        assert response.joined == ()


def test_a_rank_that_joins_again_at_once_is_in_the_next_epoch() -> None:
    parley = Parley(2)
    parley.join(0)
    parley.join(1)
    parley.settle()
    first = parley.ranks[0].membership.last_joined
    parley.join(1)
    parley.settle()
    assert parley.ranks[1].membership.last_joined is None
    assert parley.ranks[0].membership.last_joined == first
    parley.submit(0, ask("a"))
    assert [response.joined for response in parley.take()] == [(1,)]
    parley.join(0)
    parley.settle()
    assert parley.ranks[0].membership.last_joined == parley.ranks[1].membership.last_joined == 0


def test_what_waited_for_the_rank_that_joins_becomes_ready() -> None:
    for cached in (False, True):
        parley = Parley(3)
        if cached:
            parley.submit_all(ask("a"))
            parley.take()
        parley.submit(0, ask("a"))
        parley.submit(2, ask("a"))
        parley.settle()
        assert not parley.responses()
        parley.join(1)
        (response,) = parley.take()
        assert response.joined == (1,)


def test_a_group_of_operations_while_a_rank_has_joined() -> None:
    for cached in (False, True):
        parley = Parley(3)
        if cached:
            parley.submit_all(*group("g", (1,), (2,)))
            parley.take()
        parley.join(2)
        for rank in (0, 1):
            parley.submit(rank, *group("g", (1,), (2,)))
        responses = parley.take()
        assert len(responses) == 2
        assert all(response.joined == (2,) and response.error is None for response in responses)


def test_a_mismatch_while_a_rank_has_joined() -> None:
    parley = Parley(3)
    parley.join(1)
    parley.submit(0, ask("a"))
    parley.submit(2, ask("a", 9))
    (response,) = parley.take()
    assert response.error is not None
    assert response.error.sets == ((0,), (2,))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", GATHERLIKE)
def test_what_a_rank_without_data_cannot_take_part_in(kind: OpKind, *, cached: bool) -> None:
    parley = Parley(3)
    request = ask("w", 3, 2, kind=kind, splits=(1, 1, 1) if kind is OpKind.ALLTOALL else ())
    if cached:
        parley.submit_all(request)
        parley.take()
    parley.join(1)
    for rank in (0, 2):
        parley.submit(rank, request)
    (response,) = parley.take()
    assert response.error is not None
    error = response.error.error()
    assert isinstance(error, UnsupportedError)
    assert "'w'" in str(error)
    assert "1" in str(error)
    parley.join(0)
    parley.join(2)
    parley.settle()
    parley.submit_all(request)
    (response,) = parley.take()
    assert response.error is None


def test_a_barrier_goes_on_without_the_joined() -> None:
    parley = Parley(3)
    parley.join(0)
    for rank in (1, 2):
        parley.submit(rank, Request("barrier#1", OpKind.BARRIER, cached=False))
    (response,) = parley.take()
    assert response.error is None


def test_rows_of_every_rank() -> None:
    parley = Parley(4)
    for step in range(2):
        for rank in range(4):
            parley.submit(
                rank,
                ask("gather", rank, 2, kind=OpKind.ALLGATHER),
                ask("all to all", 6, kind=OpKind.ALLTOALL, splits=tuple(sorted((0, 1, 2, 3), key=lambda i: i ^ rank))),
            )
        rows = {response.name: response.rows for response in parley.take()}
        assert rows["gather"] == ((0,), (1,), (2,), (3,)), step
        assert rows["all to all"] == ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    assert parley.ranks[0].counters.misses == 2


# ---------------------------------------------------------------------------------------------- leaving and failing


@pytest.mark.parametrize("world_size", SIZES)
def test_leaving_ends_it_for_those_who_need_the_rank(world_size: int) -> None:
    parley = Parley(world_size)
    parley.submit(0, ask("a"))
    parley.run()
    gone = world_size - 1
    parley.leave(gone, "it has closed the group")
    parley.run()
    for rank, negotiator in enumerate(parley.ranks):
        if rank == gone:
            assert isinstance(negotiator.ended, GroupClosed)
        else:
            assert isinstance(negotiator.ended, PeerLost)
            assert (negotiator.ended.rank, negotiator.ended.reason) == (gone, "it has closed the group")
        assert len(negotiator.submissions.waiting) == 0
        assert negotiator.next_due() is None
        negotiator.receive(0, b"anything", 0.0)  # too late to matter
    assert parley.counts()[gone][Kind.LEAVE] == world_size - 1
    parley.leave(gone, "again")
    assert parley.counts()[gone][Kind.LEAVE] == world_size - 1


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_operations_that_a_rank_has_not_carried_out_when_it_leaves_end_the_agreement(world_size: int) -> None:
    for gone in range(world_size):
        for undone in range(3):
            parley = Parley(world_size)
            parley.submit_all(ask("a"), ask("b"))
            parley.take()
            assert [negotiator.cycles.agreed for negotiator in parley.ranks] == [2] * world_size
            parley.leave(gone, "gone", undone=undone)
            parley.settle()
            survivors = [rank for rank in range(world_size) if rank != gone]
            assert [lost(parley)[rank] for rank in survivors] == [gone if undone else None] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_what_the_others_agree_on_after_a_rank_has_left_in_the_middle_of_a_cycle_fails(world_size: int) -> None:
    """The rank that has left has carried out all that it knows to be agreed on, but not this cycle's operation."""
    cut_short = moves = 0
    while True:
        for gone in range(world_size):
            parley = Parley(world_size)
            parley.submit_all(ask("a"))
            for _ in range(moves):
                pair = next((pair for pair, wire in parley.wires.items() if wire), None)
                if pair is None:
                    assert cut_short
                    return
                parley.move(*pair)
            knows = bool(parley.responses(gone))
            parley.leave(gone, "gone")
            parley.settle()
            for rank in set(range(world_size)) - {gone}:
                if not knows:
                    assert lost(parley)[rank] == gone
                    cut_short += bool(parley.responses(rank))
        moves += 1


@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_can_carry_nothing_out_ends_the_agreement_on_all_ranks(*, own: bool) -> None:
    parley = Parley(3)
    parley.submit_all(ask("a"))
    parley.take()
    error = TotalReduceError("no memory") if own else PeerLost(2, "silent")
    for _ in range(2):
        parley.ranks[1].abort(error, "no memory" * 100)
        parley.collect(1)
    parley.run()
    assert parley.ranks[1].ended is error
    for rank in (0, 2):
        ended = parley.ranks[rank].ended
        assert isinstance(ended, PeerLost)
        assert (ended.rank, ended.reason) == ((1, ("no memory" * 100)[:500]) if own else (2, "silent"))
    assert parley.counts()[1][Kind.ABORT] == 2


def test_a_rank_that_leaves_is_named_as_the_job_names_it() -> None:
    negotiator = Negotiator(0, 2, CoordinationConfig(), ranks=(5, 3))
    negotiator.submit([ask("a")], 0.0)
    negotiator.receive(1, encode(Kind.LEAVE, 7, value=["x" * 1000, 0]), 0.0)
    assert isinstance(negotiator.ended, PeerLost)
    assert (negotiator.ended.rank, negotiator.ended.reason) == (3, "x" * 500)
    for value in ([1], "gone", ["gone"], ["gone", "0"], ["gone", 0, 0], None):
        with pytest.raises(ProtocolError, match="rank 1 leaves as no correct peer does"):
            Negotiator(0, 2, CoordinationConfig()).receive(1, encode(Kind.LEAVE, 0, value=value), 0.0)


def lost(parley: Parley) -> list[object]:
    return [negotiator.ended.rank if isinstance(negotiator.ended, PeerLost) else None for negotiator in parley.ranks]


@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_left_is_missed_only_when_needed(world_size: int, *, says_so: bool) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        parley = Parley(world_size)
        parley.submit_all(ask("a"))
        parley.take()
        if says_so:
            parley.leave(gone, "gone")
        else:
            parley.depart(gone)
        parley.settle()
        assert all(parley.ranks[rank].ended is None for rank in survivors), "nobody needs it"
        parley.submit(survivors[0], ask("a"))
        parley.settle()
        assert [lost(parley)[rank] for rank in survivors] == [gone] * len(survivors)
        error = parley.ranks[survivors[-1]].ended
        assert isinstance(error, PeerLost)
        assert error.reason == "gone"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_one_rank_alone_needs_a_rank_that_has_left(world_size: int, *, begun: bool) -> None:
    """The others have nothing to wait for, and the votes that would draw them in went to the rank that has left."""
    for gone in range(world_size):
        for alone in set(range(world_size)) - {gone}:
            parley = Parley(world_size)
            if begun:
                parley.submit(alone, ask("a"))
                assert parley.ranks[alone].next_due() is None, "its cycle has begun"
            parley.leave(gone, "gone")
            if not begun:
                parley.run()
                parley.submit(alone, ask("a"))
            parley.settle()
            survivors = [rank for rank in range(world_size) if rank != gone]
            assert [lost(parley)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_leaves_while_an_operation_waits_for_it(world_size: int, *, cached: bool) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        parley = Parley(world_size)
        if cached:
            parley.submit_all(ask("a"))
            parley.take()
        for rank in survivors:
            parley.submit(rank, ask("a"))
        parley.settle()
        assert not any(parley.responses(rank) for rank in survivors)
        parley.depart(gone)
        parley.settle()
        assert [lost(parley)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_who_leaves_while_others_have_joined(world_size: int) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        parley = Parley(world_size)
        parley.join(survivors[0])
        parley.settle()
        parley.depart(gone)
        parley.settle()
        assert [lost(parley)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_leaves_in_the_middle_of_a_cycle(world_size: int) -> None:
    """After every number of messages: those left are told of it, or had what they needed."""
    moves = 0
    while True:
        for gone in {0, 1, world_size - 1}:
            parley = Parley(world_size)
            parley.submit_all(ask("a"))
            for _ in range(moves):
                pair = next((pair for pair, wire in parley.wires.items() if wire), None)
                if pair is None:
                    return
                parley.move(*pair)
            parley.depart(gone)
            for wire in (wire for pair, wire in parley.wires.items() if pair[1] == gone):
                wire.clear()
            parley.settle()
            ended = [parley.ranks[rank].ended for rank in range(world_size) if rank != gone]
            for rank in range(world_size):
                if rank != gone:
                    error = parley.ranks[rank].ended
                    assert names(parley.responses(rank)) == ["a"] if error is None else isinstance(error, PeerLost)
                    if isinstance(error, PeerLost):
                        assert error.rank == gone
                        assert not len(parley.ranks[rank].submissions.waiting)
            if any(error is not None for error in ended):
                assert all(
                    error is not None or parley.responses(rank)
                    for rank, error in zip([r for r in range(world_size) if r != gone], ended, strict=True)
                )
        moves += 1


def test_a_lost_rank_fails_what_is_pending() -> None:
    parley = Parley(2)
    parley.submit(0, ask("a"))
    assert "a" in parley.ranks[0].submissions.waiting
    assert len(parley.ranks[0].submissions.waiting) == 1
    parley.ranks[0].fail(PeerLost(1, "silent"))
    parley.ranks[0].fail(PeerLost(0, "another one"))
    assert lost(parley) == [1, None]
    assert "a" not in parley.ranks[0].submissions.waiting
    parley.tick(5.0)
    assert parley.ranks[0].next_due() is None


# ------------------------------------------------------------------------------------------------------------ stalls


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (1, 2), (0, 3)])
def test_a_stall_is_reported_on_every_rank_and_then_ends_it(missing: tuple[int, ...]) -> None:
    parley = Parley(4, stall_warning_s=10.0, stall_abort_s=60.0)
    for rank in range(4):
        if rank not in missing:
            parley.submit(rank, ask("late"), where=f"train.py:{rank}")
    parley.run()
    parley.tick(9.0)
    parley.run()
    assert not any(negotiator.pop_stalls() for negotiator in parley.ranks)
    reports: list[list[float]] = [[] for _ in range(4)]
    second = 9.0
    while second < 59.9:
        second += 0.25
        parley.tick(second)
        parley.run()
        for rank, negotiator in enumerate(parley.ranks):
            for report in negotiator.pop_stalls():
                reports[rank].append(second)
                text = str(report)
                assert report.tensor == "late"
                assert "'late'" in text
                assert "train.py:" in text
                assert set(report.missing) == (set(missing) if rank not in missing else {rank})
                assert report.silent == ()
                assert report.as_dict()["missing"] == list(report.missing)
    for rank, times in enumerate(reports):
        assert times[0] < 12.0, "the first one comes in time"
        waiting = 4 - len(missing)
        assert len(times) <= 5 * (waiting if rank in missing else 1), f"a log must not fill with one stall: {times}"
    parley.tick(60.0)
    parley.run()
    for negotiator in parley.ranks:
        assert isinstance(negotiator.ended, StallError)
        assert negotiator.ended.tensor == "late"
        assert set(negotiator.ended.ranks) == set(missing)
        assert negotiator.ended.waited_s == pytest.approx(60.0)
        assert "train.py:" in negotiator.ended.where


@pytest.mark.parametrize(("warning", "abort"), [(0.2, 0.8), (10.0, 60.0), (1.0, 2.5), (1.0, 0.0)])
def test_however_often_one_looks_the_questions_are_few(warning: float, abort: float) -> None:
    parley = Parley(2, stall_warning_s=warning, stall_abort_s=abort)
    parley.submit(0, ask("late"))
    parley.run()
    end = abort or 8.0
    for step in range(1, 400):
        parley.tick(end * step / 401)
        parley.run()
    questions = sum(sent.kind is Kind.QUESTION for sent in parley.sent)
    assert 1 <= questions <= 5


def test_joined_ranks_are_not_missing() -> None:
    parley = Parley(3, stall_warning_s=1.0)
    parley.join(2)
    parley.submit(0, ask("late"))
    parley.settle()
    parley.tick(2.0)
    parley.run()
    parley.tick(2.1)
    assert {report.missing for report in parley.ranks[0].pop_stalls()} == {(1,)}
    assert not parley.ranks[2].pop_stalls()
    assert "rank(s) 1" in parley.ranks[0].explain("late", 3.0)


def test_silent_ranks_are_named_as_such() -> None:
    parley = Parley(2, stall_warning_s=1.0, stall_abort_s=5.0)
    parley.submit(0, ask("late"))
    parley.run()
    parley.tick(1.5)
    parley.wires[0, 1].clear()
    parley.tick(3.0)
    (report,) = parley.ranks[0].pop_stalls()
    assert (report.missing, report.silent) == ((), (1,))
    assert "no answer from rank(s) 1" in str(report)
    parley.tick(6.0)
    error = parley.ranks[0].ended
    assert isinstance(error, StallError)
    assert error.ranks == (1,)


def test_settings_that_cannot_work() -> None:
    for wrong in (
        {"cache_capacity": -1},
        {"fusion_bytes": -1},
        {"join_divisor": "all"},
        {"cycle_s": 2.0},
        {"cycle_s": -1.0},
        {"stall_warning_s": -1.0},
        {"stall_warning_s": 10.0, "stall_abort_s": 10.0},
    ):
        with pytest.raises(ConfigurationError):
            CoordinationConfig(**wrong)  # type: ignore[arg-type]


def test_an_operation_that_waits_is_explained() -> None:
    parley = Parley(3)
    parley.submit(0, ask("a"), where="train.py:7")
    assert "train.py:7" in parley.ranks[0].explain("a", 2.0)
    assert "being carried out" in parley.ranks[0].explain("b", 2.0)
    assert WaitingOperation(ask("a"), 0.0, "x").where == "x"


def test_ranks_that_differ_about_a_priority_agree_on_that_of_the_first_rank() -> None:
    parley = Parley(3)
    for step in range(3):
        for rank in (2, 1, 0):
            parley.submit(rank, ask("a", priority=10 * step + rank), ask("b", priority=7 - rank))
        parley.settle()
    for answers in parley.answers:
        assert [(response.name, response.request.priority) for response, _ in answers] == [("a", 0), ("b", 7)] * 3
    assert [rank.counters.hits for rank in parley.ranks] == [4] * 3, "another priority does not make a request another"
