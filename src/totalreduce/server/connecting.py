"""How the ranks of a group begin a parameter server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, final
from uuid import uuid4

import numpy as np
import torch

from totalreduce.codecs.codec import Codec
from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.kernels import ahead
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.epochs import CLOSE_S, open_assembly
from totalreduce.server.announcements import announce
from totalreduce.server.client import Client
from totalreduce.server.clocks import Consistency
from totalreduce.server.connection import Connection
from totalreduce.server.driver import Driver
from totalreduce.server.filters import Filter
from totalreduce.server.handover import Holdings
from totalreduce.server.layout import Layout
from totalreduce.server.messages import WINDOW, Spec
from totalreduce.server.messenger import Messenger
from totalreduce.server.optimizers import Optimizer
from totalreduce.server.placement import chains_of
from totalreduce.server.renewal import Epoch, Renewal
from totalreduce.server.saving import Origin, Snapshot, find_snapshot, write_shard
from totalreduce.server.server import Server
from totalreduce.server.setup import Setup
from totalreduce.server.shard import Shard
from totalreduce.server.table import Initial, Table

__all__ = ["VALUE", "begin_in_group", "begin_in_job", "connect"]

#: Under this name, the launcher's store has the setup for ranks that only serve.
VALUE = "parameter server"
#: Under these names, it has what ``Origin`` has.
_RUN: Final = "run of the parameter server"
_RESTORED: Final = "restored clock"
#: The settings that a snapshot has: those on which the meaning of values and states depends.
_SAVED_SETTINGS: Final = ("num_keys", "width", "dtype", "optimizer")


def connect(
    group: Group,
    *,
    num_keys: int,
    width: int = 1,
    dtype: str | torch.dtype = "float32",
    optimizer: Optimizer | None = None,
    consistency: Consistency | None = None,
    servers: Sequence[int] | None = None,
    workers: int | None = None,
    shards: int | None = None,
    replicas: int = 1,
    codec: Codec | None = None,
    filter: Filter | None = None,  # noqa: A002  (the name in the literature)
    initial: Initial = 0.0,
    restore: str | Path | None = None,
    timeout_s: float | None = None,
) -> Connection:
    """Begin a parameter server on the ranks of a group, and connect to it. Collective.

    If the launcher can replace ranks (``totalreduce run --on-loss``), this forms the group, and the loss of ranks ends
    nothing as long as each shard has a server that is left. See docs/parameter-server-losses.md.

    Args:
        group: Workers and servers. If other ranks only serve (``totalreduce run --servers``): the workers.
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        width: The number of values of each key.
        dtype: The type of the values: ``"float32"`` or ``"float64"``.
        optimizer: How a push changes values; by default ``Sum()``.
        consistency: ``Sequential()``, ``Bounded(tau)`` or ``Eventual()``, which is the default.
        servers: The ranks that have the values; by default all, or those that only serve, which count on from the
            workers.
        workers: The number of workers, which are the first ranks; by default all ranks of the group are. Others only
            serve: they may call nothing but ``close``, with a ``timeout_s`` as long as the job.
        shards: The number of parts of the keys; by default as many as servers. With more, those of a lost server are
            spread over several others.
        replicas: The number of servers that hold each shard. With more than one, a push is done when all of them have
            carried it out. Without ``--on-loss`` it is 1.
        codec: Encodes what is pushed, float32 only, with error feedback.
        filter: Says which keys of each push this worker sends now; the others are added to its next push of them. Each
            rank passes an object of its own, which may differ from the others. One of a rank that only serves is not
            used. With ``--on-loss``, the first step of a process is sent without it.
        initial: The value with which all begin; or a function from keys, int64 of shape (n,), to values of shape
            (n, width). Functions are not compared between ranks, and not sent to ranks that only serve.
        restore: A folder in which ``Connection.save`` has written: values, the state of the optimizer and the workers'
            clock are those of its last complete snapshot. The numbers of workers, servers and shards may be others.
        timeout_s: Deadline in seconds of waits that name none; by default the group's.

    Raises:
        ConfigurationError: A setting is not like that, or the filter of this rank cannot begin.
        PlanMismatchError: The ranks have different settings; on every rank. Or another rank has raised
            ``ConfigurationError``. With ``--on-loss`` it is a ``ConfigurationError`` on the rank that differs.
        RecoveryError: With ``--on-loss``: too few processes have come in time, or all servers of a shard are lost. Or
            ``restore`` has no complete snapshot, or a file of it is damaged; the error names it.
    """
    whole = group if group.with_servers is None else group.with_servers
    in_job = group.formation is not None
    if in_job and whole.operations.closed:
        raise ConfigurationError("with --on-loss, a job has one connection to one parameter server")

    def make() -> tuple[Setup, str]:
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        setup = Setup.checked(
            *(whole.world_size, group.world_size),
            num_keys=num_keys,
            width=width,
            dtype=dtype,
            optimizer=optimizer,
            consistency=consistency,
            servers=servers,
            workers=workers,
            shards=shards,
            replicas=replicas,
            codec=codec,
            initial=initial,
            restore=restore,
        )
        if filter is not None and group.rank < setup.workers:
            _begin_filter(filter, setup)
        # All ranks are members of the groups of a job; else those that only serve are asked for if they are needed.
        is_sent = whole is not group and (in_job or max(setup.servers) >= group.world_size)
        return setup, setup.encode() if is_sent else ""

    patience_s = group.timeout_s if timeout_s is None else timeout_s
    if in_job:
        setup, sent = make()
        mine = filter if group.rank < setup.workers else None
        assembly = open_assembly(environment.read_settings(), whole.rank, whole.world_size, whole.timeout_s)
        if sent:
            assembly.first_value(VALUE, sent)
        return begin_in_job(whole, setup, patience_s, assembly, mine)
    name = group.operations.own_name("parameter server")
    setup, sent = agree_or_refuse(group.control, name, make, lambda made: made[0].describe())
    if sent and group.rank == 0:
        announce(whole, group.world_size, sent)
    mine = filter if group.rank < setup.workers else None
    return begin_in_group(whole if sent else group, setup, patience_s, mine)


def _begin_filter(filter_: Filter, setup: Setup) -> None:
    """Begin the filter of this rank's worker. The other ranks are told of a ``ConfigurationError``."""
    if not isinstance(filter_, Filter):
        raise ConfigurationError(f"filter is None or a tr.ps.Filter, not {filter_!r}")
    try:
        filter_.begin(setup.num_keys, setup.width)
    except ConfigurationError:
        raise
    except Exception as error:  # of a filter of the program, or there is too little memory
        raise ConfigurationError(f"{type(filter_).__name__}.begin has failed: {error!r}") from error


