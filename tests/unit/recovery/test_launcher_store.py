"""What survives the loss of the launcher's store, and what the keeper makes of what it finds there."""

import json

import pytest
from torch.distributed import HashStore

from totalreduce.foundation.errors import ProtocolError
from totalreduce.launch.restarts import RecoveryOptions, Restarts
from totalreduce.recovery.accusation import Accusation
from totalreduce.recovery.assembly import BEGUN, FINISHED, WAITING, Assembly, accusation_key, decision_key
from totalreduce.recovery.keeper import Watch
from totalreduce.recovery.launcher_store import FIRST_EPOCH, LauncherStore
from totalreduce.recovery.membership import Decision, Member, Policy, Report


class Store:
    """A store whose process can be lost, with the methods that the library calls."""

    def __init__(self, first_epoch: int) -> None:
        self.inner, self.is_lost = HashStore(), False
        self.inner.set(FIRST_EPOCH, str(first_epoch))

    def __getattr__(self, name: str):
        if self.is_lost:
            raise RuntimeError("the server has gone")
        return getattr(self.inner, name)

    def values(self, *keys: str) -> list[str]:
        return [self.inner.get(key).decode() if self.inner.check([key]) else "" for key in keys]


class Launcher:
    """Starts another store when one is lost, unless it is told not to."""

    def __init__(self) -> None:
        self.store, self.starts_again, self.now = Store(1), True, 0.0
        self.assembly = Assembly(LauncherStore(self._connect), Policy("replace", 3), 0, 0, lambda: self.now)
        self.assembly.current = Decision(7, tuple(Member(seat, seat, has_state=True) for seat in range(3)))

    def _connect(self, _timeout_s: float) -> Store:
        if self.store.is_lost and self.starts_again:
            self.start_again()
        return self.store

    def start_again(self) -> None:
        self.store = Store(1001)


ACCUSATION = json.dumps({"suspected": 2, "incarnation": 2, "epoch": 7})


@pytest.mark.parametrize("starts_again", [True, False])
def test_accusations_begin_and_end_are_in_the_store_that_follows(starts_again: bool) -> None:
    """Whether the other store is there at once, or comes later, when this process connects again."""
    launcher = Launcher()
    launcher.starts_again = starts_again
    keys = (BEGUN, FINISHED, accusation_key(0))
    launcher.store.is_lost = True
    launcher.assembly.begin()
    if starts_again:
        assert launcher.store.values(*keys) == ["yes", "", ""]
        launcher.store.is_lost = True
    launcher.assembly.suspect(2)
    if starts_again:
        assert launcher.store.values(*keys) == ["yes", "", ACCUSATION]
        launcher.store.is_lost = True
    launcher.assembly.finish()
    if not starts_again:
        assert launcher.store.is_lost
        launcher.start_again()
        assert not launcher.assembly.has_newcomers(-1.0)  # connects again
    assert launcher.store.values(*keys) == ["yes", "yes", ACCUSATION]


def test_a_later_accusation_replaces_the_one_before_also_when_the_connection_was_lost() -> None:
    launcher = Launcher()
    launcher.assembly.suspect(1)
    lost = launcher.store
    launcher.store = Store(1001)
    launcher.store.inner.set(accusation_key(0), lost.values(accusation_key(0))[0])
    lost.is_lost = True
    launcher.assembly.suspect(2)
    assert launcher.store.values(accusation_key(0)) == [ACCUSATION]


def test_a_process_that_waits_does_not_connect_to_another_store_in_the_middle_of_a_decision() -> None:
    launcher = Launcher()
    meeting = launcher.assembly.meeting(Report(0, 0, has_state=True))
    next(meeting)
    next(meeting)
    launcher.store.is_lost = True
    launcher.now = 10.0
    launcher.assembly._say_that_it_waits()
    assert launcher.store.is_lost
    for _ in range(8):
        next(meeting)
    assert launcher.store.values(FIRST_EPOCH, "totalreduce/recovery/1001/count") == ["1001", "1"]


# ----------------------------------------------------------------------------------------------------------- the keeper

