"""`send()` beside threads that publish: it waits for one answer, not for all of them to pause."""

from __future__ import annotations

import threading

import pytest

import danube_fast
from danube_fast.testing.broker import Broker

PUBLISHERS, ROUNDS = 48, 20
RECEIVE_SECONDS = 5.0
"""Far more than a sync takes, and less than what is to be waited for lasts: until the threads end."""


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_message_that_is_sent_arrives_while_others_publish(transport):
    is_over = threading.Event()
    with (
        Broker(workers=1) as broker,
        danube_fast.connect(broker.url, transport=transport) as client,
    ):
        producers = [client.producer(f"/default/busy{number}") for number in range(PUBLISHERS)]
        faults: list[BaseException] = []

        def publish(producer: danube_fast.Producer) -> None:
            try:
                while not is_over.is_set():
                    producer.publish(b"x")
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=publish, args=(each,)) for each in producers]
        quiet = client.producer("/default/quiet")
        with client.consumer("/default/quiet", subscription="s") as consumer:
            for thread in threads:
                thread.start()
            try:
                for number in range(ROUNDS):
                    quiet.send(b"%d" % number)
                    assert consumer.receive(timeout=RECEIVE_SECONDS).payload == b"%d" % number
            finally:
                is_over.set()
                for thread in threads:
                    thread.join(60)
        assert not faults and not any(thread.is_alive() for thread in threads)
