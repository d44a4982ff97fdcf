"""``bench versions``: which version a path means, and from the samples of launches to figures."""

import sys
from pathlib import Path

import pytest

import totalreduce
from totalreduce.foundation.errors import ConfigurationError
from totalreduce_benchmarks.versions import Case, Job, RankSamples, find_version, summarise

SOURCE = Path(totalreduce.__path__[0]).parent


def test_a_version_is_a_source_tree_or_an_interpreter(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "src").symlink_to(SOURCE)
    for path, source in ((SOURCE, SOURCE), (tmp_path / "tree", tmp_path / "tree" / "src")):
        version = find_version("old", path)
        assert (version.python, version.source) == (sys.executable, str(source))
        assert version.environment()["PYTHONPATH"] == str(source)
    installed = find_version("new", Path(sys.executable))
    assert (installed.python, installed.source) == (sys.executable, None)
    assert "PYTHONPATH" not in installed.environment()


def test_a_path_without_the_package_is_refused(tmp_path):
    (tmp_path / "file").write_text("no program")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nonesuch"):
        with pytest.raises(ConfigurationError, match=r"--new .* is neither a folder with the package"):
            find_version("new", path)


def launch(*ranks):
    """One launch with one case; of each rank the seconds by block, and processor time, messages and operations."""
    return [RankSamples("", "", [Case(*rank, size=4096)]) for rank in ranks]


def test_the_slowest_rank_of_a_block_counts_and_ratios_are_taken_launch_by_launch():
    old = [
        launch(([1.0, 5.0, 2.0], 3.0, 10, 5), ([3.0, 1.0, 4.0], 1.0, 10, 5)),  # the slowest: 3, 5, 4; CPU: 4 s for 5
        launch(([2.0, 2.0, 2.0], 2.0, 10, 5), ([1.0, 1.0, 1.0], 2.0, 10, 5)),
    ]
    new = [
        launch(([2.0, 2.0, 2.0], 1.0, 20, 5), ([1.0, 1.0, 1.0], 1.0, 20, 5)),  # 2 s for 5 operations
        launch(([8.0, 8.0, 8.0], 3.0, 10, 5), ([1.0, 1.0, 1.0], 3.0, 10, 5)),
    ]
    (figure,) = summarise(Job("allreduce", 2, "tcp"), {"old": old, "new": new})
    assert (figure.what, figure.ranks, figure.transport) == ("allreduce of 4 KiB", 2, "tcp")
    assert (figure.old_s.low, figure.old_s.high) == (2.0, 4.0)
    assert (figure.new_s.low, figure.new_s.high) == (2.0, 8.0)
    assert (figure.speed.low, figure.speed.high) == (0.25, 2.0)  # 4 / 2, 2 / 8
    assert (figure.old_cpu_s.low, figure.new_cpu_s.low, figure.new_cpu_s.high) == (0.8, 0.4, 1.2)
    assert (figure.cpu.low, figure.cpu.high) == pytest.approx((0.5, 1.5))
    assert (figure.old_messages, figure.new_messages) == (2.0, 3.0)


def test_a_rank_alone_sends_no_message():
    alone = [launch(([1.0], 1.0, 0, 1))]
    (figure,) = summarise(Job("step", 1, "auto"), {"old": alone, "new": alone})
    assert (figure.what, figure.old_cpu_s.median, figure.old_messages) == ("step of an MLP", 1.0, 0.0)
