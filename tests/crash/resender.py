"""A producer in the protocol's own words, which can do what the client never would: after a crash it
sends again what was acked long ago, byte for byte, and wants to hear the original offsets.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.net import protocol as p
from tests.crash.history import History
from tests.crash.payloads import payload_of

__all__ = ["Resender"]

BATCH_MESSAGES = 20
WINDOW_BATCHES = 8
RESEND_BATCHES = 48
"""Well inside the 64 batches that the broker remembers."""
WAIT_SECONDS = 60.0


class Resender:
    """One named producer on a topic of one partition. Numbers are its sequences."""

    def __init__(self, context: zmq.Context[Any], url: str, history: History, *, topic: str,
                 name: str, index: int, durability: str) -> None:  # fmt: skip
        self.history = history
        self.topic = topic
        self.index = index
        self.name = name
        self.acks: list[tuple[int, int]] = []
        """(sent_ns, acked_ns)"""
        self.offsets: dict[int, int] = {}
        """First sequence of a batch -> offset, once acked."""
        self.next_sequence = 0
        self.duplicates = 0
        self._durability = durability
        self._context = context
        self._bootstrap = "tcp://" + url.removeprefix("danube://")
        self._socket: zmq.Socket[Any] | None = None
        self._request = 0
        self._opened: dict[str, int] = {}
        self._partition = 0
        self._on_way: dict[int, tuple[int, int]] = {}
        """Request -> (first sequence, sent_ns)"""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # ------------------------------------------------------------ protocol

    def _connect(self, endpoint: str) -> None:
        if self._socket is not None:
            self._socket.close(0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._ask(p.Hello, p.PROTOCOL_VERSION, self.name)

    def _send(self, kind: Any, *fields: Any, part: bytes | None = None) -> int:
        assert self._socket is not None
        self._request += 1
        command = p.encode(kind(self._request, *fields))
        self._socket.send_multipart([command] if part is None else [command, part])
        return self._request

    def _receive(self, seconds: float) -> Any:
        assert self._socket is not None
        if self._socket.poll(int(seconds * 1000)):
            return p.decode_server_command(self._socket.recv_multipart()[0])
        return None

    def _ask(self, kind: Any, *fields: Any) -> Any:
        request = self._send(kind, *fields)
        deadline = time.monotonic() + WAIT_SECONDS
        others: list[Any] = []
        while time.monotonic() < deadline:
            answer = self._receive(1.0)
            if answer is not None and getattr(answer, "request", None) == request:
                return answer
            if answer is not None:
                others.append(answer)
        text = f"{self.name}: no answer to {kind.__name__} in {WAIT_SECONDS} s"
        raise AssertionError(f"{text}, but {others[:3]}")

    def connect(self) -> int:
        """Look the topic up, open the producer; the broker's next sequence."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self._connect(self._bootstrap)
            create = {"durability": self._durability}
            found = self._ask(p.Lookup, self.topic, create, 10_000)
            if isinstance(found, p.Result):
                self._partition, _, _, endpoint, _ = found.value["partitions"][0]
                self._connect(endpoint)
                opened = self._ask(p.OpenProducer, self._partition, self.name)
                if isinstance(opened, p.Result):
                    break
                found = opened
            assert time.monotonic() < deadline, f"{self.name}: {found}"
            time.sleep(0.1)
        self._opened = opened.value
        return self._opened["next_sequence"]

    def _publish(self, sequence: int) -> int:
        frame = encode_frame(
            [payload_of(self.index, n) for n in range(sequence, sequence + BATCH_MESSAGES)],
            producer_id=self._opened["producer_id"], base_sequence=sequence,
            producer_epoch=self._opened["producer_epoch"], publish_time_ns=1,
        )  # fmt: skip
        return self._send(p.Publish, part=sealed_bundle([(self._partition, frame)]))

    # ------------------------------------------------------------ load

    def start(self) -> None:
        """Publish in a thread until `halt`."""
        self._stop.clear()
        self._on_way.clear()
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def halt(self) -> None:
        """End the thread, whatever is on its way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
            assert not self._thread.is_alive(), f"{self.name} hangs"
            self._thread = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let go of everything."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
        if self._socket is not None:
            self._socket.close(0)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if len(self._on_way) < WINDOW_BATCHES:
                    sequence, self.next_sequence = (
                        self.next_sequence,
                        self.next_sequence + BATCH_MESSAGES,
                    )
                    self._on_way[self._publish(sequence)] = sequence, time.monotonic_ns()
                    self._take(self._receive(0.001))
                else:
                    self._take(self._receive(0.05))
        except BaseException as error:
            self._error = error

    def _take(self, answer: Any) -> None:
        if not isinstance(answer, p.Published):
            return  # a restarted worker says that it does not know the session
        for request, (status, offset) in answer.entries:
            sequence, sent_ns = self._on_way.pop(request)
            self._check(status == p.Status.OK, f"batch {sequence}: status {status}")
            self.acks.append((sent_ns, time.monotonic_ns()))
            self._acked(sequence, offset)

    def _acked(self, sequence: int, offset: int) -> None:
        self.offsets[sequence] = offset
        for i in range(BATCH_MESSAGES):
            ident = self.index << 48 | sequence + i
            self.history.note_ack(self.topic, 0, offset + i, ident, self.name)

    def _check(self, condition: bool, text: str) -> None:
        if not condition:
            raise self.history.fail(f"{self.name} on {self.topic}: {text}")

    def on_way_at(self, moment_ns: int) -> int:
        """How many batches were on their way at a moment since `start`."""
        acked = sum(sent < moment_ns < at for sent, at in self.acks)
        return acked + sum(sent < moment_ns for _, sent in self._on_way.values())

    # ------------------------------------------------------------ after a crash

    def resend(self) -> None:
        """Connect again and send the newest batches again, acked or not."""
        expected = self.connect()
        acked_end = max(self.offsets, default=-BATCH_MESSAGES) + BATCH_MESSAGES
        self._check(
            acked_end <= expected <= self.next_sequence,
            f"the broker expects {expected}; acked up to {acked_end}, sent to {self.next_sequence}",
        )
        first = max(0, self.next_sequence - RESEND_BATCHES * BATCH_MESSAGES)
        for sequence in range(first, self.next_sequence, BATCH_MESSAGES):
            status, offset = self._publish_now(sequence)
            wanted = p.Status.DUPLICATE if sequence < expected else p.Status.OK
            self._check(status == wanted, f"batch {sequence} again: status {status}, not {wanted}")
            original = self.offsets.get(sequence, offset)
            self._check(
                offset == original, f"batch {sequence} again: offset {offset}, not {original}"
            )
            self.duplicates += wanted == p.Status.DUPLICATE
            self._acked(sequence, offset)
        gap = self.next_sequence + BATCH_MESSAGES
        status, _ = self._publish_now(gap)
        self._check(status == p.Status.OUT_OF_SEQUENCE, f"a gap at {gap} got status {status}")

    def publish_batches(self, count: int) -> None:
        """Batches one by one, acked."""
        for _ in range(count):
            sequence, self.next_sequence = self.next_sequence, self.next_sequence + BATCH_MESSAGES
            status, offset = self._publish_now(sequence)
            self._check(status == p.Status.OK, f"batch {sequence}: status {status}")
            self._acked(sequence, offset)

    def _publish_now(self, sequence: int) -> tuple[int, int]:
        request = self._publish(sequence)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            answer = self._receive(1.0)
            if isinstance(answer, p.Published):
                for number, (status, offset) in answer.entries:
                    if number == request:
                        return status, offset
        raise AssertionError(f"{self.name}: no answer to batch {sequence} in {WAIT_SECONDS} s")
