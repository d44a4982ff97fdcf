"""The four things a schedule may ask for, and the compiled program of a lane.

A schedule is a generator that yields actions for *one lane on one rank* and never sees a transport, a buffer or a
length. ``Send`` is posted and the lane goes on; ``Receive`` stops the lane until the message is there. The slot of a
message is (operation, lane, step); a step is used once per lane and pair of ranks.

Contract of a schedule ("causally free"): the destination of a ``Receive`` that replaces may still be on its way out in
an earlier ``Send`` of this rank only if the sender of the incoming message cannot have produced it before that
outgoing one arrived. Ring and chain have this property; the simulated transport, which copies a body only when it
leaves, shows a schedule that has not.

Cost: every schedule module has ``cost(world_size, num_bytes) -> Cost`` so that people and selectors can compare.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["NOTHING", "Action", "Cost", "Mode", "Program", "Receive", "Schedule", "Send", "compile_program"]


#: The chunk of a message without body.
NOTHING = -1


class Mode(enum.IntEnum):
    """What becomes of a received segment."""

    REPLACE = 0  # it is the result
    COMBINE = 1  # it is reduced with the local segment
    COMBINE_LAST = 2  # the same, and this was the last contribution: divide (AVG), round (half types)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the lane's part of ``chunk`` to ``peer``.

    ``partial``: the segment is an unfinished sum (it may be wider than the result on the wire).
    """

    peer: int
    step: int
    chunk: int
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the lane's part of ``chunk`` from ``peer``.

    ``partial`` as in the matching ``Send``. ``onto_partial``: combine with the partial sum of earlier receives, not
    with this rank's own contribution.
    """

    peer: int
    step: int
    chunk: int
    mode: Mode = Mode.REPLACE
    partial: bool = False
    onto_partial: bool = False


Action = Send | Receive
Schedule = Iterator[Action]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank pays: ``steps`` message latencies one after the other, and bytes sent."""

    steps: int
    bytes_sent: float


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule written out, shared by all lanes of all operations of one kind and one (rank, world size, root).

    Attributes:
        actions: In order.
        receives: (peer, step) -> index of the receive in ``actions``: what a message may be.
        num_chunks: How many chunks the tensor is cut into.
        partial_sums: Whether some rank combines more than two contributions one after the other; equal on all ranks.
        sources: The peers this rank receives from, in order of first use.
        targets: The peers this rank sends to.
    """

    actions: tuple[Action, ...]
    receives: Mapping[tuple[int, int], int]
    num_chunks: int
    partial_sums: bool
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def compile_program(schedule: Schedule, num_chunks: int, *, partial_sums: bool = False) -> Program:
    """Write a schedule out and check that every slot is used once.

    ``partial_sums`` must be given where this rank's actions do not show it.

    Raises:
        ValueError: The schedule uses a (peer, step) twice in one direction.
    """
    actions = tuple(schedule)
    receives: dict[tuple[int, int], int] = {}
    sends: set[tuple[int, int]] = set()
    for index, action in enumerate(actions):
        slot = (action.peer, action.step)
        if slot in (receives if isinstance(action, Receive) else sends):
            raise ValueError(f"the schedule uses the slot (peer, step) = {slot} twice")
        if isinstance(action, Receive):
            receives[slot] = index
        else:
            sends.add(slot)
    sources = tuple(dict.fromkeys(peer for peer, _ in receives))
    targets = tuple(dict.fromkeys(action.peer for action in actions if isinstance(action, Send)))
    partial_sums = partial_sums or any(isinstance(a, Receive) and a.mode is Mode.COMBINE for a in actions)
    return Program(actions, receives, num_chunks, partial_sums, sources, targets)
