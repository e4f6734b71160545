"""Roles of the workloads that measure rates: they send and receive as fast as they may.

    produce_lists   send_many                    consume_batches   receive_batch, payloads, ack(batch)
    produce_each    send() one by one            consume_each      receive(), ack() each
    publish_each    publish() one by one, many clients

A role connects, prepares, says "ready", waits for the go, and reports times of CLOCK_MONOTONIC, which
is the same in all processes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import danube_fast
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import LIST_MESSAGES, NUMBER_BYTES, Payloads
from danube_fast.bench.load.verify import Verifier
from danube_fast.errors import DanubeError

__all__ = ["AFTER_SECONDS", "FLUSH_SECONDS", "PACED_TICKS_PER_S", "SILENCE_SECONDS"]
__all__ += ["consume_batches", "consume_each", "open_client", "open_consumer", "open_payloads"]
__all__ += ["produce_each", "produce_lists", "publish_each"]

FLUSH_SECONDS = 300.0
SILENCE_SECONDS = {True: 30.0, False: 2.0}
"""Reliable or not -> a consumer ends after hearing nothing for so long."""
AFTER_SECONDS = 0.1
"""After the last message a consumer listens on for what should not come."""
PACED_TICKS_PER_S = 1000
TOPIC_TIMEOUT_SECONDS = 120.0


def open_payloads(options: dict[str, Any]) -> Payloads:
    """What was prepared for this run."""
    return Payloads(options["fd"], options["message_bytes"])


def open_client(options: dict[str, Any]) -> danube_fast.Client:
    """A client, connected as the run asks for."""
    return danube_fast.connect(
        options["url"], transport=options["transport"], timeout=30, spin_us=options["spin_us"],
        **options.get("access", {}),
    )  # fmt: skip


def produce_lists(link: Link, options: dict[str, Any]) -> None:
    """Stream `index` of `step`: lists, as fast as the window lets go or at a pace."""
    rate, step = options["rate"], options["step"]
    some = max(1, int(rate / PACED_TICKS_PER_S)) if rate else LIST_MESSAGES
    payloads = open_payloads(options)
    lists = payloads.lists(options["index"], step, some)
    passes = options["messages"] // payloads.count
    with (
        open_client(options) as client,
        client.producer(options["topics"][0], **options["topic_options"]) as producer,
    ):
        pacer = Pacer(rate / some) if rate else None
        link.ready()
        cpu = time.process_time()
        began = pacer.start() if pacer else time.monotonic_ns()
        in_turn = itertools.chain.from_iterable(itertools.repeat(lists, passes))
        for number, one in enumerate(in_turn):
            if pacer:
                pacer.wait(number)
            producer.send_many(one)
        producer.flush(timeout=FLUSH_SECONDS)
        acked = time.monotonic_ns()
        link.say({"began_ns": began, "acked_ns": acked, "cpu": time.process_time() - cpu})
        link.hear()


def produce_each(link: Link, options: dict[str, Any]) -> None:
    """Message i by `send()` to topic i mod the number of topics, one producer for each topic."""
    topics = options["topics"]
    prepared = open_payloads(options).cut(options["index"], options["step"])
    with open_client(options) as client, ExitStack() as stack:
        producers = [
            stack.enter_context(client.producer(topic, **options["topic_options"]))
            for topic in topics
        ]
        pacer = Pacer(options["rate"]) if options["rate"] else None
        link.ready()
        cpu = time.process_time()
        began = pacer.start() if pacer else time.monotonic_ns()
        if pacer:
            for number, payload in enumerate(prepared):
                pacer.wait(number)
                producers[number % len(topics)].send(payload)
        elif len(topics) == 1:
            send = producers[0].send
            for payload in prepared:
                send(payload)
        else:
            sends = itertools.cycle([producer.send for producer in producers])
            for payload, send in zip(prepared, sends, strict=False):
                send(payload)
        for producer in producers:
            producer.flush(timeout=FLUSH_SECONDS)
        acked = time.monotonic_ns()
        link.say({"began_ns": began, "acked_ns": acked, "cpu": time.process_time() - cpu})
        link.hear()


def publish_each(link: Link, options: dict[str, Any]) -> None:
    """Clients in threads of this process, each publishing one by one to its own topic."""
    payloads, topics, step = open_payloads(options), options["topics"], options["step"]
    failures: list[DanubeError] = []
    barrier = threading.Barrier(len(topics) + 1)
    with ExitStack() as stack:
        producers = []
        for topic in topics:
            client = stack.enter_context(open_client(options))
            producers.append(
                stack.enter_context(client.producer(topic, **options["topic_options"]))
            )

        def run(producer: danube_fast.Producer, prepared: list[bytes]) -> None:
            barrier.wait()
            try:
                for payload in prepared:
                    producer.publish(payload)
            except DanubeError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=run, args=(producer, payloads.cut(options["index"] + i, step)))
            for i, producer in enumerate(producers)
        ]
        for thread in threads:
            thread.start()
        link.ready()
        cpu = time.process_time()
        began = time.monotonic_ns()
        barrier.wait()
        for thread in threads:
            thread.join()
        acked = time.monotonic_ns()
        if failures:
            raise failures[0]
        link.say({"began_ns": began, "acked_ns": acked, "cpu": time.process_time() - cpu})
        link.hear()


class _Receiver:
    """What both consuming roles share: when to stop, and the report."""

    def __init__(self, link: Link, options: dict[str, Any]) -> None:
        self.link = link
        self.verifier = Verifier(open_payloads(options), options["streams"], options["messages"])
        self.wanted = options["messages"]
        self.silence_seconds = SILENCE_SECONDS[options["is_reliable"]]
        self.arrivals: list[tuple[int, int]] = []
        """(received so far, CLOCK_MONOTONIC ns)"""
        self.last_ns = 0
        self._topics = options["topics"]
        self.misplaced = 0

    def is_misplaced(self, message: danube_fast.Message) -> bool:
        """Whether a message stands in another topic than the one it was sent to."""
        number = int.from_bytes((message.payload or b"")[:NUMBER_BYTES], "little")
        return bool(message.topic != self._topics[number % len(self._topics)])

    def check_place(self, batch: danube_fast.Batch) -> None:
        """The first and the last of a batch came from the topic that they were sent to."""
        if len(self._topics) > 1 and len(batch):
            self.misplaced += self.is_misplaced(batch[0]) + self.is_misplaced(batch[-1])

    def report(self, cpu: float) -> None:
        """Tell the harness."""
        verifier = self.verifier
        self.link.say(
            {
                "ended_ns": self.last_ns,
                "cpu": cpu,
                "received": verifier.received,
                "lost": verifier.lost,
                "duplicated": verifier.duplicated,
                "corrupted": verifier.corrupted + self.misplaced,
                "arrivals": self.arrivals,
            }
        )


@contextmanager
def open_consumer(options: dict[str, Any]) -> Iterator[danube_fast.Consumer]:
    """The consumer of a receiving role, on a client of its own."""
    with (
        open_client(options) as client,
        client.consumer(
            options["topics"],
            subscription=options["subscription"],
            type=options.get("type", "exclusive"),
            initial_position="earliest",
            timeout=TOPIC_TIMEOUT_SECONDS,
        ) as consumer,
    ):
        yield consumer


def consume_batches(link: Link, options: dict[str, Any]) -> None:
    """Batches, a `bytes` object of each message, one ack for each batch."""
    receiver = _Receiver(link, options)
    verifier, wanted = receiver.verifier, receiver.wanted
    with open_consumer(options) as consumer:
        link.ready()
        cpu = time.process_time()
        while verifier.right < wanted:  # what comes twice takes nobody's place
            batch = consumer.receive_batch(LIST_MESSAGES, timeout=receiver.silence_seconds)
            if not len(batch):
                break
            verifier.take(batch.payloads())
            receiver.last_ns = time.monotonic_ns()
            receiver.arrivals.append((verifier.received, receiver.last_ns))
            consumer.ack(batch)
            receiver.check_place(batch)
        cpu = time.process_time() - cpu
        verifier.take(consumer.receive_batch(LIST_MESSAGES, timeout=AFTER_SECONDS).payloads())
        receiver.report(cpu)
        link.hear()


def consume_each(link: Link, options: dict[str, Any]) -> None:
    """One message and one ack after the other."""
    receiver = _Receiver(link, options)
    verifier, wanted = receiver.verifier, receiver.wanted
    with open_consumer(options) as consumer:
        link.ready()
        cpu = time.process_time()
        receive, ack, silence = consumer.receive, consumer.ack, receiver.silence_seconds
        for start in range(0, wanted, LIST_MESSAGES):
            some: list[bytes | None] = []
            keep = some.append
            for _ in range(min(LIST_MESSAGES, wanted - start)):
                message = receive(silence)
                if message is None:
                    break
                keep(message.payload)
                ack(message)
            verifier.take(some)
            if some:
                receiver.last_ns = time.monotonic_ns()
            if verifier.received < min(start + LIST_MESSAGES, wanted):
                break
        cpu = time.process_time() - cpu
        verifier.take(consumer.receive_batch(LIST_MESSAGES, timeout=AFTER_SECONDS).payloads())
        receiver.report(cpu)
        link.hear()
