"""Which ranks of a host can read each other's process (``transports.shm_reads``)."""

import mmap
import os

import numpy as np
import pytest
from process_reads import skip_without_process_reads
from shm_host import IDENTITY, Host, RecordingEndpoint

from totalreduce.foundation.config import TcpConfig
from totalreduce.transports.shm import ShmTransport, listen
from totalreduce.transports.shm_memory import OWNER


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_have_met_can_read_each_other(count):
    skip_without_process_reads()
    with Host(count, process_reads=True) as host:
        tensor = np.ones(1000, np.uint8)
        for number, rank in enumerate(host.ranks):
            others = set(range(count)) - {number}
            assert rank.boards.processes == dict.fromkeys(others, os.getpid())
            assert rank.boards.let_read(range(count), tensor.ctypes.data, 1000)


@pytest.mark.parametrize("forbidden", [0, 1])
def test_one_rank_that_forbids_it_is_enough(forbidden):
    doors = [listen() for _ in range(2)]
    names, (closed, endpoints) = [name for _, name in doors], ([], [RecordingEndpoint(), RecordingEndpoint()])
    ranks = [
        ShmTransport(rank, names, door, IDENTITY, TcpConfig(), process_reads=rank != forbidden)
        for rank, (door, _) in enumerate(doors)
    ]
    for rank, endpoint in zip(ranks, endpoints, strict=True):
        rank.attach(endpoint)
    for _ in range(1000):
        for rank in ranks:
            rank._next_look = 0.0
            rank.progress()
        closed = [len(rank.connected_peers()) for rank in ranks]
        if closed == [1, 1]:
            break
    assert closed == [1, 1]
    tensor = np.ones(1000, np.uint8)
    for rank in ranks:
        assert not rank.boards.processes
        assert not rank.boards.let_read(range(2), tensor.ctypes.data, 1000)
        rank.close(1.0)


def test_nobody_reads_unless_that_is_wanted():
    with Host(2) as host:
        assert [rank.boards.processes for rank in host.ranks] == [{}, {}]


def test_a_sample_with_another_value_is_another_process():
    """A rank may announce an address that has something else in this rank's view: no number of a process is taken."""
    skip_without_process_reads()
    with Host(2, meet=False, process_reads=True) as host:
        host.ranks[0]._outbox.words[OWNER.sample + 1] ^= 1
        host.move(until=lambda: all(rank.connected_peers() for rank in host.ranks))
        assert not host.ranks[1].boards.processes
        assert host.ranks[0].boards.processes == {1: os.getpid()}
        tensor = np.ones(8, np.uint8)
        assert not host.ranks[0].boards.let_read(range(2), tensor.ctypes.data, 8)
        assert host.ranks[1].boards.let_read(range(2), tensor.ctypes.data, 8)


def test_memory_that_the_system_does_not_read():
    skip_without_process_reads()
    with Host(2, process_reads=True) as host:
        page = mmap.PAGESIZE
        memory = mmap.mmap(-1, 2 * page)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        reads = host.ranks[0].boards.let_read
        assert reads(range(2), address, 2 * page)
        assert not reads(range(2), 4096, page)  # never mapped
        assert not reads(range(2), address, 1 << 46)  # its end
