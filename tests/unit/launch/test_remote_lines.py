"""What the program on another host makes of the launcher's lines, and of its silence."""

import json
import os
import signal

import pytest

from totalreduce.launch import remote


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(remote, "time", made)
    return made


@pytest.fixture
def launcher(clock):
    """The program's side of a connection, with a method ``say`` for the launcher's side."""
    theirs, ours = os.pipe()
    made = remote._Launcher(theirs)

    def say(**word):
        os.write(ours, json.dumps(word).encode() + b"\n")
        assert made.lines(is_readable=True) == [word]

    made.say = say
    yield made
    os.close(ours)
    os.close(theirs)


def test_a_launcher_that_is_silent_for_a_minute_is_lost(launcher, clock):
    launcher.say()
    clock.now += 59.0
    assert launcher.lines(is_readable=False) == []
    clock.now += 2.0
    with pytest.raises(EOFError):
        launcher.lines(is_readable=False)


def test_a_launcher_that_has_stopped_its_workers_is_stopped_itself_and_may_be_silent(launcher, clock):
    launcher.say(signal=int(signal.SIGSTOP))
    clock.now += 3600.0
    assert launcher.lines(is_readable=False) == []
    launcher.say(signal=int(signal.SIGCONT))
    clock.now += 59.0
    assert launcher.lines(is_readable=False) == []
    clock.now += 2.0
    with pytest.raises(EOFError):
        launcher.lines(is_readable=False)
