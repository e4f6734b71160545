"""Messages with keys, attributes and times go like plain ones: straight, and with all they have."""

from __future__ import annotations

from typing import Any

import pytest

import danube_fast
from danube_fast.client.produce import straight
from danube_fast.errors import InvalidArgument, TopicDeleted
from tests.crash.rig import Server
from tests.shm.test_straight import server, transport

__all__ = ["server", "transport"]

SECONDS = 60.0
HOUR_NS = 3600 * 10**9
FIELDS: list[dict[str, Any]] = [
    {"key": "a"},
    {"key": b"\xff\x00", "attributes": {"of": "bytes"}},
    {"attributes": {}},
    {"attributes": {"one": "1", "zwei": "zw\u00f6lf", "": ""}},
    {"event_time": -1},
    {"deliver_at": 0},
    {"key": "", "attributes": {"x": "y" * 3000}, "event_time": HOUR_NS},
]
SHOWN = ("payload", "key", "attributes", "event_time", "sequence", "offset")


class Straight:
    """Counts the messages with columns that went straight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = straight.send_alone

        def counted(lane: Any, message: Any, *others: Any, **named: Any) -> bool:
            is_sent = original(lane, message, *others, **named)
            self.count += is_sent and isinstance(message, tuple)
            return is_sent

        monkeypatch.setattr(straight, "send_alone", counted)


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> Straight:
    return Straight(monkeypatch)


def shown(client: danube_fast.Client, topic: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with client.consumer(topic, subscription="all", initial_position="earliest") as consumer:
        while len(found) < count:
            message = consumer.receive(timeout=SECONDS)
            assert message is not None, f"{len(found)} of {count} came"
            found.append({name: getattr(message, name) for name in SHOWN})
    return found


def test_they_arrive_as_over_sockets(server: Server, went: Straight) -> None:
    topics, counts = {"shm": "/default/columns-shm", "zmq": "/default/columns-zmq"}, {}
    for name, topic in topics.items():
        with server.client(transport=name) as client:
            producer = client.producer(topic)
            for number, fields in enumerate(FIELDS):
                assert producer.publish(b"%d" % number, **fields).offset == 2 * number
                assert producer.publish(b"plain").offset == 2 * number + 1
            assert producer.publish(None, key="gone").offset == 2 * len(FIELDS)
            counts[name] = went.count
    assert counts == {"shm": len(FIELDS) + 1, "zmq": 2 * (len(FIELDS) + 1)}
    with server.client(transport="shm") as client:
        seen = [shown(client, topic, 2 * len(FIELDS) + 1) for topic in topics.values()]
    assert seen[0] == seen[1]
    for number, fields in enumerate(FIELDS):
        message = seen[0][2 * number]
        key = fields.get("key")
        assert message["payload"] == b"%d" % number
        assert message["key"] == (key.encode() if isinstance(key, str) else key)
        assert message["attributes"] == fields.get("attributes", {})
        assert message["event_time"] == fields.get("event_time")


def test_a_key_leads_to_its_partition(server: Server, went: Straight, transport: Any) -> None:
    topic, keys = f"/default/columns-parted-{transport}", [f"key {number}" for number in range(40)]
    with server.client(transport=transport) as client:
        client.admin.create_topic(topic, partitions=4)
        with client.producer(topic) as producer:
            alone = {key: producer.publish(b"1", key=key).topic for key in keys}
            assert went.count == len(keys)
            producer.send_many([b"2"] * len(keys), keys=keys)
            producer.flush()
        assert len(set(alone.values())) == 4
        with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
            for _ in range(2 * len(keys)):
                message = consumer.receive(timeout=SECONDS)
                assert message is not None and message.key is not None
                assert message.topic == alone[message.key.decode()]


def test_what_is_refused_costs_no_number(server: Server, went: Straight, transport: Any) -> None:
    topic = f"/default/columns-refused-{transport}"
    with server.client(transport=transport) as client:
        producer = client.producer(topic)
        for wrong in ({"attributes": {"a": 1}}, {"key": 1.5}, {"event_time": "soon"}):
            with pytest.raises(InvalidArgument):
                producer.publish(b"no", **wrong)  # type: ignore[arg-type]
        assert producer.publish(b"yes", key="k").offset == 0
        client.admin.delete_topic(topic)
        with pytest.raises(TopicDeleted):
            producer.publish(b"gone", key="k")
    assert went.count == 2


def test_larger_ones_go_with_all_others(server: Server, went: Straight, transport: Any) -> None:
    topic, payload = f"/default/columns-large-{transport}", bytes(straight.PAYLOAD_BYTES_MAX)
    with server.client(transport=transport) as client:
        producer = client.producer(topic)
        assert producer.publish(payload, key="large").offset == 0
        assert producer.publish(b"", key="k" * len(payload)).offset == 1
        assert went.count == 0
        assert producer.publish(payload[:1000], key="small").offset == 2
        assert went.count == 1


def test_requests_and_replies_go_straight(server: Server, went: Straight, transport: Any) -> None:
    topic = f"/default/columns-asked-{transport}"
    with (
        server.client(transport=transport) as asking,
        server.client(transport=transport) as answering,
    ):
        asking.admin.create_topic(topic)
        with answering.subscribe(topic, "s", lambda message: message.payload + b"!"):
            for number in range(20):
                reply = asking.request(topic, b"%d" % number, timeout=SECONDS)
                assert reply.payload == b"%d!" % number
    # the first of each may wait for its producer; a reply may overtake the ack of its request, which holds the next one up
    assert went.count >= 20
