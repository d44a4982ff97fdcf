"""Ok-Topk: a sparse allreduce that sends O(k) bytes per rank, whatever the number of ranks.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, after its description; what is
done otherwise, and why, is in docs/design/0007-sparse.md. Its five phases:

1. *Local selection.* The k largest elements of residual plus gradient (``selector``).
2. *Partition.* The bucket is cut into one region per rank, so that all ranks' selections together fall into them evenly.
   Every rank contributes evenly spaced samples of its indices; their quantiles are the cuts. It is done again after
   ``partition_interval`` steps, or when a rank receives a tenth more than the mean.
3. *Split and reduce.* Each rank sends every region's elements to the region's owner, who adds them in the order of the
   ranks.
4. *Global selection.* Histograms of the reduced magnitudes, gathered, say which magnitude k elements reach over all
   regions, and how many there are in each.
5. *Balance and gather.* Owners with more than their share of those hand some on (``balance``), and everybody gathers all.

What was chosen here and is not in the result stays in the residual, like what rounding cut off.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.kernels import merging
from totalreduce.sparse import blocks
from totalreduce.sparse.accumulator import Accumulator
from totalreduce.sparse.actions import Action, Allgather, Alltoall, Array
from totalreduce.sparse.greeting import greet
from totalreduce.sparse.selector import Selection, Selector
from totalreduce.sparse.session import BucketShape, Report, Update
from totalreduce.sparse.settings import TopkSettings
from totalreduce.sparse.threshold import GlobalThreshold, magnitude

__all__ = ["OkTopk", "OkTopkSession"]

#: So many samples of every rank's indices: a cut is off by a rank's share over this, at most.
_SAMPLES = 256
#: Partition again where a rank receives so many times the mean, but not within so many steps of the last time, nor for a few bytes.
_IMBALANCE_MAX = 1.1
_PATIENCE = 2
_FEW_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class OkTopk(TopkSettings):
    """Settings of Ok-Topk; see ``TopkSettings`` for the others.

    Attributes:
        threshold_interval: The global threshold is found anew every so many steps. In between the last one is used, which
            saves a small exchange for each bucket, and as many elements are applied as reach it.
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
        for name in ("threshold_interval", "partition_interval"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is a number of steps, from 1, not {getattr(self, name)}")
        if not self.balance >= 1:
            raise ConfigurationError(f"balance is at least 1 (equal shares), not {self.balance}")

    def session(self, shape: BucketShape, rank: int, world_size: int) -> OkTopkSession:
        """The state of one bucket on one rank."""
        return OkTopkSession(self, shape, rank, world_size)


@final
class OkTopkSession:
    """See ``session.Session``."""

    def __init__(self, settings: OkTopk, shape: BucketShape, rank: int, world_size: int) -> None:
        """Nothing was exchanged yet."""
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._num_elements = shape.num_elements
        self._selector = Selector()
        self._threshold = GlobalThreshold()
        self._steps = 0
        #: Where the regions begin, and where the last one ends; ``None``: to be agreed on.
        self._cuts: list[int] | None = None
        self._partitioned_at = 0
        self._received = 0
        self.report = Report(OkTopk.name)

    def accumulate(self, gradients: Accumulator, residuals: Accumulator, scale: float) -> None:
        """See ``Session``."""
        k = self._settings.count(self._num_elements, self._steps)
        self._gradients = gradients
        self._selection = self._selector.accumulate(gradients, residuals, scale, k)
        self.report = Report(
            OkTopk.name,
            k=k,
            selected=self._selection.indices.size,
            local_threshold=magnitude(self._selection.bound),
            rescans=self._selector.rescans,
        )

    def exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        """See ``Session``."""
        selection, kind, size = self._selection, self._settings.values, self._world_size
        sent = blocks.rounded(selection.values, kind)
        cuts = self._cuts
        if cuts is None:
            sampled = yield Allgather(_samples(selection).view(np.uint8), [4 * _SAMPLES] * size)
            cuts = _quantiles(np.concatenate(sampled).view(np.int32), self._num_elements, size)
        parts = self._split(selection.indices, sent, cuts, kind)
        numbers = [(part.size, self._received) for part in parts]
        greetings = yield from greet(self._rank, finite=selection.finite, present=present, numbers=numbers)
        if not greetings.finite:
            self.report.skipped = True
            return None
        sizes, burdens = greetings.numbers.T.astype(np.int64)
        received = yield Alltoall(parts, sizes.tolist())
        indices, values = self._reduce(received, selection.indices, sent, cuts)
        bound, counts = yield from self._agree(values)
        chosen = values.view(np.int32) & _MAGNITUDE >= bound
        indices, exact = indices[chosen], values[chosen]
        applied = blocks.rounded(exact, kind)
        update = yield from self._gather(indices, applied, counts, cuts, kind)
        # What is left: all but what was applied, and what rounding cut off here.
        kept = merging.found_in(selection.indices, update.indices)
        self._gradients.put(selection.indices[kept], (selection.values - sent)[kept])
        self._gradients.add(indices, exact - applied)
        self._look_ahead(cuts, int(sizes.sum()), burdens)
        self.report.applied, self.report.global_threshold = update.indices.size, magnitude(bound)
        return Update(greetings.present, update.indices, update.values)

    def state(self) -> Mapping[str, Any]:
        """See ``Session``."""
        return {
            "steps": self._steps,
            "partitioned_at": self._partitioned_at,
            "cuts": self._cuts or [],
            "threshold": self._threshold.bound,
            "received": self._received,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``Session``."""
        self._steps, self._partitioned_at = state["steps"], state["partitioned_at"]
        cuts = list(state["cuts"])
        self._cuts = cuts if len(cuts) == self._world_size + 1 else None  # other ranks, other regions
        self._threshold.bound, self._received = state["threshold"], state["received"]

    def _split(self, indices: Array, values: Array, cuts: list[int], kind: blocks.ValueKind) -> list[Array]:
        edges = np.searchsorted(indices, cuts).tolist()
        parts = []
        for owner in range(self._world_size):
            own = slice(edges[owner], edges[owner + 1])
            if owner == self._rank:  # it need not travel
                parts.append(np.empty(0, np.uint8))
            else:
                parts.append(blocks.pack(indices[own], values[own], cuts[owner], cuts[owner + 1], kind))
        return parts

    def _reduce(self, received: list[Array], indices: Array, values: Array, cuts: list[int]) -> tuple[Array, Array]:
        begin, end = cuts[self._rank], cuts[self._rank + 1]
        low, high = np.searchsorted(indices, (begin, end)).tolist()
        lists = [blocks.unpack(block, begin, end) for block in received]
        lists[self._rank] = indices[low:high], values[low:high]
        return merging.add_up(lists)

    def _agree(self, values: Array) -> Generator[Action, Any, tuple[int, Array]]:
        fresh = self._steps % self._settings.threshold_interval == 0
        return (yield from self._threshold.agree(values, self.report.k, self._world_size, fresh=fresh))

    def _gather(
        self, indices: Array, values: Array, counts: Array, cuts: list[int], kind: blocks.ValueKind
    ) -> Generator[Action, Any, _Gathered]:
        size, begins, ends = self._world_size, list(cuts[:-1]), list(cuts[1:])
        total = int(counts.sum())
        if size > 1 and counts.max() * size > self._settings.balance * total:
            indices, values = yield from self._balance(indices, values, counts, kind)
            counts = np.diff(_shares(total, size))
            begins, ends = [0] * size, [self._num_elements] * size
        lengths = [
            blocks.block_bytes_max(int(count), end - begin, kind)
            for count, begin, end in zip(counts, begins, ends, strict=True)
        ]
        own, begin, end = lengths[self._rank], begins[self._rank], ends[self._rank]
        block = blocks.pack(indices, values, begin, end, kind, size=own)
        gathered = yield Allgather(block, lengths)
        lists = [blocks.unpack(block, begins[rank], ends[rank]) for rank, block in enumerate(gathered)]
        return _Gathered(*(np.concatenate(column) for column in zip(*lists, strict=True)))

    def _balance(
        self, indices: Array, values: Array, counts: Array, kind: blocks.ValueKind
    ) -> Generator[Action, Any, tuple[Array, Array]]:
        """Hand on, so that every rank has an equal share of all that is to be gathered, in the order of indices."""
        size, rank, n = self._world_size, self._rank, self._num_elements
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
        lists = [blocks.unpack(block, 0, n) for block in received]
        lists[rank] = indices[own], values[own]
        together, amounts = (np.concatenate(column) for column in zip(*lists, strict=True))
        return together, amounts

    def _look_ahead(self, cuts: list[int], received: int, burdens: Array) -> None:
        """Decide by what all ranks know, the bytes that each one received in the step before, whether to cut anew."""
        mean = float(burdens.mean())
        self.report.imbalance = float(burdens.max()) / mean if mean else 1.0
        self._received = received
        if self._cuts is None:
            self._cuts, self._partitioned_at = cuts, self._steps
        self._steps += 1
        age = self._steps - self._partitioned_at
        uneven = self.report.imbalance > _IMBALANCE_MAX and mean > _FEW_BYTES and age >= _PATIENCE
        if age >= self._settings.partition_interval or uneven:
            self._cuts = None


_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class _Gathered:
    indices: Array
    values: Array


def _samples(selection: Selection) -> Array:
    """Evenly spaced ones of the chosen indices; -1 where there are fewer."""
    chosen = selection.indices
    samples = np.full(_SAMPLES, -1, np.int32)
    if chosen.size:
        places = np.linspace(0, chosen.size - 1, min(_SAMPLES, chosen.size)).astype(np.int64)
        samples[: places.size] = chosen[places]
    return samples


def _quantiles(samples: Array, num_elements: int, world_size: int) -> list[int]:
    pooled = np.sort(samples[samples >= 0], axis=None)
    if not pooled.size:
        return [num_elements * rank // world_size for rank in range(world_size + 1)]
    inner = [int(pooled[pooled.size * rank // world_size]) for rank in range(1, world_size)]
    return [0, *inner, num_elements]


def _shares(total: int, world_size: int) -> list[int]:
    return [total * rank // world_size for rank in range(world_size + 1)]
