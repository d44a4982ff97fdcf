"""The picture of one step: which bars are drawn, and where."""

import json
import re

import pytest
from test_timeline_command import ORIGIN, complaint, folder, run

from totalreduce.cli.timeline_picture import Bar, step_of
from totalreduce.observe import rank_path
from totalreduce.observe.merge import merged_trace

__all__ = ["folder"]


def picture(folder, iteration=None):
    return step_of(merged_trace(sorted(folder.glob("rank*.json"))), iteration)


def lanes(found, rank):
    return {
        lane.name: [(round(bar.begin_ms), round(bar.length_ms), bar.kind) for bar in lane.bars]
        for lane in found.ranks[rank]
    }


def test_each_rank_has_its_caller_and_its_operations(folder):
    found = picture(folder)
    assert (found.iteration, round(found.length_ms), list(found.ranks)) == (0, 1100, [0, 1, 2])
    waits = [(75, 25, "the caller waits"), (1075, 25, "the caller waits")]
    assert lanes(found, 0) == {
        "caller": waits,
        "layer[0]": [(0, 2, "queued"), (2, 98, "wire")],
        "b": [(1000, 2, "queued"), (1002, 98, "wire")],
    }
    # Rank 2 is late by 50 ms.
    assert lanes(found, 2)["layer[0]"] == [(50, 2, "queued"), (52, 48, "wire")]


def test_a_step_is_of_the_names_that_come_most_often(tmp_path):
    from totalreduce.observe import Timeline

    observer = Timeline(0, rank_path(tmp_path, 0), clock=lambda: ORIGIN)
    for at, step, name in ((0, 0, "start"), (1, 0, "w"), (2, 1, "w"), (2, 1, "start"), (3, 2, "w"), (3.002, 0, "once")):
        begin = ORIGIN + at
        observer.submitted(name, step, begin, num_bytes=8, priority=0)
        observer.first_byte(name, step, begin + 0.001)
        observer.done(name, step, begin + 0.004, error=None)
    observer.close()
    assert picture(tmp_path).iteration == 2
    assert lanes(picture(tmp_path), 0) == {
        "w": [(0, 1, "queued"), (1, 3, "wire")],
        "once": [(2, 1, "queued"), (3, 1, "wire")],  # it was going on meanwhile
    }
    assert list(lanes(picture(tmp_path, 0), 0)) == ["w"]


def test_what_reaches_beyond_the_step_is_cut_off():
    meta = {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "caller"}}
    operation = {
        "ph": "X",
        "pid": 0,
        "tid": 2,
        "ts": 1000,
        "dur": 2000,
        "name": "w #4",
        "args": {"iteration": 4, "outcome": "done"},
    }
    wait = {"ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 1500, "name": "WAIT", "args": {"iteration": 4}}
    [caller, _] = step_of({"traceEvents": [meta, operation, wait]}).ranks[0]
    assert caller.bars == (Bar(0.0, 0.5, "the caller waits"),)


def test_the_command_draws(folder, tmp_path):
    pytest.importorskip("matplotlib")
    for _ in range(2):
        run(folder, "--plot", tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert len(re.findall(">rank [012]</text>", text)) == 3
    assert ">the caller waits</text>" in text
    assert "dc:date" not in text  # equal pictures are equal files


def test_pictures_that_cannot_be_drawn(folder, tmp_path):
    assert "--plot writes .png, .svg, .pdf, not" in complaint(folder, "--plot", tmp_path / "step.txt")
    steps = "the timelines have no step 7: they have steps 0 to 0"
    assert complaint(folder, "--plot", tmp_path / "step.svg", "--iteration", 7) == steps
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
