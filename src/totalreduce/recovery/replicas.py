"""Copies of the state that a rank has for itself, on the ranks after it.

Parameters and the optimizer's state are equal on all ranks, so any rank can give them to a new one. Residuals, the
sparse sessions and the running statistics of a model's buffers are not: with the rank they would be lost. So every rank
sends them to the next ranks before each vote. A copy counts when the vote has passed: then it is what the rank goes on
with, and until then the copy of the version before counts. (Rabit keeps the local models of its ranks so, in a ring.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from totalreduce.groups.encoding import pack, unpack
from totalreduce.groups.group import Group
from totalreduce.recovery.membership import Decision

__all__ = ["Replicas"]

#: The tag of the messages between ranks.
_TAG = 0x5EA7


@final
class Replicas:
    """The copies that this rank has of other ranks, and the exchange of copies.

    Attributes:
        num_copies: The number of ranks that have a copy of each rank.
    """

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies
        #: By seat: the version, and the packed state.
        self._held: dict[int, tuple[int, torch.Tensor]] = {}
        self._next: dict[int, tuple[int, torch.Tensor]] = {}

    def exchange(self, group: Group, decision: Decision, version: int, own: Mapping[str, Any]) -> None:
        """Send this rank's own state of a version to the next ranks, and receive those of the ranks before. Collective.

        Args:
            group: The ranks.
            decision: The members of the epoch.
            version: The version that the state belongs to when the vote passes.
            own: The state: values and tensors.

        Raises:
            PeerLost: A rank is lost. The copies that count are still those of the last version.
        """
        self._next = {}
        control, size = group.control, group.world_size
        mine = pack(dict(own))
        lengths = torch.zeros(size, dtype=torch.int64)
        lengths[group.rank] = mine.numel()
        control.allreduce(lengths, name="recovery/lengths").wait()
        for distance in range(1, min(self.num_copies, size - 1) + 1):
            to, source = (group.rank + distance) % size, (group.rank - distance) % size
            copy = torch.empty(int(lengths[source]), dtype=torch.uint8)
            arrival = control.recv(copy, src=source, tag=_TAG)
            departure = control.send(mine, dst=to, tag=_TAG)
            arrival.wait()
            departure.wait()
            self._next[decision.members[source].seat] = (version, copy)

    def commit(self) -> None:
        """Note that the vote has passed: the copies of the last exchange are those that count."""
        self._held, self._next = self._next or self._held, {}

    def seats(self, version: int) -> list[int]:
        """Return the seats of which this rank has a copy of a version."""
        return [seat for seat, (held, _) in self._held.items() if held == version]

    def send(self, group: Group, seat: int, to: int) -> None:
        """Send the copy of a seat's state to a rank, which calls ``receive``."""
        _, copy = self._held[seat]
        group.control.send(torch.tensor([copy.numel()]), dst=to, tag=_TAG).wait()
        group.control.send(copy, dst=to, tag=_TAG).wait()

    def receive(self, group: Group, source: int) -> dict[str, Any]:
        """Receive the copy that a rank sends."""
        length = torch.zeros(1, dtype=torch.int64)
        group.control.recv(length, src=source, tag=_TAG).wait()
        copy = torch.empty(int(length), dtype=torch.uint8)
        group.control.recv(copy, src=source, tag=_TAG).wait()
        state: dict[str, Any] = unpack(copy)
        return state

    def take(self, seat: int) -> dict[str, Any]:
        """Return the state of a seat that nobody has any more, and forget the copy."""
        state: dict[str, Any] = unpack(self._held.pop(seat)[1])
        return state

    def forget(self, seat: int) -> None:
        """Forget the copy of a seat's state, if this rank has one."""
        self._held.pop(seat, None)
