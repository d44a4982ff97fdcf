"""How the ranks of a job are joined: from the name of a transport to a transport that knows its peers.

One function per way. What they share is the question that every rank asks every other one before the first message:
where do you live, and do you have my settings?
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from totalreduce.foundation import environment
from totalreduce.foundation.config import TcpConfig, Tls
from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import describe_error, few_descriptors, is_out_of_descriptors
from totalreduce.foundation.version import VERSION
from totalreduce.foundation.world import World
from totalreduce.launch.address import choose_address, host_identity
from totalreduce.launch.rendezvous import Meeting, Member, Place, compare_settings, current_world, open_store
from totalreduce.native.collectives import NativeCollectives
from totalreduce.transports import shm, tcp
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.routed import RoutedTransport

__all__ = ["LinkRequest", "TransportName", "connect", "open_library", "standing"]

_log = logging.getLogger("totalreduce")

#: What every rank opens at least: the store's client, a listener, an epoll object, two for waking, one connection.
_DESCRIPTORS = 6
#: What the server of the store opens, beside one for every rank.
_STORE_DESCRIPTORS = 9

TransportName = Literal["auto", "shm", "tcp", "mpi", "torch", "gloo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRequest:
    """What ``init`` was asked for, as far as it concerns the way to the other ranks.

    Attributes:
        transport: Which way.
        name: Of the group.
        settings: Out of the environment.
        timeout_s: Until all ranks must have met, in seconds.
        tcp: Sockets, heartbeats, deadlines; heartbeats and silence are those of the other transports too.
        tls: Certificates, if TCP is to be encrypted.
        wire: Settings that must be equal on all ranks.
        place: Where to meet; ``None``: in the process group's store, or in one that rank 0 opens.
    """

    transport: TransportName
    name: str
    settings: Settings
    timeout_s: float
    tcp: TcpConfig
    tls: Tls | None
    wire: Mapping[str, int | str]
    place: Place | None = None


def standing(transport: TransportName, place: Place | None = None) -> tuple[int, int]:
    """Rank of this process and size of its world.

    Raises:
        ConfigurationError: The transport is unknown, its library is missing or not set up, or variables contradict.
    """
    if transport not in get_args(TransportName):
        known = ", ".join(repr(name) for name in get_args(TransportName))
        raise ConfigurationError(f"transport {transport!r} is not known; there are {known}")
    if transport == "mpi":
        from totalreduce.transports import mpi

        rank, world_size = mpi.standing()
        if world_size == 1:
            _check_alone()
        return rank, world_size
    if transport in ("torch", "gloo") and not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"transport {transport!r} works with torch.distributed: call torch.distributed.init_process_group first, "
            "or leave the transport out"
        )
    world = current_world() if place is None else place.world()
    return world.rank, world.world_size


def connect(request: LinkRequest) -> Transport:
    """Meet the other ranks, compare settings, and return the transport that reaches them.

    Raises:
        ConfigurationError: The ranks' settings differ; on every rank. Or this process has too many open files.
        RendezvousError: Somebody did not come in time.
    """
    try:
        return _connect(request)
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        rank, _ = standing(request.transport, request.place)
        raise ConfigurationError(f"rank {rank} cannot join the job: {describe_error(error)}") from error


def open_library(transport: TransportName, link: Transport, timeout_s: float) -> NativeCollectives | None:
    """The collectives of the library beside a link: the program's process group, or MPI. Collective.

    Returns:
        ``None`` if this transport has no such library.

    Raises:
        RendezvousError: Some rank did not come in time.
    """
    if transport in ("torch", "gloo"):  # "torch" sends its own messages over sockets, which cost a tenth of gloo's
        from totalreduce.native import torch_collectives

        return torch_collectives.everybody(timeout_s)
    if transport == "mpi":
        from totalreduce.native.mpi_collectives import MpiCollectives
        from totalreduce.transports.mpi import MpiTransport

        assert isinstance(link, MpiTransport)
        return MpiCollectives(link.communicator)
    return None


def _connect(request: LinkRequest) -> Transport:
    if request.tls is not None and request.transport in ("mpi", "torch", "gloo"):
        raise ConfigurationError(f"TLS is for TCP; what {request.transport} sends is not encrypted by this library")
    _, world_size = standing(request.transport, request.place)
    match request.transport:
        case "mpi":
            return _over_mpi(request)
        case "gloo":
            return _over_gloo(request)
        case _:
            return InprocNetwork(1).transport(0) if world_size == 1 else _over_sockets(request)


def _check_alone() -> None:
    """An MPI of one, started by a launcher that speaks of several, is the wrong MPI."""
    world = environment.read_world()
    if world.world_size > 1:
        raise ConfigurationError(
            f"MPI says that this process is alone, {world.launcher} that it is one of {world.world_size}: mpi4py uses "
            "another MPI than the launcher, or the launcher is none of MPI's. Start with the mpirun of mpi4py's MPI "
            "(`python -m mpi4py --mpi-lib-version` names it; MPI4PY_MPIABI chooses)"
        )


def _over_sockets(request: LinkRequest) -> Transport:
    """Listen, meet the others in the store, and know who lives where.

    ``"auto"``: shared memory between ranks of one host, as far as both have it, and TCP between all others.
    """
    key = environment.read_job_key()
    if key is not None:
        JobIdentity(key, "", 0)  # a bad key is an error before anybody waits for anybody
    if request.place is None:
        world = current_world()
        _check_descriptors(world)
        store = open_store(world, request.timeout_s)
    else:
        world, store = request.place.world(), request.place.store
    meeting = Meeting(store, world, request.name, request.timeout_s)
    with ExitStack() as doors:
        address, port, network_door = "", 0, None
        if request.transport != "shm":
            address, network_door = _listen(world, request)
            doors.enter_context(network_door)
            port = network_door.getsockname()[1]
        local_address, local_door = None, None
        if request.transport != "tcp":
            local_address, local_door = _share_memory(world)
        if local_door is not None:
            doors.enter_context(local_door)
        identity = JobIdentity(meeting.job_key(), meeting.job_id, epoch=0)
        members = meeting.gather(Member(host_identity(), address, port, local_address), request.wire)
        neighbours = _neighbours(world.rank, members)
        if request.transport == "shm":
            _check_one_host(members)
        local = remote = None
        if local_door is not None and (request.transport == "shm" or sum(n is not None for n in neighbours) > 1):
            local = shm.ShmTransport(world.rank, neighbours, local_door, identity, request.tcp)
        if network_door is not None and (local is None or None in neighbours):
            addresses = [(member.address, member.port) for member in members]
            remote = tcp.TcpTransport(world.rank, addresses, network_door, identity, request.tcp, request.tls)
        link = _joined(local, remote)
        doors.pop_all()
        # A door that no transport took over is closed: nobody else knows it.
        for door, user in ((local_door, local), (network_door, remote)):
            if door is not None and user is None:
                door.close()
    link.place(_number([member.host for member in members]))
    return link


def _check_descriptors(world: World) -> None:
    """Fail now where there are too few: the store aborts the process, or tries again until the deadline.

    Raises:
        ConfigurationError: Names the limit.
    """
    needed = _DESCRIPTORS
    if world.rank == 0 and not world.store_is_served:
        needed += _STORE_DESCRIPTORS + world.world_size
    shortage = few_descriptors(needed)
    if shortage is not None:
        raise ConfigurationError(f"rank {world.rank} cannot join the job: {shortage}")


def _listen(world: World, request: LinkRequest) -> tuple[str, socket.socket]:
    address, reason = choose_address(world, request.settings)
    try:
        door = tcp.listen(address)
    except OSError as error:
        if is_out_of_descriptors(error):
            raise
        raise ConfigurationError(
            f"rank {world.rank} cannot listen on {address} ({reason}): {error.strerror}; set TOTALREDUCE_ADDRESS"
        ) from error
    _log.info(
        "rank %d of %d listens on %s:%d (%s)", world.rank, world.world_size, address, door.getsockname()[1], reason
    )
    return address, door


def _share_memory(world: World) -> tuple[str | None, socket.socket | None]:
    """Listen on a Unix socket, if there is shared memory."""
    reason = shm.shm_available()
    if reason is None:
        try:
            door, address = shm.listen()
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            reason = f"no Unix socket: {error.strerror}"
        else:
            return address, door
    _log.info("rank %d shares no memory: %s", world.rank, reason)
    return None, None


def _neighbours(rank: int, members: Sequence[Member]) -> list[str | None]:
    """By rank: where those listen who can share memory with this rank, itself included."""
    mine = members[rank]
    if mine.shared_memory is None:
        return [None] * len(members)
    return [member.shared_memory if member.host == mine.host else None for member in members]


def _check_one_host(members: Sequence[Member]) -> None:
    for rank, member in enumerate(members):
        if member.host != members[0].host:
            raise ConfigurationError(
                f"transport 'shm' is for one host, and rank {rank} lives on another one than rank 0 (or in another "
                "container or network namespace): use 'auto'"
            )
        if member.shared_memory is None:
            raise ConfigurationError(
                f"transport 'shm': rank {rank} cannot share memory; its log says why (TOTALREDUCE_LOG=info). Use 'auto'"
            )


def _joined(local: shm.ShmTransport | None, remote: tcp.TcpTransport | None) -> Transport:
    if local is not None and remote is not None:
        return RoutedTransport(local, remote)
    link = local or remote
    assert link is not None, "every world has a way"
    return link


def _over_mpi(request: LinkRequest) -> Transport:
    """Meet in ``COMM_WORLD``: MPI's launcher knows who takes part, so there is no store and no key."""
    from totalreduce.transports import mpi

    communicator = mpi.join(request.timeout_s)
    mine = {"host": host_identity(), "settings": {"totalreduce": VERSION, **request.wire, "group name": request.name}}
    entries = communicator.exchange(mine, request.timeout_s)
    compare_settings([entry["settings"] for entry in entries])
    link = mpi.MpiTransport(communicator, request.tcp)
    link.place(_number([str(entry["host"]) for entry in entries]))
    return link


def _over_gloo(request: LinkRequest) -> Transport:
    """Meet in the process group's own store, and send through it, too."""
    from totalreduce.transports import torch_group

    world = current_world()
    meeting = Meeting(open_store(world, request.timeout_s), world, request.name, request.timeout_s)
    members = meeting.gather(Member(host_identity()), request.wire)
    link = torch_group.TorchTransport(request.tcp, request.timeout_s)
    link.place(_number([member.host for member in members]))
    return link


def _number(hosts: Sequence[str]) -> list[int]:
    """Hosts as numbers, in the order of their first ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]
