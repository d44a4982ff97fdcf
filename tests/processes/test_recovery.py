"""Training jobs whose processes are killed, under ``totalreduce run --on-loss``: bits, samples, errors."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tests.processes.recovery_runs import PROGRAM, Run

from totalreduce.launch.local import run_workers


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Processes of the tests in ``make test`` need no imports; those of slow tests begin as users' processes do."""
    if request.node.get_closest_marker("slow") is None:
        request.getfixturevalue("warm_python")


def without_epochs(final):
    return {key: value for key, value in final.items() if key != "epochs_of_job"}


KINDS = {
    "adamw": ["--optimizer", "adamw", "--norm", "--own-buffers", "--average"],
    "bfloat16 with workers": ["--dtype", "bfloat16", "--workers", "1"],
    "oktopk": ["--sync", "oktopk", "--optimizer", "momentum", "--norm"],
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("adamw", marks=pytest.mark.slow),
        pytest.param("bfloat16 with workers", marks=pytest.mark.slow),
        "oktopk",
    ],
)
def test_replaced_ranks_change_no_bit(tmp_path: Path, kind: str) -> None:
    """Rank 1 dies before its vote, rank 2 after its update, and rank 0 in an evaluation."""
    plain = Run(tmp_path / "plain", 3, *KINDS[kind], on_loss="replace")
    deaths = "1:5:forward,2:9:updated,0:13:once"
    spares = int(kind == "adamw")
    disturbed = Run(tmp_path / "disturbed", 3, *KINDS[kind], "--die", deaths, on_loss="replace", spares=spares)
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert disturbed.epochs()[-1]["members"] == [
        {"seat": 0, "incarnation": 1, "has_state": False},
        {"seat": 1, "incarnation": 1, "has_state": True},
        {"seat": 2, "incarnation": 1, "has_state": True},
    ]
    assert [event["version"] for event in disturbed.epochs()] == [0, 5, 10, 13]
    assert [final["epochs_of_job"] for final in disturbed.finals] == [4, 4, 4]
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))
    assert len({final["digest"] for final in plain.finals}) == 1
    assert plain.finals[0]["losses"] == [3.0, 3.0]
    kinds = [(event["event"], event.get("rank")) for event in disturbed.events]
    begin = kinds.index(("ended", 1))
    assert kinds[begin : begin + 3] == [("ended", 1), ("started", 1), ("epoch", None)]
    assert disturbed.events[begin]["signal"] == "SIGKILL"
    assert disturbed.events[begin + 1]["restarts_left"] == 9
    were_spares = [event["was_spare"] for event in disturbed.events if event["event"] == "started"]
    assert were_spares == [False] * 3 + [bool(spares)] * 3


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(["--norm", "--own-buffers", "--average"], marks=pytest.mark.slow),
        pytest.param(["--sync", "oktopk", "--optimizer", "momentum"], marks=pytest.mark.slow),
        ["--sync", "diloco, progress"],
        pytest.param(["--sync", "gossip, overlap"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_models_on_an_accelerator_have_the_bits_of_the_cpu_after_a_loss(tmp_path: Path, kind: list[str]) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ on the path, which compiles the fake accelerator")
    arguments = ["--samples", "64", "--epochs", "1", *kind]
    plain = Run(tmp_path / "plain", 2, *arguments, on_loss="replace")
    disturbed = Run(tmp_path / "on", 2, *arguments, "--device", "fake", "--die", "1:2:backward", on_loss="replace")
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert [final["epochs_of_job"] for final in disturbed.finals] == [2, 2]
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))


