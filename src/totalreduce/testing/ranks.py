"""``run_ranks``: the ranks of a group as threads of one process, over a real transport."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from totalreduce.engine.engine import Engine
from totalreduce.fastlane.board import BOARD_BYTES
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.errors import PeerLost
from totalreduce.groups.group import Group
from totalreduce.runner.runner import ComputeMode, Runner
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.shm import ShmTransport
from totalreduce.transports.shm import listen as listen_shm
from totalreduce.transports.tcp import TcpTransport, listen

__all__ = ["RankTransport", "TransportFactory", "make_groups", "run_ranks"]

Result = TypeVar("Result")
RankTransport = Literal["inproc", "shm", "tcp"]
#: Small, because a short test spends most of its time on making and mapping shared memory.
_POOL_BYTES = 4 * 1024 * 1024
#: Returns the connected transports of all ranks, from the world size.
TransportFactory = Callable[[int], Sequence[Transport]]


def make_groups(
    world_size: int,
    *,
    transport: RankTransport | TransportFactory = "inproc",
    engine: EngineConfig | Sequence[EngineConfig] | None = None,
    tcp: TcpConfig | Sequence[TcpConfig] | None = None,
    compute: ComputeMode = "auto",
    hosts: Sequence[int] | None = None,
) -> list[Group]:
    """Return one connected group per rank, in this process. The caller closes them.

    ``engine``, ``tcp``: one for all ranks, or one for each. ``hosts``: number of the host that each rank is assumed to
    run on; by default each has its own.
    """
    engine, tcp = engine or EngineConfig(timeout_s=30.0), tcp or TcpConfig()
    configs = [engine] * world_size if isinstance(engine, EngineConfig) else engine
    tcp_configs = [tcp] * world_size if isinstance(tcp, TcpConfig) else tcp
    links = _transports(world_size, transport, tcp_configs, configs[0])
    return [
        Group(Runner(Engine(rank, world_size, config, observers=[], hosts=hosts), link, compute=compute), "test")
        for rank, (config, link) in enumerate(zip(configs, links, strict=True))
    ]


def run_ranks(
    world_size: int,
    function: Callable[[Group], Result],
    *,
    transport: RankTransport | TransportFactory = "inproc",
    engine: EngineConfig | Sequence[EngineConfig] | None = None,
    tcp: TcpConfig | Sequence[TcpConfig] | None = None,
    compute: ComputeMode = "auto",
    hosts: Sequence[int] | None = None,
    timeout_s: float = 60.0,
) -> list[Result]:
    """Run ``function(group)`` on every rank, one thread each, and return the results by rank.

    The first failure ends the others' operations and is raised, with its rank in a note. After ``timeout_s`` the stack
    of every rank is printed.

    Raises:
        TimeoutError: A rank did not return.
        BaseException: The first error of the function.
    """
    groups = make_groups(world_size, transport=transport, engine=engine, tcp=tcp, compute=compute, hosts=hosts)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def body(rank: int) -> None:
        try:
            results[rank] = function(groups[rank])
        except BaseException as error:
            with lock:
                failures.append((rank, error))
            groups[rank].close(1.0)  # the others' operations fail, because this rank has left

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck:
        _print_stacks(stuck)
    _close_all(groups)
    if failures:
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {world_size}")
        raise error
    if stuck:
        raise TimeoutError(f"{[thread.name for thread in stuck]} did not return within {timeout_s} s")
    return results


def _transports(
    world_size: int, kind: RankTransport | TransportFactory, tcp: Sequence[TcpConfig], engine: EngineConfig
) -> Sequence[Transport]:
    if callable(kind):
        return kind(world_size)
    if kind == "inproc":
        network = InprocNetwork(world_size)
        return [network.transport(rank) for rank in range(world_size)]
    identity = JobIdentity(secrets.token_bytes(32), "test", 0)
    if kind == "shm":
        sockets = [listen_shm() for _ in range(world_size)]
        names = [name for _, name in sockets]
        body_bytes = 2 * engine.segment_bytes  # partial sums of half types travel as float32
        return [
            ShmTransport(
                *(rank, names, sock, identity, tcp[rank]),
                max_body_bytes=body_bytes,
                pool_bytes=_POOL_BYTES,
                board_bytes=BOARD_BYTES if engine.has_fast_lane else 0,
                process_reads=True,
            )
            for rank, (sock, _) in enumerate(sockets)
        ]
    listeners = [listen("127.0.0.1") for _ in range(world_size)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    return [TcpTransport(rank, addresses, listeners[rank], identity, tcp[rank]) for rank in range(world_size)]


def _close_all(groups: list[Group]) -> None:
    def close(group: Group) -> None:
        # Another rank may have left while this one had deferred work; its function has seen that error, or ignored it.
        with contextlib.suppress(PeerLost):
            group.close(2.0)

    closers = [threading.Thread(target=close, args=(group,)) for group in groups]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


def _print_stacks(threads: list[threading.Thread]) -> None:
    frames = sys._current_frames()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            text = "".join(traceback.format_stack(frame))
            print(f"--- {thread.name}\n{text}", file=sys.stderr)  # noqa: T201
