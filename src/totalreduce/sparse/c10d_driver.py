"""Exchanges over any process group of torch: gloo, NCCL, or the back end that is called "totalreduce".

What ranks have for each other goes as messages between pairs, all of them begun at once. That is not what torch offers
first: a gather of lists takes blocks of one size only with gloo, which has no all-to-all of lists either; a gather of
padded blocks sends the padding, and an all-to-all of slices wants a copy of the block for every rank. Between two and
four processes on gloo messages took half to nine tenths of the time of either at 1 kB, and half at 2 MB; and a block
that is empty is not sent at all. NCCL makes one group of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from totalreduce.sparse.actions import Action, Allgather, Allreduce, Alltoall, Array, Messages
from totalreduce.transports.torch_collectives import reason

__all__ = ["C10dDriver"]


@final
class C10dDriver:
    """A ``Carrier`` by a process group, which nobody else may use: actions begin in the same order on all ranks.

    So exchanges have to run one after the other (``in_order``). After an action that failed no other begins: what the
    ranks send each other would not fit together any more.

    Args:
        group: The ranks.
        device: Where the group's tensors are: ``cpu``, or this rank's GPU if it has a back end for GPUs only.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """See the class."""
        self._group, self._device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        #: Beside the kernels of backward: on their stream a copy would wait for all that are queued.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._failed: Exception | None = None
        self._unfinished: Any = None

    def start(self, action: Action, *, channel: int, step: int, priority: int) -> _Started:  # noqa: ARG002
        """See ``Carrier``.

        Raises:
            torch.distributed.DistBackendError: This action cannot begin, or an earlier one failed.
        """
        if self._failed is not None:
            raise self._failed
        with self.guarded():
            return self._begin(action)

    @contextlib.contextmanager
    def guarded(self, works: Sequence[Any] = ()) -> Iterator[None]:
        """For what is done with torch: beside the model's kernels, and its errors are ``DistBackendError``.

        Args:
            works: What is under way. If it fails something may still arrive for it, so its memory is kept.
        """
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                yield
        except (
            RuntimeError,
            ValueError,
        ) as error:  # gloo raises the former; after the end of a group, torch the latter
            self._unfinished = works
            self._failed = error
            if not isinstance(error, dist.DistError):
                self._failed = dist.DistBackendError(f"rank {self.rank}: the sparse exchange failed: {reason(error)}")
            raise self._failed from error

    def _begin(self, action: Action) -> _Started:
        rank = self.rank
        others = [*range(rank + 1, self.world_size), *range(rank)]  # everybody begins with another one
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
            begin = functools.partial(dist.all_reduce, tensor)
            result = functools.partial(_copied, tensor, values)
        else:
            tensor = self._room(action.size) if rank != action.root else self._moved(action.block)
            begin = functools.partial(dist.broadcast, tensor, group_src=action.root)
            result = functools.partial(_array, tensor)
        if self.world_size == 1 or not tensor.numel():
            return _Started(self, [], result)
        return _Started(self, [begin(group=self._group, async_op=True)], result)

    def _messages(
        self, sends: Mapping[int, Array], receives: Mapping[int, int], result: Callable[[dict[int, Array]], Any]
    ) -> _Started:
        came = {source: self._room(size) for source, size in receives.items()}
        moved = {id(block): self._moved(block) for block in sends.values()}  # one for all who are sent the same
        leaving = {target: moved[id(block)] for target, block in sends.items()}
        operations = [
            dist.P2POp(begin, tensor, group=self._group, group_peer=peer)
            for begin, tensors in ((dist.irecv, came), (dist.isend, leaving))
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Started(self, works, lambda: result({source: _array(tensor) for source, tensor in came.items()}))

    def _moved(self, block: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(block)).to(self._device)

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


@final
class _Started:
    """An action under way."""

    def __init__(self, driver: C10dDriver, works: Sequence[Any], result: Callable[[], Any]) -> None:
        self._driver, self._works, self._result = driver, works, result
        self._reply: Any = None
        self._error: Exception | None = None
        self._ended = False

    def on_done(self, callback: Callable[[], None]) -> None:
        """Wait, and call: no other action could begin before."""
        with contextlib.suppress(dist.DistError):
            self.reply()
        callback()

    def push(self, timeout_s: float) -> None:
        """Nothing: torch has threads that move messages, and gloo ends a connection that is waited for in vain."""

    def reply(self) -> Any:
        """See ``Carried``; what it raises is ``torch.distributed.DistBackendError``."""
        if not self._ended:
            self._ended = True  # torch's works may be waited for once
            try:
                with self._driver.guarded(self._works):
                    for work in self._works:
                        work.wait()
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
    """The values as an allreduce of the tensor has left them; it has the same memory, if that is possible."""
    result = _array(tensor)
    if not np.may_share_memory(result, values):
        np.copyto(values, result)
    return values
