"""Collectives of ``torch.distributed``: those of NCCL, gloo or UCC, as the program's process group has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.native.collectives import NativeWork
from totalreduce.native.reductions import Reduction, check_parts, check_tensor, reduction_for
from totalreduce.tensors.modes import write
from totalreduce.tensors.streams import is_on_accelerator
from totalreduce.transports.torch_group import ENDED, destroy, forming_a_group, reason

__all__ = ["TorchCollectives", "among", "everybody"]

#: Seconds between two looks at a collective of a GPU: at first, and at most.
_PAUSE_S, _PAUSE_MAX_S = 2e-5, 5e-4


@final
class _TorchWork:
    """A collective of torch that was started.

    Args:
        what: Its name.
        rank: This rank.
        work: torch's handle.
        finish: Completes the result.
        polled: Whether ``work`` must not be given a time-out. NCCL's works abort the communicator when a time-out of a
            wait is over, so that one late rank would end the job. Without a time-out they make the current stream wait,
            and not the caller.
    """

    def __init__(self, what: str, rank: int, work: Any, finish: Callable[[], None] | None, *, polled: bool) -> None:
        self._what, self._rank, self._work, self._finish, self._polled = what, rank, work, finish, polled

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float) -> bool:
        if not (self._poll(timeout_s) if self._polled else self._block(timeout_s)):
            return False
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def _block(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        try:
            self._work.wait(timedelta(seconds=max(0.001, timeout_s)))
        except RuntimeError as error:
            if time.monotonic() < deadline:
                raise self._failed(error) from error
            if not self._work.is_completed():
                return False
            try:  # it has ended in the meantime
                self._work.wait()
            except RuntimeError as failure:
                raise self._failed(failure) from failure
        return True

    def _poll(self, timeout_s: float) -> bool:
        deadline, pause_s = time.monotonic() + timeout_s, _PAUSE_S
        while not self._work.is_completed():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return True

    def _failed(self, error: RuntimeError) -> TotalReduceError:
        return TotalReduceError(f"rank {self._rank}: torch's {self._what} failed: {reason(error)}")


@final
class TorchCollectives:
    """Collectives of a process group. The library's own reductions; averages and ``bool`` are made of others."""

    def __init__(self, group: dist.ProcessGroup, *, reusable_name: bool = False) -> None:
        """Take over a private group.

        ``reusable_name``: torch has named the group after its members. It would give a later group of the same members
        the same name, and find the addresses of the old group under it. So the group lives as long as torch's own.
        """
        self._group, self._reusable_name = group, reusable_name
        self._rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        kind = dist.distributed_c10d._get_object_coll_device(group)  # "cpu" if the group takes CPU tensors at all
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, torch.accelerator.current_device_index())

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        check_tensor(tensor, on_cpu=False)
        reduction = reduction_for(tensor.detach(), op, self.world_size, wider=_WIDER)
        torch_op = _torch_op(reduction.op)
        return self._start("all_reduce", dist.all_reduce, reduction.tensor, torch_op, finish=reduction.finish)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        check_tensor(tensor, on_cpu=False)
        reduction = reduction_for(tensor.detach(), op, self.world_size, wider=_WIDER)
        target = dist.get_global_rank(self._group, root)
        torch_op = _torch_op(reduction.op)
        return self._start("reduce", dist.reduce, reduction.tensor, target, torch_op, finish=reduction.finish)

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        check_tensor(tensor, on_cpu=False)
        source = dist.get_global_rank(self._group, root)
        return self._start("broadcast", dist.broadcast, tensor.detach().view(-1).view(torch.uint8), source)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        gathered, part = _flat(output), _flat(tensor)
        check_parts(gathered, part, self.world_size)
        parts = list(gathered.view(torch.uint8).chunk(self.world_size))
        if not parts[0].numel():
            parts = [gathered.new_empty(0, dtype=torch.uint8)] * self.world_size
        return self._start("all_gather", dist.all_gather, parts, part.view(torch.uint8))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        gathered, part = _flat(tensor), _flat(output)
        check_parts(gathered, part, self.world_size)
        reduction = reduction_for(gathered, op, self.world_size, wider=_WIDER)
        if reduction.tensor.data_ptr() == gathered.data_ptr():
            reduction = reduction_for(part, op, self.world_size, wider={})
            target, source = reduction.tensor, gathered.view(reduction.tensor.dtype)
        else:  # the library reduces a wider copy
            wide = reduction.tensor
            target, source = wide.new_empty(len(part)), wide
            reduction = replace(reduction, finish=_narrow(reduction_for(target, op, self.world_size, wider={}), part))
        parts = list(source.chunk(self.world_size)) if len(part) else [source] * self.world_size
        torch_op = _torch_op(reduction.op)
        return self._start("reduce_scatter", dist.reduce_scatter, target, parts, torch_op, finish=reduction.finish)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        size = tensor.element_size()
        return self._start(
            "all_to_all_single",
            dist.all_to_all_single,
            _flat(output).view(torch.uint8),
            _flat(tensor).view(torch.uint8),
            [count * size for count in received],
            [count * size for count in sent],
        )

    def split(self, ranks: Sequence[int], timeout_s: float) -> TorchCollectives:
        members = [dist.get_global_rank(self._group, rank) for rank in ranks]
        return among(members, timeout_s, dist.get_backend(self._group))

    def close(self) -> None:
        if not self._reusable_name:
            destroy(self._group)

    def _start(
        self, what: str, begin: Callable[..., Any], *arguments: Any, finish: Callable[[], None] | None = None
    ) -> NativeWork:
        try:
            work = begin(*arguments, group=self._group, async_op=True)
        except ENDED as error:
            raise TotalReduceError(f"rank {self._rank}: torch's {what} failed: {reason(error)}") from error
        polled = any(isinstance(argument, torch.Tensor) and is_on_accelerator(argument) for argument in arguments)
        return _TorchWork(what, self._rank, work, finish, polled=polled)


def among(members: Sequence[int], timeout_s: float, backend: str) -> TorchCollectives:
    """Make a private group of some ranks of the default process group. Collective among them.

    Args:
        members: Their ranks there.
        timeout_s: Seconds until all of them must have come.
        backend: The name of its back end, for instance ``nccl``; the default process group may have another one.

    Raises:
        RendezvousError: Some rank did not come in time.
    """
    all_ranks = len(members) == dist.get_world_size()
    with forming_a_group():
        # If the group has a part of the ranks, the others do not call this, and torch must not wait for them.
        patience = timedelta(seconds=timeout_s)
        group = dist.new_group(list(members), patience, backend, use_local_synchronization=not all_ranks)
    assert isinstance(group, dist.ProcessGroup)
    return TorchCollectives(group, reusable_name=not all_ranks)


def everybody(timeout_s: float) -> TorchCollectives:
    """Make a private group with the members and the back end of the default process group. Collective.

    Raises:
        RendezvousError: Some rank did not come in time.
    """
    with forming_a_group():
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return TorchCollectives(group)


_WIDER = {torch.int16: torch.int32}


def _torch_op(op: ReduceOp) -> Any:
    return getattr(dist.ReduceOp, op.name)


def _narrow(reduction: Reduction, part: torch.Tensor) -> Callable[[], None]:
    """Return a function that finishes the reduction of a wider copy, and copies the result into ``part``."""

    def finish() -> None:
        reduction.finish()
        write(part, reduction.tensor)

    return finish


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    check_tensor(tensor, on_cpu=False)
    return tensor.detach().view(-1)
