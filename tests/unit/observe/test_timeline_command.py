"""``totalreduce timeline``: the merged file, the tables, and what is said about files that are of no use."""

import json
import re

import pytest
from typer.testing import CliRunner

from totalreduce.cli.main import build, main
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe import Timeline, rank_path

ORIGIN = 100.0


def run(*arguments):
    found = CliRunner().invoke(build(["timeline"]), ["timeline", *map(str, arguments)])
    assert found.exit_code == 0, found.output
    return found.stdout


def complaint(*arguments):
    found = CliRunner().invoke(build(["timeline"]), ["timeline", *map(str, arguments)])
    assert isinstance(found.exception, ConfigurationError), found.output
    return str(found.exception)


def record(path, rank, late_s=0.0, names=("layer[0]", "b"), **options):
    observer = Timeline(rank, path, clock=lambda: ORIGIN, **options)
    for number, name in enumerate(names):
        begin = ORIGIN + number + late_s
        observer.submitted(name, 0, begin, num_bytes=4_000_000, priority=0)
        observer.first_byte(name, 0, begin + 0.002)
        observer.waited(name, 0, ORIGIN + number + 0.075, ORIGIN + number + 0.1)
        observer.done(name, 0, ORIGIN + number + 0.1, error=None)
    observer.close()
    return path


@pytest.fixture
def folder(tmp_path):
    for rank in range(3):
        record(rank_path(tmp_path / "lines", rank), rank, late_s=0.05 if rank == 2 else 0.0)
    return tmp_path / "lines"


def rows(output, title):
    """Cells of the table below the title, by the first of their row."""
    table = output[output.index(title) :].split("└")[0]
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in table.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_a_folder_is_merged_and_explained(folder):
    (folder / "other.json").write_text("not of a rank")
    for _ in range(2):  # again: the merged file beside them is none of the ranks'
        output = run(folder)
    assert rows(output, "Late ranks") == {"2": ["2", "50.00", "50.00", "layer[0] #0"]}
    assert rows(output, "Where the time") == {
        "0": ["100.00", "0.00", "0.00", "0.00", "100.00", "75.0 %"],
        "1": ["100.00", "0.00", "0.00", "0.00", "100.00", "75.0 %"],
        "2": ["0.00", "0.00", "4.00", "0.00", "96.00", "50.0 %"],
        "all": ["200.00", "0.00", "4.00", "0.00", "296.00"],
        "share": ["40.0 %", "0.0 %", "0.8 %", "0.0 %", "59.2 %"],
    }
    assert rows(output, "Slowest tensors") == {
        "b": ["50.00", "1", "4.0 MB"],
        "layer[0]": ["50.00", "1", "4.0 MB"],
    }
    assert f"timeline: {folder / 'timeline.json'}\n" in output
    assert "https://ui.perfetto.dev" in output
    assert "note:" not in output
    merged = json.loads((folder / "timeline.json").read_text())
    assert [header["rank"] for header in merged["metadata"]["ranks"]] == [0, 1, 2]


def test_files_by_name_and_every_figure_as_json(folder, tmp_path):
    out, figures = tmp_path / "new" / "all.json", tmp_path / "figures.json"
    output = run(folder / "rank2.json", folder / "rank0.json", "--out", out, "--json", figures, "--top", 1)
    assert list(rows(output, "Slowest tensors")) == ["b"]
    assert "1 more: --top, --json." in output
    assert "note: no timeline of rank 1" in output
    assert {event["pid"] for event in json.loads(out.read_text())["traceEvents"]} == {0, 2}
    document = json.loads(figures.read_text())
    assert [rank["rank"] for rank in document["ranks"]] == [0, 2]
    assert document["late"] == [
        {"rank": 2, "times_last": 2, "median_s": 0.05, "worst_s": 0.05, "worst_operation": "layer[0] #0"}
    ]
    assert [operation["late_rank"] for operation in document["operations"]] == [2, 2]
    assert not (folder / "timeline.json").exists()


def test_a_rank_alone_has_no_late_ranks(tmp_path):
    output = run(record(tmp_path / "run.json", 0))
    assert "Late ranks" not in output
    assert rows(output, "Where the time")["0"] == ["0.00", "0.00", "4.00", "0.00", "196.00", "75.0 %"]


def test_what_limits_the_figures_is_said(tmp_path):
    record(tmp_path / "rank0.json", 0, names=("a", "b", "c"))
    other = record(tmp_path / "rank1.json", 1, names=("a", "b" * 100, "c"), max_events=5)
    trace = json.loads(other.read_text())
    trace["metadata"]["clock"] = "of another host"
    other.write_text(json.dumps(trace))
    output = run(tmp_path)
    assert "note: the ranks have 2 clocks (hosts)" in output
    assert "note: rank 1 left out 1 later events (max_events of its timeline)" in output
    assert "note: operations not compared: 3; not every rank has them" in output
    assert list(rows(output, "Slowest tensors")) == ["a"]


def test_files_of_no_use_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    first, blocker = folder / "rank0.json", tmp_path / "file"
    blocker.write_text("")
    assert "cannot read the timeline" in complaint(tmp_path / "absent")
    assert f"no timelines in {tmp_path / 'empty'}: tr.init(timeline=FOLDER)" in complaint(tmp_path / "empty")
    assert "rank1.json is given twice" in complaint(folder, folder / ".." / "lines" / "rank1.json")
    copy = tmp_path / "copy.json"
    copy.write_bytes(first.read_bytes())
    assert "two timelines of rank 0" in complaint(first, copy)
    assert "is one of the ranks' files; name another" in complaint(folder, "--out", first)
    assert "cannot write --out" in complaint(folder, "--out", blocker / "all.json")
    run(folder)
    assert "but a merged one: give the ranks' own files" in complaint(*sorted(folder.iterdir()))


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["timeline", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"totalreduce: no timelines in {tmp_path}")


def test_help_has_examples():
    assert "totalreduce timeline totalreduce-timeline --json report.json" in run("--help")
