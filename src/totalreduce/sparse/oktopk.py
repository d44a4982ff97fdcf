"""Ok-Topk: a sparse allreduce that sends O(k) bytes per rank for any number of ranks.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, after its description;
docs/design/0007-sparse.md lists the differences and their reasons. The method has five phases:

1. *Local selection.* The k largest elements of residual plus gradient (``selector``).
2. *Partition.* The bucket is cut into one region per rank, so that the selections of all ranks have equally many bytes
   in each region. Every rank contributes evenly spaced samples of its indices; their weighted quantiles are the cuts.
   The partition is computed again after ``partition_interval`` steps, or when a rank would receive a tenth more than
   the mean.
3. *Split and reduce.* Each rank sends every region's elements to the region's owner, which adds them in the order of
   the ranks.
4. *Global selection.* Gathered histograms of the reduced magnitudes give the magnitude that k elements of all regions
   reach, and the number of these elements in each region.
5. *Balance and gather.* Owners with more than their share of these elements send some to other ranks (``balance``), and
   all ranks gather all elements.

Elements that were selected on a rank and are not in the result stay in its residual, and so do rounding errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.codecs import blocks
from totalreduce.foundation import checks
from totalreduce.kernels import selection as selecting
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Alltoall
from totalreduce.sparse.regions import RegionSession, reduce_region, to_owners
from totalreduce.sparse.selector import Selection
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import TopkSettings
from totalreduce.sparse.threshold import GlobalThreshold

__all__ = ["OkTopk", "OkTopkSession"]

#: The number of samples of every rank's indices: the error of a cut is at most a rank's share over this number.
_SAMPLES = 256
#: Partition again if a rank would receive this multiple of the mean, and also this multiple of the imbalance after the
#: last partition, unless the mean is only a few bytes.
_IMBALANCE_MAX = 1.1
_WORSE = 1.05
_FEW_BYTES = 2048
#: Up to this number of ranks exchange all sizes, and partition again before anything is sent. More ranks do so in a
#: later step, at least ``_PARTITION_STEPS_MIN`` steps after the last partition.
_RANKS_WITH_ALL_SIZES = 32
_PARTITION_STEPS_MIN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OkTopk(TopkSettings):
    """Settings of Ok-Topk; see ``TopkSettings`` for the others.

    Attributes:
        threshold_interval: The number of steps after which the global threshold is computed again. In the steps
            between, the last one is used, which saves a small exchange for each bucket; all elements that reach it are
            applied.
        partition_interval: The largest number of steps after which the partition is computed again.
        balance: Balance before elements are gathered if an owner has more than this multiple of its share.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "oktopk"

    threshold_interval: int = 1
    partition_interval: int = 64
    balance: float = 1.5

    def __post_init__(self) -> None:
        TopkSettings.__post_init__(self)
        checks.integer_fields(self, "threshold_interval", "partition_interval", minimum=1)
        checks.real_field(self, "balance", minimum=1)

    def session(self, shape: BucketShape, rank: int, world_size: int) -> OkTopkSession:
        return OkTopkSession(self, shape, rank, world_size)