def begin_in_group(group: Group, setup: Setup, timeout_s: float, filter_: Filter | None = None) -> Connection:
    """Begin a parameter server that the loss of a rank ends. Collective; all ranks have this setup.

    ``filter_`` is that of this rank's worker, and has begun.

    Raises:
        ConfigurationError: A table cannot be made. The other ranks raise ``PlanMismatchError``.
    """
    name = group.operations.own_name("tables of a parameter server")
    parts = _Parts(group.rank, setup, name)
    chains = chains_of(parts.shards, setup.servers, setup.servers, 1)

    def make_shards() -> dict[int, Shard]:
        parts.find_snapshot()
        return {shard: parts.make_shard(shard) for shard, chain in chains.items() if group.rank in chain}

    made = agree_or_refuse(group.control, name, make_shards, lambda _made: {"the step of the snapshot": parts.clock})
    parts.server.begin_epoch(chains, made)
    own = group.control.subgroup(range(group.world_size), name=name)
    heads = {shard: chain[0] for shard, chain in chains.items()}
    place = Epoch(own, tuple(range(group.world_size)), heads, (parts.clock,) * setup.workers)
    run = own.broadcast_object(uuid4().hex if own.rank == 0 else None)
    connection = parts.connect(place, timeout_s, Origin(run, setup.restore, parts.clock), filter_=filter_)
    group.at_close(connection.end)
    return connection


def begin_in_job(
    group: Group, setup: Setup, timeout_s: float, assembly: Assembly, filter_: Filter | None = None
) -> Connection:
    """Begin the parameter server of a job whose ranks can be replaced, and give the unformed group up.

    ``filter_`` is that of this rank's worker, and has begun.

    Raises:
        ConfigurationError: This process has another setup than the job.
        RecoveryError: As for ``connect``.
        SystemExit: With ``--on-loss shrink``: the others have ended the job.
    """
    lines = [f"{name}: {value}" for name, value in setup.describe().items()]
    assembly.check_program("\n".join(["parameter server", *lines]), group.formation_settings)
    assert group.formation is not None
    parts = _Parts(group.rank, setup, "parameter server")
    restored = int(assembly.first_value(_RESTORED, str(0 if setup.restore is None else find_snapshot(setup.restore))))
    origin = Origin(assembly.first_value(_RUN, uuid4().hex), setup.restore, restored)
    group.close(CLOSE_S)
    renewal = Renewal(
        *(assembly, group.formation),
        Holdings((assembly.seat, assembly.incarnation), parts.server, parts.spec, parts.make_shard),
        servers=setup.servers,
        shards=parts.shards,
        replicas=setup.replicas,
    )
    return parts.connect(renewal.begin(), timeout_s, origin, renewal, filter_)


