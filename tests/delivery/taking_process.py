"""A consumer in a process of its own that dies in the middle of its work.

argv[1]: {"url", "topic", "type", "transport", "take", "reported", "killer", "how", "last"}. Takes `take` messages without
an ack and kills itself, at once or, with `reported`, when the broker has heard of them. With `killer` it acks
what it takes until a message with that payload kills it: one by one ("how": receive), by batches (batch), or in
handlers of `subscribe` (handler, async_handler); behind the offset `last` it ends in order. Prints each offset
that it takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

import danube_fast
from tests.workers.broker import wait_until

WAIT_SECONDS = 60


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take(message: danube_fast.Message, killer: bytes) -> None:
    print(message.offset, flush=True)
    if message.payload == killer:
        die()


def take_batches(consumer: danube_fast.Consumer, plan: dict[str, Any]) -> None:
    last = -1
    while last != plan["last"] and (batch := consumer.receive_batch(timeout=WAIT_SECONDS)):
        for message in batch:
            take(message, plan["killer"].encode())
            last = message.offset
        consumer.ack(batch)
        consumer.flush_acks()


def handle(client: danube_fast.Client, plan: dict[str, Any], options: Any) -> None:
    is_over = threading.Event()

    def handler(message: danube_fast.Message) -> None:
        take(message, plan["killer"].encode())
        if message.offset == plan["last"]:
            is_over.set()

    with client.subscribe(plan["topic"], "s", handler, **options):
        is_over.wait(WAIT_SECONDS)


async def handle_async(plan: dict[str, Any], options: Any) -> None:
    is_over = asyncio.Event()

    async def handler(message: danube_fast.Message) -> None:
        take(message, plan["killer"].encode())
        if message.offset == plan["last"]:
            is_over.set()

    async with (
        danube_fast.connect_async(plan["url"], transport=plan["transport"]) as client,
        await client.subscribe(plan["topic"], "s", handler, **options),
    ):
        await asyncio.wait_for(is_over.wait(), WAIT_SECONDS)


def main() -> None:
    plan = json.loads(sys.argv[1])
    options = {"type": plan["type"], "initial_position": "earliest"}
    if plan["how"] == "async_handler":
        asyncio.run(handle_async(plan, options))
        return
    client = danube_fast.connect(plan["url"], transport=plan["transport"])
    if plan["how"] == "handler":
        handle(client, plan, options)
        return
    consumer = client.consumer(plan["topic"], subscription="s", **options)
    killer = plan["killer"].encode()
    if plan["how"] == "batch":
        take_batches(consumer, plan)
        return
    taken = 0
    while killer or taken < plan["take"]:
        message = consumer.receive(timeout=WAIT_SECONDS)
        assert message is not None, f"nothing came behind {taken} messages"
        take(message, killer)
        taken += 1
        if killer:
            consumer.ack(message)
            if message.offset == plan["last"]:
                consumer.close()
                return
    if plan["reported"]:
        connection = consumer._inbox.attachments[0].connection
        wait_until("a heartbeat to report", lambda: not connection.reporters)
        consumer.flush_acks()  # it goes the same way as the heartbeat
    die()


if __name__ == "__main__":
    main()
