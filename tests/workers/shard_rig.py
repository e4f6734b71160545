"""A shard worker without its process: real log, real sockets, a hand-turned loop.

`Rig` owns the worker and turns it; `RawClient` speaks the wire protocol with nothing but zmq,
msgpack and the frame codec.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import zmq

from danube_fast.broker import messages as m
from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.errors import DanubeError
from danube_fast.frame.bundle import bundle_entries, sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.view import FrameView
from danube_fast.ring.buckets import BucketTable
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.worker import ShardWorker

WAIT_SECONDS = 60
SEGMENT_BYTES = 4 * 1024 * 1024


class Shifted:
    """The clock of this machine, and whatever a test adds."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.ahead_ns = 0

    def wall_ns(self) -> int:
        return int(self._clock.wall_ns()) + self.ahead_ns

    def monotonic_ns(self) -> int:
        return int(self._clock.monotonic_ns()) + self.ahead_ns


class FakeMailbox:
    """Nobody to talk to; operations are called directly, what the worker says is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[m.Message, Callable[[Any], None]]] = []
        self.notices: list[m.Message] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.handlers: dict[type[m.Message], Callable[[Any], None]] = {}
        self.epoch_watchers: list[Any] = []

    def fileno(self) -> int:
        return self._eventfd

    def wake(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    def do_work(self, now_ns: int) -> int:
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return 0
        return 1

    def prepare_sleep(self) -> bool:
        return True

    def serve(self, kind: type[m.Message], handler: Callable[[Any], None]) -> None:
        self.handlers[kind] = handler

    def call(
        self, peer: int, message: m.Message, body: Any = b"", *, on_reply: Callable[[Any], None],
        **_: Any,
    ) -> None:  # fmt: skip
        self.calls.append((message, on_reply))

    def asked(self, kind: type[m.Message]) -> list[Callable[[Any], None]]:
        """What takes the answers of calls of a kind."""
        return [on_reply for message, on_reply in self.calls if isinstance(message, kind)]

    def notify(self, peer: int, message: m.Message, body: bytes = b"") -> None:
        self.notices.append(message)

    def close(self) -> None:
        os.close(self._eventfd)


class FakeRequest:
    """A mailbox call whose answer is kept."""

    def __init__(self, message: Any) -> None:
        self.message = message
        self.value: Any = None
        self.error: Exception | None = None
        self.done = False

    def reply(self, value: Any = None, body: bytes = b"") -> None:
        self.value, self.done = value, True

    def fail(self, error: Exception) -> None:
        self.error, self.done = error, True

    when_done, respond = Request.when_done, Request.respond


class Rig:
    """One worker with `log_count` logs, or the `logs` of these ids, under `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        log_count: int = 1,
        logs: list[int] | None = None,
        mailbox: FakeMailbox | None = None,
        process_index: int = 1,
        worker_count: int = 1,
        environment: Environment | None = None,
        ipc_endpoint: str = "",
        **settings: Any,
    ) -> None:
        """`ipc_endpoint`: clients of rings are served beside it."""
        self.directory = directory
        self.ipc_endpoint = ipc_endpoint
        self.context: zmq.Context[Any] = zmq.Context()
        self.mailbox = mailbox or FakeMailbox()
        self.buckets = BucketTable.create()
        self.settings = Settings(
            **{
                # raw clients do not beat while a test looks at something else
                "segment_bytes": SEGMENT_BYTES, "session_timeout_ms": 3_600_000,
                "data_dir": str(directory), **settings,
            }
        )  # fmt: skip
        log_ids = range(log_count) if logs is None else logs
        config = SimpleNamespace(
            accept_rollback=False,
            logs=[(i, str(directory / f"log-{i}")) for i in log_ids], settings=self.settings,
            data_dir=str(directory), worker_count=worker_count, host_id="rig",
            processes=SimpleNamespace(workers=list(range(1, 1 + worker_count))),
            process_index=process_index, tcp_host="127.0.0.1", tcp_port=0, ipc_endpoint=ipc_endpoint,
        )  # fmt: skip
        directory.mkdir(parents=True, exist_ok=True)
        self.boot: Any = SimpleNamespace(
            config=config, settings=self.settings, clock=SystemClock(), mailbox=self.mailbox,
            counters=SimpleNamespace(set=lambda counter, value: None, get=lambda *_: 0),
            heartbeat=lambda: None, set_state=self._set_state, stop_requested=False,
            buckets=self.buckets, control=SimpleNamespace(epoch=lambda process: 1),
        )  # fmt: skip
        self.port = 0
        self.worker = ShardWorker(self.boot, self.context, environment)
        self.worker.start()
        self.clients: list[RawClient] = []

    def _set_state(self, state: Any, port: int = 0) -> None:
        self.port = port or self.port

    def turn(self, until: Callable[[], Any], what: str) -> Any:
        """Turn the loop until `until` gives something true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self.worker.do_work()
            result = until()
            if result:
                return result
        raise AssertionError(f"{what} did not happen within {WAIT_SECONDS} s")

    def operation(self, message: m.Message) -> Any:
        request = FakeRequest(message)
        self.mailbox.handlers[type(message)](request)
        self.turn(lambda: request.done, repr(message))
        if request.error:
            raise request.error
        return request.value

    def stats(self, partition_ids: list[int] | None = None) -> Any:
        """Counts of partitions, as administrators see them."""
        return msgspec.to_builtins(self.operation(m.PartitionStats(partition_ids)))

    def assign(self, partition_id: int, *, log_id: int = 0, **options: Any) -> None:
        entry = {
            "partition_id": partition_id, "topic": f"/default/t{partition_id}", "index": 0,
            "dispatch": "reliable", "durability": "fsync", "log_id": log_id, "incarnation": 1,
            **options,
        }  # fmt: skip
        self.operation(m.Assign([msgspec.convert(entry, m.Assignment)]))

    def said(self, kind: type[m.Message]) -> list[Any]:
        """What the worker told others of this kind."""
        return [message for message in self.mailbox.notices if isinstance(message, kind)]

    def answer_assignments(self, partitions: list[Any], deleted: list[int]) -> None:
        """What the coordinator says to the question of the start."""
        (on_reply,) = self.mailbox.asked(m.FindAssignments)
        value = msgspec.convert({"partitions": partitions, "deleted": deleted}, m.Assignments)
        on_reply(SimpleNamespace(error=None, value=value))

    def client(self, auth: dict[str, Any] | None = None) -> RawClient:
        client = RawClient(self, auth)
        self.clients.append(client)
        return client

    def stop(self) -> None:
        """Orderly."""
        self.worker.stop()
        self._release()

    def crash(self) -> None:
        """Let go of the files without a clean end, as far as one process can."""
        for log in self.worker.state.logs.values():
            with contextlib.suppress(DanubeError):
                log.close()
        self.worker.transports.close()
        self._release()

    def _release(self) -> None:
        for client in self.clients:
            client.socket.close(linger=0)
        self.context.destroy(linger=0)
        self.mailbox.close()
        self.buckets.close()


class RawClient:
    """A connection with a session."""

    def __init__(self, rig: Rig, auth: dict[str, Any] | None = None) -> None:
        self.rig = rig
        self.socket = self._connect()
        self.request = 0
        self.waiting: list[list[Any]] = []
        self.delivered: list[tuple[int, FrameView]] = []
        self.events: list[Any] = []
        self.names: dict[int, str] = {}
        welcome = self.ask(1, 1, "raw", auth or {})
        if welcome[0] != 64:
            self.socket.close(linger=0)
            raise AssertionError(welcome)
        self.session, self.token = welcome[2], welcome[3]

    def _connect(self) -> Any:
        sock = self.rig.context.socket(zmq.DEALER)
        sock.connect(f"tcp://127.0.0.1:{self.rig.port}")
        return sock

    def send(self, *command: Any, parts: tuple[Any, ...] = ()) -> None:
        self.socket.send_multipart([msgpack.packb(list(command)), *parts])

    def pump(self) -> None:
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = msgpack.unpackb(parts[0], strict_map_key=False)
            if command[0] == 69:
                frames = [
                    FrameView(part, start)
                    for part in parts[1:]
                    for _, start, _ in bundle_entries(part)
                ]
                assert len(frames) == len(command[1])
                self.delivered += list(zip(command[1], frames, strict=True))
            elif command[0] == 70:
                self.events.append(command)
            elif command[0] == 71:
                self.names.update(command[2])
            else:
                self.waiting.append(command)

    def _answer(self, request: int) -> Any:
        self.pump()
        for command in self.waiting:
            if command[0] == 68:
                for entry in command[1]:
                    if entry[0] == request:
                        command[1].remove(entry)
                        return [68, entry[1], command[2]]
            elif command[1] == request:
                self.waiting.remove(command)
                return command
        return None

    def post(self, op: int, *fields: Any, parts: tuple[Any, ...] = ()) -> int:
        self.request += 1
        self.send(op, self.request, *fields, parts=parts)
        return self.request

    def answer(self, request: int) -> Any:
        return self.rig.turn(lambda: self._answer(request), f"answer to request {request}")

    def ask(self, op: int, *fields: Any, parts: tuple[Any, ...] = ()) -> Any:
        return self.answer(self.post(op, *fields, parts=parts))

    def open_producer(self, partition_id: int, name: str = "p") -> dict[str, int]:
        reply = self.ask(10, partition_id, name)
        assert reply[0] == 67, reply
        value: dict[str, int] = reply[2]
        return value

    def frame(
        self, opened: dict[str, int], sequence: int, payloads: list[bytes], **columns: Any
    ) -> bytearray:
        return encode_frame(
            payloads, producer_id=opened["producer_id"], base_sequence=sequence,
            producer_epoch=opened["producer_epoch"], publish_time_ns=1, **columns,
        )  # fmt: skip

    def publish(self, *frames: tuple[int, bytearray]) -> list[int]:
        """(partition_id, frame) pairs in one bundle; the flat statuses and offsets."""
        reply = self.ask(11, parts=(sealed_bundle(list(frames)),))
        assert reply[0] == 68, reply
        statuses: list[int] = reply[1]
        return statuses

    def subscribe(
        self, partition_id: int, name: str = "s", *, consumer_id: int = 1, kind: str = "exclusive",
        position: Any = "earliest", credit: int = 1 << 30,
    ) -> Any:  # fmt: skip
        reply = self.ask(20, consumer_id, 1, partition_id, name, kind, position)
        if credit:
            self.send(21, 1, credit, credit)
        return reply

    def receive(self, count: int) -> list[tuple[int, bytes]]:
        """At least `count` messages as (offset, payload), oldest first."""

        def enough() -> bool:
            self.pump()
            return sum(len(view.payloads()) for _, view in self.delivered) >= count

        self.rig.turn(enough, f"delivery of {count} messages")
        taken, self.delivered = self.delivered, []
        return [
            (int(offset), payload or b"")
            for _, view in taken
            for offset, payload in zip(view.offsets(), view.payloads(), strict=True)
        ]

    def ack(self, *pairs: int, consumer_id: int = 1) -> None:
        """Acked and durable."""
        reply = self.ask(22, [[consumer_id, list(pairs)]])
        assert reply[0] == 67, reply
