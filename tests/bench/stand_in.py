"""Stand-ins for servers of other systems: enough of a protocol for our adapters' calls, no more.

They keep nothing, know one subscriber of a topic and write down what was asked of them. They prove that a
client half speaks the protocol and counts its acks; nothing measured against them means anything.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from pika import BasicProperties, frame, spec

WAIT_SECONDS = 60.0
READ_BYTES = 1 << 16


class StandIn:
    """Listens on 127.0.0.1, a thread for each connection; in place of a `Server` for `Bench`."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.problems: list[BaseException] = []
        self.refuses = False
        self._guard = threading.Lock()
        self._links: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, what: Callable[..., None], *words: Any) -> None:
        thread = threading.Thread(target=what, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # stopped
            link.settimeout(WAIT_SECONDS)
            self._links.append(link)
            self._start(self._guarded, link)

    def _guarded(self, link: socket.socket) -> None:
        try:
            with link:
                self.serve(link)
        except Exception as error:
            if isinstance(error, TimeoutError) or not isinstance(error, OSError):
                self.problems.append(error)  # the rest: either end has gone without a word

    def serve(self, link: socket.socket) -> None:
        raise NotImplementedError

    def send(self, link: socket.socket, data: bytes) -> None:
        with self._guard:
            link.sendall(data)

    def note(self, what: str, count: int = 1) -> None:
        with self._guard:
            self.seen[what] += count

    def hang_up(self) -> None:
        for link in self._links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has gone by itself

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a stand-in's thread did not end"

    def cpu_seconds(self) -> float:
        return 0.0

    def resident_mb(self) -> float:
        return 0.0


class MqttStandIn(StandIn):
    """MQTT 3.1.1: CONNECT, SUBSCRIBE, PUBLISH and PUBACK at QoS 0 and 1, DISCONNECT."""

    def __init__(self) -> None:
        self._subscribers: dict[bytes, tuple[socket.socket, int]] = {}
        super().__init__()

    def serve(self, link: socket.socket) -> None:
        with link.makefile("rb") as reader:
            while head := reader.read(1):
                size = shift = 0
                while True:
                    (byte,) = reader.read(1)
                    size |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                if not self._handle(link, head[0], reader.read(size)):
                    return

    def _handle(self, link: socket.socket, head: int, body: bytes) -> bool:
        kind, qos = head >> 4, head >> 1 & 3
        if kind == 1:  # CONNECT: the bit of its flags that asks for a clean session
            self.note("clean" if body[7] & 2 else "kept")
            self.send(link, bytes([0x20, 2, 0, 5 if self.refuses else 0]))
        elif kind == 8:  # SUBSCRIBE
            self._subscribers[body[4:-1]] = (link, body[-1])
            self.note(f"subscribe qos {body[-1]}")
            self.send(link, b"\x90\x03" + body[:2] + body[-1:])
        elif kind == 3:  # PUBLISH
            self._publish(link, qos, body)
        elif kind == 4:
            self.note("puback")
        else:
            assert kind == 14, f"packet type {kind}"
            return False
        return True

    def _publish(self, link: socket.socket, qos: int, body: bytes) -> None:
        (length,) = struct.unpack_from(">H", body)
        topic, rest = body[2 : 2 + length], body[2 + length :]
        number, payload = (rest[:2], rest[2:]) if qos else (b"", rest)
        self.note(f"publish qos {qos}")
        if topic in self._subscribers:
            reader, wanted = self._subscribers[topic]
            lower = min(qos, wanted)
            packet = body[: 2 + length] + (number if lower else b"") + payload
            self.send(reader, bytes([0x30 | lower << 1]) + self._size(len(packet)) + packet)
        if qos:
            self.send(link, b"\x40\x02" + number)

    @staticmethod
    def _size(length: int) -> bytes:
        found = bytearray()
        while length > 127:
            found.append(length & 127 | 128)
            length >>= 7
        return bytes([*found, length])


class AmqpStandIn(StandIn):
    """AMQP 0-9-1 by pika's own codec: one channel, publisher confirms, one consumer of a queue."""

    def __init__(self) -> None:
        self.arguments: list[dict[str, Any]] = []
        self._readers: dict[str, list[Any]] = {}
        """Queue -> connection, consumer tag, messages delivered."""
        super().__init__()

    def serve(self, link: socket.socket) -> None:
        data, message, published = b"", [], 0
        while chunk := link.recv(READ_BYTES):
            data += chunk
            first = published + 1
            while True:
                used, got = frame.decode_frame(data)
                if got is None:
                    break
                data = data[used:]
                if isinstance(got, frame.Method) and isinstance(got.method, spec.Basic.Publish):
                    message = [got.method.routing_key]
                elif isinstance(got, frame.Header):
                    self.note(f"delivery mode {got.properties.delivery_mode}")
                    message += [got.body_size, b""]
                elif isinstance(got, frame.Body):
                    message[2] += got.fragment
                    if len(message[2]) == message[1]:
                        published += 1
                        if not self.refuses:
                            self._deliver(message[0], message[2])
                else:
                    self._answer(link, got)
            self._confirm(link, first, published)

    def _reply(self, link: socket.socket, channel: int, method: Any) -> None:
        self.send(link, frame.Method(channel, method).marshal())

    def _confirm(self, link: socket.socket, first: int, last: int) -> None:
        """The last by itself and before the others, which are confirmed at once."""
        if first > last:
            return
        if self.refuses:
            self._reply(link, 1, spec.Basic.Nack(last, True))
            return
        self._reply(link, 1, spec.Basic.Ack(last, False))
        if first < last:
            self._reply(link, 1, spec.Basic.Ack(last - 1, True))

    def _deliver(self, queue: str, body: bytes) -> None:
        reader = self._readers[queue]
        reader[2] += 1
        parts = [
            frame.Method(1, spec.Basic.Deliver(reader[1], reader[2], False, "", queue)),
            frame.Header(1, len(body), BasicProperties()),
            frame.Body(1, body),
        ]
        self.send(reader[0], b"".join(part.marshal() for part in parts))

    def _answer(self, link: socket.socket, got: Any) -> None:
        if isinstance(got, frame.ProtocolHeader):
            able = {"capabilities": {"publisher_confirms": True, "basic.nack": True}}
            self._reply(link, 0, spec.Connection.Start(server_properties=able))
            return
        asked = got.method
        answers: dict[type, Any] = {
            spec.Connection.StartOk: spec.Connection.Tune(0, 1 << 17, 0),
            spec.Connection.Open: spec.Connection.OpenOk(),
            spec.Connection.Close: spec.Connection.CloseOk(),
            spec.Channel.Open: spec.Channel.OpenOk(),
            spec.Channel.Close: spec.Channel.CloseOk(),
            spec.Confirm.Select: spec.Confirm.SelectOk(),
            spec.Basic.Qos: spec.Basic.QosOk(),
            spec.Queue.Delete: spec.Queue.DeleteOk(0),
        }
        self.note(asked.NAME)
        if isinstance(asked, spec.Queue.Declare):
            self.arguments.append(asked.arguments)
            answers[type(asked)] = spec.Queue.DeclareOk(asked.queue, 0, 0)
        elif isinstance(asked, spec.Basic.Consume):
            self.arguments.append(asked.arguments)
            self._readers[asked.queue] = [link, asked.consumer_tag, 0]
            answers[type(asked)] = spec.Basic.ConsumeOk(asked.consumer_tag)
        elif isinstance(asked, spec.Basic.Cancel):
            assert asked.nowait
            return
        elif isinstance(asked, spec.Basic.Ack):
            assert asked.multiple
            self.seen["acked"] = max(self.seen["acked"], asked.delivery_tag)
            return
        elif isinstance(asked, spec.Connection.TuneOk):
            return
        self._reply(link, got.channel_number, answers[type(asked)])
