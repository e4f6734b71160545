"""The counters of a broker in the text format of Prometheus.

Every `Counter` becomes `danube_fast_<name>` and every `Histogram` `danube_fast_<name>_seconds`, with the
label `process`; topics, subscriptions and namespaces have labels of their own, as many as `metrics_topics_max` says,
and the rest stands under `OTHER` (tuning.md).
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from danube_fast.admin.view import BrokerView, NamespaceRow, SubscriptionRow, TopicRow, TopicTable
from danube_fast.clock import SECOND_NS
from danube_fast.ring.counters import HISTOGRAM_BUCKETS, Counter, CounterKind, Histogram
from danube_fast.version import VERSION

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "danube_fast"
OTHER = "other"
"""Label of all topics, or subscriptions, without one of their own; no topic has this name."""
MICROSECONDS_PER_SECOND = 1_000_000

_HISTOGRAM_HELP = {
    Histogram.ACK: "from the first frame of a group to the ack of each publish in it",
    Histogram.SYNC: "of fdatasync on log segments",
}
_TOPIC_HELP = {
    TopicRow.MESSAGES_IN: ("messages_in", "messages accepted since the broker knows it"),
    TopicRow.BYTES_IN: ("bytes_in", "bytes of frames accepted"),
    TopicRow.LAG: ("lag_messages", "not acked by the subscription furthest behind"),
}
_NAMESPACE_TOTALS = {
    "messages_in": "messages accepted for all topics of a namespace",
    "bytes_in": "bytes of frames accepted",
}
_NAMESPACE_LEVELS = {
    "topics": ("topics, reply topics aside", ""),
    "storage_bytes": ("bytes kept, where a quota bounds them", "namespace_storage_bytes_max"),
    "handles": ("producers and consumers open, likewise", "namespace_handles_max"),
}
_SUBSCRIPTION_HELP = {
    SubscriptionRow.ACKED: ("acked_messages", "acked or given up, from the topic's first on"),
    SubscriptionRow.REDELIVERED: ("redelivered_messages", "to be handed out again"),
    SubscriptionRow.LOST: ("lost_messages", "dropped, expired or evicted before they were acked"),
    SubscriptionRow.DEAD_LETTERS: ("dead_letter_messages", "given to the dead-letter topic"),
    SubscriptionRow.LAG: ("lag_messages", "published and not acked"),
    SubscriptionRow.UNACKED: ("unacked_messages", "handed out and not acked"),
    SubscriptionRow.WAITING: ("waiting_messages", "that wait to be handed out again"),
}


class _Collector(Collector):
    def __init__(self, view: BrokerView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All families, read now."""
        yield InfoMetricFamily(
            f"{PREFIX}_build",
            "what is running",
            value={"version": VERSION, "python": platform.python_version()},
        )
        view = self._view
        for counter in Counter:
            metric = _family(
                counter.kind is CounterKind.TOTAL,
                counter.name.lower(),
                f"{counter.unit} {counter.label}",
                ["process"],
            )
            for process in range(view.process_count):
                value = float(view.counters.get(process, counter))
                metric.add_metric([view.name(process)], value)
            yield metric
        yield from self._processes()
        yield from self._histograms()
        yield from self._room()
        yield from self._exposure()
        table = view.topics()
        yield from _topics(table)
        yield from _subscriptions(table, view.wall_seconds)
        yield from _namespaces(view.namespaces())

    def _processes(self) -> Iterable[Metric]:
        up = _family(False, "process_up", "1 if it is ready", ["process"])
        age = _family(False, "process_heartbeat_age_seconds", "since it showed life", ["process"])
        restarts = _family(True, "process_restarts", "times it was started again", ["process"])
        for entry in self._view.processes():
            labels = [entry.process]
            up.add_metric(labels, float(entry.state == "ready"))
            age.add_metric(labels, entry.heartbeat_age_ms / 1000)
            restarts.add_metric(labels, float(entry.restarts))
        yield from (up, age, restarts)

    def _histograms(self) -> Iterable[Metric]:
        view = self._view
        for histogram, text in _HISTOGRAM_HELP.items():
            name = f"{PREFIX}_{histogram.name.lower()}_seconds"
            family = HistogramMetricFamily(name, f"seconds {text}", labels=["process"])
            for process in view.workers:  # the others have no log
                words = view.counters.histogram(process, histogram)
                buckets, count = [], 0
                for place in range(HISTOGRAM_BUCKETS):
                    count += words[place]
                    limit = (1 << place) / MICROSECONDS_PER_SECOND
                    is_last = place == HISTOGRAM_BUCKETS - 1
                    buckets.append(("+Inf" if is_last else str(limit), count))
                total = words[HISTOGRAM_BUCKETS] / SECOND_NS
                family.add_metric([view.name(process)], buckets, total)
            yield family

    def _room(self) -> Iterable[Metric]:
        try:
            room = self._view.room() if self._view.room is not None else None
        except OSError:
            room = None
        if room is None:
            return
        for name, text, value in (
            ("disk_size_bytes", "of the disk that holds the data", room.disk),
            ("disk_free_bytes", "of it that are free", room.disk_free),
            ("log_quota_bytes", "that all logs together may take", room.quota),
            ("log_quota_left_bytes", "of them that are left", room.quota_left),
        ):
            family = _family(False, name, f"bytes {text}", [])
            family.add_metric([], float(value))
            yield family

    def _exposure(self) -> Iterable[Metric]:
        if self._view.exposure is None:
            return
        found = self._view.exposure()
        rows: list[tuple[bool, str, str, float]]
        rows = [(False, "auth_required", "1 if clients prove who they are", found.is_auth_required)]
        if found.expires_ns:
            left = found.expires_ns / SECOND_NS - self._view.wall_seconds
            rows += [
                (False, "tls_certificate_expiry_seconds", "until the certificate ends", left),
                (False, "tls_certificate_stale", "1 if its new files are unusable", found.is_stale),
                (True, "tls_certificate_reloads", "times new files were taken", found.reloads),
            ]
        if self._view.issuers_fault is not None:
            is_stale = bool(self._view.issuers_fault())
            rows.append((False, "issuers_stale", "1 if their newest file is unusable", is_stale))
        if found.crl_expires_ns:
            left = found.crl_expires_ns / SECOND_NS - self._view.wall_seconds
            rows.append((False, "tls_client_crl_expiry_seconds", "until the first CRL ends", left))
        for is_total, name, text, value in rows:
            family = _family(is_total, name, text, [])
            family.add_metric([], float(value))
            yield family


