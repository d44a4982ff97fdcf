"""Beginning and end, who this process is, what there is underneath."""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from totalreduce.coordination.config import CoordinationConfig
from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import ProcessSet

__all__ = [
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_by_id",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
    *,
    transport: str | None = None,
    timeout_s: float | None = None,
    timeline: str | Path | None = None,
    coordination: CoordinationConfig | None = None,
) -> None:
    """Join the job this process was started for. Collective; harmless when called again.

    After a failure that ended the job (``PeerLost``, ``StallError``) it leaves that job and joins anew; every rank must
    call it then. The arguments that Horovod does not have are those of ``totalreduce.init``.

    Args:
        comm: All ranks of the job, as a list or an mpi4py communicator; or left out.
        process_sets: Sets of ranks to make known at once. ``"dynamic"`` adds nothing: sets may always be added.
        transport: By default ``"torch"`` if ``torch.distributed`` is initialised with NCCL or another accelerator's
            library, which then carries everything out, else ``"auto"``.
        timeout_s: Seconds for which ranks wait for each other.
        timeline: Where to write a trace at the end.
        coordination: Settings of the agreement on what is carried out when. By default an operation that some rank
            never submits ends the job after ``timeout_s``.

    Raises:
        ConfigurationError: Contradictory variables or settings; or ``comm`` leaves ranks out.
        RendezvousError: Ranks are missing, or unreachable.
    """
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    context.start(comm, sets, transport=transport, timeout_s=timeout_s, timeline=timeline, coordination=coordination)


def shutdown() -> None:
    """Leave the job; what is pending fails. Happens by itself when the interpreter ends. ``init`` may follow."""
    context.stop()


atexit.register(shutdown)


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` not yet."""
    return context.is_initialized


def rank() -> int:
    """This process's number in the job, from 0."""
    return context.group.rank


def size() -> int:
    """Number of processes of the job."""
    return context.group.world_size


def local_rank() -> int:
    """This process's number among those of its host, from 0."""
    return context.locality.local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return context.locality.local_size


def cross_rank() -> int:
    """This host's number among those that have a process with this local rank, from 0."""
    return context.locality.cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank."""
    return context.locality.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    return context.locality.is_homogeneous


# ------------------------------------------------------------------------------------------------------- process sets


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set known. Collective among all ranks of the job, members or not.

    Raises:
        ConfigurationError: It has ranks that do not exist, or there is such a set already.
        PlanMismatchError: The ranks add different ones; on every rank.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    context.add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set. Collective among all ranks of the job.

    Returns:
        Whether that was possible; that of all ranks stays.

    Raises:
        ConfigurationError: It is not known.
    """
    return context.remove(process_set)


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The process set with this id.

    Raises:
        ConfigurationError: There is none.
    """
    return context.by_id(process_set_id)


# ----------------------------------------------------------------------------------------------------------- timeline


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:  # noqa: ARG001  (there is no clock here)
    """Record a trace from now on, on this rank.

    Args:
        file_path: Rank 0 writes this file; rank r writes ``<name>.rank<r>.json`` beside it. ``totalreduce timeline``
            merges them.
        mark_cycles: Accepted, without effect: nothing here goes by the clock.

    Raises:
        ConfigurationError: One is being recorded already, or the file cannot be written.
    """
    context.start_timeline(file_path)


def stop_timeline() -> None:
    """Write the trace."""
    context.stop_timeline()


# --------------------------------------------------------------------------------------------- what there is underneath


def mpi_built() -> bool:
    """Whether the MPI transport can be used: mpi4py is there."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether this job's messages are MPI's."""
    return context.transport == "mpi"


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI beside this library, from any thread that MPI allows."""
    context.group  # noqa: B018  (raises)
    return True


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the program's process group carries out this job's operations, and has gloo."""
    return context.transport == "torch" and "gloo" in str(dist.get_backend_config()).lower()


def nccl_built() -> int:
    """1 if torch has NCCL, else 0."""
    return int(dist.is_available() and dist.is_nccl_available())


def ddl_built() -> bool:
    """``False``."""
    return False


def ccl_built() -> bool:
    """``False``."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None
