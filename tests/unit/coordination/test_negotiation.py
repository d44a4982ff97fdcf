"""Negotiators by hand: what the cache says, who sends what, groups, joins, leaving, and what no correct peer sends."""

from __future__ import annotations

import json
import random

import pytest
from negotiators_by_hand import CHANGES, Negotiation, ask, changed, group, names

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
    negotiation = Negotiation(world_size)
    requests = [ask(f"w{index}", index + 1) for index in range(20)]
    for rank in range(world_size):
        negotiation.submit(rank, *random.Random(rank).sample(requests, 20))
    first = negotiation.take()
    assert sorted(names(first)) == sorted(f"w{index}" for index in range(20))
    slow = [rank.counters.slow_cycles for rank in negotiation.ranks]
    for step in range(3):
        negotiation.sent.clear()
        before = [rank.counters.cycles for rank in negotiation.ranks]
        for rank in range(world_size):
            negotiation.submit(rank, *random.Random(100 * step + rank).sample(requests, 20))
        again = negotiation.take()
        assert names(again) == names(first), "by ascending bit, which is the order of the first step"
        for rank, counts in enumerate(negotiation.counts()):
            cycles = negotiation.ranks[rank].counters.cycles - before[rank]
            assert counts == {Kind.VOTE: cycles * votes(world_size)} or world_size == 1
            assert cycles == 1 or world_size == 1
        for counters in (rank.counters for rank in negotiation.ranks):
            assert counters.hits == 20 * (step + 1)
            assert counters.misses == 20
    assert [rank.counters.slow_cycles for rank in negotiation.ranks] == slow


@pytest.mark.parametrize("world_size", SIZES)
def test_a_slow_cycle_costs_one_request_and_one_response_a_rank(world_size: int) -> None:
    negotiation = Negotiation(world_size)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    counts = negotiation.counts(cycle=0)
    assert sum(count[Kind.REQUESTS] for count in counts) == sum(count[Kind.RESPONSES] for count in counts)
    assert [count[Kind.REQUESTS] for count in counts] == [0] + [1] * (world_size - 1)
    assert all(count[Kind.VOTE] == votes(world_size) for count in counts)
    assert not any(count[Kind.INVALID] for count in counts)
    assert max(count[Kind.RESPONSES] for count in counts) == rounds(world_size), "the tree is no star"


@pytest.mark.parametrize("world_size", SIZES)
def test_idle_ranks_say_nothing(world_size: int) -> None:
    negotiation = Negotiation(world_size, cycle_s=0.005)
    assert all(rank.next_due() is None for rank in negotiation.ranks)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    negotiation.sent.clear()
    for second in range(1, 20):
        negotiation.tick(float(second))
        assert all(rank.next_due() is None for rank in negotiation.ranks)
    assert not negotiation.sent


def test_status_bits_are_inverted() -> None:
    negotiation = Negotiation(3)
    negotiation.submit(1, ask("a"))
    vote = decode_bits(split(negotiation.sent[0].message)[3], 100)
    assert vote & 0b11 == 0b10, "only 'uncached' is not so"
    negotiation.run()
    negotiation.submit(0, ask("a"))
    negotiation.submit(2, ask("a"))
    assert names(negotiation.take()) == ["a"]
    negotiation.sent.clear()
    negotiation.submit(2, ask("a"))
    assert decode_bits(split(negotiation.sent[0].message)[3], 100) == 0b111
    negotiation.run()  # the others have nothing: no bit is common, no status is raised
    negotiation.sent.clear()
    negotiation.submit(0, ask("a", 5))
    assert decode_bits(split(negotiation.sent[0].message)[3], 100) == 0b000, "uncached and invalid, and no hit"


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_is_the_same_error_on_every_rank(world_size: int, change: str) -> None:
    for odd in {0, 1 % world_size, world_size - 1}:
        negotiation = Negotiation(world_size)
        negotiation.submit_all(USUAL, ask("other"))
        negotiation.take()
        for rank in range(world_size):
            negotiation.submit(rank, changed(USUAL, **CHANGES[change]) if rank == odd else USUAL, ask("other"))
        responses = negotiation.take()
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
        assert "w" not in dict(negotiation.snapshot())
        # and the name can be used again, as before and otherwise
        negotiation.submit_all(ask("w", 7))
        assert [response.error for response in negotiation.take()] == [None]


