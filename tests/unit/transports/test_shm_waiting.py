"""Which processor a rank waits on: real threads, real processors."""

import os
import threading
from types import SimpleNamespace

import pytest

from totalreduce.transports.shm_memory import OWNER, Outbox, OutboxLayout
from totalreduce.transports.shm_waiting import ProcessorChoice

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


def neighbours(*cpus_by_peer):
    return [SimpleNamespace(peer=peer, cpu=cpu) for peer, cpu in cpus_by_peer]


@pytest.fixture
def outbox():
    made = Outbox(OutboxLayout.choose(2, 4096, 4096))
    yield made
    made.close()


@pytest.fixture
def here():
    """Two processors; the test's thread is on the first and may use both."""
    before = os.sched_getaffinity(0)
    first, second, *_ = sorted(before)
    os.sched_setaffinity(0, {first})
    os.sched_setaffinity(0, {first, second})
    yield first, second
    os.sched_setaffinity(0, before)


def settled(outbox, here, rank, others, where):
    """Whether the rank is alone on the processor ``where``, which it has said is its own.

    Again if it says another one: with other programs on the machine the scheduler may move this thread meanwhile.
    """
    for _ in range(20):
        os.sched_setaffinity(0, here[:1])
        os.sched_setaffinity(0, here)
        alone = ProcessorChoice(rank, outbox).choose(others)
        if outbox.words[OWNER.processor] == where + 1:
            return alone
    pytest.fail(f"it says {outbox.words[OWNER.processor] - 1} and not {where}")


def test_who_is_alone_stays_and_says_where(outbox, here):
    first, second = here
    assert settled(outbox, here, 1, neighbours((0, second + 1)), first)
    assert os.sched_getaffinity(0) == {first, second}


def test_the_higher_rank_moves_away_and_may_still_use_everything(outbox, here):
    first, second = here
    assert settled(outbox, here, 1, neighbours((0, first + 1)), second)
    assert os.sched_getaffinity(0) == {first, second}


def test_the_lower_rank_stays(outbox, here):
    first, _ = here
    assert not settled(outbox, here, 1, neighbours((2, first + 1)), first)


def test_where_all_processors_are_taken_nobody_moves(outbox, here):
    first, second = here
    assert not settled(outbox, here, 2, neighbours((0, first + 1), (1, second + 1)), first)


def test_a_sleeper_is_kept_off_its_neighbours_processors_until_it_wakes(outbox, here):
    first, second = here
    processor = ProcessorChoice(1, outbox)
    for _ in range(2):
        processor.avoid(neighbours((0, first + 1)))
        assert os.sched_getaffinity(0) == {second}
        processor.restore()
        assert os.sched_getaffinity(0) == {first, second}
    processor.avoid(neighbours((0, 0)))  # it never said where it is
    assert os.sched_getaffinity(0) == {first, second}
    processor.restore()


def test_what_somebody_else_decides_meanwhile_stands(outbox, here):
    first, second = here
    processor = ProcessorChoice(1, outbox)
    processor.avoid(neighbours((0, first + 1)))
    os.sched_setaffinity(threading.get_native_id(), {first})  # as taskset does
    processor.restore()
    assert os.sched_getaffinity(0) == {first}
    os.sched_setaffinity(0, {first, second})


def test_every_thread_gets_its_own_processors_back(outbox, here):
    first, second = here
    processor = ProcessorChoice(1, outbox)
    found = []

    def other():
        os.sched_setaffinity(0, {second})
        processor.avoid(neighbours((0, first + 1)))
        processor.restore()
        found.append(os.sched_getaffinity(0))

    processor.avoid(neighbours((0, first + 1)))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    processor.restore()
    assert found == [{second}]
    assert os.sched_getaffinity(0) == {first, second}
