"""A limit that is reached is told at once, with its name; only who reconnects is patient."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link import calls
from danube_fast.errors import Internal
from danube_fast.net import protocol as p
from danube_fast.testing import Broker

TOPIC = "/default/t"
EXHAUSTED = danube_fast.ResourceExhausted.code


def test_a_first_open_hears_at_once_which_limit_it_is(real: Broker, topic: str) -> None:
    with real.client() as one, real.client() as two:
        one.admin.create_topic(topic)
        values = {"producers_max": 1, "subscriptions_max": 1, "consumers_per_subscription_max": 1}
        one.admin.set_topic_policy(topic, values)
        with one.producer(topic), one.consumer(topic, subscription="s", type="shared"):
            with pytest.raises(danube_fast.ResourceExhausted, match=r"producers_max 1.*set-policy"):
                two.producer(topic)
            with pytest.raises(danube_fast.ResourceExhausted, match="subscriptions_max 1"):
                two.consumer(topic, subscription="other")
            with pytest.raises(danube_fast.ResourceExhausted, match="per_subscription_max 1"):
                two.consumer(topic, subscription="s", type="shared")
            with pytest.raises(danube_fast.ResourceExhausted, match="producers_max 1"):
                two.publish(topic, b"x")
        two.publish(topic, b"there is a place again")


def test_an_asynchronous_client_hears_it_too(real: Broker, topic: str) -> None:
    async def main() -> None:
        async with await real.async_client() as one, await real.async_client() as two:
            await one.admin.create_topic(topic)
            await one.admin.set_topic_policy(topic, {"producers_max": 1, "consumers_max": 1})
            await one.producer(topic)
            await one.consumer(topic, subscription="s")
            with pytest.raises(danube_fast.ResourceExhausted, match="producers_max 1"):
                await two.producer(topic)
            with pytest.raises(danube_fast.ResourceExhausted, match="consumers_max 1"):
                await two.consumer(topic, subscription="other")

    asyncio.run(main())


class Refusals:
    """Has a broker refuse opens for a limit."""

    def __init__(self, broker: Any, *commands: str, times: int, code: int = EXHAUSTED) -> None:
        self.broker, self.left, self.code = broker, times, code
        with broker.lock:
            for command in commands:
                opens = getattr(broker, f"_on_{command}")
                setattr(broker, f"_on_{command}", functools.partial(self._answer, opens))
            broker.forget_sessions()

    def _answer(self, opens: Any, session: Any, identity: bytes, command: Any) -> None:
        if self.left:
            self.left -= 1
            text = "there is 1 and the policy allows producers_max 1"
            self.broker.reply(identity, p.Error(command.request, self.code, text))
        else:
            opens(session, identity, command)


def test_a_first_open_outlasts_one_failed_sync(broker: Any, client: danube_fast.Client) -> None:
    refusals = Refusals(broker, "openproducer", "subscribe", times=2, code=Internal.code)
    assert client.producer(TOPIC).publish(b"x").offset == 0
    refusals.left = 2
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    assert consumer.receive(timeout=60) is not None and refusals.left == 0


@pytest.mark.parametrize("command", ["openproducer", "subscribe"])
def test_who_reconnects_waits_for_its_own_place(
    broker: Any, client: danube_fast.Client, command: str
) -> None:
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    producer.publish(b"before")
    refusals = Refusals(broker, command, times=3)
    assert producer.publish(b"behind").offset == 1
    got = [consumer.receive(timeout=60), consumer.receive(timeout=60)]
    assert [message.payload for message in got if message is not None] == [b"before", b"behind"]
    assert refusals.left == 0


def test_a_place_that_is_taken_for_good_ends_who_reconnects(
    broker: Any, client: danube_fast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "TAKEOVER_NS", 100_000_000)
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s")
    Refusals(broker, "openproducer", "subscribe", times=1 << 30)
    with pytest.raises(danube_fast.ResourceExhausted, match="producers_max 1"):
        consumer.receive(timeout=60)
    with pytest.raises(danube_fast.ResourceExhausted, match="producers_max 1"):
        producer.publish(b"x")