def test_or_only_when_something_is_invalid() -> None:
    negotiation = Negotiation(5)
    negotiation.submit_all(ask("a"), ask("b"), ask("c"))
    negotiation.take()
    negotiation.submit_all(ask("a"), ask("b"), ask("d"))
    negotiation.take()
    assert not any(count[Kind.INVALID] for count in negotiation.counts())
    cycles = set(negotiation.cycles[0])
    for rank in range(5):
        negotiation.submit(rank, *([ask("b", 9)] if rank in (1, 3) else [ask("a"), ask("b", 9)]))
    negotiation.take()
    for cycle in set(negotiation.cycles[0]) - cycles:
        assert {count[Kind.INVALID] for count in negotiation.counts(cycle=cycle)} in ({0}, {4})
    assert sum(count[Kind.INVALID] for count in negotiation.counts()) == 20, "in one cycle, four of every rank"


def test_a_change_on_all_ranks_is_no_error_and_a_hit_elsewhere_is_asked_in_the_same_cycle() -> None:
    negotiation = Negotiation(4)
    negotiation.submit_all(ask("a"), ask("b"))
    negotiation.take()
    cycles = negotiation.ranks[0].counters.cycles
    negotiation.submit_all(ask("b"), ask("a", 9))
    responses = negotiation.take()
    assert sorted(names(responses)) == ["a", "b"]
    assert all(response.error is None for response in responses)
    assert next(response.request.shape for response in responses if response.name == "a") == (9,)
    assert negotiation.ranks[0].counters.cycles == cycles + 1
    negotiation.submit_all(ask("a"))  # it was (9,) only once
    assert [response.request.shape for response in negotiation.take()] == [(4,)]


def test_a_hit_that_is_invalid_elsewhere_reaches_rank_0_in_the_same_cycle() -> None:
    negotiation = Negotiation(3)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    cycles = negotiation.ranks[0].counters.cycles
    for rank in range(3):
        negotiation.submit(rank, ask("a", 9) if rank == 2 else ask("a"))
    (response,) = negotiation.take()
    assert response.error is not None
    assert negotiation.ranks[0].counters.cycles == cycles + 1


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7])
def test_more_names_than_the_cache_holds(world_size: int, capacity: int) -> None:
    negotiation = Negotiation(world_size, cache_capacity=capacity)
    generator = random.Random(capacity)
    for step in range(30):
        chosen = [ask(f"w{index}") for index in generator.sample(range(9), generator.randint(1, 5))]
        for rank in range(world_size):
            negotiation.submit(rank, *random.Random(step * 10 + rank).sample(chosen, len(chosen)))
            if generator.random() < 0.3:
                negotiation.run()
        assert sorted(names(negotiation.take())) == sorted(request.name for request in chosen)
        assert len(negotiation.snapshot()) <= capacity
        assert all(bit < capacity for _, bit in negotiation.snapshot())
    hits = {rank.counters.hits for rank in negotiation.ranks}
    assert len(hits) == 1
    assert bool(hits.pop()) == bool(capacity)


