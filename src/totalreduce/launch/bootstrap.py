"""``totalreduce.init``: from environment variables to a group whose ranks have all answered."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from totalreduce.engine.engine import Engine
from totalreduce.engine.runner import ComputeMode, Runner
from totalreduce.foundation import environment
from totalreduce.foundation.config import EngineConfig, TcpConfig
from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import ConfigurationError, DeadlineExceededError, PeerLost, RendezvousError
from totalreduce.foundation.world import World
from totalreduce.groups.group import Group
from totalreduce.launch.address import choose_address
from totalreduce.launch.rendezvous import Meeting, current_world, open_store
from totalreduce.observe import Timeline, rank_path
from totalreduce.transports.base import Transport
from totalreduce.transports.handshake import JobIdentity
from totalreduce.transports.inproc import InprocNetwork
from totalreduce.transports.tcp import TcpTransport, listen

__all__ = ["init"]

_log = logging.getLogger("totalreduce")

#: Version of everything that travels: header, control frames, handshake. Compared at rendezvous.
_WIRE_VERSION = 1
#: Where all ranks share one host, memory is the wire: larger segments save an eighth of the CPU time (4 ranks, 16 MiB:
#: 10.1 ms a rank instead of 11.5), and half a millisecond is all that one holds up. Only where no EngineConfig is
#: given.
_ONE_HOST_SEGMENT_BYTES = 1024 * 1024


def init(
    transport: Literal["auto", "tcp"] = "auto",
    *,
    name: str = "default",
    timeout_s: float | None = None,
    engine: EngineConfig | None = None,
    tcp: TcpConfig | None = None,
    timeline: str | Path | None = None,
    compute: ComputeMode | None = None,
) -> Group:
    """Join the job this process was started for, and return its group when every rank has answered.

    Rank, size and address come from ``torch.distributed`` if that is initialised, else from the variables of
    ``totalreduce run``, torchrun, mpirun or srun; without any it is a world of one. Collective.

    Args:
        transport: ``"tcp"``; ``"auto"`` is the same.
        name: Groups made under different names are independent; equal on all ranks.
        timeout_s: Deadline in seconds of the rendezvous and of waits that name none (default 300, or
            ``TOTALREDUCE_TIMEOUT_S``).
        engine: Sizes, scheduling, stall watch; what shapes the wire must be equal on all ranks.
        tcp: Sockets, heartbeats, deadlines.
        timeline: Where to write a Chrome trace at the end: a folder, or a file name that each rank adds its number to.
        compute: Whether additions have their own thread (``"thread"``) or not (``"inline"``); ``"auto"``, the default
            or ``TOTALREDUCE_COMPUTE``: if there are two cores per rank of this host.

    Raises:
        ConfigurationError: Contradictory variables or settings, on every rank.
        RendezvousError: Ranks are missing, unreachable, or do not know the job's key.
    """
    if transport not in ("auto", "tcp"):
        raise ConfigurationError(f"transport {transport!r} is not known; there are 'auto' and 'tcp'")
    settings = environment.read_settings()
    engine_config = _with_timeout(engine or EngineConfig(), timeout_s or settings.timeout_s)
    tcp_config = tcp or TcpConfig()
    if tcp is None and settings.peer_timeout_s is not None:
        beat_s = min(tcp_config.heartbeat_s, settings.peer_timeout_s / 4)
        tcp_config = TcpConfig(silence_s=settings.peer_timeout_s, heartbeat_s=beat_s)
    world = current_world()
    _set_up_log(settings, world)
    recorder = _timeline(timeline or settings.timeline, world)
    link: Transport
    if world.world_size == 1:
        link = InprocNetwork(1).transport(0)
    else:
        wire = {"wire version": _WIRE_VERSION, "engine": "given" if engine else "default"}
        link = _join(world, settings, name, engine_config, tcp_config, {**wire, **engine_config.wire_settings()})
        if engine is None and link.ranks_per_host == world.world_size:
            engine_config = dataclasses.replace(engine_config, segment_bytes=_ONE_HOST_SEGMENT_BYTES)
    core = Engine(world.rank, world.world_size, engine_config, observers=[] if recorder is None else [recorder])
    mode = compute or cast("ComputeMode", settings.compute or "auto")
    group = Group(Runner(core, link, compute=mode), name)
    if recorder is not None:
        group.at_close(recorder.close)
    _meet(group, engine_config.timeout_s)
    return group


def _join(
    world: World, settings: Settings, name: str, engine: EngineConfig, tcp: TcpConfig, wire: Mapping[str, int | str]
) -> TcpTransport:
    """Listen, meet the others in the store, and know where they listen."""
    key = environment.read_job_key()
    if key is not None:
        JobIdentity(key, "", 0)  # a bad key is an error before anybody waits for anybody
    store = open_store(world, engine.timeout_s)
    meeting = Meeting(store, world, name, engine.timeout_s)
    address, reason = choose_address(world, settings)
    try:
        listener = listen(address)
    except OSError as error:
        raise ConfigurationError(
            f"rank {world.rank} cannot listen on {address} ({reason}): {error.strerror}; set TOTALREDUCE_ADDRESS"
        ) from error
    try:
        identity = JobIdentity(meeting.job_key(), meeting.job_id, epoch=0)
        port = listener.getsockname()[1]
        members = meeting.gather(address, port, wire)
        addresses = [(member.address, member.port) for member in members]
        _log.info("rank %d of %d listens on %s:%d (%s)", world.rank, world.world_size, address, port, reason)
        link = TcpTransport(world.rank, addresses, listener, identity, tcp)
    except BaseException:
        listener.close()
        raise
    return link


def _meet(group: Group, timeout_s: float) -> None:
    """The first barrier: connections stand, everybody knows the key."""
    try:
        group.barrier(timeout_s=timeout_s)
    except (PeerLost, DeadlineExceededError) as error:
        refused = group.statistics().refused_connections
        group.close(1.0)
        # Who has the wrong key himself only sees that the others hang up.
        hint = f" ({refused} connections were refused: is TOTALREDUCE_JOB_KEY the same everywhere?)" if refused else ""
        raise RendezvousError(f"rank {group.rank}: the group could not be formed: {error}{hint}") from error


def _with_timeout(config: EngineConfig, timeout_s: float | None) -> EngineConfig:
    return config if timeout_s is None else dataclasses.replace(config, timeout_s=timeout_s)


def _timeline(path: str | Path | None, world: World) -> Timeline | None:
    if path is None:
        return None
    alone = world.world_size == 1 and Path(path).suffix == ".json"
    return Timeline(world.rank, Path(path) if alone else rank_path(path, world.rank))


def _set_up_log(settings: Settings, world: World) -> None:
    """Say what is said once on rank 0, warnings everywhere; leave an application's own logging alone."""
    if not (_log.handlers or logging.getLogger().handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("totalreduce: %(message)s"))
        _log.addHandler(handler)
        default = "info" if world.rank == 0 and world.world_size > 1 else "warning"
        _log.setLevel((settings.log_level or default).upper())
    elif settings.log_level is not None:
        _log.setLevel(settings.log_level.upper())
    for warning in settings.warnings:
        _log.warning("%s", warning)
