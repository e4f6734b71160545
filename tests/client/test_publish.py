"""Producers: batches, windows, refusals, fencing, partitions, callbacks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from typing import Any

import pytest

import danube_fast
from danube_fast.frame.hash import key_hash
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.net.protocol import Status
from tests.client.fake_broker import LIMITS

TOPIC = "/default/t"


def stored(broker: Any, topic: str = TOPIC) -> list[bytes | None]:
    """Everything the broker holds, in order of offset."""
    with broker.lock:
        return [
            payload
            for partition in broker.topics[topic].partitions
            for _, _, frame in partition.frames
            for payload in FrameView(frame).payloads()
        ]


def test_sends_behind_an_unacked_frame_go_out_together(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, linger_us=2000)
    broker.hold_acks = True
    for i in range(500):
        producer.send(b"%d" % i)
    broker.wait("the lingering batch", lambda: len(stored(broker)) == 500)
    assert len(broker.publish_sizes) < 100, "messages were sent one by one"
    broker.release_acks()
    producer.flush(timeout=60)
    assert stored(broker) == [b"%d" % i for i in range(500)]


def test_full_window_blocks_then_says_why(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, batch_bytes_max=4096, window_bytes_max=8192, timeout=0.3)
    broker.hold_acks = True
    with pytest.raises(
        (danube_fast.ResourceExhausted, danube_fast.DeadlineExceeded),
        match=r"acked within|no ack from",
    ):
        producer.send_many([bytes(1000)] * 100)
    broker.release_acks()
    with contextlib.suppress(danube_fast.DeadlineExceeded):
        producer.close()  # frames that reached their timeout too are told now, or were above


def test_window_opens_when_acks_come(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, batch_bytes_max=4096, window_bytes_max=8192)
    broker.hold_acks = True
    timer = threading.Timer(0.1, broker.release_acks)
    timer.start()
    producer.send_many([bytes(1000)] * 50)
    producer.flush(timeout=60)
    timer.join()
    assert len(stored(broker)) == 50


def test_retryable_refusal_is_retried_in_order(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, linger_us=0, batch_bytes_max=4096)
    producer.publish(b"first")
    broker.refuse.extend([(8, "the disk is full")] * 3 + [(13, "a sync failed")])
    payloads = [b"%04d" % i * 300 for i in range(50)]
    producer.send_many(payloads)
    producer.flush(timeout=60)
    assert stored(broker) == [b"first", *payloads]
    assert not broker.refuse


def test_refusal_that_never_ends_is_raised_at_the_timeout(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, timeout=0.4)
    broker.refuse.extend([(8, "the disk is full: free some")] * 1000)
    with pytest.raises(danube_fast.ResourceExhausted, match="free some"):
        producer.publish(b"x")
    broker.refuse.clear()
    assert producer.publish(b"y").offset == 0
    assert stored(broker) == [b"y"]


def test_permanent_refusal_names_messages_and_spares_the_others(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, batch_bytes_max=4096)
    producer.publish(b"ok")
    broker.hold_acks = True
    broker.refuse.append((3, "no such thing"))
    outcomes: list[Any] = []
    producer.send(b"refused", on_delivery=lambda m, e: outcomes.append((m, e)))
    producer.send_many([bytes([i]) * 1000 for i in range(20)])
    broker.release_acks()
    with pytest.raises(danube_fast.InvalidArgument, match=r"1 messages.*sequence 1.*no such thing"):
        producer.flush(timeout=60)
    producer.flush(timeout=60)
    assert stored(broker) == [b"ok", *[bytes([i]) * 1000 for i in range(20)]]
    assert outcomes[0][0] is None and isinstance(outcomes[0][1], danube_fast.InvalidArgument)


def test_frames_keep_to_what_the_broker_takes(broker: Any, client: danube_fast.Client) -> None:
    """Batches of this client may be larger than `frame_bytes_max` of that broker."""
    producer = client.producer(TOPIC)
    payloads = [b"%d" % number + bytes(1000) for number in range(1500)]
    producer.send_many(payloads)
    for payload in payloads:
        producer.send(payload)
    producer.flush(timeout=60)
    assert stored(broker) == payloads * 2
    sizes = [len(frame) for _, _, frame in broker.topics[TOPIC].partitions[0].frames]
    assert LIMITS["frame_bytes_max"] // 2 < max(sizes) <= LIMITS["frame_bytes_max"]


def test_a_small_window_makes_small_batches(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, window_bytes_max=8192)
    producer.send_many([bytes(1000)] * 50)
    producer.flush(timeout=60)
    sizes = [len(frame) for _, _, frame in broker.topics[TOPIC].partitions[0].frames]
    assert max(sizes) <= 8192


def test_second_producer_of_a_name_fences_the_first(
    broker: Any, client: danube_fast.Client
) -> None:
    first = client.producer(TOPIC, name="same")
    first.publish(b"1")
    second = client.producer(TOPIC, name="same")
    assert second.publish(b"2").offset == 1
    with pytest.raises(danube_fast.ProducerFenced, match="same"):
        first.publish(b"3")
    with pytest.raises(danube_fast.ProducerFenced):
        first.send(b"4")
    assert stored(broker) == [b"1", b"2"]


def test_reopened_name_goes_on_with_its_sequences(broker: Any, client: danube_fast.Client) -> None:
    with client.producer(TOPIC, name="job") as producer:
        producer.send_many([b"a", b"b"])
    with client.producer(TOPIC, name="job") as producer:
        producer.publish(b"c")
    message = list(client.reader(TOPIC))[-1]
    assert (message.producer_name, message.sequence, message.payload) == ("job", 2, b"c")


def test_topic_deleted_under_a_producer(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    producer.publish(b"1")
    broker.delete(TOPIC)
    with pytest.raises(danube_fast.TopicDeleted):
        producer.publish(b"2")
    with pytest.raises(danube_fast.TopicDeleted):
        producer.send(b"3")


def test_mismatch_is_refused(broker: Any, client: danube_fast.Client) -> None:
    client.producer(TOPIC, dispatch="reliable", durability="os").close()
    with pytest.raises(danube_fast.FailedPrecondition, match="dispatch"):
        client.producer(TOPIC, dispatch="non_reliable")
    client.producer(TOPIC).close()


def test_large_messages_go_alone(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    large = bytes(range(256)) * 4000
    assert producer.publish(large).offset == 0
    producer.send_many([b"small", large, b"tail"])
    producer.send(large)
    producer.flush(timeout=60)
    assert stored(broker) == [large, b"small", large, b"tail", large]
    with pytest.raises(danube_fast.InvalidArgument, match="message_bytes_max"):
        producer.send(bytes(5 * 1024 * 1024))
    with pytest.raises(danube_fast.InvalidArgument, match="message_bytes_max"):
        producer.send_many([b"a", bytes(5 * 1024 * 1024)])


def test_message_too_large_with_its_attributes_is_dropped_not_stuck(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC)
    broker.hold_acks = True
    producer.send(b"before")
    producer.send(bytes(4 * 1024 * 1024 - 10), attributes={"a": "x" * 100_000})
    producer.send(b"after")
    broker.release_acks()
    with pytest.raises(danube_fast.InvalidArgument, match="message_bytes_max"):
        producer.flush(timeout=60)
    producer.flush(timeout=60)
    assert stored(broker) == [b"before", b"after"]


@pytest.mark.parametrize("bad", ["text", 5, [b"x"]])
def test_payloads_are_bytes(broker: Any, client: danube_fast.Client, bad: Any) -> None:
    producer = client.producer(TOPIC)
    with pytest.raises(danube_fast.InvalidArgument, match="encode"):
        producer.send(bad)
    with pytest.raises(danube_fast.InvalidArgument):
        producer.send_many([b"fine", bad])
    with pytest.raises(danube_fast.InvalidArgument):
        producer.publish(b"x", attributes={"a": 1})  # type: ignore[dict-item]


def test_buffers_are_copied_lists_are_not_kept(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    data = bytearray(b"abc")
    items: list[bytes | None] = [b"1", b"2"]
    producer.send(data)  # type: ignore[arg-type]
    producer.send_many(items)
    data[:] = b"zzz"
    items[:] = [b"wrong"] * 2
    producer.flush(timeout=60)
    assert stored(broker) == [b"abc", b"1", b"2"]


def test_columns_arrive(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    producer.send_many(
        [b"a", b"b", b"c"],
        keys=["x", None, b"z"],
        attributes=[{"k": "v"}, None, {}],
        event_times=[1, None, 3],
    )
    producer.send(b"d", key="q")
    producer.flush(timeout=60)
    messages = list(client.reader(TOPIC))
    assert [m.key for m in messages] == [b"x", None, b"z", b"q"]
    assert [m.attributes for m in messages] == [{"k": "v"}, {}, {}, {}]
    assert [m.event_time for m in messages] == [1, None, 3, None]
    with pytest.raises(danube_fast.InvalidArgument, match="keys"):
        producer.send_many([b"a"], keys=["a", "b"])


def test_keys_choose_partitions(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, partitions=4)
    keys = [f"key-{i % 37}" for i in range(1000)]
    producer.send_many([b"%d" % i for i in range(500)], keys=keys[:500])
    for i in range(500, 1000):
        producer.send(b"%d" % i, key=keys[i])
    assert producer.publish(b"last", key="key-0").topic.startswith(f"{TOPIC}-part-")
    producer.flush(timeout=60)
    for index, partition in enumerate(broker.topics[TOPIC].partitions):
        got = [p for _, _, frame in partition.frames for p in FrameView(frame).payloads()]
        expected = [b"%d" % i for i in range(1000) if key_hash(keys[i].encode()) % 4 == index]
        if key_hash(b"key-0") % 4 == index:
            expected.append(b"last")
        assert got == expected, f"partition {index}"


def test_without_keys_batches_go_round(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, partitions=3, batch_bytes_max=4096)
    producer.send_many([bytes(500)] * 100)
    for _ in range(100):
        producer.send(bytes(500))
    producer.flush(timeout=60)
    counts = [partition.next_offset for partition in broker.topics[TOPIC].partitions]
    assert sum(counts) == 200 and min(counts) >= 10


def test_callbacks_come_once_with_the_id(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    told: list[tuple[Any, Any]] = []
    for i in range(100):
        producer.send(b"%d" % i, on_delivery=lambda m, e: told.append((m, e)))
    deadline = time.monotonic() + 60
    while len(told) < 100 and time.monotonic() < deadline:  # nobody pumps: the keeper must
        time.sleep(0.005)
    assert told == [(danube_fast.MessageId(TOPIC, i), None) for i in range(100)]


def test_callback_may_use_the_client(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    done = threading.Event()

    def again(message_id: Any, error: Any) -> None:
        producer.publish(b"from the callback")
        done.set()

    producer.send(b"x", on_delivery=again)
    producer.flush(timeout=60)
    assert done.wait(60)
    assert stored(broker) == [b"x", b"from the callback"]


def test_callbacks_come_in_order_and_before_flush_returns(
    broker: Any, client: danube_fast.Client
) -> None:
    """However many threads read acks: a slow callback is not overtaken."""
    producers = [client.producer(f"{TOPIC}-{i}") for i in range(3)]
    told: dict[int, list[int]] = {i: [] for i in range(3)}

    def work(index: int) -> None:
        def on_delivery(message_id: Any, error: Any) -> None:
            if message_id.offset % 7 == 0:
                time.sleep(0.0005)
            told[index].append(message_id.offset)

        for _ in range(20):
            producers[index].send_many([b"x"] * 20, on_delivery=on_delivery)
        producers[index].flush(timeout=60)
        assert len(told[index]) == 400

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert told == {i: list(range(400)) for i in range(3)}


def test_many_threads_on_one_producer(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for i in range(100):
                producer.send(b"%d:%d" % (worker, i))
                if i % 25 == 0:
                    producer.publish(b"%d:p%d" % (worker, i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    producer.flush(timeout=60)
    assert not errors
    got = stored(broker)
    assert len(got) == 6 * 104
    for worker in range(6):
        mine = [p for p in got if p and p.startswith(b"%d:" % worker) and b"p" not in p]
        assert mine == [b"%d:%d" % (worker, i) for i in range(100)]


def test_close_returns_and_says_what_was_not_acked(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    producer.publish(b"1")
    broker.hold_acks = True
    producer.send_many([b"2", b"3"])
    with pytest.raises(danube_fast.DeadlineExceeded, match=r"2 messages.*sequence 1.*sequence 2"):
        producer.close(timeout=0.2)
    with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
        producer.send(b"4")
    broker.release_acks()


def test_close_flushes(broker: Any, client: danube_fast.Client) -> None:
    with client.producer(TOPIC, linger_us=10_000_000) as producer:
        for i in range(10):
            producer.send(b"%d" % i)
    assert len(stored(broker)) == 10


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression(broker: Any, client: danube_fast.Client, codec: str) -> None:
    with client.producer(TOPIC, compression=codec) as producer:
        payloads = [b"the same again and again %d" % (i % 7) for i in range(5000)]
        producer.send_many(payloads)
    assert sum(broker.publish_sizes) < 30_000
    assert stored(broker) == payloads


def test_client_publish_caches_producers(broker: Any, client: danube_fast.Client) -> None:
    ids = [client.publish(f"/default/d{i % 3}", b"%d" % i, key="k") for i in range(9)]
    assert [m.offset for m in ids] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert broker.commands["OpenProducer"] == 3


def test_unknown_status_is_an_error(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC)
    broker.refuse.append((Status.OUT_OF_SEQUENCE, ""))
    # the broker claims a gap where there is none: the lane asks where it stands, then sends again
    assert producer.publish(b"x").offset == 0
    assert broker.commands["OpenProducer"] == 2


def test_batches_of_many_producers_travel_in_few_bundles(
    broker: Any, client: danube_fast.Client
) -> None:
    """While answers are awaited, whatever is sent gathers; what has another durability goes apart."""
    names = [f"/default/many{i}" for i in range(100)]
    producers = [
        client.producer(name, durability="os" if i % 2 else "fsync") for i, name in enumerate(names)
    ]
    broker.hold_acks = True
    for number in range(20):
        for producer in producers:
            producer.send(b"%d" % number)
    broker.hold_acks = False
    broker.release_acks()
    for producer in producers:
        producer.flush(timeout=60)
    for name in names:
        assert stored(broker, name) == [b"%d" % number for number in range(20)]
    assert len(names) // 4 < max(broker.bundle_counts) <= len(names) // 2, broker.bundle_counts
    assert len(broker.bundle_counts) < len(broker.publish_sizes) // 2


def test_a_refused_frame_harms_no_other_of_its_bundle(
    broker: Any, client: danube_fast.Client
) -> None:
    producers = [client.producer(f"/default/many{i}") for i in range(30)]
    broker.hold_acks = True
    for number in range(3):
        for producer in producers:
            producer.send(b"%d" % number)
    broker.refuse.extend([(8, "the log is full")] * 7)
    broker.hold_acks = False
    broker.release_acks()
    for producer in producers:
        producer.flush(timeout=60)
    for i in range(30):
        assert stored(broker, f"/default/many{i}") == [b"0", b"1", b"2"]


def test_refused_topics_do_not_stop_the_others(
    broker: Any, client: danube_fast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window that all producers share is full of what nobody takes: the next one goes on."""
    monkeypatch.setattr("danube_fast.client.produce.state.CLIENT_WINDOW_BYTES", 64 * 1024)
    stuck = client.producer("/default/stuck")
    free = client.producer("/default/free", batch_bytes_max=4096, window_bytes_max=8192, timeout=60)
    broker.drop_publishes = 1 << 30
    stuck.send_many([bytes(1000)] * 300)
    assert client._core.pump.unacked_bytes > 64 * 1024
    broker.drop_publishes = 0
    for number in range(5):
        assert free.publish(b"%d" % number).offset == number
    broker.forget_sessions()  # what was dropped is sent again
    stuck.flush(timeout=60)


