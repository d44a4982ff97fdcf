"""The figures of a job in the text format of Prometheus, written by its client library (``prometheus-client``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.observe.view import JobView, RankRow

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["exposition"]

_RANK_LABELS = ("seat", "host")
#: Of each rank: the name of a gauge, what it is, and its value.
_GAUGES: tuple[tuple[str, str, Callable[[RankRow], float]], ...] = (
    ("rank_up", "1 if the rank runs and writes figures, else 0", lambda row: float(row.state == "running")),
    ("rank_late", "1 if other ranks wait for this rank, else 0", lambda row: float(row.is_late)),
    ("step_seconds", "Mean time of a step", lambda row: row.step_s),
    ("compute_seconds", "Mean time of a step in which the training thread was not blocked", lambda row: row.compute_s),
    ("exposed_seconds", "Mean time of a step in which the training thread waited", lambda row: row.exposed_s),
    ("hidden_ratio", "Share of the communication that computation hides", lambda row: row.hidden_share),
    ("sent_bytes_per_second", "Bytes sent per second", lambda row: row.sent_per_s),
    ("received_bytes_per_second", "Bytes received per second", lambda row: row.received_per_s),
)


def exposition(view: JobView) -> tuple[bytes, str]:
    """Return the metrics of a job, and their content type. Raises ``ConfigurationError``."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    except ImportError:
        raise ConfigurationError("metrics need prometheus-client: pip install 'totalreduce[live]'") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """Yields the metrics of one view."""

    def __init__(self, view: JobView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        view = self._view
        for name, help_text, value in (
            ("world_size", "Ranks of the present group", view.world_size),
            ("membership", "Number of the membership", view.epoch),
        ):
            yield GaugeMetricFamily(f"totalreduce_{name}", help_text, value=value)
        steps = CounterMetricFamily("totalreduce_steps", "Steps that have ended", labels=_RANK_LABELS)
        for row in view.ranks:
            steps.add_metric(_labels(row), row.step)
        yield steps
        for name, help_text, of in _GAUGES:
            gauge = GaugeMetricFamily(f"totalreduce_{name}", help_text, labels=_RANK_LABELS)
            for row in view.ranks:
                gauge.add_metric(_labels(row), of(row))
            yield gauge
        links = CounterMetricFamily(
            "totalreduce_link_bytes", "Bytes of messages on the busiest links", labels=("sender", "receiver")
        )
        for link in view.links:
            links.add_metric((str(link.sender), str(link.receiver)), link.total)
        yield links
        faults = CounterMetricFamily("totalreduce_faults", "Faults of the job, by kind", labels=("kind",))
        for kind, count in view.faults.items():
            faults.add_metric((kind,), count)
        yield faults
        training = GaugeMetricFamily(
            "totalreduce_training", "Figures of sparse methods and strategies", labels=("optimizer", "figure")
        )
        for source, figures in view.training.items():
            for figure, number in figures.items():
                if not isinstance(number, str):
                    training.add_metric((source, figure), number)
        yield training


def _labels(row: RankRow) -> tuple[str, str]:
    return str(row.seat), row.host
