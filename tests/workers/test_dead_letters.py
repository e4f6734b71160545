"""Dead letters whose topic is not to be had for a while, and what happens to them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SystemClock
from danube_fast.errors import Unavailable
from danube_fast.security.records import Binding, Principal
from danube_fast.workers.process.access import Access
from tests.workers.shard_rig import RawClient, Rig, Shifted

DEAD, OTHER = "/default/dead", "/default/other-dead"
SECOND_NS = 1_000_000_000
POISON = {"poison_policy": "dead_letter", "max_redelivery_count": 0}


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    """Partition 1 with one message and a subscription "s"; 2 and 3 take dead letters."""
    made = rigs(session_timeout_ms=3_600_000)
    made.worker.state.clock = made.boot.clock = Shifted(made.boot.clock)
    for partition_id in (1, 2, 3):
        made.assign(partition_id)
    return made


@pytest.fixture
def client(rig: Rig) -> RawClient:
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"poison"])))[0] == 0
    assert client.subscribe(1)[0] == 67
    return client


def set_policy(rig: Rig, topic: str) -> None:
    values = {**POISON, "dead_letter_topic": topic}
    rig.operation(m.SetFailurePolicy([1], "s", values))


def fail(rig: Rig, client: RawClient) -> None:
    """The message comes, and fails once too often."""
    assert client.receive(1) == [(0, b"poison")]
    client.send(23, [[1, [0, 1]]], 0, "bad")
    rig.turn(lambda: described(rig)["blocked"], "a blocked message")


def described(rig: Rig) -> Any:
    (stats,) = rig.stats([1])
    return stats["subscriptions"][0]


def asked(rig: Rig) -> list[Any]:
    """Questions for the places of a dead-letter topic."""
    return rig.mailbox.asked(m.FindDeadLetterTopic)


def answer(rig: Rig, count: int, **reply: Any) -> None:
    """Answer the question number `count`, which is the last one."""
    rig.worker.state.clock.ahead_ns += 2 * SECOND_NS  # no pause is longer
    rig.turn(lambda: len(asked(rig)) == count, f"question {count}")
    asked(rig)[-1](SimpleNamespace(**{"error": None, "value": None, **reply}))


def letters(rig: Rig, partition_id: int) -> int:
    return int(rig.worker.state.catalog.by_id[partition_id].visible)


def test_a_letter_that_is_made_again_while_it_waits_is_published_once(
    rig: Rig, client: RawClient
) -> None:
    set_policy(rig, DEAD)
    fail(rig, client)
    answer(rig, 1, error=Unavailable("its worker is down"))
    for _ in range(3):  # somebody sees that it is blocked, and gives it another chance
        set_policy(rig, DEAD)
        fail(rig, client)
    answer(rig, 2, value=m.TopicPlaces([(2, rig.boot.config.process_index)]))
    rig.turn(lambda: described(rig)["dead_letters"], "a settled letter")
    rig.turn(lambda: not rig.worker.dead_letters.is_busy, "an empty target")
    assert letters(rig, 2) == 1
    assert described(rig)["dead_letters"] == 1


def test_a_letter_goes_to_the_topic_that_the_policy_names_now(rig: Rig, client: RawClient) -> None:
    set_policy(rig, DEAD)
    fail(rig, client)
    answer(rig, 1, error=Unavailable("its worker is down"))
    set_policy(rig, OTHER)
    fail(rig, client)
    rig.worker.state.clock.ahead_ns += 2 * SECOND_NS
    rig.turn(lambda: len(asked(rig)) == 3, "both topics are asked for")
    topics = [c.topic for c, _ in rig.mailbox.calls if isinstance(c, m.FindDeadLetterTopic)]
    for topic, got in list(zip(topics, asked(rig), strict=True))[1:]:  # in either order
        place = {DEAD: 2, OTHER: 3}[topic]
        value = m.TopicPlaces([(place, rig.boot.config.process_index)])
        got(SimpleNamespace(error=None, value=value))
    rig.turn(lambda: described(rig)["dead_letters"], "a settled letter")
    rig.turn(lambda: not rig.worker.dead_letters.is_busy, "empty targets")
    assert (letters(rig, 2), letters(rig, 3)) == (0, 1)


def test_a_message_that_fails_again_while_its_letter_is_on_its_way_has_one_letter(
    rig: Rig, client: RawClient
) -> None:
    set_policy(rig, DEAD)
    fail(rig, client)
    elsewhere = rig.boot.config.process_index + 1
    answer(rig, 1, value=m.TopicPlaces([(2, elsewhere)]))
    opened = m.Opened(1, 1, 0)
    waiting(rig, m.OpenProducer, 1)[0](SimpleNamespace(error=None, value=opened))
    (published,) = waiting(rig, m.PublishBundle, 1)
    set_policy(rig, DEAD)
    fail(rig, client)
    for _ in range(10):
        rig.worker.state.clock.ahead_ns += SECOND_NS // 50
        rig.worker.do_work()
    assert len(waiting(rig, m.PublishBundle, 1)) == 1
    published(SimpleNamespace(error=None, value=[0, 0]))
    rig.turn(lambda: not rig.worker.dead_letters.is_busy, "an empty target")
    assert described(rig)["dead_letters"] == 1
    assert len(waiting(rig, m.PublishBundle, 1)) == 1


def waiting(rig: Rig, kind: type[m.Message], count: int) -> list[Any]:
    """Answers that the worker waits for, once there are as many."""
    rig.turn(lambda: len(rig.mailbox.asked(kind)) >= count, kind.__name__)
    return rig.mailbox.asked(kind)


def test_an_open_target_stops_when_its_right_goes_and_goes_on_when_it_is_back(
    rig: Rig, client: RawClient
) -> None:
    access = Access(SystemClock())
    access.is_loaded = True
    access.confirm()
    right = Binding("b", "user:dora", "producer", DEAD)
    for record in (Principal("dora"), right):
        access.policy.put(record)
    rig.worker.dead_letters._access = access
    values = {**POISON, "dead_letter_topic": DEAD}
    rig.operation(m.SetFailurePolicy([1], "s", values, "dora"))
    fail(rig, client)
    elsewhere = rig.boot.config.process_index + 1
    answer(rig, 1, value=m.TopicPlaces([(2, elsewhere)]))
    question = next(c for c, _ in rig.mailbox.calls if isinstance(c, m.FindDeadLetterTopic))
    assert question.setter == "dora"
    waiting(rig, m.OpenProducer, 1)[0](SimpleNamespace(error=None, value=m.Opened(1, 1, 0)))
    waiting(rig, m.PublishBundle, 1)  # on its way, so that the target stays open
    access.policy.remove("binding/b")
    access.policy.version += 1
    opened = client.open_producer(1, "second")
    assert client.publish((1, client.frame(opened, 0, [b"poison"])))[0] == 0
    assert client.receive(1) == [(1, b"poison")]
    client.send(23, [[1, [1, 2]]], 0, "bad")
    rig.turn(lambda: described(rig)["dead_letter_fault"], "a fault")
    assert "dora, who set the failure policy" in described(rig)["dead_letter_fault"]
    assert len(waiting(rig, m.PublishBundle, 1)) == 1, "published without a right"
    access.policy.put(right)
    access.policy.version += 1
    answer(rig, 2, value=m.TopicPlaces([(2, elsewhere)]))
    waiting(rig, m.OpenProducer, 2)[1](SimpleNamespace(error=None, value=m.Opened(1, 2, 1)))
    waiting(rig, m.PublishBundle, 2)
