"""What a schedule may ask for, and the compiled program of a lane.

A schedule is a generator that yields actions for *one lane on one rank* and never sees a transport, a buffer or a
length. ``Send`` is posted and the lane goes on; ``Receive`` stops the lane until the message is there. The slot of a
message is (operation, lane, step); a step is used once per lane and pair of ranks.

A chunk is a number. Either all chunks are cut out of one tensor (``Chunking.CUT``: allreduce, reduce, broadcast), or
each is a tensor of its own (``Chunking.BLOCKS``: allgather, alltoall and so on). Such a tensor may have any size, which
its sender and its receiver know.

Contract of a schedule ("causally free"): a ``Receive`` with ``REPLACE`` may overwrite bytes that an earlier ``Send`` of
this rank has not sent yet only if the peer needs that ``Send``'s message before it can produce the message received.
Ring and chain have this property. The simulated transport copies a body only when it leaves, and so it shows a schedule
without this property.

A module of schedules declares them, with what they cost, in ``SCHEDULES`` (:mod:`totalreduce.schedules.spec`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from totalreduce.foundation.types import Algorithm

__all__ = [
    "NOTHING",
    "Action",
    "Chunking",
    "Cost",
    "Mode",
    "Program",
    "Receive",
    "Schedule",
    "Send",
    "compile_program",
    "translate",
]


#: The chunk of a message without body.
NOTHING = -1


class Mode(enum.IntEnum):
    """What becomes of a received segment."""

    REPLACE = 0  # it is the result
    COMBINE = 1  # it is reduced with the local segment
    COMBINE_LAST = 2  # the same, and this was the last contribution: divide (AVG), round (half types)


class Chunking(enum.Enum):
    """Where the chunks of an operation are."""

    CUT = "cut"  # one tensor, cut into chunks that differ by one element at most
    BLOCKS = "blocks"  # one tensor per chunk; a rank may lack those that it neither sends nor receives


@dataclass(frozen=True, slots=True)
class Send:
    """Send the lane's part of ``chunk`` (of ``span`` chunks from there on, if they are cut) to ``peer``.

    ``partial``: the segment is an unfinished sum, which may have a wider element type on the wire. ``once``: only the
    first lane sends it.
    """

    peer: int
    step: int
    chunk: int
    partial: bool = False
    span: int = 1
    once: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the lane's part of ``chunk`` (of ``span`` chunks) from ``peer``.

    ``partial`` as in the matching ``Send``. ``onto_partial``: combine with the partial sum of earlier receives, not
    with this rank's own contribution. ``into``: the chunk into which the finished sum is written, if it is not
    ``chunk``. ``anytime``: no earlier action of this rank writes to these bytes, or reads them after the message may
    have arrived, so the message may be received into them before its turn.
    """

    peer: int
    step: int
    chunk: int
    mode: Mode = Mode.REPLACE
    partial: bool = False
    onto_partial: bool = False
    into: int | None = None
    anytime: bool = False
    span: int = 1
    once: bool = False


Action = Send | Receive
Schedule = Iterator[Action]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the busiest rank pays."""

    steps: float  #: Message latencies one after the other.
    bytes_sent: float  #: Bytes sent or received on its link, one after the other.
    #: Further messages that it handles while it waits for none, a sent and a received one counting as one.
    messages: float = 0.0

    def seconds(self, latency_s: float, bytes_per_s: float) -> float:
        """Time by the latency-bandwidth model (Hockney, 1994), with LogP's overhead for further messages."""
        overhead_s = min(_OVERHEAD * latency_s, _OVERHEAD_S_MAX)
        return self.steps * latency_s + self.messages * overhead_s + self.bytes_sent / bytes_per_s


