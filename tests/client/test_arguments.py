"""Every public argument, wrong: it fails at the call, in our words, and what was called goes on as before."""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

import danube_fast
from danube_fast.client.values.arguments import (
    ConsumerArguments,
    ProducerArguments,
    PublishArguments,
)
from danube_fast.errors import InvalidArgument
from danube_fast.testing import Broker

NAIVE = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - that is what it is about
LONE = "\udc80"
SECONDS = ["x", math.inf, math.nan, True, 1e30]
WAITS = ["x", math.inf, math.nan, True, 1e30]
TEXTS = [5, "", LONE, b"x", "x" * 300]
POSITIONS = [
    -1,
    2**64,
    1.5,
    "soon",
    NAIVE,
    {"last": -1},
    {"first": 1},
    [],
    None,
    True,
    "2026-01-01T00:00:00",
]
WHOLES = [0, -1, 1.5, "x", math.nan, True, 2**70]
TIMES = ["x", NAIVE, 1.5, 2**70, True]
TOPICS = [5, "x", "/a", "/a/b/c", b"/a/b", LONE, "/default/" + LONE]
KEYS = [5, LONE, 1.5]
ATTRIBUTES = ["x", 5, {"a": 1}, {1: "a"}, {"a": LONE}, [("a", "b")]]
PAYLOADS = [5, "text", 1.5, ["x"]]
POLICIES = [
    "x", 5, {"speed": 1}, {5: 5}, {"ack_timeout_ms": "x"}, {"ack_timeout_ms": 1.5}, {"ack_timeout_ms": -1},
    {"ack_timeout_ms": 10**30}, {"max_redelivery_count": True},
    {"poison_policy": "explode"}, {"dead_letter_topic": "x"}, {"dead_letter_topic": LONE},
]  # fmt: skip
NO_MESSAGES = [5, "x", None, [5]]

