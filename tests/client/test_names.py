"""Producers of one name, and cached producers of topics that are deleted."""

from __future__ import annotations

import pytest

import danube_fast
from danube_fast.testing import Broker


def test_closing_a_fenced_producer_leaves_the_newer_one_alone(real: Broker, topic: str) -> None:
    with real.client() as client:
        older = client.producer(topic, name="n")
        older.publish(b"1")
        with client.producer(topic, name="n") as newer:
            older.close()
            assert newer.publish(b"2").offset == 1


def test_publish_opens_another_producer_when_a_topic_is_new_again(real: Broker, topic: str) -> None:
    with real.client() as client:
        assert client.publish(topic, b"1").offset == 0
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic, durability="os")
        with pytest.raises(danube_fast.TopicDeleted, match="create it again"):
            client.publish(topic, b"of the topic that was")
        assert client.publish(topic, b"2").offset == 0
        assert len([user for user in client._core.opened if user.topic == topic]) == 1  # type: ignore[union-attr]
