"""Batch normalisation over the joint batch of a process set."""

from __future__ import annotations

import torch

from totalreduce.horovod.context import context
from totalreduce.horovod.process_sets import ProcessSet, global_process_set
from totalreduce.pytorch import sync_batch_norm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Batch normalisation of one, two or three dimensions with the statistics of all ranks' batches; on any device.

    Make layers after ``init``, and in the same order on all ranks.

    Args:
        process_set: The ranks. The other arguments are those of ``torch.nn.BatchNorm2d``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        members = context.declared(process_set)
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            group=members.group.control,
            name=members.name("SyncBatchNorm"),
        )
