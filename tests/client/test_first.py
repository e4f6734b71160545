"""The first journey: connect, publish, send, flush, receive, ack."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import DeadlineExceeded, Unavailable
from danube_fast.net import protocol

TOPIC = "/default/t"


def test_publish_and_receive(broker: Any, client: danube_fast.Client) -> None:
    with client.producer(TOPIC) as producer:
        first = producer.publish(b"one", key="k", attributes={"a": "1"}, event_time=7)
        assert str(first) == f"{TOPIC}@0"
        producer.send(b"two")
        producer.send_many([b"three", None, b""])
        assert producer.flush(timeout=60) == danube_fast.MessageId(TOPIC, 4)
    with client.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer:
        messages = [consumer.receive(timeout=60) for _ in range(5)]
        assert [m.payload for m in messages if m] == [b"one", b"two", b"three", None, b""]
        assert [m.offset for m in messages if m] == [0, 1, 2, 3, 4]
        one = messages[0]
        assert one is not None
        assert (one.key, one.attributes, one.event_time) == (b"k", {"a": "1"}, 7)
        assert one.topic == TOPIC and one.sequence == 0 and one.redelivery_count == 0
        assert consumer.receive(timeout=0.02) is None
        consumer.ack(messages)
        consumer.flush_acks(timeout=60)
        assert broker.acked(TOPIC, "s") == {0, 1, 2, 3, 4}


def test_many(broker: Any, client: danube_fast.Client) -> None:
    payloads = [b"%08d" % i * 8 for i in range(50_000)]
    producer = client.producer(TOPIC)
    producer.send_many(payloads)
    producer.flush()
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    got: list[bytes | None] = []
    while len(got) < len(payloads):
        batch = consumer.receive_batch(max_messages=7001, timeout=60)
        assert 0 < len(batch) <= 7001, f"stalled at {len(got)}"
        assert batch.offsets.tolist() == list(range(len(got), len(got) + len(batch)))
        got += batch.payloads()
        consumer.ack(batch)
    assert got == payloads
    consumer.flush_acks()
    assert len(broker.acked(TOPIC, "s")) == len(payloads)


def test_import_is_light() -> None:
    code = (
        "import sys, danube_fast; danube_fast.connect; danube_fast.Message(b'x'); "
        "assert not {'numba', 'zmq', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_lookup_that_ends_says_what_was_answered_before(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question is told why it cannot be answered now, the next ones are told nothing."""
    asked: list[Any] = []

    def answer(session: Any, identity: bytes, command: Any) -> None:
        asked.append(command)
        if len(asked) == 1:
            text = "the rules cannot be asked just now"
            broker.reply(identity, protocol.Error(command.request, Unavailable.code, text))

    monkeypatch.setattr(broker, "_on_lookup", answer)
    with (
        danube_fast.connect(broker.url, timeout=60) as client,
        pytest.raises(DeadlineExceeded, match="the rules cannot be asked just now"),
    ):
        client.producer("/default/t", timeout=2.0)
    assert len(asked) > 1
