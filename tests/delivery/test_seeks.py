"""Seeks through the public API: all partitions or none, and no ack from before one counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import danube_fast
from danube_fast.errors import InvalidArgument
from tests.crash.rig import Server

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("seeks") / "data", workers=2) as running:
        yield running


def take(consumer: danube_fast.Consumer, count: int) -> list[danube_fast.Message]:
    taken: list[danube_fast.Message] = []
    while len(taken) < count:
        message = consumer.receive(timeout=WAIT_SECONDS)
        assert message is not None, f"{len(taken)} of {count} came within {WAIT_SECONDS:g} s"
        taken.append(message)
    return taken


def test_an_ack_from_before_the_seek_of_another_is_void(server: Server) -> None:
    """One has ten messages in hand; another one wants all of them again, and gets them."""
    topic = "/default/late-ack"
    with danube_fast.connect(server.url) as client, danube_fast.connect(server.url) as other:
        with client.producer(topic) as producer:
            producer.send_many([b"%d" % number for number in range(10)])
        one = client.consumer(topic, subscription="s", type="shared", initial_position="earliest")
        held = take(one, 10)
        with other.consumer(topic, subscription="s", type="shared") as two:
            two.seek("earliest")
            one.ack(held)
            one.flush_acks()  # they are void because of the seek: there is nothing to complain of
            one.close()
            again = take(two, 10)
            assert sorted(message.offset for message in again) == list(range(10))


def test_who_hears_of_a_seek_drops_what_came_before_it(server: Server) -> None:
    topic = "/default/heard"
    with danube_fast.connect(server.url) as client:
        with client.producer(topic) as producer:
            producer.send_many([b"%d" % number for number in range(10)])
        one = client.consumer(topic, subscription="s", type="shared", initial_position="earliest")
        take(one, 1)
        with client.consumer(topic, subscription="s", type="shared") as two:
            two.seek("latest")
            client.publish(topic, b"new")
            client.publish(topic, b"newer")
            seen = []
            while len(seen) < 2:
                for consumer in (one, two):
                    message = consumer.receive(timeout=0.05)
                    if message is not None:
                        seen.append(message.payload)
                        consumer.ack(message)
            assert sorted(seen) == [b"new", b"newer"]
        one.close()


def test_a_refused_seek_moves_no_partition(server: Server) -> None:
    topic = "/default/uneven"
    with danube_fast.connect(server.url) as client:
        client.admin.create_topic(topic, partitions=2)
        with client.producer(topic) as producer:
            for number in range(5):
                producer.publish(b"%d" % number, key="one key")
        with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
            consumer.seek(2)  # one partition has none: that one goes to its end
            assert [message.payload for message in take(consumer, 3)] == [b"2", b"3", b"4"]
            consumer.seek(0)
            with pytest.raises(
                InvalidArgument, match=r"6 lies beyond the end of .*, which is at 5"
            ):
                consumer.seek(6)
            assert [message.payload for message in take(consumer, 5)] == [
                b"%d" % at for at in range(5)
            ]
