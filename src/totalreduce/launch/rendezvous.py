"""The rendezvous: ranks find each other through a ``torch.distributed`` store.

The default process group's own store is used where there is one. Every rank first writes an ``Arrival`` into the store:
rank, world size, job, version. While ranks wait for each other they compare these, so that processes that cannot be one
job learn it as soon as they have met in the store. Then every rank publishes where it listens and the settings that
shape the wire; every rank reads all of it, so a disagreement is the same error everywhere. Nothing read from the store
is evaluated; values are bounded JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from totalreduce.foundation import environment
from totalreduce.foundation.errors import ConfigurationError, RendezvousError, TotalReduceError
from totalreduce.foundation.os_errors import missing_descriptors
from totalreduce.foundation.world import World
from totalreduce.launch.arrivals import Arrival, find_conflict
from totalreduce.launch.rounds import enter_round
from totalreduce.launch.unreachable import await_listener, why_unreachable, within

__all__ = ["Meeting", "Member", "StoreRank", "compare_settings", "current_world", "open_store"]

_log = logging.getLogger(__name__)

_ENTRY_BYTES_MAX = 64 * 1024
#: The longest time between two looks into the store.
_POLL_S = 0.1
#: When rank 0 says for which ranks it waits that have come already.
_SAY_S = 2.0
#: What torch says of the system's error if the port of the store is taken.
_IN_USE = "EADDRINUSE"
#: If fewer files can be opened when a store fails, it has failed for want of them.
_STORE_DESCRIPTORS = 8
#: Torch notices the end of the time-out by itself, a little late, if nothing listens.
_GRACE_S = 0.5
#: The stores that this process serves until it ends: when rank 0 closes a group, other ranks may already join the next
#: one. There is one server per port and process, as in torch, so several groups share it.
_served: dict[tuple[str, int], Store] = {}
_NO_SHARED_KEY = "none"
#: Rank 0 serves the store: it gives up a little before the others and stays until they have read the reason.
_LINGER_S = 1.0
#: It stays so long if the ranks cannot be one job, because some may not have come yet.
_CONFLICT_LINGER_S = 2.0
#: How long a rank 0 whose port is taken asks which process has it.
_ASK_S = 1.0
#: The number of arrivals that are read beyond the world size. These contradict each other, and more would add nothing.
_ARRIVALS_MAX = 16
_SERVER = "totalreduce/server"
_MEETING = "totalreduce/meeting"


@dataclass(frozen=True, slots=True)
class Member:
    """The host of one rank, and the addresses at which it listens."""

    host: str  #: Equal for ranks that can share memory (see ``address.host_identity``).
    address: str = ""  #: Address for TCP; "" if the rank does not listen.
    port: int = 0  #: Port for TCP.
    shared_memory: str | None = None  #: Address of the Unix socket; ``None`` if the rank cannot share memory.


@dataclass(frozen=True, slots=True)
class StoreRank:
    """An open store, and the rank of this process among the processes that meet in it."""

    store: Store  #: A store that all ranks can reach.
    rank: int  #: The rank of this process.
    world_size: int
    epoch: int = 0  #: Tells successive groups of one job apart: messages and connections of another epoch are refused.
    #: Returns why the group cannot be formed any more; "" if it can. It is called several times a second. ``None``:
    #: nothing interrupts.
    interruption: Callable[[], str] | None = None

    def world(self) -> World:
        """Return the world in which this process has that rank."""
        return _world_of(self.rank, self.world_size)


def current_world() -> World:
    """Return this process's world according to ``torch.distributed`` if it is initialised, else to the launcher."""
    if not (dist.is_available() and dist.is_initialized()):
        return environment.read_world()
    return _world_of(dist.get_rank(), dist.get_world_size())


def _world_of(rank: int, world_size: int) -> World:
    """Return the world of a process whose rank ``torch.distributed`` knows."""
    env = environment.current()
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        master_address=env.get("MASTER_ADDR", ""),
        master_port=int(env.get("MASTER_PORT", "0")),
        launcher="torch.distributed",
        job_id=env.get("TOTALREDUCE_JOB_ID", ""),
    )


