"""Requests and responses: plain values, and their form in messages.

A rank sends a ``Request`` for each operation that it has submitted. The ``Response`` tells all ranks to carry the
operation out, or to raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from totalreduce.coordination.messages import MALFORMED
from totalreduce.foundation.checks import NAME_BYTES_MAX
from totalreduce.foundation.errors import MismatchError, ProtocolError, TotalReduceError, UnsupportedError
from totalreduce.foundation.types import OpKind

__all__ = ["Disagreement", "Request", "Response", "respond"]

#: Kinds in which a rank without data can take part, with neutral elements.
_JOINABLE = frozenset({OpKind.ALLREDUCE, OpKind.BARRIER})
#: Kinds whose first dimension may differ between ranks.
_RAGGED = frozenset({OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER})
_ROOTED = frozenset({OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER})
#: Memory of a request without its texts and lists (measured, and rounded up), of a character, and of a number in a
#: list.
_ENTRY_BYTES: Final = 1024
_CHARACTER_BYTES: Final = 4
_NUMBER_BYTES: Final = 40
#: The longest text for a dtype, a device or a reduction.
_WORD_MAX: Final = 64
#: The longest name: a user's, and the prefixes and suffixes that the library adds.
_NAME_MAX: Final = NAME_BYTES_MAX + 64
#: Numbers have 64 bits.
_NUMBER_MAX: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Request:
    """The description of an operation that one rank has submitted."""

    name: str  #: Equal on all ranks, unique while in flight.
    kind: OpKind  #: The collective.
    dtype: str = ""  #: As torch writes it, without ``torch.``.
    itemsize: int = 0  #: Bytes of one element.
    shape: tuple[int, ...] = ()  #: Shape of this rank's tensor.
    device: str = "cpu"  #: Kind of device: ``cpu``, ``cuda``.
    reduction: str = ""  #: ``sum``, ``avg``, ``min``, ``adasum`` and so on; empty where nothing is reduced.
    root: int = 0  #: The root of a broadcast, reduce, gather or scatter.
    prescale: float = 1.0  #: Factor before the reduction.
    postscale: float = 1.0  #: Factor after it.
    #: Of an alltoall: rows for each rank. Of a gather or scatter, on the root: rows from or for each rank.
    splits: tuple[int, ...] = ()
    #: Name and number of the operations that are carried out together with this one, all or none of them.
    batch: tuple[str, int] | None = None
    cached: bool = True  #: Whether ranks remember the response; not for names that are used once.
    #: Of operations that are ready at the same time, the one with the smaller number goes first. Ranks may differ: the
    #: priority of the first rank counts, and a cached response keeps it.
    priority: int = field(default=0, compare=False)

    def __eq__(self, other: object) -> bool:
        """Compare all fields but the priority.

        As tuples, in which one object is equal to itself, even if it is NaN. From Python 3.13 on, the method that
        ``dataclass`` makes compares field by field, where NaN differs from itself.
        """
        # Steady training brings the same objects again, and comparing the fields of two requests takes 2 µs.
        return self is other or (isinstance(other, Request) and self._compared() == other._compared())

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        scales = self.prescale, self.postscale
        place = self.name, self.kind, self.dtype, self.itemsize, self.shape, self.device
        return (*place, self.reduction, self.root, *scales, self.splits, self.batch, self.cached)

    def __post_init__(self) -> None:
        """Have all factors that are NaN be one object: then requests with them are equal and have one hash."""
        for factor in ("prescale", "postscale"):
            if math.isnan(getattr(self, factor)):
                object.__setattr__(self, factor, math.nan)

    @property
    def num_elements(self) -> int:
        """Number of elements of this rank's tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's tensor."""
        return self.num_elements * self.itemsize

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory of the request, in bytes, on a rank that receives it."""
        characters = len(self.name) + (len(self.batch[0]) if self.batch is not None else 0)
        return _ENTRY_BYTES + _CHARACTER_BYTES * characters + _NUMBER_BYTES * (len(self.shape) + len(self.splits))

    @property
    def common(self) -> Request:
        """The part of the request that must be equal on all ranks."""
        if self.kind in _RAGGED:
            # A scalar or a tensor without rows has no first dimension to differ in.
            return replace(self, shape=(-1, *self.shape[1:]) if self.shape else (), splits=())
        return self

    def describe(self) -> str:
        """Return a text for error messages, such as ``allreduce(avg) of float32[3, 4]``."""
        kind = self.kind.name.lower()
        if self.kind is OpKind.BARRIER:
            return kind
        details = [self.reduction] if self.reduction else []
        if self.kind in _ROOTED:
            details.append(f"root={self.root}")
        details += [f"{name}={value!r}" for name, value in self._scales() if value != 1.0]
        extents = ", ".join("any" if extent < 0 else str(extent) for extent in self.shape)
        text = kind + (f"({', '.join(details)})" if details else "") + f" of {self.dtype}[{extents}]"
        if self.device != "cpu":
            text += f" on {self.device}"
        if self.batch is not None:
            text += f" in the group {self.batch[0]!r} of {self.batch[1]}"
        return text

    def _scales(self) -> tuple[tuple[str, float], ...]:
        return ("prescale", self.prescale), ("postscale", self.postscale)

    def to_wire(self) -> list[Any]:
        """Return a JSON-ready form."""
        scales = [float(scale).hex() for _, scale in self._scales()]  # all bits, infinities included
        return [
            self.name,
            int(self.kind),
            self.dtype,
            self.itemsize,
            self.shape,
            self.device,
            self.reduction,
            self.root,
            scales,
            self.splits,
            self.batch,
            self.cached,
            self.priority,
        ]

    @classmethod
    def from_wire(cls, fields: Any) -> Request:
        """Read the form that ``to_wire`` returns. Raises ``ProtocolError``."""
        try:
            name, kind, dtype, itemsize, shape, device, reduction, root, scales, splits, *rest = fields
            batch, cached, priority = rest
            prescale, postscale = (float.fromhex(scale) for scale in scales)
            request = cls(
                str(name),
                OpKind(kind),
                str(dtype),
                int(itemsize),
                tuple(int(extent) for extent in shape),
                str(device),
                str(reduction),
                int(root),
                prescale,
                postscale,
                tuple(int(rows) for rows in splits),
                None if batch is None else (str(batch[0]), int(batch[1])),
                bool(cached),
                int(priority),
            )
            if request.kind in _RAGGED and not request.shape:
                raise ValueError(f"{request.describe()} has no rows")
            request._check_extents()
            return request
        except MALFORMED as cause:
            raise ProtocolError("a request that no correct peer sends") from cause

    def _check_extents(self) -> None:
        """Check that every part of a peer's request is bounded, so that ``memory_bytes`` is an upper bound."""
        names = [self.name] if self.batch is None else [self.name, self.batch[0]]
        of_batch = 0 if self.batch is None else self.batch[1]
        numbers = (self.itemsize, self.root, self.priority, of_batch, *self.shape, *self.splits)
        if max(map(len, names)) > _NAME_MAX or max(map(len, (self.dtype, self.device, self.reduction))) > _WORD_MAX:
            raise ValueError("a text is too long")
        if not all(-_NUMBER_MAX <= number < _NUMBER_MAX for number in numbers):
            raise ValueError("a number is too large")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The error that every rank raises for an operation that is not carried out."""

    tensor: str  #: The name of the operation; in a group of operations the one that is at fault.
    sets: tuple[tuple[int, ...], ...]  #: Sets of ranks with equal requests, by their first ranks.
    #: A description of each set's request; empty if requests are equal but some ranks have joined.
    values: tuple[str, ...] = ()

    def error(self) -> TotalReduceError:
        """Return a new exception."""
        if self.values:
            return MismatchError.between(self.tensor, self.sets, self.values)
        who = ", ".join(map(str, self.sets[0]))
        return UnsupportedError(
            f"tensor {self.tensor!r}: rank(s) {who} have joined and have no data; only allreduces and barriers go on "
            "without them. Call the others before any rank joins"
        )


@dataclass(frozen=True, slots=True)
class Response:
    """The decision about one operation, equal on all ranks."""

    request: Request  #: The request of the first rank that has data.
    #: By rank: the rows of its part (allgather, gather, scatter), or its rows for every rank (alltoall).
    rows: tuple[tuple[int, ...], ...] = ()
    error: Disagreement | None = None  #: The reason why the operation is not carried out; ``None`` if it is.
    joined: tuple[int, ...] = ()  #: Ranks that take part with neutral elements.
    #: Responses with equal keys can be carried out together; ``None``: this one is carried out alone.
    fusion_key: tuple[object, ...] | None = field(init=False, compare=False, repr=False)
    #: The size that counts against the limit of fused operations; 0 without a key.
    fusion_bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the key and the size once: most responses are used again and again."""
        asked, num_bytes = self.request, 0
        key: tuple[object, ...] | None = None
        if self.error is None and asked.kind is OpKind.ALLREDUCE:
            scales = asked.prescale, asked.postscale
            key = asked.dtype, asked.device, asked.reduction, *scales, asked.batch, self.joined
            num_bytes = asked.num_bytes
        elif self.error is None and asked.kind is OpKind.ALLGATHER:
            key = asked.dtype, asked.device
            num_bytes = sum(rows for (rows,) in self.rows) * math.prod(asked.shape[1:]) * asked.itemsize
        object.__setattr__(self, "fusion_key", key)
        object.__setattr__(self, "fusion_bytes", num_bytes)

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.request.name

    def with_joined(self, joined: tuple[int, ...]) -> Response:
        """Return the same response for a time at which some ranks have joined."""
        if not joined:
            return self
        if self.request.kind not in _JOINABLE:
            return Response(self.request, error=Disagreement(self.name, (joined,)), joined=joined)
        return replace(self, joined=joined)

    def to_wire(self) -> list[Any]:
        """Return a JSON-ready form."""
        error = self.error
        return [
            self.request.to_wire(),
            self.rows,
            None if error is None else [error.tensor, error.sets, error.values],
            self.joined,
        ]

    @classmethod
    def from_wire(cls, fields: Any) -> Response:
        """Read the form that ``to_wire`` returns. Raises ``ProtocolError``."""
        try:
            request, rows, error, joined = fields
            disagreement = None
            if error is not None:
                tensor, sets, values = error
                disagreement = Disagreement(str(tensor), _ranks(sets), tuple(str(value) for value in values))
                if not disagreement.sets or not all(disagreement.sets):
                    raise ValueError("a disagreement of nobody")
                if len(disagreement.values) not in (0, len(disagreement.sets)):
                    raise ValueError("a disagreement with other values than sets")
            return cls(Request.from_wire(request), _ranks(rows), disagreement, tuple(int(rank) for rank in joined))
        except MALFORMED as cause:
            raise ProtocolError("a response that no correct peer sends") from cause


