"""Servers and workers of a parameter server are killed: no push that was answered is lost, and none counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from totalreduce.bench.launching import Setting
from totalreduce_benchmarks.ps_faults import PsFaultsParameters, measure_ps_faults


@pytest.mark.parametrize(
    ("num_workers", "num_servers", "options"),
    [
        (3, 2, {"on_loss": "shrink", "kills": "server=1,worker=1"}),
        pytest.param(2, 2, {"on_loss": "replace", "kills": "server=2,worker=2,both=1"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"rule": "sequential", "kills": "server=2,worker=2,both=1"}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"rule": "bounded", "replicas": 3, "kills": "worker=3,both=3"}, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_no_push_and_apply_none_twice(
    warm_python: None, tmp_path: Path, num_workers: int, num_servers: int, options: dict[str, object]
) -> None:
    """With three ranks, two are worker and server at once; else servers have ranks of their own or all are both."""
    num_ranks = {2: 4, 3: 3, 4: 4}[num_workers]
    settings = {"servers": num_servers, "spares": 0, "step_ms": 2.0, "keys": 2000, "interval": 0.02, **options}
    parameters = PsFaultsParameters(**settings)
    figures, raw = measure_ps_faults(Setting(ranks=num_ranks), parameters, num_workers, tmp_path)
    by_kind = {figure.kind: figure for figure in figures}
    for kind, count in parameters.plan([], []).counts.items():
        assert by_kind[kind].injected == count
    assert by_kind["all"].wrong_values == 0
    assert raw["steps"] >= 25 * num_workers