MESSAGE = {
    "payload": PAYLOADS, "key": KEYS, "attributes": ATTRIBUTES, "event_time": TIMES,
    "deliver_at": [*TIMES, -1], "deliver_after": SECONDS,
}  # fmt: skip
CONSUMER: dict[str, list[Any]] = {
    "subscription": TEXTS, "type": [5, "shaerd", None, [], "reader"], "initial_position": POSITIONS,
    "name": TEXTS, "timeout": WAITS, "pattern": [5, "x", "/*/x", "/default/" + LONE], "permits_bytes": WHOLES,
    "permits_messages": WHOLES, "key_filters": [5, "x", [5], [LONE]], "failure_policy": POLICIES,
}  # fmt: skip
TABLE: dict[str, dict[str, dict[str, list[Any]]]] = {
    "client": {
        "producer": {
            "topic": [*TOPICS, None], "name": TEXTS, "dispatch": [5, "quick", [], "Reliable"],
            "durability": [5, "disk", [], True], "partitions": [-1, 1.5, "x", True],
            "linger_us": [-1, "x", math.inf, math.nan, True], "batch_bytes_max": [1, 2**40, 1.5, "x"],
            "window_bytes_max": [0, 1.5, "x"], "timeout": [*SECONDS, 0, -1],
            "compression": ["gzip", 5, []], "lingr_us": [5],
        },
        "publish": {"topic": [*TOPICS, None], **MESSAGE, "kee": [1]},
        "consumer": {"topic": [*TOPICS, [], ["/default/a", 5], ["/default/a", "/default/a"]], **CONSUMER},
        "reader": {
            "topic": [*TOPICS, []], "pattern": [5, "x"], "start": POSITIONS,
            "stop": [-1, 1.5, "soon", NAIVE, True], "timeout": WAITS, "permits_bytes": WHOLES,
        },
        "request": {
            "topic": [*TOPICS, None], "payload": PAYLOADS, "timeout": [*SECONDS, 0, -1], "key": KEYS,
            "attributes": ATTRIBUTES,
        },
        "reply": {"message": [5, "x", None], "payload": PAYLOADS, "attributes": ATTRIBUTES},
        "subscribe": {
            "topic": TOPICS, "handler": [5, "x", None], "concurrency": [0, 1.5, "x", True, 10**6],
            **CONSUMER, "prmits": [5],
        },
        "close": {"timeout": WAITS},
    },
    "producer": {
        "send": {**MESSAGE, "on_delivery": [5, "x"]},
        "send_many": {
            "payloads": [5, "text", b"bytes", [5], ["x"], [b"x", 5]],
            "keys": [[5], 5, [LONE], ["a", "b"]], "attributes": [[5], "x", [{"a": 1}], [{"a": LONE}]],
            "event_times": [["x"], [NAIVE], 5, [2**70]], "deliver_at": [["x"], [NAIVE], 5, [2**70]],
            "on_delivery": [5],
        },
        "publish": MESSAGE,
        "flush": {"timeout": WAITS},
        "close": {"timeout": WAITS},
    },
    "consumer": {
        "receive": {"timeout": WAITS},
        "receive_batch": {"max_messages": WHOLES, "timeout": WAITS},
        "ack": {"what": NO_MESSAGES},
        "ack_cumulative": {"message": NO_MESSAGES},
        "nack": {"what": NO_MESSAGES, "delay": SECONDS, "reason": [5, None, LONE]},
        "extend": {"message": NO_MESSAGES, "seconds": SECONDS},
        "flush_acks": {"timeout": WAITS},
        "seek": {"position": POSITIONS, "timeout": WAITS},
        "close": {"timeout": WAITS},
    },
    "reader": {
        "receive_batch": {"max_messages": WHOLES, "timeout": WAITS},
        "batches": {"max_messages": WHOLES},
        "close": {"timeout": WAITS},
    },
    "subscriber": {"wait": {"timeout": WAITS}, "close": {"timeout": WAITS}},
    "admin": {
        "peek": {"topic": TOPICS, "count": WHOLES, "position": POSITIONS},
        "tail": {"topic": TOPICS, "count": WHOLES},
        "create_topic": {
            "topic": [*TOPICS, None], "dispatch": [5, "quick"], "durability": [5, "disk"],
            "partitions": [-1, "x", 1.5, 10**9, object()],
        },
        "describe_topic": {"topic": [*TOPICS, object()]},
        "set_topic_policy": {
            "topic": TOPICS, "values": ["x", 5, {"speed": 1}, {"producers_max": "x"}, {"producers_max": -1}],
        },
        "set_failure_policy": {"topic": TOPICS, "subscription": [5, LONE], "values": POLICIES},
        "move_topic": {"topic": TOPICS, "worker": ["x", 1.5, object()], "timeout": WAITS},
        "create_namespace": {"namespace": [5, "", "a/b", LONE]},
        "redrive": {"topic": TOPICS, "max_messages": WHOLES},
    },
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "request": {"payload": b"x"}, "reply": {"payload": b"x"}, "publish": {"payload": b"x"},
    "consumer": {"subscription": "s"}, "subscribe": {"subscription": "s", "handler": print},
    "send": {"payload": b"x"}, "send_many": {"payloads": [b"x"]}, "extend": {"seconds": 1},
    "set_topic_policy": {"values": {}}, "move_topic": {"worker": 0},
    "set_failure_policy": {"subscription": "s", "values": {}}, "redrive": {"subscription": "s"},
}  # fmt: skip
OURS = ("Expected `", "msgspec", "steps()", "NoneType' object", "$.", "unexpected keyword")
"""Words of libraries and of our own inside, which mean nothing to a caller."""


def calls(thing: str) -> list[tuple[str, str, Any]]:
    return [
        (method, argument, value)
        for method, arguments in TABLE[thing].items()
        for argument, values in arguments.items()
        for value in values
    ]


