"""Joining and leaving the job, the ranks of this process, process sets, timelines, and the libraries in use."""

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

    After a failure that ended the job (``PeerLost``, ``StallError``) every rank must call it again, to leave that job
    and to join a new one. The arguments that Horovod does not have are those of ``totalreduce.init``.

    Args:
        comm: All ranks of the job, as a list or an mpi4py communicator; or left out.
        process_sets: Process sets to register at once. ``"dynamic"`` adds none, because sets may always be added.
        transport: By default ``"torch"`` if ``torch.distributed`` is initialised with NCCL or another accelerator's
            library, which then carries out all operations; otherwise ``"auto"``.
        timeout_s: Seconds for which ranks wait for each other.
        timeline: The file for a trace, written at the end.
        coordination: Settings of the agreement on the order of operations. By default an operation that some rank never
            submits ends the job after ``timeout_s``.

    Raises:
        ConfigurationError: Contradictory variables or settings; or ``comm`` leaves ranks out.
        RendezvousError: Ranks are missing, or unreachable.
    """
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    context.start(comm, sets, transport=transport, timeout_s=timeout_s, timeline=timeline, coordination=coordination)


def shutdown() -> None:
    """Leave the job; pending operations fail. Called at the interpreter's end, too. ``init`` may follow."""
    context.stop()


atexit.register(shutdown)


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` not yet."""
    return context.is_initialized


def rank() -> int:
    """Return the rank of this process in the job."""
    return context.group.rank


def size() -> int:
    """Return the number of processes of the job."""
    return context.group.world_size


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return context.locality.local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host."""
    return context.locality.local_size


def cross_rank() -> int:
    """Return the rank of this host among those that have a process with this local rank."""
    return context.locality.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return context.locality.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    return context.locality.is_homogeneous


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Collective among all ranks of the job, members or not.

    Raises:
        ConfigurationError: It has ranks that do not exist, or a set with the same ranks is registered.
        PlanMismatchError: The ranks add different sets; on every rank.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    context.add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective among all ranks of the job.

    Returns:
        Whether it was removed; the set of all ranks stays.

    Raises:
        ConfigurationError: It is not registered.
    """
    return context.remove(process_set)


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the process set with this id.

    Raises:
        ConfigurationError: No set has this id.
    """
    return context.by_id(process_set_id)


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Record a trace from now on, on this rank; ``mark_cycles`` has no effect, as no cycle has a fixed length.

    Rank 0 writes ``file_path``, and rank r ``<name>.rank<r>.json`` beside it. ``totalreduce timeline`` merges them.

    Raises:
        ConfigurationError: A trace is being recorded already, or the file cannot be written.
    """
    context.start_timeline(file_path)


def stop_timeline() -> None:
    """Write the trace."""
    context.stop_timeline()


def mpi_built() -> bool:
    """Whether the MPI transport can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether MPI sends this job's messages."""
    return context.transport == "mpi"


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI itself, from any thread that MPI allows; always true."""
    context.group  # noqa: B018  (raises)
    return True


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the program's process group carries out this job's operations, and has gloo."""
    return context.transport == "torch" and "gloo" in str(dist.get_backend_config()).lower()


def nccl_built() -> int:
    """Return 1 if torch has NCCL, else 0."""
    return int(dist.is_available() and dist.is_nccl_available())


def ddl_built() -> bool:
    """Return ``False``: DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return ``False``: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None
