"""Errors of the operating system, with their limits and remedies."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from totalreduce.foundation.errors import TotalReduceError

__all__ = ["describe_error", "is_out_of_descriptors", "missing_descriptors", "out_of_descriptors"]

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
#: Enough for a rank of a job of a thousand ranks, with data loaders.
_ENOUGH_DESCRIPTORS = 65_536


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether an error means that this process, or this machine, may open no more files or sockets."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS


def out_of_descriptors() -> OSError | None:
    """Return the error with which no file or socket can be opened now; ``None`` if one can be opened.

    It is for errors of other libraries that hide this cause, and for system calls that leave descriptors out without
    an error.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error if is_out_of_descriptors(error) else None
    return None


def missing_descriptors(needed: int) -> str | None:
    """Return a sentence if this process cannot open so many more files and sockets; otherwise ``None``.

    It is for use before and after calls of libraries that end the process, or report another error, in that case.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        # The listing itself has one of them. Those above a limit that was lowered later do not count.
        num_open = sum(int(name) < soft for name in os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        return describe_error(error) if is_out_of_descriptors(error) else None
    if soft - num_open >= needed:
        return None
    shortage = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return f"it must open {needed} more files and sockets, and has {num_open} open: {describe_error(shortage)}"


def describe_error(error: BaseException) -> str:
    """Return one line about an error: for an ``OSError`` the name of its number, the limit reached, and the remedy.

    For other exceptions it has the kind and the text; for the library's own errors, which are sentences, the text.
    """
    if isinstance(error, TotalReduceError):
        return str(error)
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        higher = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
        remedy = f"start it after `ulimit -n {higher}`"
        if higher <= soft:
            remedy = "the hard limit is the same: have it raised (limits.conf, or LimitNOFILE= of the service)"
        return f"too many open files (EMFILE): this process may have {soft} (RLIMIT_NOFILE, `ulimit -n`); {remedy}"
    if error.errno == errno.ENFILE:
        return (
            f"too many open files on this machine (ENFILE): the limit of all processes together is {_system_limit()} "
            "(`sysctl fs.file-max`); end what holds many files, or raise it"
        )
    # Errors of TLS and of name resolution are OSErrors too, but their numbers are not the system's.
    name = errno.errorcode.get(error.errno)
    return f"{error.strerror} ({name})" if name and error.strerror == os.strerror(error.errno) else error.strerror


def _system_limit() -> str:
    try:
        return Path("/proc/sys/fs/file-max").read_text("ascii").strip()
    except OSError:  # no descriptor is left to read it with
        return "reached"
