"""Models that FSDP2 shards, over ``tr.attempts(copies=...)``: bits, samples, members, errors after the death of ranks.

The first steps of the programs meet new processes, so versions are compared with those that the processes note.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

from totalreduce.launch.local import run_workers
from totalreduce.launch.restarts import RecoveryOptions

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torch_fsdp_recovery.py"
PROGRAM = Path(__file__).parent / "programs" / "sharded.py"

pytestmark = pytest.mark.usefixtures("warm_python")


def run(folder, num_workers, *arguments, **options):
    return Run(folder, num_workers, *map(str, arguments), program=PROGRAM, **options)


def begins(done, seat=0):
    """Return the version and the number of ranks with which the attempts of a seat's processes began."""
    paths = sorted(done.folder.glob(f"samples-{seat}-*"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [(line["begins"], line["world_size"]) for line in lines if "begins" in line]


def samples(done, epoch):
    """Return the samples of an epoch in the steps that count: of each version those of the last attempt."""
    used = {}
    for path in done.folder.glob("samples-*"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line.get("epoch") == epoch:
                used.setdefault(line["version"], {}).setdefault(line["attempt"], []).extend(line["samples"])
    return sorted(sample for attempts in used.values() for sample in attempts[max(attempts)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory, zygote):
    """An undisturbed run of three ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", str(zygote.python))
        return run(tmp_path_factory.mktemp("sharded") / "plain", 3, on_loss="replace")


def test_replaced_ranks_change_no_bit(tmp_path: Path, plain: Run) -> None:
    """Rank 1 dies before it sends gradients, rank 2 when the others may have the step, and rank 0 in the last step."""
    deaths = "1:5:forward,2:9:updated,0:13:committed"
    disturbed = run(tmp_path / "disturbed", 3, "--die", deaths, on_loss="replace", spares=1)
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert [event["epoch"] for event in disturbed.epochs()] == [1, 2, 3, 4]
    versions = [version for version, _ in begins(disturbed, seat=1)][-3:]  # of its second process
    lost_at = (5, 9, 14)
    assert all(version % 3 == 0 and lost - 6 < version <= lost for version, lost in zip(versions, lost_at, strict=True))
    assert disturbed.finals == plain.finals
    assert plain.finals[0]["losses"] == [3.0, 3.0]
    assert len({final["digest"] for final in plain.finals}) == 3  # the running statistics are those of each rank


@pytest.mark.slow
def test_a_group_that_was_added_comes_back_with_the_shards(tmp_path: Path) -> None:
    """Each attempt builds the optimizer without it. Rank 1 dies before it is copied, and rank 0 after that."""
    alone = run(tmp_path / "plain", 2, "--add", on_loss="replace")
    disturbed = run(tmp_path / "disturbed", 2, "--add", "--die", "1:5:forward,0:11:backward", on_loss="replace")
    assert disturbed.result.exit_code == 0, disturbed.result.errors
    assert [version for version, _ in begins(disturbed, seat=1)][1] in (0, 3)
    assert [version for version, _ in begins(disturbed, seat=0)][-1] in (6, 9)
    assert disturbed.finals == alone.finals


#: Rank 1 kills rank 2, which has the copy of its part, and itself.
TOGETHER = ("--die", "1:5:forward:2")


@pytest.mark.slow
def test_the_loss_of_a_rank_and_of_its_copy_is_an_error_that_names_it(tmp_path: Path) -> None:
    failed = run(tmp_path / "failed", 3, *TOGETHER, on_loss="replace", restarts=2)
    errors = "\n".join(failed.result.errors)
    assert failed.result.exit_code not in (0, 124)
    assert "nobody has the shards of rank 1 of 3 ranks, of version 3, any more" in errors
    assert "Use more replicas (tr.ShardCopies(replicas=...)), or snapshots" in errors


@pytest.mark.slow
def test_neighbours_that_die_together_are_survived_with_two_copies_or_a_snapshot(tmp_path: Path, plain: Run) -> None:
    twice = run(tmp_path / "twice", 3, *TOGETHER, "--replicas", 2, on_loss="replace")
    assert twice.result.exit_code == 0, twice.result.errors
    assert twice.finals == plain.finals
    snapshots = ("--snapshots", tmp_path / "snapshots", "--snapshots-every", 2)
    disk = run(tmp_path / "disk", 3, *TOGETHER, *snapshots, on_loss="replace")
    assert disk.result.exit_code == 0, disk.result.errors
    assert "the job goes on from version" in "\n".join(disk.result.errors)
    assert begins(disk)[1][0] in (2, 4)
    assert disk.finals == plain.finals


@pytest.mark.slow
def test_fewer_ranks_have_the_bits_of_a_job_that_begins_with_them(tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    arguments = ("--snapshots", snapshots, "--snapshots-every", 1)
    shrunk = run(tmp_path / "shrunk", 3, *arguments, "--die", "1:5:backward", on_loss="shrink", restarts=0)
    assert shrunk.result.exit_code == 0, shrunk.result.errors
    (_, first), (version, second) = begins(shrunk)
    assert (first, second) == (3, 2)
    for path in snapshots.iterdir():
        if int(path.name.rpartition("-")[2]) != version:
            shutil.rmtree(path)
    other = run(tmp_path / "other", 2, *arguments, on_loss="replace")
    assert other.result.exit_code == 0, other.result.errors
    assert begins(other) == [(version, 2)]
    assert shrunk.finals == other.finals
    assert len(other.finals) == 2
    for epoch in range(2):
        assert samples(shrunk, epoch) == list(range(160))


@pytest.mark.slow
def test_processes_that_join_get_their_shards(tmp_path: Path) -> None:
    arguments = ("--die", "1:3:forward", "--hold", 3, "--late", 1)
    joined = run(tmp_path / "joined", 3, *arguments, on_loss="shrink", min_ranks=2)
    assert joined.result.exit_code == 0, joined.result.errors
    assert [size for _, size in begins(joined)] == [3, 2, 3]
    assert {final["world_size"] for final in joined.finals} == {3}
    assert samples(joined, 0) == list(range(160))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [3, 2, 4])
def test_after_the_loss_of_all_ranks_a_job_of_any_size_goes_on_from_the_snapshot(
    tmp_path: Path, plain: Run, num_workers: int
) -> None:
    arguments = ("--snapshots", tmp_path / "snapshots")
    first = run(tmp_path / "first", 3, *arguments, "--die", "0:8:forward:1", on_loss="replace", restarts=0)
    assert first.result.exit_code != 0
    second = run(tmp_path / "second", num_workers, *arguments, on_loss="replace")
    assert second.result.exit_code == 0, second.result.errors
    assert begins(second) == [(5, num_workers)]
    assert len({final["version"] for final in second.finals}) == 1
    if num_workers == 3:
        assert second.finals == plain.finals
    torn = next((tmp_path / "snapshots").glob("version-*/shard-1/*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-100])
    last = torn.parent.parent
    for path in last.parent.iterdir():
        if path != last:
            shutil.rmtree(path)
    third = run(tmp_path / "third", 2, *arguments, on_loss="replace", restarts=0)
    assert third.result.exit_code != 0
    assert f"the snapshot's file {torn} is damaged" in "\n".join(third.result.errors)


@pytest.mark.slow
def test_hybrid_shards_are_replaced(tmp_path: Path) -> None:
    arguments = ("--replicates", 2, "--samples", 192)
    plain = run(tmp_path / "plain", 4, *arguments, on_loss="replace")
    disturbed = run(tmp_path / "disturbed", 4, *arguments, "--die", "1:4:updated,2:8:backward", on_loss="replace")
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert len(disturbed.epochs()) == 3
    assert disturbed.finals == plain.finals


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_deaths_change_no_bit(tmp_path: Path, plain: Run, seed: int) -> None:
    """Each first process dies at a random place; with two copies also two that die at the same time are survived."""
    draw = random.Random(seed)
    places = ("forward", "backward", "updated", "committed")
    deaths = [f"{seat}:{draw.randrange(1, 13)}:{draw.choice(places)}" for seat in range(3)]
    arguments = ("--die", ",".join(deaths), "--every", draw.choice((1, 2, 3)), "--replicas", 2)
    disturbed = run(tmp_path / "disturbed", 3, *arguments, on_loss="replace")
    assert disturbed.result.exit_code == 0, disturbed.result.errors
    assert disturbed.finals == plain.finals


def run_example(lost: int | None) -> tuple[str, list[str]]:
    """Return what the example prints, and the events; rank ``lost`` is killed when the first epoch begins."""
    events, pids = [], {}

    def follow(event):
        events.append(event["event"])
        if event["event"] == "started":
            pids[event["rank"]] = event["pid"]
        if event["event"] == "epoch" and event["epoch"] == 1 and lost is not None:
            os.kill(pids[lost], signal.SIGKILL)

    tiny = ("--model", "gpt", "--width", "32", "--layers", "2", "--batch", "4", "--examples", "64", "--every", "2")
    result = run_workers(
        [sys.executable, str(EXAMPLE), *tiny],
        num_workers=2,
        output="capture",
        timeout_s=100.0,
        recovery=RecoveryOptions(on_event=follow, on_loss="replace"),
    )
    assert result.exit_code == 0, result.errors
    return "\n".join(result.output), events


@pytest.mark.slow
def test_the_example_ends_with_the_loss_of_an_undisturbed_run() -> None:
    """A rank is killed while the job begins."""
    (plain, _), (disturbed, events) = run_example(None), run_example(1)
    assert events.count("ended") == 3
    assert "16 steps" in plain
    pattern = r"mean loss (\S+)"
    assert re.findall(pattern, disturbed) == re.findall(pattern, plain) != []
    assert re.search(r"copies of [\d.]+ ms; they take [\d.]+ MB", disturbed)
