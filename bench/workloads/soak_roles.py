"""What the members of the workload `soak` do: lives that come and go, and clients that stay.

    churn   life after life: two clients, a topic, a producer, all types of subscription, requests, a
            reader; everything compared; closed, the topic deleted; the next one over another lane
    stand   one client over each lane, a topic, a producer and all types of subscription until the end

A message is its number, the number of its life, random bytes, and a checksum of all that. Workers are killed
meanwhile, so messages may come again; none may be missing, changed, twice in the log, or out of order
where its subscription keeps an order.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import danube_fast
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.client.values.arguments import DurabilityLevel, SubscriptionType, Transport
from danube_fast.errors import DanubeError, DeadlineExceeded, Unavailable

__all__ = [
    "LIFE_MESSAGES",
    "MESSAGE_BYTES_MIN",
    "Tally",
    "Watch",
    "churn",
    "make",
    "patiently",
    "stand",
]

T = TypeVar("T")
LANES: tuple[Transport, ...] = ("zmq", "shm")
HEAD = struct.Struct("<QQ")
CHECKSUM = struct.Struct("<I")
MESSAGE_BYTES_MIN = HEAD.size + CHECKSUM.size
KEYS = 50
LIFE_MESSAGES = 300
PUBLISHED_ALONE = 5
"""Messages of a life that go out by publish(), behind those of send_many()."""
REQUESTS = 2
STAND_PARTITIONS = 4
STAND_TICKS_PER_S = 20
STANDING = "standing"
ANSWERS = "answers"
PATIENCE_SECONDS = 60.0
"""How long a killed worker may keep somebody from going on."""
POLL_SECONDS = 0.02
CONNECT_SECONDS = 30.0
RECEIVE_MESSAGES = 1000


def patiently(step: Callable[[], T]) -> T:
    """Do it again while a worker is away. What is done here may be done twice."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return step()
        except (Unavailable, DeadlineExceeded):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def make(life: int, numbers: Iterable[int], message_bytes: int) -> list[bytes]:
    """Messages of a life."""
    made = []
    for number in numbers:
        content = HEAD.pack(number, life) + os.urandom(message_bytes - MESSAGE_BYTES_MIN)
        made.append(content + CHECKSUM.pack(zlib.crc32(content)))
    return made


class Tally:
    """What was seen, by whoever sees it."""

    def __init__(self) -> None:
        self.sent = self.lives = self.requests = 0
        self.lost = self.duplicated = self.corrupted = self.disordered = self.redelivered = 0

    def number(self, payload: bytes | None, life: int) -> int:
        """The number of a message; -1 for one that was changed, or is not of that life."""
        if payload is None or len(payload) < MESSAGE_BYTES_MIN:
            self.corrupted += 1
            return -1
        (checksum,) = CHECKSUM.unpack(payload[-CHECKSUM.size :])
        number, of_life = HEAD.unpack_from(payload)
        if checksum != zlib.crc32(payload[: -CHECKSUM.size]) or of_life != life:
            self.corrupted += 1
            return -1
        return int(number)

    def report(self) -> dict[str, int]:
        """For the harness."""
        return dict(vars(self))


class Watch:
    """What one subscription has got: each message at least once, in the order that its type keeps."""

    def __init__(self, type_name: str, life: int, room: int, tally: Tally) -> None:
        self._by_key = type_name == "key_shared"
        self._in_order = type_name != "shared"
        self._life = life
        self._tally = tally
        self._seen = bytearray(b"\1" * room)  # every page of it is in memory from now on
        self._seen[:] = bytes(room)
        self._last: dict[str | bytes | None, int] = {}
        self._lock = threading.Lock()
        self.got = 0

    def note(self, message: danube_fast.Message) -> None:
        """A message came. From any thread."""
        with self._lock:
            number = self._tally.number(message.payload, self._life)
            if number < 0:
                return
            if self._seen[number]:
                self._tally.redelivered += 1
                return
            self._seen[number] = 1
            self.got += 1
            if self._in_order:
                place = message.key if self._by_key else message.topic
                self._tally.disordered += number < self._last.get(place, -1)
                self._last[place] = number


# ---------------------------------------------------------------- lives


