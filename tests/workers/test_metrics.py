"""`/metrics`: topics and subscriptions with bounded labels, histograms, what is running, what is left."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from danube_fast.broker import messages as m
from danube_fast.clock import SystemClock
from danube_fast.ring.counters import (
    HISTOGRAM_BUCKETS,
    HISTOGRAM_WORDS,
    CounterBlock,
    Histogram,
    observe,
)
from danube_fast.testing.broker import Broker
from danube_fast.version import VERSION
from danube_fast.workers.reports import topic_metrics
from danube_fast.workers.reports.namespace_metrics import NamespaceTotals
from danube_fast.workers.reports.topic_metrics import SLICE, TopicMetrics, _Share
from danube_fast.workers.reports.topic_reports import TopicReports
from tests.workers.broker import wait_until

NAMED_MAX = 4
TOPICS = 7
MESSAGES = 10
WAIT_SECONDS = 60

Samples = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(workers=2, metrics_topics_max=NAMED_MAX) as started:
        yield started


def scrape(broker: Broker) -> Samples:
    """Samples by name and values of labels, in the order of the labels' names."""
    with urllib.request.urlopen(f"{broker.admin_url}/metrics", timeout=WAIT_SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str) -> float:
    return sum(value for (each, _), value in samples.items() if each == name)


def test_topics_and_subscriptions_have_labels_up_to_a_bound(broker: Broker) -> None:
    """What has no label of its own is in the sums; the furthest behind have their age."""
    with broker.client() as client:
        for number in range(TOPICS):
            topic = f"/default/t{number}"
            with (
                client.producer(topic, durability="fsync") as producer,
                client.consumer(topic, subscription="s", initial_position="earliest") as consumer,
            ):
                for index in range(MESSAGES):
                    producer.publish(b"%d" % index)
                got = consumer.receive_batch(MESSAGES, timeout=WAIT_SECONDS)
                assert len(got) >= 1
                if number:  # the first topic stays behind
                    consumer.ack(got)
                    consumer.flush_acks()

    def all_counted() -> Samples | None:
        samples = scrape(broker)
        count = total(samples, "danube_fast_topic_messages_in_total")
        return samples if count == TOPICS * MESSAGES else None

    samples = wait_until("a report of every worker", all_counted, WAIT_SECONDS)
    for name in ("danube_fast_topic_bytes_in_total", "danube_fast_subscription_lag_messages"):
        keys = [labels for each, labels in samples if each == name]
        assert len([labels for labels in keys if labels[0] != "other"]) <= NAMED_MAX, keys
        assert len([labels for labels in keys if labels[0] == "other"]) == 1, keys
    first = "s", "/default/t0"
    assert samples["danube_fast_subscription_lag_messages", first] == MESSAGES
    assert samples["danube_fast_subscription_acked_messages_total", first] == 0
    assert samples["danube_fast_subscription_lag_seconds", first] > 0
    assert samples["danube_fast_subscription_oldest_unacked_timestamp_seconds", first] > 1e9
    assert samples["danube_fast_topic_messages_in_total", first[1:]] == MESSAGES


def test_namespaces_have_rows_and_the_limits_of_their_quota(broker: Broker) -> None:
    with broker.client() as client:
        client.admin.create_namespace("tenant")
        client.admin.set_namespace_quota(
            "tenant", {"namespace_storage_bytes_max": 1 << 30, "namespace_handles_max": 7}
        )
        with client.producer("/tenant/a") as producer:
            producer.send_many([b"x" * 100] * MESSAGES)
            producer.flush()

            def counted() -> Samples | None:
                samples = scrape(broker)
                name = "danube_fast_namespace_messages_in_total"
                is_there = samples.get((name, ("tenant",))) == MESSAGES
                used = samples.get(("danube_fast_namespace_storage_bytes", ("tenant",)), 0)
                return samples if is_there and used > 100 * MESSAGES else None

            samples = wait_until("the count of the namespace", counted, WAIT_SECONDS)
        for name, value in {
            ("danube_fast_namespace_topics", ("tenant",)): 1,
            ("danube_fast_namespace_handles", ("tenant",)): 1,
            ("danube_fast_namespace_quota", ("namespace_handles_max", "tenant")): 7,
        }.items():
            assert samples[name] == value, name
        assert ("danube_fast_namespace_handles", ("default",)) not in samples


