"""A consumer in a process of its own that dies in the middle of its work.

argv[1]: {"url", "topic", "type", "transport", "take", "reported", "killer"}. Takes `take` messages without an
ack and kills itself, at once or, with `reported`, when the broker has heard of them. With `killer` it acks
what it takes, one by one, until a message with that payload kills it. Prints each offset that it takes.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import danube_fast
from tests.workers.broker import wait_until


def main() -> None:
    plan = json.loads(sys.argv[1])
    client = danube_fast.connect(plan["url"], transport=plan["transport"])
    consumer = client.consumer(
        plan["topic"], subscription="s", type=plan["type"], initial_position="earliest"
    )
    killer = plan["killer"].encode()
    taken = 0
    while killer or taken < plan["take"]:
        message = consumer.receive(timeout=10 if killer else 60)
        if message is None:
            return
        print(message.offset, flush=True)
        taken += 1
        if killer and message.payload == killer:
            os.kill(os.getpid(), signal.SIGKILL)
        if killer:
            consumer.ack(message)
            consumer.flush_acks()
    if plan["reported"]:
        connection = consumer._inbox.attachments[0].connection
        wait_until("a heartbeat to report", lambda: not connection.reporters)
        consumer.flush_acks()  # it goes the same way as the heartbeat
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
