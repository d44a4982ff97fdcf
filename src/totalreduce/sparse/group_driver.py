"""Exchanges over a ``Group``: every action is an operation with a name of its own, so buckets may be in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.groups.group import Group
from totalreduce.groups.work import Work
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Array, Broadcast, Messages

__all__ = ["GroupDriver"]


@final
class GroupDriver:
    """A ``Carrier`` by a group.

    Args:
        group: The ranks. A subgroup of them is made, so that nobody else's names are met. Collective in the sense of
            ``Group.subgroup``: every rank does it.
        name: Different for each driver of a group.
    """

    def __init__(self, group: Group, name: str) -> None:
        """See the class."""
        self._group = group.control.subgroup(range(group.world_size), name=f"sparse {name}")
        self.rank, self.world_size = group.rank, group.world_size

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> _Started:
        """See ``Carrier``."""
        name = f"{channel}.{step}"
        group, rank = self._group, self.rank
        if isinstance(action, Allgather):
            outputs = _empty(action.sizes)
            work = group.allgather(outputs, _tensor(action.block), name=name, priority=priority)
            return _Started([work], lambda: [output.numpy() for output in outputs])
        if isinstance(action, Alltoall):
            sizes = [0 if source == rank else size for source, size in enumerate(action.sizes)]
            outputs = _empty(sizes)
            inputs = [_tensor(block[:0] if to == rank else block) for to, block in enumerate(action.blocks)]
            work = group.alltoall(outputs, inputs, name=name, priority=priority)
            own = action.blocks[rank]
            return _Started(
                [work], lambda: [own if source == rank else out.numpy() for source, out in enumerate(outputs)]
            )
        if isinstance(action, Allreduce):
            work = group.allreduce(torch.from_numpy(action.values), name=name, priority=priority)
            return _Started([work], lambda: action.values)
        if isinstance(action, Broadcast):
            block = _tensor(action.block) if rank == action.root else torch.empty(action.size, dtype=torch.uint8)
            work = group.broadcast(block, root=action.root, name=name, priority=priority, async_op=True)
            return _Started([work], block.numpy)
        return self._start_messages(action, channel, priority)

    def _start_messages(self, action: Messages, channel: int, priority: int) -> _Started:
        group = self._group
        came = {source: torch.empty(size, dtype=torch.uint8) for source, size in action.receives.items()}
        works = [group.recv(into, src=source, tag=channel, priority=priority) for source, into in came.items()]
        works += [
            group.send(_tensor(block), dst=target, tag=channel, priority=priority)
            for target, block in action.sends.items()
        ]
        return _Started(works, lambda: {source: into.numpy() for source, into in came.items()})


@final
class _Started:
    """Operations that together are one action."""

    def __init__(self, works: Sequence[Work], reply: Callable[[], Any]) -> None:
        self._works, self._reply = works, reply

    def on_done(self, callback: Callable[[], None]) -> None:
        """See ``Carried``."""
        if not self._works:
            callback()
            return
        lock, left = threading.Lock(), len(self._works)

        def one_done(_: Work) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback()

        for work in self._works:
            work.on_done(one_done)

    def push(self, timeout_s: float) -> None:
        """See ``Carried``. Who waits for an operation moves its messages, and makes it urgent."""
        with suppress(TotalReduceError):
            for work in self._works:
                work.wait(timeout_s)

    def reply(self) -> Any:
        """See ``Carried``."""
        for work in self._works:
            work.wait()
        return self._reply()


def _tensor(block: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(block))


def _empty(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]
