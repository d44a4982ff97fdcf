"""The figures of ``totalreduce bench faults`` from the logs of its workers."""

import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.foundation.errors import ConfigurationError
from totalreduce_benchmarks import faults_kinds, network_faults
from totalreduce_benchmarks.faults import FaultsParameters
from totalreduce_benchmarks.faults_injector import Injector, Schedule
from totalreduce_benchmarks.faults_job import RunningJob
from totalreduce_benchmarks.faults_kinds import KINDS, Fault, FaultKind, FaultPlan
from totalreduce_benchmarks.faults_records import SAMPLES, Final
from totalreduce_benchmarks.faults_summary import KindFigure, summarise
from totalreduce_benchmarks.faults_torchrun import TorchrunFaults


def lines_of(*, batch: int = 250, repeated: int = 3) -> list[dict]:
    """Two ranks and eight blocks, one in a tenth of a second, four in an epoch; one block is repeated."""
    found = []
    for version in range(8):
        for seat in range(2):
            first = version % 4 * batch + seat * batch // 2
            samples = list(range(first, first + batch // 2))
            about = {"seat": seat, "about": version, "data_epoch": version // 4, "samples": samples}
            if version == repeated:
                found.append({**about, "job_epoch": 1})
            found.append({**about, "job_epoch": 1 + (version >= repeated)})
            at = 100 + version / 10 + (version >= repeated)
            found.append({"seat": seat, "done": version + 1, "digest": f"d{version}", "at": at, "world_size": 2})
    change = {"reason": "rank 1 is lost: killed", "noticed_at": 100.27, "seconds": 0.9}
    return [*found, {"seat": 0, "change": change}]


def figure_of(lines: list[dict], faults: list[Fault] | None = None, **options):
    injected = TorchrunFaults(Path(), num_faults=1, num_ranks=2, interval_s=1.0, seed=0)
    injected.faults += [Fault("kill", 100.25)] if faults is None else faults
    injected.hung = options.pop("hung", False)
    injected.keeper_starts += options.pop("keeper_starts", [])
    finals = [Final(8, "d7", "b", 2, 0.1)] * 2
    return summarise("replace", lines, finals, injected, **{"ends_wrong": False, **options})


def test_a_run_with_one_fault() -> None:
    figure = figure_of(lines_of())
    assert (figure.system, figure.total.injected, figure.total.survived, figure.total.wrong) == ("replace", 1, 1, 0)
    assert (figure.lost_versions, figure.lost_samples, figure.doubled_samples) == (0, 0, 0)
    assert figure.total.detection_max_s == pytest.approx(0.02)
    assert figure.total.recovery_p50_s == pytest.approx(0.9)
    assert figure.progress_p50_s == pytest.approx(1.05)  # the block that was lost took effect at 101.3
    assert (figure.versions, figure.seconds) == (8, pytest.approx(1.7))
    assert figure.goodput == pytest.approx(8 * 0.1 / 1.7)
    assert figure.every_s == pytest.approx(1.7)


def test_what_is_wrong_is_counted() -> None:
    lines = lines_of()
    lines = [{**line, "digest": "other"} if line.get("done") == 5 and line["seat"] == 1 else line for line in lines]
    figure = figure_of(lines)
    assert (figure.total.wrong, figure.total.survived) == (1, 0)
    assert figure_of(lines_of(), ends_wrong=True).total.wrong == 1
    assert figure_of([line for line in lines_of() if line.get("done") != 2]).lost_versions == 1
    lost = [line for line in lines_of() if not (line.get("about") == 1 and line["seat"] == 0)]
    assert figure_of(lost).lost_samples == SAMPLES // 8
    doubled = [
        {**line, "samples": [0] * 125} if line.get("about") == 2 and line["seat"] == 0 else line for line in lines_of()
    ]
    assert (figure_of(doubled).lost_samples, figure_of(doubled).doubled_samples) == (SAMPLES // 8, SAMPLES // 8)


def test_each_kind_has_figures_of_its_own() -> None:
    """Three faults: a kill that is noticed, one of the store, and a stop after which two versions are wrong."""
    lines = lines_of()
    lines = [{**line, "digest": "x"} if line.get("done") in (7, 8) and line["seat"] == 1 else line for line in lines]
    faults = [Fault("kill", 100.25), Fault("keeper", 100.95), Fault("stop", 101.55)]
    lines.append({"seat": 0, "change": {"reason": "rank 0 is lost: silent", "noticed_at": 101.6, "seconds": 0.3}})
    figure = figure_of(lines, faults, keeper_starts=[90.0, 101.0], hung=True)
    kill, keeper, stop = figure.kinds
    assert kill == KindFigure("kill", 1, 1, 0, 0, pytest.approx(0.02), pytest.approx(0.02), 0.9, 0.9)
    assert keeper == KindFigure("keeper", 1, 1, 0, 0, pytest.approx(0.05), pytest.approx(0.05), 0.0, 0.0)
    assert stop == KindFigure("stop", 1, 0, 1, 2, pytest.approx(0.05), pytest.approx(0.05), 0.3, 0.3)
    total = figure.total
    assert (total.kind, total.injected, total.survived, total.hung, total.wrong) == ("all", 3, 0, 1, 2)
    assert (total.detection_p50_s, total.recovery_max_s) == (pytest.approx(0.05), 0.9)


def test_the_pace_before_the_first_fault_is_the_measure_of_the_goodput_with_a_duration() -> None:
    figure = figure_of(lines_of(repeated=5), [Fault("kill", 100.45)], paced=True)
    assert figure.step_s == pytest.approx(0.1)
    assert figure.goodput == pytest.approx(3 * 0.1 / (101.7 - 100.45))  # three blocks after the fault


def test_faults_come_by_turns_or_as_often_as_they_are_counted() -> None:
    chance = random.Random(1)
    assert list(FaultPlan("kill, stop").sequence(5, chance)) == ["kill", "stop", "kill", "stop", "kill"]
    plan = FaultPlan("kill=50,stop=10,keeper=5")
    assert (plan.kinds, plan.total(20), FaultPlan("kill").total(20)) == (["kill", "stop", "keeper"], 65, 20)
    order = list(plan.sequence(20, chance))
    assert Counter(order) == {"kill": 50, "stop": 10, "keeper": 5}
    assert "stop" in order[:30]  # mixed, and not one kind after the other
    endless = list(itertools.islice(plan.sequence(None, chance), 130))
    assert Counter(endless) == {"kill": 100, "stop": 20, "keeper": 10}


class Numbered(FaultKind):
    """Is possible at every second attempt."""

    help = ""

    def __init__(self) -> None:
        self.attempts = 0

    def cause(self, job: RunningJob, chance: random.Random) -> float | None:
        self.attempts += 1
        return None if self.attempts % 2 else float(self.attempts)


def test_a_fault_that_is_not_possible_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "kill", Numbered())
    (tmp_path / "blocks-0-0.jsonl").write_text('\n{"done": 7, "at": 9e9}\n{"done": 8, "at": 9e9}\n')
    job = RunningJob(tmp_path, 1)
    job.on_event({"event": "started", "rank": 0, "pid": 1, "incarnation": 0})
    job.on_event({"event": "epoch", "members": [{"seat": 0, "incarnation": 0}]})
    injector = Injector(job, FaultPlan("kill=3"), Schedule(0.001, 20), tmp_path)
    injector._run()
    assert injector.faults == [Fault("kill", 2.0), Fault("kill", 4.0), Fault("kill", 6.0)]
    assert (tmp_path / "stop").read_text() == "33"  # 25 blocks after the last one
    assert not injector.hung


def test_the_last_process_with_the_state_is_not_killed(tmp_path: Path) -> None:
    job = RunningJob(tmp_path, 2)
    for rank in range(2):
        job.on_event({"event": "started", "rank": rank, "pid": os.getpid(), "incarnation": 0})
    assert job.send(0, signal.SIGCONT) is None  # no group has been formed yet
    job.on_event({"event": "epoch", "members": [{"seat": rank, "incarnation": 0} for rank in range(2)]})
    assert job.send(0, signal.SIGCONT) is not None
    assert job.pids() == {1: os.getpid()}
    assert job.send(1, signal.SIGCONT) is None
    job.on_event({"event": "started", "rank": 0, "pid": os.getpid(), "incarnation": 1})
    assert job.send(1, signal.SIGCONT) is None  # rank 0 has no state before an epoch with it
    assert job.kill_keeper() is None


def test_wrong_options_are_refused() -> None:
    assert FaultsParameters(interval="0.5,2").intervals() == [0.5, 2.0]
    churn = FaultsParameters(duration="1h", interval="5", kinds="kill,stop")
    assert (churn.duration_s(), churn.num_faults(5.0)) == (3600.0, 721)
    assert churn.schedule(5.0) == Schedule(5.0, 20, 3600.0, 20.0, 0)
    assert FaultsParameters(duration="90s").schedule(5.0).pace_s == 20.0
    assert FaultsParameters(duration="10s").schedule(5.0).pace_s == 2.5
    for options, text in (
        ({"interval": "soon"}, "not soon"),
        ({"interval": "1,0"}, "positive"),
        ({"torchrun": True, "kinds": "kill,stop"}, "--kinds kill"),
        ({"kinds": "burn"}, "burn"),
        ({"kinds": "kill=0"}, "kill=0"),
        ({"kinds": "kill=3,stop"}, "or none"),
        ({"kinds": ""}, "or none"),
        ({"duration": "soon"}, "1h"),
        ({"duration": "0s"}, "positive"),
        ({"torchrun": True, "duration": "1h"}, "without --duration"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            FaultsParameters(**options)


def running_job(folder: Path) -> RunningJob:
    """A job whose two ranks have formed a group, and have taken a step after that."""
    job = RunningJob(folder, 2)
    for rank in range(2):
        job.on_event({"event": "started", "rank": rank, "pid": 1 << 22, "incarnation": 0})
    members = [{"seat": rank, "incarnation": 0} for rank in range(2)]
    job.on_event({"event": "epoch", "members": members})
    block = {"seat": 0, "done": 1, "digest": "d", "at": time.time() + 1.0, "world_size": 2}
    (folder / "blocks-0-0.jsonl").write_text(f"\n{json.dumps(block)}\n")
    return job


def test_an_error_of_the_injector_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FaultKind):
        help = "an error"

        def cause(self, job, chance):
            raise ZeroDivisionError("the fault is broken")

    monkeypatch.setitem(KINDS, "kill", Broken())
    told, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        injector = Injector(running_job(tmp_path), FaultPlan("kill"), Schedule(0.001, 1), tmp_path)
        injector.start()
        assert told.wait(10.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(injector.error, ZeroDivisionError)
    assert not injector.hung


class FakeHost:
    """A host that notes what is done, and fails where it is told to."""

    namespace, address = "host", "10.0.0.2"

    def __init__(self, fails: str) -> None:
        self.fails, self.done = fails, []

    def __getattr__(self, name: str):
        def call(peer) -> bool:
            self.done.append(name)
            if name == self.fails:
                raise subprocess.CalledProcessError(2, ["ip"], stderr="RTNETLINK answers: No such process")
            return True

        return call


def test_a_partition_is_not_possible_or_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    def cause(host, sleep=lambda _: None):
        job = running_job(tmp_path)
        monkeypatch.setattr(faults_kinds, "host_of", lambda _pid: host)
        monkeypatch.setattr(faults_kinds.time, "sleep", sleep)
        try:
            return KINDS["partition"].cause(job, random.Random(1)), job._members
        finally:
            monkeypatch.undo()

    at, members = cause(FakeHost("block"))
    assert (at, members) == (None, [(0, 0), (1, 0)])  # the group counts as before
    host = FakeHost("nothing")
    at, members = cause(host)
    assert (at is not None, members, host.done) == (True, [], ["block", "unblock"])
    host = FakeHost("nothing")
    with pytest.raises(KeyboardInterrupt):
        cause(host, interrupted)
    assert host.done == ["block", "unblock"]
    with pytest.raises(
        BenchmarkFailedError, match=r"the route from host to 10\.0\.0\.2 could not be restored: RTNETLINK"
    ):
        cause(FakeHost("unblock"))


def test_a_process_without_the_variables_of_a_worker_has_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is just being started."""
    shown = json.dumps([{"addr_info": [{"local": "10.0.0.1"}]}])
    monkeypatch.setattr(network_faults, "_run", lambda *command: shown if "-j" in command else "host\n")
    with pytest.raises(ProcessLookupError, match=f"/proc/{os.getpid()}/environ"):
        network_faults.host_of(os.getpid())
