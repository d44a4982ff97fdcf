"""``totalreduce bench versions`` once, tiny: both versions are launched, and a version that fails is named."""

import json
from pathlib import Path

import pytest
from commands import invoke

import totalreduce

SOURCE = Path(totalreduce.__path__[0]).parent


def run(*arguments):
    return invoke("bench", "versions", *arguments)


@pytest.mark.slow
def test_two_versions_are_measured_in_turns(tmp_path):
    out = tmp_path / "out.json"
    found = run(
        *("--old", SOURCE, "--new", SOURCE, "--what", "allreduce", "-n", 2, "--transports", "tcp"),
        *("--sizes", "4KiB,300KiB", "--seconds", 0.02, "--rounds", 1, "--json", out),
    )
    assert found.exit_code == 0, found.output
    document = json.loads(out.read_text())
    assert [figure["what"] for figure in document["figures"]] == [
        "allreduce of 4 KiB",
        "allreduce of 300 KiB",
    ]
    for figure in document["figures"]:
        assert figure["old_s"]["median"] / figure["new_s"]["median"] == figure["speed"]["median"]
        assert 0 < figure["old_cpu_s"]["median"] < 1
        assert figure["old_messages"] >= 1
    assert [row["transport"] for row in document["raw"]] == ["tcp"]
    for launches in document["raw"][0]["launches"].values():
        assert [[Path(rank["package"]).parents[1] for rank in ranks] for ranks in launches] == [[SOURCE] * 2]
    assert "allreduce of 300 KiB" in found.stdout


@pytest.mark.slow
def test_a_version_that_fails_is_named(tmp_path):
    package = tmp_path / "totalreduce"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this version is broken')")
    versions = ("--old", tmp_path, "--new", SOURCE)  # what fails is launched first
    found = run(
        *versions,
        "--what",
        "allreduce",
        "-n",
        1,
        "--transports",
        "tcp",
        "--sizes",
        "4KiB",
        "--seconds",
        0.02,
        "--rounds",
        1,
    )
    assert found.exit_code == 1
    assert "the old version: rank 0 failed: exit code 1" in found.output
    assert "this version is broken" in found.output
