"""Acks that a lost connection took with it: `flush_acks` and `close` tell, a nack does not matter."""

from __future__ import annotations

from typing import Any

import pytest

import danube_fast
from danube_fast.client.consume.acks import AckQueue
from danube_fast.client.values.limits import ACK_DELAY_NS, ACK_EARLY_NS, FOREVER_NS
from danube_fast.clock import MILLISECOND_NS

TOPIC = "/default/t"


def test_flush_of_acks_does_not_wait_for_a_broker_that_fell_silent(
    broker: Any, client: danube_fast.Client
) -> None:
    client.producer(TOPIC).send_many([b"%d" % i for i in range(3)])
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    batch = consumer.receive_batch(timeout=60)
    broker.mute = True
    consumer.ack(batch)
    with pytest.raises(danube_fast.Unavailable):
        consumer.flush_acks(timeout=60)
    assert consumer.state == "reconnecting"
    consumer.flush_acks(timeout=0.1)  # nothing was acked since
    broker.mute = False


def batch_in_a_loss(broker: Any, client: danube_fast.Client) -> tuple[Any, danube_fast.Batch]:
    """A consumer that has three messages in hand and has just lost its broker."""
    client.producer(TOPIC).send_many([b"%d" % i for i in range(3)])
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    batch = consumer.receive_batch(timeout=60)
    broker.mute = True
    broker.wait("silence", lambda: consumer.state == "reconnecting")
    return consumer, batch


def test_flush_of_acks_never_claims_what_it_could_not_send(
    broker: Any, client: danube_fast.Client
) -> None:
    consumer, batch = batch_in_a_loss(broker, client)
    consumer.ack(batch)
    with pytest.raises(danube_fast.Unavailable, match="delivered again"):
        consumer.flush_acks(timeout=2)
    broker.mute = False
    again: list[int] = []
    while len(again) < 3:
        again += consumer.receive_batch(timeout=60).offsets.tolist()
    assert again == [0, 1, 2]


def test_a_nack_during_a_loss_is_no_lost_ack(broker: Any, client: danube_fast.Client) -> None:
    consumer, batch = batch_in_a_loss(broker, client)
    consumer.nack(batch)
    broker.mute = False
    broker.wait("the next session", lambda: consumer.state == "connected")
    consumer.flush_acks(timeout=60)  # nothing was acked, so nothing is told


def with_two_acks(broker: Any, client: danube_fast.Client) -> danube_fast.Consumer:
    """A consumer whose acks of two messages have reached the broker."""
    client.producer(TOPIC).send_many([b"a", b"b"])
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    for count in (1, 2):  # the first ack asks for an answer, the second does not
        message = consumer.receive(timeout=60)
        assert message is not None
        consumer.ack(message)
        broker.wait("an ack", lambda n=count: len(broker.acked(TOPIC, "s")) == n)
    return consumer


@pytest.mark.parametrize("arrived", [True, False])
def test_flush_acks_tells_when_acks_were_lost(
    broker: Any, client: danube_fast.Client, arrived: bool
) -> None:
    """An ack that was sent, and then its session was lost, may be durable or not."""
    consumer = with_two_acks(broker, client)
    subscribed = broker.commands["Subscribe"]
    with broker.lock:
        if not arrived:
            broker.topics[TOPIC].partitions[0].subs["s"]["acked"].discard(1)
        broker.forget_sessions()
    broker.wait("a new subscription", lambda: broker.commands["Subscribe"] > subscribed)
    consumer.receive(timeout=0.05)
    if not arrived:
        with pytest.raises(danube_fast.Unavailable, match="delivered again"):
            consumer.flush_acks(timeout=60)
    consumer.flush_acks(timeout=60)


def test_flush_acks_is_content_once_everything_was_acked_again(
    broker: Any, client: danube_fast.Client
) -> None:
    client.producer(TOPIC).send_many([b"a", b"b", b"c"])
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    for _ in range(3):
        message = consumer.receive(timeout=60)
        assert message is not None
        consumer.ack(message)
    broker.wait("the acks", lambda: len(broker.acked(TOPIC, "s")) == 3)
    with broker.lock:
        broker.topics[TOPIC].partitions[0].subs.clear()  # and they were not durable
        broker.forget_sessions()
    for _ in range(3):
        message = consumer.receive(timeout=60)
        assert message is not None
        consumer.ack(message)
    consumer.flush_acks(timeout=60)
    assert broker.acked(TOPIC, "s") == {0, 1, 2}


@pytest.mark.parametrize("end", ["arrived", "lost", "acked again"])
def test_close_tells_when_acks_were_lost_before_a_reconnect(
    broker: Any, client: danube_fast.Client, end: str
) -> None:
    consumer = with_two_acks(broker, client)
    subscribed = broker.commands["Subscribe"]
    with broker.lock:
        if end != "arrived":
            broker.topics[TOPIC].partitions[0].subs.clear()  # they were not durable
        broker.forget_sessions()
    broker.wait("a new subscription", lambda: broker.commands["Subscribe"] > subscribed)
    for offset in (0, 1) if end == "acked again" else ():
        message = consumer.receive(timeout=60)
        assert message is not None and message.offset == offset
        consumer.ack(message)
    if end == "lost":
        with pytest.raises(danube_fast.Unavailable, match=f"were lost.*{TOPIC} [01] to 1;"):
            consumer.close()
    consumer.close()


class _Pump:
    """Time, and a timer that never strikes."""

    def __init__(self) -> None:
        self.clock = self
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def arm(self, timer: Any, due_ns: int) -> None:
        pass

    def disarm(self, timer: Any) -> None:
        pass


def test_a_receive_that_waits_sends_acks_before_the_end_of_their_delay() -> None:
    """At that end the next message of a steady stream may just arrive, and would wait for the ack's turn."""
    pump: Any = _Pump()
    acks = AckQueue(pump, pump, [])
    sent = []
    for waited_ns in (0, ACK_EARLY_NS - 1, 1, ACK_EARLY_NS):
        pump.now_ns += waited_ns
        acks._arm()
        acks.send_unless_busy()
        sent.append(acks.due_ns == FOREVER_NS)
    assert sent == [True, False, True, True]
    assert ACK_EARLY_NS < ACK_DELAY_NS - 5 * MILLISECOND_NS
