"""Publishes and consumes through shared memory, as process 1 of a pid namespace, until it is killed.

    unshare --pid --fork --mount-proc python -m tests.shm.confined URL TOPIC

First it writes its pid, one byte, and whether it has rings, another; then a byte for each round.
"""

from __future__ import annotations

import os
import sys

import danube_fast

ROUND = 500


def main() -> None:
    """Until SIGKILL. What was not as sent ends it with an error."""
    url, topic = sys.argv[1:]
    with danube_fast.connect(url, transport="shm") as client:
        producer = client.producer(topic, durability="os")
        consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        (connection,) = client._core.routes.workers.values()
        os.write(1, bytes((min(os.getpid(), 255), connection.has_rings)))
        expected = 0
        sent = 0
        while True:
            # one round is always under way
            while sent < expected + 2 * ROUND:
                producer.send_many([b"%d" % number for number in range(sent, sent + ROUND)])
                sent += ROUND
            batch = consumer.receive_batch(timeout=60)
            before = expected // ROUND
            for message in batch:
                if int(message.payload) != expected:
                    sys.exit(f"{message.payload!r} came where {expected} should")
                expected += 1
            consumer.ack(batch)
            os.write(1, b"r" * (expected // ROUND - before))


if __name__ == "__main__":
    main()
