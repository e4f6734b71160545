"""Danube, the Rust broker whose concepts these are, by danube-client (gRPC).

    sending     send() of each message, one after the other: the client has no call for many, and sends that are
                under way at the same time may overtake each other
    receiving   one stream into a queue; each message is acked by a call of its own

One broker with embedded metadata, its log on the local disk. `max_unacked_messages` is raised from 10 to its
maximum, so that rates are compared and not limits. It acks what it has in memory; its log is
written in the background, every 5 s by default.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.peers.adapter import (
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    find_program,
    has_module,
)
from danube_fast.bench.peers.server import HOST, Server, free_port, start_server

__all__ = ["Danube"]

PROGRAM = ("danube-broker",)
VARIABLE = "BENCH_DANUBE_BROKER"
TRANSPORT = "tcp"
RECEIVED_MAX = 10_000
ACKS_MAX = 1024
"""Acks that may be under way."""
UNACKED_MAX = 10_000
START_SECONDS = 60.0
SETTINGS = """\
cluster_name: bench
broker:
  host: {host}
  ports: {{client: {port}, admin: {admin}, raft: {raft}, prometheus: {metrics}}}
meta_store: {{data_dir: {data}/raft}}
bootstrap_namespaces: [default]
auto_create_topics: true
auth: {{mode: none}}
load_manager: {{assignment_strategy: fair, load_report_interval_seconds: 30}}
storage: {{mode: local, local_wal_root: {data}/wal}}
dispatch: {{max_unacked_messages: {unacked}}}
policies:
  max_producers_per_topic: 0
  max_subscriptions_per_topic: 0
  max_consumers_per_topic: 0
  max_consumers_per_subscription: 0
  max_publish_rate: 0
  max_subscription_dispatch_rate: 0
  max_message_size: 10485760
"""


class _Link:
    """A client and the event loop that it lives in."""

    def __init__(self, options: dict[str, Any]) -> None:
        from danube import DanubeClientBuilder

        self.options = options
        self.topic = f"/default/{options['topic']}"
        self.loop = asyncio.new_event_loop()
        builder = DanubeClientBuilder().service_url(f"http://{options['address']}")
        self.client: Any = self.run(builder.build())

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    async def producer(self, name: str) -> Any:
        """A producer; it makes the topic."""
        from danube import DispatchStrategy

        kind = "RELIABLE" if self.options["is_reliable"] else "NON_RELIABLE"
        builder = self.client.new_producer().with_topic(self.topic).with_name(name)
        producer = builder.with_dispatch_strategy(DispatchStrategy[kind]).build()
        await producer.create()
        return producer

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run(asyncio.sleep(0))
        self.loop.close()


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Link(options)
        self._producer = self._link.run(self._link.producer("sender"))

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        self._link.run(self._send_lists(lists))

    async def _send_lists(self, lists: Sequence[list[bytes]]) -> None:
        send = self._producer.send
        for one in lists:
            for payload in one:
                await send(payload)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        self._link.run(self._send_each(payloads, before))

    async def _send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        send = self._producer.send
        for number, payload in enumerate(payloads):
            before(number)
            await send(payload)

    def close(self) -> None:
        try:
            self._link.run(self._producer.close())
        finally:
            self._link.close()


class _Receiver(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Link(options)
        self._acks: set[asyncio.Task[Any]] = set()
        self._link.run(self._subscribe())

    async def _subscribe(self) -> None:
        from danube import SubType

        await self._link.producer("maker")
        builder = self._link.client.new_consumer().with_topic(self._link.topic)
        builder = builder.with_consumer_name("bench").with_subscription("bench")
        self._consumer = builder.with_subscription_type(SubType.EXCLUSIVE).build()
        await self._consumer.subscribe()
        self._queue = await self._consumer.receive()

    def receive(self, take: Take, silence_seconds: float) -> None:
        self._link.run(self._receive(take, silence_seconds))

    async def _receive(self, take: Take, silence_seconds: float) -> None:
        queue, ack = self._queue, self._consumer.ack
        while True:
            try:
                some = [await asyncio.wait_for(queue.get(), silence_seconds)]
            except TimeoutError:
                break
            while not queue.empty() and len(some) < RECEIVED_MAX:
                some.append(queue.get_nowait())
            wants_more = take([message.payload for message in some])
            for message in some:
                task = asyncio.ensure_future(ack(message))
                self._acks.add(task)
                task.add_done_callback(self._acks.discard)
                if len(self._acks) >= ACKS_MAX:
                    await asyncio.wait(self._acks, return_when=asyncio.FIRST_COMPLETED)
            if not wants_more:
                break
        if self._acks:
            await asyncio.wait(self._acks)

    def close(self) -> None:
        try:
            self._link.run(self._consumer.close())
        finally:
            self._link.close()


class Danube(Adapter):
    """danube-broker by danube-client."""

    name = "danube"
    sender_kind, receiver_kind = _Sender, _Receiver
    variants = (
        Variant(
            "danube non_reliable", "none: in memory until delivered", TRANSPORT, True,
            {"is_reliable": False},
        ),
        Variant(
            "danube reliable", "memory, acked; log written every 5 s or 10 MB (default)",
            TRANSPORT, False, {"is_reliable": True},
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The server or the client."""
        if find_program(PROGRAM, variable=VARIABLE) is None:
            return f"no danube-broker on PATH or in {VARIABLE}; docs/peers.md says how to build it"
        return None if has_module("danube") else "no Python client; pip install danube-client"

    def version(self) -> str:
        """Of danube-client: the broker does not tell its own."""
        return f"danube-client {importlib.metadata.version('danube-client')}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One broker for both kinds of topics."""
        program = find_program(PROGRAM, variable=VARIABLE) or PROGRAM[0]

        def command(port: int, data: Path) -> list[str]:
            file = data / "danube.yml"
            file.write_text(
                SETTINGS.format(
                    host=HOST,
                    port=port,
                    admin=free_port(),
                    raft=free_port(),
                    metrics=free_port(),
                    data=data,
                    unacked=UNACKED_MAX,
                )
            )
            return [program, "--config-file", str(file)]

        return start_server(folder, self.name, command, START_SECONDS)