def opened_by_somebody(broker: Any, name: str) -> None:
    """An OPEN_PRODUCER of that name arrives: it fences whoever had it open."""
    with broker.lock:
        broker.topics[TOPIC].partitions[0].producers[name]["epoch"] += 1


def test_a_producer_opens_again_where_its_partition_is_now(
    broker: Any, client: danube_fast.Client
) -> None:
    with client.producer(TOPIC, name="p") as producer:
        assert producer.publish(b"before").offset == 0
        opened = broker.commands["OpenProducer"]
        broker.refuse.append((int(Status.NOT_OWNER), "it moved"))
        assert producer.publish(b"after").offset == 1
        assert broker.commands["OpenProducer"] > opened
    assert stored(broker) == [b"before", b"after"]


def test_its_own_late_open_fences_a_producer_that_moved_only_once(
    broker: Any, client: danube_fast.Client
) -> None:
    with client.producer(TOPIC, name="p") as producer:
        broker.refuse.append((int(Status.NOT_OWNER), "it moved"))
        producer.publish(b"moved")
        opened_by_somebody(broker, "p")
        assert producer.publish(b"asked again").offset == 1
        opened_by_somebody(broker, "p")
        with pytest.raises(danube_fast.errors.ProducerFenced):
            producer.publish(b"another one has it")
    assert stored(broker) == [b"moved", b"asked again"]


def test_a_producer_waits_for_the_worker_that_is_to_have_its_topic(
    broker: Any, client: danube_fast.Client
) -> None:
    """It has its time for that, however often the broker says that the worker is busy."""
    look_up, asked = broker._on_lookup, []

    def busy(session: Any, identity: bytes, command: p.Lookup) -> None:
        asked.append(command)
        if command.topic != TOPIC or len(asked) < 4:
            code, text = danube_fast.Unavailable.code, "its worker is busy; try again"
            broker.reply(identity, p.Error(command.request, code, text))
        else:
            look_up(session, identity, command)

    broker._on_lookup = busy
    assert client.producer(TOPIC).publish(b"x").offset == 0
    assert len(asked) == 4
    with pytest.raises(danube_fast.Unavailable, match="its worker is busy"):
        client.producer("/default/never", timeout=3)
