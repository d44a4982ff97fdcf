"""Exchanges over any process group of torch: gloo, NCCL, or the back end that is called "totalreduce".

Allgathers and all-to-alls are carried out by messages between pairs of ranks, because torch's collectives fit badly:
with gloo, an allgather of lists takes blocks of one size only, and there is no all-to-all of lists; a gather of padded
blocks sends the padding, and an all-to-all of slices needs a copy of the block for every rank. Between two and four
processes on gloo, messages took half to nine tenths of the time of either at 1 kB, and half at 2 MB; and empty blocks
are not sent at all.

The messages of one action begin in the order of their distance, which is (destination - source) modulo the number of
ranks, so at every moment each rank receives from another one. They begin in batches of ``_BATCH_DISTANCES`` distances,
and the next batch begins when the oldest of ``_BATCHES_IN_FLIGHT`` has ended. So the number of requests in flight does
not grow with the number of ranks. In a batch the receives begin first: with 16 processes on gloo, batches that
alternated between sends and receives were 14 to 21 % slower than all messages at once, and these batches are as fast.
NCCL makes one group of each batch.

No rank can wait for ever, because a message has the same distance for its sender and for its receiver. Consider an
unfinished message with the smallest distance: all earlier messages of its two ranks have ended, so both ranks have
begun it, and it makes progress.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from totalreduce.kernels.arrays import Array
from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Messages
from totalreduce.tensors.streams import SideStreams
from totalreduce.transports.torch_group import reason

__all__ = ["C10dDriver"]

#: Distances of one batch: at most so many messages are sent, and as many received. Up to nine ranks have one batch.
_BATCH_DISTANCES = 8
#: Batches that may be under way at once. With a second one the links are not idle while the first one ends.
_BATCHES_IN_FLIGHT = 2


@final
class C10dDriver:
    """A ``Carrier`` over a process group of its own, in which actions begin in the same order on all ranks.

    So exchanges have to run one after the other (``in_order``). After an action that failed no other begins, because
    the messages of the ranks would not match any more.

    Args:
        group: The ranks.
        device: The device of the group's tensors: ``cpu``, or this rank's GPU if it has a back end for GPUs only.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        #: On the stream of backward a copy would wait for all kernels that are queued there.
        self._streams = SideStreams()
        self._failed: Exception | None = None
        self._unfinished: Any = None

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> _Started:  # noqa: ARG002
        """Begin an action; return at once. Raises ``torch.distributed.DistBackendError``."""
        if self._failed is not None:
            raise self._failed
        with self.guarded():
            return self._begin(action)

    @contextlib.contextmanager
    def guarded(self, works: Collection[Any] = ()) -> Iterator[None]:
        """Run torch's operations on the side stream, and make their errors a ``DistBackendError``.

        If the operations fail, messages may still arrive for ``works``, which are in flight, so their memory is kept.
        """
        try:
            with self._streams.on(self._device):
                yield
        except (
            RuntimeError,
            ValueError,
        ) as error:  # gloo raises the former; after the end of a group, torch the latter
            self._unfinished = works
            self._failed = error
            if isinstance(error, dist.DistError):
                raise  # its cause says who is lost
            self._failed = dist.DistBackendError(f"rank {self.rank}: the sparse exchange failed: {reason(error)}")
            raise self._failed from error

    def _begin(self, action: Action) -> _Started:
        rank = self.rank
        others = [other for other in range(self.world_size) if other != rank]
        if isinstance(action, Messages):
            return self._messages(action.sends, action.receives, lambda came: came)
        if isinstance(action, Allgather | Alltoall):
            blocks = action.blocks if isinstance(action, Alltoall) else [action.block] * self.world_size
            sends = {other: blocks[other] for other in others}
            receives = {other: action.sizes[other] for other in others}
            return self._messages(sends, receives, lambda came: _by_rank({**came, rank: blocks[rank]}))
        if isinstance(action, Allreduce):
            values = action.values
            tensor = self._moved(values)
            return self._collective(dist.all_reduce, tensor, lambda: _copied(tensor, values))
        block = self._room(action.size) if rank != action.root else self._moved(action.block)
        return self._collective(dist.broadcast, block, lambda: _array(block), group_src=action.root)

    def _collective(
        self, begin: Callable[..., Any], tensor: torch.Tensor, result: Callable[[], Array], **options: Any
    ) -> _Started:
        if self.world_size == 1 or not tensor.numel():
            return _Started(self, iter(()), result)
        work = begin(tensor, group=self._group, async_op=True, **options)
        return _Started(self, iter([_Batch([work], {})]), result)

    def _messages(
        self, sends: Mapping[int, Array], receives: Mapping[int, int], result: Callable[[dict[int, Array]], Any]
    ) -> _Started:
        came: dict[int, Array] = {source: np.empty(0, np.uint8) for source in receives}
        return _Started(self, self._batches(sends, receives, came), lambda: result(came))

    def _batches(
        self, sends: Mapping[int, Array], receives: Mapping[int, int], came: dict[int, Array]
    ) -> Iterator[_Batch]:
        """Begin one batch after the other; they put the received blocks into ``came``."""
        targets = {(target - self.rank) % self.world_size: target for target, block in sends.items() if block.size}
        sources = {(self.rank - source) % self.world_size: source for source, size in receives.items() if size}
        distances = sorted({*targets, *sources})
        block: Array | None = None
        for begin in range(0, len(distances), _BATCH_DISTANCES):
            batch = distances[begin : begin + _BATCH_DISTANCES]
            arriving = {sources[each]: self._room(receives[sources[each]]) for each in batch if each in sources}
            operations = [self._message(dist.irecv, tensor, source) for source, tensor in arriving.items()]
            for target in (targets[each] for each in batch if each in targets):
                if sends[target] is not block:  # one copy for all ranks that are sent the same block
                    block = sends[target]
                    leaving = self._moved(block)
                operations.append(self._message(dist.isend, leaving, target))
            yield _Batch(dist.batch_isend_irecv(operations), arriving, came)

    def _message(self, begin: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(begin, tensor, group=self._group, group_peer=peer)

    def _moved(self, block: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(block)).to(self._device)

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Operations of torch that were begun together."""

    works: Sequence[Any]  #: Their handles, each of which may be waited for once.
    arriving: Mapping[int, torch.Tensor]  #: The tensors that receive messages, by source.
    came: dict[int, Array] = field(default_factory=dict)  #: Gets the received blocks in host memory.

    def finish(self) -> None:
        """Wait until all operations have ended."""
        for work in self.works:
            work.wait()
        self.came.update({source: _array(tensor) for source, tensor in self.arriving.items()})


@final
class _Started:
    """An action under way."""

    def __init__(self, driver: C10dDriver, batches: Iterator[_Batch], result: Callable[[], Any]) -> None:
        """Begin the batches that may be in flight at once; ``reply`` begins the others."""
        self._driver, self._batches, self._result = driver, batches, result
        self._in_flight = deque(itertools.islice(batches, _BATCHES_IN_FLIGHT))
        self._reply: Any = None
        self._error: Exception | None = None
        self._ended = False

    def on_done(self, callback: Callable[[], None]) -> None:
        """Wait, and call ``callback``: no other action could begin before."""
        with contextlib.suppress(dist.DistError):
            self.reply()
        callback()

    def push(self, timeout_s: float) -> None:
        """Do nothing: torch's threads move messages, and gloo closes a connection after a time-out."""

    def reply(self) -> Any:
        """Wait until the action has ended, and return the reply; raise only ``torch.distributed.DistBackendError``."""
        if not self._ended:
            self._ended = True  # torch's works may be waited for once
            try:
                with self._driver.guarded(self._in_flight):
                    while self._in_flight:
                        self._in_flight[0].finish()
                        self._in_flight.popleft()
                        self._in_flight.extend(itertools.islice(self._batches, 1))
                    self._reply = self._result()
            except dist.DistError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._reply


def _by_rank(blocks: Mapping[int, Array]) -> list[Array]:
    return [blocks[rank] for rank in range(len(blocks))]


def _array(tensor: torch.Tensor) -> Array:
    return tensor.cpu().numpy()


def _copied(tensor: torch.Tensor, values: Array) -> Array:
    """Copy a reduced tensor to the values, unless both have the same memory."""
    result = _array(tensor)
    if not np.may_share_memory(result, values):
        np.copyto(values, result)
    return values
