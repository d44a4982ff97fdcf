"""Workers on other hosts: the launcher's side, ``RemoteWorker``, and the program that a remote shell runs there.

The launcher runs ``ssh HOST 'exec PYTHON -m totalreduce.launch.remote'`` for each worker. What the worker is goes there
on standard input, so that the job's key is on no command line. Each line is a JSON object. The first one is the order:

- ``command``, ``folder``, ``environment``: what is started, in a process group of its own;
- ``has_input``: whether it has a standard input;
- ``num_local``: the number of workers that share the cores of the host;
- ``mark``: the value of a variable that all processes of this worker have.

The lines that follow are ``{"signal": number}``, ``{"input": text}`` (written to the worker's standard input, which
ends there), ``{"end_if_stopped": true}``, and ``{}``, which says that the launcher is still there.

Signals reach the worker's program alone, but for those that end, stop or continue all its processes. After SIGSTOP the
launcher may be silent: it is stopped itself.
The worker's output and exit code are passed on; the exit code is 128 plus the number of a signal that has ended it. A
worker that itself exits with 255, which is ssh's code for a lost connection, has exit code 1.
The figures of the worker, which it writes into a folder on its host, come between its standard error as a zero byte, a
word and a line of JSON; the launcher writes them into the folder of the job.
When the standard input ends (the connection is lost, or the launcher has ended), or nothing comes for a minute, all
processes of the worker are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from totalreduce.foundation.environment import LIVE, REMOTE_WORKER, current, working_folder
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.foundation.os_errors import describe_error
from totalreduce.launch.guard import kill_processes
from totalreduce.launch.live import LiveJob
from totalreduce.launch.workers import OUT_OF_MEMORY, Start, Worker, default_num_threads, signal_name
from totalreduce.observe.board import Board
from totalreduce.observe.figures import DOCUMENT_BYTES_MAX, RankFigures

__all__ = ["RemoteWorker"]

#: What the program writes to standard error when the worker has been started. No text contains the first byte.
_STARTED = b"\0totalreduce: started\n"
#: What it writes there before a line with the worker's figures. Both begin with the same byte.
_FIGURES = b"\0totalreduce: figures "
#: How long it may take until the worker has been started, or until the program gets its order.
_START_S = 60.0
#: How often the launcher says that it is still there, and the silence after which the program ends its worker.
_BEAT_S, _SILENCE_S = 5.0, 60.0
#: How long the program waits for output after the worker's end, if a process that it started holds the pipe open.
_DRAIN_S = 1.0
_TICK_S = 0.5
#: A pipe has 64 KiB, and at most this (``/proc/sys/fs/pipe-max-size``) if the worker has made it larger.
_PIPE_BYTES_MAX = 1 << 20
#: An order has the environment, which Linux limits to 2 MiB; a line is not longer than this.
_LINE_BYTES_MAX = 8 << 20
#: The exit code of ssh when it cannot connect or loses the connection, and that of a worker that exits with the same.
_CONNECTION_LOST, _OF_PROGRAM = 255, 1

#: Variables that belong to the launcher's login or terminal and have no meaning on another host.
_NOT_SENT = frozenset(
    ("HOME", "USER", "LOGNAME", "SHELL", "SHLVL", "PWD", "OLDPWD", "_", "HOSTNAME", "MAIL", "TMPDIR", "DISPLAY")
)
_NOT_SENT_PREFIXES = ("SSH_", "XDG_", "DBUS_", "XAUTH")


@final
class RemoteWorker(Worker):
    """A worker on another host, at the end of a remote shell.

    Its process is that of the remote shell (ssh), which ends with the worker's exit code.
    """

    def __init__(self, start: Start, *, host: str, shell: Sequence[str], python: str, num_local: int) -> None:
        """Start it. Its output comes through pipes.

        Args:
            start: What it is started with on the other host. Variables of the launcher's login are left out.
            host: The name of the host, for the remote shell.
            shell: The remote shell: a command to which the host and a command line for it are appended.
            python: The Python interpreter of the other host.
            num_local: The number of workers that share the cores of the host.

        Raises:
            ConfigurationError: The remote shell cannot be started.
        """
        program = f"exec {shlex.quote(python)} -m totalreduce.launch.remote"
        # The guard knows the processes of a job by its id.
        own = {**current(), "TOTALREDUCE_JOB_ID": start.environment["TOTALREDUCE_JOB_ID"]}
        remote_shell = Start(start.rank, [*shell, host, program], own, has_input=True)
        super().__init__(remote_shell, subprocess.PIPE, subprocess.PIPE, host=host)
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        order = {
            "command": list(start.command),
            "folder": working_folder(),
            "environment": _sent(start.environment),
            "has_input": start.has_input,
            "num_local": num_local,
            "mark": secrets.token_hex(8),
        }
        self._is_started = False
        self._unread = b""  #: The begin of what may be a word of the program.
        live = start.environment.get(LIVE, "0")
        self._board = None if live == "0" else Board(Path(live))
        #: Lines that the remote shell has not taken yet. A signal handler may append one while ``_flush`` writes.
        self._unsent: deque[bytes] = deque()
        self._is_flushing = False
        self._begin = self._said_at = time.monotonic()
        self._say(order)

    @property
    def is_starting(self) -> bool:
        """Whether the program on the other host has not said yet that it has started the worker."""
        return not (self._is_started or self.ended)

    @property
    def has_lost_host(self) -> bool:
        """Whether the worker was not started, or the connection was lost."""
        return self.ended and (not self._is_started or self._exit_code == _CONNECTION_LOST)

    def poll(self, now: float) -> bool:
        """Return whether it has ended since the last call; keep the connection alive until then."""
        if self.ended:
            return False
        if not self._is_started and now >= self._begin + _START_S:
            self.send(signal.SIGKILL)
        if now >= self._said_at + _BEAT_S and not self._unsent:
            self._said_at = now
            self._say({})
        self._flush()
        if not super().poll(now):
            return False
        if not self._signal and 128 < self._exit_code <= 128 + signal.SIGRTMAX:
            self._signal = signal_name(self._exit_code - 128)
        assert self.process.stdin is not None
        self.process.stdin.close()  # a remote shell that was killed has not closed the other end
        return True

    def end_if_stopped(self) -> bool:
        """Have the other host kill the worker if it is stopped. Returns ``False``: the launcher does not know."""
        self._say({"end_if_stopped": True})
        return False

    def shown(self, data: bytes, *, is_error: bool) -> bytes:
        """Return the bytes without what the program itself has written between them."""
        if not is_error:
            return data
        data, self._unread = self._unread + data, b""
        shown: list[bytes] = []
        begin = search = 0
        while (zero := data.find(_STARTED[:1], search)) >= 0:
            taken = self._word_of_program(data, zero)
            if taken is None:
                self._unread = data[zero:]
                return b"".join([*shown, data[begin:zero]])
            if taken:
                shown.append(data[begin:zero])
                begin = zero + taken
            search = zero + max(1, taken)
        return b"".join([*shown, data[begin:]])

    def _word_of_program(self, data: bytes, at: int) -> int | None:
        """Act on a word of the program that begins at a place of the bytes; return its length, 0 if there is none.

        Returns ``None`` if the rest of the word has not come yet.
        """
        word = data[at : at + len(_STARTED)]
        if not self._is_started and _STARTED.startswith(word):
            self._is_started = word == _STARTED
            return len(_STARTED) if self._is_started else None
        word, begin = data[at : at + len(_FIGURES)], at + len(_FIGURES)
        if not _FIGURES.startswith(word):
            return 0
        end = data.find(b"\n", begin, begin + DOCUMENT_BYTES_MAX + 1)
        if end < 0:
            return None if len(data) - begin <= DOCUMENT_BYTES_MAX else 0
        line = data[begin:end]
        if self._board is not None:
            # The folder is gone if the run ends, and a word that is no document is a word of the worker.
            with contextlib.suppress(OSError, ProtocolError):
                self._board.write_figures(RankFigures.decode(line).seat, line)
        return end + 1 - at

    def give(self, line: bytes) -> None:
        """Write a line to the worker's standard input, and close that."""
        self._say({"input": line.decode()})

    def send(self, number: signal.Signals) -> None:
        """Have a signal sent as ``Worker.send`` does. SIGKILL ends the connection, which has the same effect."""
        if number is signal.SIGKILL:
            super().send(number)
        else:
            self._say({"signal": int(number)})

    def _say(self, value: Mapping[str, Any]) -> None:
        if not self.ended:
            self._unsent.append(json.dumps(value).encode() + b"\n")
            self._flush()

    def _flush(self) -> None:
        """Write what the remote shell can take now; ``poll`` goes on with the rest.

        A call by a signal handler in the middle of another call leaves its line to that one, or to ``poll``.
        """
        if self._is_flushing:
            return
        self._is_flushing = True
        assert self.process.stdin is not None
        try:
            while self._unsent:
                rest = self._unsent[0][os.write(self.process.stdin.fileno(), self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ValueError):  # it has ended, which its exit status shows
            self._unsent.clear()
        finally:
            self._is_flushing = False


def _sent(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environment.items()
        if name not in _NOT_SENT and not name.startswith(_NOT_SENT_PREFIXES)
    }


# ---------------------------------------------------------------------------------------------------- on the other host


class _Launcher:
    """The lines that the launcher sends. ``EOFError`` ends them."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._unread = b""
        self._heard_at = time.monotonic()
        #: Whether the launcher has had the worker stopped. It is then stopped itself, and silent.
        self._is_stopped = False

    def order(self) -> dict[str, Any]:
        """Return the order, the first line."""
        give_up_at = time.monotonic() + _START_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, give_up_at - time.monotonic()))
            if not ready:
                raise EOFError
            self._read()
        line, _, self._unread = self._unread.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order

    def lines(self, *, is_readable: bool) -> list[dict[str, Any]]:
        """Return the lines that have come; ``is_readable``: whether there is something to read."""
        if is_readable:
            self._read()
        elif time.monotonic() > self._heard_at + _SILENCE_S and not self._is_stopped:
            raise EOFError
        *lines, self._unread = self._unread.split(b"\n")
        words: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if words:
            self._is_stopped = words[-1].get("signal") == signal.SIGSTOP
        return words

    def _read(self) -> None:
        data = os.read(self._descriptor, 1 << 16)
        if not data or len(self._unread) > _LINE_BYTES_MAX:
            raise EOFError
        self._unread += data
        self._heard_at = time.monotonic()


@final
class _NewFigures:
    """Finds the figures that the worker writes into a folder of this host."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seen: tuple[str, int] | None = None
        self._look_at = 0.0

    def take(self, now: float) -> bytes:
        """Return the word with the figures that were written since the last call; nothing if none were."""
        if now < self._look_at:
            return b""
        self._look_at = now + _TICK_S
        for path in self._board.figure_files():
            with contextlib.suppress(OSError):
                seen = (path.name, path.stat().st_mtime_ns)
                document = path.read_bytes()
                if seen != self._seen and len(document) <= DOCUMENT_BYTES_MAX and b"\n" not in document:
                    self._seen = seen
                    return _FIGURES + document + b"\n"
        return b""


def _attend(worker: Worker, launcher: _Launcher, figures: _NewFigures | None) -> int:
    """Do what the launcher says, and pass output and figures on, until the worker has ended; return its exit code.

    Raises:
        EOFError, BrokenPipeError: The launcher is gone.
    """
    pipes = {pipe.fileno(): target for target, pipe in ((1, worker.process.stdout), (2, worker.process.stderr)) if pipe}
    for pipe in pipes:
        os.set_blocking(pipe, False)
    unsent = {1: b"", 2: b""}
    leave_at = float("inf")
    while True:
        awaited = [0, *(pipe for pipe, target in pipes.items() if not unsent[target])]
        if worker.exit_descriptor is not None and not worker.ended:
            awaited.append(worker.exit_descriptor)
        readable, writable, _ = select.select(awaited, [target for target in unsent if unsent[target]], [], _TICK_S)
        for line in launcher.lines(is_readable=0 in readable):
            _obey(worker, line)
        for target in writable:
            # So many bytes do not block. If nobody reads them, the launcher must still be heard, or be found silent.
            with contextlib.suppress(BlockingIOError):  # it does not block, and another process has written to it
                unsent[target] = unsent[target][os.write(target, unsent[target][: select.PIPE_BUF]) :]
        for pipe in set(pipes).intersection(readable):
            data = os.read(pipe, 1 << 16)
            unsent[pipes[pipe]] = data
            if not data:
                del pipes[pipe]
        now = time.monotonic()
        if figures is not None and not unsent[2]:  # if the launcher does not read, figures are left out
            unsent[2] = figures.take(now)
        if worker.poll(now):
            leave_at = now + _DRAIN_S
            end = worker.result(())
            worker.send(signal.SIGKILL)  # the rest of its process group
            for pipe, target in pipes.items():  # what it has written itself is never left, however slow the network is
                with contextlib.suppress(BlockingIOError):
                    unsent[target] += os.read(pipe, _PIPE_BYTES_MAX)
            if end.is_out_of_memory:  # the launcher cannot know that
                unsent[2] += f"totalreduce: killed by SIGKILL, {OUT_OF_MEMORY}\n".encode()
        if worker.ended and not any(unsent.values()) and (not pipes or now >= leave_at):
            code = worker.result(()).exit_code
            return _OF_PROGRAM if code == _CONNECTION_LOST else code


def _obey(worker: Worker, line: Mapping[str, Any]) -> None:
    if "signal" in line and not worker.ended:
        worker.send(signal.Signals(line["signal"]))
    elif "input" in line:
        worker.give(line["input"].encode())
    elif "end_if_stopped" in line:
        worker.end_if_stopped()


def main() -> int:
    """Run one worker for a launcher on another host; return the exit code."""
    # The launcher passes on what the worker is to get. A handler, because a worker would inherit that they are ignored.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    launcher = _Launcher()
    try:
        order = launcher.order()
    except EOFError:
        return _CONNECTION_LOST
    environment = {**current(), **order["environment"], REMOTE_WORKER: order["mark"], "PWD": order["folder"]}
    environment.setdefault("OMP_NUM_THREADS", str(default_num_threads(order["num_local"])))
    with contextlib.ExitStack() as stack:  # removes the folder, however the worker ends
        live = None
        if environment.get(LIVE, "0") != "0":  # the launcher's folder, which is on another host
            with contextlib.suppress(ConfigurationError):
                live = stack.enter_context(LiveJob())
                live.begin(environment["TOTALREDUCE_JOB_ID"], order["command"], 1, is_part=True)
            environment[LIVE] = "0" if live is None else str(live.board.path)
        return _run(order, environment, launcher, None if live is None else _NewFigures(live.board))


def _run(
    order: Mapping[str, Any], environment: Mapping[str, str], launcher: _Launcher, figures: _NewFigures | None
) -> int:
    """Run the worker of an order; return its exit code."""
    try:
        os.chdir(order["folder"])
        start = Start(0, order["command"], environment, order["has_input"])
        worker = Worker(start, subprocess.PIPE, subprocess.PIPE)
    except (OSError, ConfigurationError) as error:
        where = f"on {socket.gethostname()}, in the folder {order['folder']}"
        print(f"totalreduce: a worker cannot be started {where}: {describe_error(error)}", file=sys.stderr)  # noqa: T201
        return 127
    ended_well = False
    try:
        os.write(2, _STARTED)
        code = _attend(worker, launcher, figures)
        ended_well = True
        return code
    except (EOFError, BrokenPipeError):
        return _CONNECTION_LOST
    finally:
        worker.finish(time.monotonic())
        if not ended_well:
            kill_processes(REMOTE_WORKER, order["mark"])


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # the output was written without buffers, and nobody may be there to read the rest
