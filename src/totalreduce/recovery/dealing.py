"""``Dealer``: which samples each rank gets in each step, for a number of ranks that changes within an epoch.

``sampler.ElasticSampler`` deals the samples of a data set with a length, ``stream.ElasticStream`` those of a data set
that can only be read from its beginning. Both have their position in common, which is part of the state of a job.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from totalreduce.foundation import checks, environment
from totalreduce.foundation.errors import ConfigurationError

__all__ = ["Dealer", "batches_of", "needed", "place_at_begin", "samples_of_step", "share_of", "steps_of"]

#: The signals for programs: a process that does not handle them dies by them.
_FOR_PROGRAMS: Final = (signal.SIGUSR1, signal.SIGUSR2)


def batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of a ``DataLoader``, whose workers do not die by a signal that this process handles.

    Some batch systems send SIGUSR1 and SIGUSR2 to all processes of a rank. A process that is forked or spawned begins
    with the blocked signals of the thread that starts it.
    """
    handled = [number for number in _FOR_PROGRAMS if callable(signal.getsignal(number))]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def samples_of_step(left: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """Return the number of samples that all ranks together take in the next step; 0 at the end of the epoch.

    Samples that are left at the end are dealt evenly over the last two steps, or over the last one.

    Args:
        left: The number of samples that are left. If it is at least twice the number of a full step, it does not
            matter by how much.
        batch_size: The number of samples of one rank in a full step.
        world_size: The number of ranks.
        drop_last: Whether samples that are too few for a full step are left out.
    """
    full = batch_size * world_size
    if left < full:
        return 0 if drop_last else left
    if drop_last or left >= 2 * full or left == full:
        return full
    return left if left // 2 < world_size else -(-left // 2)


def steps_of(left: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """Return the number of steps in which ``left`` samples are dealt out; arguments as for ``samples_of_step``."""
    full = batch_size * world_size
    if drop_last:
        return left // full
    num_full = max(0, left // full - 1)  # the last two steps, or the last one, share what is left
    left -= num_full * full
    first = samples_of_step(left, batch_size, world_size, drop_last=False)
    return num_full + (first > 0) + (left > first)


def place_at_begin() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks with which the job begins, as the launcher says.

    Ranks that only serve a parameter server do not count, and neither do ranks that may join later. Without a launcher,
    or with variables that ``tr.init()`` refuses, this is the only rank.
    """
    try:
        world, settings = environment.read_world(), environment.read_settings()
    except ConfigurationError:
        return 0, 1
    num_workers = world.world_size - settings.servers
    ranks = [rank for rank in settings.begin_ranks or range(num_workers) if rank < num_workers]
    return (ranks.index(world.rank), len(ranks)) if world.rank in ranks else (0, max(1, len(ranks)))


def share_of(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the samples of a rank begin among the ``total`` samples of a step, and how many they are."""
    quotient, remainder = divmod(total, world_size)
    return rank * quotient + min(rank, remainder), quotient + (rank < remainder)


class Dealer(ABC):
    """The position in the data of an epoch, and the share of this rank.

    A step may have several *parts*, blocks that work on the same samples one after the other. The number of its samples
    stays what it was in the first part, so that all parts work on the same ones when ranks are lost or join meanwhile.

    Attributes:
        epoch: The number of the epoch, on which the order depends.
        cursor: The number of samples of this epoch that steps have used.
        part: The number of parts of the present step that have taken effect.
        rank: This rank, from the last ``place``; before that, the one with which the launcher lets it begin.
        world_size: The number of ranks, in the same way.
    """

    def __init__(self, batch_size: int, *, drop_last: bool) -> None:
        """Begin at the first sample of epoch 0, with the ranks that the launcher has started."""
        self.epoch = self.cursor = self.part = 0
        self.rank, self.world_size = place_at_begin()
        self._batch_size, self._drop_last = checks.integer("batch_size", batch_size, minimum=1), bool(drop_last)
        self._steps_taken = 0  #: The number of steps of this epoch that have taken effect.
        #: The number of samples of the present step, if one of its parts has taken effect; otherwise 0.
        self._begun = 0

    @property
    @abstractmethod
    def next_total(self) -> int:
        """The number of samples that all ranks together take in the next step; 0 at the end of the epoch."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the epoch has no further step."""

    @abstractmethod
    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batch of each step from the position to the end.

        In a step in which this rank has no sample (``next_share`` is 0) the batch is the step's first sample, which
        counts on another rank: the rank can do what the others do, and its gradients do not count.

        The caller moves the position on (``advance``), or calls ``deal`` anew after the ranks have changed.

        Args:
            batches: The iterator of the ``DataLoader``, made after the last ``place``.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return what must be equal on all ranks."""

    @abstractmethod
    def check_loader(self, user: str, loader: object) -> None:
        """Check that a ``DataLoader`` makes the batches that this object deals.

        Args:
            user: The name of the method that needs it, for the error.
            loader: What the program has passed.

        Raises:
            ConfigurationError: It does not.
        """

    @abstractmethod
    def _left_after_step(self) -> int | None:
        """Return the number of samples that are left after the next step; ``None``: many, or unknown."""

    def has_samples_for(self, world_size: int, num_parts: int) -> bool:
        """Whether each of so many ranks has samples in all blocks that follow the present one.

        Args:
            world_size: The number of ranks.
            num_parts: The number of parts of the present step; 0: the present block works on no samples.
        """
        is_last_part = num_parts > 0 and self.part + 1 >= num_parts
        if not is_last_part and 0 < self.next_total < world_size:
            return False
        left = self._left_after_step()
        return not left or left >= world_size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Nothing happens if it is the present one, which a rank that joins may be in the middle of."""
        if epoch != self.epoch:
            self.load_state_dict({"epoch": epoch, "cursor": 0})

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
    def next_share(self) -> int:
        """The number of samples that this rank takes in the next step."""
        return share_of(self.next_total, self.rank, self.world_size)[1]

    def advance(self, num_parts: int = 1) -> None:
        """Note that a step has used its samples; with several parts, that one of them has taken effect."""
        if self.part + 1 < num_parts:
            self._begun, self.part = self.next_total, self.part + 1
        else:
            self.cursor += self.next_total
            self._steps_taken += 1
            self._begun = self.part = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position: epoch, cursor, steps taken, and for a step that has begun its part and its samples."""
        position = {"epoch": self.epoch, "cursor": self.cursor, "part": self.part, "begun": self._begun}
        return {**position, "steps": self._steps_taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the position of ``state_dict``; ``part``, ``begun`` and ``steps`` may be left out.

        Raises:
            ConfigurationError: The position is beyond the data set.
        """
        keys = ("cursor", "part", "begun", "steps")
        numbers = {key: checks.integer(key, state.get(key, 0), minimum=0) for key in keys}
        epoch = checks.integer("epoch", state["epoch"])
        self._check_position(numbers["cursor"] + numbers["begun"])
        self.epoch, self.cursor, self.part, self._begun, self._steps_taken = epoch, *numbers.values()
        if "steps" not in state:  # the library has not always counted them
            self._steps_taken = -(-self.cursor // (self._batch_size * self.world_size))

    def _steps_of_epoch(self, num_samples: int) -> int:
        """Return the number of steps of an epoch of so many samples: those taken, and those left for the present ranks.

        The number is the same on all ranks, and changes within an epoch only when the number of ranks does.
        """
        left = num_samples - self.cursor - self._begun
        planned = steps_of(left, self._batch_size, self.world_size, drop_last=self._drop_last)
        return self._steps_taken + bool(self._begun) + planned

    def _check_position(self, num_used: int) -> None:  # noqa: B027  (a stream cannot know)
        """Raise ``ConfigurationError`` if the epoch is known to have fewer samples."""


def needed(dealer: Dealer | None, user: str, loader: object = None) -> Dealer:
    """Return the sampler or stream of a state, for a method ``user`` that needs one. Raises ``ConfigurationError``."""
    if dealer is None:
        raise ConfigurationError(f"{user} needs a tr.ElasticSampler in the state: tr.State(..., sampler=sampler)")
    if loader is not None:
        dealer.check_loader(user, loader)
    return dealer
