"""From the name of a transport to a transport that reaches the other ranks of the job.

``TRANSPORTS`` has one ``TransportSpec`` per name. Every ``connect`` exchanges the ranks' hosts, addresses and settings
before the first message: through a store (``meet``), or with a library's own messages.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from totalreduce.foundation import environment
from totalreduce.foundation.config import TcpConfig, Tls
from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.extensions import Extensions
from totalreduce.foundation.os_errors import describe_error, is_out_of_descriptors, missing_descriptors
from totalreduce.foundation.version import VERSION
from totalreduce.foundation.world import World
from totalreduce.kernels import exchange, relay
from totalreduce.kernels.machine_code import NoCodeError, warn
from totalreduce.launch.address import choose_address, host_identity
from totalreduce.launch.rendezvous import Meeting, Member, StoreRank, compare_settings, current_world, open_store
from totalreduce.native.collectives import NativeCollectives
from totalreduce.runner.carriers import CARRIERS
from totalreduce.schedules import SCHEDULES
from totalreduce.transports import shm, tcp
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.routed import RoutedTransport

__all__ = ["TRANSPORTS", "JoinRequest", "TransportSpec", "connect", "host_numbers", "meet"]

_log = logging.getLogger(__name__)

#: Descriptors of every rank: the store's client, a listener, an epoll object, two for waking, one connection.
_DESCRIPTORS = 6
#: Descriptors of the server of the store, beside one for every rank.
_STORE_DESCRIPTORS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """The arguments of ``init`` that concern the connections between ranks."""

    transport: str  #: The name of the transport.
    name: str  #: The name of the group.
    settings: Settings  #: Settings from the environment.
    timeout_s: float  #: Seconds until all ranks must have met.
    #: Sockets, heartbeats, deadlines; the other transports use the heartbeats and the limit of silence, too.
    tcp: TcpConfig
    tls: Tls | None  #: Certificates, if TCP is to be encrypted.
    wire: Mapping[str, int | float | str]  #: Settings that must be equal on all ranks.
    #: The store in which the ranks meet; ``None``: the process group's store, or one that rank 0 opens.
    store: StoreRank | None = None
    board_bytes: int = 0  #: Length of the boards (see ``transports.base.Boards``).


def _world(store: StoreRank | None) -> World:
    return current_world() if store is None else store.world()


def _rank_and_size(store: StoreRank | None) -> tuple[int, int]:
    world = _world(store)
    return world.rank, world.world_size


def _rank_beside_torch(transport: str) -> Callable[[StoreRank | None], tuple[int, int]]:
    def rank_and_size(store: StoreRank | None) -> tuple[int, int]:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigurationError(
                f"transport {transport!r} works with torch.distributed: call torch.distributed.init_process_group "
                "first, or leave the transport out"
            )
        return _rank_and_size(store)

    return rank_and_size


def _rank_in_mpi(store: StoreRank | None) -> tuple[int, int]:  # noqa: ARG001  (MPI knows the ranks by itself)
    from totalreduce.transports import mpi

    rank, world_size = mpi.rank_and_size()
    if world_size == 1:
        _check_alone()
    return rank, world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSpec:
    """How one kind of transport is connected."""

    #: Meets the other ranks, compares settings (``meet`` does both), and returns the transport that reaches them, with
    #: their hosts set by ``Transport.set_hosts``. Collective.
    connect: Callable[[JoinRequest], Transport]
    #: Returns the rank of this process and the size of its world, from the store given to ``init``, or from the
    #: environment.
    rank_and_size: Callable[[StoreRank | None], tuple[int, int]] = _rank_and_size
    #: Returns the collectives of the library beside the transport, within the given seconds; ``None``: there is no such
    #: library.
    library: Callable[[Transport, float], NativeCollectives] | None = None
    prefers_library: bool = False  #: With ``collectives="auto"`` the library carries the collectives out.
    encrypts: bool = False  #: The transport can encrypt with TLS.
    shares_memory: bool = False  #: Ranks of one host send through shared memory.


def connect(request: JoinRequest) -> Transport:
    """Meet the other ranks, compare settings, and return the transport that reaches them. Collective.

    Raises:
        ConfigurationError: The transport is unknown, or the ranks' settings differ; on every rank. Or this process has
            too many open files.
        RendezvousError: Some rank did not come in time.
    """
    spec = TRANSPORTS[request.transport]
    if request.tls is not None and not spec.encrypts:
        raise ConfigurationError(f"TLS is for TCP; what {request.transport} sends is not encrypted by this library")
    try:
        added = {  # it reads the entry points of installed packages
            f"{kind} of other packages": ", ".join(items.added()) or "none"
            for kind, items in (("schedules", SCHEDULES), ("carriers", CARRIERS))
        }
        return spec.connect(replace(request, wire={**request.wire, **added}))
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        rank, _ = spec.rank_and_size(request.store)
        raise ConfigurationError(f"rank {rank} cannot join the job: {describe_error(error)}") from error


def meet(request: JoinRequest, address: str = "", port: int = 0) -> list[Member]:
    """Tell every rank where this one listens, compare settings, and return the same of all ranks, by rank.

    ``Member.host`` tells the hosts apart; :func:`host_numbers` makes the numbers of ``Transport.set_hosts`` of them.

    Raises:
        ConfigurationError: The ranks' settings differ; on every rank.
        RendezvousError: Some rank did not come in time.
    """
    return _open_meeting(request).gather(Member(host_identity(), address, port), request.wire)


def host_numbers(members: Sequence[Member]) -> list[int]:
    """Return the host of every rank as a number, in the order of the hosts' first ranks."""
    return _number([member.host for member in members])


