"""Routes on the tree: every requester gets the data, from the nearest holder, over each edge at most once."""

import random
from collections import deque

import pytest

from totalreduce.recovery.routing import Route, find_route


def neighbours(rank: int, size: int) -> list[int]:
    near = [2 * rank + 1, 2 * rank + 2, *([(rank - 1) // 2] if rank else [])]
    return [other for other in near if other < size]


def nearest(size: int, holders: set[int]) -> list[int]:
    """Distances by a search in breadth, from all holders at once."""
    found, waiting = dict.fromkeys(holders, 0), deque(holders)
    while waiting:
        rank = waiting.popleft()
        for other in neighbours(rank, size):
            if other not in found:
                found[other] = found[rank] + 1
                waiting.append(other)
    return [found[rank] for rank in range(size)]


def deliver(route: Route, holders: set[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Let the data flow; return by rank after how many edges it has come, and the edges that it took."""
    hops, waiting, edges = dict.fromkeys(holders, 0), deque(holders), []
    while waiting:
        rank = waiting.popleft()
        for target in route.targets[rank]:
            assert route.sources[target] == rank
            edges.append((rank, target))
            hops[target] = hops[rank] + 1
            waiting.append(target)
    return hops, edges


@pytest.mark.parametrize("size", range(1, 65))
def test_every_requester_gets_the_data_over_a_shortest_way(size: int) -> None:
    chosen = random.Random(size)
    for _ in range(20):
        ranks = range(size)
        holders = set(chosen.sample(ranks, chosen.randint(1, size)))
        requesters = set(chosen.sample(ranks, chosen.randint(0, size)))
        route = find_route(size, holders, requesters)
        assert list(route.distances) == nearest(size, holders)
        hops, edges = deliver(route, holders)
        assert requesters <= hops.keys()
        assert all(hops[rank] == route.distances[rank] for rank in hops)
        undirected = [frozenset(edge) for edge in edges]
        assert len(set(undirected)) == len(undirected)
        assert all(target in neighbours(rank, size) for rank, target in edges)
        assert all(route.sources[holder] is None for holder in holders)
        passing = hops.keys() - holders - requesters
        assert all(route.targets[rank] for rank in passing), "a rank gets the data that neither needs nor passes it on"


def test_a_route_of_seven_ranks() -> None:
    """Rank 3 holds; 4 and 6 need: 3 -> 1 -> 4, and 1 -> 0 -> 2 -> 6."""
    route = find_route(7, [3], [4, 6])
    assert route.distances == (2, 1, 3, 0, 2, 4, 4)
    assert route.sources == (1, 3, 0, None, 1, None, 2)
    assert route.targets == ((2,), (4, 0), (6,), (1,), (), (), ())


def test_without_a_holder_there_is_no_route() -> None:
    with pytest.raises(ValueError, match="no holder"):
        find_route(3, [], [1])
