"""The runner under several threads: who moves messages, who looks on, who closes; nothing lost, nothing left."""

import functools
import gc
import inspect
import random
import sys
import threading
import time

import pytest
import torch
from descriptors import open_files

import totalreduce as tr
from totalreduce.engine import telling
from totalreduce.engine.operation import Operation
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.errors import DeadlineExceededError, GroupClosed, PeerLost
from totalreduce.runner import runner as runner_module
from totalreduce.runner import turns
from totalreduce.testing.ranks import make_groups, run_ranks

TRANSPORTS = ["inproc", "tcp"]
PATIENT = EngineConfig(timeout_s=30.0)


def in_threads(*functions, timeout_s=30.0):
    """Run all at once; the first failure is raised here."""
    failures = []

    def body(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not come back"


def close_all(groups):
    in_threads(*[lambda group=group: group.close(2.0) for group in groups])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("compute", ["thread", pytest.param("inline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_operations", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_eight_threads_submit_and_wait_on_one_group(transport, compute, num_operations):
    num_threads = 8

    def body(group):
        def worker(thread):
            chosen = random.Random(100 * group.rank + thread)
            for step in range(num_operations):
                size = (1, 77, 5_000, 60_000)[(step + thread) % 4]
                value = torch.full((size,), float(step + thread + group.rank), dtype=torch.float64)
                work = group.allreduce(value, name=f"t{thread}", priority=chosen.randrange(5))
                if chosen.random() < 0.2:
                    while not work.done():
                        time.sleep(0)
                assert work.wait(timeout_s=25) is value
                assert value.unique().tolist() == [2.0 * (step + thread) + 1]

        in_threads(*[lambda thread=thread: worker(thread) for thread in range(num_threads)], timeout_s=60)
        group.barrier()
        return group.statistics()

    for statistics in run_ranks(2, body, transport=transport, compute=compute, engine=PATIENT):
        assert statistics.operations == num_threads * num_operations + 1
        assert statistics.floating_bytes == 0


def test_an_idle_rank_wakes_once_for_the_engine_and_the_heartbeats(monkeypatch):
    """Were the two not due in the same rounds, only every second round would call ``Engine.tick``."""
    rounds, ticks = [], []
    groups = make_groups(2, transport="shm")
    try:
        runner = groups[0].operations.runner
        tick, progress = runner.engine.tick, runner.transport.progress
        monkeypatch.setattr(runner.engine, "tick", lambda now: (ticks.append(now), tick(now)))
        monkeypatch.setattr(runner.transport, "progress", lambda: (rounds.append(0), progress())[1])
        time.sleep(1.0)  # until they are due together
        del rounds[:], ticks[:]
        time.sleep(2.0)
        assert len(ticks) >= 4
        assert len(rounds) <= 1.3 * len(ticks)
    finally:
        close_all(groups)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_threads_wait_for_one_operation(transport):
    def body(group):
        for step in range(30):
            value = torch.full((50_000,), float(step + group.rank))
            work = group.allreduce(value, name="shared")
            in_threads(*[functools.partial(work.wait, timeout_s=20)] * 5)
            assert value[0] == value[-1] == 3.0 * step + 3
        return work.done()

    assert run_ranks(3, body, transport=transport, engine=PATIENT) == [True] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_thread_waits_while_the_main_one_goes_on_submitting(transport):
    def body(group):
        first = group.allreduce(torch.full((10,), 1.0), name="first")
        waited = []
        waiter = threading.Thread(target=lambda: waited.append(first.wait(timeout_s=20)[0].item()))
        waiter.start()
        works = [group.allreduce(torch.full((1000,), float(number)), name=f"w{number}") for number in range(100)]
        values = [work.wait(timeout_s=20)[5].item() for work in reversed(works)]
        waiter.join(20)
        return waited, values

    assert run_ranks(2, body, transport=transport) == [([2.0], [2.0 * number for number in reversed(range(100))])] * 2


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nobody_sleeps_through_a_message(transport):
    """A wake-up that gets lost costs a tick of 100 ms: a thousand small operations would show a dozen of them."""

    def body(group):
        slow = 0
        for _ in range(300):
            works = [group.allreduce(torch.ones(20_000 * (k + 1)), name=f"w{k}") for k in range(3)]
            begin = time.monotonic()
            in_threads(*[functools.partial(work.wait, timeout_s=20) for work in works[:2]])
            works[2].wait(timeout_s=20)
            slow += time.monotonic() - begin > 0.09
        return slow

    assert max(run_ranks(2, body, transport=transport, compute="thread", engine=PATIENT)) <= 15


def wait_for_nobody(group, number, entered, outcomes):
    work = group.allreduce(torch.ones(1000), name=f"never {number}")
    entered.release()
    try:
        work.wait(timeout_s=20)
    except BaseException as error:
        outcomes.append(error)


@pytest.mark.faults("F8")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_while_others_wait_fails_their_operations(transport):
    for _ in range(20):
        groups = make_groups(2, transport=transport, engine=PATIENT)
        entered, outcomes = threading.Semaphore(0), []

        waiters = [
            threading.Thread(target=wait_for_nobody, args=(groups[0], number, entered, outcomes)) for number in range(4)
        ]
        for waiter in waiters:
            waiter.start()
        for _ in waiters:
            assert entered.acquire(timeout=10)
        begin = time.monotonic()
        groups[0].close()
        for waiter in waiters:
            waiter.join(10)
        assert time.monotonic() - begin < 5.0
        assert [type(error) for error in outcomes] == [GroupClosed] * 4, outcomes
        assert "pending" in str(outcomes[0])
        with pytest.raises(GroupClosed, match="make a new one"):
            groups[0].allreduce(torch.ones(1), name="late")
        groups[0].close()  # harmless
        groups[1].close()


@pytest.mark.faults("F4")
def test_the_others_see_that_a_rank_has_left():
    groups = make_groups(2, transport="tcp", engine=PATIENT)
    in_threads(*[group.barrier for group in groups])
    pending = groups[0].allreduce(torch.ones(10), name="x")
    groups[1].close()
    with pytest.raises(PeerLost, match="rank 1 is lost: it has closed the group"):
        pending.wait(timeout_s=5)
    groups[0].close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_and_descriptors_are_given_back(transport):
    def cycle():
        groups = make_groups(3, transport=transport, compute="thread", engine=PATIENT)
        works = [group.allreduce(torch.ones(100_000), name="x") for group in groups]
        assert [work.wait(timeout_s=20)[0].item() for work in works] == [3.0] * 3
        close_all(groups)

    cycle()
    gc.collect()
    threads, files = threading.active_count(), open_files()
    for _ in range(20):
        cycle()
    gc.collect()
    assert threading.active_count() == threads
    assert open_files() <= files


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_done_is_not_kept(transport):
    groups = make_groups(3, transport=transport, engine=PATIENT)

    def work(group):
        for _ in range(200):
            group.allreduce(torch.ones(5000), name="x").wait()

    in_threads(*[lambda group=group: work(group) for group in groups])
    in_threads(*[group.barrier for group in groups])
    gc.collect()
    kept = sum(type(thing) is Operation for thing in gc.get_objects())
    close_all(groups)
    assert kept < 50, f"{kept} of 600 operations are still in memory"


@pytest.mark.alone
def test_a_deadline_passes_and_the_operation_still_succeeds():
    def body(group):
        value = torch.full((100_000,), float(group.rank))
        if group.rank == 1:
            late.wait(20)
        work = group.allreduce(value, name="late")
        if group.rank == 0:
            begin = time.monotonic()
            with pytest.raises(DeadlineExceededError, match=r"'late'.*never submitted by rank\(s\) 1"):
                work.wait(timeout_s=0.3)
            assert 0.3 <= time.monotonic() - begin < 0.8
            late.set()
        return work.wait(timeout_s=20)[-1].item()

    for transport in TRANSPORTS:
        late = threading.Event()
        assert run_ranks(2, body, transport=transport) == [1.0, 1.0]


def test_a_failing_observer_ends_the_group_with_its_error_and_nobody_hangs():
    class Broken(tr.Observer):
        def received(self, *arguments, **facts):
            raise RuntimeError("a bug of the observer's")

    groups = make_groups(2, transport="tcp", engine=PATIENT)
    groups[0].observers.append(Broken())
    works = [group.allreduce(torch.ones(1000), name="x") for group in groups]
    with pytest.raises(RuntimeError, match="a bug of the observer's"):
        works[0].wait(timeout_s=5)
    with pytest.raises(GroupClosed, match="a bug of the observer's"):
        groups[0].allreduce(torch.ones(1000), name="y")
    with pytest.raises(PeerLost):
        groups[1].barrier(timeout_s=5)
    close_all(groups)


def test_a_submission_that_is_refused_because_a_rank_has_left_raises_when_the_others_are_told(monkeypatch):
    """The program may end at this error, and the others must not take its end for the cause."""
    monkeypatch.setattr(runner_module, "_TELLING_S", 20.0)
    monkeypatch.setattr(telling, "_PATIENCE_S", 20.0)
    groups = make_groups(3, transport="inproc", engine=PATIENT)
    in_threads(*[group.barrier for group in groups])
    groups[2].close()
    runner, seen = groups[0]._runner, []
    while 2 not in runner.engine.members.departed:
        time.sleep(0.001)

    def submit():
        with pytest.raises(PeerLost) as caught:
            groups[0].allreduce(torch.ones(3), name="w")
        seen.append((caught.value.rank, runner.engine.telling.is_done))

    submitting = threading.Thread(target=submit)
    with runner._moving:  # nothing leaves
        submitting.start()
        while not seen and runner.engine.telling.is_done:
            time.sleep(0.001)
    submitting.join(20)
    assert seen == [(2, True)]
    close_all(groups)


# Ctrl-C. A signal handler runs between two steps of the main thread: when a function is entered, when one written in C
# has come back, or (its call fails then) while it waits.

#: Nobody is lost by silence here: what the peers learn, they learn from the end of the connection or a GOODBYE.
NEVER_SILENT = TcpConfig(silence_s=60.0)
CLOSE_S = 20.0
#: A sample of the first 380 steps of a ``wait`` over TCP; by then it has found nothing to do and sleeps. In shared
#: memory: all steps in which an operation that began in the fast lane is looked at and given to the engine.
MOMENTS = {"tcp": range(3, 380, 4), "shm": range(1, 60)}


def connected_pair(transport="tcp"):
    """Two ranks that have met, and to which the name "known" is known."""
    groups = make_groups(2, transport=transport, engine=PATIENT, tcp=NEVER_SILENT)
    in_threads(*[lambda group=group: group.allreduce(torch.ones(1000), name="known").wait() for group in groups])
    return groups


def expect_the_loss_of_rank_1(pending, closer, reason):
    """At once, that is long before rank 1's ``close`` would give up waiting."""
    closer.join(CLOSE_S / 4)
    assert not closer.is_alive()
    with pytest.raises(PeerLost, match=reason) as caught:
        pending.wait(timeout_s=CLOSE_S / 2)
    assert caught.value.rank == 1


def expect_the_end(group):
    for thread in group._runner._threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("end", ["close", "loss", "failure"])
def test_a_tensor_that_is_changed_after_an_error_is_not_what_the_receiver_gets(end):
    """An operation that ends early gives its tensor back when the transport reads nothing of it any more."""
    groups = connected_pair()
    sender, receiver = (group._runner for group in groups)
    got, value = torch.zeros(64 << 20, dtype=torch.uint8), torch.ones(64 << 20, dtype=torch.uint8)
    receiving = groups[1].recv(got, src=0)
    closer, changed = threading.Thread(target=groups[0].close, args=(CLOSE_S,)), threading.Event()
    with receiver._moving:  # the receiver reads nothing, so a message is half-way out when the operation ends
        sending = groups[0].send(value, dst=1)
        deadline = time.monotonic() + 20
        while sender.transport.idle() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not sender.transport.idle()
        sending.on_done(lambda _: (value.fill_(2), changed.set()))
        if end == "loss":
            with sender.locked():
                sender.engine.peer_lost(1, "the test says so", time.monotonic())
            sender.transport.wake()
        elif end == "failure":
            sender._fail(RuntimeError("of the test"))
        else:
            closer.start()
        assert changed.wait(20)
    errors = {"close": GroupClosed, "loss": PeerLost, "failure": RuntimeError}
    assert type(sending.exception()) is errors[end]
    if end != "close":
        closer.start()
    with pytest.raises(PeerLost):
        receiving.wait(timeout_s=20)
    assert set(got.unique().tolist()) <= {0, 1}
    closer.join(CLOSE_S)
    close_all(groups)


@pytest.mark.parametrize("closing", ["afterwards", "meanwhile"])
def test_ctrl_c_that_cuts_a_message_in_two_ends_the_connections_at_once(closing, monkeypatch):
    """Nobody goes on with the message, and nobody waits for its end."""
    monkeypatch.setattr(turns, "_PARKED_S", 0.5)
    groups = connected_pair()
    struck = groups[1]._runner
    closer = threading.Thread(target=groups[1].close, args=(CLOSE_S,))

    sending = struck.transport._routes[0].outgoing
    consume, driver = sending._consume, threading.get_ident()

    def strike(sent):
        """In place of taking note of what has just been sent."""
        if threading.get_ident() != driver:
            return consume(sent)
        if closing == "meanwhile":
            closer.start()
            while not struck._stop:
                time.sleep(0.001)
        raise KeyboardInterrupt

    sending._consume = strike
    pending = groups[0].allreduce(torch.ones(1000), name="only rank 0")
    # The communication thread is kept away, as by somebody who drives, so that this thread is the one to send.
    struck._turns.driver = "somebody"
    while not struck._turns.parked:
        struck.transport.wake()
        time.sleep(0.001)
    work = groups[1].allreduce(torch.ones(1000), name="only rank 1")
    struck._turns.driver = None
    with pytest.raises(KeyboardInterrupt):
        work.wait(timeout_s=20)
    if closing == "afterwards":
        closer.start()
    with pytest.raises((KeyboardInterrupt, GroupClosed)):  # when the connections have ended, which read the tensor
        work.wait(timeout_s=20)
    expect_the_loss_of_rank_1(pending, closer, "its connection ended")
    groups[0].close()
    expect_the_end(groups[1])


def wait_and_be_struck(work, step):
    """Wait, and have ``KeyboardInterrupt`` raised at the ``step``-th moment at which a signal handler may run."""
    left = step

    def strike(frame, event, argument):
        nonlocal left
        # Python prints, and does not raise, what is raised in a generator that is being closed.
        if event in ("call", "c_return") and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    def wait():
        gc.disable()  # what strikes in a callback of a collection, as other tests' libraries have, is lost on its way
        sys.setprofile(strike)
        try:
            work.wait(timeout_s=20)
        finally:
            sys.setprofile(None)
            gc.enable()

    with pytest.raises(KeyboardInterrupt):
        wait()


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize(("transport", "name"), [("tcp", "only rank 1"), ("shm", "known")])
def test_ctrl_c_anywhere_in_a_wait_leaves_nobody_waiting(transport, name, first):
    """Neither the peers, nor this rank's ``close``, nor its threads. In shared memory the fast lane begins "known"."""
    struck = []
    for step in MOMENTS[transport][first::3]:
        groups = connected_pair(transport)
        pending = groups[0].allreduce(torch.ones(1000), name="only rank 0")
        wait_and_be_struck(groups[1].allreduce(torch.ones(1000), name=name), step)
        closer = threading.Thread(target=groups[1].close, args=(CLOSE_S,))
        closer.start()
        struck.append((groups, pending, closer))
    for groups, pending, closer in struck:
        expect_the_loss_of_rank_1(pending, closer, "its connection ended|it has closed the group")
        groups[0].close()
        expect_the_end(groups[1])
