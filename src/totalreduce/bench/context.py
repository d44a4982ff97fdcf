"""What every benchmark worker has: the engine, gloo, the same barrier for both, and progress on stderr."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import totalreduce as tr
from totalreduce.bench.goodput import ring_goodput
from totalreduce.bench.mpi_launching import MPI_PEERS
from totalreduce.bench.mpi_rank import MpiRank
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.environment import read_settings, read_world
from totalreduce.groups.group import Group
from totalreduce.launch.address import choose_address, interface_of

__all__ = ["Context", "open_context", "sleep_until"]

_TIMEOUT_S = 300.0
# More ranks than cores leave one without a core for seconds; that is no death. Nothing else depends on it.
_PATIENT = TcpConfig(silence_s=30.0)


@dataclass(kw_only=True, slots=True)
class Context:
    """One rank of a benchmark.

    Attributes:
        group: The engine as users get it.
        fifo: The same engine without priorities, where it is among the peers.
        peers: What is measured, in order: ``totalreduce``, ``gloo``, ``fifo``, ``openmpi``, ``mpich``.
        rounds: How often each peer is measured.
        rate_bits_per_s: Nominal rate of the links; ``None`` where nothing is shaped.
        address: This rank's IPv4 address towards the others.
        hosts: Host of every rank.
        mpi: The rank of this number in an MPI job, by peer.
        transport: What ``group`` sends through.
        others: Further groups, see ``another_group``.
    """

    group: Group
    fifo: Group | None
    peers: list[str]
    rounds: int
    rate_bits_per_s: float | None
    address: str
    hosts: tuple[int, ...]
    mpi: dict[str, MpiRank]
    transport: str
    others: list[Group] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.group.world_size

    def group_of(self, peer: str) -> Group:
        """The engine behind a peer's name."""
        if peer == "fifo":
            assert self.fifo is not None
            return self.fifo
        return self.group

    def another_group(self, name: str, **settings: Any) -> Group:
        """The same ranks over the same transport, with other settings; closed at the end. Collective."""
        group = _group(self.transport, f"bench-{name}", **settings)
        self.others.append(group)
        return group

    @staticmethod
    def has_engine(peer: str) -> bool:
        """Whether a peer is this library's engine in some setting."""
        return peer in ("totalreduce", "fifo")

    def allreduce(self, peer: str) -> Callable[[torch.Tensor], None]:
        """A blocking sum over all ranks, in place, by the peer of that name."""
        if peer == "gloo":
            return _gloo_allreduce
        group = self.group_of(peer)

        def reduce(tensor: torch.Tensor) -> None:
            group.allreduce(tensor, name="bench.allreduce").wait()

        return reduce

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
        first_of_host = [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]
        return ring_goodput(
            rank=self.rank,
            members=first_of_host if len(first_of_host) > 1 else range(self.world_size),
            address=self.address,
            exchange=self.exchange,
        )

    def report(self, text: str) -> None:
        """Tell the user where the benchmark is; rank 0 only, on stderr."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def environment(self) -> dict[str, Any]:
        """Versions and machine, for the JSON document."""
        return {
            "totalreduce": tr.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "threads_per_rank": torch.get_num_threads(),
            "mpi": {peer: rank.version for peer, rank in self.mpi.items()},
        }

    def close(self) -> None:
        """Leave together, so that nobody mistakes an early exit for a crash."""
        self.barrier()
        for rank in self.mpi.values():
            rank.close()
        for group in self.others:
            group.close()
        if self.fifo is not None:
            self.fifo.close()
        self.group.close()


def open_context(config: dict[str, Any]) -> Context:
    """Connect gloo and the engine, over the same interface.

    Gloo comes first: the engine then meets through the same store. Gloo resolves the host's *name*, which
    inside an emulated host leads elsewhere; hence the interface by name.
    """
    world = read_world()
    folder = Path(config["folder"])
    waiting = {peer: MpiRank(folder, peer, world.rank) for peer in config["peers"] if peer in MPI_PEERS}
    address, _ = choose_address(world, read_settings())
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{world.master_address}:{world.master_port}",
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    transport = config["transport"]
    group = _group(transport, "bench")
    fifo = None
    if "fifo" in config["peers"]:
        fifo = _group(transport, "bench-fifo", engine=EngineConfig(scheduling="fifo"))
    for rank in waiting.values():
        rank.meet(world.world_size)
    return Context(
        group=group,
        fifo=fifo,
        peers=config["peers"],
        rounds=config["rounds"],
        rate_bits_per_s=config["rate_bits_per_s"],
        address=address,
        hosts=tuple(config["host_of_rank"]),
        mpi=waiting,
        transport=transport,
    )


def _group(transport: str, name: str, **settings: Any) -> Group:
    return tr.init(transport, name=name, timeout_s=_TIMEOUT_S, tcp=_PATIENT, **settings)


def sleep_until(deadline: float) -> None:
    """Until ``time.monotonic()`` reaches the deadline."""
    remaining = deadline - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)


def _gloo_allreduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
