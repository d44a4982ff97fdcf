"""``ElasticStream``: deals the samples of a data set that can only be read from its beginning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

import torch.utils.data._utils.worker as data_worker
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.recovery.dealing import Dealer, samples_of_step, share_of

__all__ = ["ElasticStream", "Seekable"]


@runtime_checkable
class Seekable(Protocol):
    """A data set that an ``ElasticStream`` need not read from the beginning to come to a position."""

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the samples of an epoch from the one with the index ``start`` on.

        They are the same in every process, and whenever it is called: ``iterate(e, s)`` returns what ``iterate(e, 0)``
        returns after ``s`` samples.
        """
        ...


@runtime_checkable
class _HasEpochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Dealt:
    """What a worker of the ``DataLoader`` hands over for one step."""

    total: int  #: The number of samples of all ranks.
    left: int | None  #: The number of samples after the step; ``None``: more than could be seen.
    share: int  #: The number of samples of this rank.
    batch: Any  #: These samples, collated; ``None`` without any.

    def pin_memory(self) -> _Dealt:
        """Return the same with the batch in pinned memory; a ``DataLoader`` with ``pin_memory=True`` calls it."""
        return replace(self, batch=pin_memory(self.batch))  # type: ignore[no-untyped-call]


@final
class ElasticStream(Dealer, IterableDataset[Any]):
    """Deals every sample of an iterable data set out exactly once in an epoch, whatever ranks are lost and join.

    It is the data set of a ``DataLoader``, and takes the place of the sampler in a ``tr.State``::

        stream = tr.ElasticStream(records, batch_size=32, collate=decode_and_stack)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        state = tr.State(model=model, optimizer=optimizer, sampler=stream)

    Every rank reads all samples, and keeps those of its share. With W workers each worker reads all samples, too, and
    makes the batches of every W-th step. So the data set yields what is cheap to read, such as records or names of
    files, and ``collate`` does the expensive work, such as decoding: it sees only the samples of this rank.

    The data set is an object that can be iterated again and again, and yields the same samples in the same order on
    every rank and each time. Its order may depend on the epoch: a method ``set_epoch(epoch)`` is called before each
    iteration, if there is one. The data set must not deal its samples out to ranks by itself. Nor does it deal them out
    to workers: ``torch.utils.data.get_worker_info()`` returns ``None`` in its iteration.

    A process that goes on in the middle of an epoch, because the ranks have changed, reads the samples from the
    beginning and passes over those that were used. A data set with a method ``iterate(epoch, start)`` spares it that
    (see ``Seekable``).

    The samples of a step are dealt as by ``tr.ElasticSampler``: those that are left at the end are dealt evenly over
    the last two steps, or over the last one. So each process has the samples of two steps of all ranks in memory.

    Attributes:
        epoch: The number of the epoch.
        cursor: The number of samples of this epoch that steps have used.
        part: The number of parts of the present step that have taken effect (``job.parts``).
        rank: This rank, from the last ``place``; before that, the one with which the launcher lets it begin.
        world_size: The number of ranks, in the same way.
    """

    def __init__(
        self,
        dataset: Iterable[Any] | Seekable,
        batch_size: int,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
    ) -> None:
        """Begin at the first sample of epoch 0, with the ranks that the launcher has started. Nothing is read.

        Args:
            dataset: The data set: an ``IterableDataset``, or any object that can be iterated again and again.
            batch_size: The number of samples of each rank in each step.
            collate: Makes the batch of a list of samples.
            drop_last: Leave the samples at the end of an epoch out that are too few for full batches on all ranks.

        Raises:
            ConfigurationError: The data set cannot be iterated, or only once; or ``batch_size`` is not positive.
        """
        super().__init__(batch_size, drop_last=drop_last)
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset | Seekable):
            raise ConfigurationError(
                f"a tr.ElasticStream reads its data set again after a loss, and a {type(dataset).__name__} can be read "
                "only once: pass an object whose __iter__() begins anew, or that has a method iterate(epoch, start)"
            )
        if not isinstance(dataset, Iterable | Seekable):
            raise ConfigurationError(f"a tr.ElasticStream needs an iterable data set, not a {type(dataset).__name__}")
        self._dataset, self._collate = dataset, collate
        self._is_over = False
        #: Of the step whose batch this process has got last: its samples, and those after it.
        self._total = 0
        self._left: int | None = None

    def __iter__(self) -> Iterator[_Dealt]:
        """Yield the batches of this rank, in worker w of W those of the steps w, w + W, w + 2 W and so on.

        Raises:
            ConfigurationError: The data set has fewer samples than were used already.
        """
        worker = get_worker_info()
        own, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        data_worker._worker_info = None  # else data sets deal their samples out to the workers, a second time
        for index, (total, left, share, samples) in enumerate(self._steps()):
            if index % num_workers == own:
                yield _Dealt(total, left, share, self._collate(samples))

    def __len__(self) -> int:
        """Return the number of steps of this epoch, as ``tr.ElasticSampler`` does, if the data set has a length.

        Raises:
            TypeError: It has none.
        """
        return self._steps_taken if self._is_over else self._steps_of_epoch(len(self._dataset))  # type: ignore[arg-type]

    @property
    def next_total(self) -> int:
        """The number of samples that all ranks together take in the present step; 0 at the end of the epoch."""
        return self._begun or self._total

    @property
    def is_over(self) -> bool:
        """Whether this process has seen the end of the epoch."""
        return self._is_over

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batch of each step; see ``Dealer.deal``."""
        for dealt in batches:
            self._total, self._left = dealt.total, dealt.left
            yield dealt.batch
        self._end()

    def describe(self) -> str:
        """Return what must be equal on all ranks."""
        kind = type(self._dataset).__qualname__
        return f"stream: {kind}, batches of {self._batch_size}, drop_last={self._drop_last}"

    def check_loader(self, user: str, loader: object) -> None:
        """Check that a ``DataLoader`` hands the batches of this stream over; see ``Dealer.check_loader``."""
        if not isinstance(loader, DataLoader) or loader.dataset is not self or loader.batch_size is not None:
            raise ConfigurationError(
                f"{user} needs a DataLoader whose data set is the stream of the state, which makes the batches itself: "
                "DataLoader(stream, batch_size=None)"
            )
        if loader.persistent_workers or not loader.in_order:
            raise ConfigurationError(
                f"{user} needs a DataLoader with persistent_workers=False and in_order=True: workers that stay would "
                "go on at an old position after the ranks have changed"
            )

    def state_dict(self) -> dict[str, int]:
        """Return the position, and whether the end of the epoch was seen."""
        return {**super().state_dict(), "is_over": int(self._is_over)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the position of ``state_dict``; all but ``epoch`` may be left out."""
        super().load_state_dict(state)
        if state.get("is_over", 0):
            self._end()
        else:
            self._is_over = False

    def _end(self) -> None:
        self._is_over, self._total, self._left = True, 0, 0

    def _left_after_step(self) -> int | None:
        return self._left

    def _steps(self) -> Iterator[tuple[int, int | None, int, list[Any]]]:
        """Yield of each step the samples of all ranks, those left behind it, those of this rank, and its batch."""
        rank, world_size, cursor, total = self.rank, self.world_size, self.cursor, self._begun
        unread = self._from(self.epoch, cursor)
        num_ahead = 2 * self._batch_size * world_size
        ahead = list(itertools.islice(unread, max(num_ahead, total)))
        if len(ahead) < total:
            raise _shorter(self.epoch, cursor + len(ahead), cursor + total)
        while total := total or samples_of_step(len(ahead), self._batch_size, world_size, drop_last=self._drop_last):
            begin, num_mine = share_of(total, rank, world_size)
            mine = ahead[begin : begin + num_mine] or ahead[:1]
            ahead = ahead[total:]
            ahead += itertools.islice(unread, max(0, num_ahead - len(ahead)))
            yield total, None if len(ahead) == num_ahead else len(ahead), num_mine, mine
            total = 0

    def _from(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the samples of an epoch from an index on."""
        if isinstance(self._dataset, Seekable):
            return iter(self._dataset.iterate(epoch, start))
        if isinstance(self._dataset, _HasEpochs):
            self._dataset.set_epoch(epoch)
        samples = iter(self._dataset)
        num_used = sum(1 for _ in itertools.islice(samples, start))
        if num_used < start:
            raise _shorter(epoch, num_used, start)
        return samples


def _shorter(epoch: int, found: int, used: int) -> ConfigurationError:
    return ConfigurationError(
        f"the data set yields {found} samples in epoch {epoch} now, and {used} were dealt out before: a "
        "tr.ElasticStream needs a data set that yields the same samples each time it is read"
    )
