"""Threads for users' callbacks: as many as wait for each other, and a clock for what nobody waits for."""

import threading
import time

from totalreduce.c10d.callbacks import Callbacks


def test_callbacks_may_wait_for_callbacks():
    callbacks = Callbacks("test")
    done = [threading.Event() for _ in range(5)]

    def step(index):
        if index + 1 < len(done):
            callbacks.run(lambda: step(index + 1))
            assert done[index + 1].wait(20)
        done[index].set()

    callbacks.run(lambda: step(0))
    assert done[0].wait(20)
    callbacks.close()


def test_all_that_wait_get_threads():
    callbacks = Callbacks("test")
    all_wait, done = threading.Barrier(101), threading.Semaphore(0)

    def wait():
        all_wait.wait(20)
        done.release()

    for _ in range(100):
        callbacks.run(wait)
    all_wait.wait(20)
    for _ in range(100):
        assert done.acquire(timeout=20)
    callbacks.close()


def test_a_system_that_allows_no_thread_for_a_while(monkeypatch):
    callbacks, start = Callbacks("test"), threading.Thread.start
    refused, ran = [], threading.Event()

    def refuse(thread):
        if thread.name == "test-callbacks" and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    callbacks.run(ran.set)
    assert ran.wait(20)
    assert len(refused) == 2
    callbacks.close()


def test_a_thread_is_used_again():
    callbacks = Callbacks("test")
    threads = []
    for _ in range(3):
        ran = threading.Event()

        def note(ran=ran):
            threads.append(threading.get_ident())
            ran.set()

        callbacks.run(note)
        assert ran.wait(20)
        while not callbacks._idle:
            time.sleep(0.001)
    assert len(set(threads)) == 1
    callbacks.close()


def test_an_error_in_a_callback_ends_nothing(caplog):
    callbacks = Callbacks("test")
    ran = threading.Event()
    callbacks.run(lambda: 1 / 0)
    callbacks.run(ran.set)
    assert ran.wait(20)
    deadline = time.monotonic() + 20  # the two may run in two threads
    while "ZeroDivisionError" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "ZeroDivisionError" in caplog.text
    callbacks.close()


def test_deadlines():
    callbacks = Callbacks("test")
    expired, forgotten = threading.Event(), threading.Event()
    now = time.monotonic()
    callbacks.watch(1, now + 0.1, expired.set)
    callbacks.watch(2, now + 0.1, forgotten.set)
    callbacks.watch(3, now + 1000, forgotten.set)
    callbacks.forget(2)
    assert expired.wait(20)
    assert time.monotonic() >= now + 0.1
    assert not forgotten.is_set()
    callbacks.close()
