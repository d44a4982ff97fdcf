"""``ElasticSampler``: which samples each rank trains on, for a number of ranks that changes within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import final

import torch
from torch.utils.data import Sampler

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["ElasticSampler", "needed"]


@final
class ElasticSampler(Sampler[list[int]]):
    """Deals every sample of an epoch out exactly once, whatever ranks are lost and join meanwhile.

    It is the ``batch_sampler`` of a ``DataLoader``, and part of a ``tr.State``::

        sampler = tr.ElasticSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)

    All ranks have the same order of the samples. In each step the ranks take the next samples together, and each gets
    its share of them: ``batch_size`` samples. Samples that are left at the end of the epoch are dealt evenly over its
    last two steps, or over the last one, whose shares then have one sample more. So all ranks have the same number of
    steps, and a share of every step. (The exception: ranks have joined, and fewer samples are left than there are
    ranks. Then ``job.batches`` takes part in the last step for the ranks without a sample.)

    ``job.step()`` advances ``cursor`` when a step has taken effect. So the samples of a step that is repeated, with
    other ranks or with the same, are dealt out again.

    Attributes:
        epoch: The number of the epoch, of which the order depends.
        cursor: The number of samples of this epoch that steps have used.
        rank: This rank, from the last ``place``.
        world_size: The number of ranks.
    """

    def __init__(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        """Begin at the first sample of epoch 0, with one rank.

        Args:
            dataset: The data set, which has a length; or the number of samples.
            batch_size: The number of samples of each rank in each step.
            shuffle: Whether the order is random. It depends on ``seed`` and the epoch alone.
            seed: The seed of the order; equal on all ranks.
            drop_last: Leave the samples at the end of an epoch out that are too few for full batches on all ranks.

        Raises:
            ConfigurationError: The data set has no length or no sample, or ``batch_size`` is not positive.
        """
        if not isinstance(dataset, int) and not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                "an ElasticSampler needs a data set with a length; an iterable data set cannot be dealt out again"
            )
        num_samples = dataset if isinstance(dataset, int) else len(dataset)
        self._num_samples = checks.integer("the number of samples", num_samples, minimum=1)
        self._batch_size = checks.integer("batch_size", batch_size, minimum=1)
        self._shuffle, self._seed, self._drop_last = bool(shuffle), checks.integer("seed", seed), bool(drop_last)
        self.epoch = self.cursor = self.rank = 0
        self.world_size = 1

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, step by step, from the cursor to the end of the epoch."""
        order = self._order()
        cursor, rank, world_size = self.cursor, self.rank, self.world_size
        while total := self._total(cursor):
            begin = cursor + sum(_share(total, other, world_size) for other in range(rank))
            num_mine = _share(total, rank, world_size)
            if num_mine:
                yield order[begin : begin + num_mine].tolist()
            cursor += total

    def __len__(self) -> int:
        """Return the number of steps from the cursor to the end of the epoch."""
        cursor = self.cursor
        steps = 0
        while total := self._total(cursor):
            cursor += total
            steps += 1
        return steps

    @property
    def next_total(self) -> int:
        """The number of samples that all ranks together take in the next step; 0 at the end of the epoch."""
        return self._total(self.cursor)

    @property
    def next_share(self) -> int:
        """The number of samples that this rank takes in the next step."""
        return _share(self.next_total, self.rank, self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Nothing happens if it is the present one, which a rank that joins may be in the middle of."""
        if epoch != self.epoch:
            self.epoch, self.cursor = checks.integer("epoch", epoch), 0

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, and begin each. The first epoch is 0."""
        for epoch in range(self.epoch, checks.integer("the number of epochs", count)):
            self.set_epoch(epoch)
            yield epoch

    def place(self, rank: int, world_size: int) -> None:
        """Set the rank and the number of ranks. ``tr.recoverable`` calls it; without that, call it once."""
        self.rank, self.world_size = rank, world_size

    @property
    def place_now(self) -> tuple[int, int]:
        """The rank and the number of ranks, on which the batches depend."""
        return self.rank, self.world_size

    @property
    def left(self) -> int:
        """The number of samples of the epoch that no step has used."""
        return self._num_samples - self.cursor

    def advance(self) -> None:
        """Note that a step has used its samples."""
        self.cursor += self.next_total

    def describe(self) -> str:
        """Return what must be equal on all ranks."""
        return (
            f"sampler: {self._num_samples} samples, batches of {self._batch_size}, shuffle={self._shuffle}, "
            f"seed={self._seed}, drop_last={self._drop_last}"
        )

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the cursor."""
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the epoch and the cursor of ``state_dict``.

        Raises:
            ConfigurationError: The cursor is beyond the data set.
        """
        epoch, cursor = checks.integer("epoch", state["epoch"]), checks.integer("cursor", state["cursor"])
        if not 0 <= cursor <= self._num_samples:
            raise ConfigurationError(
                f"the saved sampler has used {cursor} samples of its epoch, and the data set has {self._num_samples}"
            )
        self.epoch, self.cursor = epoch, cursor

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples)
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self.epoch) % (1 << 63))
        return torch.randperm(self._num_samples, generator=generator)

    def _total(self, cursor: int) -> int:
        """Return the number of samples that all ranks take in the step that begins at the cursor."""
        left, full = self._num_samples - cursor, self._batch_size * self.world_size
        if left < full:
            return 0 if self._drop_last else left
        if self._drop_last or left >= 2 * full or left == full:
            return full
        return left if left // 2 < self.world_size else -(-left // 2)


def _share(total: int, rank: int, world_size: int) -> int:
    return total // world_size + (rank < total % world_size)


def needed(sampler: ElasticSampler | None, user: str, loader: object = None) -> ElasticSampler:
    """Return the sampler of a state, for a method ``user`` that needs one.

    Args:
        sampler: The sampler, if the state has one.
        user: The name of the method, for the error.
        loader: A ``DataLoader`` that must use the sampler; ``None``: the method takes none.

    Raises:
        ConfigurationError: The state has no sampler, or the loader uses another one.
    """
    if sampler is None:
        raise ConfigurationError(f"{user} needs a tr.ElasticSampler in the state: tr.State(..., sampler=sampler)")
    if loader is not None and getattr(loader, "batch_sampler", None) is not sampler:
        raise ConfigurationError(
            f"{user} needs a DataLoader whose batch_sampler is the sampler of the state: "
            "DataLoader(dataset, batch_sampler=sampler)"
        )
    return sampler
