"""Snapshots of a parameter server: each server writes its shards, and any number of servers reads them.

A snapshot is one version of ``recovery.snapshots``, which is complete when all shards are there and belong together.
Its version is the clock of all workers. At this clock no worker has pushed anything in its step, so the clock also says
which pushes were applied: all of earlier steps, and none of later ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RecoveryError
from totalreduce.kernels.arrays import Array
from totalreduce.recovery.snapshots import Snapshots, whole_versions
from totalreduce.server.clocks import FINISHED
from totalreduce.server.layout import Layout
from totalreduce.server.table import Table

__all__ = ["Origin", "Snapshot", "describe_snapshot", "find_snapshot", "write_shard"]

#: The number of versions that stay on disk.
_KEEP = 2


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values of a connection come from. Equal on all ranks, and on processes in the place of lost ones.

    Attributes:
        run: A text that no other connection has. Snapshots have it.
        folder: That of the snapshot which was restored, absolute; ``None``: there was none.
        clock: That of the snapshot; 0 if there was none.
    """

    run: str
    folder: str | None = None
    clock: int = 0

    def is_saved(self, folder: str | Path, clock: int) -> bool:
        """Whether a folder has the snapshot of this clock already, because the values were restored from it."""
        return str(Path(folder).absolute()) == self.folder and clock == self.clock


def describe_snapshot(folder: str | Path, run: str, mark: int) -> Array:
    """Return the description of a snapshot that is to be written, uint8, which a worker sends to servers.

    All workers, and a process that takes the place of a lost one, send the same bytes. So shards that are written
    before and after a loss belong together.

    Raises:
        ConfigurationError: The name of the folder is too long.
    """
    text = json.dumps({"folder": str(Path(folder).absolute()), "run": run, "mark": mark}).encode()
    if len(text) > 1000:
        raise ConfigurationError(f"the name of the folder is too long: {folder}")
    return np.frombuffer(bytearray(text), np.uint8)


