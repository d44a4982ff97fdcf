"""``ElasticSampler``: deals the samples of an epoch out again whenever the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Sampler

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.horovod.context import context

__all__ = ["ElasticSampler"]


@final
class ElasticSampler(Sampler[int]):
    """Deals samples to the ranks, and knows which ones were used. It is the ``sampler`` of a ``DataLoader``.

    ::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    The program calls ``record_batch`` after each batch, and ``state.commit()``, which tells all ranks what each of them
    has recorded. After a change of the ranks, the samples that no committed batch has used are dealt to the new ranks.
    So no sample is lost, and none is used twice.

    All ranks get the same number of samples, so that they take the same number of steps. If the samples that are left
    are no multiple of the number of ranks, the last ones, fewer than there are ranks, are not dealt in this epoch: they
    are the first ones of the next epoch, where they are used in addition to its own samples. If the sampler knows the
    loader's batch size (``batch_size=``), some ranks get one of these samples in their last batch, unless this batch is
    full on all ranks, which makes them rare. Horovod deals samples twice instead.

    Attributes:
        dataset: The data set.
        shuffle: Whether the order is random.
        seed: The seed of the order.
        epoch: The number of the epoch, on which the order depends.
        rank: This rank.
        num_replicas: The number of ranks.
        remaining_indices: The indices that are dealt to all ranks together.
        indices: The indices that are dealt to this rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, batch_size: int | None = None) -> None:
        """Begin at the first sample of epoch 0. Call it after ``hvd.init()``.

        Args:
            dataset: The data set, which has a length.
            shuffle: Whether the order is random: that of torch's ``DistributedSampler`` with the same seed.
            seed: The seed of the order; equal on all ranks.
            batch_size: The batch size of the loader, if the sampler may rely on it.

        Raises:
            ConfigurationError: The data set has no length or no sample, or a number is out of range.
        """
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError("an hvd.elastic.ElasticSampler needs a data set with a length")
        num_samples = checks.integer("the number of samples", len(dataset), minimum=1)
        self.dataset, self.shuffle, self.seed = dataset, bool(shuffle), checks.integer("seed", seed)
        self._batch_size = None if batch_size is None else checks.integer("batch_size", batch_size, minimum=1)
        self.epoch = 0
        self._processed = np.zeros(num_samples, dtype=np.bool_)  #: By index: whether this epoch has used the sample.
        self._carried: list[int] = []  #: The samples of earlier epochs that are not used yet.
        #: The batch size of the loader, as far as ``record_batch`` has shown it since the samples were dealt.
        self._largest_batch = 0
        self._records: list[int] = []  #: What this rank has recorded, and the other ranks do not know yet.
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's samples."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Nothing happens if it is the present one, of which a new process may have a part to do.

        Call it where an epoch begins or, as Horovod demands, where one ends, with the number of the next epoch.
        """
        if epoch == self.epoch:
            return
        has_run = any(self._is_recorded) or not self.indices  # else the epoch was not begun, or nothing is recorded
        self._carried = list(self._left_out) if has_run else []
        self.epoch = checks.integer("epoch", epoch)
        self._processed[:] = False
        self._records = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch of this rank was used.

        Args:
            batch_idx: The number of the batch since the iteration over the loader began.
            batch_size: The number of its samples, or the batch size of the loader: the last batch may be smaller.
        """
        batch_idx = checks.integer("batch_idx", batch_idx, minimum=0)
        batch_size = checks.integer("batch_size", batch_size, minimum=0)
        self._largest_batch = max(self._largest_batch, batch_size)
        begin = batch_idx * self._largest_batch
        for place in range(begin, min(begin + batch_size, len(self.indices))):
            if not self._is_recorded[place]:
                self._is_recorded[place] = True
                self._record(self.indices[place])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that samples were used, by their indices in the data set.

        Raises:
            ConfigurationError: The data set has no such sample.
        """
        places: dict[int, list[int]] = {}
        for place, index in enumerate(self.indices):
            if not self._is_recorded[place]:
                places.setdefault(index, []).append(place)
        for index in map(int, indices):
            if not 0 <= index < len(self._processed):
                raise ConfigurationError(f"the data set has {len(self._processed)} samples, and none of index {index}")
            if places.get(index):
                self._is_recorded[places[index].pop(0)] = True
            self._record(index)

    @property
    def processed_indices(self) -> set[int]:
        """The samples that this epoch has used: on all ranks until the last commit, and on this rank since then."""
        return set(np.flatnonzero(self._processed).tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, ``processed_indices``, and the samples of earlier epochs that are not used yet."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices, "carried": list(self._carried)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned, and deal the samples that are left.

        Raises:
            ConfigurationError: The state has samples that the data set has not.
        """
        processed = np.zeros_like(self._processed)
        indices = np.fromiter(state_dict["processed_indices"], dtype=np.int64)
        carried = [int(index) for index in state_dict.get("carried", ())]
        if any(not 0 <= index < len(processed) for index in (*indices, *carried)):
            raise ConfigurationError(f"the saved sampler has used other samples than those of {len(processed)}")
        processed[indices] = True
        self._load(checks.integer("epoch", state_dict["epoch"]), processed, carried)

    def reset(self) -> None:
        """Deal the samples that are left to the present ranks. Called when the epoch or the ranks change."""
        group = context.group
        self.rank, self.num_replicas = group.rank, group.world_size
        order = self._order()
        left = [*self._carried, *order[~self._processed[order]].tolist()]
        per_rank = len(left) // self.num_replicas
        num_dealt = per_rank * self.num_replicas
        if self._batch_size is not None and per_rank % self._batch_size:
            num_dealt = len(left)  # some ranks have one sample more, and all have the same number of batches
        self.remaining_indices, self._left_out = left[:num_dealt], left[num_dealt:]
        self.indices: list[int] = self.remaining_indices[self.rank :: self.num_replicas]
        self._is_recorded = [False] * len(self.indices)
        self._largest_batch = self._batch_size or 0

    # --------------------------------------------------------------------------------------- what a state calls (state)

    def describe(self) -> str:
        """Return what must be equal on all ranks."""
        return (
            f"{len(self._processed)} samples, shuffle={self.shuffle}, seed={self.seed}, batch_size={self._batch_size}"
        )

    def records(self) -> list[int]:
        """Return the epoch, and the indices that this rank has recorded since ``forget_records``."""
        return [self.epoch, *self._records]

    def forget_records(self) -> None:
        """Note that all ranks know what this rank has recorded."""
        self._records = []

    def take(self, records: Sequence[int]) -> None:
        """Note what another rank has recorded: the result of its ``records``."""
        epoch, *indices = records
        if epoch == self.epoch:
            for index in indices:
                self._use(index)

    def snapshot(self) -> dict[str, Any]:
        """Return what ``state_dict`` does, in less time and memory. Nothing in it changes later."""
        return {
            "epoch": self.epoch,
            "processed": torch.from_numpy(self._processed.copy()),
            "carried": list(self._carried),
        }

    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot of this sampler, or of that of another rank.

        Raises:
            ConfigurationError: It is of a data set of another length.
        """
        processed = snapshot["processed"].numpy()
        if processed.shape != self._processed.shape:
            raise ConfigurationError(
                f"the sampler of the job has {len(processed)} samples, and that of this process {len(self._processed)}"
            )
        self._load(snapshot["epoch"], processed.copy(), list(snapshot["carried"]))

    # -----------------------------------------------------------------------------------------------------------------

    def _load(self, epoch: int, processed: np.ndarray[Any, np.dtype[np.bool_]], carried: list[int]) -> None:
        self.epoch, self._processed, self._carried, self._records = epoch, processed, carried, []
        self.reset()

    def _record(self, index: int) -> None:
        self._records.append(index)
        self._use(index)

    def _use(self, index: int) -> None:
        """Note that a sample was used: for an earlier epoch, if that lacks it, else for this one."""
        if index in self._carried:
            self._carried.remove(index)
        else:
            self._processed[index] = True

    def _order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(len(self._processed))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = torch.randperm(len(self._processed), generator=generator, dtype=torch.int64, device="cpu")
        order: np.ndarray[Any, np.dtype[np.int64]] = indices.numpy()
        return order
