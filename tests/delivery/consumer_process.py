"""A consumer in a process of its own, to be killed or stopped.

argv[1]: {"url", "topic", "subscription", "type", "transport"}. Prints "ready", then a line
`OFFSET REDELIVERIES` for each message, which it acks at once and durably before the next.
"""

from __future__ import annotations

import json
import sys

import danube_fast


def main() -> None:
    plan = json.loads(sys.argv[1])
    with (
        danube_fast.connect(plan["url"], transport=plan["transport"]) as client,
        client.consumer(
            plan["topic"], subscription=plan["subscription"], type=plan["type"],
            initial_position="earliest",
        ) as consumer,
    ):  # fmt: skip
        print("ready", flush=True)
        for message in consumer:
            consumer.ack(message)
            consumer.flush_acks()
            print(message.offset, message.redelivery_count, flush=True)


if __name__ == "__main__":
    main()
