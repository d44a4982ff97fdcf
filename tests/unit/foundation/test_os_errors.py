"""How the operating system's errors are put into words."""

import errno
import os
import socket
import ssl
import subprocess
import sys

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors, out_of_descriptors


def os_error(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (os_error(errno.ENOSPC), "No space left on device (ENOSPC)"),
        (os_error(errno.ECONNREFUSED), "Connection refused (ECONNREFUSED)"),
        (ssl.SSLError(1, "certificate verify failed"), "certificate verify failed"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("no number"), "OSError: no number"),
        (ValueError("3 is no rank"), "ValueError: 3 is no rank"),
        (MemoryError(), "MemoryError"),
        (ConfigurationError("set this"), "set this"),
    ],
)
def test_one_line_that_names_the_error(error, text):
    assert describe_error(error) == text
    assert not is_out_of_descriptors(error)


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_the_limit_of_open_files_and_what_to_do():
    lines = run(
        "import errno, resource\n"
        "from totalreduce.foundation.os_errors import describe_error\n"
        "for hard in (200, 100):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "    print(describe_error(OSError(errno.EMFILE, 'Too many open files')))\n"
    )
    common = "too many open files (EMFILE): this process may have 100 (RLIMIT_NOFILE, `ulimit -n`); "
    assert [line.removeprefix(common) for line in lines] == [
        "start it after `ulimit -n 200`",
        "the hard limit is the same: have it raised (limits.conf, or LimitNOFILE= of the service)",
    ]
    assert is_out_of_descriptors(os_error(errno.EMFILE))


def test_the_limit_of_the_machine():
    error = os_error(errno.ENFILE)
    assert is_out_of_descriptors(error)
    assert "ENFILE" in describe_error(error)
    assert "fs.file-max" in describe_error(error)


def test_whether_a_descriptor_is_left():
    assert out_of_descriptors() is None
    full, free = run(
        "import os, resource\n"
        "from totalreduce.foundation.os_errors import describe_error, out_of_descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "held = []\n"
        "while (reason := out_of_descriptors()) is None: held.append(os.dup(2))\n"
        "print(describe_error(reason))\n"
        "os.close(held.pop())\n"
        "print(out_of_descriptors())"
    )
    assert "this process may have 12 " in full
    assert free == "None"
