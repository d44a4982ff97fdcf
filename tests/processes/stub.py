"""Stands for a Python interpreter: it asks the zygote for a process that has imported torch.

The stub passes its arguments, environment, folder and open files on, forwards signals, and ends as the process ends.
Its own end is the end of the process. ``fleet.Fleet`` writes this file with the first line and the constants filled in.
"""

import json
import os
import signal
import socket
import struct
import sys

PYTHON = "{python}"
ZYGOTE = "{address}"


def inherited():
    """The files that are open in this process and that a program started by it would have."""
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number < 3 or os.get_inheritable(number):
                numbers.append(number)
        except OSError:
            pass  # the listing itself
    return numbers


def main():
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")):
        os.execv(PYTHON, [PYTHON, *arguments])
    numbers = inherited()
    zygote = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote.connect("\0" + ZYGOTE)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": numbers}
    socket.send_fds(zygote, [json.dumps(request).encode()], numbers)
    (pid,) = struct.unpack("i", zygote.recv(4))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    for number in (0, 1, 2):  # not the others: to mpirun their end before that of the stub would be a crash
        os.close(number)
    end = zygote.recv(4)
    (code,) = struct.unpack("i", end) if end else (255,)  # the zygote has ended, and all its processes with it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