def test_the_loss_of_the_store_changes_no_bit(tmp_path: Path) -> None:
    """The process that serves it is killed at once, after the first epoch was decided, and when a rank has died."""
    plain = Run(tmp_path / "plain", 3, on_loss="replace")
    keepers, begun, killed = [], [], []

    def kill_keeper(place: str) -> None:
        if place not in killed:
            killed.append(place)
            os.kill(keepers[-1], signal.SIGKILL)

    def follow(event: dict) -> None:
        if event["event"] == "keeper":
            keepers.append(event["pid"])
        elif event["event"] == "epoch":
            begun.append(event["epoch"])
            (tmp_path / "disturbed" / f"epoch-of-store-{event['epoch'] // 1000}").touch()
            kill_keeper("first epoch")
        elif event["event"] == "ended" and event["signal"] == "SIGKILL":
            kill_keeper(f"death of rank {event['rank']}")
        elif event["event"] == "started":
            kill_keeper("start")

    # An epoch follows the loss of the store alone, before a rank dies, too: one epoch may follow two losses.
    deaths = "1:8:forward:epoch-of-store-2,2:11:updated:epoch-of-store-3"
    disturbed = Run(tmp_path / "disturbed", 3, "--die", deaths, on_loss="replace", on_event=follow)
    assert disturbed.result.exit_code == 0, disturbed.result.errors
    assert killed == ["start", "first epoch", "death of rank 1", "death of rank 2"]
    assert len(keepers) == 5
    assert [epoch // 1000 for epoch in begun] == [1, 2, 3, 4]  # a thousand numbers for each new store
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))
    assert len(disturbed.finals) == 3


def test_without_the_lost_rank_no_sample_is_lost_or_used_twice(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 4, "--die", "1:5:forward,3:8:backward", on_loss="shrink", restarts=0)
    assert run.result.exit_code == 0, run.result.errors
    assert [len(event["members"]) for event in run.epochs()] == [4, 3, 2]
    assert [event["version"] for event in run.epochs()] == [0, 5, 8]
    assert len(run.finals) == 2
    assert len({final["digest"] for final in run.finals}) == 1
    assert {final["world_size"] for final in run.finals} == {2}
    for epoch in range(2):
        used = [sample for (of, _), samples in run.blocks().items() if of == epoch for sample in samples]
        assert sorted(used) == list(range(300))


def test_a_rank_that_is_started_again_joins_and_has_the_same_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 3, "--die", "1:3:forward", "--hold", "3", on_loss="shrink", min_ranks=2)
    assert run.result.exit_code == 0, run.result.errors
    sizes = [len(event["members"]) for event in run.epochs()]
    assert sizes in ([3, 2, 3], [3, 3])  # it may come before the others have met without it
    assert len(run.finals) == 3
    assert len({final["digest"] for final in run.finals}) == 1
    used = [sample for (of, _), samples in run.blocks().items() if of == 0 for sample in samples]
    assert sorted(used) == list(range(300))


def test_a_worker_that_cannot_be_started_is_tried_again_and_a_spare_is_not(tmp_path: Path) -> None:
    """The interpreter is gone from the begin of the first epoch until a replacement could not be started."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)

    def follow(event: dict) -> None:
        if event["event"] == "epoch" and event["version"] == 0:
            python.unlink()
        elif event["event"] == "start failed" and event["rank"] == 1:
            python.symlink_to(sys.executable)

    options = {"python": python, "on_event": follow, "on_loss": "replace", "spares": 1}
    run = Run(tmp_path / "run", 2, "--die", "1:5:forward", **options)
    assert run.result.exit_code == 0, run.result.errors
    failed = [event for event in run.events if event["event"] == "start failed"]
    assert [(event["rank"], event["host"]) for event in failed] == [(None, "localhost"), (1, "localhost")]
    assert failed[1]["error"] == f"cannot start '{python}': No such file or directory (ENOENT)"
    started = [event for event in run.events if event["event"] == "started"]
    assert [(event["rank"], event["restarts_left"]) for event in started] == [(0, 10), (1, 10), (1, 8)]
    assert started[2]["was_spare"] is False
    # Times of events are rounded to milliseconds.
    assert started[2]["time"] - failed[1]["time"] >= 0.998, "there is a pause before the next attempt"
    assert [final["version"] for final in run.finals] == [40, 40]


@pytest.mark.slow
def test_a_worker_that_cannot_be_started_and_is_needed_ends_the_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)

    def follow(event: dict) -> None:
        if event["event"] == "ended" and python.is_symlink():
            python.unlink()

    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100)\n")
    options = {"python": python, "program": program, "on_event": follow, "on_loss": "replace", "restarts": 1}
    run = Run(tmp_path / "run", 2, **options)
    assert (run.result.exit_code, run.result.first_failure.rank) == (3, 1)
    assert run.result.workers[0].signal == "SIGTERM"
    assert [event["rank"] for event in run.events if event["event"] == "start failed"] == [1]


@pytest.mark.slow
def test_without_spares_that_work_lost_ranks_are_started_again(tmp_path: Path) -> None:
    """A spare has no rank before tr.init(), so a program that needs one there fails as a spare."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"sys.argv[0] = {str(PROGRAM)!r}\n"
        f"exec(compile(open({str(PROGRAM)!r}).read(), {str(PROGRAM)!r}, 'exec'))\n"
    )
    arguments = ["--die", "1:5:forward", "--pause", "0.1"]
    run = Run(tmp_path / "run", 2, *arguments, program=program, on_loss="replace", spares=1)
    assert run.result.exit_code == 0, run.result.errors
    (ended,) = [event for event in run.events if event["event"] == "spare ended"]
    assert ended["exit_code"] == 1
    assert ended["last_errors"][-1] == "KeyError: 'RANK'"
    assert [final["version"] for final in run.finals] == [40, 40]
    assert len({final["digest"] for final in run.finals}) == 1


