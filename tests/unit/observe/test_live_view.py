"""The figures of ranks, the folder of a job, and what a person is shown of both."""

import ast
import asyncio
import contextlib
import io
import json
import logging
import os
import re
import threading
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from totalreduce.foundation.environment import runtime_folders
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.groups.statistics import Statistics
from totalreduce.groups.steps import Reading, StepReport
from totalreduce.launch.bootstrap import _seat, init
from totalreduce.launch.live import LiveJob
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.observe import JsonFormatter, board, metrics, publisher
from totalreduce.observe.board import Board, RankReading, find_boards, launcher_identity, make_board
from totalreduce.observe.figures import DOCUMENT_BYTES_MAX, Link, RankFigures
from totalreduce.observe.job import JobRecord
from totalreduce.observe.table import job_tables
from totalreduce.observe.view import view_of
from totalreduce.pytorch.hooks import StepCounter, has_step_hooks
from totalreduce.runner.meter import Meter, StepTotals


def figures(seat=0, **changed):
    values = {
        "seat": seat,
        "rank": seat,
        "world_size": 3,
        "host": f"node{seat}",
        "pid": 100 + seat,
        "epoch": 0,
        "incarnation": 0,
        "step": 50,
        "step_s": 0.1,
        "compute_s": 0.06,
        "exposed_s": 0.04,
        "since_step_s": 0.02,
        "hidden_share": 0.5,
        "bytes_sent": 1000,
        "bytes_received": 2000,
        "sent_per_s": 10.0,
        "received_per_s": 20.0,
    }
    return RankFigures(**(values | changed))


