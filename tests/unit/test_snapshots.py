"""Snapshots on disk: what comes back, which version counts, and errors that name the file."""

import json
from pathlib import Path

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, RecoveryError
from totalreduce.recovery.snapshots import Snapshots


def shared_of(version: int) -> dict:
    return {"version": version, "weights": torch.arange(1000.0) * version, "nested": [1, {"x": None, "y": (2.5,)}]}


def write(folder: Path, *versions: int, world_size: int = 2, own: bool = True, keep: int = 2) -> list[Snapshots]:
    ranks = [Snapshots(folder, every=10, keep=keep) for _ in range(world_size)]
    for version in versions:
        for rank in reversed(range(world_size)):  # rank 0 removes old versions
            mine = {"residual": torch.full((3,), rank + version / 100)} if own else None
            ranks[rank].write(version, rank, world_size, shared_of(version) if rank == 0 else None, mine)
            ranks[rank].wait()
    return ranks


def test_the_last_version_comes_back(tmp_path: Path) -> None:
    ranks = write(tmp_path, 10, 20)
    reader = Snapshots(tmp_path, every=10)
    assert reader.latest() == 20
    shared = reader.read_shared(20)
    assert shared.pop("weights").equal(torch.arange(1000.0) * 20)
    assert shared == {"version": 20, "nested": [1, {"x": None, "y": (2.5,)}]}
    assert [reader.read_own(20, rank, 2)["residual"][0].item() for rank in range(2)] == pytest.approx([0.2, 1.2])
    assert reader.read_own(20, 0, 3) is None
    assert [each.written for each in ranks] == [20, 20]


def test_tensors_are_copied_before_write_returns(tmp_path: Path) -> None:
    weights = torch.ones(200_000)
    snapshots = Snapshots(tmp_path, every=1)
    snapshots.write(1, 0, 1, {"weights": weights}, None)
    weights.zero_()
    snapshots.wait()
    assert snapshots.read_shared(1)["weights"].sum() == 200_000


def test_only_the_last_whole_versions_stay(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30, 40, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000000030", "version-000000040"]


def test_a_version_that_lacks_a_part_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 10)
    late = Snapshots(tmp_path, every=10)
    late.write(20, 0, 2, shared_of(20), {"residual": torch.ones(3)})
    late.wait()
    assert Snapshots(tmp_path, every=10).latest() == 10
    assert "version 20" in caplog.text
    assert "own-1" in caplog.text


@pytest.mark.parametrize("damage", ["torn", "missing", "changed"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 10)
    file = next((tmp_path / "version-000000010" / "shared").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    if damage == "torn":
        file.write_bytes(data[:-100])
    elif damage == "missing":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(RecoveryError) as caught:
        Snapshots(tmp_path, every=10).read_shared(10)
    assert str(file) in str(caught.value)
    assert ("No such file" if damage == "missing" else "is damaged") in str(caught.value)


def test_an_unreadable_description_is_named(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "version-000000010" / "shared" / "part.json"
    path.write_text(json.dumps({"version": 10}))
    with pytest.raises(RecoveryError, match=r"part\.json"):
        Snapshots(tmp_path, every=10).read_shared(10)


def test_a_version_that_cannot_be_written_is_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    snapshots = Snapshots(tmp_path / "file", every=10)
    snapshots.write(10, 0, 1, shared_of(10), None)
    snapshots.wait()
    assert (snapshots.written, snapshots.failed) == (0, 1)
    assert "the snapshot of version 10" in caplog.text
    assert "Not a directory" in caplog.text


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every"):
        Snapshots(tmp_path, every=0)
    with pytest.raises(ConfigurationError, match="keep"):
        Snapshots(tmp_path, every=1, keep=0)
    assert [Snapshots(tmp_path, every=10).is_due(version) for version in (0, 5, 10, 20)] == [False, False, True, True]
    assert Snapshots(tmp_path / "none", every=10).latest() == 0
