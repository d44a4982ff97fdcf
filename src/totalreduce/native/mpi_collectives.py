"""Collectives of MPI, through ``mpi4py``. All calls return at once (``Iallreduce``); nothing here blocks inside MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from totalreduce.foundation.errors import TotalReduceError
from totalreduce.foundation.types import ReduceOp
from totalreduce.native.collectives import NativeWork
from totalreduce.native.reductions import check_parts, check_tensor, reduction_for
from totalreduce.tensors.modes import write
from totalreduce.transports.mpi import MPI, Communicator, reason

__all__ = ["MpiCollectives"]


@final
class _MpiWork:
    """A request of MPI. ``finish`` completes its result."""

    def __init__(self, what: str, communicator: Communicator, request: MPI.Request, finish: Callable[[], None]) -> None:
        self._what, self._communicator, self._request, self._finish = what, communicator, request, finish
        self._over = False

    def done(self) -> bool:
        return self._over or self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        if self._over:
            return True
        try:
            self._over = self._communicator.finish(self._request, timeout_s)
        except MPI.Exception as error:
            raise _failed(self._communicator, self._what, error) from error
        if self._over:
            self._finish()
        return self._over


@final
class MpiCollectives:
    """Collectives of a communicator. CPU tensors; float16 and bfloat16 are reduced as float32."""

    def __init__(self, communicator: Communicator, *, own: bool = False) -> None:
        """Use the communicator of a transport (MPI keeps collectives and messages apart), or an ``own`` one."""
        self._communicator, self._own = communicator, own
        self.world_size = communicator.world_size
        self.device = torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        check_tensor(tensor, on_cpu=True)
        reduction = reduction_for(tensor.detach(), op, self.world_size, wider=_WIDER)
        array, mpi_op = reduction.tensor.numpy(), _OPS[reduction.op]
        return self._start("Iallreduce", lambda comm: comm.Iallreduce(MPI.IN_PLACE, array, mpi_op), reduction.finish)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NativeWork:
        check_tensor(tensor, on_cpu=True)
        reduction = reduction_for(tensor.detach(), op, self.world_size, wider=_WIDER)
        array, mpi_op = reduction.tensor.numpy(), _OPS[reduction.op]
        is_root = self._communicator.rank == root
        sent, received = (MPI.IN_PLACE if is_root else array), (array if is_root else None)
        return self._start("Ireduce", lambda comm: comm.Ireduce(sent, received, mpi_op, root), reduction.finish)

    def broadcast(self, tensor: torch.Tensor, root: int) -> NativeWork:
        data = _bytes(tensor)
        return self._start("Ibcast", lambda comm: comm.Ibcast([data, MPI.BYTE], root))

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> NativeWork:
        check_parts(output, tensor, self.world_size)
        part, gathered = _bytes(tensor), _bytes(output)
        return self._start("Iallgather", lambda comm: comm.Iallgather([part, MPI.BYTE], [gathered, MPI.BYTE]))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> NativeWork:
        check_tensor(output, on_cpu=True)
        check_tensor(tensor, on_cpu=True)
        check_parts(tensor, output, self.world_size)
        part, parts = output.detach().view(-1), tensor.detach().view(-1)
        wide = _WIDER.get(part.dtype, part.dtype)
        reduction = reduction_for(part.to(wide), op, self.world_size, wider={})
        source, target = parts.to(wide).view(reduction.tensor.dtype).numpy(), reduction.tensor.numpy()
        mpi_op = _OPS[reduction.op]

        def finish() -> None:
            reduction.finish()
            if wide is not part.dtype:
                write(part, reduction.tensor)

        def begin(comm: MPI.Intracomm) -> MPI.Request:
            return comm.Ireduce_scatter_block(source, target, mpi_op)

        return self._start("Ireduce_scatter_block", begin, finish)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> NativeWork:
        size, here, there = tensor.element_size(), _bytes(tensor), _bytes(output)
        sends = [here, [count * size for count in sent], None, MPI.BYTE]
        receives = [there, [count * size for count in received], None, MPI.BYTE]
        return self._start("Ialltoallv", lambda comm: comm.Ialltoallv(sends, receives))

    def split(self, ranks: Sequence[int], timeout_s: float) -> MpiCollectives:  # noqa: ARG002  (MPI has no deadline)
        communicator = self._communicator
        with communicator.lock:
            group = communicator.handle.Get_group().Incl(list(ranks))
            handle = communicator.handle.Create_group(group, len(ranks))
        handle.Set_errhandler(MPI.ERRORS_RETURN)
        return MpiCollectives(Communicator(handle), own=True)

    def close(self) -> None:
        if self._own and self._communicator.usable():
            with self._communicator.lock:
                self._communicator.handle.Free()

    def _start(
        self, what: str, begin: Callable[[MPI.Intracomm], MPI.Request], finish: Callable[[], None] = lambda: None
    ) -> NativeWork:
        communicator = self._communicator
        try:
            with communicator.lock:
                return _MpiWork(what, communicator, begin(communicator.handle), finish)
        except MPI.Exception as error:
            raise _failed(communicator, what, error) from error


_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _bytes(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as bytes, without a copy."""
    check_tensor(tensor, on_cpu=True)
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _failed(communicator: Communicator, what: str, error: MPI.Exception) -> TotalReduceError:
    return TotalReduceError(f"rank {communicator.rank}: MPI's {what} failed: {reason(error)}")
