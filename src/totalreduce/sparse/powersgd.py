"""PowerSGD: matrices of low rank instead of sparse vectors.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019. One step of a power iteration for each matrix M, the sum of all ranks' matrices: the left factor is an
orthonormal basis of M Q, the right one is M' times that, and their product is a projection of M. Both are linear in M,
so that two allreduces compute them; Q is the right factor of the step before. The residual of each rank is its own
matrix without an equal share of the product that was applied.

The matrices of a bucket travel together. Segments of one dimension, and those whose factors would be no smaller, travel
uncompressed with the left factors. After an allreduce a rank computes with single multiplications and additions and
with sums in a fixed order, without BLAS: the results have the same bits on different machines.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np

from totalreduce.foundation import checks
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allreduce
from totalreduce.sparse.common import BaseSession
from totalreduce.sparse.session import BucketShape, Update

__all__ = ["PowerSGD", "PowerSGDSession"]

#: A vector counts as dependent on those before it if the projection leaves no more than this share of its norm.
_EPSILON = 1e-10
#: The number of elements that are multiplied at a time, so that they stay in the second-level cache.
_BLOCK = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGD:
    """Settings of PowerSGD.

    Attributes:
        rank: The rank of the approximation of every matrix.
        seed: The seed of the first right factors.

    Raises:
        ConfigurationError: A value makes no sense.
    """

    name: ClassVar[str] = "powersgd"
    whole: ClassVar[bool] = True

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer_fields(self, "rank", minimum=1)
        checks.integer_fields(self, "seed", minimum=0)

    def session(self, shape: BucketShape, rank: int, world_size: int) -> PowerSGDSession:
        return PowerSGDSession(self, shape, rank, world_size)


@final
class PowerSGDSession(BaseSession):
    """The session of PowerSGD. Factors are kept transposed: their vectors are rows."""

    def __init__(self, settings: PowerSGD, shape: BucketShape, rank: int, world_size: int) -> None:
        super().__init__(settings.name, shape, rank, world_size)
        #: The rows and columns of the segments that are compressed, by the segments' numbers.
        self._shapes = _matrices(shape, settings.rank)
        self._fresh = [
            _start(settings.seed, number, min(settings.rank, *sides), sides[1])
            for number, sides in self._shapes.items()
        ]
        #: The right factors with which matrices are multiplied first.
        self._starts = self._fresh
        #: The largest element of a factor: products, sums of ``rank`` products with numbers up to 1, do not overflow.
        self._limit = np.finfo(np.float32).max / (2 * settings.rank)

    def state(self) -> Mapping[str, Any]:
        """Return the number of steps and the right factors."""
        return {**super().state(), "factors": _joined(self._starts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the number of steps and the right factors."""
        super().load_state(state)
        factors = np.array(state["factors"], np.float32)
        if factors.size == _joined(self._fresh).size:  # otherwise the settings were others
            self._starts = _parted(factors, self._fresh)

    def _exchange(self, present: Array) -> Generator[Action, Any, Update | None]:
        with self._gradients.on_host() as segments:
            return (yield from self._project(segments, present))

    def _project(self, segments: Sequence[Array], present: Array) -> Generator[Action, Any, Update | None]:
        matrices = [segments[number].reshape(sides) for number, sides in self._shapes.items()]
        plain = [segment for number, segment in enumerate(segments) if number not in self._shapes]
        greetings = yield from self._greet(present)
        if not greetings.finite:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            products = [start @ matrix.T for start, matrix in zip(self._starts, matrices, strict=True)]
        sums = yield from self._sum([*products, *plain])
        if sums is None:
            return None
        lefts = [_orthonormal(total) for total in sums[: len(matrices)]]
        with np.errstate(over="ignore", invalid="ignore"):
            products = [left @ matrix for left, matrix in zip(lefts, matrices, strict=True)]
        rights = yield from self._sum(products)
        if rights is None:
            return None
        self._starts = [_next_start(right, fresh) for right, fresh in zip(rights, self._fresh, strict=True)]
        self.report.k = self.report.selected = sum(part.size for part in [*sums, *rights])
        factors, rest = iter(zip(lefts, rights, strict=True)), iter(sums[len(matrices) :])
        applied = [
            _product(*next(factors)) if number in self._shapes else next(rest) for number in range(len(segments))
        ]
        for number, segment in enumerate(segments):
            own = applied[number] / np.float32(self._world_size) if number in self._shapes else segment
            np.subtract(segment, own, out=segment)
        return Update(greetings.present, None, _joined(applied))

    def _sum(self, parts: Sequence[Array]) -> Generator[Action, Any, list[Array] | None]:
        """Return the sums over all ranks; ``None`` on all ranks if a sum overflows."""
        if not parts:
            return []
        total = yield Allreduce(_joined(parts))
        if not np.abs(total).max(initial=0.0) <= self._limit:
            return None
        return _parted(total, parts)


def _matrices(shape: BucketShape, rank: int) -> dict[int, tuple[int, int]]:
    found = {}
    for number, sides in enumerate(shape.shapes):
        if len(sides) >= 2:
            rows, columns = sides[0], int(np.prod(sides[1:], dtype=np.int64))
            if min(rank, rows, columns) * (rows + columns) < rows * columns:
                found[number] = rows, columns
    return found


def _start(seed: int, number: int, rank: int, columns: int) -> Array:
    return _orthonormal(np.random.default_rng([seed, number]).random((rank, columns)) - 0.5)


def _next_start(right: Array, fresh: Array) -> Array:
    """Return a basis of the right factor; vectors that are zero, as those of a zero matrix, begin again."""
    basis = _orthonormal(right)
    return np.where(basis.any(axis=1, keepdims=True), basis, fresh)


def _orthonormal(vectors: Array) -> Array:
    """Return an orthonormal basis of the rows, float32; a row that depends on those before it becomes zero.

    Computed by modified Gram-Schmidt, twice for each row, in float64.
    """
    basis = vectors.astype(np.float64)
    for number in range(len(basis)):
        before = _norm(basis[number])
        for other in [*basis[:number], *basis[:number]]:
            basis[number] -= np.sum(basis[number] * other) * other
        after = _norm(basis[number])
        basis[number] *= 1 / after if after > _EPSILON * before else 0.0
    return basis.astype(np.float32)


def _norm(vector: Array) -> float:
    return float(np.sqrt(np.sum(vector * vector)))


def _product(left: Array, right: Array) -> Array:
    """Return the product of two factors as one row."""
    out = np.empty((left.shape[1], right.shape[1]), np.float32)
    height = max(1, _BLOCK // right.shape[1])
    for begin in range(0, len(out), height):
        rows = slice(begin, begin + height)
        np.multiply(left[0, rows, None], right[0], out=out[rows])
        for p, q in zip(left[1:], right[1:], strict=True):
            out[rows] += p[rows, None] * q
    return out.reshape(-1)


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.float32), *(part.reshape(-1) for part in parts)])


def _parted(joined: Array, like: Sequence[Array]) -> list[Array]:
    """Undo ``_joined``."""
    edges = np.cumsum([0, *(part.size for part in like)]).tolist()
    return [joined[low:high].reshape(part.shape) for (low, high), part in zip(pairwise(edges), like, strict=True)]
