"""Calls of a signal handler in the middle of another call of the same client: queued, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.client.link.pump import Pump
from danube_fast.errors import FailedPrecondition
from tests.crash.rig import Server
from tests.shm.children import script
from tests.shm.test_straight import SECONDS, server, transport

__all__ = ["server", "transport"]

PUBLISHES = 100

STRUCK = """
import collections, signal, sys, threading, time, danube_fast
from danube_fast.errors import FailedPrecondition
url, topic, transport = sys.argv[1:4]
client = danube_fast.connect(url, transport=transport, timeout=60)
producer = client.producer(topic)
consumer = client.consumer(topic, subscription="s", initial_position="earliest")
acked, sent, told, strikes, refused, open_acks = {}, [], [], 0, 0, []

def on_alarm(*_):
    global strikes, refused
    strikes += 1
    payload = b"in%d" % strikes
    try:
        if strikes % 3 == 0:
            acked[payload] = producer.publish(payload).offset
        elif strikes % 3 == 1:
            producer.send(payload)
            sent.append(payload)
        else:
            producer.send(payload, key="k", on_delivery=lambda *_: told.append(payload))
            sent.append(payload)
            if open_acks:
                consumer.ack(open_acks.pop())
    except FailedPrecondition as error:
        assert "signal handler" in str(error), error
        refused += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0011)

signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.001)
number, end = 0, time.monotonic() + 60
while strikes < 600 or not refused:
    assert time.monotonic() < end, f"{strikes} strikes in a minute, {refused} refused"
    number += 1
    payload = b"out%d" % number
    if number % 4 == 0:
        acked[payload] = producer.publish(payload).offset
    elif number % 4 == 1:
        message = consumer.receive(timeout=60)
        open_acks.append(message)
    else:
        producer.send(payload)
        sent.append(payload)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
producer.flush(timeout=60)
counts, offsets = collections.Counter(), {}
with client.reader(topic, start="earliest", stop="latest") as reader:
    for batch in reader.batches():
        for message in batch:
            counts[message.payload] += 1
            offsets[message.payload] = message.offset
lost = [each for each in (*acked, *sent) if not counts[each]]
twice = [each for each, count in counts.items() if count > 1]
wrong = [each for each, offset in acked.items() if offsets.get(each) != offset]
print(f"lost {lost}, twice {twice}, wrong {wrong}, told {len(told) - strikes // 3 in (0, 1)}", flush=True)
client.close(timeout=60)
"""


def test_what_a_signal_handler_sends_is_sent_once(server: Server, transport: str) -> None:
    """A timer strikes anywhere inside publish(), send() and receive(), and sends, publishes and acks itself."""
    with script(STRUCK, server.url, f"/default/reentry-{transport}", transport) as struck:
        struck.hear("lost [], twice [], wrong [], told True", 2 * SECONDS)
        struck.ends_quietly()


def test_a_call_that_would_wait_for_itself_is_refused(
    server: Server, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a call reads the sockets, or holds the lock, others of its thread end at once."""
    original, refused = Pump._sleep, list[str]()
    topic = f"/default/refused-inside-{transport}"

    with server.client(transport=transport) as client:
        producer = client.producer(topic)
        assert producer.publish(b"0").offset == 0

        def struck(pump: Pump, row: int, limit_ns: int) -> None:
            if not refused:
                pump.release()  # as in the sleep
                try:
                    for call in (lambda: producer.publish(b"no"), producer.flush):
                        with pytest.raises(FailedPrecondition) as error:
                            call()
                        refused.append(str(error.value))
                    producer.send(b"2")
                finally:
                    pump.acquire()
            original(pump, row, limit_ns)

        monkeypatch.setattr(Pump, "_sleep", struck)
        count = 0
        while (
            not refused and count < PUBLISHES
        ):  # the ack of one may be there before its thread sleeps
            count += 1
            assert producer.publish(b"1").offset == count
        assert len(refused) == 2 and all("in the middle of another call" in r for r in refused)
        producer.flush(timeout=SECONDS)
        with client.reader(topic, start="earliest", stop="latest") as reader:
            payloads = [message.payload for batch in reader.batches() for message in batch]
        assert payloads == [b"0", *[b"1"] * count, b"2"]
