"""Which operations the relay can carry out, and the tracks and rows that it has for them (``kernels.relay``).

There are two kinds of them:

* Where sums are made, or every rank gets the same, a track is a lane of the operation, and its rows are the actions
  of the schedule. In a ring or a chain a rank receives from one neighbour and sends to another one, in the
  order of the rows. In other schedules a message may come before its turn, so each row has a state.
* Where every block travels from one rank to another one (alltoall, gather, scatter), no message waits for an addition.
  A track is a block, and its row i is the block's message in lane i of the operation. Of no block this rank
  sends more than ``exchange_window`` bytes beyond what it has received of each other block.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from totalreduce.engine.layout import OperationLayout, Region
from totalreduce.engine.operation import Operation
from totalreduce.foundation.config import EngineConfig
from totalreduce.foundation.partition import exchange_window
from totalreduce.foundation.types import PAIRWISE, Algorithm, OpKind, ReduceOp
from totalreduce.kernels import relay as words
from totalreduce.kernels.arrays import Array
from totalreduce.kernels.element_types import FLOAT32, KINDS, REDUCTIONS, SUM, has_code
from totalreduce.kernels.relay import ROW
from totalreduce.schedules.actions import NOTHING, Action, Chunking, Mode, Receive, Send

__all__ = ["RelayPlan", "Standing", "Sum", "plan_of"]

_RECEIVE: Final = {
    Mode.REPLACE: words.REPLACE,
    Mode.COMBINE: words.COMBINE,
    Mode.COMBINE_LAST: words.COMBINE_LAST,
}
#: The length of a line of the processor's cache.
_CACHE_LINE_BYTES: Final = 64

#: The first chunk and the number of the chunks whose sums are in one slot.
_Key = tuple[int, int]
#: Messages of an operation that wait to leave: the number of the lane, and the index of the action in the program.
_Waiting = Collection[tuple[int, int]]
#: For each track: the index of the next row that receives, and of the next one that sends.
_Positions = list[tuple[int, int]]


class Sum(NamedTuple):
    """Unfinished sums of a lane that are not kept in the tensor: a part of an accumulator of the engine.

    Attributes:
        place: The buffer and the lane of the accumulator.
        start: The first byte in the accumulator.
        stop: The byte after the last one.
        first: The row that writes the sums first.
        last: The row that needs them last; the number of rows, if they are kept until the lane has ended.
    """

    place: tuple[int, int]
    start: int
    stop: int
    first: int
    last: int


class Standing(NamedTuple):
    """How far messages of the engine have carried an operation out.

    Attributes:
        positions: By track: the index of the next row that receives, and of the next one that sends.
        carried_out: The track and the index of every row behind these that was carried out, of tracks with states.
        early: Of every body that has come before its turn, in tracks with states: the track, the row and the bytes.
    """

    positions: list[tuple[int, int]]
    carried_out: list[tuple[int, int]]
    early: list[tuple[int, int, memoryview]]


@dataclass(frozen=True, slots=True, eq=False)
class RelayPlan:
    """What the relay needs of an operation and does not change from iteration to iteration.

    Attributes:
        peers: The ranks with which messages are exchanged.
        near: Those of them with which the engine exchanges the messages, because no connection for bulk leads to them.
        sources: Of the others, those from which bodies come. A message without body may come by any connection.
        targets: Of the others, those to which messages leave.
        rows: By track: the rows of ``kernels.relay``, one after the other.
        tracks: The words of the tracks that do not change (``kernels.relay.tracks_of``).
        has_states: Whether the rows have states.
        ahead: By how many rows a track that sends may be ahead of those that receive; 0: it does not wait for them.
        standing: Returns how far messages of the engine have carried out an operation; ``None``: it cannot be handed
            over now.
        kind: The element type (``kernels.element_types``).
        itemsize: The bytes of an element.
        reduction: How contributions are combined (``kernels.element_types``).
        divisor: Of an average; otherwise 1.
        sums: The unfinished sums that are not kept in the tensor, by number.
        slots: How many slots the relay needs for them, and for bodies that come before their turn; and the length of
            the longest of these, or a little more.
    """

    peers: tuple[int, ...]
    near: frozenset[int]
    sources: frozenset[int]
    targets: frozenset[int]
    rows: list[array[int]]
    tracks: Array
    has_states: bool
    ahead: int
    standing: Callable[[Operation, _Waiting], Standing | None]
    kind: int
    itemsize: int
    reduction: int
    divisor: int
    sums: Sequence[Sum]
    slots: tuple[int, int]

    def needed_sums(self, standing: Standing) -> list[int]:
        """Return the numbers of the sums that there are and that are needed, of an operation that is handed over."""
        numbers = []
        for number, (place, _, _, first, last) in enumerate(self.sums):
            lane = place[1]
            receives, sends = standing.positions[lane]
            is_needed = last >= receives
            if last * ROW.num_words < len(self.rows[lane]) and self.rows[lane][last * ROW.num_words] == words.SEND:
                is_needed = last >= sends and (lane, last) not in standing.carried_out
            if first < receives and is_needed:
                numbers.append(number)
        return numbers

    @property
    def is_of_blocks(self) -> bool:
        """Whether the tracks are blocks. Then the engine may receive some messages: no other track needs them."""
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
    near = frozenset(peers) - bulk_peers
    if len(near) == len(peers):
        return None
    if layout.signature.kind in PAIRWISE:
        return None if near else _plan_of_blocks(layout, peers, config, bytes_per_s)
    # A receiver says that it has submitted an operation only if it expects more than the eager allowance.
    if layout.num_bytes <= config.eager_bytes:
        return None
    return _plan_of_lanes(layout, peers, near)


# ------------------------------------------------------------------------------------------------- rings and chains


def _plan_of_lanes(layout: OperationLayout, peers: tuple[int, ...], near: frozenset[int]) -> RelayPlan | None:
    """Return the plan of a schedule in which messages are added, or passed on."""
    program, signature = layout.program, layout.signature
    # A chain has a second source only in a broadcast: it sends the consent, an empty message, after the data of this
    # rank has left.
    has_states = max(len(program.sources), len(program.targets)) > 1 and program.algorithm != Algorithm.CHAIN
    if layout.num_lanes > words.TRACKS_MAX:
        return None
    receives = [action for action in program.actions if isinstance(action, Receive)]
    if has_states and any(action.chunk == NOTHING for action in receives):
        return None  # such a message may come by any connection, and before its turn
    # Measured with 64 MiB on four hosts of two ranks: float32 951 and 979 ms, and 1,045 and 1,042 by messages. But
    # bfloat16, whose sums are not in the tensor, took 2,490 and 3,623 ms, and 1,714 and 1,814.
    if near and (not has_states or layout.keeps_partials):
        return None
    adds = any(action.mode is not Mode.REPLACE for action in receives)
    if adds and not has_code(signature.dtype, signature.reduction):
        return None
    rows = _Rows(layout, peers, has_states=has_states)
    return RelayPlan(
        peers=peers,
        near=near,
        sources=frozenset(action.peer for action in receives if action.chunk != NOTHING) - near,
        targets=frozenset(program.targets) - near,
        rows=rows.by_lane,
        tracks=words.tracks_of(rows.by_lane, [layout.expectation.packed] * layout.num_lanes, of_blocks=False),
        has_states=has_states,
        ahead=0,
        standing=functools.partial(
            _standing_of_lanes, [_following(row) for row in rows.by_lane], has_states=has_states
        ),
        kind=KINDS.get(signature.dtype, FLOAT32),
        itemsize=signature.dtype.itemsize,
        reduction=REDUCTIONS.get(signature.reduction, SUM),
        divisor=len(layout.ranks) if signature.reduction is ReduceOp.AVG else 1,
        sums=rows.sums,
        slots=(rows.num_slots, rows.slot_bytes),
    )


def _following(rows: array[int]) -> _Positions:
    """Return for each row, and for the end, the first row from there on that receives, and that sends."""
    length = len(rows) // ROW.num_words
    return [
        (words.next_row(rows, length, index, False), words.next_row(rows, length, index, True))
        for index in range(length + 1)
    ]


def _standing_of_lanes(
    following: list[_Positions], operation: Operation, waiting: _Waiting, *, has_states: bool
) -> Standing | None:
    """Return ``RelayPlan.standing``; ``following``: by lane, what ``_following`` returns."""
    first: dict[int, int] = {}  # by lane: the first action whose message waits
    for number, index in waiting:
        first[number] = min(first.get(number, index), index)
    standing = Standing([], [], [])
    for lane, rows in zip(operation.lanes, following, strict=True):
        if lane.arrivals and (not has_states or any(arrival.computing for arrival in lane.arrivals.values())):
            return None
        receives, sends = rows[lane.position][0], rows[first.get(lane.index, lane.position)][1]
        standing.positions.append((receives, sends))
        if has_states:
            sent = [index for index in range(sends, lane.position) if (lane.index, index) not in waiting]
            there = [index for index, arrival in lane.arrivals.items() if arrival.buffer is None]
            standing.carried_out.extend((lane.index, index) for index in (*sent, *there))
            standing.early.extend(
                (lane.index, index, arrival.buffer)
                for index, arrival in lane.arrivals.items()
                if arrival.buffer is not None
            )
    return standing


class _Rows:
    """The rows of the lanes of an operation.

    Attributes:
        by_lane: The rows of each lane, one after the other.
        sums: See ``RelayPlan``.
        num_slots: See ``RelayPlan.slots``.
        slot_bytes: See ``RelayPlan.slots``; a slot begins and ends with a line of the cache.
    """

    def __init__(self, layout: OperationLayout, peers: tuple[int, ...], *, has_states: bool) -> None:
        """Write the rows; ``peers``: see ``RelayPlan``."""
        self._layout, self._peers = layout, peers
        self._actions = layout.program.actions
        self._is_wide = layout.partial_dtype is not layout.dtype
        uses = [index for index, action in enumerate(self._actions) if layout.keeps_partials and _uses_sum(action)]
        is_cut = layout.program.chunking is Chunking.CUT
        #: Whether the sums of a chunk have a slot of their own, because no two spans of chunks overlap.
        by_chunk = _are_apart({(self._actions[index].chunk, self._actions[index].span) for index in uses})
        #: By row that uses sums: what is equal for those of a lane that use the same ones.
        self._keys = {
            index: (self._actions[index].chunk, self._actions[index].span) if by_chunk or not is_cut else (0, 0)
            for index in uses
        }
        bounds = {key: self._bounds(key) for key in self._keys.values()}
        longest, num_early = 1, 0
        self.sums: list[Sum] = []
        numbers: list[dict[_Key, int]] = []
        for lane in range(layout.num_lanes):
            numbers.append({})
            for index, (action, region) in enumerate(zip(self._actions, layout.regions(lane), strict=True)):
                if region is None:
                    continue
                key = self._keys.get(index)
                if key is not None and key not in numbers[lane]:
                    numbers[lane][key] = len(self.sums)
                    same = [layout.regions(lane)[other] for other, used in self._keys.items() if used == key]
                    start = min(each.wide_start for each in same if each is not None)
                    stop = max(each.wide_stop for each in same if each is not None)
                    self.sums.append(Sum((region.buffer, lane), start, stop, *bounds[key]))
                    longest = max(longest, stop - start)
                if has_states and isinstance(action, Receive) and not _may_replace(action):
                    longest, num_early = max(longest, region.body_bytes), num_early + 1
        self.slot_bytes = _CACHE_LINE_BYTES * -(-longest // _CACHE_LINE_BYTES)
        self.num_slots = len(self.sums) + num_early
        self.by_lane = [
            array("q", itertools.chain.from_iterable(self._rows(found, layout.regions(lane))))
            for lane, found in enumerate(numbers)
        ]

    def _bounds(self, key: _Key) -> tuple[int, int]:
        """Return the first and the last row that use the sums of a key, as in ``Sum``."""
        indices = [index for index, used in self._keys.items() if used == key]
        sends = [index for index in indices if isinstance(self._actions[index], Send)]
        last = self._actions[indices[-1]]
        # Messages that send the same sums may leave in any order.
        ends_with_sum = isinstance(last, Receive) and last.mode is Mode.COMBINE_LAST and not sends
        is_last = ends_with_sum or sends == indices[-1:]
        return indices[0], indices[-1] if is_last else len(self._actions)

    def _rows(self, numbers: Mapping[_Key, int], regions: Sequence[Region | None]) -> Iterator[tuple[int, ...]]:
        """Yield the rows of a lane; ``numbers``: the numbers of its sums, by key."""
        for index, (action, region) in enumerate(zip(self._actions, regions, strict=True)):
            if region is None:
                yield words.NOTHING, *(ROW.num_words - 1) * [0]
                continue
            total = own = region.buffer, region.start
            manner = 0
            if index in self._keys:
                number = numbers[self._keys[index]]
                total = words.OF_SUMS, number * self.slot_bytes + region.wide_start - self.sums[number].start
                manner = words.GIVES_BACK if self.sums[number].last == index else 0
            if isinstance(action, Send):
                what, local = words.SEND, total if action.partial else own
                into = local
            else:
                what, local = _RECEIVE[action.mode], total if action.onto_partial else own
                into = total if action.mode is Mode.COMBINE else (region.into, region.start)
                manner |= self._manner(action)
            peer = self._peers.index(action.peer)
            yield what, manner, action.step, peer, region.body_bytes, *local, *into

    def _manner(self, action: Receive) -> int:
        """Return the bits of ``ROW.manner`` of a row that receives."""
        manner = words.ANYTIME if action.anytime else 0
        if self._is_wide:
            manner |= words.WIDE_BODY if action.partial else 0
            manner |= words.WIDE_LOCAL if action.onto_partial else 0
            manner |= words.WIDE_RESULT if action.mode is Mode.COMBINE else 0
        return manner


def _uses_sum(action: Action) -> bool:
    """Return whether an action reads or writes an unfinished sum of this rank."""
    if isinstance(action, Send):
        return action.partial
    return action.onto_partial or action.mode is Mode.COMBINE


def _may_replace(action: Receive) -> bool:
    """Return whether the message of an action may be written to its place before its turn."""
    return action.mode is Mode.REPLACE and action.anytime


def _are_apart(spans: Collection[tuple[int, int]]) -> bool:
    """Return whether no two spans of chunks, each given by its first chunk and its length, overlap."""
    in_order = sorted(spans)
    return all(first + length <= after for (first, length), (after, _) in itertools.pairwise(in_order))


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
            rows[-1].extend((what, 0, action.step, peers.index(action.peer), at.body_bytes, *2 * (at.buffer, at.start)))
        signatures.append(signature)
        positions.append(position)
    longest = max(row[ROW.length_bytes] for row in rows)
    return RelayPlan(
        peers=peers,
        near=frozenset(),
        sources=frozenset(layout.program.sources),
        targets=frozenset(layout.program.targets),
        rows=rows,
        tracks=words.tracks_of(rows, signatures, of_blocks=True),
        has_states=False,
        ahead=max(2, round(exchange_window(bytes_per_s, len(peers)) / longest)),
        standing=functools.partial(_standing_of_blocks, positions),
        kind=FLOAT32,
        itemsize=1,
        reduction=SUM,
        divisor=1,
        sums=(),
        slots=(0, 0),
    )


def _standing_of_blocks(positions: _Positions, operation: Operation, _waiting: _Waiting) -> Standing | None:
    """Return ``RelayPlan.standing``: the engine hands such an operation over before its first message."""
    has_begun = any(lane.begun or lane.arrivals for lane in operation.lanes)
    return None if has_begun else Standing(positions, [], [])
