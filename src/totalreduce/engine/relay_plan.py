"""Which operations the relay can carry out, and the lanes and rows that it has for them (``kernels.relay``).

The relay must know which message of a lane is next. Two kinds of schedules fit:

* In a ring or a chain a rank receives from one neighbour and sends to another one. A lane of the operation is a lane of
  the relay, whose rows are the actions of the schedule.
* Where every block travels from one rank to another one (alltoall, gather, scatter), no message waits for an addition.
  A lane of the relay is a block, and its row i is the block's message in lane i of the operation. Of no block this rank
  sends more than ``exchange_window`` bytes beyond what it has received of each other block.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from totalreduce.engine.layout import OperationLayout, Region
from totalreduce.engine.operation import Operation
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.partition import exchange_window
from totalreduce.foundation.types import PAIRWISE, Algorithm, OpKind, ReduceOp
from totalreduce.kernels import relay as words
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.element_types import FLOAT32, KINDS, REDUCTIONS, SUM, has_code
from totalreduce.kernels.relay import ROW
from totalreduce.schedules.actions import NOTHING, Action, Mode, Receive, Send

__all__ = ["RelayPlan", "plan_of"]

_RECEIVE: Final = {
    Mode.REPLACE: words.REPLACE,
    Mode.COMBINE: words.COMBINE,
    Mode.COMBINE_LAST: words.COMBINE_LAST,
}
#: The length of a line of the processor's cache.
_LINE_BYTES: Final = 64

#: Messages of an operation that wait to leave: the number of the lane, and the index of the action in the program.
_Waiting = Collection[tuple[int, int]]
#: For each lane of the relay: the index of the next row that receives, and of the next one that sends.
_Positions = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class RelayPlan:
    """What the relay needs of an operation and does not change from iteration to iteration.

    Attributes:
        peers: The ranks with which messages are exchanged.
        sources: Those from which bodies come. A message without body may come by any connection.
        targets: Those to which messages leave.
        rows: By lane of the relay: the rows of ``kernels.relay``, one after the other.
        lanes: The words of these lanes that do not change (``kernels.relay.lanes_of``), with indices of ``peers``.
        ahead: By how many rows a lane that sends may be ahead of the lanes that receive; 0: it does not wait for them.
        positions: Returns the rows from which the relay goes on with an operation that the engine's messages have
            begun; ``None``: it cannot be handed over now.
        kind: The element type (``kernels.element_types``).
        itemsize: The bytes of an element.
        reduction: How contributions are combined (``kernels.element_types``).
        divisor: Of an average; otherwise 1.
        sums: The numbers of the unfinished sums that are not kept in the tensor, by buffer and lane.
        sum_bytes: The length of the longest of these sums, or a little more.
    """

    peers: tuple[int, ...]
    sources: frozenset[int]
    targets: frozenset[int]
    rows: list[array[int]]
    lanes: Array
    ahead: int
    positions: Callable[[Operation, _Waiting], _Positions | None]
    kind: int
    itemsize: int
    reduction: int
    divisor: int
    sums: Mapping[tuple[int, int], int]
    sum_bytes: int

    @property
    def is_of_blocks(self) -> bool:
        """Whether the lanes are blocks: the engine may receive some messages, because no other lane depends on them."""
        return self.ahead > 0


def plan_of(
    layout: OperationLayout, bulk_peers: frozenset[int], config: EngineConfig, bytes_per_s: float
) -> RelayPlan | None:
    """Return what the relay needs for operations of a layout; ``None`` if it cannot carry them out.

    Args:
        layout: The layout.
        bulk_peers: The peers to which bulk leaves by a connection of its own.
        config: The lengths of bulk and of the eager allowance.
        bytes_per_s: The bandwidth of the link of a host.
    """
    peers = tuple(dict.fromkeys((*layout.program.sources, *layout.program.targets)))
    if not peers or not bulk_peers.issuperset(peers):
        return None
    if layout.signature.kind in PAIRWISE:
        return _plan_of_blocks(layout, peers, config, bytes_per_s)
    # A receiver says that it has submitted an operation only if it expects more than the eager allowance.
    if layout.num_bytes <= config.eager_bytes:
        return None
    return _plan_of_lanes(layout, peers)


# ------------------------------------------------------------------------------------------------- rings and chains


def _plan_of_lanes(layout: OperationLayout, peers: tuple[int, ...]) -> RelayPlan | None:
    """Return the plan of a schedule with one source, in which messages are added."""
    program, signature = layout.program, layout.signature
    # The messages of a lane must come in the order of its rows. From one source they do. A chain has a second source
    # only in a broadcast: it sends the consent, an empty message, after the data of this rank has left.
    if len(program.sources) > 1 and program.algorithm != Algorithm.CHAIN:
        return None
    if len(peers) > words.PEERS_MAX or layout.num_lanes > words.LANES_MAX:
        return None
    receives = [action for action in program.actions if isinstance(action, Receive)]
    if any(action.onto_partial for action in receives):
        return None
    if layout.keeps_partials and not layout.sends_partials_once:
        return None  # a sum would give its slot back when a part of it has been sent
    can_add = not signature.dtype.is_half and has_code(signature.dtype, signature.reduction)
    if not can_add and any(action.mode is not Mode.REPLACE for action in receives):
        return None
    sums, rows = _Sums(layout), []
    for lane in range(layout.num_lanes):
        row = functools.partial(_row, sums, peers, lane)
        rows.append(array("q", itertools.chain.from_iterable(map(row, program.actions, layout.regions(lane)))))
    lane_peers = [range(len(peers))] * len(rows)
    return RelayPlan(
        peers=peers,
        sources=frozenset(action.peer for action in receives if action.chunk != NOTHING),
        targets=frozenset(program.targets),
        rows=rows,
        lanes=words.lanes_of(rows, [layout.expectation.packed] * len(rows), lane_peers, of_blocks=False),
        ahead=0,
        positions=functools.partial(_positions_of_lanes, [_following(row) for row in rows]),
        kind=KINDS.get(signature.dtype, FLOAT32),
        itemsize=signature.dtype.itemsize,
        reduction=REDUCTIONS.get(signature.reduction, SUM),
        divisor=len(layout.ranks) if signature.reduction is ReduceOp.AVG else 1,
        sums=sums.numbers,
        sum_bytes=sums.num_bytes,
    )


def _following(rows: array[int]) -> _Positions:
    """Return for each row, and for the end, the first row from there on that receives, and that sends."""
    length = len(rows) // ROW.num_words
    return [
        (words.next_row(rows, length, index, False), words.next_row(rows, length, index, True))
        for index in range(length + 1)
    ]


def _positions_of_lanes(following: list[_Positions], operation: Operation, waiting: _Waiting) -> _Positions | None:
    """Return ``RelayPlan.positions``; ``following``: by lane, what ``_following`` returns."""
    if any(lane.arrivals for lane in operation.lanes):
        return None
    first: dict[int, int] = {}  # by lane: the first action whose message waits
    for lane, index in waiting:
        first[lane] = min(first.get(lane, index), index)
    return [
        (rows[lane.position][0], rows[first.get(lane.index, lane.position)][1])
        for lane, rows in zip(operation.lanes, following, strict=True)
    ]


class _Sums:
    """The unfinished sums of an operation that are not kept in its tensor.

    Attributes:
        numbers: By buffer and lane: the number of the sum.
        num_bytes: The length of the longest sum, rounded up so that each begins with a line of the cache.
    """

    def __init__(self, layout: OperationLayout) -> None:
        self._layout = layout
        self.numbers: dict[tuple[int, int], int] = {}
        longest = max(layout.accumulator_bytes(buffer, 0) for buffer in range(len(layout.sizes)))
        self.num_bytes = _LINE_BYTES * max(1, -(-longest // _LINE_BYTES))

    def place(self, lane: int, region: Region, *, partial: bool) -> tuple[int, int]:
        """Return the buffer and the first byte of a region: of the unfinished sums, if they are kept apart."""
        if not partial or not self._layout.keeps_partials:
            return region.buffer, region.start
        number = self.numbers.setdefault((region.buffer, lane), len(self.numbers))
        return words.OF_SUMS, number * self.num_bytes + region.wide_start


def _row(sums: _Sums, peers: tuple[int, ...], lane: int, action: Action, region: Region | None) -> tuple[int, ...]:
    """Return the words of a row of ``kernels.relay``."""
    if region is None:
        return (words.NOTHING, *(ROW.num_words - 1) * [0])
    if isinstance(action, Send):
        what, place = words.SEND, sums.place(lane, region, partial=action.partial)
    elif action.mode is Mode.COMBINE_LAST:
        what, place = words.COMBINE_LAST, (region.into, region.start)
    else:
        what, place = _RECEIVE[action.mode], sums.place(lane, region, partial=action.mode is Mode.COMBINE)
    return what, action.step, peers.index(action.peer), region.buffer, region.start, region.body_bytes, *place


# ----------------------------------------------------------------------------------------------------------- blocks


def _plan_of_blocks(
    layout: OperationLayout, peers: tuple[int, ...], config: EngineConfig, bytes_per_s: float
) -> RelayPlan | None:
    """Return the plan of a schedule in which every pair of ranks exchanges blocks of its own."""
    if layout.signature.kind is OpKind.SEND_RECV:
        return None  # a receiver from any rank submits the operation only when it has heard of it
    rows, signatures, positions = [], [], []
    for index, action in enumerate(layout.program.actions):
        regions = [region for region in (layout.regions(lane)[index] for lane in range(layout.num_lanes)) if region]
        # A sender chooses the connection by the longest message that it knows of, which may be another one than here.
        # So a block is sure to come by the connection for bulk only if every message of it is bulk.
        if not regions or min(region.body_bytes for region in regions) <= config.bulk_bytes:
            return None
        if isinstance(action, Send):
            what, signature, position = words.SEND, layout.signature_to(action.peer), (len(regions), 0)
        else:
            what, signature, position = words.REPLACE, layout.expectation.signature_from(action.peer), (0, len(regions))
        rows.append(array("q"))
        for at in regions:
            rows[-1].extend((what, action.step, 0, at.buffer, at.start, at.body_bytes, at.buffer, at.start))
        signatures.append(signature)
        positions.append(position)
    longest = max(row[ROW.length_bytes] for row in rows)
    lane_peers = [[peers.index(action.peer)] for action in layout.program.actions]
    return RelayPlan(
        peers=peers,
        sources=frozenset(layout.program.sources),
        targets=frozenset(layout.program.targets),
        rows=rows,
        lanes=words.lanes_of(rows, signatures, lane_peers, of_blocks=True),
        ahead=max(2, round(exchange_window(bytes_per_s, len(peers)) / longest)),
        positions=functools.partial(_positions_of_blocks, positions),
        kind=FLOAT32,
        itemsize=1,
        reduction=SUM,
        divisor=1,
        sums={},
        sum_bytes=0,
    )


def _positions_of_blocks(positions: _Positions, operation: Operation, _waiting: _Waiting) -> _Positions | None:
    """Return ``RelayPlan.positions``: the engine hands such an operation over before its first message."""
    return None if any(lane.begun or lane.arrivals for lane in operation.lanes) else positions
