"""The parts of a negotiator, each by itself: neighbours, operations, timer, inbox, membership, and rank 0's table."""

from __future__ import annotations

import pytest
from negotiators_by_hand import ask, group, names

from totalreduce.coordination.cache import ResponseCache
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.coordination.inbox import CycleInbox
from totalreduce.coordination.limits import Allowances, RankRequests
from totalreduce.coordination.membership import Membership
from totalreduce.coordination.messages import Kind, encode, split
from totalreduce.coordination.requests import Response
from totalreduce.coordination.submissions import CycleTimer, Submissions
from totalreduce.coordination.table import RequestTable
from totalreduce.coordination.topology import Topology
from totalreduce.foundation.errors import ProtocolError


@pytest.mark.parametrize("world_size", range(1, 40))
def test_requests_of_all_ranks_reach_rank_0_and_votes_reach_all(world_size: int) -> None:
    ranks = [Topology(rank, world_size) for rank in range(world_size)]
    for rank, topology in enumerate(ranks):
        assert topology.children == [child for child in range(1, world_size) if ranks[child].parent == rank]
        below = {rank}.union(*(topology.subtree(child) for child in topology.children))
        assert below == {rank} | {other for child in topology.children for other in ranks[child].subtree(child)}
        assert len(below) == 1 + sum(len(topology.subtree(child)) for child in topology.children), "each rank once"
    assert {rank for child in ranks[0].children for rank in ranks[0].subtree(child)} == set(range(1, world_size))
    heard = [{rank} for rank in range(world_size)]
    for round_ in range(ranks[0].num_rounds):
        for rank, topology in enumerate(ranks):
            assert all(rank in ranks[target].vote_sources[round_] for target in topology.vote_targets[round_])
        heard = [
            heard[rank].union(*(heard[each] for each in ranks[rank].vote_sources[round_])) for rank in range(world_size)
        ]
    assert all(votes == set(range(world_size)) for votes in heard)
    for topology in ranks:
        sources = [source for several in topology.vote_sources for source in several]
        assert len(sources) == len(set(sources)) == sum(map(len, topology.vote_targets)), "each rank votes once"
        assert topology.rank not in sources


@pytest.mark.parametrize(("world_size", "rounds", "messages"), [(2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 2, 4), (64, 3, 9)])
def test_up_to_four_ranks_vote_in_one_round(world_size: int, rounds: int, messages: int) -> None:
    topology = Topology(world_size - 1, world_size)
    assert (topology.num_rounds, sum(map(len, topology.vote_targets))) == (rounds, messages)


def test_the_timer_collects_until_a_caller_is_blocked_or_a_buffer_is_full() -> None:
    timer = CycleTimer(CoordinationConfig(cycle_s=0.5, fusion_bytes=100))
    assert timer.due_at is None
    assert not timer.hurry(), "there is no news"
    assert not timer.submitted(60, 10.0)
    assert timer.due_at == 10.5
    assert (timer.is_due(10.4), timer.is_due(10.5)) == (False, True)
    assert timer.submitted(40, 10.1), "the buffer is full"
    timer.begin_cycle()
    assert (timer.has_news, timer.is_due(99.0)) == (False, False)
    timer.end_cycle(20.0, 20.001)
    timer.submitted(0, 20.001)
    assert timer.hurry()
    assert timer.is_due(20.001)
    timer.begin_cycle()
    timer.require_cycle()
    assert timer.is_due(0.0)


def test_agreement_takes_a_fifth_of_the_time_at_most() -> None:
    timer = CycleTimer(CoordinationConfig(cycle_s=0.0))
    timer.begin_cycle()
    timer.end_cycle(1.0, 1.001)
    timer.submitted(0, 1.001)
    assert timer.due_at == pytest.approx(1.005)
    timer.begin_cycle()
    timer.end_cycle(2.0, 3.0)
    timer.submitted(0, 3.0)
    assert timer.due_at == pytest.approx(3.005), "and the pause is never longer than 5 ms"


def test_operations_are_looked_up_once_until_the_cache_changes() -> None:
    cache = ResponseCache(8)
    submissions = Submissions(0, cache)
    cache.put(Response(ask("a")), ask("a"))
    cache.put(Response(ask("b")), ask("b"))
    submissions.add([ask("b"), ask("a", 9), ask("new")], 0.0, "")
    hits, invalid, uncached = submissions.classify()
    assert (hits, invalid) == (0b10, 0b01)
    assert [request.name for request in uncached] == ["a", "new"]
    submissions.send(uncached)
    assert (list(submissions.unsent), list(submissions.waiting)) == (["b"], ["b", "a", "new"])
    submissions.agree([Response(ask("b"))])
    submissions.end_cycle(hits)
    assert (list(submissions.unsent), list(submissions.waiting)) == ([], ["a", "new"])
    assert submissions.allowances._costs.keys() == {"a", "new"}
    submissions.add([ask("b")], 1.0, "")
    assert submissions.classify() == (0b10, 0, [])


