"""Snapshots of a parameter server: written by its servers, restored by any number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import totalreduce as tr
from totalreduce.foundation.errors import ConfigurationError, RecoveryError, RefusedError, SlowWorkersError
from totalreduce.groups.group import Group
from totalreduce.server.layout import Layout
from totalreduce.server.saving import Snapshot
from totalreduce.testing import run_ranks

ps = tr.ps
NUM_KEYS = 3000


def _settings(**more: object) -> dict[str, object]:
    return {"num_keys": NUM_KEYS, "optimizer": ps.Adam(0.1), "consistency": ps.Sequential(), "initial": 1.0, **more}


def _train(client: ps.Connection, rank: int, num_workers: int, until: int) -> None:
    """Push in each step to keys that depend on the step alone; the workers divide them among them."""
    for step in client.steps(until):
        keys = np.flatnonzero(np.random.default_rng(step).random(NUM_KEYS) < 0.3)
        mine = keys[rank::num_workers]
        client.push(mine, np.sin(mine + step).astype(np.float32))


def _values(client: ps.Connection, group: Group) -> np.ndarray:
    client.meet()
    group.barrier()
    out = np.empty(NUM_KEYS, np.float32)
    client.pull_range(0, NUM_KEYS, out).wait()
    return out


def _straight(until: int) -> np.ndarray:
    def body(group: Group) -> np.ndarray:
        with ps.connect(group, **_settings()) as client:
            _train(client, 0, 1, until)
            return _values(client, group)

    return run_ranks(1, body)[0]


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_a_job_with_other_ranks_goes_on_where_the_snapshot_was_written(tmp_path: Path, world_size: int) -> None:
    """Values and state of the optimizer are those of a run without an interruption, bit by bit."""

    def first(group: Group) -> None:
        with ps.connect(group, **_settings(shards=5)) as client:
            _train(client, group.rank, group.world_size, 4)
            client.save(tmp_path)
            _train(client, group.rank, group.world_size, 6)  # is lost: the job ends without a second snapshot

    def second(group: Group) -> tuple[int, np.ndarray]:
        with ps.connect(group, **_settings(restore=tmp_path, initial=7.0)) as client:
            begin = client.step
            _train(client, group.rank, group.world_size, 9)
            return begin, _values(client, group)

    run_ranks(world_size, first)
    expected = _straight(9)
    for begin, values in run_ranks(5 - world_size, second):
        assert begin == 4
        np.testing.assert_array_equal(values, expected)


def test_pushes_of_a_restored_program_without_steps_count(tmp_path: Path) -> None:
    def body(group: Group) -> list[float]:
        with ps.connect(group, num_keys=10, consistency=ps.Sequential()) as client:
            client.push([3], np.ones(1, np.float32))
            client.clock()
            client.save(tmp_path)
        with ps.connect(group, num_keys=10, consistency=ps.Sequential(), restore=tmp_path) as client:
            client.push([3], np.ones(1, np.float32))
            client.clock()
            client.push([4], np.ones(1, np.float32))
            client.clock()
            out = np.empty(10, np.float32)
            client.pull_range(0, 10, out).wait()
            return out.tolist()

    for values in run_ranks(2, body):
        assert values == [0, 0, 0, 4, 2, 0, 0, 0, 0, 0]


def test_the_snapshot_is_of_one_moment_while_workers_go_on(tmp_path: Path) -> None:
    """Rank 0 pushes at once behind its save(); nothing of that is in the snapshot."""

    def body(group: Group) -> np.ndarray:
        with ps.connect(group, num_keys=NUM_KEYS, consistency=ps.Eventual()) as client:
            ones = np.ones(NUM_KEYS, np.float32)
            client.push_range(0, NUM_KEYS, ones)
            client.clock()
            client.save(tmp_path)
            for _ in range(3):
                client.push_range(0, NUM_KEYS, 100 * ones)
            client.clock()
        with ps.connect(group, num_keys=NUM_KEYS, restore=tmp_path) as client:
            return _values(client, group)

    for values in run_ranks(3, body):
        np.testing.assert_array_equal(values, np.full(NUM_KEYS, 3, np.float32))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    def write(group: Group) -> None:
        with ps.connect(group, **_settings()) as client:
            _train(client, group.rank, group.world_size, 1)
            client.save(tmp_path)

    def read(group: Group) -> None:
        ps.connect(group, **_settings(restore=tmp_path))

    run_ranks(2, write)
    [victim] = (tmp_path / "version-000000001" / "shard-1").glob("*.distcp")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises((RecoveryError, tr.PlanMismatchError), match=f"{victim} is damaged"):
        run_ranks(2, read)
    for part in (tmp_path / "version-000000001").iterdir():
        (part / "part.json").unlink()
    with pytest.raises((RecoveryError, tr.PlanMismatchError), match="no complete snapshot"):
        run_ranks(1, read)


def test_a_snapshot_of_something_else_is_refused(tmp_path: Path) -> None:
    def write(group: Group) -> None:
        with ps.connect(group, **_settings()) as client:
            _train(client, 0, 1, 1)
            client.save(tmp_path)

    run_ranks(1, write)
    for changed, text in [
        ({"num_keys": 4}, "num_keys 3000, and this parameter server 4"),
        ({"optimizer": ps.SGD(1.0)}, "optimizer 'Adam', and this parameter server 'SGD'"),
        ({"dtype": "float64"}, "dtype 'float32', and this parameter server 'float64'"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            run_ranks(1, lambda group, changed=changed: ps.connect(group, **_settings(restore=tmp_path, **changed)))


def test_a_snapshot_with_other_keys_in_its_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an older version of the library may have written it."""

    def write(group: Group) -> None:
        with ps.connect(group, **_settings()) as client:
            _train(client, 0, 1, 1)
            client.save(tmp_path)

    with monkeypatch.context() as older:
        older.setattr(Layout, "digest", property(lambda _: "of another layout"))
        run_ranks(1, write)
    with pytest.raises(
        ConfigurationError, match="written by a version of totalreduce that has other keys in each shard"
    ):
        run_ranks(1, lambda group: ps.connect(group, **_settings(restore=tmp_path)))