@final
class OkTopkSession(RegionSession[OkTopk]):
    """The session of Ok-Topk."""

    def __init__(self, settings: OkTopk, shape: BucketShape, rank: int, world_size: int) -> None:
        super().__init__(settings, shape, rank, world_size)
        self._threshold = GlobalThreshold()
        #: The first index of each region, and the end of the last one; ``None``: the next step computes them.
        self._cuts: list[int] | None = None
        self._partitioned_at = 0
        self._received = 0
        self._best = 1.0  # the imbalance right after the last partition

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        selection, kind, size = self._selection, self._settings.values, self._world_size
        sent = blocks.rounded(selection.values, kind)
        cuts, fresh = self._cuts, False
        while True:
            if cuts is None:
                sampled = yield Allgather(self._samples(selection).view(np.uint8), [4 * _SAMPLES] * size)
                cuts, fresh = self._cut(np.concatenate(sampled).view(np.int32)), True
            parts = to_owners(selection.indices, sent, cuts, self._rank, kind)
            greetings = yield from self._greet(present, self._sizes_to_send(parts))
            if not greetings.finite:
                return None
            sizes, loads = self._received_sizes(greetings.numbers)
            uneven = self._uneven(loads, fresh=fresh)
            if fresh or not uneven or size > _RANKS_WITH_ALL_SIZES:
                break
            cuts = None
        received = yield Alltoall(parts, sizes.tolist())
        indices, values = reduce_region(received, selection.indices, sent, cuts, self._rank)
        del parts, received, sent  # other buckets are in flight, too, and these lists are large
        bound, counts = yield from self._agree(values)
        kept = selecting.keep_largest(indices, values, bound - 1, 0)
        indices, exact = indices[:kept], values[:kept]
        applied = blocks.rounded(exact, kind)
        keep_own = functools.partial(self._keep_own, cuts, indices, exact - applied)
        all_indices, all_values = yield from self._gather(indices, applied, counts, cuts, keep_own)
        self._keep_others(cuts, all_indices)
        self._look_ahead(cuts, int(sizes.sum()), fresh=fresh, uneven=uneven)
        return Update(greetings.present, all_indices, all_values)

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps, the partition and the threshold."""
        return {
            **super().state(),
            "partitioned_at": self._partitioned_at,
            "cuts": self._cuts or [],
            "threshold": self._threshold.bound,
            "received": self._received,
            "best": self._best,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the number of steps, the partition and the threshold."""
        super().load_state(state)
        self._partitioned_at = state["partitioned_at"]
        cuts = list(state["cuts"])
        self._cuts = cuts if len(cuts) == self._world_size + 1 else None  # other ranks, other regions
        self._threshold.bound, self._received, self._best = state["threshold"], state["received"], state["best"]

    def _agree(self, values: Array) -> Generator[Action, Any, tuple[int, Array]]:
        fresh = self._steps % self._settings.threshold_interval == 0
        return (yield from self._threshold.agree(values, self.report.k, self._world_size, fresh=fresh))

    def _gather(
        self, indices: Array, values: Array, counts: Array, cuts: list[int], meanwhile: Callable[[], None]
    ) -> Generator[Action, Any, tuple[Array, Array]]:
        size, begins, ends, kind = self._world_size, list(cuts[:-1]), list(cuts[1:]), self._settings.values
        total = int(counts.sum())
        if size > 1 and counts.max() * size > self._settings.balance * total:
            indices, values = yield from self._balance(indices, values, counts)
            counts = np.diff(_shares(total, size))
            begins, ends = [0] * size, [self._num_elements] * size
        lengths = [
            blocks.block_bytes_max(int(count), end - begin, kind)
            for count, begin, end in zip(counts, begins, ends, strict=True)
        ]
        own, begin, end = lengths[self._rank], begins[self._rank], ends[self._rank]
        block = blocks.pack(indices, values, begin, end, kind, size=own)
        gathered = yield Allgather(block, lengths, meanwhile)
        lists = [(indices, values) if rank == self._rank else other for rank, other in enumerate(gathered)]
        return blocks.unpack_all(lists, list(zip(begins, ends, strict=True)))[:2]

    def _balance(self, indices: Array, values: Array, counts: Array) -> Generator[Action, Any, tuple[Array, Array]]:
        """Exchange elements, so that every rank has an equal share of all of them, in the order of indices."""
        size, rank, n, kind = self._world_size, self._rank, self._num_elements, self._settings.values
        ends = np.concatenate([[0], np.cumsum(counts)])
        shares = _shares(int(counts.sum()), size)

        def overlap(owner: int, target: int) -> tuple[int, int]:
            low, high = max(ends[owner], shares[target]), min(ends[owner + 1], shares[target + 1])
            return int(low - ends[owner]), int(max(low, high) - ends[owner])

        parts, lengths, own = [], [], slice(0, 0)
        for target in range(size):
            low, high = overlap(rank, target)
            if target == rank:
                own = slice(low, high)
                parts.append(np.empty(0, np.uint8))
            else:
                length = blocks.block_bytes_max(high - low, n, kind)
                parts.append(blocks.pack(indices[low:high], values[low:high], 0, n, kind, size=length))
            low, high = overlap(target, rank)
            lengths.append(0 if target == rank else blocks.block_bytes_max(high - low, n, kind))
        received = yield Alltoall(parts, lengths)
        lists = [(indices[own], values[own]) if source == rank else block for source, block in enumerate(received)]
        return blocks.unpack_all(lists, [(0, n)] * size)[:2]

    def _samples(self, selection: Selection) -> Array:
        """Return evenly spaced samples of the selected indices; -1 if there are fewer.

        Each rank takes other positions, so that the samples of a thousand ranks do not cluster.
        """
        chosen = selection.indices
        samples = np.full(_SAMPLES, -1, np.int32)
        count = min(_SAMPLES, chosen.size)
        shift = (self._rank + 0.5) / self._world_size
        samples[:count] = chosen[((np.arange(count) + shift) * chosen.size / max(count, 1)).astype(np.int64)]
        return samples

    def _cut(self, samples: Array) -> list[int]:
        per_sample = max(1.0, self.report.k / _SAMPLES)
        value_bits = 8 * blocks.value_bytes(1, self._settings.values)
        return _quantiles(samples, self._num_elements, self._world_size, per_sample, value_bits)

    def _sizes_to_send(self, parts: Sequence[Array]) -> list[list[int]]:
        """Return the sizes of all parts for each rank; with many ranks only its part's, and the bytes received last."""
        sizes = [part.size for part in parts]
        if self._world_size <= _RANKS_WITH_ALL_SIZES:
            return [sizes] * self._world_size
        return [[length, self._received] for length in sizes]

    def _received_sizes(self, numbers: Array) -> tuple[Array, Array]:
        """Return the sizes of the parts for this rank, and the bytes that each rank receives or received last."""
        table = numbers.astype(np.int64)
        if self._world_size <= _RANKS_WITH_ALL_SIZES:
            return table[:, self._rank], table.sum(axis=0)
        return table[:, 0], table[:, 1]

    def _uneven(self, loads: Array, *, fresh: bool) -> bool:
        """Whether the regions should be cut again; all ranks decide alike."""
        mean = float(loads.mean())
        imbalance = self.report.imbalance = float(loads.max()) / mean if mean else 1.0
        if fresh:
            self._best = imbalance
        return mean > _FEW_BYTES and imbalance > max(_IMBALANCE_MAX, _WORSE * self._best)

    def _look_ahead(self, cuts: list[int], received: int, *, fresh: bool, uneven: bool) -> None:
        """Decide whether the next step cuts the regions again."""
        self._received = received
        if fresh:
            self._cuts, self._partitioned_at = cuts, self._steps
        age = self._steps + 1 - self._partitioned_at
        late = self._world_size > _RANKS_WITH_ALL_SIZES and uneven and age >= _PARTITION_STEPS_MIN
        if age >= self._settings.partition_interval or late:
            self._cuts = None


