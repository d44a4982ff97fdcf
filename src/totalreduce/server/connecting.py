"""How the ranks of a group begin a parameter server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from totalreduce.codecs.codec import Codec, check_codec
from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.kernels import ahead
from totalreduce.recovery.assembly import Assembly
from totalreduce.recovery.forming import open_assembly
from totalreduce.server.client import Client
from totalreduce.server.clocks import Consistency, Eventual
from totalreduce.server.connection import Connection
from totalreduce.server.handover import Holdings
from totalreduce.server.layout import Layout
from totalreduce.server.messages import WINDOW, Spec
from totalreduce.server.optimizers import Optimizer, Sum
from totalreduce.server.placement import chains_of
from totalreduce.server.renewal import Epoch, Renewal
from totalreduce.server.server import Server
from totalreduce.server.shard import Shard
from totalreduce.server.table import Initial, Table

__all__ = ["connect"]

_DTYPES = ("float32", "float64")
_SHARDS_MAX = 256
#: The largest number of values of a key: a row fits into a request.
_WIDTH_MAX = 1 << 18


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
    initial: Initial = 0.0,
    timeout_s: float | None = None,
) -> Connection:
    """Begin a parameter server on the ranks of a group, and connect to it. Collective.

    If the launcher can replace ranks (``totalreduce run --on-loss``), this forms the group, and the loss of ranks ends
    nothing as long as each shard has a server that is left. See docs/parameter-server.md.

    Args:
        group: Workers and servers.
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        width: The number of values of each key.
        dtype: The type of the values: ``"float32"`` or ``"float64"``.
        optimizer: How a push changes values; by default ``Sum()``.
        consistency: ``Sequential()``, ``Bounded(tau)`` or ``Eventual()``, which is the default.
        servers: The ranks that have the values; by default all.
        workers: The number of workers, which are the first ranks; by default all ranks are. Others only serve: they may
            call nothing but ``close``.
        shards: The number of parts of the keys; by default as many as servers. With more, those of a lost server are
            spread over several others.
        replicas: The number of servers that hold each shard. With more than one, a push is done when all of them have
            carried it out. Without ``--on-loss`` it is 1.
        codec: Encodes what is pushed to ranges of keys, float32 only, with error feedback.
        initial: The value with which all begin; or a function from keys, int64 of shape (n,), to values of shape
            (n, width). Functions are not compared between ranks.
        timeout_s: Deadline in seconds of waits that name none; by default the group's.

    Raises:
        ConfigurationError: A setting is not like that.
        PlanMismatchError: The ranks have different settings; on every rank.
        RecoveryError: With ``--on-loss``: too few processes have come in time, or all servers of a shard are lost.
    """
    rank, world_size = group.rank, group.world_size

    def describe() -> dict[str, Any]:
        kind = str(dtype).removeprefix("torch.")
        checks.one_of("dtype", kind, _DTYPES)
        check_codec(codec)
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        if codec is not None and kind != "float32":
            raise ConfigurationError(f"codecs encode float32, not {kind}")
        for what, setting, base in (("optimizer", optimizer, Optimizer), ("consistency", consistency, Consistency)):
            if setting is not None and not isinstance(setting, base):
                raise ConfigurationError(f"{what} is {setting!r}; expected is a tr.ps.{base.__name__}")
        if servers is not None and not servers:
            raise ConfigurationError("servers must name a rank")
        seats = list(range(world_size) if servers is None else checks.ranks_in(servers, world_size))
        return {
            "num_keys": checks.integer("num_keys", num_keys, minimum=1),
            "width": checks.integer("width", width, minimum=1, maximum=_WIDTH_MAX),
            "dtype": kind,
            "optimizer": (optimizer or Sum()).describe(),
            "consistency": (consistency or Eventual()).describe(),
            "servers": seats,
            "workers": world_size
            if workers is None
            else checks.integer("workers", workers, minimum=1, maximum=world_size),
            "shards": len(seats)
            if shards is None
            else checks.integer("shards", shards, minimum=1, maximum=_SHARDS_MAX),
            "replicas": checks.integer("replicas", replicas, minimum=1, maximum=len(seats)),
            "codec": repr(codec),
            "initial": "a function" if callable(initial) else checks.real_number("initial", initial),
        }

    assembly = None
    if group.formation is None:
        name = group.operations.own_name("parameter server")
        settings = agree_or_refuse(group.control, name, describe, lambda made: made)
    else:
        name, settings = "parameter server", describe()
        assembly = _open_assembly(group, settings)
    digest = hashlib.blake2b(json.dumps([name, settings], sort_keys=True).encode(), digest_size=4).digest()
    kind = np.dtype(settings["dtype"])
    layout = Layout(settings["num_keys"], range(settings["shards"]))
    spec = Spec(layout.num_keys, settings["width"], kind, codec, int.from_bytes(digest, "little"))
    rule, update, num_workers = consistency or Eventual(), optimizer or Sum(), settings["workers"]
    numbers = [int(shard) for shard in np.unique(layout.owners)]

    def make_shard(shard: int) -> Shard:
        try:
            table = Table(layout, shard, width=spec.width, dtype=kind, optimizer=update, initial=initial)
        except ConfigurationError:
            raise
        except Exception as error:  # of the function ``initial``, or there is too little memory
            raise ConfigurationError(f"the table of a parameter server cannot be made: {error!r}") from error
        return Shard(rank, table, spec, rule, num_workers)

    server, renewal = Server(rank), None
    if assembly is None:
        chains = chains_of(numbers, settings["servers"], settings["servers"], 1)

        def make_shards() -> dict[int, Shard]:
            return {shard: make_shard(shard) for shard, chain in chains.items() if rank in chain}

        made = agree_or_refuse(group.control, f"{name}, its tables", make_shards, lambda _made: {})
        server.begin_epoch(chains, made)
        own = group.control.subgroup(range(world_size), name=name)
        heads = {shard: chain[0] for shard, chain in chains.items()}
        place = Epoch(own, tuple(range(world_size)), heads, (0,) * num_workers)
    else:
        assert group.formation is not None
        renewal = Renewal(
            *(assembly, group.formation),
            Holdings((assembly.seat, assembly.incarnation), server, spec, make_shard),
            servers=settings["servers"],
            shards=numbers,
            replicas=settings["replicas"],
        )
        place = renewal.begin()
    _load_kernels(spec, update)
    heads = place.servers if rank < num_workers else {}
    client = Client(rank, layout, spec, heads, steps_are_atomic=renewal is not None)
    client.begin_epoch(place.servers, place.clock_of(rank))
    connection = Connection(
        *(place, name, client, server, spec),
        rank=rank,
        incoming_max=4 * WINDOW * len(numbers) * (num_workers if settings["replicas"] > 1 else 1),
        timeout_s=group.timeout_s if timeout_s is None else timeout_s,
        renewal=renewal,
    )
    if renewal is None:
        group.at_close(connection.end)
    return connection


def _open_assembly(group: Group, settings: dict[str, Any]) -> Assembly:
    """Meet the launcher's store, compare this process's program with the job's, and give the unformed group up."""
    if group.operations.closed:
        raise ConfigurationError("with --on-loss, a job has one connection to one parameter server")
    assembly = open_assembly(environment.read_settings(), group.rank, group.world_size, group.timeout_s)
    lines = [f"{name}: {value}" for name, value in settings.items()]
    assembly.check_equal("program", "\n".join(["parameter server", *lines]))
    assembly.check_equal("settings", group.formation_settings)
    group.close(1.0)
    return assembly


def _load_kernels(spec: Spec, optimizer: Optimizer) -> None:
    """Compile what this table needs, before the first push waits for it."""
    table = Table(Layout(1, [0]), 0, width=spec.width, dtype=spec.dtype, optimizer=optimizer)
    table.push(table.find_range(0, 1), np.zeros(spec.width, spec.dtype))
    table.pull(table.find_keys(np.zeros(1, spec.key_dtype)))
    if spec.codec is not None:
        ahead.load_codecs()
