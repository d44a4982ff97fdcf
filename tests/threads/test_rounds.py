"""Ranks that meet in a store with the entries of earlier rounds."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from totalreduce.foundation.errors import RendezvousError
from totalreduce.launch.rounds import enter_round


def enter(store, world_size, *, late=None, ranks=None, timeout_s=20.0):
    """Have the ranks enter a round; rank ``late`` comes when the others have waited for a while."""
    ranks = range(world_size) if ranks is None else ranks
    gate = threading.Event()

    def body(rank):
        if rank == late:
            gate.wait(0.1)
        return enter_round(store, "group", rank, world_size, timeout_s)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(body, ranks))


@pytest.mark.parametrize("late", [None, 0, 1])
def test_all_ranks_of_a_round_get_one_name_that_is_new(late):
    store, seen = HashStore(), set()
    for world_size in (2, 4, 3, 4, 2, 1):
        (name,) = set(enter(store, world_size, late=late))
        assert name not in seen
        seen.add(name)


def test_ranks_of_a_round_that_came_to_nothing_do_not_disturb_the_next_one():
    """Rank 1 of the first round had answered, and rank 2 never came: the rank 2 of the next round must not stand in."""
    store = HashStore()

    def first(rank):
        with pytest.raises(RendezvousError) as caught:
            enter_round(store, "group", rank, 3, 0.3)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(first, range(2)))
    assert re.search(r"rank\(s\) (1, )?2 did not come", errors[0])  # rank 1 may have answered just after the end
    stale = store.get("totalreduce/rounds/group/now").decode()
    names = enter(store, 3, late=0)
    assert len(set(names)) == 1
    assert stale not in names


def test_rank_0_may_be_in_its_next_meeting_already():
    """A rank that was slow to read the first meeting's answer belongs to it, although a second one was announced."""
    store = HashStore()
    entered = threading.Event()

    class Slow:
        """Shows rank 1 no answer before rank 0 has announced the next meeting."""

        def check(self, keys):
            if keys[0].endswith("/all") and not keys[0].endswith("//all"):
                entered.wait(10.0)
            return store.check(keys)

        def __getattr__(self, name):
            return getattr(store, name)

    def zero():
        first = enter_round(store, "group", 0, 2, 20.0)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(enter_round, store, "group", 0, 2, 20.0)
            while store.get("totalreduce/rounds/group/now").decode() == first:
                pass
            entered.set()
            return first, second.result()

    def one():
        return enter_round(Slow(), "group", 1, 2, 20.0), enter_round(store, "group", 1, 2, 20.0)

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(zero), pool.submit(one)]
        assert ranks[0].result() == ranks[1].result()
