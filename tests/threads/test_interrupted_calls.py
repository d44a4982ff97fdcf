"""A signal handler runs between two steps of the main thread, whatever the library does there, and may close the group.

Python calls a handler when a function is entered, when one written in C has come back, or while it waits. A profiler is
called at the same moments, so that a test can act as a handler at each of them.
"""

import gc
import inspect
import logging
import sys
import threading
import time

import pytest
import torch

import totalreduce as tr
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.errors import GroupClosed, PeerLost
from totalreduce.tensors.storage import StorageHold
from totalreduce.testing.ranks import make_groups, run_ranks

#: Nobody is lost by silence here: what the peers learn, they learn from the end of the connection or a GOODBYE.
NEVER_SILENT = TcpConfig(silence_s=60.0)
#: Long before anything gives up waiting.
AT_ONCE_S = 5.0


def connected_pair(transport):
    """Two ranks that have met, and to which the name "known" is known."""
    groups = make_groups(2, transport=transport, engine=EngineConfig(timeout_s=30.0), tcp=NEVER_SILENT)
    threads = [
        threading.Thread(target=lambda group=group: group.allreduce(torch.ones(1000), name="known").wait())
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return groups


def allreduce_and_be_interrupted(group, name, step, handler, code=None, *, waits=True):
    """Allreduce, and call the ``handler`` at the ``step``-th moment at which Python may do so; return the error.

    With ``code`` only the moments count at which the function with this code is entered.
    """
    left = step

    def interrupt(frame, event, argument):
        nonlocal left
        counts = event == "call" and frame.f_code is code if code is not None else event in ("call", "c_return")
        # Python prints, and does not raise, what is raised in a generator that is being closed, or by a destructor.
        if counts and not frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_code is not DESTRUCTOR:
            left -= 1
            if left == 0:
                handler()

    gc.disable()  # what strikes in a callback of a collection, as other tests' libraries have, is lost on its way
    sys.setprofile(interrupt)
    try:
        work = group.allreduce(torch.ones(1000), name=name)
        if waits:
            work.wait(timeout_s=20)
    except BaseException as error:
        return error
    finally:
        sys.setprofile(None)
        gc.enable()
    return None


def expect_the_end(group):
    for thread in [*group._runner._threads, *threading.enumerate()]:
        if thread.name.startswith(f"totalreduce-{group.rank}"):
            thread.join(AT_ONCE_S)
            assert not thread.is_alive(), thread.name


DESTRUCTOR = StorageHold.release.__code__
#: The moments of an allreduce: of its submission, and of the wait for it until that sleeps. A part is a sample of them.
MOMENTS = {"tcp": range(1, 560), "shm": range(1, 260)}
IN_PARTS = pytest.mark.parametrize(
    ("transport", "name", "part"),
    [
        pytest.param(transport, name, part, marks=[pytest.mark.slow] if part else [])
        for transport, name in (("tcp", "only rank 1"), ("shm", "known"), ("shm", "only rank 1"))
        for part in range(0, 64, 2)
    ],
)


@IN_PARTS
def test_a_handler_closes_the_group_at_any_moment_of_a_call(transport, name, part, caplog):
    """The call fails, the other rank is told, and all threads end, without any other exception and at once."""
    for step in MOMENTS[transport][part::64]:
        groups = connected_pair(transport)
        pending = groups[0].allreduce(torch.ones(1000), name="only rank 0")
        begin = time.monotonic()
        error = allreduce_and_be_interrupted(groups[1], name, step, groups[1].close)
        assert isinstance(error, GroupClosed), (step, error)
        with pytest.raises(PeerLost, match="it has closed the group") as caught:
            pending.wait(timeout_s=AT_ONCE_S)
        assert caught.value.rank == 1
        expect_the_end(groups[1])
        assert time.monotonic() - begin < AT_ONCE_S, step
        groups[0].close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@IN_PARTS
def test_a_handler_closes_the_group_and_raises_at_any_moment_of_a_call(transport, name, part):
    """As ``sys.exit`` in a handler does: the exception leaves the call, and both ranks end at once all the same."""
    for step in MOMENTS[transport][part::64]:
        groups = connected_pair(transport)
        pending = groups[0].allreduce(torch.ones(1000), name="only rank 0")

        def handler(group=groups[1]):
            group.close()
            raise SystemExit(3)

        error = allreduce_and_be_interrupted(groups[1], name, step, handler)
        assert isinstance(error, SystemExit), (step, error)
        with pytest.raises(PeerLost, match=r"it has closed the group|its connection ended") as caught:
            pending.wait(timeout_s=AT_ONCE_S)
        assert caught.value.rank == 1
        expect_the_end(groups[1])
        groups[0].close()


@pytest.mark.parametrize("function", ["submit", "add", "carry_by_messages", "push", "complete_ended", "look_again"])
def test_an_exception_in_a_submission_ends_the_group(function):
    """Ctrl-C may come between two changes of the engine: nothing goes on from there, and no other rank waits."""
    groups = connected_pair("tcp")
    runner = groups[1]._runner
    engine = runner.engine
    functions = {
        "submit": engine.submit,
        "add": engine.table.add,
        "carry_by_messages": engine.carry_by_messages,
        "push": engine.outbox.push,
        "complete_ended": runner._endpoint.complete_ended,
        "look_again": runner._look_again,
    }
    pending = groups[0].allreduce(torch.ones(1000), name="w")

    def handler():
        raise KeyboardInterrupt

    code = functions[function].__func__.__code__
    error = allreduce_and_be_interrupted(groups[1], "w", 1, handler, code, waits=False)
    assert isinstance(error, KeyboardInterrupt)
    with pytest.raises(GroupClosed, match="KeyboardInterrupt"):
        groups[1].allreduce(torch.ones(1000), name="w")
    with pytest.raises(PeerLost):
        pending.wait(timeout_s=AT_ONCE_S)
    groups[1].close()
    expect_the_end(groups[1])
    groups[0].close()


@pytest.mark.parametrize("function", ["hurry", "round", "wait"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_handler_that_stays_for_long_after_it_has_closed_the_group(transport, function, caplog):
    """The transport is closed under the interrupted call, which finds that out when the handler returns."""
    groups = connected_pair(transport)
    runner = groups[1]._runner
    functions = {"hurry": runner._hurry, "round": runner._round, "wait": runner.transport.wait}

    def handler():
        groups[1].close(0.2)
        expect_the_end(groups[1])

    error = allreduce_and_be_interrupted(groups[1], "only rank 1", 1, handler, functions[function].__func__.__code__)
    assert isinstance(error, GroupClosed), error
    groups[0].close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_callback_of_an_operation_closes_the_group(transport):
    def body(group):
        group.barrier()
        closed = threading.Event()
        work = group.allreduce(torch.ones(1000), name="w")
        work.on_done(lambda _: (group.close(), closed.set()))
        assert closed.wait(AT_ONCE_S)
        assert work.wait().tolist() == [2.0] * 1000
        expect_the_end(group)
        with pytest.raises(GroupClosed):
            group.allreduce(torch.ones(3))

    run_ranks(2, body, transport=transport)


def test_callbacks_of_a_group_that_a_handler_has_closed():
    """Those of ``on_quiesce`` are not called, because they would work on what the interrupted call works on."""
    groups = connected_pair("shm")
    called = []
    groups[1].on_quiesce(lambda: called.append("quiesce"))
    groups[1].at_close(lambda: called.append("close"))
    error = allreduce_and_be_interrupted(groups[1], "only rank 1", 40, groups[1].close)
    assert isinstance(error, tr.GroupClosed)
    expect_the_end(groups[1])
    assert called == ["close"]
    groups[0].close()