#: What handling one more message costs, as a share of a message's latency, most of which is software too. Measured:
#: with 0.5 the best allreduce schedule at 1 KiB is chosen with 4 ranks on a host and with 8 hosts; with 0.2 it is not.
#: Source of the idea: Culler et al., "LogP: towards a realistic model of parallel computation" (1993), DOI
#: 10.1145/155332.155333.
_OVERHEAD = 0.5
#: Distance makes a message slow and not dear: between cities, or where the latency was measured while others had the
#: cores, handling one takes no longer than here.
_OVERHEAD_S_MAX = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A schedule written out, shared by all lanes of all operations of one kind and one (rank, world size, root)."""

    actions: tuple[Action, ...]  #: In order.
    #: (peer, step) -> index of the receive in ``actions``: what a message may be.
    receives: Mapping[tuple[int, int], int]
    sends: Mapping[tuple[int, int], int]  #: The same for sends.
    num_chunks: int  #: How many chunks there are.
    span_max: int  #: The most chunks that travel as one message; equal on all ranks.
    chunking: Chunking  #: Where the chunks are.
    #: Whether some rank combines more than two contributions one after the other; equal on all ranks.
    partial_sums: bool
    preserves: bool  #: Partial sums must not be kept in the tensor, because it is not this rank's to change.
    sources: tuple[int, ...]  #: The peers this rank receives from, in order of first use.
    targets: tuple[int, ...]  #: The peers this rank sends to.
    addressed: frozenset[int]  #: The peers to which it sends a message before its first receive.
    #: How many ranks a lane passes one after the other, if the tensor is to be cut into many lanes that follow each
    #: other; 0 if lanes only overlap. Equal on all ranks.
    pipeline_ranks: int = 0
    algorithm: str = Algorithm.AUTO  #: The name of the schedule.
    #: Returns the ranks whose contributions to a chunk are added, in the order in which they are added one after the
    #: other; ``None`` if sums of contributions are added.
    contributions: Callable[[int], Sequence[int]] | None = None


def compile_program(
    schedule: Schedule,
    num_chunks: int,
    *,
    chunking: Chunking = Chunking.CUT,
    partial_sums: bool = False,
    preserves: bool = False,
    span_max: int = 1,
    pipeline_ranks: int = 0,
    contributions: Callable[[int], Sequence[int]] | None = None,
) -> Program:
    """Write a schedule out and check that every slot is used once. Raises ``ValueError``.

    ``partial_sums``, ``span_max`` and ``pipeline_ranks`` must be given where this rank's actions do not show them.
    """
    actions: list[Action] = []
    receives: dict[tuple[int, int], int] = {}
    sends: dict[tuple[int, int], int] = {}
    used: set[int] = set()
    for index, action in enumerate(schedule):
        slot = (action.peer, action.step)
        if slot in (receives if isinstance(action, Receive) else sends):
            raise ValueError(f"the schedule uses the slot (peer, step) = {slot} twice")
        if isinstance(action, Receive):
            receives[slot] = index
            if action.mode is Mode.REPLACE and used.isdisjoint(range(action.chunk, action.chunk + action.span)):
                action = dataclasses.replace(action, anytime=True)  # noqa: PLW2901
            used.add(action.chunk if action.into is None else action.into)
        else:
            sends[slot] = index
        used.update(range(action.chunk, action.chunk + action.span))
        actions.append(action)
    sources = tuple(dict.fromkeys(peer for peer, _ in receives))
    targets = tuple(dict.fromkeys(action.peer for action in actions if isinstance(action, Send)))
    before_waiting = itertools.takewhile(lambda action: isinstance(action, Send), actions)
    addressed = frozenset(action.peer for action in before_waiting)
    partial_sums = partial_sums or any(isinstance(a, Receive) and a.mode is Mode.COMBINE for a in actions)
    return Program(
        tuple(actions),
        receives,
        sends,
        num_chunks,
        span_max,
        chunking,
        partial_sums,
        preserves,
        sources,
        targets,
        addressed,
        pipeline_ranks,
        contributions=contributions,
    )


@functools.lru_cache(maxsize=1024)
def translate(program: Program, ranks: tuple[int, ...]) -> Program:
    """Return the program of a subgroup, with the ranks of the whole group in place of the subgroup's."""
    inner = program.contributions
    return dataclasses.replace(
        program,
        actions=tuple(dataclasses.replace(action, peer=ranks[action.peer]) for action in program.actions),
        receives={(ranks[peer], step): index for (peer, step), index in program.receives.items()},
        sends={(ranks[peer], step): index for (peer, step), index in program.sends.items()},
        sources=tuple(ranks[peer] for peer in program.sources),
        targets=tuple(ranks[peer] for peer in program.targets),
        addressed=frozenset(ranks[peer] for peer in program.addressed),
        contributions=None if inner is None else lambda chunk: [ranks[peer] for peer in inner(chunk)],
    )
