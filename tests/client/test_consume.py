"""Consumers: batches, acks, redelivery, credit, seek, several topics, ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

import danube_fast
from danube_fast.net import protocol as p

TOPIC = "/default/t"


def fill(client: danube_fast.Client, count: int, topic: str = TOPIC, **options: Any) -> list[bytes]:
    payloads = [b"%06d" % i for i in range(count)]
    with client.producer(topic, **options) as producer:
        producer.send_many(payloads)  # type: ignore[arg-type]
    return payloads


def drain(consumer: danube_fast.Consumer, count: int) -> list[danube_fast.Message]:
    messages: list[danube_fast.Message] = []
    while len(messages) < count:
        message = consumer.receive(timeout=60)
        assert message is not None, f"stalled at {len(messages)} of {count}"
        messages.append(message)
    return messages


def test_receive_and_batches_and_iteration_share_one_place(
    broker: Any, client: danube_fast.Client
) -> None:
    payloads = fill(client, 1000)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    got = [m.payload for m in drain(consumer, 3)]
    got += consumer.receive_batch(max_messages=10, timeout=60).payloads()
    for message in consumer:
        got.append(message.payload)
        if len(got) == 100:
            break
    got += [m.payload for m in drain(consumer, 1)]
    while len(got) < 1000:
        got += consumer.receive_batch(timeout=60).payloads()
    assert got == payloads
    assert len(consumer.receive_batch(timeout=0.01)) == 0
    assert consumer.receive(timeout=0) is None


def test_unacked_comes_again_when_the_consumer_goes(
    broker: Any, client: danube_fast.Client
) -> None:
    fill(client, 10)
    with client.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer:
        messages = drain(consumer, 10)
        consumer.ack(messages[:5])
        consumer.ack(messages[7])
    with client.consumer(TOPIC, subscription="s") as consumer:
        again = drain(consumer, 4)
        assert [m.offset for m in again] == [5, 6, 8, 9]
        assert [m.redelivery_count for m in again] == [1] * 4
        assert [m.payload for m in again] == [b"%06d" % i for i in (5, 6, 8, 9)]
        consumer.ack(consumer.receive_batch(timeout=0.01))
        consumer.ack(again)
    assert broker.acked(TOPIC, "s") == set(range(10))


def test_split_batches_ack_exactly_what_they_hold(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 20)
    with client.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer:
        consumer.ack([m for m in drain(consumer, 20) if m.offset % 3])
    with client.consumer(TOPIC, subscription="s") as consumer:
        batch = consumer.receive_batch(timeout=60)
        assert batch.offsets.tolist() == [0, 3, 6, 9, 12, 15, 18]
        assert batch[2].offset == 6 and batch[-1].payload == b"000018"
        consumer.ack(batch[3])
        consumer.flush_acks(timeout=60)
        assert 9 in broker.acked(TOPIC, "s") and 6 not in broker.acked(TOPIC, "s")
        consumer.ack(batch)
        consumer.flush_acks(timeout=60)
    assert broker.acked(TOPIC, "s") == set(range(20))


def test_acks_go_out_by_themselves(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 3)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    consumer.ack(drain(consumer, 3))
    broker.wait("the queued acks", lambda: len(broker.acked(TOPIC, "s")) == 3)


def test_cumulative(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 10)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    messages = drain(consumer, 10)
    consumer.ack(messages[8])
    consumer.ack_cumulative(messages[6])
    consumer.flush_acks(timeout=60)
    assert broker.acked(TOPIC, "s") >= set(range(7))
    shared = client.consumer(TOPIC, subscription="t", type="shared", initial_position="earliest")
    with pytest.raises(danube_fast.FailedPrecondition, match="shared"):
        shared.ack_cumulative(drain(shared, 1)[0])


def test_acks_of_a_steady_stream_travel_together(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    began = time.monotonic()
    for number in range(200):
        producer.publish(b"%d" % number)
        message = consumer.receive(timeout=60)
        assert message is not None
        consumer.ack(message)
    spent_ms = (time.monotonic() - began) * 1000
    consumer.flush_acks()
    assert broker.acked(TOPIC, "s") == set(range(200))
    assert broker.ack_commands <= spent_ms / 10 + 3


def test_nobody_is_told_of_acks_of_a_non_reliable_topic(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, dispatch="non_reliable")
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    for number in range(10):
        producer.publish(b"%d" % number)
        message = consumer.receive(timeout=60)
        assert message is not None
        consumer.ack(message)
    producer.publish(b"last")
    consumer.ack(consumer.receive_batch(timeout=60))
    assert len(consumer.receive_batch(timeout=0.05)) == 0
    assert broker.ack_commands == 0
    consumer.flush_acks()


def test_ack_by_id_and_by_constructed_message(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 3)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    drain(consumer, 3)
    consumer.ack(danube_fast.MessageId.parse(f"{TOPIC}@1"))
    consumer.ack(danube_fast.Message(b"", topic=TOPIC, offset=2))
    consumer.flush_acks(timeout=60)
    assert broker.acked(TOPIC, "s") == {1, 2}
    with pytest.raises(danube_fast.InvalidArgument, match="names no message"):
        consumer.ack(7)  # type: ignore[arg-type]


def test_nack_brings_it_again(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 3)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    messages = drain(consumer, 3)
    consumer.nack(messages[1], reason="later")
    (again,) = drain(consumer, 1)
    assert (again.offset, again.redelivery_count) == (1, 1)


def test_what_waits_in_the_queue_is_extended_and_what_the_application_has_is_not(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.ack_timeout_ms = 3000
    fill(client, 10)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    first = drain(consumer, 4)
    broker.wait("an extension", lambda: len(broker.extended) >= 2)
    assert {tuple(pairs) for _, pairs, _ in broker.extended} == {(4, 10)}
    drain(consumer, 6)
    before = len(broker.extended)
    consumer.extend(first[2], 7.5)
    broker.wait("another extension", lambda: len(broker.extended) > before)
    assert broker.extended[before][1:] == ([2, 3], 7500)


def test_small_credit_still_gets_everything(broker: Any, client: danube_fast.Client) -> None:
    payloads = fill(client, 20_000, batch_bytes_max=4096)
    consumer = client.consumer(
        TOPIC, subscription="s", initial_position="earliest", permits_bytes=10_000
    )
    broker.wait("credit used up", lambda: broker.commands["Flow"] >= 1)
    got: list[bytes | None] = []
    while len(got) < len(payloads):
        batch = consumer.receive_batch(timeout=60)
        assert batch, f"stalled at {len(got)}: credit was lost"
        got += batch.payloads()
    assert got == payloads
    assert broker.commands["Flow"] > 20


def test_credit_of_what_comes_to_a_consumer_that_rests_is_not_lost(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.ack_timeout_ms = 200
    fill(client, 1)
    consumer = client.consumer(
        TOPIC, subscription="s", type="shared", initial_position="earliest", permits_messages=4
    )
    broker.wait("the first one", lambda: broker.commands["Flow"] == 1)
    broker.deliver_late = True
    fill(client, 8)
    broker.wait("a rest", lambda: broker.commands["CloseConsumer"] == 1)
    assert len(drain(consumer, 9)) == 9
    assert consumer.receive(timeout=0.05) is None  # who comes for more has taken what there was

    def credit() -> int:
        (flow,) = (flow for session in broker.sessions.values() for flow in session.flows.values())
        return int(flow[1])

    broker.wait("all credit", lambda: credit() == 4)


def test_seek(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 10)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    first = drain(consumer, 4)
    consumer.seek(7)
    consumer.ack(first)  # from before the seek: a quiet no-op
    assert [m.offset for m in drain(consumer, 3)] == [7, 8, 9]
    consumer.seek("earliest")
    assert [m.offset for m in drain(consumer, 10)] == list(range(10))
    consumer.seek("latest")
    assert consumer.receive(timeout=0.05) is None
    with pytest.raises(danube_fast.InvalidArgument, match="position"):
        consumer.seek("yesterday")


def test_exclusive_is_refused_twice(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 1)
    refused = pytest.raises(danube_fast.FailedPrecondition, match="has a consumer")
    with client.consumer(TOPIC, subscription="s"), refused:
        client.consumer(TOPIC, subscription="s")
    client.consumer(TOPIC, subscription="s").close()


def test_missing_topic_waits_then_not_found(broker: Any, client: danube_fast.Client) -> None:
    with pytest.raises(danube_fast.NotFound, match="topics create"):
        client.consumer("/default/none", subscription="s", timeout=0.7)


def test_missing_topic_that_appears(broker: Any, client: danube_fast.Client) -> None:
    import threading

    def create() -> None:
        broker.wait("a waiting lookup", lambda: bool(broker.waiting))
        broker.create("/default/soon")

    thread = threading.Thread(target=create)
    thread.start()
    consumer = client.consumer("/default/soon", subscription="s", timeout=60)
    thread.join()
    client.publish("/default/soon", b"x")
    assert drain(consumer, 1)[0].payload == b"x"


def test_list_of_topics_and_partitions(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 300, "/default/a", partitions=3, batch_bytes_max=4096)
    fill(client, 5, "/default/b")
    consumer = client.consumer(
        ["/default/a", "/default/b"], subscription="s", initial_position="earliest"
    )
    messages = drain(consumer, 305)
    consumer.ack(messages)
    consumer.flush_acks(timeout=60)
    assert broker.acked("/default/b", "s") == set(range(5))
    assert len({m.topic for m in messages}) >= 2
    with pytest.raises(danube_fast.InvalidArgument, match="not both"):
        client.consumer("/default/b", subscription="s", pattern="/default/*")
    for wrong in ("/default", "*/x", "/*/x", "/default/", "x"):
        with pytest.raises(danube_fast.InvalidArgument, match="not a pattern"):
            client.consumer(subscription="s", pattern=wrong)
    with pytest.raises(danube_fast.InvalidArgument, match="twice"):
        client.consumer(["/default/b", "/default/b"], subscription="s")


def test_topic_deleted_under_a_consumer(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 1)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    drain(consumer, 1)
    broker.delete(TOPIC)
    for _ in range(2):
        with pytest.raises(danube_fast.TopicDeleted, match="deleted"):
            consumer.receive(timeout=60)
    assert consumer.state == "failed"
    consumer.close()
    assert consumer.state == "closed"


def test_damaged_frame_is_data_loss(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 10)
    with broker.lock:
        broker.topics[TOPIC].partitions[0].frames[0][2][200] ^= 1
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    with pytest.raises(danube_fast.DataLoss, match="BODY_CRC"):
        consumer.receive(timeout=60)
    assert consumer.receive(timeout=0.01) is None


def test_gaps_are_told(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 1)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    drain(consumer, 1)
    broker.event("gap", {"end": 10, "reason": "unclean end"})
    client.publish(TOPIC, b"x")
    drain(consumer, 1)
    assert [(g.first, g.last, g.reason) for g in consumer.gaps] == [(1, 9, "unclean end")]


def test_closed_consumer(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 5)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    taken = drain(consumer, 2)
    consumer.ack(taken[0])
    consumer.close()
    with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
        consumer.receive(timeout=1)
    for late in (consumer.ack, consumer.nack, consumer.ack_cumulative):
        with pytest.raises(danube_fast.FailedPrecondition, match="gets again what was not acked"):
            late(taken[1])
    assert list(consumer) == []
    closed = broker.commands["CloseConsumer"]
    consumer.close()
    assert broker.commands["CloseConsumer"] == closed, "nothing is left to close"


def test_options_are_checked(broker: Any, client: danube_fast.Client) -> None:
    for bad in ({"type": "weird"}, {"initial_position": -1}, {"permits_bytes": 0}):
        with pytest.raises(danube_fast.InvalidArgument):
            client.consumer(TOPIC, subscription="s", **bad)  # type: ignore[arg-type]
    with pytest.raises(danube_fast.InvalidArgument, match="key_shared"):
        client.consumer(TOPIC, subscription="s", type="shared", key_filters=["a*"])
    with pytest.raises(danube_fast.InvalidArgument, match="list of globs"):
        client.consumer(TOPIC, subscription="s", type="key_shared", key_filters="a*")
    with pytest.raises(danube_fast.InvalidArgument, match="namespace"):
        client.consumer("flights", subscription="s")


def test_subscriber_acks_on_return_and_nacks_on_error(
    broker: Any, client: danube_fast.Client
) -> None:
    fill(client, 30)
    failed: set[int] = set()
    seen: list[int] = []

    def handler(message: danube_fast.Message) -> None:
        if message.offset % 10 == 3 and message.offset not in failed:
            failed.add(message.offset)
            raise ValueError("not now")
        seen.append(message.offset)

    with client.subscribe(
        TOPIC, "s", handler, type="shared", concurrency=4, initial_position="earliest"
    ):
        broker.wait("all acks", lambda: len(broker.acked(TOPIC, "s")) == 30)
    assert sorted(seen) == list(range(30)) and failed == {3, 13, 23}


def test_a_seek_that_fails_in_the_middle_says_what_it_moved(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.create(TOPIC, partitions=2)
    seek = broker._on_seek

    def dies(session: Any, identity: bytes, command: p.Seek) -> None:
        number = session.consumers[command.consumer_id]["partition"].partition_id
        if number == 2 and not command.dry_run:
            broker.reply(identity, p.Error(command.request, 14, "the worker is away"))
        else:
            seek(session, identity, command)

    broker._on_seek = dies
    consumer = client.consumer(TOPIC, subscription="s")
    with pytest.raises(danube_fast.Unavailable) as caught:
        consumer.seek("earliest")
    assert f"moved {TOPIC}-part-0, and perhaps not {TOPIC}-part-1" in str(caught.value)


def test_a_seek_that_one_partition_refuses_moves_none(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.create(TOPIC, partitions=2)
    seek, moved = broker._on_seek, []

    def refuses(session: Any, identity: bytes, command: p.Seek) -> None:
        if session.consumers[command.consumer_id]["partition"].partition_id == 2:
            broker.reply(identity, p.Error(command.request, 14, "its log cannot be read"))
        else:
            moved.append(not command.dry_run)
            seek(session, identity, command)

    broker._on_seek = refuses
    consumer = client.consumer(TOPIC, subscription="s")
    with pytest.raises(danube_fast.Unavailable, match="cannot be read"):
        consumer.seek("earliest")
    assert moved == [False]


def test_acks_while_a_seek_is_on_its_way_are_not_sent(
    broker: Any, client: danube_fast.Client
) -> None:
    """The broker would take them for messages that it sends after the seek."""
    fill(client, 10)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    first = drain(consumer, 5)
    attachment = consumer._inbox.attachments[0]
    with client._core.pump.lock:
        attachment.seek("earliest", dry_run=False)
        consumer._acks.add(first)
        consumer._acks.send()
    consumer.lag()  # answered behind the seek
    assert broker.ack_commands == 0
    assert [m.offset for m in drain(consumer, 10)] == list(range(10))
    consumer.close()
    (sub,) = broker.topics[TOPIC].partitions[0].subs.values()
    assert not sub["acked"]


def test_only_who_received_a_message_acks_it(broker: Any, client: danube_fast.Client) -> None:
    messages = fill(client, 10)
    options: Any = {"type": "shared", "initial_position": "earliest"}
    one = client.consumer(TOPIC, subscription="one", **options)
    other = client.consumer(TOPIC, subscription="other", **options)
    received = drain(one, len(messages))
    batch = other.receive_batch(timeout=5)
    (read, *_) = client.reader(TOPIC, start="earliest", stop="latest")
    for wrong in (
        batch, batch[0], [received[0], batch[0]], read,
        danube_fast.MessageId("/default/none", 0), danube_fast.MessageId(TOPIC, 10),
    ):  # fmt: skip
        for use in (one.ack, one.nack):
            with pytest.raises(danube_fast.InvalidArgument, match="never received"):
                use(wrong)
    one.flush_acks()
    (partition,) = broker.topics[TOPIC].partitions
    assert not partition.subs["one"]["acked"], "a list is acked as a whole, or not at all"
    one.ack(received[3].message_id)
    one.ack(received)
    one.ack(received)  # a second time: a quiet no-op
    one.flush_acks()
    assert partition.subs["one"]["acked"] == set(range(10))


def test_messages_that_came_before_the_answer_to_subscribe_are_acked_by_id(
    broker: Any, client: danube_fast.Client
) -> None:
    """A worker delivers at once, and answers when the new subscription is durable."""
    fill(client, 10)
    subscribe, grant, reply = broker._on_subscribe, broker._on_flow, broker.reply
    answers: list[Any] = []

    def on_subscribe(*command: Any) -> None:
        broker.reply = lambda *parts: answers.append(parts)
        try:
            subscribe(*command)
        finally:
            broker.reply = reply

    def on_flow(*command: Any) -> None:
        grant(*command)
        while answers:
            reply(*answers.pop(0))

    broker._on_subscribe, broker._on_flow = on_subscribe, on_flow
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    received = drain(consumer, 10)
    for message in received:
        consumer.ack(message.message_id)
    consumer.flush_acks()
    (sub,) = broker.topics[TOPIC].partitions[0].subs.values()
    assert sub["acked"] == set(range(10))


def test_close_says_which_acks_were_not_sent(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 10)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    first = drain(consumer, 10)
    broker.mute = True
    consumer.ack(first[2:5])
    with pytest.raises(danube_fast.Unavailable, match=f"{TOPIC} 2 to 4; these messages may be"):
        consumer.close(timeout=0.2)
    assert consumer.state == "closed"
    consumer.close()  # said once


def test_close_says_nothing_when_all_acks_arrived(broker: Any, client: danube_fast.Client) -> None:
    fill(client, 10)
    with client.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer:
        consumer.ack(drain(consumer, 10))
    with pytest.raises(ZeroDivisionError), client.consumer(TOPIC, subscription="t") as consumer:
        raise ZeroDivisionError
