"""Loops of ``tr.replayed`` whose processes are killed, under ``totalreduce run --on-loss replace``."""

import os
import random
from pathlib import Path

import pytest
from tests.processes.recovery_runs import Run

DYING = Path(__file__).parent / "programs" / "dying.py"
KMEANS = Path(__file__).parents[2] / "examples" / "rabit_kmeans.py"
SIZES = ("--points", "200", "--clusters", "3", "--rounds", "8")


def run_kmeans(folder: Path, deaths: tuple[str, ...] = (), arguments=SIZES, **options) -> Run:
    """Run the example on 4 ranks."""
    return Run(folder, 4, ",".join(deaths), str(KMEANS), *arguments, program=DYING, on_loss="replace", **options)


def check_equal(disturbed: Run, plain: Run) -> None:
    assert plain.result.exit_code == disturbed.result.exit_code == 0, disturbed.result.errors
    assert disturbed.finals == plain.finals
    assert disturbed.result.output[0] == plain.result.output[0]
    assert plain.result.output[0].startswith("centres ")
    assert len({str(final["shared"]) for final in plain.finals}) == 1
    assert len({final["own"] for final in plain.finals}) == 4
    versions = [event["version"] for event in disturbed.epochs()]
    assert versions == sorted(versions)


def killed(run: Run) -> list[int]:
    return sorted(event["rank"] for event in run.events if event["event"] == "ended" and event["signal"] == "SIGKILL")


def test_killed_ranks_change_no_bit(tmp_path: Path, warm_python) -> None:
    """One rank in a call, one in the vote of a checkpoint, two at once, and one in the recovery from that."""
    deaths = ("2:0:1:result 0", "0:0:3:vote", "1:0:5:call 1", "3:0:5:call 1", "1:1:0:parcels")
    plain, disturbed = run_kmeans(tmp_path / "plain"), run_kmeans(tmp_path / "disturbed", deaths)
    check_equal(disturbed, plain)
    assert [final["version"] for final in plain.finals] == [8] * 4
    assert killed(disturbed) == [0, 1, 1, 2, 3]
    assert {0, 1, 3, 5} <= {event["version"] for event in disturbed.epochs()}


@pytest.mark.slow
def test_ranks_that_are_killed_in_every_place_change_no_bit(tmp_path: Path, warm_python) -> None:
    plain = run_kmeans(tmp_path / "plain")
    steps = ("call 0", "result 0", "call 1", "result 1", "exchange", "vote", "committed")
    places = [f"{version}:{step}" for version, step in enumerate(steps, 1)]
    for number, place in enumerate([*places, "0:call 0", "8:call 0", "8:result 0"]):
        first, second = number % 4, (number + 1 + number % 3) % 4
        new = ("0:parcels", f"{place[0]}:exchange", "0:level")  # a new process has the version when it has the parcels
        for name, deaths in {
            "one": (f"{first}:0:{place}",),
            "two": (f"{first}:0:{place}", f"{second}:0:{place}"),
            "again": (f"{first}:0:{place}", f"{first}:1:{new[number % 3]}"),
        }.items():
            disturbed = run_kmeans(tmp_path / f"{number} {name}", deaths)
            check_equal(disturbed, plain)
            assert killed(disturbed) == sorted(int(death[0]) for death in deaths), deaths


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_or_stopped_at_any_time_change_no_bit(tmp_path: Path, seed: int) -> None:
    """The launcher's events say when a group has been formed; a fault follows within 1 s, on one rank or two.

    With interpreters of their own: the zygote's processes are not stopped by a signal to what the launcher has started.
    There are enough rounds that no fault comes after the end: nobody would miss a process that is stopped there. The
    faults of a run hit two ranks only: if a third one were lost while these are replaced, there might be no copy.
    """
    sizes = ("--points", "2000", "--clusters", "5", "--rounds", "300")
    chosen, pids = random.Random(seed), {}
    victims = chosen.sample(range(4), 2)

    def fault(event) -> None:
        if event["event"] == "started":
            pids[event["rank"]] = event["pid"]
        if event["event"] == "epoch" and event["epoch"] <= 3:
            for rank in chosen.sample(victims, chosen.randint(1, 2)):
                number = chosen.choice(["KILL", "KILL", "STOP"])
                pause_s = chosen.uniform(0.0, 1.0)
                os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep {pause_s}; kill -{number} {pids[rank]}")

    plain = run_kmeans(tmp_path / "plain", (), sizes)
    disturbed = run_kmeans(tmp_path / "disturbed", (), sizes, on_event=fault, restarts=40)
    check_equal(disturbed, plain)
    assert len(disturbed.epochs()) > 2


DEVIATING = """
import os, signal, time
import torch
import totalreduce as tr

group = tr.init()
incarnation = int(os.environ["TOTALREDUCE_INCARNATION"])
try:
    group.allreduce(torch.ones(1))
except tr.ConfigurationError as error:
    print("before:", error)
with tr.replayed(tr.Checkpoint(total=0.0), group) as job:
    try:
        group.allreduce(torch.ones(1))
    except tr.ConfigurationError as error:
        print("in it:", error)
    for _ in range(job.version, 3):
        # The new process makes another call, whose result has the same size.
        job.allreduce(torch.ones(2, 2) if incarnation else torch.ones(4), name="sums")
        if group.rank == 1 and job.version == 1 and incarnation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        job.allreduce(torch.ones(1))
        job.checkpoint()
"""


@pytest.mark.faults("F23")
def test_a_process_that_makes_another_call_ends_the_job_on_every_rank(tmp_path: Path, warm_python) -> None:
    program = tmp_path / "program.py"
    program.write_text(DEVIATING)
    run = Run(tmp_path / "run", 2, program=program, on_loss="replace")
    assert run.result.exit_code == 1
    started = [(event["rank"], event["incarnation"]) for event in run.events if event["event"] == "started"]
    assert started == [(0, 0), (1, 0), (1, 1)], "nothing is started again after the mismatch"
    for rank in range(2):
        text = run.result.errors[rank]
        assert "ReplayMismatchError: call 0 after version 1: the processes of the job do not make the same" in text
        assert "the job has made the call allreduce(sum) of float32[4] named 'sums', and the process" in text
        assert "makes allreduce(sum) of float32[2, 2] named 'sums'" in text
    before, in_it = run.result.output[0].splitlines()
    assert "its group is formed by `with tr.recoverable(...)` or `with tr.replayed(...)`" in before
    assert "the group's own collectives are not replayed: call job.allreduce" in in_it


def test_the_loss_of_all_copies_of_local_values_is_an_error(tmp_path: Path, warm_python) -> None:
    """Ranks 1, 2 and 3 are lost at once: ranks 2 and 3 had the copies of rank 1."""
    deaths = ("1:0:2:call 0", "2:0:2:call 0", "3:0:2:call 0")
    run = run_kmeans(tmp_path / "run", deaths, restarts=3)
    assert run.result.exit_code != 0
    assert not run.finals
    assert "all ranks that had a copy of the local values of rank 1 are lost with it" in run.result.errors[0]
