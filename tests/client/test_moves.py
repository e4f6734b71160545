"""What a consumer does when a partition goes to another worker: nobody is left behind, no credit is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import danube_fast
from danube_fast.client.consume.attachment import Attachment
from danube_fast.net import protocol as p
from danube_fast.testing import Broker
from tests.workers.broker import wait_until

TOPIC = "/default/a"


@pytest.fixture
def broker(broker: Any) -> Any:
    """`places`: ports of partitions that another one has; `away`: those that take nobody."""
    broker.places, broker.away = {}, set()
    look_up, subscribe, reply = broker._on_lookup, broker._on_subscribe, broker.reply

    def on_lookup(session: Any, identity: bytes, command: p.Lookup) -> None:
        def answer(identity: bytes, result: Any) -> None:
            for place in result.value["partitions"]:
                port = broker.places.get(place[0], broker.port)
                place[3] = f"tcp://127.0.0.1:{port}"
            reply(identity, result)

        broker.reply = answer
        try:
            look_up(session, identity, command)
        finally:
            broker.reply = reply

    def on_subscribe(session: Any, identity: bytes, command: p.Subscribe) -> None:
        if command.partition_id in broker.away:
            reply(identity, p.Error(command.request, p.Status.NOT_OWNER, "it is not here"))
        else:
            subscribe(session, identity, command)

    open_producer = broker._on_openproducer

    def on_open_producer(session: Any, identity: bytes, command: p.OpenProducer) -> None:
        if command.partition_id in broker.away:
            reply(identity, p.Error(command.request, p.Status.NOT_OWNER, "it is not here"))
        else:
            open_producer(session, identity, command)

    broker._on_lookup, broker._on_subscribe = on_lookup, on_subscribe
    broker._on_openproducer = on_open_producer
    return broker


@pytest.fixture
def other(broker: Any) -> Iterator[Any]:
    """Another worker."""
    other = type(broker)()
    yield other
    other.close()


def look_up(client: danube_fast.Client, consumer: danube_fast.Consumer) -> None:
    """The client looks the topic up again."""
    core = client._core
    with core.pump.lock:
        core.routes.refresh(consumer._inbox.partitions.routes[0])


def move(broker: Any, client: danube_fast.Client, consumer: Any, port: int) -> None:
    """The first partition is on another worker, and the client has found out."""
    with broker.lock:
        broker.places[broker.topics[TOPIC].partitions[0].partition_id] = port
    look_up(client, consumer)
    first = consumer._inbox.attachments[0]
    wait_until("it moved", lambda: first.connection.endpoint.endswith(f":{port}"))
    wait_until("it is attached", lambda: first.subscribed)


def attached(broker: Any) -> int:
    """How many consumers there are."""
    with broker.lock:
        return sum(len(session.consumers) for session in broker.sessions.values())


def test_a_consumer_that_is_closed_follows_nobody(
    broker: Any, other: Any, client: danube_fast.Client
) -> None:
    """A lookup of its topic was on its way when it was closed."""
    for each in (broker, other):
        each.create(TOPIC, partitions=1)
    consumer = client.consumer(TOPIC, subscription="s")
    core = client._core
    bootstrap = core.routes.bootstrap

    def asks() -> bool:
        with core.pump.lock:
            return any(type(call.command) is p.Lookup for call in bootstrap.calls.values())

    with broker.lock:
        look_up(client, consumer)
        wait_until("it was asked", asks)
        core.routes.discard(consumer._inbox)
        broker.places[1] = other.port
    wait_until("it was answered", lambda: not asks())
    with core.pump.lock:
        users = [user for each in core.routes.workers.values() for user in each.users]
    assert not [user for user in users if isinstance(user, Attachment)]
    assert attached(broker) == attached(other) == 0


def test_who_moves_is_detached_where_it_was(
    broker: Any, other: Any, client: danube_fast.Client
) -> None:
    """Or else the worker that gets the partition back keeps messages for a consumer that is nowhere."""
    for each in (broker, other):
        each.create(TOPIC, partitions=2)
    consumer = client.consumer(TOPIC, subscription="s")
    assert attached(broker) == 2
    move(broker, client, consumer, other.port)
    wait_until("one is left", lambda: attached(broker) == 1)
    assert attached(other) == 1
    broker.forget_connections()  # what was told and not answered is told again
    move(broker, client, consumer, broker.port)
    wait_until("both are back", lambda: (attached(broker), attached(other)) == (2, 0))


def test_a_subscribe_that_is_answered_late_leaves_nobody_behind(
    broker: Any, other: Any, client: danube_fast.Client
) -> None:
    for each in (broker, other):
        each.create(TOPIC, partitions=1)
    consumer = client.consumer(TOPIC, subscription="s")
    core = client._core
    first = consumer._inbox.attachments[0]
    with core.pump.lock:  # its session ended; it moves before the new SUBSCRIBE is answered
        first.on_session(resumed=True)
        before = first.consumer_id
        first.move(core.routes._worker(f"tcp://127.0.0.1:{other.port}", False), first.credit)
    wait_until("it is attached there", lambda: attached(other) == 1)
    wait_until(
        "nobody is here", lambda: broker.commands["CloseConsumer"] >= 2 and not attached(broker)
    )
    assert before


def test_credit_goes_back_to_the_worker_that_a_frame_came_from(
    broker: Any, other: Any, client: danube_fast.Client
) -> None:
    for each in (broker, other):
        each.create(TOPIC, partitions=1)
    consumer = client.consumer(
        TOPIC, subscription="s", initial_position="earliest", permits_messages=8
    )
    producer = client.producer(TOPIC)
    for number in range(8):
        producer.publish(b"%d" % number)
    wait_until("all are here", lambda: len(consumer._inbox._queue) == 8)
    for port in (other.port, broker.port) * 2:
        move(broker, client, consumer, port)
    got = []
    while len(got) < 8:
        message = consumer.receive(timeout=60)
        assert message is not None, f"only {got} came again"
        got.append(message.payload)
        consumer.ack(message)
    assert got == [b"%d" % number for number in range(8)]


def test_credit_goes_back_for_what_comes_after_a_consumer_has_left(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.create(TOPIC, partitions=1)
    consumer = client.consumer(TOPIC, subscription="s", type="shared", permits_messages=8)

    def credit() -> int:
        with broker.lock:
            return sum(
                flow[1] for session in broker.sessions.values() for flow in session.flows.values()
            )

    wait_until("it is granted", lambda: credit() == 8)
    with danube_fast.connect(broker.url, name="publisher") as publisher:
        core = client._core
        with core.pump.lock:  # nothing is read meanwhile
            for number in range(4):
                publisher.producer(TOPIC, name=f"p{number}").publish(b"x")
            assert credit() == 4
            consumer._inbox.rest()
    wait_until("all of it is back", lambda: credit() == 8)
    wait_until("nobody is kept", lambda: not consumer._inbox.attachments[0].connection.receivers)


def test_opening_does_not_wait_for_partitions_that_rest_meanwhile(
    broker: Any, client: danube_fast.Client
) -> None:
    """One partition takes no subscription for longer than what came from the other may wait."""
    topic = broker.create(TOPIC, partitions=2)
    client.producer(TOPIC).publish(b"x", key=b"a")
    client.producer(TOPIC).publish(b"x", key=b"b")
    full = next(part for part in topic.partitions if part.frames)
    broker.away = {part.partition_id for part in topic.partitions} - {full.partition_id}
    broker.ack_timeout_ms = 90
    opened: list[Any] = []

    def open_it() -> None:
        opened.append(
            client.consumer(TOPIC, subscription="s", type="shared", initial_position="earliest")
        )

    thread = threading.Thread(target=open_it)
    thread.start()
    wait_until("it rests", lambda: broker.commands["CloseConsumer"])
    broker.away = set()
    thread.join(60)
    assert not thread.is_alive(), "it waits for a partition that rests"
    message = opened[0].receive(timeout=60)
    assert message is not None and message.payload == b"x"


def test_an_end_that_overtakes_the_answer_to_a_subscribe(
    broker: Any, client: danube_fast.Client
) -> None:
    """A subscription is answered when it is durable; the partition was closed for a move meanwhile."""
    broker.create(TOPIC, partitions=1)
    subscribe = broker._on_subscribe

    def closed(session: Any, identity: bytes, command: p.Subscribe) -> None:
        broker._on_subscribe = subscribe
        detail = {"code": int(p.Status.NOT_OWNER), "text": "it is being moved"}
        broker.reply(identity, p.ConsumerEvent(command.consumer_id, "closed", detail))
        answer = {"next_offset": 0, "end_offset": 0, "first_offset": 0, "ack_timeout_ms": 0}
        broker.reply(identity, p.Result(command.request, answer))

    broker._on_subscribe = closed
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    client.producer(TOPIC).publish(b"x")
    message = consumer.receive(timeout=60)
    assert message is not None and message.payload == b"x"


def make_again(broker: Any) -> None:
    """While the client is away its topic is deleted and made again; its worker has forgotten both."""
    broker.forget_sessions()
    broker.away = {part.partition_id for part in broker.topics[TOPIC].partitions}
    broker.delete(TOPIC)
    broker.create(TOPIC, partitions=2)


def test_a_topic_that_was_made_again_meanwhile_is_not_waited_for(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.create(TOPIC, partitions=2)
    consumer = client.consumer(TOPIC, subscription="s")
    with broker.lock:
        make_again(broker)
    with pytest.raises(danube_fast.TopicDeleted, match="made again"):
        consumer.receive(timeout=60)
    consumer.close()
    with client.consumer(TOPIC, subscription="s", initial_position="earliest") as another:
        client.producer(TOPIC).publish(b"x")
        message = another.receive(timeout=60)
        assert message is not None and message.payload == b"x"


def test_a_producer_whose_topic_was_made_again_meanwhile_says_so(
    broker: Any, client: danube_fast.Client
) -> None:
    broker.create(TOPIC, partitions=2)
    producer = client.producer(TOPIC, timeout=60)
    producer.publish(b"before")
    with broker.lock:
        make_again(broker)
    with pytest.raises(danube_fast.TopicDeleted, match="made again"):
        producer.publish(b"after")
    with broker.lock:
        assert not any(part.frames for part in broker.topics[TOPIC].partitions)


def test_a_seek_finds_a_consumer_that_rests_or_moves(
    broker: Any, other: Any, client: danube_fast.Client
) -> None:
    for each in (broker, other):
        each.create(TOPIC, partitions=1)
    consumer = client.consumer(TOPIC, subscription="s", type="shared")
    client.producer(TOPIC).publish(b"x")
    assert consumer.receive(timeout=60)
    with client._core.pump.lock:
        consumer._inbox.rest()
    wait_until("it has left", lambda: attached(broker) == 0)
    consumer.seek("earliest")
    message = consumer.receive(timeout=60)
    assert message is not None and message.payload == b"x"
    first = consumer._inbox.attachments[0]
    core = client._core
    with core.pump.lock:  # there is no answer yet
        first.move(core.routes._worker(f"tcp://127.0.0.1:{other.port}", False), first.credit)
    consumer.seek("earliest")
    assert other.commands["Seek"] == 2, "tried, then done"


def test_a_topic_of_a_pattern_that_was_made_again_unheard_joins(real: Broker, topic: str) -> None:
    """Neither its worker nor the watcher told: both were new when they were asked."""
    with real.client() as client, real.client() as other:
        other.publish(topic, b"before")
        with client.consumer(pattern=f"{topic}*", subscription="s") as consumer:
            assert consumer.topics == (topic,)
            core, (route,) = client._core, consumer._inbox.partitions.routes
            with core.pump.lock:
                consumer._inbox.attachments[0]._forget_id()
                core.routes.bootstrap.abandon(core.watcher._call)
                core.pump.disarm(core.watcher)
                core.watcher._cursor = ""
            other.admin.delete_topic(topic)
            producer = other.producer(topic)
            producer.publish(b"after")
            with core.pump.lock:
                core.routes.refresh(route)
            wait_until("it joins", lambda: consumer.receive(timeout=0.1))
            with core.pump.lock:
                core.watcher._ask()
            assert consumer.state == "connected"
            producer.publish(b"more")
            message = consumer.receive(timeout=60)
            assert message is not None and message.payload == b"more"


def close_for_move(broker: Any) -> None:
    """The first partition is about to move; its consumer stays until it says that it has left."""
    with broker.lock:
        broker.away.add(1)
        for session in broker.sessions.values():
            for consumer_id in session.consumers:
                detail = {"code": 36, "text": "it is being moved"}
                broker.reply(session.identity, p.ConsumerEvent(consumer_id, "closed", detail))


def test_queued_acks_go_before_a_move(broker: Any, client: danube_fast.Client) -> None:
    broker.create(TOPIC, partitions=1)
    producer = client.producer(TOPIC)
    for number in range(8):
        producer.publish(b"%d" % number)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    messages = []
    while len(messages) < 8:
        message = consumer.receive(timeout=60)
        assert message is not None
        messages.append(message)
    with client._core.pump.lock:  # nothing is sent or read meanwhile
        close_for_move(broker)
        consumer._acks.add(messages[:5])
    wait_until("it has left", lambda: attached(broker) == 0)
    (sub,) = broker.topics[TOPIC].partitions[0].subs.values()
    assert sub["acked"] == set(range(5))
    consumer.flush_acks()  # they were heard: there is nothing to complain of
    with broker.lock:
        broker.away.clear()
    consumer.ack(messages[5])  # too late: it comes again
    wait_until("it is back", lambda: attached(broker) == 1)
    assert [getattr(consumer.receive(timeout=60), "offset", None) for _ in range(3)] == [5, 6, 7]


def test_what_is_acked_while_its_consumer_leaves_is_sent_or_told(
    broker: Any, client: danube_fast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who acks in order takes no lock, and acks on in another thread while the client says goodbye."""
    broker.create(TOPIC, partitions=1)
    producer = client.producer(TOPIC)
    producer.send_many([b"%d" % number for number in range(8)])
    producer.flush()
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    messages: list[Any] = list(consumer.receive_batch(8, timeout=60))
    assert len({id(message._source) for message in messages}) == 1
    consumer.ack(messages[0])
    acks, attachment = consumer._acks, consumer._inbox.attachments[0]
    leave, seek_another = attachment._depart, attachment._on_refused
    blocked: list[Any] = []

    def leave_meanwhile() -> Any:
        for message in messages[1:4]:
            if message._source is acks.run_source and message.offset == acks.run_end:
                acks.run_end += 1
            else:
                blocked.append(message)
        return leave()

    def seek_another_then(error: Any) -> None:
        while blocked:  # the lock is free at last
            acks.add_one(blocked.pop(0))
        seek_another(error)

    # the only one there is
    monkeypatch.setattr(Attachment, "_depart", lambda _: leave_meanwhile())
    monkeypatch.setattr(Attachment, "_on_refused", lambda _, error: seek_another_then(error))
    close_for_move(broker)
    wait_until("it has left", lambda: attached(broker) == 0)
    with pytest.raises(danube_fast.Unavailable, match="delivered again"):
        consumer.flush_acks()
    with broker.lock:
        (sub,) = broker.topics[TOPIC].partitions[0].subs.values()
        assert sub["acked"] == {0}
        broker.away.clear()
    wait_until("it is back", lambda: attached(broker) == 1)
    again = consumer.receive(timeout=60)
    assert again is not None and again.offset == 1
