"""Where the bytes of an operation's messages are: computed once per name and shape, shared by all its iterations.

This is index arithmetic with the same result on all ranks that exchange a message. A tensor is cut into lanes and every
lane into chunks, so that neighbouring chunks of a lane lie together. Where an operation has blocks instead (see
``schedules.actions.Chunking``), each block is cut into lanes, so that blocks of different sizes have different numbers
of lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.header import pack_signature, unpack_signature, with_count
from totalreduce.foundation.partition import PIECE_BYTES_MIN, balanced_range, lane_count, pipeline_pieces
from totalreduce.foundation.types import PAIRWISE, DType, Signature
from totalreduce.schedules.actions import NOTHING, Action, Chunking, Mode, Program, Receive, Send

__all__ = ["OperationLayout", "Region"]

#: The largest message of several chunks, in segments.
_SPAN_SEGMENTS = 2


class Region(NamedTuple):
    """The bytes that one action of one lane sends or receives.

    Attributes:
        buffer: The number of the buffer of the operation.
        start: The first byte in the buffer.
        stop: The byte after the last one.
        wide_start: The first byte in the accumulator of this lane of the buffer, whose elements may be wider.
        wide_stop: The byte after the last one in that accumulator.
        body_bytes: The length of the message.
        into: The number of the buffer that takes the finished sum, from ``start`` to ``stop``.
    """

    buffer: int
    start: int
    stop: int
    wide_start: int
    wide_stop: int
    body_bytes: int
    into: int


class Expectation:
    """The signature of an operation as this rank has submitted it, with which messages of other ranks are compared.

    Attributes:
        signature: The signature.
        packed: The packed signature.
        ranks: The ranks of the whole group that take part.
    """

    __slots__ = ("_pairs", "packed", "ranks", "signature")

    def __init__(self, signature: Signature, packed: bytes, ranks: tuple[int, ...], pairs: Mapping[int, bytes]) -> None:
        """``pairs``: by source, the packed signatures of messages whose size only sender and receiver know."""
        self.signature, self.packed, self.ranks, self._pairs = signature, packed, ranks, pairs

    def signature_from(self, peer: int) -> bytes:
        """Return the packed signature that messages from ``peer`` must have."""
        return self._pairs.get(peer, self.packed)

    def describe(self, peer: int) -> str:
        """Return in words the signature that this rank expects of ``peer``."""
        pair = self._pairs.get(peer)
        return unpack_signature(pair) if pair is not None else self.signature.describe()


class OperationLayout:
    """Everything about an operation that does not change from iteration to iteration.

    Attributes:
        signature: The signature.
        program: The compiled schedule for this rank, with ranks of the whole group.
        ranks: The ranks of the whole group that take part.
        sizes: The bytes of every buffer.
        dtype: The element type; ``itemsize``: the bytes of one element.
        expectation: The signature with which messages of other ranks are compared.
        num_bytes: The bytes of all buffers.
        num_lanes: The number of lanes; ``uneven``: whether some blocks have fewer.
        partial_dtype: The element type of unfinished sums.
        keeps_partials: Whether unfinished sums are kept in accumulators, because they are wider, or because this rank
            must not change the tensor.
        expected_bytes: By peer that sends some: about how many bytes it will send.
        bytes_to: By peer that expects some: about how many bytes it expects.
        is_bulk: Whether all its messages leave by the connection for bulk, where there is one
            (``Transport.bulk_peers``), because one is longer than ``EngineConfig.bulk_bytes``. They may not take
            two connections, because those of a lane must arrive in the order of the steps (``SendQueue.push_back``).
        carried_by: What the carrier has computed for operations of this layout; ``False``: it takes none of them.
        relay_plan: The same of the relay (``engine.relaying``).
    """

    __slots__ = (
        "_chunk_lanes",
        "_cut",
        "_outgoing",
        "_regions",
        "bytes_to",
        "carried_by",
        "dtype",
        "expectation",
        "expected_bytes",
        "is_bulk",
        "itemsize",
        "keeps_partials",
        "num_bytes",
        "num_lanes",
        "partial_dtype",
        "program",
        "ranks",
        "relay_plan",
        "signature",
        "sizes",
        "uneven",
    )

    def __init__(
        self,
        signature: Signature,
        program: Program,
        ranks: tuple[int, ...],
        sizes: Sequence[int],
        config: EngineConfig,
        *,
        longest_bytes: int = 0,
        piece_bytes: int = 0,
    ) -> None:
        """Cut the buffers into lanes.

        Args:
            signature: See ``OperationLayout``.
            program: See ``OperationLayout``.
            ranks: See ``OperationLayout``.
            sizes: See ``OperationLayout``.
            config: The length of segments.
            longest_bytes: How long segments of very large chunks may be, if longer than ``config.segment_bytes``.
            piece_bytes: How long segments of blocks of more than ``config.eager_bytes`` may be, if shorter; 0: as long
                as others.
        """
        self.signature, self.program, self.ranks, self.sizes = signature, program, ranks, list(sizes)
        self.carried_by: Any = None
        self.relay_plan: Any = None
        dtype = self.dtype = signature.dtype
        self.itemsize = dtype.itemsize
        widen = dtype.is_half and config.half_accumulation == "float32" and program.partial_sums
        self.partial_dtype = DType.FLOAT32 if widen else dtype
        self.keeps_partials = widen or program.preserves
        self.num_bytes = sum(sizes)
        self._cut = program.chunking is Chunking.CUT
        counts = [size // self.itemsize for size in sizes]
        self._chunk_lanes = self._count_lanes(counts, config, longest_bytes, piece_bytes)
        self.num_lanes = max(self._chunk_lanes)
        self.uneven = min(self._chunk_lanes) != self.num_lanes
        self._regions: dict[int, list[Region | None]] = {}
        packed = pack_signature(signature, program.algorithm)
        incoming: dict[int, bytes] = {}
        self._outgoing: dict[int, bytes] = {}
        if signature.kind in PAIRWISE:
            for action in program.actions:
                pairs = self._outgoing if isinstance(action, Send) else incoming
                pairs[action.peer] = with_count(packed, counts[action.chunk])
        self.expectation = Expectation(signature, packed, ranks, incoming)
        self.expected_bytes = self._bytes_by_peer(Receive)
        self.bytes_to = self._bytes_by_peer(Send)
        # Lane 0 takes part in every action, and has the longest messages.
        longest = max((region.body_bytes for region in self.regions(0) if region is not None), default=0)
        self.is_bulk = longest > config.bulk_bytes

    def _bytes_by_peer(self, kind: type[Action]) -> dict[int, int]:
        """Return about how many bytes the actions of a kind exchange with each peer: as many as the peer finds.

        A peer with which only messages without body are exchanged is left out.
        """
        num_bytes: dict[int, int] = {}
        for action in self.program.actions:
            if isinstance(action, kind) and action.chunk != NOTHING:
                size = self.sizes[0] // self.program.num_chunks if self._cut else self.sizes[action.chunk]
                if size:
                    num_bytes[action.peer] = num_bytes.get(action.peer, 0) + size * action.span
        return num_bytes

    def signature_to(self, peer: int) -> bytes:
        """Return the packed signature of messages to ``peer``."""
        return self._outgoing.get(peer, self.expectation.packed)

    def describe_to(self, peer: int) -> str:
        """Return in words the signature of messages to ``peer``; if there are none, of messages from ``peer``."""
        pair = self._outgoing.get(peer)
        return unpack_signature(pair) if pair is not None else self.expectation.describe(peer)

    def regions(self, lane: int) -> list[Region | None]:
        """Return the regions of one lane's actions, in order; ``None`` where the lane takes no part."""
        found = self._regions.get(lane)
        if found is None:
            found = self._regions[lane] = [self._region(action, lane) for action in self.program.actions]
        return found

    def _region(self, action: Action, lane: int) -> Region | None:
        if action.once and lane > 0:
            return None
        if action.chunk == NOTHING:
            return Region(0, 0, 0, 0, 0, 0, 0)
        buffer = 0 if self._cut else action.chunk
        if lane >= self._chunk_lanes[buffer]:
            return None
        first, last = self._lane_elements(buffer, lane)
        start, stop = self._chunk_elements(first, last, action.chunk, action.span) if self._cut else (first, last)
        width, wide = self.itemsize, self.partial_dtype.itemsize
        into = buffer
        if isinstance(action, Receive) and action.mode is Mode.COMBINE_LAST and action.into is not None:
            into = action.into
        body_bytes = (stop - start) * (wide if action.partial else width)
        wide_range = wide * (start - first), wide * (stop - first)
        return Region(buffer, width * start, width * stop, *wide_range, body_bytes, into)

    def accumulator_bytes(self, buffer: int, lane: int) -> int:
        """Return the bytes of the accumulator of one lane of a buffer."""
        start, stop = self._lane_elements(buffer, lane)
        return (stop - start) * self.partial_dtype.itemsize

    @property
    def sends_partials_once(self) -> bool:
        """Whether an accumulator is no longer needed when its contents have been sent."""
        return not self._cut or self.program.num_chunks == 1

    def _lane_elements(self, buffer: int, lane: int) -> tuple[int, int]:
        count, lanes = self.sizes[buffer] // self.itemsize, self._chunk_lanes[buffer]
        return (0, count) if lanes == 1 else balanced_range(count, lanes, lane)

    def elements(self, chunk: int, lane: int, span: int = 1) -> tuple[int, int]:
        """Return the half-open element range, within its buffer, of one lane of ``span`` chunks."""
        buffer = 0 if self._cut else chunk
        first, last = self._lane_elements(buffer, lane)
        return self._chunk_elements(first, last, chunk, span) if self._cut else (first, last)

    def _chunk_elements(self, first: int, last: int, chunk: int, span: int) -> tuple[int, int]:
        """Return the element range of ``span`` chunks of a lane with the range ``first`` to ``last``.

        The chunks are cut as ``balanced_range`` cuts them.
        """
        size, larger = divmod(last - first, self.program.num_chunks)
        after = chunk + span
        return first + chunk * size + min(chunk, larger), first + after * size + min(after, larger)

    def _count_lanes(
        self, counts: Sequence[int], config: EngineConfig, longest_bytes: int, piece_bytes: int
    ) -> list[int]:
        """Return the number of lanes of each buffer; the sender and the receiver of a block compute the same number."""
        program, width = self.program, self.partial_dtype.itemsize

        def lanes(chunk_bytes: int) -> int:
            return lane_count(
                chunk_bytes,
                segment_bytes=config.segment_bytes,
                longest_bytes=longest_bytes,
                segment_bytes_min=config.segment_bytes_min,
                lanes_min=config.lanes_min,
            )

        if not self._cut:
            sizes = [count * width for count in counts]
            return [
                max(lanes(size), -(-size // piece_bytes) if piece_bytes and size > config.eager_bytes else 0)
                for size in sizes
            ]
        num_bytes = counts[0] * width
        num_lanes = lanes(-(-num_bytes // program.num_chunks))
        if program.span_max > 1:
            # Counted in elements of the larger chunks: a message must fit into a transport's buffer in any case.
            chunk_elements = max(1, _SPAN_SEGMENTS * config.segment_bytes // (width * program.span_max))
            num_lanes = max(num_lanes, -(-counts[0] // (chunk_elements * program.num_chunks)))
        if program.pipeline_ranks:
            piece_bytes = min(PIECE_BYTES_MIN, config.segment_bytes)
            num_lanes = max(num_lanes, pipeline_pieces(program.pipeline_ranks, num_bytes, piece_bytes))
        return [num_lanes]