def plain(tables):
    """Return what a terminal shows."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables)
    return console.export_text()


def readings(*ranks, age_s=0.5):
    return {each.seat: RankReading(each, age_s) for each in ranks}


# ----------------------------------------------------------------------------------------------------------- documents


def test_figures_come_back_as_they_were_written():
    links = (Link(peer=2, sent=5, received=6, sent_per_s=0.5, received_per_s=0.25),)
    made = figures(
        1,
        links=links,
        pending="x",
        pending_of_all=False,
        pending_ranks=(1, 5),
        sources={"model": {"density": 0.01, "method": "x"}},
    )
    assert RankFigures.decode(made.encode()) == made


def test_a_document_is_bounded_whatever_a_rank_has():
    links = tuple(
        Link(peer=peer, sent=1, received=1, sent_per_s=float(peer), received_per_s=0.0) for peer in range(999)
    )
    sources = {f"source {i}": {f"figure {j}": "y" * 5000 for j in range(100)} for i in range(100)}
    text = figures(links=links, pending="x" * 10_000, step_s=float("nan"), sources=sources).encode()
    read = RankFigures.decode(text)
    assert len(text) <= DOCUMENT_BYTES_MAX
    assert (read.pending, read.step_s, read.links, read.sources) == ("x" * 200, 0.0, (), {})
    read = RankFigures.decode(figures(links=links).encode())
    assert [link.peer for link in read.links] == list(range(935, 999))  # the busiest ones


@pytest.mark.parametrize(
    "change",
    [
        {"seat": "1"},
        {"seat": True},
        {"step_s": None},
        {"step_s": float("inf")},
        {"is_open": 1},
        {"host": 5},
        {"links": [{"peer": 1}]},
        {"links": None},
        {"pending_ranks": [True]},
        {"pending_of_all": 1},
        {"sources": {"model": {"density": [1]}}},
        {"sources": {"model": {"density": float("nan")}}},
        {"surplus": 1},
    ],
    ids=str,
)
def test_what_no_rank_writes_is_refused(change):
    document = json.loads(figures().encode()) | change
    with pytest.raises(ProtocolError, match="no figures of a rank"):
        RankFigures.decode(json.dumps(document).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 9000, b" " * 20_000])
def test_other_bytes_are_refused(text):
    with pytest.raises(ProtocolError):
        RankFigures.decode(text)


# ------------------------------------------------------------------------------------------------------ steps of a rank


def test_a_step_is_divided_into_computing_and_waits():
    now = [10.0]
    meter = Meter(lambda: now[0])
    seen = []
    meter.watchers.append(seen.append)
    meter.blocked(3.0)  # before the first step, which has no known begin
    meter.end_step()
    assert meter.totals == StepTotals(1, 0, 0.0, 0.0, 10.0)
    now[0] = 11.0
    meter.blocked(0.25)
    meter.end_step(elsewhere_s=0.5)
    now[0] = 13.0
    meter.blocked(9.0)  # no step waits for longer than it lasts
    meter.end_step(elsewhere_s=0.5)
    assert meter.totals == StepTotals(3, 2, 3.0, 2.75, 13.0)
    assert [totals.steps for totals in seen] == [1, 2, 3]
    other = Meter(lambda: now[0])
    other.go_on(meter)
    other.begin_at(40)
    now[0] = 99.0
    other.end_step()  # the time since the last step of the other meter is that of forming a group
    assert other.totals == StepTotals(41, 2, 3.0, 2.75, 99.0)


def reading(at, totals, **counted):
    zeros = dict.fromkeys(Statistics.__dataclass_fields__, 0)
    return Reading(at, totals, Statistics(**(zeros | counted)), {}, {})


def test_a_report_has_the_means_of_its_steps():
    before = reading(100.0, StepTotals(5, 4, 2.0, 1.0), active_s=1.0, bytes_sent=10, waited_s=1.0)
    after = reading(102.0, StepTotals(9, 8, 4.0, 1.5), active_s=3.0, bytes_sent=70, bytes_received=8, waited_s=9.0)
    report = StepReport.between(before, after)
    assert report == StepReport(
        step=9,
        steps=4,
        step_s=0.5,
        compute_s=0.375,
        exposed_s=0.125,
        hidden_share=0.75,  # of 2 s of communication, the thread that trains was blocked for 0.5 s
        bytes_sent=60,
        bytes_received=8,
        seconds=2.0,
    )
    assert report.scalars()["totalreduce/exposed_s"] == 0.125
    assert "totalreduce/step" not in report.scalars()
    idle = StepReport.between(after, replace(after, at=103.0))
    assert (idle.steps, idle.step_s, idle.hidden_share) == (0, 0.0, 1.0)


def test_steps_of_one_torch_optimizer_are_counted_and_updates_may_still_be_deferred():
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
    counted = []
    counter = StepCounter(lambda: counted.append(1))
    try:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
        assert not has_step_hooks(optimizers[0])
    finally:
        counter.remove()
    optimizers[0].step()
    assert len(counted) == 3


# -------------------------------------------------------------------------------------------------- who others wait for


def late(*ranks, **options):
    return {each.seat: each.why for each in view_of({}, readings(*ranks, **options), 0.0).late}


def test_the_rank_that_computes_longest_is_late():
    slow = figures(2, compute_s=0.09, exposed_s=0.01)
    assert late(figures(0), figures(1), slow) == {2: "computes for 30.0 ms longer than the median rank"}
    assert late(figures(0), figures(1), figures(2, compute_s=0.064)) == {}
    assert late(slow) == {}


def test_the_rank_that_has_not_submitted_what_others_wait_for_is_late():
    waiting = [figures(seat, pending="bucket 3", pending_s=seconds) for seat, seconds in ((0, 4.0), (1, 6.0))]
    why = "has not submitted 'bucket 3', in flight elsewhere for 6.0 s"
    assert late(*waiting, figures(2)) == {2: why}
    assert late(*waiting, figures(2, pending="bucket 3", pending_s=5.0)) == {}
    slow_steps = [replace(each, step_s=10.0) for each in waiting]
    assert late(*slow_steps, figures(2, step_s=10.0)) == {}  # 6 s are less than three steps


def test_ranks_without_timed_steps_are_not_compared_with_the_others():
    no_steps = {"step": 0, "step_s": 0.0, "compute_s": 0.0, "exposed_s": 0.0}
    servers = [figures(seat, **no_steps) for seat in (2, 3, 4)]
    assert late(figures(0), figures(1), *servers) == {}
    long_steps = [figures(seat, step_s=9.0, pending="bucket 3", pending_s=6.0) for seat in (0, 1)]
    assert late(*long_steps, *servers) == {}  # 6 s are less than three steps of the ranks that have steps
    view = view_of({}, readings(figures(0), replace(servers[0], hidden_share=1.0)), 0.0)
    assert (view.step_s, view.hidden_share) == (0.1, 0.5)


def test_only_ranks_that_take_part_in_an_operation_can_be_late_with_it():
    waiting = figures(0, pending="workers", pending_s=4.0, pending_of_all=False, pending_ranks=(0, 2))
    assert list(late(waiting, figures(1), figures(2), figures(3, step=0, step_s=0.0))) == [2]


def test_a_rank_without_new_figures_is_late():
    view = view_of({}, {**readings(figures(0)), **readings(figures(1), age_s=8.0)}, 0.0)
    assert [(each.seat, each.why) for each in view.late] == [(1, "has been silent for 8 s")]
    assert [row.state for row in view.ranks] == ["running", "silent"]


# ------------------------------------------------------------------------------------------------------------- the view


def event(kind, **details):
    return {"time": 1000.5, "event": kind, **details}


def record_of(*events):
    record = JobRecord("run-1", ["python", "train.py"], 3, {"began_at": 990.0})
    for each in events:
        record.note(each)
    return json.loads(json.dumps(record.document(1001.0)))


STARTED = [event("started", rank=seat, incarnation=0, pid=7, host="localhost") for seat in range(4)]


def test_the_state_of_each_seat():
    job = record_of(
        *STARTED,
        event("ended", rank=1, exit_code=137, signal="SIGKILL", host="localhost", incarnation=0),
        event("ended", rank=2, exit_code=0, signal=None, host="localhost"),
        event("ended", rank=3, exit_code=1, signal=None, host="localhost", incarnation=0, error="KeyError: 3"),
        event("started", rank=3, incarnation=1, pid=8, host="localhost", was_spare=False, restarts_left=9),
    )
    ranks = [figures(seat) for seat in range(4)]
    view = view_of(job, readings(*ranks), 1002.0)
    states = [(row.seat, row.rank, row.host, row.state, row.note) for row in view.ranks]
    assert states == [
        (0, 0, "node0", "running", ""),
        (1, None, "node1", "lost", "SIGKILL"),
        (2, None, "node2", "ended", "exit code 0"),
        (3, None, "node3", "starting", ""),  # the figures are those of the process before
    ]
    assert view.faults["lost"] == 2
    assert view.faults["restarts"] == 1
    assert [each["text"] for each in view.events] == [
        "rank 1 was killed by SIGKILL",
        "rank 3 failed with exit code 1: KeyError: 3",
        "rank 3 is started again (9 restarts left)",
    ]
    assert (view.job, view.command, view.began_at) == ("run-1", "python train.py", 990.0)


def test_members_of_an_epoch():
    members = [{"seat": 0, "incarnation": 0, "has_state": True}, {"seat": 2, "incarnation": 0, "has_state": True}]
    job = record_of(*STARTED[:3], event("epoch", epoch=2, members=members, version=17))
    ranks = [figures(0, epoch=2, world_size=2), figures(1), figures(2, rank=1, world_size=2, epoch=2)]
    view = view_of(job, readings(*ranks), 0.0)
    assert [(row.seat, row.rank, row.state) for row in view.ranks] == [
        (0, 0, "running"),
        (1, None, "left out"),
        (2, 1, "running"),
    ]
    assert (view.epoch, view.world_size) == (2, 2)
    closed = view_of(job, readings(replace(ranks[0], is_open=False), age_s=60.0), 0.0)
    assert [row.state for row in closed.ranks] == ["no group", "starting", "starting"]
    assert closed.late == ()


def test_after_the_end_the_last_figures_are_shown():
    job = record_of(*STARTED[:2], *(event("ended", rank=rank, exit_code=0, signal=None) for rank in (0, 1)))
    view = view_of(job, readings(*(figures(rank, is_open=False) for rank in (0, 1)), age_s=60.0), 0.0)
    assert [row.state for row in view.ranks] == ["ended", "ended"]
    assert (view.step_s, view.compute_s, view.exposed_s, view.hidden_share) == (0.1, 0.06, 0.04, 0.5)
    assert view.sent_per_s == 0.0  # nothing is sent any more


def test_a_share_is_not_shown_before_a_step_has_been_timed():
    view = view_of({}, readings(figures(0, step_s=0.0, hidden_share=1.0)), 0.0)
    text = plain(job_tables(view))
    assert "- hidden" in text
    assert "100%" not in text


def test_the_number_of_a_membership_is_not_called_an_epoch():
    """Users train in epochs."""
    members = [{"seat": 0, "incarnation": 0, "has_state": True}]
    job = record_of(*STARTED[:1], event("epoch", epoch=2, members=members, version=17))
    view = view_of(job, readings(figures(0, epoch=2, world_size=1)), 0.0)
    text = plain(job_tables(view))
    assert "membership 2" in text
    assert "(membership 2)" in view.events[-1]["text"]
    page = resources.files("totalreduce.observe").joinpath("page", "page.js").read_text()
    assert '["membership", job.epoch]' in page
    for shown in (text, metrics.exposition(view)[0].decode()):
        assert "epoch" not in shown.lower()


def test_messages_about_memberships_do_not_say_epoch():
    """Texts of errors and logs in the folders that know memberships, but for names in documents and samples' epochs."""
    source = resources.files("totalreduce")
    found = []
    for folder in ("recovery", "server", "launch", "transports", "observe", "engine"):
        for path in Path(str(source / folder)).glob("*.py"):
            if path.name in ("sampler.py", "stream.py", "dealing.py"):  # epochs of the data set
                continue
            docstrings = set()
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    docstrings.add(id(node.value))
            for node in ast.walk(tree):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
                if is_text and re.search(r"\bepochs?\b.* | \bepochs?\b", node.value):
                    found.append((path.name, node.value))
    assert [each for each in found if each != ("launcher_store.py", "/first epoch")] == []


