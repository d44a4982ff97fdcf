"""Which processes can be the ranks of one job, and what is said of those that cannot."""

import dataclasses
import itertools
import os
import threading

import pytest
from torch._C._distributed_c10d import HashStore, Store

from totalreduce.foundation.errors import RendezvousError
from totalreduce.foundation.world import World
from totalreduce.launch.arrivals import Arrival, find_conflict, this_process
from totalreduce.launch.rendezvous import Meeting, Member


def arrival(rank, **changes):
    usual = Arrival(rank, 3, "job", "1.0", f"id {rank}", f"process {rank} on host {rank}")
    return dataclasses.replace(usual, **changes)


def test_ranks_of_one_job_agree():
    assert find_conflict([]) is None
    assert find_conflict([arrival(2), arrival(0), arrival(1)]) is None
    assert find_conflict([arrival(1), arrival(1)]) is None  # a process that has come twice


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"world_size": 4}, "rank 1 was started with world size 4, rank 0 with 3. "),
        (
            {"job_id": "other"},
            "rank 1 (process 1 on host 1) belongs to job 'other', rank 0 (process 0 on host 0) to job 'job'. ",
        ),
        ({"version": "2.0"}, "rank 1 runs totalreduce 2.0, rank 0 1.0. "),
        # What was said first is decided first.
        ({"world_size": 4, "job_id": "other", "version": "2.0"}, "rank 1 was started with world size 4, "),
        ({"job_id": "other", "version": "2.0"}, "rank 1 (process 1 on host 1) belongs to job 'other', "),
    ],
)
def test_a_rank_that_differs_is_named_with_both_values_whatever_the_order(changes, sentence):
    for order in itertools.permutations([arrival(0), arrival(1, **changes), arrival(2)]):
        assert find_conflict(order).startswith(sentence)


def test_two_processes_of_one_rank_are_named_in_the_order_in_which_they_came():
    twin = arrival(1, process="id 7", label="process 7 on host 7")
    text = find_conflict([arrival(1), arrival(0), twin])
    assert text.startswith("two processes are rank 1: process 1 on host 1, and process 7 on host 7, which came later. ")
    assert "process 7 on host 7, and process 1" in find_conflict([twin, arrival(1)])


def test_without_rank_0_the_lowest_one_is_the_measure():
    text = find_conflict([arrival(2), arrival(1, world_size=9)])
    assert text.startswith("rank 2 was started with world size 3, rank 1 with 9. ")


def test_an_arrival_survives_its_journey():
    world = World(1, 3, 1, 3, "127.0.0.1", 29500, "single", "a job")
    mine = Arrival.of(world)
    assert (mine.rank, mine.world_size, mine.job_id, mine.process) == (1, 3, "a job", this_process())
    assert mine.label.startswith(f"process {os.getpid()} on ")
    assert Arrival.from_text(mine.to_text()) == mine


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": "x"}', '{"rank": 1, "world_size": 2}', "null"])
def test_what_no_rank_writes_is_refused(text):
    with pytest.raises(RendezvousError, match="no rank of this library"):
        Arrival.from_text(text)


class CountingStore:
    """A store that counts the accesses that read values."""

    def __init__(self, store: HashStore) -> None:
        self.store, self.reads = store, 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads += 1
        return self.store.multi_get(keys)

    def __getattr__(self, name: str):
        return getattr(self.store, name)


@pytest.mark.parametrize("world_size", [2, 9])
def test_an_epoch_s_group_meets_with_one_access_for_all_entries(world_size: int) -> None:
    """A store in another city answers in milliseconds, and 256 ranks have 256 entries."""
    store = HashStore()
    counting = [CountingStore(store) for _ in range(world_size)]
    found = {}

    def meet(rank: int) -> None:
        meeting = Meeting(
            counting[rank], World(rank, world_size, 0, 1, "", 0, "manual", "job"), "epoch", 30.0, lambda: ""
        )
        found[rank] = meeting.gather(Member(f"host {rank}", "127.0.0.1", 1000 + rank), {"wire": 1})

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(world_size):
        assert [member.port for member in found[rank]] == [1000 + other for other in range(world_size)]
        assert counting[rank].reads == 1


class PlainStore(Store):
    """A store without ``compare_set``, such as torch's ``EtcdStore``."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("make", [HashStore, PlainStore])
def test_each_process_joins_the_next_meeting_also_behind_one_that_was_lost_when_it_had_claimed_it(make) -> None:
    """The lost process has written its claim, and has not counted it."""
    store, world = make(), World(0, 1, 0, 1, "", 0, "manual", "job")
    lost = dataclasses.replace(Arrival.of(world), process="lost")
    store.set("totalreduce/0/name/1/claim/0", lost.to_text())
    store.add("totalreduce/0/name/1/rank/read", 1)  # the meeting is over
    joined = [Meeting(store, world, "name", 5.0).job_id for _ in range(3)]
    assert joined == [f"job/totalreduce/0/name/{number}" for number in (2, 3, 4)]
