"""Horovod's interface for PyTorch, carried out by totalreduce. Programs change one import.

>>> import totalreduce.horovod as hvd                                                   # doctest: +SKIP
>>> hvd.init()                                                                          # doctest: +SKIP
>>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)                           # doctest: +SKIP
>>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())           # doctest: +SKIP

Names, arguments and results are those of ``horovod.torch`` 0.28. ``docs/horovod.md`` lists the differences.
"""

from __future__ import annotations

from typing import NoReturn

from totalreduce import __version__
from totalreduce.foundation.errors import TotalReduceError as HorovodInternalError
from totalreduce.horovod.basics import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_by_id,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from totalreduce.horovod.batch_norm import SyncBatchNorm
from totalreduce.horovod.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from totalreduce.horovod.compression import Compression
from totalreduce.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from totalreduce.horovod.handles import poll, synchronize
from totalreduce.horovod.joining import join
from totalreduce.horovod.optimizer import DistributedOptimizer
from totalreduce.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_by_id",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> NoReturn:
    if name == "elastic":
        raise AttributeError(
            "totalreduce.horovod has no elastic training yet: a lost rank raises PeerLost on all others. Restart the "
            "job (torchrun --max-restarts does) and go on from a checkpoint"
        )
    raise AttributeError(f"module 'totalreduce.horovod' has no attribute {name!r}")
