"""Spare processes: they run the program, or a server, up to ``tr.init()``, and wait there for the seat of a lost rank.

A lost rank is then replaced without the start of an interpreter and without imports. A spare waits for one line on its
standard input: a JSON object with the variables of the environment that the worker of a seat has and a spare has not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import final

from totalreduce.foundation.environment import SPARE, current
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.workers import Worker

__all__ = ["Spare", "Spares", "await_seat"]

#: The variables that differ between seats.
_SEAT_VARIABLES = ("RANK", "ROLE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TOTALREDUCE_INCARNATION")
#: Those that differ as well if some ranks only serve; otherwise they do not exist.
_WHOLE_VARIABLES = ("TOTALREDUCE_RANK", "TOTALREDUCE_LOCAL_RANK", "TOTALREDUCE_LOCAL_WORLD_SIZE")
#: The values of ``SPARE``.
_PROGRAM, _SERVER = "program", "server"
#: The most bytes that are kept of each stream of a spare without a seat.
_HELD_BYTES_MAX = 64 * 1024


@final
class Spare:
    """The launcher's side of one spare."""

    def __init__(
        self, start: Callable[[Mapping[str, str]], Worker], environment: Mapping[str, str], *, serves: bool
    ) -> None:
        """Start it.

        Args:
            start: Starts a worker with rank -1, pipes for its output, a standard input, and these variables.
            environment: The variables of any seat.
            serves: Whether it serves.
        """
        own = {*_SEAT_VARIABLES, *_WHOLE_VARIABLES}
        common = {name: text for name, text in environment.items() if name not in own}
        #: Its process. The rank is -1 until it has a seat.
        self.worker = start({**common, SPARE: _SERVER if serves else _PROGRAM})
        #: Whether it can replace a rank that only serves a parameter server; else one that runs the program.
        self.serves = serves
        #: What it has written to standard output and standard error without a seat.
        self.held = (bytearray(), bytearray())

    def hold(self, data: bytes, *, is_error: bool) -> None:
        """Keep bytes that it has written without a seat: the last ones, if there are many."""
        self.held[is_error].extend(data)
        del self.held[is_error][:-_HELD_BYTES_MAX]

    def seat(self, rank: int, environment: Mapping[str, str]) -> None:
        """Give it the seat of a rank; ``environment`` is what a worker of this seat would get."""
        self.worker.rank = rank
        # If it has ended just now, the launcher notices that as the end of this rank's worker.
        self.worker.give(json.dumps(_variables_of_seat(environment)).encode() + b"\n")


@final
class Spares:
    """The spares of a run."""

    def __init__(self) -> None:
        self.waiting: list[Spare] = []  #: Those without a seat, the oldest first.
        self.fail = False  #: Whether one has ended by itself without a seat: then no more are started.

    def count(self, *, serves: bool) -> dict[str, int]:
        """Return by host how many spares wait there that serve, or that do not."""
        return Counter(spare.worker.host for spare in self.waiting if spare.serves == serves)

    def take(self, host: str, *, serves: bool) -> Spare | None:
        """Return the oldest such spare of a host, which waits no more; ``None`` if there is none."""
        fitting = (spare for spare in self.waiting if spare.worker.host == host and spare.serves == serves)
        found = next(fitting, None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def of(self, worker: Worker) -> Spare | None:
        """Return the spare without a seat whose process this is, if it is one."""
        return next((spare for spare in self.waiting if spare.worker is worker), None)

    def take_ended(self, now: float) -> list[Spare]:
        """Return the spares that have ended since the last call; they wait no more."""
        ended = [spare for spare in self.waiting if spare.worker.poll(now)]
        self.waiting = [spare for spare in self.waiting if spare not in ended]
        return ended


def await_seat() -> None:
    """If this process is a spare, wait for a seat, and take its variables into the environment.

    Raises ``SystemExit``, ``ConfigurationError``.
    """
    kind = current().get(SPARE)
    if kind not in (_PROGRAM, _SERVER):
        return
    if kind == _PROGRAM:
        importlib.import_module("torch._dynamo")  # each program's first optimizer imports it, which takes a second
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit(0)
    try:
        os.environ.update(_variables_of_seat(json.loads(line)))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{SPARE} is set, and standard input has no seat. Only totalreduce run --spares sets this variable"
        ) from error
    del os.environ[SPARE]
    # Workers have no standard input.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _variables_of_seat(environment: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of a seat. Raises ``KeyError`` if one is missing that every seat has."""
    present = [name for name in _WHOLE_VARIABLES if name in environment]
    return {name: str(environment[name]) for name in (*_SEAT_VARIABLES, *present)}