def arguments_of(
    owner: Any, method: str, argument: str, value: Any, topic: str, message: Any
) -> Any:
    """One wrong argument, and right ones beside it."""
    right = {"topic": topic, "message": message, "what": message, "position": "earliest"}
    right |= RIGHT.get(method, {})
    if argument == "key_filters":
        right["type"] = "key_shared"
    if argument == "pattern":
        right["topic"] = None
    if method == "create_topic":
        right["topic"] = f"{topic}-new"
    takes = inspect.signature(getattr(owner, method)).parameters
    return {name: right[name] for name in right if name in takes} | {argument: value}


def judge(call: str, error: BaseException | None) -> str | None:
    """What is wrong with that outcome."""
    if error is None:
        return f"{call} was taken"
    if not isinstance(error, InvalidArgument):
        return f"{call} raised {type(error).__name__}: {error}"
    found = [word for word in OURS if word in str(error)]
    return f"{call} says {error}" if found else None


def test_whatever_is_public_is_in_the_table() -> None:
    kinds: dict[str, Any] = {
        "client": danube_fast.Client, "producer": danube_fast.Producer, "consumer": danube_fast.Consumer,
        "reader": danube_fast.Reader, "subscriber": danube_fast.Subscriber,
    }  # fmt: skip
    more: dict[Any, list[str]] = {
        "publish": list(PublishArguments.__annotations__),
        "producer": list(ProducerArguments.__annotations__),
        "subscribe": list(ConsumerArguments.__annotations__),
    }
    for thing, kind in kinds.items():
        for name, method in vars(kind).items():
            if name.startswith("_") or not inspect.isfunction(method):
                continue
            parameters = inspect.signature(method).parameters.values()
            wanted = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}
            wanted |= set(more.get(name, [])) if thing == "client" else set()
            missing = wanted - set(TABLE[thing].get(name, ())) - {"schema"}
            assert not missing, f"{thing}.{name}: {missing}"


def test_a_wrong_argument_fails_at_the_call(real: Broker, topic: str) -> None:
    faults: list[str] = []
    with real.client() as client:
        producer = client.producer(topic, partitions=0)
        consumer = client.consumer(topic, subscription="s")
        producer.publish(b"first")
        message = consumer.receive(timeout=60)
        reader = client.reader(topic, stop=None)
        subscriber = client.subscribe(topic, "handled", lambda message: None)
        things = {
            "client": client, "producer": producer, "consumer": consumer, "reader": reader,
            "subscriber": subscriber, "admin": client.admin,
        }  # fmt: skip
        for thing, owner in things.items():
            for method, argument, value in calls(thing):
                given = arguments_of(owner, method, argument, value, topic, message)
                try:
                    outcome = getattr(owner, method)(**given)
                    if inspect.isgenerator(outcome):
                        next(outcome)
                    faults += [judge(f"{thing}.{method}({argument}={value!r})", None) or ""]
                except Exception as error:
                    fault = judge(f"{thing}.{method}({argument}={value!r})", error)
                    faults += [fault] if fault else []
            producer.publish(b"on")
            got = consumer.receive(timeout=60)
            assert got is not None and got.payload == b"on", thing
            consumer.ack(got)
            consumer.flush_acks(timeout=60)
    assert not faults, "\n".join(faults)


