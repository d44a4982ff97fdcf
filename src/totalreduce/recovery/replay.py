"""The rules of replay: plain objects without threads, groups or clocks.

A program makes a sequence of *calls* (allreduce, broadcast, allgather) and *checkpoints*. The *version* is the number
of checkpoints so far, the *position* of a rank is the number of calls that it has finished since the last checkpoint. A
process that replaces a lost one runs the program from the top, begins with the state of the last checkpoint, and gets
the results of the calls that the job has finished since then from the logs of the other ranks.

Before a call moves data, all ranks meet in it. So a rank that has returned from call s proves that all have entered
call s, and have finished call s - 1: the ranks that are left after a loss differ by one call at most. The result of the
last call must therefore be on every rank that has finished it, and older results only where a new process can get them.
(Chen, Cano, Zhou: RABIT: A Reliable Allreduce and Broadcast Interface, 2015.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, final

from totalreduce.foundation.errors import ConfigurationError, RecoveryError, ReplayMismatchError
from totalreduce.foundation.types import OpKind, Signature
from totalreduce.recovery.routing import Route, find_route

__all__ = ["Call", "Entry", "Parcel", "ReplayLog", "Standing", "Versions", "plan_parcels"]

Result = TypeVar("Result")
State = TypeVar("State")

#: What an entry of the log takes beside its result and its name, in bytes, by estimate.
_ENTRY_BYTES = 512
#: The most results in one parcel. Their descriptions, with the longest names, are shorter than the longest document of
#: an encoded value.
_RESULTS_MAX = 2048


@dataclass(frozen=True, slots=True)
class Call:
    """What must be equal on all ranks, and when the call is replayed."""

    signature: Signature  #: The kind, dtype, reduction, root and shape.
    name: str = ""  #: The name that the program has given; "" if it has given none.

    def describe(self) -> str:
        """Return a description for messages, such as ``allreduce(sum) of float32[3, 4] named 'counts'``."""
        return self.signature.describe() + (f" named {self.name!r}" if self.name else "")


@dataclass(frozen=True, slots=True)
class Entry(Generic[Result]):
    """A call that the job has finished, and its result."""

    call: Call
    result: Result


@final
class ReplayLog(Generic[Result]):
    """The results of the calls since the last checkpoint that one rank keeps."""

    def __init__(self, rank: int, world_size: int, *, result_copies: int, bytes_max: int) -> None:
        """Begin without a result.

        Args:
            rank: This rank.
            world_size: The number of ranks.
            result_copies: On how many ranks a result is kept, but for the last one, which all ranks keep. If the
                number of ranks is no multiple of it, some results are kept on more ranks.
            bytes_max: The most bytes of all results since a checkpoint. A new process gets all of them.
        """
        self.version = 0  #: The version after which the calls follow.
        self.position = 0  #: The number of calls whose results the program of this rank has.
        self._world_size = world_size
        self._round = max(world_size // result_copies, 1)
        self._place = rank % self._round
        self._bytes_max = bytes_max
        self._num_bytes = 0  #: Of the results of the calls before the position, on all ranks.
        self._entries: dict[int, Entry[Result]] = {}

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of the calls whose results this rank has."""
        return tuple(sorted(self._entries))

    @property
    def is_replaying(self) -> bool:
        """Whether the log has the result of the next call."""
        return self.position in self._entries

    def describe_position(self) -> str:
        """Return the place of the next call, for messages."""
        return f"call {self.position} after version {self.version}"

    def answer(self, call: Call) -> Result | None:
        """Return the result of the next call if the log has it; the position moves on. ``None``: carry the call out.

        Raises:
            ReplayMismatchError: The job has made another call in this place.
        """
        entry = self._entries.get(self.position)
        if entry is None:
            return None
        if entry.call != call:
            raise self._mismatch(call.describe())
        self._move_on(call)
        return entry.result

    def check_no_call(self, description: str) -> None:
        """Check that the job has made no call where this rank does what ``description`` says.

        Raises:
            ReplayMismatchError: It has.
        """
        if self.is_replaying:
            raise self._mismatch(description)

    def check_room(self, call: Call) -> None:
        """Check that there is room for the result of the next call, before it is carried out.

        Raises:
            ConfigurationError: The results since the last checkpoint would take too many bytes, on all ranks.
        """
        total = self._num_bytes + self._bytes_of(call)
        if total > self._bytes_max:
            raise ConfigurationError(
                f"{self.describe_position()}: with this call, the results since the last checkpoint take {total} "
                f"bytes, and log_bytes is {self._bytes_max}. Call job.checkpoint() more often, or choose a larger "
                "log_bytes in tr.replayed"
            )

    def append(self, call: Call, result: Result) -> None:
        """Keep the result of a call that was carried out; the position moves on.

        All ranks have entered this call, so they have finished the one before: its result is dropped, unless this rank
        is one of those that keep it.
        """
        last = self.position - 1
        if last in self._entries and last % self._round != self._place:
            del self._entries[last]
        self._entries[self.position] = Entry(call, result)
        self._move_on(call)

    def entries(self, numbers: Iterable[int]) -> dict[int, Entry[Result]]:
        """Return entries that this rank has, for others."""
        return {number: self._entries[number] for number in numbers}

    def install(self, entries: Mapping[int, Entry[Result]]) -> None:
        """Take entries from other ranks. They are kept until the next checkpoint."""
        self._entries.update(entries)

    def begin(self, version: int) -> None:
        """Begin anew after the checkpoint of a version: all results are dropped."""
        self.version, self.position, self._num_bytes = version, 0, 0
        self._entries.clear()

    def _move_on(self, call: Call) -> None:
        self._num_bytes += self._bytes_of(call)
        self.position += 1

    def _bytes_of(self, call: Call) -> int:
        """Return what an entry takes: its result, its name, and by estimate what else describes it."""
        signature = call.signature
        num_blocks = self._world_size if signature.kind is OpKind.ALLGATHER else 1
        return _ENTRY_BYTES + len(call.name.encode()) + num_blocks * signature.num_elements * signature.dtype.itemsize

    def _mismatch(self, description: str) -> ReplayMismatchError:
        logged = self._entries[self.position].call.describe()
        return ReplayMismatchError(
            self.version,
            self.position,
            (f"the job has made the call {logged}, and the process that was started again makes {description}",),
        )


