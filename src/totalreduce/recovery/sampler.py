"""``ElasticSampler``: which samples each rank trains on, for a number of ranks that changes within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, final

import torch
from torch.utils.data import Sampler

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.recovery.dealing import Dealer, samples_of_step, share_of

__all__ = ["ElasticSampler"]


@final
class ElasticSampler(Dealer, Sampler[list[int]]):
    """Deals every sample of an epoch out exactly once, whatever ranks are lost and join meanwhile.

    It is the ``batch_sampler`` of a ``DataLoader``, and part of a ``tr.State``::

        sampler = tr.ElasticSampler(dataset, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)

    All ranks have the same order of the samples. In each step the ranks take the next samples together, and each gets
    its share of them: ``batch_size`` samples. Samples that are left at the end of the epoch are dealt evenly over its
    last two steps, or over the last one, whose shares then have one sample more. So all ranks have the same number of
    steps, and a share of every step. (The exception: ranks have joined, and fewer samples are left than there are
    ranks. Then the ranks without a sample work on one of another rank in the last step, and their gradients do not
    count; ``job.batch_counts`` tells.)

    ``job.step()`` advances ``cursor`` when a step has taken effect. So the samples of a step that is repeated, with
    other ranks or with the same, are dealt out again.

    For data sets without a length there is ``tr.ElasticStream``.

    Attributes:
        epoch: The number of the epoch, on which the order depends.
        cursor: The number of samples of this epoch that steps have used.
        part: The number of parts of the present step that have taken effect (``job.parts``).
        rank: This rank, from the last ``place``; before that, the one with which the launcher lets it begin.
        world_size: The number of ranks, in the same way.
    """

    def __init__(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        """Begin at the first sample of epoch 0, with the ranks that the launcher has started.

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
                "a tr.ElasticSampler needs a data set with a length: use tr.ElasticStream for an iterable data set"
            )
        num_samples = dataset if isinstance(dataset, int) else len(dataset)
        super().__init__(batch_size, drop_last=drop_last)
        self._num_samples = checks.integer("the number of samples", num_samples, minimum=1)
        self._shuffle, self._seed = bool(shuffle), checks.integer("seed", seed)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, step by step, from the cursor to the end of the epoch."""
        order = self._order()
        rank, world_size = self.rank, self.world_size
        for cursor, total in self._steps():
            begin, num_mine = share_of(total, rank, world_size)
            first = cursor + (begin if num_mine else 0)
            yield order[first : first + max(1, num_mine)].tolist()

    def __len__(self) -> int:
        """Return the number of steps of this epoch, which is the number of batches of this rank in it.

        It is the same on all ranks, before ``tr.recoverable`` and in it, at the begin of an epoch and later. When the
        number of ranks changes, it becomes the number of steps taken and of those that the present ranks will take.
        """
        return self._steps_of_epoch(self._num_samples)

    @property
    def next_total(self) -> int:
        """The number of samples that all ranks together take in the next step; 0 at the end of the epoch."""
        return self._begun or self._total(self.cursor)

    @property
    def is_over(self) -> bool:
        """Whether the epoch has no further step."""
        return self.next_total == 0

    @property
    def left(self) -> int:
        """The number of samples of the epoch that no step has used."""
        return self._num_samples - self.cursor

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batch of each step; see ``Dealer.deal``."""
        while self.next_total:
            yield next(batches)

    def describe(self) -> str:
        """Return what must be equal on all ranks."""
        return (
            f"sampler: {self._num_samples} samples, batches of {self._batch_size}, shuffle={self._shuffle}, "
            f"seed={self._seed}, drop_last={self._drop_last}"
        )

    def check_loader(self, user: str, loader: object) -> None:
        """Check that this sampler is the ``batch_sampler`` of a ``DataLoader``; see ``Dealer.check_loader``."""
        if getattr(loader, "batch_sampler", None) is not self:
            raise ConfigurationError(
                f"{user} needs a DataLoader whose batch_sampler is the sampler of the state: "
                "DataLoader(dataset, batch_sampler=sampler)"
            )

    def _left_after_step(self) -> int:
        return self.left - self.next_total

    def _check_position(self, num_used: int) -> None:
        if num_used > self._num_samples:
            raise ConfigurationError(
                f"the saved sampler has used {num_used} samples of its epoch, and the data set has {self._num_samples}"
            )

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples, dtype=torch.int64, device="cpu")
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self.epoch) % (1 << 63))
        return torch.randperm(self._num_samples, generator=generator, dtype=torch.int64, device="cpu")

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Yield the cursor and the number of samples of each step that is left, as things are when this is called."""
        cursor, total = self.cursor, self.next_total
        while total:
            yield cursor, total
            cursor += total
            total = self._total(cursor)

    def _total(self, cursor: int) -> int:
        """Return the number of samples that all ranks take in the step that begins at the cursor."""
        return samples_of_step(self._num_samples - cursor, self._batch_size, self.world_size, drop_last=self._drop_last)