def test_a_wrong_argument_fails_at_the_call_that_is_awaited(real: Broker, topic: str) -> None:
    faults: list[str] = []

    async def refused(call: str, do: Callable[[], Any]) -> None:
        try:
            outcome = do()
            if inspect.isasyncgen(outcome):
                await anext(outcome)
            else:
                await outcome
            error: BaseException | None = None
        except Exception as fault:
            error = fault
        wrong = judge(call, error)
        if wrong:
            faults.append(wrong)

    async def main() -> None:
        async with await real.async_client() as client:
            producer = await client.producer(topic)
            consumer = await client.consumer(topic, subscription="s")
            await producer.publish(b"first")
            message = await consumer.receive(timeout=60)
            things = {
                "client": client, "producer": producer, "consumer": consumer,
                "reader": await client.reader(topic, stop=None),
                "subscriber": await client.subscribe(topic, "handled", lambda message: None),
                "admin": client.admin,
            }  # fmt: skip
            for thing, owner in things.items():
                for method, argument, value in calls(thing):
                    given = arguments_of(owner, method, argument, value, topic, message)
                    call = f"{thing}.{method}({argument}={value!r})"
                    await refused(call, lambda: getattr(owner, method)(**given))  # noqa: B023
                await producer.publish(b"on")
                got = await consumer.receive(timeout=60)
                assert got is not None and got.payload == b"on", thing
                await consumer.ack(got)
                await consumer.flush_acks(timeout=60)

    asyncio.run(main())
    assert not faults, "\n".join(faults)


CONNECT: dict[str, list[Any]] = {
    "url": [5, "x", "http://x", "danube://", "danube://a:b", b"danube://a"], "name": TEXTS,
    "transport": [5, "pigeon", []], "spin_us": [-1, 1.5, "x", True], "timeout": WAITS,
}  # fmt: skip


@pytest.mark.parametrize("argument", list(CONNECT))
def test_connect_refuses_what_cannot_be(real: Broker, argument: str) -> None:
    for value in CONNECT[argument]:
        given = {"url": real.url, argument: value}
        with pytest.raises(InvalidArgument):
            danube_fast.connect(**given)
        with pytest.raises(InvalidArgument):
            asyncio.run(danube_fast.connect_async(**given))


def test_a_topic_that_stores_nothing_has_no_durability(real: Broker, topic: str) -> None:
    with real.client() as client:
        with pytest.raises(InvalidArgument, match="stores nothing"):
            client.producer(topic, dispatch="non_reliable", durability="fsync")
        with pytest.raises(InvalidArgument, match="stores nothing"):
            client.admin.create_topic(topic, dispatch="non_reliable", durability="fsync")
        assert topic not in [found["topic"] for found in client.admin.list_topics()]
        with pytest.raises(
            InvalidArgument, match=r"publish\(\) has no option kee=.*did you mean key="
        ):
            client.publish(topic, b"x", kee=1)  # type: ignore[call-arg]
        assert topic not in [found["topic"] for found in client.admin.list_topics()]


def test_close_behind_the_clients_own_close_is_quiet(real: Broker, topic: str) -> None:
    client = real.client()
    things: list[Any] = [
        client.producer(topic), client.consumer(topic, subscription="s"),
        client.reader(topic), client.subscribe(topic, "h", print),
    ]  # fmt: skip
    client.close()
    client.close()
    for thing in things:
        thing.close()

    async def main() -> None:
        twin = await real.async_client()
        others: list[Any] = [
            await twin.producer(topic), await twin.consumer(topic, subscription="s"),
            await twin.reader(topic), await twin.subscribe(topic, "h", print),
        ]  # fmt: skip
        await twin.close()
        for other in others:
            await other.close()

    asyncio.run(main())


def test_numbers_of_numpy_are_numbers(real: Broker, topic: str) -> None:
    with real.client() as client:
        client.publish(topic, b"x")
        consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        batch = consumer.receive_batch(timeout=60)
        consumer.seek(batch.offsets[0])
        again = consumer.receive(timeout=60)
        assert again is not None and again.payload == b"x"


def test_no_time_at_all_finds_a_topic_that_is_there(real: Broker, topic: str) -> None:
    with real.client() as client:
        with pytest.raises(danube_fast.NotFound):
            client.consumer(topic, subscription="s", timeout=0)
        client.publish(topic, b"x")
        with client.consumer(topic, subscription="s", timeout=0) as consumer:
            assert consumer.state == "connected"