def test_a_snapshot_of_an_optimizer_with_other_state_is_refused(tmp_path: Path) -> None:
    def make(group: Group, kind: str, settings: dict[str, float], restore: Path | None = None) -> None:
        with ps.connect(group, num_keys=4, optimizer=ps.Torch(kind, settings), restore=restore) as client:
            if restore is None:
                client.clock()
                client.save(tmp_path / kind)

    for kind, before, after, text in [
        ("SGD", {}, {"momentum": 0.9}, r"\['count'\], and this parameter server \['count', 'momentum_buffer'\]"),
        (
            "RMSprop",
            {"momentum": 0.9},
            {"centered": True},
            "'momentum_buffer'.* this parameter server .*'grad_avg'",
        ),
    ]:
        run_ranks(1, lambda group, kind=kind, before=before: make(group, kind, {"lr": 0.1, **before}))
        with pytest.raises(ConfigurationError, match=text):
            run_ranks(1, lambda group, kind=kind, after=after: make(group, kind, {"lr": 0.1, **after}, tmp_path / kind))


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10, consistency=ps.Bounded(3)) as client:
            client.push([1], np.ones(1, np.float32))
            with pytest.raises(ConfigurationError, match="between two steps"):
                client.save(tmp_path)
            client.clock()
            if group.rank == 0:
                with pytest.raises(SlowWorkersError):  # rank 1 does not save yet
                    client.save(tmp_path, timeout_s=0.05)
            group.barrier()
            if group.rank == 1:
                client.save(tmp_path)
            for _ in range(1 + group.rank):
                client.clock()
            with pytest.raises(RefusedError, match=r"different steps, by worker: \{0: 2, 1: 3\}"):
                client.save(tmp_path)
            for _ in range(2 - group.rank):
                client.clock()
            (tmp_path / "file").touch()
            with pytest.raises(RefusedError, match="was not written"):
                client.save(tmp_path / "file")

    run_ranks(2, body)
    assert tr.Snapshots(tmp_path, every=1).latest() == 1


def _save_at(folder: Path, clocks: tuple[int, ...], world_size: int = 2) -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10, consistency=ps.Sequential()) as client:
            for step in client.steps(max(clocks) + 1):
                if step in clocks:
                    client.save(folder)
                client.push_range(0, 10, np.ones(10, np.float32))

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nobody_saves_after_the_end(tmp_path: Path, world_size: int) -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10) as client:
            client.clock()
            client.retire().wait()
            with pytest.raises(ConfigurationError, match="before retire"):
                client.save(tmp_path)

    run_ranks(world_size, body)
    assert list(tmp_path.iterdir()) == []


def test_a_restored_snapshot_is_not_written_again(tmp_path: Path) -> None:
    _save_at(tmp_path, (3,))
    parts = sorted(tmp_path.glob("*/*/part.json"))
    before = [(part.stat().st_ino, part.read_bytes()) for part in parts]

    def body(group: Group) -> int:
        with ps.connect(group, num_keys=10, restore=tmp_path) as client:
            client.save(tmp_path)
            same = [(part.stat().st_ino, part.read_bytes()) for part in parts] == before
            group.barrier()
            client.clock()
            client.save(tmp_path)
            client.save(tmp_path)  # once more: it is there already
            return same

    assert run_ranks(2, body) == [True, True]
    assert len(parts) == 2
    assert tr.Snapshots(tmp_path, every=1).latest() == 4


@pytest.mark.parametrize("clock", [2, 5])
def test_a_folder_of_another_run_is_refused_and_stays(tmp_path: Path, clock: int) -> None:
    _save_at(tmp_path, (3, 5))
    before = {path: path.read_bytes() for path in tmp_path.rglob("part.json")}
    with pytest.raises(RefusedError, match=r"snapshot 5 of another run, and this one is \d: use another folder"):
        _save_at(tmp_path, (clock,))
    assert {path: path.read_bytes() for path in tmp_path.rglob("part.json")} == before


def test_a_repeated_save_waits_for_the_one_that_was_not_done(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10) as client:
            client.clock()
            if group.rank == 0:
                for folder, error in [
                    (tmp_path, SlowWorkersError),
                    (tmp_path, SlowWorkersError),
                    (tmp_path / "other", ConfigurationError),
                ]:
                    with pytest.raises(error):
                        client.save(folder, timeout_s=0.05)
            group.barrier()
            client.save(tmp_path)
            client.clock()
            client.save(tmp_path)  # would wait for ever, if one had asked more often

    run_ranks(2, body)
    assert tr.Snapshots(tmp_path, every=1).latest() == 2


def test_workers_with_different_folders_are_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with ps.connect(group, num_keys=10) as client:
            client.clock()
            with pytest.raises(RefusedError, match="different folders"):
                client.save(tmp_path / str(group.rank))
            client.save(tmp_path / "same")

    run_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_an_open_snapshot_keeps_no_values_in_memory(tmp_path: Path) -> None:
    _save_at(tmp_path, (1,))
    description = Snapshot(tmp_path, 1)._description
    assert not {"values", "states"} & description.keys()
    assert description["num_keys"] == 10