def _family(is_total: bool, name: str, text: str, labels: list[str]) -> Any:
    kind = CounterMetricFamily if is_total else GaugeMetricFamily
    return kind(f"{PREFIX}_{name}", text, labels=labels)


def _topics(table: TopicTable) -> Iterable[Metric]:
    for place, (name, text) in _TOPIC_HELP.items():
        family = _family(place < TopicRow.TOTALS, f"topic_{name}", text, ["topic"])
        for topic, values in table.topics.items():
            family.add_metric([topic or OTHER], float(values[place]))
        yield family


def _subscriptions(table: TopicTable, now: float) -> Iterable[Metric]:
    labels = ["topic", "subscription"]
    for place, (name, text) in _SUBSCRIPTION_HELP.items():
        is_total = place < SubscriptionRow.TOTALS
        family = _family(is_total, f"subscription_{name}", f"messages {text}", labels)
        for (topic, subscription), values in table.subscriptions.items():
            family.add_metric([topic or OTHER, subscription or OTHER], float(values[place]))
        yield family
    lag = _family(False, "subscription_lag_seconds", "age of the oldest message not acked", labels)
    oldest = _family(
        False, "subscription_oldest_unacked_timestamp_seconds", "when that came; 0: none", labels
    )
    for key, came in table.oldest.items():
        lag.add_metric(key, max(0.0, now - came) if came else 0.0)
        oldest.add_metric(key, came)
    yield from (lag, oldest)


def _namespaces(rows: Mapping[str, NamespaceRow]) -> Iterable[Metric]:
    for name, text in _NAMESPACE_TOTALS.items():
        family = _family(True, f"namespace_{name}", text, ["namespace"])
        for namespace, row in rows.items():
            family.add_metric([namespace or OTHER], float(getattr(row, name)))
        yield family
    for name, (text, bounded_by) in _NAMESPACE_LEVELS.items():
        family = _family(False, f"namespace_{name}", text, ["namespace"])
        for namespace, row in rows.items():
            if namespace and (not bounded_by or bounded_by in row.quota):
                family.add_metric([namespace], float(getattr(row, name)))
        yield family
    family = _family(False, "namespace_quota", "limits by name", ["namespace", "name"])
    for namespace, row in rows.items():
        for name, limit in row.quota.items():
            family.add_metric([namespace, name], float(limit))
    yield family


def render(view: BrokerView) -> bytes:
    """The page that a Prometheus server scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry)
