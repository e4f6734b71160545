"""Request and reply over ordinary topics, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.client.handle import requests
from danube_fast.client.produce.publisher import Publisher
from danube_fast.testing import Broker

WAIT_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_SECONDS} s"
        time.sleep(0.01)
    return value


def reply_topics(client: danube_fast.Client) -> set[str]:
    return {entry["topic"] for entry in client.admin.list_topics(pattern="/system/reply-*")}


@contextmanager
def responder(
    broker: Broker, topic: str, handler: Callable[[danube_fast.Message], object], **options: Any
) -> Iterator[danube_fast.Client]:
    with broker.client(name="responder") as client:
        client.admin.create_topic(topic)
        with client.subscribe(topic, "responders", handler, **options):
            yield client


def backwards(message: danube_fast.Message) -> bytes:
    assert message.payload is not None
    return message.payload[::-1]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_many_requests_beside_each_other_share_one_reply_topic(
    real: Broker, topic: str, transport: str
) -> None:
    with responder(real, topic, backwards) as other, real.client(transport=transport) as client:
        before = reply_topics(other)

        def ask(number: int) -> bool:
            payload = b"request-%d" % number
            reply = client.request(topic, payload, timeout=WAIT_SECONDS, key=b"%d" % (number % 7))
            return reply.payload == payload[::-1] and len(reply.attributes) == 1

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(ask, range(400)))
        mine = reply_topics(other) - before
        assert len(mine) == 1
        assert client.admin.describe_topic(mine.pop())["dispatch"] == "non_reliable"


def test_two_clients_have_reply_topics_of_their_own_which_end_with_them(
    real: Broker, topic: str
) -> None:
    with responder(real, topic, lambda m: m.attributes["x-reply-topic"].encode()) as other:
        before = reply_topics(other)
        with real.client(name="same") as one, real.client(name="same") as two:
            names = {str(c.request(topic, b"").payload, "ascii") for c in (one, two, one)}
            assert len(names) == 2 and reply_topics(other) - before == names
        assert reply_topics(other) == before


def test_a_consumer_replies_by_itself(real: Broker, topic: str) -> None:
    with real.client() as client, ThreadPoolExecutor(1) as pool:
        client.admin.create_topic(topic)
        with client.consumer(topic, subscription="s") as consumer:
            asked = pool.submit(client.request, topic, b"one", 20, attributes={"mine": "1"})
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None and message.reply_topic is not None
            assert message.attributes["mine"] == "1"
            message.reply(b"first", {"status": "ok"})
            message.reply(b"second")  # one is enough
            reply = asked.result(WAIT_SECONDS)
            assert (reply.payload, reply.attributes["status"]) == (b"first", "ok")
            asked = pool.submit(client.request, topic, b"two", 20)
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            client.reply(message, None)
            assert asked.result(WAIT_SECONDS).payload is None


def test_a_late_reply_finds_nobody_and_harms_nobody(real: Broker, topic: str) -> None:
    may_reply = threading.Event()
    late: list[danube_fast.Message] = []

    def handler(message: danube_fast.Message) -> bytes:
        if message.payload == b"slow":
            late.append(message)
            assert may_reply.wait(WAIT_SECONDS)
        return b"reply to " + (message.payload or b"")

    with responder(real, topic, handler), real.client() as client:
        assert client.request(topic, b"quick").payload == b"reply to quick"
        began = time.monotonic()
        with pytest.raises(
            danube_fast.DeadlineExceeded, match=r"no reply .* within 2 s.*ask again"
        ):
            client.request(topic, b"slow", timeout=2)
        assert time.monotonic() - began >= 2
        until("the slow request", lambda: late)
        may_reply.set()
        for number in range(20):  # the late reply comes among these
            assert client.request(topic, b"%d" % number).payload == b"reply to %d" % number
        assert not client._core.requests._waiting


def test_who_asked_has_gone(real: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with real.client() as client:
        client.admin.create_topic(topic)
        with client.consumer(topic, subscription="s") as consumer:
            asker = real.client()
            with pytest.raises(danube_fast.DeadlineExceeded):
                asker.request(topic, b"x", timeout=2)
            with pytest.raises(danube_fast.DeadlineExceeded):
                asker.request(topic, b"y", timeout=2)
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None and message.reply_topic is not None
            message.reply(b"somebody is there")
            asker.close()
            message.reply(b"nobody is there")  # its producer hears that the topic is gone
            with real.client() as stranger:
                stranger.reply(message, b"nobody is there")  # there is no such topic
            second = consumer.receive(timeout=WAIT_SECONDS)
            assert second is not None
            second.reply(b"nobody is there")
            assert message.reply_topic not in reply_topics(client)
    assert not caplog.records


def test_what_cannot_be_replied_to(real: Broker, topic: str) -> None:
    with real.client() as client:
        with client.producer(topic) as producer:
            producer.publish(b"no request")
        with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None and message.reply_topic is None
            with pytest.raises(danube_fast.FailedPrecondition, match=r"client.request"):
                message.reply(b"x")
        with pytest.raises(danube_fast.FailedPrecondition, match="constructed"):
            danube_fast.Message(b"", attributes={"x-reply-topic": "/default/x"}).reply(b"x")
        for timeout in (0, -1, float("nan"), float("inf")):
            with pytest.raises(danube_fast.InvalidArgument, match="timeout"):
                client.request(topic, b"x", timeout=timeout)
        with pytest.raises(danube_fast.InvalidArgument, match="leave them out"):
            client.request(topic, b"x", attributes={"x-correlation-id": "1"})
        with pytest.raises(danube_fast.InvalidArgument, match="message_bytes_max"):
            client.request(topic, bytes(17 << 20))
        with pytest.raises(danube_fast.InvalidArgument, match="topic name"):
            client.request("nowhere", b"x")


def test_the_reply_topic_is_deleted_by_somebody(real: Broker, topic: str) -> None:
    asked = threading.Event()
    may_reply = threading.Event()

    def handler(message: danube_fast.Message) -> bytes:
        if message.payload == b"wait":
            asked.set()
            assert may_reply.wait(WAIT_SECONDS)
        return b"done"

    with responder(real, topic, handler) as other, real.client() as client:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.request, topic, b"wait", WAIT_SECONDS)
            assert asked.wait(WAIT_SECONDS)
            (mine,) = client._core.requests._topics
            other.admin.delete_topic(mine)
            with pytest.raises(danube_fast.Unavailable, match="ask again"):
                waiting.result(WAIT_SECONDS)
            may_reply.set()
        assert client.request(topic, b"go on").payload == b"done"
        assert mine not in reply_topics(other)


def test_a_request_that_has_ended_is_not_published(
    real: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes | None] = []

    def handler(message: danube_fast.Message) -> bytes:
        seen.append(message.payload)
        return b"done"

    with responder(real, topic, handler), real.client() as client:
        assert client.request(topic, b"before").payload == b"done"
        own = client._core.requests

        def slow(*_: object) -> bool:
            """Find no quick way; the reply topic goes before there is another one."""
            assert own._reader is not None
            own.reader_failed(own._reader, danube_fast.TopicDeleted("gone"))
            return False

        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "send_columns", slow)
            with pytest.raises(danube_fast.Unavailable, match="ask again"):
                client.request(topic, b"ended", WAIT_SECONDS)
        assert client.request(topic, b"after").payload == b"done"
        assert seen == [b"before", b"after"]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_requests_go_on_when_workers_are_killed(topic: str, transport: str) -> None:
    with (
        Broker(workers=2) as broker,
        responder(broker, topic, backwards),
        broker.client(transport=transport) as client,
    ):
        assert client.request(topic, b"before").payload == b"erofeb"
        (reply_topic,) = reply_topics(client)
        killed = [broker.kill_worker(index) for index in range(2)]

        def ask() -> bool:
            try:
                return client.request(topic, b"after", timeout=2).payload == b"retfa"
            except danube_fast.DeadlineExceeded:
                return False  # the reply went with the worker

        until("a reply", ask)
        for _ in range(50):
            assert client.request(topic, b"after", timeout=WAIT_SECONDS).payload == b"retfa"
        assert reply_topics(client) == {reply_topic}
        assert not set(killed) & set(broker.worker_pids)


def test_the_time_of_a_request_counts_everything(topic: str) -> None:
    with Broker() as broker:
        client = broker.client(timeout=600)
        client.admin.create_topic(topic)
        broker.kill()
        began = time.monotonic()
        with pytest.raises(danube_fast.DanubeError):
            client.request(topic, b"x", timeout=0.5)
        assert time.monotonic() - began < WAIT_SECONDS
        broker.start()
        with client.subscribe(topic, "s", backwards):
            assert client.request(topic, b"ab", timeout=WAIT_SECONDS).payload == b"ba"
        client.close()


def test_closing_ends_a_request(real: Broker, topic: str) -> None:
    client = real.client()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.request, topic, b"x", WAIT_SECONDS)
        until("the request", lambda: client._core.requests._waiting)
        client.close()
        with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
            asked.result(WAIT_SECONDS)


def test_names_that_are_taken(real: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = "/system/reply-taken"
    names = iter([taken, "/system/reply-free"])
    with responder(real, topic, backwards) as other:
        other.admin.create_topic(taken)
        monkeypatch.setattr(requests, "reply_topic_name", lambda: next(names))
        with real.client() as client:
            assert client.request(topic, b"ab").payload == b"ba"
        assert reply_topics(other) >= {taken} and "/system/reply-free" not in reply_topics(other)
        other.admin.delete_topic(taken)


def test_asynchronous_requests_and_replies(real: Broker, topic: str) -> None:
    async def handler(message: danube_fast.Message) -> bytes | None:
        if message.payload == b"quiet":
            return None
        await asyncio.sleep(0)
        return backwards(message)

    async def main() -> None:
        async with await real.async_client() as other, await real.async_client() as client:
            await other.admin.create_topic(topic)
            async with await other.subscribe(topic, "s", handler):
                payloads = [b"request-%d" % n for n in range(100)]
                replies = await asyncio.gather(*(client.request(topic, p) for p in payloads))
                assert [r.payload for r in replies] == [p[::-1] for p in payloads]
                cancelled = [asyncio.ensure_future(client.request(topic, b"quiet")) for _ in "ab"]
                while len(client._core.requests._waiting) < 2:  # noqa: ASYNC110 - a few turns
                    await asyncio.sleep(0)
                cancelled[0].cancel()
                cancelled[1].cancel()
                assert (await client.request(topic, b"on")).payload == b"no"
                assert not client._core.requests._waiting
            async with await other.consumer(topic, subscription="by hand") as consumer:
                asked = asyncio.ensure_future(client.request(topic, b"x", WAIT_SECONDS))
                message = await consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None
                await message.reply(b"y", {"a": "b"})
                reply = await asked
                assert (reply.payload, reply.attributes["a"]) == (b"y", "b")
                asked = asyncio.ensure_future(client.request(topic, b"x", WAIT_SECONDS))
                message = await consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None
                await other.reply(message, b"z")
                assert (await asked).payload == b"z"

    asyncio.run(main())


INTERRUPTED = """
import sys, danube_fast
client = danube_fast.connect(sys.argv[1])
handle = client.subscribe(sys.argv[2], "s", print, timeout=60)
try:
    print("waiting", flush=True)
    client.request(sys.argv[2] + "-nobody", b"x", 600) if sys.argv[3] == "request" else handle.wait()