def test_a_group_of_operations_is_cached_as_a_whole_or_not_at_all() -> None:
    cache = ResponseCache(8)
    members = group("g", (1,), (2,))
    cache.put(Response(members[0]), members[0])
    submissions = Submissions(0, cache)
    submissions.add(members, 0.0, "")
    assert submissions.classify() == (0, 0b1, members)


def test_a_joined_rank_is_announced_once() -> None:
    membership = Membership()
    assert not membership.announce()
    membership.join()
    assert membership.must_announce
    assert (membership.announce(), membership.announce()) == (True, False)
    assert not membership.update([2, 0], 3)
    assert (membership.joined, membership.last_joined, membership.is_joining) == ((2, 0), None, True)
    assert membership.update([2, 0, 1], 3)
    assert (membership.joined, membership.last_joined, membership.is_joining) == ((), 1, False)
    for wrong in ([0, 0], [3], [-1]):
        with pytest.raises(ValueError):
            membership.update(wrong, 3)


def test_the_inbox_keeps_messages_of_this_cycle_and_votes_of_the_next() -> None:
    inbox = CycleInbox(Topology(0, 4), Allowances(), ResponseCache(8))

    def add(peer: int, message: bytes) -> None:
        kind, cycle, round_, body = split(message)
        inbox.add(peer, kind, cycle, round_, body)

    assert not inbox.has_begun
    add(3, encode(Kind.VOTE, 0, 0, bits=5))
    assert inbox.has_begun
    for peer, message in (
        (3, encode(Kind.VOTE, 0, 0, bits=5)),  # twice
        (2, encode(Kind.VOTE, 0, 1, bits=5)),  # in a round that four ranks do not have
        (3, encode(Kind.VOTE, 1, 0, bits=5)),  # while this rank is idle
        (3, encode(Kind.VOTE, 2, 0, bits=5)),  # two cycles ahead
        (1, encode(Kind.REQUESTS, 0, value=[[1, [], False]])),  # while this rank is idle
        (1, encode(Kind.BEGIN, 2)),
    ):
        with pytest.raises(ProtocolError):
            add(peer, message)
    inbox.is_idle = False
    add(3, encode(Kind.VOTE, 1, 0, bits=7))
    assert inbox.missing(Kind.VOTE, [1, 2, 3]) == [1, 2]
    assert inbox.take(Kind.VOTE, [1, 2, 3]) is None
    add(1, encode(Kind.VOTE, 0, 0, bits=1))
    assert inbox.take(Kind.VOTE, [1, 3]) == [1, 5]
    assert inbox.take(Kind.VOTE, [3]) is None
    assert inbox.missing(Kind.REQUESTS, [1, 2]) == [1, 2]
    add(1, encode(Kind.REQUESTS, 0, value=[[1, [ask("a").to_wire()], False]]))
    assert inbox.missing(Kind.REQUESTS, [1, 2]) == [2]
    add(2, encode(Kind.REQUESTS, 0, value=[[3, [], True], [2, [], False]]))
    lists = inbox.take(Kind.REQUESTS, [1, 2])
    assert lists is not None
    assert [[each.rank for each in requests] for requests in lists] == [[1], [3, 2]]
    inbox.end_cycle()
    assert (inbox.number, inbox.is_idle, inbox.has_begun) == (1, True, True)
    with pytest.raises(ProtocolError, match="rank 3 says VOTE in cycle 1, which had no such part"):
        inbox.end_cycle()


def test_the_table_of_rank_0_answers_when_all_ranks_have_asked() -> None:
    table = RequestTable(3)
    assert table.process([RankRequests(2, [ask("b"), ask("a")], True), RankRequests(0, [ask("a")], False)]) == [[], [2]]
    assert table.pop_arrivals() == [("a", 0), ("b", 2), ("a", 2)]
    assert table.pop_arrivals() == []
    responses, joined = table.process([RankRequests(1, [ask("a")], True)])
    assert names([Response.from_wire(response) for response in responses]) == ["a"]
    assert joined == [2, 1]
    assert len(table) == 1
    assert table.process([RankRequests(0, [], True)])[1] == [2, 1, 0]
    assert table.process([]) == [[], []], "the next epoch begins"
    table.clear()
    assert not len(table)
