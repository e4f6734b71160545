"""The counters of all processes in the text format of Prometheus.

Every `Counter` becomes `danube_<name>` (totals end in `_total`) with the label `process`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from danube_fast.admin.view import BrokerView
from danube_fast.ring.counters import Counter, CounterKind

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Collector(Collector):
    def __init__(self, view: BrokerView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All families, read now."""
        view = self._view
        for counter in Counter:
            family = CounterMetricFamily if counter.kind is CounterKind.TOTAL else GaugeMetricFamily
            name = f"danube_{counter.name.lower()}"
            metric = family(name, f"{counter.unit} {counter.label}", labels=["process"])
            for process in range(view.process_count):
                value = float(view.counters.get(process, counter))
                metric.add_metric([view.name(process)], value)
            yield metric
        yield from self._processes()

    def _processes(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("danube_process_up", "1 if it is ready", labels=["process"])
        age = GaugeMetricFamily(
            "danube_process_heartbeat_age_seconds", "since it showed life", labels=["process"]
        )
        restarts = CounterMetricFamily(
            "danube_process_restarts", "times it was started again", labels=["process"]
        )
        for entry in self._view.processes():
            labels = [str(entry["process"])]
            up.add_metric(labels, float(entry["state"] == "ready"))
            age.add_metric(labels, entry["heartbeat_age_ms"] / 1000)
            restarts.add_metric(labels, float(entry["restarts"]))
        yield from (up, age, restarts)


def render(view: BrokerView) -> bytes:
    """The page that a Prometheus server scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry)
