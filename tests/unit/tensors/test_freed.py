"""Freed memory goes back to the system, although memory behind it is in use."""

import re
from pathlib import Path

import torch

from totalreduce.tensors.freed import give_back_freed_memory

MIB = 1 << 20


def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def test_freed_memory_goes_back_to_the_system():
    # Of a length that the C library takes from its heap. What earlier tests have freed can serve them.
    tensors = [torch.ones(64 * 1024, dtype=torch.uint8) for _ in range(1600)]
    before = resident_bytes()
    del tensors[:-1]  # the last one is behind all others
    give_back_freed_memory()
    assert before - resident_bytes() > 60 * MIB
    assert tensors[0].sum() == 64 * 1024
