"""The context of a benchmark's worker: the engine, gloo, the same barrier for both, and progress on stderr."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.bench.goodput import ring_goodput
from totalreduce.bench.launching import Setting
from totalreduce.bench.machine import Machine, describe_machine
from totalreduce.bench.mpi_rank import MpiRank
from totalreduce.bench.report import print_progress
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.environment import read_settings, read_world
from totalreduce.groups.group import Group
from totalreduce.launch.address import choose_address, interface_of

_TIMEOUT_S = 300.0
# More ranks than cores leave one without a core for seconds; that is no death. Nothing else depends on it.
_PATIENT = TcpConfig(silence_s=30.0)


class Context:
    """One rank of a benchmark.

    Gloo comes first: the engine then meets through the same store. Gloo resolves the host's *name*, which
    inside an emulated host leads elsewhere; hence the interface by name.

    Attributes:
        peers: In the order in which they are measured: ``totalreduce``, ``gloo``, ``fifo``, ``openmpi``, ``mpich``.
        rounds: How often each peer is measured.
        group: The engine as users get it.
        rank: Of this worker.
        world_size: Number of workers.
        address: This rank's IPv4 address towards the others.
        mpi: The rank of this number in an MPI job, by peer.
    """

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._setting, self.peers, self.rounds = setting, setting.peers, setting.rounds
        world = read_world()
        self.rank, self.world_size = world.rank, world.world_size
        self.mpi = {peer: MpiRank(folder, peer, world.rank) for peer in setting.mpi_peers}
        self.address, _ = choose_address(world, read_settings())
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.address)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{world.master_address}:{world.master_port}",
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        self._groups: dict[str, Group] = {}
        self.group = self.another_group("totalreduce")
        if "fifo" in setting.peers:
            self.another_group("fifo", engine=EngineConfig(scheduling="fifo"))
        for rank in self.mpi.values():
            rank.meet(world.world_size)

    def group_of(self, peer: str) -> Group:
        """Return the engine behind a peer's name."""
        return self._groups.get(peer, self.group)

    def another_group(self, name: str, **settings: Any) -> Group:
        """Return a group of the same ranks with other settings; it is closed at the end. Collective."""
        self._groups[name] = tr.init(
            self._setting.transport, name=f"bench-{name}", timeout_s=_TIMEOUT_S, tcp=_PATIENT, **settings
        )
        return self._groups[name]

    def own_group(self, name: str) -> Group:
        """Return the group of this name, which the first call makes. Collective."""
        return self._groups[name] if name in self._groups else self.another_group(name)

    def barrier(self) -> None:
        """The same for every peer, so that its skew is too."""
        self.group.barrier()

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, by rank; equal on all ranks, so decisions drawn from them are."""
        mine = torch.tensor(values, dtype=torch.float64)
        others = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(others, mine)
        return [other.tolist() for other in others]

    def goodput(self) -> float:
        """Bits per second that a plain TCP stream delivers here while each rank streams to the next."""
        hosts = self._setting.host_of_rank
        first_of_host = [hosts.index(host) for host in dict.fromkeys(hosts)]
        return ring_goodput(
            rank=self.rank,
            members=first_of_host if len(first_of_host) > 1 else range(self.world_size),
            address=self.address,
            exchange=self.exchange,
        )

    def report(self, text: str) -> None:
        """Tell the user where the benchmark is; rank 0 only."""
        if self.rank == 0:
            print_progress(text)

    def machine(self) -> Machine:
        """Return the machine and versions, for the JSON document."""
        versions = {peer: rank.version for peer, rank in self.mpi.items()}
        return describe_machine(threads_per_rank=torch.get_num_threads(), mpi=versions)

    def close(self) -> None:
        """Leave together, so that no rank mistakes an early exit for a crash."""
        self.barrier()
        for rank in self.mpi.values():
            rank.close()
        for group in reversed(self._groups.values()):
            group.close()


def sleep_until(deadline: float) -> None:
    """Until ``time.monotonic()`` reaches the deadline."""
    remaining = deadline - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)