@pytest.mark.slow
def test_after_the_loss_of_all_ranks_a_new_job_goes_on_from_the_snapshot(tmp_path: Path) -> None:
    kind = [*KINDS["oktopk"], "--snapshots"]
    plain = Run(tmp_path / "plain", 2, *kind, str(tmp_path / "none"), on_loss="replace")
    snapshots = tmp_path / "snapshots"
    deaths = "0:18:forward,1:18:forward"
    first = Run(tmp_path / "first", 2, *kind, str(snapshots), "--die", deaths, on_loss="replace", restarts=0)
    assert first.result.exit_code == 137
    assert not first.finals
    # Neither may this job begin anew by itself after it has taken a step.
    later = "0:17:forward,1:17:forward"
    lost = Run(tmp_path / "lost", 2, *kind, str(snapshots), "--die", later, on_loss="replace", restarts=2)
    assert "the job begins with version 15" in lost.result.errors[0]
    assert any("all processes that had the state of the job have ended" in text for text in lost.result.errors)
    assert not lost.finals
    second = Run(tmp_path / "second", 2, *kind, str(snapshots), on_loss="replace")
    assert second.result.exit_code == 0, second.result.errors
    assert "the job begins with version 15" in second.result.errors[0]
    assert second.finals == plain.finals
    assert min(version for _, version in second.blocks()) == 15


def test_a_rank_that_is_lost_in_the_first_block_after_the_disk_gets_its_own_buffers(tmp_path: Path) -> None:
    """No vote has passed then, so no copy was sent with one."""
    snapshots = tmp_path / "snapshots"
    kind = ["--norm", "--own-buffers", "--average", "--samples", "160", "--snapshots", str(snapshots)]
    plain = Run(tmp_path / "plain", 2, *kind, on_loss="replace")
    for path in snapshots.iterdir():
        if int(path.name.rpartition("-")[2]) > 10:
            shutil.rmtree(path)
    disturbed = Run(tmp_path / "disturbed", 2, *kind, "--die", "1:10:once", on_loss="replace")
    assert disturbed.result.exit_code == 0, disturbed.result.errors
    assert [event["version"] for event in disturbed.epochs()] == [0, 10]
    assert list(map(without_epochs, disturbed.finals)) == list(map(without_epochs, plain.finals))
    assert plain.finals[0]["buffers"]["1.running_mean"] != plain.finals[1]["buffers"]["1.running_mean"]