except KeyboardInterrupt:
    client.close()
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("what", ["request", "wait"])
def test_ctrl_c_ends_what_waits(real: Broker, topic: str, what: str) -> None:
    with real.client() as client:
        client.admin.create_topic(topic)
    command = [sys.executable, "-c", INTERRUPTED, real.url, topic, what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)  # it waits, or is about to
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait(WAIT_SECONDS) == 0


KILLED = """
import sys, danube_fast
client = danube_fast.connect(sys.argv[1])
try:
    client.request(sys.argv[2], b"x", 3)
except danube_fast.DanubeError as error:
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""


def test_the_reply_topic_of_a_killed_client_goes() -> None:
    with Broker(workers=2, reply_topic_expiry_seconds=1) as broker, broker.client() as client:
        client.admin.create_topic("/default/asked")
        client.admin.create_topic("/system/reply", dispatch="non_reliable")
        command = [sys.executable, "-c", KILLED]
        command += [broker.url, "/default/asked"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "DeadlineExceeded\n"
                (topic,) = reply_topics(client)
                until("it is read for long", lambda: _age_of(process.pid) > 4)
                assert reply_topics(client) == {topic}, "its client lives"
            finally:
                process.kill()
        until("the broker deletes it", lambda: not reply_topics(client))
        assert [t["topic"] for t in client.admin.list_topics(pattern="/system/*")] == [
            "/system/reply"
        ]


def _age_of(pid: int) -> float:
    """Seconds since a process was started."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