def _open_meeting(request: JoinRequest) -> Meeting:
    if request.store is not None:
        store = request.store
        return Meeting(store.store, store.world(), request.name, request.timeout_s, store.interruption)
    world = current_world()
    _check_descriptors(world)
    return Meeting(open_store(world, request.timeout_s), world, request.name, request.timeout_s)


def _check_alone() -> None:
    """Refuse an MPI with one rank where the launcher has started several: it is the wrong MPI."""
    world = environment.read_world()
    if world.world_size > 1:
        raise ConfigurationError(
            f"MPI says that this process is alone, {world.launcher} that it is one of {world.world_size}: mpi4py uses "
            "another MPI than the launcher, or the launcher is none of MPI's. Start with the mpirun of mpi4py's MPI "
            "(`python -m mpi4py --mpi-lib-version` names it; MPI4PY_MPIABI chooses)"
        )


def _over_sockets(request: JoinRequest) -> Transport:
    """Listen, meet the other ranks in the store, and connect by shared memory, by TCP, or by both.

    With ``"auto"`` ranks of one host use shared memory, as far as both have it, and all others TCP.
    """
    if _rank_and_size(request.store)[1] == 1:
        return InprocNetwork(1).transport(0)
    key = environment.read_job_key()
    if key is not None:
        JobIdentity(key, "", 0)  # a bad key is an error before any rank waits for another
    world, meeting = _world(request.store), _open_meeting(request)
    with ExitStack() as listeners:
        address, port, tcp_listener = "", 0, None
        if request.transport != "shm":
            address, tcp_listener = _listen(world, request)
            listeners.enter_context(tcp_listener)
            port = tcp_listener.getsockname()[1]
        shm_address, shm_listener = None, None
        if request.transport != "tcp":
            shm_address, shm_listener = _share_memory(world, request.board_bytes)
        if shm_listener is not None:
            listeners.enter_context(shm_listener)
        epoch = 0 if request.store is None else request.store.epoch
        identity = JobIdentity(meeting.job_key(), meeting.job_id, epoch)
        members = meeting.gather(Member(host_identity(), address, port, shm_address), request.wire)
        neighbours = _neighbours(world.rank, members)
        if request.transport == "shm":
            _check_one_host(members)
        shares = shm_listener is not None and (request.transport == "shm" or sum(n is not None for n in neighbours) > 1)
        sends = tcp_listener is not None and (not shares or None in neighbours)
        # Only now it is known which functions can be used. The first time on a machine they are compiled. After that
        # the ranks meet once more: peers on other hosts wait for an answer for ``connect_timeout_s`` only.
        tcp_config, lane, moving = request.tcp, "", ""
        if sends and request.tls is not None:
            tcp_config = replace(request.tcp, relay=False)
        elif sends and request.tcp.has_relay:
            moving = _why_not(relay.load)
            tcp_config = replace(request.tcp, relay=False) if moving else request.tcp
        if shares and request.board_bytes:
            lane = _why_not(exchange.load)
        board_bytes = 0 if _lack_code(meeting.prepared(f"{lane}\n{moving}"), world.rank) else request.board_bytes
        local = remote = None
        if shm_listener is not None and shares:
            local = shm.ShmTransport(
                *(world.rank, neighbours, shm_listener, identity, tcp_config),
                board_bytes=board_bytes,
                process_reads=request.settings.process_reads is True,
            )
        if tcp_listener is not None and sends:
            addresses = [(member.address, member.port) for member in members]
            remote = tcp.TcpTransport(world.rank, addresses, tcp_listener, identity, tcp_config, request.tls)
        transport = RoutedTransport(local, remote) if local is not None and remote is not None else local or remote
        assert transport is not None, "every world needs shared memory or TCP"
        listeners.pop_all()
        for listener, user in ((shm_listener, local), (tcp_listener, remote)):
            if listener is not None and user is None:  # no transport has taken it over
                listener.close()
    transport.set_hosts(host_numbers(members))
    return transport


