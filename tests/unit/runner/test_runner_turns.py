"""Which thread moves the messages: how long the communication thread stays parked."""

import threading
import time

import pytest

from totalreduce.runner import turns as turns_module
from totalreduce.runner.turns import Turns


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(turns_module, "_PARKED_S", 0.01)
    monkeypatch.setattr(turns_module, "_PARKED_DEEP_S", 20.0)
    return Turns()


def parked(turns: Turns) -> threading.Thread:
    thread = threading.Thread(target=turns.park)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(5.0)
    return not thread.is_alive()


def test_without_a_driver_the_thread_looks_often(turns: Turns) -> None:
    begin = time.monotonic()
    for _ in range(3):
        turns.park()
    assert time.monotonic() - begin < 5.0


def test_while_one_driver_goes_on_the_thread_sleeps_until_it_leaves(turns: Turns) -> None:
    turns.driver = object()
    turns.park()
    thread = parked(turns)
    thread.join(0.3)
    assert thread.is_alive(), "the same driver was there when it parked before"
    turns.leave(time.monotonic(), resting=True)
    assert has_ended(thread)
    assert turns.resting


def test_for_another_driver_the_thread_looks_once_more(turns: Turns) -> None:
    turns.driver = object()
    turns.park()
    turns.driver = object()
    begin = time.monotonic()
    turns.park()
    assert time.monotonic() - begin < 5.0


def test_a_submission_ends_the_sleep(turns: Turns) -> None:
    turns.driver = object()
    turns.park()
    thread = parked(turns)
    time.sleep(0.05)
    turns.unpark()
    assert has_ended(thread)