def test_unnamed_operations_leave_the_cache_alone() -> None:
    negotiation = Negotiation(3, cache_capacity=2)
    negotiation.submit_all(ask("a"), ask("b"))
    negotiation.take()
    for number in range(5):
        negotiation.submit_all(ask(f"allreduce#{number}", cached=False))
        assert len(negotiation.take()) == 1
    assert negotiation.snapshot() == [("a", 0), ("b", 1)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_more_requests_than_one_cycle_takes(world_size: int) -> None:
    negotiation = Negotiation(world_size, cache_capacity=4000, cycle_s=1.0)
    requests = [ask(f"w{index}") for index in range(2100)]
    for rank in range(world_size):
        negotiation.submit(rank, *(requests if rank % 2 else reversed(requests)))
    negotiation.tick(1.0)
    negotiation.run()  # the clock stands still: the rest is not put off
    responses = negotiation.responses()
    assert len(responses) == 2100
    negotiation.check()
    lists = [
        [requests for rank, requests, _ in json.loads(split(sent.message)[3]) if rank == sent.source]
        for sent in negotiation.sent
        if sent.kind is Kind.REQUESTS
    ]
    assert all(len(requests) <= 1024 for (requests,) in lists)
    assert negotiation.ranks[0].counters.slow_cycles >= 3
    for answers in negotiation.answers:
        answers.clear()
    negotiation.submit_all(*requests)
    negotiation.tick(10.0)
    assert len(negotiation.take()) == 2100
    assert negotiation.ranks[0].counters.misses == 2100


def test_a_group_that_is_larger_than_a_cycle_comes_as_a_whole() -> None:
    negotiation = Negotiation(2, cache_capacity=4000)
    negotiation.submit_all(*group("g", *[(3,)] * 1500))
    responses = negotiation.take()
    assert len(responses) == 1500
    assert sum(bool(cycle.responses) for cycle in negotiation.cycles[0].values()) == 1


def test_collecting_while_nobody_is_blocked() -> None:
    negotiation = Negotiation(2, cycle_s=0.5)
    negotiation.now = 10.0
    negotiation.submit_all(ask("a"))
    assert not negotiation.sent
    assert negotiation.ranks[0].next_due() == pytest.approx(10.5)
    negotiation.now = 10.3
    negotiation.submit_all(ask("b"))
    assert negotiation.ranks[0].next_due() == pytest.approx(10.5), "the first one counts"
    negotiation.tick(10.4)
    assert not negotiation.sent
    negotiation.tick(10.6)
    negotiation.run()
    assert names(negotiation.responses()) == ["a", "b"]
    assert negotiation.ranks[0].counters.cycles == 1
    negotiation.sent.clear()
    negotiation.submit(1, ask("a"))
    assert not negotiation.sent
    negotiation.hurry(1)  # somebody is blocked
    assert len(negotiation.sent) == 1
    negotiation.hurry(0)  # without news
    assert len(negotiation.sent) == 1
    negotiation.run()
    negotiation.submit(0, ask("a"))
    negotiation.submit(1, ask("b"))
    negotiation.hurry(0)
    negotiation.run()
    assert names(negotiation.responses()) == ["a", "b", "a"]
    assert negotiation.ranks[1].next_due() is None, "rank 1 was drawn in, with what it had"


def test_enough_bytes_begin_a_cycle_at_once() -> None:
    negotiation = Negotiation(2, cycle_s=0.5, fusion_bytes=100)
    negotiation.ranks[0].timer._not_before = 100.0
    negotiation.submit(0, ask("a"), num_bytes=60)
    assert not negotiation.sent
    negotiation.submit(0, ask("b"), num_bytes=40)
    assert negotiation.sent


# ----------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("world_size", SIZES)
def test_a_group_is_ready_as_a_whole(world_size: int) -> None:
    negotiation = Negotiation(world_size)
    for step in range(3):
        for rank in range(world_size):
            members = group("g", (1,), (2,), (3,))
            negotiation.submit(rank, *random.Random(step * 7 + rank).sample(members, 3))
            negotiation.run()
            assert (rank == world_size - 1) == bool(negotiation.responses(rank))
        assert len(negotiation.take()) == 3
    assert negotiation.ranks[0].counters.misses == 3


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
        negotiation = Negotiation(world_size)
        usual = group("g", (1,), (2,), (3,)) + group("h", (4,), (5,)) + [ask("single")]
        if cached:
            negotiation.submit_all(*usual)
            negotiation.take()
        for rank in range(world_size):
            negotiation.submit(
                rank,
                *(group("g", (1,), (9,), (3,)) + group("h", (4,), (5,)) + [ask("single")] if rank == odd else usual),
            )
        responses = {response.name: response for response in negotiation.take()}
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
        negotiation.submit_all(*usual)
        assert all(response.error is None for response in negotiation.take())


def test_a_group_of_which_one_member_was_evicted_is_asked_for_anew_as_a_whole() -> None:
    negotiation = Negotiation(3, cache_capacity=3)
    negotiation.submit_all(*group("g", (1,), (2,)))
    negotiation.submit_all(ask("x"))
    negotiation.take()
    negotiation.submit_all(ask("y"))
    negotiation.take()
    assert [name for name, _ in negotiation.snapshot()] == ["g.1of2", "x", "y"]
    negotiation.submit_all(*group("g", (1,), (2,)))
    assert names(negotiation.take()) == ["g.0of2", "g.1of2"]
    assert [name for name, _ in negotiation.snapshot()] == ["y", "g.0of2", "g.1of2"]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_group_differently(odd: int) -> None:
    single = [ask("g.0of2", 1), ask("g.1of2", 2)]
    for other in (
        single,
        [changed(request, batch=("h", 2)) for request in single],
        [changed(single[0], batch=("h", 1)), single[1]],
    ):
        negotiation = Negotiation(3)
        for rank in range(3):
            negotiation.submit(rank, *(other if rank == odd else group("g", (1,), (2,))))
        responses = negotiation.take()
        assert sorted(names(responses)) == ["g.0of2", "g.1of2"]
        for response in responses:
            assert response.error is not None
            error = response.error.error()
            assert isinstance(error, MismatchError)
            assert "in the group 'g' of 2" in str(error)
        assert all(len(rank.submissions.waiting) == 0 for rank in negotiation.ranks)


def test_a_group_of_two_against_one_of_three() -> None:
    negotiation = Negotiation(2)
    names_ = ["a", "b", "c"]
    negotiation.submit(0, *[ask(name, batch=("g", 2)) for name in names_[:2]], ask("c"))
    negotiation.submit(1, *[ask(name, batch=("h", 3)) for name in names_])
    responses = negotiation.take()
    assert sorted(names(responses)) == names_
    assert all(response.error is not None for response in responses)


# ------------------------------------------------------------------------------------------------------------- join


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world_size", SIZES)
def test_each_rank_first_to_have_no_more_data(world_size: int, *, cached: bool) -> None:
    for first in range(world_size):
        negotiation = Negotiation(world_size)
        if cached:
            negotiation.submit_all(ask("a"), ask("b"))
            negotiation.take()
        snapshot = negotiation.snapshot()
        order = [(first + step) % world_size for step in range(world_size)]
        for place, rank in enumerate(order):
            negotiation.join(rank)
            negotiation.settle()
            active = order[place + 1 :]
            for other in active:
                negotiation.submit(other, ask("a"), ask("b"))
                if cached:  # a mix: one that nobody knows
                    negotiation.submit(other, ask(f"new {place}"))
                negotiation.settle()
            responses = negotiation.take()
            assert sorted(names(responses)) == ((["a", "b"] + [f"new {place}"] * cached) if active else [])
            assert all(response.joined == tuple(sorted(order[: place + 1])) for response in responses)
            assert all(response.error is None for response in responses)
            expected = tuple(order[: place + 1]) if active else ()
            assert all(set(negotiator.membership.joined) == set(expected) for negotiator in negotiation.ranks)
        assert {negotiator.membership.last_joined for negotiator in negotiation.ranks} == {order[-1]}
        assert sorted(negotiation.snapshot()) == sorted(snapshot), "nothing of it is remembered"


@pytest.mark.parametrize("world_size", SIZES)
def test_all_join_in_one_cycle_and_again(world_size: int) -> None:
    negotiation = Negotiation(world_size)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    for _ in range(3):
        for rank in reversed(range(world_size)):
            negotiation.join(rank)
        negotiation.settle()
        assert negotiation.take() == [], "all have lent, and nobody had data"
        assert len({negotiator.membership.last_joined for negotiator in negotiation.ranks}) == 1
        assert {negotiator.membership.last_joined for negotiator in negotiation.ranks} <= set(range(world_size))
        assert all(negotiator.membership.joined == () for negotiator in negotiation.ranks)
        negotiation.submit_all(ask("a"))
        (response,) = negotiation.take()
        assert response.joined == ()


def test_a_rank_that_joins_again_at_once_is_in_the_next_epoch() -> None:
    negotiation = Negotiation(2)
    negotiation.join(0)
    negotiation.join(1)
    negotiation.settle()
    first = negotiation.ranks[0].membership.last_joined
    negotiation.join(1)
    negotiation.settle()
    assert negotiation.ranks[1].membership.last_joined is None
    assert negotiation.ranks[0].membership.last_joined == first
    negotiation.submit(0, ask("a"))
    assert [response.joined for response in negotiation.take()] == [(1,)]
    negotiation.join(0)
    negotiation.settle()
    assert negotiation.ranks[0].membership.last_joined == negotiation.ranks[1].membership.last_joined == 0


def test_what_waited_for_the_rank_that_joins_becomes_ready() -> None:
    for cached in (False, True):
        negotiation = Negotiation(3)
        if cached:
            negotiation.submit_all(ask("a"))
            negotiation.take()
        negotiation.submit(0, ask("a"))
        negotiation.submit(2, ask("a"))
        negotiation.settle()
        assert not negotiation.responses()
        negotiation.join(1)
        (response,) = negotiation.take()
        assert response.joined == (1,)


def test_a_group_of_operations_while_a_rank_has_joined() -> None:
    for cached in (False, True):
        negotiation = Negotiation(3)
        if cached:
            negotiation.submit_all(*group("g", (1,), (2,)))
            negotiation.take()
        negotiation.join(2)
        for rank in (0, 1):
            negotiation.submit(rank, *group("g", (1,), (2,)))
        responses = negotiation.take()
        assert len(responses) == 2
        assert all(response.joined == (2,) and response.error is None for response in responses)


def test_a_mismatch_while_a_rank_has_joined() -> None:
    negotiation = Negotiation(3)
    negotiation.join(1)
    negotiation.submit(0, ask("a"))
    negotiation.submit(2, ask("a", 9))
    (response,) = negotiation.take()
    assert response.error is not None
    assert response.error.sets == ((0,), (2,))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", GATHERLIKE)
def test_what_a_rank_without_data_cannot_take_part_in(kind: OpKind, *, cached: bool) -> None:
    negotiation = Negotiation(3)
    request = ask("w", 3, 2, kind=kind, splits=(1, 1, 1) if kind is OpKind.ALLTOALL else ())
    if cached:
        negotiation.submit_all(request)
        negotiation.take()
    negotiation.join(1)
    for rank in (0, 2):
        negotiation.submit(rank, request)
    (response,) = negotiation.take()
    assert response.error is not None
    error = response.error.error()
    assert isinstance(error, UnsupportedError)
    assert "'w'" in str(error)
    assert "1" in str(error)
    negotiation.join(0)
    negotiation.join(2)
    negotiation.settle()
    negotiation.submit_all(request)
    (response,) = negotiation.take()
    assert response.error is None


def test_a_barrier_goes_on_without_the_joined() -> None:
    negotiation = Negotiation(3)
    negotiation.join(0)
    for rank in (1, 2):
        negotiation.submit(rank, Request("barrier#1", OpKind.BARRIER, cached=False))
    (response,) = negotiation.take()
    assert response.error is None


def test_rows_of_every_rank() -> None:
    negotiation = Negotiation(4)
    for step in range(2):
        for rank in range(4):
            negotiation.submit(
                rank,
                ask("gather", rank, 2, kind=OpKind.ALLGATHER),
                ask("all to all", 6, kind=OpKind.ALLTOALL, splits=tuple(sorted((0, 1, 2, 3), key=lambda i: i ^ rank))),
            )
        rows = {response.name: response.rows for response in negotiation.take()}
        assert rows["gather"] == ((0,), (1,), (2,), (3,)), step
        assert rows["all to all"] == ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    assert negotiation.ranks[0].counters.misses == 2


# ---------------------------------------------------------------------------------------------- leaving and failing


@pytest.mark.parametrize("world_size", SIZES)
def test_leaving_ends_it_for_those_who_need_the_rank(world_size: int) -> None:
    negotiation = Negotiation(world_size)
    negotiation.submit(0, ask("a"))
    negotiation.run()
    gone = world_size - 1
    negotiation.leave(gone, "it has closed the group")
    negotiation.run()
    for rank, negotiator in enumerate(negotiation.ranks):
        if rank == gone:
            assert isinstance(negotiator.ended, GroupClosed)
        else:
            assert isinstance(negotiator.ended, PeerLost)
            assert (negotiator.ended.rank, negotiator.ended.reason) == (gone, "it has closed the group")
        assert len(negotiator.submissions.waiting) == 0
        assert negotiator.next_due() is None
        negotiator.receive(0, b"anything", 0.0)  # too late to matter
    assert negotiation.counts()[gone][Kind.LEAVE] == world_size - 1
    negotiation.leave(gone, "again")
    assert negotiation.counts()[gone][Kind.LEAVE] == world_size - 1


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_operations_that_a_rank_has_not_carried_out_when_it_leaves_end_the_agreement(world_size: int) -> None:
    for gone in range(world_size):
        for undone in range(3):
            negotiation = Negotiation(world_size)
            negotiation.submit_all(ask("a"), ask("b"))
            negotiation.take()
            assert [negotiator.cycles.agreed for negotiator in negotiation.ranks] == [2] * world_size
            negotiation.leave(gone, "gone", undone=undone)
            negotiation.settle()
            survivors = [rank for rank in range(world_size) if rank != gone]
            assert [lost(negotiation)[rank] for rank in survivors] == [gone if undone else None] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_what_the_others_agree_on_after_a_rank_has_left_in_the_middle_of_a_cycle_fails(world_size: int) -> None:
    """The rank that has left has carried out all that it knows to be agreed on, but not this cycle's operation."""
    cut_short = moves = 0
    while True:
        for gone in range(world_size):
            negotiation = Negotiation(world_size)
            negotiation.submit_all(ask("a"))
            for _ in range(moves):
                pair = next((pair for pair, wire in negotiation.wires.items() if wire), None)
                if pair is None:
                    assert cut_short
                    return
                negotiation.move(*pair)
            knows = bool(negotiation.responses(gone))
            negotiation.leave(gone, "gone")
            negotiation.settle()
            for rank in set(range(world_size)) - {gone}:
                if not knows:
                    assert lost(negotiation)[rank] == gone
                    cut_short += bool(negotiation.responses(rank))
        moves += 1


@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_can_carry_nothing_out_ends_the_agreement_on_all_ranks(*, own: bool) -> None:
    negotiation = Negotiation(3)
    negotiation.submit_all(ask("a"))
    negotiation.take()
    error = TotalReduceError("no memory") if own else PeerLost(2, "silent")
    for _ in range(2):
        negotiation.ranks[1].abort(error, "no memory" * 100)
        negotiation.collect(1)
    negotiation.run()
    assert negotiation.ranks[1].ended is error
    for rank in (0, 2):
        ended = negotiation.ranks[rank].ended
        assert isinstance(ended, PeerLost)
        assert (ended.rank, ended.reason) == ((1, ("no memory" * 100)[:500]) if own else (2, "silent"))
    assert negotiation.counts()[1][Kind.ABORT] == 2


def test_a_rank_that_leaves_is_named_as_the_job_names_it() -> None:
    negotiator = Negotiator(0, 2, CoordinationConfig(), ranks=(5, 3))
    negotiator.submit([ask("a")], 0.0)
    negotiator.receive(1, encode(Kind.LEAVE, 7, value=["x" * 1000, 0]), 0.0)
    assert isinstance(negotiator.ended, PeerLost)
    assert (negotiator.ended.rank, negotiator.ended.reason) == (3, "x" * 500)
    for value in ([1], "gone", ["gone"], ["gone", "0"], ["gone", 0, 0], None):
        with pytest.raises(ProtocolError, match="rank 1 leaves as no correct peer does"):
            Negotiator(0, 2, CoordinationConfig()).receive(1, encode(Kind.LEAVE, 0, value=value), 0.0)


def lost(negotiation: Negotiation) -> list[object]:
    return [
        negotiator.ended.rank if isinstance(negotiator.ended, PeerLost) else None for negotiator in negotiation.ranks
    ]


@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_left_is_missed_only_when_needed(world_size: int, *, says_so: bool) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        negotiation = Negotiation(world_size)
        negotiation.submit_all(ask("a"))
        negotiation.take()
        if says_so:
            negotiation.leave(gone, "gone")
        else:
            negotiation.depart(gone)
        negotiation.settle()
        assert all(negotiation.ranks[rank].ended is None for rank in survivors), "nobody needs it"
        negotiation.submit(survivors[0], ask("a"))
        negotiation.settle()
        assert [lost(negotiation)[rank] for rank in survivors] == [gone] * len(survivors)
        error = negotiation.ranks[survivors[-1]].ended
        assert isinstance(error, PeerLost)
        assert error.reason == "gone"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_one_rank_alone_needs_a_rank_that_has_left(world_size: int, *, begun: bool) -> None:
    """The others have nothing to wait for, and the votes that would draw them in went to the rank that has left."""
    for gone in range(world_size):
        for alone in set(range(world_size)) - {gone}:
            negotiation = Negotiation(world_size)
            if begun:
                negotiation.submit(alone, ask("a"))
                assert negotiation.ranks[alone].next_due() is None, "its cycle has begun"
            negotiation.leave(gone, "gone")
            if not begun:
                negotiation.run()
                negotiation.submit(alone, ask("a"))
            negotiation.settle()
            survivors = [rank for rank in range(world_size) if rank != gone]
            assert [lost(negotiation)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_leaves_while_an_operation_waits_for_it(world_size: int, *, cached: bool) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        negotiation = Negotiation(world_size)
        if cached:
            negotiation.submit_all(ask("a"))
            negotiation.take()
        for rank in survivors:
            negotiation.submit(rank, ask("a"))
        negotiation.settle()
        assert not any(negotiation.responses(rank) for rank in survivors)
        negotiation.depart(gone)
        negotiation.settle()
        assert [lost(negotiation)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_who_leaves_while_others_have_joined(world_size: int) -> None:
    for gone in range(world_size):
        survivors = [rank for rank in range(world_size) if rank != gone]
        negotiation = Negotiation(world_size)
        negotiation.join(survivors[0])
        negotiation.settle()
        negotiation.depart(gone)
        negotiation.settle()
        assert [lost(negotiation)[rank] for rank in survivors] == [gone] * len(survivors)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_who_leaves_in_the_middle_of_a_cycle(world_size: int) -> None:
    """After every number of messages: those left are told of it, or had what they needed."""
    moves = 0
    while True:
        for gone in {0, 1, world_size - 1}:
            negotiation = Negotiation(world_size)
            negotiation.submit_all(ask("a"))
            for _ in range(moves):
                pair = next((pair for pair, wire in negotiation.wires.items() if wire), None)
                if pair is None:
                    return
                negotiation.move(*pair)
            negotiation.depart(gone)
            for wire in (wire for pair, wire in negotiation.wires.items() if pair[1] == gone):
                wire.clear()
            negotiation.settle()
            ended = [negotiation.ranks[rank].ended for rank in range(world_size) if rank != gone]
            for rank in range(world_size):
                if rank != gone:
                    error = negotiation.ranks[rank].ended
                    assert names(negotiation.responses(rank)) == ["a"] if error is None else isinstance(error, PeerLost)
                    if isinstance(error, PeerLost):
                        assert error.rank == gone
                        assert not len(negotiation.ranks[rank].submissions.waiting)
            if any(error is not None for error in ended):
                assert all(
                    error is not None or negotiation.responses(rank)
                    for rank, error in zip([r for r in range(world_size) if r != gone], ended, strict=True)
                )
        moves += 1


def test_a_lost_rank_fails_what_is_pending() -> None:
    negotiation = Negotiation(2)
    negotiation.submit(0, ask("a"))
    assert "a" in negotiation.ranks[0].submissions.waiting
    assert len(negotiation.ranks[0].submissions.waiting) == 1
    negotiation.ranks[0].fail(PeerLost(1, "silent"))
    negotiation.ranks[0].fail(PeerLost(0, "another one"))
    assert lost(negotiation) == [1, None]
    assert "a" not in negotiation.ranks[0].submissions.waiting
    negotiation.tick(5.0)
    assert negotiation.ranks[0].next_due() is None


# ------------------------------------------------------------------------------------------------------------ stalls


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (1, 2), (0, 3)])
def test_a_stall_is_reported_on_every_rank_and_then_ends_it(missing: tuple[int, ...]) -> None:
    negotiation = Negotiation(4, stall_warning_s=10.0, stall_abort_s=60.0)
    for rank in range(4):
        if rank not in missing:
            negotiation.submit(rank, ask("late"), where=f"train.py:{rank}")
    negotiation.run()
    negotiation.tick(9.0)
    negotiation.run()
    assert not any(negotiator.pop_stalls() for negotiator in negotiation.ranks)
    reports: list[list[float]] = [[] for _ in range(4)]
    second = 9.0
    while second < 59.9:
        second += 0.25
        negotiation.tick(second)
        negotiation.run()
        for rank, negotiator in enumerate(negotiation.ranks):
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
    negotiation.tick(60.0)
    negotiation.run()
    for negotiator in negotiation.ranks:
        assert isinstance(negotiator.ended, StallError)
        assert negotiator.ended.tensor == "late"
        assert set(negotiator.ended.ranks) == set(missing)
        assert negotiator.ended.waited_s == pytest.approx(60.0)
        assert "train.py:" in negotiator.ended.where


@pytest.mark.parametrize(("warning", "abort"), [(0.2, 0.8), (10.0, 60.0), (1.0, 2.5), (1.0, 0.0)])
def test_however_often_one_looks_the_questions_are_few(warning: float, abort: float) -> None:
    negotiation = Negotiation(2, stall_warning_s=warning, stall_abort_s=abort)
    negotiation.submit(0, ask("late"))
    negotiation.run()
    end = abort or 8.0
    for step in range(1, 400):
        negotiation.tick(end * step / 401)
        negotiation.run()
    questions = sum(sent.kind is Kind.QUESTION for sent in negotiation.sent)
    assert 1 <= questions <= 5


def test_joined_ranks_are_not_missing() -> None:
    negotiation = Negotiation(3, stall_warning_s=1.0)
    negotiation.join(2)
    negotiation.submit(0, ask("late"))
    negotiation.settle()
    negotiation.tick(2.0)
    negotiation.run()
    negotiation.tick(2.1)
    assert {report.missing for report in negotiation.ranks[0].pop_stalls()} == {(1,)}
    assert not negotiation.ranks[2].pop_stalls()
    assert "rank(s) 1" in negotiation.ranks[0].explain("late", 3.0)


def test_silent_ranks_are_named_as_such() -> None:
    negotiation = Negotiation(2, stall_warning_s=1.0, stall_abort_s=5.0)
    negotiation.submit(0, ask("late"))
    negotiation.run()
    negotiation.tick(1.5)
    negotiation.wires[0, 1].clear()
    negotiation.tick(3.0)
    (report,) = negotiation.ranks[0].pop_stalls()
    assert (report.missing, report.silent) == ((), (1,))
    assert "no answer from rank(s) 1" in str(report)
    negotiation.tick(6.0)
    error = negotiation.ranks[0].ended
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
    negotiation = Negotiation(3)
    negotiation.submit(0, ask("a"), where="train.py:7")
    assert "train.py:7" in negotiation.ranks[0].explain("a", 2.0)
    assert "being carried out" in negotiation.ranks[0].explain("b", 2.0)
    assert WaitingOperation(ask("a"), 0.0, "x").where == "x"


def test_ranks_that_differ_about_a_priority_agree_on_that_of_the_first_rank() -> None:
    negotiation = Negotiation(3)
    for step in range(3):
        for rank in (2, 1, 0):
            negotiation.submit(rank, ask("a", priority=10 * step + rank), ask("b", priority=7 - rank))
        negotiation.settle()
    for answers in negotiation.answers:
        assert [(response.name, response.request.priority) for response, _ in answers] == [("a", 0), ("b", 7)] * 3
    assert [rank.counters.hits for rank in negotiation.ranks] == [4] * 3, (
        "another priority does not make a request another"
    )