@final
class _Parts:
    """The parts of a connection, before it has a group.

    Attributes:
        spec: Of the table.
        shards: The numbers of the shards.
        server: Has no shards yet.
        clock: That with which workers begin.
    """

    def __init__(self, rank: int, setup: Setup, name: str) -> None:
        digest = hashlib.blake2b(json.dumps([name, setup.describe()], sort_keys=True).encode(), digest_size=4).digest()
        self._rank, self._setup, self._name = rank, setup, name
        self._layout = Layout(setup.num_keys, range(setup.shards))
        number = int.from_bytes(digest, "little")
        self.spec = Spec(setup.num_keys, setup.width, np.dtype(setup.dtype), setup.codec, number)
        self.shards = [int(shard) for shard in np.unique(self._layout.owners)]
        self.server = Server(rank)
        self.clock = 0
        self._snapshot: Snapshot | None = None
        _load_kernels(self.spec, setup.optimizer)  # now, because a group that is formed must not be left alone for long

    def find_snapshot(self) -> None:
        """Open the snapshot that is to be restored, if there is one. Raises ``RecoveryError``."""
        folder = self._setup.restore
        if folder is not None and self._snapshot is None:
            self._snapshot = Snapshot(folder, find_snapshot(folder))
            self.clock = self._snapshot.clock

    def make_shard(self, shard: int, begins: bool = True) -> Shard:
        """Return a shard as it is when the table begins; else with zeros.

        Raises:
            ConfigurationError: The table cannot be made.
            RecoveryError: The snapshot cannot be read.
        """
        setup, spec = self._setup, self.spec
        about = {
            **{name: value for name, value in setup.describe().items() if name in _SAVED_SETTINGS},
            "state": [kind.name for kind in setup.optimizer.states],
            "num_shards": setup.shards,
            "layout": self._layout.digest,
        }
        clock = 0
        try:
            table = Table(
                *(self._layout, shard),
                width=spec.width,
                dtype=spec.dtype,
                optimizer=setup.optimizer,
                initial=setup.initial if begins and setup.restore is None else 0.0,
            )
            if begins:
                self.find_snapshot()
                clock = self.clock
                if self._snapshot is not None:
                    self._snapshot.load(table, self._layout, about)
        except TotalReduceError:
            raise
        except Exception as error:  # of the function ``initial``, or there is too little memory
            raise ConfigurationError(f"the table of a parameter server cannot be made: {error!r}") from error
        write = partial(write_shard, about=about, place=self.shards.index(shard), count=len(self.shards))
        return Shard(self._rank, table, spec, setup.consistency, setup.workers, clock=clock, write=write)

    def connect(
        self,
        place: Epoch,
        timeout_s: float,
        origin: Origin,
        renewal: Renewal | None = None,
        filter_: Filter | None = None,
    ) -> Connection:
        """Return the connection. The arguments are those of ``Driver``, ``Connection`` and ``Client``."""
        setup, rank = self._setup, self._rank
        heads = place.servers if rank < setup.workers else {}
        client = Client(*(rank, self._layout, self.spec, heads), steps_are_atomic=renewal is not None, filter_=filter_)
        client.begin_epoch(place.servers, place.clock_of(rank), is_restored=setup.restore is not None)
        incoming_max = 4 * WINDOW * len(self.shards) * (setup.workers if setup.replicas > 1 else 1)
        open_messenger = partial(Messenger, name=self._name, spec=self.spec, incoming_max=incoming_max)
        driver = Driver(place, client, self.server, open_messenger, renewal)
        return Connection(driver, timeout_s=timeout_s, origin=origin, check_rate=setup.optimizer.check_rate)


def _load_kernels(spec: Spec, optimizer: Optimizer) -> None:
    """Compile what this table needs, before the first push waits for it."""
    table = Table(Layout(1, [0]), 0, width=spec.width, dtype=spec.dtype, optimizer=optimizer)
    table.push(table.find_range(0, 1), np.zeros(spec.width, spec.dtype))
    table.pull(table.find_keys(np.zeros(1, spec.key_dtype)))
    if spec.codec is not None:
        ahead.load_codecs()