def test_numbers_of_the_job_are_those_of_running_ranks():
    links = (Link(peer=1, sent=500, received=0, sent_per_s=50.0, received_per_s=0.0),)
    first = figures(0, links=links, stalls=1, sources={"model": {"density": 0.02}})
    view = view_of({}, readings(first, figures(1, step_s=0.3, compute_s=0.16, step=52, exposed_s=0.14)), 0.0)
    assert (view.step, view.step_s, view.sent_per_s) == (52, pytest.approx(0.2), 20.0)
    assert view.exposed_s == pytest.approx(0.09)
    assert [(each.sender, each.receiver, each.per_s, each.total) for each in view.links] == [(0, 1, 50.0, 500)]
    assert view.training == {"model": {"density": 0.02}}
    assert view.faults["stalls"] == 1
    text = plain(job_tables(view))
    assert "2 of 3 ranks" in text
    assert "200.0 ms a step: 110.0 ms computing, 90.0 ms exposed" in text
    assert "seat 1 computes for 50.0 ms longer than the median rank" in text
    assert "0 → 1  50 B/s" in text
    assert "model: density 0.02" in text
    assert "faults: 1 stalls" in text


def test_metrics_are_what_the_client_library_writes():
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    links = (Link(peer=1, sent=500, received=0, sent_per_s=50.0, received_per_s=0.0),)
    view = view_of({}, readings(figures(0, links=links, sources={"model": {"density": 0.02, "method": "x"}})), 0.0)
    text, kind = metrics.exposition(view)
    assert kind.startswith("text/plain")
    families = parser.text_string_to_metric_families(text.decode())
    samples = {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}
    assert samples["totalreduce_steps_total", "0", "node0"] == 50
    assert samples["totalreduce_exposed_seconds", "0", "node0"] == 0.04
    assert samples["totalreduce_rank_up", "0", "node0"] == 1
    assert samples["totalreduce_link_bytes_total", "0", "1"] == 500
    assert samples["totalreduce_faults_total", "lost"] == 0
    assert samples["totalreduce_training", "density", "model"] == 0.02
    assert samples["totalreduce_world_size",] == 3


