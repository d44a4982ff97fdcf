"""Ok-Topk: a sparse allreduce that sends O(k) bytes per rank, whatever the number of ranks.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, after its description; what
is done otherwise, and why, is in docs/design/0007-sparse.md. Its five phases:

1. *Local selection.* The k largest elements of residual plus gradient (``selector``).
2. *Partition.* The bucket is cut into one region per rank, so that all ranks' selections together take equally many
   bytes in each. Every rank contributes evenly spaced samples of its indices; their weighted quantiles are the cuts.
   It is done again after ``partition_interval`` steps, or when a rank would receive a tenth more than the mean.
3. *Split and reduce.* Each rank sends every region's elements to the region's owner, who adds them in the order of
   the ranks.
4. *Global selection.* Histograms of the reduced magnitudes, gathered, say which magnitude k elements reach over all
   regions, and how many there are in each.
5. *Balance and gather.* Owners with more than their share of those hand some on (``balance``), and everybody gathers
   all.

What was chosen here and is not in the result stays in the residual, like what rounding cut off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.kernels import selection as selecting
from totalreduce.sparse import blocks
from totalreduce.sparse.actions import Action, Allgather, Alltoall, Array
from totalreduce.sparse.regions import RegionSession, reduce_region, to_owners
from totalreduce.sparse.selector import Selection
from totalreduce.sparse.session import BucketShape, Update
from totalreduce.sparse.settings import TopkSettings
from totalreduce.sparse.threshold import GlobalThreshold

__all__ = ["OkTopk", "OkTopkSession"]

#: So many samples of every rank's indices: a cut is off by a rank's share over this, at most.
_SAMPLES = 256
#: Partition again where a rank would receive so many times the mean, and so much more than after the last partition;
#: but not for a few bytes.
_IMBALANCE_MAX = 1.1
_WORSE = 1.05
_FEW_BYTES = 2048
#: Up to so many ranks tell each other all sizes, and partition again before anything is sent. More ranks do so in the
#: step after the next one, and not within so many steps of the last time.
_TOLD_RANKS = 32
_PATIENCE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OkTopk(TopkSettings):
    """Settings of Ok-Topk; see ``TopkSettings`` for the others.

    Attributes:
        threshold_interval: The global threshold is found anew every so many steps. In between the last one is used,
            which saves a small exchange for each bucket, and as many elements are applied as reach it.
        partition_interval: The partition is found anew after so many steps, at the latest.
        balance: Hand elements on before they are gathered where an owner has more than this times its share.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "oktopk"

    threshold_interval: int = 1
    partition_interval: int = 64
    balance: float = 1.5

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        TopkSettings.__post_init__(self)
        checks.whole_fields(self, "threshold_interval", "partition_interval", minimum=1)
        checks.real_field(self, "balance", minimum=1)

    def session(self, shape: BucketShape, rank: int, world_size: int) -> OkTopkSession:
        """The state of one bucket on one rank."""
        return OkTopkSession(self, shape, rank, world_size)


@final
class OkTopkSession(RegionSession[OkTopk]):
    """See ``session.Session``."""

    def __init__(self, settings: OkTopk, shape: BucketShape, rank: int, world_size: int) -> None:
        """Nothing was exchanged yet."""
        super().__init__(settings, shape, rank, world_size)
        self._threshold = GlobalThreshold()
        #: Where the regions begin, and where the last one ends; ``None``: to be agreed on.
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
            greetings = yield from self._greet(present, self._told(parts))
            if not greetings.finite:
                return None
            sizes, burdens = self._heard(greetings.numbers)
            uneven = self._uneven(burdens, fresh=fresh)
            if fresh or not uneven or size > _TOLD_RANKS:
                break
            cuts = None
        received = yield Alltoall(parts, sizes.tolist())
        indices, values = reduce_region(received, selection.indices, sent, cuts, self._rank)
        del parts, received, sent  # other buckets are under way, too, and all these lists are not small
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
        """See ``Session``."""
        return {
            **super().state(),
            "partitioned_at": self._partitioned_at,
            "cuts": self._cuts or [],
            "threshold": self._threshold.bound,
            "received": self._received,
            "best": self._best,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``Session``."""
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
        """Hand on, so that every rank has an equal share of all that is to be gathered, in the order of indices."""
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
        """Evenly spaced ones of the chosen indices; -1 where there are fewer.

        Each rank takes other places, so that the samples of a thousand ranks do not lie in heaps.
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

    def _told(self, parts: Sequence[Array]) -> list[list[int]]:
        """What each rank is told: the sizes of all parts; of many ranks its own, and what came in the last step."""
        told = [part.size for part in parts]
        if self._world_size <= _TOLD_RANKS:
            return [told] * self._world_size
        return [[length, self._received] for length in told]

    def _heard(self, numbers: Array) -> tuple[Array, Array]:
        """The sizes of what comes here, by source, and the bytes that every rank receives (or did in the last step)."""
        table = numbers.astype(np.int64)
        if self._world_size <= _TOLD_RANKS:
            return table[:, self._rank], table.sum(axis=0)
        return table[:, 0], table[:, 1]

    def _uneven(self, burdens: Array, *, fresh: bool) -> bool:
        """Whether the regions should be cut anew: decided by what all ranks know."""
        mean = float(burdens.mean())
        imbalance = self.report.imbalance = float(burdens.max()) / mean if mean else 1.0
        if fresh:
            self._best = imbalance
        return mean > _FEW_BYTES and imbalance > max(_IMBALANCE_MAX, _WORSE * self._best)

    def _look_ahead(self, cuts: list[int], received: int, *, fresh: bool, uneven: bool) -> None:
        """Decide whether the next step cuts anew."""
        self._received = received
        if fresh:
            self._cuts, self._partitioned_at = cuts, self._steps
        age = self._steps + 1 - self._partitioned_at
        late = self._world_size > _TOLD_RANKS and uneven and age >= _PATIENCE
        if age >= self._settings.partition_interval or late:
            self._cuts = None


def _quantiles(samples: Array, num_elements: int, world_size: int, per_sample: float, value_bits: int) -> list[int]:
    """Cut where equal shares of the bits are: an index takes fewer where more are chosen.

    Args:
        samples: Of all ranks.
        num_elements: Of the bucket.
        world_size: Number of ranks.
        per_sample: How many chosen elements of its rank a sample stands for.
        value_bits: Of one value.
    """
    pooled = np.sort(samples[samples >= 0], axis=None)
    last = pooled.size - 1
    if last < 0:
        return [num_elements * rank // world_size for rank in range(world_size + 1)]
    # How far apart the elements of one rank are, around each sample. The ranks' samples may lie in heaps.
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
