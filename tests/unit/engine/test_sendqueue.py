"""The most urgent message leaves next, and nobody starves."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from totalreduce.engine.layout import Region
from totalreduce.engine.outbox import QueuedMessage, SendQueue
from totalreduce.schedules.actions import Send


def message(sequence: int, *, priority: int = 0, step: int = 0, lane: int = 0, promoted: bool = False) -> QueuedMessage:
    operation = SimpleNamespace(sequence=sequence, priority=priority, promoted=promoted)
    return QueuedMessage(operation, lane, Send(1, step, 0), Region(0, 0, 0, 0, 0, 0, 0))


def emptied(queue: SendQueue) -> list[QueuedMessage]:
    messages = []
    while (each := queue.pop()) is not None:
        messages.append(each)
    return messages


def filled(*messages: QueuedMessage, fifo: bool = False, starvation_limit: int = 1000) -> SendQueue:
    queue = SendQueue(fifo=fifo, starvation_limit=starvation_limit)
    for each in messages:
        queue.push(each)
    return queue


def test_order() -> None:
    late_step, lane_1, lane_0 = message(0, step=1), message(0, lane=1), message(0)
    second, urgent, promoted = message(1), message(2, priority=-5), message(3, priority=9, promoted=True)
    queue = filled(late_step, second, lane_1, lane_0, urgent, promoted)
    assert len(queue) == 6
    assert emptied(queue) == [promoted, urgent, lane_0, lane_1, late_step, second]
    assert len(queue) == 0
    assert queue.pop() is None


def test_fifo_keeps_the_order_of_submission() -> None:
    first, urgent = message(0, priority=5), message(1, priority=-5, promoted=True)
    queue = filled(urgent, first, fifo=True)
    queue.rerank(urgent)
    assert emptied(queue) == [first, urgent]


def test_reranked_messages_leave_once() -> None:
    first, second = message(0, priority=1), message(1, priority=2)
    queue = filled(first, second)
    second.operation.promoted = True
    queue.rerank(second)
    assert emptied(queue) == [second, first]


def test_discarded_messages_do_not_leave() -> None:
    first, second = message(0), message(1)
    queue = filled(first, second)
    queue.discard(first)
    queue.discard(first)
    assert len(queue) == 1
    assert emptied(queue) == [second]


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_the_oldest_leaves_after_so_many_overtakes(limit: int) -> None:
    old = message(0, priority=100)
    queue = filled(old, starvation_limit=limit)
    for sequence in range(1, 50):
        queue.push(message(sequence))
        leaving = queue.pop()
        assert (leaving is old) == (sequence == limit + 1)
        if leaving is old:
            return
    pytest.fail("the oldest message starved")


@pytest.mark.parametrize("limit", [1, 1000])
def test_messages_that_come_back_are_the_oldest(limit: int) -> None:
    first, second, later = message(0, step=0), message(0, step=1), message(0, step=2)
    queue = filled(first, second, starvation_limit=limit)
    queue.rerank(first)
    held = [queue.pop(), queue.pop()]
    queue.push(later)
    queue.push_back(held)
    assert len(queue) == 3
    assert emptied(queue) == [first, second, later]


def test_what_has_left_is_not_kept() -> None:
    queue = filled(starvation_limit=3)
    for sequence in range(100):
        each = message(sequence)
        queue.push(each)
        each.operation.promoted = True
        queue.rerank(each)
        assert queue.pop() is each
        assert not queue._heap
        assert not queue._by_age
    queue = filled(message(0), message(1), starvation_limit=3)  # never empty, always overtaken
    for sequence in range(2, 5000):
        each = message(sequence, priority=-(sequence % 2))
        queue.push(each)
        each.operation.promoted = sequence % 3 == 0
        queue.rerank(each)
        queue.pop()
        assert len(queue._heap) <= 300


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30),
    st.lists(st.sampled_from(["pop", "promote", "discard"]), max_size=40),
    st.integers(1, 5),
)
def test_every_message_leaves_exactly_once(kinds: list[tuple[int, bool]], events: list[str], limit: int) -> None:
    messages = [message(i, priority=priority, promoted=promoted) for i, (priority, promoted) in enumerate(kinds)]
    queue = filled(*messages, starvation_limit=limit)
    left, gone = [], set()
    for place, event in enumerate(events):
        victim = messages[place % len(messages)] if messages else None
        if event == "pop":
            left += [each for each in [queue.pop()] if each is not None]
        elif victim is not None and event == "promote":
            victim.operation.promoted = True
            queue.rerank(victim)
        elif victim is not None and victim not in left:
            queue.discard(victim)
            gone.add(victim)
        assert len(queue) == len(messages) - len(left) - len(gone)
    left += emptied(queue)
    assert len(left) == len(set(left)) == len(messages) - len(gone)
    assert not gone.intersection(left)