# ----------------------------------------------------------------------------------------------------------- the folder


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "runtime_folders", lambda: [tmp_path / "runtime"])
    return tmp_path / "runtime"


def test_the_folder_of_a_job(runtime):
    with LiveJob() as live:
        live.begin("run-9", ["python", "train.py"], 2)
        live.board.write_figures(1, figures(1).encode())
        live.board.write_figures(3, figures(1).encode())  # its name is not that of its seat
        live.board.write_figures(4, b"{")
        assert list(live.board.read_figures()) == [1]
        assert live.board.read_figures()[1].figures == figures(1)
        assert live.board.read_figures()[1].age_s < 5.0
        [found] = find_boards()
        assert found.path == live.board.path
        assert found.read_job()["job"] == "run-9"
        assert (runtime.stat().st_mode & 0o777, found.path.stat().st_mode & 0o777) == (0o700, 0o700)
    assert find_boards() == []
    assert list(runtime.iterdir()) == []


def test_a_full_disk_costs_the_live_view_and_one_warning(small_disk, monkeypatch):
    folder = small_disk(64)
    monkeypatch.setattr(board, "runtime_folders", lambda: [folder / "runtime"])
    said = []
    with LiveJob(said.append) as live:
        live.begin("run-9", ["python", "train.py"], 2)
        before = live.board.read_job()
        filler = folder / "filler"
        filler.write_bytes(bytes((64 << 10) - 4096))  # but for the file about the job
        for _ in range(3):
            with contextlib.suppress(OSError):
                live.board.write_figures(0, b"x")
            live.note({"time": 1.0, "event": "ended", "rank": 0, "exit_code": 3, "signal": None})
            live._write_at = 0.0
            live.write()
        assert said == [
            "the live view of this job cannot be written: No space left on device (ENOSPC). The job goes on"
        ]
        assert live.board.read_job() == before
        assert [path.name for path in live.board.path.iterdir()] == ["job.json"]
        filler.unlink()
        live._write_at = 0.0
        live.write()
        assert live.board.read_job()["lost"] == 3
        assert len(said) == 1