MALFORMED = [
    "garbage",
    "[]",
    "{}",
    "[" * 100_000,
    json.dumps({"suspected": 3, "incarnation": 0, "epoch": 1}),
    json.dumps({"suspected": -1, "incarnation": 0, "epoch": 1}),
    json.dumps({"suspected": "1", "incarnation": 0, "epoch": 1}),
    json.dumps({"suspected": 1.0, "incarnation": 0, "epoch": 1}),
    json.dumps({"suspected": True, "incarnation": 0, "epoch": 1}),
    json.dumps({"suspected": 1, "incarnation": -1, "epoch": 1}),
    json.dumps({"suspected": 1, "incarnation": 1 << 50, "epoch": 1}),
    json.dumps({"suspected": 1, "incarnation": 0, "epoch": None}),
]


def test_an_accusation_is_read_as_it_was_written() -> None:
    assert Accusation.decode(Accusation(2, 5, 9).encode(), 3) == Accusation(2, 5, 9)
    for text in MALFORMED:
        with pytest.raises(ProtocolError, match="the store holds"):
            Accusation.decode(text, 3)


def test_the_keeper_tells_the_launcher_what_ranks_write_and_counts_the_rest() -> None:
    store = HashStore()
    watch = Watch(store, 3, 5)
    assert watch.news() == []
    store.set(accusation_key(1), json.dumps({"suspected": 2, "incarnation": 4, "epoch": 6, "by": 0, "finished": 1}))
    store.set(accusation_key(2), Accusation(1, 0, 6).encode())
    store.set(WAITING, "1 0 1")
    decision = Decision(5, (Member(0, 1, has_state=False),), 3)
    store.set(decision_key(5), decision.encode())
    member = {"seat": 0, "incarnation": 1, "has_state": False}
    assert watch.news() == [
        {"suspected": 2, "by": 1, "incarnation": 4, "epoch": 6},
        {"suspected": 1, "by": 2, "incarnation": 0, "epoch": 6},
        {"epoch": 5, "members": (member,), "version": 3},
        {"waiting": True},
    ]
    assert watch.news() == []
    refused = []
    for text in MALFORMED:
        store.set(accusation_key(0), text)
        refused += watch.news()
    assert refused == [{"refused": count} for count in (1, 2, 4, 8)]
    store.set(decision_key(6), json.dumps({"suspected": 1, "incarnation": 0, "by": 0, "epoch": 6, "finished": True}))
    assert watch.news() == watch.news() == []
    assert watch.num_refused == 13
    store.set(decision_key(6), decision.encode())  # of another epoch
    store.set(accusation_key(0), b"\xff\xfe")
    assert watch.news() == []
    assert watch.num_refused == 15
    for seats in ((0, 3), (1, 1)):  # a seat that there is not, and a seat with two processes
        members = tuple(Member(seat, 0, has_state=False) for seat in seats)
        store.set(decision_key(6), Decision(6, members, 3).encode())
        assert watch.news() == [{"refused": 16}] * (seats == (0, 3))
    store.set(decision_key(6), " " * (5 << 20) + Decision(6, (), 3).encode())
    assert watch.news() == []
    assert watch.num_refused == 18
    store.set(BEGUN, "yes")
    store.set(FINISHED, "yes")
    assert watch.news() == [{"begun": True}, {"finished": True}]
    assert watch.news() == []


def test_only_accusations_of_processes_that_there_are_end_a_worker() -> None:
    options = RecoveryOptions(on_loss="shrink", max_ranks=4)
    restarts = Restarts(options, options.seats(3, 0))
    for rank in range(3):
        restarts.started(rank, 0.0)
    assert not restarts.is_to_end(4, 0, 0, 1)
    assert not restarts.is_to_end(-1, 0, 0, 1)
    assert not restarts.is_to_end(1, 0, 4, 1)
    assert not restarts.is_to_end(3, -1, 0, 1), "the seat was not taken yet"
    assert not restarts.is_to_end(1, 1, 0, 1), "another incarnation"
    assert restarts.is_to_end(1, 0, 0, 1)
    assert not restarts.is_to_end(0, 0, 1, 1), "it was accused itself"
    for epoch in range(2, 1000):
        assert restarts.is_to_end(1, 0, 0, epoch)
    assert not restarts.is_to_end(0, 0, 1, 999)
    assert len(restarts._accused) < 100
