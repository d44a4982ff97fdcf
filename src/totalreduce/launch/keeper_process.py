"""The launcher's side of the keeper, the process that serves the store of the ranks' decisions.

The keeper (``totalreduce.recovery.keeper``) serves the store in which the ranks decide who forms the next group. It is
a process of its own, so that the launcher needs no torch, and so that it can live in an emulated host.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, final

from totalreduce.launch.restarts import PAUSE_MAX_S, SOON_S
from totalreduce.launch.workers import is_stopped

__all__ = [
    "JobBegun",
    "JobFinished",
    "KeeperEvent",
    "KeeperProcess",
    "MembershipDecided",
    "RankSuspected",
    "RankWaits",
    "ValuesRefused",
]

_PAUSE_S = 0.05
#: How often the launcher looks whether the keeper is stopped, in seconds.
_LOOK_S = 1.0
#: The number of epochs that ranks may have decided and the keeper has not told the launcher of, because it was lost. It
#: tells them every 20 ms, and an epoch takes at least a millisecond.
_EPOCHS_UNSEEN = 1000


@dataclass(frozen=True, slots=True)
class RankSuspected:
    """A rank has heard nothing from another one."""

    seat: int  #: The seat of the silent rank.
    incarnation: int  #: How often that rank was started again.
    by: int  #: The seat of the rank that reports it.
    epoch: int  #: The membership in which it is silent.


@dataclass(frozen=True, slots=True)
class RankWaits:
    """A rank has waited for others for a while."""


@dataclass(frozen=True, slots=True)
class ValuesRefused:
    """The store has values that no rank writes: ``count`` is their number so far."""

    count: int


@dataclass(frozen=True, slots=True)
class JobBegun:
    """The first block of the job has taken effect."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All ranks have come to the end of the job."""


@dataclass(frozen=True, slots=True)
class MembershipDecided:
    """The ranks have decided who forms the next group."""

    epoch: int  #: The number of the membership.
    seats: list[int]  #: The seats of its members.
    details: dict[str, Any]  #: All that the keeper says of it, JSON values.


KeeperEvent = RankSuspected | RankWaits | ValuesRefused | JobBegun | JobFinished | MembershipDecided
"""What the keeper reports to the launcher."""


@final
class KeeperProcess:
    """The launcher's side of the keeper. If the keeper is lost, another one is started."""

    def __init__(
        self, prefix: Sequence[str], address: str, port: int, num_seats: int, environment: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            prefix: A command before its own, for an emulated host.
            address: Where the ranks reach it. It listens there only, if an interface has this address.
            port: Its port.
            num_seats: The number of seats.
            environment: Its environment.
        """
        arguments = [address, str(port), str(num_seats)]
        self._command = [*prefix, sys.executable, "-m", "totalreduce.recovery.keeper", *arguments]
        self._environment = dict(environment)
        #: What a new store must have, and the launcher knows.
        self._known: dict[str, Any] = {"first_epoch": 1, "ended": {}, "begun": False, "finished": False}
        self._due, self._pause_s, self._look_at = 0.0, _PAUSE_S, 0.0
        self.starts = 0  #: How often it was started again.
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, json.dumps(self._known)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        self.pid, self._unread = self._process.pid, b""
        self.is_lost = False  #: Whether the process has ended, and no other one has been started yet.
        os.set_blocking(self.output.fileno(), False)

    @property
    def output(self) -> IO[bytes]:
        """Readable when the keeper has something to say, or has ended."""
        assert self._process.stdout is not None
        return self._process.stdout

    def has_ended(self, seat: int, incarnation: int, *, finished: bool) -> None:
        """Tell the ranks that a worker has ended; ``finished``: by coming to the end of the job."""
        self._known["ended"][str(seat)] = incarnation
        self._known["finished"] |= finished
        if self.is_lost:
            return
        assert self._process.stdin is not None
        try:
            word = {"ended": [seat, incarnation], "finished": finished}
            self._process.stdin.write(json.dumps(word).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the end of its output shows that it has ended

    def read(self) -> list[KeeperEvent]:
        """Return what the keeper has reported since the last call. Raises ``EOFError``: it has ended."""
        try:
            data = os.read(self.output.fileno(), 65536)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        events = [event for word in map(_json_of, lines) if (event := _event_of(word)) is not None]
        for event in events:
            match event:
                case MembershipDecided():
                    self._known["first_epoch"] = event.epoch + 1
                case JobBegun():
                    self._known["begun"] = True
                case JobFinished():
                    self._known["finished"] = True
        return events

    def lost(self, now: float) -> None:
        """Note that the process has ended; another one is due after a pause, which doubles if it ends soon, too."""
        self._reap()
        self.is_lost = True
        self._known["first_epoch"] += _EPOCHS_UNSEEN
        self._pause(now)

    def _pause(self, now: float) -> None:
        if now > self._due + SOON_S:
            self._pause_s = _PAUSE_S
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def start_again(self, now: float) -> bool:
        """Start another process if one is due; return whether one was started."""
        if now < self._due:
            return False
        try:
            self._start()
        except OSError:  # too many processes or open files, perhaps not for long
            self._pause(now)
            return False
        self.starts += 1
        return True

    def end_if_stopped(self, now: float) -> None:
        """Kill it if a signal such as SIGSTOP has stopped it: ranks would wait for the store. Looks once a second."""
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if is_stopped(self.pid):
                self._process.kill()

    def close(self) -> None:
        """End it."""
        if not self.is_lost:
            self._reap()

    def _reap(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()


def _json_of(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _event_of(word: object) -> KeeperEvent | None:
    """Return the event that a line of the keeper reports (``totalreduce.recovery.keeper`` lists the lines), if any."""
    if not isinstance(word, dict):
        return None
    if "suspected" in word:
        return RankSuspected(word["suspected"], word["incarnation"], word["by"], word["epoch"])
    if "waiting" in word:
        return RankWaits()
    if "refused" in word:
        return ValuesRefused(word["refused"])
    if "finished" in word:
        return JobFinished()
    if "begun" in word:
        return JobBegun()
    if "members" in word:
        return MembershipDecided(word["epoch"], [member["seat"] for member in word["members"]], word)
    return None
