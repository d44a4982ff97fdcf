"""How the ranks of a group begin a parameter server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from totalreduce.codecs.codec import Codec, check_codec
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.agreement import agree_or_refuse
from totalreduce.groups.group import Group
from totalreduce.kernels import ahead
from totalreduce.server.client import Client
from totalreduce.server.clocks import Consistency, Eventual
from totalreduce.server.connection import Connection
from totalreduce.server.layout import Layout
from totalreduce.server.messages import Spec
from totalreduce.server.optimizers import Optimizer, Sum
from totalreduce.server.server import Server
from totalreduce.server.table import Initial, Table

__all__ = ["connect"]

_DTYPES = ("float32", "float64")
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
    codec: Codec | None = None,
    initial: Initial = 0.0,
    timeout_s: float | None = None,
) -> Connection:
    """Begin a parameter server on the ranks of a group, and connect to it. Collective.

    Args:
        group: All of its ranks are workers.
        num_keys: Keys are the integers from 0 to ``num_keys`` - 1.
        width: The number of values of each key.
        dtype: The type of the values: ``"float32"`` or ``"float64"``.
        optimizer: How a push changes values; by default ``Sum()``.
        consistency: ``Sequential()``, ``Bounded(tau)`` or ``Eventual()``, which is the default.
        servers: The ranks that have the values; by default all.
        codec: Encodes what is pushed to ranges of keys, float32 only, with error feedback.
        initial: The value with which all begin; or a function from keys, int64 of shape (n,), to values of shape
            (n, width). Functions are not compared between ranks.
        timeout_s: Deadline in seconds of waits that name none; by default the group's.

    Raises:
        ConfigurationError: A setting is not like that.
        PlanMismatchError: The ranks have different settings; on every rank.
    """
    name = group.operations.own_name("parameter server")

    def make() -> dict[str, Any]:
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
        return {
            "num_keys": checks.integer("num_keys", num_keys, minimum=1),
            "width": checks.integer("width", width, minimum=1, maximum=_WIDTH_MAX),
            "dtype": kind,
            "optimizer": (optimizer or Sum()).describe(),
            "consistency": (consistency or Eventual()).describe(),
            "servers": list(range(group.world_size) if servers is None else checks.ranks_in(servers, group.world_size)),
            "codec": repr(codec),
            "initial": "a function" if callable(initial) else checks.real_number("initial", initial),
        }

    settings = agree_or_refuse(group.control, name, make, lambda made: made)
    digest = hashlib.blake2b(json.dumps([name, settings], sort_keys=True).encode(), digest_size=4).digest()
    kind = np.dtype(settings["dtype"])
    layout = Layout(settings["num_keys"], settings["servers"])
    spec = Spec(layout.num_keys, settings["width"], kind, codec, int.from_bytes(digest, "little"))
    rule, update = consistency or Eventual(), optimizer or Sum()

    def make_ends() -> tuple[Client, Server | None]:
        try:
            client = Client(group.rank, layout, spec)
            if not layout.ranges_of(group.rank):
                return client, None
            table = Table(layout, group.rank, width=spec.width, dtype=kind, optimizer=update, initial=initial)
        except ConfigurationError:
            raise
        except Exception as error:  # of the function ``initial``, or there is too little memory
            raise ConfigurationError(f"the table of a parameter server cannot be made: {error!r}") from error
        return client, Server(group.rank, table, spec, rule, group.world_size)

    client, server = agree_or_refuse(group.control, f"{name}, its tables", make_ends, lambda _made: {})
    _load_kernels(spec, update)
    own = group.control.subgroup(range(group.world_size), name=name)
    connection = Connection(own, name, client, server, spec, group.timeout_s if timeout_s is None else timeout_s)
    group.at_close(connection.end)
    return connection


def _load_kernels(spec: Spec, optimizer: Optimizer) -> None:
    """Compile what this table needs, before the first push waits for it."""
    table = Table(Layout(1, [0]), 0, width=spec.width, dtype=spec.dtype, optimizer=optimizer)
    table.push(table.find_range(0, 1), np.zeros(spec.width, spec.dtype))
    table.pull(table.find_keys(np.zeros(1, spec.key_dtype)))
    if spec.codec is not None:
        ahead.load_codecs()
