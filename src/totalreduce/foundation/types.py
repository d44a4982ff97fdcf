"""Kinds of operations, element types, reductions, and the signature of an operation.

The numbers of the enumerations travel in headers: add at the end, never renumber.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass

__all__ = [
    "PAIRWISE",
    "Algorithm",
    "DType",
    "OpKind",
    "ReduceOp",
    "Signature",
    "operation_id",
    "root_number",
    "successor_name",
]


class OpKind(enum.IntEnum):
    """Kinds of operations."""

    ALLREDUCE = 1
    BROADCAST = 2
    BARRIER = 3
    REDUCE = 4
    ALLGATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALLTOALL = 9
    SEND_RECV = 10


#: Kinds in which only sender and receiver know the size of a message, which its header has.
PAIRWISE = frozenset({OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL, OpKind.SEND_RECV})


class Algorithm(enum.StrEnum):
    """Names of this package's schedules; ``AUTO`` lets the selector decide by size and measured links.

    Where a schedule is wanted, any name is accepted, so that other packages can add schedules.
    """

    AUTO = "auto"
    RING = "ring"
    STAR = "star"
    TREE = "tree"
    HALVING_DOUBLING = "halving_doubling"
    CHAIN = "chain"
    DIRECT = "direct"
    HIERARCHICAL = "hierarchical"
    DISSEMINATION = "dissemination"


class ReduceOp(enum.IntEnum):
    """How elements of different ranks become one.

    ``AVG`` is the sum divided once by the world size; for integers the quotient is rounded towards zero, as NCCL does.
    Integer sums wrap around like torch's. For ``bool``, ``SUM`` and ``MAX`` are *or*, ``PRODUCT`` and ``MIN`` are
    *and*. The bitwise ones are for integers and ``bool``.
    """

    NONE = 0
    SUM = 1
    AVG = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    @property
    def is_bitwise(self) -> bool:
        """Whether it combines bits, which floating-point elements do not allow."""
        return self >= ReduceOp.BAND


class DType(enum.IntEnum):
    """Element types that can be reduced."""

    UINT8 = 1
    INT8 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    FLOAT16 = 6
    BFLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    BOOL = 10

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_half(self) -> bool:
        """Whether sums of this type are accumulated in float32."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_floating_point(self) -> bool:
        """Whether elements are floats of any width."""
        return DType.FLOAT16 <= self <= DType.FLOAT64


_ITEMSIZE = {
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.BOOL: 1,
}


@dataclass(frozen=True, slots=True)
class Signature:
    """The properties of an operation that must be equal on all ranks; every data header has them."""

    kind: OpKind  #: The collective.
    dtype: DType  #: Element type.
    reduction: ReduceOp  #: ``ReduceOp.NONE`` where nothing is reduced.
    root: int  #: Root rank; 0 where there is none.
    shape: tuple[int, ...]  #: Shape of the tensor, ``()`` for a scalar.
    #: Elements of every rank's block, where a collective has blocks and all ranks know them.
    sizes: tuple[int, ...] = ()
    algorithm: str = Algorithm.AUTO  #: Name of the schedule, if it was chosen explicitly.

    @property
    def num_elements(self) -> int:
        """Product of the shape (1 for a scalar), or the sum of the blocks' sizes."""
        if self.sizes:
            return sum(self.sizes)
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def shape_digest(self) -> int:
        """Hash of the shape, 32 bits: it differs between (2, 3) and (3, 2), which have equal element counts."""
        text = ",".join(map(str, self.sizes or self.shape)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def describe(self) -> str:
        """Return a description for messages, such as ``allreduce(avg) of float32[3, 4]``."""
        kind = self.kind.name.lower()
        if self.kind is OpKind.BARRIER:
            return kind
        detail = ""
        if self.reduction is not ReduceOp.NONE:
            detail = self.reduction.name.lower()
        if self.kind in _ROOTED:
            detail = f"{detail}, root={self.root}" if detail else f"root={self.root}"
        extents = f"blocks of {', '.join(map(str, self.sizes))}" if self.sizes else ", ".join(map(str, self.shape))
        by = f" by {self.algorithm}" if self.algorithm != Algorithm.AUTO else ""
        return f"{kind}{f'({detail})' if detail else ''} of {self.dtype.name.lower()}[{extents}]{by}"


_ROOTED = frozenset({OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER})


def operation_id(name: str) -> int:
    """Return the hash of an operation's name, 64 bits: all ranks compute the same id without communication.

    A collision of two names of one group (probability n**2 / 2**65) is noticed at submission and refused.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


#: What ``successor_name`` adds.
_SUCCESSOR = re.compile(r" \(\d+\)")


def successor_name(name: str, num_earlier: int) -> str:
    """Return the name of an object that is made after ``num_earlier`` objects of the same name, for its operations."""
    return f"{name} ({num_earlier + 1})" if num_earlier else name


def root_number(name: str) -> int:
    """Return the number by which the engine chooses the root of an operation, where the choice is its own.

    Objects that follow each other with one name get equal numbers, although their operations have different ids. So
    results have the same bits, however many such objects a program has made before.
    """
    return operation_id(_SUCCESSOR.sub("", name))
