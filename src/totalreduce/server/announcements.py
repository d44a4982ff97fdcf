"""How rank 0 tells the ranks that only serve of the next parameter server."""

from __future__ import annotations

import queue
from typing import final

from totalreduce.foundation.errors import ProtocolError, TotalReduceError
from totalreduce.foundation.types import operation_id
from totalreduce.groups.group import Group

__all__ = ["Announcements", "announce"]

_NUMBER = operation_id("announcements of parameter servers")


def announce(group: Group, first_server: int, text: str) -> None:
    """Send the description of a parameter server from rank 0 to all ranks from ``first_server`` on.

    Raises:
        GroupClosed: This rank has closed the group.
    """
    runner = group.operations.runner

    def post(_now: float) -> bool:
        for rank in range(first_server, group.world_size):
            runner.engine.channels.post(rank, _NUMBER, text.encode())
        return True

    runner.act(post)


@final
class Announcements:
    """What rank 0 announces to this rank. It implements ``engine.channels.Channel``."""

    def __init__(self, group: Group) -> None:
        """Open the channel; what came before is not lost."""
        self._queue: queue.SimpleQueue[str | TotalReduceError | None] = queue.SimpleQueue()
        runner = group.operations.runner

        def begin(now: float) -> bool:
            runner.engine.channels.open(_NUMBER, self, now)
            if 0 in runner.engine.members.departed:
                self._queue.put(None)
            return True

        runner.act(begin)

    def wait(self) -> str | None:
        """Return the next description; ``None``: rank 0 has closed its group, so that nothing more will come.

        There is no deadline: a program may compute for hours before it connects. The loss of a rank ends the wait.

        Raises:
            PeerLost: A rank is lost.
            GroupClosed: This rank has closed the group.
        """
        found = self._queue.get()
        if isinstance(found, TotalReduceError):
            raise found
        return found

    # -------------------------------------------------------------------------- the channel: under the engine's lock

    def receive(self, peer: int, message: bytes, now: float) -> None:
        """See ``Channel``."""
        del now
        if peer != 0:
            raise ProtocolError(f"rank {peer} announces a parameter server, which only rank 0 does")
        self._queue.put(message.decode(errors="replace"))

    def fail(self, error: TotalReduceError, now: float) -> None:
        """See ``Channel``."""
        del now
        self._queue.put(error)

    def depart(self, peer: int, reason: str, now: float) -> None:
        """See ``Channel``."""
        del reason, now
        if peer == 0:
            self._queue.put(None)

    def next_due(self) -> None:
        """See ``Channel``."""
        return

    def tick(self, now: float) -> None:
        """See ``Channel``."""