class _Life:
    """One of many: everything is opened, used, compared, closed, deleted."""

    TYPES: tuple[tuple[SubscriptionType, int], ...] = (
        ("exclusive", 1),
        ("failover", 2),
        ("shared", 2),
        ("key_shared", 2),
    )

    def __init__(self, options: dict[str, Any], number: int, tally: Tally) -> None:
        self.number = number
        self.topic = f"/default/soak-{os.getpid()}-{number}"
        self.lanes = LANES[number % 2], LANES[number // 2 % 2]
        self.partitions = (0, 2, 0)[number % 3]
        self.durability: DurabilityLevel = "os" if number // 3 % 2 else "fsync"
        self.options = options
        self.tally = tally

    def live(self) -> None:
        """From birth to death."""
        url = self.options["url"]
        with (
            danube_fast.connect(url, transport=self.lanes[0], timeout=CONNECT_SECONDS) as sender,
            danube_fast.connect(url, transport=self.lanes[1], timeout=CONNECT_SECONDS) as taker,
        ):
            with sender.producer(
                self.topic,
                dispatch="reliable",
                durability=self.durability,
                partitions=self.partitions or None,
                timeout=PATIENCE_SECONDS,
            ) as producer:
                with ExitStack() as stack:
                    groups = self._subscribe(taker, stack)
                    self._publish(producer)
                    self._receive(groups)
                self._ask(sender)
            self._read_back(taker)
            patiently(lambda: self._delete(sender))
        self.tally.lives += 1

    def _subscribe(
        self, client: danube_fast.Client, stack: ExitStack
    ) -> list[tuple[Watch, list[danube_fast.Consumer]]]:
        groups = []
        for type_name, count in self.TYPES:
            consumers = [
                stack.enter_context(
                    client.consumer(
                        self.topic, subscription=type_name, type=type_name,
                        initial_position="earliest", timeout=PATIENCE_SECONDS,
                    )
                )
                for _ in range(count)
            ]  # fmt: skip
            groups.append((Watch(type_name, self.number, LIFE_MESSAGES, self.tally), consumers))
        return groups

    def _publish(self, producer: danube_fast.Producer) -> None:
        payloads = make(self.number, range(LIFE_MESSAGES), self.options["message_bytes"])
        keys = [b"%d" % (number % KEYS) for number in range(LIFE_MESSAGES)]
        many = LIFE_MESSAGES - PUBLISHED_ALONE
        producer.send_many(payloads[:many], keys=keys[:many])
        for payload, key in zip(payloads[many:], keys[many:], strict=True):
            producer.publish(payload, key=key)
        producer.flush(timeout=PATIENCE_SECONDS)
        self.tally.sent += LIFE_MESSAGES

    def _receive(self, groups: list[tuple[Watch, list[danube_fast.Consumer]]]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(watch.got < LIFE_MESSAGES for watch, _ in groups):
            for watch, consumers in groups:
                self._poll(watch, consumers)
            if time.monotonic() > deadline:
                break
        for watch, consumers in groups:
            self.tally.lost += LIFE_MESSAGES - watch.got
            while patiently(consumers[0].lag) and time.monotonic() < deadline + PATIENCE_SECONDS:
                self._poll(watch, consumers)
                for consumer in consumers:
                    try:
                        consumer.flush_acks()
                    except DanubeError:
                        pass  # they were lost with a worker: the messages come again

    @staticmethod
    def _poll(watch: Watch, consumers: list[danube_fast.Consumer]) -> None:
        for consumer in consumers:
            batch = consumer.receive_batch(RECEIVE_MESSAGES, timeout=POLL_SECONDS)
            for message in batch:
                watch.note(message)
            consumer.ack(batch)

    def _ask(self, client: danube_fast.Client) -> None:
        answers = f"{self.options['topic']}-{ANSWERS}"
        for number in range(REQUESTS):
            (payload,) = make(self.number, [number], self.options["message_bytes"])
            reply = patiently(lambda p=payload: client.request(answers, p, timeout=5))  # type: ignore[misc]
            self.tally.corrupted += reply.payload != payload[::-1]
            self.tally.requests += 1

    def _read_back(self, client: danube_fast.Client) -> None:
        """Every message is in the log once, in order per partition."""
        counts = [0] * LIFE_MESSAGES
        last: dict[str, int] = {}
        for message in client.reader(self.topic, timeout=PATIENCE_SECONDS):
            number = self.tally.number(message.payload, self.number)
            if number >= 0:
                counts[number] += 1
                self.tally.disordered += number < last.get(message.topic, -1)
                last[message.topic] = number
        self.tally.lost += counts.count(0)
        self.tally.duplicated += sum(count - 1 for count in counts if count > 1)

    def _delete(self, client: danube_fast.Client) -> None:
        try:
            client.admin.delete_topic(self.topic)
        except danube_fast.NotFound:
            pass  # the answer to the first attempt was lost


def churn(link: Link, options: dict[str, Any]) -> None:
    """Life after life, at a pace, until told to stop."""
    tally = Tally()
    link.ready()
    cpu = time.process_time()
    pacer = Pacer(options["lives_per_s"])
    pacer.start()
    number = options["first_life"]
    while not link.has_order():
        pacer.wait(tally.lives)
        _Life(options, number, tally).live()
        number += options["life_step"]
    link.hear()
    link.say({**tally.report(), "cpu": time.process_time() - cpu})
    link.hear()


# ---------------------------------------------------------------- those who stay


class _Standing:
    """Clients that stay for the whole run."""

    LIFE = 1 << 40
    """Of no life in `churn`."""

    def __init__(self, options: dict[str, Any], stack: ExitStack) -> None:
        self.tally = Tally()
        self.sent = 0
        self.stopping = threading.Event()
        self.errors: list[DanubeError] = []
        self._options = options
        self._stack = stack
        self.clients = [
            stack.enter_context(
                danube_fast.connect(options["url"], transport=lane, timeout=CONNECT_SECONDS)
            )
            for lane in LANES
        ]
        self.topic = f"{options['topic']}-{STANDING}"
        self.producer = stack.enter_context(
            self.clients[0].producer(
                self.topic, dispatch="reliable", durability=options["durability"],
                partitions=STAND_PARTITIONS, timeout=PATIENCE_SECONDS,
            )
        )  # fmt: skip
        patiently(lambda: self._create(f"{options['topic']}-{ANSWERS}"))
        self.watches: dict[str, Watch] = {}
        self.handles: list[danube_fast.Subscriber] = []
        self.threads: list[threading.Thread] = []

    def _create(self, topic: str) -> None:
        try:
            self.clients[0].admin.create_topic(topic, durability="os")
        except danube_fast.AlreadyExists:
            pass  # the answer to the first attempt was lost

    def subscribe(self) -> None:
        """All types; those that handlers can share by `client.subscribe`."""
        room = self._options["standing_messages_max"]
        for type_name in ("exclusive", "failover", "shared", "key_shared"):
            watch = self.watches[type_name] = Watch(type_name, self.LIFE, room, self.tally)
            if type_name in ("shared", "key_shared"):
                for client in self.clients:
                    handle = client.subscribe(
                        self.topic, type_name, watch.note, type=type_name, concurrency=2,
                        initial_position="earliest",
                    )  # fmt: skip
                    self.handles.append(self._stack.enter_context(handle))
            else:
                for client in self.clients[: 1 + (type_name == "failover")]:
                    consumer = client.consumer(
                        self.topic, subscription=type_name, type=type_name,
                        initial_position="earliest",
                    )  # fmt: skip
                    self._stack.enter_context(consumer)
                    thread = threading.Thread(target=self._follow, args=(consumer, watch))
                    self.threads.append(thread)
                    thread.start()
        for client in self.clients:
            answers = f"{self._options['topic']}-{ANSWERS}"
            handle = client.subscribe(answers, ANSWERS, lambda m: (m.payload or b"")[::-1])
            self.handles.append(self._stack.enter_context(handle))

    def _follow(self, consumer: danube_fast.Consumer, watch: Watch) -> None:
        try:
            while not self.stopping.is_set():
                for message in (batch := consumer.receive_batch(timeout=0.2)):
                    watch.note(message)
                consumer.ack(batch)
        except DanubeError as error:
            self.errors.append(error)

    def publish(self, count: int) -> None:
        """The next messages, keyed in turn."""
        numbers = range(self.sent, min(self.sent + count, self._options["standing_messages_max"]))
        payloads = make(self.LIFE, numbers, self._options["message_bytes"])
        self.producer.send_many(payloads, keys=[b"%d" % (n % KEYS) for n in numbers])
        self.sent += len(payloads)

    def finish(self) -> None:
        """Wait until all came."""
        self.producer.flush(timeout=PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(watch.got < self.sent for watch in self.watches.values()):
            if time.monotonic() > deadline or self.errors:
                break
            time.sleep(POLL_SECONDS)
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        for error in self.errors:
            raise error
        self.tally.sent = self.sent
        self.tally.lost += sum(self.sent - watch.got for watch in self.watches.values())


def stand(link: Link, options: dict[str, Any]) -> None:
    """Publish and consume at a pace until told to stop, then see that everything came."""
    with ExitStack() as stack:
        standing = _Standing(options, stack)
        standing.subscribe()
        try:
            link.ready()
            cpu = time.process_time()
            pacer = Pacer(STAND_TICKS_PER_S)
            pacer.start()
            some = max(1, int(options["standing_per_s"] / STAND_TICKS_PER_S))
            tick = 0
            while not link.has_order():
                tick = pacer.wait(tick) and tick + 1
                standing.publish(some)
            link.hear()
            standing.finish()
        finally:
            standing.stopping.set()
        link.say({**standing.tally.report(), "cpu": time.process_time() - cpu})
        link.hear()