def test_namespaces_are_named_as_they_come_and_no_count_falls() -> None:
    totals = NamespaceTotals(1)

    def look(*rows: tuple[int, str, int, int]) -> dict[str, list[int]]:
        for number, namespace, count, moving_epoch in rows:
            partition: Any = SimpleNamespace(
                partition_id=number, topic=f"/{namespace}/t", message_count=count,
                byte_count=10 * count, moving_epoch=moving_epoch,
            )  # fmt: skip
            totals.add(partition)
        return dict(totals.finish())

    assert look((1, "a", 5, 0), (2, "b", 7, 0)) == {"a": [5, 50], "": [7, 70]}
    assert look((2, "b", 8, 0)) == {"a": [5, 50], "": [8, 80]}, "a topic was deleted"
    assert look((3, "a", 90, 2)) == {"a": [5, 50], "": [8, 80]}, "it came with what it has"
    assert look((3, "a", 91, 2)) == {"a": [6, 60], "": [8, 80]}


def test_times_of_acks_and_syncs(broker: Broker) -> None:
    with broker.client() as client, client.producer("/default/h", durability="fsync") as producer:
        before = scrape(broker)
        for index in range(MESSAGES):
            producer.publish(b"%d" % index)  # each waits for its ack

        def counted() -> Samples | None:
            samples = scrape(broker)
            name = "danube_fast_ack_seconds_count"
            return samples if total(samples, name) >= total(before, name) + MESSAGES else None

        samples = wait_until("every ack in the histogram", counted, WAIT_SECONDS)
    assert total(samples, "danube_fast_sync_seconds_count") > 0
    for name in ("ack", "sync"):
        for worker in ("worker-0", "worker-1"):
            rows = [
                value
                for (each, labels), value in samples.items()
                if each == f"danube_fast_{name}_seconds_bucket" and worker in labels
            ]
            assert len(rows) == HISTOGRAM_BUCKETS
            assert rows == sorted(rows)
    assert total(samples, "danube_fast_ack_seconds_sum") > 0


def test_what_is_running_and_what_is_left(broker: Broker) -> None:
    samples = scrape(broker)
    (labels,) = [labels for name, labels in samples if name == "danube_fast_build_info"]
    assert VERSION in labels
    disk, free = (samples[f"danube_fast_disk_{name}_bytes", ()] for name in ("size", "free"))
    quota, left = (samples[f"danube_fast_log_quota_{name}bytes", ()] for name in ("", "left_"))
    assert 0 < free < disk
    assert 0 < left < quota
    assert samples["danube_fast_scrapes_total", ("coordinator",)] > 0
    assert samples["danube_fast_auth_required", ()] == 0, "and every local user is let in"
    assert not [name for name, _ in samples if "tls" in name]


def test_a_bucket_is_the_number_of_bits_of_the_microseconds() -> None:
    words = [0] * HISTOGRAM_WORDS
    for took_ns, bucket in ((0, 0), (999, 0), (1000, 1), (1999, 1), (2000, 2), (10**14, -2)):
        before = list(words)
        observe(words, took_ns, 3)
        assert words[bucket] == before[bucket] + 3
        assert words[HISTOGRAM_BUCKETS] == before[HISTOGRAM_BUCKETS] + 3 * took_ns
    block = CounterBlock.create(2, 1)
    for place, value in enumerate(words):
        block.set(Histogram.SYNC + place, value)
    assert block.histogram(1, Histogram.SYNC) == words
    assert not any(block.histogram(1, Histogram.ACK))
    block.close()


