"""Reports of topics and subscriptions that workers send (topic_metrics.py), and their sum for `/metrics`."""

from __future__ import annotations

from danube_fast.admin.view import TopicTable
from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["WANTED_NS", "TopicReports", "add_rows"]

WANTED_NS = 120 * SECOND_NS
"""How long after a scrape the next one is expected; an older report is not shown."""


def add_rows(row: list[int], values: list[int]) -> list[int]:
    """Add two rows, value by value."""
    return [one + other for one, other in zip(row, values, strict=True)]


class TopicReports:
    """Keep the last report of each worker. Any thread may call `table` and `published`."""

    def __init__(self, mailbox: Mailbox, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[int, tuple[int, m.TopicMetrics]] = {}
        """By worker: when the report came, and the report, which is replaced, never changed."""
        mailbox.serve(m.TopicMetrics, self._take)

    def _take(self, request: Request[m.TopicMetrics]) -> None:
        self._reports[request.peer] = self._clock.monotonic_ns(), request.message

    def published(self) -> dict[str, list[int]]:
        """Add up messages and bytes by namespace; the empty name has all that have no row."""
        found: dict[str, list[int]] = {}
        for _, report in list(self._reports.values()):
            for name, values in report.namespaces:
                known = found.get(name)
                found[name] = values if known is None else add_rows(known, values)
        return found

    def table(self) -> TopicTable:
        """Add up the reports of all workers; a topic with partitions on several has one row."""
        table = TopicTable({}, {}, {})
        oldest_ns = self._clock.monotonic_ns() - WANTED_NS
        for came_ns, report in list(self._reports.values()):
            if came_ns < oldest_ns:
                continue
            topics = [*report.topics, ("", report.other_topics)]
            rest = ("", "", report.other_subscriptions, None)
            for topic, values in topics:
                known = table.topics.get(topic)
                table.topics[topic] = values if known is None else add_rows(known, values)
            for topic, name, values, oldest in (*report.subscriptions, rest):
                key = topic, name
                known = table.subscriptions.get(key)
                table.subscriptions[key] = values if known is None else add_rows(known, values)
                if oldest is not None:
                    came = [time for time in (oldest, table.oldest.get(key, 0.0)) if time]
                    table.oldest[key] = min(came, default=0.0)
        return table