def _why_not(load: Callable[[], object]) -> str:
    """Load a compiled function; return why that is not possible, or ""."""
    try:
        load()
    except NoCodeError as error:
        return " ".join(str(error).splitlines())
    return ""


def _lack_code(texts: Sequence[str], rank: int) -> bool:
    """Whether some rank has not the function of the fast lane, so that none uses it. Rank 0 warns, once for the job.

    Args:
        texts: By rank: why it has not the function of the fast lane, and behind a line feed why it has not that of the
            relay; "" if it has it, or needs none.
        rank: This rank.
    """
    reasons = [text.partition("\n")[::2] for text in texts]
    lacking = {number: lane or moving for number, (lane, moving) in enumerate(reasons) if lane or moving}
    lane_lacks, relay_lacks = (any(column) for column in zip(*reasons, strict=True))
    if lacking and (rank == 0 or rank in lacking):
        first = next(iter(lacking))
        effects = ["ranks of one host exchange tensors by messages"] * lane_lacks
        effects += ["Python moves large messages between hosts"] * relay_lacks
        warn(
            "%s, which is slower, because rank %d (one of %d) has no compiled code: %s",
            *(" and ".join(effects), first, len(lacking), lacking[first]),
            elsewhere=rank != 0,
        )
    return lane_lacks


def _check_descriptors(world: World) -> None:
    """Raise ``ConfigurationError`` if this process may open too few files.

    Otherwise the store would abort the process, or try again until the deadline.
    """
    needed = _DESCRIPTORS
    if world.rank == 0 and not world.store_is_served:
        needed += _STORE_DESCRIPTORS + world.world_size
    shortage = missing_descriptors(needed)
    if shortage is not None:
        raise ConfigurationError(f"rank {world.rank} cannot join the job: {shortage}")


def _listen(world: World, request: JoinRequest) -> tuple[str, socket.socket]:
    address, reason = choose_address(world, request.settings)
    try:
        listener = tcp.listen(address)
    except OSError as error:
        if is_out_of_descriptors(error):
            raise
        raise ConfigurationError(
            f"rank {world.rank} cannot listen on {address} ({reason}): {error.strerror}; set TOTALREDUCE_ADDRESS"
        ) from error
    port = listener.getsockname()[1]
    _log.debug("rank %d of %d listens on %s:%d (%s)", world.rank, world.world_size, address, port, reason)
    return address, listener