def test_what_has_no_name_goes_on_counting_whichever_rows_it_has() -> None:
    share = _Share(2, 2, 1, 1)
    rows = {"a": [10, 0], "b": [20, 0], "c": [30, 7]}
    for _ in share.divide(rows):
        pass
    assert set(share.named) == {"c", "b"} and share.others == [10, 0]
    rows = {"a": [110, 0], "b": [21, 9], "c": [31, 7]}
    for _ in share.divide(rows):
        pass
    assert set(share.named) == {"a", "b"} and share.others == [11, 7], "1 of c's 31 is new"
    rows = {"a": [110, 3], "b": [21, 9], "d": [5, 0]}
    for _ in share.divide(rows):
        pass
    assert set(share.named) == {"d", "b"} and share.others == [11, 3]


def _state(topics: int, most: int) -> Any:
    """A worker of so many topics with one subscription each; `reports` is what it tells."""
    ledger = SimpleNamespace(settled_ahead=0, unacked=0, waiting=0)
    partitions: dict[int, Any] = {}
    for number in range(topics):
        sub = SimpleNamespace(
            name="s", ledger=ledger, cursor=number, tracks=True, redelivered_count=0,
            dropped_count=0, lost_count=0, dead_letter_count=0,
        )  # fmt: skip
        partitions[number] = SimpleNamespace(
            partition_id=number, topic=f"/default/t{number}", message_count=1, byte_count=100,
            moving_epoch=0,
            visible=topics, subscriptions={"s": sub},
        )  # fmt: skip
    reports: list[dict[str, Any]] = []
    scrapes = itertools.count(1)
    return SimpleNamespace(
        settings=SimpleNamespace(metrics_topics_max=most),
        boot=SimpleNamespace(
            config=SimpleNamespace(worker_count=1),
            counters=SimpleNamespace(get=lambda *_: next(scrapes)),
            mailbox=SimpleNamespace(notify=lambda _peer, report: reports.append(report)),
        ),
        catalog=SimpleNamespace(by_id=partitions),
        clock=SystemClock(), now_wall_ns=10**18, reports=reports, partition=partitions.get,
    )  # fmt: skip


def test_a_look_at_many_topics_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_metrics, "lag_seconds", lambda *_: 1.0)
    topics, most = 20 * SLICE, 10
    state = _state(topics, most)
    metrics = TopicMetrics(state)
    turns = 0
    while not state.reports:
        metrics.do_work(turns)
        turns += 1
        assert turns < 1000
    assert turns > 2 * topics / SLICE, "partitions and subscriptions, then rows of both"
    (report,) = state.reports
    assert len(report.topics) == len(report.subscriptions) == most
    assert report.other_topics[0] == topics - most
    handlers: dict[Any, Any] = {}
    mailbox: Any = SimpleNamespace(serve=handlers.__setitem__)
    reports = TopicReports(mailbox, SystemClock())
    for peer in (1, 2):
        handlers[m.TopicMetrics](SimpleNamespace(peer=peer, message=report))
    table = reports.table()
    assert len(table.topics) == most + 1
    assert sum(row[0] for row in table.topics.values()) == 2 * topics


def test_without_scrapes_no_worker_looks() -> None:
    state = _state(3, 10)
    state.boot.counters.get = lambda *_: 0
    metrics = TopicMetrics(state)
    for now_ns in range(0, 100_000_000_000, 1_000_000_000):
        metrics.do_work(now_ns)
    assert not state.reports


def test_reply_topics_are_added_up_without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_metrics, "lag_seconds", lambda *_: 1.0)
    state = _state(4, 10)
    for number in (1, 2):
        state.catalog.by_id[number].topic = f"/system/reply-{number}"
    metrics = TopicMetrics(state)
    for turn in range(100):
        metrics.do_work(turn)
    names = [topic for topic, _ in state.reports[0].topics]
    assert sorted(names) == ["/default/t0", "/default/t3", "/system/reply-*"]
    assert {topic for topic, *_ in state.reports[0].subscriptions} == {*names}