def write_shard(note: str, clock: int, table: Table, about: dict[str, Any], place: int, count: int) -> None:
    """Write a shard of a snapshot.

    ``note`` is what ``describe_snapshot`` has returned. ``about`` has the settings that the one who reads it must have,
    too. ``place`` is that of the shard among the ``count`` shards that have keys.

    Raises:
        RecoveryError: It could not be written; or the folder has a snapshot of another run that is not earlier.
        ProtocolError: The description is none.
    """
    try:
        described = json.loads(note)
        folder, run, mark = Path(described["folder"]), str(described["run"]), int(described["mark"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"a worker sends no description of a snapshot: {note[:200]!r}") from error
    if clock < 1:
        raise RecoveryError("no worker has ended a step: call clock(), and then save()")
    if clock >= FINISHED:
        raise RecoveryError("all workers have finished: save() belongs before retire() and finish()")
    snapshots = Snapshots(folder, every=1, keep=_KEEP)
    if _is_written(snapshots, clock, run):
        return
    snapshots.token = f"{run}-{mark}"
    arrays = {"values": table.values, "states": list(table.states)}
    content = {**about, "version": table.version, **_tensors(arrays)}
    snapshots.write_shard(clock, place, count, content)
    snapshots.wait()
    if snapshots.failed:
        raise RecoveryError(f"shard {place} of the snapshot in {folder} was not written: {snapshots.failure}")


def _is_written(snapshots: Snapshots, clock: int, run: str) -> bool:
    """Whether this run has written a complete snapshot of this clock. To write it again could only damage it.

    A shard of a snapshot that is not complete yet finds no later snapshot of its run: workers come to the next one when
    all shards are written.

    Raises:
        RecoveryError: There is a complete snapshot of another run that is not earlier. It would be damaged, or hide
            this one.
    """
    last = max(whole_versions(snapshots), default=0)
    if last < clock:
        return False
    if last == clock and snapshots.shards_of(clock)[1].startswith(f"{run}-"):
        return True
    which = "a later snapshot" if last > clock else "the snapshot"
    raise RecoveryError(
        f"the folder {snapshots.folder} has {which} {last} of another run, and this one is {clock}: use another folder"
    )


def find_snapshot(folder: str | Path) -> int:
    """Return the clock of the last complete snapshot in a folder.

    Raises:
        RecoveryError: There is none, or a description cannot be read.
    """
    clock = Snapshots(folder, every=1).latest()
    if clock < 1:
        raise RecoveryError(f"restore: there is no complete snapshot of a parameter server in {folder}")
    return clock


@final
class Snapshot:
    """A complete snapshot.

    Attributes:
        clock: Of all workers.
    """

    def __init__(self, folder: str | Path, clock: int) -> None:
        """Raises ``RecoveryError`` if a file is damaged, and ``ConfigurationError`` if it is of something else."""
        self._snapshots, self.clock = Snapshots(folder, every=1), clock
        self._count, self._token = self._snapshots.shards_of(clock)
        # Without the values, which would stay in memory as long as this object.
        first = self._read(0)
        self._description = {name: value for name, value in first.items() if name not in ("values", "states")}

    def _read(self, place: int) -> dict[str, Any]:
        found = self._snapshots.read_shard(self.clock, place, self._token)
        if not isinstance(found, dict) or "optimizer" not in found or "num_shards" not in found:
            raise ConfigurationError(f"what is in {self._snapshots.folder} is no snapshot of a parameter server")
        return found

    def load(self, table: Table, layout: Layout, about: dict[str, Any]) -> None:
        """Set the values and the state of a table to those of the same keys.

        ``about``: as for ``write_shard``. The number of shards, and numbers of the optimizer, may be others.

        Raises:
            ConfigurationError: The snapshot is of other keys, values or another optimizer, or of a version of this
                library that has other keys in each shard.
            RecoveryError: A file is damaged, or missing.
        """
        for name in ("num_keys", "width", "dtype"):
            self._check(name, self._description[name], about[name])
        for name in ("name", "kind"):
            self._check("optimizer", self._description["optimizer"].get(name), about["optimizer"].get(name))
        # Settings such as momentum= decide what state an optimizer has.
        self._check("state of the optimizer", self._description.get("state"), about.get("state"))
        old = Layout(layout.num_keys, range(self._description["num_shards"]))
        if self._description.get("layout") != old.digest:
            raise ConfigurationError(
                f"the snapshot in {self._snapshots.folder} was written by a version of totalreduce that has other keys "
                "in each shard: read it with that version"
            )
        shards = [int(shard) for shard in np.unique(old.owners)]
        if len(shards) != self._count or layout.num_ranges != old.num_ranges:
            raise RecoveryError(f"the snapshot in {self._snapshots.folder} has {self._count} parts, not {len(shards)}")
        sizes = np.diff(layout.begins)
        mine = _rows_of(table.ranges, sizes)
        for shard in np.unique(old.owners[table.ranges]).tolist():
            place = shards.index(shard)
            content = self._read(place)
            theirs = _rows_of(old.ranges_of(shard), sizes)
            for target, source in zip(
                (table.values, *table.states), (content["values"], *content["states"]), strict=True
            ):
                into = target.reshape(sum(len(rows) for rows in mine.values()), -1)
                out_of = source.numpy().reshape(sum(len(rows) for rows in theirs.values()), -1)
                for index in mine.keys() & theirs.keys():
                    into[mine[index].start : mine[index].stop] = out_of[theirs[index].start : theirs[index].stop]

    def _check(self, name: str, found: object, expected: object) -> None:
        if found != expected:
            raise ConfigurationError(
                f"the snapshot in {self._snapshots.folder} has {name} {found!r}, and this parameter server {expected!r}"
            )


def _rows_of(ranges: list[int], sizes: Array) -> dict[int, range]:
    """Return the rows of each range in the table of a shard that has these ranges."""
    ends = np.cumsum(sizes[ranges]).tolist()
    return {index: range(end - int(sizes[index]), end) for index, end in zip(ranges, ends, strict=True)}


def _tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [torch.from_numpy(each) for each in value] if isinstance(value, list) else torch.from_numpy(value)
        for name, value in arrays.items()
    }