def test_a_full_disk_leaves_no_folder_behind(small_disk, monkeypatch):
    folder = small_disk(8)
    monkeypatch.setattr(board, "runtime_folders", lambda: [folder])
    folder.chmod(0o700)
    (folder / "filler").write_bytes(bytes(8 << 10))
    with pytest.raises(ConfigurationError, match=r"no folder for the figures .*No space left on device \(ENOSPC\)"):
        LiveJob()
    assert [path.name for path in folder.iterdir()] == ["filler"]


def test_folders_of_launchers_that_were_killed_are_removed(runtime):
    dead = make_board("run-1")
    dead.write_job(launcher_identity() | {"launcher_started": 1, "job": "run-1"})  # the id was used again
    # The ids of processes in other containers, and of hosts that share the folder, mean nothing here.
    others = [make_board("other") for _ in range(3)]
    for other, change in zip(others, ({"boot_id": "x"}, {"pid_namespace": "pid:[1]"}, {"boot_id": ""}), strict=True):
        other.write_job(launcher_identity() | {"launcher_started": 1} | change)
    new, old = Board(runtime / "new"), Board(runtime / "old")
    for empty, age_s in ((new, 3600), (old, 48 * 3600)):
        empty.path.mkdir(mode=0o700)
        os.utime(empty.path, (time.time() - age_s,) * 2)
    assert find_boards() == []
    made = make_board("run-2")
    assert not dead.path.exists()
    assert not old.path.exists()
    assert all(each.path.exists() for each in (made, new, *others))
    made.write_job(launcher_identity() | {"pid_namespace": "pid:[1]"})  # as if a launcher elsewhere had this one's id
    assert find_boards() == []


def test_files_are_made_anew_and_links_are_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / f".rank0.json.{os.getpid()}.{threading.get_native_id()}").symlink_to(target)
    Board(tmp_path).write_figures(0, b"{}")
    assert target.read_text() == "kept"
    written = (tmp_path / "rank0.json").lstat()
    assert (written.st_mode & 0o177777, written.st_size) == (0o100600, 2)


def test_a_relative_runtime_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert all(folder.is_absolute() for folder in runtime_folders())


def test_a_folder_that_others_can_open_is_not_used(runtime):
    runtime.mkdir(mode=0o755)
    runtime.chmod(0o755)
    with pytest.raises(ConfigurationError, match="open to others"):
        make_board("run-1")
    assert find_boards() == []


