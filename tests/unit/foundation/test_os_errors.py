"""How the operating system's errors are put into words."""

import errno
import os
import resource
import socket
import ssl

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


def test_the_limit_of_open_files_and_what_to_do(monkeypatch):
    lines = []
    for hard in (200, 100):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (100, hard))
        lines.append(describe_error(os_error(errno.EMFILE)))
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
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        while (reason := out_of_descriptors()) is None:
            held.append(os.dup(2))
        full = describe_error(reason)
        os.close(held.pop())
        assert out_of_descriptors() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)
    assert f"this process may have {soft} " in full