def _share_memory(world: World, board_bytes: int) -> tuple[str | None, socket.socket | None]:
    """Listen on a Unix socket, if there is shared memory, and this rank may have as much of it as it will need."""
    num_ranks = world.local_world_size
    reason = shm.shm_available(shm.reserved_bytes(num_ranks, board_bytes), num_ranks)
    if reason is None:
        try:
            listener, address = shm.listen()
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            reason = f"no Unix socket: {error.strerror}"
        else:
            return address, listener
    is_missed = world.local_world_size > 1 and world.local_rank == 0  # one line for each host is enough
    _log.log(
        logging.WARNING if is_missed else logging.INFO,
        *("rank %d shares no memory, so it exchanges all messages over TCP: %s", world.rank, reason),
    )
    return None, None


def _neighbours(rank: int, members: Sequence[Member]) -> list[str | None]:
    """Return, by rank, where the ranks listen that can share memory with this one; itself is included."""
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


def _over_mpi(request: JoinRequest) -> Transport:
    """Meet in ``COMM_WORLD``: MPI's launcher knows the members, so there is no store and no key."""
    from totalreduce.transports import mpi

    communicator = mpi.join(request.timeout_s)
    mine = {"host": host_identity(), "settings": {"totalreduce": VERSION, **request.wire, "group name": request.name}}
    entries = communicator.exchange(mine, request.timeout_s)
    compare_settings([entry["settings"] for entry in entries])
    transport = mpi.MpiTransport(communicator, request.tcp)
    transport.set_hosts(_number([str(entry["host"]) for entry in entries]))
    return transport


def _over_gloo(request: JoinRequest) -> Transport:
    """Meet in the process group's own store, and send messages of the process group."""
    from totalreduce.transports import torch_group

    members = meet(request)
    transport = torch_group.TorchTransport(request.tcp, request.timeout_s)
    transport.set_hosts(host_numbers(members))
    return transport


def _torch_library(transport: Transport, timeout_s: float) -> NativeCollectives:  # noqa: ARG001
    from totalreduce.native import torch_collectives

    return torch_collectives.everybody(timeout_s)


def _mpi_library(transport: Transport, timeout_s: float) -> NativeCollectives:  # noqa: ARG001
    from totalreduce.native.mpi_collectives import MpiCollectives
    from totalreduce.transports.mpi import MpiTransport

    assert isinstance(transport, MpiTransport)
    return MpiCollectives(transport.communicator)


def _number(hosts: Sequence[str]) -> list[int]:
    """Return the hosts as numbers, in the order of their first ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def _check_spec(name: str, item: object) -> TransportSpec:
    if not isinstance(item, TransportSpec):
        raise ConfigurationError(f"the transport {name!r} is a TransportSpec, not {item!r}")
    return item


#: What ``init(transport=...)`` accepts. ``torch`` sends its messages over sockets, which cost a tenth of gloo's.
TRANSPORTS: Extensions[TransportSpec] = Extensions(
    "transport",
    "totalreduce.transports",
    {
        "auto": TransportSpec(connect=_over_sockets, encrypts=True, shares_memory=True),
        "shm": TransportSpec(connect=_over_sockets, encrypts=True, shares_memory=True),
        "tcp": TransportSpec(connect=_over_sockets, encrypts=True),
        "mpi": TransportSpec(connect=_over_mpi, rank_and_size=_rank_in_mpi, library=_mpi_library),
        "torch": TransportSpec(
            connect=_over_sockets,
            rank_and_size=_rank_beside_torch("torch"),
            library=_torch_library,
            prefers_library=True,
        ),
        "gloo": TransportSpec(connect=_over_gloo, rank_and_size=_rank_beside_torch("gloo"), library=_torch_library),
    },
    _check_spec,
)