def test_a_rank_warns_of_a_folder_that_others_can_open(tmp_path, caplog):
    tmp_path.chmod(0o700)
    publisher.Publisher(tmp_path, 0)._warn_of_an_open_folder()
    assert caplog.text == ""
    tmp_path.chmod(0o755)
    publisher.Publisher(tmp_path, 0)._warn_of_an_open_folder()
    assert "does not belong to this user alone" in caplog.text


def test_what_cannot_be_written_does_not_hurt(tmp_path):
    gone = Board(tmp_path / "gone")
    assert (gone.read_figures(), gone.read_job(), gone.is_alive()) == ({}, {}, False)
    with pytest.raises(OSError, match="No such file"):
        gone.write_figures(0, b"")


# ---------------------------------------------------------------------------------------------------------------- logs


def test_log_records_as_json():
    logger = logging.getLogger("totalreduce.transports.tcp")
    record = logger.makeRecord(logger.name, logging.WARNING, "f.py", 1, "rank %d", (3,), None, extra={"peer": 5})
    document = json.loads(JsonFormatter(2).format(record))
    assert document.pop("time").endswith("+00:00")
    assert document == {
        "level": "warning",
        "area": "transports",
        "logger": "totalreduce.transports.tcp",
        "message": "rank 3",
        "rank": 2,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "peer": 5,
    }
    try:
        raise ValueError("wrong")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logger.makeRecord("totalreduce", logging.ERROR, "f.py", 1, "failed", (), info)
    assert "ValueError: wrong" in json.loads(JsonFormatter().format(record))["error"]


# ---------------------------------------------------------------------------------------------- programs of the library


def test_steps_beside_the_back_end_of_torch_are_counted():
    dist.init_process_group("totalreduce", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    try:
        group = dist.distributed_c10d._get_default_group().group
        for _ in range(3):
            optimizer.step()
    finally:
        dist.destroy_process_group()
    optimizer.step()
    assert group.meter.totals.steps == 3


@pytest.mark.parametrize(
    ("variables", "seat"),
    [
        ({}, 0),  # torch.multiprocessing.spawn: nothing but the program knows the rank
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "TOTALREDUCE_JOB_ID": "run-1"}, 5),
    ],
    ids=["none", "mpirun without an address", "totalreduce"],
)
def test_the_seat_is_that_of_the_launcher_if_it_is_totalreduce(tmp_path, monkeypatch, variables, seat):
    """Variables of another launcher may be incomplete, which must not make init fail, and name other ranks."""
    monkeypatch.setattr(publisher, "_publisher", None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TOTALREDUCE_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {**variables, "TOTALREDUCE_LIVE": str(tmp_path)}.items():
        monkeypatch.setenv(name, text)
    with init(store=StoreRank(dist.HashStore(), 0, 1), name="seat"):
        pass
    assert list(Board(tmp_path).read_figures()) == [seat]
    assert _seat(3) == (seat or 3)


def test_top_as_an_application(runtime):
    pytest.importorskip("textual", reason="textual is not installed")
    from textual.widgets import Static

    from totalreduce.cli.top_app import TopApp

    async def use(app, other):
        async with app.run_test(size=(120, 30)) as pilot:
            shown = app.query_one("#job", Static)

            def text():
                console = Console(width=100, record=True, file=io.StringIO())
                console.print(shown.content)
                return console.export_text()

            assert "run-1" in text()
            await pilot.press("n")
            assert "run-2" in text()
            await pilot.press("p")
            other.board.write_job({"job": "run-3"})
            await pilot.pause(0.2)
            assert "run-2" in text()  # paused
            await pilot.press("p")
            while "run-3" not in text():
                await pilot.pause(0.05)
            other.board.remove()
            give_up_at = time.monotonic() + 20.0
            while app.return_code is None and time.monotonic() < give_up_at:
                await pilot.pause(0.05)
        return app.return_code

    with LiveJob() as one, LiveJob() as other:
        for live, name in ((one, "run-1"), (other, "run-2")):
            live.begin(name, ["train.py"], 1)
        app = TopApp(one.board, 0.05)
        assert asyncio.run(use(app, other)) == 0