@final
class Versions(Generic[State]):
    """The state of the last checkpoint and of the next one, on one rank.

    A checkpoint has two phases. In the first one a rank prepares the next version, and other ranks get copies of what
    it has for itself. In the second one the ranks vote: the vote passes when all ranks have come to it. Until it has
    passed, the last version counts, because other ranks may not have prepared the next one.
    """

    def __init__(self, state: State) -> None:
        self.version = 0  #: The version that counts.
        self.state = state  #: The state of this version.
        self.is_in_vote = False  #: Whether this rank has come to the vote, and does not know whether it has passed.
        self._prepared: State | None = None

    def prepare(self, state: State) -> None:
        """Note the state of the next version."""
        self._prepared = state

    def commit(self) -> None:
        """Note that the vote has passed: the next version counts."""
        assert self._prepared is not None
        self.version, self.state = self.version + 1, self._prepared
        self._prepared, self.is_in_vote = None, False

    def decided(self, version: int) -> bool:
        """Note the version with which the ranks go on after a loss; return whether the vote has passed.

        Raises:
            RecoveryError: This rank has another version, and cannot come to this one.
        """
        if version == self.version + 1 and self.is_in_vote:
            self.commit()
            return True
        self.is_in_vote = False
        if version != self.version:
            raise RecoveryError(f"this rank has version {self.version} of the state, and the others have {version}")
        return False

    def load(self, version: int, state: State) -> None:
        """Begin with the state of a version, from another rank."""
        self.version, self.state, self._prepared, self.is_in_vote = version, state, None, False


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank says of itself when a group was formed."""

    has_state: bool  #: Whether it has the state of the version with which the group begins.
    position: int  #: The number of calls that its program has finished since then.
    held: tuple[int, ...]  #: The numbers of the calls whose results it has.
    copies: tuple[int, ...]  #: The ranks of whose own state it has a copy, of this version.

    @property
    def end(self) -> int:
        """The number of calls that the job has finished, as far as this rank knows."""
        return max(self.position, *(number + 1 for number in self.held)) if self.held else self.position


@dataclass(frozen=True, slots=True)
class Parcel:
    """Data that some ranks send to others when a group was formed."""

    #: ``state``: what is equal on all ranks; ``own``: what one rank has for itself; ``results``: of calls.
    kind: Literal["state", "own", "results"]
    numbers: tuple[int, ...]  #: For ``own`` the rank; for ``results`` the numbers of the calls.
    route: Route  #: From whom each rank gets it.
    requesters: frozenset[int]  #: The ranks that need it. Other ranks on the route only pass it on.


def plan_parcels(standings: Sequence[Standing], version: int, *, with_own: bool) -> list[Parcel]:
    """Return what is sent when a group was formed. All ranks call it with the same arguments, and get the same.

    Results with the same holders and the same requesters travel together, up to 2048 in a parcel. Raises
    ``RecoveryError``.
    """
    size, end = len(standings), max(standing.end for standing in standings)
    new = frozenset(rank for rank, standing in enumerate(standings) if not standing.has_state)
    parcels = []
    if new:
        parcels.append(Parcel("state", (), find_route(size, frozenset(range(size)) - new, new), new))
    for rank in sorted(new) if with_own else ():
        holders = frozenset(other for other, standing in enumerate(standings) if rank in standing.copies)
        if holders:
            parcels.append(Parcel("own", (rank,), find_route(size, holders, [rank]), frozenset([rank])))
        elif version > 0 or end > 0:  # else no rank has used the local values with which the lost process began
            raise RecoveryError(
                f"version {version}: all ranks that had a copy of the local values of rank {rank} are lost with it. "
                "More copies need a larger local_replicas"
            )
    together: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    held = [frozenset(standing.held) for standing in standings]
    for number in range(end):
        holders = frozenset(rank for rank in range(size) if number in held[rank])
        requesters = frozenset(rank for rank in range(size) if standings[rank].position <= number) - holders
        if requesters and not holders:
            raise RecoveryError(
                f"version {version}: all ranks that had the result of call {number} are lost. More copies need a "
                "larger result_copies"
            )
        if requesters:
            together.setdefault((holders, requesters), []).append(number)
    for (holders, requesters), numbers in together.items():
        route = find_route(size, holders, requesters)
        parcels += [
            Parcel("results", tuple(numbers[begin : begin + _RESULTS_MAX]), route, requesters)
            for begin in range(0, len(numbers), _RESULTS_MAX)
        ]
    return parcels
