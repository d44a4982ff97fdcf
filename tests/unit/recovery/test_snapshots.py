"""Snapshots on disk: what comes back, which version counts, and errors that name the file."""

import hashlib
import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError, RecoveryError
from totalreduce.recovery.sampler import ElasticSampler
from totalreduce.recovery.sharing import begin_from_disk
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.recovery.state import State


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


def test_what_was_just_written_stays_in_a_folder_with_later_versions(tmp_path: Path) -> None:
    write(tmp_path, 30, 40, keep=2)
    write(tmp_path, 10, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "version-000000010",
        "version-000000030",
        "version-000000040",
    ]


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


def write_shards(folder: Path, version: int, ranks, token: str = "first", world_size: int = 3) -> None:
    for rank in ranks:
        snapshots = Snapshots(folder, every=10)
        snapshots.token = token
        snapshots.write_shard(version, rank, world_size, {"rows": torch.full((2,), rank + version / 100)})
        snapshots.wait()
        assert snapshots.written == version


def test_shards_come_back_if_all_are_there_and_belong_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path, 10, [2, 1, 0])
    write_shards(tmp_path, 20, [0, 2])
    reader = Snapshots(tmp_path, every=10)
    assert reader.latest() == 10
    assert "version 20 in" in caplog.text
    assert "lacks shard-1" in caplog.text
    assert reader.shards_of(10) == (3, "first")
    assert [reader.read_shard(10, rank, "first")["rows"][0].item() for rank in range(3)] == pytest.approx(
        [0.1, 1.1, 2.1]
    )
    write_shards(tmp_path, 20, [1], token="second")  # by ranks that have come to version 20 in another epoch
    assert reader.latest() == 10
    write_shards(tmp_path, 20, [0], token="second", world_size=2)
    assert reader.latest() == 10
    write_shards(tmp_path, 20, [1], token="second", world_size=2)
    assert reader.latest() == 20
    assert reader.shards_of(20) == (2, "second")
    write_shards(tmp_path, 30, [0, 1, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"version-{each:09d}" for each in (10, 20, 30)]
    write_shards(tmp_path, 30, [0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"version-{each:09d}" for each in (20, 30)]


def test_a_snapshot_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "sharded", 10, [0], world_size=1)
    write(tmp_path / "shared", 10)
    with pytest.raises(RecoveryError, match="of a sharded state"):
        Snapshots(tmp_path / "sharded", every=10).read_shared(10)
    with pytest.raises(RecoveryError, match="not sharded"):
        Snapshots(tmp_path / "shared", every=10).shards_of(10)


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
    caplog.clear()
    snapshots.release()
    [said] = caplog.messages
    assert said == (
        f"snapshots in {snapshots.folder}: 1 could not be written by this rank (Not a directory (ENOTDIR)); there is "
        "no version"
    )


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every"):
        Snapshots(tmp_path, every=0)
    with pytest.raises(ConfigurationError, match="keep"):
        Snapshots(tmp_path, every=1, keep=0)
    assert [Snapshots(tmp_path, every=10).is_due(version) for version in (0, 5, 10, 20)] == [False, False, True, True]
    ranges = [(4, 9), (8, 12), (10, 11), (9, 20)]
    assert [Snapshots(tmp_path, every=10).is_due(last, since) for since, last in ranges] == [False, True, False, True]
    assert Snapshots(tmp_path / "none", every=10).latest() == 0


def test_a_format_of_another_library_is_named(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "version-000000010" / "shared" / "part.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    with pytest.raises(RecoveryError, match="has format 7, and this library reads format 1") as caught:
        Snapshots(tmp_path, every=10).latest()
    assert str(path) in str(caught.value)


def test_a_disk_that_is_full_is_a_warning_and_the_last_version_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of a file's size stands for the disk's: the system refuses the write with an error of its own."""
    snapshots = Snapshots(tmp_path, every=10)
    snapshots.write(10, 0, 1, shared_of(10), None)
    snapshots.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        snapshots.write(20, 0, 1, {"weights": torch.ones(200_000)}, None)
        snapshots.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (snapshots.written, snapshots.failed) == (10, 1)
    assert "the snapshot of version 20" in caplog.text
    assert "is not written: File too large (EFBIG)" in caplog.text
    assert Snapshots(tmp_path, every=10).latest() == 10
    assert [path.name for path in (tmp_path / "version-000000020").iterdir()] == []
    caplog.clear()
    snapshots.release()
    [said] = caplog.messages
    assert said == (
        f"snapshots in {tmp_path}: 1 could not be written by this rank (File too large (EFBIG)); the last version "
        "there is 10"
    )
    snapshots.write(30, 0, 1, shared_of(30), None)
    snapshots.wait()
    assert (snapshots.written, Snapshots(tmp_path, every=10).latest()) == (30, 30)


def make_state(width: int, kind=torch.optim.AdamW, *, frozen: bool = False, **values) -> State:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
    return State(model=model, optimizer=kind(model[: 1 if frozen else 2].parameters(), lr=0.1), **values)


@pytest.mark.parametrize(
    ("other", "theirs", "mine"),
    [
        (lambda: make_state(5), "parameter 0.weight: torch.float32[4, 3]", "parameter 0.weight: torch.float32[5, 3]"),
        (lambda: make_state(1), "parameter 0.weight: torch.float32[4, 3]", "parameter 0.weight: torch.float32[1, 3]"),
        (lambda: make_state(4, torch.optim.SGD), "optimizer: AdamW", "optimizer: SGD"),
        (lambda: make_state(4, best=1.0), "nothing", "value best"),
    ],
)
def test_a_version_of_another_program_is_refused_and_nothing_changes(tmp_path: Path, other, theirs, mine) -> None:
    snapshots = Snapshots(tmp_path, every=1)
    snapshots.write(1, 0, 1, make_state(4).shared(), None)
    snapshots.wait()
    state = other()
    before = state.digests()
    with pytest.raises(ConfigurationError) as caught:
        begin_from_disk(state, Snapshots(tmp_path, every=1))
    assert f"the state of the job has {theirs!r}, and this process's has {mine!r}" in str(caught.value)
    assert state.digests() == before


def test_several_optimizers_come_back(tmp_path: Path) -> None:
    def make():
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1)})
        optimizers = {
            "a": torch.optim.AdamW(model["a"].parameters()),
            "b": torch.optim.SGD(model["b"].parameters(), 1.0),
        }
        return State(model=model, optimizer=optimizers, sampler=ElasticSampler(10, 2))

    state, other = make(), make()
    for _ in range(2):
        state.model["b"](state.model["a"](torch.ones(1, 3))).sum().backward()
        for each in state.optimizers.values():
            each.step()
    state.optimizers["b"].param_groups[0]["lr"] = 0.25
    state.sampler.advance(2)
    state.count(None)
    snapshots = Snapshots(tmp_path, every=1)
    snapshots.write(1, 0, 1, state.shared(), None)
    snapshots.wait()
    assert other.digests() != state.digests()
    begin_from_disk(other, snapshots)
    assert other.digests() == state.digests()
    assert {name.split(" state")[0] for name in state.digests() if name.startswith("optimizer")} == {"optimizer a"}
    assert other.optimizers["b"].param_groups[0]["lr"] == 0.25
    assert other.sampler.state_dict() == {"epoch": 0, "cursor": 0, "part": 1, "begun": 2, "steps": 0}
    assert "optimizer b: SGD" in state.describe().splitlines()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({}, "needs an optimizer, and optimizer={} has none"),
        ({3: None}, "names of the optimizers of a tr.State are strings, not 3"),
        ({"a": "sgd"}, "needs an optimizer of torch, not a str"),
    ],
)
def test_optimizers_that_are_none_are_refused(optimizer, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        State(model=torch.nn.Linear(1, 1), optimizer=optimizer)


def test_a_parameter_that_is_not_in_the_model_is_refused() -> None:
    other = torch.nn.Linear(5, 6)
    with pytest.raises(
        ConfigurationError, match=r"optimizer b has a parameter of shape \[6, 5\] in group 0 that is not"
    ):
        State(model=torch.nn.Linear(1, 1), optimizer={"b": torch.optim.SGD(other.parameters(), lr=0.1)})


def test_signals_are_handled_while_a_loop_runs(tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append("before"))
    try:
        snapshots = Snapshots(tmp_path, every=10, on_signal=(signal.SIGUSR1, signal.SIGUSR2))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (seen, snapshots.is_asked) == (["before"], False)
        snapshots.watch()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (seen, snapshots.is_asked) == (["before"], True)
        snapshots.release()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == ["before", "before"]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_forked_process_does_not_answer_for_its_parent(tmp_path: Path) -> None:
    """SIGUSR1 is for the training process alone, and SIGTERM ends the worker of a DataLoader as usual."""
    snapshots = Snapshots(tmp_path, every=10, on_signal=(signal.SIGUSR1, signal.SIGTERM))
    snapshots.watch()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            if snapshots.is_asked:
                os._exit(1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(2)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not snapshots.is_asked
    finally:
        snapshots.release()


def test_the_last_version_waits_for_the_one_that_is_being_written(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, every=10)
    snapshots.write(10, 0, 1, shared_of(10), None)
    snapshots.write_last(11, lambda: snapshots.write(11, 0, 1, shared_of(11), None))
    assert (snapshots.written, snapshots.latest()) == (11, 11)
    begun = os.stat(tmp_path / "version-000000011" / "shared" / "part.json").st_mtime_ns
    snapshots.write_last(11, lambda: snapshots.write(11, 0, 1, shared_of(11), None))  # it is on disk already
    assert os.stat(tmp_path / "version-000000011" / "shared" / "part.json").st_mtime_ns == begun
    snapshots.token = "another epoch"  # in which the other ranks write this version, too
    snapshots.write_last(11, lambda: snapshots.write(11, 0, 1, shared_of(11), None))
    about = json.loads((tmp_path / "version-000000011" / "shared" / "part.json").read_text())
    assert about["token"] == "another epoch"


def test_a_part_of_another_run_does_not_count(tmp_path: Path) -> None:
    """Run A has died when two of four ranks had written version 20. Run B, of two ranks, comes there without rank 1."""
    for rank in range(2):
        write_own(tmp_path, 20, rank, world_size=4)
    assert Snapshots(tmp_path, every=10).latest() == 0
    write_own(tmp_path, 20, 0, world_size=2)
    assert Snapshots(tmp_path, every=10).latest() == 0
    write_own(tmp_path, 20, 1, world_size=2, token="another epoch")
    assert Snapshots(tmp_path, every=10).latest() == 0
    with pytest.raises(RecoveryError, match="own-1 does not belong to the other parts of this version"):
        Snapshots(tmp_path, every=10).read_own(20, 1, 2)
    write_own(tmp_path, 20, 1, world_size=2)
    reader = Snapshots(tmp_path, every=10)
    assert (reader.latest(), reader.read_own(20, 1, 2)) == (20, {"residual": 1})


def write_own(folder: Path, version: int, rank: int, *, world_size: int, token: str = "") -> None:
    snapshots = Snapshots(folder, every=10)
    snapshots.token = token
    snapshots.write(version, rank, world_size, shared_of(version), {"residual": rank})
    snapshots.wait()
    assert snapshots.failed == 0


def test_a_shard_that_was_replaced_since_the_version_was_chosen_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, 10, [0, 1, 2])
    reader = Snapshots(tmp_path, every=10)
    _, token = reader.shards_of(reader.latest())
    write_shards(tmp_path, 10, [1], token="second")
    with pytest.raises(RecoveryError, match="shard-1 does not belong to the other parts of this version"):
        reader.read_shard(10, 1, token)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_process_that_is_killed_while_it_replaces_a_part_damages_no_version(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part was written by a run that came to this version before. Killed: no step after the given number."""
    write(tmp_path, 10, 20, world_size=1, own=False)
    snapshots = Snapshots(tmp_path, every=10)
    done = []

    def until_killed(call):
        def step(path, *arguments, **options):
            if "version" in str(path) and (path.name == "shared" or path.name.startswith(".shared")) and path.exists():
                if len(done) >= steps:
                    raise KeyboardInterrupt
                done.append(path.name)
                if call.__name__ == "rmtree":  # killed in the middle of it
                    for file in path.glob("*.distcp"):
                        file.unlink()
                    return None
            return call(path, *arguments, **options)

        return step

    monkeypatch.setattr("shutil.rmtree", until_killed(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", until_killed(Path.rename))
    snapshots.write(20, 0, 1, shared_of(20), None)
    snapshots.wait()
    monkeypatch.undo()
    reader = Snapshots(tmp_path, every=10)
    version = reader.latest()
    assert version == (20 if steps != 1 else 10)
    assert reader.read_shared(version)["version"] == version


def test_a_version_that_cannot_be_read_stays_and_others_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 10, 20, world_size=1, keep=3)
    path = tmp_path / "version-000000010" / "shared" / "part.json"
    path.write_text("{")
    [writer] = write(tmp_path, 30, 40, world_size=1)
    assert (writer.written, writer.failed) == (40, 0)
    assert sorted(int(each.name[-9:]) for each in tmp_path.iterdir()) == [10, 30, 40]
    assert "the snapshot of version 10 stays where it is" in caplog.text


@pytest.mark.parametrize("damage", ["index", "world_size"])
def test_every_error_of_reading_is_typed(tmp_path: Path, damage: str) -> None:
    """The index of torch's checkpoint is no checkpoint, but has the SHA-256 that it was written with."""
    write(tmp_path, 10)
    path = tmp_path / "version-000000010" / "shared"
    about = json.loads((path / "part.json").read_text())
    if damage == "index":
        (path / ".metadata").write_bytes(b"nothing")
        about["files"][".metadata"] = {"bytes": 7, "sha256": hashlib.sha256(b"nothing").hexdigest()}
    else:
        about["world_size"] = "many"
    (path / "part.json").write_text(json.dumps(about))
    with pytest.raises(RecoveryError, match="cannot be read") as caught:
        Snapshots(tmp_path, every=10).read_shared(10)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "SIGKILL"), (12345, "12345"), ("SIGUSR1", "no signal"), ([signal.SIGUSR1, None], "None")],
)
def test_what_cannot_be_handled_is_refused(tmp_path: Path, number, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Snapshots(tmp_path, every=10, on_signal=number)


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    errors = []

    def body() -> None:
        try:
            Snapshots(tmp_path, every=10, on_signal=signal.SIGUSR1).watch()
        except ConfigurationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]
