"""Readers: ranges, stops, Arrow."""

from __future__ import annotations

from typing import Any

import pytest

import danube_fast

TOPIC = "/default/t"


def fill(client: danube_fast.Client, count: int, **options: Any) -> list[bytes]:
    payloads = [b"%06d" % i for i in range(count)]
    with client.producer(TOPIC, batch_bytes_max=4096, **options) as producer:
        producer.send_many(payloads, keys=[b"%d" % (i % 5) for i in range(count)])  # type: ignore[arg-type]
    return payloads


@pytest.mark.parametrize(
    ("start", "stop", "first", "end"),
    [("earliest", "latest", 0, 1000), (10, 20, 10, 20), (990, "latest", 990, 1000), (5, 5, 0, 0)],
)
def test_ranges(
    broker: Any, client: danube_fast.Client, start: Any, stop: Any, first: int, end: int
) -> None:
    payloads = fill(client, 1000)
    reader = client.reader(TOPIC, start=start, stop=stop)
    assert [m.payload for m in reader] == payloads[first:end]
    assert reader.is_finished


def test_latest_means_now(broker: Any, client: danube_fast.Client) -> None:
    payloads = fill(client, 10)
    reader = client.reader(TOPIC)
    client.publish(TOPIC, b"later")
    assert [m.payload for m in reader] == payloads


def test_empty_topic_ends_at_once(broker: Any, client: danube_fast.Client) -> None:
    client.producer(TOPIC)
    assert list(client.reader(TOPIC)) == []
    assert client.reader(TOPIC).to_arrow().num_rows == 0


def test_reading_on(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 3)
    with client.reader(TOPIC, start=2, stop=None) as reader:
        assert reader.receive_batch(timeout=60).payloads() == [b"000002"]
        client.publish(TOPIC, b"new")
        assert reader.receive_batch(timeout=60).payloads() == [b"new"]
        assert len(reader.receive_batch(timeout=0.01)) == 0
        with pytest.raises(danube_fast.InvalidArgument, match="never ends"):
            reader.to_arrow()


def test_gap_at_the_end_does_not_hang(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 5)
    with broker.lock:
        broker.topics[TOPIC].partitions[0].next_offset = 100
    reader = client.reader(TOPIC)
    messages = [m.offset for m in reader.receive_batch(timeout=60)]
    broker.event("gap", {"end": 100, "reason": "unclean end"})
    assert [*messages, *(m.offset for m in reader)] == [0, 1, 2, 3, 4]


def test_partitions(broker: Any, client: danube_fast.Client) -> None:
    payloads = fill(client, 500, partitions=3)
    assert sorted(m.payload for m in client.reader(TOPIC) if m.payload) == payloads


def test_arrow(broker: Any, client: danube_fast.Client) -> None:
    pytest.importorskip("pyarrow")
    payloads = fill(client, 1000)
    table = client.reader(TOPIC, start=100).to_arrow()
    assert table.num_rows == 900
    assert table["payload"].to_pylist() == payloads[100:]
    assert table["offset"].to_pylist() == list(range(100, 1000))
    assert set(table["topic"].to_pylist()) == {TOPIC}
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    batch = consumer.receive_batch(max_messages=7, timeout=60)
    assert batch.to_arrow()["payload"].to_pylist() == payloads[:7]


def test_a_reader_acks_nothing(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 5)
    list(client.reader(TOPIC))
    assert broker.topics[TOPIC].partitions[0].subs == {}
    assert broker.commands["Ack"] == 0
    with pytest.raises(danube_fast.InvalidArgument, match="stop"):
        client.reader(TOPIC, stop=-1)
