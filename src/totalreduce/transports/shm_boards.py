"""``base.Boards`` in the memories of ``shm_memory.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import final

from totalreduce.transports.shm_connection import ShmConnection
from totalreduce.transports.shm_memory import OWNER, Outbox
from totalreduce.transports.shm_reads import ProcessReads
from totalreduce.transports.shm_waiting import ASLEEP, Sleep

__all__ = ["ShmBoards"]


@final
class ShmBoards:
    """The memories of the ranks of one host (see ``base.Boards``)."""

    def __init__(
        self,
        rank: int,
        members: Collection[int],
        outbox: Outbox,
        sleep: Sleep,
        reads: ProcessReads,
        expel: Callable[[int, str], None],
    ) -> None:
        self.members = members
        self.board_at, self.board_bytes = outbox.layout.board_at, outbox.layout.board_bytes
        self.sleep_at = 8 * OWNER.sleep
        self.offset_of = outbox.arena.offset_of
        self.expel, self._sleep, self._reads = expel, sleep, reads
        self.processes: Mapping[int, int] = reads.processes
        self._memories = {rank: outbox.view}
        self._connections: dict[int, ShmConnection] = {}

    def add(self, connection: ShmConnection, index: int) -> None:
        """Add the memory of a rank that has connected; it stays readable when the rank has gone.

        ``index``: the rank's in the layout.
        """
        # First: whoever finds the memory takes the process's number for final.
        self._reads.meet(connection.peer, index, connection.sock, connection.mapping)
        self._memories[connection.peer] = connection.mapping.view
        self._connections[connection.peer] = connection

    def close(self) -> None:
        """Let go of the memories of the other ranks. Nothing reads them any more."""
        self._reads.close()
        self._memories.clear()
        self._connections.clear()
        # These refer to objects that refer to this one.
        self.expel = lambda _peer, _reason: None
        self._sleep.watched = lambda: False

    def memories(self) -> dict[int, memoryview]:
        """Return the memories by rank."""
        return self._memories

    def let_read(self, peers: Collection[int], address: int, num_bytes: int) -> bool:
        """Return whether other ranks can read memory of this process that is not shared."""
        return self._reads.admits(peers) and self._reads.can_be_read(address, num_bytes)

    def rely_on(self, peers: Collection[int]) -> None:
        """Count the connections to these ranks as used."""
        for peer in peers:
            if peer in self._connections:
                self._connections[peer].relied_on = True

    def ring(self, peer: int) -> None:
        """Wake a rank if it sleeps. Any thread."""
        self._connections[peer].bell.ring(ASLEEP)

    def watch(self, has_changed: Callable[[], bool]) -> None:
        """Have waits end when ``has_changed`` returns true."""
        self._sleep.watched = has_changed
