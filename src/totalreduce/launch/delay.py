"""Delayed links of emulated hosts: a process that hands Ethernet frames on after a fixed time.

The kernel's own delay (``netem``) is missing on many machines, among them most containers. So a delayed link is a pair
of TAP devices instead of a pair of veth devices: one is a port of the bridge, the other one goes to the host. This
process reads the frames that one device sends, and gives them to the other device when the delay is over. The token
buckets of both devices shape what this process reads.

A TAP device belongs to the network namespace in which it was made, and this process is started in that of the bridge.
The launcher moves one device of each pair to its host.

This file is run as a script, in an interpreter without packages: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["DelayLine", "start_delay"]

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES_MAX = 1 << 16
#: Frames that one device may send before another one has its turn.
_TURN = 64
#: Frames on their way in all links together; further ones are dropped, as by a full queue: a second of 100 Mbit/s.
_FRAMES_MAX = 1 << 13
#: How long the process may take to make its devices.
_START_S = 20.0


class DelayLine:
    """Frames on their way. No file, no clock: both are arguments.

    All frames have the same delay, so they leave in the order in which they came.
    """

    def __init__(self, delay_s: float, frames_max: int = _FRAMES_MAX) -> None:
        """Begin without frames."""
        self._delay_s, self._frames_max = delay_s, frames_max
        self._frames: deque[tuple[float, int, bytes]] = deque()

    def push(self, target: int, frame: bytes, now: float) -> None:
        """Take a frame for a device in, or drop it if there are too many."""
        if len(self._frames) < self._frames_max:
            self._frames.append((now + self._delay_s, target, frame))

    def pop(self, now: float) -> tuple[int, bytes] | None:
        """Return the next frame whose time has come, and its device; ``None`` if there is none."""
        if not self._frames or self._frames[0][0] > now:
            return None
        _, target, frame = self._frames.popleft()
        return target, frame

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next frame is due; ``None`` without frames."""
        return max(0.0, self._frames[0][0] - now) if self._frames else None


def start_delay(prefix: Sequence[str], names: Sequence[tuple[str, str]], delay_s: float) -> subprocess.Popen[bytes]:
    """Start the process of a network's delayed links; return when its devices exist. Raises ``OSError``.

    The process ends when its standard input ends, as it does when the launcher ends in any way.

    Args:
        prefix: The command that runs another one in the namespace of the bridge.
        names: Two devices of each link.
        delay_s: The delay of a link, in seconds.
    """
    pairs = [f"{one},{other}" for one, other in names]
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", __file__, repr(delay_s), *pairs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_S)
    if not readable or process.stdout.readline() != b"ready\n":
        process.kill()
        lines = process.communicate()[1].decode("utf-8", "replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"not made within {_START_S:g} s")
    return process


def _open_tap(name: str) -> int:
    """Make a TAP device; return its file."""
    file = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return file


def _main(delay_s: float, pairs: Sequence[str]) -> None:
    target_of: dict[int, int] = {}
    for pair in pairs:
        one, other = (_open_tap(name) for name in pair.split(","))
        target_of |= {one: other, other: one}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    line, poll = DelayLine(delay_s), select.epoll()
    for file in (0, *target_of):
        poll.register(file, select.EPOLLIN)
    while True:
        wait_s = line.wait_s(time.monotonic())
        for file, _ in poll.poll(-1 if wait_s is None else wait_s):
            if file == 0:  # the launcher has ended: it never writes
                return
            with contextlib.suppress(BlockingIOError):
                for _ in range(_TURN):
                    line.push(target_of[file], os.read(file, _FRAME_BYTES_MAX), time.monotonic())
        while (found := line.pop(time.monotonic())) is not None:
            with contextlib.suppress(OSError):  # a full queue, or a link that is cut: the frame is lost
                os.write(*found)


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2:])