def open_store(world: World, timeout_s: float) -> Store:
    """Return the store that all ranks can reach. Raises ``RendezvousError``: it cannot be reached in time."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    serves = world.rank == 0 and not world.store_is_served
    where = f"{world.master_address}:{world.master_port}"

    def make(*, serves: bool = serves, timeout_s: float = timeout_s) -> Store:
        # multi_tenant: a later init_process_group in this process shares the server instead of finding its port taken.
        return TCPStore(
            world.master_address,
            world.master_port,
            world.world_size,
            serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    address, left_s = (world.master_address, world.master_port), timeout_s
    if not serves:
        # Torch's own wait says nothing of the cause, prints a page of frames, and looks names up beyond its deadline.
        until = time.monotonic() + timeout_s
        cause = await_listener(*address, timeout_s)
        if cause is not None:
            raise _not_reached(world, where, cause)
        left_s = until - time.monotonic()
    try:
        if not serves:
            return _store_within(left_s, make)
        if address not in _served:
            _served[address] = _store_within(left_s, make)
            _served[address].set(_SERVER, Arrival.of(world).to_text())
        return _served[address]
    except (RuntimeError, ValueError, TimeoutError) as error:
        if serves:
            _refuse_second_server(world, lambda: make(serves=False, timeout_s=_ASK_S))
        if serves and _IN_USE in str(error):
            cause = (
                f"another program uses port {world.master_port} of this host. End it (`ss -ltnp` shows it), or choose "
                "another MASTER_PORT, the same on all ranks"
            )
        else:
            cause = why_unreachable(*address, _ASK_S, serves=serves)
        cause = cause or (
            f"{_first_line(error)}. Rank 0 serves it: was it started, and with the same world size? Check MASTER_ADDR "
            "and MASTER_PORT (is the port free on rank 0's host, and open?)"
        )
        raise _not_reached(world, where, cause) from error


def _not_reached(world: World, where: str, cause: str) -> RendezvousError:
    role = "serve" if world.rank == 0 and not world.store_is_served else "reach"
    shortage = missing_descriptors(_STORE_DESCRIPTORS)
    return RendezvousError(f"rank {world.rank} cannot {role} the store at {where}: {shortage or cause}")


def _refuse_second_server(world: World, ask: Callable[[], Store]) -> None:
    """Look for another rank 0 at the port at which this rank 0 cannot serve the store.

    Raises:
        ConfigurationError: There is one. Its ranks learn of the conflict too, if they have not met yet.
    """
    mine = Arrival.of(world)
    try:
        store = _store_within(_ASK_S, ask)
        if not store.check([_SERVER]):
            return
        server = Arrival.from_text(_text_of(store, _SERVER))
        if server.job_id == mine.job_id and store.check([_MEETING]):
            prefix = _text_of(store, _MEETING)
            if not _is_over(store, prefix, server.world_size):
                _announce(store, prefix, mine)
    except (RuntimeError, ValueError, TimeoutError):
        return
    conflict = find_conflict([server, mine])
    if conflict is not None:
        raise ConfigurationError(
            f"rank 0 cannot serve the store at {world.master_address}:{world.master_port}, which {server.label} does: "
            f"{conflict}"
        )


def _announce(store: Store, prefix: str, arrival: Arrival) -> None:
    number = store.add(f"{prefix}/arrivals", 1)
    store.set(f"{prefix}/arrival/{number}", arrival.to_text())


def _is_over(store: Store, prefix: str, world_size: int) -> bool:
    """Whether a meeting has ended, with or without an error."""
    return bool(store.check([f"{prefix}/failure"])) or store.add(f"{prefix}/rank/read", 0) >= world_size


def _text_of(store: Store, key: str) -> str:
    """Return a value that the store has. Raises ``RendezvousError`` if it is too large."""
    return _checked(store.get(key))


def _checked(value: bytes) -> str:
    if len(value) > _ENTRY_BYTES_MAX:
        raise RendezvousError(f"an entry in the store is larger than {_ENTRY_BYTES_MAX} bytes")
    return value.decode()


def _store_within(timeout_s: float, make: Callable[[], Store]) -> Store:
    """Call ``make`` with a deadline: torch waits for ever for an answer if something else listens at the port.

    Raises:
        TimeoutError: No answer came.
    """
    try:
        return within(timeout_s + _GRACE_S, make)
    except TimeoutError:
        raise TimeoutError(f"the listener there does not answer like a store within {timeout_s:g} s") from None


@final
class Meeting:
    """A rendezvous of all ranks under one name; every ``init`` of a process joins the next one.

    Attributes:
        job_id: Name of the job and of the meeting.
    """

    def __init__(
        self, store: Store, world: World, name: str, timeout_s: float, interruption: Callable[[], str] | None = None
    ) -> None:
        """``interruption``: see ``StoreRank``."""
        self._world, self._store, self._interruption = world, store, interruption
        self._deadline = time.monotonic() + timeout_s
        self._linger_s = min(_LINGER_S, 0.2 * timeout_s) if world.rank == 0 else 0.0
        self._conflict_linger_s = min(_CONFLICT_LINGER_S, timeout_s) if world.rank == 0 else 0.0
        self._key_source = ""
        self._arrivals: list[Arrival] = []
        self._before = ""
        with self._store_needed("announcing this rank"):
            # A second init must not read what the first one left in the store.
            meetings = f"totalreduce/{self._enter_round(name, timeout_s)}/{name}"
            # The members of an epoch are decided already, each by one process: they need not be compared, which would
            # take several accesses of the store for each of them.
            self._compares_arrivals = interruption is None
            if self._compares_arrivals:
                arrival = Arrival.of(world)
                self._prefix = self._claim(arrival, meetings)
                _announce(store, self._prefix, arrival)
            else:
                self._prefix = f"{meetings}/{store.add(f'{meetings}/count/{world.rank}', 1)}"
            self.job_id = f"{world.job_id}/{self._prefix}"
            if world.rank == 0:
                store.set(_MEETING, self._prefix)

    def _enter_round(self, name: str, timeout_s: float) -> str:
        """Return a text that tells the processes of this start from those that torchrun has started before."""
        if "TORCHELASTIC_RUN_ID" not in environment.current():
            return "0"
        return enter_round(self._store, name, self._world.rank, self._world.world_size, timeout_s)

    def job_key(self) -> bytes:
        """Return the key that proves membership: from the environment, or made by rank 0 and shared in the store."""
        key = environment.read_job_key()
        self._key_source = "shared through the store" if key is None else "given by the environment"
        if self._world.rank == 0:
            with self._store_needed("sharing the job's key"):
                # A rank without a key must not wait for one that is not shared.
                self._store.set(f"{self._prefix}/key", _NO_SHARED_KEY if key is not None else secrets.token_hex(32))
        if key is not None:
            return key
        if self._world.rank == 0:
            _log.info(
                "no TOTALREDUCE_JOB_KEY: rank 0 made a key and shares it through the store, "
                "so this job is as safe as its store at %s:%d",
                self._world.master_address or "the process group's address",
                self._world.master_port,
            )
        shared = self._read([f"{self._prefix}/key"], "rank 0's key")[0]
        # With a key on some ranks only, ``gather`` ends the meeting; until then any key will do.
        return secrets.token_bytes(32) if shared == _NO_SHARED_KEY else bytes.fromhex(shared)

    def gather(self, member: Member, settings: Mapping[str, Any]) -> list[Member]:
        """Publish where this rank listens; return the same of all ranks, by rank.

        Raises:
            RendezvousError: A rank did not come in time; the message names it.
            ConfigurationError: The ranks' settings differ, or they are not ranks of one job; on every rank.
        """
        entry = {"member": asdict(member), "settings": {**settings, "job key": self._key_source}}
        entries = [json.loads(text) for text in self._exchange("rank", json.dumps(entry))]
        compare_settings([entry["settings"] for entry in entries])
        return [_member(entry["member"]) for entry in entries]

    def prepared(self, lack: str) -> list[str]:
        """Publish what this rank lacks after it has prepared itself, or ""; return the same of all ranks, by rank.

        Call it after ``gather``. Where a rank must prepare for long, the others wait here, and rank 0 says for whom.

        Raises:
            RendezvousError: A rank did not come in time; the message names it.
        """
        return self._exchange("prepared", lack, "to compile code, once on a machine")

    def _exchange(self, what: str, text: str, task: str = "") -> list[str]:
        """Publish a text; return those of all ranks, by rank. ``task``: what late ranks do; "": they may be missing."""
        keys = [f"{self._prefix}/{what}/{rank}" for rank in range(self._world.world_size)]
        count = f"{self._prefix}/{what}/read"
        with self._store_needed("waiting for the other ranks"):
            self._store.set(keys[self._world.rank], text)
            texts = self._read(keys, "the other ranks", task)
            self._compare_arrivals()  # every rank has written its arrival before its entry
            self._store.add(count, 1)
            # If rank 0 fails after this, for instance because of its certificate, the store ends with its process.
            self._linger(lambda: self._store.add(count, 0) >= self._world.world_size)
        return texts

    def _read(self, keys: list[str], what: str, task: str = "") -> list[str]:
        # The store is polled, because torch logs every ``wait`` that runs out, and rank 0 may give up meanwhile.
        pause_s, say_at = 0.005, time.monotonic() + _SAY_S
        with self._store_needed(f"waiting for {what}"):
            self._compare_arrivals()
            while not self._store.check(keys):
                self._check_deadline(keys, what, task)
                if task and time.monotonic() >= say_at and self._world.rank == 0:
                    say_at = math.inf
                    _log.info("waiting for %s %s", self._absent(keys, what), task)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
                self._compare_arrivals()
            return [_checked(value) for value in self._store.multi_get(keys)]

    def _absent(self, keys: list[str], what: str) -> str:
        """Return which ranks have not written their key, if each has one; otherwise ``what``."""
        absent = [str(rank) for rank, key in enumerate(keys) if len(keys) > 1 and not self._store.check([key])]
        return f"rank(s) {', '.join(absent)}" if absent else what

    @contextlib.contextmanager
    def _store_needed(self, use: str) -> Iterator[None]:
        """Raise ``RendezvousError`` for an error of the store; ``use``: what this process was doing with it."""
        try:
            yield
        except TotalReduceError:  # it is a RuntimeError too, but the store has not raised it
            raise
        except RuntimeError as error:
            raise self._failed(
                f"the store is gone while {use} ({_first_line(error)}). Rank 0 or the launcher serves it: see why it "
                "ended"
            ) from error

    def _claim(self, arrival: Arrival, meetings: str) -> str:
        """Return the meeting that this process joins: the next one, unless another process has its rank.

        If another process has this rank in a meeting that is in progress, this process joins that meeting, so that all
        ranks there learn of the two processes. A claim is one atomic access of the store: of two processes that come at
        the same moment, the later one finds the claim of the other one.
        """
        count = f"{meetings}/count/{arrival.rank}"
        num_counted = self._store.add(count, 0)
        for number in itertools.count(max(1, num_counted)):
            prefix = f"{meetings}/{number}"
            holder = Arrival.from_text(self._holder_of(f"{prefix}/claim/{arrival.rank}", arrival.to_text()))
            if holder.process != arrival.process:
                self._before = f" {holder.label} was rank {arrival.rank} before this process: was one started twice?"
                if not _is_over(self._store, prefix, holder.world_size):
                    break
            elif number > num_counted:
                # Also meetings that a process has claimed, and not counted because it was lost in between.
                self._store.add(count, number - num_counted)
                break
        return prefix

    def _holder_of(self, key: str, mine: str) -> str:
        """Return the text of the process that has written a key; without one, write and return ``mine``."""
        try:
            return _checked(self._store.compare_set(key, "", mine))
        except RuntimeError:
            # The store lacks this method, as torch's EtcdStore (NotImplementedError, which is a RuntimeError), or it is
            # gone: then the next line raises.
            if not self._store.check([key]):
                self._store.set(key, mine)
            return _text_of(self._store, key)

    def _read_arrivals(self, prefix: str, num_known: int) -> list[Arrival]:
        """Return the arrivals after the first ``num_known``, in their order."""
        found: list[Arrival] = []
        while num_known + len(found) < self._world.world_size + _ARRIVALS_MAX:
            key = f"{prefix}/arrival/{num_known + len(found) + 1}"
            if not self._store.check([key]):
                break
            found.append(Arrival.from_text(_text_of(self._store, key)))
        return found

    def _compare_arrivals(self) -> None:
        """Raise ``ConfigurationError`` if the processes that have come so far cannot be ranks of one job."""
        if not self._compares_arrivals:
            return
        new = self._read_arrivals(self._prefix, len(self._arrivals))
        if not new:
            return
        self._arrivals += new
        conflict = find_conflict(self._arrivals)
        if conflict is None:
            return
        self._store.add(f"{self._prefix}/informed", 1)
        wanted = max(len(self._arrivals), *(arrival.world_size for arrival in self._arrivals))
        self._linger(lambda: self._store.add(f"{self._prefix}/informed", 0) >= wanted, self._conflict_linger_s)
        raise ConfigurationError(conflict)

    def _check_deadline(self, keys: list[str], what: str, task: str) -> None:
        """Raise ``RendezvousError``, with the missing ranks, at the deadline or if rank 0 has reported one."""
        failure = f"{self._prefix}/failure"
        if self._store.check([failure]):
            raise self._failed(self._store.get(failure).decode()[:2000])
        reason = "" if self._interruption is None else self._interruption()
        if reason:
            raise self._failed(reason)
        if time.monotonic() < self._deadline - self._linger_s:
            return
        who = self._absent(keys, what)
        reason = f"{who} did not come within the time-out. Were all ranks started?{self._before}"
        if task:
            reason = f"the time-out has ended the wait for {who} {task}. Give the first job more time (timeout_s)"
        if self._world.rank == 0:
            self._store.set(failure, reason)
        self._linger(lambda: False)
        raise self._failed(reason)

    def _failed(self, reason: str) -> RendezvousError:
        return RendezvousError(f"rank {self._world.rank} of {self._world.world_size}: {reason}")

    def _linger(self, all_know: Callable[[], bool], seconds: float | None = None) -> None:
        """Keep rank 0, which serves the store, alive for a moment, so that the others can read why all fail."""
        until, pause_s = time.monotonic() + (self._linger_s if seconds is None else seconds), 0.002
        while time.monotonic() < until and not all_know():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)


def compare_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ConfigurationError``, with both values, unless the settings of all ranks are equal."""
    for rank, mine in enumerate(settings):
        names = [name for name in {**settings[0], **mine} if settings[0].get(name) != mine.get(name)]
        if names:
            name = names[0]
            advice = (
                "use the same version, and call init with the same arguments and the same TOTALREDUCE_* variables on "
                "every rank"
            )
            if name == "job key":
                advice = "set TOTALREDUCE_JOB_KEY (or TOTALREDUCE_JOB_KEY_FILE) on every rank, to the same, or on none"
            raise ConfigurationError(
                f"{name} is {settings[0].get(name)!r} on rank 0 and {mine.get(name)!r} on rank {rank}; {advice}"
            )


def _member(entry: Mapping[str, Any]) -> Member:
    shared = entry["shared_memory"]
    return Member(
        str(entry["host"]),
        str(entry["address"]),
        int(entry["port"]),
        None if shared is None else str(shared),
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
