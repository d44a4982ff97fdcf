"""``Snapshots``: the state on disk, for the loss of all processes.

Each version has a folder ``version-000000100``. In it are parts: ``shared`` (what all ranks have in common, written by
rank 0) and ``own-3`` (what rank 3 has for itself, if ranks have something); or, for a sharded state, ``shard-3`` (what
rank 3 has of it) and no others. A part is a checkpoint of ``torch.distributed.checkpoint`` with a file ``part.json``,
which has the size and SHA-256 of every file. It is written under another name and renamed at the end, so a part is
whole or not there.

A version counts if all its parts are there and belong together. The parts of one version may come from two runs, or
from two epochs of a run, because a job that goes back to an older version comes to the same number again. Therefore the
ranks of an epoch have a random *token* in common, which ``part.json`` has.

A part holds the tensors of the state and, as the tensor ``document``, their place in the nested values
(``groups.encoding``), so no value is pickled. The index of ``torch.distributed.checkpoint`` itself (``.metadata``) is a
pickle, of which only the classes of an index are loaded (``snapshot_index``), and tensors are read with
``weights_only=True``. So a folder may belong to a team: whoever can write to it can change the weights, and cannot have
code run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import torch

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, RecoveryError
from totalreduce.foundation.named_files import read_named, reading
from totalreduce.foundation.os_errors import describe_error
from totalreduce.groups.encoding import decode, encode
from totalreduce.groups.group import Group
from totalreduce.recovery.snapshot_index import tensors_in
from totalreduce.tensors.flats import fetch, host_like

__all__ = ["Snapshots", "share_token", "whole_versions"]

_log = logging.getLogger(__name__)

_SHARED = "shared"
_PART_FILE = "part.json"
_PART_BYTES_MAX = 16 << 20
_PREFIX = "version-"
#: The version of the format of a part, which is in its description. Raise it if a part changes.
_FORMAT = 1


@final
class Snapshots:
    """Writes versions of a state beside training, and reads the last one. Pass it to ``tr.recoverable``.

    Attributes:
        folder: Where the versions are: a file system that all ranks see.
        written: The last version whose part of this process was written; 0 before that.
        failed: The number of versions that could not be written.
        failure: Why the last one of them could not be written.
        token: Equal in the parts that belong together. ``share_token`` sets it.
        on_signal: The signals that ask for a last version.
    """

    def __init__(self, folder: str | Path, *, every: int, keep: int = 2, on_signal: int | Iterable[int] = ()) -> None:
        """Note the settings; nothing is read or written.

        Args:
            folder: Where the versions are. It is made if it does not exist.
            every: Write each version that is a multiple of this number. A rank copies what it writes, and writes it in
                a thread; if that lasts until the next one is due, this one is left out.
            keep: How many versions stay on disk. With 1, a sharded state that goes back after a loss may replace the
                only version part by part, and the loss of all processes meanwhile leaves none.
            on_signal: A signal, or several (``signal.SIGUSR1``), by which a batch system tells a process that it must
                end soon. When one rank has got it, all ranks write the version after the next step, and the loop ends
                on all of them: ``job.preempted`` is then true. ``tr.recoverable`` and ``tr.attempts`` handle the
                signals while they run, which must be in the main thread.

        Raises:
            ConfigurationError: A number is not positive, or a signal cannot be handled.
        """
        # torch warns that one process writes or reads a checkpoint by itself, as it does here with each part. The
        # filter stays: ``warnings.catch_warnings`` is not safe in threads, and a thread writes beside training.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self.folder = Path(folder)
        self.every = checks.integer("every", every, minimum=1)
        self.keep = checks.integer("keep", keep, minimum=1)
        self.on_signal = tuple(map(_handled, on_signal if isinstance(on_signal, Iterable) else (on_signal,)))
        self.written = self.failed = 0
        self.failure = ""
        self.token = self._written_token = ""  #: The second one is that of the version ``written``.
        self._is_asked, self._home = False, 0
        self._handlers: dict[int, Any] = {}  #: Those of before ``watch``.
        self._writer: threading.Thread | None = None

    def is_due(self, version: int, since: int | None = None) -> bool:
        """Whether a version is to be written.

        Args:
            version: The version.
            since: The version before it that could be written; ``None``: each could.
        """
        return version > 0 and version // self.every > (version - 1 if since is None else since) // self.every

    @property
    def is_asked(self) -> bool:
        """Whether this process has got a signal of ``on_signal``."""
        return self._is_asked

    def watch(self) -> None:
        """Handle the signals of ``on_signal`` from now on, until ``release``.

        Raises:
            ConfigurationError: This is not the main thread.
        """
        if self.on_signal and threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("tr.Snapshots(on_signal=...) needs the main thread, which alone handles signals")
        self._home = os.getpid()
        for number in self.on_signal:
            self._handlers[number] = signal.signal(number, self._ask)

    def release(self) -> None:
        """Give the signals back the handlers of before ``watch``, and return when all is on disk, or has failed.

        If versions could not be written, a warning says how many, and which version is the last one on disk.
        """
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler or signal.SIG_DFL)
        self.wait()
        if self.failed:
            whole = self._sort_versions()[0]
            last = f"the last version there is {whole[-1]}" if whole else "there is no version"
            _log.warning(
                "snapshots in %s: %d could not be written by this rank (%s); %s",
                *(self.folder, self.failed, self.failure, last),
            )

    def write_last(self, version: int, write: Callable[[], None]) -> None:
        """Return when this rank's parts of a version are on disk, or have failed.

        Args:
            version: The version.
            write: Begins to write it, by ``write`` or ``write_shard``. It is called if that has not been done yet.
        """
        self.wait()
        if (self.written, self._written_token) != (version, self.token):
            write()
            self.wait()

    def write(self, version: int, rank: int, world_size: int, shared: Any, own: Any) -> None:
        """Copy the parts of this rank, and write them in a thread.

        Args:
            version: The version of the state.
            rank: The rank of this process.
            world_size: The number of ranks.
            shared: What all ranks have in common; only rank 0's is written.
            own: What this rank has for itself; ``None``: no rank has anything.
        """
        if self._is_writing(version, rank):
            return
        parts = {} if rank != 0 else {_SHARED: shared}
        if own is not None:
            parts[f"own-{rank}"] = own
        if not parts:
            return
        about = _about(version, world_size, self.token, has_own=own is not None)
        self._start(version, rank, about, parts)

    def write_shard(self, version: int, rank: int, world_size: int, shard: Any) -> None:
        """Copy this rank's part of a sharded state, and write it in a thread.

        Args:
            version: The version of the state.
            rank: The rank of this process.
            world_size: The number of ranks, each of which writes a part.
            shard: The part.
        """
        if self._is_writing(version, rank):
            return
        about = _about(version, world_size, self.token, has_own=False)
        self._start(version, rank, about, {_shard(rank): shard})

    def wait(self) -> None:
        """Return when what this process writes is on disk, or has failed."""
        if self._writer is not None:
            self._writer.join()

    def latest(self) -> int:
        """Return the last version that counts; 0 if there is none. Versions that lack a part are logged.

        Raises:
            RecoveryError: The description of a part cannot be read.
        """
        for version in sorted(self._versions(), reverse=True):
            missing = self._missing(version)
            if not missing:
                return version
            _log.warning(
                "the snapshot of version %d in %s lacks %s: an older one is used", version, self.folder, missing
            )
        return 0

    def read_shared(self, version: int) -> Any:
        """Return what all ranks have in common, of a version of ``latest``.

        Raises:
            RecoveryError: A file is missing, or has other bytes than it was written with. Or the state is sharded.
        """
        if self._is_sharded(version):
            raise RecoveryError(
                f"the snapshot of version {version} in {self.folder} is of a sharded state, which "
                "tr.attempts(copies=tr.ShardCopies(...)) reads. Use another folder, or the same program as before"
            )
        return self._read(version, _SHARED)

    def shards_of(self, version: int) -> tuple[int, str]:
        """Return how many ranks have written a part of a sharded state, of a version of ``latest``, and their token.

        Raises:
            RecoveryError: The state is not sharded.
        """
        if not self._is_sharded(version):
            raise RecoveryError(
                f"the snapshot of version {version} in {self.folder} is of a state that is not sharded. Use another "
                "folder, or the same program as before"
            )
        about = self._about(version, _shard(0))
        return about["world_size"], about["token"]

    def read_shard(self, version: int, rank: int, token: str) -> Any:
        """Return the part that a rank has written of a sharded state, which has the token that ``shards_of`` returns.

        Raises:
            RecoveryError: As ``read_shared``. Or the part has another token.
        """
        return self._read(version, _shard(rank), token)

    def read_own(self, version: int, rank: int, world_size: int) -> Any:
        """Return what a rank has for itself; ``None`` if nothing was written, or by another number of ranks.

        Raises:
            RecoveryError: As ``read_shared``.
        """
        about = self._about(version, _SHARED)
        if not about["has_own"]:
            return None
        if about["world_size"] != world_size:
            if rank == 0:
                _log.warning(
                    "the snapshot is of %d ranks, and there are %d: residuals begin at zero, and all else is as "
                    "rank 0 had it",
                    about["world_size"],
                    world_size,
                )
            return None
        return self._read(version, f"own-{rank}", about["token"])

    def _ask(self, number: int, _frame: object) -> None:
        if os.getpid() == self._home:
            self._is_asked = True
        elif number == signal.SIGTERM:
            # A process that was forked, such as a worker of a DataLoader, ends as it would without this handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # ------------------------------------------------------------------------------------------------------------ files

    def _folder(self, version: int) -> Path:
        return self.folder / f"{_PREFIX}{version:09d}"

    def _path(self, version: int, part: str) -> Path:
        return self._folder(version) / part

    def _versions(self) -> list[int]:
        names = [path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _missing(self, version: int) -> str:
        """Return the name of a part that a version lacks; "" if it lacks none."""
        if self._is_sharded(version):
            head = self._about(version, _shard(0))
            shards = [_shard(rank) for rank in range(head["world_size"])]
            return next((shard for shard in shards if not self._belongs(version, shard, head)), "")
        if not (self._path(version, _SHARED) / _PART_FILE).exists():
            return _SHARED
        about = self._about(version, _SHARED)
        parts = [f"own-{rank}" for rank in range(about["world_size"])] if about["has_own"] else []
        return next((part for part in parts if not self._belongs(version, part, about)), "")

    def _is_sharded(self, version: int) -> bool:
        """Whether rank 0 has written its part of a sharded state."""
        return (self._path(version, _shard(0)) / _PART_FILE).exists()

    def _belongs(self, version: int, part: str, head: dict[str, Any]) -> bool:
        """Whether a part is there, and is not one that is left of ranks that had come to this version before."""
        if not (self._path(version, part) / _PART_FILE).exists():
            return False
        about = self._about(version, part)
        return (about["token"], about["world_size"]) == (head["token"], head["world_size"])

    def _about(self, version: int, part: str) -> dict[str, Any]:
        path = self._path(version, part) / _PART_FILE
        try:
            about: dict[str, Any] = json.loads(read_named(path, _PART_BYTES_MAX))
            written = about["format"]
            about["version"], about["has_own"], about["files"].items()
            about["world_size"] = int(about["world_size"])
            about.setdefault("token", "")  # the library has not always written one
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecoveryError(f"the snapshot's file {path} cannot be read: {error}") from error
        if written != _FORMAT:
            raise RecoveryError(
                f"the snapshot's file {path} has format {written!r}, and this library reads format {_FORMAT}: go on "
                "with the library that has written it, or remove the folder"
            )
        return about

    def _read(self, version: int, part: str, token: str | None = None) -> Any:
        """Return a part; with ``token``, only if it has this one."""
        path = self._path(version, part)
        about = self._about(version, part)
        if token is not None and about["token"] != token:
            raise RecoveryError(
                f"{path} does not belong to the other parts of this version: it is left of another run, or another "
                f"process writes to this folder. Remove the folder {path.parent} to use the version before"
            )
        for name, expected in about["files"].items():
            file = path / name
            try:
                found = _fingerprint(file, expected["bytes"])
            except OSError as error:
                raise RecoveryError(f"the snapshot's file {file} cannot be read: {describe_error(error)}") from error
            if found != expected:
                raise RecoveryError(
                    f"the snapshot's file {file} is damaged: it has {_shown(found)}, and was written with "
                    f"{_shown(expected)}. Remove the folder {path.parent} to use the version before"
                )
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            tensors = tensors_in(path, {name: each["bytes"] for name, each in about["files"].items()})
            document = bytes(tensors.pop("document").numpy()).decode()
            return decode(document, [tensors[f"tensor-{index}"] for index in range(len(tensors))])
        except ConfigurationError:  # a value of a type that this process does not have
            raise
        except (Exception, CheckpointException) as error:  # the second one is no Exception
            reason = describe_error(_cause(error))
            raise RecoveryError(f"the snapshot's part {path} cannot be read: {reason}") from error

    def _is_writing(self, version: int, rank: int) -> bool:
        """Whether the last version is not written yet, so that this one is left out, which is logged."""
        if self._writer is None or not self._writer.is_alive():
            return False
        _log.warning("rank %d: the snapshot of version %d is left out: the last one is not written yet", rank, version)
        return True

    def _start(self, version: int, rank: int, about: dict[str, Any], parts: dict[str, Any]) -> None:
        """Copy the parts, and write them in a thread."""
        encoded = {name: _copied(value) for name, value in parts.items()}
        self._writer = threading.Thread(
            target=self._write_all, args=(version, rank, about, encoded), name="totalreduce snapshot", daemon=True
        )
        self._writer.start()

    def _write_all(
        self, version: int, rank: int, about: dict[str, Any], parts: dict[str, dict[str, torch.Tensor]]
    ) -> None:
        try:
            for name, tensors in parts.items():
                self._write_part(self._path(version, name), about, tensors)
            self.written, self._written_token = version, about["token"]
        except BaseException as error:  # torch's CheckpointException is no Exception
            self.failed += 1
            self.failure = describe_error(_cause(error))
            _log.warning("the snapshot of version %d in %s is not written: %s", version, self.folder, self.failure)
            return
        if rank == 0:
            try:
                self._remove_old(version)
            except OSError as error:
                _log.warning("old snapshots in %s are not removed: %s", self.folder, describe_error(error))

    def _write_part(self, path: Path, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{what}") for what in ("new", "old"))
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            save(tensors, storage_writer=FileSystemWriter(temporary), no_dist=True)
            files = {each.name: _fingerprint(each) for each in sorted(temporary.iterdir())}
            with (temporary / _PART_FILE).open("w", encoding="utf-8") as file:
                json.dump({**about, "files": files}, file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():  # of a run that went back to an older version
                # Not removed in its place: a process that is killed then would leave a part that is damaged.
                path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _sort_versions(self) -> tuple[list[int], list[int]]:
        """Return the versions that have all parts, and all that can be read, in order. A warning names the others."""
        whole, readable = [], []
        for version in self._versions():
            try:
                is_whole = not self._missing(version)
            except RecoveryError as error:
                _log.warning("the snapshot of version %d stays where it is: %s", version, error)
                continue
            readable.append(version)
            whole += [version] if is_whole else []
        return whole, readable

    def _remove_old(self, written: int) -> None:
        """Remove the versions before the last ``keep`` whole ones. Those that cannot be read stay.

        So do ``written``, which this process has just written, and later ones. If a job has gone back to an older
        version, the folder may have later ones, and other ranks may not have written this one yet.
        """
        whole, readable = self._sort_versions()
        for version in readable:
            if len(whole) >= self.keep and version < min(written, whole[-self.keep]):
                shutil.rmtree(self._folder(version), ignore_errors=True)


def whole_versions(snapshots: Snapshots) -> list[int]:
    """Return the versions that count, in order. One that cannot be read is left out, with a warning."""
    return snapshots._sort_versions()[0]


def share_token(group: Group, snapshots: Snapshots | None) -> None:
    """Have the parts that the ranks write from now on belong together. Collective, at the begin of an epoch."""
    token = group.broadcast_object(uuid.uuid4().hex if group.rank == 0 else None)
    if snapshots is not None:
        snapshots.token = token


def _about(version: int, world_size: int, token: str, *, has_own: bool) -> dict[str, Any]:
    return {"format": _FORMAT, "version": version, "world_size": world_size, "has_own": has_own, "token": token}


def _shard(rank: int) -> str:
    return f"shard-{rank}"


def _handled(number: int) -> signal.Signals:
    try:
        handled = signal.Signals(number)
    except (TypeError, ValueError):
        raise ConfigurationError(f"on_signal={number!r} is no signal: signal.SIGUSR1, for example") from None
    if handled in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigurationError(f"on_signal={handled.name}: no process can handle this signal")
    return handled


def _copied(value: Any) -> dict[str, torch.Tensor]:
    """Return a nested value as tensors that nothing else changes. Raises ``ConfigurationError``."""
    document, tensors = encode(value)
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    copies = [host_like(tensor) for tensor in plain]
    fetch(copies, plain)
    named = {f"tensor-{index}": copy for index, copy in enumerate(copies)}
    return {**named, "document": torch.frombuffer(bytearray(document.encode()), dtype=torch.uint8)}


def _cause(error: BaseException) -> BaseException:
    """Return the error of the system behind an error of torch, if there is one."""
    failures = getattr(error, "failures", None)  # of a CheckpointException: by rank an error and its traceback
    first = next(iter(failures.values()))[0] if failures else error
    cause: BaseException | None = first
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return first if cause is None else cause


def _shown(fingerprint: dict[str, Any]) -> str:
    digest = fingerprint["sha256"]
    return f"{fingerprint['bytes']} bytes" + (f" with SHA-256 {digest[:12]}…" if digest else "")


def _fingerprint(path: Path, bytes_expected: int | None = None) -> dict[str, Any]:
    """Return the size and the digest of a file; without the digest if it is not as long as expected."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_read = bytes_expected is None or size == bytes_expected
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest() if is_read else ""}
