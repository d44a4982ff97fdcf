"""Messages of MPI, through ``mpi4py``: for machines where MPI knows the network best.

All messages use a private duplicate of ``COMM_WORLD``, so the program's own messages are not disturbed. All calls
return at once (``Isend``, ``Irecv``, ``Testsome``, ``Iallreduce``); nothing here blocks inside MPI.

MPI decides which threads may call it (see ``Communicator``). Importing this module imports ``mpi4py.MPI``, which
initialises MPI. ``mpi4py`` would also finalise MPI at the end of every process that has a copy of it, forked children
included, and a child that calls ``MPI_Finalize`` uses its parent's connection to ``mpirun`` and aborts. So this module
tells ``mpi4py`` not to finalise, and finalises MPI itself when the process that imported it ends. Where the program has
imported ``mpi4py.MPI`` before, or has set ``mpi4py.rc``, nothing is changed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, final

from totalreduce.foundation.config import TcpConfig
from totalreduce.foundation.errors import ConfigurationError, RendezvousError
from totalreduce.transports.passing import HEAD_BYTES, PassingTransport, Wire, WireError

try:
    import mpi4py

    _FINALISES = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize is not False and mpi4py.rc.finalize is None
    if _FINALISES:
        mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: there is mpi4py, but no MPI library
    raise ConfigurationError(
        f"transport 'mpi' needs mpi4py and the MPI library it is built for ({error}): `pip install 'totalreduce[mpi]'` "
        "beside your cluster's MPI, or `pip install mpi4py mpich` where there is none"
    ) from error
__all__ = ["MPI", "Communicator", "MpiTransport", "join", "rank_and_size", "reason"]

_log = logging.getLogger(__name__)

_HEAD_TAG, _BODY_TAG = 1, 2
#: The longest description of a rank's settings.
_DOCUMENT_BYTES = 16 * 1024
_PAUSE_MAX_S = 1e-3
#: MPI belongs to the process, not to a group: below THREAD_MULTIPLE the calls of all groups exclude each other.
_SERIAL = threading.RLock()


def _finalise(pid: int) -> None:
    if os.getpid() == pid and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


if _FINALISES:
    weakref.finalize(MPI, _finalise, os.getpid())  # at exit it runs after the finalizers of groups, which are younger


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process in ``COMM_WORLD``, and its size."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@final
class Communicator:
    """A private communicator, and the lock for the threads that may call MPI on it.

    With ``THREAD_MULTIPLE`` (which mpi4py asks for) every thread may call MPI. With ``THREAD_SERIALIZED`` one thread at
    a time may; this module's calls exclude each other, and the program must see to its own. With less, only the thread
    that initialised MPI may, so messages move only while that thread waits for an operation; a warning says so.
    """

    def __init__(self, handle: MPI.Intracomm) -> None:
        """Use ``join``."""
        self.handle = handle  #: The communicator of mpi4py.
        self.rank = handle.Get_rank()
        self.world_size = handle.Get_size()
        level = MPI.Query_thread()
        self.funnelled = level < MPI.THREAD_SERIALIZED  #: Whether only the thread that initialised MPI may call it.
        self.lock = threading.RLock() if level >= MPI.THREAD_MULTIPLE else _SERIAL  #: Held during calls of MPI.
        if self.funnelled:
            _log.warning(
                "rank %d: this MPI may be called by its first thread only: messages move only while that thread waits "
                "for an operation, and nothing overlaps with computation",
                self.rank,
            )

    def usable(self) -> bool:
        """Whether the calling thread may call MPI now."""
        return not MPI.Is_finalized() and (not self.funnelled or MPI.Is_thread_main())

    def finish(self, request: MPI.Request, timeout_s: float) -> bool:
        """Wait for a request without blocking inside MPI; returns whether it is done in time."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while True:
            with self.lock:
                if request.Test():
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s + 1e-6, _PAUSE_MAX_S)

    def exchange(self, document: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Return every rank's JSON document, by rank. Collective. Raises ``RendezvousError``."""
        text = json.dumps(document).encode()
        if len(text) > _DOCUMENT_BYTES:
            raise ConfigurationError(f"the description of rank {self.rank} has more than {_DOCUMENT_BYTES} bytes")
        mine = bytearray(text.ljust(_DOCUMENT_BYTES))
        documents = bytearray(_DOCUMENT_BYTES * self.world_size)
        with self.lock:
            request = self.handle.Iallgather([mine, MPI.BYTE], [documents, MPI.BYTE])
        if not self.finish(request, timeout_s):
            raise _absent(self.rank, timeout_s)
        begins = range(0, len(documents), _DOCUMENT_BYTES)
        return [json.loads(documents[begin : begin + _DOCUMENT_BYTES]) for begin in begins]


def join(timeout_s: float) -> Communicator:
    """Return a private communicator of all ranks. Collective. Raises ``RendezvousError``."""
    world = MPI.COMM_WORLD
    handle, request = world.Idup()
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise _absent(world.Get_rank(), timeout_s)
        time.sleep(_PAUSE_MAX_S)
    handle.Set_errhandler(MPI.ERRORS_RETURN)
    return Communicator(handle)


def _absent(rank: int, timeout_s: float) -> RendezvousError:
    return RendezvousError(
        f"rank {rank}: not every rank of MPI's COMM_WORLD came to init within {timeout_s:g} s; "
        "all must call it, in the same order if there are several groups"
    )


@final
class _MpiWire(Wire):
    """A ``Wire`` of MPI: one message to a peer at a time, and one head and one body from a peer at a time."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._communicator, self._lock = communicator, communicator.lock
        #: The requests that are not done, and for each "head" or "body" (arriving) or "sent", and the peer.
        self._requests: list[MPI.Request] = []
        self._owners: list[tuple[str, int]] = []
        self._statuses: list[MPI.Status] = []
        self._buffers = [memoryview(bytearray(HEAD_BYTES)) for _ in range(self.world_size)]
        self._heads: dict[int, memoryview] = {}
        self._received: set[int] = set()
        #: By peer: the number of requests of the message that is leaving, and whether one of them is a body.
        self._leaving: dict[int, tuple[int, bool]] = {}
        self._left: dict[int, int] = {}
        self._failures: list[tuple[int, str]] = []
        with self._lock:
            for peer in range(self.world_size):
                if peer != self.rank:
                    self._post("head", peer, self._receive(self._buffers[peer], peer, _HEAD_TAG))

    @property
    def beats(self) -> bool:
        """Whether every thread may poll."""
        return not self._communicator.funnelled

    def usable(self) -> bool:
        return self._communicator.usable()

    def poll(self) -> bool:
        """Ask MPI which requests are done. Meanwhile MPI moves the others."""
        if not self.usable():
            return False
        with self._lock:
            statuses = self._statuses
            while len(statuses) < len(self._requests):
                statuses.append(MPI.Status())
            try:
                done = MPI.Request.Testsome(self._requests, statuses)
            except MPI.Exception as error:
                self._sort_out(reason(error))
                return True
            if not done:
                return False
            for place, index in enumerate(done):
                self._done(*self._owners[index], statuses[place])
            self._forget(set(done))
            return True

    def _sort_out(self, text: str) -> None:
        """Find out which of the requests that have ended failed: at least one did, and MPI does not say which."""
        ended = {index for index, request in enumerate(self._requests) if request == MPI.REQUEST_NULL}
        for index in ended:
            kind, peer = self._owners[index]
            wanted = (peer, _BODY_TAG if kind == "body" else _HEAD_TAG, MPI.SUCCESS)
            good = [s for s in self._statuses if (s.Get_source(), s.Get_tag(), s.Get_error()) == wanted]
            if good and kind != "sent":
                self._done(kind, peer, good[0])
            elif kind != "sent" or len(ended) == 1:
                self._failures.append((peer, text))
            else:
                self._done(kind, peer, self._statuses[0])  # if it was this one, the next message will fail
        self._forget(ended)

    def _done(self, kind: str, peer: int, status: MPI.Status) -> None:
        if kind == "head":
            self._heads[peer] = self._buffers[peer][: status.Get_count(MPI.BYTE)]
        elif kind == "body":
            self._received.add(peer)
        else:
            requests, with_body = self._leaving[peer]
            if requests > 1:
                self._leaving[peer] = requests - 1, with_body
            else:
                del self._leaving[peer]
                self._left[peer] = self._left.get(peer, 0) + with_body
        status.Set_source(MPI.PROC_NULL)  # the status has been read (see _sort_out)

    def _forget(self, done: set[int]) -> None:
        kept = [index for index in range(len(self._requests)) if index not in done]
        self._requests = [self._requests[index] for index in kept]
        self._owners = [self._owners[index] for index in kept]

    def _post(self, kind: str, peer: int, request: MPI.Request) -> None:
        self._requests.append(request)
        self._owners.append((kind, peer))

    def _receive(self, view: memoryview, peer: int, tag: int) -> MPI.Request:
        try:
            return self._communicator.handle.Irecv([view, MPI.BYTE], peer, tag)
        except MPI.Exception as error:
            raise WireError(reason(error)) from error

    def failures(self) -> list[tuple[int, str]]:
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def may_send(self, peer: int) -> bool:
        return peer not in self._leaving

    def send(self, peer: int, head: bytes, body: memoryview | None) -> None:
        handle = self._communicator.handle
        with self._lock:
            requests, with_body = self._leaving.get(peer, (0, False))
            try:
                self._post("sent", peer, handle.Isend([head, MPI.BYTE], peer, _HEAD_TAG))
                self._leaving[peer] = requests + 1, with_body
                if body is not None:
                    self._post("sent", peer, handle.Isend([body, MPI.BYTE], peer, _BODY_TAG))
                    self._leaving[peer] = requests + 2, True
            except MPI.Exception as error:
                raise WireError(reason(error)) from error

    def bodies_left(self, peer: int) -> int:
        return self._left.pop(peer, 0)

    def busy(self, peer: int) -> bool:
        return peer in self._leaving

    def head(self, peer: int) -> memoryview | None:
        return self._heads.get(peer)

    def receive(self, peer: int, view: memoryview) -> None:
        with self._lock:
            self._post("body", peer, self._receive(view, peer, _BODY_TAG))

    def received(self, peer: int) -> bool:
        return peer in self._received

    def release(self, peer: int) -> None:
        with self._lock:
            del self._heads[peer]
            self._received.discard(peer)
            self._post("head", peer, self._receive(self._buffers[peer], peer, _HEAD_TAG))

    def close(self, timeout_s: float) -> None:
        """Cancel the receives of messages that will not come; free the communicator if no request is left."""
        if not self.usable():
            return  # MPI_Finalize does it; the memory stays alive with this object's requests
        with self._lock:
            for request, (kind, _) in zip(self._requests, self._owners, strict=True):
                if kind != "sent":
                    request.Cancel()
        deadline = time.monotonic() + timeout_s
        while self._requests and (self.poll() or time.monotonic() < deadline):
            time.sleep(1e-4)
        if self._requests:
            peers = sorted({peer for _, peer in self._owners})
            _log.warning("rank %d: MPI does not let go of messages from or to rank(s) %s", self.rank, peers)
        else:
            with self._lock:
                self._communicator.handle.Free()


@final
class MpiTransport(PassingTransport):
    """Messages of MPI.

    MPI cannot redirect a body that has begun to arrive: if its operation fails meanwhile, the body is still written
    into the operation's tensor, but never after ``close``.
    """

    def __init__(self, communicator: Communicator, config: TcpConfig) -> None:
        """Take over a communicator from ``join``."""
        super().__init__(_MpiWire(communicator), config)
        self.communicator = communicator


def reason(error: MPI.Exception) -> str:
    """Return MPI's description of an error."""
    return f"MPI says: {error.Get_error_string()}"