def respond(requests: Mapping[int, Request], world_size: int, joined: Sequence[int]) -> Response:
    """Compare the requests of the ranks for one operation, by rank. Ranks that have joined may have none."""
    first = requests[min(requests)]
    said: dict[Request, list[int]] = {}
    for rank in sorted(requests):
        said.setdefault(requests[rank].common, []).append(rank)
    if len(said) > 1:
        sets = tuple(tuple(ranks) for ranks in said.values())
        return Response(first, error=Disagreement(first.name, sets, tuple(request.describe() for request in said)))
    rows: tuple[tuple[int, ...], ...] = ()
    if first.kind in (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER):
        rows = tuple((requests[rank].shape[0],) if rank in requests else (0,) for rank in range(world_size))
        if first.kind is not OpKind.ALLGATHER and first.root in requests and not joined:
            misfit = _compare_blocks(requests, first.root)
            if misfit is not None:
                return Response(first, error=misfit)
    elif first.kind is OpKind.ALLTOALL:
        rows = tuple(requests[rank].splits if rank in requests else (0,) * world_size for rank in range(world_size))
    return Response(first, rows).with_joined(tuple(sorted(joined)))


def _compare_blocks(requests: Mapping[int, Request], root: int) -> Disagreement | None:
    """Compare the sizes of the root's blocks in a gather or scatter with the sizes of the ranks' tensors."""
    sizes = requests[root].splits
    for rank in sorted(requests):
        size, rows = sizes[rank] if rank < len(sizes) else None, requests[rank].shape[0]
        if size != rows:
            block = "no block" if size is None else f"a block of {size} elements"
            values = f"{block} for rank {rank}", f"a tensor of {rows} elements"
            return Disagreement(requests[root].name, ((root,), (rank,)), values)
    return None


def _ranks(nested: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(number) for number in numbers) for numbers in nested)
