"""Producers of one name, and cached producers of topics that are deleted."""

from __future__ import annotations

import asyncio

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
        assert len([user for user in client._core.routes.users if user.topic == topic]) == 1  # type: ignore[union-attr]


def test_a_producer_that_is_cancelled_while_it_opens_takes_no_place(
    real: Broker, topic: str
) -> None:
    async def main() -> None:
        async with await real.async_client() as client:
            await client.admin.create_topic(topic)
            await client.admin.set_topic_policy(topic, {"producers_max": 1})
            cancelled = 0
            while cancelled < 3:
                opening = asyncio.ensure_future(client.producer(topic))
                # until it has asked the worker; a refusal may come first
                while not (client._core.routes.users or opening.done()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                opening.cancel()
                await asyncio.wait([opening])
                cancelled += opening.cancelled()
                if opening.cancelled():
                    continue
                refusal = opening.exception()  # the answer was quicker
                if refusal is None:
                    await opening.result().close()
                else:  # the one before it is on its way out still
                    assert isinstance(refusal, danube_fast.ResourceExhausted), refusal
            async with asyncio.timeout(20):
                while True:  # the last one may be on its way out still
                    try:
                        await (await client.producer(topic)).close()
                        return
                    except danube_fast.ResourceExhausted:
                        await asyncio.sleep(0.01)

    asyncio.run(main())
