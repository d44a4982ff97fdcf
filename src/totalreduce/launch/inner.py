"""``tr.init(inner=...)``: the mesh of a group, with a library of ``torch.distributed`` inside each host."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch.distributed as dist

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups.engine_collectives import EngineCollectives
from totalreduce.groups.group import Group
from totalreduce.groups.mesh import MeshCollectives, ranks_per_host

__all__ = ["Inner", "check_inner", "mesh_of"]

Inner = Literal["nccl", "gloo"]

_log = logging.getLogger(__name__)


def check_inner(inner: str, rank: int, world_size: int, *, on_loss: bool, native: bool) -> None:
    """Raise ``ConfigurationError`` if this process cannot make a mesh. Needs no other rank.

    Args:
        inner: The argument of ``init``, or the variable's value.
        rank: This rank in the job.
        world_size: The number of ranks of the job.
        on_loss: Whether the launcher can replace ranks.
        native: Whether a native library carries out all collectives.
    """
    wanted = f"inner={inner!r}"
    if inner not in get_args(Inner):
        raise ConfigurationError(f"inner is 'nccl' or 'gloo', not {inner!r}")
    if on_loss:
        raise ConfigurationError(
            f"{wanted} and ranks that can be replaced (--on-loss) exclude each other: torch.distributed cannot replace "
            "a rank. Leave one of the two out"
        )
    if native:
        raise ConfigurationError(
            f"{wanted} is for the engine between hosts, and another library is to carry out all collectives: leave "
            "inner and TOTALREDUCE_INNER out, or use tr.init() without transport='torch' and collectives='native'"
        )
    line = f"torch.distributed.init_process_group({inner!r})"
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(f"{wanted} uses torch.distributed inside a host: call {line} before tr.init()")
    if inner == "nccl" and not dist.is_nccl_available():
        raise ConfigurationError(f"{wanted}: this torch has no NCCL; install one for CUDA, or use inner='gloo' on CPUs")
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigurationError(
            f"{wanted}: this is rank {rank} of {world_size}, and for torch.distributed rank {dist.get_rank()} of "
            f"{dist.get_world_size()}: call {line} in each process of the job, before tr.init() and with its ranks"
        )


def mesh_of(group: Group, inner: str) -> MeshCollectives | None:
    """Make the mesh of a group of all ranks; ``None`` if each rank is alone on its host. Collective.

    Raises:
        ConfigurationError: Hosts have different numbers of ranks; on every rank.
        RendezvousError: Some rank did not come in time.
    """
    from totalreduce.native import torch_collectives

    hosts = group.operations.runner.transport.hosts
    if ranks_per_host(hosts) == 1:
        if group.rank == 0:
            _log.warning(
                "inner=%r has no effect: each rank is alone on its host, so that the engine does all. Start several "
                "ranks on each host (totalreduce run --hosts a:2,b:2), or leave inner and TOTALREDUCE_INNER out",
                inner,
            )
        return None
    whole, here = EngineCollectives(group.operations.within("mesh")), hosts[group.rank]
    members = [rank for rank, host in enumerate(hosts) if host == here]
    library = torch_collectives.among(members, group.timeout_s, inner)
    return MeshCollectives(whole, library, hosts, group.timeout_s)
