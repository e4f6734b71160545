"""Messages that fail, over a real broker: ack timeouts, backoff, poison, dead letters, redrive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server
from tests.workers.broker import wait_until

TOPIC, DEAD = "/default/orders", "/default/dead-orders"
WAIT_SECONDS = 60.0
QUICK = {"base_redelivery_delay_ms": 20, "max_redelivery_count": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("failures") / "data", workers=2, session_timeout_ms=30_000
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


def receive(consumer: Any) -> danube_fast.Message:
    message = consumer.receive(timeout=WAIT_SECONDS)
    assert message is not None, f"no message in {WAIT_SECONDS} s"
    return message


def fail_until_poison(consumer: Any, reason: str) -> danube_fast.Message:
    """Nack one message as often as QUICK lets it come; what it was."""
    for attempt in range(QUICK["max_redelivery_count"] + 1):
        message = receive(consumer)
        assert message.redelivery_count == attempt
        consumer.nack(message, reason=reason)
    return message


def described(client: danube_fast.Client, topic: str, name: str = "s") -> dict[str, Any]:
    return client.admin.describe_subscription(topic, name)


def test_a_silent_consumer_loses_its_messages_and_a_working_one_gets_them(
    client: danube_fast.Client,
) -> None:
    topic = f"{TOPIC}-silent"
    policy = {"ack_timeout_ms": 2000, "base_redelivery_delay_ms": 0}
    options = {"subscription": "s", "type": "shared", "failure_policy": policy}
    with client.producer(topic) as producer, client.consumer(topic, **options) as silent:
        producer.publish(b"work")
        taken = receive(silent)
        with client.consumer(topic, **options) as working:
            again = receive(working)
            assert (again.offset, again.redelivery_count) == (taken.offset, 1)
            working.ack(again)
            working.flush_acks()
        silent.ack(taken)  # it is not theirs any more
        assert described(client, topic)["redelivered"] == 1


def test_what_an_application_has_not_got_does_not_time_out(client: danube_fast.Client) -> None:
    topic = f"{TOPIC}-slow"
    with (
        client.producer(topic) as producer,
        client.consumer(
            topic, subscription="s", failure_policy={"ack_timeout_ms": 2000}
        ) as consumer,
    ):
        producer.send_many([b"%d" % n for n in range(8)])
        producer.flush()
        for n in range(8):  # 3.2 s in all, longer than the timeout
            message = receive(consumer)
            assert (message.offset, message.redelivery_count) == (n, 0)
            time.sleep(0.4)
            consumer.ack(message)
        consumer.flush_acks()
        assert described(client, topic)["redelivered"] == 0


def test_an_extended_message_stays(client: danube_fast.Client) -> None:
    topic = f"{TOPIC}-extended"
    policy = {"ack_timeout_ms": 2000, "base_redelivery_delay_ms": 0}
    with (
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", failure_policy=policy) as consumer,
    ):
        producer.publish(b"long work")
        message = receive(consumer)
        consumer.extend(message, 60)
        assert consumer.receive(timeout=3.0) is None
        consumer.ack(message)
        consumer.flush_acks()
        assert described(client, topic)["redelivered"] == 0


def test_a_poison_message_is_blocked_until_the_policy_changes_and_nobody_else_is(
    client: danube_fast.Client,
) -> None:
    topic = f"{TOPIC}-blocked"
    with (
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", failure_policy=QUICK) as consumer,
    ):
        producer.publish(b"poison")
        poison = fail_until_poison(consumer, "bad")
        producer.publish(b"fine")
        fine = receive(consumer)
        assert fine.payload == b"fine"
        consumer.ack(fine)
        consumer.flush_acks()
        state = described(client, topic)
        assert (state["blocked"], state["lag_messages"]) == (1, 1)
        assert "blocked" in state["state"]
        client.admin.set_failure_policy(topic, "s", {"max_redelivery_count": 9})
        again = receive(consumer)
        assert (again.offset, again.redelivery_count) == (poison.offset, 3)


def test_the_policy_of_a_subscription_survives_the_next_subscriber_and_a_restart(
    tmp_path: Path,
) -> None:
    topic = f"{TOPIC}-policy"
    with Server(tmp_path / "data", workers=1) as server:
        with danube_fast.connect(server.url) as client, client.producer(topic) as producer:
            producer.publish(b"x")
            client.consumer(topic, subscription="s", failure_policy=QUICK).close()
            changed = client.admin.set_failure_policy(topic, "s", {"ack_timeout_ms": 7000})
            assert changed["ack_timeout_ms"] == 7000
            client.consumer(topic, subscription="s", failure_policy={"ack_timeout_ms": 1}).close()
            before = described(client, topic)["failure_policy"]
        assert {**before, **QUICK, "ack_timeout_ms": 7000} == before
        server.stop()
        server.start()
        with danube_fast.connect(server.url) as client:
            assert described(client, topic)["failure_policy"] == before


def test_dead_letters_say_where_they_come_from_and_can_be_redriven(
    client: danube_fast.Client,
) -> None:
    topic = f"{TOPIC}-dead"
    policy = {**QUICK, "poison_policy": "dead_letter", "dead_letter_topic": DEAD}
    with (
        client.producer(topic, partitions=2) as producer,
        client.consumer(topic, subscription="s", type="shared", failure_policy=policy) as consumer,
    ):
        for n in range(4):
            producer.publish(b"payload %d" % n, key=b"key-%d" % n, attributes={"n": str(n)})
        left = dict.fromkeys(range(4), QUICK["max_redelivery_count"] + 1)
        while any(left.values()):
            message = receive(consumer)
            left[int(message.attributes["n"])] -= 1
            consumer.nack(message, reason="no stock")
        with client.consumer(DEAD, subscription="look", initial_position="earliest") as letters:
            found = [receive(letters) for _ in range(4)]
        for letter in found:
            n = letter.attributes["n"]
            assert (letter.payload, letter.key) == (f"payload {n}".encode(), f"key-{n}".encode())
            assert letter.attributes["x-original-topic"] == topic
            assert letter.attributes["x-original-subscription"] == "s"
            assert letter.attributes["x-failure-reason"] == "no stock"
            assert letter.attributes["x-delivery-attempt"] == "3"
            assert letter.attributes["x-poison-policy"] == "dead_letter"
            assert int(letter.attributes["x-original-topic-offset"]) in range(4)
        wait_until("end of lag", lambda: described(client, topic)["lag_messages"] == 0)
        assert described(client, topic)["dead_letters"] == 4

        assert client.admin.redrive(topic, "s") == 4
        again = [receive(consumer) for _ in range(4)]
        assert sorted(m.attributes["n"] for m in again) == list("0123")
        assert all("x-original-topic" not in m.attributes for m in again)
        assert client.admin.redrive(topic, "s") == 0, "each letter once"


def test_a_dead_letter_that_is_too_large_stays_and_stops_no_other(tmp_path: Path) -> None:
    topic, limit = f"{TOPIC}-large", 65_536
    policy = {"max_redelivery_count": 0, "poison_policy": "dead_letter", "dead_letter_topic": DEAD}
    with (
        Server(tmp_path / "data", workers=1, message_bytes_max=limit) as server,
        danube_fast.connect(server.url) as client,
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", failure_policy=policy) as consumer,
    ):
        for payload in (bytes(limit - 400), b"small"):
            producer.publish(payload)
            consumer.nack(receive(consumer), reason="r" * 1000)
        with client.consumer(DEAD, subscription="look", initial_position="earliest") as letters:
            assert receive(letters).payload == b"small"
        wait_until("the settled letter", lambda: described(client, topic)["dead_letters"] == 1)
        state = described(client, topic)
        assert (state["blocked"], state["lag_messages"]) == (1, 1)
        assert server.broker is not None
        wait_until("a word of it", lambda: "cannot go to" in server.broker.error_text())
        assert server.broker.error_text().count("cannot go to") == 1, "tried again and again"


def test_poison_is_dropped_if_the_policy_says_so(client: danube_fast.Client) -> None:
    topic = f"{TOPIC}-dropped"
    policy = {**QUICK, "poison_policy": "drop"}
    with (
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", failure_policy=policy) as consumer,
    ):
        producer.publish(b"poison")
        fail_until_poison(consumer, "bad")
        wait_until("end of lag", lambda: described(client, topic)["lag_messages"] == 0)
        assert described(client, topic)["dropped"] == 1


def test_a_policy_that_cannot_be_is_refused(client: danube_fast.Client) -> None:
    topic = f"{TOPIC}-refused"
    client.admin.create_topic(topic)
    with pytest.raises(danube_fast.InvalidArgument, match="dead_letter_topic"):
        client.consumer(topic, subscription="s", failure_policy={"poison_policy": "dead_letter"})
    with pytest.raises(danube_fast.NotFound, match="no subscription"):
        client.admin.set_failure_policy(topic, "s", {"ack_timeout_ms": 1})
    client.consumer(topic, subscription="s").close()
    with pytest.raises(danube_fast.InvalidArgument, match="backoff_strategy"):
        client.admin.set_failure_policy(topic, "s", {"backoff_strategy": "sometimes"})


def test_a_topic_that_loses_letters_takes_none(client: danube_fast.Client) -> None:
    topic, lossy = f"{TOPIC}-without-letters", f"{DEAD}-lossy"
    client.admin.create_topic(topic, partitions=2)
    client.admin.create_topic(lossy, dispatch="non_reliable")
    policy = {**QUICK, "poison_policy": "dead_letter", "dead_letter_topic": lossy}

    def is_undone() -> bool:  # each partition's worker asks for itself
        try:
            described(client, topic)
        except danube_fast.NotFound:
            return True
        return False

    refused: list[tuple[str, type[Exception], str]] = [
        (lossy, danube_fast.FailedPrecondition, "non_reliable"),
        (topic, danube_fast.InvalidArgument, "itself"),
        (f"{topic}-part-1", danube_fast.InvalidArgument, "partition"),
    ]
    for letters, kind, text in refused:
        with pytest.raises(kind, match=text):
            client.consumer(
                topic, subscription="s", failure_policy={**policy, "dead_letter_topic": letters}
            )
        wait_until("the end of what was refused", is_undone)
    with client.consumer(topic, subscription="s"):
        with pytest.raises(danube_fast.FailedPrecondition, match="non_reliable"):
            client.admin.set_failure_policy(topic, "s", policy)
        with pytest.raises(danube_fast.InvalidArgument, match="itself"):
            client.admin.set_failure_policy(topic, "s", {**policy, "dead_letter_topic": topic})
        assert not described(client, topic)["failure_policy"].get("dead_letter_topic")


def test_the_state_says_why_letters_have_to_wait(client: danube_fast.Client) -> None:
    topic, dead = f"{TOPIC}-nowhere", "/no-such-namespace/dead"
    policy = {**QUICK, "poison_policy": "dead_letter", "dead_letter_topic": dead}
    options = {"subscription": "s", "failure_policy": policy}
    with client.producer(topic) as producer, client.consumer(topic, **options) as consumer:
        producer.publish(b"poison")
        fail_until_poison(consumer, "bad")

        def state() -> str:
            return str(described(client, topic)["state"])

        wait_until("the cause", lambda: "no-such-namespace" in state())
        assert "dead letters have to wait" in state()
        client.admin.create_namespace("no-such-namespace")
        wait_until("the letter", lambda: described(client, topic)["dead_letters"] == 1)
        assert state() == "caught up"