@pytest.mark.slow
def test_with_fewer_ranks_the_bits_are_those_of_a_job_that_begins_with_them(tmp_path: Path) -> None:
    """The first part is undisturbed; the second one is compared with a job of two ranks that begins at its version."""
    snapshots = tmp_path / "snapshots"
    arguments = ["--snapshots", str(snapshots)]
    shrunk = Run(tmp_path / "shrunk", 3, *arguments, "--die", "1:10:backward", on_loss="shrink", restarts=0)
    assert [(len(event["members"]), event["version"]) for event in shrunk.epochs()] == [(3, 0), (2, 10)]
    for path in snapshots.iterdir():
        if int(path.name.rpartition("-")[2]) > 10:
            shutil.rmtree(path)
    other = Run(tmp_path / "other", 2, *arguments, on_loss="replace")
    assert "the job begins with version 10" in other.result.errors[0]
    assert list(map(without_epochs, shrunk.finals)) == list(map(without_epochs, other.finals))
    assert len(other.finals) == 2


@pytest.mark.slow
def test_a_stopped_rank_is_replaced(tmp_path: Path) -> None:
    pids = {}

    def stop_rank_1(event):
        if event["event"] == "started":
            pids[event["rank"]] = event["pid"]
        if event["event"] == "epoch" and event["epoch"] == 1:
            os.kill(pids[1], signal.SIGSTOP)

    run = Run(tmp_path / "run", 3, on_loss="replace", on_event=stop_rank_1)
    assert run.result.exit_code == 0, run.result.errors
    assert [event["rank"] for event in run.events if event["event"] == "suspected"] == [1]
    assert [final["version"] for final in run.finals] == [28, 28, 28]
    assert len({final["digest"] for final in run.finals}) == 1


@pytest.mark.slow
def test_when_restarts_are_used_up_the_run_ends_with_the_failure(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 3, "--die", "1:3:forward", on_loss="replace", restarts=0)
    assert run.result.exit_code == 128 + signal.SIGKILL
    assert run.result.first_failure is not None
    assert run.result.first_failure.rank == 1
    assert run.finals == []


@pytest.mark.slow
def test_fewer_than_min_ranks_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 3, "--die", "1:3:forward", on_loss="shrink", restarts=0, min_ranks=3)
    assert run.result.exit_code == 128 + signal.SIGKILL
    assert run.finals == []


@pytest.mark.slow
def test_a_process_with_another_program_does_not_disturb_the_job(tmp_path: Path) -> None:
    """The replacement of rank 1 has another model; the next one has the right one again."""
    program = tmp_path / "program.py"
    changed = PROGRAM.read_text().replace(
        "    hidden = 32\n", "    hidden = 33 if incarnation == 1 else 32\n    begin = time.monotonic()\n"
    )
    program.write_text(changed)
    run = Run(tmp_path / "run", 2, "--die", "1:3:forward", on_loss="replace", program=program)
    assert run.result.exit_code == 0, run.result.errors
    assert "cannot join the job, because its program is another one" in run.result.errors[1]
    assert "float32[33, 16]" in run.result.errors[1]
    assert "float32[32, 16]" in run.result.errors[1]
    assert [event["incarnation"] for event in run.events if event["event"] == "started"] == [0, 0, 1, 2]
    assert {final["version"] for final in run.finals} == {40}


def test_the_loss_of_everybody_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2, "--die", "0:3:forward,1:3:forward", on_loss="replace", restarts=3)
    assert run.result.exit_code != 0
    assert any("all processes that had the state of the job have ended" in text for text in run.result.errors)


def test_without_the_launcher_the_same_loop_runs_and_a_loss_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    argv = [sys.executable, str(PROGRAM), str(folder)]
    # As in a worker of another run: its variables are not this run's.
    environment = {**os.environ, "TOTALREDUCE_ON_LOSS": "replace", "TOTALREDUCE_KEEPER": "127.0.0.1:9"}
    result = run_workers(argv, num_workers=2, environment=environment, output="capture", timeout_s=60.0)
    assert result.exit_code == 0, result.errors
    finals = [json.loads((folder / f"final-{rank}.json").read_text()) for rank in range(2)]
    assert [(final["version"], final["epochs_of_job"]) for final in finals] == [(40, 0), (40, 0)]
    assert finals[0]["digest"] == finals[1]["digest"]  # although the ranks began with different parameters
    result = run_workers([*argv, "--die", "1:3:forward"], num_workers=2, output="capture", timeout_s=60.0)
    assert result.exit_code == 128 + signal.SIGKILL
    assert "PeerLost: rank 1 is lost" in result.errors[0]
