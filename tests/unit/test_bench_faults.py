"""The figures of ``totalreduce bench faults`` from the logs of its workers."""

from pathlib import Path

import pytest

from totalreduce.bench.faults import FaultsParameters, summarise
from totalreduce.bench.faults_records import SAMPLES, Final
from totalreduce.bench.faults_torchrun import TorchrunFaults
from totalreduce.foundation.errors import ConfigurationError


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


def figure_of(lines: list[dict], **options):
    faults = TorchrunFaults(Path(), num_faults=1, num_ranks=2, interval_s=1.0, seed=0)
    faults.times.append(100.25)
    finals = [Final(8, "d7", "b", 2, 0.1)] * 2
    return summarise(FaultsParameters(), "replace", lines, finals, faults, ends_wrong=options.get("ends_wrong", False))[
        0
    ]


def test_a_run_with_one_fault() -> None:
    figure = figure_of(lines_of())
    assert (figure.system, figure.injected, figure.survived, figure.wrong) == ("replace", 1, 1, 0)
    assert (figure.lost_versions, figure.lost_samples, figure.doubled_samples) == (0, 0, 0)
    assert figure.detection_max_s == pytest.approx(0.02)
    assert figure.recovery_p50_s == pytest.approx(0.9)
    assert figure.progress_p50_s == pytest.approx(1.05)  # the block that was lost took effect at 101.3
    assert (figure.versions, figure.seconds) == (8, pytest.approx(1.7))
    assert figure.goodput == pytest.approx(8 * 0.1 / 1.7)
    assert figure.every_s == pytest.approx(1.7)


def test_what_is_wrong_is_counted() -> None:
    lines = lines_of()
    lines = [{**line, "digest": "other"} if line.get("done") == 5 and line["seat"] == 1 else line for line in lines]
    figure = figure_of(lines)
    assert (figure.wrong, figure.survived) == (1, 0)
    assert figure_of(lines_of(), ends_wrong=True).wrong == 1
    assert figure_of([line for line in lines_of() if line.get("done") != 2]).lost_versions == 1
    lost = [line for line in lines_of() if not (line.get("about") == 1 and line["seat"] == 0)]
    assert figure_of(lost).lost_samples == SAMPLES // 8
    doubled = [
        {**line, "samples": [0] * 125} if line.get("about") == 2 and line["seat"] == 0 else line for line in lines_of()
    ]
    assert (figure_of(doubled).lost_samples, figure_of(doubled).doubled_samples) == (SAMPLES // 8, SAMPLES // 8)


def test_wrong_options_are_refused() -> None:
    assert FaultsParameters(interval="0.5,2").intervals() == [0.5, 2.0]
    for options, text in (
        ({"interval": "soon"}, "not soon"),
        ({"interval": "1,0"}, "positive"),
        ({"torchrun": True, "kinds": "kill,stop"}, "--kinds kill"),
        ({"kinds": "burn"}, "burn"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            FaultsParameters(**options)
