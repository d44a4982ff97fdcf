"""Whether this system lets a process read another one's memory: not in some sandboxes and emulators."""

import ctypes
import os

import pytest


def skip_without_process_reads():
    """Skip a test where the system has no ``process_vm_readv``."""
    if ctypes.CDLL(None).process_vm_readv(os.getpid(), None, 0, None, 0, 0) != 0:
        pytest.skip("this system lets no process read another one's memory")
