"""The timeline of a real engine: every operation of every rank, with its parts where they belong."""

import json
import threading
import time

import pytest
import torch

import totalreduce as tr
from totalreduce.observe import Timeline, analyse, merge_timelines, merged_trace
from totalreduce.testing.ranks import run_ranks

ROUNDS, ELEMENTS = 3, 300_000


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_every_operation_of_every_rank_is_recorded(tmp_path, transport):
    def work(group):
        timeline = Timeline(group.rank, tmp_path / f"{group.rank}.json")
        group.observers.append(timeline)
        for _ in range(ROUNDS):
            tensor = torch.full((ELEMENTS,), float(group.rank + 1))
            assert group.allreduce(tensor, name="w", op=tr.ReduceOp.SUM).wait()[-1] == 6.0
        group.barrier()
        group.observers.remove(timeline)
        timeline.close()
        return timeline.dropped

    assert run_ranks(3, work, transport=transport) == [0, 0, 0]
    trace = json.loads(
        merge_timelines([tmp_path / f"{rank}.json" for rank in range(3)], tmp_path / "all.json").read_text()
    )
    # On a rank that is always the last to submit, messages are there already, and QUEUED takes no time.
    assert any(event["name"] == "QUEUED" for event in trace["traceEvents"])
    for rank in range(3):
        events = [event for event in trace["traceEvents"] if event["pid"] == rank]
        spans = {event["name"]: event for event in events if event["ph"] == "X"}
        assert {"w #0", "w #1", "w #2", "barrier #0", "WIRE", "REDUCE"} <= spans.keys()
        for number in range(ROUNDS):
            args = spans[f"w #{number}"]["args"]
            assert (args["bytes"], args["outcome"], args["iteration"]) == (4 * ELEMENTS, "done", number)
            # A ring of three: four thirds of the tensor leave and four thirds arrive.
            assert args["bytes sent"] == args["bytes received"] == 4 * ELEMENTS * 4 // 3
        inside = [event for event in events if event["name"] in ("REDUCE", "QUEUED", "WIRE")]
        operations = [event for event in events if event.get("args", {}).get("outcome")]
        for part in inside:
            assert any(
                whole["ts"] <= part["ts"] + 1 and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1
                for whole in operations
            )
        level = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
        assert max(level) == 4 * ELEMENTS
        assert level[-1] == 0


def test_ranks_wait_for_each_other_at_the_same_time(tmp_path):
    """One clock for all: a barrier ends on no rank before it has begun on every rank."""

    def work(group):
        timeline = Timeline(group.rank, tmp_path / f"{group.rank}.json")
        group.observers.append(timeline)
        for _ in range(5):
            group.barrier()
        group.observers.remove(timeline)
        timeline.close()

    run_ranks(3, work)
    trace = json.loads(
        merge_timelines([tmp_path / f"{rank}.json" for rank in range(3)], tmp_path / "all.json").read_text()
    )
    for number in range(5):
        barriers = [event for event in trace["traceEvents"] if event["name"] == f"barrier #{number}"]
        assert len(barriers) == 3
        last_begin = max(event["ts"] for event in barriers)
        assert all(last_begin <= event["ts"] + event["dur"] for event in barriers)


def test_the_rank_that_sleeps_is_named(tmp_path):
    sleeper, slept_s = 2, 0.05
    others_have_submitted = threading.Barrier(3)

    def work(group):
        timeline = Timeline(group.rank, tmp_path / f"{group.rank}.json")
        group.observers.append(timeline)
        for _ in range(ROUNDS):
            tensor = torch.ones(ELEMENTS)
            if group.rank == sleeper:
                others_have_submitted.wait(30)
                time.sleep(slept_s)
                group.allreduce(tensor, name="w").wait()
            else:
                pending = group.allreduce(tensor, name="w")
                others_have_submitted.wait(30)
                pending.wait()
        group.observers.remove(timeline)
        timeline.close()
        return group.statistics().hidden_share

    hidden_shares = run_ranks(3, work)
    report = analyse(merged_trace([tmp_path / f"{rank}.json" for rank in range(3)]))
    assert [operation.late_rank for operation in report.operations] == [sleeper] * ROUNDS
    assert all(slept_s <= operation.late_s for operation in report.operations)
    assert [(late.rank, late.times_last) for late in report.late] == [(sleeper, ROUNDS)]
    assert report.ranks[sleeper].split.waiting_s == 0.0
    assert min(report.ranks[rank].split.waiting_s for rank in (0, 1)) >= ROUNDS * slept_s
    # The engine counts it, too.
    assert [rank.hidden_share for rank in report.ranks] == pytest.approx(hidden_shares, abs=0.1)


def test_rank_0_marks_when_each_rank_was_ready(tmp_path):
    """Of an operation that the ranks agree on: the last mark is the rank that the others waited for."""
    others_have_asked = threading.Barrier(3)

    def work(group):
        timeline = Timeline(group.rank, tmp_path / f"{group.rank}.json")
        group.observers.append(timeline)
        coordinator = group.coordinate()
        if group.rank == 1:
            others_have_asked.wait()
            time.sleep(1.0)
        work = coordinator.allreduce(torch.ones(4), name="w")
        if group.rank != 1:
            others_have_asked.wait()
        work.wait()
        coordinator.allreduce(torch.ones(4), name="w").wait()  # remembered: nobody asks for it again
        group.barrier()
        group.observers.remove(timeline)
        timeline.close()

    run_ranks(3, work)
    marks = {}
    for rank in range(3):
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        marks[rank] = [event for event in events if event["name"].startswith("READY")]
    assert (marks[1], marks[2]) == ([], [])
    assert sorted(event["name"] for event in marks[0]) == ["READY 0", "READY 1", "READY 2"]
    assert [event["args"]["rank"] for event in marks[0]][-1] == 1
    assert marks[0][-1]["ts"] - marks[0][0]["ts"] > 100_000
