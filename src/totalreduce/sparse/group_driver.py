"""Exchanges over a ``Group``: every action is an operation with its own name, so buckets may come in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.groups import checked
from totalreduce.groups.group import Group
from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Broadcast, Messages
from totalreduce.tensors.work import Work, when_all_done

__all__ = ["GroupDriver"]

_NOTHING = memoryview(bytearray(0))


@final
class GroupDriver:
    """A ``Carrier`` over a group.

    Args:
        group: The ranks. A subgroup of them is made (on every rank; see ``Group.subgroup``), so that the operations'
            names are different from all others.
        name: Different for each driver of a group.
        beside: Whether the threads that begin actions may do so while the program may call no collective
            (``runner.gate``), because exchanges go on beside its steps.
    """

    def __init__(self, group: Group, name: str, *, beside: bool = False) -> None:
        self._beside = beside
        self._group = group.control.subgroup(range(group.world_size), name=f"sparse {name}")
        self.rank, self.world_size = group.rank, group.world_size

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> _Started:
        """Begin an action; return at once."""
        if self._beside:
            self._group.operations.gate.admit_thread()
        name = f"{channel}.{step}"
        group, rank = self._group, self.rank
        # Blocks are no tensors here: torch releases the GIL in each call, and the communication thread, which the last
        # action has woken, would take it.
        if isinstance(action, Allgather):
            gathered = _blocks(action.sizes, rank, np.ascontiguousarray(action.block))
            work = group.submit(checked.allgather_bytes([block.data for block in gathered]), name, priority)
            return _Started([work], lambda: gathered)
        if isinstance(action, Alltoall):
            came = _blocks(action.sizes, rank, action.blocks[rank])
            sent = [np.ascontiguousarray(block).data for block in action.blocks]
            received = [block.data for block in came]
            sent[rank] = received[rank] = _NOTHING
            work = group.submit(checked.alltoall_bytes(sent, received), name, priority)
            return _Started([work], lambda: came)
        if isinstance(action, Allreduce):
            work = group.allreduce(torch.from_numpy(action.values), name=name, priority=priority)
            return _Started([work], lambda: action.values)
        if isinstance(action, Broadcast):
            block = _tensor(action.block) if rank == action.root else _empty(action.size)
            work = group.broadcast(block, root=action.root, name=name, priority=priority, async_op=True)
            return _Started([work], block.numpy)
        return self._start_messages(action, channel, priority)

    def _start_messages(self, action: Messages, channel: int, priority: int) -> _Started:
        group = self._group
        came = {source: _empty(size) for source, size in action.receives.items()}
        works = [group.recv(into, src=source, tag=channel, priority=priority) for source, into in came.items()]
        works += [
            group.send(_tensor(block), dst=target, tag=channel, priority=priority)
            for target, block in action.sends.items()
        ]
        return _Started(works, lambda: {source: into.numpy() for source, into in came.items()})


@final
class _Started:
    """The operations of one action."""

    def __init__(self, works: Sequence[Work], reply: Callable[[], Any]) -> None:
        self._works, self._reply = works, reply

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the last operation has ended, or one has failed."""
        when_all_done(self._works, callback, or_failed=True)

    def push(self, timeout_s: float) -> None:
        """Wait: a thread that waits for an operation moves messages, and makes the operation urgent."""
        with suppress(TotalReduceError):
            for work in self._works:
                work.wait(timeout_s)

    def reply(self) -> Any:
        """Wait for the operations and return the reply."""
        for work in self._works:
            error = work.exception()
            if error is not None:  # a message to a rank that has left: the message from another one may never come
                raise error
        for work in self._works:
            work.wait()
        return self._reply()


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _tensor(block: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(block))


def _blocks(sizes: Sequence[int], rank: int, own: Array) -> list[Array]:
    """Return memory for the blocks of all ranks; this rank's block is its own."""
    return [own if source == rank else np.empty(size, np.uint8) for source, size in enumerate(sizes)]
