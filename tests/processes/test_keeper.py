"""The process that serves the launcher's store: where it listens, what it is told, and its end."""

import contextlib
import os
import signal
import socket
import time

import pytest
from tests.processes.recovery_runs import Run

from totalreduce.launch.address import towards
from totalreduce.launch.keeper_process import JobFinished, KeeperProcess, ValuesRefused
from totalreduce.launch.workers import free_port
from totalreduce.recovery.assembly import ENDED, FINISHED, accusation_key
from totalreduce.recovery.launcher_store import LauncherStore


@pytest.fixture
def keeper_at(warm_python):
    with contextlib.ExitStack() as stack:

        def start(address):
            port = free_port()
            keeper = KeeperProcess([], address, port, 2, dict(os.environ))
            stack.callback(keeper.close)
            return keeper, port

        yield start


def events_of(keeper, count, timeout_s=20.0):
    events, give_up_at = [], time.monotonic() + timeout_s
    while len(events) < count:
        assert time.monotonic() < give_up_at, events
        events += keeper.read()
        time.sleep(0.005)
    return events


def is_open(address, port):
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def test_the_keeper_listens_at_its_address_and_is_told_of_the_end_of_the_job(keeper_at):
    keeper, port = keeper_at("127.0.0.1")
    store = LauncherStore.at(("127.0.0.1", port), 20.0)
    others = {"127.0.0.2", towards() or "127.0.0.3"}
    assert [is_open(address, port) for address in ("127.0.0.1", *others)] == [True] + [False] * len(others)
    keeper.has_ended(1, 0, finished=False)
    store.set_lasting(accusation_key(0), "garbage")
    assert events_of(keeper, 1) == [ValuesRefused(1)]
    while store.text(ENDED) != '{"1": 0}':
        time.sleep(0.005)
    assert not store.is_set(FINISHED)
    keeper.has_ended(0, 0, finished=True)  # the rank had no connection when it ended
    assert events_of(keeper, 1) == [JobFinished()]
    assert store.is_set(FINISHED)


def test_a_keeper_at_an_address_that_is_not_of_this_host_listens_at_all_addresses(keeper_at):
    _, port = keeper_at("192.0.2.1")
    store = LauncherStore.at(("127.0.0.2", port), 20.0)
    assert store.first_epoch == 1


def test_a_keeper_that_is_stopped_is_lost(tmp_path, zygote):
    """Ranks that read its store would wait for their time-out, which is five minutes."""
    stopped = []

    def follow(event):
        if event["event"] == "epoch" and not stopped:
            stopped.append(event["epoch"])
            os.kill(keepers[-1], signal.SIGSTOP)
        elif event["event"] == "keeper":
            keepers.append(event["pid"])

    keepers = []
    begin = time.monotonic()
    options = {"python": zygote.python, "on_loss": "shrink", "on_event": follow, "restarts": 0}  # of the workers
    run = Run(tmp_path / "run", 2, "--die", "1:5:forward", **options)
    assert run.result.exit_code == 0, run.result.errors
    assert len(keepers) == 2
    assert run.epochs()[-1]["epoch"] // 1000 == 1
    assert [final["world_size"] for final in run.finals] == [1]
    for epoch in range(2):
        used = [sample for (of, _), samples in run.blocks().items() if of == epoch for sample in samples]
        assert sorted(used) == list(range(300))
    assert time.monotonic() - begin < 60
