"""A job whose machines each have a launcher of their own, as torchrun's: which part of the ranks this one starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.workers import free_port

__all__ = ["NodeOptions", "node_options"]

#: torchrun's default.
_PORT = 29_500
_BACKENDS = ("c10d", "static")
#: ``node0:29500``, ``10.0.0.1``, ``[fd00::1]:29500``.
_ENDPOINT = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """The part of a job that a launcher starts. All options but ``rank`` are the same on the other machines."""

    rank: int  #: The number of this machine, from 0.
    count: int  #: The number of machines.
    address: str  #: The address of machine 0, on which rank 0 serves the rendezvous store.
    port: int  #: The port of this store.
    job: str  #: The id of the job.

    @property
    def names(self) -> list[str]:
        """The names of the machines, in results."""
        return [f"node{number}" for number in range(self.count)]

    def seats(self, num_workers: int) -> range:
        """Return the ranks of this machine, if all machines together have so many."""
        here = num_workers // self.count
        return range(self.rank * here, (self.rank + 1) * here)


def node_options(
    *,
    nnodes: str | None = None,
    node_rank: int | None = None,
    endpoint: str | None = None,
    backend: str | None = None,
    job: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> NodeOptions | None:
    """Return what torchrun's options say; ``None`` if they say nothing but that there is one machine.

    Raises:
        ConfigurationError: They contradict each other, or something is missing, or has no meaning here.
    """
    count = _count(nnodes)
    if backend is not None and backend not in _BACKENDS:
        raise ConfigurationError(
            f"--rdzv-backend is {' or '.join(_BACKENDS)} here, and not {backend!r}: the ranks always meet in a store "
            "that rank 0 serves"
        )
    if endpoint is not None and (master_addr is not None or master_port is not None):
        raise ConfigurationError("give --rdzv-endpoint, or --master-addr and --master-port, and not both")
    address, port = (master_addr, master_port) if endpoint is None else _parsed(endpoint)
    if count == 1:
        if node_rank not in (None, 0):
            raise ConfigurationError(f"--node-rank {node_rank} needs --nnodes: the number of machines")
        if address is None and port is None:
            return None
    elif node_rank is None or not 0 <= node_rank < count:
        given = "needs --node-rank" if node_rank is None else f"does not go with --node-rank {node_rank}"
        raise ConfigurationError(f"--nnodes {count} {given}: the number of this machine, from 0 to {count - 1}")
    elif address is None:
        raise ConfigurationError(
            f"--nnodes {count} needs the address of machine 0 and a free port there, the same on every machine: "
            f"--rdzv-endpoint node0:{_PORT}"
        )
    elif port == 0:
        raise ConfigurationError("--rdzv-endpoint with port 0 is for one machine: all machines must know the port")
    address, port = address or "127.0.0.1", free_port() if port == 0 else port or _PORT
    return NodeOptions(
        rank=node_rank or 0, count=count, address=address, port=port, job=f"{job or 'run'}@{address}:{port}"
    )


def _count(nnodes: str | None) -> int:
    if nnodes is None:
        return 1
    if re.fullmatch(r"\d+:\d+", nnodes):
        least, _, most = nnodes.partition(":")
        if least != most:
            raise ConfigurationError(
                f"--nnodes {nnodes}: a number of machines that changes needs one launcher for all of them: totalreduce "
                "run --hosts-file hosts --on-loss shrink. Or start the script with torchrun"
            )
        nnodes = least
    if not re.fullmatch(r"[1-9]\d{0,4}", nnodes):
        raise ConfigurationError(f"--nnodes is the number of machines, at least 1, not {nnodes!r}")
    return int(nnodes)


def _parsed(endpoint: str) -> tuple[str, int | None]:
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match[3] and int(match[3]) > 65_535):
        raise ConfigurationError(
            f"--rdzv-endpoint is the address of machine 0 and a port, as node0:{_PORT}, not {endpoint!r}"
        )
    return match[1] or match[2], int(match[3]) if match[3] else None
