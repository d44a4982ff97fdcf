"""``totalreduce.init``: from environment variables to a group whose ranks have all answered."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import torch

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.engine.engine import Engine
from totalreduce.fastlane.board import BOARD_BYTES
from totalreduce.foundation import environment
from totalreduce.foundation.config import EngineConfig, TcpConfig, Tls
from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, RendezvousError
from totalreduce.foundation.observer import Observer
from totalreduce.foundation.os_errors import missing_descriptors
from totalreduce.foundation.types import ReduceOp
from totalreduce.groups import probe
from totalreduce.groups.group import Group
from totalreduce.groups.probe import LinkPolicy
from totalreduce.launch.inner import Inner, check_inner, mesh_of
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.launch.spares import await_seat
from totalreduce.launch.transports import TRANSPORTS, JoinRequest, connect
from totalreduce.native import tuning
from totalreduce.native.collectives import NativeCollectives
from totalreduce.observe import Timeline, rank_path
from totalreduce.observe.logs import JsonFormatter, ReportHandler
from totalreduce.observe.publisher import publish
from totalreduce.runner.runner import ComputeMode, Runner
from totalreduce.transports.inproc import InprocNetwork

__all__ = ["describe_settings", "init"]

Collectives = Literal["auto", "engine", "native"]

_log = logging.getLogger(__name__)

#: Version of header, control frames and handshake. The ranks compare it at the rendezvous.
_WIRE_VERSION = 3
#: If fewer files can be opened when a group cannot be formed, it has failed for want of them.
_GROUP_DESCRIPTORS = 3
#: Where all ranks share one host, larger segments save an eighth of the CPU time (4 ranks, 16 MiB: 10.1 ms a rank
#: instead of 11.5), and one segment delays others by half a millisecond at most. Only if no EngineConfig is given.
_ONE_HOST_SEGMENT_BYTES = 1024 * 1024
#: No network is idle during additions there, so small chunks need no second lane, and half the messages (2 ranks,
#: 1 MiB: 0.70 ms instead of 0.99; 4 ranks: 2.6 ms instead of 4.2).
_ONE_HOST_SEGMENT_BYTES_MIN = 512 * 1024

#: How often a rank that waits for the others asks whether the group can still be formed.
_INTERRUPTION_S = 0.1


def init(
    transport: str = "auto",
    *,
    name: str = "default",
    timeout_s: float | None = None,
    engine: EngineConfig | None = None,
    tcp: TcpConfig | None = None,
    tls: Tls | None = None,
    timeline: str | Path | None = None,
    compute: ComputeMode | None = None,
    links: LinkPolicy | str | Path | None = None,
    store: StoreRank | None = None,
    collectives: Collectives = "auto",
    coordination: CoordinationConfig | str | Path | None = None,
    inner: Inner | None = None,
) -> Group:
    """Join the job this process was started for, and return its group when every rank has answered.

    Rank, size and address come from ``torch.distributed`` if that is initialised, else from the variables of
    ``totalreduce run``, torchrun, mpirun or srun; without any it is a world of one. Collective.

    Args:
        transport: ``"auto"``: shared memory between the ranks of one host, TCP between hosts; ``"shm"`` or ``"tcp"``:
            one of the two only. ``"mpi"``: messages of the MPI that mpi4py is built for; rank and size are those of
            its ``COMM_WORLD``. ``"torch"``: as ``"auto"``, beside the collectives of ``torch.distributed``, which must
            be initialised (see ``collectives``). ``"gloo"``: messages of ``torch.distributed``, where nothing else
            arrives. Packages can add others (``docs/extending.md``).
        name: Groups made under different names are independent; equal on all ranks.
        timeout_s: Deadline in seconds of the rendezvous and of waits that name none (default 300, or
            ``TOTALREDUCE_TIMEOUT_S``).
        engine: Sizes, scheduling, stall watch; what shapes the wire must be equal on all ranks.
        tcp: Sockets, heartbeats, deadlines; heartbeats and silence count for every transport.
        tls: Certificates: TCP is encrypted. On all ranks or on none; default ``TOTALREDUCE_TLS_CERT`` and so on.
        timeline: Where to write a Chrome trace at the end: a folder, or a file name that each rank adds its number to.
            A rank that cannot write there logs a warning and goes on without.
        compute: Whether additions have their own thread (``"thread"``) or not (``"inline"``); ``"auto"``, the default
            or ``TOTALREDUCE_COMPUTE``: if there are two cores per rank of this host.
        links: What messages cost, for the choice of schedules: ``"auto"`` measures it at start (some ten milliseconds)
            where the job spans several hosts, ``"measure"`` always, ``"off"`` never; or a file that ``totalreduce
            doctor --store`` wrote (``TOTALREDUCE_LINKS``). Equal on all ranks.
        collectives: Who carries them out: ``"engine"``, this library, in any order and with priorities; ``"native"``,
            the library behind ``transport``, in an order on which the ranks agree (``docs/coordination.md``).
            ``"auto"``: native for ``"torch"`` (the program's back end: NCCL, gloo), else the engine.
        coordination: Settings of that agreement; ``"measure"``: measured now, printed, and kept; or a file that
            ``group.coordinator.store`` wrote. Equal on all ranks.
        inner: The library of ``torch.distributed``, which must be initialised with any back end, for the exchange
            inside each host in allreduces of large tensors: ``"nccl"`` for GPUs, ``"gloo"`` for CPUs. Between hosts
            each rank then exchanges its part only (``docs/gpu.md``). Default ``TOTALREDUCE_INNER``; ``None``: the
            engine does all. Equal on all ranks.
        store: An open store, and this process's rank among the processes that meet in it, instead of what
            ``torch.distributed`` or the environment say.

    Returns:
        The group. If the launcher can replace ranks (``totalreduce run --on-loss``), it refuses operations until
        ``with tr.recoverable(...)`` forms it; with ``tr.replayed``, always. If some ranks only serve (``totalreduce run
        --servers``), it is the group of the others.

    Raises:
        ConfigurationError: Contradictory variables or settings, on every rank.
        RendezvousError: Ranks are missing, unreachable, or do not know the job's key.
    """
    await_seat()
    settings = environment.read_settings()
    wanted = _Wanted.of(
        settings, _Arguments(transport, timeout_s, engine, tcp, tls, links, collectives, coordination, inner)
    )
    engine_config, wire = wanted.engine, wanted.wire()
    spec = TRANSPORTS[transport]
    rank, world_size = spec.rank_and_size(store)
    num_servers = 0 if store is not None else settings.servers
    native = collectives == "native" or (collectives == "auto" and spec.prefers_library)
    # torch.distributed makes no groups while it makes the one for which it has given the store.
    library_inside = wanted.inner if store is None else None
    if library_inside is not None:
        check_inner(library_inside, rank, world_size, on_loss=settings.on_loss is not None, native=native)
    if num_servers:
        _check_servers(num_servers, world_size, name)
    _set_up_log(settings, rank, world_size)
    if settings.on_loss is not None and store is None:
        formation = functools.partial(
            init,
            transport,
            name=name,
            timeout_s=timeout_s,
            engine=engine,
            tcp=tcp,
            tls=tls,
            timeline=timeline,
            compute=compute,
            links=links,
            collectives=collectives,
            coordination=coordination,
        )
        group = Group(Runner(Engine(0, 1, engine_config), InprocNetwork(1).transport(0)), name)
        group.await_formation(rank, world_size, formation, _description(wire))
        return _for_program(group, num_servers)
    recorder = _timeline(timeline or settings.timeline, rank, world_size)
    link = connect(
        JoinRequest(
            transport=transport,
            name=name,
            settings=settings,
            timeout_s=engine_config.timeout_s,
            tcp=wanted.tcp,
            tls=wanted.tls,
            wire=wire,
            store=store,
            board_bytes=BOARD_BYTES if engine_config.has_fast_lane else 0,
        )
    )
    if engine is None and world_size > 1 and len(set(link.hosts)) == 1:  # what all ranks agree on, not a guess
        engine_config = dataclasses.replace(
            engine_config, segment_bytes=_ONE_HOST_SEGMENT_BYTES, segment_bytes_min=_ONE_HOST_SEGMENT_BYTES_MIN
        )
    observers: list[Observer] = [] if recorder is None else [recorder]
    core = Engine(
        rank,
        world_size,
        engine_config,
        epoch=0 if store is None else store.epoch,
        observers=observers,
        hosts=link.hosts,
        shared_memory=spec.shares_memory,
    )
    mode = compute or cast("ComputeMode", settings.compute or "auto")
    group = Group(Runner(core, link, compute=mode), name)
    if recorder is not None:
        group.at_close(recorder.close)
    if settings.live is not None:
        publisher = publish(group.operations.runner, settings.live, _seat(rank), settings.incarnation)
        group.at_close(functools.partial(publisher.leave, group.operations.runner))
    _meet(group, engine_config.timeout_s, None if store is None else store.interruption)
    probe.apply(group, wanted.links)
    try:
        natives: NativeCollectives | None = None
        if native:
            if spec.library is None:
                raise ConfigurationError(
                    f"transport {transport!r} has no collectives of its own: use collectives='engine'"
                )
            natives = spec.library(link, engine_config.timeout_s)
        elif library_inside is not None:
            natives = mesh_of(group, library_inside)
        if natives is not None:
            group.use(natives, _coordination(group, natives, coordination))
    except BaseException:
        group.close(1.0)
        raise
    return _for_program(group, num_servers)


def _seat(rank: int) -> int:
    """Return the place of this process in its job: the one that totalreduce's launcher gave it, else its rank.

    A process that this launcher has started keeps its place when the members of the group, and so its rank, change.
    Other launchers may have set no variables, or some of which ``init`` makes no use.
    """
    try:
        world = environment.read_world()
    except ConfigurationError:
        return rank
    return world.rank if world.launcher == "totalreduce" else rank


def _check_servers(num_servers: int, world_size: int, name: str) -> None:
    """Refuse a group that the ranks that only serve do not join: they call ``init`` without arguments."""
    launched = environment.read_world().world_size
    if not num_servers < launched:
        raise ConfigurationError(f"TOTALREDUCE_SERVERS={num_servers} of {launched} ranks: a job needs a worker, too")
    if world_size != launched:
        raise ConfigurationError(
            f"tr.init() would use torch.distributed or MPI here, in which {num_servers} of {launched} ranks, which "
            "only serve (--servers), take no part: call it in a program that uses neither, or start without --servers"
        )
    if name != "default":
        raise ConfigurationError(
            f"ranks that only serve (--servers) do not join a group with the name {name!r}: leave the name out"
        )


def _for_program(group: Group, num_servers: int) -> Group:
    """Return the group of the workers on a worker, if some ranks only serve; else the group."""
    num_workers = group.world_size - num_servers
    return group.workers(num_workers) if num_servers and group.rank < num_workers else group


def describe_settings() -> str:
    """Return what must be equal on all ranks of ``init()`` without arguments, one setting in a line.

    A process that joins a running job compares it with the job's before it meets the other ranks.
    """
    return _description(_Wanted.of(environment.read_settings(), _Arguments()).wire())


class _Arguments(NamedTuple):
    """Arguments of ``init``."""

    transport: str = "auto"
    timeout_s: float | None = None
    engine: EngineConfig | None = None
    tcp: TcpConfig | None = None
    tls: Tls | None = None
    links: LinkPolicy | str | Path | None = None
    collectives: Collectives = "auto"
    coordination: CoordinationConfig | str | Path | None = None
    inner: Inner | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What the arguments of ``init`` and the environment say together; an argument goes before a variable."""

    settings: Settings  #: The environment's.
    transport: str  #: As the argument of ``init``, and so are ``collectives`` and ``coordination``.
    is_engine_given: bool  #: Whether there is an argument ``engine``.
    engine: EngineConfig  #: Sizes, scheduling, stall watch.
    tcp: TcpConfig  #: Sockets, heartbeats, deadlines.
    tls: Tls | None  #: Certificates, if TCP is to be encrypted.
    links: LinkPolicy  #: What messages cost.
    collectives: Collectives
    coordination: CoordinationConfig | str | Path | None
    inner: str | None  #: The library inside each host.

    @classmethod
    def of(cls, settings: Settings, given: _Arguments) -> _Wanted:
        """Return what is wanted."""
        if given.collectives not in get_args(Collectives):
            raise ConfigurationError(f"collectives are 'auto', 'engine' or 'native', not {given.collectives!r}")
        timeout_s = settings.timeout_s if given.timeout_s is None else given.timeout_s
        engine_config = _with_timeout(given.engine or EngineConfig(), timeout_s)
        if engine_config.fast_lane is None:
            engine_config = dataclasses.replace(engine_config, fast_lane=settings.fast_lane)
        tcp_config = given.tcp or TcpConfig()
        if given.tcp is None and settings.peer_timeout_s is not None:
            beat_s = min(tcp_config.heartbeat_s, settings.peer_timeout_s / 4)
            tcp_config = TcpConfig(silence_s=settings.peer_timeout_s, heartbeat_s=beat_s)
        if tcp_config.relay is None:
            tcp_config = dataclasses.replace(tcp_config, relay=settings.relay)
        return cls(
            settings,
            given.transport,
            is_engine_given=given.engine is not None,
            engine=engine_config,
            tcp=tcp_config,
            tls=given.tls or settings.tls,
            links=probe.resolve(given.links, settings.links),
            collectives=given.collectives,
            coordination=given.coordination,
            inner=given.inner or settings.inner,
        )

    def wire(self) -> dict[str, int | float | str]:
        """Return what must be equal on all ranks.

        What is left out are ``OWN_SETTINGS``, ``OWN_TCP_SETTINGS``, ``OWN_VARIABLES``, and the arguments ``name``,
        ``timeout_s``, ``timeline``, ``compute`` and ``store`` of ``init``.
        """
        settings = self.settings
        first = settings.begin_ranks
        return {
            "wire version": _WIRE_VERSION,
            "transport": self.transport,
            "TLS": "on" if self.tls else "off",
            "engine": "given" if self.is_engine_given else "default",
            "collectives": self.collectives,
            "inner": self.inner or "none",
            # Settings that are given are compared by ``Group.coordinate``.
            "coordination": "measured" if self.coordination == "measure" else "given",
            "links": probe.wire_setting(self.links),
            **self.engine.wire_settings(),
            **self.tcp.wire_settings(),
            "on_loss": settings.on_loss or "none",
            "min_ranks": settings.min_ranks,
            "begin_ranks": "all" if first is None else ",".join(map(str, first)),
            "servers": settings.servers,
        }


def _description(wire: Mapping[str, int | float | str]) -> str:
    """Return settings and a fingerprint of the job's key, one in a line. The key cannot be found from it."""
    key = environment.read_job_key()
    fingerprint = "none" if key is None else hmac.new(key, b"totalreduce fingerprint", "sha256").hexdigest()[:8]
    return "\n".join([*(f"{name}: {value}" for name, value in wire.items()), f"fingerprint of the key: {fingerprint}"])


def _coordination(
    group: Group, natives: NativeCollectives, wanted: CoordinationConfig | str | Path | None
) -> CoordinationConfig:
    if wanted == "measure":

        def maximise(seconds: torch.Tensor) -> None:
            group.control.allreduce(seconds, name="coordination/tuning", op=ReduceOp.MAX).wait()

        return tuning.measure(natives, CoordinationConfig(), maximise=maximise, reports=group.rank == 0)
    if isinstance(wanted, str | Path):
        return tuning.read_settings(wanted)
    return wanted or CoordinationConfig()


def _meet(group: Group, timeout_s: float, interruption: Callable[[], str] | None) -> None:
    """Run the first barrier, after which all ranks are connected and have proved that they know the key."""
    try:
        if interruption is None:
            group.barrier(timeout_s=timeout_s)
        else:
            _meet_unless_interrupted(group, timeout_s, interruption)
    except (PeerLost, DeadlineExceededError) as error:
        refused = group.statistics().refused_connections
        shortage = missing_descriptors(_GROUP_DESCRIPTORS)
        group.close(1.0)
        if shortage is not None:
            raise RendezvousError(f"rank {group.rank}: the group could not be formed: {shortage}") from error
        # A rank with the wrong key, or one that meets a rank that has given up, only sees that connections end.
        cause = f"{refused} connections were refused" if refused else "the error of the rank that left first says more"
        hint = f" ({cause}; is TOTALREDUCE_JOB_KEY the same everywhere?)"
        raise RendezvousError(f"rank {group.rank}: the group could not be formed: {error}{hint}") from error


def _meet_unless_interrupted(group: Group, timeout_s: float, interruption: Callable[[], str]) -> None:
    """Run the first barrier as ``_meet`` does, and give up when ``interruption`` returns a reason."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            group.barrier(timeout_s=_INTERRUPTION_S)
            return
        except DeadlineExceededError:
            reason = interruption()
            if reason:
                group.close(1.0, reason=reason)
                raise RendezvousError(f"rank {group.rank}: the group could not be formed: {reason}") from None
            if time.monotonic() >= give_up_at:
                raise


def _with_timeout(config: EngineConfig, timeout_s: float | None) -> EngineConfig:
    return config if timeout_s is None else dataclasses.replace(config, timeout_s=timeout_s)


def _timeline(path: str | Path | None, rank: int, world_size: int) -> Timeline | None:
    if path is None:
        return None
    alone = world_size == 1 and Path(path).suffix == ".json"
    try:
        return Timeline(rank, Path(path) if alone else rank_path(path, rank))
    except ConfigurationError as error:  # a job must start although the disk of one host is full
        _log.warning("rank %d: %s. No timeline is recorded on this rank; the job goes on", rank, error)
        return None


def _set_up_log(settings: Settings, rank: int, world_size: int) -> None:
    """Log information on rank 0 and warnings on all ranks; an application's own logging is not changed."""
    library = logging.getLogger("totalreduce")  # the parent of the loggers of all areas
    if not (library.handlers or logging.getLogger().handlers):
        handler = ReportHandler(sys.stderr)
        as_json = settings.log_format == "json"
        handler.setFormatter(JsonFormatter(rank) if as_json else logging.Formatter("totalreduce: %(message)s"))
        library.addHandler(handler)
        default = "info" if rank == 0 and world_size > 1 else "warning"
        library.setLevel((settings.log_level or default).upper())
    elif settings.log_level is not None:
        library.setLevel(settings.log_level.upper())
    for warning in settings.warnings:
        _log.warning("%s", warning)