def _quantiles(samples: Array, num_elements: int, world_size: int, per_sample: float, value_bits: int) -> list[int]:
    """Cut the bucket into regions with equal numbers of bits: an index has fewer bits where more are selected.

    A sample of any rank stands for ``per_sample`` selected elements of that rank.
    """
    pooled = np.sort(samples[samples >= 0], axis=None)
    last = pooled.size - 1
    if last < 0:
        return [num_elements * rank // world_size for rank in range(world_size + 1)]
    # The distance between elements of one rank, around each sample. The ranks' samples may cluster.
    places = np.arange(pooled.size)
    low, high = np.maximum(places - world_size, 0), np.minimum(places + world_size, last)
    spacing = (pooled[high] - pooled[low]) / np.maximum(high - low, 1) * (world_size / per_sample)
    # 1.5 + log2(1 + spacing), but in arithmetic that gives the same bits on all machines.
    fraction, exponent = np.frexp(1.0 + spacing)
    bits = np.cumsum(exponent + (2.0 * fraction - 2.0) + 1.5 + value_bits)
    cuts = np.searchsorted(bits, [bits[-1] * rank / world_size for rank in range(1, world_size)])
    return [0, *pooled[cuts].tolist(), num_elements]


def _shares(total: int, world_size: int) -> list[int]:
    return [total * rank // world_size for rank in range(world_size + 1)]
