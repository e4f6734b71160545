"""A client that becomes another user and then asks for rings.

    python -m tests.shm.stranger URL USER

Everything is loaded before it changes its user, who may not be allowed to read the package. It writes
one line of JSON: who it is, what transport="auto" gave it, and how transport="shm" was refused.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import danube_fast

COUNT = 100


def exchange(url: str, topic: str, transport: str) -> dict[str, Any]:
    """Publish and consume some messages."""
    with danube_fast.connect(url, transport=transport, timeout=60) as client:
        producer = client.producer(topic, durability="os", timeout=60)
        consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        producer.send_many([b"%d" % number for number in range(COUNT)])
        producer.flush()
        numbers: list[int] = []
        while len(numbers) < COUNT and (batch := consumer.receive_batch(timeout=60)):
            numbers += [int(message.payload) for message in batch]
            consumer.ack(batch)
        connections = client._core.routes.workers.values()
        return {"numbers": numbers, "rings": [one.has_rings for one in connections]}


def main() -> None:
    """Three attempts."""
    url, user = sys.argv[1], int(sys.argv[2])
    said: dict[str, Any] = {"own": exchange(url, "/default/own", "auto")}
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    said["user"] = os.geteuid()
    said["auto"] = exchange(url, "/default/auto", "auto")
    try:
        exchange(url, "/default/shm", "shm")
    except danube_fast.DanubeError as error:
        said["refused"] = [type(error).__name__, str(error)]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
