"""Sessions: heartbeats, lost connections, restarts, silence, forks, interrupts, closing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link.url import parse_url
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p

TOPIC = "/default/t"


def stored(broker: Any) -> list[bytes | None]:
    with broker.lock:
        (partition,) = broker.topics[TOPIC].partitions
        return [p for _, _, frame in partition.frames for p in FrameView(frame).payloads()]


@pytest.mark.parametrize("forget", ["forget_sessions", "forget_connections"])
def test_producer_resends_exactly_what_was_lost(
    broker: Any, client: danube_fast.Client, forget: str
) -> None:
    producer = client.producer(TOPIC, batch_bytes_max=4096)
    expected = []
    for turn in range(5):
        payloads: list[bytes | None] = [b"%d-%d" % (turn, i) * 50 for i in range(100)]
        expected += payloads
        broker.drop_publishes = turn  # the first ones vanish, then the connection is lost
        producer.send_many(payloads)
        broker.wait("the drops", lambda: not broker.drop_publishes)
        getattr(broker, forget)()
    assert producer.flush(timeout=60) == danube_fast.MessageId(TOPIC, 499)
    assert stored(broker) == expected


def test_acks_lost_with_the_connection_are_told_again_with_the_same_offset(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC)
    broker.hold_acks = True
    told: list[Any] = []
    for i in range(3):
        producer.send(b"%d" % i, on_delivery=lambda m, e: told.append((m.offset, e)))
    broker.wait("the frames", lambda: len(stored(broker)) == 3)
    with broker.lock:
        broker.held.clear()
        broker.hold_acks = False
        broker.forget_sessions()
    producer.flush(timeout=60)
    assert told == [(0, None), (1, None), (2, None)]
    assert stored(broker) == [b"0", b"1", b"2"]


def test_state_lost_by_a_memory_topic_renumbers(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    producer.publish(b"gone")
    with broker.lock:
        (partition,) = broker.topics[TOPIC].partitions
        partition.frames.clear()
        partition.producers.clear()
        broker.forget_sessions()
    producer.send_many([b"a", b"b"])
    producer.flush(timeout=60)
    assert stored(broker) == [b"a", b"b"]


@pytest.mark.parametrize("forget", ["forget_sessions", "forget_connections"])
def test_consumer_survives_and_old_acks_are_no_ops(
    broker: Any, client: danube_fast.Client, forget: str
) -> None:
    client.producer(TOPIC).send_many([b"%d" % i for i in range(10)])
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    first = [consumer.receive(timeout=60) for _ in range(4)]
    assert first[3] is not None
    consumer.ack(first[0])
    consumer.flush_acks(timeout=60)
    getattr(broker, forget)()
    subscribed = broker.commands["Subscribe"]
    broker.wait("a new subscription", lambda: broker.commands["Subscribe"] > subscribed)
    again = [consumer.receive(timeout=60) for _ in range(9)]
    assert [m.offset for m in again if m] == list(range(1, 10))
    consumer.ack([m for m in first if m])
    with pytest.raises(danube_fast.Unavailable, match="delivered again"):
        consumer.flush_acks(timeout=60)  # what was not sent is not claimed
    consumer.ack([m for m in again if m])
    consumer.flush_acks(timeout=60)
    assert broker.acked(TOPIC, "s") == set(range(10))
    assert consumer.state == "connected"


@pytest.mark.parametrize("dispatch", ["reliable", "non_reliable"])
def test_what_waits_is_void_as_soon_as_the_connection_is_lost(
    broker: Any, client: danube_fast.Client, dispatch: str
) -> None:
    producer = client.producer(TOPIC, dispatch=dispatch)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    for name in (b"a", b"b"):
        producer.send_many([name, name])
        producer.flush(timeout=60)
    taken = consumer.receive(timeout=60)
    assert taken is not None and taken.offset == 0
    broker.mute = True
    broker.wait("the loss", lambda: consumer.state == "reconnecting")
    left = []
    while (message := consumer.receive(timeout=0)) is not None:
        left.append(message.offset)
    # another consumer may have a reliable message by now; what is not reliable comes once
    assert left == ([] if dispatch == "reliable" else [1, 2, 3])
    broker.mute = False
    broker.wait("the next session", lambda: consumer.state == "connected")
    if dispatch == "reliable":
        again = [consumer.receive(timeout=60) for _ in range(4)]
        assert [m.offset for m in again if m] == [0, 1, 2, 3]


def test_reader_goes_on_behind_what_it_has(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, batch_bytes_max=4096)
    payloads: list[bytes | None] = [b"%05d" % i * 20 for i in range(3000)]
    producer.send_many(payloads)
    producer.flush(timeout=60)
    got = []
    for index, message in enumerate(client.reader(TOPIC, permits_bytes=8192)):
        got.append(message.payload)
        if index in (100, 2000):
            broker.forget_connections()
        if index == 1000:
            broker.forget_sessions()
    assert got == payloads


def test_heartbeats_keep_their_rhythm(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = sys.modules[type(broker).__module__].LIMITS
    with danube_fast.connect(broker.url) as client:
        broker.wait("idle pings", lambda: broker.commands["Ping"])
        client.producer(TOPIC).publish(b"x")
    monkeypatch.setitem(limits, "heartbeat_idle_ms", 600_000)
    with danube_fast.connect(broker.url) as client, client.consumer(TOPIC, subscription="s"):
        before, began = broker.commands["Ping"], time.monotonic()
        broker.wait("pings of a consumer", lambda: broker.commands["Ping"] >= before + 6)
        assert time.monotonic() - began > 4 * limits["heartbeat_ms"] / 1000, "too many pings"


def test_silence_leads_to_a_new_connection(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s")
    producer.publish(b"1")
    hellos = broker.hellos
    broker.mute = True
    producer.send(b"2")
    broker.wait("the loss", lambda: consumer.state == "reconnecting")
    broker.mute = False
    producer.flush(timeout=60)
    assert broker.hellos > hellos
    assert stored(broker) == [b"1", b"2"]
    offsets = set()
    while offsets != {0, 1}:
        message = consumer.receive(timeout=60)
        assert message is not None
        offsets.add(message.offset)


def test_nobody_there() -> None:
    with pytest.raises(danube_fast.Unavailable, match="danube-fast serve"):
        danube_fast.connect("danube://127.0.0.1:9", timeout=0.3)


def test_second_host_answers(broker: Any) -> None:
    url = f"danube://127.0.0.1:9,{broker.url.removeprefix('danube://')}"
    with danube_fast.connect(url, timeout=60) as client:
        assert client.publish(TOPIC, b"x").offset == 0


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("danube://127.0.0.1", ["tcp://127.0.0.1:6650"]),
        ("danube://a:1,b:2/", ["tcp://a:1", "tcp://b:2"]),
        ("danube://[::1]:7", ["tcp://[::1]:7"]),
        ("danube://[::1]", ["tcp://[::1]:6650"]),
    ],
)
def test_urls(url: str, endpoints: list[str]) -> None:
    assert parse_url(url) == endpoints


@pytest.mark.parametrize("url", ["", "tcp://a:1", "danube://", "danube://a:b", "danube://a:70000"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(danube_fast.InvalidArgument, match="danube://"):
        parse_url(url)


def test_options_that_do_not_fit(broker: Any) -> None:
    with pytest.raises(danube_fast.InvalidArgument, match="sign_on="):
        danube_fast.connect(broker.url, tls="ca.pem")
    with pytest.raises(danube_fast.InvalidArgument, match="transport"):
        danube_fast.connect(broker.url, transport="pigeon")


def test_closed_client_refuses_everything(broker: Any) -> None:
    client = danube_fast.connect(broker.url)
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s")
    client.close()
    client.close()
    for call in (
        lambda: producer.send(b"x"),
        lambda: producer.publish(b"x"),
        lambda: consumer.receive(timeout=1),
        lambda: client.producer(TOPIC),
        lambda: client.admin.list_topics(),
    ):
        with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
            call()


def test_close_ends_a_receive_in_another_thread(broker: Any) -> None:
    client = danube_fast.connect(broker.url)
    client.publish(TOPIC, b"x")
    consumer = client.consumer(TOPIC, subscription="s")
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            consumer.receive()
        except danube_fast.DanubeError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    client.close(timeout=60)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(errors[0], danube_fast.FailedPrecondition)


def test_close_returns_although_nobody_answers(broker: Any) -> None:
    client = danube_fast.connect(broker.url)
    producer = client.producer(TOPIC)
    client.consumer(TOPIC, subscription="s")
    with broker.lock:  # otherwise it may have looked, and takes one message more
        broker.mute = True
    producer.send(b"x")
    with pytest.raises(danube_fast.DeadlineExceeded, match="1 messages"):
        client.close(timeout=0.3)
    broker.mute = False


def test_two_threads_wait_on_one_client(broker: Any, client: danube_fast.Client) -> None:
    """A consumer waits as the leader while producers publish through the same sockets."""
    client.publish(TOPIC, b"first")
    consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
    got: list[bytes | None] = []

    def receive() -> None:
        while len(got) < 301:
            message = consumer.receive(timeout=60)
            if message is None:
                return
            got.append(message.payload)
            consumer.ack(message)

    def publish(worker: int) -> None:
        producer = client.producer(TOPIC)
        for i in range(100):
            producer.publish(b"%d-%d" % (worker, i))

    threads = [threading.Thread(target=receive)]
    threads += [threading.Thread(target=publish, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 301
    broker.wait("all acks", lambda: len(broker.acked(TOPIC, "s")) == 301)


def test_after_fork_every_call_says_so(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s")
    producer.publish(b"x")
    assert consumer.receive(timeout=60) is not None
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        outcome = b""
        for call in (
            lambda: producer.send(b"x"),
            lambda: producer.flush(),
            lambda: consumer.receive(),
            lambda: client.publish(TOPIC, b"x"),
        ):
            try:
                call()
                outcome += b"?"
            except danube_fast.FailedPrecondition as error:
                outcome += b"." if "forked" in str(error) else b"!"
            except BaseException:
                outcome += b"!"
        os.write(writing, outcome)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"...."
    os.waitpid(child, 0)
    assert producer.publish(b"the parent goes on").offset == 1


@pytest.mark.parametrize(
    "call", ["consumer.receive()", "producer.flush(60)", "producer.publish(b'x')"]
)
def test_interrupt_ends_a_blocking_call(broker: Any, call: str) -> None:
    code = (
        "import danube_fast, sys\n"
        f"client = danube_fast.connect({broker.url!r})\n"
        f"producer = client.producer({TOPIC!r})\n"
        f"consumer = client.consumer({TOPIC!r}, subscription='s')\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "producer.send(b'y')\n"
        "try:\n"
        "    print('waiting', flush=True)\n"
        f"    {call}; {call}\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "client._core.shut()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        assert child.stdout.readline() == "ready\n"
        broker.hold_acks = True
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
    assert child.returncode == 0


def test_concurrent_publishes_share_one_cached_producer(
    broker: Any, client: danube_fast.Client
) -> None:
    threads = [threading.Thread(target=client.publish, args=(TOPIC, b"x")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stored(broker)) == 8
    assert broker.commands["OpenProducer"] == 1


def test_operation_with_an_unknown_outcome_says_so_at_once(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules[type(broker).__module__].LIMITS, "heartbeat_idle_ms", 60_000)
    with danube_fast.connect(broker.url, timeout=60) as client:
        client.publish(TOPIC, b"x")
        broker.ignore_admin = True
        broker.commands.clear()

        def forget() -> None:
            broker.wait("the question", lambda: broker.commands["Admin"])
            broker.forget_sessions()

        threading.Thread(target=forget).start()
        with pytest.raises(danube_fast.Unavailable, match="before you repeat it"):
            client.admin.list_topics()
        broker.ignore_admin = False
        assert client.admin.list_topics() == [{"topic": TOPIC}]


def test_a_producer_that_cannot_be_opened_again_at_once_goes_on(
    broker: Any, client: danube_fast.Client
) -> None:
    """Nothing is sent in the new session before the producer is open there: it would count as fenced."""
    producer = client.producer(TOPIC)
    producer.publish(b"0")
    open_producer, refused = broker._on_openproducer, []

    def refuse_once(session: Any, identity: bytes, command: p.OpenProducer) -> None:
        if not refused:
            refused.append(command)
            text = "the disk failed; try again"
            broker.reply(identity, p.Error(command.request, danube_fast.Internal.code, text))
            return
        open_producer(session, identity, command)

    broker._on_openproducer = refuse_once
    broker.drop_publishes = 1
    producer.send(b"1")
    broker.wait("the drop", lambda: not broker.drop_publishes)
    broker.forget_sessions()
    producer.flush(timeout=60)
    assert refused
    assert stored(broker) == [b"0", b"1"]
