"""A worker's line to the rank of the same number in an MPI job (see ``mpi_peer``)."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

from totalreduce.bench.mpi_launching import explain, signature_of
from totalreduce.foundation.errors import TotalReduceError

_PATIENCE_S = 300.0
_SAMPLE_S = 300.0


class MpiRank:
    """Asks for one sample at a time and sleeps until it is there."""

    def __init__(self, folder: Path, peer: str, rank: int) -> None:
        """Listen; the MPI rank connects when it has started."""
        self.version = ""  #: Of the MPI library; empty before ``meet``.
        self._folder, self._peer, self._rank = folder, peer, rank
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / f"{peer}.{rank}"))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._stream: Any = None

    def meet(self, world_size: int) -> None:
        """Wait for the MPI rank to connect."""
        with self._listener:
            self._connection = self._accept()
        self._connection.settimeout(_SAMPLE_S)
        self._stream = self._connection.makefile("rw")
        hello = json.loads(self._stream.readline())
        self.version = hello["version"]
        if not self.version.startswith(signature_of(self._peer)) or hello["size"] != world_size:
            self.close()
            raise TotalReduceError(
                f"{self._peer}'s mpirun started rank {hello['rank']} of {hello['size']} of {self.version!r}: its "
                "mpi4py belongs to another MPI. Say with --mpirun which mpirun belongs to the mpi4py beside it"
            )

    def _accept(self) -> socket.socket:
        deadline = time.monotonic() + _PATIENCE_S
        self._listener.settimeout(0.2)
        while True:
            try:
                return self._listener.accept()[0]
            except TimeoutError as error:
                reason = explain(self._folder, self._peer)
                if reason is not None or time.monotonic() > deadline:
                    why = reason or f"did not come within {_PATIENCE_S:.0f} s"
                    raise TotalReduceError(f"{self._peer}'s rank {self._rank}: {why}") from error

    def sample(self, kind: str, count: int, times: int, dtype: str) -> float:
        """Seconds of one operation, averaged over ``times``, on this rank; checked by the MPI's side."""
        try:
            self._say({"kind": kind, "count": count, "times": times, "dtype": dtype})
            line = self._stream.readline()
        except OSError:
            line = ""
        if not line:
            why = explain(self._folder, self._peer) or f"ended, or took longer than {_SAMPLE_S:.0f} s"
            raise TotalReduceError(f"{self._peer}'s rank {self._rank}: {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise TotalReduceError(f"{self._peer}'s rank {self._rank}: {answer['error']}")
        return float(answer["seconds"])

    def close(self) -> None:
        """Let the MPI rank finish."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has gone already
                self._say(None)
            with contextlib.suppress(OSError):
                self._stream.close()
            self._connection.close()

    def _say(self, document: dict[str, Any] | None) -> None:
        self._stream.write(json.dumps(document) + "\n")
        self._stream.flush()
