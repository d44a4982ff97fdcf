"""One rank of an MPI that a benchmark compares with: ``mpirun -n N python mpi_peer.py FOLDER PEER``.

Runs under the MPI's own Python, which needs mpi4py and NumPy and nothing of this package. It sleeps on a Unix socket
until the worker of the same rank asks for a sample, so that whoever is not being measured takes no core from the other.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:  # this package need not be where the MPI's Python looks
    from totalreduce.kernels.arrays import Array

_PATIENCE_S = 300.0
#: As in ``values.py``: element i of a contribution is (i mod P + 1) times a factor.
_PERIOD = 8191


def main(folder: Path, peer: str) -> None:
    """Answer requests until the worker says goodbye; end the whole MPI job if it vanishes."""
    comm = MPI.COMM_WORLD
    with _connect(folder / f"{peer}.{comm.rank}") as connection, connection.makefile("rw") as stream:
        _say(stream, {"rank": comm.rank, "size": comm.size, "version": MPI.Get_library_version().splitlines()[0]})
        for line in stream:
            request = json.loads(line)
            if request is None:
                return
            try:
                _say(stream, {"seconds": _sample(comm, **request)})
            except Exception as error:
                _say(stream, {"error": f"{type(error).__name__}: {error}"})
    comm.Abort(1)


def _connect(path: Path) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(str(path))
            return connection
        except OSError:  # the worker is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _say(stream: Any, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document) + "\n")
    stream.flush()


def _pattern(count: int, factor: int, dtype: str) -> Array:
    return ((np.arange(count) % _PERIOD + 1) * factor).astype(dtype)


def _sample(comm: Any, kind: str, count: int, times: int, dtype: str) -> float:
    """Seconds of one operation, averaged over ``times`` on buffers of their own; the results are checked."""
    buffers = [_buffers(comm, kind, count, dtype) for _ in range(times)]
    operations = [operation for operation, _, _ in buffers]
    comm.Barrier()
    begin = time.monotonic()
    for operation in operations:
        operation()
    elapsed = time.monotonic() - begin
    comm.Barrier()  # nobody checks while another rank still works
    for _, found, expected in buffers:
        if not np.allclose(found, expected, rtol=1e-6 * comm.size, atol=0):
            raise ValueError(f"{kind} of {count} elements gave a wrong result")
    return elapsed / times


def _buffers(comm: Any, kind: str, count: int, dtype: str) -> tuple[Callable[[], Any], Array, Array]:
    """Return the operation, the array of its result, and the right result. ``count``: as for Total Reduce's side."""
    rank, size = comm.rank, comm.size
    block, last = count // size, size - 1
    total = size * (size + 1) // 2
    nothing = np.empty(0, dtype)
    whole, own = _pattern(count, rank + 1, dtype), _pattern(block, rank + 1, dtype)
    blocks = np.concatenate([_pattern(block, index + 1, dtype) for index in range(size)])
    empty = np.zeros(count, dtype)
    part = np.zeros(block, dtype)
    root = rank == 0
    match kind:
        case "allreduce":
            return lambda: comm.Allreduce(MPI.IN_PLACE, whole), whole, _pattern(count, total, dtype)
        case "reduce":
            if root:
                return lambda: comm.Reduce(MPI.IN_PLACE, whole), whole, _pattern(count, total, dtype)
            return lambda: comm.Reduce(whole, None), nothing, nothing
        case "broadcast":
            return lambda: comm.Bcast(whole), whole, _pattern(count, 1, dtype)
        case "allgather":
            return lambda: comm.Allgather(own, empty), empty, blocks
        case "gather":
            target = empty if root else None
            return lambda: comm.Gather(own, target), empty if root else nothing, blocks if root else nothing
        case "scatter":
            source = blocks if root else None
            return lambda: comm.Scatter(source, part), part, own
        case "reduce_scatter":
            inputs = blocks * dtype_of(dtype)(rank + 1)
            return lambda: comm.Reduce_scatter_block(inputs, part), part, own * dtype_of(dtype)(total)
        case "alltoall":
            inputs = np.concatenate([_pattern(block, rank * size + index + 1, dtype) for index in range(size)])
            expected = np.concatenate([_pattern(block, index * size + rank + 1, dtype) for index in range(size)])
            return lambda: comm.Alltoall(inputs, empty), empty, expected
        case "send":
            if root and size > 1:
                return lambda: comm.Send(whole, last), nothing, nothing
            if rank == last and size > 1:
                return lambda: comm.Recv(empty, 0), empty, _pattern(count, 1, dtype)
            return lambda: None, nothing, nothing
    raise ValueError(f"unknown collective {kind!r}")


def dtype_of(name: str) -> Any:
    """NumPy's scalar type of that name."""
    return np.dtype(name).type


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
